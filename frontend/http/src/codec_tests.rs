//! Tables of valid and invalid HTTP bodies, decoded and encoded.

#![allow(clippy::unwrap_used, clippy::panic, clippy::indexing_slicing)]

use bytes::Bytes;
use pharos::error::InferError;
use pharos::infer::{CorrelationId, InferOutput, InferResponse, Parameter};
use pharos::region::Slice;
use pharos::tensor::{DataType, Tensor, push_bytes_element};
use proptest::prelude::*;

use super::*;

const LIMIT: u64 = 1 << 20;

fn head(header_length: Option<&str>) -> Head {
    Head {
        model_name: "m".into(),
        model_version: String::new(),
        header_length: header_length.map(str::to_owned),
    }
}

fn json(body: &str) -> Result<Decoded, InferError> {
    decode(head(None), Bytes::copy_from_slice(body.as_bytes()), LIMIT)
}

fn with_binary(json: &str, binary: &[u8]) -> Result<Decoded, InferError> {
    let body = [json.as_bytes(), binary].concat();
    decode(head(Some(&json.len().to_string())), body, LIMIT)
}

/// Returns a request with one FP32 input that has these members besides name, shape and datatype.
fn one(members: &str) -> String {
    format!(r#"{{"inputs":[{{"name":"X","shape":[1],"datatype":"FP32",{members}}}]}}"#)
}

/// Returns a valid request with these members besides its inputs.
fn besides(members: &str) -> String {
    format!(r#"{{{members},"inputs":[{{"name":"X","shape":[1],"datatype":"FP32","data":[1]}}]}}"#)
}

#[test]
fn decodes_a_request_with_all_members() {
    let body = r#"{"unknown":{"a":[1]},"id":"r\u00e91","parameters":{"sequence_id":7,"sequence_start":true,"sequence_end":false,
        "priority":3,"timeout":99,"text":"t","flag":true,"int":-5,"big":18446744073709551615,"double":1.5},
        "outputs":[{"name":"Y","parameters":{"binary_data":true,"classification":2}},{"name":"Z"}],
        "inputs":[{"data":[[1,2],[3,4]],"datatype":"INT32","shape":[2,2],"name":"X"}]}"#;
    let (request, form) = json(body).unwrap();
    assert_eq!((request.model_name.as_str(), request.id.as_str()), ("m", "ré1"));
    assert_eq!(request.correlation_id, CorrelationId::Uint(7));
    assert!(request.sequence_start && !request.sequence_end);
    assert_eq!((request.priority, request.timeout_us), (3, 99));
    let expected = [
        ("text", Parameter::String("t".into())),
        ("flag", Parameter::Bool(true)),
        ("int", Parameter::Int(-5)),
        ("big", Parameter::Uint(u64::MAX)),
        ("double", Parameter::Double(1.5)),
    ];
    assert_eq!(request.parameters, expected.map(|(key, value)| (key.to_owned(), value)));
    assert_eq!(request.inputs[0].tensor.shape, [2, 2]);
    assert_eq!(request.inputs[0].tensor.data.len(), 16);
    assert_eq!(
        (request.outputs[0].binary_data, request.outputs[0].classification),
        (Some(true), 2)
    );
    assert_eq!(form, AnswerForm { binary: false, exceptions: vec!["Y".into()] });
}

#[test]
fn binary_inputs_are_slices_of_the_body() {
    let text = r#"{"inputs":[{"name":"A","shape":[2],"datatype":"INT8","parameters":{"binary_data_size":2}},
        {"name":"B","shape":[1],"datatype":"INT8","data":[3]},
        {"name":"C","shape":[1],"datatype":"BYTES","parameters":{"binary_data_size":5}}]}"#;
    let body = Bytes::from([text.as_bytes(), &[8, 9, 1, 0, 0, 0, b'x']].concat());
    let (request, _) = decode(head(Some(&text.len().to_string())), body.clone(), LIMIT).unwrap();
    assert_eq!(request.inputs[0].tensor.data, [8, 9][..]);
    assert_eq!(request.inputs[0].tensor.data.pieces()[0].as_ptr(), body[text.len()..].as_ptr());
    assert_eq!(request.inputs[1].tensor.data, [3][..]);
    assert_eq!(request.inputs[2].tensor.data, [1, 0, 0, 0, b'x'][..]);
}

