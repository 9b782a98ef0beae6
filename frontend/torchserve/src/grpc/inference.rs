//! `InferenceAPIsService`: health and predictions.

use std::pin::Pin;
use std::sync::Arc;

use futures_util::{StreamExt as _, TryStreamExt as _};
use tonic::codegen::tokio_stream::Stream;
use tonic::{Request, Response, Status, Streaming};

use super::prediction::Prediction;
use super::proto::inference::inference_ap_is_service_server::InferenceApIsService;
use super::proto::inference::{PredictionResponse, PredictionsRequest, TorchServeHealthResponse};
use super::sequences;
use crate::rest::Shared;
use pharos_edge::SharedCall;

/// The implementation of `InferenceAPIsService`.
pub(super) struct Inference(pub(super) Arc<Shared>);

type Parts = Pin<Box<dyn Stream<Item = Result<PredictionResponse, Status>> + Send>>;

impl Inference {
    async fn predict(
        &self,
        asked: PredictionsRequest,
        call: &SharedCall,
    ) -> Result<PredictionResponse, Status> {
        let mut prediction = Prediction::begin(&self.0, asked, true, call)?;
        let answer = match prediction.next().await {
            Some((part, _)) => part?,
            None => PredictionResponse::default(),
        };
        if let Some(timeline) = prediction.timeline() {
            call.lock().set_times(timeline);
        }
        Ok(answer)
    }
}

/// Takes the call of an inference from its request.
fn begun<T>(request: &mut Request<T>) -> Result<SharedCall, Status> {
    let call = SharedCall::of(request)?;
    call.lock().read_headers(request.metadata().as_ref());
    Ok(call)
}

#[tonic::async_trait]
impl InferenceApIsService for Inference {
    async fn ping(
        self: Arc<Self>,
        _: Request<()>,
    ) -> Result<Response<TorchServeHealthResponse>, Status> {
        let text = if self.0.registry.is_healthy() { "Healthy" } else { "Unhealthy" };
        Ok(Response::new(TorchServeHealthResponse {
            health: format!("{{\n  \"status\": \"{text}\"\n}}"),
        }))
    }

    async fn predictions(
        self: Arc<Self>,
        mut request: Request<PredictionsRequest>,
    ) -> Result<Response<PredictionResponse>, Status> {
        let call = begun(&mut request)?;
        let answer = self.predict(request.into_inner(), &call).await;
        answer.map(Response::new).inspect_err(|_| call.lock().forget_timing())
    }

    type StreamPredictionsStream = Parts;

    async fn stream_predictions(
        self: Arc<Self>,
        mut request: Request<PredictionsRequest>,
    ) -> Result<Response<Parts>, Status> {
        let call = begun(&mut request)?;
        let prediction = Prediction::begin(&self.0, request.into_inner(), true, &call);
        let prediction = prediction.inspect_err(|_| call.lock().forget_timing())?;
        Ok(streamed(call, prediction.parts()))
    }

    type StreamPredictions2Stream = Parts;

    async fn stream_predictions2(
        self: Arc<Self>,
        mut request: Request<Streaming<PredictionsRequest>>,
    ) -> Result<Response<Parts>, Status> {
        let call = begun(&mut request)?;
        let answers = sequences::answers(self.0.clone(), request.into_inner(), call.clone());
        Ok(streamed(call, answers))
    }
}

/// Returns a streamed answer that notes the reason for which the stream fails. The times of its
/// requests are not known when the stream begins.
fn streamed(
    call: SharedCall,
    parts: impl Stream<Item = Result<PredictionResponse, Status>> + Send + 'static,
) -> Response<Parts> {
    Response::new(parts.inspect_err(move |status| call.note_failure(status)).boxed())
}
