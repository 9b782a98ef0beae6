//! Checking requests: accepted ones, and the error texts of refused ones.

use bytes::Bytes;
use proptest::prelude::*;

use super::super::*;
use super::{IDENTITY, SIMPLE, config};
use crate::error::{ErrorCode, Reason};
use crate::infer::{InferInput, InferRequest, RequestedOutput};
use crate::tensor::{DataType, Tensor, byte_size, push_bytes_element};

fn input(name: &str, datatype: DataType, shape: &[i64], data: Vec<u8>) -> InferInput {
    InferInput {
        name: name.to_owned(),
        tensor: Tensor { datatype, shape: shape.to_vec(), data: Bytes::from(data).into() },
    }
}

fn int32(name: &str, shape: &[i64]) -> InferInput {
    let size = byte_size(DataType::Int32, shape).unwrap_or(0);
    input(name, DataType::Int32, shape, vec![0; size as usize])
}

fn strings(name: &str, shape: &[i64], elements: &[&str]) -> InferInput {
    let mut data = Vec::new();
    for element in elements {
        assert!(push_bytes_element(&mut data, element.as_bytes()));
    }
    input(name, DataType::Bytes, shape, data)
}

fn request(inputs: Vec<InferInput>) -> InferRequest {
    InferRequest { inputs, ..InferRequest::default() }
}

/// Checks an error text. `expected` is without the prefix of errors of parsed requests; a leading
/// `!` means no prefix.
fn refused(config: &ModelConfig, mut request: InferRequest, expected: &str) {
    let error = config.check(&mut request).expect_err(expected);
    let expected = match expected.strip_prefix('!') {
        Some(bare) => bare.to_owned(),
        None => format!("[request id: <id_unknown>] {expected}"),
    };
    assert_eq!(error.message, expected);
    assert_eq!((error.code, error.reason), (ErrorCode::InvalidArg, Reason::Invalid));
}

const NOTE: &str = "NOTE: Setting a non-zero max_batch_size in the model config requires a batch \
                    dimension to be prepended to each input shape. If you want to specify the \
                    full shape including the batch dim in your input dims config, try setting \
                    max_batch_size to zero. See the model configuration docs for more info on \
                    max_batch_size.";

#[test]
fn a_valid_request_passes_and_its_inputs_are_sorted() {
    let simple = config("simple", SIMPLE);
    let mut good = request(vec![int32("INPUT1", &[3, 16]), int32("INPUT0", &[3, 16])]);
    let checked = simple.check(&mut good).unwrap();
    assert_eq!(checked.batch_size, 3);
    let names: Vec<&str> = good.inputs.iter().map(|input| &*input.name).collect();
    assert_eq!(names, ["INPUT0", "INPUT1"]);
    let identity = config("identity", IDENTITY);
    let mut good = request(vec![strings("INPUT0", &[2], &["a", ""])]);
    good.outputs =
        vec![RequestedOutput { name: "OUTPUT0".to_owned(), ..RequestedOutput::default() }];
    assert_eq!(identity.check(&mut good).unwrap().batch_size, 1);
    assert_eq!(
        identity.check(&mut request(vec![strings("INPUT0", &[0], &[])])).unwrap().batch_size,
        1
    );
}

