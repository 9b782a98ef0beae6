//! Refusals of connections that are not served, in the protocol of the client.

use std::sync::Arc;
use std::time::Duration;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::sync::Semaphore;

use super::Speaks;

/// How long and how much is read on after the last words: a socket that is closed with bytes unread takes them back.
const LINGER: Duration = Duration::from_secs(1);
const LINGER_BYTES: usize = 256 << 10;
/// So many connections may linger at a time; the others are closed at once.
const LINGERING: usize = 64;

/// TLS: a fatal alert, `protocol_version`; what a client shows when the other side speaks no TLS.
const ALERT: [u8; 7] = [0x15, 0x03, 0x01, 0x00, 0x02, 0x02, 0x46];

/// Says last words.
pub(super) struct Speaker(Arc<Semaphore>);

impl Speaker {
    pub(super) fn new() -> Self {
        Self(Arc::new(Semaphore::new(LINGERING)))
    }

    /// Refuses a connection for which there is no room. With `tls` it is only closed: a handshake would cost more than it
    /// tells.
    pub(super) fn overloaded(&self, stream: TcpStream, (speaks, tls): (Speaks, bool), text: &str) {
        if tls {
            return;
        }
        // gRPC's clients wait longer and longer between connections that are only closed; after a proper farewell in their
        // own protocol they come again at once.
        if speaks == Speaks::Http {
            self.say(stream, http1("503 Service Unavailable", text));
        }
    }

    /// Refuses a client that speaks no TLS where only that is spoken; `first` are its first bytes.
    pub(super) fn clear_text(&self, stream: TcpStream, first: &[u8]) {
        if !first.starts_with(b"PRI") && first.first().is_some_and(u8::is_ascii_uppercase) {
            self.say(stream, http1("400 Bad Request", "this port speaks TLS: use https"));
        }
    }

    /// Refuses a client that speaks TLS where none is spoken.
    pub(super) fn tls(&self, stream: TcpStream) {
        self.say(stream, ALERT.to_vec());
    }

    /// Writes, and reads on for a moment.
    fn say(&self, mut stream: TcpStream, words: Vec<u8>) {
        let Ok(lingering) = self.0.clone().try_acquire_owned() else {
            // A new socket's buffer is empty: this does not wait, or it is not worth it.
            let _ = stream.try_write(&words);
            return;
        };
        tokio::spawn(async move {
            let all = async {
                stream.write_all(&words).await?;
                stream.shutdown().await?;
                let (mut buffer, mut read) = ([0; 4096], 0);
                while read < LINGER_BYTES {
                    match stream.read(&mut buffer).await? {
                        0 => break,
                        more => read += more,
                    }
                }
                std::io::Result::Ok(())
            };
            // The client may be gone, or stay: both are well.
            let _ = tokio::time::timeout(LINGER, all).await;
            drop(lingering);
        });
    }
}

fn http1(status: &str, text: &str) -> Vec<u8> {
    let body = format!("{{\"error\":\"{text}\"}}");
    let length = body.len();
    format!(
        "HTTP/1.1 {status}\r\nContent-Type: application/json\r\nContent-Length: {length}\r\nRetry-After: 1\r\n\
         Connection: close\r\n\r\n{body}"
    )
    .into_bytes()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_answer_has_the_length_that_it_says() {
        let answer = String::from_utf8(http1("503 Service Unavailable", "full")).unwrap();
        assert!(answer.contains("Content-Length: 16\r\n") && answer.ends_with("\r\n\r\n{\"error\":\"full\"}"));
    }
}
