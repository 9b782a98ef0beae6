//! Each flag of Triton's `--help` (`tests/python/lifecycle/golden_triton_flags.json`, recorded from
//! a Triton server) is accepted in all its forms, and either changes the options or is reported as
//! a flag without effect.

use super::Options;

/// Flags of later versions than the recorded one.
const LATER: [(&str, &str); 3] = [
    ("grpc-infer-thread-count", "integer"),
    ("grpc-max-response-pool-size", "integer"),
    ("http-max-input-size", "integer"),
];

/// The flags that have no effect here.
const WITHOUT_EFFECT: [&str; 15] = [
    "buffer-manager-thread-count",
    "cache-directory",
    "cuda-memory-pool-byte-size",
    "cuda-virtual-address-size",
    "enable-peer-access",
    "grpc-http2-max-ping-strikes",
    "grpc-http2-max-pings-without-data",
    "grpc-http2-min-recv-ping-interval-without-data",
    "grpc-infer-allocation-pool-size",
    "grpc-infer-thread-count",
    "grpc-keepalive-permit-without-calls",
    "grpc-max-response-pool-size",
    "repoagent-directory",
    "sagemaker-thread-count",
    "vertex-ai-thread-count",
];

/// Returns a value in Triton's form that is not the default.
fn value(flag: &str, form: &str) -> &'static str {
    match (flag, form) {
        ("log-format", _) => "ISO8601",
        ("model-control-mode", _) => "Explicit",
        ("load-model", _) => "m",
        ("http-address" | "grpc-address" | "metrics-address", _) => "127.0.0.1",
        ("grpc-infer-response-compression-level", _) => "High",
        ("http-restricted-api" | "grpc-restricted-protocol", _) => "health:key=value",
        ("sagemaker-safe-port-range", _) => "1-65535",
        ("metrics-config", _) => "summary_latencies=true",
        ("trace-config", _) => "rate=3",
        ("trace-level", _) => "min",
        ("backend-config", _) => "tensorflow,version=2",
        ("cache-config", _) => "local,size=1048576",
        ("rate-limit", _) => "execution_count",
        ("rate-limit-resource", _) => "R1:10:0",
        ("host-policy", _) => "gpu_0,numa-node=0",
        ("model-load-gpu-limit", _) => "0:0.5",
        ("cuda-memory-pool-byte-size" | "cuda-virtual-address-size", _) => "0:67108864",
        ("metrics-interval-ms", _) => "1500.5",
        ("min-supported-compute-capability", _) => "7.5",
        // The deprecated flag is equivalent to --cache-config.
        ("response-cache-byte-size", _) => "1048576",
        (_, "integer") => "3",
        (_, "string") => "text",
        (flag, "boolean") if is_on_by_default(flag) => "False",
        (_, "boolean") => "True",
        (flag, form) => panic!("--{flag} <{form}> needs a value here"),
    }
}

fn is_on_by_default(flag: &str) -> bool {
    let on = [
        "log-info",
        "log-warning",
        "log-error",
        "exit-on-error",
        "strict-readiness",
        "allow-http",
        "allow-grpc",
    ];
    on.contains(&flag)
        || ["allow-metrics", "allow-gpu-metrics", "allow-cpu-metrics"].contains(&flag)
}

/// Returns the flags that a flag requires, as in Triton.
fn beside(flag: &str) -> &'static [&'static str] {
    match flag {
        "load-model" => &["--model-control-mode=explicit"],
        _ => &[],
    }
}

fn parse(flag: &str, given: &[&str]) -> Options {
    let repository = "--model-repository=models";
    let args: Vec<&str> =
        ["tritonserver", repository].iter().chain(beside(flag)).chain(given).copied().collect();
    Options::from_args(args).unwrap_or_else(|error| panic!("{given:?}: {error}"))
}

/// Returns all options as text.
fn shown(options: &Options) -> String {
    format!("{options:?}")
}

