//! Where models come from. A repository is a thing that can be listed and whose models can be made local: a directory, or a
//! store somewhere else of which copies are kept here.

mod namespaces;

use std::collections::BTreeMap;
use std::fmt::Debug;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::{fs, io};

use pharos::metrics::cache::Cache;
use pharos::repository::Stamp;

use super::objects::Objects;
use super::scan;
use crate::cli::Place;

/// A repository.
pub(crate) trait Source: Debug + Send + Sync {
    /// What it is called in messages: a path, an address.
    fn name(&self) -> String;

    /// The names of its models. Asked often: at each poll, and for each index.
    ///
    /// # Errors
    /// It cannot be listed.
    fn list(&self) -> io::Result<Vec<String>>;

    /// Its models, each with a fingerprint of its files. Asked at each poll.
    ///
    /// # Errors
    /// It cannot be read.
    fn look(&self) -> io::Result<Vec<(String, Stamp)>>;

    /// Whether it has a model, as far as is known without asking anybody far away.
    fn has(&self, model: &str) -> bool;

    /// The server ends: what is not to last goes now, whoever still holds it.
    fn close(&self) {}

    /// Why it cannot be read at the moment, if that is so and it goes on with what it held before.
    fn trouble(&self) -> Option<String> {
        None
    }

    /// The files of a model as they are now; `None` if there is no such model. Of what is given out nothing may change
    /// while anybody holds it, unless it is the repository itself. May take long: never called on a task of the runtime.
    ///
    /// # Errors
    /// They cannot be had.
    fn local(&self, model: &str) -> io::Result<Option<Local>>;
}

/// What has to stay while a model's files are used.
pub(crate) trait Keeper: Debug + Send + Sync {}

/// A model's files: a directory of this machine.
#[derive(Debug)]
pub(crate) struct Local {
    path: PathBuf,
    /// What is removed, with all that is in it, when nobody holds this any more.
    removed: Option<PathBuf>,
    /// Goes after that.
    _keeper: Option<Arc<dyn Keeper>>,
}

impl Local {
    /// A directory that stays when nobody holds it.
    pub(crate) fn lasting(path: PathBuf) -> Self {
        Self { path, removed: None, _keeper: None }
    }

    /// A directory that is removed with the one `above` it when nobody holds it any more, and the keeper needed until then.
    pub(crate) fn kept(path: PathBuf, above: PathBuf, keeper: Arc<dyn Keeper>) -> Self {
        Self { path, removed: Some(above), _keeper: Some(keeper) }
    }

    pub(crate) fn path(&self) -> &Path {
        &self.path
    }
}

impl Drop for Local {
    fn drop(&mut self) {
        if let Some(path) = &self.removed
            && let Err(error) = fs::remove_dir_all(path)
            && error.kind() != io::ErrorKind::NotFound
        {
            tracing::warn!("'{}' cannot be removed: {error}", path.display());
        }
    }
}

/// A directory whose directories are models.
#[derive(Debug)]
pub(crate) struct Directory(pub(crate) PathBuf);

impl Source for Directory {
    fn name(&self) -> String {
        self.0.display().to_string()
    }

    fn list(&self) -> io::Result<Vec<String>> {
        Ok(scan::directories(&self.0)?.into_iter().map(|(name, _)| name).collect())
    }

    fn look(&self) -> io::Result<Vec<(String, Stamp)>> {
        // Whatever is wrong with a model, it is told when it is loaded.
        let seen = |(name, path): (String, PathBuf)| (name, scan::stamp(&path).unwrap_or_default());
        Ok(scan::directories(&self.0)?.into_iter().map(seen).collect())
    }

    fn has(&self, model: &str) -> bool {
        !scan::is_hidden(model) && self.0.join(model).is_dir()
    }

    fn local(&self, model: &str) -> io::Result<Option<Local>> {
        Ok(self.has(model).then(|| Local::lasting(self.0.join(model))))
    }
}

/// All repositories of the server.
#[derive(Clone, Debug)]
pub(crate) struct Sources {
    all: Arc<[Box<dyn Source>]>,
    /// Models are told apart by their repositories: they are called `repository/name` here.
    namespaces: bool,
}

