//! The goal of a stage: which steps it runs, and which tensors it keeps for which consumers.

use std::sync::Arc;

use super::graph::TensorId;
use super::plan::Plan;

/// The goal of a stage for a request: the same each time that the stage runs.
#[derive(Debug)]
pub(super) struct Goal {
    /// Whether each step of the plan runs in this stage.
    pub(super) needed: Vec<bool>,
    /// The number of consumers of each tensor: steps of this stage, and the end of the stage.
    pub(super) consumer_counts: Vec<usize>,
    /// The tensors that the decoupled step at the end of the stage, or the response, consumes;
    /// each once.
    pub(super) outputs: Vec<TensorId>,
}

impl Goal {
    /// Returns the goal of each stage for the requested outputs, given the decoupled steps that end
    /// the stages.
    pub(super) fn of(plan: &Plan, producers: &[usize], requested: &[usize]) -> Vec<Arc<Self>> {
        let goals = (0..=producers.len()).map(|stage| {
            let outputs: Vec<TensorId> =
                match producers.get(stage).and_then(|step| plan.steps().get(*step)) {
                    Some(step) => step.inputs.iter().map(|(_, id)| *id).collect(),
                    None => {
                        requested.iter().filter_map(|at| plan.outputs().get(*at)).copied().collect()
                    }
                };
            Arc::new(Self::new(plan, producers, distinct(outputs)))
        });
        goals.collect()
    }

    fn new(plan: &Plan, producers: &[usize], outputs: Vec<TensorId>) -> Self {
        let mut needed = vec![false; plan.steps().len()];
        let mut tensors = outputs.clone();
        while let Some(id) = tensors.pop() {
            let Some(step) = plan.tensors().get(id).and_then(|tensor| tensor.producer) else {
                continue;
            };
            // The outputs of a decoupled step exist when the stage begins.
            if producers.contains(&step) {
                continue;
            }
            if let Some(seen) = needed.get_mut(step).filter(|seen| !**seen) {
                *seen = true;
                tensors.extend(
                    plan.steps()
                        .get(step)
                        .into_iter()
                        .flat_map(|step| &step.inputs)
                        .map(|(_, id)| *id),
                );
            }
        }
        let consumer_counts = plan.tensors().iter().map(|tensor| {
            tensor.consumers.iter().filter(|step| needed.get(**step) == Some(&true)).count()
        });
        let mut consumer_counts: Vec<usize> = consumer_counts.collect();
        for end in &outputs {
            if let Some(count) = consumer_counts.get_mut(*end) {
                *count += 1;
            }
        }
        Self { needed, consumer_counts, outputs }
    }

    /// Returns the positions of a step's outputs that have consumers.
    pub(super) fn requested(&self, outputs: &[(String, TensorId)]) -> Vec<usize> {
        let has_consumers =
            |id: TensorId| self.consumer_counts.get(id).is_some_and(|count| *count > 0);
        (0..)
            .zip(outputs)
            .filter(|(_, (_, id))| has_consumers(*id))
            .map(|(position, _)| position)
            .collect()
    }
}

/// Returns the ids in ascending order, each once.
pub(super) fn distinct(mut ids: Vec<TensorId>) -> Vec<TensorId> {
    ids.sort_unstable();
    ids.dedup();
    ids
}
