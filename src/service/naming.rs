//! Naming policies: clients may use model names that differ from the repository's.

use crate::error::InferError;

/// The model to which a client's name and version refer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Resolved {
    /// The repository's name of the model.
    pub model: String,
    /// The version as clients know it.
    pub version: String,
}

/// Translates between model names of clients and of the repository.
pub trait Naming: Send + Sync {
    /// Returns the model to which a name and a version (empty: none) refer; `None` if clients use
    /// the repository's names.
    ///
    /// # Errors
    /// The version is unknown.
    fn resolve(&self, model: &str, version: &str) -> Result<Option<Resolved>, InferError>;

    /// Returns all versions of a model as clients know them.
    fn versions(&self, model: &str) -> Vec<String>;

    /// Returns whether requests are counted by these names, if requests are counted by name at all.
    fn counts(&self) -> bool {
        true
    }
}
