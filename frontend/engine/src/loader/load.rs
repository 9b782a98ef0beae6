//! Loads a version of a model: its instances and all that they need. Must not depend on the origin of the request
//! or on the version that served before.

use std::collections::BTreeMap;
use std::io;
use std::path::{Component, Path, PathBuf};
use std::sync::{Arc, Weak};

use pharos::classification;
use pharos::id::ModelVersion;
use pharos::metrics::builtin::Builtin;
use pharos::metrics::cache::Cache;
use pharos::metrics::record;
use pharos::metrics::series::ModelSeries;
use pharos::model::{ModelConfig, Scheduling, TensorSpec, Warmup, WarmupBatch};
use pharos::repository::memory_budget::MemoryBytes;
use pharos::repository::{Change, VersionFingerprint, changes};
use pharos::timeline::Instant;

use super::Loader;
use super::memory_budget::Loaded;
use super::memory_sizes::ToLoad;
use super::prepare::{Prepared, Version};
use crate::cache::{ModelCache, ResponseCache};
use crate::calls::Caller;
use crate::launch::Launch;
use crate::launch::limits::Limited;
use crate::model_memory::MemoryShare;
use crate::scheduler::placement::Placement;
use crate::scheduler::{Driver, DriverSettings, Limits, placement, settings};
use crate::serving::{Executor, Serving};
use crate::store::identity::{Files, identity};
use crate::store::scan::{self, LoadedFiles};
use crate::supervisor::{Ending, Instances, Plan, WarmUp, WarmUpBatch};
use pharos_os::{blocking, clock, threads};

/// The series of a version that is being loaded. Dropping it removes new series; [`Unserved::keep`] keeps them.
pub(super) struct Unserved {
    cache: Arc<Cache>,
    series: Arc<ModelSeries>,
    /// Whether the series are new, and not those of a serving version.
    is_new: bool,
}

impl Unserved {
    /// Creates new series, or continues the given ones.
    pub(super) fn new(
        loader: &Loader,
        model: &ModelVersion,
        config: &ModelConfig,
        continued: Option<&Arc<ModelSeries>>,
    ) -> Self {
        let (cache, policy) = (loader.cache(), &loader.settings.model_policy);
        let new = || {
            let tags: Vec<(String, String)> = config.metric_tags.iter().map(|(k, v)| (k.clone(), v.clone())).collect();
            let series = cache.model_series(model, &tags, config.histogram_buckets.clone());
            if let Some((name, version)) = policy.metric_name(config) {
                series.set_alias(name, version);
            }
            series
        };
        Self { cache: cache.clone(), series: continued.cloned().unwrap_or_else(new), is_new: continued.is_none() }
    }

    pub(super) fn series(&self) -> &Arc<ModelSeries> {
        &self.series
    }

    /// Keeps the series: the version can serve.
    pub(super) fn keep(mut self) -> Arc<ModelSeries> {
        self.is_new = false;
        self.series.clone()
    }
}

impl Drop for Unserved {
    fn drop(&mut self) {
        if self.is_new {
            self.cache.model_unloaded(&self.series);
        }
    }
}

/// The memory of a version that is being loaded. If it is dropped before [`EndsIfDropped::keep`], the load was cancelled or has failed,
/// and the memory is free when the processes have ended.
struct EndsIfDropped(Option<Arc<MemoryShare>>);

impl EndsIfDropped {
    fn keep(mut self) -> Option<Arc<MemoryShare>> {
        self.0.take()
    }
}

impl Drop for EndsIfDropped {
    fn drop(&mut self) {
        self.0.iter().for_each(|share| share.end());
    }
}

/// A version whose instances are about to start.
struct VersionStart {
    model: ModelVersion,
    config: Arc<ModelConfig>,
    launch: Launch,
    /// When loading began.
    began: Instant,
    series: Unserved,
    /// Its files before anything of them was read for this load, if the server has a response cache.
    loaded_files: Option<Arc<LoadedFiles>>,
    /// Its response cache, if it uses one.
    responses: Option<ModelCache>,
}

impl Loader {
    /// Loads a version and retries a failed load as often as the settings allow. Counts into `continued` if given.
    ///
    /// # Errors
    /// The reason of the last failure.
    pub(super) async fn load_version(
        self: &Arc<Self>,
        prepared: &Prepared,
        number: u64,
        continued: Option<&Arc<ModelSeries>>,
    ) -> Result<Serving, String> {
        let mut left = self.settings.load_retries;
        loop {
            match self.try_to_load(prepared, number, continued).await {
                Err(reason) if left > 0 => {
                    left -= 1;
                    tracing::warn!(model = prepared.name, version = number, "load failed, retrying: {reason}");
                }
                loaded => return loaded,
            }
        }
    }

