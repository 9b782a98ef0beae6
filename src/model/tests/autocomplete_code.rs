//! Models whose code completes their configuration. Texts and results were taken from a real Triton
//! 2.51 for the same configurations and the same calls of `pb_utils.ModelConfig`, except for tests
//! of the JSON exchange.

use super::super::*;

const IN: &str = r#"{"name":"IN","data_type":"TYPE_FP32","dims":[4]}"#;
const OUT: &str = r#"{"name":"OUT","data_type":"TYPE_FP32","dims":[4]}"#;

fn resolved(source: &str) -> Draft {
    let files = ["model.py".to_owned()];
    let completion = Completion { directory: "m", files: &files, ..Completion::default() };
    Draft::from_text(source, "config.pbtxt").unwrap().resolve(&completion).unwrap()
}

fn answered(source: &str, answer: &str) -> Result<ModelConfig, String> {
    let files = ["model.py".to_owned()];
    let completion = Completion { directory: "m", files: &files, ..Completion::default() };
    let draft = resolved(source).merge_answer(answer, &[]).map_err(|error| error.to_string())?;
    draft.complete(&completion).map_err(|error| error.to_string())
}

/// Summarizes what clients would see.
fn short(source: &str, answer: &str) -> String {
    match answered(source, answer) {
        Ok(config) => {
            let tensors = |specs: &[TensorSpec]| {
                specs
                    .iter()
                    .map(|spec| format!("{}:{}{:?}", spec.name, spec.datatype.name(), spec.dims))
                    .collect::<Vec<_>>()
                    .join(" ")
            };
            let scheduling = match &config.scheduling {
                Scheduling::Default => "default".to_owned(),
                Scheduling::Dynamic(dynamic) => {
                    format!("dynamic{:?}", dynamic.preferred_batch_sizes)
                }
                Scheduling::Sequence(_) => "sequence".to_owned(),
                Scheduling::Ensemble { .. } => "ensemble".to_owned(),
            };
            let inputs = tensors(&config.inputs);
            let outputs = tensors(&config.outputs);
            format!(
                "{} {inputs} -> {outputs} {scheduling} {}",
                config.max_batch_size, config.decoupled
            )
        }
        Err(error) => error,
    }
}

