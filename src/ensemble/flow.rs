//! The execution of one request by a plan: which steps may run, for which response of a decoupled
//! step, with which inputs; and the order of the responses.
//!
//! A stage runs once for each response that begins it. Such runs are independent and concurrent.
//! The results for the responses to one request of a decoupled step are passed on in the order of
//! these responses, in whatever order later steps finish. The results of several concurrent
//! requests of a decoupled step are interleaved in the order of their completion.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::Arc;

use super::goal::Goal;
use super::graph::{Step, TensorId};
use super::plan::Plan;
use super::run::Run;
use super::stages::Stages;
use crate::error::InferError;

/// Triton's text for a request whose outputs cannot be made.
pub const DEADLOCK_TEXT: &str =
    "unexpected deadlock, at least one output is not set while no more ensemble steps can be made";

/// The identifier of one execution of a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct CallId(u64);

/// A step to be run.
#[derive(Debug, PartialEq, Eq)]
pub struct Call<T> {
    /// The identifier under which results are reported.
    pub id: CallId,
    /// The step's number in the plan.
    pub step: usize,
    /// The stage that contains it, or that it ends if it is decoupled.
    pub stage: usize,
    /// Whether it may answer any number of times.
    pub decoupled: bool,
    /// Its inputs by position in [`Step::inputs`]; unset ones are missing.
    pub inputs: Vec<(usize, T)>,
    /// The outputs that have consumers, by position in [`Step::outputs`].
    pub outputs: Vec<usize>,
}

/// A response's tensors by position in the ensemble's outputs, or its error.
pub type Output<T> = Result<Vec<(usize, T)>, InferError>;

/// A run of a stage.
#[derive(Debug)]
struct Iteration<T> {
    stage: usize,
    run: Run<T>,
    /// The decoupled step whose response it began with; `None` for the request itself.
    of: Option<CallId>,
}

/// The state of the run for a response.
#[derive(Debug)]
enum Slot {
    Running,
    Complete,
    Failed(InferError),
}

/// A step that is running.
#[derive(Debug, Default)]
struct Open {
    step: usize,
    /// The iteration that it belongs to; unused for a decoupled step, which ends its iteration.
    iteration: u64,
    /// For a decoupled step: its responses that were not passed on yet, in the order of their
    /// iterations.
    slots: VecDeque<(u64, Slot)>,
    /// The number of complete `slots`.
    complete: usize,
    /// Whether further responses are impossible or ignored.
    ended: bool,
}

/// A request in execution.
#[derive(Debug)]
pub struct Flow<T> {
    plan: Arc<Plan>,
    stages: Arc<Stages>,
    goals: Vec<Arc<Goal>>,
    /// The positions of the requested outputs, ascending.
    requested: Vec<usize>,
    iterations: BTreeMap<u64, Iteration<T>>,
    /// Iterations and steps that may run.
    ready: VecDeque<(u64, usize)>,
    calls: BTreeMap<CallId, Open>,
    outputs: VecDeque<Output<T>>,
    next_number: u64,
}

impl<T: Clone> Flow<T> {
    /// Begins a request with these inputs, by position in the configuration; others are optional
    /// and stay unset. `requested` are the positions of the requested outputs; steps that none of
    /// them needs do not run.
    pub fn new(
        plan: Arc<Plan>,
        stages: Arc<Stages>,
        requested: &[usize],
        given: impl IntoIterator<Item = (usize, T)>,
    ) -> Self {
        let mut requested = requested.to_vec();
        requested.sort_unstable();
        requested.dedup();
        let goals = stages.goals(&plan, &requested);
        let mut inputs: Vec<Option<T>> = plan.inputs().iter().map(|_| None).collect();
        for (position, value) in given {
            if let Some(input) = inputs.get_mut(position) {
                *input = Some(value);
            }
        }
        let values = plan.inputs().iter().copied().zip(inputs).collect();
        let mut flow = Self {
            plan,
            stages,
            goals,
            requested,
            iterations: BTreeMap::new(),
            ready: VecDeque::new(),
            calls: BTreeMap::new(),
            outputs: VecDeque::new(),
            next_number: 0,
        };
        flow.begin(values);
        flow
    }