#[test]
fn a_raw_request_has_only_binary_data() {
    let (request, form) = decode(head(Some("0")), Bytes::from_static(b"abc"), LIMIT).unwrap();
    assert_eq!(request.raw_body, Some(b"abc".to_vec().into()));
    assert!(form.binary && request.inputs.is_empty());
    let (request, _) = decode(head(None), Bytes::new(), LIMIT).unwrap();
    assert_eq!(request.raw_body, Some(Data::new()));
}

#[test]
fn accepts_nonfinite_numbers() {
    let (request, _) = json(&one(r#""data":[NaN]"#)).unwrap();
    let data: [u8; 4] = request.inputs[0].tensor.data.as_slice()[..].try_into().unwrap();
    assert!(f32::from_le_bytes(data).is_nan());
    let (request, _) = json(&besides(r#""parameters":{"x":-Infinity}"#)).unwrap();
    assert_eq!(request.parameters[0].1, Parameter::Double(f64::NEG_INFINITY));
}

#[test]
fn a_nul_ends_the_json() {
    let (request, _) = json(&format!("{}\0\0", one(r#""data":[1]"#))).unwrap();
    assert_eq!(request.inputs.len(), 1);
}

#[test]
fn outputs_have_the_requested_format() {
    let outputs = r#""outputs":[{"name":"A"},{"name":"B","parameters":{"binary_data":false}},
        {"name":"C","parameters":{"binary_data":true}}],"parameters":{"binary_data_output":true}"#;
    let (_, form) = json(&besides(outputs)).unwrap();
    let wishes = ["A", "B", "C", "other"].map(|name| form.is_binary(name));
    assert_eq!(wishes, [true, false, true, true]);
}

#[test]
fn shared_memory_references_carry_no_data() {
    let region = r#""parameters":{"shared_memory_region":"r","shared_memory_offset":8,"shared_memory_byte_size":4}"#;
    let outputs = format!(r#""outputs":[{{"name":"Y",{region}}},{{"name":"Z"}}]"#);
    let body = format!(
        r#"{{"inputs":[{{"name":"X","shape":[1],"datatype":"INT32",{region}}}],{outputs}}}"#
    );
    let (request, form) = json(&body).unwrap();
    let slice = Slice::new("r".into(), 8, 4);
    assert_eq!(request.inputs[0].tensor.data.region(), Some(&slice));
    assert_eq!(
        (request.inputs[0].tensor.data.len(), request.inputs[0].tensor.data.bytes_here()),
        (4, 0)
    );
    assert_eq!(request.outputs[0].region.as_ref(), Some(&slice));
    assert!(request.outputs[1].region.is_none() && request.uses_regions());
    let tensor = |data| Tensor { datatype: DataType::Int32, shape: vec![1], data };
    let outputs = vec![
        InferOutput { name: "Y".into(), tensor: tensor(slice.into()) },
        InferOutput { name: "Z".into(), tensor: tensor(vec![5, 0, 0, 0].into()) },
    ];
    let response = InferResponse { outputs, ..InferResponse::default() };
    for (binary, second) in
        [(false, r#","data":[5]}"#), (true, r#","parameters":{"binary_data_size":4}}"#)]
    {
        let encoded = encode(response.clone(), &AnswerForm { binary, ..form.clone() }).unwrap();
        let head = std::str::from_utf8(&encoded.head).unwrap();
        let expected = format!(
            r#""outputs":[{{"name":"Y","datatype":"INT32","shape":[1]}},{{"name":"Z","datatype":"INT32","shape":[1]{second}]}}"#
        );
        assert!(head.ends_with(&expected), "{head}");
        assert_eq!(encoded.blobs.len(), usize::from(binary));
    }
}

/// Every row of the error table: status and a part of the message.
#[test]
#[allow(clippy::too_many_lines)] // a table
fn errors_have_tritons_status_and_text() {
    let only_one = "Input must set only one of the following fields: 'data', 'binary_data_size' \
                    in 'parameters', 'shared_memory_region' in 'parameters'. But";
    let string = "attempt to access JSON non-string as string";
    let unsigned = "attempt to access JSON non-unsigned-integer as unsigned-integer";
    let boolean = "attempt to access JSON non-boolean as boolean";
    let deep = format!(r#"{{"inputs":{}{}}}"#, "[".repeat(100), "]".repeat(100));
    for (body, status, text) in [
        (r#"{"inputs":["#.to_owned(), 500, "failed to parse the request JSON buffer: "),
        ("{} x".into(), 500, "failed to parse the request JSON buffer: "),
        ("[]".into(), 500, "Unable to parse 'inputs': attempt to access non-existing object member 'inputs'"),
        ("5".into(), 500, "Unable to parse 'inputs': attempt to access non-existing object member 'inputs'"),
        ("{}".into(), 500, "Unable to parse 'inputs': attempt to access non-existing object member 'inputs'"),
        (r#"{"inputs":{}}"#.into(), 500, "Unable to parse 'inputs': attempt to access JSON non-array as array"),
        (r#"{"inputs":[5]}"#.into(), 400, &format!("{only_one} no field is set")),
        (deep, 400, "JSON nesting depth exceeds maximum allowed limit (100)"),
        (r#"{"inputs":[{"name":"X"}]}"#.into(), 400, &format!("{only_one} no field is set")),
        (
            one(r#""data":[1],"parameters":{"binary_data_size":4}"#),
            400,
            &format!("{only_one} set 'data' 'binary_data_size'"),
        ),
        (
            one(r#""data":[1],"parameters":{"shared_memory_region":"r"}"#),
            400,
            &format!("{only_one} set 'data' 'shared_memory_region'"),
        ),
        (
            one(r#""parameters":{"shared_memory_region":7}"#),
            500,
            &format!("Unable to parse 'shared_memory_region': {string}"),
        ),
        (
            one(r#""parameters":{"shared_memory_region":"r","shared_memory_offset":-1}"#),
            500,
            &format!("Unable to parse 'shared_memory_offset': {unsigned}"),
        ),
        (
            one(r#""parameters":{"binary_data_size":"4"}"#),
            500,
            &format!("Unable to parse 'binary_data_size': {unsigned}"),
        ),
        (
            one(r#""parameters":{"binary_data_size":4}"#),
            400,
            "unexpected size for input 'X', expecting 4 additional bytes for model 'm'",
        ),
        (
            r#"{"inputs":[{"data":[1]}]}"#.into(),
            500,
            "Unable to parse 'name': attempt to access non-existing object member 'name'",
        ),
        (r#"{"inputs":[{"name":5,"data":[1]}]}"#.into(), 500, &format!("Unable to parse 'name': {string}")),
        (
            r#"{"inputs":[{"name":"X","data":[1]}]}"#.into(),
            500,
            "Unable to parse 'datatype': attempt to access non-existing object member 'datatype'",
        ),
        (
            r#"{"inputs":[{"name":"X","datatype":"F","data":[1]}]}"#.into(),
            500,
            "Unable to parse 'shape': attempt to access non-existing object member 'shape'",
        ),
        (
            r#"{"inputs":[{"name":"X","datatype":"F","shape":[1],"data":[1]}]}"#.into(),
            400,
            "invalid datatype for input X",
        ),
        (
            r#"{"inputs":[{"name":"X","datatype":"FP32","shape":[-1],"data":[1]}]}"#.into(),
            500,
            &format!("Unable to parse 'shape': {unsigned}"),
        ),
        (
            r#"{"inputs":[{"name":"X","datatype":"FP32","shape":[1.5],"data":[1]}]}"#.into(),
            500,
            &format!("Unable to parse 'shape': {unsigned}"),
        ),
        (
            r#"{"inputs":[{"name":"X","datatype":"FP32","shape":5,"data":[1]}]}"#.into(),
            500,
            "Unable to parse 'shape': attempt to access JSON non-array as array",
        ),
        (
            r#"{"inputs":[{"name":"X","datatype":"FP32","shape":[9223372036854775807,2],"data":[1]}]}"#.into(),
            400,
            "causes total element count to exceed maximum size of",
        ),
        (
            r#"{"inputs":[{"name":"X","datatype":"FP64","shape":[9223372036854775807],"data":[1]}]}"#.into(),
            400,
            "byte size overflow for input",
        ),
        (
            r#"{"inputs":[{"name":"X","datatype":"FP32","shape":[1152921504606846976],"data":[1]}]}"#.into(),
            500,
            "Unable to parse 'data': Shape does not match true shape of 'data' field",
        ),
        (one(r#""data":[1,2]"#), 500, "Unable to parse 'data': Shape does not match true shape of 'data' field"),
        (besides(r#""id":5"#), 500, &format!("Unable to parse 'id': {string}")),
        (besides(r#""parameters":5"#), 500, "failed to get request params.: attempt to get members for non-object"),
        (besides(r#""parameters":{"triton_x":1}"#), 400, "parameter keys starting with 'triton_' are reserved"),
        (
            besides(r#""parameters":{"x":[1]}"#),
            400,
            "parameter 'x' has invalid type. It should be either 'int', 'bool', or 'string'.",
        ),
        (besides(r#""parameters":{"x":null}"#), 400, "parameter 'x' has invalid type."),
        (
            besides(r#""parameters":{"priority":-1}"#),
            400,
            &format!("Unable to parse 'priority': {unsigned}: it is -1, allowed: 0 to 18446744073709551615"),
        ),
        (
            besides(r#""parameters":{"timeout":"1"}"#),
            400,
            &format!("Unable to parse 'timeout': {unsigned}: it is \"1\", allowed: 0 to 18446744073709551615"),
        ),
        (
            besides(r#""parameters":{"sequence_id":1.5}"#),
            400,
            &format!(
                "Unable to parse 'sequence_id': {string}: it is 1.5, allowed: 0 to 18446744073709551615, or a string"
            ),
        ),
        (
            besides(r#""parameters":{"sequence_id":18446744073709551616}"#),
            400,
            &format!("Unable to parse 'sequence_id': {string}: it is 18446744073709551616, allowed: 0 to"),
        ),
        (
            besides(&format!(r#""parameters":{{"sequence_id":"{}"}}"#, "x".repeat(129))),
            400,
            "string correlation ID cannot be longer than 128 characters, this one has 129 bytes",
        ),
        (
            besides(&format!(r#""parameters":{{"sequence_id":["{}"]}}"#, "é".repeat(999))),
            400,
            &format!("Unable to parse 'sequence_id': {string}: it is [\"{}..., allowed: ", "é".repeat(62)),
        ),
        (
            besides(r#""parameters":{"sequence_start":1}"#),
            400,
            &format!("Unable to parse 'sequence_start': {boolean}: it is 1, allowed: true or false"),
        ),
        (
            besides(r#""parameters":{"binary_data_output":1}"#),
            400,
            &format!("Unable to parse 'binary_data_output': {boolean}"),
        ),
        (besides(r#""outputs":5"#), 500, "Unable to parse 'outputs': attempt to access JSON non-array as array"),
        (
            besides(r#""outputs":[5]"#),
            500,
            "Unable to parse 'name': attempt to access non-existing object member 'name'",
        ),
        (
            besides(r#""outputs":[{}]"#),
            500,
            "Unable to parse 'name': attempt to access non-existing object member 'name'",
        ),
        (
            besides(r#""outputs":[{"name":"Y","parameters":{"binary_data":5}}]"#),
            400,
            &format!("Unable to parse 'binary_data': {boolean}"),
        ),
        (
            besides(r#""outputs":[{"name":"Y","parameters":{"classification":"a"}}]"#),
            400,
            &format!("Unable to set 'classification': {unsigned}"),
        ),
        (
            besides(r#""outputs":[{"name":"Y","parameters":{"shared_memory_region":"r","binary_data":true}}]"#),
            400,
            "Output can't set both 'shared_memory_region' and 'binary_data'",
        ),
        (
            besides(r#""outputs":[{"name":"Y","parameters":{"shared_memory_region":"r","classification":1}}]"#),
            400,
            "Output can't set both 'shared_memory_region' and 'classification'",
        ),
        (
            besides(
                r#""outputs":[{"name":"Y","parameters":{"shared_memory_region":"r","shared_memory_byte_size":true}}]"#,
            ),
            500,
            &format!("Unable to parse 'shared_memory_byte_size': {unsigned}"),
        ),
    ] {
        let error = json(&body).map(|_| ()).unwrap_err();
        assert_eq!(error.code.http_status(), status, "{body}: {error}");
        assert!(error.message.contains(text), "{body}: got {error:?}, expected {text:?}");
    }
}

#[test]
fn refuses_wrong_lengths() {
    let text = one(r#""parameters":{"binary_data_size":4}"#);
    let error = |header: &str, body: &[u8]| {
        decode(head(Some(header)), Bytes::copy_from_slice(body), LIMIT).unwrap_err()
    };
    assert_eq!(
        error("abc", b"{}").message,
        "Unable to parse Inference-Header-Content-Length, got: abc"
    );
    assert_eq!(
        error("3", b"{}").message,
        "inference header size should be in range (0, 2), got: 3"
    );
    assert_eq!(
        error("-1", b"{}").message,
        "inference header size should be in range (0, 2), got: -1"
    );
    let short = with_binary(&text, &[1, 2]).unwrap_err();
    assert_eq!(
        short.message,
        "unexpected size for input 'X', expecting 2 additional bytes for model 'm'"
    );
    let long = with_binary(&text, &[1, 2, 3, 4, 5]).unwrap_err();
    assert_eq!(long.message, "unexpected additional input data for model 'm'");
    let big = decode(head(None), Bytes::from_static(b"{         }"), 10).unwrap_err();
    assert_eq!(
        big.message,
        "request JSON size of 11 bytes exceeds the maximum allowed input size of 10 bytes. Use \
         --http-max-input-size to increase the limit."
    );
    let raw = decode(head(Some("0")), Bytes::from_static(b"12345678901"), 10).unwrap_err();
    assert!(raw.message.contains("exceeds the maximum allowed value"), "{raw}");
}

fn tensor(datatype: DataType, shape: &[i64], data: impl Into<Vec<u8>>) -> Tensor {
    Tensor { datatype, shape: shape.to_vec(), data: data.into().into() }
}

fn response(outputs: Vec<(&str, Tensor)>) -> InferResponse {
    let outputs =
        outputs.into_iter().map(|(name, tensor)| InferOutput { name: name.into(), tensor });
    InferResponse {
        model_name: "m".into(),
        model_version: "1".into(),
        outputs: outputs.collect(),
        ..InferResponse::default()
    }
}

/// Returns the JSON of one output without the enclosing object.
fn rendered(tensor: Tensor) -> Result<String, InferError> {
    let encoded = encode(response(vec![("Y", tensor)]), &AnswerForm::default())?;
    let text = String::from_utf8(encoded.head.to_vec()).unwrap();
    let data = text.split("\"data\":").nth(1).unwrap();
    Ok(data.strip_suffix("}]}").unwrap().to_owned())
}

#[test]
fn the_keys_of_an_answer_are_ordered() {
    let mut mixed = response(vec![
        ("A", tensor(DataType::Int32, &[1, 2], [1, 0, 0, 0, 2, 0, 0, 0])),
        ("B", tensor(DataType::Uint8, &[3], [7, 8, 9])),
        ("C", tensor(DataType::Fp32, &[0], [])),
    ]);
    mixed.id = "a\"b".into();
    mixed.parameters =
        vec![("p".into(), Parameter::Int(1)), ("q".into(), Parameter::String("s".into()))];
    let form = AnswerForm { binary: true, exceptions: vec!["A".into()] };
    let encoded = encode(mixed, &form).unwrap();
    let expected = r#"{"id":"a\"b","model_name":"m","model_version":"1","parameters":{"p":1,"q":"s"},"outputs":[{"name":"A","datatype":"INT32","shape":[1,2],"data":[1,2]},{"name":"B","datatype":"UINT8","shape":[3],"parameters":{"binary_data_size":3}},{"name":"C","datatype":"FP32","shape":[0],"parameters":{"binary_data_size":0}}]}"#;
    assert_eq!(encoded.head, expected.as_bytes());
    assert_eq!(encoded.blobs, [Bytes::from_static(&[7, 8, 9])]);
    let empty = encode(response(vec![("C", tensor(DataType::Fp32, &[0], []))]), &form).unwrap();
    assert!(!empty.is_binary(), "an empty binary output must not set the length header");
}

#[test]
fn every_datatype_is_rendered() {
    let strings = |elements: &[&[u8]]| {
        let mut out = Vec::new();
        elements.iter().for_each(|element| assert!(push_bytes_element(&mut out, element)));
        tensor(DataType::Bytes, &[elements.len() as i64], out)
    };
    for (tensor, expected) in [
        (tensor(DataType::Bool, &[2], [0, 2]), "[false,true]"),
        (tensor(DataType::Uint16, &[1], [255, 255]), "[65535]"),
        (tensor(DataType::Uint32, &[1], [255; 4]), "[4294967295]"),
        (tensor(DataType::Uint64, &[1], [255; 8]), "[18446744073709551615]"),
        (tensor(DataType::Int8, &[2], [128, 127]), "[-128,127]"),
        (tensor(DataType::Int16, &[1], [254, 255]), "[-2]"),
        (tensor(DataType::Int64, &[1], i64::MIN.to_le_bytes()), "[-9223372036854775808]"),
        (
            tensor(DataType::Fp32, &[2], [0.1f32.to_le_bytes(), 1f32.to_le_bytes()].concat()),
            "[0.1,1.0]",
        ),
        (tensor(DataType::Fp64, &[1], 0.1f64.to_le_bytes()), "[0.1]"),
        (
            tensor(
                DataType::Fp32,
                &[2],
                [f32::NAN.to_le_bytes(), f32::NEG_INFINITY.to_le_bytes()].concat(),
            ),
            "[NaN,-Infinity]",
        ),
        (strings(&[b"a", b"", "é\n\u{1}".as_bytes()]), "[\"a\",\"\",\"é\\n\\u0001\"]"),
        (tensor(DataType::Int32, &[0], []), "[]"),
    ] {
        assert_eq!(rendered(tensor).unwrap(), expected);
    }
    let error = |tensor: Tensor| {
        rendered(tensor).map_err(|e| (e.code.http_status(), e.message)).unwrap_err()
    };
    let (status, text) = error(tensor(DataType::Fp16, &[1], [0, 0]));
    assert!(
        status == 400 && text.starts_with("sending FP16 data via JSON is not supported."),
        "{text}"
    );
    let (status, text) = error(strings(&[b"\xff"]));
    assert!(status == 400 && text.contains("is not UTF-8"), "{text}");
    for bad in [
        tensor(DataType::Int32, &[2], [0; 4]),
        tensor(DataType::Bytes, &[1], [9, 0, 0, 0]),
        tensor(DataType::Bytes, &[2], [0; 4]),
    ] {
        assert_eq!(
            error(bad),
            (500, "output tensor shape does not match size of output for 'Y'".to_owned())
        );
    }
}

/// Generates a fixed-size tensor of finite values that JSON can represent.
fn any_tensor() -> impl Strategy<Value = Tensor> {
    let json = DataType::ALL
        .into_iter()
        .filter(|d| d.size().is_some() && !matches!(d, DataType::Fp16 | DataType::Bf16));
    let json: Vec<DataType> = json.collect();
    (proptest::sample::select(json), 0i64..5, 0i64..5).prop_flat_map(|(datatype, rows, columns)| {
        let size = datatype.size().unwrap_or(1);
        let count = (rows * columns) as usize * size;
        proptest::collection::vec(any::<u8>(), count).prop_map(move |mut bytes| {
            match datatype {
                DataType::Bool => bytes.iter_mut().for_each(|byte| *byte &= 1),
                // Clear one exponent bit: excludes infinities and NaN, whose payload JSON cannot
                // represent.
                DataType::Fp32 | DataType::Fp64 => {
                    bytes.chunks_mut(size).for_each(|chunk| chunk[size - 1] &= 0xbf)
                }
                _ => {}
            }
            tensor(datatype, &[rows, columns], bytes)
        })
    })
}

proptest! {
    #[test]
    fn decoding_never_panics(data in proptest::collection::vec(any::<u8>(), 0..300)) {
        crate::fuzzing::request(&data);
    }

    #[test]
    fn decoding_mutated_requests_never_panics(at in 0usize..400, byte in any::<u8>(), cut in 0usize..400, length in any::<u16>()) {
        let mut body = besides(r#""id":"i","parameters":{"sequence_id":"s","x":1.5},"outputs":[{"name":"X","parameters":{"binary_data":true}}]"#).into_bytes();
        body.extend_from_slice(&[1, 2, 3, 4]);
        let at = at % body.len();
        body[at] = byte;
        body.truncate(cut.max(at + 1));
        for length in [length, u16::MAX, body.len() as u16 - 1] {
            crate::fuzzing::request(&[&length.to_le_bytes(), &body[..]].concat());
        }
    }

    /// A tensor that is sent as JSON or as binary data is decoded to the same bytes.
    #[test]
    fn tensors_round_trip(tensor in any_tensor(), binary in any::<bool>(), id in ".{0,8}") {
        let mut sent = response(vec![("X", tensor.clone())]);
        sent.id = id.clone();
        let encoded = encode(sent, &AnswerForm { binary, exceptions: vec![] }).unwrap();
        let json = String::from_utf8(encoded.head.to_vec()).unwrap().replace("\"outputs\"", "\"inputs\"");
        let (request, _) = with_binary(&json, &encoded.blobs.concat()).unwrap();
        prop_assert_eq!(&request.inputs[0].tensor, &tensor);
        prop_assert_eq!(request.id, id);
    }

    #[test]
    fn strings_round_trip(strings in proptest::collection::vec(".{0,12}", 0..6)) {
        let mut data = Vec::new();
        strings.iter().for_each(|text| assert!(push_bytes_element(&mut data, text.as_bytes())));
        let tensor = tensor(DataType::Bytes, &[strings.len() as i64], data);
        let encoded = encode(response(vec![("X", tensor.clone())]), &AnswerForm::default()).unwrap();
        let body = String::from_utf8(encoded.head.to_vec()).unwrap().replace("\"outputs\"", "\"inputs\"");
        let (request, _) = json(&body).unwrap();
        prop_assert_eq!(&request.inputs[0].tensor, &tensor);
    }
}
