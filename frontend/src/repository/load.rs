//! Loads models: configuration, versions, instances.

use std::collections::BTreeMap;
use std::fs::File;
use std::io;
use std::path::{Component, Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use memmap2::Mmap;
use pharos::classification;
use pharos::ensemble::Plan as EnsemblePlan;
use pharos::id::ModelVersion;
use pharos::metrics::record;
use pharos::model::{Completion, Draft, ModelConfig, ModelSignature, TensorSpec, VersionPolicy, Warmup, onnx};
use pharos::repository::{self, State};
use pharos::supervisor;
use tokio::sync::{Semaphore, watch};

use super::scan::{self, Contents, Found};
use super::serving::Executor;
use super::{Repository, Serving, ensemble};
use crate::cache::{Files, ModelCache, ResponseCache};
use crate::clock;
use crate::scheduler::{Driver, placement, settings};
use crate::supervisor::{Instances, Plan, WarmUp};
use crate::system;

/// A model that can be loaded.
struct Prepared {
    config: ModelConfig,
    /// If it is an ensemble.
    plan: Option<EnsemblePlan>,
    /// The versions to run, with their directories.
    versions: BTreeMap<u64, PathBuf>,
}

/// The backends of the worker that this build starts.
const BACKENDS: [&str; 3] = ["builtin", "onnxruntime", "tract"];

impl Repository {
    /// Loads every model that is in the repositories and returns when each is ready or has failed.
    ///
    /// # Errors
    /// A repository cannot be read. A model that cannot be loaded is no error here; see [`Repository::failures`].
    pub(crate) async fn load_all(self: &Arc<Self>) -> io::Result<()> {
        let found = scan::models(&self.settings.repositories)?;
        for model in &found {
            self.change(|table| table.states.add(&model.name));
        }
        self.load_models(&found).await
    }

    /// Loads these models side by side, an ensemble when its members among them are done.
    async fn load_models(self: &Arc<Self>, found: &[Found]) -> io::Result<()> {
        // Ensembles are known by their configurations only; all are read before anything is loaded.
        let prepared: Vec<_> = found.iter().map(|model| self.prepare_known(model)).collect();
        let mut loads = Vec::new();
        for (model, prepared) in found.iter().zip(prepared) {
            let Some(prepared) = prepared else { continue };
            let table = self.table();
            match ensemble::hopeless(&table.dependencies, &table.states, &model.name) {
                Some(reason) => self.cannot_load(&model.name, reason),
                None => loads.push((model.name.clone(), prepared, watch::channel(()))),
            }
        }
        // A sender that is dropped says that its model is done, one way or the other.
        let done: BTreeMap<String, watch::Receiver<()>> =
            loads.iter().map(|(name, _, (_, done))| (name.clone(), done.clone())).collect();
        let permits = Arc::new(Semaphore::new(self.settings.load_threads.max(1)));
        let mut tasks = Vec::new();
        for (name, prepared, (sender, _)) in loads {
            let members: Vec<_> =
                self.table().dependencies.members(&name).filter_map(|member| done.get(member).cloned()).collect();
            let (repository, permits) = (self.clone(), permits.clone());
            tasks.push(tokio::spawn(async move {
                for mut member in members {
                    while member.changed().await.is_ok() {}
                }
                let _permit = permits.acquire().await;
                repository.load(&name, prepared).await;
                drop(sender);
            }));
        }
        drop(done);
        for task in tasks {
            task.await.map_err(|error| io::Error::other(format!("loading a model panicked: {error}")))?;
        }
        Ok(())
    }

    /// Reads a model's configuration and remembers what it depends on; what goes wrong is in its state and in the log.
    fn prepare_known(&self, model: &Found) -> Option<Prepared> {
        let prepared = self.prepare(model).inspect_err(|reason| self.cannot_load(&model.name, reason.clone())).ok()?;
        self.change(|table| match &prepared.plan {
            Some(plan) => table.dependencies.insert(&model.name, plan.members()),
            None => table.dependencies.remove(&model.name),
        });
        Some(prepared)
    }

    fn cannot_load(&self, model: &str, reason: String) {
        tracing::error!(%model, "model cannot be loaded: {reason}");
        self.change(|table| table.states.fail(model, reason));
    }

    /// Loads the versions of one model; what goes wrong is in its state and in the log.
    async fn load(&self, model: &str, Prepared { config, plan, versions }: Prepared) {
        for (version, directory) in versions {
            self.change(|table| table.states.set(model, version, State::Loading, ""));
            let loaded = match plan.clone() {
                Some(plan) => self.load_ensemble(&config, plan, (version, directory)).await,
                None => self.load_version(&config, version, directory).await,
            };
            match loaded {
                Ok(serving) => self.change(|table| {
                    table.states.set(model, version, State::Ready, "");
                    table.serving.entry(model.to_owned()).or_default().insert(version, Arc::new(serving));
                }),
                Err(reason) => {
                    tracing::error!(%model, version, "model cannot be loaded: {reason}");
                    self.change(|table| table.states.set(model, version, State::Unavailable, reason));
                }
            }
        }
    }

    /// The configuration of a model and the versions to run, with their directories.
    fn prepare(&self, model: &Found) -> Result<Prepared, String> {
        if model.duplicate {
            return Err(format!("model '{}' is in more than one repository", model.name));
        }
        let contents = scan::contents(&model.path).map_err(|error| error.to_string())?;
        let config_path = model.path.join("config.pbtxt");
        let draft = match &contents.config {
            Some(text) => Draft::from_text(text, &config_path.to_string_lossy()).map_err(|error| error.to_string())?,
            None if self.settings.auto_complete => Draft::empty(),
            None => return Err(format!("'{}' does not exist, and auto-complete is off", config_path.display())),
        };
        let signature = signature(&contents, draft.model_file())?;
        let completion = Completion {
            directory: &model.name,
            files: &contents.files,
            backends: &BACKENDS,
            gpus: &[],
            signature: signature.as_ref(),
            auto_complete: self.settings.auto_complete,
            default_max_batch_size: self.settings.default_max_batch_size,
        };
        let config = draft.complete(&completion).map_err(|error| error.to_string())?;
        let plan = EnsemblePlan::new(&config).transpose()?;
        let present: Vec<u64> = contents.versions.keys().copied().collect();
        let wanted = repository::select(&config.version_policy, &present);
        self.change(|table| {
            for version in missing(&config.version_policy, &present) {
                let reason = format!("version {version} has no directory in '{}'", model.path.display());
                table.states.set(&model.name, version, State::Unavailable, reason);
            }
        });
        if wanted.is_empty() {
            let there =
                if present.is_empty() { "no version directories".to_owned() } else { format!("versions {present:?}") };
            return Err(format!("no version to run: '{}' has {there}", model.path.display()));
        }
        let versions = contents.versions.into_iter().filter(|(version, _)| wanted.contains(version)).collect();
        Ok(Prepared { config, plan, versions })
    }

    async fn load_version(&self, config: &ModelConfig, version: u64, directory: PathBuf) -> Result<Serving, String> {
        let began = clock::now();
        let (warmups, labels) = (warmups(config, &directory)?, labels(config, &directory)?);
        check_initial_states(config, &directory)?;
        let placements = placement::of(config, version);
        let active = placements.iter().filter(|placement| !placement.passive).count();
        if active == 0 {
            return Err(format!(
                "all instances of model '{}' are passive: none would execute its requests",
                config.name
            ));
        }
        let limits = self.limits.as_ref().map(|limits| limits.register(&placements)).transpose()?;
        let model = ModelVersion::new(config.name.as_str(), version);
        let tags: Vec<(String, String)> = config.metric_tags.iter().map(|(k, v)| (k.clone(), v.clone())).collect();
        let series = self.cache.model_loaded_with(&model, &tags, config.histogram_buckets.clone());
        let config = Arc::new(config.clone());
        let responses = self.model_cache(&model, &config, &directory).await;
        if responses.is_some() {
            self.cache.model_cached(&series);
        }
        if config.decoupled {
            self.cache.model_decoupled(&series);
        }
        let settings = (settings::of(&config), limits);
        let driver = Driver::new(config.clone(), series.clone(), settings, self.timer.clone(), responses);
        let threads = self.threads(active);
        let plan = self.plan(directory.clone(), threads, warmups);
        match Instances::start(plan, &placements, &driver).await {
            Ok((instances, loaded)) => {
                let seconds = (clock::now() - began).as_secs_f64();
                record::model_load_duration(&series, seconds);
                record::memory_usage(&series, loaded.memory, self.gpu_memory(&instances).await);
                tracing::info!(model = %model, engine = loaded.engine, instances = placements.len(), threads, "model ready in {seconds:.3} s");
                let config = Arc::new(config.with_parameter("engine", &loaded.engine));
                let executor = Executor::Instances { driver, instances };
                Ok(Serving { model, config, series, directory, labels, executor })
            }
            Err(reason) => {
                self.cache.model_unloaded(&series);
                Err(reason)
            }
        }
    }

    /// Threads for each instance, when this many execute.
    fn threads(&self, active: usize) -> u32 {
        match self.settings.worker_threads {
            0 => cores().div_euclid(u32::try_from(active).unwrap_or(1).max(1)).max(1),
            threads => threads,
        }
    }

    /// What is the same for all instances of a version in this directory.
    fn plan(&self, directory: PathBuf, threads: u32, warmups: Vec<WarmUp>) -> Arc<Plan> {
        Arc::new(Plan {
            program: self.settings.program.clone(),
            initial_states: whole(initial_states(&directory)),
            directory: whole(directory),
            threads,
            settings: supervisor::Settings {
                start_timeout: self.settings.start_timeout,
                max_backoff: self.settings.max_backoff,
                execution_timeout: self.settings.execution_timeout.unwrap_or(Duration::ZERO),
                ..supervisor::Settings::default()
            },
            cache: self.cache.clone(),
            warmups,
            metrics: self.metrics.subscribe(),
        })
    }

    /// The response cache for a version, if the server has one and the model asks for it.
    async fn model_cache(&self, model: &ModelVersion, config: &ModelConfig, directory: &Path) -> Option<ModelCache> {
        let shared = self.responses_for(model, config)?;
        let files = Files { model: model.clone(), config: config.clone(), directory: directory.to_owned() };
        read_cache(shared, vec![files]).await
    }

    pub(super) fn responses_for(&self, model: &ModelVersion, config: &ModelConfig) -> Option<Arc<ResponseCache>> {
        if config.response_cache && self.responses.is_none() {
            tracing::info!(%model, "it asks for the response cache and goes without: --cache-config was not given");
        }
        self.responses.clone().filter(|_| config.response_cache)
    }

    /// What the processes of a model hold on the GPUs, by the number of the device.
    async fn gpu_memory(&self, instances: &Instances) -> Vec<(u32, u64)> {
        let Some(gpus) = &self.settings.gpus else { return Vec::new() };
        let pids = instances.processes().filter_map(|(_, pid)| pid).collect();
        system::gpu_memory(gpus.clone(), pids).await
    }
}

/// The response cache for a version with these files, the first of them its own.
pub(super) async fn read_cache(shared: Arc<ResponseCache>, files: Vec<Files>) -> Option<ModelCache> {
    let model = files.first().map(|files| files.model.clone());
    let cache = tokio::task::spawn_blocking(move || ModelCache::new(shared, &files)).await;
    let unread = |error: &io::Error| {
        let model = model.map(|model| model.to_string()).unwrap_or_default();
        tracing::warn!(model, "without the response cache, its files cannot be read: {error}");
    };
    cache.unwrap_or_else(|error| Err(io::Error::other(error))).inspect_err(unread).ok()
}

/// A file that the configuration names in the model's directory, or in a directory there.
fn model_file(directory: &Path, name: &str) -> Result<PathBuf, String> {
    let inside = Path::new(name).components().all(|part| matches!(part, Component::Normal(_)));
    if inside && !name.is_empty() {
        return Ok(directory.join(name));
    }
    Err(format!("file '{}' must be in the model's directory '{}'", name.escape_debug(), directory.display()))
}

/// A path that means the same in any process.
fn whole(path: PathBuf) -> PathBuf {
    path.canonicalize().unwrap_or(path)
}

/// The directory with the files of the states' first values, beside the versions.
fn initial_states(version: &Path) -> PathBuf {
    version.parent().unwrap_or(version).join("initial_state")
}

/// Refuses first values of states that are not there, or too short: the instances read them when they start.
fn check_initial_states(config: &ModelConfig, version: &Path) -> Result<(), String> {
    let directory = initial_states(version);
    let read = |name: &str| {
        let path = model_file(&directory, name)?;
        std::fs::read(&path).map_err(|error| format!("failed to open text file for read {}: {error}", path.display()))
    };
    let mut from_file =
        config.states.iter().filter(|state| state.initial.as_ref().is_some_and(|first| first.file.is_some()));
    from_file.try_for_each(|state| state.first_value(read).map(drop))
}

/// The names of the classes, by output. Label files are in the model's directory.
pub(super) fn labels(config: &ModelConfig, version: &Path) -> Result<BTreeMap<String, Vec<String>>, String> {
    let directory = version.parent().unwrap_or(version);
    let named = config.outputs.iter().filter(|output| !output.label_filename.is_empty());
    let read = |output: &TensorSpec| {
        let path = model_file(directory, &output.label_filename)?;
        let text = std::fs::read_to_string(&path);
        let text = text.map_err(|error| format!("label file '{}' cannot be read: {error}", path.display()))?;
        Ok((output.name.clone(), classification::labels(&text)))
    };
    let in_output = |output| read(output).map_err(|text: String| format!("output '{}': {text}", output.name));
    named.map(in_output).collect()
}

/// What the instances execute before they are ready. Files are in the directory `warmup` beside the versions.
fn warmups(config: &ModelConfig, version: &Path) -> Result<Vec<WarmUp>, String> {
    let directory = version.parent().unwrap_or(version).join("warmup");
    let file = |name: &str| {
        let path = model_file(&directory, name)?;
        std::fs::read(&path).map_err(|error| format!("'{}' cannot be read: {error}", path.display()))
    };
    let warm_up = |warmup: &Warmup| {
        let requests = warmup.requests(config, file)?;
        let checked = requests.into_iter().map(|mut request| {
            let checked = config.check(&mut request).map_err(|error| error.to_string())?;
            Ok::<_, String>((request, checked))
        });
        Ok(WarmUp { name: warmup.name.clone(), count: warmup.count, parts: checked.collect::<Result<_, _>>()? })
    };
    let named = |warmup: &Warmup| warm_up(warmup).map_err(|text: String| format!("warmup '{}': {text}", warmup.name));
    config.warmups.iter().map(named).collect()
}

/// The versions that a policy names and that are not there.
fn missing(policy: &VersionPolicy, present: &[u64]) -> Vec<u64> {
    match policy {
        VersionPolicy::Specific(named) => named.iter().filter(|version| !present.contains(version)).copied().collect(),
        VersionPolicy::Latest(_) | VersionPolicy::All => Vec::new(),
    }
}

/// What the newest version's model file says about its inputs and outputs; `None` if there is no ONNX file.
fn signature(contents: &Contents, file_name: &str) -> Result<Option<ModelSignature>, String> {
    let file_name = if file_name.is_empty() { "model.onnx" } else { file_name };
    let Some(path) = contents.versions.values().next_back().map(|directory| directory.join(file_name)) else {
        return Ok(None);
    };
    if path.extension().is_none_or(|extension| extension != "onnx") || !path.is_file() {
        return Ok(None);
    }
    let file = map(&path).map_err(|error| format!("'{}' cannot be read: {error}", path.display()))?;
    onnx::signature(&file).map(Some).map_err(|error| format!("'{}': {error}", path.display()))
}

/// Maps a file, so that weights are not read only to find the names of inputs.
#[allow(unsafe_code)]
fn map(path: &Path) -> io::Result<Mmap> {
    let file = File::open(path)?;
    // SAFETY: read once, right away, by a parser that checks everything it reads. A model file that is truncated in
    // that moment would end the process, as it would any program that maps its model.
    unsafe { Mmap::map(&file) }
}

fn cores() -> u32 {
    std::thread::available_parallelism().map_or(1, |cores| u32::try_from(cores.get()).unwrap_or(1))
}
