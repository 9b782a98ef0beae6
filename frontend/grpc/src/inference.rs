//! `inference.GRPCInferenceService`: each rpc maps to one verb of the engine.

use std::future::Future;
use std::pin::pin;
use std::sync::Arc;

use pharos::error::{InferError, Reason};
use pharos::model::TensorMetadata;
use pharos::region::Kind;
use pharos::service::{Endpoint, Service, SharedService};
use tonic::{Request, Response, Status, Streaming};

use super::call::status;
use super::codec::{self, decode_for as decode};
use super::large_tensors;
use super::logging;
use super::proto::grpc_inference_service_server::GrpcInferenceService;
use super::proto::{self, model_metadata_response};
use super::raw::RawMessage;
use super::repository;
use super::shared_memory;
use super::statistics;
use super::stream::{self, Answers};
use super::trace;
use pharos_edge::{SharedCall, deadline};

/// The extensions advertised, in Triton's order.
const EXTENSIONS: [&str; 13] = [
    "classification",
    "sequence",
    "model_repository",
    "model_repository(unload_dependents)",
    "schedule_policy",
    "model_configuration",
    "system_shared_memory",
    "cuda_shared_memory",
    "binary_tensor_data",
    "parameters",
    "statistics",
    "trace",
    "logging",
];

/// The inference service.
pub(super) struct Inference(pub(super) SharedService);

type Answer<T> = Result<Response<T>, Status>;

impl Inference {
    /// Answers with the result of `verb`.
    fn answer<Q, A>(
        &self,
        request: Request<Q>,
        verb: impl FnOnce(&dyn Service, Q) -> Result<A, InferError>,
    ) -> Answer<A> {
        verb(&*self.0, request.into_inner()).map(Response::new).map_err(status)
    }

    /// Like [`Inference::answer`], for an asynchronous verb.
    async fn answer_later<Q, A, F>(
        &self,
        request: Request<Q>,
        verb: impl FnOnce(SharedService, Q) -> F,
    ) -> Answer<A>
    where
        F: Future<Output = Result<A, InferError>>,
    {
        verb(self.0.clone(), request.into_inner()).await.map(Response::new).map_err(status)
    }
}

fn ready_error(error: InferError) -> Result<bool, InferError> {
    // Clients expect OK and `false` for an unknown or unloaded model; only an invalid question is
    // an error.
    match error.reason {
        Reason::UnknownModel | Reason::NotReady => Ok(false),
        _ => Err(error),
    }
}

fn tensors(tensors: Vec<TensorMetadata>) -> Vec<model_metadata_response::TensorMetadata> {
    let tensors = tensors.into_iter();
    tensors
        .map(|tensor| model_metadata_response::TensorMetadata {
            name: tensor.name,
            datatype: tensor.datatype.to_owned(),
            shape: tensor.shape,
        })
        .collect()
}

#[tonic::async_trait]
impl GrpcInferenceService for Inference {
    async fn server_live(
        self: Arc<Self>,
        request: Request<proto::ServerLiveRequest>,
    ) -> Answer<proto::ServerLiveResponse> {
        self.answer(request, |service, _| Ok(proto::ServerLiveResponse { live: service.live() }))
    }

    async fn server_ready(
        self: Arc<Self>,
        request: Request<proto::ServerReadyRequest>,
    ) -> Answer<proto::ServerReadyResponse> {
        self.answer(request, |service, _| Ok(proto::ServerReadyResponse { ready: service.ready() }))
    }

    async fn model_ready(
        self: Arc<Self>,
        request: Request<proto::ModelReadyRequest>,
    ) -> Answer<proto::ModelReadyResponse> {
        self.answer_later(request, |service, asked| async move {
            let ready =
                service.model_ready(&asked.name, &asked.version).await.or_else(ready_error)?;
            Ok(proto::ModelReadyResponse { ready })
        })
        .await
    }

    async fn server_metadata(
        self: Arc<Self>,
        request: Request<proto::ServerMetadataRequest>,
    ) -> Answer<proto::ServerMetadataResponse> {
        self.answer(request, |service, _| {
            Ok(proto::ServerMetadataResponse {
                name: service.server_name().to_owned(),
                version: env!("CARGO_PKG_VERSION").to_owned(),
                extensions: EXTENSIONS.map(str::to_owned).to_vec(),
            })
        })
    }

    async fn model_metadata(
        self: Arc<Self>,
        request: Request<proto::ModelMetadataRequest>,
    ) -> Answer<proto::ModelMetadataResponse> {
        self.answer(request, |service, asked| {
            let metadata = service.model_metadata(&asked.name, &asked.version)?;
            Ok(proto::ModelMetadataResponse {
                name: metadata.name,
                versions: metadata.versions,
                platform: metadata.platform,
                inputs: tensors(metadata.inputs),
                outputs: tensors(metadata.outputs),
            })
        })
    }

    async fn model_infer(
        self: Arc<Self>,
        mut request: Request<proto::ModelInferRequest>,
    ) -> Answer<proto::ModelInferResponse> {
        let call = SharedCall::of(&mut request)?;
        let read = self.0.now();
        let limit = {
            let message = request.get_ref();
            let mut call = call.lock();
            call.name_model(&message.model_name, &message.model_version);
            call.read_headers(request.metadata().as_ref());
            call.begin_trace(&message.model_name, request.metadata().as_ref());
            call.deadline().map(|deadline| deadline.limit)
        };
        let inputs = request.extensions_mut().remove::<large_tensors::Inputs>().unwrap_or_default();
        let allows_large_outputs =
            request.extensions().get::<large_tensors::AllowsLargeOutputs>().is_some();
        let answer = {
            // Pinned here: passed by value, it would be copied several times.
            let infer = pin!(async {
                let mut request = decode(request.into_inner(), inputs, &*self.0).await?;
                call.lock().describe_client_in(&mut request, read);
                let response = self.0.infer(request, Endpoint::GrpcInfer).await;
                call.lock().has_responded();
                response
            });
            deadline::within(limit, infer).await
        };
        match answer {
            Ok(response) => {
                call.lock().set_times(&response.timeline);
                Ok(codec::encode_for(response, allows_large_outputs))
            }
            Err(error) => {
                call.lock().has_failed(&error);
                Err(status(error))
            }
        }
    }

