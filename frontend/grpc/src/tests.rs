//! Tests of the gRPC edge through its services, over a service that echoes.

#![allow(clippy::unwrap_used, clippy::panic, clippy::indexing_slicing)]

use std::time::Duration;

use http::uri::PathAndQuery;
use pharos::error::Reason;
use prost::Message;
use tonic::codegen::tokio_stream::{self, StreamExt};
use tonic::{Code, Request as Call, Status};
use tonic_health::pb::{HealthCheckRequest, HealthCheckResponse};
use tonic_prost::ProstCodec;
use tower::Service as _;

use super::proto::*;
use super::*;
use pharos::service::{Protocol, Route};
use pharos_service_double::EchoService;

type Client = tonic::client::Grpc<Admission<Dispatch>>;

fn client(service: &EchoService) -> Client {
    tonic::client::Grpc::new(admitted_services(service.shared(), Settings::default()).unwrap())
}

async fn unary<Q, A>(service: &EchoService, path: &'static str, message: Q) -> Result<A, Status>
where
    Q: Message + Default + 'static,
    A: Message + Default + 'static,
{
    let mut client = client(service);
    client.ready().await.unwrap();
    let path = PathAndQuery::from_static(path);
    client
        .unary(Call::new(message), path, ProstCodec::<Q, A>::default())
        .await
        .map(|answer| answer.into_inner())
}

macro_rules! call {
    ($service:expr, $method:literal, $message:expr) => {
        unary($service, concat!("/inference.GRPCInferenceService/", $method), $message).await
    };
}

fn infer_request(model: &str, id: &str) -> ModelInferRequest {
    let input = model_infer_request::InferInputTensor {
        name: "INPUT0".into(),
        datatype: "UINT8".into(),
        shape: vec![2],
        ..Default::default()
    };
    ModelInferRequest {
        model_name: model.into(),
        id: id.into(),
        inputs: vec![input],
        raw_input_contents: vec![vec![1, 2].into()],
        ..Default::default()
    }
}

/// Returns the only answer that was counted.
fn counted(service: &EchoService) -> (Route, u16, Option<Reason>) {
    let records = service.records();
    assert_eq!(records.len(), 1, "{records:?}");
    assert_eq!(records[0].0, Protocol::Grpc);
    (records[0].1, records[0].2, records[0].3)
}

#[tokio::test]
async fn answers_queries_about_server_and_models() {
    let service = EchoService::default();
    let live: ServerLiveResponse = call!(&service, "ServerLive", ServerLiveRequest {}).unwrap();
    assert!(live.live);
    assert_eq!(counted(&service), (Route::Live, 0, None));
    let ready: ServerReadyResponse = call!(&service, "ServerReady", ServerReadyRequest {}).unwrap();
    assert!(ready.ready);
    let server: ServerMetadataResponse =
        call!(&service, "ServerMetadata", ServerMetadataRequest {}).unwrap();
    assert_eq!((server.name.as_str(), server.extensions.len()), ("triton", 13));
    let named = |name: &str| (name.to_owned(), String::new());
    let (name, version) = named("echo");
    let metadata: ModelMetadataResponse =
        call!(&service, "ModelMetadata", ModelMetadataRequest { name, version }).unwrap();
    assert_eq!((metadata.platform.as_str(), metadata.inputs[0].shape[0]), ("builtin", -1));
    let (name, version) = named("echo");
    // The configuration's bytes are passed through: they decode as any message with a name in field
    // 1.
    let config: RepositoryIndexResponse =
        call!(&service, "ModelConfig", ModelConfigRequest { name, version }).unwrap();
    assert_eq!(config.models[0].name, "echo");
    let statistics: ModelStatisticsResponse =
        call!(&service, "ModelStatistics", ModelStatisticsRequest::default()).unwrap();
    assert!(statistics.model_stats[0].inference_stats.as_ref().unwrap().cache_miss.is_some());
    let index: RepositoryIndexResponse = call!(
        &service,
        "RepositoryIndex",
        RepositoryIndexRequest { ready: true, ..Default::default() }
    )
    .unwrap();
    assert_eq!((index.models.len(), index.models[0].state.as_str()), (1, "READY"));
}

#[tokio::test]
async fn an_unknown_model_is_not_ready_and_cannot_infer() {
    let service = EchoService::default();
    let question = ModelReadyRequest { name: "nope".into(), version: String::new() };
    let ready: ModelReadyResponse = call!(&service, "ModelReady", question).unwrap();
    assert!(!ready.ready);
    assert_eq!(counted(&service), (Route::ModelReady, 0, None));
    let service = EchoService::default();
    let result: Result<ModelInferResponse, _> =
        call!(&service, "ModelInfer", infer_request("nope", ""));
    let status = result.unwrap_err();
    assert_eq!(
        (status.code(), status.message()),
        (Code::InvalidArgument, "Request for unknown model: 'nope' is not found")
    );
    assert_eq!(counted(&service), (Route::Infer, 3, Some(Reason::UnknownModel)));
}

#[tokio::test]
async fn infer_answers_and_is_counted() {
    let service = EchoService::default();
    let answer: ModelInferResponse =
        call!(&service, "ModelInfer", infer_request("echo", "7")).unwrap();
    assert_eq!((answer.id.as_str(), answer.outputs[0].name.as_str()), ("7", "OUTPUT0"));
    assert_eq!(answer.raw_output_contents[0], [1u8, 2][..]);
    assert_eq!(counted(&service), (Route::Infer, 0, None));
}

#[tokio::test]
async fn loads_and_unloads_have_parameters() {
    use super::proto::model_repository_parameter::ParameterChoice;
    use super::proto::{
        ModelRepositoryParameter, RepositoryModelUnloadRequest, RepositoryModelUnloadResponse,
    };
    let text = |text: &str| ParameterChoice::StringParam(text.to_owned());
    let parameters = |name: &str, choice| {
        let parameter = ModelRepositoryParameter { parameter_choice: Some(choice) };
        [(name.to_owned(), parameter)].into_iter().collect()
    };
    for (name, choice, code, expected) in [
        ("config", text("{}"), Code::Internal, "other with config=2"),
        (
            "file:1/x",
            ParameterChoice::BytesParam(vec![1, 2, 3].into()),
            Code::Internal,
            "other with file:1/x=3",
        ),
        (
            "config",
            ParameterChoice::BoolParam(true),
            Code::InvalidArgument,
            "'config', expected string_param.",
        ),
        ("file:1/x", text("x"), Code::InvalidArgument, "'file:1/x', expected bytes_param."),
        ("unknown", text("x"), Code::InvalidArgument, "unrecognized load parameter 'unknown'."),
    ] {
        let service = EchoService::default();
        let model_name = "other".to_owned();
        let parameters = parameters(name, choice);
        let request = RepositoryModelLoadRequest { model_name, parameters, ..Default::default() };
        let load: Result<RepositoryModelLoadResponse, _> =
            call!(&service, "RepositoryModelLoad", request);
        let status = load.unwrap_err();
        assert!(status.message().contains(expected), "{status}");
        assert_eq!((status.code(), counted(&service).0), (code, Route::RepositoryLoad));
    }
    for (choice, code, expected) in [
        (ParameterChoice::BoolParam(true), Code::Internal, "other true"),
        (text("x"), Code::InvalidArgument, "'unload_dependents' parameter, expected bool_param."),
    ] {
        let service = EchoService::default();
        let model_name = "other".to_owned();
        let parameters = parameters("unload_dependents", choice);
        let request = RepositoryModelUnloadRequest { model_name, parameters, ..Default::default() };
        let unload: Result<RepositoryModelUnloadResponse, _> =
            call!(&service, "RepositoryModelUnload", request);
        let status = unload.unwrap_err();
        assert!(status.message().contains(expected), "{status}");
        assert_eq!((status.code(), counted(&service).0), (code, Route::RepositoryUnload));
    }
    let repository_name = "somewhere".to_owned();
    let request = RepositoryModelLoadRequest { repository_name, ..Default::default() };
    let load: Result<RepositoryModelLoadResponse, _> =
        call!(&EchoService::default(), "RepositoryModelLoad", request);
    assert_eq!(load.unwrap_err().message(), "'repository_name' specification is not supported");
}

#[tokio::test]
async fn unregistering_succeeds() {
    let service = EchoService::default();
    let _: CudaSharedMemoryUnregisterResponse =
        call!(&service, "CudaSharedMemoryUnregister", CudaSharedMemoryUnregisterRequest::default())
            .unwrap();
    let regions: SystemSharedMemoryStatusResponse =
        call!(&service, "SystemSharedMemoryStatus", SystemSharedMemoryStatusRequest::default())
            .unwrap();
    assert!(regions.regions.is_empty());
}

#[tokio::test]
async fn calls_that_reach_no_handler_are_counted() {
    let service = EchoService::default();
    let result: Result<ServerLiveResponse, _> =
        call!(&service, "NoSuchMethod", ServerLiveRequest {});
    assert_eq!(result.unwrap_err().code(), Code::Unimplemented);
    assert_eq!(counted(&service), (Route::Unknown, 12, Some(Reason::Unsupported)));
    // Field 5 (inputs) with the wrong wire type: not a ModelInferRequest.
    let service = EchoService::default();
    let bad = StatisticDuration { count: 1, ns: 2 };
    let result: Result<ModelInferResponse, _> = call!(&service, "ModelInfer", bad);
    assert!(result.is_err());
    assert_eq!(counted(&service).2, Some(Reason::Malformed));
    let service = EchoService::default();
    let waiting = async {
        let _: Result<ModelInferResponse, _> =
            call!(&service, "ModelInfer", infer_request("slow", ""));
    };
    assert!(tokio::time::timeout(Duration::from_millis(20), waiting).await.is_err());
    assert_eq!(counted(&service), (Route::Infer, 1, Some(Reason::Cancelled)));
}

#[tokio::test]
async fn health_and_reflection_answer() {
    let service = EchoService::default();
    let question = HealthCheckRequest { service: "anything".into() };
    let health: HealthCheckResponse =
        unary(&service, "/grpc.health.v1.Health/Check", question).await.unwrap();
    assert_eq!(health.status, 1);
    assert_eq!(counted(&service), (Route::HealthCheck, 0, None));
    // ServerReflectionRequest { list_services = 7 }, and in the answer the name of the inference
    // service.
    let mut client = client(&service);
    client.ready().await.unwrap();
    let path =
        PathAndQuery::from_static("/grpc.reflection.v1.ServerReflection/ServerReflectionInfo");
    let question = tokio_stream::once(raw::RawMessage(vec![0x3a, 0].into()));
    let codec = ProstCodec::<raw::RawMessage, ModelInferResponse>::default();
    let answer = client.streaming(Call::new(question), path, codec).await;
    assert!(answer.is_ok());
}

async fn stream(
    service: &EchoService,
    messages: Vec<ModelInferRequest>,
    status: bool,
) -> Vec<Result<ModelStreamInferResponse, Status>> {
    let mut client = client(service);
    client.ready().await.unwrap();
    let path = PathAndQuery::from_static("/inference.GRPCInferenceService/ModelStreamInfer");
    let mut call = Call::new(tokio_stream::iter(messages));
    if status {
        call.metadata_mut().insert("triton_grpc_error", "true".parse().unwrap());
    }
    let codec = ProstCodec::<ModelInferRequest, ModelStreamInferResponse>::default();
    client.streaming(call, path, codec).await.unwrap().into_inner().collect().await
}

#[tokio::test]
async fn a_stream_answers_in_order_with_errors_in_band() {
    let service = EchoService::default();
    let messages: Vec<_> = (0..200)
        .map(|n| if n == 100 { "fail".into() } else { n.to_string() })
        .map(|id: String| infer_request("echo", &id))
        .collect();
    let answers = stream(&service, messages, false).await;
    assert_eq!(answers.len(), 200);
    for (n, answer) in answers.into_iter().enumerate() {
        let answer = answer.unwrap();
        let response = answer.infer_response.unwrap();
        let expected = if n == 100 {
            ("fail".to_owned(), "[request id: fail] asked to fail")
        } else {
            (n.to_string(), "")
        };
        assert_eq!((response.id, answer.error_message.as_str()), expected);
        let last = response.parameters["triton_final_response"].parameter_choice.clone();
        assert_eq!(last, Some(infer_parameter::ParameterChoice::BoolParam(true)));
    }
    let records = service.records();
    assert_eq!(records.len(), 200, "expected one record per request and none for the stream");
    assert_eq!(records.iter().filter(|record| record.3 == Some(Reason::Invalid)).count(), 1);
}

#[tokio::test]
async fn a_stream_with_triton_grpc_error_ends_with_the_errors_status() {
    let service = EchoService::default();
    let messages = ["1", "fail", "3"].map(|id| infer_request("echo", id)).to_vec();
    let answers = stream(&service, messages, true).await;
    assert_eq!(answers.len(), 2);
    assert_eq!(answers[1].as_ref().unwrap_err().code(), Code::InvalidArgument);
}

#[tokio::test]
async fn a_truncated_stream_ends_with_an_error_after_the_answers() {
    let service = EchoService::default();
    let good = infer_request("echo", "1").encode_to_vec();
    let frame =
        |message: &[u8]| [&[0][..], &(message.len() as u32).to_be_bytes(), message].concat();
    let body = [frame(&good), frame(&[0xff, 0xff])].concat();
    let request = Request::post("/inference.GRPCInferenceService/ModelStreamInfer")
        .header("content-type", "application/grpc")
        .body(http_body_util::Full::new(bytes::Bytes::from(body)))
        .unwrap();
    let response = admitted_services(service.shared(), Settings::default())
        .unwrap()
        .call(request)
        .await
        .unwrap();
    let answer = http_body_util::BodyExt::collect(response.into_body()).await.unwrap();
    assert_eq!(answer.trailers().unwrap()["grpc-status"], "13");
    assert!(!answer.to_bytes().is_empty(), "the first request is answered");
    let codes: Vec<_> =
        service.records().into_iter().map(|(_, _, code, reason)| (code, reason)).collect();
    assert!(
        codes.contains(&(0, None)) && codes.contains(&(13, Some(Reason::Malformed))),
        "{codes:?}"
    );
    assert_eq!(codes.len(), 2);
}

#[tokio::test]
async fn requests_that_are_not_grpc_are_refused_with_an_http_status() {
    for content_type in [Some("application/json"), None] {
        let service = EchoService::default();
        let mut request = Request::post("/inference.GRPCInferenceService/ModelInfer");
        if let Some(content_type) = content_type {
            request = request.header("content-type", content_type);
        }
        let request = request.body(http_body_util::Empty::<bytes::Bytes>::new()).unwrap();
        let response = admitted_services(service.shared(), Settings::default())
            .unwrap()
            .call(request)
            .await
            .unwrap();
        assert_eq!(response.status().as_u16(), 415);
        assert_eq!(counted(&service), (Route::Infer, 13, Some(Reason::Malformed)));
    }
}

#[tokio::test]
async fn an_abandoned_stream_cancels_its_requests() {
    let service = EchoService::default();
    let waiting =
        stream(&service, vec![infer_request("slow", "1"), infer_request("slow", "2")], false);
    assert!(tokio::time::timeout(Duration::from_millis(50), waiting).await.is_err());
    let all_counted = async {
        while service.records().len() < 2 {
            tokio::task::yield_now().await;
        }
    };
    tokio::time::timeout(Duration::from_secs(5), all_counted).await.unwrap();
    assert!(service.records().iter().all(|record| record.3 == Some(Reason::Cancelled)));
}

/// Returns a call with one request that takes long, and this deadline.
fn limited(method: &str, limit: &str) -> Request<http_body_util::Full<bytes::Bytes>> {
    let message = infer_request("slow", "1").encode_to_vec();
    let body = [&[0][..], &(message.len() as u32).to_be_bytes(), &message].concat();
    Request::post(format!("/inference.GRPCInferenceService/{method}"))
        .header("content-type", "application/grpc")
        .header("grpc-timeout", limit)
        .body(http_body_util::Full::new(bytes::Bytes::from(body)))
        .unwrap()
}

/// Waits until a call is counted, and returns the codes and reasons of all.
async fn counts_of(service: &EchoService) -> Vec<(u16, Option<Reason>)> {
    let records = async {
        while service.records().is_empty() {
            tokio::task::yield_now().await;
        }
        service.records()
    };
    let records = tokio::time::timeout(Duration::from_secs(5), records).await.unwrap();
    records.into_iter().map(|(_, _, code, reason)| (code, reason)).collect()
}

/// A client that leaves at its deadline does so a little earlier than the deadline of the server.
#[tokio::test]
async fn a_client_that_leaves_at_its_deadline_is_too_late() {
    let left = async |method: &str, limit: &str, after_ms: u64| {
        let service = EchoService::default();
        let request = limited(method, limit);
        let mut server = admitted_services(service.shared(), Settings::default()).unwrap();
        let call = async {
            let response = server.call(request).await.unwrap();
            http_body_util::BodyExt::collect(response.into_body()).await.map(drop)
        };
        assert!(tokio::time::timeout(Duration::from_millis(after_ms), call).await.is_err());
        counts_of(&service).await
    };
    let late = [(4, Some(Reason::Timeout))];
    // The client's deadline is 40 ms before the server's.
    let (unary, stream) =
        tokio::join!(left("ModelInfer", "3S", 2_980), left("ModelStreamInfer", "3S", 2_980));
    assert_eq!((unary, stream), (late.to_vec(), late.to_vec()));
    for method in ["ModelInfer", "ModelStreamInfer"] {
        assert_eq!(left(method, "60S", 100).await, [(1, Some(Reason::Cancelled))], "{method}");
    }
}

#[tokio::test]
async fn a_call_ends_at_the_clients_deadline() {
    for method in ["ModelInfer", "ModelStreamInfer"] {
        let service = EchoService::default();
        let request = limited(method, "50m");
        let ended = async {
            let response = admitted_services(service.shared(), Settings::default())
                .unwrap()
                .call(request)
                .await
                .unwrap();
            let head = response.headers().get("grpc-status").cloned();
            let body = http_body_util::BodyExt::collect(response.into_body()).await.unwrap();
            head.or_else(|| body.trailers()?.get("grpc-status").cloned())
        };
        let status = tokio::time::timeout(Duration::from_secs(5), ended).await.unwrap();
        assert_eq!(status.unwrap(), "4", "{method}");
        assert_eq!(counts_of(&service).await, [(4, Some(Reason::Timeout))], "{method}");
    }
}

#[tokio::test]
async fn answers_are_compressed_only_if_the_request_was() {
    let service = EchoService::default();
    for (encoding, expected) in
        [(None, None), (Some("gzip"), Some("gzip")), (Some("deflate"), Some("deflate"))]
    {
        let service = admitted_services(service.shared(), Settings::default()).unwrap();
        let mut client =
            tonic::client::Grpc::new(service).accept_compressed(CompressionEncoding::Gzip);
        match encoding {
            Some("gzip") => client = client.send_compressed(CompressionEncoding::Gzip),
            Some(_) => {
                client = client
                    .send_compressed(CompressionEncoding::Deflate)
                    .accept_compressed(CompressionEncoding::Deflate)
            }
            None => {}
        }
        client.ready().await.unwrap();
        let path = PathAndQuery::from_static("/inference.GRPCInferenceService/ModelInfer");
        let codec = ProstCodec::<ModelInferRequest, ModelInferResponse>::default();
        let answer =
            client.unary(Call::new(infer_request("echo", "1")), path, codec).await.unwrap();
        let got = answer.metadata().get("grpc-encoding").and_then(|value| value.to_str().ok());
        match expected {
            None => assert_eq!(got, None),
            Some(_) => assert!(got.is_some(), "{encoding:?}"),
        }
        assert_eq!(answer.into_inner().id, "1");
    }
}

/// The names in the descriptors of services.
mod descriptor {
    #[derive(Clone, PartialEq, prost::Message)]
    pub(super) struct Set {
        #[prost(message, repeated, tag = "1")]
        pub(super) file: Vec<File>,
    }
    #[derive(Clone, PartialEq, prost::Message)]
    pub(super) struct File {
        #[prost(string, tag = "2")]
        pub(super) package: String,
        #[prost(message, repeated, tag = "6")]
        pub(super) service: Vec<Service>,
    }
    #[derive(Clone, PartialEq, prost::Message)]
    pub(super) struct Service {
        #[prost(string, tag = "1")]
        pub(super) name: String,
        #[prost(message, repeated, tag = "2")]
        pub(super) method: Vec<Method>,
    }
    #[derive(Clone, PartialEq, prost::Message)]
    pub(super) struct Method {
        #[prost(string, tag = "1")]
        pub(super) name: String,
    }
}

#[test]
fn every_method_has_a_class() {
    use pharos_edge::access::routes::{Class, class, of_grpc};
    let set = descriptor::Set::decode(FILE_DESCRIPTOR_SET).unwrap();
    let mut paths = Vec::new();
    for file in &set.file {
        for service in &file.service {
            let path = |method: &descriptor::Method| {
                format!("/{}.{}/{}", file.package, service.name, method.name)
            };
            paths.extend(service.method.iter().map(path));
        }
    }
    assert!(paths.contains(&"/inference.GRPCInferenceService/ModelInfer".to_owned()), "{paths:?}");
    for path in paths {
        assert!(matches!(class(of_grpc(&path)), Class::Part(_)), "{path} has no route");
    }
}

/// Returns the load report in the trailers of a call that asks for one.
async fn reported(service: &EchoService, model: &str, format: &str) -> Option<String> {
    let mut client = client(service);
    client.ready().await.unwrap();
    let mut call = Call::new(infer_request(model, ""));
    call.metadata_mut().insert("endpoint-load-metrics-format", format.parse().unwrap());
    let path = PathAndQuery::from_static("/inference.GRPCInferenceService/ModelInfer");
    let codec = ProstCodec::<ModelInferRequest, ModelInferResponse>::default();
    let metadata = match client.unary(call, path, codec).await {
        Ok(answer) => answer.into_parts().0,
        Err(status) => status.metadata().clone(),
    };
    let report = metadata.get_bin("endpoint-load-metrics-bin")?.to_bytes().unwrap();
    Some(String::from_utf8_lossy(&report).into_owned())
}

#[tokio::test]
async fn a_call_that_asks_gets_a_load_report() {
    let service = EchoService::default();
    for format in ["json", "Text", "binary"] {
        assert!(
            reported(&service, "echo", format).await.unwrap().contains("waiting_requests"),
            "{format}"
        );
    }
    assert!(
        !reported(&service, "nope", "json").await.unwrap().contains("waiting_requests"),
        "that of the server"
    );
    assert_eq!(reported(&service, "echo", "other").await, None);
}
