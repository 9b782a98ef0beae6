//! Parsers for the values of flags. Each error lists the allowed values.

use std::fmt::Display;
use std::net::IpAddr;
use std::ops::RangeInclusive;
use std::str::FromStr;
use std::time::Duration;

use super::StatsdAddress;

pub(super) fn boolean(text: &str) -> Result<bool, String> {
    match text.to_ascii_lowercase().as_str() {
        "true" | "on" | "yes" | "1" => Ok(true),
        "false" | "off" | "no" | "0" => Ok(false),
        _ => Err("allowed are true, false, on, off, yes, no, 1 and 0".to_owned()),
    }
}

pub(super) fn seconds(text: &str) -> Result<Duration, String> {
    let allowed = "allowed are whole seconds from 0 to 86400";
    let seconds: u64 = text.parse().map_err(|_| allowed.to_owned())?;
    if seconds <= 86_400 { Ok(Duration::from_secs(seconds)) } else { Err(allowed.to_owned()) }
}

pub(super) fn positive_seconds(text: &str) -> Result<Duration, String> {
    let allowed = "allowed are whole seconds from 1 to 86400";
    seconds(text).ok().filter(|duration| !duration.is_zero()).ok_or_else(|| allowed.to_owned())
}

pub(super) fn port(text: &str) -> Result<u16, String> {
    text.parse().map_err(|_| "expected a number from 0 to 65535".to_owned())
}

/// Returns a parser for whole numbers within `range`.
pub(super) fn whole<N>(
    range: RangeInclusive<N>,
) -> impl Fn(&str) -> Result<N, String> + Clone + Send + Sync + 'static
where
    N: FromStr + PartialOrd + Display + Clone + Send + Sync + 'static,
{
    move |text: &str| {
        let number = text.parse().ok().filter(|number| range.contains(number));
        number.ok_or_else(|| {
            format!("expected a whole number from {} to {}", range.start(), range.end())
        })
    }
}

/// Parses milliseconds. Triton accepts fractions; less than 1 ms becomes 1 ms.
pub(super) fn fractional_milliseconds(text: &str) -> Result<Duration, String> {
    let allowed =
        "expected milliseconds greater than 0, at most 86400000, for example 500 or 1500.5";
    let milliseconds = text
        .parse::<f64>()
        .ok()
        .filter(|milliseconds| *milliseconds > 0.0 && *milliseconds <= 86_400_000.0);
    milliseconds
        .map(|milliseconds: f64| Duration::from_secs_f64(milliseconds.max(1.0) / 1e3))
        .ok_or_else(|| allowed.to_owned())
}

pub(super) fn milliseconds(text: &str) -> Result<Duration, String> {
    let milliseconds =
        text.parse().ok().filter(|milliseconds| (1..=86_400_000).contains(milliseconds));
    milliseconds
        .map(Duration::from_millis)
        .ok_or_else(|| "allowed are whole milliseconds from 1 to 86400000".to_owned())
}

pub(super) fn input_size(text: &str) -> Result<u64, String> {
    let size: u64 =
        text.parse().map_err(|_| "allowed are numbers of bytes greater than 0".to_owned())?;
    if size == 0 {
        Err("--http-max-input-size must be greater than 0.".to_owned())
    } else {
        Ok(size)
    }
}

/// Parses an IP address or `localhost`.
pub(super) fn address(text: &str) -> Result<IpAddr, String> {
    if text == "localhost" {
        return Ok(IpAddr::from([127, 0, 0, 1]));
    }
    text.parse().map_err(|_| {
        "allowed are IPv4 and IPv6 addresses, for example 127.0.0.1 or ::, and localhost".to_owned()
    })
}

/// Parses `HOST:PORT` (IPv6 addresses in brackets) or `unix:PATH`. Also accepts the prefixes
/// `unixgram:` and `udp:` of other programs.
pub(super) fn statsd_address(text: &str) -> Result<StatsdAddress, String> {
    let allowed = "allowed are HOST:PORT for UDP, for example 127.0.0.1:8125 or [::1]:8125, and \
                   unix:PATH for a Unix datagram socket, for example unix:/run/pharos/statsd.sock";
    let without = |prefix: &str| {
        text.strip_prefix(prefix).map(|rest| rest.strip_prefix("//").unwrap_or(rest))
    };
    if let Some(path) = without("unix:").or_else(|| without("unixgram:")) {
        return if path.is_empty() {
            Err(allowed.to_owned())
        } else {
            Ok(StatsdAddress::Unix(path.into()))
        };
    }
    let (host, port) = without("udp:").unwrap_or(text).rsplit_once(':').ok_or(allowed)?;
    let host = host.strip_prefix('[').and_then(|host| host.strip_suffix(']')).unwrap_or(host);
    let port =
        port.parse().map_err(|_| format!("'{port}' is not a port from 0 to 65535; {allowed}"))?;
    // Without brackets, the last group of an IPv6 address would be ambiguous with the port.
    let bare = host.contains(':') && !text.contains('[');
    if host.is_empty() || host.contains('/') || bare {
        Err(allowed.to_owned())
    } else {
        Ok(StatsdAddress::Udp(host.to_owned(), port))
    }
}