    type ModelStreamInferStream = Answers;

    async fn model_stream_infer(
        self: Arc<Self>,
        mut request: Request<Streaming<proto::ModelInferRequest>>,
    ) -> Answer<Answers> {
        let call = SharedCall::of(&mut request)?;
        {
            let mut call = call.lock();
            call.do_not_count();
            // The times of its requests are not known when a stream begins, and there may be any
            // number of requests.
            call.read_headers(request.metadata().as_ref());
        }
        let errors_as_status =
            request.metadata().get("triton_grpc_error").is_some_and(|value| value == "true");
        let metadata = request.metadata().clone();
        let options = stream::StreamOptions { errors_as_status, metadata, call };
        Ok(Response::new(stream::answer(request.into_inner(), self.0.clone(), options)))
    }

    async fn model_config(
        self: Arc<Self>,
        request: Request<proto::ModelConfigRequest>,
    ) -> Answer<proto::ModelConfigResponse> {
        self.answer(request, |service, asked| {
            let config = service.model_config_proto(&asked.name, &asked.version)?;
            Ok(proto::ModelConfigResponse { config: Some(RawMessage(config.into())) })
        })
    }

    async fn model_statistics(
        self: Arc<Self>,
        request: Request<proto::ModelStatisticsRequest>,
    ) -> Answer<proto::ModelStatisticsResponse> {
        self.answer(request, |service, asked| {
            let models = service.statistics(&asked.name, &asked.version)?;
            Ok(proto::ModelStatisticsResponse {
                model_stats: models.into_iter().map(statistics::message).collect(),
            })
        })
    }

    async fn repository_index(
        self: Arc<Self>,
        request: Request<proto::RepositoryIndexRequest>,
    ) -> Answer<proto::RepositoryIndexResponse> {
        self.answer_later(request, repository::index).await
    }

    async fn repository_model_load(
        self: Arc<Self>,
        request: Request<proto::RepositoryModelLoadRequest>,
    ) -> Answer<proto::RepositoryModelLoadResponse> {
        self.answer_later(request, repository::load).await
    }

    async fn repository_model_unload(
        self: Arc<Self>,
        request: Request<proto::RepositoryModelUnloadRequest>,
    ) -> Answer<proto::RepositoryModelUnloadResponse> {
        self.answer_later(request, repository::unload).await
    }

    async fn system_shared_memory_status(
        self: Arc<Self>,
        request: Request<proto::SystemSharedMemoryStatusRequest>,
    ) -> Answer<proto::SystemSharedMemoryStatusResponse> {
        self.answer(request, |service, asked| shared_memory::system_status(service, &asked.name))
    }

    async fn system_shared_memory_register(
        self: Arc<Self>,
        request: Request<proto::SystemSharedMemoryRegisterRequest>,
    ) -> Answer<proto::SystemSharedMemoryRegisterResponse> {
        self.answer(request, |service, asked| {
            shared_memory::system_register(service, &asked)?;
            Ok(proto::SystemSharedMemoryRegisterResponse {})
        })
    }

    async fn system_shared_memory_unregister(
        self: Arc<Self>,
        request: Request<proto::SystemSharedMemoryUnregisterRequest>,
    ) -> Answer<proto::SystemSharedMemoryUnregisterResponse> {
        self.answer(request, |service, asked| {
            shared_memory::unregister(service, Kind::System, &asked.name)?;
            Ok(proto::SystemSharedMemoryUnregisterResponse {})
        })
    }

    async fn cuda_shared_memory_status(
        self: Arc<Self>,
        request: Request<proto::CudaSharedMemoryStatusRequest>,
    ) -> Answer<proto::CudaSharedMemoryStatusResponse> {
        self.answer(request, |service, asked| shared_memory::cuda_status(service, &asked.name))
    }

    async fn cuda_shared_memory_register(
        self: Arc<Self>,
        request: Request<proto::CudaSharedMemoryRegisterRequest>,
    ) -> Answer<proto::CudaSharedMemoryRegisterResponse> {
        let done = shared_memory::cuda_register(&*self.0, request.get_ref()).await;
        done.map(|()| Response::new(proto::CudaSharedMemoryRegisterResponse {})).map_err(status)
    }

    async fn cuda_shared_memory_unregister(
        self: Arc<Self>,
        request: Request<proto::CudaSharedMemoryUnregisterRequest>,
    ) -> Answer<proto::CudaSharedMemoryUnregisterResponse> {
        self.answer(request, |service, asked| {
            shared_memory::unregister(service, Kind::Cuda, &asked.name)?;
            Ok(proto::CudaSharedMemoryUnregisterResponse {})
        })
    }

    async fn trace_setting(
        self: Arc<Self>,
        request: Request<proto::TraceSettingRequest>,
    ) -> Answer<proto::TraceSettingResponse> {
        self.answer(request, trace::settings)
    }

    async fn log_settings(
        self: Arc<Self>,
        request: Request<proto::LogSettingsRequest>,
    ) -> Answer<proto::LogSettingsResponse> {
        self.answer(request, logging::settings)
    }
}
