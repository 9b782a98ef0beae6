//! A repository in a local directory.

use std::io;
use std::path::PathBuf;

use pharos::repository::{Stamp, check_model_name};

use super::files::{ModelFiles, TemporaryDirectories};
use super::single_model::{Single, is_model};
use super::{Store, scan};

/// A directory with a subdirectory for each model, or a single model.
#[derive(Debug)]
pub(crate) struct Directory {
    path: PathBuf,
    /// The name of the single model.
    model_name: Option<String>,
    /// Links to the files of a single model without version directories.
    links: TemporaryDirectories,
}

impl Directory {
    pub(crate) fn new(path: PathBuf, model_name: Option<String>) -> Self {
        Self { path, model_name, links: TemporaryDirectories::default() }
    }

    fn single(&self) -> io::Result<Option<Single>> {
        Single::find(&self.path, self.model_name.as_deref())
    }

    /// Returns whether this is a directory of models with the directory of this model, without
    /// listing the others.
    fn holds(&self, model: &str) -> bool {
        is_name(model) && is_model(&self.path.join(model))
    }

    /// Returns whether a directory of models contains this model.
    fn has_directory(&self, model: &str) -> bool {
        is_name(model) && self.path.join(model).is_dir()
    }
}

impl Store for Directory {
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

    fn poll(&self) -> io::Result<Vec<(String, Stamp)>> {
        if let Some(single) = self.single()? {
            let stamp = single.stamp();
            return Ok(vec![(single.name, stamp)]);
        }
        let mut stamps = Vec::new();
        for (name, path) in scan::directories(&self.path)? {
            // Errors of a model are reported when it is loaded.
            stamps.push((name, scan::stamp(&path).unwrap_or_default()));
        }
        Ok(stamps)
    }

    fn has(&self, model: &str) -> bool {
        self.holds(model)
            || match self.single() {
                Ok(Some(single)) => single.name == model,
                _ => self.has_directory(model),
            }
    }

    fn single_model(&self) -> Option<String> {
        self.single().ok().flatten().map(|single| single.name)
    }

    /// The configured name of a single model has precedence over the one in its configuration,
    /// because deployments choose a name without changing the files.
    fn names_models(&self) -> bool {
        self.model_name.is_some() && self.single_model().is_some()
    }

    fn local(&self, model: &str) -> io::Result<Option<ModelFiles>> {
        if self.holds(model) {
            return Ok(Some(ModelFiles::permanent(self.path.join(model))));
        }
        match self.single()? {
            Some(single) if single.name == model => single.local(&self.links).map(Some),
            Some(_) => Ok(None),
            None => {
                Ok(self.has_directory(model).then(|| ModelFiles::permanent(self.path.join(model))))
            }
        }
    }
}

/// Returns whether a model of a directory may have this name. A name may come from a client, also
/// as the name of a member of an ensemble, and a path would lead out of the repository.
fn is_name(model: &str) -> bool {
    !scan::is_hidden(model) && check_model_name(model).is_ok()
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use std::fs;

    use super::*;

    #[test]
    fn no_name_leads_out_of_the_repository() {
        let folder = tempfile::tempdir().unwrap();
        let top = folder.path().canonicalize().unwrap();
        let inside = top.join("models");
        let outside = top.join("outside");
        for directory in [&inside, &outside] {
            fs::create_dir_all(directory.join("m/1")).unwrap();
            fs::write(directory.join("m/config.pbtxt"), "").unwrap();
        }
        let store = Directory::new(inside.clone(), None);
        assert_eq!(store.local("m").unwrap().unwrap().path(), inside.join("m"));
        let absolute = outside.join("m").display().to_string();
        for name in [absolute.as_str(), "../outside/m", "m/../../outside/m", "m/1", "", ".", ".."] {
            assert!(!store.has(name) && store.local(name).unwrap().is_none(), "{name:?}");
        }
    }
}
