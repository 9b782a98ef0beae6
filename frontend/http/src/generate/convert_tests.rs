//! The JSON of the generate extension, member by member. The golden files of the client tests have
//! the answers of a real Triton to the same requests.

#![allow(clippy::unwrap_used)]

use pharos::infer::{InferOutput, Parameter};

use super::*;

fn model() -> ModelMetadata {
    let tensor = |name: &str, datatype, shape: &[i64]| TensorMetadata {
        name: name.into(),
        datatype,
        shape: shape.into(),
    };
    ModelMetadata {
        name: "m".into(),
        versions: vec!["1".into()],
        platform: "builtin".into(),
        inputs: vec![
            tensor("I", "INT32", &[-1]),
            tensor("ROWS", "FP32", &[-1, 2]),
            tensor("T", "BYTES", &[1]),
            tensor("H", "FP16", &[-1]),
            tensor("DEEP", "INT64", &[-1, -1]),
            tensor("B", "BOOL", &[2]),
        ],
        outputs: Vec::new(),
    }
}

fn parse(json: &str) -> Result<InferRequest, (u16, String)> {
    let mut parsed = InferRequest::default();
    let result = request(json.as_bytes(), &model(), &mut parsed);
    result.map(|()| parsed).map_err(|error| (error.code.http_status(), error.message))
}

