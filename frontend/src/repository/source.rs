//! Where models come from. A repository is a thing that can be listed and whose models can be made local: a directory, or a
//! store somewhere else of which copies are kept here.

mod namespaces;
mod registered;
mod single;

use std::collections::BTreeMap;
use std::fmt::Debug;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::{fs, io};

use pharos::metrics::cache::Cache;
use pharos::repository::{DUPLICATE, Stamp};

use super::given::Places;
use super::objects::Objects;
use super::{Settings, scan};
use crate::cli::Place;
pub(crate) use registered::Registered;
use single::Single;

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

    /// The name of the model that it is, if it is no directory of models.
    fn is_model(&self) -> Option<String> {
        None
    }

    /// Whether it names its models itself, whatever their configurations call them.
    fn names_models(&self) -> bool {
        false
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

/// A directory whose directories are models, or a place that is a model itself.
#[derive(Debug)]
pub(crate) struct Directory {
    path: PathBuf,
    /// The name of the model that the place is.
    model_name: Option<String>,
    /// Links to the files of a model whose place has no version directory.
    links: Places,
}

impl Directory {
    pub(crate) fn new(path: PathBuf, model_name: Option<String>) -> Self {
        Self { path, model_name, links: Places::default() }
    }

    fn single(&self) -> io::Result<Option<Single>> {
        Single::find(&self.path, self.model_name.as_deref())
    }

    /// Whether a directory of models has this one.
    fn has_directory(&self, model: &str) -> bool {
        !scan::is_hidden(model) && self.path.join(model).is_dir()
    }
}

impl Source for Directory {
    fn name(&self) -> String {
        self.path.display().to_string()
    }

    fn list(&self) -> io::Result<Vec<String>> {
        Ok(match self.single()? {
            Some(single) => vec![single.name],
            None => scan::directories(&self.path)?.into_iter().map(|(name, _)| name).collect(),
        })
    }

    fn close(&self) {
        self.links.close();
    }

    fn look(&self) -> io::Result<Vec<(String, Stamp)>> {
        if let Some(single) = self.single()? {
            let stamp = single.stamp();
            return Ok(vec![(single.name, stamp)]);
        }
        // Whatever is wrong with a model, it is told when it is loaded.
        let seen = |(name, path): (String, PathBuf)| (name, scan::stamp(&path).unwrap_or_default());
        Ok(scan::directories(&self.path)?.into_iter().map(seen).collect())
    }

    fn has(&self, model: &str) -> bool {
        match self.single() {
            Ok(Some(single)) => single.name == model,
            _ => self.has_directory(model),
        }
    }

    fn is_model(&self) -> Option<String> {
        self.single().ok().flatten().map(|single| single.name)
    }

    fn local(&self, model: &str) -> io::Result<Option<Local>> {
        match self.single()? {
            Some(single) if single.name == model => single.local(&self.links).map(Some),
            Some(_) => Ok(None),
            None => Ok(self.has_directory(model).then(|| Local::lasting(self.path.join(model)))),
        }
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
        let all = paths.iter().map(|path| Box::new(Directory::new(path.clone(), None)) as Box<dyn Source>).collect();
        Self { all, namespaces }
    }

    /// Needs the runtime. Copies of stores' models are kept where the settings say, or in directories that go with the server.
    ///
    /// # Errors
    /// A store cannot be used.
    pub(crate) fn new(settings: &Settings, cache: &Arc<Cache>) -> Result<Self, String> {
        let copies = settings.cache_directory.as_deref();
        let source = |place: &Place| -> Result<Box<dyn Source>, String> {
            Ok(match place {
                Place::Directory(path) => Box::new(Directory::new(path.clone(), settings.model_name.clone())),
                Place::Objects(address) => Box::new(Objects::new(address.clone(), copies, cache.clone())?),
            })
        };
        let registered = settings.registered.clone().map(|registered| Ok(Box::new(registered) as Box<dyn Source>));
        let all = settings.repositories.iter().map(source).chain(registered).collect::<Result<_, _>>()?;
        Ok(Self { all, namespaces: false })
    }

    fn sources(&self) -> impl Iterator<Item = &dyn Source> {
        self.all.iter().map(|source| &**source)
    }

    /// Whether models are to be told apart by their repositories.
    pub(crate) fn with_namespaces(self, namespaces: bool) -> Self {
        Self { namespaces, ..self }
    }

    /// All models by name, each with the number of repositories that have it.
    ///
    /// # Errors
    /// A repository cannot be listed; the text names it.
    pub(crate) fn list(&self) -> io::Result<BTreeMap<String, usize>> {
        let mut all = BTreeMap::new();
        for source in self.all.iter() {
            let names = source.list().map_err(|error| unreadable(&source.name(), &error))?;
            for name in names {
                *all.entry(self.called(&**source, name)).or_default() += 1;
            }
        }
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

    /// Says at start which places are models themselves, and that there are no models. Blocks.
    pub(crate) fn announce(&self, found: usize) {
        for source in self.all.iter() {
            if let Some(model) = source.is_model() {
                tracing::info!(%model, "'{}' is a model, not a directory of models", source.name());
            }
        }
        if found == 0 {
            let names: Vec<String> = self.all.iter().map(|source| format!("'{}'", source.name())).collect();
            tracing::warn!(
                "no models found in {}: a model repository has a directory for each model, such as NAME/1/model.onnx, with \
                 its configuration in NAME/config.pbtxt; a directory that holds one model file, such as model.onnx, is \
                 served too",
                names.join(", ")
            );
        }
    }

    /// Whether a model is called as its repository says, whatever its configuration calls it.
    pub(crate) fn name_model(&self, model: &str) -> bool {
        match self.in_namespace(model) {
            Some((source, _)) => source.names_models(),
            None => self.sources().any(|source| source.names_models() && source.has(model)),
        }
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
            self.sources().filter(|_| !self.namespaces).partition(|source| source.has(model));
        let several = |sources: &[&dyn Source]| {
            let names: Vec<String> = sources.iter().map(|source| format!("'{}'", source.name())).collect();
            Err(format!("{DUPLICATE}: {}", names.join(", ")))
        };
        if known.len() > 1 {
            return several(&known);
        }
        for asked in [known, others] {
            let mut found: Option<(&dyn Source, Local)> = None;
            for source in asked {
                let local = source.local(model).map_err(|error| unreadable(&source.name(), &error).to_string())?;
                let Some(local) = local else { continue };
                if let Some((other, _)) = &found {
                    return several(&[*other, source]);
                }
                found = Some((source, local));
            }
            if let Some((_, found)) = found {
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
