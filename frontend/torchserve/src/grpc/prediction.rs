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
use crate::form::{self, FormPart};
use crate::handler_call::{self, HandlerCall, check_size};
use crate::registry::{InFlight, ModelReference, Version};
use crate::rest::{
    EndedSequences, Shared, accept, end_of_worker, first_response, wait_until_loaded,
};
use crate::{ErrorResponse, Exception, failure as prediction};
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
    _in_flight: InFlight,
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
    fn runs(
        shared: &Shared,
        request: InferRequest,
        reference: ModelReference<'_>,
    ) -> Result<Self, Status> {
        match shared.stream(request, reference) {
            Ok(responses) => Ok(Self::Runs(responses)),
            Err(error) => {
                Err(status(&prediction::refused(&error, reference, || prediction::End::Died)))
            }
        }
    }
}

impl Prediction {
    /// Starts a request. The engine gets it now or, while the first worker loads the model, when
    /// the response is first polled.
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
            let refused = ErrorResponse::bad_request("Parameter model_name is required.");
            return Err(Status::internal(format!("{}\nBadRequestException.()", refused.message)));
        }
        // TorchServe returns INTERNAL for every error before a request is queued.
        let internal = |refused: ErrorResponse| failure::with_code(Code::Internal, &refused);
        let version = shared.registry.find(&model_name, &model_version).map_err(internal)?;
        let reference = ModelReference { name: &model_name, version: &model_version };
        let in_flight = accept(shared, reference, &version).map_err(internal)?;
        let received = clock::now();
        form::check_parts(input.len()).map_err(internal)?;
        let parts: Vec<FormPart> =
            input.into_iter().map(|(name, data)| FormPart::bare(name, data)).collect();
        let mut handler_call = HandlerCall::default();
        let sequence = version.deployment().sequence.is_some().then(|| {
            let given = sequence_id.clone().filter(|id| !id.is_empty());
            let id = given.unwrap_or_else(|| format!("ts-seq-{}", shared.ids.next()));
            let [name, start, _] = &shared.settings.sequence_headers;
            handler_call.headers.insert(name.clone(), id.as_str().into());
            if starts {
                handler_call.headers.insert(start.clone(), "true".into());
            }
            id
        });
        let id = shared.ids.next();
        let mut request =
            handler_call::request(reference, &id, &parts, handler_call).ok_or_else(|| {
                Status::resource_exhausted("the parts of the request are too long for one element")
            })?;
        if let Some(id) = sequence {
            request.correlation_id = CorrelationId::String(id);
            request.sequence_start = starts;
        }
        call.lock().describe_client_in(&mut request, received);
        request.timeline.received = received;
        request.timeline.request_start = received;
        let stage = match version.is_loading() {
            true => Stage::Waits(Box::new(request)),
            false => Stage::runs(shared, request, reference)?,
        };
        Ok(Self {
            shared: shared.clone(),
            model: model_name,
            asked_version: model_version,
            version,
            sequence_id,
            stage,
            begun: false,
            received,
            timeline: None,
            _in_flight: in_flight,
        })
    }

    /// Waits until the engine has accepted the request.
    async fn run(&mut self) -> Result<(), Status> {
        let Stage::Waits(_) = &self.stage else { return Ok(()) };
        let loaded =
            wait_until_loaded(&self.shared, self.reference(), &self.version, self.received).await;
        loaded.map_err(|refused| status(&refused))?;
        if let Stage::Waits(request) = std::mem::replace(&mut self.stage, Stage::Ended) {
            match self.shared.stream(*request, self.reference()) {
                Ok(responses) => self.stage = Stage::Runs(responses),
                Err(error) => return Err(self.failed(&error).await),
            }
        }
        Ok(())
    }

    /// Returns the model and the version that the client named.
    fn reference(&self) -> ModelReference<'_> {
        ModelReference { name: &self.model, version: &self.asked_version }
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
            false => match first_response(&mut **responses, &self.version, self.received).await {
                Ok(streamed) => streamed,
                Err(error) => return Some((Err(self.failed(&error).await), true)),
            },
        };
        let Streamed { answer, last, empty } = streamed?;
        self.timeline = answer.as_ref().ok().map(|response| response.timeline).filter(|_| last);
        if empty && answer.is_ok() {
            return None;
        }
        let converted = answer.and_then(|response| {
            let answer = handler_call::answer(response)?;
            check_size(&answer.body, self.shared.settings.max_response_size)?;
            Ok(answer)
        });
        let part = match converted {
            Ok(answer) => {
                if let Some(ended) = EndedSequences::of(&self.shared, &self.version) {
                    ended.close(&answer.headers);
                }
                Ok(PredictionResponse {
                    prediction: answer.body,
                    sequence_id: self.sequence_id.clone(),
                    status: None,
                })
            }
            Err(error) => Err(self.failed(&error).await),
        };
        Some((part, last))
    }

    async fn failed(&mut self, error: &InferError) -> Status {
        let end = end_of_worker(&self.shared, error, &self.version, self.received).await;
        status(&prediction::refused(error, self.reference(), || end))
    }
}

/// Returns the status of a refusal. TorchServe returns INTERNAL for every error before a request is
/// queued.
fn status(refused: &ErrorResponse) -> Status {
    match refused.exception {
        Exception::ServiceUnavailable => failure::with_code(Code::Internal, refused),
        _ => failure::status(refused),
    }
}
