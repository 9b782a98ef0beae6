//! The encoding of values in frames: numbers, texts, lists, and structs field by field.

use super::PREFIX;
use crate::error::ErrorCode;
use crate::id::CorrelationId;
use crate::infer::Parameter;
use crate::tensor::DataType;
use crate::timeline::{ComputeStamps, Instant};

/// A frame that cannot be decoded: the field and the value found.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("bad frame from the other process: {field} is {value}")]
pub struct DecodeError {
    field: &'static str,
    value: u64,
}

impl DecodeError {
    pub(super) fn new(field: &'static str, value: u64) -> Self {
        Self { field, value }
    }
}

pub(super) type Result<T> = std::result::Result<T, DecodeError>;

/// Writes the payload, preceded by its length.
pub(super) fn framed(out: &mut Vec<u8>, payload: impl FnOnce(&mut Vec<u8>)) {
    let start = out.len();
    out.extend_from_slice(&[0; PREFIX]);
    payload(out);
    let length = out.len() - start - PREFIX;
    let length = u32::try_from(length).unwrap_or(u32::MAX);
    out[start..start + PREFIX].copy_from_slice(&length.to_le_bytes());
}

/// Reads a payload completely. Fails if bytes are left.
pub(super) fn whole<T>(payload: &[u8], read: impl FnOnce(&mut &[u8]) -> Result<T>) -> Result<T> {
    let mut input = payload;
    let value = read(&mut input)?;
    if !input.is_empty() {
        return Err(DecodeError::new("bytes left over", input.len() as u64));
    }
    Ok(value)
}

/// A value in a frame. `get` decodes what `put` encodes.
pub(super) trait Wire: Sized {
    fn put(&self, out: &mut Vec<u8>);
    fn get(input: &mut &[u8]) -> Result<Self>;
}

pub(super) fn take<'a>(input: &mut &'a [u8], length: usize) -> Result<&'a [u8]> {
    let (taken, rest) =
        input.split_at_checked(length).ok_or(DecodeError::new("bytes missing", length as u64))?;
    *input = rest;
    Ok(taken)
}

macro_rules! numbers {
    ($($number:ty),*) => {$(
        impl Wire for $number {
            fn put(&self, out: &mut Vec<u8>) {
                out.extend_from_slice(&self.to_le_bytes());
            }
            fn get(input: &mut &[u8]) -> Result<Self> {
                let bytes = take(input, size_of::<Self>())?;
                Ok(Self::from_le_bytes(bytes.try_into().map_err(|_| DecodeError::new("number", 0))?))
            }
        }
    )*};
}
numbers!(u8, u16, u32, u64, i64, f64);

/// Implements `Wire` for a struct, field by field in the given order.
macro_rules! fields {
    ($name:ident { $($field:ident),* }) => {
        impl Wire for $name {
            fn put(&self, out: &mut Vec<u8>) {
                $(self.$field.put(out);)*
            }
            fn get(input: &mut &[u8]) -> Result<Self> {
                $(let $field = Wire::get(input)?;)*
                Ok(Self { $($field),* })
            }
        }
    };
}
pub(super) use fields;

fields!(ComputeStamps { start, input_end, output_start, end });

/// Reads the length of a list. Each element has at least one byte, so a count over the remaining
/// bytes is refused: it must not make the decoder reserve memory.
fn bounded_count(input: &mut &[u8]) -> Result<usize> {
    let count = u32::get(input)? as usize;
    if count > input.len() {
        return Err(DecodeError::new("count", count as u64));
    }
    Ok(count)
}

impl<T: Wire> Wire for Vec<T> {
    fn put(&self, out: &mut Vec<u8>) {
        u32::try_from(self.len()).unwrap_or(u32::MAX).put(out);
        for item in self {
            item.put(out);
        }
    }
    fn get(input: &mut &[u8]) -> Result<Self> {
        let count = bounded_count(input)?;
        let mut items = Vec::with_capacity(count.min(1024));
        for _ in 0..count {
            items.push(T::get(input)?);
        }
        Ok(items)
    }
}

impl Wire for bool {
    fn put(&self, out: &mut Vec<u8>) {
        u8::from(*self).put(out);
    }
    fn get(input: &mut &[u8]) -> Result<Self> {
        match u8::get(input)? {
            0 => Ok(false),
            1 => Ok(true),
            other => Err(DecodeError::new("flag", other.into())),
        }
    }
}

