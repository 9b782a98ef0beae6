//! Names and numbers that identify things. No behaviour.

use std::fmt;
use std::sync::Arc;

/// One accepted inference request, unique for the life of the frontend.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct RequestId(pub u64);

/// One model instance: a worker process running one copy of one model version. Unique for the life of the frontend; a
/// restarted instance keeps its number.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct InstanceId(pub u32);

/// A model name with a version number, cheap to clone. Displayed as `name/version`.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ModelVersion {
    /// The model's name.
    pub name: Arc<str>,
    /// The version: the number of its directory, 1 or greater.
    pub version: u64,
}

impl ModelVersion {
    /// Puts a name and a version together.
    pub fn new(name: impl Into<Arc<str>>, version: u64) -> Self {
        Self { name: name.into(), version }
    }
}

impl fmt::Display for ModelVersion {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.name, self.version)
    }
}
