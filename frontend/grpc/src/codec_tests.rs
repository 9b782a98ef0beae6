//! Tables of valid and invalid gRPC messages, decoded and encoded.

#![allow(clippy::unwrap_used, clippy::panic, clippy::indexing_slicing)]

use bytes::Bytes;
use pharos::infer::InferOutput;
use proptest::prelude::*;
use prost::Message as _;

use super::super::proto::InferTensorContents;
use super::*;

fn choice(choice: ParameterChoice) -> InferParameter {
    InferParameter { parameter_choice: Some(choice) }
}

fn text(value: &str) -> InferParameter {
    choice(ParameterChoice::StringParam(value.into()))
}

fn tensor(datatype: &str, contents: Option<InferTensorContents>) -> InferInputTensor {
    let contents = contents.map(|contents| contents.encode_to_vec().into());
    InferInputTensor {
        name: "X".into(),
        datatype: datatype.into(),
        shape: vec![1],
        contents,
        ..Default::default()
    }
}

fn request(inputs: Vec<InferInputTensor>, raw: Vec<&'static [u8]>) -> ModelInferRequest {
    ModelInferRequest {
        model_name: "m".into(),
        inputs,
        raw_input_contents: raw.into_iter().map(Bytes::from_static).collect(),
        ..Default::default()
    }
}

fn with_parameter(key: &str, value: InferParameter) -> ModelInferRequest {
    let mut message = request(vec![tensor("INT8", None)], vec![&[1]]);
    message.parameters.insert(key.into(), value);
    message
}

#[test]
fn typed_contents_become_little_endian_bytes() {
    let empty = InferTensorContents::default;
    for (datatype, contents, expected) in [
        ("BOOL", InferTensorContents { bool_contents: vec![true, false], ..empty() }, vec![1, 0]),
        ("INT8", InferTensorContents { int_contents: vec![-1, 127], ..empty() }, vec![255, 127]),
        ("INT16", InferTensorContents { int_contents: vec![-2], ..empty() }, vec![254, 255]),
        ("INT32", InferTensorContents { int_contents: vec![1], ..empty() }, vec![1, 0, 0, 0]),
        ("INT64", InferTensorContents { int64_contents: vec![-1], ..empty() }, vec![255; 8]),
        ("UINT8", InferTensorContents { uint_contents: vec![255], ..empty() }, vec![255]),
        ("UINT16", InferTensorContents { uint_contents: vec![258], ..empty() }, vec![2, 1]),
        ("UINT32", InferTensorContents { uint_contents: vec![u32::MAX], ..empty() }, vec![255; 4]),
        (
            "UINT64",
            InferTensorContents { uint64_contents: vec![1], ..empty() },
            vec![1, 0, 0, 0, 0, 0, 0, 0],
        ),
        (
            "FP32",
            InferTensorContents { fp32_contents: vec![1.0], ..empty() },
            1f32.to_le_bytes().to_vec(),
        ),
        (
            "FP64",
            InferTensorContents { fp64_contents: vec![0.1], ..empty() },
            0.1f64.to_le_bytes().to_vec(),
        ),
        (
            "BYTES",
            InferTensorContents { bytes_contents: vec![Bytes::from_static(b"ab")], ..empty() },
            b"\x02\0\0\0ab".to_vec(),
        ),
    ] {
        let decoded = decode(request(vec![tensor(datatype, Some(contents))], vec![])).unwrap();
        assert_eq!(decoded.inputs[0].tensor.data, expected[..], "{datatype}");
    }
}

/// Decodes a request with these encoded contents.
fn with_encoded_contents(datatype: &str, contents: &[u8]) -> Result<Data, InferError> {
    let mut input = tensor(datatype, None);
    input.contents = Some(Bytes::copy_from_slice(contents));
    decode(request(vec![input], vec![])).map(|mut request| request.inputs.remove(0).tensor.data)
}

