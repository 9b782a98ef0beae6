//! Where models come from. A repository is a thing that can be listed and whose models can be made local: today that is a
//! directory, and a store somewhere else can be one by keeping copies here.

mod namespaces;

use std::fmt::Debug;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::{fs, io};

/// A repository.
pub(crate) trait Source: Debug + Send + Sync {
    /// What it is called in messages: a path, an address.
    fn name(&self) -> String;

    /// The names of its models. Asked often: at each poll, and for each index.
    ///
    /// # Errors
    /// It cannot be listed.
    fn list(&self) -> io::Result<Vec<String>>;

    /// The files of a model as they are now; `None` if there is no such model. Of what is given out nothing may change
    /// while anybody holds it, unless it is the repository itself. May take long: never called on a task of the runtime.
    ///
    /// # Errors
    /// They cannot be had.
    fn local(&self, model: &str) -> io::Result<Option<Local>>;
}

/// A model's files: a directory of this machine.
#[derive(Debug)]
pub(crate) struct Local {
    path: PathBuf,
    temporary: bool,
}

impl Local {
    /// A directory that stays when nobody holds it.
    pub(crate) fn lasting(path: PathBuf) -> Self {
        Self { path, temporary: false }
    }

    /// A directory that is removed, with all that is in it, when nobody holds it any more.
    pub(crate) fn temporary(path: PathBuf) -> Self {
        Self { path, temporary: true }
    }

    pub(crate) fn path(&self) -> &Path {
        &self.path
    }
}

impl Drop for Local {
    fn drop(&mut self) {
        if self.temporary
            && let Err(error) = fs::remove_dir_all(&self.path)
        {
            tracing::warn!("'{}' cannot be removed: {error}", self.path.display());
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
        Ok(super::scan::directories(&self.0)?.into_iter().map(|(name, _)| name).collect())
    }

    fn local(&self, model: &str) -> io::Result<Option<Local>> {
        let path = self.0.join(model);
        Ok((!super::scan::is_hidden(model) && path.is_dir()).then(|| Local::lasting(path)))
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
    pub(crate) fn of_directories(paths: &[PathBuf], namespaces: bool) -> Self {
        let all = paths.iter().map(|path| Box::new(Directory(path.clone())) as Box<dyn Source>).collect();
        Self { all, namespaces }
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

    /// The files of a model.
    ///
    /// # Errors
    /// No repository has the model, or more than one, or its files cannot be had.
    pub(crate) fn local(&self, model: &str) -> Result<Local, String> {
        if let Some((source, name)) = self.in_namespace(model) {
            let local = source.local(name).map_err(|error| unreadable(&source.name(), &error).to_string())?;
            return local.ok_or_else(|| format!("model '{name}' is not in '{}'", source.name()));
        }
        let mut found = None;
        for source in self.all.iter().filter(|_| !self.namespaces) {
            let local = source.local(model).map_err(|error| unreadable(&source.name(), &error).to_string())?;
            if local.is_some() && found.is_some() {
                return Err(format!("model '{model}' is in more than one repository"));
            }
            found = found.or(local);
        }
        found.ok_or_else(|| {
            let names: Vec<String> = self.all.iter().map(|source| format!("'{}'", source.name())).collect();
            format!("model '{model}' is not in {}", names.join(", "))
        })
    }
}

fn unreadable(name: &str, error: &io::Error) -> io::Error {
    io::Error::new(error.kind(), format!("'{name}' cannot be read: {error}"))
}
