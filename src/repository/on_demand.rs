//! Models that are loaded on demand: how they are configured.

/// The name of the model parameter that chooses when a model is loaded.
pub const LOAD_PARAMETER: &str = "load";

/// The name of the model parameter that keeps a loaded model if its value is a number greater than
/// 0.
pub const MIN_LOADED_PARAMETER: &str = "min_loaded";

/// The value of [`LOAD_PARAMETER`] for models that are loaded with their first request.
pub const ON_DEMAND_VALUE: &str = "on_demand";
