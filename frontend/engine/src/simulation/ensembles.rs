//! The ensembles of a simulation: the real code of ensembles sends requests of their steps to the
//! simulated models.

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, Waker};

use pharos::ensemble::{self, Plan, Stages};
use pharos::id::ModelVersion;
use pharos::infer::{InferInput, InferRequest};
use pharos::metrics::record;
use pharos::metrics::statistics;
use pharos::model::{Completion, Draft};
use pharos::service::Streamed;
use pharos::tensor::{DataType, Tensor};
use pharos::timeline::Timeline;

use super::calls::{Woken, values_of};
use super::models::Counted;
use super::steps::{Kind, StepModel, Steps};
use super::worker::{answer_to, responses_to};
use super::world::{Event, World};
use crate::ensemble::{Ensemble, EnsembleResponses, Member, Members, Target};
use crate::scheduler::InferResult;

const TENSORS: &str = "max_batch_size: 2 input { name: 'IN' data_type: TYPE_UINT64 dims: 1 } \
                       output { name: 'OUT' data_type: TYPE_UINT64 dims: 1 }";

/// Names and configurations: steps that follow each other, steps that run at the same time with a
/// limit of requests, a step for each response of another one, and the same with a step that has
/// several responses itself.
const CONFIGS: [(&str, &str); 4] = [
    (
        "chain",
        "ensemble_scheduling { step [
         { model_name: 'plain' model_version: -1 input_map { key: 'IN' value: 'IN' } output_map { \
         key: 'OUT' value: 'x' } },
         { model_name: 'ordered' model_version: -1 input_map { key: 'IN' value: 'x' } output_map { \
         key: 'OUT' value: 'OUT' } } ] }",
    ),
    (
        "fork",
        "output { name: 'OTHER' data_type: TYPE_UINT64 dims: 1 } ensemble_scheduling { \
         max_inflight_requests: 2 step [
         { model_name: 'plain' model_version: -1 input_map { key: 'IN' value: 'IN' } output_map { \
         key: 'OUT' value: 'OUT' } },
         { model_name: 'levels' model_version: -1 input_map { key: 'IN' value: 'IN' } output_map { \
         key: 'OUT' value: 'OTHER' } } ] }",
    ),
    (
        "stream",
        "ensemble_scheduling { step [
         { model_name: 'streamed' model_version: -1 input_map { key: 'IN' value: 'IN' } output_map \
         { key: 'OUT' value: 'x' } },
         { model_name: 'plain' model_version: -1 input_map { key: 'IN' value: 'x' } output_map { \
         key: 'OUT' value: 'OUT' } } ] }",
    ),
    (
        "burst",
        "ensemble_scheduling { step [
         { model_name: 'streamed' model_version: -1 input_map { key: 'IN' value: 'IN' } output_map \
         { key: 'OUT' value: 'x' } },
         { model_name: 'streamed' model_version: -1 input_map { key: 'IN' value: 'x' } output_map \
         { key: 'OUT' value: 'OUT' } } ] }",
    ),
];

/// The first value of ensembles, far from those of other clients, and the distance between two of
/// them: more than a request of the decoupled model has responses.
const FIRST_VALUE: u64 = 1 << 40;
const DISTANCE: u64 = 1 << 12;

/// An ensemble with its requests.
pub(super) struct SimulatedEnsemble {
    pub(super) name: &'static str,
    version: Arc<StepModel>,
    counted: Counted,
}

impl SimulatedEnsemble {
    fn ensemble(&self) -> &Ensemble {
        self.version.ensemble().expect("this is an ensemble")
    }

    /// Returns the outputs of all responses to values.
    fn expected(&self, values: &[u64]) -> Vec<Outputs> {
        let all =
            |to: &dyn Fn(u64) -> u64| values.iter().map(|value| to(*value)).collect::<Vec<_>>();
        match self.name {
            "fork" => vec![vec![all(&answer_to), all(&answer_to)]],
            "chain" => vec![vec![all(&|value| answer_to(answer_to(value)))]],
            "stream" => (0..responses_to(values[0]))
                .map(|n| vec![all(&|value| answer_to(answer_to(value + n)))])
                .collect(),
            _ => {
                let inner =
                    |n: u64| (0..responses_to(answer_to(values[0] + n))).map(move |m| (n, m));
                let numbers = (0..responses_to(values[0])).flat_map(inner);
                numbers
                    .map(|(n, m)| vec![all(&|value| answer_to(answer_to(value + n) + m))])
                    .collect()
            }
        }
    }

    /// Returns whether responses come in the order of [`SimulatedEnsemble::expected`]. Steps at the
    /// same time that have several responses each take turns.
    fn is_in_order(&self) -> bool {
        self.name != "burst"
    }
}

/// Creates all ensembles.
pub(super) fn all(steps: &Steps) -> Vec<SimulatedEnsemble> {
    CONFIGS.into_iter().map(|(name, text)| ensemble(steps, name, text)).collect()
}

