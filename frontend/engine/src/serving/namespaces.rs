//! Resolves model names where several repositories may contain models of the same name
//! (`--model-namespacing`).

use std::collections::BTreeSet;

use pharos::error::InferError;
use pharos::id::bare_name;

use super::Snapshot;

impl Snapshot {
    /// Returns the full name of the model that a request names, either with its repository or by a
    /// unique bare name.
    ///
    /// # Errors
    /// The name is ambiguous.
    pub(crate) fn resolve<'a>(&'a self, name: &'a str) -> Result<&'a str, InferError> {
        if !self.namespaces || self.states.model(name).is_some() {
            return Ok(name);
        }
        let candidates = self.with_bare_name(name);
        // A request may load a model, so its name must mean the same whether or not it is loaded.
        let mut wanted = candidates.clone();
        wanted
            .retain(|called| self.wanted.contains(*called) || self.on_demand.contains_key(*called));
        match (candidates.as_slice(), wanted.as_slice()) {
            ([], _) => Ok(name),
            ([only], _) | (_, [only]) => Ok(only),
            (all, _) => Err(ambiguous(name, all)),
        }
    }

    /// Returns all known models with a bare name.
    pub(crate) fn with_bare_name(&self, name: &str) -> Vec<&str> {
        self.states
            .iter()
            .map(|(called, _)| called)
            .filter(|called| bare_name(called) == name)
            .collect()
    }

    /// Returns the ensembles whose members may change with a model: its dependents, and ensembles
    /// whose members have the same bare name.
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

/// An ambiguous name: Triton's text with the candidates.
pub(crate) fn ambiguous(name: &str, all: &[&str]) -> InferError {
    let shown: Vec<String> = all.iter().map(|called| format!("'{called}'")).collect();
    InferError::invalid(format!(
        "There are {} identifiers of model '{name}' in global map, model namespace must be \
         provided to resolve ambiguity. They are {}",
        all.len(),
        shown.join(", ")
    ))
}
