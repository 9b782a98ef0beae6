//! Walks over the fields of an encoded Protocol Buffers message, without a schema.
//! Source: <https://protobuf.dev/programming-guides/encoding/>.

use prost::encoding::{WireType, decode_key, decode_varint};

/// A field of an encoded message.
#[derive(Clone, Copy, Debug)]
pub struct Field<'m> {
    /// The number of the field.
    pub number: u32,
    /// How the value is encoded.
    pub wire_type: WireType,
    /// The encoded value. Of a length-delimited field, what follows the length.
    pub value: &'m [u8],
}

/// The fields of a message, up to the first malformed one. The start and the end of a group are
/// fields without a value.
#[derive(Clone, Copy, Debug)]
pub struct Fields<'m>(&'m [u8]);

impl<'m> Fields<'m> {
    /// Returns the fields of this message.
    pub fn of(message: &'m [u8]) -> Self {
        Self(message)
    }

    /// Returns what is left of the message: after the last field nothing, or the malformed field
    /// and what follows it.
    pub fn rest(&self) -> &'m [u8] {
        self.0
    }
}

impl<'m> Iterator for Fields<'m> {
    type Item = Field<'m>;

    fn next(&mut self) -> Option<Field<'m>> {
        let mut after = self.0;
        if after.is_empty() {
            // Without the error of a missing key, which allocates memory.
            return None;
        }
        let (number, wire_type) = decode_key(&mut after).ok()?;
        let length = match wire_type {
            WireType::Varint => {
                let mut behind = after;
                decode_varint(&mut behind).ok()?;
                after.len() - behind.len()
            }
            WireType::SixtyFourBit => 8,
            WireType::LengthDelimited => usize::try_from(decode_varint(&mut after).ok()?).ok()?,
            WireType::StartGroup | WireType::EndGroup => 0,
            WireType::ThirtyTwoBit => 4,
        };
        let (value, rest) = after.split_at_checked(length)?;
        self.0 = rest;
        Some(Field { number, wire_type, value })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_values_of_all_wire_types_are_found() {
        // A varint, a fixed64, an empty message, two bytes, a group, a fixed32.
        let message = [
            0x08, 0x96, 0x01, 0x11, 1, 2, 3, 4, 5, 6, 7, 8, 0x2a, 0, 0x32, 2, 0x2a, 0, 0x1b, 0x1c,
            0x25, 1, 2, 3, 4,
        ];
        let mut fields = Fields::of(&message);
        let found: Vec<_> =
            fields.by_ref().map(|field| (field.number, field.value.to_vec())).collect();
        let expected: [(u32, &[u8]); 7] = [
            (1, &[0x96, 0x01]),
            (2, &[1, 2, 3, 4, 5, 6, 7, 8]),
            (5, &[]),
            (6, &[0x2a, 0]),
            (3, &[]),
            (3, &[]),
            (4, &[1, 2, 3, 4]),
        ];
        assert!(
            found.iter().map(|(number, value)| (*number, &value[..])).eq(expected),
            "{found:?}"
        );
        assert!(fields.rest().is_empty());
    }

    #[test]
    fn a_malformed_field_ends_the_walk() {
        // A length beyond the message, an endless varint, an unknown wire type, and a short
        // fixed32.
        for malformed in [
            &[0x2a, 0, 0x2a, 0xff, 0xff, 0xff, 0xff, 0x0f][..],
            &[0x08, 1, 0xff, 0xff],
            &[0x08, 1, 0x07],
            &[0x08, 1, 0x25, 1],
        ] {
            let mut fields = Fields::of(malformed);
            assert_eq!(
                (fields.by_ref().count(), fields.rest()),
                (1, &malformed[2..]),
                "{malformed:?}"
            );
        }
        assert_eq!(Fields::of(&[0xff; 64]).count(), 0);
    }
}
