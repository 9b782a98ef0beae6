//! Tensors: datatype, shape and data.

use std::fmt;

use crate::data::Data;

named_enum! {
    /// The closed list of datatypes.
    #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
    #[repr(u8)]
    pub enum DataType {
        /// One byte, 0 or 1.
        Bool = 1 => "BOOL",
        /// Unsigned, 8 bits.
        Uint8 = 2 => "UINT8",
        /// Unsigned, 16 bits.
        Uint16 = 3 => "UINT16",
        /// Unsigned, 32 bits.
        Uint32 = 4 => "UINT32",
        /// Unsigned, 64 bits.
        Uint64 = 5 => "UINT64",
        /// Signed, 8 bits.
        Int8 = 6 => "INT8",
        /// Signed, 16 bits.
        Int16 = 7 => "INT16",
        /// Signed, 32 bits.
        Int32 = 8 => "INT32",
        /// Signed, 64 bits.
        Int64 = 9 => "INT64",
        /// IEEE 754 half precision.
        Fp16 = 10 => "FP16",
        /// IEEE 754 single precision.
        Fp32 = 11 => "FP32",
        /// IEEE 754 double precision.
        Fp64 = 12 => "FP64",
        /// Byte strings; each element is serialized as a 4-byte little-endian length and the bytes.
        Bytes = 13 => "BYTES",
        /// bfloat16: the upper half of a single-precision number.
        Bf16 = 14 => "BF16",
    }
    /// Returns the name in the protocol, for example `INT32`.
    pub fn name;
}

impl DataType {
    /// Returns the bytes per element; `None` for [`DataType::Bytes`], whose elements vary.
    pub fn size(self) -> Option<usize> {
        match self {
            Self::Bool | Self::Uint8 | Self::Int8 => Some(1),
            Self::Uint16 | Self::Int16 | Self::Fp16 | Self::Bf16 => Some(2),
            Self::Uint32 | Self::Int32 | Self::Fp32 => Some(4),
            Self::Uint64 | Self::Int64 | Self::Fp64 => Some(8),
            Self::Bytes => None,
        }
    }

    /// Returns the datatype with this name in the protocol.
    pub fn from_name(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|datatype| datatype.name() == name)
    }

    /// Returns the number in `inference.DataType` of the model configuration, also used in frames.
    pub fn number(self) -> u8 {
        self as u8
    }

    /// Returns the datatype with this number.
    pub fn from_number(number: u8) -> Option<Self> {
        Self::ALL.into_iter().find(|datatype| datatype.number() == number)
    }
}

impl fmt::Display for DataType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// Returns the number of elements of a shape; `None` if a dimension is negative or the product
/// exceeds `i64::MAX`.
pub fn element_count(shape: &[i64]) -> Option<u64> {
    shape.iter().try_fold(1u64, |product, &dim| {
        let next = product.checked_mul(u64::try_from(dim).ok()?)?;
        (next <= i64::MAX as u64).then_some(next)
    })
}

/// Returns the number of bytes of a fixed-size tensor; `None` for BYTES and if [`element_count`] or
/// the product overflows.
pub fn byte_size(datatype: DataType, shape: &[i64]) -> Option<u64> {
    element_count(shape)?.checked_mul(datatype.size()? as u64)
}

/// Formats a shape as Triton does in messages: `[1,16]`.
pub fn format_shape(shape: &[i64]) -> String {
    let dims: Vec<String> = shape.iter().map(i64::to_string).collect();
    format!("[{}]", dims.join(","))
}

/// A tensor: datatype, shape and bytes (little-endian, row-major; BYTES elements length-prefixed).
///
/// Cloning is cheap: `data` is shared.
#[derive(Clone, Debug, PartialEq)]
pub struct Tensor {
    /// The datatype of the elements.
    pub datatype: DataType,
    /// Dimensions; the batch is first if the model batches. Not negative in a checked tensor.
    pub shape: Vec<i64>,
    /// The bytes.
    pub data: Data,
}

