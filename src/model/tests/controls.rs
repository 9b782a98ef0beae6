//! Control inputs of sequences: error texts, which were taken from a real Triton 2.51, and the
//! bytes of each kind and type.

use super::complete;
use crate::infer::CorrelationId;
use crate::model::controls::ControlValues;

const TENSORS: &str = "backend: 'builtin' max_batch_size: 4 input { name: 'X' data_type: \
                       TYPE_INT32 dims: 1 }
    output { name: 'Y' data_type: TYPE_INT32 dims: 1 } ";

fn with(batching: &str) -> String {
    format!("{TENSORS} sequence_batching {{ {batching} }}")
}

fn control(name: &str, kind: &str, what: &str) -> String {
    format!("control_input {{ name: '{name}' control {{ kind: CONTROL_SEQUENCE_{kind} {what} }} }}")
}

const TYPES: &str = "unexpected data type for control CONTROL_SEQUENCE_CORRID for m. Allowed data \
                     types are TYPE_UINT64, TYPE_INT64, TYPE_UINT32, TYPE_INT32 and TYPE_STRING";
const MULTIPLE: &str =
    "sequence batching control tensor 'A' is specified for multiple control kinds for m";
const CHOICES: &str = "'int32_false_true', 'fp32_false_true'";
const INTS: &str = "int32_false_true: [ 0, 1 ]";

#[track_caller]
fn refused(batching: &str, expected: &str) {
    let error = complete("m", &with(batching)).unwrap_err();
    assert!(error.contains(expected), "{batching}\n{error}");
}

#[test]
fn invalid_controls_are_refused_as_triton_does() {
    let start = |what: &str| control("A", "START", what);
    let of_start =
        |text: &str| format!("sequence batching {text} for CONTROL_SEQUENCE_START for m");
    refused(&control("", "START", INTS), "sequence batching control tensor must have a name for m");
    refused(&(start(INTS) + &control("A", "END", INTS)), MULTIPLE);
    let twice = "sequence batching specifies multiple CONTROL_SEQUENCE_START tensors for m";
    refused(&(start(INTS) + &control("B", "START", INTS)), twice);
    refused(&start(""), &of_start(&format!("must specify either {CHOICES} or 'bool_false_true'")));
    let both = format!("{INTS} fp32_false_true: [ 0, 1 ]");
    refused(
        &start(&both),
        &of_start(&format!("specifies more than one from {CHOICES} and 'bool_false_true'")),
    );
    for (choice, values) in [("int32", "0, 1, 2"), ("fp32", "1"), ("bool", "true")] {
        let exactly =
            of_start(&format!("control '{choice}_false_true' must have exactly 2 entries"));
        refused(&start(&format!("{choice}_false_true: [ {values} ]")), &exactly);
    }
    let must_not =
        format!("sequence batching must not specify either {CHOICES} or 'bool_false_true'");
    refused(
        &control("A", "CORRID", INTS),
        &format!("{must_not} for CONTROL_SEQUENCE_CORRID for m"),
    );
    for datatype in ["", "data_type: TYPE_FP32", "data_type: TYPE_INT8"] {
        refused(&control("A", "CORRID", datatype), TYPES);
    }
    let none = "it is TYPE_INVALID";
    let fp32 = "it is TYPE_FP32";
    for (datatype, is) in [("", none), ("data_type: TYPE_FP32", fp32)] {
        refused(&control("A", "CORRID", datatype), &format!("{TYPES}: {is}"));
    }
    let silent = complete("m", &with("control_input { name: 'A' }")).unwrap();
    assert_eq!(
        silent.warnings,
        ["the control input 'A' has no 'control': the model is not given this input"]
    );
}

/// Triton loads these two, and the model receives only one of the two tensors with this name.
#[test]
fn tensors_of_the_same_name_are_refused() {
    let input = "sequence batching control tensor 'X' is also an input of the model for m";
    refused(&control("X", "START", INTS), input);
    let two = format!(
        "{{ kind: CONTROL_SEQUENCE_START {INTS} }}, {{ kind: CONTROL_SEQUENCE_END {INTS} }}"
    );
    refused(&format!("control_input {{ name: 'A' control [ {two} ] }}"), MULTIPLE);
}

#[test]
fn settings_out_of_range_are_refused_as_triton_does() {
    for utilization in ["1.5", "-0.5"] {
        let range = "sequence batching minimum slot utilization must be in range (0.0, 1.0] for m";
        let range = format!("{range}: it is {utilization}");
        refused(&format!("direct {{ minimum_slot_utilization: {utilization} }}"), &range);
    }
    let preferred = |size: u32| format!("oldest {{ preferred_batch_size: [ {size} ] }}");
    refused(
        &preferred(0),
        "sequence batching preferred batch size must be positive for m: 0 is given",
    );
    let most = "sequence batching preferred batch size must be <= max batch size for m: 9 is \
                given, the maximum is 4";
    refused(&preferred(9), most);
    let candidates =
        "sequence batching max_candidate_sequences must be 0 or greater for m: it is -3";
    refused("oldest { max_candidate_sequences: -3 }", candidates);
}

#[track_caller]
fn check(text: &str, id: &CorrelationId, expected: &[&[u8]]) {
    let config = complete("m", &with(text)).unwrap();
    let first = Some(ControlValues { start: true, end: false, id });
    let last = Some(ControlValues { start: false, end: true, id });
    let bytes = config.controls()[0].make([first, None, last].into_iter());
    assert_eq!(bytes, expected.concat(), "{text}");
}

#[test]
fn each_slot_has_its_element() {
    let id = CorrelationId::Uint(0x1_2345_6789);
    check(
        &control("A", "START", "int32_false_true: [ 7, -1 ]"),
        &id,
        &[&[255; 4], &[7, 0, 0, 0], &[7, 0, 0, 0]],
    );
    check(&control("A", "END", "bool_false_true: [ false, true ]"), &id, &[&[0], &[0], &[1]]);
    let no = 0.5f32.to_le_bytes();
    let yes = 2f32.to_le_bytes();
    check(&control("A", "READY", "fp32_false_true: [ 0.5, 2 ]"), &id, &[&yes, &no, &yes]);
    let long = 0x1_2345_6789u64.to_le_bytes();
    let short = 0x2345_6789u32.to_le_bytes();
    for datatype in ["UINT64", "INT64"] {
        check(
            &control("A", "CORRID", &format!("data_type: TYPE_{datatype}")),
            &id,
            &[&long, &[0; 8], &long],
        );
    }
    for datatype in ["UINT32", "INT32"] {
        check(
            &control("A", "CORRID", &format!("data_type: TYPE_{datatype}")),
            &id,
            &[&short, &[0; 4], &short],
        );
    }
    let text = CorrelationId::String("né".into());
    let element = [3, 0, 0, 0, b'n', 0xc3, 0xa9];
    check(&control("A", "CORRID", "data_type: TYPE_STRING"), &text, &[&element, &[0; 4], &element]);
}
