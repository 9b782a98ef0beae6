//! Naming policies: model names of clients that differ from the repository's.

use crate::error::InferError;

/// The model that a client's name and version mean.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Resolved {
    /// The repository's name of the model.
    pub model: String,
    /// The version as clients know it.
    pub version: String,
}

/// Translates between model names of clients and of the repository.
pub trait Naming: Send + Sync {
    /// The model that a client means by a name and a version (empty: none); `None` if the repository's names are used.
    ///
    /// # Errors
    /// The version is unknown.
    fn resolve(&self, model: &str, version: &str) -> Result<Option<Resolved>, InferError>;

    /// All versions of a model as clients know them.
    fn versions(&self, model: &str) -> Vec<String>;

    /// Whether requests are counted by these names, if requests are counted by name at all.
    fn counts(&self) -> bool {
        true
    }
}
