//! The registered TorchServe models. Each has a default version and possibly others; versions are
//! strings. In the engine each version is a separate model: the first version of NAME has the name
//! NAME, others `NAME@VERSION`.
//!
//! The registry contains the models that TorchServe would report as registered, whether or not
//! workers are running.

mod describe;
mod health;
mod phase;
mod start;
mod version;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use parking_lot::{RwLock, RwLockReadGuard, RwLockWriteGuard};
use pharos::error::{Cause, ErrorCode, InferError, Reason};
use pharos::model::MAX_INSTANCES;
use pharos::service::{Naming, Resolved, SharedManagement};
use pharos_os::blocking;
use tokio::sync::{Mutex, watch};

use super::archive::{self, StoredFile};
use super::{Archive, Deployment, ErrorResponse, Exception, RegistrationParameters, Settings};

pub use describe::{Listed, Listing, ModelDescription};
pub use version::{InFlight, Version};

/// A registered model.
struct Model {
    /// The version for requests that name none.
    default: String,
    versions: BTreeMap<String, Arc<Version>>,
}

/// The model and the version that a client names. An empty version is the default one.
#[derive(Clone, Copy, Debug, Default)]
pub struct ModelReference<'a> {
    /// The name of the model.
    pub name: &'a str,
    /// The version, or empty.
    pub version: &'a str,
}

/// The registered models.
pub struct Registry {
    service: SharedManagement,
    settings: Arc<Settings>,
    /// The directory that deployments are written to.
    repository: PathBuf,
    /// The workers of a version that a request may ask for; 0 for no limit.
    max_requested_workers: u64,
    // Locked only for lookups and changes, never while waiting.
    models: RwLock<BTreeMap<String, Model>>,
    // Locked while a version is registered or unregistered, from choosing its name until its entry
    // is changed.
    turn: Mutex<()>,
    changes: watch::Sender<u64>,
    /// Set when the server exits; ends downloads and installations of packages.
    exiting: watch::Sender<bool>,
}

/// The result of a change: a status and a message.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ManagementOutcome {
    /// The HTTP status: 200, or 202 if the change is still in progress.
    pub status: u16,
    /// The message.
    pub text: String,
}

impl ManagementOutcome {
    fn ok(text: String) -> Self {
        Self { status: 200, text }
    }

    fn accepted() -> Self {
        Self { status: 202, text: "Processing worker updates...".to_owned() }
    }
}

/// Parameters for scaling workers.
#[derive(Clone, Copy, Debug)]
pub struct Scale {
    /// The number of workers that are kept running.
    pub min: u32,
    /// The most workers.
    pub max: u32,
    /// Whether to wait until the workers have loaded the model.
    pub wait: bool,
}

impl Registry {
    /// Creates an empty registry.
    pub fn new(
        service: SharedManagement,
        settings: Arc<Settings>,
        repository: PathBuf,
        max_requested_workers: u64,
    ) -> Arc<Self> {
        Arc::new(Self {
            service,
            settings,
            repository,
            max_requested_workers,
            models: RwLock::default(),
            turn: Mutex::new(()),
            changes: watch::Sender::new(0),
            exiting: watch::Sender::new(false),
        })
    }

    /// Returns a receiver that is notified of every registration, scaling, unregistration and
    /// change of the default version.
    pub fn changes(&self) -> watch::Receiver<u64> {
        self.changes.subscribe()
    }

    /// Returns all registered versions, each with whether it is the default version of its model.
    pub fn deployments(&self) -> Vec<(Arc<Deployment>, bool)> {
        let mut deployments = Vec::new();
        for model in self.read().values() {
            for (text, version) in &model.versions {
                deployments.push((version.deployment(), *text == model.default));
            }
        }
        deployments
    }

    /// Registers an archive and starts its workers. With `wait`, waits for them, and unregisters
    /// the archive if they fail.
    ///
    /// # Errors
    /// The archive is invalid or already registered, or its workers do not start.
    pub async fn register(
        self: &Arc<Self>,
        url: &str,
        asked: RegistrationParameters,
        wait: bool,
    ) -> Result<ManagementOutcome, ErrorResponse> {
        let registry = self.clone();
        let url = url.to_owned();
        run_to_completion(async move { registry.register_now(&url, asked, wait).await }).await
    }

    async fn register_now(
        self: &Arc<Self>,
        url: &str,
        asked: RegistrationParameters,
        wait: bool,
    ) -> Result<ManagementOutcome, ErrorResponse> {
        let version = self.add(url, asked).await?;
        let workers = version.deployment().min_workers;
        let registered = format!(
            "Model \"{}\" Version: {} registered with {workers} initial workers",
            version.name, version.text
        );
        if workers == 0 {
            return Ok(ManagementOutcome::ok(format!(
                "{registered}. Use scale workers API to add workers for the model."
            )));
        }
        if !wait {
            version.keep_starting(self);
            return Ok(ManagementOutcome::accepted());
        }
        match version.start(self).await {
            Ok(()) => Ok(ManagementOutcome::ok(registered)),
            Err(error) => {
                self.remove(&version).await;
                Err(not_started(&version, &error))
            }
        }
    }

