//! Ensembles: models that are graphs of other models. Builds and checks the graph ([`Plan`],
//! [`check`]), splits it at decoupled members ([`Stages`]), decides which step may run when
//! ([`Flow`]), tracks dependencies ([`Dependencies`]), and converts shapes between members with and
//! without batching ([`fit`]). Only makes decisions: the caller runs the members and holds the
//! tensors.

mod check;
mod dependencies;
mod explain;
mod flow;
#[cfg(test)]
#[allow(clippy::unwrap_used, clippy::indexing_slicing)]
mod flow_tests;
mod goal;
mod graph;
mod plan;
mod run;
mod shape;
mod stages;
#[cfg(test)]
#[allow(clippy::unwrap_used, clippy::indexing_slicing)]
mod tests;

pub use check::{check, check_cache};
pub use dependencies::Dependencies;
pub use flow::{Call, CallId, DEADLOCK_TEXT, Flow, Output};
pub use graph::{Step, TensorId};
pub use plan::Plan;
pub use shape::fit;
pub use stages::Stages;

/// Adds the prefix that Triton gives to every error of an ensemble's request.
pub fn in_ensemble(name: &str, message: &str) -> String {
    format!("in ensemble '{name}', {message}")
}