/// Error texts of a real Triton for the same requests.
#[test]
#[allow(clippy::too_many_lines)] // a table
fn wrong_inputs_are_refused() {
    let simple = config("simple", SIMPLE);
    let a = || int32("INPUT0", &[1, 16]);
    let b = || int32("INPUT1", &[1, 16]);
    for (inputs, expected) in [
        (
            vec![a()],
            "expected 2 inputs but got 1 inputs for model 'simple'. Got input(s) ['INPUT0'], but \
             missing required input(s) ['INPUT1']. Please provide all required input(s).",
        ),
        (
            vec![],
            "expected 2 inputs but got 0 inputs for model 'simple'. Got input(s) [], but missing \
             required input(s) ['INPUT0','INPUT1']. Please provide all required input(s).",
        ),
        (
            vec![a(), b(), int32("FOO", &[1])],
            "expected 2 inputs but got 3 inputs for model 'simple'. Got input(s) \
             ['INPUT0','INPUT1','FOO'], but missing required input(s) []. Please provide all \
             required input(s).",
        ),
        (
            vec![a(), int32("FOO", &[1, 1])],
            "!unexpected inference input 'FOO' for model 'simple', allowed inputs are: INPUT0, \
             INPUT1",
        ),
        (vec![a(), a()], "input 'INPUT0' already exists in request"),
        (
            vec![int32("INPUT0", &[1, 8]), b()],
            &*format!(
                "unexpected shape for input 'INPUT0' for model 'simple'. Expected [-1,16], got \
                 [1,8]. {NOTE}"
            ),
        ),
        (
            vec![input("INPUT0", DataType::Int32, &[1, -1], vec![0; 64]), b()],
            "All input dimensions should be specified for input 'INPUT0' for model 'simple', got \
             [1,-1]",
        ),
        (
            vec![int32("INPUT0", &[8]), b()],
            "input 'INPUT0' batch size does not match other inputs for 'simple'",
        ),
        (
            vec![int32("INPUT0", &[]), b()],
            "input 'INPUT0' has no shape but model requires batch dimension for 'simple'",
        ),
        (
            vec![int32("INPUT0", &[0, 16]), int32("INPUT1", &[0, 16])],
            "input byte size mismatch for input 'INPUT1' for model 'simple'. Expected 64, got 0",
        ),
        (
            vec![int32("INPUT0", &[16, 1]), int32("INPUT1", &[16, 1])],
            "inference request batch-size must be <= 8 for 'simple': send fewer rows in a \
             request, or raise max_batch_size in the model's config.pbtxt",
        ),
        (
            vec![input("INPUT0", DataType::Int64, &[1, 16], vec![0; 128]), b()],
            "inference input 'INPUT0' data-type is 'INT64', but model 'simple' expects 'INT32'",
        ),
        (
            vec![input("INPUT0", DataType::Int32, &[1, 16], vec![0; 4]), b()],
            "input byte size mismatch for input 'INPUT0' for model 'simple'. Expected 64, got 4",
        ),
        (
            vec![int32("INPUT0", &[1, 2]), int32("INPUT1", &[1, 3])],
            &*format!(
                "unexpected shape for input 'INPUT1' for model 'simple'. Expected [-1,16], got \
                 [1,3]. {NOTE}"
            ),
        ),
        (
            vec![a(), input("INPUT1", DataType::Int32, &[-1, 16], vec![])],
            "All input dimensions should be specified for input 'INPUT1' for model 'simple', got \
             [-1,16]",
        ),
        (
            vec![
                input("INPUT0", DataType::Int32, &[0, 16], vec![0; 64]),
                input("INPUT1", DataType::Int32, &[0, 16], vec![0; 64]),
            ],
            "inference request batch-size must be 1 or more for 'simple', got 0",
        ),
    ] {
        refused(&simple, request(inputs), expected);
    }
    let mut with_id = request(vec![a(), a()]);
    with_id.id = "7".to_owned();
    assert_eq!(
        simple.check(&mut with_id).unwrap_err().message,
        "[request id: 7] input 'INPUT0' already exists in request"
    );
}

#[test]
fn wrong_outputs_are_refused_before_inputs() {
    let simple = config("simple", SIMPLE);
    for (names, expected) in [
        (&["X"][..], "!unexpected inference output 'X' for model 'simple'"),
        (&["OUTPUT0", "OUTPUT0"], "output 'OUTPUT0' already exists in request"),
    ] {
        let mut wrong = request(vec![]);
        wrong.outputs = names
            .iter()
            .map(|name| RequestedOutput { name: name.to_string(), ..RequestedOutput::default() })
            .collect();
        refused(&simple, wrong, expected);
    }
}

/// Error texts of a real Triton for the same requests.
#[test]
fn the_framing_of_strings_is_checked() {
    let identity = config("ident", IDENTITY);
    let indicator = "incomplete string length indicator for inference input 'INPUT0' for model \
                     'ident', expecting 4 bytes but only";
    let buffer = "bytes available. Please make sure the string length indicator is in one buffer.";
    for (shape, data, expected) in [
        (&[2][..], &b"\x01\0\0\0a\x01\0"[..], &*format!("{indicator} 2 {buffer}")),
        (
            &[2],
            b"\x01\0\0\0a",
            "expected 2 string elements for inference input 'INPUT0' for model 'ident', got 1",
        ),
        (
            &[1],
            b"\x01\0\0\0a\x01\0\0\0b",
            "unexpected number of string elements 2 for inference input 'INPUT0' for model \
             'ident', expecting 1",
        ),
        (
            &[1],
            b"\x05\0\0\0ab",
            "!incomplete string data for inference input 'INPUT0', expecting string of length 5 \
             but only 2 bytes available",
        ),
        (
            &[1],
            b"\xff\xff\xff\xffab",
            "!incomplete string data for inference input 'INPUT0', expecting string of length \
             4294967295 but only 2 bytes available",
        ),
        (&[1], b"\x01\0\0\0ab", &*format!("{indicator} 1 {buffer}")),
        (
            &[2, 2],
            b"",
            "unexpected shape for input 'INPUT0' for model 'ident'. Expected [-1], got [2,2]. ",
        ),
        (
            &[-3],
            b"",
            "All input dimensions should be specified for input 'INPUT0' for model 'ident', got \
             [-3]",
        ),
        (
            &[i64::MAX],
            b"",
            "expected 9223372036854775807 string elements for inference input 'INPUT0' for model \
             'ident', got 0",
        ),
    ] {
        refused(
            &identity,
            request(vec![input("INPUT0", DataType::Bytes, shape, data.to_vec())]),
            expected,
        );
    }
}

