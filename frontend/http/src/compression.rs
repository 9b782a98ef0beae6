//! Content codings of requests and responses: gzip and deflate (the zlib format in HTTP, RFC 1950).

use bytes::Bytes;
use flate2::Compression;
use pharos::data::Data;
use pharos::error::InferError;

use pharos_listener::receiving::Reservation;
use pharos_listener::receiving::body::no_memory;
use pharos_listener::receiving::coding::{Format, InflateError, deflate, inflate};

/// A content coding.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Coding {
    /// Uncompressed.
    Identity,
    /// RFC 1952.
    Gzip,
    /// RFC 1950.
    Deflate,
}

impl Coding {
    /// Returns the name in `Content-Encoding`; `None` for identity, which has no header.
    pub(super) fn name(self) -> Option<&'static str> {
        match self {
            Self::Identity => None,
            Self::Gzip => Some("gzip"),
            Self::Deflate => Some("deflate"),
        }
    }

    /// Returns the compression format; `None` for identity.
    fn format(self) -> Option<Format> {
        match self {
            Self::Identity => None,
            Self::Gzip => Some(Format::Gzip),
            Self::Deflate => Some(Format::Zlib),
        }
    }

    /// Returns the coding of a request with this `Content-Encoding`; `None` if it is not supported.
    pub(super) fn of_request(header: Option<&str>) -> Option<Self> {
        match header.map(str::trim) {
            None | Some("") => Some(Self::Identity),
            Some(name) => Self::of_name(name),
        }
    }

    /// Returns the coding with this name, ignoring case (RFC 9110, 8.4.1).
    fn of_name(name: &str) -> Option<Self> {
        [Self::Identity, Self::Gzip, Self::Deflate]
            .into_iter()
            .find(|coding| name.eq_ignore_ascii_case(coding.name().unwrap_or("identity")))
    }

    /// Returns the coding with the highest weight in `Accept-Encoding`; the first one wins a tie.
    /// `*` and a missing header select identity, a weight of 0 refuses a coding, and malformed
    /// entries are ignored.
    pub(super) fn of_response(header: Option<&str>) -> Self {
        let Some(header) = header else { return Self::Identity };
        let mut best = (Self::Identity, 0.0);
        for item in header.split(',') {
            let mut parts = item.split(';').map(str::trim);
            let Some(coding) = parts.next().and_then(Self::of_name) else { continue };
            let weight = match parts.next() {
                None => Some(1.0),
                Some(weight) => {
                    weight.strip_prefix("q=").and_then(|weight| weight.parse::<f64>().ok())
                }
            };
            if let Some(weight) = weight
                && weight > best.1
            {
                best = (coding, weight);
            }
        }
        best.0
    }
}

/// Decompresses a request's body to at most `limit` bytes. Returns `Ok(None)` if it is longer.
///
/// # Errors
/// INVALID_ARG if the body does not have the declared coding; UNAVAILABLE if the memory budget is
/// exhausted.
pub(super) fn decompress(
    body: Data,
    coding: Coding,
    limit: u64,
    reservation: &mut Reservation,
) -> Result<Option<Data>, InferError> {
    let Some(format) = coding.format() else {
        return Ok((body.len() as u64 <= limit).then_some(body));
    };
    match inflate(body, format, limit, reservation) {
        Ok(inflated) => Ok(Some(inflated)),
        Err(InflateError::TooLarge) => Ok(None),
        Err(InflateError::Full(full)) => Err(no_memory(full)),
        Err(InflateError::Broken(error)) => {
            let name = coding.name().unwrap_or_default();
            Err(InferError::malformed(format!(
                "unable to decompress the request's {name} body: {error}"
            )))
        }
    }
}

/// Compresses the pieces of a response into one.
///
/// # Errors
/// INTERNAL if compression fails, which does not happen when writing to memory.
pub(super) fn compress<'a>(
    pieces: impl Iterator<Item = &'a Bytes>,
    coding: Coding,
) -> Result<Bytes, InferError> {
    let Some(format) = coding.format() else {
        return Ok(pieces.flat_map(|piece| piece.iter().copied()).collect());
    };
    // Use the fastest level: compression delays the answer, and higher levels hardly shrink numeric
    // tensors further.
    let compressed = deflate(pieces, format, Compression::fast());
    compressed
        .map(Bytes::from)
        .map_err(|error| InferError::internal(format!("cannot compress the response: {error}")))
}

#[cfg(test)]
#[allow(clippy::unwrap_used, clippy::panic)]
mod tests {
    use super::*;
    use pharos_listener::receiving::Budget;

    #[test]
    fn selects_the_coding_with_the_highest_weight() {
        for (header, expected) in [
            ("gzip", Coding::Gzip),
            ("gzip, deflate", Coding::Gzip),
            ("deflate;q=0.5, gzip;q=0.4", Coding::Deflate),
            ("deflate;q=0.5,gzip;q=0.6", Coding::Gzip),
            ("gzip;q=0", Coding::Identity),
            ("identity, gzip;q=0.9", Coding::Identity),
            ("br, zstd, *", Coding::Identity),
            ("gzip;q=x, deflate", Coding::Deflate),
            ("Deflate", Coding::Deflate),
            (";;,,", Coding::Identity),
        ] {
            assert_eq!(Coding::of_response(Some(header)), expected, "{header}");
        }
        assert_eq!(Coding::of_response(None), Coding::Identity);
        for (header, expected) in [
            ("br", None),
            ("gzip, gzip", None),
            ("\u{fffd}", None),
            ("GZip", Some(Coding::Gzip)),
            (" identity", Some(Coding::Identity)),
        ] {
            assert_eq!(Coding::of_request(Some(header)), expected, "{header}");
        }
    }

    #[test]
    fn decompresses_only_up_to_the_limit() {
        let pieces = [Bytes::from_static(b"tensor "), Bytes::from(vec![7u8; 5000])];
        let whole: Vec<u8> = pieces.iter().flatten().copied().collect();
        for coding in [Coding::Identity, Coding::Gzip, Coding::Deflate] {
            let small = compress(pieces.iter(), coding).unwrap();
            assert_eq!(
                decompress(small.clone().into(), coding, 5007, &mut Budget::default().reserve())
                    .unwrap(),
                Some(whole.clone().into()),
                "{coding:?}"
            );
            assert_eq!(
                decompress(small.into(), coding, 5006, &mut Budget::default().reserve()).unwrap(),
                None,
                "{coding:?}"
            );
        }
        let mut reservation = Budget::default().reserve();
        let error =
            decompress(Bytes::from_static(b"xx").into(), Coding::Gzip, 10, &mut reservation)
                .unwrap_err();
        assert!(
            error.message.starts_with("unable to decompress the request's gzip body"),
            "{error}"
        );
    }
}
