//! gzip (RFC 1952) and zlib (RFC 1950, which both protocols call `deflate`). Decompression reserves
//! memory for each piece of output before allocating it. Call these functions on threads that serve
//! no sockets.

use std::collections::VecDeque;
use std::io::{self, BufRead, Read, Write};

use bytes::{Buf, Bytes};
use flate2::Compression;
use flate2::bufread::{MultiGzDecoder, ZlibDecoder};
use flate2::write::{GzEncoder, ZlibEncoder};
use pharos::data::{Collector, Data};

use super::{Full, Reservation};

/// A format of compressed data.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Format {
    /// RFC 1952.
    Gzip,
    /// RFC 1950.
    Zlib,
}

/// Why data cannot be decompressed.
#[derive(Debug)]
pub enum InflateError {
    /// The output exceeds the limit.
    TooLarge,
    /// The memory budget is exhausted.
    Full(Full),
    /// The data is not valid.
    Broken(io::Error),
}

/// The sizes of the output pieces of decompression: the first and the largest.
const PIECES: (usize, usize) = (16 << 10, 1 << 20);

/// Decompresses `data` to at most `limit` bytes.
///
/// # Errors
/// See [`InflateError`].
pub fn inflate(
    data: Data,
    format: Format,
    limit: u64,
    reservation: &mut Reservation,
) -> Result<Data, InflateError> {
    let mut input = Pieces(data.pieces().iter().cloned().collect());
    drop(data);
    let inflated = match format {
        // A file has one or more members (RFC 1952, 2.2).
        Format::Gzip => read_all(MultiGzDecoder::new(&mut input), limit, reservation),
        Format::Zlib => read_all(ZlibDecoder::new(&mut input), limit, reservation),
    };
    match inflated {
        Ok(_) if !input.is_empty() => {
            let text = "there is more data behind the end of the compressed data";
            Err(InflateError::Broken(io::Error::new(io::ErrorKind::InvalidData, text)))
        }
        inflated => inflated,
    }
}

fn read_all(
    mut from: impl Read,
    limit: u64,
    reservation: &mut Reservation,
) -> Result<Data, InflateError> {
    let mut whole = Collector::default();
    loop {
        let size = whole.len().clamp(PIECES.0, PIECES.1);
        reservation.grow(size).map_err(InflateError::Full)?;
        let mut piece = vec![0; size];
        let mut filled = 0;
        while let Some(free) = piece.get_mut(filled..).filter(|free| !free.is_empty()) {
            match from.read(free) {
                Ok(0) => break,
                Ok(count) => filled += count,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(InflateError::Broken(error)),
            }
        }
        let ended = filled < size;
        piece.truncate(filled);
        whole.push(piece.into());
        if whole.len() as u64 > limit {
            return Err(InflateError::TooLarge);
        }
        if ended {
            return Ok(whole.finish());
        }
    }
}

/// Compresses pieces into one buffer.
///
/// # Errors
/// Writing to memory does not fail.
pub fn deflate<'a>(
    pieces: impl Iterator<Item = &'a Bytes>,
    format: Format,
    level: Compression,
) -> io::Result<Vec<u8>> {
    match format {
        Format::Gzip => {
            write_all(GzEncoder::new(Vec::new(), level), pieces).and_then(GzEncoder::finish)
        }
        Format::Zlib => {
            write_all(ZlibEncoder::new(Vec::new(), level), pieces).and_then(ZlibEncoder::finish)
        }
    }
}

fn write_all<'a, W: Write>(mut to: W, pieces: impl Iterator<Item = &'a Bytes>) -> io::Result<W> {
    for piece in pieces {
        to.write_all(piece)?;
    }
    Ok(to)
}

/// Reads pieces in order, and drops each after reading it.
struct Pieces(VecDeque<Bytes>);

impl Pieces {
    fn is_empty(&self) -> bool {
        self.0.iter().all(Bytes::is_empty)
    }
}

impl BufRead for Pieces {
    fn fill_buf(&mut self) -> io::Result<&[u8]> {
        while self.0.front().is_some_and(Bytes::is_empty) {
            self.0.pop_front();
        }
        Ok(self.0.front().map(|first| &**first).unwrap_or_default())
    }

    fn consume(&mut self, count: usize) {
        if let Some(first) = self.0.front_mut() {
            first.advance(count.min(first.len()));
        }
    }
}

impl Read for Pieces {
    fn read(&mut self, to: &mut [u8]) -> io::Result<usize> {
        let count = self.fill_buf()?.read(to)?;
        self.consume(count);
        Ok(count)
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::super::Budget;
    use super::*;

    fn cut(bytes: &[u8]) -> Data {
        let mut data = Collector::default();
        bytes.chunks(5000).for_each(|piece| data.push(Bytes::copy_from_slice(piece)));
        data.finish()
    }

    #[test]
    fn decompresses_within_the_limits_only() {
        let plain: Vec<u8> =
            (0..300_000u32).flat_map(|number| (number % 1000).to_le_bytes()).collect();
        for format in [Format::Gzip, Format::Zlib] {
            let small =
                deflate([Bytes::from(plain.clone())].iter(), format, Compression::fast()).unwrap();
            let inflated = |limit: u64, most: u64| {
                let budget = Budget::new(most);
                inflate(cut(&small), format, limit, &mut budget.reserve())
            };
            let length = plain.len() as u64;
            assert_eq!(inflated(length, u64::MAX).unwrap(), Data::from(plain.clone()));
            assert!(matches!(inflated(length - 1, u64::MAX), Err(InflateError::TooLarge)));
            assert!(matches!(inflated(length, length / 2), Err(InflateError::Full(Full { .. }))));
        }
        let again = |format, more: &[u8]| {
            let small =
                deflate([Bytes::from(plain.clone())].iter(), format, Compression::fast()).unwrap();
            inflate(
                cut(&[&small, more].concat()),
                format,
                1 << 30,
                &mut Budget::default().reserve(),
            )
        };
        let twice = deflate([Bytes::from(plain.clone())].iter(), Format::Gzip, Compression::fast())
            .unwrap();
        assert_eq!(again(Format::Gzip, &twice).unwrap(), Data::from([&plain[..], &plain].concat()));
        for format in [Format::Gzip, Format::Zlib] {
            assert!(
                matches!(again(format, b"something else"), Err(InflateError::Broken(_))),
                "{format:?}"
            );
        }
        let broken = inflate(cut(b"nothing"), Format::Gzip, 10, &mut Budget::default().reserve());
        assert!(matches!(broken, Err(InflateError::Broken(_))));
    }

    #[test]
    fn a_compression_bomb_uses_no_more_memory_than_the_limit() {
        let bomb =
            deflate([Bytes::from(vec![0; 64 << 20])].iter(), Format::Gzip, Compression::fast())
                .unwrap();
        let limit = 1 << 20;
        let budget = Budget::new(limit + PIECES.1 as u64 + PIECES.0 as u64);
        let refused = inflate(bomb.into(), Format::Gzip, limit, &mut budget.reserve());
        assert!(matches!(refused, Err(InflateError::TooLarge)), "{refused:?}");
    }
}