    /// Returns a step that may run now.
    pub fn next_step(&mut self) -> Option<Call<T>> {
        loop {
            let (number, step) = self.ready.pop_front()?;
            let plan = Arc::clone(&self.plan);
            let Some((iteration, of_plan)) =
                self.iterations.get_mut(&number).zip(plan.steps().get(step))
            else {
                continue;
            };
            let ids: Vec<TensorId> = of_plan.inputs.iter().map(|(_, id)| *id).collect();
            let inputs = iteration.run.take(&ids);
            let stage = iteration.stage;
            let decoupled = self.stages.ended_by(step).is_some();
            let goal = self.goals.get(stage + usize::from(decoupled));
            let outputs = goal.map_or_else(Vec::new, |goal| goal.requested(&of_plan.outputs));
            if decoupled {
                self.iterations.remove(&number);
            }
            let id = CallId(self.number());
            self.calls.insert(id, Open { step, iteration: number, ..Open::default() });
            return Some(Call { id, step, stage, decoupled, inputs, outputs });
        }
    }

    /// Reports the outputs, by position in [`Step::outputs`], or the error of a step that answers
    /// once. Other outputs stay unset; their consumers run without them. Returns the names of unset
    /// outputs that have consumers.
    pub fn done(&mut self, id: CallId, made: Output<T>) -> Vec<String> {
        let Some(Open { step, iteration, .. }) = self.calls.remove(&id) else { return Vec::new() };
        match made {
            Ok(made) => self.made(iteration, step, made),
            Err(error) => {
                self.fail(iteration, error);
                Vec::new()
            }
        }
    }

    /// Like [`Flow::done`], for one of any number of responses of a decoupled step.
    pub fn response(&mut self, id: CallId, made: Output<T>) -> Vec<String> {
        let number = self.number();
        let Some(open) = self.calls.get_mut(&id).filter(|open| !open.ended) else {
            return Vec::new();
        };
        let step = open.step;
        let Some(stage) = self.stages.ended_by(step) else { return Vec::new() };
        match made {
            Err(error) => {
                open.ended = true;
                open.slots.push_back((number, Slot::Failed(error)));
                self.pass_on_complete(id);
                Vec::new()
            }
            Ok(made) => {
                open.slots.push_back((number, Slot::Running));
                let Some(goal) = self.goals.get(stage + 1) else { return Vec::new() };
                let run = Run::new(Arc::clone(&self.plan), Arc::clone(goal));
                self.iterations.insert(number, Iteration { stage: stage + 1, run, of: Some(id) });
                self.made(number, step, made)
            }
        }
    }

    /// Reports that a decoupled step returns no more responses.
    pub fn ended(&mut self, id: CallId) {
        if let Some(open) = self.calls.get_mut(&id) {
            open.ended = true;
            self.pass_on_complete(id);
        }
    }

    /// Returns whether results of a step are still accepted.
    pub fn is_open(&self, id: CallId) -> bool {
        self.calls.get(&id).is_some_and(|open| !open.ended)
    }

    /// Returns the number of a decoupled step's responses whose stage is complete, and that wait
    /// for an earlier response.
    pub fn waiting(&self, id: CallId) -> usize {
        self.calls.get(&id).map_or(0, |open| open.complete)
    }

    /// Returns the ensemble's next response. After an error there are no others.
    pub fn next_output(&mut self) -> Option<Output<T>> {
        self.outputs.pop_front()
    }

    /// Returns whether no step runs, no step can run, and no response is left.
    pub fn is_over(&self) -> bool {
        self.calls.is_empty() && self.ready.is_empty() && self.outputs.is_empty()
    }

    /// Returns the number of tensors that are kept now.
    pub fn kept(&self) -> usize {
        let outputs: usize = self.outputs.iter().flatten().map(Vec::len).sum();
        outputs + self.iterations.values().map(|iteration| iteration.run.kept()).sum::<usize>()
    }

    fn number(&mut self) -> u64 {
        self.next_number += 1;
        self.next_number
    }

    /// Begins the first stage with the inputs.
    fn begin(&mut self, values: Vec<(TensorId, Option<T>)>) {
        let Some(goal) = self.goals.first() else { return };
        let mut run = Run::new(Arc::clone(&self.plan), Arc::clone(goal));
        let number = self.number();
        for (id, value) in values {
            let steps = run.resolve(id, value);
            self.ready.extend(steps.into_iter().map(|step| (number, step)));
        }
        let is_complete = run.is_complete();
        self.iterations.insert(number, Iteration { stage: 0, run, of: None });
        if is_complete {
            self.completed(number);
        }
    }

