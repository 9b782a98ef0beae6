//! The codec of gRPC calls: Protocol Buffers, with a bound on the fields of a message. An empty
//! element of a repeated message has two bytes and becomes a value of hundreds of bytes, so that a
//! bound on the bytes of a message does not bound its memory.

use std::marker::PhantomData;

use prost::Message;
use tonic::Status;
use tonic::codec::{BufferSettings, Codec, DecodeBuf, Decoder};
use tonic_prost::ProstCodec;

use bytes::Buf;

use super::fields::Fields;

/// The maximum number of fields of a message, without those of messages in it. Each element of a
/// repeated field counts, except those of packed numbers.
pub const MAX_FIELDS: usize = 16_384;

/// The maximum number of fields of all messages in a message.
const MAX_INNER_FIELDS: usize = 16 * MAX_FIELDS;

/// Which fields of the requests of a service are messages whose fields are bounded too.
pub trait InnerMessages {
    /// The numbers of these fields, in every request of the service.
    const NUMBERS: &'static [u32];
}

/// No fields.
#[derive(Debug)]
pub struct NoInnerMessages;

impl InnerMessages for NoInnerMessages {
    const NUMBERS: &'static [u32] = &[];
}

/// The codec that generated services use.
#[derive(Debug)]
pub struct BoundedCodec<T, U, N>(ProstCodec<T, U>, PhantomData<fn() -> N>);

/// The codec of services whose requests have no bounded messages in them.
pub type FlatCodec<T, U> = BoundedCodec<T, U, NoInnerMessages>;

impl<T, U, N> Default for BoundedCodec<T, U, N> {
    fn default() -> Self {
        Self(ProstCodec::new(), PhantomData)
    }
}

impl<T, U, N> Codec for BoundedCodec<T, U, N>
where
    T: Message + Send + 'static,
    U: Message + Default + Send + 'static,
    N: InnerMessages + 'static,
{
    type Encode = T;
    type Decode = U;
    type Encoder = <ProstCodec<T, U> as Codec>::Encoder;
    type Decoder = BoundedDecoder<<ProstCodec<T, U> as Codec>::Decoder, N>;

    fn encoder(&mut self) -> Self::Encoder {
        self.0.encoder()
    }

    fn decoder(&mut self) -> Self::Decoder {
        BoundedDecoder(self.0.decoder(), PhantomData)
    }
}

/// Decodes messages that have at most [`MAX_FIELDS`] fields.
#[derive(Debug)]
pub struct BoundedDecoder<D, N>(D, PhantomData<fn() -> N>);

impl<D: Decoder<Error = Status>, N: InnerMessages + 'static> Decoder for BoundedDecoder<D, N> {
    type Item = D::Item;
    type Error = Status;

    fn decode(&mut self, from: &mut DecodeBuf<'_>) -> Result<Option<D::Item>, Status> {
        // The buffer has the message in one piece.
        if let Some(text) = excess(from.chunk(), N::NUMBERS) {
            return Err(Status::invalid_argument(text));
        }
        self.0.decode(from)
    }

    fn buffer_settings(&self) -> BufferSettings {
        self.0.buffer_settings()
    }
}

/// Returns why a message has too many fields, if it has. Looks only at the fields before the first
/// malformed one, which decoding refuses.
fn excess(message: &[u8], messages: &[u32]) -> Option<String> {
    let mut count = 0;
    let mut in_messages = 0;
    for field in Fields::of(message) {
        count += 1;
        if count > MAX_FIELDS {
            return Some(format!(
                "the message has more than {MAX_FIELDS} fields; each input, output, raw content \
                 and parameter is one"
            ));
        }
        if messages.contains(&field.number) {
            in_messages += Fields::of(field.value).take(MAX_INNER_FIELDS + 1).count();
        }
        if in_messages > MAX_INNER_FIELDS {
            return Some(format!(
                "the inputs and outputs of the message have more than {MAX_INNER_FIELDS} fields; \
                 each parameter is one"
            ));
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A field with this number for each of the values.
    fn message(number: u8, values: &[&[u8]]) -> Vec<u8> {
        let field = |value: &&[u8]| {
            let mut field = vec![number << 3 | 2];
            prost::encoding::encode_varint(value.len() as u64, &mut field);
            [&field[..], value].concat()
        };
        values.iter().flat_map(field).collect()
    }

    #[test]
    fn the_fields_of_a_message_are_bounded() {
        let most = message(5, &vec![&b""[..]; MAX_FIELDS]);
        assert_eq!(excess(&most, &[]), None);
        let excess = excess(&[&most[..], &[0x2a, 0]].concat(), &[]);
        assert!(
            excess.as_ref().is_some_and(|text| text.contains("more than 16384 fields")),
            "{excess:?}"
        );
    }

    #[test]
    fn the_fields_of_all_messages_in_it_are_bounded_together() {
        let parameters = message(4, &vec![&b""[..]; MAX_INNER_FIELDS / 2]);
        let two = message(5, &[&parameters, &parameters]);
        assert_eq!(excess(&two, &[5]), None);
        let more = [&two[..], &message(6, &[&message(2, &[b""])])].concat();
        let found = excess(&more, &[5, 6]);
        assert!(
            found.as_ref().is_some_and(|text| text.contains("more than 262144 fields")),
            "{found:?}"
        );
        assert_eq!(excess(&more, &[5]), None, "other fields may contain any bytes");
    }
}
