//! Checks for the fuzz targets of HTTP bodies: each accepts any bytes and panics if an invariant is
//! violated. The server does not use this module.

use bytes::Bytes;
use pharos::infer::{InferInput, InferOutput, InferRequest, InferResponse};
use pharos::model::{ModelMetadata, TensorMetadata};
use pharos::tensor::{DataType, byte_size};

use super::codec::{AnswerForm, Head, decode, encode};
use super::generate::convert;
use super::v1::request::{ModelInputs, parse};
use super::{repository, shared_memory};

/// Returns the parameters of a load request by name; empty if `body` is not a valid load request.
pub fn load(body: &[u8]) -> Vec<(String, Bytes)> {
    repository::load_parameters(body).unwrap_or_default()
}

/// Decodes any body with any header: the first two bytes are the length of the JSON (`0xffff`: no
/// header), the rest is the body. A decoded request is encoded again in both forms. The body is
/// also parsed as a request of the generate extension and as a registration of shared memory.
pub fn request(data: &[u8]) {
    let Some((length, body)) = data.split_first_chunk::<2>() else { return };
    let length = u16::from_le_bytes(*length);
    let header_length = (length != u16::MAX).then(|| length.to_string());
    let head = Head { model_name: "model".into(), model_version: String::new(), header_length };
    generate(body);
    let _ = (shared_memory::system(body), shared_memory::cuda(body));
    let Ok((request, form)) = decode(head, Bytes::copy_from_slice(body), 1 << 20) else { return };
    let outputs = request.inputs.into_iter();
    let outputs = outputs.map(|input| InferOutput { name: input.name, tensor: input.tensor });
    let response = InferResponse {
        model_name: request.model_name,
        id: request.id,
        parameters: request.parameters,
        outputs: outputs.collect(),
        ..InferResponse::default()
    };
    let other = AnswerForm { binary: !form.binary, ..form.clone() };
    for form in [form, other] {
        let _ = encode(response.clone(), &form);
    }
}

/// Parses any body as a request of the generate extension and of v1, and checks that the data of
/// each tensor matches its shape.
fn generate(body: &[u8]) {
    let inputs = [
        ("I", "INT32", vec![-1]),
        ("ROWS", "FP32", vec![-1, 2]),
        ("T", "BYTES", vec![1]),
        ("DEEP", "INT64", vec![-1, 3, -1]),
        ("B", "BOOL", vec![2]),
        ("D", "FP64", vec![0]),
        ("U", "UINT8", vec![-1]),
        ("H", "FP16", vec![-1]),
    ];
    let tensor = |(name, datatype, shape): (&str, _, _)| TensorMetadata {
        name: name.to_owned(),
        datatype,
        shape,
    };
    let name = "m".to_owned();
    let platform = String::new();
    let versions = Vec::new();
    let outputs = Vec::new();
    let model =
        ModelMetadata { name, versions, platform, inputs: inputs.map(tensor).to_vec(), outputs };
    let mut request = InferRequest::default();
    let generated = convert::request(body, &model, &mut request).map(|_| request.inputs);
    let predicted =
        parse(body, ModelInputs::new(&model.inputs, |_| false)).map(|(inputs, _)| inputs);
    for InferInput { name, tensor } in [generated, predicted].into_iter().flatten().flatten() {
        let fits = tensor.datatype == DataType::Bytes
            || byte_size(tensor.datatype, &tensor.shape) == Some(tensor.data.len() as u64);
        assert!(fits, "{name} {:?} has {} bytes", tensor.shape, tensor.data.len());
        let outputs = vec![InferOutput { name, tensor }];
        let _ = convert::response(&InferResponse { outputs, ..InferResponse::default() });
    }
}
