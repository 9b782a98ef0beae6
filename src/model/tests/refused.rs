//! Configurations that a load refuses with Triton's texts, in Triton's order; and backends in model
//! names.

use super::{Completion, Draft, complete};

const TENSORS: &str = "max_batch_size: 4 input { name: 'a' data_type: TYPE_FP32 dims: 1 } output \
                       { name: 'b' data_type: TYPE_FP32 dims: 1 } output { name: 'c' data_type: \
                       TYPE_FP32 dims: 1 }";

#[test]
fn the_backend_may_be_in_the_model_name() {
    let backend = |directory: &str, files: &[&str]| {
        let files: Vec<String> = files.iter().map(|&file| file.to_owned()).collect();
        let completion = Completion { directory, files: &files, ..Completion::default() };
        Draft::empty()
            .resolve(&completion)
            .map(|draft| draft.backend().to_owned())
            .map_err(|error| error.to_string())
    };
    for (directory, files, expected) in [
        ("m.builtin", &[][..], "builtin"),
        ("m.my.backend", &["weights"], "my.backend"),
        ("m.builtin", &["model.py"], "python"),
    ] {
        assert_eq!(backend(directory, files).as_deref(), Ok(expected), "{directory} {files:?}");
    }
    for directory in ["m", "m."] {
        assert!(
            backend(directory, &[]).unwrap_err().contains("the form NAME.BACKEND"),
            "{directory}"
        );
    }
}

#[test]
fn the_name_of_the_directory_is_compared_last() {
    let named = format!("name: 'other' backend: 'builtin' {TENSORS}");
    for (more, expected) in [
        (
            "",
            "unexpected directory name 'm' for model 'other', directory name must equal model name",
        ),
        ("instance_group { kind: KIND_CPU gpus: 0 }", "instance group other_0"),
        (
            "platform: 'ensemble'",
            "Ensemble model 'other' must have platform type 'ensemble' and empty backend type",
        ),
        ("batch_output { target_name: 'x' }", "unknown target output name 'x' for other"),
    ] {
        let error = complete("m", &format!("{named} {more}")).unwrap_err();
        assert!(error.contains(expected), "{more}: {error}");
    }
    let negative = named.replace("max_batch_size: 4", "max_batch_size: -1");
    let expected = "'max_batch_size' must be non-negative value for other: -1 is given";
    assert_eq!(complete("m", &negative).unwrap_err(), expected);
}

#[test]
fn duplicate_targets_of_a_batch_output_are_refused() {
    let scattered =
        |targets: &str| format!("batch_output {{ source_input: 'a' target_name: {targets} }}");
    let with = |more: String| complete("m", &format!("backend: 'builtin' {TENSORS} {more}"));
    assert_eq!(
        with(scattered("['b', 'c', 'b']")).unwrap_err(),
        "target output name 'b' can only be specified once for m"
    );
    // As in Triton.
    assert!(with(scattered("['b', 'c']") + &scattered("'b'")).is_ok());
}

#[test]
fn histogram_options_without_buckets_are_refused() {
    let with = |options: &str| {
        let control = format!("metric_control {{ metric_identifier {{ family: 'f' }} {options} }}");
        complete("m", &format!("backend: 'builtin' {TENSORS} model_metrics {{ {control} }}"))
    };
    assert!(with("histogram_options { buckets: [1, 2] }").is_ok());
    for (options, expected) in [
        ("", "model_metrics: the control of family 'f' needs 'histogram_options'"),
        (
            "histogram_options { }",
            "model_metrics: the 'histogram_options' of family 'f' need 'buckets'",
        ),
    ] {
        assert_eq!(with(options).unwrap_err(), expected);
    }
}