    async fn try_to_load(
        self: &Arc<Self>,
        prepared: &Prepared,
        number: u64,
        continued: Option<&Arc<ModelSeries>>,
    ) -> Result<Serving, String> {
        let version = prepared.versions.get(&number).ok_or_else(|| format!("version {number} does not exist"))?;
        match prepared.plan.clone() {
            Some(plan) => self.load_ensemble((prepared, version), plan, number).await,
            None => {
                let model = ModelVersion::new(self.stores.model_name(&prepared.name), number);
                let began = clock::now();
                let loaded_files = self.loaded_files(prepared, version).await;
                let launch = self.launch(prepared, version).await?;
                let config = Arc::new(self.configure(prepared, (number, version), &launch).await?);
                let series = Unserved::new(self, &model, &config, continued);
                let responses = self.model_cache(&model, &config, loaded_files.as_deref()).await;
                let start = VersionStart { model, config, launch, began, series, loaded_files, responses };
                self.start_version((prepared, version), start).await
            }
        }
    }

    async fn start_version(
        self: &Arc<Self>,
        (prepared, version): (&Prepared, &Version),
        start: VersionStart,
    ) -> Result<Serving, String> {
        let VersionStart { model, config, launch, began, series: unserved, loaded_files, responses } = start;
        let directory = &version.directory;
        let warmups = warmups(&config, directory).await?;
        let labels = labels(&config, directory)?;
        check_initial_states(&config, directory)?;
        let placements = placements(&config, model.version)?;
        let limits = self.models.shared.limits.as_ref().map(Limits::registration);
        let series = unserved.series().clone();
        if responses.is_some() {
            self.cache().model_cached(&series);
        }
        if config.decoupled {
            self.cache().model_decoupled(&series);
        }
        let scheduling = settings::of(&config);
        let settings =
            DriverSettings { config: config.clone(), series: series.clone(), scheduling, limits, cache: responses };
        let driver = Driver::new(settings, self.timer.clone());
        let threads = self.threads(&placements, &launch);
        let caller = caller(prepared, &launch);
        let plan = Plan { caller, ..self.plan((directory.clone(), launch), &config, threads, warmups) };
        let to_load = ToLoad { name: &prepared.name, version: model.version, directory, config: Some(&config) };
        let memory = EndsIfDropped(self.room_for(&to_load).await?.map(Arc::new));
        let (_memory, _files) = (memory.0.clone(), prepared.model_files.clone());
        let plan = Arc::new(Plan { _memory, _files, loaded_files: loaded_files.clone(), ..plan });
        let (instances, loaded) = Instances::start(plan, &placements, &driver).await?;
        let time = clock::now() - began;
        if let Some(share) = &memory.0 {
            let loaded = Loaded { share, pids: instances.pids(), time, fingerprint: version.fingerprint };
            if let Err(reason) = self.measure_loaded(&to_load, loaded).await {
                instances.stop().await;
                return Err(reason);
            }
        }
        let seconds = time.as_secs_f64();
        record::model_load_duration(&series, seconds);
        let (bytes, pinned) = instances.memory();
        record::memory_usage(&series, bytes, pinned, self.gpu_memory(&instances).await);
        log_warnings(&model, &config);
        tracing::info!(%model, engine = loaded.engine, instances = placements.len(), "model ready in {seconds:.3} s");
        Ok(Serving {
            model,
            config: Arc::new(config.with_parameter("engine", &loaded.engine)),
            series: unserved.keep(),
            directory: directory.clone(),
            loaded_files,
            labels,
            executor: Arc::new(Executor::Instances { driver, instances, memory: memory.keep() }),
            fingerprint: version.fingerprint,
            files: prepared.model_files.clone(),
        })
    }

    /// Returns the change that a version with the same files needs, by comparing its complete old and new configurations. This
    /// lets a client return the served configuration with another number of instances. `None` if it must be reloaded.
    pub(super) async fn change_when_complete(&self, serving: &Serving, prepared: &Prepared) -> Option<Change> {
        let number = serving.model.version;
        let version = prepared.versions.get(&number)?;
        serving.instances().filter(|_| version.fingerprint.files == serving.fingerprint.files)?;
        let launch = self.launch(prepared, version).await.ok()?;
        let config = self.configure(prepared, (number, version), &launch).await.ok()?;
        let config = match serving.config.parameters.get("engine") {
            Some(engine) => config.with_parameter("engine", engine),
            None => config,
        };
        let fingerprints = |config: &ModelConfig| {
            BTreeMap::from([(number, VersionFingerprint::new(config, version.fingerprint.files))])
        };
        match changes(&fingerprints(&serving.config), &fingerprints(&config), false).remove(&number)? {
            Change::Keep => Some(Change::Describe),
            Change::Replace => None,
            other => Some(other),
        }
    }

