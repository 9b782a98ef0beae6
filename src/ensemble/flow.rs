//! One request on its way through a plan: which steps may run, for which response of a decoupled step, what they are given,
//! and which responses come of it in which order.
//!
//! A stage of the plan is run once for each response that begins it. Such runs are independent of each other, and as many are
//! under way as there are responses; but what comes of the responses to one request of a decoupled step goes on in their order,
//! however the steps behind it are answered. Where several requests of a decoupled step are under way, theirs mix as they come.

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

/// A step that was begun for one response, by a number of its own.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct CallId(u64);

/// A step to be run.
#[derive(Debug, PartialEq, Eq)]
pub struct Call<T> {
    /// To tell of it what comes of it.
    pub id: CallId,
    /// Its number in the plan.
    pub step: usize,
    /// The stage that it is part of, or ends if it is decoupled.
    pub stage: usize,
    /// Whether it may answer any number of times.
    pub decoupled: bool,
    /// Its inputs by their position in [`Step::inputs`]; those that stay unset are missing.
    pub inputs: Vec<(usize, T)>,
    /// The outputs that somebody wants, by their position in [`Step::outputs`].
    pub wanted: Vec<usize>,
}

/// What a response is made of, by position in the ensemble's outputs; or why there is none.
pub type Output<T> = Result<Vec<(usize, T)>, InferError>;

/// A stage that is run.
#[derive(Debug)]
struct Iteration<T> {
    stage: usize,
    run: Run<T>,
    /// The step whose response it began with; `None` for the request itself.
    of: Option<CallId>,
}

/// What has come of a response.
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
    /// What it is run for; of no meaning for a decoupled one, which ends it.
    iteration: u64,
    /// Of a decoupled step: its responses that have not gone on, in their order, which is that of their iterations.
    slots: VecDeque<(u64, Slot)>,
    /// How many of them are complete.
    complete: usize,
    /// It gives no more responses, or none that is wanted.
    ended: bool,
}

/// A request on its way.
#[derive(Debug)]
pub struct Flow<T> {
    plan: Arc<Plan>,
    stages: Arc<Stages>,
    goals: Vec<Arc<Goal>>,
    /// Positions of the outputs that are asked for, ascending.
    requested: Vec<usize>,
    iterations: BTreeMap<u64, Iteration<T>>,
    /// Steps that may run, with what they are run for.
    ready: VecDeque<(u64, usize)>,
    calls: BTreeMap<CallId, Open>,
    outputs: VecDeque<Output<T>>,
    next_number: u64,
}

impl<T: Clone> Flow<T> {
    /// Begins with the inputs that were given, by their positions in the configuration; others are optional and stay
    /// unset. `requested` says which outputs are asked for, by their positions: steps that none of them needs do not run.
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

    /// A step that may run now.
    pub fn next_step(&mut self) -> Option<Call<T>> {
        loop {
            let (number, step) = self.ready.pop_front()?;
            let plan = Arc::clone(&self.plan);
            let Some((iteration, of_plan)) = self.iterations.get_mut(&number).zip(plan.steps().get(step)) else {
                continue;
            };
            let ids: Vec<TensorId> = of_plan.inputs.iter().map(|(_, id)| *id).collect();
            let inputs = iteration.run.take(&ids);
            let (stage, decoupled) = (iteration.stage, self.stages.ended_by(step).is_some());
            let goal = self.goals.get(stage + usize::from(decoupled));
            let wanted = goal.map_or_else(Vec::new, |goal| goal.wanted(&of_plan.outputs));
            if decoupled {
                self.iterations.remove(&number);
            }
            let id = CallId(self.number());
            self.calls.insert(id, Open { step, iteration: number, ..Open::default() });
            return Some(Call { id, step, stage, decoupled, inputs, wanted });
        }
    }

    /// A step that answers once has made these outputs, by their position in [`Step::outputs`], or has failed. Others stay
    /// unset: what takes them runs without. Gives the names of those among them that somebody wants.
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

