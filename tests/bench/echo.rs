//! The upper limit: axum and tonic with the same bytes and without a server behind them.
//!
//! Receives the same requests as the servers and answers with as many bytes. Runs as a separate
//! process, so that it shares nothing with the load generator.

use std::convert::Infallible;
use std::future::{Ready, ready};
use std::io::Read;
use std::net::{Ipv4Addr, SocketAddr};
use std::task::{Context, Poll};

use axum::Router;
use axum::body::Body;
use axum::response::Response;
use axum::routing::{get, post};
use axum::serve::ListenerExt;
use bytes::Bytes;
use tokio::net::TcpListener;
use tonic::codegen::{BoxFuture, Service};
use tonic::server::{Grpc, NamedService, UnaryService};
use tonic::{Request, Status};
use tonic_prost::ProstCodec;

use crate::messages::{ModelInferRequest, ModelInferResponse};
use crate::workload::Workload;

/// Serves both protocols on loopback until standard input ends, which happens when the parent ends.
///
/// # Errors
/// A port is in use, or a listener fails.
pub(crate) fn serve(http: u16, grpc: u16) -> Result<(), String> {
    exit_with_parent();
    let runtime =
        tokio::runtime::Runtime::new().map_err(|error| format!("the echo's runtime: {error}"))?;
    runtime.block_on(async {
        let grpc = tonic::transport::Server::builder().add_service(GrpcEcho).serve(loopback(grpc));
        tokio::select! {
            result = serve_http(loopback(http)) => result.map_err(|error| format!("the HTTP echo: {error}")),
            result = grpc => result.map_err(|error| format!("the gRPC echo: {error}")),
        }
    })
}

/// Ends this process when its standard input ends.
pub(crate) fn exit_with_parent() {
    std::thread::spawn(|| {
        let _ = std::io::stdin().read_to_end(&mut Vec::new());
        std::process::exit(0);
    });
}

/// Returns the address of a port.
pub(crate) fn loopback(port: u16) -> SocketAddr {
    (Ipv4Addr::LOCALHOST, port).into()
}

async fn serve_http(address: SocketAddr) -> std::io::Result<()> {
    let listener = TcpListener::bind(address).await?.tap_io(|stream| {
        let _ = stream.set_nodelay(true);
    });
    axum::serve(listener, router()).await
}

/// Returns the routes over HTTP.
pub(crate) fn router() -> Router {
    let mut router = Router::new().route("/v2/health/ready", get(|| async {}));
    for workload in Workload::ALL.into_iter().filter(|workload| {
        !matches!(workload, Workload::Python(_) | Workload::Handler | Workload::Compiled(_))
    }) {
        let (head, length) = (workload.http_response_head().len(), workload.http_response_length());
        let path = format!("/v2/models/{}/infer", workload.model());
        router = router
            .route(&path, post(move |body: Bytes| async move { http_echo(&body, head, length) }));
    }
    router
}

/// Returns the last `length` bytes of the request: its JSON head is longer than the response's, and
/// the tensors are as long.
fn http_echo(body: &Bytes, head: usize, length: usize) -> Response {
    let body = body.slice(body.len().saturating_sub(length)..);
    let response = Response::builder()
        .header("content-type", "application/octet-stream")
        .header("inference-header-content-length", head);
    response.body(Body::from(body)).unwrap_or_default()
}

/// The inference service with its one method.
#[derive(Clone)]
pub(crate) struct GrpcEcho;

impl NamedService for GrpcEcho {
    const NAME: &'static str = "inference.GRPCInferenceService";
}

impl Service<http::Request<tonic::body::Body>> for GrpcEcho {
    type Response = http::Response<tonic::body::Body>;
    type Error = Infallible;
    type Future = BoxFuture<Self::Response, Self::Error>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Self::Error>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: http::Request<tonic::body::Body>) -> Self::Future {
        Box::pin(async move {
            let codec = ProstCodec::<ModelInferResponse, ModelInferRequest>::default();
            Ok(Grpc::new(codec).unary(ModelInfer, request).await)
        })
    }
}

/// Decodes the request and returns its contents.
struct ModelInfer;

impl UnaryService<ModelInferRequest> for ModelInfer {
    type Response = ModelInferResponse;
    type Future = Ready<Result<tonic::Response<ModelInferResponse>, Status>>;

    fn call(&mut self, request: Request<ModelInferRequest>) -> Self::Future {
        let request = request.into_inner();
        let workload =
            Workload::ALL.into_iter().find(|workload| workload.model() == request.model_name);
        let unknown =
            || Status::not_found(format!("the echo has no model '{}'", request.model_name));
        ready(workload.ok_or_else(unknown).map(|workload| {
            tonic::Response::new(workload.grpc_response(request.raw_input_contents))
        }))
    }
}
