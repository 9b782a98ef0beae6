//! `pharos health`: asks a running server whether it is ready, for health checks in containers
//! without a shell.

use std::io::{self, Read, Write};
use std::net::{Ipv4Addr, SocketAddr, TcpStream, ToSocketAddrs};
use std::process::ExitCode;
use std::time::Duration;

use pharos::printable::printable;
use pharos_os::client::{BlockingTls, ClientTls};

use crate::cli::{Certificates, Http};

/// The time limit of the connection, of the request and of the response.
const LIMIT: Duration = Duration::from_secs(2);

/// The number of bytes that are read of the response.
const LONGEST: u64 = 4096;

/// Exits with 0 if the server at `address` is ready: `HOST:PORT`, with `https://` before it for TLS
/// with these certificates. The server's certificate must have `server_name`, or else the host's
/// name. Without an address, the command asks the listener which the options of this process
/// define: in a container, this process has the variables of the server.
pub(crate) fn run(
    address: Option<&str>,
    listener: &Http,
    server_name: Option<&str>,
    certificates: &Certificates,
) -> ExitCode {
    let here = reached_at((listener.address, listener.port).into()).to_string();
    match ready(address.unwrap_or(&here), server_name, certificates) {
        Ok(()) => ExitCode::SUCCESS,
        Err(reason) => {
            eprintln!("{}", printable(&reason));
            ExitCode::FAILURE
        }
    }
}

/// Returns the address at which this machine reaches a listener.
fn reached_at(mut listener: SocketAddr) -> SocketAddr {
    if listener.ip().is_unspecified() {
        listener.set_ip(Ipv4Addr::LOCALHOST.into());
    }
    listener
}

/// Returns the reason if the server is not ready.
fn ready(
    address: &str,
    server_name: Option<&str>,
    certificates: &Certificates,
) -> Result<(), String> {
    let target = Target::parse(address, server_name);
    let files = certificates.clone().files();
    let tls = match target.is_secure {
        true => Some(BlockingTls::new(&files, target.name)?),
        false if server_name.is_some() || files != ClientTls::default() => {
            return Err(format!(
                "the flags for certificates need https:// before the address: https://{address}"
            ));
        }
        false => None,
    };
    match status(&target, tls.as_ref()) {
        Ok((200, _)) => Ok(()),
        Ok((status, body)) if body.is_empty() => {
            Err(format!("{address} is not ready: it answered {status}"))
        }
        Ok((status, body)) => Err(format!("{address} is not ready: it answered {status}: {body}")),
        Err(error) => Err(failure(&target, &error)),
    }
}

/// The server to ask.
#[derive(Clone, Copy, Debug)]
struct Target<'a> {
    is_secure: bool,
    /// `HOST:PORT`.
    address: &'a str,
    /// The name that the server's certificate must have.
    name: &'a str,
}

impl<'a> Target<'a> {
    fn parse(text: &'a str, name: Option<&'a str>) -> Self {
        let (is_secure, address) = match text.strip_prefix("https://") {
            Some(address) => (true, address),
            None => (false, text.strip_prefix("http://").unwrap_or(text)),
        };
        let host = address.rsplit_once(':').map_or(address, |(host, _)| host);
        let without_brackets =
            host.strip_prefix('[').and_then(|host| host.strip_suffix(']')).unwrap_or(host);
        Self { is_secure, address, name: name.unwrap_or(without_brackets) }
    }
}

/// Returns the text for a server that cannot be asked.
fn failure(target: &Target<'_>, error: &io::Error) -> String {
    let address = target.address;
    let unusable = |rest| {
        format!("'{address}' is not an address of a server: expected [https://]HOST:PORT, {rest}")
    };
    match error.kind() {
        _ if address.contains('/') => unusable("without a path"),
        io::ErrorKind::InvalidInput => unusable("for example localhost:8000"),
        _ => format!("{address} is not ready: {error}"),
    }
}

/// Returns the status and the body of the readiness check.
fn status(target: &Target<'_>, tls: Option<&BlockingTls>) -> io::Result<(u16, String)> {
    let connection = connect(target.address.to_socket_addrs()?)?;
    connection.set_read_timeout(Some(LIMIT))?;
    connection.set_write_timeout(Some(LIMIT))?;
    match tls {
        Some(tls) => ask(tls.on(connection)?, target.address),
        None => ask(connection, target.address),
    }
}

/// Sends the request over a connection, and returns the status and the body of the response.
fn ask(mut connection: impl Read + Write, address: &str) -> io::Result<(u16, String)> {
    let request =
        format!("GET /v2/health/ready HTTP/1.1\r\nHost: {address}\r\nConnection: close\r\n\r\n");
    let sent = connection.write_all(request.as_bytes()).and_then(|()| connection.flush());
    let mut answer = Vec::new();
    let read = connection.take(LONGEST).read_to_end(&mut answer);
    if answer.is_empty() {
        // A server that closes the connection during the request may have said why.
        read?;
        sent?;
    }
    let text = String::from_utf8_lossy(&answer);
    let code = text.strip_prefix("HTTP/1.1 ").and_then(|rest| rest.get(..3)?.parse().ok());
    let body = text.split_once("\r\n\r\n").map_or("", |(_, body)| body);
    let Some(code) = code else {
        let first = text.lines().next().unwrap_or_default();
        return Err(io::Error::new(
            io::ErrorKind::InvalidData,
            format!("not a status of HTTP: {first:?}"),
        ));
    };
    Ok((code, body.trim().to_owned()))
}

