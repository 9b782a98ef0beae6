//! One prediction, from the request to the last part of the response.

use std::sync::Arc;

use futures_util::stream;
use pharos::error::InferError;
use pharos::id::CorrelationId;
use pharos::infer::InferRequest;
use pharos::service::{Responses, Streamed};
use pharos::timeline::{Instant, Timeline};
use tonic::codegen::tokio_stream::Stream;
use tonic::{Code, Status};

use super::failure;
use super::proto::inference::{PredictionResponse, PredictionsRequest};
use crate::form::{self, Part};
use crate::handler_call::{self, HandlerCall, check_size};
use crate::registry::{InFlight, Version};
use crate::rest::{EndedSequences, Shared, end_of, enter, first_of, loaded};
use crate::{Exception, Refused, failure as prediction};
use pharos_edge::SharedCall;
use pharos_os::clock;

/// A prediction in progress.
pub(super) struct Prediction {
    shared: Arc<Shared>,
    model: String,
    asked_version: String,
    version: Arc<Version>,
    sequence_id: Option<String>,
    stage: Stage,
    /// Whether the first response has been received.
    begun: bool,
    received: Instant,
    /// The timeline of the request, once it has succeeded.
    timeline: Option<Timeline>,
    _entered: InFlight,
}

/// The stage of a prediction.
enum Stage {
    /// The request waits while the first worker loads the model.
    Waits(Box<InferRequest>),
    /// The engine executes the request.
    Runs(Box<dyn Responses>),
    /// The response is complete.
    Ended,
}

impl Stage {
    /// Passes a request to the engine.
    fn runs(shared: &Shared, request: InferRequest, called: (&str, &str)) -> Result<Self, Status> {
        let refused = |error| status(&prediction::refused(&error, called, || prediction::End::Died));
        shared.stream(request, called).map(Self::Runs).map_err(refused)
    }
}

impl Prediction {
    /// Starts a request. The engine gets it now or, while the first worker loads the model, when the response is first polled.
    ///
    /// # Errors
    /// The model is unknown or has no worker, or the request is malformed.
    pub(super) fn begin(
        shared: &Arc<Shared>,
        asked: PredictionsRequest,
        starts: bool,
        call: &SharedCall,
    ) -> Result<Self, Status> {
        let PredictionsRequest { model_name, model_version, input, sequence_id } = asked;
        if model_name.is_empty() {
            let refused = Refused::bad_request("Parameter model_name is required.");
            return Err(Status::internal(format!("{}\nBadRequestException.()", refused.message)));
        }
        // TorchServe returns INTERNAL for every error before a request is queued.
        let internal = |refused: Refused| failure::with_code(Code::Internal, &refused);
        let version = shared.registry.find(&model_name, &model_version).map_err(internal)?;
        let entered = enter(shared, (&model_name, &model_version), &version).map_err(internal)?;
        let received = clock::now();
        form::check_parts(input.len()).map_err(internal)?;
        let parts: Vec<Part> = input.into_iter().map(|(name, data)| Part::bare(name, data)).collect();
        let mut handler_call = HandlerCall::default();
        let sequence = version.deployment().sequence.is_some().then(|| {
            let made = || format!("ts-seq-{}", shared.ids.next());
            let id = sequence_id.clone().filter(|id| !id.is_empty()).unwrap_or_else(made);
            let [name, start, _] = &shared.settings.sequence_headers;
            handler_call.headers.insert(name.clone(), id.as_str().into());
            if starts {
                handler_call.headers.insert(start.clone(), "true".into());
            }
            id
        });
        let id = shared.ids.next();
        let too_long = || Status::resource_exhausted("the parts of the request are too long for one element");
        let request = handler_call::request((&model_name, &model_version, &id), &parts, handler_call);
        let mut request = request.ok_or_else(too_long)?;
        if let Some(id) = sequence {
            request.correlation_id = CorrelationId::String(id);
            request.sequence_start = starts;
        }
        call.lock().complete(&mut request, received);
        request.timeline.received = received;
        request.timeline.request_start = received;
        let (model, asked_version, shared) = (model_name, model_version, shared.clone());
        let stage = match version.is_loading() {
            true => Stage::Waits(Box::new(request)),
            false => Stage::runs(&shared, request, (&model, &asked_version))?,
        };
        Ok(Self {
            shared,
            model,
            asked_version,
            version,
            sequence_id,
            stage,
            begun: false,
            received,
            timeline: None,
            _entered: entered,
        })
    }

