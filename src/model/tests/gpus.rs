//! Instance groups on machines with GPUs.

use super::super::*;

/// Returns the kinds and GPUs of a model's groups on a machine with GPUs 0 and 2, and GPU 3, which
/// cannot be used.
fn on_gpus(
    source: &str,
    no_cuda_provider: Option<&str>,
) -> Result<Vec<(InstanceKind, Vec<u32>)>, String> {
    let io = "input { name: 'INPUT0' data_type: TYPE_INT32 dims: [16] } output { name: 'OUTPUT0' \
              data_type: TYPE_INT32 dims: [16] }";
    let completion = Completion {
        directory: "m",
        gpus: &[0, 2],
        unusable_gpus: &[3],
        no_cuda_provider,
        ..Completion::default()
    };
    let draft = Draft::from_text(&format!("{io} {source}"), "config.pbtxt").unwrap();
    let config = draft.complete(&completion).map_err(|error| error.to_string())?;
    Ok(config.instance_groups.into_iter().map(|group| (group.kind, group.gpus)).collect())
}

#[test]
fn models_whose_backend_can_use_gpus_are_put_on_all_of_them() {
    use InstanceKind::{Cpu, Gpu, Model};
    for (backend, expected) in [
        ("python", (Gpu, vec![0, 2])),
        ("pytorch", (Gpu, vec![0, 2])),
        ("torchserve", (Gpu, vec![0, 2])),
        ("onnxruntime", (Gpu, vec![0, 2])),
        ("builtin", (Cpu, vec![])),
        ("tract", (Cpu, vec![])),
        ("sklearn", (Cpu, vec![])),
        ("xgboost", (Cpu, vec![])),
        ("custom", (Cpu, vec![])),
    ] {
        assert_eq!(
            on_gpus(&format!("backend: '{backend}'"), None),
            Ok(vec![expected.clone()]),
            "{backend}"
        );
        let auto = format!("backend: '{backend}' instance_group {{ kind: KIND_AUTO count: 2 }}");
        assert_eq!(on_gpus(&auto, None), Ok(vec![expected]), "{backend}");
    }
    assert_eq!(on_gpus("backend: 'onnxruntime'", Some("it has none")), Ok(vec![(Cpu, vec![])]));
    let groups = "instance_group [ { kind: KIND_GPU gpus: [2] }, { kind: KIND_CPU }, { kind: \
                  KIND_MODEL }, { gpus: [0, 3] } ]";
    let expected = vec![(Gpu, vec![2]), (Cpu, vec![]), (Model, vec![]), (Gpu, vec![0, 3])];
    assert_eq!(on_gpus(&format!("backend: 'builtin' {groups}"), None), Ok(expected));
    let simple = "backend: 'python' instance_group { name: 'g' count: 2 }";
    let completion = Completion { directory: "m", gpus: &[0, 2], ..Completion::default() };
    let json =
        Draft::from_text(simple, "config.pbtxt").unwrap().complete(&completion).unwrap().to_json();
    assert!(json.contains(r#""kind":"KIND_GPU","count":2,"gpus":[0,2]"#), "{json}");
}

#[test]
fn kind_gpu_is_refused_for_models_that_cannot_run_on_gpus() {
    let group = "instance_group { name: 'g' kind: KIND_GPU }";
    let this = "instance group g of model m";
    for (source, expected) in [
        ("backend: 'sklearn'", "has kind KIND_GPU but its backend 'sklearn' runs on CPUs only"),
        (
            "backend: 'tract'",
            "has kind KIND_GPU but its backend 'tract' runs on CPUs only; ONNX models run on GPUs \
             with backend 'onnxruntime' and `pip install onnxruntime-gpu[cuda,cudnn]`",
        ),
        (
            "backend: 'onnxruntime'",
            "has kind KIND_GPU but x.so is missing; the parameter allow_cpu_fallback: \"true\" \
             lets the model run on CPUs instead",
        ),
    ] {
        let refused = on_gpus(&format!("{source} {group}"), Some("x.so is missing"));
        assert_eq!(refused, Err(format!("{this} {expected}")), "{source}");
    }
    let fallback = "parameters { key: 'allow_cpu_fallback' value { string_value: 'true' } }";
    let allowed =
        on_gpus(&format!("backend: 'onnxruntime' {group} {fallback}"), Some("x.so is missing"));
    assert_eq!(allowed, Ok(vec![(InstanceKind::Gpu, vec![0, 2])]));
    for (value, here) in [("yes", None), ("", Some("x.so is missing"))] {
        let unclear = fallback.replace("'true'", &format!("'{value}'"));
        let refused = on_gpus(&format!("backend: 'onnxruntime' {group} {unclear}"), here);
        let text =
            format!("parameter 'allow_cpu_fallback' must be true or false for m, got '{value}'");
        assert_eq!(refused, Err(text));
    }
    let on_cpu = format!(
        "backend: 'onnxruntime' instance_group {{ kind: KIND_CPU }} {}",
        fallback.replace("true", "yes")
    );
    assert!(on_gpus(&on_cpu, None).is_err(), "the parameter is checked on any machine");
    let denied = fallback.replace("'true'", "'false'");
    assert!(
        on_gpus(&format!("backend: 'onnxruntime' {group} {denied}"), Some("x.so is missing"))
            .is_err()
    );
    assert_eq!(
        on_gpus("backend: 'python' instance_group { name: 'g' gpus: [0, 7] }", None),
        Err(format!("{this} specifies invalid or unsupported gpu id 7; GPUs here: 0, 2, 3"))
    );
    let completion = Completion { directory: "m", unusable_gpus: &[0], ..Completion::default() };
    let draft = |text: &str| {
        Draft::from_text(&format!("backend: 'python' {text}"), "config.pbtxt").unwrap()
    };
    let error = draft(group).complete(&completion).unwrap_err().to_string();
    assert_eq!(error, format!("{this} has kind KIND_GPU but none of the GPUs here can be used: 0"));
    assert_eq!(draft("").complete(&completion).unwrap().instance_groups[0].kind, InstanceKind::Cpu);
}