#[test]
fn sizes_do_not_overflow() {
    let wide = config("m", &SIMPLE.replace("[ 16 ]", "[ -1, -1 ]"));
    let huge = || vec![int32("INPUT0", &[2, i64::MAX, 2]), int32("INPUT1", &[2, 1, 1])];
    let expected = "shape [2,9223372036854775807,2] for input 'INPUT0' for model 'm' causes total \
                    element count to exceed maximum size of 9223372036854775807";
    refused(&wide, request(huge()), expected);
}

#[test]
fn errors_name_some_of_many_inputs() {
    let many = (0..10_000).map(|number| int32(&format!("X{number}"), &[1, 16])).collect();
    let error = config("simple", SIMPLE).check(&mut request(many)).unwrap_err();
    assert!(
        error.message.contains("but got 10000 inputs") && error.message.contains(",'X63',...]"),
        "{error}"
    );
    assert!(error.message.len() < 1000, "{error}");
}

#[test]
fn optional_inputs_may_be_omitted() {
    let source = SIMPLE.replace("{ name: \"INPUT", "{ optional: true name: \"INPUT");
    let optional = config("m", &source);
    let key = |inputs: Vec<InferInput>| optional.check(&mut request(inputs)).unwrap().shape_key;
    let a = || int32("INPUT0", &[1, 16]);
    let b = || int32("INPUT1", &[1, 16]);
    assert_eq!(key(vec![a()]), key(vec![a()]));
    assert_eq!(key(vec![a(), b()]), key(vec![b(), a()]));
    let keys = [key(vec![]), key(vec![a()]), key(vec![b()]), key(vec![a(), b()])];
    for (i, one) in keys.iter().enumerate() {
        assert!(!keys[..i].contains(one), "different sets of inputs do not share a batch");
    }
    let optional =
        config("m", &SIMPLE.replace("{ name: \"INPUT1\"", "{ optional: true name: \"INPUT1\""));
    let rest = "for model 'm'. Got input(s) ['INPUT1'], but missing required input(s) ['INPUT0']. \
                Please provide all required input(s).";
    let expected = format!("expected number of inputs between 1 and 2 but got 1 inputs {rest}");
    refused(&optional, request(vec![int32("INPUT1", &[1, 16])]), &expected);
}

#[test]
fn shape_keys_are_equal_for_requests_that_may_share_a_batch() {
    let key = |config: &ModelConfig, a: &[i64], b: &[i64]| {
        config.check(&mut request(vec![int32("INPUT0", a), int32("INPUT1", b)])).unwrap().shape_key
    };
    let simple = config("m", SIMPLE);
    assert_eq!(key(&simple, &[1, 16], &[1, 16]), key(&simple, &[8, 16], &[8, 16]));
    let variable = config("m", &SIMPLE.replace("dims: [ 16 ]", "dims: [ -1, -1 ]"));
    assert_eq!(key(&variable, &[1, 2, 3], &[1, 4, 5]), key(&variable, &[2, 2, 3], &[2, 4, 5]));
    assert_ne!(key(&variable, &[1, 2, 3], &[1, 4, 5]), key(&variable, &[1, 3, 2], &[1, 4, 5]));
    assert_ne!(key(&variable, &[1, 2, 3], &[1, 4, 5]), key(&variable, &[1, 2, 3], &[1, 4, 6]));
    let ragged = config(
        "m",
        &SIMPLE
            .replace("dims: [ 16 ] }", "dims: [ -1 ] allow_ragged_batch: true }")
            .replacen(
                "OUTPUT0\" data_type: TYPE_INT32 dims: [ -1 ] allow_ragged_batch: true",
                "OUTPUT0\" data_type: TYPE_INT32 dims: [ -1 ]",
                1,
            )
            .replacen(
                "OUTPUT1\" data_type: TYPE_INT32 dims: [ -1 ] allow_ragged_batch: true",
                "OUTPUT1\" data_type: TYPE_INT32 dims: [ -1 ]",
                1,
            ),
    );
    assert_eq!(key(&ragged, &[1, 2], &[1, 4]), key(&ragged, &[1, 3], &[1, 5]));
}

