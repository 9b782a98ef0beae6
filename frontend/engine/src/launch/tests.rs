//! Tests of the choice of programs, with directories as users arrange them.

use std::fs;
use std::os::unix::fs::{PermissionsExt, symlink};

use pharos::model::{Provenance, SandboxMode};
use tempfile::TempDir;

use super::*;

struct Fixture {
    folder: TempDir,
    program: Program,
}

impl Fixture {
    fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let root = folder.path();
        for directory in ["m/1", "backends"] {
            fs::create_dir_all(root.join(directory)).unwrap();
        }
        let program = Program {
            worker: "/opt/pharos-worker".into(),
            python: Some("/bin/sh".into()),
            backends: vec![root.join("backends")],
            environments: root.join("environments"),
            deployment_backends: vec!["rows"],
            ..Program::default()
        };
        Self { folder, program }
    }

    fn root(&self) -> &Path {
        self.folder.path()
    }

    /// Creates a file and its parent directories.
    fn file(&self, path: &str, mode: u32) -> PathBuf {
        let path = self.root().join(path);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(&path, "#!/bin/sh\n").unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(mode)).unwrap();
        path
    }

    fn choose(&self, backend: &str, environment: Option<&str>) -> Result<Launch, String> {
        self.with_model(backend, environment, |model| {
            choose(&self.program, model, &Reading::default())
        })
    }

    /// Calls a function with a model of this backend and environment.
    fn with_model<R>(
        &self,
        backend: &str,
        environment: Option<&str>,
        then: impl FnOnce(&Model<'_>) -> R,
    ) -> R {
        let directory = self.root().join("m");
        let version = self.root().join("m/1");
        let model = Model {
            name: "m",
            backend,
            library: None,
            environment,
            sandbox: None,
            provenance: Provenance::default(),
            limits: Parameters::default(),
            directory: &directory,
            version: &version,
        };
        then(&model)
    }

    /// Returns the command without the fixture's root, with the variables that it sets.
    fn chosen(&self, backend: &str, environment: Option<&str>) -> String {
        match self.choose(backend, environment) {
            Ok(launch) => {
                let mut text = launch.executable.display().to_string();
                for argument in &launch.arguments {
                    text += &format!(" {}", argument.display());
                }
                for (name, value) in &launch.variables {
                    let own = value.as_ref().filter(|_| {
                        !["PATH", "LD_LIBRARY_PATH", "ORT_DYLIB_PATH", TELEMETRY].contains(name)
                    });
                    text +=
                        &own.map_or(String::new(), |value| format!(" {name}={}", value.display()));
                }
                text.replace(&self.root().display().to_string(), "")
            }
            Err(error) => error.replace(&self.root().display().to_string(), ""),
        }
    }
}

fn variable(launch: &Launch, name: &str) -> Option<String> {
    let (_, value) = launch.variables.iter().find(|(known, _)| *known == name)?;
    Some(value.as_ref()?.to_str().unwrap().to_owned())
}