impl Wire for String {
    fn put(&self, out: &mut Vec<u8>) {
        u32::try_from(self.len()).unwrap_or(u32::MAX).put(out);
        out.extend_from_slice(self.as_bytes());
    }
    fn get(input: &mut &[u8]) -> Result<Self> {
        let length = bounded_count(input)?;
        let bytes = take(input, length)?;
        let text = str::from_utf8(bytes)
            .map_err(|e| DecodeError::new("text, not UTF-8 after byte", e.valid_up_to() as u64))?;
        Ok(text.to_owned())
    }
}

impl<T: Wire> Wire for Option<T> {
    fn put(&self, out: &mut Vec<u8>) {
        match self {
            None => out.push(0),
            Some(value) => {
                out.push(1);
                value.put(out);
            }
        }
    }
    fn get(input: &mut &[u8]) -> Result<Self> {
        match u8::get(input)? {
            0 => Ok(None),
            1 => Ok(Some(T::get(input)?)),
            other => Err(DecodeError::new("option", other.into())),
        }
    }
}

impl<T: Wire> Wire for Box<T> {
    fn put(&self, out: &mut Vec<u8>) {
        (**self).put(out);
    }
    fn get(input: &mut &[u8]) -> Result<Self> {
        T::get(input).map(Box::new)
    }
}

impl Wire for CorrelationId {
    fn put(&self, out: &mut Vec<u8>) {
        match self {
            Self::Uint(id) => {
                out.push(0);
                id.put(out);
            }
            Self::String(id) => {
                out.push(1);
                id.put(out);
            }
        }
    }
    fn get(input: &mut &[u8]) -> Result<Self> {
        match u8::get(input)? {
            0 => Ok(Self::Uint(u64::get(input)?)),
            1 => Ok(Self::String(String::get(input)?)),
            other => Err(DecodeError::new("kind of correlation id", other.into())),
        }
    }
}

impl<A: Wire, B: Wire> Wire for (A, B) {
    fn put(&self, out: &mut Vec<u8>) {
        self.0.put(out);
        self.1.put(out);
    }
    fn get(input: &mut &[u8]) -> Result<Self> {
        Ok((A::get(input)?, B::get(input)?))
    }
}

impl Wire for Instant {
    fn put(&self, out: &mut Vec<u8>) {
        self.0.put(out);
    }
    fn get(input: &mut &[u8]) -> Result<Self> {
        Ok(Self(u64::get(input)?))
    }
}

impl Wire for DataType {
    fn put(&self, out: &mut Vec<u8>) {
        out.push(self.number());
    }
    fn get(input: &mut &[u8]) -> Result<Self> {
        let number = u8::get(input)?;
        Self::from_number(number).ok_or(DecodeError::new("datatype", number.into()))
    }
}

impl Wire for ErrorCode {
    fn put(&self, out: &mut Vec<u8>) {
        out.push(self.to_wire());
    }
    fn get(input: &mut &[u8]) -> Result<Self> {
        let number = u8::get(input)?;
        Self::from_wire(number).ok_or(DecodeError::new("error code", number.into()))
    }
}

impl Wire for Parameter {
    fn put(&self, out: &mut Vec<u8>) {
        match self {
            Self::Bool(value) => {
                out.push(0);
                u8::from(*value).put(out);
            }
            Self::Int(value) => {
                out.push(1);
                value.put(out);
            }
            Self::Uint(value) => {
                out.push(2);
                value.put(out);
            }
            Self::Double(value) => {
                out.push(3);
                value.put(out);
            }
            Self::String(value) => {
                out.push(4);
                value.put(out);
            }
        }
    }
    fn get(input: &mut &[u8]) -> Result<Self> {
        Ok(match u8::get(input)? {
            0 => Self::Bool(u8::get(input)? != 0),
            1 => Self::Int(i64::get(input)?),
            2 => Self::Uint(u64::get(input)?),
            3 => Self::Double(f64::get(input)?),
            4 => Self::String(String::get(input)?),
            kind => return Err(DecodeError::new("parameter kind", kind.into())),
        })
    }
}
