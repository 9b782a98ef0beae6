//! OTLP over gRPC: tonic's client over the server's own HTTP client. tonic's channel would add a
//! load balancer and a second connector for one unary call.

use std::error::Error;

use bytes::{Buf, BufMut, Bytes};
use http::uri::PathAndQuery;
use http::{HeaderMap, Uri};
use pharos::otlp::{Signal, retry_delay};
use pharos_os::client::{self, HttpsClient, Version, deepest};
use tonic::client::Grpc;
use tonic::codec::{Codec, CompressionEncoding, DecodeBuf, Decoder, EncodeBuf, Encoder};
use tonic::metadata::MetadataMap;
use tonic::{Code, Request, Status};

use super::{Endpoint, Failure, MAX_ANSWER, shortened};

/// A client of one method.
pub(super) struct Client {
    grpc: Grpc<HttpsClient>,
    method: PathAndQuery,
    headers: HeaderMap,
}

impl Client {
    pub(super) fn new(
        endpoint: &Endpoint,
        signal: Signal,
        headers: HeaderMap,
    ) -> Result<Self, String> {
        let mut parts = endpoint.target.clone().into_parts();
        parts.path_and_query = Some(PathAndQuery::from_static("/"));
        let origin = Uri::from_parts(parts)
            .map_err(|error| format!("'{}' is not valid: {error}", endpoint.url))?;
        let mut grpc = Grpc::with_origin(client::with(&endpoint.tls, Version::Http2)?, origin)
            .max_decoding_message_size(MAX_ANSWER)
            .accept_compressed(CompressionEncoding::Gzip);
        if endpoint.gzip {
            grpc = grpc.send_compressed(CompressionEncoding::Gzip);
        }
        Ok(Self { grpc, method: PathAndQuery::from_static(signal.method()), headers })
    }

    /// Sends a message and returns the response.
    pub(super) async fn export(&self, message: Bytes) -> Result<Bytes, Failure> {
        let mut grpc = self.grpc.clone();
        grpc.ready().await.map_err(|error| Failure::transient(deepest(&error)))?;
        let mut request = Request::new(message);
        *request.metadata_mut() = MetadataMap::from_headers(self.headers.clone());
        let response = grpc.unary(request, self.method.clone(), Encoded).await;
        response.map(tonic::Response::into_inner).map_err(|status| failure(&status))
    }
}

/// Converts a status. Only a status of this client's own transport has a source.
fn failure(status: &Status) -> Failure {
    if let Some(source) = status.source() {
        return Failure::transient(deepest(source));
    }
    // RESOURCE_EXHAUSTED is retried only if its details have a retry time. Otherwise the message is
    // too long for any attempt.
    let after = retry_delay(status.details());
    let retryable = match status.code() {
        Code::ResourceExhausted => after.is_some(),
        code => matches!(
            code,
            Code::Cancelled
                | Code::DeadlineExceeded
                | Code::Aborted
                | Code::OutOfRange
                | Code::Unavailable
                | Code::DataLoss
        ),
    };
    let text = format!(
        "gRPC status {}: {}",
        i32::from(status.code()),
        shortened(status.message().as_bytes())
    );
    Failure { retryable, after, text }
}

/// Messages that are encoded already, so that a retry does not encode them again.
#[derive(Clone, Copy)]
struct Encoded;

impl Codec for Encoded {
    type Encode = Bytes;
    type Decode = Bytes;
    type Encoder = Self;
    type Decoder = Self;

    fn encoder(&mut self) -> Self {
        *self
    }

    fn decoder(&mut self) -> Self {
        *self
    }
}

impl Encoder for Encoded {
    type Item = Bytes;
    type Error = Status;

    fn encode(&mut self, message: Bytes, buffer: &mut EncodeBuf<'_>) -> Result<(), Status> {
        buffer.reserve(message.len());
        buffer.put(message);
        Ok(())
    }
}

impl Decoder for Encoded {
    type Item = Bytes;
    type Error = Status;

    fn decode(&mut self, buffer: &mut DecodeBuf<'_>) -> Result<Option<Bytes>, Status> {
        let length = buffer.remaining();
        Ok(Some(buffer.copy_to_bytes(length)))
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn statuses_tell_whether_to_retry() {
        for (code, retryable) in [
            (Code::Unavailable, true),
            (Code::DeadlineExceeded, true),
            (Code::InvalidArgument, false),
            (Code::Unauthenticated, false),
            (Code::ResourceExhausted, false),
        ] {
            let failure = failure(&Status::new(code, "no"));
            assert_eq!((failure.retryable, failure.after), (retryable, None), "{code:?}");
        }
        // google.rpc.Status with RetryInfo of 3 s, as encoded by protoc.
        let mut details = b"\x1a\x30\x0a\x28type.googleapis.com/google.rpc.RetryInfo".to_vec();
        details.extend(b"\x12\x04\x0a\x02\x08\x03");
        let status = Status::with_details(Code::ResourceExhausted, "later", details.into());
        let failure = failure(&status);
        assert_eq!((failure.retryable, failure.after), (true, Some(Duration::from_secs(3))));
    }
}