    /// Checks the number of workers in a request; `present` is the number that the version has.
    fn check_workers(&self, name: &str, wanted: u32, present: u32) -> Result<(), ErrorResponse> {
        let limit = self.max_requested_workers.max(u64::from(present));
        if self.max_requested_workers == 0 || u64::from(wanted) <= limit {
            return Ok(());
        }
        let message = format!(
            "{name} is {wanted}; a request may ask for 0 to {limit} workers of a model \
             (--load-request-max-instances sets the limit)"
        );
        Err(ErrorResponse::bad_request(message))
    }

    /// Opens an archive and registers it as a version of a model, without starting workers.
    async fn add(
        self: &Arc<Self>,
        url: &str,
        asked: RegistrationParameters,
    ) -> Result<Arc<Version>, ErrorResponse> {
        // A number that exceeds the engine's limit is refused with the deployment.
        if let Some(workers) =
            asked.model.min_workers.filter(|workers| !asked.at_start && *workers <= MAX_INSTANCES)
        {
            self.check_workers("initial_workers", workers, 0)?;
        }
        let settings = self.settings.clone();
        let place = url.to_owned();
        let wanted = asked.clone();
        let exiting = self.exiting.subscribe();
        let service = self.service.clone();
        let opened = blocking::run(move || {
            if !wanted.at_start && !archive::is_in_store(&settings, &place) {
                let name = wanted.model_name.as_deref().unwrap_or(&place);
                service
                    .check_registration(name, &place)
                    .map_err(|error| ErrorResponse::invalid_url(error.message))?;
            }
            super::open(&settings, &place, &wanted, &exiting)
        });
        let archive = opened.await.unwrap_or_else(|error| {
            Err(ErrorResponse::internal(format!("Failed to save model: {error}")))
        })?;
        let kept = archive.kept.clone();
        let added = self.enter(archive, asked).await;
        if added.is_err() {
            remove_download(kept).await;
        }
        added
    }

    /// Registers an archive as a version of a model.
    async fn enter(
        self: &Arc<Self>,
        archive: Archive,
        asked: RegistrationParameters,
    ) -> Result<Arc<Version>, ErrorResponse> {
        let _turn = self.turn.lock().await;
        let name = asked.model_name.clone().unwrap_or_else(|| archive.model_name.clone());
        let text = archive.version.clone();
        if self.find(&name, &text).is_ok() {
            let message = format!("Model version {text} is already registered for model {name}");
            return Err(ErrorResponse::conflict(message));
        }
        let called = self.free_name(&name, &text);
        // Reads the archive's code.
        let settings = self.settings.clone();
        let made =
            blocking::run(move || Deployment::new(&settings, Arc::new(archive), &asked, called))
                .await;
        let deployment =
            made.unwrap_or_else(|error| Err(ErrorResponse::internal(error.to_string())))?;
        let version = Arc::new(Version::new(name.clone(), text.clone(), deployment));
        let mut models = self.write();
        let model = models
            .entry(name)
            .or_insert_with(|| Model { default: text.clone(), versions: BTreeMap::new() });
        model.versions.insert(text, version.clone());
        drop(models);
        self.changed();
        Ok(version)
    }

    /// Returns a model name for the engine that no version uses yet.
    fn free_name(&self, name: &str, version: &str) -> String {
        let models = self.read();
        let taken = |called: &str| {
            models
                .values()
                .flat_map(|model| model.versions.values())
                .any(|version| *version.engine_name == *called)
        };
        if !taken(name) {
            return name.to_owned();
        }
        let wanted = format!("{name}@{version}")
            .replace(|c: char| c.is_control() || matches!(c, '/' | '\\'), "_");
        let numbered = (2..).map(|number| format!("{wanted}#{number}"));
        std::iter::once(wanted.clone())
            .chain(numbered)
            .find(|called| !taken(called))
            .unwrap_or(wanted)
    }

    /// Changes the number of workers.
    ///
    /// # Errors
    /// There is no such version, `max` is less than `min`, `min` is too large, or the workers do
    /// not start.
    pub async fn scale(
        self: &Arc<Self>,
        name: &str,
        version: &str,
        scale: Scale,
    ) -> Result<ManagementOutcome, ErrorResponse> {
        let registry = self.clone();
        let name = name.to_owned();
        let version = version.to_owned();
        run_to_completion(async move { registry.scale_now(&name, &version, scale).await }).await
    }

