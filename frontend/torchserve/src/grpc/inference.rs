//! `InferenceAPIsService`: health and predictions.

use std::pin::Pin;
use std::sync::Arc;

use futures_util::{StreamExt as _, TryStreamExt as _};
use tonic::codegen::tokio_stream::Stream;
use tonic::{Request, Response, Status, Streaming};

use super::CallerDeadline;
use super::call::{Call, Caller};
use super::failure::StreamFailure;
use super::proto::inference::inference_ap_is_service_server::InferenceApIsService;
use super::proto::inference::{PredictionResponse, PredictionsRequest, TorchServeHealthResponse};
use super::sequences;
use crate::rest::Shared;
use pharos_edge::response_timing::AnswerTiming;
use pharos_edge::tenants;

/// The implementation of `InferenceAPIsService`.
pub(super) struct Inference(pub(super) Arc<Shared>);

type Parts = Pin<Box<dyn Stream<Item = Result<PredictionResponse, Status>> + Send>>;

impl Inference {
    fn caller<T>(&self, request: &Request<T>, timing: &AnswerTiming) -> Caller {
        let tenant = tenants::of(&*self.0.service, request.metadata().as_ref(), request.extensions());
        let deadline = request.extensions().get().and_then(|CallerDeadline(deadline)| *deadline);
        Caller { tenant, trace: timing.trace(), deadline }
    }
}

#[tonic::async_trait]
impl InferenceApIsService for Inference {
    async fn ping(self: Arc<Self>, _: Request<()>) -> Result<Response<TorchServeHealthResponse>, Status> {
        let text = if self.0.registry.is_healthy() { "Healthy" } else { "Unhealthy" };
        Ok(Response::new(TorchServeHealthResponse { health: format!("{{\n  \"status\": \"{text}\"\n}}") }))
    }

    async fn predictions(
        self: Arc<Self>,
        request: Request<PredictionsRequest>,
    ) -> Result<Response<PredictionResponse>, Status> {
        let timing = self.0.timing.of(request.metadata().as_ref());
        let caller = self.caller(&request, &timing);
        let mut call = Call::begin(&self.0, request.into_inner(), (true, caller))?;
        let answer = match call.next().await {
            Some((part, _)) => part?,
            None => PredictionResponse::default(),
        };
        let mut response = Response::new(answer);
        let times = call.timeline().and_then(|timeline| timing.value(timeline));
        timing.add_to(response.metadata_mut().as_mut(), times);
        Ok(response)
    }

    type StreamPredictionsStream = Parts;

    async fn stream_predictions(
        self: Arc<Self>,
        request: Request<PredictionsRequest>,
    ) -> Result<Response<Parts>, Status> {
        let timing = self.0.timing.of(request.metadata().as_ref());
        let caller = self.caller(&request, &timing);
        let call = Call::begin(&self.0, request.into_inner(), (true, caller))?;
        Ok(streamed(timing, call.parts()))
    }

    type StreamPredictions2Stream = Parts;

    async fn stream_predictions2(
        self: Arc<Self>,
        request: Request<Streaming<PredictionsRequest>>,
    ) -> Result<Response<Parts>, Status> {
        let timing = self.0.timing.of(request.metadata().as_ref());
        let caller = self.caller(&request, &timing);
        Ok(streamed(timing, sequences::answers(self.0.clone(), request.into_inner(), caller)))
    }
}

/// Returns a streamed answer with the client's `traceparent`, and with the reason for which the stream fails. The times of its
/// requests are not known when the stream begins.
fn streamed(
    timing: AnswerTiming,
    parts: impl Stream<Item = Result<PredictionResponse, Status>> + Send + 'static,
) -> Response<Parts> {
    let failure = StreamFailure::default();
    let noted = failure.clone();
    let mut response = Response::new(parts.inspect_err(move |status| noted.note(status)).boxed());
    timing.add_to(response.metadata_mut().as_mut(), None);
    response.extensions_mut().insert(failure);
    response
}
