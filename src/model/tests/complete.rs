//! Converting drafts to configurations: defaults, auto-complete, refusals, and golden JSON.

use super::super::*;
use super::{IDENTITY, SIMPLE, complete, config};
use crate::tensor::DataType;

fn tensor(name: &str, datatype: DataType, dims: &[i64]) -> SignatureTensor {
    SignatureTensor {
        name: name.to_owned(),
        datatype,
        dims: Some(dims.to_vec()),
        first_dim_name: None,
    }
}

/// A classifier of 8 x 8 images with a batch dimension.
fn digits() -> ModelSignature {
    ModelSignature {
        inputs: vec![tensor("image", DataType::Fp32, &[-1, 64])],
        outputs: vec![
            tensor("label", DataType::Int64, &[-1]),
            tensor("scores", DataType::Fp32, &[-1, 10]),
        ],
        omitted_outputs: Vec::new(),
    }
}

fn with_signature(source: &str, signature: &ModelSignature) -> Result<ModelConfig, String> {
    let files = ["model.onnx".to_owned()];
    let completion = Completion {
        directory: "digits",
        files: &files,
        backends: &["onnxruntime", "tract", "builtin"],
        gpus: &[],
        unusable_gpus: &[],
        no_cuda_provider: None,
        compiled: false,
        signature: Some(signature),
        gguf: None,
        text: None,
        auto_complete: true,
        default_max_batch_size: 4,
    };
    let draft = Draft::from_text(source, "config.pbtxt").map_err(|error| error.to_string())?;
    draft.complete(&completion).map_err(|error| error.to_string())
}

/// The answers of a real Triton 2.51 for these configurations, byte for byte.
#[test]
fn json_equals_tritons() {
    let simple = SIMPLE.replace("builtin", "python") + "instance_group [ { kind: KIND_CPU } ]";
    let full = r#"
backend: "python"
max_batch_size: 8
input [ { name: "INPUT0" data_type: TYPE_INT32 dims: [ -1, 16 ] }, { name: "INPUT1" data_type: TYPE_INT32 dims: [ 1 ] reshape { shape: [] } } ]
output [ { name: "OUTPUT0" data_type: TYPE_INT32 dims: [ -1, 16 ] } ]
dynamic_batching { max_queue_delay_microseconds: 100 priority_levels: 2 default_priority_level: 1 default_queue_policy { default_timeout_microseconds: 100 } priority_queue_policy { key: 1 value { max_queue_size: 3 } } }
instance_group [ { kind: KIND_CPU count: 2 } ]
parameters { key: "b" value: { string_value: "2" } }
parameters { key: "a" value: { string_value: "1" } }
metric_tags { key: "k" value: "v" }
version_policy { specific { versions: [1] } }
model_warmup [ { name: "w" batch_size: 1 inputs { key: "INPUT0" value { data_type: TYPE_INT32 dims: [1,16] zero_data: true } } inputs { key: "INPUT1" value { data_type: TYPE_INT32 dims: [1] zero_data: true } } } ]
"#;
    let sequence = r#"
backend: "python"
max_batch_size: 2
input [ { name: "INPUT0" data_type: TYPE_FP32 dims: [ -1 ] optional: true allow_ragged_batch: true} ]
output [ { name: "OUTPUT0" data_type: TYPE_FP32 dims: [ -1 ] } ]
instance_group [ { kind: KIND_CPU }, {kind: KIND_CPU count: 2} ]
sequence_batching { oldest { max_candidate_sequences: 4 } control_input [ { name: "START" control [ { kind: CONTROL_SEQUENCE_START fp32_false_true: [0,1] } ] } ] }
"#;
    for (name, source, golden) in [
        ("simple", &*simple, include_str!("../golden/simple.json")),
        ("full", full, include_str!("../golden/full.json")),
        ("seq", sequence, include_str!("../golden/sequence.json")),
    ] {
        let config = config(name, source);
        assert_eq!(config.to_json(), golden.trim(), "{name}");
        let again = ModelConfig::decode(&config.encode()).unwrap();
        assert_eq!(again.to_json(), config.to_json(), "{name}");
    }
}

