//! Loads a version of a model: reads and completes its configuration, chooses the program of its
//! workers, reserves memory, and starts its instances. Must not depend on the origin of the request
//! or on the version that served before.

use std::collections::BTreeMap;
use std::io;
use std::path::{Component, Path, PathBuf};
use std::sync::{Arc, Weak};
use std::time::Duration;

use pharos::classification;
use pharos::id::ModelVersion;
use pharos::metrics::builtin::Builtin;
use pharos::metrics::cache::Cache;
use pharos::metrics::record;
use pharos::metrics::series::ModelSeries;
use pharos::model::generation::generates_text;
use pharos::model::pooling::PoolingTask;
use pharos::model::{CodeLocation, ModelConfig, Scheduling, TensorSpec, Warmup, WarmupBatch};
use pharos::repository::memory_budget::MemoryBytes;
use pharos::repository::{Change, VersionFingerprint, changes};
use pharos::supervisor::{self, Backoff, RestartPolicy};

use super::Loader;
use super::memory_budget::{LoadedVersion, ToLoad};
use super::prepare::{Configuration, Prepared, Version};
use crate::cache::{ModelResponseCache, ResponseCache};
use crate::calls::Caller;
use crate::launch::limits::Limited;
use crate::launch::{self, Launch, Reading};
use crate::load_progress::LoadProgress;
use crate::model_memory::MemoryShare;
use crate::process;
use crate::scheduler::placement::Placement;
use crate::scheduler::{Driver, DriverSettings, Limits, placement, settings};
use crate::serving::{Executor, Serving};
use crate::store::ModelFiles;
use crate::store::identity::{Files, identity};
use crate::store::scan::{self, LoadedFiles};
use crate::supervisor::{Ending, Instances, Plan, WarmUp, WarmUpBatch};
use pharos_os::{blocking, clock, threads};

/// The time limit of reading a part of a file. A load that waits holds one of the places for loads.
const READ_LIMIT: Duration = Duration::from_secs(30);

/// The series of a version that is being loaded. Dropping it removes new series; [`Unserved::keep`]
/// keeps them.
pub(super) struct Unserved {
    cache: Arc<Cache>,
    series: Arc<ModelSeries>,
    /// Whether the series are new; otherwise a serving version counts into them.
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
        let cache = loader.cache().clone();
        if let Some(series) = continued {
            return Self { cache, series: series.clone(), is_new: false };
        }
        let tags: Vec<(String, String)> =
            config.metric_tags.iter().map(|(k, v)| (k.clone(), v.clone())).collect();
        let series = cache.model_series(model, &tags, config.histogram_buckets.clone());
        if let Some((name, version)) = loader.settings.model_policy.metric_name(config) {
            series.set_alias(name, version);
        }
        Self { cache, series, is_new: true }
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

/// The memory of a version that is being loaded. If it is dropped before [`EndsIfDropped::keep`],
/// the load was cancelled or has failed, and the memory is free when the processes have ended.
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

/// What the instances of a version are started with.
struct Startup {
    directory: PathBuf,
    config: Arc<ModelConfig>,
    launch: Launch,
    warmups: Vec<WarmUp>,
    /// The model, as the caller of others.
    caller: Arc<Caller>,
    files: Arc<ModelFiles>,
    /// The files of the version before anything of them was read for this load, if the server has
    /// a response cache.
    loaded_files: Option<Arc<LoadedFiles>>,
}

impl Loader {
    /// Loads a version and retries a failed load as often as the settings allow. Counts into
    /// `continued` if given.
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
                    tracing::warn!(
                        model = prepared.name,
                        version = number,
                        "load failed, retrying: {reason}"
                    );
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
        let version = prepared
            .versions
            .get(&number)
            .ok_or_else(|| format!("version {number} does not exist"))?;
        match prepared.plan.clone() {
            Some(plan) => self.load_ensemble(prepared, version, plan, number).await,
            None => self.load_instances(prepared, version, number, continued).await,
        }
    }