#[test]
fn members_that_are_inputs_become_tensors() {
    for (json, name, shape, bytes) in [
        (r#"{"I":5}"#, "I", vec![1], vec![5, 0, 0, 0]),
        ("\u{feff}{\"I\":5}", "I", vec![1], vec![5, 0, 0, 0]),
        (r#"{"I":[5,-1]}"#, "I", vec![2], vec![5, 0, 0, 0, 255, 255, 255, 255]),
        (r#"{"I":[]}"#, "I", vec![0], vec![]),
        (
            r#"{"ROWS":[1,2,3,4]}"#,
            "ROWS",
            vec![2, 2],
            [1f32, 2., 3., 4.].map(f32::to_le_bytes).concat(),
        ),
        (r#"{"ROWS":[NaN,1]}"#, "ROWS", vec![1, 2], [f32::NAN, 1.].map(f32::to_le_bytes).concat()),
        (r#"{"T":"a,\u00e9"}"#, "T", vec![1], b"\x04\0\0\0a,\xc3\xa9".to_vec()),
        (r#"{"T":["a"]}"#, "T", vec![1], b"\x01\0\0\0a".to_vec()),
        (r#"{"DEEP":[7,8]}"#, "DEEP", vec![1, 2], [7i64, 8].map(i64::to_le_bytes).concat()),
        (r#"{"B":[true,false]}"#, "B", vec![2], vec![1, 0]),
        (r#"{"parameters":{"T":"in"}}"#, "T", vec![1], b"\x02\0\0\0in".to_vec()),
    ] {
        let request = parse(json).unwrap();
        let [input] = request.inputs.as_slice() else { unreachable!("{json}") };
        assert_eq!((input.name.as_str(), &input.tensor.shape), (name, &shape), "{json}");
        assert_eq!(*input.tensor.data.as_slice(), *bytes, "{json}");
    }
}

#[test]
fn other_members_become_parameters() {
    let request = parse(
        r#"{"id":"x","a":1,"parameters":{"b":"c","id":true},"triton_x":1.5,"sequence_start":5}"#,
    )
    .unwrap();
    assert_eq!(request.id, "x");
    let expected = [
        ("a", Parameter::Int(1)),
        ("b", Parameter::String("c".into())),
        ("id", Parameter::Bool(true)),
        ("triton_x", Parameter::Double(1.5)),
        ("sequence_start", Parameter::Int(5)),
    ];
    assert_eq!(request.parameters, expected.map(|(name, value)| (name.to_owned(), value)));
    assert!(!request.sequence_start);
}

#[test]
fn refusals_have_tritons_codes_and_texts() {
    let invalid = "has invalid type. It should be either 'int', 'bool', or 'string'.";
    let schema =
        |name| format!("The schema can not convert input '{name}' to tensor with proper shape");
    let bytes = "Unable to parse JSON bytes array: attempt to access JSON non-string as string, \
                 for input 'T'";
    let signed =
        "Unable to parse 'data': attempt to access JSON non-signed-integer as signed-integer";
    for (json, status, text) in [
        ("", 500, "failed to parse the request JSON buffer: ".to_owned()),
        (r#"{"I":[1]"#, 500, "failed to parse the request JSON buffer: ".to_owned()),
        ("[1]", 500, "attempt to get members for non-object".to_owned()),
        (
            &format!("{{{}\"last\":0}}", "\"\":0,".repeat(20_000)),
            400,
            "failed to parse the request JSON buffer: an object has more than 16384 members"
                .to_owned(),
        ),
        (
            r#"{"parameters":3}"#,
            500,
            "Expected JSON object for keyword: 'parameters': attempt to access JSON non-object as \
             object"
                .to_owned(),
        ),
        (
            r#"{"parameters":{"k":{}}}"#,
            400,
            format!("Converting keyword: 'parameters': parameter 'k' {invalid}"),
        ),
        (r#"{"k":{}}"#, 400, format!("parameter 'k' {invalid}")),
        (
            r#"{"parameters":{"triton_adapter":"{}"}}"#,
            400,
            "Converting keyword: 'parameters': parameter keys starting with 'triton_' are reserved \
             for Triton usage and should not be specified."
                .to_owned(),
        ),
        (r#"{"k":[1]}"#, 400, format!("parameter 'k' {invalid}")),
        (r#"{"k":null}"#, 400, format!("parameter 'k' {invalid}")),
        (
            r#"{"id":5}"#,
            500,
            "Unable to parse 'id': attempt to access JSON non-string as string".to_owned(),
        ),
        (r#"{"T":["a","b"]}"#, 400, schema("T")),
        (r#"{"ROWS":[1,2,3]}"#, 400, schema("ROWS")),
        (r#"{"B":[true]}"#, 400, schema("B")),
        (r#"{"B":[]}"#, 400, schema("B")),
        (
            r#"{"ROWS":[[1,2],[3,4,5]]}"#,
            500,
            "Unable to parse 'data': Shape does not match".to_owned(),
        ),
        (r#"{"T":null}"#, 500, bytes.to_owned()),
        (r#"{"T":{"a":1}}"#, 500, bytes.to_owned()),
        (r#"{"T":NaN}"#, 500, bytes.to_owned()),
        (r#"{"T":[-Infinity]}"#, 500, bytes.to_owned()),
        (
            r#"{"id":NaN}"#,
            500,
            "Unable to parse 'id': attempt to access JSON non-string as string".to_owned(),
        ),
        (r#"{"T":[1,2]}"#, 500, bytes.to_owned()),
        (r#"{"I":{}}"#, 500, signed.to_owned()),
        (r#"{"I":"5"}"#, 500, signed.to_owned()),
        (r#"{"I":true}"#, 500, signed.to_owned()),
        (r#"{"H":[1.0]}"#, 400, "receiving FP16 data via JSON is not supported.".to_owned()),
    ] {
        let (got, message) = parse(json).unwrap_err();
        assert_eq!(got, status, "{json}: {message}");
        assert!(message.starts_with(&text), "{json}: {message}");
    }
    let deep = format!("{{\"I\":{}1{}}}", "[".repeat(200), "]".repeat(200));
    assert_eq!(parse(&deep).unwrap_err().0, 400);
}

#[test]
fn a_response_is_an_object_sorted_by_name() {
    let output = |name: &str, datatype, shape: &[i64], bytes: &[u8]| InferOutput {
        name: name.into(),
        tensor: Tensor {
            datatype,
            shape: shape.to_vec(),
            data: bytes::Bytes::copy_from_slice(bytes).into(),
        },
    };
    let full = InferResponse {
        model_name: "m".into(),
        model_version: "1".into(),
        id: "q\"".into(),
        // A parameter does not replace an output of the same name.
        parameters: vec![
            ("p".into(), Parameter::Int(3)),
            ("id".into(), Parameter::Bool(true)),
            ("Z".into(), Parameter::Int(7)),
        ],
        outputs: vec![
            output("Z", DataType::Uint8, &[1, 1], &[9]),
            output("A", DataType::Uint8, &[2], &[1, 2]),
            output("none", DataType::Uint8, &[0], &[]),
            output("t", DataType::Bytes, &[1], b"\x01\0\0\0a"),
        ],
        ..InferResponse::default()
    };
    let text = String::from_utf8(response(&full).unwrap()).unwrap();
    let expected = r#"{"A":[1,2],"Z":9,"id":"q\"","model_name":"m","model_version":"1","none":[],"p":3,"t":"a"}"#;
    assert_eq!(text, expected);
    let half = InferResponse { outputs: vec![output("H", DataType::Fp16, &[1], &[0, 0])], ..full };
    assert!(
        response(&half)
            .unwrap_err()
            .message
            .contains("sending FP16 data via JSON is not supported")
    );
}