    /// Adds a step's outputs to an iteration.
    fn made(&mut self, number: u64, step: usize, made: Vec<(usize, T)>) -> Vec<String> {
        let Some(iteration) = self.iterations.get_mut(&number) else { return Vec::new() };
        let (missing, steps) = iteration.run.made(step, made);
        let is_complete = iteration.run.is_complete();
        self.ready.extend(steps.into_iter().map(|step| (number, step)));
        if is_complete {
            self.completed(number);
        }
        let outputs = self.plan.steps().get(step).map_or(&[][..], |step: &Step| &step.outputs);
        missing.into_iter().filter_map(|position| Some(outputs.get(position)?.0.clone())).collect()
    }

    /// Marks an iteration as complete: it is passed on in its turn.
    fn completed(&mut self, number: u64) {
        let Some(of) = self.iterations.get(&number).map(|iteration| iteration.of) else { return };
        let Some(call) = of else { return self.pass_on(number) };
        let Some(open) = self.calls.get_mut(&call) else { return };
        let position = open.slots.binary_search_by_key(&number, |(number, _)| *number);
        if let Some((_, slot)) = position.ok().and_then(|position| open.slots.get_mut(position)) {
            *slot = Slot::Complete;
            open.complete += 1;
        }
        self.pass_on_complete(call);
    }

    /// Passes on complete iterations of a decoupled step, up to the first incomplete one.
    fn pass_on_complete(&mut self, id: CallId) {
        loop {
            let Some(open) = self.calls.get_mut(&id) else { return };
            match open.slots.pop_front() {
                Some((number, Slot::Running)) => {
                    open.slots.push_front((number, Slot::Running));
                    return;
                }
                Some((number, Slot::Complete)) => {
                    open.complete -= 1;
                    self.pass_on(number);
                }
                Some((_, Slot::Failed(error))) => return self.end(error),
                None => {
                    if open.ended {
                        self.calls.remove(&id);
                    }
                    return;
                }
            }
        }
    }

    /// Passes the results of a stage on: to the response, or to the decoupled step that ends the
    /// stage.
    fn pass_on(&mut self, number: u64) {
        let Some(iteration) = self.iterations.get_mut(&number) else { return };
        if let Some(producer) = self.stages.producer(iteration.stage) {
            self.ready.push_back((number, producer));
            return;
        }
        let outputs = self.requested.iter().filter_map(|at| self.plan.outputs().get(*at)).copied();
        let values = iteration.run.take(&outputs.collect::<Vec<_>>());
        let values =
            values.into_iter().filter_map(|(at, value)| Some((*self.requested.get(at)?, value)));
        self.outputs.push_back(Ok(values.collect()));
        self.iterations.remove(&number);
    }

    /// Handles a failed step: the results for earlier responses are still passed on, then the
    /// request ends.
    fn fail(&mut self, number: u64, error: InferError) {
        let Some(of) = self.iterations.get(&number).map(|iteration| iteration.of) else { return };
        let Some(call) = of else { return self.end(error) };
        let Some(open) = self.calls.get_mut(&call) else { return };
        let Ok(position) = open.slots.binary_search_by_key(&number, |(number, _)| *number) else {
            return;
        };
        let abandoned: BTreeSet<u64> =
            open.slots.split_off(position).into_iter().map(|(number, _)| number).collect();
        open.slots.push_back((number, Slot::Failed(error)));
        open.complete =
            open.slots.iter().filter(|(_, slot)| matches!(slot, Slot::Complete)).count();
        open.ended = true;
        self.calls.retain(|_, open| !abandoned.contains(&open.iteration));
        self.ready.retain(|(number, _)| !abandoned.contains(number));
        abandoned.iter().for_each(|number| drop(self.iterations.remove(number)));
        self.pass_on_complete(call);
    }

    /// Ends the request with an error, even if steps are still running.
    fn end(&mut self, error: InferError) {
        self.iterations.clear();
        self.ready.clear();
        self.calls.clear();
        self.outputs.push_back(Err(error));
    }
}
