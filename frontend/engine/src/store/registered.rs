//! Directories anywhere on the machine that are registered as models while the server runs.

use std::collections::BTreeMap;
use std::io;
use std::path::PathBuf;
use std::sync::Arc;

use parking_lot::{RwLock, RwLockReadGuard};
use pharos::repository::Stamp;

use super::{ModelFiles, Store, scan};

/// The registered directories by model name. Clones share them.
#[derive(Clone, Debug, Default)]
pub struct Registered(Arc<RwLock<BTreeMap<String, PathBuf>>>);

impl Registered {
    /// Registers all of these directories or none.
    ///
    /// # Errors
    /// A name that is already in use.
    pub fn add(&self, models: &BTreeMap<String, PathBuf>) -> Result<(), String> {
        let mut all = self.0.write();
        if let Some(name) = models.keys().find(|name| all.contains_key(*name)) {
            return Err(name.clone());
        }
        all.extend(models.clone());
        Ok(())
    }

    /// Unregisters models. Their files stay.
    pub fn remove<'a>(&self, names: impl IntoIterator<Item = &'a String>) {
        let mut all = self.0.write();
        for name in names {
            all.remove(name);
        }
    }

    fn all(&self) -> RwLockReadGuard<'_, BTreeMap<String, PathBuf>> {
        self.0.read()
    }
}

impl Store for Registered {
    fn name(&self) -> String {
        "registered models".to_owned()
    }

    fn list(&self) -> io::Result<Vec<String>> {
        Ok(self.all().keys().cloned().collect())
    }

    fn poll(&self) -> io::Result<Vec<(String, Stamp)>> {
        let all = self.all().clone();
        Ok(all
            .into_iter()
            .map(|(name, path)| (name, scan::stamp(&path).unwrap_or_default()))
            .collect())
    }

    fn has(&self, model: &str) -> bool {
        self.all().contains_key(model)
    }

    fn names_models(&self) -> bool {
        true
    }

    fn local(&self, model: &str) -> io::Result<Option<ModelFiles>> {
        let path = self.all().get(model).cloned();
        Ok(path.filter(|path| path.is_dir()).map(|path| ModelFiles::permanent(path).by_request()))
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn names_are_unique() {
        let registered = Registered::default();
        let models = |names: &[&str]| {
            names.iter().map(|name| ((*name).to_owned(), std::env::temp_dir())).collect()
        };
        registered.add(&models(&["a", "b"])).unwrap();
        assert_eq!(registered.add(&models(&["c", "b"])).unwrap_err(), "b");
        assert_eq!(registered.list().unwrap(), ["a", "b"]);
        assert_eq!(registered.local("a").unwrap().unwrap().path(), std::env::temp_dir());
        assert!(registered.local("c").unwrap().is_none());
        registered.remove(&["b".to_owned()]);
        registered.add(&models(&["b"])).unwrap();
    }
}
