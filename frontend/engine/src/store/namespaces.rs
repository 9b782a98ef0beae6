//! Models of the same name in several repositories (`--model-namespacing`). Each has a full name,
//! `REPOSITORY/NAME`. A bare name means the only model of that name, or, for a member of an
//! ensemble, the one in the ensemble's repository.

use std::io;

use pharos::id::ModelName;

use super::{LocalError, Store, Stores, in_several, unreadable};

impl Stores {
    /// Returns whether models of different repositories are distinct.
    pub(crate) fn namespaces(&self) -> bool {
        self.namespaces
    }

    /// Returns the full name of a model of a repository.
    pub(super) fn full_name(&self, store: &dyn Store, name: String) -> String {
        if self.namespaces { format!("{}/{name}", store.name()) } else { name }
    }

    /// Splits a full name into its repository and the bare name; `None` if it has no repository.
    pub(super) fn in_namespace<'a>(&self, called: &'a str) -> Option<(&dyn Store, &'a str)> {
        let after = |store: &dyn Store| {
            called.strip_prefix(&store.name())?.strip_prefix('/').filter(|name| !name.contains('/'))
        };
        let mut stores = self.all.iter().filter(|_| self.namespaces);
        stores.find_map(|store| Some((&**store, after(&**store)?)))
    }

    /// Returns the model name of a full name.
    pub(crate) fn model_name(&self, called: &str) -> ModelName {
        match self.in_namespace(called) {
            Some((store, name)) => ModelName::in_namespace(&store.name(), name),
            None => ModelName::new(called),
        }
    }

    /// Returns the part of a name that a client may choose freely.
    pub(crate) fn without_namespace<'a>(&self, called: &'a str) -> &'a str {
        self.in_namespace(called).map_or(called, |(_, name)| name)
    }

    /// Returns the full names of the models of this name: one for each repository that contains it,
    /// or the name itself if it is a full name. Blocks.
    ///
    /// # Errors
    /// A repository cannot be listed.
    pub(crate) fn of_name(&self, name: &str) -> io::Result<Vec<String>> {
        if !self.namespaces || self.in_namespace(name).is_some() {
            return Ok(vec![name.to_owned()]);
        }
        let mut found = Vec::new();
        for store in self.all.iter() {
            let names = store.list().map_err(|error| unreadable(&store.name(), &error))?;
            if names.iter().any(|other| other == name) {
                found.push(self.full_name(&**store, name.to_owned()));
            }
        }
        found.dedup();
        Ok(found)
    }

    /// Returns why a name without a repository denotes no model. Blocks.
    pub(super) fn why_unresolved(&self, name: &str) -> LocalError {
        match self.of_name(name) {
            Ok(all) if all.len() > 1 => {
                in_several(all.iter().filter_map(|called| Some(self.in_namespace(called)?.0)))
            }
            Ok(_) => self.not_found(name),
            Err(error) => LocalError::NotFound(error.to_string()),
        }
    }

    /// Returns the full name of a member of an ensemble: the model of this name in `namespace`, or
    /// in the ensemble's repository if that is empty, or else the only one of the name. Returns an
    /// unknown or ambiguous name unchanged. Blocks.
    pub(crate) fn member(&self, ensemble: &str, namespace: &str, name: &str) -> String {
        if !self.namespaces {
            return name.to_owned();
        }
        let all = self.of_name(name).unwrap_or_default();
        let of_ensemble = self.model_name(ensemble);
        let first =
            Some(namespace).filter(|namespace| !namespace.is_empty()).or(of_ensemble.namespace());
        let beside = all.iter().find(|called| self.model_name(called).namespace() == first);
        match (beside, all.as_slice()) {
            (Some(called), _) => called.clone(),
            (None, [only]) => only.clone(),
            (None, _) => name.to_owned(),
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use std::collections::BTreeMap;
    use std::fs;
    use std::path::PathBuf;

    use pharos::repository::DUPLICATE;
    use tempfile::TempDir;

    use super::*;

    fn stores(namespaces: bool) -> (TempDir, Stores, [String; 2]) {
        let folder = tempfile::tempdir().unwrap();
        let [a, b] = ["a", "b"].map(|name| folder.path().join(name));
        for path in [a.join("same"), b.join("same"), b.join("only")] {
            fs::create_dir_all(path).unwrap();
        }
        let shown = [&a, &b].map(|path: &PathBuf| path.display().to_string());
        let stores = Stores::of_directories(&[a, b], namespaces);
        (folder, stores, shown)
    }

    #[test]
    fn full_names_include_the_repository() {
        let (_folder, stores, [a, b]) = stores(true);
        assert_eq!(
            stores.list().unwrap().into_keys().collect::<Vec<_>>(),
            [format!("{a}/same"), format!("{b}/only"), format!("{b}/same")]
        );
        assert_eq!(stores.of_name("same").unwrap(), [format!("{a}/same"), format!("{b}/same")]);
        assert_eq!(stores.of_name("only").unwrap(), [format!("{b}/only")]);
        assert!(stores.of_name("none").unwrap().is_empty());
        let called = format!("{b}/same");
        assert_eq!(stores.of_name(&called).unwrap(), std::slice::from_ref(&called));
        assert_eq!(stores.local(&called).unwrap().path().display().to_string(), called);
        for nowhere in [
            format!("{a}/only"),
            "same".to_owned(),
            format!("{a}/../b/same"),
            "/etc/same".to_owned(),
        ] {
            assert!(stores.local(&nowhere).is_err(), "{nowhere}");
        }
        assert_eq!(
            stores.local("same").unwrap_err(),
            LocalError::Ambiguous(format!("{DUPLICATE}: '{a}', '{b}'"))
        );
        let absent = LocalError::NotFound(format!("model 'none' is not in '{a}', '{b}'"));
        assert_eq!(stores.local("none").unwrap_err(), absent);
        assert_eq!(
            (stores.without_namespace(&called), stores.without_namespace("x/same")),
            ("same", "x/same")
        );
    }

    #[test]
    fn members_are_searched_in_the_ensembles_repository_first() {
        let (_folder, stores, [a, b]) = stores(true);
        let ensemble = format!("{a}/ensemble");
        for (namespace, name, expected) in [
            ("", "same", format!("{a}/same")),
            (b.as_str(), "same", format!("{b}/same")),
            ("", "only", format!("{b}/only")),
            (a.as_str(), "only", format!("{b}/only")),
            ("elsewhere", "same", "same".to_owned()),
            ("", "none", "none".to_owned()),
        ] {
            assert_eq!(stores.member(&ensemble, namespace, name), expected, "{namespace} {name}");
        }
    }

    #[test]
    fn without_namespaces_names_are_unchanged() {
        let (_folder, stores, [a, b]) = stores(false);
        assert_eq!(
            stores.list().unwrap(),
            BTreeMap::from([("only".to_owned(), 1), ("same".to_owned(), 2)])
        );
        assert_eq!(stores.of_name("same").unwrap(), ["same"]);
        assert_eq!(stores.member("ensemble", &b, "same"), "same");
        assert_eq!(
            stores.local("same").unwrap_err(),
            LocalError::Ambiguous(format!("{DUPLICATE}: '{a}', '{b}'"))
        );
        assert!(stores.local(&format!("{a}/same")).is_err());
    }
}
