//! One request on its way through a plan: which steps may run, what they are given, and what is left at the end.
//!
//! Holds the tensors (`T`, whatever the caller has for one) from when they are made until the last step that takes them
//! has them; that step is given the tensor itself and not a clone, so that nothing lives longer than it is needed.

use std::collections::VecDeque;
use std::sync::Arc;

use super::plan::{Plan, TensorId};

/// Triton's text for a request whose outputs cannot be made.
pub const DEADLOCK_TEXT: &str =
    "unexpected deadlock, at least one output is not set while no more ensemble steps can be made";

/// Where a tensor is.
#[derive(Clone, Debug, Default)]
struct Place<T> {
    value: Option<T>,
    /// It was made, or left out by the client or by the step that could make it: nobody waits for it any more.
    settled: bool,
    /// How many still want it: steps that have not run, and the response.
    wanted: usize,
}

/// A request on its way.
#[derive(Debug)]
pub struct Run<T> {
    plan: Arc<Plan>,
    places: Vec<Place<T>>,
    /// For each step how many of its tensors are not settled; `None` for one that is not needed.
    waits: Vec<Option<usize>>,
    ready: VecDeque<usize>,
    /// Positions of the outputs that are asked for, ascending.
    requested: Vec<usize>,
}

impl<T: Clone> Run<T> {
    /// Begins with the inputs that were given, by their positions in the configuration; others are optional and stay
    /// unset. `requested` says which outputs are asked for, by their positions: steps that none of them needs do not run.
    pub fn new(plan: Arc<Plan>, requested: &[usize], given: impl IntoIterator<Item = (usize, T)>) -> Self {
        let mut requested = requested.to_vec();
        requested.sort_unstable();
        requested.dedup();
        let needed = needed(&plan, &requested);
        let waits = plan.steps().iter().zip(&needed).map(|(step, needed)| needed.then(|| distinct(&step.inputs).len()));
        let waits = waits.collect();
        let places = plan.tensors().iter().map(|tensor| {
            let steps = tensor.consumers.iter().filter(|step| needed.get(**step) == Some(&true)).count();
            Place { value: None, settled: false, wanted: steps }
        });
        let mut run =
            Self { places: places.collect(), waits, ready: VecDeque::new(), requested, plan: Arc::clone(&plan) };
        for output in run.requested.iter().filter_map(|position| plan.outputs().get(*position)) {
            if let Some(place) = run.places.get_mut(*output) {
                place.wanted += 1;
            }
        }
        let mut inputs: Vec<Option<T>> = plan.inputs().iter().map(|_| None).collect();
        for (position, value) in given {
            if let Some(input) = inputs.get_mut(position) {
                *input = Some(value);
            }
        }
        for (id, value) in plan.inputs().iter().zip(inputs) {
            run.settle(*id, value);
        }
        run
    }

    /// A step that may run now, with its inputs by their position in [`Step::inputs`](super::Step::inputs); those that
    /// stay unset are missing. Each step comes at most once.
    pub fn next_step(&mut self) -> Option<(usize, Vec<(usize, T)>)> {
        let step = self.ready.pop_front()?;
        let plan = Arc::clone(&self.plan);
        let inputs = plan.steps().get(step).map_or(&[][..], |step| &step.inputs);
        let mut left: Vec<TensorId> = inputs.iter().map(|(_, id)| *id).collect();
        let mut given = Vec::with_capacity(inputs.len());
        for (position, (_, id)) in inputs.iter().enumerate() {
            left.remove(0);
            let Some(place) = self.places.get_mut(*id) else { continue };
            // A model may take one tensor by several inputs: the step is done with it at the last of them.
            let last = !left.contains(id);
            place.wanted -= usize::from(last);
            let value = if last && place.wanted == 0 { place.value.take() } else { place.value.clone() };
            given.extend(value.map(|value| (position, value)));
        }
        Some((step, given))
    }

