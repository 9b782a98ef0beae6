//! The gRPC edge: `inference.GRPCInferenceService`, health, load reports and reflection (spec 1.2,
//! 2.5).
//!
//! Handlers translate between messages and the verbs of a `pharos::service::Service` and make no
//! other decisions. A [`pharos_edge::Call`] counts every request once.

mod call;
pub mod codec;
mod compress;
mod contents;
pub mod fuzzing;
mod health;
mod inference;
mod large_tensors;
mod load_report;
mod logging;
pub mod raw;
mod repository;
mod shared_memory;
mod statistics;
mod stream;
mod trace;
mod window;

use std::convert::Infallible;
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use http::header::{CONTENT_TYPE, HeaderValue};
use http::{Request, Response, StatusCode};
use pharos::access::Restrictions;
use pharos::metrics::labels::Listener;
use pharos::service::{Route, SharedService};
use tokio::net::TcpListener;
use tokio::task::JoinHandle;
use tonic::body::Body;
use tonic::codec::CompressionEncoding;
use tonic::service::Routes;
use tonic_health::pb::health_server::HealthServer;

use self::call::Admission;
use self::health::HealthService;
use self::inference::Inference;
use self::load_report::OpenRca;
use self::load_report::proto::open_rca_service_server::OpenRcaServiceServer;
use self::proto::grpc_inference_service_server::GrpcInferenceServiceServer;
use pharos_edge::access::bounds_of;
use pharos_edge::access::routes::of_grpc;
use pharos_edge::access::{Access, Forward};
use pharos_edge::response_timing::ResponseTiming;
use pharos_edge::{Incoming, ServerPolicy};
use pharos_listener::receiving::Budget;
use pharos_listener::receiving::grpc::{Limits, MAX_MESSAGE, MessageTimeout, received};
use pharos_listener::{self as listener, PhaseReceiver, RequestBody};

/// The generated messages and the service of package `inference`.
#[allow(missing_docs, unreachable_pub, unused_qualifications, clippy::all, clippy::pedantic)]
pub mod proto {
    include!(concat!(env!("OUT_DIR"), "/inference.rs"));
    /// The descriptors of the proto files, for reflection.
    pub const FILE_DESCRIPTOR_SET: &[u8] =
        include_bytes!(concat!(env!("OUT_DIR"), "/grpc_service.bin"));
}

/// The name of the v2 protocol's service.
const SERVICE: &str = "inference.GRPCInferenceService";

/// The settings of the gRPC edge.
#[derive(Clone, Debug, Default)]
pub struct Settings {
    /// `--grpc-restricted-protocol`.
    pub restricted: Arc<Restrictions>,
    /// The tokens that requests must present.
    pub access: Access,
    /// `--grpc-header-forward-pattern`.
    pub forward: Forward,
    /// The idle timeout while the message of a unary call is received; zero disables it.
    pub body_timeout: Duration,
    /// Whether answers are compressed for all clients that accept compression.
    pub compress: bool,
    /// The memory budget for messages that are being received.
    pub budget: Budget,
    /// The size limits of messages.
    pub limits: Limits,
    /// The name of another service on the same port, for reflection.
    pub other_service: Option<&'static str>,
    /// `--response-timing`.
    pub timing: ResponseTiming,
}

/// Returns the default connection settings of a gRPC listener.
pub fn connections() -> listener::Settings {
    listener::Settings::new(Listener::Grpc)
}