/// As parsers of Protocol Buffers must: packed numbers may come in parts, or single, and unknown
/// fields are skipped.
#[test]
fn numbers_are_found_in_each_valid_encoding() {
    for (datatype, contents, expected) in [
        (
            "UINT16",
            &[0x22, 1, 1, 0x20, 2, 0x22, 3, 0x83, 0x80, 0, 0x20, 0xff, 0xff, 3][..],
            &[1, 0, 2, 0, 3, 0, 255, 255][..],
        ),
        ("BOOL", &[0x08, 7, 0x0a, 3, 0x80, 0, 0], &[1, 0, 0]),
        ("FP32", &[0x35, 1, 2, 3, 4, 0x32, 4, 5, 6, 7, 8], &[1, 2, 3, 4, 5, 6, 7, 8]),
        ("FP64", &[0x39, 1, 2, 3, 4, 5, 6, 7, 8], &[1, 2, 3, 4, 5, 6, 7, 8]),
        ("INT8", &[0x12, 1, 9, 0x48, 1, 0x82, 1, 0], &[9]),
        ("BYTES", &[0x42, 0, 0x42, 1, b'a'], &[0, 0, 0, 0, 1, 0, 0, 0, b'a']),
        ("BYTES", &[0x22, 0, 0x42, 1, b'a'], &[1, 0, 0, 0, b'a']),
    ] {
        assert_eq!(with_encoded_contents(datatype, contents).unwrap(), *expected, "{datatype}");
    }
}

#[test]
fn malformed_contents_are_refused() {
    for (datatype, contents) in [
        ("INT8", &[0x12, 2, 1][..]),
        ("INT8", &[0x12, 1, 0x81]),
        ("INT8", &[0x12, 1, 1, 0x07]),
        ("INT8", &[0x15, 1, 2, 3, 4]),
        ("FP32", &[0x32, 3, 1, 2, 3]),
        ("FP32", &[0x30, 1]),
        ("FP64", &[0x3d, 1, 2, 3, 4]),
        ("BYTES", &[0x40, 1]),
        ("INT8", &[0x4b, 0x12, 1, 1, 0x4c]),
    ] {
        let error = with_encoded_contents(datatype, contents).unwrap_err();
        let expected = "the contents of input tensor 'X' for model 'm' are malformed";
        assert_eq!(
            (error.code.grpc_code(), &*error.message),
            (3, expected),
            "{datatype} {contents:?}"
        );
    }
    // Without an element nothing is set.
    for contents in [&[][..], &[0x12, 0], &[0x48, 1]] {
        let error = with_encoded_contents("INT8", contents).unwrap_err();
        assert!(
            error.message.starts_with("unable to find data for input tensor 'X'"),
            "{contents:?}: {error}"
        );
    }
}

#[test]
fn a_negative_timeout_never_expires() {
    let message = with_parameter("timeout", choice(ParameterChoice::Int64Param(-1)));
    assert_eq!(decode(message).unwrap().timeout_us, u64::MAX);
}

#[test]
fn decodes_raw_contents_and_parameters() {
    let mut message =
        request(vec![tensor("FP16", None), tensor("BYTES", None)], vec![&[1, 2], &[0, 0, 0, 0]]);
    message.id = "7".into();
    for (key, value) in [
        ("sequence_id", choice(ParameterChoice::Uint64Param(9))),
        ("sequence_start", choice(ParameterChoice::BoolParam(true))),
        ("priority", choice(ParameterChoice::Uint64Param(2))),
        ("timeout", choice(ParameterChoice::Int64Param(5))),
        ("mine", choice(ParameterChoice::DoubleParam(0.5))),
        ("triton_enable_empty_final_response", choice(ParameterChoice::BoolParam(true))),
    ] {
        message.parameters.insert(key.into(), value);
    }
    let parameters = [("classification".to_owned(), choice(ParameterChoice::Int64Param(3)))].into();
    message.outputs = vec![InferRequestedOutputTensor { name: "Y".into(), parameters }];
    let decoded = decode(message).unwrap();
    assert_eq!(decoded.inputs[0].tensor.data, [1, 2][..]);
    assert_eq!((decoded.correlation_id, decoded.sequence_start), (CorrelationId::Uint(9), true));
    assert_eq!((decoded.priority, decoded.timeout_us, decoded.id.as_str()), (2, 5, "7"));
    assert_eq!(decoded.parameters, [("mine".to_owned(), Parameter::Double(0.5))]);
    assert_eq!((decoded.outputs[0].name.as_str(), decoded.outputs[0].classification), ("Y", 3));
}

