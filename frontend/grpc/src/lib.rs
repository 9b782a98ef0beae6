//! The gRPC edge: `inference.GRPCInferenceService`, health and reflection (spec 1.2, 2.5).
//!
//! Handlers translate between messages and the verbs of a `pharos::service::Service`, and decide nothing else. Every answer is counted once, by
//! `call_accounting::Counted`.

mod call_accounting;
pub mod codec;
mod compress;
mod contents;
mod deadline;
mod health;
mod inference;
mod large_tensors;
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
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use http::header::{CONTENT_TYPE, HeaderValue};
use http::{Request, Response, StatusCode};
use pharos::access::Restrictions;
use pharos::metrics::labels::Listener;
use pharos::service::Service;
use tokio::net::TcpListener;
use tonic::Status;
use tonic::body::Body;
use tonic::codec::CompressionEncoding;
use tonic::service::Routes;
use tonic_health::pb::health_server::HealthServer;

use self::call_accounting::Counted;
use self::health::HealthService;
use self::inference::Inference;
use self::proto::grpc_inference_service_server::GrpcInferenceServiceServer;
use pharos_listener as listener;
use pharos_listener::access::{Access, Forward};
use pharos_listener::body_timeout::{Pace, Paced};
use pharos_listener::receiving::Budget;
use pharos_listener::receiving::grpc::{Limits, MAX_MESSAGE, received};
use pharos_listener::{Life, Speaks};

/// The generated messages and service of package `inference`.
#[allow(missing_docs, unreachable_pub, unused_qualifications, clippy::all, clippy::pedantic)]
pub mod proto {
    include!(concat!(env!("OUT_DIR"), "/inference.rs"));
    /// The files that the messages are generated from, for reflection.
    pub const FILE_DESCRIPTOR_SET: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/grpc_service.bin"));
}

/// The name of the v2 protocol's service.
const SERVICE: &str = "inference.GRPCInferenceService";

/// What the gRPC edge is told at start.
#[derive(Clone, Debug, Default)]
pub struct Settings {
    /// `--grpc-restricted-protocol`.
    pub restricted: Arc<Restrictions>,
    /// The tokens that are asked for.
    pub access: Access,
    /// `--grpc-header-forward-pattern`.
    pub forward: Forward,
    /// How long the message of a unary call may not go on; zero for ever.
    pub body_timeout: Duration,
    /// Whether answers are compressed for all clients that can read that.
    pub compress: bool,
    /// The memory of what is being received.
    pub budget: Budget,
    /// The most bytes of a message.
    pub limits: Limits,
    /// The name of a service that is served on the same port by somebody else, for reflection.
    pub beside: Option<&'static str>,
}

/// How a listener treats its connections unless it is told otherwise.
pub fn connections() -> listener::Settings {
    listener::Settings::new(Listener::Grpc)
}