    async fn scale_now(
        self: &Arc<Self>,
        name: &str,
        version: &str,
        scale: Scale,
    ) -> Result<ManagementOutcome, ErrorResponse> {
        let Scale { min, max, wait } = scale;
        if max < min {
            return Err(ErrorResponse::bad_request("max_worker cannot be less than min_worker."));
        }
        let found = self.find(name, version)?;
        if min > MAX_INSTANCES {
            let message =
                format!("min_worker is {min}; allowed are whole numbers from 0 to {MAX_INSTANCES}");
            return Err(ErrorResponse::bad_request(message));
        }
        let workers = found.deployment().min_workers;
        self.check_workers("min_worker", min, workers)?;
        found.resize(min, max);
        self.changed();
        if !wait {
            found.keep_starting(self);
            return Ok(ManagementOutcome::accepted());
        }
        if let Err(error) = found.start(self).await {
            // As TorchServe does: the client gets the error, and the server tries again until
            // `maxRetryTimeoutInSec`.
            found.keep_starting(self);
            return Err(not_started(&found, &error));
        }
        let of_version =
            if version.is_empty() { String::new() } else { format!(", version: {version}") };
        Ok(ManagementOutcome::ok(format!("Workers scaled to {min} for model: {name}{of_version}")))
    }

    /// Unregisters a version (empty: the default one) and stops its workers.
    ///
    /// # Errors
    /// The version does not exist, or is the default of several versions.
    pub async fn unregister(
        self: &Arc<Self>,
        name: &str,
        version: &str,
    ) -> Result<ManagementOutcome, ErrorResponse> {
        let registry = self.clone();
        let name = name.to_owned();
        let version = version.to_owned();
        run_to_completion(async move { registry.unregister_now(&name, &version).await }).await
    }

    async fn unregister_now(
        self: &Arc<Self>,
        name: &str,
        version: &str,
    ) -> Result<ManagementOutcome, ErrorResponse> {
        let _turn = self.turn.lock().await;
        let found = self.find(name, version)?;
        let others = self
            .read()
            .get(name)
            .is_some_and(|model| model.versions.len() > 1 && model.default == found.text);
        if others {
            let message = format!("Cannot remove default version for model {name}");
            return Err(ErrorResponse::new(403, Exception::InvalidModelVersion, message));
        }
        self.remove_in_turn(&found).await;
        Ok(ManagementOutcome::ok(format!("Model \"{name}\" unregistered")))
    }

    /// Unregisters a version whose workers do not start, and stops them.
    async fn remove(self: &Arc<Self>, version: &Arc<Version>) {
        let _turn = self.turn.lock().await;
        self.remove_in_turn(version).await;
    }

    /// Unregisters a version, stops its workers and removes its files, unless it is not registered
    /// any more: then another version may have its name in the engine. The caller holds `turn`.
    async fn remove_in_turn(self: &Arc<Self>, version: &Arc<Version>) {
        if !self.take(version) {
            return;
        }
        version.stop(self).await;
        // Another version may have been registered with the same archive file.
        let kept = version.deployment().archive.kept.clone().filter(|kept| !self.uses(kept.path()));
        remove_download(kept).await;
        self.changed();
    }

    /// Removes a version from the table. If it was the default version, the first remaining version
    /// becomes the default. Returns false if the version is not registered.
    fn take(&self, version: &Arc<Version>) -> bool {
        let mut models = self.write();
        let Some(model) = models.get_mut(&version.name) else { return false };
        if !model.versions.get(&version.text).is_some_and(|known| Arc::ptr_eq(known, version)) {
            return false;
        }
        model.versions.remove(&version.text);
        match model.versions.keys().next().cloned() {
            None => drop(models.remove(&version.name)),
            Some(other) if model.default == version.text => {
                tracing::warn!(
                    "the default version {} of model {} was removed; the default version is now \
                     {other}",
                    version.text,
                    version.name
                );
                model.default = other;
            }
            Some(_) => {}
        }
        true
    }

    /// Returns whether a version uses this archive file.
    fn uses(&self, path: &Path) -> bool {
        self.deployments().iter().any(|(deployment, _)| {
            archive::local_path(&self.settings, &deployment.archive.mar_name()).as_deref()
                == Some(path)
        })
    }

    /// Makes a version the default for requests that name none.
    ///
    /// # Errors
    /// The version does not exist.
    pub fn set_default(
        &self,
        name: &str,
        version: &str,
    ) -> Result<ManagementOutcome, ErrorResponse> {
        {
            let mut models = self.write();
            let model = models.get_mut(name).ok_or_else(|| unknown(name))?;
            if !model.versions.contains_key(version) {
                return Err(unknown_version(format!(
                    "Model version {version} does not exist for model {name}"
                )));
            }
            version.clone_into(&mut model.default);
        }
        self.changed();
        Ok(ManagementOutcome::ok(format!(
            "Default version successfully updated for model \"{name}\" to \"{version}\""
        )))
    }