    /// Waits until the engine has accepted the request.
    async fn run(&mut self) -> Result<(), Status> {
        let Stage::Waits(_) = &self.stage else { return Ok(()) };
        let called = (self.model.as_str(), self.asked_version.as_str());
        loaded(&self.shared, called, (&self.version, self.received)).await.map_err(|refused| status(&refused))?;
        if let Stage::Waits(request) = std::mem::replace(&mut self.stage, Stage::Ended) {
            match self.shared.stream(*request, (&self.model, &self.asked_version)) {
                Ok(responses) => self.stage = Stage::Runs(responses),
                Err(error) => return Err(self.failed(&error).await),
            }
        }
        Ok(())
    }

    /// Returns the timeline of the request after its last part, if it has succeeded.
    pub(super) fn timeline(&self) -> Option<&Timeline> {
        self.timeline.as_ref()
    }

    /// Returns the sequence id of the request.
    pub(super) fn sequence_id(&self) -> Option<String> {
        self.sequence_id.clone()
    }

    /// Streams all parts of the response; an error is the last item.
    pub(super) fn parts(self) -> impl Stream<Item = Result<PredictionResponse, Status>> + Send {
        stream::unfold(Some(self), async |prediction| {
            let mut prediction = prediction?;
            let (part, last) = prediction.next().await?;
            let goes_on = !last && part.is_ok();
            Some((part, goes_on.then_some(prediction)))
        })
    }

    /// Returns the next part and whether it is the last; `None` after the last.
    pub(super) async fn next(&mut self) -> Option<(Result<PredictionResponse, Status>, bool)> {
        if let Err(status) = self.run().await {
            return Some((Err(status), true));
        }
        let Stage::Runs(responses) = &mut self.stage else { return None };
        let begun = std::mem::replace(&mut self.begun, true);
        let streamed = match begun {
            true => responses.next_response().await,
            false => match first_of(&mut **responses, &self.version, self.received).await {
                Ok(streamed) => streamed,
                Err(error) => return Some((Err(self.failed(&error).await), true)),
            },
        };
        let Streamed { answer, last, empty } = streamed?;
        self.timeline = answer.as_ref().ok().map(|response| response.timeline).filter(|_| last);
        if empty && answer.is_ok() {
            return None;
        }
        let most = self.shared.settings.max_response_size;
        let part = match answer
            .and_then(handler_call::answer)
            .and_then(|answer| check_size(&answer.body, most).map(|()| answer))
        {
            Ok(answer) => {
                if let Some(ended) = EndedSequences::of(&self.shared, &self.version) {
                    ended.close(&answer.headers);
                }
                Ok(PredictionResponse { prediction: answer.body, sequence_id: self.sequence_id.clone(), status: None })
            }
            Err(error) => Err(self.failed(&error).await),
        };
        Some((part, last))
    }

    async fn failed(&mut self, error: &InferError) -> Status {
        let end = end_of(&self.shared, error, &self.version, self.received).await;
        status(&prediction::refused(error, (&self.model, &self.asked_version), || end))
    }
}

/// Returns the status of a refusal. TorchServe returns INTERNAL for every error before a request is queued.
fn status(refused: &Refused) -> Status {
    match refused.exception {
        Exception::ServiceUnavailable => failure::with_code(Code::Internal, refused),
        _ => failure::status(refused),
    }
}
