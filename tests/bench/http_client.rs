//! An HTTP/1.1 client with minimal overhead: sends prebuilt bytes and checks the length of the
//! response.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};

use bytes::Bytes;

use crate::client::{Client, EXCHANGE_TIMEOUT, Turns};
use crate::workload::Workload;

/// The maximum length of a response's head.
const HEAD_LIMIT: usize = 16 << 10;

/// One keep-alive connection.
pub(crate) struct HttpClient {
    workload: Workload,
    stream: TcpStream,
    requests: Turns,
    /// Buffer of the response; grows to the largest response.
    buffer: Vec<u8>,
    /// Length of the body of the first response.
    expected: Option<usize>,
}

/// The part of a response before its body.
#[derive(Debug, PartialEq)]
struct Head {
    status: u16,
    /// The offset of the body.
    end: usize,
    body: usize,
}

impl HttpClient {
    /// Connects to a server.
    ///
    /// # Errors
    /// The connection fails.
    pub(crate) fn connect(
        workload: Workload,
        requests: Turns,
        address: SocketAddr,
    ) -> Result<Self, String> {
        let stream = open(address).map_err(|error| format!("HTTP to {address}: {error}"))?;
        Ok(Self { workload, stream, requests, buffer: vec![0; HEAD_LIMIT], expected: None })
    }

    /// Sends the next request and reads the response into the buffer. Returns the range of its
    /// body.
    fn round_trip(&mut self) -> Result<(usize, usize), String> {
        self.stream
            .write_all(&self.requests.next())
            .map_err(|error| format!("HTTP write: {error}"))?;
        let (head, filled) = read_head(&mut self.stream, &mut self.buffer)?;
        let end = head.end + head.body;
        if self.buffer.len() < end {
            self.buffer.resize(end, 0);
        }
        if filled > end {
            return Err(format!("HTTP: {} bytes after the response", filled - end));
        }
        self.stream
            .read_exact(&mut self.buffer[filled..end])
            .map_err(|error| format!("HTTP read: {error}"))?;
        if head.status != 200 {
            let text = String::from_utf8_lossy(&self.buffer[head.end..end.min(head.end + 300)]);
            return Err(format!("HTTP status {}: {text}", head.status));
        }
        Ok((head.end, end))
    }
}

impl Client for HttpClient {
    fn exchange(&mut self) -> Result<(), String> {
        let (begin, end) = self.round_trip()?;
        let expected = *self.expected.get_or_insert(end - begin);
        if end - begin == expected {
            return Ok(());
        }
        Err(format!("HTTP: a body of {} bytes where the first one had {expected}", end - begin))
    }

    fn has_first(&self) -> bool {
        self.requests.has_first()
    }

    fn probe(&mut self) -> Result<Vec<Bytes>, String> {
        let (begin, end) = self.round_trip()?;
        let body = Bytes::copy_from_slice(&self.buffer[begin..end]);
        let payload = self.workload.payload();
        let head = body
            .len()
            .checked_sub(payload)
            .ok_or(format!("HTTP: a body of only {} bytes", body.len()))?;
        let mut tensors = body.slice(head..);
        Ok(self.workload.answer().iter().map(|output| tensors.split_to(output.len())).collect())
    }
}

/// Requests a path and returns the status.
///
/// # Errors
/// The connection fails, or the response is not HTTP.
pub(crate) fn get_status(address: SocketAddr, path: &str) -> Result<u16, String> {
    let mut stream = open(address).map_err(|error| error.to_string())?;
    let request = format!("GET {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n\r\n");
    stream.write_all(request.as_bytes()).map_err(|error| error.to_string())?;
    read_head(&mut stream, &mut vec![0; HEAD_LIMIT]).map(|(head, _)| head.status)
}