#[test]
fn backends_are_found_in_the_documented_order() {
    let mut fixture = Fixture::new();
    assert!(fixture.chosen("onnxruntime", None).contains("`pip install onnxruntime`"));
    fixture.program.onnxruntime = Some("/opt/libonnxruntime.so".into());
    for backend in ORDINARY {
        assert_eq!(fixture.chosen(backend, None), "/opt/pharos-worker");
    }
    for backend in PYTHON {
        assert_eq!(fixture.chosen(backend, None), "/bin/sh -m pharos_worker");
    }
    assert_eq!(
        fixture.chosen("mine", None),
        "backend 'mine' of model 'm' is not available here; available: builtin, onnxruntime, \
         onnxruntime_genai, python, pytorch, rows, sklearn, vllm, xgboost; \
         '/backends/mine' does not hold \
         libpharos_mine.so, pharos-worker-mine, model.py or libtriton_mine.so"
    );
    fixture.file("backends/other/pharos-worker-other", 0o755);
    fixture.file("backends/nothing/readme", 0o644);
    assert!(fixture.chosen("mine", None).contains("xgboost, other; '/backends/mine'"));
    for (file, expected) in [
        (
            "backends/mine/libtriton_mine.so",
            "/opt/pharos-worker PHAROS_BACKEND_LIBRARY=/backends/mine/libtriton_mine.so",
        ),
        (
            "backends/mine/model.py",
            "/bin/sh -m pharos_worker PHAROS_PYTHON_BACKEND=/backends/mine/model.py",
        ),
        ("m/1/model.py", "/bin/sh -m pharos_worker PHAROS_PYTHON_BACKEND=/backends/mine/model.py"),
        ("backends/mine/pharos-worker-mine", "/backends/mine/pharos-worker-mine"),
        (
            "backends/mine/libpharos_mine.so",
            "/opt/pharos-worker PHAROS_BACKEND_LIBRARY=/backends/mine/libpharos_mine.so",
        ),
        ("m/libpharos_mine.so", "/opt/pharos-worker PHAROS_BACKEND_LIBRARY=/m/libpharos_mine.so"),
        (
            "m/1/libpharos_mine.so",
            "/opt/pharos-worker PHAROS_BACKEND_LIBRARY=/m/1/libpharos_mine.so",
        ),
    ] {
        fixture.file(file, 0o755);
        assert_eq!(fixture.chosen("mine", None), expected, "{file}");
    }
    for name in ["../mine", "a/b", ".hidden", "", "a b"] {
        let error = fixture.choose(name, None).unwrap_err();
        assert!(error.contains("is not a valid backend name: allowed are letters"), "{error}");
    }
    fixture.file("installed/mine/pharos-worker-mine", 0o755);
    fixture.file("installed/second/pharos-worker-second", 0o755);
    fixture.program.backends.push(fixture.root().join("installed"));
    assert_eq!(
        fixture.chosen("mine", None),
        "/opt/pharos-worker PHAROS_BACKEND_LIBRARY=/m/1/libpharos_mine.so"
    );
    assert_eq!(fixture.chosen("second", None), "/installed/second/pharos-worker-second");
    assert!(
        fixture
            .chosen("foo", None)
            .contains("mine, other, second; neither '/backends/foo' nor '/installed/foo' holds")
    );
    fixture.program.backends.clear();
    assert!(
        fixture.chosen("foo", None).ends_with("no backend directory is set (--backend-directory)")
    );
}

#[test]
fn cuda_libraries_are_found_beside_onnx_runtime() {
    let mut fixture = Fixture::new();
    let library = fixture.file("site/onnxruntime/capi/libonnxruntime.so.1.31.1", 0o644);
    fixture.program.onnxruntime = Some(library);
    for file in ["cudnn/lib/libcudnn.so.9", "cu13/lib/libcudart.so.13", "cu13/include/cuda.h"] {
        fixture.file(&format!("site/nvidia/{file}"), 0o644);
    }
    fs::create_dir_all(fixture.root().join("site/nvidia/nothing")).unwrap();
    // A runtime for processors needs no CUDA libraries.
    assert_eq!(variable(&fixture.choose("onnxruntime", None).unwrap(), LIBRARY_PATH), None);
    fixture.file("site/onnxruntime/capi/libonnxruntime_providers_cuda.so", 0o644);
    fixture.file("site/tensorrt_libs/libnvinfer.so.10", 0o644);
    // Other backends may use other versions of these libraries.
    assert_eq!(variable(&fixture.choose("builtin", None).unwrap(), LIBRARY_PATH), None);
    let path = variable(&fixture.choose("onnxruntime", None).unwrap(), LIBRARY_PATH).unwrap();
    let own = std::env::var(LIBRARY_PATH).unwrap_or_default();
    let ours = path
        .strip_prefix(&own)
        .unwrap()
        .replace(&format!("{}/site/", fixture.root().display()), "");
    assert_eq!(ours.trim_start_matches(':'), "nvidia/cu13/lib:nvidia/cudnn/lib:tensorrt_libs");
}