    /// Loads a version with instances: reads its files, reserves memory, and starts the instances.
    async fn load_instances(
        self: &Arc<Self>,
        prepared: &Prepared,
        version: &Version,
        number: u64,
        continued: Option<&Arc<ModelSeries>>,
    ) -> Result<Serving, String> {
        let began = clock::now();
        let directory = &version.directory;
        let model = ModelVersion::new(self.stores.model_name(&prepared.name), number);

        // 1. What the files say.
        let loaded_files = self.loaded_files(prepared, version).await;
        let launch = self.launch(prepared, version).await?;
        let config = Arc::new(self.configure(prepared, number, version, &launch).await?);
        let unserved = Unserved::new(self, &model, &config, continued);
        let series = unserved.series().clone();
        let cache = self.model_cache(&model, &config, loaded_files.as_deref()).await;
        let warmups = warmups(&config, directory).await?;
        let labels = labels(&config, directory)?;
        check_initial_states(&config, directory)?;
        let placements = placements(&config, number)?;
        if cache.is_some() {
            self.cache().model_cached(&series);
        }
        if config.decoupled {
            self.cache().model_decoupled(&series);
        }
        if generates_text(&config) {
            self.cache().model_generates(&series);
        } else if PoolingTask::of(&config).is_some() {
            self.cache().model_reads_texts(&series);
        }

        // 2. The memory that the instances need.
        let threads = self.threads(&placements, &launch);
        let startup = Startup {
            directory: directory.clone(),
            config: config.clone(),
            caller: caller(prepared, &launch),
            launch,
            warmups,
            files: prepared.model_files.clone(),
            loaded_files: loaded_files.clone(),
        };
        let to_load =
            ToLoad { name: &prepared.name, version: number, directory, config: Some(&config) };
        let memory = EndsIfDropped(self.room_for(&to_load).await?.map(Arc::new));

        // 3. The instances.
        let settings = DriverSettings {
            config: config.clone(),
            series: series.clone(),
            scheduling: settings::of(&config),
            limits: self.models.shared.limits.as_ref().map(Limits::registration),
            response_cache: cache,
        };
        let driver = Driver::new(settings, self.timer.clone());
        let load = self.models.loads.begin(model.clone(), began);
        let plan = Arc::new(self.plan(startup, threads, memory.0.clone(), load.progress()));
        let (instances, loaded) = Instances::start(plan, &placements, &driver).await?;
        let time = clock::now() - began;
        if let Some(share) = &memory.0 {
            let measured = LoadedVersion {
                share,
                pids: instances.pids(),
                time,
                fingerprint: version.fingerprint,
            };
            if let Err(reason) = self.measure_loaded(&to_load, measured).await {
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

    /// Returns the change that a version with the same files needs, by comparing its complete old
    /// and new configurations. This lets a client return the served configuration with another
    /// number of instances. `None` if it must be reloaded.
    pub(super) async fn change_when_complete(
        &self,
        serving: &Serving,
        prepared: &Prepared,
    ) -> Option<Change> {
        let number = serving.model.version;
        let version = prepared.versions.get(&number)?;
        serving.instances().filter(|_| version.fingerprint.files == serving.fingerprint.files)?;
        let launch = self.launch(prepared, version).await.ok()?;
        let mut config = self.configure(prepared, number, version, &launch).await.ok()?;
        if let Some(engine) = serving.config.parameters.get("engine") {
            config = config.with_parameter("engine", engine);
        }
        let before = VersionFingerprint::new(&serving.config, version.fingerprint.files);
        let after = VersionFingerprint::new(&config, version.fingerprint.files);
        let mut changes =
            changes(&BTreeMap::from([(number, before)]), &BTreeMap::from([(number, after)]), false);
        match changes.remove(&number)? {
            Change::Keep => Some(Change::Describe),
            Change::Replace => None,
            other => Some(other),
        }
    }

    /// Changes a version in place for a configuration that differs only in instances, which are
    /// started and stopped. Returns the changed version and the removed instances, or `None` if
    /// this is not possible because an ensemble has other members.
    ///
    /// # Errors
    /// An instance cannot be started; nothing has changed then.
    pub(super) async fn follow(
        self: &Arc<Self>,
        serving: &Serving,
        prepared: &Prepared,
    ) -> Result<Option<(Serving, Ending)>, String> {
        let number = serving.model.version;
        let version = prepared
            .versions
            .get(&number)
            .ok_or_else(|| format!("version {number} does not exist"))?;
        if self.models.has_other_members(serving) {
            return Ok(None);
        }
        let launch = match prepared.plan {
            Some(_) => Launch::default(),
            None => self.launch(prepared, version).await?,
        };
        let config = Arc::new(self.configure(prepared, number, version, &launch).await?);
        let mut ending = Ending::default();
        if let Executor::Instances { driver, instances, .. } = &*serving.executor
            && (version.fingerprint.instances != serving.fingerprint.instances
                || instances.any_given_up())
        {
            let placements = placements(&config, number)?;
            let threads = self.threads(&placements, &launch);
            let startup = Startup {
                directory: serving.directory.clone(),
                config: config.clone(),
                warmups: warmups(&config, &serving.directory).await?,
                caller: caller(prepared, &launch),
                launch,
                files: serving.files.clone(),
                loaded_files: serving.loaded_files.clone(),
            };
            let size = self.size_with(serving, &config);
            let room = EndsIfDropped(self.room_for_more(serving, &size).await?.map(Arc::new));
            let load = self.models.loads.begin(serving.model.clone(), clock::now());
            let plan = Arc::new(self.plan(startup, threads, room.0.clone(), load.progress()));
            ending = instances.resize(&plan, &placements, driver).await?;
            if let (Some(share), Some(room)) = (serving.executor.memory(), room.keep()) {
                let mut surplus_bytes = share.bytes();
                surplus_bytes.subtract(&size);
                let surplus = share.split(&surplus_bytes);
                surplus.end();
                ending.keep(surplus);
                share.set(size);
                room.set(MemoryBytes::default());
            }
            let (bytes, pinned) = instances.memory();
            record::memory_usage(&serving.series, bytes, pinned, self.gpu_memory(instances).await);
            tracing::info!(model = %serving.model, instances = placements.len(), "instances changed in place");
        }
        let complete = match serving.config.parameters.get("engine") {
            Some(engine) => config.with_parameter("engine", engine),
            // The version is an ensemble.
            None => config
                .with_decoupled(serving.config.decoupled)
                .map_err(|error| error.to_string())?,
        };
        let changed = Serving {
            config: Arc::new(complete),
            fingerprint: version.fingerprint,
            ..serving.clone()
        };
        Ok(Some((changed, ending)))
    }

    /// Returns the program for a version; may unpack an environment.
    ///
    /// # Errors
    /// The program is missing or cannot be used, or the file system of its environment does not
    /// answer.
    async fn launch(&self, prepared: &Prepared, version: &Version) -> Result<Launch, String> {
        let reading = Arc::new(Reading::default());
        let mut choosing = {
            let program = self.settings.program.clone();
            let prepared = prepared.clone();
            let directory = version.directory.clone();
            let reading = reading.clone();
            blocking::run(move || {
                let Prepared { name, configuration, model_files, provenance, .. } = &prepared;
                let model =
                    configuration.launched(name, model_files.path(), &directory, *provenance);
                launch::choose(&program, &model, &reading)
            })
        };
        loop {
            let call = reading.call();
            match clock::timeout(READ_LIMIT, &mut choosing).await {
                Some(chosen) => return chosen.unwrap_or_else(|error| Err(error.to_string())),
                // Its thread ends when the file system answers.
                None if call.is_some() && call == reading.call() => {
                    let seconds = READ_LIMIT.as_secs();
                    let name = &prepared.name;
                    return Err(format!(
                        "model '{name}': its environment cannot be read: no answer within \
                         {seconds} s"
                    ));
                }
                None => {}
            }
        }
    }

    /// Returns the configuration of a version.
    ///
    /// # Errors
    /// The model's code does not complete it to a valid configuration.
    async fn configure(
        &self,
        prepared: &Prepared,
        number: u64,
        version: &Version,
        launch: &Launch,
    ) -> Result<ModelConfig, String> {
        let completion = match &prepared.configuration {
            Configuration::Known(config) => return Ok((**config).clone()),
            Configuration::CompletedByCode(completion) => completion,
        };
        let may_answer = {
            let completion = completion.clone();
            let directory = version.directory.clone();
            blocking::run(move || completion.may_answer(&directory))
        };
        if !may_answer.await.unwrap_or(true) {
            return completion.unanswered().map_err(|error| error.to_string());
        }
        let directory = canonical(version.directory.clone());
        let model_directory = canonical(prepared.model_files.path().to_owned());
        let location = CodeLocation {
            version: number,
            directory: &directory.to_string_lossy(),
            model_directory: &model_directory.to_string_lossy(),
            backend_settings: &self.settings.backend_settings.of(completion.draft.backend()),
        };
        // A compiled backend may start threads, so its process is not the copy of another one.
        let alone = launch.interpreter.is_none().then(|| launch.without_fork_server());
        let launch = alone.as_ref().unwrap_or(launch);
        let question = process::Question {
            model: &prepared.name,
            text: completion.draft.query(&location, &completion.facts()),
            // As for a model with one instance.
            threads: self.threads(&[], launch),
            limit: self.start_timeout(launch),
        };
        let answer = process::complete(launch, &self.fork_servers, question).await?;
        completion.merge_answer(&answer).map_err(|error| error.to_string())
    }

    /// Returns the time limits and restart policy of a model's workers.
    fn supervision(&self, config: &ModelConfig, launch: &Launch) -> supervisor::Settings {
        let default = supervisor::Settings::default();
        let backoff = Backoff::Exponential {
            first: Duration::from_millis(100),
            max: self.settings.max_backoff,
        };
        let settings = supervisor::Settings {
            start_timeout: self.start_timeout(launch),
            execution_timeout: self.settings.execution_timeout.unwrap_or(Duration::ZERO),
            restart: RestartPolicy { backoff, ..default.restart },
        };
        self.settings.model_policy.supervision(config, settings)
    }

    /// Returns the time limit of a worker for loading its model, and of the model's code for
    /// completing the configuration.
    fn start_timeout(&self, launch: &Launch) -> Duration {
        let python = self.settings.python_start_timeout.filter(|_| launch.interpreter.is_some());
        python.unwrap_or(self.settings.start_timeout)
    }

    /// Returns the number of threads of each instance.
    fn threads(&self, placements: &[Placement], launch: &Launch) -> u32 {
        let active = placements.iter().filter(|placement| !placement.passive).count();
        let share = (threads::processors() / active.max(1)).max(1);
        let limit = launch.limits.as_ref().and_then(Limited::processors);
        match self.settings.worker_threads {
            0 => u32::try_from(limit.map_or(share, |limit| share.min(limit))).unwrap_or(1),
            threads => threads,
        }
    }

    /// Returns the settings that all instances of a version share.
    fn plan(
        self: &Arc<Self>,
        startup: Startup,
        threads: u32,
        memory: Option<Arc<MemoryShare>>,
        progress: Arc<LoadProgress>,
    ) -> Plan {
        let Startup { directory, config, launch, warmups, caller, files, loaded_files } = startup;
        let policies = self.settings.policies.clone();
        for group in &config.instance_groups {
            if !group.host_policy.is_empty() && !policies.has(&group.host_policy) {
                tracing::warn!(
                    model = %config.name,
                    "host_policy '{policy}' of instance group {group} has no effect: no --host-policy={policy},... sets it",
                    policy = group.host_policy,
                    group = group.name
                );
            }
        }
        let models: Weak<Self> = Arc::downgrade(self);
        Plan {
            backend_settings: self.settings.backend_settings.of(&config.backend),
            model_directory: canonical(model_directory(&directory)),
            initial_states: canonical(initial_states(&directory)),
            directory: canonical(directory),
            progress,
            threads,
            spin_us: match launch.limits.as_ref().and_then(Limited::processors) {
                // A quota also counts the time in which a worker polls.
                Some(_) => self.settings.worker_spin.limited_us,
                None => self.settings.worker_spin.usual_us,
            },
            max_wait: self.settings.max_wait,
            settings: self.supervision(&config, &launch),
            launch,
            memory,
            files,
            loaded_files,
            workers: self.workers.clone(),
            cache: self.cache().clone(),
            models,
            caller,
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
    ) -> Option<ModelResponseCache> {
        let shared = self.responses_for(model, config)?;
        read_cache(shared, vec![Files::new(model, config, loaded?)]).await
    }

    pub(super) fn responses_for(
        &self,
        model: &ModelVersion,
        config: &ModelConfig,
    ) -> Option<Arc<ResponseCache>> {
        if config.response_cache && self.models.shared.response_cache.is_none() {
            tracing::info!(%model, "the model enables the response cache, but --cache-config is not set");
        }
        self.models.shared.response_cache.clone().filter(|_| config.response_cache)
    }

    /// Returns the bytes that the processes of a model use on GPUs, by device number.
    async fn gpu_memory(&self, instances: &Instances) -> Vec<(u32, u64)> {
        let memory = self.settings.devices.process_memory().await;
        let pids = instances.pids();
        let used = self
            .settings
            .devices
            .numbers()
            .filter_map(|number| Some((number, memory.of(number, &pids)?)));
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
        return Err(format!(
            "all instances of model '{name}' are passive: none would execute its requests"
        ));
    }
    Ok(placements)
}

/// Returns the response cache of a version; the first entry of `files` is the version itself, the
/// others are its members.
pub(super) async fn read_cache(
    shared: Arc<ResponseCache>,
    files: Vec<Files>,
) -> Option<ModelResponseCache> {
    let model = files.first().map(|files| files.model.clone());
    match blocking::run(move || identity(&files))
        .await
        .unwrap_or_else(|error| Err(io::Error::other(error)))
    {
        Ok(identity) => Some(ModelResponseCache::new(shared, identity)),
        Err(error) => {
            let model = model.map(|model| model.to_string()).unwrap_or_default();
            tracing::warn!(
                model,
                "response cache disabled for the model: cannot read its files: {error}"
            );
            None
        }
    }
}

/// Returns the path of a file that the configuration names, inside the model's directory or a
/// subdirectory.
pub(crate) fn inner_file(directory: &Path, name: &str) -> Result<PathBuf, String> {
    let inside = Path::new(name).components().all(|part| matches!(part, Component::Normal(_)));
    if inside && !name.is_empty() {
        return Ok(directory.join(name));
    }
    Err(format!(
        "file '{}' must be in the model's directory '{}'",
        name.escape_debug(),
        directory.display()
    ))
}

/// Returns a path that is valid in every process.
fn canonical(path: PathBuf) -> PathBuf {
    path.canonicalize().unwrap_or(path)
}

/// Returns the directory of the model whose version is in this directory: the directory above, or
/// the same if versions have no directories.
fn model_directory(version: &Path) -> PathBuf {
    let is_number =
        version.file_name().and_then(|name| name.to_str()?.parse::<u64>().ok()).is_some();
    let above = version.parent().filter(|_| is_number);
    above.unwrap_or(version).to_owned()
}

/// Returns the directory with the initial values of states, beside the versions.
fn initial_states(version: &Path) -> PathBuf {
    version.parent().unwrap_or(version).join("initial_state")
}

/// Checks that the files of initial state values, which the instances read on start, exist and are
/// long enough.
fn check_initial_states(config: &ModelConfig, version: &Path) -> Result<(), String> {
    let directory = initial_states(version);
    for state in &config.states {
        if state.initial.as_ref().is_some_and(|first| first.file.is_some()) {
            state.first_value(|name| {
                let path = inner_file(&directory, name)?;
                scan::read(&path).map_err(|error| {
                    format!("failed to open text file for read {}: {error}", path.display())
                })
            })?;
        }
    }
    Ok(())
}

/// Logs settings of the configuration that are valid but probably unintended.
pub(super) fn log_warnings(model: &ModelVersion, config: &ModelConfig) {
    for warning in &config.warnings {
        tracing::warn!(%model, "{warning}");
    }
    for (family, _) in &config.histogram_buckets {
        if Builtin::from_name(family).is_some_and(Builtin::has_buckets_of_models) {
            continue;
        }
        let renamed = Builtin::formerly(family)
            .map(|present| {
                format!("; it is now named '{}', with buckets in seconds", present.name())
            })
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
    for (number, step) in
        steps.iter().enumerate().filter(|(_, step)| !step.model_namespace.is_empty())
    {
        tracing::warn!(
            %model,
            "'model_namespace' is '{namespace}' in step {number} (model '{member}'), which has no effect without \
             --model-namespacing",
            namespace = step.model_namespace,
            member = step.model_name
        );
    }
}

/// Returns the class labels by output. Label files are in the model's directory.
pub(super) fn labels(
    config: &ModelConfig,
    version: &Path,
) -> Result<BTreeMap<String, Vec<String>>, String> {
    let directory = version.parent().unwrap_or(version);
    let mut labels = BTreeMap::new();
    for output in &config.outputs {
        if !output.label_filename.is_empty() {
            let read = read_labels(config, output, directory);
            let of_output = read.map_err(|text| format!("output '{}': {text}", output.name))?;
            labels.insert(output.name.clone(), of_output);
        }
    }
    Ok(labels)
}

fn read_labels(
    config: &ModelConfig,
    output: &TensorSpec,
    directory: &Path,
) -> Result<Vec<String>, String> {
    let path = inner_file(directory, &output.label_filename)?;
    let bytes = scan::read(&path)
        .map_err(|error| format!("label file '{}' cannot be read: {error}", path.display()))?;
    if let Err(error) = std::str::from_utf8(&bytes) {
        tracing::warn!(
            model = config.name,
            output = output.name,
            "label file '{path}' is not UTF-8 at byte {at}: invalid bytes are replaced with U+FFFD",
            path = path.display(),
            at = error.valid_up_to()
        );
    }
    Ok(classification::labels(&String::from_utf8_lossy(&bytes)))
}

/// Returns the warm-ups of instances, after making and dropping the requests of each: an error in
/// them is an error of the load.
async fn warmups(config: &Arc<ModelConfig>, version: &Path) -> Result<Vec<WarmUp>, String> {
    if config.warmups.is_empty() {
        return Ok(Vec::new());
    }
    let directory = version.parent().unwrap_or(version).join("warmup");
    let mut all = Vec::new();
    for (index, warmup) in config.warmups.iter().enumerate() {
        let config = config.clone();
        let directory = directory.clone();
        all.push(WarmUp {
            name: warmup.name.clone(),
            count: warmup.count,
            make: Box::new(move || match config.warmups.get(index) {
                Some(warmup) => warm_up_batch(&config, warmup, &directory),
                None => Err(format!("warm-up {index} does not exist")),
            }),
        });
    }
    let checked = blocking::run(move || {
        for warm_up in &all {
            (warm_up.make)().map_err(|text| format!("warmup '{}': {text}", warm_up.name))?;
        }
        Ok(all)
    });
    checked.await.unwrap_or_else(|error| Err(error.to_string()))
}

/// Makes the requests of a warm-up; `directory` is `warmup` beside the versions. Blocks.
fn warm_up_batch(
    config: &ModelConfig,
    warmup: &Warmup,
    directory: &Path,
) -> Result<WarmUpBatch, String> {
    let WarmupBatch { requests, controls } = warmup.requests(config, |name: &str| {
        let path = inner_file(directory, name)?;
        scan::read(&path).map_err(|error| format!("'{}' cannot be read: {error}", path.display()))
    })?;
    let mut checked_requests = Vec::new();
    for mut request in requests {
        let checked = config.check(&mut request).map_err(|error| error.to_string())?;
        checked_requests.push((request, checked));
    }
    Ok(WarmUpBatch { requests: checked_requests, controls })
}
