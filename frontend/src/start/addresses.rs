//! Checks that no two listeners of this server have addresses that overlap. The system refuses to
//! bind most of these, but with `SO_REUSEPORT` it distributes the connections among the listeners.

use std::net::{IpAddr, Ipv4Addr, SocketAddr};

use crate::cli::Options;
use pharos_http::cloud::Platform;
use pharos_torchserve::{Settings, named_addresses};

/// A listener, the flag or key of its address, and the address.
pub(super) type Named = (String, String, SocketAddr);

/// Returns the listeners of the server's own ports.
pub(super) fn of_server(options: &Options, platforms: &[Platform]) -> Vec<Named> {
    let Options { http, grpc, metrics, openai, .. } = options;
    let openai_port = openai.port.unwrap_or_default();
    let listeners = [
        (http.allow, "HTTP", "--http-port", (http.address, http.port)),
        (grpc.allow, "gRPC", "--grpc-port", (grpc.address, grpc.port)),
        (metrics.allow, "metrics", "--metrics-port", (options.metrics_address(), metrics.port)),
        (openai.port.is_some(), "OpenAI's API", "--openai-port", (http.address, openai_port)),
    ];
    let allowed = listeners.into_iter().filter(|(allow, ..)| *allow);
    let own =
        allowed.map(|(_, what, flag, address)| (what.to_owned(), flag.to_owned(), address.into()));
    let clouds = platforms.iter().map(|platform| {
        let (what, flag, address) = of_cloud(options, platform);
        (what.to_owned(), flag.to_owned(), address)
    });
    own.chain(clouds).collect()
}

/// Returns the listener of a cloud platform. It is on all interfaces, as in Triton.
pub(super) fn of_cloud(
    options: &Options,
    platform: &Platform,
) -> (&'static str, &'static str, SocketAddr) {
    let Options { sagemaker, vertex_ai, .. } = options;
    let (what, flag, port) = match platform {
        Platform::SageMaker(_) => ("SageMaker", "--sagemaker-port", sagemaker.port),
        Platform::VertexAi(_) => ("Vertex AI", "--vertex-ai-port", vertex_ai.port),
    };
    (what, flag, (Ipv4Addr::UNSPECIFIED, port).into())
}

/// Returns the listeners of the server's own ports and of TorchServe's.
pub(super) fn of_torchserve(options: &Options, settings: &Settings) -> Vec<Named> {
    of_server(options, &[]).into_iter().chain(named_addresses(settings)).collect()
}

/// Checks that the addresses of these listeners do not overlap.
///
/// # Errors
/// Names the first two that overlap.
pub(super) fn check(listeners: &[Named]) -> Result<(), String> {
    for (index, (what, key, address)) in listeners.iter().enumerate() {
        let others = listeners.iter().take(index);
        if let Some((other, other_key, at)) =
            others.into_iter().find(|(_, _, at)| overlap(*at, *address))
        {
            return Err(format!(
                "{what} cannot listen on {address} ({key}): {other} listens on {at} \
                 ({other_key}). Give each its own port"
            ));
        }
    }
    Ok(())
}

/// Returns whether two listeners would have connections to the same address. Port 0 stands for a
/// free port, and the IPv6 address `::` includes IPv4.
fn overlap(one: SocketAddr, other: SocketAddr) -> bool {
    let a = one.ip().to_canonical();
    let b = other.ip().to_canonical();
    let includes = |a: IpAddr, b: IpAddr| a.is_unspecified() && (a.is_ipv6() || b.is_ipv4());
    one.port() == other.port() && one.port() != 0 && (a == b || includes(a, b) || includes(b, a))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check_pair(one: &str, other: &str) -> Result<(), String> {
        let named = |what: &str, at: &str| {
            at.parse().map(|at| (what.to_owned(), format!("--{what}-port"), at))
        };
        let listeners: Result<Vec<_>, _> =
            [named("HTTP", one), named("gRPC", other)].into_iter().collect();
        check(&listeners.map_err(|error: std::net::AddrParseError| error.to_string())?)
    }

    #[test]
    fn addresses_of_one_port_overlap_if_one_includes_the_other() {
        for (one, other, overlaps) in [
            ("127.0.0.1:8000", "127.0.0.1:8000", true),
            ("0.0.0.0:8000", "127.0.0.1:8000", true),
            ("[::]:8000", "127.0.0.1:8000", true),
            ("[::]:8000", "0.0.0.0:8000", true),
            ("[::]:8000", "[::1]:8000", true),
            ("[::ffff:127.0.0.1]:8000", "127.0.0.1:8000", true),
            ("127.0.0.1:8000", "127.0.0.1:8001", false),
            ("127.0.0.1:8000", "127.0.0.2:8000", false),
            ("127.0.0.1:8000", "[::1]:8000", false),
            ("0.0.0.0:8000", "[::1]:8000", false),
            ("0.0.0.0:0", "0.0.0.0:0", false),
        ] {
            assert_eq!(check_pair(one, other).is_err(), overlaps, "{one} {other}");
            assert_eq!(check_pair(other, one).is_err(), overlaps, "{other} {one}");
        }
    }

    #[test]
    fn the_error_names_both_listeners() {
        let error = check_pair("0.0.0.0:8000", "127.0.0.1:8000").err();
        assert_eq!(
            error.as_deref(),
            Some(
                "gRPC cannot listen on 127.0.0.1:8000 (--gRPC-port): HTTP listens on 0.0.0.0:8000 \
                 (--HTTP-port). Give each its own port"
            )
        );
    }
}