/// Building the reflection service from the compiled-in descriptors failed.
#[derive(Debug, thiserror::Error)]
#[error("cannot offer gRPC reflection: {0}")]
pub struct ReflectionError(#[from] tonic_reflection::server::Error);

/// Spawns a task that serves gRPC on `listener` until `phases` signals shutdown and all calls in
/// flight are answered.
///
/// # Errors
/// The compiled-in descriptors are invalid.
pub fn serve(
    listener: TcpListener,
    service: SharedService,
    settings: Settings,
    connections: listener::Settings,
    phases: PhaseReceiver,
) -> Result<JoinHandle<()>, ReflectionError> {
    let service = admitted_services(service, settings)?;
    // HTTP/2 itself refuses only frames, which are not counted as requests.
    Ok(tokio::spawn(listener::serve(listener, connections, service, |_| {}, phases)))
}

type InferenceServer = GrpcInferenceServiceServer<Inference>;

/// All services, by path. Inference calls skip the router, because the other services are called
/// rarely.
#[derive(Clone)]
struct Dispatch {
    plain: InferenceServer,
    others: Routes,
    body_timeout: Duration,
    budget: Budget,
    limits: Limits,
    /// Whether answers are compressed for all clients that accept it. gRPC clients announce
    /// support in every call; compressing the request is what signals that the client wants
    /// compressed answers.
    compress: bool,
}

/// The future of a response.
type Answering = Pin<Box<dyn Future<Output = Result<Response<Body>, Infallible>> + Send>>;

/// Calls the gRPC services of the server.
pub type Services = Arc<dyn Fn(Incoming<RequestBody>) -> Answering + Send + Sync>;

/// Adds reflection for the services with these names.
///
/// # Errors
/// As [`serve`].
pub fn with_reflection(services: Routes, names: &[&str]) -> Result<Routes, ReflectionError> {
    let builder = || {
        let builder = tonic_reflection::server::Builder::configure()
            .register_encoded_file_descriptor_set(proto::FILE_DESCRIPTOR_SET)
            .register_encoded_file_descriptor_set(load_report::proto::FILE_DESCRIPTOR_SET)
            .register_encoded_file_descriptor_set(tonic_health::pb::FILE_DESCRIPTOR_SET);
        let own =
            ["grpc.reflection.v1.ServerReflection", "grpc.reflection.v1alpha.ServerReflection"];
        names.iter().chain(&own).fold(builder, |builder, name| builder.with_service_name(*name))
    };
    Ok(services.add_service(builder().build_v1()?).add_service(builder().build_v1alpha()?))
}

/// Builds all services for a listener of another protocol.
///
/// # Errors
/// As [`serve`].
pub fn services(service: SharedService, settings: Settings) -> Result<Services, ReflectionError> {
    let services = admitted_services(service, settings)?;
    Ok(Arc::new(move |incoming| services.clone().answer(incoming)))
}

/// Builds all services behind the tokens and restrictions of their settings.
fn admitted_services(
    service: SharedService,
    settings: Settings,
) -> Result<Admission<Dispatch>, ReflectionError> {
    let Settings {
        restricted,
        access,
        forward,
        body_timeout,
        compress,
        budget,
        limits,
        other_service,
        timing,
    } = settings;
    let inference = Arc::new(Inference(service.clone()));
    let plain = GrpcInferenceServiceServer::from_arc(inference)
        .accept_compressed(CompressionEncoding::Gzip)
        .accept_compressed(CompressionEncoding::Deflate)
        .max_decoding_message_size(MAX_MESSAGE)
        .max_encoding_message_size(MAX_MESSAGE);
    let health = Routes::new(HealthServer::new(HealthService(service.clone())));
    let load_reports = OpenRcaServiceServer::from_arc(Arc::new(OpenRca::new(service.clone())));
    let others =
        health.add_service(load_reports.max_decoding_message_size(load_report::MAX_REQUEST));
    let names =
        [SERVICE, "grpc.health.v1.Health", load_report::SERVICE].into_iter().chain(other_service);
    let others = with_reflection(others, &names.collect::<Vec<_>>())?.prepare();
    let inner = Dispatch { plain, others, body_timeout, budget, limits, compress };
    let policy = Arc::new(ServerPolicy { service, access, restricted, timing });
    Ok(Admission { policy, forward, inner })
}

impl<B> tower::Service<Request<B>> for Dispatch
where
    B: http_body::Body<Data = bytes::Bytes> + Send + Unpin + 'static,
    B::Error: Into<Box<dyn std::error::Error + Send + Sync>> + Send + 'static,
{
    type Response = Response<Body>;
    type Error = Infallible;
    type Future = Answering;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        // The services are always ready.
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: Request<B>) -> Self::Future {
        // The gRPC protocol requires this status; 200 would look like success to a client that does
        // not use gRPC.
        let content_type =
            request.headers().get(CONTENT_TYPE).map_or(&b""[..], HeaderValue::as_bytes);
        if !content_type.starts_with(b"application/grpc") {
            let mut response = Response::new(Body::empty());
            *response.status_mut() = StatusCode::UNSUPPORTED_MEDIA_TYPE;
            return Box::pin(std::future::ready(Ok(response)));
        }
        let route = of_grpc(request.uri().path());
        let is_stream = matches!(route, Route::StreamInfer | Route::Reflection);
        let timeout = MessageTimeout { idle: self.body_timeout, is_stream };
        let (budget, limits) = bounds_of(route, &self.budget, self.limits);
        let request = received(request, &budget, limits, timeout);
        if !request.uri().path().starts_with("/inference.GRPCInferenceService/") {
            let others = self.others.clone().call(request.map(Body::new));
            return Box::pin(others);
        }
        let compresses = self.compress || request.headers().contains_key("grpc-encoding");
        let answer_format = compress::accepted(request.headers()).filter(|_| compresses);
        let is_infer = route == Route::Infer;
        if !is_infer && answer_format.is_none() {
            return self.plain.call(request);
        }
        let mut plain = self.plain.clone();
        Box::pin(async move {
            let response = match is_infer {
                true => plain
                    .call(large_tensors::take(request).await)
                    .await
                    .map(large_tensors::reassemble),
                false => plain.call(request).await,
            }?;
            Ok(match answer_format {
                Some(format) => compress::compressed(response, format, &budget),
                None => response,
            })
        })
    }
}

#[cfg(test)]
mod tests;