fn ensemble(steps: &Steps, name: &'static str, text: &str) -> SimulatedEnsemble {
    let draft = Draft::from_text(&format!("platform: 'ensemble' {TENSORS} {text}"), "config.pbtxt")
        .unwrap();
    let config = draft.complete(&Completion { directory: name, ..Completion::default() }).unwrap();
    let plan = Plan::new(&config).unwrap().unwrap();
    let members: Vec<_> =
        plan.steps().iter().map(|step| steps.member(step).unwrap().config.clone()).collect();
    ensemble::check(&config, &plan, &members.iter().map(|config| &**config).collect::<Vec<_>>())
        .unwrap();
    let decoupled: Vec<bool> = members.iter().map(|config| config.decoupled).collect();
    let stages = Stages::new(name, &plan, &decoupled).unwrap();
    let config = Arc::new(config.with_decoupled(stages.is_decoupled()).unwrap());
    let model = ModelVersion::new(name, 1);
    let series = steps.metrics().model_loaded(&model, &[]);
    record::ensemble_loaded(
        steps.metrics(),
        &series,
        plan.steps().iter().map(|step| step.model.as_str()),
    );
    if config.decoupled {
        steps.metrics().model_decoupled(&series);
    }
    let kind = Kind::Ensemble(Ensemble::new(plan, stages, &config, None));
    SimulatedEnsemble {
        name,
        version: Arc::new(StepModel { model, config, series, kind }),
        counted: Counted::default(),
    }
}

/// A request to an ensemble, and its client.
pub(super) struct EnsembleCall {
    ensemble: usize,
    answers: Option<Answers>,
    woken: Arc<Woken>,
    /// The responses that have not come.
    expected: Vec<Outputs>,
    /// Whether its client reads no further responses for a time.
    pauses: bool,
}

/// The values of each output of a response.
type Outputs = Vec<Vec<u64>>;

/// What the client waits for.
enum Answers {
    One(Pin<Box<dyn Future<Output = InferResult>>>),
    Many(Box<EnsembleResponses<Steps>>),
}

impl EnsembleCall {
    /// Returns whether its client waits.
    pub(super) fn waits(&self) -> bool {
        self.answers.is_some()
    }

    /// Its client no longer pauses.
    pub(super) fn read_on(&mut self) {
        self.pauses = false;
        self.woken.set();
    }
}

impl World {
    /// Sends a request to an ensemble, and plans the next one.
    pub(super) fn send_to_ensemble(&mut self, number: usize) {
        // The number of responses depends on the value.
        let mut first =
            FIRST_VALUE + self.ensemble_calls.len() as u64 * DISTANCE + self.random.below(4);
        if self.ensembles[number].name == "burst" && responses_to(first) > 3 {
            // Otherwise there would be thousands of responses.
            first += 4;
        }
        let rows = 1 + self.random.below(2);
        let values: Vec<u64> = (0..rows).map(|row| first + row * DISTANCE / 2).collect();
        let data: Vec<u8> = values.iter().flat_map(|value| value.to_le_bytes()).collect();
        let tensor = Tensor {
            datatype: DataType::Uint64,
            shape: vec![i64::try_from(rows).unwrap(), 1],
            data: data.into(),
        };
        let inputs = vec![InferInput { name: "IN".into(), tensor }];
        let timeline = Timeline { request_start: self.now, ..Timeline::default() };
        let mut request = InferRequest { inputs, timeline, ..InferRequest::default() };
        let steps = self.steps.clone();
        let version = self.ensembles[number].version.clone();
        let checked = version.config.check(&mut request).unwrap();
        let answers = match version.config.decoupled {
            true => {
                let ensemble = version.ensemble().expect("an ensemble");
                let target = Target { members: &steps, version: &version, ensemble };
                Answers::Many(Box::new(EnsembleResponses::begin(&target, request, checked)))
            }
            false => Answers::One(Box::pin(async move {
                let ensemble = version.ensemble().expect("an ensemble");
                let target = Target { members: &steps, version: &version, ensemble };
                crate::ensemble::infer(target, request, checked).await
            })),
        };
        self.ensembles[number].counted.sent += 1;
        let expected = self.ensembles[number].expected(&values);
        self.open_at_ensembles.push(self.ensemble_calls.len());
        self.ensemble_calls.push(EnsembleCall {
            ensemble: number,
            answers: Some(answers),
            woken: Woken::new(),
            expected,
            pauses: false,
        });
        if self.random.chance(self.faults.cancel) {
            let after = self.random.below(12_000);
            self.after(after, Event::CancelEnsemble(self.ensemble_calls.len() - 1));
        }
        let pause = 1_000 + self.random.below(40_000);
        self.after(pause, Event::ArriveAtEnsemble(number));
    }