impl Tensor {
    /// Returns a BYTES tensor of this shape with one element; `None` if the element has 4 GiB or
    /// more.
    pub fn of_element(element: &[u8], shape: Vec<i64>) -> Option<Self> {
        let mut data = Vec::with_capacity(element.len() + 4);
        push_bytes_element(&mut data, element).then(|| Self {
            datatype: DataType::Bytes,
            shape,
            data: data.into(),
        })
    }
}

/// Splits the serialized elements of a BYTES tensor.
///
/// Yields the bytes of each element. The first framing error (a length that exceeds the data) ends
/// the iteration with `Err`, which holds the byte position.
pub fn bytes_elements(data: &[u8]) -> impl Iterator<Item = Result<&[u8], usize>> {
    let mut at = 0;
    std::iter::from_fn(move || {
        if at >= data.len() {
            return None;
        }
        let element = data.get(at..at + 4).and_then(|prefix| {
            let length = u32::from_le_bytes(prefix.try_into().ok()?) as usize;
            data.get(at + 4..(at + 4).checked_add(length)?)
        });
        match element {
            Some(bytes) => {
                at += 4 + bytes.len();
                Some(Ok(bytes))
            }
            None => {
                let failed_at = at;
                at = data.len();
                Some(Err(failed_at))
            }
        }
    })
}

/// Appends one element of a BYTES tensor in its serialized form.
///
/// Returns false for an element longer than `u32::MAX` bytes, the limit of the format. Callers have
/// lower size limits.
pub fn push_bytes_element(out: &mut Vec<u8>, element: &[u8]) -> bool {
    let Ok(length) = u32::try_from(element.len()) else { return false };
    out.extend_from_slice(&length.to_le_bytes());
    out.extend_from_slice(element);
    true
}

/// An error in the framing of a BYTES tensor, with Triton's text.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StringsError {
    /// The text.
    pub message: String,
    /// Whether the request's id precedes the text.
    pub prefixed: bool,
}

/// Checks that the pieces of a tensor's data consist of `expected` elements of an input of a model,
/// in one pass.
///
/// # Errors
/// The framing is invalid, or the number of elements differs.
pub fn check_strings<P: AsRef<[u8]>>(
    input: &str,
    model: &str,
    pieces: &[P],
    expected: u64,
) -> Result<(), StringsError> {
    let wrong = |prefixed: bool, message: String| Err(StringsError { message, prefixed });
    let mut rest = Pieces::of(pieces);
    let mut count = 0u64;
    while let Some(length) = rest.length() {
        count += 1;
        if count > expected {
            let text = format!(
                "unexpected number of string elements {count} for inference input '{input}' for \
                 model '{model}', expecting {expected}"
            );
            return wrong(true, text);
        }
        if !rest.skip(length as usize) {
            let text = format!(
                "incomplete string data for inference input '{input}', expecting string of length \
                 {length} but only {} bytes available",
                rest.left
            );
            return wrong(false, text);
        }
    }
    if rest.left > 0 {
        let text = format!(
            "incomplete string length indicator for inference input '{input}' for model \
             '{model}', expecting 4 bytes but only {} bytes available. Please make sure the \
             string length indicator is in one buffer.",
            rest.left
        );
        return wrong(true, text);
    }
    if count != expected {
        let text = format!(
            "expected {expected} string elements for inference input '{input}' for model \
             '{model}', got {count}"
        );
        return wrong(true, text);
    }
    Ok(())
}

/// The bytes of some pieces that are not read yet.
struct Pieces<'a, P> {
    /// The rest of the current piece.
    current: &'a [u8],
    next: std::slice::Iter<'a, P>,
    /// The number of bytes in all pieces.
    left: usize,
}