    /// Changes a version in place for a configuration that differs only in instances, which are started and stopped. Returns the
    /// changed version and the removed instances, or `None` if this is not possible because an ensemble has other members.
    ///
    /// # Errors
    /// An instance cannot be started; nothing has changed then.
    pub(super) async fn follow(
        self: &Arc<Self>,
        serving: &Serving,
        prepared: &Prepared,
    ) -> Result<Option<(Serving, Ending)>, String> {
        let number = serving.model.version;
        let version = prepared.versions.get(&number).ok_or_else(|| format!("version {number} does not exist"))?;
        if self.models.has_other_members(serving) {
            return Ok(None);
        }
        let launch = match prepared.plan {
            Some(_) => Launch::default(),
            None => self.launch(prepared, version).await?,
        };
        let config = &Arc::new(self.configure(prepared, (number, version), &launch).await?);
        let mut ending = Ending::default();
        if let Executor::Instances { driver, instances, .. } = &*serving.executor
            && (version.fingerprint.instances != serving.fingerprint.instances || instances.any_given_up())
        {
            let placements = placements(config, number)?;
            let warmups = warmups(config, &serving.directory).await?;
            let threads = self.threads(&placements, &launch);
            let caller = caller(prepared, &launch);
            let directory = serving.directory.clone();
            let plan = Plan { caller, ..self.plan((directory, launch), config, threads, warmups) };
            let size = self.size_with(serving, config);
            let room = EndsIfDropped(self.room_for_more(serving, &size).await?.map(Arc::new));
            let (_files, loaded_files) = (serving.files.clone(), serving.loaded_files.clone());
            let plan = Arc::new(Plan { _memory: room.0.clone(), _files, loaded_files, ..plan });
            ending = instances.resize(&plan, &placements, driver).await?;
            if let (Some(share), Some(room)) = (serving.executor.memory(), room.keep()) {
                let mut surplus = share.bytes();
                surplus.subtract(&size);
                let surplus = share.split(&surplus);
                surplus.end();
                ending.keep(surplus);
                share.set(size);
                room.set(MemoryBytes::default());
            }
            let (bytes, pinned) = instances.memory();
            record::memory_usage(&serving.series, bytes, pinned, self.gpu_memory(instances).await);
            tracing::info!(model = %serving.model, instances = placements.len(), "instances changed in place");
        }
        let config = match serving.config.parameters.get("engine") {
            Some(engine) => config.with_parameter("engine", engine),
            // The version is an ensemble.
            None => config.with_decoupled(serving.config.decoupled).map_err(|error| error.to_string())?,
        };
        let changed = Serving { config: Arc::new(config), fingerprint: version.fingerprint, ..serving.clone() };
        Ok(Some((changed, ending)))
    }

    /// Returns the number of threads of each instance.
    pub(super) fn threads(&self, placements: &[Placement], launch: &Launch) -> u32 {
        let active = placements.iter().filter(|placement| !placement.passive).count();
        let share = (threads::processors() / active.max(1)).max(1);
        let limit = launch.limits.as_ref().and_then(Limited::processors);
        match self.settings.worker_threads {
            0 => u32::try_from(limit.map_or(share, |limit| share.min(limit))).unwrap_or(1),
            threads => threads,
        }
    }

    /// Returns the settings that all instances of a version in this directory share.
    fn plan(
        self: &Arc<Self>,
        (directory, launch): (PathBuf, Launch),
        config: &ModelConfig,
        threads: u32,
        warmups: Vec<WarmUp>,
    ) -> Plan {
        let this: Weak<Self> = Arc::downgrade(self);
        let policies = self.settings.policies.clone();
        let named = config.instance_groups.iter().filter(|group| !group.host_policy.is_empty());
        for group in named.filter(|group| !policies.has(&group.host_policy)) {
            let (policy, group) = (&group.host_policy, &group.name);
            tracing::warn!(
                model = %config.name,
                "host_policy '{policy}' of instance group {group} has no effect: no --host-policy={policy},... sets it"
            );
        }
        Plan {
            initial_states: canonical(initial_states(&directory)),
            directory: canonical(directory),
            threads,
            spin_us: match launch.limits.as_ref().and_then(Limited::processors) {
                // A quota also counts the time in which a worker polls.
                Some(_) => self.settings.worker_spin.limited_us,
                None => self.settings.worker_spin.usual_us,
            },
            max_wait: self.settings.max_wait,
            settings: self.supervision(config, &launch),
            launch,
            _memory: None,
            _files: Arc::new(()),
            loaded_files: None,
            workers: self.workers.clone(),
            cache: self.cache().clone(),
            models: this,
            caller: Arc::default(),
            warmups,
            metrics: self.metrics.subscribe(),
            devices: self.settings.devices.clone(),
            pinned: self.models.shared.pinned.clone(),
            policies,
            descriptors: self.settings.descriptors.clone(),
            event_loops: self.settings.threads.event_loops.clone(),
        }
    }

