//! What clients do: they send requests, load and unload models, and change the repository.

use std::fmt;
use std::future::poll_fn;
use std::sync::Arc;
use std::time::Duration;

use pharos::error::InferError;
use pharos::infer::{InferInput, InferRequest};
use pharos::repository::memory_budget::Memory;
use pharos::repository::{LoadScope, Override};
use pharos::tensor::{DataType, Tensor};
use pharos::timeline::Instant;
use tokio::task::JoinHandle;

use super::World;
use super::repository::{self, ENSEMBLES, MODELS};
use crate::calls::Models;
use crate::loader::Loader;
use crate::model_memory::Totals;
use crate::simulation::calls::values_of;
use crate::simulation::worker::answer_to;
use pharos_os::clock;

/// The longest time that anything may take: several processes that do not stop, one after the
/// other.
const LONGEST: Duration = Duration::from_secs(15);

/// What a client waits for.
#[derive(Clone, Debug)]
pub(super) enum Operation {
    Start,
    /// A request to a model with a value.
    Infer {
        model: String,
        value: u64,
    },
    Load(String),
    Unload(String),
    ShutDown,
}

impl fmt::Display for Operation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Start => f.write_str("the start"),
            Self::Infer { model, value } => write!(f, "request {value} to '{model}'"),
            Self::Load(model) => write!(f, "the load of '{model}'"),
            Self::Unload(model) => write!(f, "the unload of '{model}'"),
            Self::ShutDown => f.write_str("the end"),
        }
    }
}

/// What an operation has led to: the value of the answer of a request, or an error for the client.
type Outcome = Result<Option<u64>, String>;

/// An operation that has not ended.
struct Open {
    operation: Operation,
    began: Instant,
    task: JoinHandle<Outcome>,
}

/// The operations that have not ended.
#[derive(Default)]
pub(super) struct Clients {
    open: Vec<Open>,
    next_value: u64,
    /// The last error of a request or a load.
    last_error: String,
}

impl Clients {
    /// Begins an operation.
    pub(super) fn begin(
        &mut self,
        operation: Operation,
        work: impl Future<Output = Outcome> + Send + 'static,
    ) {
        self.open.push(Open { operation, began: clock::now(), task: tokio::spawn(work) });
    }

    pub(super) fn any_open(&self) -> bool {
        !self.open.is_empty()
    }

    /// Returns an operation that has not ended.
    pub(super) fn open(&self) -> Option<&Operation> {
        self.open.first().map(|open| &open.operation)
    }
}

impl World {
    /// Loads the models of the start.
    pub(super) fn start(&mut self) {
        let loader = self.loader.clone();
        self.clients.begin(Operation::Start, async move {
            loader.load_at_start().await.map(|_| None).map_err(|error| error.to_string())
        });
    }

    /// Does something at random.
    pub(super) fn act(&mut self) {
        let name = self.some_model();
        let by_request = self.mode.by_request();
        let [change, load, unload, cancel] = self.rates;
        match self.random.below(100) {
            number if number < change => self.change(&name),
            number if number < change + load && by_request => self.load(name),
            number if number < change + load + unload && by_request => self.unload(name),
            number if number < change + load + unload + cancel => self.cancel(),
            _ => {
                let limit_us =
                    if self.random.chance(8) { 1_000 + self.random.below(50_000) } else { 0 };
                self.send(name, limit_us);
            }
        }
    }

    /// Returns the name of a model or an ensemble; some are chosen more often.
    fn some_model(&mut self) -> String {
        let all = MODELS.len() as u64 + ENSEMBLES.len() as u64;
        let number = usize::try_from(self.random.below(all).min(self.random.below(all))).unwrap();
        let name = ENSEMBLES
            .get(number)
            .map_or_else(|| MODELS[number - ENSEMBLES.len()], |(name, _)| name);
        name.to_owned()
    }

    /// Sends a request with a limit of its time in microseconds, 0 for none.
    fn send(&mut self, model: String, limit_us: u64) {
        self.clients.next_value += 1;
        let value = self.clients.next_value;
        let data = value.to_le_bytes().to_vec().into();
        let tensor = Tensor { datatype: DataType::Uint64, shape: vec![1, 1], data };
        let inputs = vec![InferInput { name: "IN".into(), tensor }];
        let mut request = InferRequest {
            model_name: model.clone(),
            inputs,
            timeout_us: limit_us,
            ..InferRequest::default()
        };
        request.timeline.request_start = self.now;
        self.clients.begin(Operation::Infer { model, value }, infer(self.loader.clone(), request));
    }

    fn change(&mut self, name: &str) {
        self.coverage.changes += 1;
        self.repository.change(name, &mut self.random);
    }

