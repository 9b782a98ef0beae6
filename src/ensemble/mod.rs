//! Ensembles: models that are a plan over other models. What such a plan is and whether it can work ([`Plan`], [`check`]),
//! which step may run when ([`Run`]), what depends on what ([`Dependencies`]), and how shapes pass between members that
//! batch and members that do not ([`fit`]). Decides only: members are run by the caller, which also has the tensors.

mod check;
mod dependencies;
mod plan;
mod run;
mod shape;
#[cfg(test)]
#[allow(clippy::unwrap_used, clippy::indexing_slicing)]
mod tests;

pub use check::check;
pub use dependencies::Dependencies;
pub use plan::{Plan, Step, TensorId};
pub use run::{DEADLOCK_TEXT, Run};
pub use shape::fit;

/// The prefix of every error of an ensemble's request, as Triton writes it.
pub fn in_ensemble(name: &str, message: &str) -> String {
    format!("in ensemble '{name}', {message}")
}