    /// Returns the response cache of a version, if the server has one and the model enables it.
    async fn model_cache(
        &self,
        model: &ModelVersion,
        config: &ModelConfig,
        loaded: Option<&LoadedFiles>,
    ) -> Option<ModelCache> {
        let shared = self.responses_for(model, config)?;
        read_cache(shared, vec![Files::new(model, config, loaded?)]).await
    }

    pub(super) fn responses_for(&self, model: &ModelVersion, config: &ModelConfig) -> Option<Arc<ResponseCache>> {
        if config.response_cache && self.models.shared.response_cache.is_none() {
            tracing::info!(%model, "the model enables the response cache, but --cache-config is not set");
        }
        self.models.shared.response_cache.clone().filter(|_| config.response_cache)
    }

    /// Returns the bytes that the processes of a model use on GPUs, by device number.
    async fn gpu_memory(&self, instances: &Instances) -> Vec<(u32, u64)> {
        let (memory, pids) = (self.settings.devices.process_memory().await, instances.pids());
        let used = self.settings.devices.numbers().filter_map(|number| Some((number, memory.of(number, &pids)?)));
        used.filter(|(_, bytes)| *bytes > 0).collect()
    }
}

/// Returns a model as the caller of others.
fn caller(prepared: &Prepared, launch: &Launch) -> Arc<Caller> {
    let sandbox = launch.sandbox.as_ref().map(|sandbox| sandbox.choice).unwrap_or_default();
    Arc::new(Caller { model: prepared.name.clone(), origin: prepared.provenance.origin, sandbox })
}

/// Returns the placements of a version's instances.
fn placements(config: &ModelConfig, version: u64) -> Result<Vec<Placement>, String> {
    let placements = placement::of(config, version);
    if placements.iter().all(|placement| placement.passive) {
        let name = &config.name;
        return Err(format!("all instances of model '{name}' are passive: none would execute its requests"));
    }
    Ok(placements)
}

/// Returns the response cache of a version; the first entry of `files` is the version itself, the others are its members.
pub(super) async fn read_cache(shared: Arc<ResponseCache>, files: Vec<Files>) -> Option<ModelCache> {
    let model = files.first().map(|files| files.model.clone());
    let identity = blocking::run(move || identity(&files)).await;
    let unread = |error: &io::Error| {
        let model = model.map(|model| model.to_string()).unwrap_or_default();
        tracing::warn!(model, "response cache disabled for the model: cannot read its files: {error}");
    };
    let identity = identity.unwrap_or_else(|error| Err(io::Error::other(error))).inspect_err(unread).ok()?;
    Some(ModelCache::new(shared, identity))
}

/// Returns the path of a file that the configuration names, inside the model's directory or a subdirectory.
fn model_file(directory: &Path, name: &str) -> Result<PathBuf, String> {
    let inside = Path::new(name).components().all(|part| matches!(part, Component::Normal(_)));
    if inside && !name.is_empty() {
        return Ok(directory.join(name));
    }
    Err(format!("file '{}' must be in the model's directory '{}'", name.escape_debug(), directory.display()))
}

/// Returns a path that is valid in every process.
fn canonical(path: PathBuf) -> PathBuf {
    path.canonicalize().unwrap_or(path)
}

/// Returns the directory with the initial values of states, beside the versions.
fn initial_states(version: &Path) -> PathBuf {
    version.parent().unwrap_or(version).join("initial_state")
}

/// Checks that the files of initial state values, which the instances read on start, exist and are long enough.
fn check_initial_states(config: &ModelConfig, version: &Path) -> Result<(), String> {
    let directory = initial_states(version);
    let read = |name: &str| {
        let path = model_file(&directory, name)?;
        scan::read(&path).map_err(|error| format!("failed to open text file for read {}: {error}", path.display()))
    };
    let mut from_file =
        config.states.iter().filter(|state| state.initial.as_ref().is_some_and(|first| first.file.is_some()));
    from_file.try_for_each(|state| state.first_value(read).map(drop))
}