    /// The outputs of a step that somebody wants, by their position in [`Step::outputs`](super::Step::outputs).
    pub fn wanted(&self, step: usize) -> Vec<usize> {
        let outputs = self.plan.steps().get(step).map_or(&[][..], |step| &step.outputs);
        let wanted = |(_, id): &(String, TensorId)| self.places.get(*id).is_some_and(|place| place.wanted > 0);
        outputs.iter().enumerate().filter(|(_, output)| wanted(output)).map(|(position, _)| position).collect()
    }

    /// A step has run and has made these outputs, by their position in [`Step::outputs`](super::Step::outputs). Others stay
    /// unset, as optional inputs do: what takes them runs without. Gives the names of those among them that somebody wants.
    pub fn done(&mut self, step: usize, made: impl IntoIterator<Item = (usize, T)>) -> Vec<String> {
        let plan = Arc::clone(&self.plan);
        let outputs = plan.steps().get(step).map_or(&[][..], |step| &step.outputs);
        for (position, value) in made {
            if let Some((_, id)) = outputs.get(position) {
                self.settle(*id, Some(value));
            }
        }
        let is_missing = |(_, id): &&(String, TensorId)| {
            self.places.get(*id).is_some_and(|place| !place.settled && place.wanted > 0)
        };
        let missing: Vec<&(String, TensorId)> = outputs.iter().filter(is_missing).collect();
        missing.iter().for_each(|(_, id)| self.settle(*id, None));
        missing.into_iter().map(|(name, _)| name.clone()).collect()
    }

    /// The outputs that were asked for, by their positions in the configuration; without those that stayed unset.
    ///
    /// # Errors
    /// [`DEADLOCK_TEXT`] if a step that one of them needs has not run or not been [`Run::done`].
    pub fn finish(mut self) -> Result<Vec<(usize, T)>, &'static str> {
        let mut made = Vec::with_capacity(self.requested.len());
        for position in &self.requested {
            let place = self.plan.outputs().get(*position).and_then(|id| self.places.get_mut(*id));
            let Some(place) = place else { continue };
            if !place.settled {
                return Err(DEADLOCK_TEXT);
            }
            made.extend(place.value.take().map(|value| (*position, value)));
        }
        Ok(made)
    }

    /// How many tensors are kept now.
    pub fn kept(&self) -> usize {
        self.places.iter().filter(|place| place.value.is_some()).count()
    }

    /// A tensor is there, or will never be: steps that waited for nothing else may run.
    fn settle(&mut self, id: TensorId, value: Option<T>) {
        let Some(place) = self.places.get_mut(id).filter(|place| !place.settled) else { return };
        place.settled = true;
        place.value = value.filter(|_| place.wanted > 0);
        for &step in self.plan.tensors().get(id).map_or(&[][..], |tensor| &tensor.consumers) {
            let Some(Some(waits)) = self.waits.get_mut(step) else { continue };
            *waits -= 1;
            if *waits == 0 {
                self.ready.push_back(step);
            }
        }
    }
}

/// The steps that the outputs at these positions need.
fn needed(plan: &Plan, requested: &[usize]) -> Vec<bool> {
    let mut needed = vec![false; plan.steps().len()];
    let mut tensors: Vec<TensorId> = requested.iter().filter_map(|at| plan.outputs().get(*at)).copied().collect();
    while let Some(id) = tensors.pop() {
        let Some(step) = plan.tensors().get(id).and_then(|tensor| tensor.producer) else { continue };
        if let Some(seen) = needed.get_mut(step).filter(|seen| !**seen) {
            *seen = true;
            tensors.extend(plan.steps().get(step).into_iter().flat_map(|step| &step.inputs).map(|(_, id)| *id));
        }
    }
    needed
}

/// The tensors of a step's inputs, each once.
fn distinct(inputs: &[(String, TensorId)]) -> Vec<TensorId> {
    let mut ids: Vec<TensorId> = inputs.iter().map(|(_, id)| *id).collect();
    ids.sort_unstable();
    ids.dedup();
    ids
}