#[test]
fn metadata_shapes_start_with_the_batch() {
    let metadata = config("simple", SIMPLE).metadata(&[1, 3]);
    assert_eq!((&*metadata.name, &*metadata.platform), ("simple", "builtin"));
    assert_eq!(metadata.versions, ["1", "3"]);
    let input =
        TensorMetadata { name: "INPUT1".to_owned(), datatype: "INT32", shape: vec![-1, 16] };
    assert_eq!(metadata.inputs[1], input);
    let metadata = config("identity", IDENTITY).metadata(&[]);
    assert_eq!(
        metadata.outputs[0],
        TensorMetadata { name: "OUTPUT0".to_owned(), datatype: "BYTES", shape: vec![-1] }
    );
}

#[test]
fn defaults_are_filled_in() {
    let simple = config("simple", SIMPLE);
    let Scheduling::Dynamic(dynamic) = &simple.scheduling else {
        panic!("{:?}", simple.scheduling)
    };
    assert_eq!(dynamic.preferred_batch_sizes, [8]);
    assert_eq!(simple.version_policy, VersionPolicy::Latest(1));
    let [group] = &simple.instance_groups[..] else { panic!("{:?}", simple.instance_groups) };
    assert_eq!((&*group.name, group.kind, group.count), ("simple", InstanceKind::Cpu, 1));
    let two = config(
        "m",
        &format!("{IDENTITY} instance_group [ {{ count: 3 }}, {{ name: 'other' count: -1 }} ]"),
    );
    let groups: Vec<_> =
        two.instance_groups.iter().map(|group| (&*group.name, group.count)).collect();
    assert_eq!(groups, [("m_0", 3), ("other", 1)]);
    let differ = |more: &str| {
        let plain = config("m", IDENTITY);
        let changed = config("m", &format!("{IDENTITY} {more}"));
        let parts = plain.encode_parts().into_iter().zip(changed.encode_parts());
        parts.map(|(plain, changed)| plain != changed).collect::<Vec<_>>()
    };
    assert_eq!(differ(""), [false, false, false]);
    assert_eq!(differ("instance_group { count: 3 }"), [true, false, false]);
    assert_eq!(differ("version_policy { all {} }"), [false, true, false]);
    assert_eq!(differ("max_batch_size: 2"), [false, false, true]);
}

#[test]
fn an_onnx_model_without_configuration_is_completed() {
    let config = with_signature("", &digits()).unwrap();
    assert_eq!((&*config.backend, &*config.platform), ("onnxruntime", "onnxruntime_onnx"));
    assert_eq!((config.max_batch_size, &*config.default_model_filename), (4, "model.onnx"));
    assert!(
        matches!(&config.scheduling, Scheduling::Dynamic(dynamic) if dynamic.preferred_batch_sizes == [4])
    );
    let metadata = config.metadata(&[1]);
    assert_eq!(
        metadata.inputs[0],
        TensorMetadata { name: "image".to_owned(), datatype: "FP32", shape: vec![-1, 64] }
    );
    // One label for each item: the protocol's shape is [-1,1], the model's tensor has no second
    // dimension.
    assert_eq!(metadata.outputs[0].shape, [-1, 1]);
    assert_eq!(config.outputs[0].protocol_shape(&[3], true)[..], [3, 1]);
    assert_eq!(config.outputs[1].protocol_shape(&[3, 10], true)[..], [3, 10]);
}

#[test]
fn missing_fields_are_filled_in() {
    let io = |config: &ModelConfig| {
        let dims: Vec<_> =
            config.inputs.iter().chain(&config.outputs).map(|tensor| tensor.dims.clone()).collect();
        (config.max_batch_size, dims)
    };
    let batched = (4, vec![vec![64], vec![1], vec![10]]);
    let whole = (0, vec![vec![-1, 64], vec![-1], vec![-1, 10]]);
    for (source, expected) in [
        ("input { name: 'image' data_type: TYPE_FP32 dims: [64] }", &batched),
        ("input { name: 'image' }", &batched),
        ("input { name: 'image' dims: [-1, 64] }", &whole),
        ("max_batch_size: 16", &(16, batched.1.clone())),
        ("platform: 'onnxruntime_onnx' output { name: 'scores' }", &(4, vec![vec![64], vec![10]])),
    ] {
        assert_eq!(&io(&with_signature(source, &digits()).unwrap()), expected, "{source}");
    }
    let mut fixed = digits();
    fixed.outputs[1].dims = Some(vec![1, 10]);
    let config = with_signature("", &fixed).unwrap();
    assert_eq!(io(&config), (0, vec![vec![-1, 64], vec![-1], vec![1, 10]]));
    assert_eq!(config.scheduling, Scheduling::Default);
    assert_eq!(
        with_signature("max_batch_size: 16", &digits()).unwrap().scheduling,
        Scheduling::Default
    );
}

