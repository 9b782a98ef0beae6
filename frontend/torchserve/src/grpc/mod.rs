//! TorchServe's gRPC ports: predictions and the v2 protocol on one port, model management on
//! another. Every call is written to the access log once, in TorchServe's format.

mod failure;
mod inference;
mod management;
mod prediction;
mod routes;
mod sequences;

use std::convert::Infallible;
use std::future::{Future, ready};
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use axum::response::Response as HttpResponse;
use http::{HeaderMap, Request, Response};
use pharos::service::{Protocol, Route};
use tonic::body::Body;
use tonic::service::Routes;

use self::inference::Inference;
use self::management::ManagementService;
use super::Settings;
use super::access_log::ACCESS_LOG;
use super::guard::{RequiredAccess, purpose};
use super::rest::{BODY_TIMEOUT, KserveHttp, Shared};
use super::token::Purpose;
use pharos_edge::access::bounds_of;
use pharos_edge::access::routes::class;
use pharos_edge::request_log::LogLine;
use pharos_edge::{Call, Incoming, Policy, Refusal, SharedCall, address};
use pharos_listener::RequestBody;
use pharos_listener::receiving::grpc::{Limits, MessageTimeout, received as bounded};

/// The generated messages and services.
#[allow(missing_docs, unreachable_pub, unused_qualifications, clippy::all, clippy::pedantic)]
mod proto {
    pub mod inference {
        include!(concat!(env!("OUT_DIR"), "/org.pytorch.serve.grpc.inference.rs"));
    }
    pub mod management {
        include!(concat!(env!("OUT_DIR"), "/org.pytorch.serve.grpc.management.rs"));
    }
}

/// `google.rpc.Status`, without details.
#[allow(unreachable_pub)]
#[derive(Clone, PartialEq, Eq, Hash, prost::Message)]
pub struct RpcStatus {
    /// A value of `google.rpc.Code`.
    #[prost(int32, tag = "1")]
    pub code: i32,
    /// The error message.
    #[prost(string, tag = "2")]
    pub message: String,
}

type InferenceServer =
    proto::inference::inference_ap_is_service_server::InferenceApIsServiceServer<Inference>;
type ManagementServer =
    proto::management::management_ap_is_service_server::ManagementApIsServiceServer<
        ManagementService,
    >;
/// The future of a response.
type Answering = Pin<Box<dyn Future<Output = Result<Response<Body>, Infallible>> + Send>>;

/// A function that adds a reflection service, which lists the services of these names.
pub(super) type WithReflection = fn(Routes, &[&str]) -> Result<Routes, String>;

/// Creates the v2 protocol over HTTP behind a policy, with a function that renders its refusals.
pub type KserveRoutes =
    Box<dyn FnOnce(Arc<dyn Policy>, fn(Refusal) -> HttpResponse) -> KserveHttp + Send>;

/// The implementation of the v2 protocol, which TorchServe's ports also serve.
pub struct Kserve {
    /// Creates the HTTP routes, with the policy of TorchServe's ports.
    pub http: KserveRoutes,
    /// The gRPC services under their standard package name, with health and reflection.
    pub grpc: KserveGrpc,
    /// Adds a reflection service, which lists the services of these names.
    pub with_reflection: WithReflection,
}

/// Calls the gRPC services of the v2 protocol.
pub type KserveGrpc = Arc<dyn Fn(Incoming<RequestBody>) -> Answering + Send + Sync>;

/// The services of a port.
#[derive(Clone)]
enum Services {
    Inference(InferenceServer, KserveGrpc),
    Management(Routes),
}

/// The service of one port.
#[derive(Clone)]
pub(super) struct Port {
    shared: Arc<Shared>,
    services: Services,
}

/// Returns the port with predictions, the v2 protocol, health and reflection.
pub(super) fn inference(shared: &Arc<Shared>, kserve: KserveGrpc) -> Port {
    let most = limits(&shared.settings).received;
    let own = InferenceServer::from_arc(Arc::new(Inference(shared.clone())))
        .max_decoding_message_size(most)
        .max_encoding_message_size(usize::MAX);
    Port { shared: shared.clone(), services: Services::Inference(own, kserve) }
}

/// Returns the port with model management and reflection.
///
/// # Errors
/// The reflection service cannot be created.
pub(super) fn management(
    shared: &Arc<Shared>,
    with_reflection: WithReflection,
) -> Result<Port, String> {
    let own = Routes::new(ManagementServer::from_arc(Arc::new(ManagementService(shared.clone()))));
    let own = with_reflection(own, &[service_of(routes::MANAGEMENT)])?;
    Ok(Port { shared: shared.clone(), services: Services::Management(own.prepare()) })
}

