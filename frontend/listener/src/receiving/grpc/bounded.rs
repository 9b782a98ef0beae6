//! The codec of gRPC calls: Protocol Buffers, with a bound on the fields of a message. An empty element of a repeated message has two
//! bytes and becomes a value of hundreds of bytes, so that a bound on the bytes of a message does not bound its memory.

use prost::Message;
use prost::encoding::{WireType, decode_key, decode_varint};
use tonic::Status;
use tonic::codec::{BufferSettings, Codec, DecodeBuf, Decoder};
use tonic_prost::ProstCodec;

use bytes::Buf;

/// The maximum number of fields of a message, without those of messages in it. Each element of a repeated field counts, except those
/// of packed numbers.
pub const MAX_FIELDS: usize = 16_384;

/// The codec that generated services use.
#[derive(Debug)]
pub struct BoundedCodec<T, U>(ProstCodec<T, U>);

impl<T, U> Default for BoundedCodec<T, U> {
    fn default() -> Self {
        Self(ProstCodec::new())
    }
}

impl<T, U> Codec for BoundedCodec<T, U>
where
    T: Message + Send + 'static,
    U: Message + Default + Send + 'static,
{
    type Encode = T;
    type Decode = U;
    type Encoder = <ProstCodec<T, U> as Codec>::Encoder;
    type Decoder = BoundedDecoder<<ProstCodec<T, U> as Codec>::Decoder>;

    fn encoder(&mut self) -> Self::Encoder {
        self.0.encoder()
    }

    fn decoder(&mut self) -> Self::Decoder {
        BoundedDecoder(self.0.decoder())
    }
}

/// Decodes messages that have at most [`MAX_FIELDS`] fields.
#[derive(Debug)]
pub struct BoundedDecoder<D>(D);

impl<D: Decoder<Error = Status>> Decoder for BoundedDecoder<D> {
    type Item = D::Item;
    type Error = Status;

    fn decode(&mut self, from: &mut DecodeBuf<'_>) -> Result<Option<D::Item>, Status> {
        // The buffer has the message in one piece.
        if has_more_fields(from.chunk(), MAX_FIELDS) {
            let text = format!(
                "the message has more than {MAX_FIELDS} fields; each input, output, raw content and parameter is one"
            );
            return Err(Status::invalid_argument(text));
        }
        self.0.decode(from)
    }

    fn buffer_settings(&self) -> BufferSettings {
        self.0.buffer_settings()
    }
}

/// Returns whether a message has more than `most` fields. Looks only at the fields before the first malformed one, which decoding
/// refuses.
fn has_more_fields(mut message: &[u8], most: usize) -> bool {
    let mut count = 0;
    while let Some(rest) = after_field(message) {
        count += 1;
        if count > most {
            return true;
        }
        message = rest;
    }
    false
}

/// Returns what follows the field at the start of a message.
fn after_field(mut message: &[u8]) -> Option<&[u8]> {
    let (_, wire_type) = decode_key(&mut message).ok()?;
    let length = match wire_type {
        WireType::Varint => {
            decode_varint(&mut message).ok()?;
            0
        }
        WireType::SixtyFourBit => 8,
        WireType::LengthDelimited => usize::try_from(decode_varint(&mut message).ok()?).ok()?,
        // The start and the end of a group, without bytes.
        WireType::StartGroup | WireType::EndGroup => 0,
        WireType::ThirtyTwoBit => 4,
    };
    message.get(length..)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fields_are_counted_and_not_what_they_contain() {
        // A varint, a fixed64, an empty message, a message with two bytes that look like fields, a group, a fixed32.
        let message =
            [0x08, 0x96, 0x01, 0x11, 1, 2, 3, 4, 5, 6, 7, 8, 0x2a, 0, 0x32, 2, 0x2a, 0, 0x1b, 0x1c, 0x25, 1, 2, 3, 4];
        assert!(has_more_fields(&message, 6) && !has_more_fields(&message, 7));
        for end in 0..message.len() {
            assert!(!has_more_fields(message.get(..end).unwrap_or_default(), 6), "{end}");
        }
        // A length beyond the message, an endless varint, and an unknown wire type end the count.
        for malformed in [&[0x2a, 0, 0x2a, 0xff, 0xff, 0xff, 0xff, 0x0f][..], &[0x08, 1, 0xff, 0xff], &[0x08, 1, 0x07]]
        {
            assert!(has_more_fields(malformed, 0) && !has_more_fields(malformed, 1), "{malformed:?}");
        }
        assert!(!has_more_fields(&[0xff; 64], 0));
    }
}