    /// Loads a model, sometimes after a change or with a configuration of the client.
    fn load(&mut self, model: String) {
        if self.random.chance(2) {
            self.change(&model);
        }
        self.coverage.loads += 1;
        let config = format!(
            r#"{{"backend": "builtin", "max_batch_size": 4,
                "input": [{{"name": "IN", "data_type": "TYPE_UINT64", "dims": [1]}}],
                "output": [{{"name": "OUT", "data_type": "TYPE_UINT64", "dims": [1]}}],
                "instance_group": [{{"count": {}, "kind": "KIND_CPU"}}]}}"#,
            1 + self.random.below(2)
        );
        let given = self.random.chance(4) && model.starts_with('m');
        let config = given.then(|| Override { config, ..Override::default() });
        self.load_with(model, config);
    }

    /// Loads a model, with a configuration of the client if there is one.
    fn load_with(&mut self, model: String, config: Option<Override>) {
        let loader = self.loader.clone();
        let name = model.clone();
        self.clients.begin(Operation::Load(model), async move {
            loader
                .load_model(&name, config, LoadScope::Code)
                .await
                .map(|()| None)
                .map_err(|error| error.message)
        });
    }

    fn unload(&mut self, model: String) {
        self.coverage.unloads += 1;
        let loader = self.loader.clone();
        let name = model.clone();
        let dependents = self.random.chance(2);
        self.clients.begin(Operation::Unload(model), async move {
            loader
                .unload_model(&name, dependents)
                .await
                .map(|()| None)
                .map_err(|error| error.message)
        });
    }

    /// A client goes away.
    fn cancel(&mut self) {
        let some = usize::try_from(self.random.below(1 + self.clients.open.len() as u64)).unwrap();
        if some < self.clients.open.len() {
            self.coverage.cancelled += 1;
            self.clients.open.swap_remove(some).task.abort();
        }
    }

    /// Looks at what has ended.
    ///
    /// # Errors
    /// An answer is wrong, or a task has panicked.
    pub(super) async fn collect(&mut self) -> Result<(), String> {
        let mut position = 0;
        while position < self.clients.open.len() {
            if !self.clients.open[position].task.is_finished() {
                position += 1;
                continue;
            }
            let Open { operation, began, task } = self.clients.open.remove(position);
            let outcome = task.await.map_err(|error| format!("{operation}: {error}"))?;
            self.note(u64::from(outcome.is_ok()));
            let took = self.now - began;
            if took > LONGEST {
                return Err(format!("{operation} takes {took:?}: {outcome:?}"));
            }
            self.ended(&operation, outcome)?;
        }
        Ok(())
    }

    fn ended(&mut self, operation: &Operation, outcome: Outcome) -> Result<(), String> {
        match (operation, outcome) {
            (Operation::Infer { model, value }, Ok(answer)) => {
                let steps = match model.as_str() {
                    "e0" => 2,
                    "e1" => 3,
                    _ => 1,
                };
                let expected = (0..steps).fold(*value, |value, _| answer_to(value));
                if answer != Some(expected) {
                    return Err(format!(
                        "{operation} is answered with {answer:?} instead of {expected}"
                    ));
                }
                self.coverage.answered += 1;
            }
            (Operation::Infer { .. }, Err(error)) => {
                self.coverage.refused += 1;
                self.clients.last_error = error;
            }
            (Operation::Load(_), Err(error)) => {
                self.coverage.failed_loads += 1;
                self.clients.last_error = error;
            }
            (Operation::Start | Operation::Unload(_) | Operation::ShutDown, Err(error)) => {
                return Err(format!("{operation}: {error}"));
            }
            _ => {}
        }
        Ok(())
    }

    /// Restores the repository, and checks that each model can be loaded and answers.
    ///
    /// # Errors
    /// One does not.
    pub(super) async fn recover(&mut self) -> Result<(), String> {
        self.repository.restore();
        // Polls see it twice, and pauses after failed loads end.
        self.pass(self.now + Duration::from_secs(61)).await?;
        if !self.mode.by_request() {
            for name in repository::names() {
                self.check_answer(name).await?;
            }
            return Ok(());
        }
        // Not all fit into a limited memory at the same time.
        self.unload_all().await?;
        for name in repository::names() {
            let on_demand = self.loader.models().snapshot().on_demand.contains_key(name);
            // A model that was unloaded while the repository did not have it is no longer loaded on
            // demand.
            if !on_demand {
                let before = self.coverage.failed_loads;
                self.load_with(name.to_owned(), None);
                self.finish().await?;
                if self.coverage.failed_loads > before {
                    return Err(format!(
                        "'{name}' cannot be loaded at the end: {}",
                        self.clients.last_error
                    ));
                }
            }
            self.check_answer(name).await?;
            self.unload_all().await?;
        }
        Ok(())
    }

    /// Unloads all models, and lets their processes end.
    ///
    /// # Errors
    /// Something is left of one.
    async fn unload_all(&mut self) -> Result<(), String> {
        for name in repository::names() {
            self.unload(name.to_owned());
        }
        self.finish().await?;
        self.pass(self.now + Duration::from_secs(10)).await?;
        let totals = self.loader.models().shared.memory.totals(Memory::Main);
        let living = self.processes.living();
        if living > 0 || totals != Totals::default() {
            return Err(format!("{living} processes and {totals:?} are left after all unloads"));
        }
        let loads = self.loader.models().loads.percentages();
        if !loads.is_empty() {
            return Err(format!("the loads of {loads:?} are left after all unloads"));
        }
        Ok(())
    }

    /// # Errors
    /// A model does not answer.
    async fn check_answer(&mut self, name: &str) -> Result<(), String> {
        let before = self.coverage.answered;
        self.send(name.to_owned(), 0);
        self.finish().await?;
        match self.coverage.answered == before {
            true => {
                let index = self.loader.index(false);
                Err(format!(
                    "'{name}' does not answer at the end: {}; {index:?}",
                    self.clients.last_error
                ))
            }
            false => Ok(()),
        }
    }
}

/// Sends a request as a model of the server does.
async fn infer(loader: Arc<Loader>, request: InferRequest) -> Outcome {
    let text = |error: InferError| error.message;
    let mut answers = Models::infer(loader, request, false).map_err(text)?;
    let answer = poll_fn(|cx| answers.poll_next(cx)).await;
    let response = answer.ok_or("there is no answer")?.answer.map_err(text)?;
    let output = response.outputs.first().ok_or("there is no output")?;
    Ok(values_of(&output.tensor).first().copied())
}