#[test]
fn interpreters_are_found_in_the_documented_order() {
    let fixture = Fixture::new();
    let home = " VIRTUAL_ENV=/m/.venv";
    fixture.file("m/.venv/bin/python", 0o755);
    assert_eq!(
        fixture.chosen("python", None),
        format!("/m/.venv/bin/python -m pharos_worker{home}")
    );
    let python3 = fixture.file("m/.venv/bin/python3", 0o755);
    assert_eq!(
        fixture.chosen("pytorch", None),
        format!("/m/.venv/bin/python3 -m pharos_worker{home}")
    );
    fixture.file("m/venv/bin/python3", 0o755);
    assert_eq!(
        fixture.chosen("python", None),
        "/m/venv/bin/python3 -m pharos_worker VIRTUAL_ENV=/m/venv"
    );
    // The link stays unresolved, because Python recognizes the environment by its path.
    fs::create_dir_all(fixture.root().join("env/bin")).unwrap();
    fs::create_dir_all(fixture.root().join("env/conda-meta")).unwrap();
    symlink(python3, fixture.root().join("env/bin/python3")).unwrap();
    let expected = "/env/bin/python3 -m pharos_worker CONDA_PREFIX=/env";
    let absolute = fixture.root().join("env");
    assert_eq!(fixture.chosen("python", absolute.to_str()), expected);
    assert_eq!(
        fixture.chosen("python", Some("$$TRITON_MODEL_DIRECTORY/../env")).replace("/m/..", ""),
        expected
    );
    let launch = fixture.choose("python", absolute.to_str()).unwrap();
    let bin = format!("{}/env/bin:", fixture.root().display());
    assert!(variable(&launch, "PATH").unwrap().starts_with(&bin));
    assert!(
        variable(&launch, "LD_LIBRARY_PATH")
            .unwrap()
            .starts_with(&format!("{}/env/lib", fixture.root().display()))
    );
    assert!(
        launch.variables.contains(&("PYTHONHOME", None))
            && launch.variables.contains(&("VIRTUAL_ENV", None))
    );
}

#[test]
fn the_variables_of_an_unpacked_environment_have_absolute_paths() {
    let mut fixture = Fixture::new();
    let python3 = fixture.file("python3", 0o755);
    let archive = fixture.root().join("env.tar");
    let mut builder = tar::Builder::new(fs::File::create(&archive).unwrap());
    builder.append_path_with_name(python3, "bin/python3").unwrap();
    builder.finish().unwrap();
    let up = "../".repeat(std::env::current_dir().unwrap().components().count() - 1);
    fixture.program.environments =
        Path::new(&up).join(fixture.root().strip_prefix("/").unwrap()).join("environments");
    let launch = fixture.choose("python", archive.to_str()).unwrap();
    assert!(launch.executable.is_absolute());
    for name in ["PATH", LIBRARY_PATH, "VIRTUAL_ENV"] {
        let value = variable(&launch, name).unwrap();
        assert!(value.starts_with('/'), "{name}: {value}");
    }
}

#[test]
fn interpreters_that_cannot_run_are_refused() {
    let mut fixture = Fixture::new();
    for (environment, expected) in [
        (
            "$$TRITON_MODEL_DIRECTORY/nowhere",
            "model 'm': EXECUTION_ENV_PATH is '/m/nowhere', which does not exist; allowed are the \
             directory of a virtual or conda environment, and a .tar.gz of one made by conda-pack \
             or venv-pack",
        ),
        (
            "/dev/null",
            "model 'm': EXECUTION_ENV_PATH is '/dev/null', which is neither a directory nor a \
             file; allowed",
        ),
        (
            "$$TRITON_MODEL_DIRECTORY/1",
            "model 'm': '/m/1' (the model's EXECUTION_ENV_PATH) is not a Python environment: it \
             has neither bin/python3 nor bin/python",
        ),
    ] {
        let error = fixture.chosen("python", Some(environment));
        assert!(error.starts_with(expected), "{error}");
    }
    let wrong = fixture.file("m/wrong.tar.gz", 0o644);
    let error = fixture.chosen("python", wrong.to_str());
    assert!(
        error.starts_with(
            "model 'm': the environment '/m/wrong.tar.gz' cannot be used: it cannot be unpacked \
             into '/environments/pharos-environments': it is neither a tar file nor one that is \
             compressed with gzip"
        ),
        "{error}"
    );
    fixture.file("m/venv/bin/python3", 0o644);
    assert_eq!(
        fixture.chosen("python", None),
        "model 'm': the Python interpreter '/m/venv/bin/python3' (in the model's directory) is \
         not executable by this user"
    );
    fs::remove_file(fixture.root().join("m/venv/bin/python3")).unwrap();
    symlink("/nonexistent/python3", fixture.root().join("m/venv/bin/python3")).unwrap();
    assert!(fixture.chosen("python", None).ends_with("is a dangling link"));
    fs::remove_dir_all(fixture.root().join("m/venv")).unwrap();
    for (python, expected) in [
        (
            "/nonexistent/python3",
            "model 'm': the Python interpreter '/nonexistent/python3' (of --python) does not exist",
        ),
        ("/usr", "model 'm': the Python interpreter '/usr' (of --python) is not a file"),
        (
            "no-such-python",
            "model 'm' needs Python, but 'no-such-python' is not on the PATH; set --python",
        ),
    ] {
        fixture.program.python = Some(python.into());
        assert_eq!(fixture.chosen("python", None), expected);
    }
}