#[test]
fn answers_add_fields_and_change_none() {
    let io = format!(r#""input":[{IN}],"output":[{OUT}]"#);
    let check = |source: &str, config: &str, expected: &str| {
        assert_eq!(
            short(source, &format!("{{\"config\":{{{config}}}}}")),
            expected,
            "{source} {config}"
        );
    };
    check("", &io, "0 IN:FP32[4] -> OUT:FP32[4] default false");
    check(
        "",
        &format!(r#"{io},"max_batch_size":8,"dynamic_batching":{{}}"#),
        "8 IN:FP32[4] -> OUT:FP32[4] dynamic[8] false",
    );
    check("", r#""model_transaction_policy":{"decoupled":true}"#, "0  ->  default true");
    check("max_batch_size: 4", r#""max_batch_size":16"#, "16  ->  default false");
    check("", r#""max_batch_size":2,"sequence_batching":{}"#, "2  ->  sequence false");
    check(
        "max_batch_size: 4 sequence_batching {}",
        r#""max_batch_size":4,"dynamic_batching":{}"#,
        "4  ->  sequence false",
    );
    let only_names = "input { name: 'IN' } output { name: 'OUT' }";
    check(only_names, &io, "0 IN:FP32[4] -> OUT:FP32[4] default false");
    let more = "input { name: 'EXTRA' data_type: TYPE_INT32 dims: [1] optional: true }";
    check(more, &io, "0 EXTRA:INT32[1] IN:FP32[4] -> OUT:FP32[4] default false");
    // Fields that the answer omits keep their values; fields that a model may not set are ignored.
    let said = "input { name: 'IN' data_type: TYPE_FP32 dims: [4] }";
    let other = r#""name":"n","version_policy":{"all":{}},"parameters":{"a":{"string_value":"b"}},"backend":"x""#;
    check(said, other, "0 IN:FP32[4] ->  default false");
    let config = answered("", &format!("{{\"config\":{{{other}}}}}")).unwrap();
    assert_eq!((&*config.name, &*config.backend, config.parameters.len()), ("m", "python", 0));
    assert_eq!(config.version_policy, VersionPolicy::Latest(1));
}

#[test]
fn answers_that_contradict_are_refused() {
    let int = "input { name: 'IN' data_type: TYPE_INT32 dims: [4] }";
    let seven = "output { name: 'OUT' data_type: TYPE_FP32 dims: [7] }";
    for (source, answer, expected) in [
        (
            int,
            format!(r#"{{"config":{{"input":[{IN}]}}}}"#),
            "unable to load model 'm', configuration expects datatype TYPE_INT32 for input 'IN', \
             model provides TYPE_FP32",
        ),
        (
            seven,
            format!(r#"{{"config":{{"output":[{OUT}]}}}}"#),
            "model 'm', tensor 'OUT': the model expects dims [4] but the model configuration \
             specifies dims [7]",
        ),
        (
            "max_batch_size: 4",
            r#"{"config":{"max_batch_size":2}}"#.to_owned(),
            "configuration specified max_batch_size 4, but in auto-complete-config function for \
             model 'm' specified max_batch_size 2",
        ),
        (
            "model_transaction_policy { decoupled: true }",
            r#"{"config":{"model_transaction_policy":{"decoupled":false}}}"#.to_owned(),
            "trying to change decoupled property in auto-complete-config for model 'm', which is \
             already set to 'true'",
        ),
        (
            "",
            r#"{"error":"ValueError: no such weights\n"}"#.to_owned(),
            "ValueError: no such weights",
        ),
        (
            "",
            "{}".to_owned(),
            "auto-complete of model 'm' has answered neither a configuration nor an error",
        ),
        (
            "",
            r#"{"config":{"nonsense":1}}"#.to_owned(),
            "auto-complete of model 'm' has answered an invalid model configuration: ",
        ),
        (
            "",
            "{\"config\":{".to_owned(),
            "auto-complete of model 'm' has answered JSON of the wrong form: ",
        ),
        ("", String::new(), "auto-complete of model 'm' has answered JSON of the wrong form: "),
        (
            "",
            r#"{"config":{"input":[{"name":"IN","data_type":"TYPE_FP32"}]}}"#.to_owned(),
            "model input 'IN' must specify 'dims' for m",
        ),
    ] {
        let error = answered(source, &answer).unwrap_err();
        assert!(
            error.starts_with(expected) && (error == expected || expected.ends_with(": ")),
            "{error}"
        );
    }
}

/// Triton's models receive the configuration in this form.
#[test]
fn the_query_has_all_defaults() {
    let place = CodeLocation {
        version: 3,
        directory: "/models/m/3",
        model_directory: "/models/\"m\"",
        backend_settings: &[("size".to_owned(), "8".to_owned())],
    };
    let question =
        resolved("max_batch_size: 8 dynamic_batching {}").query(&place, &Completion::default());
    for part in [
        r#"{"config":{"name":"m","platform":"","backend":"python""#,
        r#""version_policy":{"latest":{"num_versions":1}},"max_batch_size":8,"input":[],"output":[]"#,
        r#""instance_group":[{"name":"m","kind":"KIND_CPU","count":1"#,
        r#""preferred_batch_size":[8]"#,
        r#","directory":"/models/m/3","model_directory":"/models/\"m\"","version":3,"backend":"python","backend_settings":{"size":"8"}}"#,
    ] {
        assert!(question.contains(part), "{part} in {question}");
    }
    let again = format!(
        "{{\"config\":{}",
        question.strip_prefix("{\"config\":").unwrap().split(",\"directory\"").next().unwrap()
    );
    // A model that returns its configuration unchanged changes nothing, including defaults of the
    // batch size.
    assert_eq!(
        short("max_batch_size: 8 dynamic_batching {}", &(again + "}")),
        "8  ->  dynamic[8] false"
    );
}

#[test]
fn a_resolved_draft_has_backend_file_and_policy() {
    let draft = resolved(
        "parameters { key: 'EXECUTION_ENV_PATH' value { string_value: '/env' } } version_policy { \
         all {} }",
    );
    assert_eq!(
        (draft.backend(), draft.parameter("EXECUTION_ENV_PATH"), draft.parameter("x")),
        ("python", Some("/env"), None)
    );
    assert_eq!(draft.version_policy().unwrap(), VersionPolicy::All);
    let more = resolved("instance_group { count: 2 }").encode_parts();
    let differ: Vec<bool> =
        more.iter().zip(&resolved("").encode_parts()).map(|(one, other)| one != other).collect();
    assert_eq!(differ, [true, false, false]);
}

#[test]
fn files_with_a_signature_are_found() {
    for (source, files, expected) in [
        ("", &["model.onnx"][..], Some("model.onnx")),
        ("", &["model.ort"], Some("model.ort")),
        ("", &["model.ort", "model.onnx"], Some("model.onnx")),
        ("", &[], Some("model.onnx")),
        ("backend: 'tract'", &["model.onnx"], Some("model.onnx")),
        ("platform: 'onnxruntime_onnx' default_model_filename: 'net.ort'", &[], Some("net.ort")),
        ("default_model_filename: 'model.pt'", &["model.onnx"], None),
        ("backend: 'python'", &["model.onnx"], None),
        ("platform: 'pytorch_libtorch'", &["model.onnx"], None),
    ] {
        let files: Vec<String> = files.iter().map(|&file| file.to_owned()).collect();
        let draft = Draft::from_text(source, "").unwrap();
        assert_eq!(draft.onnx_file(&files), expected, "{source} {files:?}");
    }
}

#[test]
fn the_groups_that_a_compiled_backend_prefers_are_used() {
    let placed = |source: &str, preferred: &str, gpus: &[u32]| {
        let completion =
            Completion { directory: "m", gpus, compiled: true, ..Completion::default() };
        let source = format!("backend: 'mine' {source}");
        let draft = Draft::from_text(&source, "config.pbtxt").unwrap();
        let draft = draft.resolve(&completion).unwrap();
        let answer = format!(
            r#"{{"config":{{"input":[{IN}],"output":[{OUT}]}},"preferred_groups":[{preferred}]}}"#
        );
        let answered = draft.merge_answer(&answer, gpus).unwrap().complete(&completion).unwrap();
        let groups = answered.instance_groups.into_iter();
        groups.map(|group| (group.count, group.gpus)).collect::<Vec<_>>()
    };
    let cpu = r#"{"kind":"KIND_CPU","count":2,"gpus":[]}"#;
    let gpu = r#"{"kind":"KIND_GPU","count":0,"gpus":[]}"#;
    let second_gpu = r#"{"kind":"KIND_GPU","count":3,"gpus":[1]}"#;
    let both = format!("{gpu},{cpu}");
    // Without a preference: a GPU if there is one.
    assert_eq!(placed("", "", &[]), [(1, vec![])]);
    assert_eq!(placed("", "", &[0, 1]), [(1, vec![0, 1])]);
    assert_eq!(placed("", cpu, &[0, 1]), [(2, vec![])]);
    assert_eq!(placed("", &both, &[]), [(2, vec![])]);
    assert_eq!(placed("", &both, &[0, 1]), [(1, vec![0, 1])]);
    assert_eq!(placed("", second_gpu, &[0, 1]), [(3, vec![1])]);
    assert_eq!(placed("", &format!("{second_gpu},{cpu}"), &[0]), [(2, vec![])]);
    // The configuration decides what it says.
    let group = |text: &str| format!("instance_group {{ {text} }}");
    assert_eq!(placed(&group("kind: KIND_GPU"), cpu, &[0]), [(1, vec![0])]);
    assert_eq!(placed(&group("kind: KIND_CPU"), cpu, &[0]), [(2, vec![])]);
    assert_eq!(placed(&group("kind: KIND_CPU count: 5"), cpu, &[0]), [(5, vec![])]);
}

#[test]
fn workers_of_an_archive_take_the_gpus_in_turn() {
    let placed = |source: &str, group: &str, gpus: &[u32]| {
        let archive = ["m.mar".to_owned()];
        let completion =
            Completion { directory: "m", files: &archive, gpus, ..Completion::default() };
        let source = format!("backend: 'torchserve' {source}");
        let draft =
            Draft::from_text(&source, "config.pbtxt").unwrap().resolve(&completion).unwrap();
        let answer = format!(
            r#"{{"config":{{"input":[{IN}],"output":[{OUT}],"instance_group":[{{{group}}}]}}}}"#
        );
        draft.merge_answer(&answer, gpus).unwrap().complete(&completion).unwrap().instance_groups
    };
    let short = |groups: Vec<InstanceGroup>| {
        groups.into_iter().map(|group| (group.count, group.gpus)).collect::<Vec<_>>()
    };
    let groups = |count: u32, gpus: &[u32]| short(placed("", &format!(r#""count":{count}"#), gpus));
    assert_eq!(groups(5, &[]), [(5, vec![])]);
    assert_eq!(groups(5, &[0, 2]), [(3, vec![0]), (2, vec![2])]);
    assert_eq!(groups(2, &[0, 1, 2]), [(1, vec![0]), (1, vec![1])]);
    assert_eq!(groups(1, &[0, 1, 2]), [(1, vec![0, 1, 2])]);
    let named =
        |count: u32, gpus: &str| format!(r#""kind":"KIND_GPU","count":{count},"gpus":{gpus}"#);
    let all = &[0, 1, 2];
    assert_eq!(short(placed("", &named(1, "[2]"), all)), [(1, vec![2])]);
    assert_eq!(short(placed("", &named(1, "[2, 0]"), all)), [(1, vec![2, 0])]);
    assert_eq!(short(placed("", &named(3, "[2, 0]"), all)), [(2, vec![2]), (1, vec![0])]);
    for (count, gpus) in [(1, &all[..]), (3, all), (1, &[]), (3, &[])] {
        let [group] = &placed("", &format!(r#""kind":"KIND_CPU","count":{count}"#), gpus)[..]
        else {
            panic!()
        };
        assert_eq!((group.kind, group.count, group.gpus.len()), (InstanceKind::Cpu, count, 0));
    }
    // A single instance has the default name, wherever it runs.
    assert_eq!(
        [r#""count":1"#, r#""kind":"KIND_CPU""#, &named(1, "[2]")].map(|group| placed(
            "", group, all
        )[0]
        .name
        .clone()),
        ["m", "m", "m"]
    );
    // Configured groups take precedence.
    let said = placed(
        "instance_group { kind: KIND_GPU gpus: [1] }",
        r#""kind":"KIND_CPU","count":3"#,
        all,
    );
    assert_eq!(short(said), [(1, vec![1])]);
}

#[test]
fn warns_about_a_python_model_without_tensors() {
    let warnings = |io: &str| answered("", &format!("{{\"config\":{{{io}}}}}")).unwrap().warnings;
    assert!(warnings("")[0].starts_with("it has neither inputs nor outputs"));
    assert!(warnings(&format!(r#""input":[{IN}],"output":[{OUT}]"#)).is_empty());
}