/// Their sizes may differ. Triton fills in a maximum batch size here.
#[test]
fn first_dimensions_of_different_names_are_no_batch() {
    let named = |image: Option<&str>, label: Option<&str>, scores: Option<&str>| {
        let mut signature = digits();
        signature.inputs[0].first_dim_name = image.map(str::to_owned);
        signature.outputs[0].first_dim_name = label.map(str::to_owned);
        signature.outputs[1].first_dim_name = scores.map(str::to_owned);
        signature
    };
    for signature in [
        named(None, None, None),
        named(Some("N"), Some("N"), Some("N")),
        named(Some("N"), None, Some("N")),
        named(Some("N"), None, None),
    ] {
        let config = with_signature("", &signature).unwrap();
        assert_eq!((config.max_batch_size, config.warnings.len()), (4, 0), "{signature:?}");
    }
    for (signature, other) in [
        (named(Some("N"), Some("M"), Some("N")), "label"),
        (named(Some("N"), None, Some("M")), "scores"),
    ] {
        let config = with_signature("dynamic_batching { }", &signature).unwrap();
        assert_eq!(
            (config.max_batch_size, config.metadata(&[]).outputs[1].shape.clone()),
            (0, vec![-1, 10])
        );
        let expected = format!(
            "requests are not batched: the first dimension of 'image' is named 'N' and that of \
             '{other}' 'M', so that their sizes may differ; if both are the batch, set \
             'max_batch_size'"
        );
        assert_eq!(config.warnings, [expected]);
        let config = with_signature("max_batch_size: 8", &signature).unwrap();
        assert_eq!(
            (config.max_batch_size, config.warnings.len()),
            (8, 0),
            "an explicit size holds"
        );
    }
}

#[test]
fn a_contradicted_configuration_is_refused() {
    let mut fixed = digits();
    fixed.inputs[0].dims = Some(vec![1, 64]);
    for (source, signature, expected) in [
        (
            "input { name: 'image' data_type: TYPE_INT32 dims: [64] }",
            &digits(),
            "unable to load model 'digits', configuration expects datatype TYPE_INT32 for input \
             'image', model provides TYPE_FP32",
        ),
        (
            "max_batch_size: 2 input { name: 'image' dims: [63] }",
            &digits(),
            "model 'digits', tensor 'image': the model expects 2 dimensions (shape [-1,64]) but \
             the model configuration specifies 2 dimensions (an initial batch dimension because \
             max_batch_size > 0 followed by the explicit tensor shape, making complete shape \
             [-1,63])",
        ),
        (
            "input { name: 'image' dims: [1,1,64] }",
            &digits(),
            "model 'digits', tensor 'image': the model expects 2 dimensions (shape [-1,64]) but \
             the model configuration specifies 3 dimensions (shape [1,1,64])",
        ),
        (
            "output { name: 'score' }",
            &digits(),
            "unexpected inference output 'score' for model 'digits', allowed outputs are: label, \
             scores",
        ),
        (
            "max_batch_size: 2",
            &fixed,
            "autofill failed for model 'digits': model does not support batching while non-zero \
             max_batch_size is specified: tensor 'image' has shape [1,64], its first dimension is \
             not variable",
        ),
    ] {
        assert_eq!(with_signature(source, signature).unwrap_err(), expected, "{source}");
    }
    let mut two = digits();
    two.inputs.push(tensor("mask", DataType::Fp32, &[-1, 1]));
    let expected = "unable to load model 'digits', configuration expects 1 inputs, model provides \
                    2: input 'mask' is not configured";
    assert_eq!(with_signature("input { name: 'image' }", &two).unwrap_err(), expected);
}