/// Logs settings of the configuration that are valid but probably unintended.
pub(super) fn log_warnings(model: &ModelVersion, config: &ModelConfig) {
    for warning in &config.warnings {
        tracing::warn!(%model, "{warning}");
    }
    let is_histogram = |family: &str| Builtin::from_name(family).is_some_and(Builtin::has_buckets_of_models);
    for (family, _) in config.histogram_buckets.iter().filter(|(family, _)| !is_histogram(family)) {
        let renamed = Builtin::formerly(family)
            .map(|present| format!("; it is now named '{}', with buckets in seconds", present.name()))
            .unwrap_or_default();
        tracing::warn!(
            %model,
            "'model_metrics' has buckets for '{family}', which is not a histogram of single models of this server{renamed}"
        );
    }
    let Scheduling::Ensemble { steps, .. } = &config.scheduling else { return };
    if model.name.namespace().is_some() {
        return;
    }
    for (number, step) in steps.iter().enumerate().filter(|(_, step)| !step.model_namespace.is_empty()) {
        let (namespace, member) = (&step.model_namespace, &step.model_name);
        tracing::warn!(
            %model,
            "'model_namespace' is '{namespace}' in step {number} (model '{member}'), which has no effect without \
             --model-namespacing"
        );
    }
}

/// Returns the class labels by output. Label files are in the model's directory.
pub(super) fn labels(config: &ModelConfig, version: &Path) -> Result<BTreeMap<String, Vec<String>>, String> {
    let directory = version.parent().unwrap_or(version);
    let named = config.outputs.iter().filter(|output| !output.label_filename.is_empty());
    let read = |output: &TensorSpec| {
        let path = model_file(directory, &output.label_filename)?;
        let bytes = scan::read(&path);
        let bytes = bytes.map_err(|error| format!("label file '{}' cannot be read: {error}", path.display()))?;
        if let Err(error) = std::str::from_utf8(&bytes) {
            let (path, at) = (path.display(), error.valid_up_to());
            tracing::warn!(
                model = config.name,
                output = output.name,
                "label file '{path}' is not UTF-8 at byte {at}: invalid bytes are replaced with U+FFFD"
            );
        }
        Ok((output.name.clone(), classification::labels(&String::from_utf8_lossy(&bytes))))
    };
    let in_output = |output| read(output).map_err(|text: String| format!("output '{}': {text}", output.name));
    named.map(in_output).collect()
}

/// Returns the warm-ups of instances, after making and dropping the requests of each: errors are those of the load.
async fn warmups(config: &Arc<ModelConfig>, version: &Path) -> Result<Vec<WarmUp>, String> {
    if config.warmups.is_empty() {
        return Ok(Vec::new());
    }
    let directory = version.parent().unwrap_or(version).join("warmup");
    let warm_up = |(index, warmup): (usize, &Warmup)| {
        let (config, directory) = (config.clone(), directory.clone());
        let make = Box::new(move || match config.warmups.get(index) {
            Some(warmup) => warm_up_batch(&config, warmup, &directory),
            None => Err(format!("warm-up {index} does not exist")),
        });
        WarmUp { name: warmup.name.clone(), count: warmup.count, make }
    };
    let all: Vec<WarmUp> = config.warmups.iter().enumerate().map(warm_up).collect();
    let check = move || {
        for warm_up in &all {
            (warm_up.make)().map_err(|text| format!("warmup '{}': {text}", warm_up.name))?;
        }
        Ok(all)
    };
    blocking::run(check).await.unwrap_or_else(|error| Err(error.to_string()))
}

/// Makes the requests of a warm-up; `directory` is `warmup` beside the versions. Blocks.
fn warm_up_batch(config: &ModelConfig, warmup: &Warmup, directory: &Path) -> Result<WarmUpBatch, String> {
    let file = |name: &str| {
        let path = model_file(directory, name)?;
        scan::read(&path).map_err(|error| format!("'{}' cannot be read: {error}", path.display()))
    };
    let WarmupBatch { requests, controls } = warmup.requests(config, file)?;
    let checked = requests.into_iter().map(|mut request| {
        let checked = config.check(&mut request).map_err(|error| error.to_string())?;
        Ok::<_, String>((request, checked))
    });
    Ok(WarmUpBatch { parts: checked.collect::<Result<_, _>>()?, controls })
}