/// Sends a JSON body and returns the status and the body of the response.
///
/// # Errors
/// The connection fails, or the response is not HTTP.
pub(crate) fn post(address: SocketAddr, path: &str, json: &str) -> Result<(u16, Vec<u8>), String> {
    let mut stream = open(address).map_err(|error| error.to_string())?;
    let request = format!(
        "POST {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\nContent-Type: \
         application/json\r\nContent-Length: {}\r\n\r\n{json}",
        json.len()
    );
    stream.write_all(request.as_bytes()).map_err(|error| error.to_string())?;
    let mut buffer = vec![0; HEAD_LIMIT];
    let (head, filled) = read_head(&mut stream, &mut buffer)?;
    buffer.resize((head.end + head.body).max(filled), 0);
    stream.read_exact(&mut buffer[filled..]).map_err(|error| format!("HTTP read: {error}"))?;
    Ok((head.status, buffer.split_off(head.end)))
}

fn open(address: SocketAddr) -> std::io::Result<TcpStream> {
    let stream = TcpStream::connect_timeout(&address, EXCHANGE_TIMEOUT)?;
    stream.set_nodelay(true)?;
    stream.set_read_timeout(Some(EXCHANGE_TIMEOUT))?;
    stream.set_write_timeout(Some(EXCHANGE_TIMEOUT))?;
    Ok(stream)
}

/// Reads until the head is complete. Returns it with the number of bytes in the buffer, which may
/// include some of the body.
fn read_head(stream: &mut impl Read, buffer: &mut [u8]) -> Result<(Head, usize), String> {
    let mut filled = 0;
    loop {
        match stream.read(&mut buffer[filled..]) {
            Ok(0) if filled == buffer.len() => {
                return Err(format!("HTTP: a head of more than {filled} bytes"));
            }
            Ok(0) => return Err("HTTP: the server closed the connection".to_owned()),
            Ok(count) => filled += count,
            Err(error) => return Err(format!("HTTP read: {error}")),
        }
        let searched = &buffer[..filled.min(HEAD_LIMIT)];
        if let Some(end) = searched.windows(4).position(|window| window == b"\r\n\r\n") {
            return parse_head(&buffer[..end])
                .map(|(status, body)| (Head { status, end: end + 4, body }, filled));
        }
    }
}

/// Parses the status and the body length.
fn parse_head(head: &[u8]) -> Result<(u16, usize), String> {
    let text = std::str::from_utf8(head).map_err(|_| "HTTP: a head that is not text".to_owned())?;
    let mut lines = text.split("\r\n");
    let status_line = lines.next().unwrap_or_default();
    let status = status_line.split(' ').nth(1).and_then(|status| status.parse().ok());
    let status = status.ok_or_else(|| format!("HTTP: not a status line: '{status_line}'"))?;
    let length = lines.filter_map(|line| line.split_once(':')).find_map(|(name, value)| {
        name.eq_ignore_ascii_case("content-length").then(|| value.trim().parse().ok()).flatten()
    });
    // Chunked responses would need another reader, and every measured server sends a
    // Content-Length.
    length
        .map(|length| (status, length))
        .ok_or_else(|| format!("HTTP: status {status} without a Content-Length"))
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[track_caller]
    fn check(response: &str, expected: Result<(u16, usize, &str), &str>) {
        let mut buffer = vec![0; HEAD_LIMIT];
        let result = read_head(&mut response.as_bytes(), &mut buffer);
        let seen = result.map(|(head, filled)| {
            (head.status, head.body, String::from_utf8(buffer[head.end..filled].to_vec()).unwrap())
        });
        let seen = seen
            .as_ref()
            .map(|(status, body, rest)| (*status, *body, rest.as_str()))
            .map_err(String::as_str);
        assert_eq!(seen, expected);
    }

    #[test]
    fn parses_response_heads() {
        check("HTTP/1.1 200 OK\r\ncontent-length: 3\r\nx: y\r\n\r\nabc", Ok((200, 3, "abc")));
        check("HTTP/1.1 503 Busy\r\nContent-Length:  0\r\n\r\n", Ok((503, 0, "")));
        check("HTTP/1.1 200 OK\r\n\r\nabc", Err("HTTP: status 200 without a Content-Length"));
        check("nonsense\r\n\r\n", Err("HTTP: not a status line: 'nonsense'"));
        check("HTTP/1.1 200 OK\r\n", Err("HTTP: the server closed the connection"));
    }
}