#[test]
fn backends_and_platforms_are_matched() {
    let check = |source: &str, files: &[&str], backends: &[&str]| {
        let files: Vec<String> = files.iter().map(|&file| file.to_owned()).collect();
        let completion =
            Completion { directory: "m", files: &files, backends, ..Completion::default() };
        let source = format!("{source} {}", IDENTITY.replace("backend: \"builtin\"", ""));
        let config = Draft::from_text(&source, "f").unwrap().complete(&completion);
        config.map(|config| {
            format!("{}|{}|{}", config.backend, config.platform, config.default_model_filename)
        })
    };
    for (source, files, backends, expected) in [
        ("backend: 'onnxruntime'", &[][..], &[][..], "onnxruntime|onnxruntime_onnx|model.onnx"),
        ("platform: 'onnxruntime_onnx'", &[], &[], "onnxruntime|onnxruntime_onnx|model.onnx"),
        ("platform: 'pytorch_libtorch'", &[], &[], "pytorch|pytorch_libtorch|model.pt"),
        ("", &["model.py"], &[], "python||model.py"),
        ("", &["model.json", "model.py", "model.pkl"], &[], "python||model.py"),
        ("", &["model.pt2"], &[], "pytorch|pytorch_libtorch|model.pt2"),
        (
            "platform: 'pytorch_libtorch'",
            &["model.pt2", "model.py"],
            &[],
            "pytorch|pytorch_libtorch|model.pt2",
        ),
        ("", &["model.pkl"], &[], "sklearn||model.pkl"),
        ("backend: 'sklearn'", &["model.pkl", "model.joblib"], &[], "sklearn||model.joblib"),
        ("", &["model.ubj"], &[], "xgboost||model.ubj"),
        ("backend: 'xgboost'", &[], &[], "xgboost||model.json"),
        ("", &["model.json"], &[], "xgboost||model.json"),
        ("", &["config.json", "a.safetensors", "model.json"], &[], "vllm||"),
        ("", &["config.json", "a.safetensors", "model.onnx"], &["tract"], "tract||model.onnx"),
        ("default_model_filename: 'run.py'", &["run.py"], &[], "python||run.py"),
        ("", &["model.onnx"], &["tract", "builtin"], "tract||model.onnx"),
        ("platform: 'onnxruntime_onnx'", &[], &["tract"], "tract|onnxruntime_onnx|model.onnx"),
        ("backend: 'mine' platform: 'mine_too'", &[], &[], "mine|mine_too|"),
        ("backend: 'builtin'", &[], &["builtin"], "builtin||"),
        ("default_model_filename: 'net.onnx'", &[], &[], "onnxruntime|onnxruntime_onnx|net.onnx"),
        ("", &["model.ort"], &[], "onnxruntime|onnxruntime_onnx|model.ort"),
        ("", &["model.ort", "model.onnx"], &[], "onnxruntime|onnxruntime_onnx|model.onnx"),
        ("default_model_filename: 'net.ort'", &[], &[], "onnxruntime|onnxruntime_onnx|net.ort"),
        ("platform: 'foo_bar'", &[], &[], "unexpected platform type 'foo_bar' for m"),
        (
            "platform: 'onnxruntime_onnx' backend: 'python'",
            &[],
            &[],
            "unexpected 'platform' and 'backend' pair, got:onnxruntime_onnx, python",
        ),
        (
            "backend: 'mine'",
            &[],
            &["builtin", "tract"],
            "backend 'mine' of model 'm' is not available here; available: builtin, tract",
        ),
        (
            "",
            &["weights.bin"],
            &[],
            "must specify 'platform' or 'backend' for 'm': its version directories hold no \
             archive (.mar), no model of Hugging Face (config.json and *.safetensors) and none of \
             model.onnx, model.ort, model.pt, model.pt2, model.py, \
             model.joblib, model.pkl, model.json, model.ubj, model.gguf, and its name does not \
             have the form NAME.BACKEND",
        ),
    ] {
        let got = check(source, files, backends).unwrap_or_else(|error| error.to_string());
        assert_eq!(got, expected, "{source} {files:?}");
    }
}

#[test]
fn a_gguf_file_is_the_model_only_if_no_other_backend_serves_it() {
    let found = |source: &str, files: &[&str]| {
        let files: Vec<String> = files.iter().map(|file| (*file).to_owned()).collect();
        let draft = Draft::from_text(source, "config.pbtxt").unwrap();
        draft.gguf_file(&files).map(str::to_owned)
    };
    let own = Some("model.gguf".to_owned());
    assert_eq!(found("", &["model.gguf"]), own);
    assert_eq!(found("backend: 'llamacpp'", &["model.gguf", "model.py"]), own);
    assert_eq!(found("default_model_filename: 'x.gguf'", &["x.gguf"]), Some("x.gguf".to_owned()));
    // The code of a Python model may read the file.
    assert_eq!(found("", &["model.gguf", "model.py"]), None);
    assert_eq!(found("backend: 'python'", &["model.gguf"]), None);
    assert_eq!(found("", &["model.onnx"]), None);
}

