//! Refuses connections with a response in the protocol of the client.

use std::sync::Arc;
use std::time::Duration;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::sync::Semaphore;

use super::HttpVersions;

/// The limits of reading after the response: closing a socket with unread bytes resets it and
/// discards the response.
const LINGER: Duration = Duration::from_secs(1);
const LINGER_BYTES: usize = 256 << 10;
/// The maximum number of lingering connections; others are closed at once.
const LINGERING: usize = 64;

/// A fatal TLS alert, `protocol_version`, which clients report if the server does not support TLS.
const ALERT: [u8; 7] = [0x15, 0x03, 0x01, 0x00, 0x02, 0x02, 0x46];

/// Sends refusals.
pub(super) struct RefusalSender(Arc<Semaphore>);

impl RefusalSender {
    pub(super) fn new() -> Self {
        Self(Arc::new(Semaphore::new(LINGERING)))
    }

    /// Refuses a connection over the limit. With `tls` it is only closed, because a handshake is
    /// too expensive.
    pub(super) fn overloaded(
        &self,
        stream: TcpStream,
        versions: HttpVersions,
        tls: bool,
        text: &str,
    ) {
        if tls {
            return;
        }
        // Connections of gRPC are only closed: clients then back off exponentially, but retry at
        // once after GOAWAY.
        if versions == HttpVersions::Http {
            self.send(stream, http1("503 Service Unavailable", text));
        }
    }

    /// Refuses a clear-text client of a TLS port; `first` are its first bytes.
    pub(super) fn clear_text(&self, stream: TcpStream, first: &[u8]) {
        if !first.starts_with(b"PRI") && first.first().is_some_and(u8::is_ascii_uppercase) {
            self.send(stream, http1("400 Bad Request", "this port requires TLS: use https"));
        }
    }

    /// Refuses a TLS client of a clear-text port.
    pub(super) fn tls(&self, stream: TcpStream) {
        self.send(stream, ALERT.to_vec());
    }

    /// Writes a response, then reads within the limits.
    fn send(&self, mut stream: TcpStream, response: Vec<u8>) {
        let Ok(lingering) = self.0.clone().try_acquire_owned() else {
            // The send buffer of a new socket is empty, so this rarely fails.
            let _ = stream.try_write(&response);
            return;
        };
        tokio::spawn(async move {
            let all = async {
                stream.write_all(&response).await?;
                stream.shutdown().await?;
                let mut buffer = [0; 4096];
                let mut read = 0;
                while read < LINGER_BYTES {
                    match stream.read(&mut buffer).await? {
                        0 => break,
                        more => read += more,
                    }
                }
                std::io::Result::Ok(())
            };
            // Neither a disconnect nor a timeout matters.
            let _ = tokio::time::timeout(LINGER, all).await;
            drop(lingering);
        });
    }
}

fn http1(status: &str, text: &str) -> Vec<u8> {
    let body = format!("{{\"error\":\"{text}\"}}");
    let length = body.len();
    format!(
        "HTTP/1.1 {status}\r\nContent-Type: application/json\r\nContent-Length: \
         {length}\r\nRetry-After: 1\r\nConnection: close\r\n\r\n{body}"
    )
    .into_bytes()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn content_length_matches_the_body() {
        let answer = String::from_utf8(http1("503 Service Unavailable", "full")).unwrap();
        assert!(
            answer.contains("Content-Length: 16\r\n")
                && answer.ends_with("\r\n\r\n{\"error\":\"full\"}")
        );
    }
}
