//! Model repositories: directories, object stores (S3, GCS, Azure), directories registered at run
//! time, and files that clients send with a load. A repository lists its models and provides the
//! files of a model as a local directory. Must not depend on which models are loaded.

mod address;
mod directory;
mod files;
pub(crate) mod identity;
mod namespaces;
mod objects;
mod overrides;
mod registered;
pub(crate) mod scan;
mod single_model;

use std::collections::BTreeMap;
use std::fmt::Debug;
use std::io;
use std::path::PathBuf;
use std::sync::Arc;

use pharos::metrics::cache::Cache;
use pharos::repository::{DUPLICATE, Stamp, check_model_name};
use tokio::sync::watch;

pub use address::{Location, Locations};
use directory::Directory;
pub(crate) use files::{ModelFiles, TemporaryDirectories};
use objects::ObjectRepository;
pub(crate) use overrides::Overrides;
pub use registered::Registered;

/// The sources of models.
#[derive(Clone, Debug)]
pub struct Settings {
    /// The model repositories.
    pub locations: Vec<Location>,
    /// Directories that are registered as models while the server runs, if this is possible.
    pub registered: Option<Registered>,
    /// Whether several repositories may contain models of the same name.
    pub namespaces: bool,
    /// The name of the model in a repository that is a single model.
    pub model_name: Option<String>,
    /// The directory for copies of a store's objects; `None` for temporary directories.
    pub cache_directory: Option<PathBuf>,
}

/// A repository.
pub(crate) trait Store: Debug + Send + Sync {
    /// Returns its name for messages: a path or an address.
    fn name(&self) -> String;

    /// Returns the names of its models. Called for each poll and each index.
    ///
    /// # Errors
    /// The repository cannot be listed.
    fn list(&self) -> io::Result<Vec<String>>;

    /// Returns its models, each with a fingerprint of its files. Called for each poll.
    ///
    /// # Errors
    /// The repository cannot be read.
    fn poll(&self) -> io::Result<Vec<(String, Stamp)>>;

    /// Returns whether it contains a model, as far as known without a request to a remote store.
    fn has(&self, model: &str) -> bool;

    /// Removes temporary files, also files in use, because the server exits.
    fn close(&self) {}

    /// Returns why it cannot be read now, while the last known contents are used.
    fn failure(&self) -> Option<String> {
        None
    }

    /// Returns the name of the model if the repository is a single model instead of a directory of
    /// models.
    fn single_model(&self) -> Option<String> {
        None
    }

    /// Returns whether the repository, and not the configurations, determines the names of its
    /// models.
    fn names_models(&self) -> bool {
        false
    }

    /// Returns the current files of a model; `None` if there is no such model. Returned copies do
    /// not change while they are held; a directory repository returns its own directory. Blocks,
    /// possibly for long.
    ///
    /// # Errors
    /// The files cannot be read or fetched.
    fn local(&self, model: &str) -> io::Result<Option<ModelFiles>>;
}

/// All repositories of the server.
#[derive(Clone, Debug)]
pub(crate) struct Stores {
    all: Arc<[Box<dyn Store>]>,
    /// Whether models are named `repository/name`.
    namespaces: bool,
}

impl Stores {
    #[cfg(test)]
    pub(crate) fn of_directories(paths: &[PathBuf], namespaces: bool) -> Self {
        let all = paths
            .iter()
            .map(|path| Box::new(Directory::new(path.clone(), None)) as Box<dyn Store>)
            .collect();
        Self { all, namespaces }
    }

    /// Creates all repositories. Copies of objects are kept in the configured directory, or in
    /// temporary directories. Requests to remote stores end when `exiting` becomes true. Needs a
    /// Tokio runtime.
    ///
    /// # Errors
    /// A store cannot be used.
    pub(crate) fn new(
        settings: &Settings,
        cache: &Arc<Cache>,
        exiting: &watch::Receiver<bool>,
    ) -> Result<Self, String> {
        let copies = settings.cache_directory.as_deref();
        let mut all: Vec<Box<dyn Store>> = Vec::new();
        for location in &settings.locations {
            all.push(match location {
                Location::Directory(path) => {
                    Box::new(Directory::new(path.clone(), settings.model_name.clone()))
                }
                Location::Objects(address) => Box::new(ObjectRepository::new(
                    address.clone(),
                    copies,
                    cache.clone(),
                    exiting.clone(),
                )?),
            });
        }
        if let Some(registered) = settings.registered.clone() {
            all.push(Box::new(registered));
        }
        Ok(Self { all: all.into(), namespaces: settings.namespaces })
    }

    fn stores(&self) -> impl Iterator<Item = &dyn Store> {
        self.all.iter().map(|store| &**store)
    }

    /// Returns all models by name, each with the number of repositories that contain it.
    ///
    /// # Errors
    /// A repository cannot be listed; the text names it.
    pub(crate) fn list(&self) -> io::Result<BTreeMap<String, usize>> {
        let mut all = BTreeMap::new();
        for store in self.all.iter() {
            let names = store.list().map_err(|error| unreadable(&store.name(), &error))?;
            for name in names {
                *all.entry(self.full_name(&**store, name)).or_default() += 1;
            }
        }
        Ok(all)
    }