#[test]
fn an_archive_of_torchserve_may_have_any_name() {
    let backend = |files: &[&str]| {
        let files: Vec<String> = files.iter().map(|&file| file.to_owned()).collect();
        let completion = Completion { directory: "m", files: &files, ..Completion::default() };
        Draft::from_text("", "f")
            .unwrap()
            .resolve(&completion)
            .map(|draft| draft.backend().to_owned())
    };
    assert_eq!(backend(&["mnist.mar"]).unwrap(), "torchserve");
    assert_eq!(
        backend(&["mnist.mar", "model.py"]).unwrap(),
        "python",
        "other model files take precedence"
    );
    assert!(backend(&["mnist.tar"]).is_err());
}

/// Error texts of a real Triton for the same configurations, where it refuses them too.
#[test]
fn schedulers_that_cannot_work_are_refused() {
    let input = "input { name: 'INPUT0' data_type: TYPE_INT32 dims: [16] }";
    let output = "output { name: 'OUTPUT0' data_type: TYPE_INT32 dims: [16] }";
    let io = format!("{input} {output}");
    let dynamic = |rest: &str| format!("{io} max_batch_size: 4 dynamic_batching {{ {rest} }}");
    for (source, expected) in [
        (
            format!("{io} name: 'other'"),
            "unexpected directory name 'm' for model 'other', directory name must equal model name",
        ),
        (
            format!("{io} max_batch_size: -1"),
            "'max_batch_size' must be non-negative value for m: -1 is given",
        ),
        (
            dynamic("preferred_batch_size: [8]"),
            "dynamic batching preferred size must be <= max batch size for m: 8 is given, the \
             maximum is 4",
        ),
        (
            dynamic("preferred_batch_size: [0]"),
            "dynamic batching preferred size must be positive for m: 0 is given",
        ),
        (
            format!("{io} dynamic_batching {{ preferred_batch_size: [2] }}"),
            "dynamic batching preferred size must be <= max batch size for m: 2 is given, the \
             maximum is 0",
        ),
        (dynamic("priority_levels: 2"), "default priority level must be in range [1, 2] for m"),
        (
            dynamic(
                "priority_levels: 2 default_priority_level: 1 priority_queue_policy { key: 5 \
                 value {} }",
            ),
            "priority queue policy must have priority level in range [1, 2] for m",
        ),
        (
            dynamic("priority_levels: 2 default_priority_level: 1 preserve_ordering: true"),
            "Only one priority level is allowed when 'preserve_ordering' is true for m",
        ),
        (
            dynamic("preserve_ordering: true default_queue_policy { timeout_action: DELAY }"),
            "Queue policy can not have DELAY as timeout action when 'preserve_ordering' is true \
             for m",
        ),
    ] {
        let source = format!("backend: 'builtin' {source}");
        assert_eq!(complete("m", &source).unwrap_err(), expected, "{source}");
    }
}

