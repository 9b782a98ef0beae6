//! Control inputs of sequences: what is refused, in the words of a real Triton 2.51, and the bytes of each kind and type.

use super::complete;
use crate::infer::CorrelationId;
use crate::model::controls::ControlValues;

const TENSORS: &str = "backend: 'builtin' max_batch_size: 4 input { name: 'X' data_type: TYPE_INT32 dims: 1 }
    output { name: 'Y' data_type: TYPE_INT32 dims: 1 } ";

fn with(batching: &str) -> String {
    format!("{TENSORS} sequence_batching {{ {batching} }}")
}

fn control(name: &str, kind: &str, what: &str) -> String {
    format!("control_input {{ name: '{name}' control {{ kind: CONTROL_SEQUENCE_{kind} {what} }} }}")
}

#[test]
fn what_cannot_be_is_refused_as_triton_does() {
    let ints = "int32_false_true: [ 0, 1 ]";
    let start = |what| control("A", "START", what);
    let corrid = |what| control("A", "CORRID", what);
    let all = "'int32_false_true', 'fp32_false_true'";
    let types = "Allowed data types are TYPE_UINT64, TYPE_INT64, TYPE_UINT32, TYPE_INT32 and TYPE_STRING";
    let wrong_type = format!("unexpected data type for control CONTROL_SEQUENCE_CORRID for m. {types}");
    let exactly = |choice| {
        format!("sequence batching control '{choice}' must have exactly 2 entries for CONTROL_SEQUENCE_START for m")
    };
    let rows = [
        (control("", "START", ints), "sequence batching control tensor must have a name for m".to_owned()),
        (
            start(ints) + &control("A", "END", ints),
            "sequence batching control tensor 'A' is specified for multiple control kinds for m".to_owned(),
        ),
        (
            start(ints) + &control("B", "START", ints),
            "sequence batching specifies multiple CONTROL_SEQUENCE_START tensors for m".to_owned(),
        ),
        (
            start(""),
            format!(
                "sequence batching must specify either {all} or 'bool_false_true' for CONTROL_SEQUENCE_START for m"
            ),
        ),
        (
            start("int32_false_true: [ 0, 1 ] fp32_false_true: [ 0, 1 ]"),
            format!(
                "sequence batching specifies more than one from {all} and 'bool_false_true' for CONTROL_SEQUENCE_START for m"
            ),
        ),
        (start("int32_false_true: [ 0, 1, 2 ]"), exactly("int32_false_true")),
        (start("fp32_false_true: [ 1 ]"), exactly("fp32_false_true")),
        (start("bool_false_true: [ true ]"), exactly("bool_false_true")),
        (
            corrid(ints),
            format!(
                "sequence batching must not specify either {all} or 'bool_false_true' for CONTROL_SEQUENCE_CORRID for m"
            ),
        ),
        (corrid(""), wrong_type.clone()),
        (corrid("data_type: TYPE_FP32"), wrong_type.clone()),
        (corrid("data_type: TYPE_INT8"), wrong_type),
        (
            "direct { minimum_slot_utilization: 1.5 }".to_owned(),
            "sequence batching minimum slot utilization must be in range (0.0, 1.0] for m".to_owned(),
        ),
        (
            "oldest { preferred_batch_size: [ 0 ] }".to_owned(),
            "sequence batching preferred batch size must be positive for m".to_owned(),
        ),
        (
            "oldest { preferred_batch_size: [ 9 ] }".to_owned(),
            "sequence batching preferred batch size must be <= max batch size for m".to_owned(),
        ),
        // Triton loads these two, and the model sees one of the two tensors of the name.
        (
            control("X", "START", ints),
            "sequence batching control tensor 'X' is also an input of the model for m".to_owned(),
        ),
        (
            format!(
                "control_input {{ name: 'A' control [ {{ kind: CONTROL_SEQUENCE_START {ints} }}, {{ kind: CONTROL_SEQUENCE_END {ints} }} ] }}"
            ),
            "sequence batching control tensor 'A' is specified for multiple control kinds for m".to_owned(),
        ),
    ];
    for (batching, expected) in rows {
        let refused = complete("m", &with(&batching)).unwrap_err();
        assert!(refused.contains(&expected), "{batching}\n{refused}");
    }
    assert!(complete("m", &with("control_input { name: 'A' }")).is_ok());
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
fn each_place_has_its_element() {
    let id = CorrelationId::Uint(0x1_2345_6789);
    check(&control("A", "START", "int32_false_true: [ 7, -1 ]"), &id, &[&[255; 4], &[7, 0, 0, 0], &[7, 0, 0, 0]]);
    check(&control("A", "END", "bool_false_true: [ false, true ]"), &id, &[&[0], &[0], &[1]]);
    let (no, yes) = (0.5f32.to_le_bytes(), 2f32.to_le_bytes());
    check(&control("A", "READY", "fp32_false_true: [ 0.5, 2 ]"), &id, &[&yes, &no, &yes]);
    let (long, short) = (0x1_2345_6789u64.to_le_bytes(), 0x2345_6789u32.to_le_bytes());
    for datatype in ["UINT64", "INT64"] {
        check(&control("A", "CORRID", &format!("data_type: TYPE_{datatype}")), &id, &[&long, &[0; 8], &long]);
    }
    for datatype in ["UINT32", "INT32"] {
        check(&control("A", "CORRID", &format!("data_type: TYPE_{datatype}")), &id, &[&short, &[0; 4], &short]);
    }
    let (text, element) = (CorrelationId::String("né".into()), [3, 0, 0, 0, b'n', 0xc3, 0xa9]);
    check(&control("A", "CORRID", "data_type: TYPE_STRING"), &text, &[&element, &[0; 4], &element]);
}