#[test]
#[allow(clippy::too_many_lines)] // a table
fn raw_bodies_become_the_one_input() {
    let model = |max: u32, datatype: &str, dims: &str| {
        let io = format!("data_type: {datatype} dims: {dims}");
        config(
            "m",
            &format!(
                "backend: 'builtin' max_batch_size: {max} input {{ name: 'I' {io} }} output {{ \
                 name: 'O' {io} }}"
            ),
        )
    };
    let raw = |body: &'static [u8]| InferRequest {
        raw_body: Some(Bytes::from_static(body).into()),
        ..InferRequest::default()
    };
    for (config, body, shape, data) in [
        (model(0, "TYPE_INT16", "[3]"), &b"aabbcc"[..], &[3][..], &b"aabbcc"[..]),
        (model(2, "TYPE_INT16", "[3]"), b"aabbcc", &[1, 3], b"aabbcc"),
        (model(2, "TYPE_INT16", "[2,-1]"), b"aabbccdd", &[1, 2, 2], b"aabbccdd"),
        (model(0, "TYPE_STRING", "[1]"), b"abc", &[1], b"\x03\0\0\0abc"),
        (model(8, "TYPE_STRING", "[1]"), b"", &[1, 1], b"\0\0\0\0"),
    ] {
        let mut request = raw(body);
        config.check(&mut request).unwrap();
        assert_eq!(request.raw_body, None);
        assert_eq!((&*request.inputs[0].name, &*request.inputs[0].tensor.shape), ("I", shape));
        assert_eq!(*request.inputs[0].tensor.data.as_slice(), *data);
    }
    for (config, body, expected) in [
        (
            config("simple", SIMPLE),
            &b"abcd"[..],
            "Raw request must only have 1 input (found 1) to be deduced but got 2 inputs in \
             'simple' model configuration",
        ),
        (
            config("ident", IDENTITY),
            b"abcd",
            "For BYTE datatype raw input 'INPUT0', the model must have input shape [1]",
        ),
        (
            model(0, "TYPE_INT32", "[-1,-1]"),
            b"abcd",
            "The shape of the raw input 'I' can not be deduced because there are more than one \
             variable-sized dimension",
        ),
        (
            model(2, "TYPE_FP32", "[-1]"),
            b"abcdabc",
            "input byte size mismatch for input 'I' for model 'm'. Expected 4, got 7",
        ),
        (
            model(0, "TYPE_INT32", "[16]"),
            b"abc",
            "input byte size mismatch for input 'I' for model 'm'. Expected 64, got 3",
        ),
    ] {
        refused(&config, raw(body), expected);
    }
}

#[test]
fn the_clients_order_of_inputs_is_kept() {
    let source = "backend: 'b' input [ { name: 'A' data_type: TYPE_INT8 dims: [1] }, { name: 'B' \
                  data_type: TYPE_INT8 dims: [1] optional: true }, { name: 'Z' data_type: \
                  TYPE_INT8 dims: [1] } ] output { name: 'O' data_type: TYPE_INT8 dims: [1] }";
    let model = config("m", source);
    for (given, expected) in
        [("ABZ", &[][..]), ("AZ", &[]), ("ZAB", &[2, 0, 1]), ("ZA", &[2, 0]), ("BAZ", &[1, 0, 2])]
    {
        let inputs = given
            .chars()
            .map(|name| input(&name.to_string(), DataType::Int8, &[1], vec![0]))
            .collect();
        let mut request = request(inputs);
        model.check(&mut request).unwrap();
        assert_eq!(request.input_order, expected, "{given}");
        assert!(request.inputs.is_sorted_by(|one, other| one.name < other.name), "{given}");
        // Another check finds them sorted.
        model.check(&mut request).unwrap();
        assert_eq!(request.input_order, expected, "{given}");
    }
}

proptest! {
    /// An accepted request is consistent: sizes match shapes, and inputs are in the order of the
    /// configuration.
    #[test]
    fn accepted_requests_are_consistent(
        shapes in prop::collection::vec(prop::collection::vec(-2i64..20, 0..4), 0..4),
        sizes in prop::collection::vec(0usize..400, 4),
        names in prop::collection::vec(prop::sample::select(vec!["INPUT0", "INPUT1", "X"]), 4),
    ) {
        let model = config("m", &SIMPLE.replace("[ 16 ]", "[ -1 ]"));
        let inputs = shapes.iter().zip(&sizes).zip(&names);
        let mut request = request(inputs.map(|((shape, &size), name)| input(name, DataType::Int32, shape, vec![0; size])).collect());
        if let Ok(checked) = model.check(&mut request) {
            prop_assert!((1..=8).contains(&checked.batch_size));
            prop_assert_eq!(request.inputs.len(), 2);
            for (input, spec) in request.inputs.iter().zip(&model.inputs) {
                prop_assert_eq!(&input.name, &spec.name);
                prop_assert_eq!(input.tensor.shape[0] as u64, checked.batch_size);
                prop_assert_eq!(byte_size(DataType::Int32, &input.tensor.shape), Some(input.tensor.data.len() as u64));
            }
        }
    }
}