    /// Returns all models, each with a fingerprint of its files in all repositories that contain
    /// it.
    ///
    /// # Errors
    /// A repository cannot be read; the text names it.
    pub(crate) fn poll(&self) -> io::Result<BTreeMap<String, Stamp>> {
        let mut all = BTreeMap::new();
        for store in self.all.iter() {
            for (name, stamp) in store.poll().map_err(|error| unreadable(&store.name(), &error))? {
                let name = self.full_name(&**store, name);
                all.entry(name)
                    .and_modify(|other| *other = Stamp::of(&(*other, stamp)))
                    .or_insert(stamp);
            }
        }
        Ok(all)
    }

    /// Logs at start which repositories are single models, and warns if there are no models.
    /// Blocks.
    pub(crate) fn announce(&self, is_empty: bool) {
        for store in self.all.iter() {
            if let Some(model) = store.single_model() {
                tracing::info!(%model, "'{}' is a model, not a directory of models", store.name());
            }
        }
        if is_empty {
            tracing::warn!(
                "no models found in {}: a model repository has a directory for each model, such \
                 as NAME/1/model.onnx, with its configuration in NAME/config.pbtxt; a directory \
                 that holds one model file, such as model.onnx, is served too",
                names(self.stores())
            );
        }
    }

    /// Returns whether the repository, and not the configuration, determines the name of a model.
    pub(crate) fn name_model(&self, model: &str) -> bool {
        match self.in_namespace(model) {
            Some((store, _)) => store.names_models(),
            None => self.stores().any(|store| store.names_models() && store.has(model)),
        }
    }

    /// Removes temporary files, because the server exits.
    pub(crate) fn close(&self) {
        self.all.iter().for_each(|store| store.close());
    }

    /// Returns the repositories that cannot be read now, with the reasons.
    pub(crate) fn failure_reasons(&self) -> Vec<(String, String)> {
        self.all.iter().filter_map(|store| Some((store.name(), store.failure()?))).collect()
    }

    /// Returns the files of a model. Searches repositories known to contain it first, so that an
    /// unreachable store does not block loading a model of another repository.
    ///
    /// # Errors
    /// No repository contains the model, or several do, or its files cannot be read.
    pub(crate) fn local(&self, model: &str) -> Result<ModelFiles, LocalError> {
        if let Some((store, name)) = self.in_namespace(model) {
            let local = store.local(name).map_err(|error| LocalError::unreadable(store, &error))?;
            return local.ok_or_else(|| LocalError::NotFound(why_not_in([store], name)));
        }
        if self.namespaces {
            return Err(self.why_unresolved(model));
        }
        let (known, others) = self.stores().partition::<Vec<_>, _>(|store| store.has(model));
        if known.len() > 1 {
            return Err(in_several(known));
        }
        for candidates in [known, others] {
            let mut found: Option<(&dyn Store, ModelFiles)> = None;
            for store in candidates {
                let local =
                    store.local(model).map_err(|error| LocalError::unreadable(store, &error))?;
                let Some(local) = local else { continue };
                if let Some((other, _)) = &found {
                    return Err(in_several([*other, store]));
                }
                found = Some((store, local));
            }
            if let Some((_, found)) = found {
                return Ok(found);
            }
        }
        Err(self.not_found(model))
    }

    fn not_found(&self, model: &str) -> LocalError {
        LocalError::NotFound(why_not_in(self.stores(), model))
    }
}

/// Why the repositories have no files of a model.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum LocalError {
    /// No repository contains the model, or a repository cannot be read.
    NotFound(String),
    /// Several repositories contain the model.
    Ambiguous(String),
}

impl LocalError {
    /// Returns the text of the error.
    pub(crate) fn into_text(self) -> String {
        match self {
            Self::NotFound(text) | Self::Ambiguous(text) => text,
        }
    }

    fn unreadable(store: &dyn Store, error: &io::Error) -> Self {
        Self::NotFound(unreadable(&store.name(), error).to_string())
    }
}

/// Returns why none of these repositories has a model. Blocks.
fn why_not_in<'a>(stores: impl IntoIterator<Item = &'a dyn Store>, model: &str) -> String {
    let Err(reason) = check_model_name(model) else {
        return format!("model '{model}' is not in {}", names(stores));
    };
    // No store returns the files of such a model, but it may list the name.
    let listing = stores
        .into_iter()
        .find(|store| store.list().is_ok_and(|names| names.iter().any(|name| name == model)));
    match listing {
        Some(store) => format!("{reason}: rename its directory in '{}'", store.name()),
        None => reason,
    }
}

/// Returns the error for a model that is in several repositories.
fn in_several<'a>(stores: impl IntoIterator<Item = &'a dyn Store>) -> LocalError {
    LocalError::Ambiguous(format!("{DUPLICATE}: {}", names(stores)))
}

/// Returns the names of repositories, for messages.
fn names<'a>(stores: impl IntoIterator<Item = &'a dyn Store>) -> String {
    let names: Vec<String> =
        stores.into_iter().map(|store| format!("'{}'", store.name())).collect();
    names.join(", ")
}

fn unreadable(name: &str, error: &io::Error) -> io::Error {
    io::Error::new(error.kind(), format!("'{name}' cannot be read: {error}"))
}
