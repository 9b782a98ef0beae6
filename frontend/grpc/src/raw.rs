//! A protobuf message that is already encoded.

use bytes::{Buf, BufMut, Bytes};
use prost::encoding::{DecodeContext, WireType};
use prost::{DecodeError, Message};

/// A message as the core encoded it: `inference.ModelConfig`, `xds.data.orca.v3.OrcaLoadReport`.
/// Only sent, never received: decoding yields an empty message.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub struct RawMessage(pub Bytes);

impl Message for RawMessage {
    fn encode_raw(&self, buf: &mut impl BufMut) {
        buf.put_slice(&self.0);
    }

    fn merge_field(
        &mut self,
        tag: u32,
        wire_type: WireType,
        buf: &mut impl Buf,
        ctx: DecodeContext,
    ) -> Result<(), DecodeError> {
        prost::encoding::skip_field(wire_type, tag, buf, ctx)
    }

    fn encoded_len(&self) -> usize {
        self.0.len()
    }

    fn clear(&mut self) {
        self.0.clear();
    }
}