#[test]
#[allow(clippy::too_many_lines)] // a table
fn errors_have_tritons_code_and_text() {
    let ints = |numbers: &[i32]| {
        Some(InferTensorContents { int_contents: numbers.to_vec(), ..Default::default() })
    };
    let region = |size: bool, contents| {
        let mut one = tensor("INT8", contents);
        one.parameters.insert("shared_memory_region".into(), text("r"));
        if size {
            one.parameters
                .insert("shared_memory_byte_size".into(), choice(ParameterChoice::Int64Param(1)));
        }
        request(vec![one], vec![])
    };
    for (message, code, expected) in [
        (
            request(vec![tensor("INT8", ints(&[1]))], vec![&[1]]),
            3,
            "contents field must not be specified when using raw_input_contents for 'X' for model \
             'm'",
        ),
        (
            request(vec![tensor("INT8", None)], vec![]),
            3,
            "unable to find data for input tensor 'X' for model 'm' in request.",
        ),
        (
            request(vec![tensor("INT8", None), tensor("INT8", None)], vec![&[1]]),
            3,
            "unable to find data for input tensor 'X'",
        ),
        (
            request(vec![tensor("INT8", None)], vec![&[1], &[2]]),
            3,
            "unexpected additional input data for model 'm'",
        ),
        (
            request(vec![tensor("FP32", ints(&[1]))], vec![]),
            3,
            "unexpected explicit tensor data for input tensor 'X' for model 'm' of type 'INT32', \
             expected datatype 'FP32'",
        ),
        (
            request(
                vec![tensor(
                    "INT32",
                    ints(&[1]).map(|ints| InferTensorContents { fp32_contents: vec![1.0], ..ints }),
                )],
                vec![],
            ),
            3,
            "binary data was already supplied.",
        ),
        (
            request(vec![tensor("FP16", ints(&[1]))], vec![]),
            3,
            "unexpected explicit tensor data for input tensor 'X'",
        ),
        (
            request(vec![tensor("INT8", ints(&[300]))], vec![]),
            3,
            "value 300 of input tensor 'X' for model 'm' is out of range for datatype INT8",
        ),
        (
            request(vec![tensor("F", None)], vec![&[1]]),
            3,
            "invalid datatype for input X: 'F' is not one of BOOL",
        ),
        (region(false, None), 3, "'shared_memory_byte_size' must be specified along with"),
        (
            region(true, ints(&[1])),
            3,
            "unexpected 'content' provided when using shared memory for input tensor 'X'",
        ),
        (
            with_parameter("sequence_id", choice(ParameterChoice::BoolParam(true))),
            3,
            "invalid value type for 'sequence_id' parameter, expected int64_param or string_param.",
        ),
        (
            with_parameter("sequence_end", text("x")),
            3,
            "invalid value type for 'sequence_end' parameter, expected bool_param.",
        ),
        (
            with_parameter("priority", choice(ParameterChoice::Int64Param(-1))),
            3,
            "invalid value -1 for 'priority' parameter",
        ),
        (
            with_parameter("triton_x", text("x")),
            3,
            "parameter keys starting with 'triton_' are reserved",
        ),
        (
            with_parameter("mine", InferParameter::default()),
            3,
            "invalid value type for 'mine' parameter",
        ),
    ] {
        let error = decode(message).map(|_| ()).unwrap_err();
        assert_eq!(error.code.grpc_code(), code, "{error}");
        assert!(error.message.contains(expected), "got {error}, expected {expected}");
    }
}

#[test]
fn outputs_are_raw() {
    let tensor = Tensor {
        datatype: DataType::Bf16,
        shape: vec![1],
        data: Bytes::from_static(&[1, 2]).into(),
    };
    let response = InferResponse {
        model_name: "m".into(),
        parameters: vec![("p".into(), Parameter::Uint(1))],
        outputs: vec![InferOutput { name: "Y".into(), tensor }],
        ..Default::default()
    };
    let message = encode(response);
    assert_eq!(message.outputs[0].datatype, "BF16");
    assert_eq!(message.raw_output_contents, [Bytes::from_static(&[1, 2])]);
    assert_eq!(message.parameters["p"], choice(ParameterChoice::Uint64Param(1)));
}

/// Many short strings must decode in linear time; the bound is generous, and only quadratic time
/// exceeds it.
#[test]
fn many_strings_decode_in_linear_time() {
    let contents = InferTensorContents {
        bytes_contents: vec![Bytes::from_static(b"x"); 100_000],
        ..Default::default()
    };
    let bytes = request(vec![tensor("BYTES", Some(contents))], vec![]).encode_to_vec();
    let start = pharos_os::clock::now();
    let decoded = decode(ModelInferRequest::decode(Bytes::from(bytes)).unwrap()).unwrap();
    assert_eq!(decoded.inputs[0].tensor.data.len(), 500_000);
    assert!(
        (pharos_os::clock::now() - start) < std::time::Duration::from_secs(1),
        "{:?}",
        (pharos_os::clock::now() - start)
    );
}

proptest! {
    #[test]
    fn decoding_never_panics(bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
        if let Ok(message) = ModelInferRequest::decode(&*bytes) {
            let _ = decode(message);
        }
    }
}