    /// Finds a version (empty: the default one) of a model.
    ///
    /// # Errors
    /// The model or version does not exist.
    pub fn find(&self, name: &str, version: &str) -> Result<Arc<Version>, ErrorResponse> {
        let models = self.read();
        let model = models.get(name).ok_or_else(|| unknown(name))?;
        let text = if version.is_empty() { &model.default } else { version };
        model.versions.get(text).cloned().ok_or_else(|| {
            unknown_version(format!("Model version: {text} does not exist for model: {name}"))
        })
    }

    /// Returns all versions of a model.
    ///
    /// # Errors
    /// The model does not exist.
    pub fn all_of(&self, name: &str) -> Result<Vec<Arc<Version>>, ErrorResponse> {
        let models = self.read();
        let model = models.get(name).ok_or_else(|| unknown(name))?;
        Ok(model.versions.values().cloned().collect())
    }

    /// Ends downloads and installations of packages, and the wait of requests for workers that are
    /// still loading, because the server is shutting down.
    pub fn stop_waiting(&self) {
        self.exiting.send_replace(true);
        self.read()
            .values()
            .flat_map(|model| model.versions.values())
            .for_each(|version| version.stop_waiting());
    }

    /// Returns the model that was registered at server start, if there is exactly one.
    pub fn only_startup_model(&self) -> Option<String> {
        let models = self.read();
        let mut at_start = models.iter().filter(|(_, model)| {
            model.versions.values().any(|version| version.deployment().at_start)
        });
        let (name, _) = at_start.next()?;
        at_start.next().is_none().then(|| name.clone())
    }

    fn changed(&self) {
        self.changes.send_modify(|count| *count += 1);
    }

    fn read(&self) -> RwLockReadGuard<'_, BTreeMap<String, Model>> {
        self.models.read()
    }

    fn write(&self) -> RwLockWriteGuard<'_, BTreeMap<String, Model>> {
        self.models.write()
    }
}

impl Naming for Registry {
    fn resolve(&self, name: &str, version: &str) -> Result<Option<Resolved>, InferError> {
        if !self.read().contains_key(name) {
            return Ok(None);
        }
        match self.find(name, version) {
            Ok(found) => {
                Ok(Some(Resolved { model: found.engine_name.clone(), version: found.text.clone() }))
            }
            Err(refused) => {
                Err(InferError::new(ErrorCode::NotFound, Reason::UnknownModel, refused.message))
            }
        }
    }

    fn versions(&self, name: &str) -> Vec<String> {
        self.read()
            .get(name)
            .map(|model| model.versions.keys().cloned().collect())
            .unwrap_or_default()
    }
}

/// Naming for internal requests: the engine's model names, without per-name counting.
pub struct Uncounted;

impl Naming for Uncounted {
    fn resolve(&self, _: &str, _: &str) -> Result<Option<Resolved>, InferError> {
        Ok(None)
    }

    fn versions(&self, _: &str) -> Vec<String> {
        Vec::new()
    }

    fn counts(&self) -> bool {
        false
    }
}

/// Removes the downloaded file of an archive that is no longer registered.
async fn remove_download(kept: Option<StoredFile>) {
    if let Some(kept) = kept
        && let Err(error) = blocking::run(move || kept.remove()).await
    {
        tracing::warn!("failed to remove an archive from the model store: {error}");
    }
}

/// Runs a change to completion, even if the client disconnects, so that no change is left half
/// done.
async fn run_to_completion(
    work: impl Future<Output = Result<ManagementOutcome, ErrorResponse>> + Send + 'static,
) -> Result<ManagementOutcome, ErrorResponse> {
    let done = tokio::spawn(work).await;
    done.unwrap_or_else(|error| Err(ErrorResponse::internal(format!("the task failed: {error}"))))
}

fn unknown(name: &str) -> ErrorResponse {
    ErrorResponse::not_found(format!("Model not found: {name}"))
}

fn unknown_version(message: String) -> ErrorResponse {
    ErrorResponse::new(404, Exception::ModelVersionNotFound, message)
}

fn not_started(version: &Version, error: &InferError) -> ErrorResponse {
    let reason = match &error.cause {
        Cause::Exiting => return ErrorResponse::exiting(),
        // The engine knows the model by one version.
        Cause::FailedVersions(reasons) => reasons.values().next().unwrap_or(&error.message),
        _ => &error.message,
    };
    let reason = reason.trim().trim_end_matches(';').trim_end();
    let name = &version.name;
    let text = &version.text;
    ErrorResponse::internal(format!(
        "Failed to start workers for model {name} version: {text}: {reason}"
    ))
}
