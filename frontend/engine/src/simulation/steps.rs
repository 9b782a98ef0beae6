//! The requests of the steps of ensembles in a simulation.

use std::sync::{Arc, Mutex};
use std::task::{Context, Poll};

use pharos::ensemble::Step;
use pharos::error::InferError;
use pharos::id::{CorrelationId, ModelVersion};
use pharos::infer::InferRequest;
use pharos::metrics::cache::Cache;
use pharos::metrics::series::ModelSeries;
use pharos::model::ModelConfig;
use pharos::service::Streamed;

use super::calls::{is_refused, values_of};
use super::models::{Counted, Model};
use crate::ensemble::{Ensemble, Member, Members, ResponseSource};
use crate::scheduler::{self, Driver, InferResult};

/// A model, or an ensemble, as ensembles see it.
pub(super) struct StepModel {
    pub(super) model: ModelVersion,
    pub(super) config: Arc<ModelConfig>,
    pub(super) series: Arc<ModelSeries>,
    pub(super) kind: Kind,
}

pub(super) enum Kind {
    /// A model with its position among the models of the simulation.
    Model(usize, Arc<Driver>),
    Ensemble(Ensemble),
}

impl Member for StepModel {
    fn model(&self) -> &ModelVersion {
        &self.model
    }

    fn config(&self) -> &Arc<ModelConfig> {
        &self.config
    }

    fn series(&self) -> &Arc<ModelSeries> {
        &self.series
    }

    fn ensemble(&self) -> Option<&Ensemble> {
        match &self.kind {
            Kind::Model(..) => None,
            Kind::Ensemble(ensemble) => Some(ensemble),
        }
    }

    fn accept(&self) -> Result<(), InferError> {
        Ok(())
    }
}

/// The models, and the requests of all steps.
pub(super) struct Steps {
    metrics: Arc<Cache>,
    models: Vec<Arc<StepModel>>,
    // Held to add, find or change one request.
    requests: Mutex<Vec<StepRequest>>,
    // Held to read or change the counts of one model.
    counted: Mutex<Vec<Counted>>,
}

/// A request of a step.
struct StepRequest {
    model: usize,
    values: Vec<u64>,
    /// How often a process has received it.
    executed: u32,
    /// Whether it had a response, so that it must not be executed again.
    answered: bool,
}

impl Steps {
    /// Lets steps use these models.
    pub(super) fn new(metrics: &Arc<Cache>, models: &[Model]) -> Arc<Self> {
        let counted = Mutex::new(vec![Counted::default(); models.len()]);
        let models = models.iter().enumerate().map(|(number, model)| {
            let driver = model.driver.clone();
            let config = model.config.clone();
            let model = driver.model.clone();
            let series = driver.series.clone();
            Arc::new(StepModel { model, config, series, kind: Kind::Model(number, driver) })
        });
        let models = models.collect();
        Arc::new(Self { metrics: metrics.clone(), models, requests: Mutex::default(), counted })
    }

    /// Returns what the steps of all ensembles have seen of a model.
    pub(super) fn counted(&self, model: usize) -> Counted {
        self.counted.lock().unwrap()[model]
    }

    /// Records that a process has received a request. Returns how often it was received; `None` if
    /// no step has sent it.
    ///
    /// # Errors
    /// It had a response before.
    pub(super) fn received(&self, model: usize, values: &[u64]) -> Result<Option<u32>, ()> {
        let mut requests = self.requests.lock().unwrap();
        let found =
            requests.iter_mut().rfind(|request| request.model == model && request.values == values);
        let Some(request) = found else { return Ok(None) };
        request.executed += 1;
        if request.answered { Err(()) } else { Ok(Some(request.executed)) }
    }

    /// Begins to count a request. Returns the driver that executes it.
    fn begin(
        self: &Arc<Self>,
        member: &StepModel,
        request: &mut InferRequest,
    ) -> (Counting, Arc<Driver>) {
        let Kind::Model(model, driver) = &member.kind else {
            panic!("steps of these ensembles are models")
        };
        let values = values_of(&request.inputs[0].tensor);
        self.counted.lock().unwrap()[*model].sent += 1;
        let mut requests = self.requests.lock().unwrap();
        requests.push(StepRequest { model: *model, values, executed: 0, answered: false });
        (
            Counting {
                steps: self.clone(),
                model: *model,
                number: requests.len() - 1,
                ended: false,
            },
            driver.clone(),
        )
    }
}

/// Counts the end of a step's request; as cancelled if dropped before.
struct Counting {
    steps: Arc<Steps>,
    model: usize,
    number: usize,
    ended: bool,
}

impl Counting {
    fn answered(&self) {
        self.steps.requests.lock().unwrap()[self.number].answered = true;
    }

    fn ended(&mut self, answer: &InferResult) {
        self.ended = true;
        let counted = &mut self.steps.counted.lock().unwrap()[self.model];
        match answer {
            Ok(_) => counted.succeeded += 1,
            Err(error) if is_refused(error) => counted.refused += 1,
            Err(_) => counted.failed += 1,
        }
    }
}

impl Drop for Counting {
    fn drop(&mut self) {
        if !self.ended {
            self.steps.counted.lock().unwrap()[self.model].cancelled += 1;
        }
    }
}

/// The responses of a decoupled step.
pub(super) struct StepResponses {
    responses: scheduler::InstanceResponses,
    counting: Counting,
}

impl ResponseSource for StepResponses {
    fn poll_next(&mut self, cx: &mut Context<'_>) -> Poll<Option<Streamed>> {
        let next = self.responses.poll_next(cx);
        if let Poll::Ready(Some(streamed)) = &next {
            if streamed.answer.is_ok() && !streamed.empty {
                self.counting.answered();
            }
            if streamed.last {
                self.counting.ended(&streamed.answer);
            }
        }
        next
    }
}

impl Members for Steps {
    type Member = StepModel;
    type Responses = StepResponses;

    fn metrics(&self) -> &Cache {
        &self.metrics
    }

    fn member(&self, step: &Step) -> Result<Arc<StepModel>, InferError> {
        Ok(self
            .models
            .iter()
            .find(|member| *member.model.name == *step.model)
            .expect("a known model")
            .clone())
    }

    fn with_sequence(&self, _: &Step, _: &CorrelationId) -> Option<Arc<StepModel>> {
        None
    }

    fn begin_sequence(&self, _: &Step, _: &CorrelationId) {}

    fn has_replaced_members(&self, _version: &StepModel) -> bool {
        false
    }

    async fn infer(
        self: &Arc<Self>,
        member: &Arc<StepModel>,
        mut request: Box<InferRequest>,
    ) -> InferResult {
        let checked = member.config.check(&mut request)?;
        let (mut counting, driver) = self.begin(member, &mut request);
        let answer = driver.infer(request, checked).await;
        if answer.is_ok() {
            counting.answered();
        }
        counting.ended(&answer);
        answer
    }

    fn stream(
        self: &Arc<Self>,
        member: &Arc<StepModel>,
        mut request: InferRequest,
    ) -> Result<StepResponses, InferError> {
        let checked = member.config.check(&mut request)?;
        let (counting, driver) = self.begin(member, &mut request);
        Ok(StepResponses { responses: driver.stream(request, checked), counting })
    }
}
