//! Ensembles: models that are a plan over other models. What such a plan is and whether it can work ([`Plan`], [`check`]),
//! what is done again for each response of a decoupled member ([`Stages`]), which step may run when ([`Flow`]), what
//! depends on what ([`Dependencies`]), and how shapes pass between members that batch and members that do not ([`fit`]).
//! Decides only: members are run by the caller, which also has the tensors.

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

/// The prefix of every error of an ensemble's request, as Triton writes it.
pub fn in_ensemble(name: &str, message: &str) -> String {
    format!("in ensemble '{name}', {message}")
}
