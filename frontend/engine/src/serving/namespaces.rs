//! The models that a name means where several repositories may have models of the same name (`--model-namespacing`).

use std::collections::BTreeSet;

use pharos::error::InferError;
use pharos::id::bare_name;

use super::Snapshot;

impl Snapshot {
    /// The full name of the model that a request names: with its repository, or by its bare name if that is unique.
    ///
    /// # Errors
    /// The name is ambiguous.
    pub(crate) fn resolve<'a>(&'a self, name: &'a str) -> Result<&'a str, InferError> {
        if !self.namespaces || self.states.model(name).is_some() {
            return Ok(name);
        }
        let candidates = self.with_bare_name(name);
        let wanted: Vec<&str> = candidates.iter().copied().filter(|called| self.wanted.contains(*called)).collect();
        match (candidates.as_slice(), wanted.as_slice()) {
            ([], _) => Ok(name),
            ([only], _) | (_, [only]) => Ok(only),
            (all, _) => Err(ambiguous(name, all)),
        }
    }

    /// All known models of a bare name.
    pub(crate) fn with_bare_name(&self, name: &str) -> Vec<&str> {
        self.states.iter().map(|(called, _)| called).filter(|called| bare_name(called) == name).collect()
    }

    /// Ensembles whose members may change with a model: those that depend on it, and those that take another model of its
    /// bare name, or none, and could take this one.
    pub(crate) fn touched_by(&self, changed: &str) -> Vec<String> {
        let mut touched: Vec<&str> = self.dependencies.dependents(changed);
        if self.namespaces {
            let name = bare_name(changed);
            for ensemble in self.dependencies.with_member(|member| bare_name(member) == name) {
                touched.push(ensemble);
                touched.extend(self.dependencies.dependents(ensemble));
            }
        }
        let mut found = BTreeSet::new();
        touched.retain(|ensemble| found.insert(*ensemble));
        touched.into_iter().map(str::to_owned).collect()
    }
}

/// Triton's text, with the candidates.
pub(crate) fn ambiguous(name: &str, all: &[&str]) -> InferError {
    let shown: Vec<String> = all.iter().map(|called| format!("'{called}'")).collect();
    InferError::invalid(format!(
        "There are {} identifiers of model '{name}' in global map, model namespace must be provided to resolve ambiguity. They are \
         {}",
        all.len(),
        shown.join(", ")
    ))
}