/// Connects to the first of the addresses of a name that accepts. The name of this machine usually
/// has an IPv6 address too, at which no server may listen.
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
    use std::io::{BufRead, BufReader};
    use std::net::TcpListener;
    use std::thread;

    use super::*;

    /// Returns what a server without TLS answers.
    fn clear(address: &str) -> io::Result<(u16, String)> {
        status(&Target::parse(address, None), None)
    }

    #[test]
    fn a_listener_on_all_interfaces_is_reached_at_the_loopback_address() {
        let reached = |listener: &str| reached_at(listener.parse().unwrap()).to_string();
        assert_eq!(reached("0.0.0.0:9000"), "127.0.0.1:9000");
        assert_eq!(reached("[::]:9000"), "127.0.0.1:9000");
        assert_eq!(reached("10.1.2.3:9000"), "10.1.2.3:9000");
        assert_eq!(reached("[fd00::1]:8000"), "[fd00::1]:8000");
    }

    /// Returns what is read from a server that sends `answer`.
    fn read(answer: &'static str) -> Result<(u16, String), String> {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap().to_string();
        let server = thread::spawn(move || {
            let (mut connection, _) = listener.accept().unwrap();
            // All of the request is read: closing a connection with unread bytes resets it.
            let lines =
                BufReader::new(connection.try_clone().unwrap()).lines().map_while(Result::ok);
            let lines: Vec<String> = lines.take_while(|line| !line.is_empty()).collect();
            connection.write_all(answer.as_bytes()).unwrap();
            lines.first().cloned()
        });
        let status = clear(&address).map_err(|error| error.to_string());
        assert_eq!(server.join().unwrap().as_deref(), Some("GET /v2/health/ready HTTP/1.1"));
        status
    }

    #[test]
    fn reads_the_status() {
        assert_eq!(read("HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n"), Ok((200, String::new())));
        assert_eq!(
            read("HTTP/1.1 400 Bad Request\r\n\r\nloading\n"),
            Ok((400, "loading".to_owned()))
        );
    }

    #[test]
    fn every_address_of_a_name_is_tried() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let open = listener.local_addr().unwrap();
        let closed = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
        assert_eq!(connect([closed, open].into_iter()).unwrap().peer_addr().unwrap(), open);
        assert_eq!(
            connect([closed].into_iter()).unwrap_err().kind(),
            io::ErrorKind::ConnectionRefused
        );
        assert_eq!(connect([].into_iter()).unwrap_err().kind(), io::ErrorKind::NotFound);
    }

    #[test]
    fn the_form_of_an_address_is_told() {
        let reason = |address| ready(address, None, &Certificates::default()).unwrap_err();
        for address in
            ["localhost", "localhost:x", "localhost:99999", "https://localhost", "http://localhost"]
        {
            let text = reason(address);
            assert!(
                text.contains("expected [https://]HOST:PORT, for example localhost:8000"),
                "{text}"
            );
        }
        for address in ["http://127.0.0.1:1/", "127.0.0.1:1/v2", "ftp://127.0.0.1:1"] {
            assert!(
                reason(address).contains("expected [https://]HOST:PORT, without a path"),
                "{address}"
            );
        }
        assert!(reason("127.0.0.1:1").starts_with("127.0.0.1:1 is not ready: "));
        for (address, name, part) in [
            ("https://127.0.0.1:1", "https://a", "'https://a' is not the name of a server"),
            ("127.0.0.1:1", "a", "need https:// before the address: https://127.0.0.1:1"),
        ] {
            let text = ready(address, Some(name), &Certificates::default()).unwrap_err();
            assert!(text.contains(part), "{text}");
        }
    }

    #[test]
    fn the_name_of_a_certificate_is_that_of_the_host_if_none_is_given() {
        for (text, name, expected) in [
            ("https://a:1", None, (true, "a:1", "a")),
            ("https://[::1]:1", None, (true, "[::1]:1", "::1")),
            ("https://127.0.0.1:1", Some("b"), (true, "127.0.0.1:1", "b")),
            ("http://a:1", None, (false, "a:1", "a")),
        ] {
            let Target { is_secure, address, name } = Target::parse(text, name);
            assert_eq!((is_secure, address, name), expected, "{text}");
        }
    }

    #[test]
    fn other_answers_are_errors() {
        for answer in ["", "SSH-2.0\r\n", "HTTP/1.1 2", "HTTP/1.1 xyz\r\n"] {
            assert!(
                read(answer).is_err_and(|reason| reason.contains("not a status")),
                "{answer:?}"
            );
        }
        let closed = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
        assert!(clear(&closed.to_string()).is_err());
        assert!(clear("no port").is_err());
    }
}
