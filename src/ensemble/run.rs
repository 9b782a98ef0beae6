//! One run of a stage: which of its steps may run, their inputs, and the tensors at the end.
//!
//! Holds each tensor (of the caller's type `T`) from its production until its last consumer has
//! taken it. That consumer receives the tensor itself, not a clone, so that no tensor lives longer
//! than necessary.

use std::sync::Arc;

use super::goal::{Goal, distinct};
use super::graph::TensorId;
use super::plan::Plan;

/// A tensor of the stage.
#[derive(Clone, Debug)]
struct Slot<T> {
    value: Option<T>,
    /// Whether it was produced, or omitted by the client or by its producer.
    resolved: bool,
    /// The number of consumers that have not taken it yet.
    consumers_left: usize,
}

/// A run of a stage.
#[derive(Debug)]
pub(super) struct Run<T> {
    plan: Arc<Plan>,
    goal: Arc<Goal>,
    slots: Vec<Slot<T>>,
    /// The number of each step's inputs that are not resolved; `None` for a step that is not
    /// needed.
    waits: Vec<Option<usize>>,
}

impl<T: Clone> Run<T> {
    pub(super) fn new(plan: Arc<Plan>, goal: Arc<Goal>) -> Self {
        let slots = goal
            .consumer_counts
            .iter()
            .map(|consumers_left| Slot {
                value: None,
                resolved: false,
                consumers_left: *consumers_left,
            })
            .collect();
        let waits = plan.steps().iter().zip(&goal.needed).map(|(step, needed)| {
            needed.then(|| distinct(step.inputs.iter().map(|(_, id)| *id).collect()).len())
        });
        let waits = waits.collect();
        Self { plan, goal, slots, waits }
    }

    /// Resolves a tensor: it is produced, or will never be. Returns the steps that become ready.
    pub(super) fn resolve(&mut self, id: TensorId, value: Option<T>) -> Vec<usize> {
        let Some(slot) = self.slots.get_mut(id).filter(|slot| !slot.resolved) else {
            return Vec::new();
        };
        slot.resolved = true;
        slot.value = value.filter(|_| slot.consumers_left > 0);
        let mut ready = Vec::new();
        for &step in self.plan.tensors().get(id).map_or(&[][..], |tensor| &tensor.consumers) {
            let Some(Some(waits)) = self.waits.get_mut(step) else { continue };
            *waits -= 1;
            if *waits == 0 {
                ready.push(step);
            }
        }
        ready
    }

    /// Settles a step's outputs, by position; missing ones stay unset, like optional inputs.
    /// Returns the positions of missing outputs that have consumers, and the steps that become
    /// ready.
    pub(super) fn made(
        &mut self,
        step: usize,
        made: impl IntoIterator<Item = (usize, T)>,
    ) -> (Vec<usize>, Vec<usize>) {
        let plan = Arc::clone(&self.plan);
        let outputs = plan.steps().get(step).map_or(&[][..], |step| &step.outputs);
        let mut values: Vec<Option<T>> = outputs.iter().map(|_| None).collect();
        for (position, value) in made {
            if let Some(slot) = values.get_mut(position) {
                *slot = Some(value);
            }
        }
        let missing = self
            .goal
            .requested(outputs)
            .into_iter()
            .filter(|position| values.get(*position).is_some_and(Option::is_none))
            .collect();
        let ready = outputs
            .iter()
            .zip(values)
            .flat_map(|((_, id), value)| self.resolve(*id, value))
            .collect();
        (missing, ready)
    }

    /// Returns the tensors of a list, by position in it, without unset ones. To be called once for
    /// each consumer that the goal counts.
    pub(super) fn take(&mut self, ids: &[TensorId]) -> Vec<(usize, T)> {
        let mut given = Vec::with_capacity(ids.len());
        for (position, id) in ids.iter().enumerate() {
            let Some(slot) = self.slots.get_mut(*id) else { continue };
            // A model may take one tensor as several inputs: count the step as one consumer, at the
            // last of them.
            let last = !ids.iter().skip(position + 1).any(|later| later == id);
            slot.consumers_left -= usize::from(last);
            let value = if last && slot.consumers_left == 0 {
                slot.value.take()
            } else {
                slot.value.clone()
            };
            given.extend(value.map(|value| (position, value)));
        }
        given
    }

    /// Returns whether all tensors of the stage's goal are resolved.
    pub(super) fn is_complete(&self) -> bool {
        self.goal.outputs.iter().all(|id| self.slots.get(*id).is_none_or(|slot| slot.resolved))
    }

    /// Returns the number of tensors that are kept now.
    pub(super) fn kept(&self) -> usize {
        self.slots.iter().filter(|slot| slot.value.is_some()).count()
    }
}
