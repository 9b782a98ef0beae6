//! The check of the fuzz target of gRPC messages: it accepts any bytes and panics if an invariant
//! is violated. The server does not use this module.

use bytes::Bytes;
use pharos::data::Data;
use pharos::infer::{InferOutput, InferResponse};
use pharos::tensor::DataType;
use prost::Message;

use super::codec::{decode, encode};
use super::contents::{self, Of};
use super::large_tensors::split;
use super::proto::{InferTensorContents, ModelInferRequest};

/// Decodes any message that arrives in pieces: the first two bytes are the length of its first
/// piece, the rest is the message. What is left of a message without its large inputs is the same
/// request, typed contents become what a schema says, and a decoded request can be encoded as a
/// response.
pub fn request(data: &[u8]) {
    let Some((length, message)) = data.split_first_chunk::<2>() else { return };
    let (first, second) =
        message.split_at(usize::from(u16::from_le_bytes(*length)).min(message.len()));
    let pieces = Data::from(vec![Bytes::copy_from_slice(first), Bytes::copy_from_slice(second)]);
    let Ok(request) = ModelInferRequest::decode(Bytes::copy_from_slice(message)) else { return };
    if let Some((head, inputs)) = split(pieces) {
        let mut rest = ModelInferRequest::decode(head.slice(5..))
            .expect("the rest of a valid message is valid");
        let raw = inputs.merge(std::mem::take(&mut rest.raw_input_contents));
        rest.raw_input_contents = raw.into_iter().map(Data::join).collect();
        // Compared as text, because a NaN among the parameters is not equal to itself.
        assert_eq!(format!("{rest:?}"), format!("{request:?}"));
    }
    for input in &request.inputs {
        if let (Some(contents), Some(datatype)) =
            (&input.contents, DataType::from_name(&input.datatype))
        {
            typed(contents, datatype);
        }
    }
    let Ok(request) = decode(request) else { return };
    let outputs = request.inputs.into_iter();
    let outputs = outputs.map(|input| InferOutput { name: input.name, tensor: input.tensor });
    let _ = encode(InferResponse {
        model_name: request.model_name,
        id: request.id,
        parameters: request.parameters,
        outputs: outputs.collect(),
        ..InferResponse::default()
    });
}

/// Compares the conversion of typed contents with the fields that the generated decoder finds in
/// them.
fn typed(contents: &[u8], datatype: DataType) {
    let converted = contents::bytes(contents, Of { input: "i", model: "m", datatype });
    let Ok(fields) = InferTensorContents::decode(contents) else {
        assert!(converted.is_err(), "malformed contents were accepted: {converted:?}");
        return;
    };
    let Ok(converted) = converted else { return };
    let converted = converted.unwrap_or_default();
    let expected: Vec<u8> = match datatype {
        DataType::Bool => fields.bool_contents.iter().map(|&flag| u8::from(flag)).collect(),
        DataType::Int8 | DataType::Int16 | DataType::Int32 => {
            let size = datatype.size().unwrap_or_default();
            fields
                .int_contents
                .iter()
                .flat_map(|number| number.to_le_bytes().into_iter().take(size))
                .collect()
        }
        DataType::Uint8 | DataType::Uint16 | DataType::Uint32 => {
            let size = datatype.size().unwrap_or_default();
            fields
                .uint_contents
                .iter()
                .flat_map(|number| number.to_le_bytes().into_iter().take(size))
                .collect()
        }
        DataType::Int64 => {
            fields.int64_contents.iter().flat_map(|number| number.to_le_bytes()).collect()
        }
        DataType::Uint64 => {
            fields.uint64_contents.iter().flat_map(|number| number.to_le_bytes()).collect()
        }
        DataType::Fp32 => {
            fields.fp32_contents.iter().flat_map(|number| number.to_le_bytes()).collect()
        }
        DataType::Fp64 => {
            fields.fp64_contents.iter().flat_map(|number| number.to_le_bytes()).collect()
        }
        DataType::Bytes => {
            let element = |element: &Bytes| {
                let length = u32::try_from(element.len()).unwrap_or(u32::MAX).to_le_bytes();
                [&length[..], element].concat()
            };
            fields.bytes_contents.iter().flat_map(element).collect()
        }
        DataType::Fp16 | DataType::Bf16 => Vec::new(),
    };
    assert_eq!(converted, expected, "{datatype}");
}
