//! A gRPC client with minimal overhead: h2 with prebuilt message bytes, one request at a time.

use std::future::poll_fn;
use std::net::SocketAddr;

use bytes::{Bytes, BytesMut};
use h2::RecvStream;
use h2::client::SendRequest;
use http::{HeaderMap, Request, StatusCode};
use prost::Message;
use tokio::net::TcpStream;
use tokio::runtime::Runtime;
use tokio::time::timeout;

use crate::client::{Client, EXCHANGE_TIMEOUT, Turns};
use crate::messages::ModelInferResponse;
use crate::workload::{GRPC_PATH, TENANT, TENANT_HEADER};

/// The receive window, large enough that flow control does not affect the measurement.
const WINDOW: u32 = 16 << 20;

/// One HTTP/2 connection with a current-thread runtime, which runs on the requesting thread.
pub(crate) struct GrpcClient {
    runtime: Runtime,
    sender: SendRequest<Bytes>,
    request: Request<()>,
    messages: Turns,
    /// Length of the first response, prefix included.
    expected: Option<usize>,
}

impl GrpcClient {
    /// Connects to a server.
    ///
    /// # Errors
    /// The connection fails.
    pub(crate) fn connect(messages: Turns, address: SocketAddr) -> Result<Self, String> {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
        let runtime = runtime.map_err(|error| format!("the client's runtime: {error}"))?;
        let sender = runtime.block_on(async {
            timeout(EXCHANGE_TIMEOUT, open(address))
                .await
                .unwrap_or_else(|_| Err("no response in time".to_owned()))
        });
        let sender = sender.map_err(|error| format!("gRPC to {address}: {error}"))?;
        let request = Request::post(format!("http://{address}{GRPC_PATH}"))
            .header("content-type", "application/grpc")
            .header("te", "trailers")
            .header(TENANT_HEADER, TENANT)
            .body(())
            .map_err(|error| format!("gRPC request: {error}"))?;
        Ok(Self { runtime, sender, request, messages, expected: None })
    }

    /// Sends one request. Returns the number of response bytes and, with `keep`, the bytes.
    fn round_trip(&mut self, keep: bool) -> Result<(usize, BytesMut), String> {
        let call = call(&mut self.sender, self.request.clone(), self.messages.next(), keep);
        let result = self.runtime.block_on(async { timeout(EXCHANGE_TIMEOUT, call).await });
        result.unwrap_or_else(|_| {
            Err(format!("gRPC: no response in {} s", EXCHANGE_TIMEOUT.as_secs()))
        })
    }
}

impl Client for GrpcClient {
    fn exchange(&mut self) -> Result<(), String> {
        let (length, _) = self.round_trip(false)?;
        let expected = *self.expected.get_or_insert(length);
        if length == expected {
            return Ok(());
        }
        Err(format!("gRPC: a response of {length} bytes where the first one had {expected}"))
    }

    fn has_first(&self) -> bool {
        self.messages.has_first()
    }

    fn probe(&mut self) -> Result<Vec<Bytes>, String> {
        let (_, message) = self.round_trip(true)?;
        let message = message.freeze();
        if message.len() < 5 {
            return Err(format!("gRPC: a response of only {} bytes", message.len()));
        }
        let response = ModelInferResponse::decode(message.slice(5..));
        response
            .map(|response| response.raw_output_contents)
            .map_err(|error| format!("gRPC response: {error}"))
    }
}

async fn open(address: SocketAddr) -> Result<SendRequest<Bytes>, String> {
    let stream = TcpStream::connect(address).await.map_err(|error| error.to_string())?;
    stream.set_nodelay(true).map_err(|error| error.to_string())?;
    let mut builder = h2::client::Builder::new();
    builder.initial_window_size(WINDOW).initial_connection_window_size(WINDOW);
    let (sender, connection) =
        builder.handshake(stream).await.map_err(|error| error.to_string())?;
    tokio::spawn(connection);
    Ok(sender)
}

async fn call(
    sender: &mut SendRequest<Bytes>,
    request: Request<()>,
    message: Bytes,
    keep: bool,
) -> Result<(usize, BytesMut), String> {
    let failed = |what: &'static str| move |error: h2::Error| format!("gRPC {what}: {error}");
    poll_fn(|context| sender.poll_ready(context)).await.map_err(failed("connection"))?;
    let (response, mut stream) = sender.send_request(request, false).map_err(failed("request"))?;
    stream.send_data(message, true).map_err(failed("request"))?;
    let response = response.await.map_err(failed("response"))?;
    if response.status() != StatusCode::OK {
        return Err(format!("gRPC: HTTP status {}", response.status()));
    }
    // A refusal may come as headers alone.
    if response.headers().contains_key("grpc-status") {
        check_status(response.headers())?;
    }
    let mut body = response.into_body();
    let received = read_message(&mut body, keep).await.map_err(failed("response"))?;
    let trailers = body.trailers().await.map_err(failed("trailers"))?;
    check_status(&trailers.ok_or("gRPC: a response without trailers")?)?;
    Ok(received)
}

async fn read_message(body: &mut RecvStream, keep: bool) -> Result<(usize, BytesMut), h2::Error> {
    let (mut length, mut kept) = (0, BytesMut::new());
    while let Some(chunk) = body.data().await {
        let chunk = chunk?;
        body.flow_control().release_capacity(chunk.len())?;
        length += chunk.len();
        if keep {
            kept.extend_from_slice(&chunk);
        }
    }
    Ok((length, kept))
}

fn check_status(headers: &HeaderMap) -> Result<(), String> {
    let text = |name: &str| {
        headers.get(name).map(|value| String::from_utf8_lossy(value.as_bytes()).into_owned())
    };
    match text("grpc-status").as_deref() {
        Some("0") => Ok(()),
        status => Err(format!(
            "grpc-status {}: {}",
            status.unwrap_or("missing"),
            text("grpc-message").unwrap_or_default()
        )),
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn only_status_zero_passes() {
        let with = |status: &'static str| {
            HeaderMap::from_iter([("grpc-status".parse().unwrap(), status.parse().unwrap())])
        };
        assert_eq!(check_status(&with("0")), Ok(()));
        assert_eq!(check_status(&with("14")), Err("grpc-status 14: ".to_owned()));
        assert_eq!(check_status(&HeaderMap::new()), Err("grpc-status missing: ".to_owned()));
    }
}
