//! Parses TorchServe's addresses: `http://HOST[:PORT]`, `https://HOST[:PORT]`, and a host and a
//! port for gRPC.

use std::net::{IpAddr, SocketAddr, ToSocketAddrs};

use super::Address;

/// The default ports of a listener.
pub(super) struct Ports {
    /// The port without TLS.
    pub(super) plain: u16,
    /// The port with TLS.
    pub(super) secure: u16,
}

/// Parses the address in `key`.
///
/// # Errors
/// The address is invalid; the text names the key, the value and what is allowed.
pub(super) fn parse(key: &str, value: &str, ports: Ports) -> Result<Address, String> {
    let allowed = |why: &str| {
        format!(
            "{key}={value}: {why}; allowed are http://HOST[:PORT] and https://HOST[:PORT], such as http://127.0.0.1:8080"
        )
    };
    if value.starts_with("unix:") {
        return Err(allowed("Unix sockets are not supported"));
    }
    let lower = value.to_ascii_lowercase();
    let (rest, tls) = match (lower.strip_prefix("http://"), lower.strip_prefix("https://")) {
        (Some(rest), _) => (rest, false),
        (None, Some(rest)) => (rest, true),
        (None, None) => return Err(allowed("invalid address")),
    };
    let authority = rest.trim_end_matches('/');
    let (host, port) = split(authority).ok_or_else(|| allowed("invalid host or port"))?;
    let port = port.unwrap_or(if tls { ports.secure } else { ports.plain });
    let socket = resolve(host, port).map_err(|why| allowed(&why))?;
    Ok(Address { socket, tls })
}

/// Resolves the address of a gRPC listener.
///
/// # Errors
/// The host cannot be resolved.
pub(super) fn grpc(key: &str, host: &str, port: u16, tls: bool) -> Result<Address, String> {
    let socket = resolve(host, port).map_err(|why| {
        format!("{key}={host}: {why}; allowed are IP addresses and names of this machine")
    })?;
    Ok(Address { socket, tls })
}

/// Splits `HOST[:PORT]`, where an IPv6 address is in brackets.
fn split(authority: &str) -> Option<(&str, Option<u16>)> {
    if authority.is_empty() || authority.contains(['/', '?', '@', ' ']) {
        return None;
    }
    if let Some(rest) = authority.strip_prefix('[') {
        let (host, port) = rest.split_once(']')?;
        return match port.strip_prefix(':') {
            Some(port) => Some((host, Some(port.parse().ok()?))),
            None if port.is_empty() => Some((host, None)),
            None => None,
        };
    }
    match authority.split_once(':') {
        Some((host, port)) if !host.is_empty() => Some((host, Some(port.parse().ok()?))),
        Some(_) => None,
        None => Some((authority, None)),
    }
}

fn resolve(host: &str, port: u16) -> Result<SocketAddr, String> {
    if let Ok(address) = host.parse::<IpAddr>() {
        return Ok(SocketAddr::new(address, port));
    }
    let addresses = (host, port)
        .to_socket_addrs()
        .map_err(|error| format!("cannot resolve the host '{host}': {error}"))?;
    // As in Java, prefer IPv4 if a name has addresses of both families.
    let preferred = addresses.min_by_key(SocketAddr::is_ipv6);
    preferred.ok_or_else(|| format!("the host '{host}' has no address"))
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn addresses_have_the_ports_of_their_listener() {
        let at = |text: &str| {
            parse("inference_address", text, Ports { plain: 8080, secure: 8443 }).unwrap()
        };
        let address = |socket: &str, tls| Address { socket: socket.parse().unwrap(), tls };
        assert_eq!(at("http://127.0.0.1:28080"), address("127.0.0.1:28080", false));
        assert_eq!(at("http://0.0.0.0"), address("0.0.0.0:8080", false));
        assert_eq!(at("https://0.0.0.0/"), address("0.0.0.0:8443", true));
        assert_eq!(at("HTTP://localhost:1"), address("127.0.0.1:1", false));
        assert_eq!(at("http://[::1]:5"), address("[::1]:5", false));
        assert_eq!(at("http://[::]"), address("[::]:8080", false));
    }

    #[test]
    fn refuses_invalid_addresses_with_key_and_value() {
        for text in [
            "127.0.0.1:8080",
            "http://",
            "http://:80",
            "http://h:x",
            "http://h:70000",
            "http://[::1",
            "unix:/tmp/s",
        ] {
            let error =
                parse("inference_address", text, Ports { plain: 1, secure: 2 }).unwrap_err();
            assert!(
                error.contains(&format!("inference_address={text}: ")) && error.contains("allowed"),
                "{error}"
            );
        }
        let error = grpc("grpc_inference_address", "no such host", 1, false).unwrap_err();
        assert!(error.contains("grpc_inference_address=no such host"), "{error}");
    }
}
