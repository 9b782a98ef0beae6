//! `pharos health`: asks a running server whether it is ready, for health checks in containers without a shell.

use std::io::{self, BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpStream, ToSocketAddrs};
use std::process::ExitCode;
use std::time::Duration;

/// The time limit of the connection, of the request and of the response.
const LIMIT: Duration = Duration::from_secs(2);

/// The maximum length of the line with the status.
const LONGEST: u64 = 256;

/// Exits with 0 if the server at `address` is ready.
pub(crate) fn run(address: &str) -> ExitCode {
    let reason = match status(address) {
        Ok(200) => return ExitCode::SUCCESS,
        Ok(status) => format!("{address} is not ready: it answered {status}"),
        Err(error) => failure(address, &error),
    };
    eprintln!("{reason}");
    ExitCode::FAILURE
}

/// Returns the text for a server that cannot be asked.
fn failure(address: &str, error: &io::Error) -> String {
    match error.kind() {
        _ if address.contains('/') => {
            format!("'{address}' is not an address of a server: expected HOST:PORT, without a scheme and a path")
        }
        io::ErrorKind::InvalidInput => {
            format!("'{address}' is not an address of a server: expected HOST:PORT, for example localhost:8000")
        }
        _ => format!("{address} is not ready: {error}"),
    }
}

/// Returns the status of the readiness check.
fn status(address: &str) -> io::Result<u16> {
    let mut connection = connect(address.to_socket_addrs()?)?;
    connection.set_read_timeout(Some(LIMIT))?;
    connection.set_write_timeout(Some(LIMIT))?;
    write!(connection, "GET /v2/health/ready HTTP/1.1\r\nHost: {address}\r\nConnection: close\r\n\r\n")?;
    let mut line = Vec::new();
    BufReader::new(connection.take(LONGEST)).read_until(b'\n', &mut line)?;
    let line = String::from_utf8_lossy(&line);
    let code = line.strip_prefix("HTTP/1.1 ").and_then(|rest| rest.get(..3)?.parse().ok());
    code.ok_or_else(|| io::Error::new(io::ErrorKind::InvalidData, format!("not a status of HTTP: {line:?}")))
}

/// Connects to the first of the addresses of a name that accepts. The name of this machine usually has one of IPv6 too, at which no
/// server may listen.
fn connect(addresses: impl Iterator<Item = SocketAddr>) -> io::Result<TcpStream> {
    let mut refused = io::Error::from(io::ErrorKind::NotFound);
    for address in addresses {
        match TcpStream::connect_timeout(&address, LIMIT) {
            Ok(connection) => return Ok(connection),
            Err(error) => refused = error,
        }
    }
    Err(refused)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use std::net::TcpListener;
    use std::thread;

    use super::*;

    /// Returns the status that is read from a server which sends `answer`.
    fn read(answer: &'static str) -> Result<u16, String> {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap().to_string();
        let server = thread::spawn(move || {
            let (mut connection, _) = listener.accept().unwrap();
            // All of the request is read: closing a connection with unread bytes resets it.
            let lines = BufReader::new(connection.try_clone().unwrap()).lines().map_while(Result::ok);
            let lines: Vec<String> = lines.take_while(|line| !line.is_empty()).collect();
            connection.write_all(answer.as_bytes()).unwrap();
            lines.first().cloned()
        });
        let status = status(&address).map_err(|error| error.to_string());
        assert_eq!(server.join().unwrap().as_deref(), Some("GET /v2/health/ready HTTP/1.1"));
        status
    }

    #[test]
    fn reads_the_status() {
        assert_eq!(read("HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n"), Ok(200));
        assert_eq!(read("HTTP/1.1 400 Bad Request\r\n\r\n"), Ok(400));
    }

    #[test]
    fn every_address_of_a_name_is_tried() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let open = listener.local_addr().unwrap();
        let closed = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
        assert_eq!(connect([closed, open].into_iter()).unwrap().peer_addr().unwrap(), open);
        assert_eq!(connect([closed].into_iter()).unwrap_err().kind(), io::ErrorKind::ConnectionRefused);
        assert_eq!(connect([].into_iter()).unwrap_err().kind(), io::ErrorKind::NotFound);
    }

    #[test]
    fn the_form_of_an_address_is_told() {
        let reason = |address| failure(address, &status(address).unwrap_err());
        for address in ["localhost", "localhost:x", "localhost:99999"] {
            let text = reason(address);
            assert!(text.contains(&format!("'{address}'")) && text.contains("expected HOST:PORT"), "{text}");
        }
        for address in ["http://127.0.0.1:1", "127.0.0.1:1/v2"] {
            assert!(reason(address).contains("expected HOST:PORT, without a scheme and a path"), "{address}");
        }
        assert!(reason("127.0.0.1:1").starts_with("127.0.0.1:1 is not ready: "));
    }

    #[test]
    fn other_answers_are_errors() {
        for answer in ["", "SSH-2.0\r\n", "HTTP/1.1 2", "HTTP/1.1 xyz\r\n"] {
            assert!(read(answer).is_err_and(|reason| reason.contains("not a status")), "{answer:?}");
        }
        let closed = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
        assert!(status(&closed.to_string()).is_err());
        assert!(status("no port").is_err());
    }
}