    /// The client of a request to an ensemble goes away.
    pub(super) fn cancel_ensemble(&mut self, call: usize) {
        let call = &mut self.ensemble_calls[call];
        if call.answers.take().is_some() {
            self.ensembles[call.ensemble].counted.cancelled += 1;
        }
    }

    /// Polls the requests to ensembles that were woken. Returns whether any was.
    ///
    /// # Errors
    /// An answer is wrong.
    pub(super) fn poll_ensemble_calls(&mut self) -> Result<bool, String> {
        let mut changed = false;
        let calls = &self.ensemble_calls;
        self.open_at_ensembles.retain(|number| calls[*number].waits());
        for at in 0..self.open_at_ensembles.len() {
            let number = self.open_at_ensembles[at];
            let call = &mut self.ensemble_calls[number];
            if !call.waits() || call.pauses || !call.woken.take() {
                continue;
            }
            changed = true;
            let waker = Waker::from(call.woken.clone());
            let mut context = Context::from_waker(&waker);
            let streamed = match call.answers.as_mut() {
                Some(Answers::One(answer)) => {
                    let answer = answer.as_mut().poll(&mut context);
                    answer.map(|answer| Some(Streamed { answer, last: true, empty: false }))
                }
                Some(Answers::Many(responses)) => responses.poll_next(&mut context),
                None => continue,
            };
            if let Poll::Ready(streamed) = streamed {
                // There may be more.
                call.woken.set();
                self.on_ensemble_response(
                    number,
                    streamed.ok_or("an ensemble's stream has no last response")?,
                )?;
            }
        }
        Ok(changed)
    }

    fn on_ensemble_response(
        &mut self,
        number: usize,
        Streamed { answer, last, empty }: Streamed,
    ) -> Result<(), String> {
        let call = &mut self.ensemble_calls[number];
        let one = &mut self.ensembles[call.ensemble];
        let name = one.name;
        if let (Ok(response), false) = (&answer, empty) {
            let got: Outputs =
                response.outputs.iter().map(|output| values_of(&output.tensor)).collect();
            let at = call.expected.iter().position(|expected| *expected == got);
            let at = at.filter(|at| *at == 0 || !one.is_in_order());
            let at = at.ok_or_else(|| {
                format!(
                    "request {number} to '{name}' has the response {got:?}, not {:?}",
                    call.expected.first()
                )
            })?;
            call.expected.remove(at);
            self.coverage.ensemble_responses += 1;
        }
        match answer {
            Ok(_) if last => {
                if !call.expected.is_empty() {
                    return Err(format!(
                        "request {number} to '{name}' ends without {:?}",
                        call.expected
                    ));
                }
                one.counted.succeeded += 1;
            }
            Ok(_) => {}
            Err(error) if !last || error.message.contains("bug in the server") => {
                return Err(format!(
                    "request {number} to '{name}', last {last}: {}",
                    error.message
                ));
            }
            Err(_) => one.counted.failed += 1,
        }
        if last {
            call.answers = None;
        } else if self.random.chance(6) {
            call.pauses = true;
            let pause = self.random.below(3_000);
            self.after(pause, Event::ReadEnsemble(number));
        }
        self.note(number as u64 + (1 << 32));
        Ok(())
    }

    /// The ensembles have as many requests as clients that wait.
    pub(super) fn check_ensembles(&self) -> Result<(), String> {
        for (number, one) in self.ensembles.iter().enumerate() {
            let open = self.open_at_ensembles.iter().map(|number| &self.ensemble_calls[*number]);
            let waiting = open.filter(|call| call.ensemble == number && call.waits()).count();
            if one.ensemble().in_flight() != waiting {
                let in_flight = one.ensemble().in_flight();
                return Err(format!(
                    "'{}' has {in_flight} requests, and {waiting} clients wait",
                    one.name
                ));
            }
        }
        Ok(())
    }

    /// Checks that nothing is left of ensembles when all requests are answered.
    ///
    /// # Errors
    /// What is left, or does not agree.
    pub(super) fn check_end_of_ensembles(&mut self) -> Result<(), String> {
        self.check_ensembles()?;
        for one in &self.ensembles {
            let name = one.name;
            let counted = one.counted;
            if let Some((step, taken)) = one.ensemble().places_taken().find(|(_, taken)| *taken > 0)
            {
                return Err(format!("'{name}' has {taken} places of step '{}' in use", step.model));
            }
            let seen = statistics::of(&one.version.series).inference_stats;
            let succeeded = seen.success.count;
            let failed = seen.fail.count;
            let successes = counted.succeeded..=counted.succeeded + counted.cancelled;
            if !successes.contains(&succeeded) || succeeded + failed != counted.sent {
                return Err(format!(
                    "'{name}': {succeeded} successes and {failed} failures are counted: \
                     {counted:?}"
                ));
            }
            self.coverage.ensembles.add(&counted);
        }
        Ok(())
    }
}
