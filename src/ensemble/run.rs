//! A stage of a plan on its way, once: which of its steps may run, what they are given, and what is left at the end.
//!
//! Holds the tensors (`T`, whatever the caller has for one) from when they are made until the last step that takes them
//! has them; that step is given the tensor itself and not a clone, so that nothing lives longer than it is needed.

use std::sync::Arc;

use super::plan::{Plan, TensorId};
use super::stages::Stages;

/// What a stage is to make for a request: the same for each time that the stage is run.
#[derive(Debug)]
pub(super) struct Goal {
    /// Whether each step of the plan is to run in this stage.
    needed: Vec<bool>,
    /// How many want each tensor: steps of this stage, and what comes behind it.
    wanted: Vec<usize>,
    /// The tensors that the decoupled step at the end takes, or that the response is made of; each once.
    ends: Vec<TensorId>,
}

impl Goal {
    /// One for each stage, when the outputs at these positions are asked for.
    pub(super) fn of(plan: &Plan, stages: &Stages, requested: &[usize]) -> Vec<Arc<Self>> {
        let goals = (0..stages.count()).map(|stage| {
            let ends: Vec<TensorId> = match stages.producer(stage).and_then(|step| plan.steps().get(step)) {
                Some(step) => step.inputs.iter().map(|(_, id)| *id).collect(),
                None => requested.iter().filter_map(|at| plan.outputs().get(*at)).copied().collect(),
            };
            Arc::new(Self::new(plan, stages, distinct(ends)))
        });
        goals.collect()
    }

    fn new(plan: &Plan, stages: &Stages, ends: Vec<TensorId>) -> Self {
        let mut needed = vec![false; plan.steps().len()];
        let mut tensors = ends.clone();
        while let Some(id) = tensors.pop() {
            let Some(step) = plan.tensors().get(id).and_then(|tensor| tensor.producer) else { continue };
            // What a decoupled step makes is there when the stage begins.
            if stages.ended_by(step).is_some() {
                continue;
            }
            if let Some(seen) = needed.get_mut(step).filter(|seen| !**seen) {
                *seen = true;
                tensors.extend(plan.steps().get(step).into_iter().flat_map(|step| &step.inputs).map(|(_, id)| *id));
            }
        }
        let is_needed = |step: &&usize| needed.get(**step) == Some(&true);
        let wanted = plan.tensors().iter().map(|tensor| tensor.consumers.iter().filter(is_needed).count());
        let mut wanted: Vec<usize> = wanted.collect();
        for end in &ends {
            if let Some(count) = wanted.get_mut(*end) {
                *count += 1;
            }
        }
        Self { needed, wanted, ends }
    }

    /// Those of a step's outputs that somebody wants, by their position.
    pub(super) fn wanted(&self, outputs: &[(String, TensorId)]) -> Vec<usize> {
        let wanted = |(_, id): &(String, TensorId)| self.wanted.get(*id).is_some_and(|count| *count > 0);
        outputs.iter().enumerate().filter(|(_, output)| wanted(output)).map(|(position, _)| position).collect()
    }
}

/// Where a tensor is.
#[derive(Clone, Debug)]
struct Place<T> {
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
    places: Vec<Place<T>>,
    /// For each step how many of its tensors are not settled; `None` for one that is not needed.
    waits: Vec<Option<usize>>,
}

impl<T: Clone> Run<T> {
    pub(super) fn new(plan: Arc<Plan>, goal: Arc<Goal>) -> Self {
        let places = goal.wanted.iter().map(|wanted| Place { value: None, settled: false, wanted: *wanted }).collect();
        let waits = plan
            .steps()
            .iter()
            .zip(&goal.needed)
            .map(|(step, needed)| needed.then(|| distinct(step.inputs.iter().map(|(_, id)| *id).collect()).len()));
        let waits = waits.collect();
        Self { plan, goal, places, waits }
    }

    /// A tensor is there, or will never be. Gives the steps that waited for nothing else.
    pub(super) fn settle(&mut self, id: TensorId, value: Option<T>) -> Vec<usize> {
        let Some(place) = self.places.get_mut(id).filter(|place| !place.settled) else { return Vec::new() };
        place.settled = true;
        place.value = value.filter(|_| place.wanted > 0);
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
            if let Some(place) = values.get_mut(position) {
                *place = Some(value);
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
            let Some(place) = self.places.get_mut(*id) else { continue };
            // A model may take one tensor by several inputs: the step is done with it at the last of them.
            let last = !ids.iter().skip(position + 1).any(|later| later == id);
            place.wanted -= usize::from(last);
            let value = if last && place.wanted == 0 { place.value.take() } else { place.value.clone() };
            given.extend(value.map(|value| (position, value)));
        }
        given
    }

    /// Whether everything is there that the stage is to make, or will never be.
    pub(super) fn is_complete(&self) -> bool {
        self.goal.ends.iter().all(|id| self.places.get(*id).is_none_or(|place| place.settled))
    }

    /// How many tensors are kept now.
    pub(super) fn kept(&self) -> usize {
        self.places.iter().filter(|place| place.value.is_some()).count()
    }
}

fn distinct(mut ids: Vec<TensorId>) -> Vec<TensorId> {
    ids.sort_unstable();
    ids.dedup();
    ids
}