impl Sources {
    #[cfg(test)]
    pub(crate) fn of_directories(paths: &[PathBuf], namespaces: bool) -> Self {
        let all = paths.iter().map(|path| Box::new(Directory(path.clone())) as Box<dyn Source>).collect();
        Self { all, namespaces }
    }

    /// Needs the runtime. Copies of stores' models are kept in `copies`, or in directories that go with the server.
    ///
    /// # Errors
    /// A store cannot be used.
    pub(crate) fn new(places: &[Place], copies: Option<&Path>, cache: &Arc<Cache>) -> Result<Self, String> {
        let source = |place: &Place| -> Result<Box<dyn Source>, String> {
            Ok(match place {
                Place::Directory(path) => Box::new(Directory(path.clone())),
                Place::Objects(address) => Box::new(Objects::new(address.clone(), copies, cache.clone())?),
            })
        };
        let all = places.iter().map(source).collect::<Result<_, _>>()?;
        Ok(Self { all, namespaces: false })
    }

    /// Whether models are to be told apart by their repositories.
    pub(crate) fn with_namespaces(self, namespaces: bool) -> Self {
        Self { namespaces, ..self }
    }

    /// The names of all models, by name, each once.
    ///
    /// # Errors
    /// A repository cannot be listed; the text names it.
    pub(crate) fn list(&self) -> io::Result<Vec<String>> {
        let mut all = Vec::new();
        for source in self.all.iter() {
            let names = source.list().map_err(|error| unreadable(&source.name(), &error))?;
            all.extend(names.into_iter().map(|name| self.called(&**source, name)));
        }
        all.sort_unstable();
        all.dedup();
        Ok(all)
    }

    /// All models, each with a fingerprint of its files; one that is in several repositories, of all of them.
    ///
    /// # Errors
    /// A repository cannot be read; the text names it.
    pub(crate) fn look(&self) -> io::Result<BTreeMap<String, Stamp>> {
        let mut all = BTreeMap::new();
        for source in self.all.iter() {
            for (name, stamp) in source.look().map_err(|error| unreadable(&source.name(), &error))? {
                let name = self.called(&**source, name);
                all.entry(name).and_modify(|other| *other = Stamp::of(&(*other, stamp))).or_insert(stamp);
            }
        }
        Ok(all)
    }

    /// The server ends.
    pub(crate) fn close(&self) {
        self.all.iter().for_each(|source| source.close());
    }

    /// The repositories that cannot be read at the moment, with the reasons.
    pub(crate) fn troubles(&self) -> Vec<(String, String)> {
        self.all.iter().filter_map(|source| Some((source.name(), source.trouble()?))).collect()
    }

    /// The files of a model. Repositories that are known to have it are asked first: a store that is away must not keep a
    /// model of another repository from being loaded.
    ///
    /// # Errors
    /// No repository has the model, or more than one, or its files cannot be had.
    pub(crate) fn local(&self, model: &str) -> Result<Local, String> {
        if let Some((source, name)) = self.in_namespace(model) {
            let local = source.local(name).map_err(|error| unreadable(&source.name(), &error).to_string())?;
            return local.ok_or_else(|| format!("model '{name}' is not in '{}'", source.name()));
        }
        let (known, others): (Vec<_>, Vec<_>) =
            self.all.iter().filter(|_| !self.namespaces).partition(|source| source.has(model));
        let several = || format!("model '{model}' is in more than one repository");
        if known.len() > 1 {
            return Err(several());
        }
        for asked in [known, others] {
            let mut found = None;
            for source in asked {
                let local = source.local(model).map_err(|error| unreadable(&source.name(), &error).to_string())?;
                if local.is_some() && found.is_some() {
                    return Err(several());
                }
                found = found.or(local);
            }
            if let Some(found) = found {
                return Ok(found);
            }
        }
        let names: Vec<String> = self.all.iter().map(|source| format!("'{}'", source.name())).collect();
        Err(format!("model '{model}' is not in {}", names.join(", ")))
    }
}

fn unreadable(name: &str, error: &io::Error) -> io::Error {
    io::Error::new(error.kind(), format!("'{name}' cannot be read: {error}"))
}
