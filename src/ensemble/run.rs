//! A stage of a plan on its way, once: which of its steps may run, what they are given, and what is left at the end.
//!
//! Holds the tensors (`T`, whatever the caller has for one) from when they are made until the last step that takes them
//! has them; that step is given the tensor itself and not a clone, so that nothing lives longer than it is needed.

use std::sync::Arc;

use super::goal::{Goal, distinct};
use super::graph::TensorId;
use super::plan::Plan;

/// A tensor of the stage: its value while it is kept.
#[derive(Clone, Debug)]
struct Slot<T> {
    value: Option<T>,
    /// It was made, or left out by the client or by the step that could make it: nobody waits for it any more.
    settled: bool,
    /// How many have yet to be given it.
    wanted: usize,
}

/// A stage on its way.
#[derive(Debug)]
pub(super) struct Run<T> {
    plan: Arc<Plan>,
    goal: Arc<Goal>,
    slots: Vec<Slot<T>>,
    /// For each step how many of its tensors are not settled; `None` for one that is not needed.
    waits: Vec<Option<usize>>,
}

impl<T: Clone> Run<T> {
    pub(super) fn new(plan: Arc<Plan>, goal: Arc<Goal>) -> Self {
        let slots = goal.wanted.iter().map(|wanted| Slot { value: None, settled: false, wanted: *wanted }).collect();
        let waits = plan
            .steps()
            .iter()
            .zip(&goal.needed)
            .map(|(step, needed)| needed.then(|| distinct(step.inputs.iter().map(|(_, id)| *id).collect()).len()));
        let waits = waits.collect();
        Self { plan, goal, slots, waits }
    }

    /// A tensor is there, or will never be. Gives the steps that waited for nothing else.
    pub(super) fn settle(&mut self, id: TensorId, value: Option<T>) -> Vec<usize> {
        let Some(slot) = self.slots.get_mut(id).filter(|slot| !slot.settled) else { return Vec::new() };
        slot.settled = true;
        slot.value = value.filter(|_| slot.wanted > 0);
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

    /// What a step makes, by position in its outputs: what is missing stays unset, as optional inputs do. Gives the
    /// positions of those that somebody wants and that are missing, and the steps that waited for nothing else.
    pub(super) fn made(&mut self, step: usize, made: impl IntoIterator<Item = (usize, T)>) -> (Vec<usize>, Vec<usize>) {
        let plan = Arc::clone(&self.plan);
        let outputs = plan.steps().get(step).map_or(&[][..], |step| &step.outputs);
        let mut values: Vec<Option<T>> = outputs.iter().map(|_| None).collect();
        for (position, value) in made {
            if let Some(slot) = values.get_mut(position) {
                *slot = Some(value);
            }
        }
        let is_missing = |position: &usize| values.get(*position).is_some_and(Option::is_none);
        let missing = self.goal.wanted(outputs).into_iter().filter(is_missing).collect();
        let ready = outputs.iter().zip(values).flat_map(|((_, id), value)| self.settle(*id, value)).collect();
        (missing, ready)
    }

    /// The tensors of a list, by position in it; those that stayed unset are missing. To be called once for each that the
    /// goal counts.
    pub(super) fn take(&mut self, ids: &[TensorId]) -> Vec<(usize, T)> {
        let mut given = Vec::with_capacity(ids.len());
        for (position, id) in ids.iter().enumerate() {
            let Some(slot) = self.slots.get_mut(*id) else { continue };
            // A model may take one tensor by several inputs: the step is done with it at the last of them.
            let last = !ids.iter().skip(position + 1).any(|later| later == id);
            slot.wanted -= usize::from(last);
            let value = if last && slot.wanted == 0 { slot.value.take() } else { slot.value.clone() };
            given.extend(value.map(|value| (position, value)));
        }
        given
    }

    /// Whether everything is there that the stage is to make, or will never be.
    pub(super) fn is_complete(&self) -> bool {
        self.goal.ends.iter().all(|id| self.slots.get(*id).is_none_or(|slot| slot.settled))
    }

    /// How many tensors are kept now.
    pub(super) fn kept(&self) -> usize {
        self.slots.iter().filter(|slot| slot.value.is_some()).count()
    }
}