/// As above.
#[test]
fn tensors_that_cannot_work_are_refused() {
    let input = "input { name: 'INPUT0' data_type: TYPE_INT32 dims: [16] }";
    let output = "output { name: 'OUTPUT0' data_type: TYPE_INT32 dims: [16] }";
    let with_input =
        |rest: &str| format!("{output} input {{ name: 'INPUT0' data_type: TYPE_INT32 {rest} }}");
    for (source, expected) in [
        (
            format!("{output} input {{ data_type: TYPE_INT32 dims: [1] }}"),
            "model input must specify 'name' for m",
        ),
        (
            format!("{output} input {{ name: 'INPUT0' dims: [1] }}"),
            "model input 'INPUT0' must specify 'data_type' for m",
        ),
        (with_input(""), "model input 'INPUT0' must specify 'dims' for m"),
        (
            with_input("dims: [0]"),
            "model input 'INPUT0' dimension must be integer >= 1, or -1 to indicate a \
             variable-size dimension for m: [0] is given",
        ),
        (
            format!("{input} output {{ name: 'O' data_type: TYPE_INT32 dims: [-2] }}"),
            "model output 'O' dimension must be integer >= 1, or -1 to indicate a variable-size \
             dimension for m: [-2] is given",
        ),
        (
            with_input("dims: [16] reshape { shape: [3,5] }"),
            "model input 'INPUT0' has different size for dims and reshape for m",
        ),
        (
            with_input("dims: [-1,2,-1] reshape { shape: [-1,3,-1] }"),
            "model input 'INPUT0' has different size for dims and reshape for m",
        ),
        (
            with_input("dims: [-1,2] reshape { shape: [2] }"),
            "model input 'INPUT0' has different size for dims and reshape for m",
        ),
        (
            with_input("dims: [-1,-1] reshape { shape: [-1] }"),
            "model input 'INPUT0' has different number of variable-size dimensions for dims and \
             reshape for m",
        ),
        (
            with_input("dims: [1] reshape { shape: [] }"),
            "model input 'INPUT0' cannot have empty reshape for non-batching model as scalar \
             tensors are not supported for m",
        ),
        (
            with_input("dims: [16] format: FORMAT_NCHW"),
            "model input NHWC/NCHW require 3 dims for m",
        ),
    ] {
        let source = format!("backend: 'builtin' {source}");
        assert_eq!(complete("m", &source).unwrap_err(), expected, "{source}");
    }
}

/// As above; Triton accepts the cases from the repeated input on.
#[test]
fn contradictory_settings_are_refused() {
    let input = "input { name: 'INPUT0' data_type: TYPE_INT32 dims: [16] }";
    let output = "output { name: 'OUTPUT0' data_type: TYPE_INT32 dims: [16] }";
    let io = format!("{input} {output}");
    for (source, expected) in [
        (
            format!(
                "{io} response_cache {{ enable: true }} model_transaction_policy {{ decoupled: \
                 true }}"
            ),
            "Response Cache does not currently support model m with 'decoupled' transaction \
             policy. Please disable the response cache.",
        ),
        (
            format!("{io} response_cache {{ enable: true }} sequence_batching {{ }}"),
            "Response Cache does not currently support model m with sequence batching scheduler. \
             Please disable the response cache.",
        ),
        (
            format!("{io} instance_group {{ kind: KIND_CPU gpus: [0] }}"),
            "instance group m_0 of model m has kind KIND_CPU but specifies one or more GPUs",
        ),
        (
            format!("{io} instance_group {{ kind: KIND_GPU }}"),
            "instance group m_0 of model m has kind KIND_GPU but no GPUs are available",
        ),
        (format!("{io} {input}"), "model input 'INPUT0' is listed twice for m"),
        (
            output.to_owned(),
            "must specify at least one 'input' for 'm': the configuration has none and the model \
             file gives none",
        ),
        (
            format!("{io} instance_group {{ count: 5000 }}"),
            "instance group m_0 of model m has count 5000, allowed: 1 to 4096",
        ),
        (
            format!(
                "{io} instance_group {{ name: 'g' rate_limiter {{ resources [ {{ count: 1 }} ] }} \
                 }}"
            ),
            "instance group g of model m has a rate limiter resource without a name",
        ),
        (
            format!("{io} default_model_filename: '../../etc/passwd'"),
            "'default_model_filename' must stay in the version directory for m, got \
             '../../etc/passwd'",
        ),
        (
            format!("{io} version_policy {{ specific {{ versions: [1, -1] }} }}"),
            "'version_policy.specific' must list versions of 1 or greater for m",
        ),
    ] {
        let source = format!("backend: 'builtin' {source}");
        assert_eq!(complete("m", &source).unwrap_err(), expected, "{source}");
    }
}