impl<'a, P: AsRef<[u8]>> Pieces<'a, P> {
    fn of(pieces: &'a [P]) -> Self {
        let left = pieces.iter().map(|piece| piece.as_ref().len()).sum();
        Self { current: &[], next: pieces.iter(), left }
    }

    /// Reads the length of an element; `None` if fewer bytes are left.
    fn length(&mut self) -> Option<u32> {
        if let Some((length, rest)) = self.current.split_first_chunk() {
            self.current = rest;
            self.left -= length.len();
            return Some(u32::from_le_bytes(*length));
        }
        let mut length = [0; 4];
        if self.left < length.len() {
            return None;
        }
        for byte in &mut length {
            while self.current.is_empty() {
                self.current = self.next.next()?.as_ref();
            }
            let (first, rest) = self.current.split_first()?;
            (*byte, self.current, self.left) = (*first, rest, self.left - 1);
        }
        Some(u32::from_le_bytes(length))
    }

    /// Leaves out `count` bytes. Returns false if fewer are left.
    fn skip(&mut self, mut count: usize) -> bool {
        if count > self.left {
            return false;
        }
        self.left -= count;
        while count > self.current.len() {
            count -= self.current.len();
            let Some(next) = self.next.next() else { return false };
            self.current = next.as_ref();
        }
        self.current = self.current.get(count..).unwrap_or_default();
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_and_numbers_round_trip() {
        for datatype in DataType::ALL {
            assert_eq!(DataType::from_name(datatype.name()), Some(datatype));
            assert_eq!(DataType::from_number(datatype.number()), Some(datatype));
        }
        assert_eq!(DataType::from_name("INT"), None);
        assert_eq!(DataType::from_number(0), None);
    }

    #[test]
    fn element_counts_do_not_overflow() {
        assert_eq!(element_count(&[]), Some(1));
        assert_eq!(element_count(&[3, 0, 5]), Some(0));
        assert_eq!(element_count(&[-1, 2]), None);
        assert_eq!(element_count(&[i64::MAX, 2]), None);
        assert_eq!(byte_size(DataType::Fp64, &[i64::MAX]), None);
        assert_eq!(byte_size(DataType::Int16, &[2, 3]), Some(12));
    }

    #[test]
    fn strings_are_checked_wherever_their_pieces_begin() {
        let mut data = Vec::new();
        for element in [&b"ab"[..], b"", b"a longer element", b"", b"z"] {
            assert!(push_bytes_element(&mut data, element));
        }
        let check = |data: &[u8], expected, at: &[usize]| {
            let mut pieces = vec![data];
            for &at in at {
                let last = pieces.pop().unwrap_or_default();
                let (first, second) = last.split_at(at.min(last.len()));
                pieces.extend([first, second]);
            }
            check_strings("i", "m", &pieces, expected).map_err(|wrong| wrong.message)
        };
        for short in 0..=data.len() {
            let whole = check(&data, 5, &[]);
            let part = &data[..short];
            assert_eq!(whole, Ok(()));
            for first in 0..=short {
                for second in [0, 1, 3, 7] {
                    for expected in [4, 5] {
                        assert_eq!(
                            check(part, expected, &[first, second, 2]),
                            check(part, expected, &[])
                        );
                    }
                }
            }
        }
        let text = check(&data[..data.len() - 1], 5, &[3, 9]).unwrap_err();
        assert!(text.contains("expecting string of length 1 but only 0 bytes available"), "{text}");
    }

    #[test]
    fn bytes_elements_stop_at_a_framing_error() {
        let mut data = Vec::new();
        assert!(push_bytes_element(&mut data, b"ab"));
        assert!(push_bytes_element(&mut data, b""));
        data.extend_from_slice(&[9, 0, 0, 0, 1]);
        let elements: Vec<_> = bytes_elements(&data).collect();
        assert_eq!(elements, vec![Ok(&b"ab"[..]), Ok(&b""[..]), Err(10)]);
    }
}