/// The reflection service could not be made from the compiled-in descriptors.
#[derive(Debug, thiserror::Error)]
#[error("cannot offer gRPC reflection: {0}")]
pub struct ReflectionError(#[from] tonic_reflection::server::Error);

/// Serves gRPC on `listener` until `life` says to stop and the calls in flight are answered.
///
/// # Errors
/// Only before serving, when the compiled-in descriptors are not usable.
pub async fn serve<S: Service>(
    listener: TcpListener,
    service: S,
    (settings, connections): (Settings, listener::Settings),
    life: Life,
) -> Result<(), ReflectionError> {
    let service = services(service, settings)?;
    // What HTTP/2 itself refuses are frames, not requests.
    listener::serve(listener, (Speaks::Http2, connections), service, |_| {}, life).await;
    Ok(())
}

type InferenceServer<S> = GrpcInferenceServiceServer<Inference<S>>;

/// All services, by path. Inference has a short way; the others are asked rarely.
#[derive(Clone)]
pub struct Dispatch<S: Service> {
    plain: InferenceServer<S>,
    others: Routes,
    body_timeout: Duration,
    budget: Budget,
    limits: Limits,
    /// Whether answers are compressed for every client that can read that. gRPC clients announce in every call that they
    /// could; only one that compresses its own request asks for it.
    compress: bool,
}

/// Every gRPC service of the server, counted.
pub type Services<S> = Counted<S, Dispatch<S>>;

/// These services with reflection, which shows those of these names.
///
/// # Errors
/// As [`serve`].
pub fn with_reflection(services: Routes, names: &[&str]) -> Result<Routes, ReflectionError> {
    let builder = || {
        let builder = tonic_reflection::server::Builder::configure()
            .register_encoded_file_descriptor_set(proto::FILE_DESCRIPTOR_SET)
            .register_encoded_file_descriptor_set(tonic_health::pb::FILE_DESCRIPTOR_SET);
        let own = ["grpc.reflection.v1.ServerReflection", "grpc.reflection.v1alpha.ServerReflection"];
        names.iter().chain(&own).fold(builder, |builder, name| builder.with_service_name(*name))
    };
    Ok(services.add_service(builder().build_v1()?).add_service(builder().build_v1alpha()?))
}

/// Makes them.
///
/// # Errors
/// As [`serve`].
pub fn services<S: Service>(service: S, settings: Settings) -> Result<Services<S>, ReflectionError> {
    let inference = Arc::new(Inference(service.clone()));
    let plain = GrpcInferenceServiceServer::from_arc(inference)
        .accept_compressed(CompressionEncoding::Gzip)
        .accept_compressed(CompressionEncoding::Deflate)
        .max_decoding_message_size(MAX_MESSAGE)
        .max_encoding_message_size(MAX_MESSAGE);
    let Settings { restricted, access, forward, body_timeout, compress, budget, limits, beside } = settings;
    let health = Routes::new(HealthServer::new(HealthService(service.clone())));
    let names = [SERVICE, "grpc.health.v1.Health"].into_iter().chain(beside);
    let others = with_reflection(health, &names.collect::<Vec<_>>())?.prepare();
    let inner = Dispatch { plain, others, body_timeout, budget, limits, compress };
    Ok(Counted { service, restricted, access, forward, inner })
}

impl<S: Service, B> tower::Service<Request<B>> for Dispatch<S>
where
    B: http_body::Body<Data = bytes::Bytes> + Send + Unpin + 'static,
    B::Error: Into<Box<dyn std::error::Error + Send + Sync>> + Send + 'static,
{
    type Response = Response<Body>;
    type Error = Infallible;
    type Future = std::pin::Pin<Box<dyn Future<Output = Result<Response<Body>, Infallible>> + Send>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        // None of the services ever waits to be ready.
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: Request<B>) -> Self::Future {
        // What the protocol asks for; an answer of status 200 would look like a success to who speaks no gRPC.
        let content_type = request.headers().get(CONTENT_TYPE).map_or(&b""[..], HeaderValue::as_bytes);
        if !content_type.starts_with(b"application/grpc") {
            let mut response = Response::new(Body::empty());
            *response.status_mut() = StatusCode::UNSUPPORTED_MEDIA_TYPE;
            return Box::pin(std::future::ready(Ok(response)));
        }
        let limits = self.limits;
        if !request.uri().path().starts_with("/inference.GRPCInferenceService/") {
            let request = received(request, (&self.budget, limits));
            let others = self.others.clone().call(request.map(Body::new));
            return Box::pin(others);
        }
        // A stream of requests may rest for as long as it likes.
        let patience =
            if request.uri().path().ends_with("/ModelStreamInfer") { Duration::ZERO } else { self.body_timeout };
        let pace = Pace { patience, chunked: false };
        let request =
            request.map(|body| Paced::new(body, pace, |fault| Box::new(Status::invalid_argument(fault.to_string()))));
        let compresses = self.compress || request.headers().contains_key("grpc-encoding");
        let answer_format = compress::accepted(request.headers()).filter(|_| compresses);
        let request = received(request, (&self.budget, limits));
        let is_infer = request.uri().path().ends_with("/ModelInfer");
        if !is_infer && answer_format.is_none() {
            return self.plain.call(request);
        }
        let (mut plain, budget) = (self.plain.clone(), self.budget.clone());
        Box::pin(async move {
            let response = match is_infer {
                true => plain.call(large_tensors::take(request).await).await.map(large_tensors::reassemble),
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
