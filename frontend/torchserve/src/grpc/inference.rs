//! `InferenceAPIsService`: health and predictions.

use std::pin::Pin;
use std::sync::Arc;

use futures_util::StreamExt;
use pharos::id::TenantId;
use pharos::service::Management;
use tonic::codegen::tokio_stream::Stream;
use tonic::metadata::{MetadataMap, MetadataValue};
use tonic::{Request, Response, Status, Streaming};

use super::call::Call;
use super::proto::inference::inference_ap_is_service_server::InferenceApIsService;
use super::proto::inference::{PredictionResponse, PredictionsRequest, TorchServeHealthResponse};
use super::sequences;
use crate::rest::Shared;

/// The implementation of `InferenceAPIsService`.
pub(super) struct Inference<S: Management>(pub(super) Arc<Shared<S>>);

type Parts = Pin<Box<dyn Stream<Item = Result<PredictionResponse, Status>> + Send>>;

impl<S: Management> Inference<S> {
    /// Returns the tenant that a request with this metadata belongs to.
    fn tenant(&self, metadata: &MetadataMap) -> TenantId {
        self.0.service.tenant(|name| metadata.get(name).map(MetadataValue::as_encoded_bytes))
    }
}

#[tonic::async_trait]
impl<S: Management> InferenceApIsService for Inference<S> {
    async fn ping(self: Arc<Self>, _: Request<()>) -> Result<Response<TorchServeHealthResponse>, Status> {
        let text = if self.0.registry.is_healthy() { "Healthy" } else { "Unhealthy" };
        Ok(Response::new(TorchServeHealthResponse { health: format!("{{\n  \"status\": \"{text}\"\n}}") }))
    }

    async fn predictions(
        self: Arc<Self>,
        request: Request<PredictionsRequest>,
    ) -> Result<Response<PredictionResponse>, Status> {
        let timing = self.0.timing.of(request.metadata().as_ref());
        let tenant = self.tenant(request.metadata());
        let mut call = Call::begin(&self.0, request.into_inner(), (true, tenant))?;
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
        let tenant = self.tenant(request.metadata());
        let call = Call::begin(&self.0, request.into_inner(), (true, tenant))?;
        Ok(Response::new(call.parts().boxed()))
    }

    type StreamPredictions2Stream = Parts;

    async fn stream_predictions2(
        self: Arc<Self>,
        request: Request<Streaming<PredictionsRequest>>,
    ) -> Result<Response<Parts>, Status> {
        let tenant = self.tenant(request.metadata());
        Ok(Response::new(sequences::answers(self.0.clone(), request.into_inner(), tenant).boxed()))
    }
}
