//! TorchServe's gRPC ports: predictions and the v2 protocol on one port, model management on another. Every call is written to the
//! access log once, in TorchServe's format.

mod accounting;
mod call;
mod failure;
mod inference;
mod management;
mod routes;
mod sequences;

use std::convert::Infallible;
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use http::{HeaderMap, Request, Response};
use pharos::error::Reason;
use pharos::service::{Protocol, Route};
use pharos::timeline::Instant;
use tonic::body::Body;
use tonic::service::Routes;
use tonic::{Code, Status};

use self::accounting::CallEnd;
use self::inference::Inference;
use self::management::ManagementService;
use super::Settings;
use super::guard::{Denied, NO_MODEL_API, OPEN_SETTINGS, RequiredAccess, purpose};
use super::rest::{AccessLog, BODY_TIMEOUT, Shared, V2Gate};
use super::token::{FAILED, Purpose};
use pharos_edge::access::DeniedAnswer;
use pharos_edge::access::bounds_of;
use pharos_edge::access::routes::class;
use pharos_edge::answering::{Account, Calls};
use pharos_edge::deadline;
use pharos_edge::request_log::LoggedByPort;
use pharos_edge::{load_report, routing};
use pharos_listener::receiving::grpc::{Limits, MessageTimeout, received as bounded};
use pharos_listener::{Peer, RequestBody};
use pharos_os::clock;

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

type InferenceServer = proto::inference::inference_ap_is_service_server::InferenceApIsServiceServer<Inference>;
type ManagementServer =
    proto::management::management_ap_is_service_server::ManagementApIsServiceServer<ManagementService>;
/// The future of a response.
type Answering = Pin<Box<dyn Future<Output = Result<Response<Body>, Infallible>> + Send>>;

/// A function that adds a reflection service, which lists the services of these names.
pub(super) type WithReflection = fn(Routes, &[&str]) -> Result<Routes, String>;

/// The implementation of the v2 protocol, which TorchServe's ports also serve.
pub struct Kserve {
    /// Creates the HTTP routes, with the access check of TorchServe's ports.
    pub http: Box<dyn FnOnce(V2Gate) -> routing::Routes<V2Gate> + Send>,
    /// The gRPC services under their standard package name, with health and reflection.
    pub grpc: KserveGrpc,
    /// Adds a reflection service, which lists the services of these names.
    pub with_reflection: WithReflection,
}

/// Calls the gRPC services of the v2 protocol.
pub(super) type KserveGrpc = Arc<dyn Fn(Request<RequestBody>) -> Answering + Send + Sync>;

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
pub(super) fn management(shared: &Arc<Shared>, with_reflection: WithReflection) -> Result<Port, String> {
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

    fn call(&mut self, mut request: Request<RequestBody>) -> Self::Future {
        let deadline = deadline_of(request.headers());
        request.extensions_mut().insert(CallerDeadline(deadline));
        let logged = log(&mut request).map(|logged| logged.with_deadline(deadline));
        let path = request.uri().path().to_owned();
        let shared = self.shared.clone();
        let is_own = routes::is_own(&path);
        let route = routes::of_path(&path);
        let (budget, limits) = bounds_of(route, (&shared.budget, limits(&shared.settings)));
        let (bounds, timeout) = ((&budget, limits), message_timeout(&path, BODY_TIMEOUT));
        let denied = self.denied(route, &request);
        let refused = denied.as_ref().map(|(_, reason)| *reason);
        // The v2 protocol's edge counts its answers itself.
        let reported = is_own && refused.is_none() && load_report::requested(route, request.headers()).is_some();
        let counts = is_own || refused.is_some();
        let account = || Account::new(Calls(shared.service.clone()), route).with_deadline(deadline);
        let end = CallEnd { count: counts.then(account), refused, logged };
        let answer: Answering = match (denied, &mut self.services) {
            (Some((status, _)), _) => Box::pin(std::future::ready(Ok(status.into_http()))),
            (None, Services::Inference(own, _)) if is_own => own.call(bounded(request, bounds, timeout)),
            (None, Services::Management(own)) => Box::pin(own.call(bounded(request, bounds, timeout))),
            (None, Services::Inference(_, kserve)) => {
                if let Some(standard) = routes::standard(request.uri()) {
                    *request.uri_mut() = standard;
                }
                kserve(request)
            }
        };
        Box::pin(async move {
            let response = end.with(answer.await?);
            if reported {
                // The model is in the message, so this is the report of the server.
                let reported = load_report::in_trailers(response, move || shared.service.load_report("", ""));
                return Ok(reported.map(Body::new));
            }
            Ok(response)
        })
    }
}

/// When the client of a call leaves at its deadline. An extension of the request: a handler gets the call after its message.
#[derive(Clone, Copy, Debug)]
struct CallerDeadline(Option<Instant>);

/// Returns when the client of a call that has just been received leaves at its deadline.
fn deadline_of(headers: &HeaderMap) -> Option<Instant> {
    deadline::of(headers).map(|limit| deadline::at(clock::now(), limit))
}

/// Returns the time limit of the messages of a call.
fn message_timeout(path: &str, idle: Duration) -> MessageTimeout {
    MessageTimeout { idle, is_stream: routes::has_many_messages(path) }
}

impl Port {
    /// Returns the refusal of a call that is denied or whose route is unknown.
    fn denied<B>(&self, route: Route, request: &Request<B>) -> Option<(Status, Reason)> {
        let class = class(route);
        let purpose = match self.services {
            Services::Inference(..) => purpose(class, Some(Purpose::Inference)),
            Services::Management(_) => Some(Purpose::Management),
        };
        let wanted = RequiredAccess { route, class, purpose };
        Some(match self.shared.guard.check(Protocol::Grpc, wanted, request.headers()).err()? {
            Denied::Key(_) => (Status::permission_denied(FAILED), Reason::Unauthenticated),
            Denied::ModelApi => (Status::permission_denied(NO_MODEL_API), Reason::Restricted),
            Denied::Settings => (Status::permission_denied(OPEN_SETTINGS), Reason::Restricted),
            Denied::Server(denied) => {
                let DeniedAnswer { code, text, reason, .. } = denied.over_grpc();
                (Status::new(Code::from_i32(code.into()), text), reason)
            }
        })
    }
}

/// Returns the line of a call in the access log, and marks the call so that the v2 protocol's edge does not log it too.
fn log(request: &mut Request<RequestBody>) -> Option<AccessLog> {
    let (path, received) = (request.uri().path(), clock::now());
    let peer = request.extensions().get::<Peer>().and_then(|peer| peer.address);
    let what = || format!("gRPC {} HTTP/2.0", path.strip_prefix('/').unwrap_or(path));
    let logged = AccessLog::new((Protocol::Grpc, peer, received), what)?;
    request.extensions_mut().insert(LoggedByPort);
    Some(logged)
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

        fn poll_frame(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
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
            let mut body = bounded(request, (&Budget::default(), Limits::default()), timeout).into_body();
            let frame = std::future::poll_fn(|cx| Pin::new(&mut body).poll_frame(cx));
            let failed = tokio::time::timeout(Duration::from_millis(50), frame).await;
            assert_eq!(failed.is_ok_and(|frame| frame.unwrap().is_err()), stalls, "{path}");
        }
    }
}