#[test]
fn accepts_every_flag_of_triton_in_all_forms() {
    let golden = include_str!("../../../tests/python/lifecycle/golden_triton_flags.json");
    let golden: Vec<(String, String)> = serde_json::from_str(golden).unwrap();
    let all = golden.iter().map(|(flag, form)| (flag.as_str(), form.as_str())).chain(LATER);
    let mut ineffective = Vec::new();
    for (flag, form) in all.filter(|(flag, _)| *flag != "help") {
        let default = parse(flag, &[]);
        let forms = match form {
            "" => vec![vec![format!("--{flag}")]],
            _ => {
                let value = value(flag, form);
                vec![vec![format!("--{flag}={value}")], vec![format!("--{flag}"), value.to_owned()]]
            }
        };
        for given in forms {
            let given: Vec<&str> = given.iter().map(String::as_str).collect();
            let options = parse(flag, &given);
            assert_ne!(shown(&options), shown(&default), "{given:?} changes nothing");
            let named: Vec<String> = options.without_effect();
            if let [line] = named.as_slice() {
                let why =
                    line.strip_prefix(&format!("--{flag} has no effect: ")).unwrap_or_default();
                assert!(!why.is_empty(), "{given:?}: {line}");
                ineffective.push(flag);
            }
        }
        if form == "boolean" {
            let alone = parse(flag, &[&format!("--{flag}")]);
            assert_eq!(
                shown(&alone),
                shown(&parse(flag, &[&format!("--{flag}=true")])),
                "--{flag}"
            );
        }
    }
    ineffective.sort_unstable();
    ineffective.dedup();
    assert_eq!(ineffective, WITHOUT_EFFECT);
}

#[test]
fn tritonserver_has_tritons_defaults() {
    for args in [&["/usr/bin/tritonserver"][..], &["pharos", "tritonserver"]] {
        // getopt_long accepts unambiguous prefixes.
        let options =
            Options::from_args(args.iter().chain(&["--model-st=m", "--sagemaker-p=9"])).unwrap();
        assert_eq!(
            (options.metrics.port, options.http.port, options.grpc.port),
            (8002, 8000, 8001)
        );
        assert_eq!(options.grpc_clients.keepalive_time.as_secs(), 7200);
        assert_eq!(options.sagemaker.port, 9);
    }
    let options = Options::from_args(["pharos", "--model-repository=m"]).unwrap();
    assert_eq!(options.metrics.port, 8082);
}

#[test]
fn warns_about_deprecated_flags_and_settings_without_effect() {
    let warnings = |given: &[&str]| parse("", given).warnings().join("\n");
    let strict = parse("", &["--strict-model-config=true"]);
    assert!(
        !strict.models.auto_complete()
            && strict.warnings()[0].starts_with("--strict-model-config is deprecated")
    );
    assert!(parse("", &["--strict-model-config=false"]).models.auto_complete());
    let both = ["--strict-model-config=false", "--disable-auto-complete-config"];
    assert!(!parse("", &both).models.auto_complete());
    assert!(warnings(&both).contains("is overridden by --disable-auto-complete-config"));
    assert!(
        warnings(&["--response-cache-byte-size=9000000"])
            .contains("use --cache-config=local,size=BYTES")
    );
    for (setting, why) in [
        ("python,shm-default-byte-size=1", "tensors are in shared memory"),
        ("python,other=1", "known settings of python are stub-timeout-seconds"),
        ("onnxruntime,intra_op_thread_count=1", "each instance is a process"),
        ("version=2", "the known setting is default-max-batch-size"),
    ] {
        let text = warnings(&[&format!("--backend-config={setting}")]);
        let expected =
            format!("--backend-config={} has no effect: ", setting.split('=').next().unwrap());
        assert!(text.starts_with(&expected) && text.contains(why), "{text}");
    }
    assert_eq!(
        warnings(&[
            "--backend-config=python,stub-timeout-seconds=9",
            "--backend-config=tensorrt,plugins=x",
            "--backend-config=default-max-batch-size=2"
        ]),
        ""
    );
}
