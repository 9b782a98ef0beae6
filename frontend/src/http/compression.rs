//! Content codings of requests and responses: gzip and deflate (which in HTTP means zlib, RFC 1950), nothing else.

use std::io::{Read, Write};

use bytes::Bytes;
use flate2::Compression;
use flate2::read::{GzDecoder, ZlibDecoder};
use flate2::write::{GzEncoder, ZlibEncoder};
use pharos::data::Data;
use pharos::error::InferError;

/// A content coding.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Coding {
    /// As is.
    Identity,
    /// RFC 1952.
    Gzip,
    /// RFC 1950.
    Deflate,
}

impl Coding {
    /// The name in `Content-Encoding`; `None` for identity, which is not named.
    pub(super) fn name(self) -> Option<&'static str> {
        match self {
            Self::Identity => None,
            Self::Gzip => Some("gzip"),
            Self::Deflate => Some("deflate"),
        }
    }

    /// The coding of a request with this `Content-Encoding`; `None` for one that is not supported.
    pub(super) fn of_request(header: Option<&str>) -> Option<Self> {
        match header.map(str::trim) {
            None | Some("") => Some(Self::Identity),
            Some(name) => Self::of_name(name),
        }
    }

    /// The coding of this name, in any case (RFC 9110, 8.4.1).
    fn of_name(name: &str) -> Option<Self> {
        [Self::Identity, Self::Gzip, Self::Deflate]
            .into_iter()
            .find(|coding| name.eq_ignore_ascii_case(coding.name().unwrap_or("identity")))
    }

    /// The coding that a client with this `Accept-Encoding` likes best. Of equals the one named first; `*` and absence ask
    /// for nothing; a weight of 0 refuses; what is malformed is passed over.
    pub(super) fn of_response(header: Option<&str>) -> Self {
        let mut best = (Self::Identity, 0.0);
        for item in header.unwrap_or_default().split(',') {
            let mut parts = item.split(';').map(str::trim);
            let Some(coding) = parts.next().and_then(Self::of_name) else { continue };
            let weight = match parts.next() {
                None => Some(1.0),
                Some(weight) => weight.strip_prefix("q=").and_then(|weight| weight.parse::<f64>().ok()),
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

/// Decompresses a request's body of at most `limit` bytes.
///
/// # Errors
/// `Ok(None)` when it is longer than `limit`; INVALID_ARG when it is not what its coding says.
pub(super) fn decompress(body: Data, coding: Coding, limit: u64) -> Result<Option<Data>, InferError> {
    let mut out = Vec::with_capacity(body.len().saturating_mul(2).min(usize::try_from(limit).unwrap_or(usize::MAX)));
    let most = limit.saturating_add(1);
    let read = match coding {
        Coding::Identity => return Ok((body.len() as u64 <= limit).then_some(body)),
        Coding::Gzip => GzDecoder::new(&*body.join()).take(most).read_to_end(&mut out),
        Coding::Deflate => ZlibDecoder::new(&*body.join()).take(most).read_to_end(&mut out),
    };
    match read {
        Ok(read) if read as u64 > limit => Ok(None),
        Ok(_) => Ok(Some(out.into())),
        Err(error) => {
            let name = coding.name().unwrap_or_default();
            Err(InferError::malformed(format!("unable to decompress the request's {name} body: {error}")))
        }
    }
}

/// Compresses a response made of several pieces into one.
///
/// # Errors
/// INTERNAL; writing to memory does not fail.
pub(super) fn compress<'a>(pieces: impl Iterator<Item = &'a Bytes>, coding: Coding) -> Result<Bytes, InferError> {
    // The fastest level: an answer waits for it, and tensors of numbers hardly compress better at a higher one.
    let level = Compression::fast();
    let compressed = match coding {
        Coding::Identity => Ok(pieces.flat_map(|piece| piece.iter().copied()).collect()),
        Coding::Gzip => write_all(GzEncoder::new(Vec::new(), level), pieces).and_then(GzEncoder::finish),
        Coding::Deflate => write_all(ZlibEncoder::new(Vec::new(), level), pieces).and_then(ZlibEncoder::finish),
    };
    compressed.map(Bytes::from).map_err(|error| InferError::internal(format!("cannot compress the response: {error}")))
}

fn write_all<'a, W: Write>(mut to: W, pieces: impl Iterator<Item = &'a Bytes>) -> std::io::Result<W> {
    for piece in pieces {
        to.write_all(piece)?;
    }
    Ok(to)
}

#[cfg(test)]
#[allow(clippy::unwrap_used, clippy::panic)]
mod tests {
    use super::*;

    #[test]
    fn the_best_weight_wins() {
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
    fn what_is_compressed_comes_back_within_the_limit_only() {
        let pieces = [Bytes::from_static(b"tensor "), Bytes::from(vec![7u8; 5000])];
        let whole: Vec<u8> = pieces.iter().flatten().copied().collect();
        for coding in [Coding::Identity, Coding::Gzip, Coding::Deflate] {
            let small = compress(pieces.iter(), coding).unwrap();
            assert_eq!(decompress(small.clone().into(), coding, 5007).unwrap(), Some(whole.clone().into()), "{coding:?}");
            assert_eq!(decompress(small.into(), coding, 5006).unwrap(), None, "{coding:?}");
        }
        let error = decompress(Bytes::from_static(b"xx").into(), Coding::Gzip, 10).unwrap_err();
        assert!(error.message.starts_with("unable to decompress the request's gzip body"), "{error}");
    }
}
