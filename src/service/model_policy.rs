//! Settings of a model that the protocol that deployed it derives from its configuration.

use std::fmt::Debug;

use crate::model::{CodeOrigin, ModelConfig};
use crate::supervisor;

/// Adjusts how the workers of a model are supervised and how its metrics name it. Called when a
/// version is loaded.
pub trait ModelPolicy: Debug + Send + Sync {
    /// Returns the time limits and restarts of the model's workers; `settings` are the server's.
    fn supervision(
        &self,
        config: &ModelConfig,
        settings: supervisor::Settings,
    ) -> supervisor::Settings;

    /// Returns the name and version under which metrics show the model, if they differ from its
    /// own.
    fn metric_name<'a>(&self, config: &'a ModelConfig) -> Option<(&'a str, &'a str)>;

    /// Returns the source of a model's code, from its parameters in the configuration of its
    /// repository. `parameter` returns the parameter of a name.
    fn origin<'a>(&self, parameter: &dyn Fn(&str) -> Option<&'a str>) -> CodeOrigin;
}