#[test]
fn onnx_models_on_gpus_need_the_cuda_provider_beside_the_library() {
    let mut fixture = Fixture::new();
    let why = |fixture: &Fixture| no_cuda_provider(&fixture.program);
    assert!(why(&fixture).unwrap().starts_with("ONNX Runtime is not installed, "));
    fixture.program.onnxruntime = Some(fixture.file("capi/libonnxruntime.so.1.31.1", 0o644));
    let text = why(&fixture).unwrap();
    let advice = "is missing; `pip install onnxruntime-gpu[cuda,cudnn]` installs it";
    assert!(
        text.contains("capi/libonnxruntime_providers_cuda.so' ") && text.ends_with(advice),
        "{text}"
    );
    fixture.file("capi/libonnxruntime_providers_cuda.so", 0o644);
    assert_eq!(why(&fixture), None);
}

#[test]
fn lists_files_outside_the_model() {
    let fixture = Fixture::new();
    let path = fixture.file("backends/mine/libpharos_mine.so", 0o644);
    let of = |backend, environment| {
        fixture.with_model(backend, environment, |model| outside(&fixture.program, model))
    };
    assert_eq!(of("mine", None), [path]);
    assert_eq!(of("python", Some("/env.tar.gz")), [PathBuf::from("/env.tar.gz")]);
    assert!(
        of("python", None).is_empty()
            && of("builtin", None).is_empty()
            && of("none", None).is_empty()
    );
}

#[test]
fn onnx_runtime_sends_nothing_unless_the_user_allows_it() {
    let mut fixture = Fixture::new();
    fixture.program.onnxruntime = Some("/opt/libonnxruntime.so".into());
    for backend in ["onnxruntime", "builtin", "python"] {
        assert_eq!(
            variable(&fixture.choose(backend, None).unwrap(), TELEMETRY),
            Some("1".to_owned())
        );
    }
    assert_eq!(without_telemetry(Some("0".into())), (TELEMETRY, Some("0".into())));
}

#[test]
fn what_fork_servers_load() {
    let mut fixture = Fixture::new();
    fixture.program.onnxruntime = Some("/opt/libonnxruntime.so".into());
    let preload = |fixture: &Fixture, backend| fixture.choose(backend, None).unwrap().preload;
    for backend in ["onnxruntime", "builtin", "python"] {
        assert_eq!(preload(&fixture, backend), None);
    }
    fixture.program.forks = true;
    fixture.program.python_preload = vec!["numpy".to_owned()];
    assert_eq!(preload(&fixture, "onnxruntime"), Some(vec!["onnxruntime".to_owned()]));
    assert_eq!(preload(&fixture, "builtin"), Some(Vec::new()));
    assert_eq!(preload(&fixture, "python"), Some(vec!["numpy".to_owned()]));
}

#[test]
fn the_program_that_makes_a_sandbox_does_not_get_the_variables_of_the_model() {
    let mut fixture = Fixture::new();
    fixture.program.sandboxes.mode = SandboxMode::On;
    fixture.file("m/venv/bin/python3", 0o755);
    let launch = fixture.choose("python", None).unwrap();
    assert!(variable(&launch, LIBRARY_PATH).unwrap().contains("/m/venv/lib"));
    let command = launch.command(Some(Path::new("/tmp/own")));
    assert_eq!(command.get_program(), "/opt/pharos-worker");
    // Its loader would search for libraries in the environment of the model.
    assert!(command.get_envs().all(|(_, value)| value.is_none()), "{command:?}");
    let text: Vec<_> = command.get_args().map(|argument| argument.to_string_lossy()).collect();
    for (name, value) in [(LIBRARY_PATH, "/m/venv/lib"), (TEMPORARY, "/tmp/own")] {
        let at = text.iter().position(|argument| argument == name).unwrap();
        assert!(text[at - 1] == "--set" && text[at + 1].contains(value), "{text:?}");
    }
}

#[test]
fn a_program_gets_its_variables_also_if_they_have_hidden_names() {
    let mut fixture = Fixture::new();
    fixture.program.hidden = vec!["PATH".into(), "SECRET".into()];
    fixture.file("m/venv/bin/python3", 0o755);
    let command = fixture.choose("python", None).unwrap().command(None);
    let value = |name: &str| command.get_envs().find(|(known, _)| *known == name).unwrap().1;
    assert!(value("PATH").unwrap().to_str().unwrap().contains("/m/venv/bin"));
    assert_eq!(value("SECRET"), None);
}