/// Returns the limits on message sizes.
pub fn limits(settings: &Settings) -> Limits {
    Limits { setting: Some("max_request_size"), ..Limits::new(Some(settings.max_request_size)) }
}

/// Returns the name of the prediction service.
pub fn inference_service() -> &'static str {
    service_of(routes::INFERENCE)
}

/// Returns the service name in a path prefix.
fn service_of(path: &'static str) -> &'static str {
    path.trim_matches('/')
}

impl tower::Service<Request<RequestBody>> for Port {
    type Response = Response<Body>;
    type Error = Infallible;
    type Future = Answering;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: Request<RequestBody>) -> Self::Future {
        let path = request.uri().path().to_owned();
        let text = || format!("gRPC {} HTTP/2.0", path.strip_prefix('/').unwrap_or(&path));
        let line = LogLine::begin(&ACCESS_LOG, Protocol::Grpc, address(&request), text);
        let mut incoming = Incoming { request, line };
        let route = routes::of_path(&path);
        let is_own = routes::is_own(&path);
        let access = self.check(route, incoming.request.headers());
        if let (Services::Inference(_, kserve), false, Ok(())) = (&self.services, is_own, &access) {
            // Access was checked above. The v2 protocol's edge is open here, and counts the call.
            if let Some(standard) = routes::standard(incoming.request.uri()) {
                *incoming.request.uri_mut() = standard;
            }
            return kserve(incoming);
        }
        let shared = self.shared.clone();
        let policy: Arc<dyn Policy> = shared.clone();
        let mut call = match Call::admit_if(access, Protocol::Grpc, route, &mut incoming, &policy) {
            Ok(call) => call,
            Err(refusal) => return Box::pin(ready(Ok(refusal.into_status().into_http()))),
        };
        if !is_own {
            // Reflection on the port of management is not counted.
            call.do_not_count();
        }
        let call = SharedCall::new(call);
        let mut request = incoming.request;
        request.extensions_mut().insert(call.clone());
        let (budget, limits) = bounds_of(route, &shared.budget, limits(&shared.settings));
        let request = bounded(request, &budget, limits, message_timeout(&path, BODY_TIMEOUT));
        let answer: Answering = match &mut self.services {
            Services::Inference(own, _) => own.call(request),
            Services::Management(own) => Box::pin(own.call(request)),
        };
        Box::pin(async move { Ok(call.finish(answer.await?)) })
    }
}

/// Returns the time limit of the messages of a call.
fn message_timeout(path: &str, idle: Duration) -> MessageTimeout {
    MessageTimeout { idle, is_stream: routes::has_many_messages(path) }
}

impl Port {
    /// Checks access to a route.
    ///
    /// # Errors
    /// The call is denied, or its route is unknown.
    fn check(&self, route: Route, headers: &HeaderMap) -> Result<(), Refusal> {
        let class = class(route);
        let purpose = match self.services {
            Services::Inference(..) => purpose(class, Some(Purpose::Inference)),
            Services::Management(_) => Some(Purpose::Management),
        };
        let wanted = RequiredAccess { route, class, purpose };
        let checked = self.shared.guard.check(Protocol::Grpc, wanted, headers);
        checked.map_err(|denied| denied.refusal(Protocol::Grpc))
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use bytes::Bytes;
    use http_body::{Body, Frame};
    use pharos_listener::receiving::Budget;

    use super::*;

    /// A body that never has data.
    struct Stalled;

    impl Body for Stalled {
        type Data = Bytes;
        type Error = Infallible;

        fn poll_frame(
            self: Pin<&mut Self>,
            _: &mut Context<'_>,
        ) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
            Poll::Pending
        }
    }

    #[tokio::test]
    async fn the_message_of_a_call_must_not_stall() {
        for (path, stalls) in [
            ("/org.pytorch.serve.grpc.inference.InferenceAPIsService/Ping", true),
            ("/org.pytorch.serve.grpc.inference.InferenceAPIsService/StreamPredictions", true),
            ("/org.pytorch.serve.grpc.inference.InferenceAPIsService/StreamPredictions2", false),
            ("/org.pytorch.serve.grpc.management.ManagementAPIsService/RegisterModel", true),
            ("/grpc.reflection.v1.ServerReflection/ServerReflectionInfo", false),
        ] {
            let request = Request::builder().uri(path).body(Stalled).unwrap();
            let timeout = message_timeout(path, Duration::from_millis(5));
            let mut body =
                bounded(request, &Budget::default(), Limits::default(), timeout).into_body();
            let frame = std::future::poll_fn(|cx| Pin::new(&mut body).poll_frame(cx));
            let failed = tokio::time::timeout(Duration::from_millis(50), frame).await;
            assert_eq!(failed.is_ok_and(|frame| frame.unwrap().is_err()), stalls, "{path}");
        }
    }
}