#[test]
fn invalid_ensembles_are_refused() {
    let io = "platform: 'ensemble' input { name: 'a' data_type: TYPE_INT32 dims: [1] } output { \
              name: 'b' data_type: TYPE_INT32 dims: [1] }";
    let step = "step { model_name: 'simple' model_version: -1 input_map { key: 'x' value: 'a' } \
                output_map { key: 'y' value: 'b' } }";
    let good = format!("{io} ensemble_scheduling {{ {step} }}");
    let Scheduling::Ensemble { steps, .. } = config("e", &good).scheduling else {
        panic!("no ensemble")
    };
    assert_eq!((&*steps[0].model_name, steps[0].model_version), ("simple", None));
    assert!(config("e", &good).instance_groups.is_empty());
    let seventh = good.replace("model_version: -1", "model_version: 7");
    let Scheduling::Ensemble { steps, .. } = config("e", &seventh).scheduling else {
        panic!("no ensemble")
    };
    assert_eq!(steps[0].model_version, Some(7));
    for version in ["0", "-2"] {
        let expected = format!(
            "ensemble 'e' depends on 'simple' whose required version {version} is not loaded: \
             'model_version' of a step is 1 or greater, or -1 for the latest"
        );
        let source = good.replace("model_version: -1", &format!("model_version: {version}"));
        assert_eq!(complete("e", &source).unwrap_err(), expected);
    }
    for (source, expected) in [
        (
            io.to_owned(),
            "ensemble scheduling must be set for ensemble e whose platform is ensemble",
        ),
        (format!("{io} ensemble_scheduling {{ }}"), "must specify 'step' for ensemble 'e'"),
        (
            format!("{good} instance_group {{ kind: KIND_CPU }}"),
            "instance group should not be specified for ensemble 'e'",
        ),
        (
            format!("{good} backend: 'builtin'"),
            "Ensemble model 'e' must have platform type 'ensemble' and empty backend type",
        ),
        (
            format!("{io} ensemble_scheduling {{ step {{ model_name: 'x' }} }}"),
            "must specify 'input_map' in step 0 of ensemble 'e'",
        ),
        (
            good.replace("platform: 'ensemble'", "backend: 'builtin'"),
            "ensemble scheduling cannot be set for model 'e' whose platform is not ensemble",
        ),
    ] {
        assert_eq!(complete("e", &source).unwrap_err(), expected, "{source}");
    }
}

/// Triton accepts all of these silently.
#[test]
fn probably_unintended_settings_are_accepted_with_a_warning() {
    let io = "platform: 'ensemble' input { name: 'a' data_type: TYPE_INT32 dims: [1] } output { \
              name: 'b' data_type: TYPE_INT32 dims: [1] }";
    let maps = "output_map { key: 'y' value: 'b' } input_map { key: 'x' value: 'c' } input_map { \
                key: 'x' value: 'a' }";
    let step =
        |more: &str| format!("step {{ model_name: 'simple' model_version: -1 {maps} {more} }}");
    let ensemble = |more: &str| format!("{io}\nensemble_scheduling {{ {} }}", step(more));
    let twice = config("e", &ensemble(""));
    assert_eq!(
        twice.warnings,
        ["config.pbtxt:2:148: 'input_map' has the key 'x' twice; the last one counts"]
    );
    let Scheduling::Ensemble { steps, .. } = &twice.scheduling else { panic!("no ensemble") };
    assert_eq!(steps[0].input_map["x"], "a");
    let decoupled = config("e", &(ensemble("") + " model_transaction_policy { decoupled: true }"));
    assert_eq!(decoupled.with_decoupled(true).unwrap().warnings.len(), 1);
    let expected = "'model_transaction_policy' says that it is decoupled, but none of its members \
                    is: it answers once";
    assert_eq!(decoupled.with_decoupled(false).unwrap().warnings[1], expected);
    assert_eq!(twice.with_decoupled(false).unwrap().warnings.len(), 1);
}

#[test]
fn shapes_are_converted_in_both_directions() {
    let spec = |dims: &[i64], reshape: Option<&[i64]>| TensorSpec {
        name: "t".to_owned(),
        datatype: DataType::Fp32,
        dims: dims.to_vec(),
        reshape: reshape.map(<[i64]>::to_vec),
        optional: false,
        allow_ragged_batch: false,
        is_shape_tensor: false,
        label_filename: String::new(),
    };
    for (spec, batching, protocol, backend) in [
        (spec(&[16], None), true, &[3, 16][..], &[3, 16][..]),
        (spec(&[1], Some(&[])), true, &[3, 1], &[3]),
        (spec(&[-1, 4, -1], Some(&[2, -1, 2, -1])), true, &[3, 7, 4, 9], &[3, 2, 7, 2, 9]),
        (spec(&[4], Some(&[2, 2])), false, &[4], &[2, 2]),
    ] {
        assert_eq!(spec.backend_shape(protocol, batching), backend);
        assert_eq!(&spec.protocol_shape(backend, batching)[..], protocol);
    }
    assert_eq!(spec(&[1], Some(&[])).backend_shape(&[], true), [0i64; 0]);
}