    /// As [`Flow::done`], for one of any number of responses of a decoupled step.
    pub fn response(&mut self, id: CallId, made: Output<T>) -> Vec<String> {
        let number = self.number();
        let Some(open) = self.calls.get_mut(&id).filter(|open| !open.ended) else { return Vec::new() };
        let (step, Some(stage)) = (open.step, self.stages.ended_by(open.step)) else { return Vec::new() };
        match made {
            Err(error) => {
                open.ended = true;
                open.slots.push_back((number, Slot::Failed(error)));
                self.move_on(id);
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

    /// A decoupled step gives no more responses.
    pub fn ended(&mut self, id: CallId) {
        if let Some(open) = self.calls.get_mut(&id) {
            open.ended = true;
            self.move_on(id);
        }
    }

    /// Whether anything that comes of a step is still wanted.
    pub fn is_open(&self, id: CallId) -> bool {
        self.calls.get(&id).is_some_and(|open| !open.ended)
    }

    /// Responses of a decoupled step that everything has been made of, and that wait for one before them.
    pub fn waiting(&self, id: CallId) -> usize {
        self.calls.get(&id).map_or(0, |open| open.complete)
    }

    /// The next response. After an error there are no others.
    pub fn next_output(&mut self) -> Option<Output<T>> {
        self.outputs.pop_front()
    }

    /// Whether nothing runs, nothing can run, and no response is left.
    pub fn is_over(&self) -> bool {
        self.calls.is_empty() && self.ready.is_empty() && self.outputs.is_empty()
    }

    /// How many tensors are kept now.
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
            let steps = run.settle(id, value);
            self.ready.extend(steps.into_iter().map(|step| (number, step)));
        }
        let is_complete = run.is_complete();
        self.iterations.insert(number, Iteration { stage: 0, run, of: None });
        if is_complete {
            self.completed(number);
        }
    }

    /// What a step makes is there, for this iteration.
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

    /// A stage has made everything: it goes on when its turn comes.
    fn completed(&mut self, number: u64) {
        let Some(of) = self.iterations.get(&number).map(|iteration| iteration.of) else { return };
        let Some(call) = of else { return self.go_on(number) };
        let Some(open) = self.calls.get_mut(&call) else { return };
        let position = open.slots.binary_search_by_key(&number, |(number, _)| *number);
        if let Some((_, slot)) = position.ok().and_then(|position| open.slots.get_mut(position)) {
            *slot = Slot::Complete;
            open.complete += 1;
        }
        self.move_on(call);
    }

    /// Lets go on what has been made of a decoupled step's responses, up to the first of which it has not.
    fn move_on(&mut self, id: CallId) {
        loop {
            let Some(open) = self.calls.get_mut(&id) else { return };
            match open.slots.pop_front() {
                Some((number, Slot::Running)) => {
                    open.slots.push_front((number, Slot::Running));
                    return;
                }
                Some((number, Slot::Complete)) => {
                    open.complete -= 1;
                    self.go_on(number);
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

    /// What a stage has made becomes a response, or goes to the decoupled step behind it.
    fn go_on(&mut self, number: u64) {
        let Some(iteration) = self.iterations.get_mut(&number) else { return };
        if let Some(producer) = self.stages.producer(iteration.stage) {
            self.ready.push_back((number, producer));
            return;
        }
        let outputs = self.requested.iter().filter_map(|at| self.plan.outputs().get(*at)).copied();
        let values = iteration.run.take(&outputs.collect::<Vec<_>>());
        let values = values.into_iter().filter_map(|(at, value)| Some((*self.requested.get(at)?, value)));
        self.outputs.push_back(Ok(values.collect()));
        self.iterations.remove(&number);
    }

    /// A step has failed: what has been made of responses before it goes on, then the request ends.
    fn fail(&mut self, number: u64, error: InferError) {
        let Some(of) = self.iterations.get(&number).map(|iteration| iteration.of) else { return };
        let Some(call) = of else { return self.end(error) };
        let Some(open) = self.calls.get_mut(&call) else { return };
        let Ok(position) = open.slots.binary_search_by_key(&number, |(number, _)| *number) else { return };
        let given_up: BTreeSet<u64> = open.slots.split_off(position).into_iter().map(|(number, _)| number).collect();
        open.slots.push_back((number, Slot::Failed(error)));
        open.complete = open.slots.iter().filter(|(_, slot)| matches!(slot, Slot::Complete)).count();
        open.ended = true;
        self.calls.retain(|_, open| !given_up.contains(&open.iteration));
        self.ready.retain(|(number, _)| !given_up.contains(number));
        given_up.iter().for_each(|number| drop(self.iterations.remove(number)));
        self.move_on(call);
    }

    /// The request ends with an error, whatever is still running.
    fn end(&mut self, error: InferError) {
        self.iterations.clear();
        self.ready.clear();
        self.calls.clear();
        self.outputs.push_back(Err(error));
    }
}
