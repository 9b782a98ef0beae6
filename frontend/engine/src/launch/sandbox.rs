//! The sandbox of the programs that run models: which files, directories and devices they may use.
//!
//! The worker's executable restricts itself and then becomes the program
//! ([`pharos::wire::sandbox`]), so that the restrictions apply before any code of the model or of
//! its Python environment runs.

use std::ffi::OsString;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use pharos::model::{Isolation, SandboxChoice, SandboxMode, refused_sandbox};
use pharos::wire::sandbox::{CHECK, ESSENTIAL, Permissions};
use pharos_os::directories;
use pharos_os::worker_user::WorkerUser;

use super::settings::{Program, Sandboxes};
use super::{Model, Variables};

/// The parts of the system that interpreters and libraries read: programs, libraries, and the
/// settings of users, time zones, certificates and drivers, but no others of `/etc`.
const SYSTEM: [&str; 34] = [
    "/bin",
    "/etc/OpenCL",
    "/etc/alternatives",
    "/etc/ca-certificates",
    "/etc/crypto-policies",
    "/etc/group",
    "/etc/host.conf",
    "/etc/hosts",
    "/etc/ld.so.cache",
    "/etc/ld.so.conf",
    "/etc/ld.so.conf.d",
    "/etc/localtime",
    "/etc/mime.types",
    "/etc/nsswitch.conf",
    "/etc/passwd",
    "/etc/pki/ca-trust",
    "/etc/pki/tls/cert.pem",
    "/etc/pki/tls/certs",
    "/etc/pki/tls/openssl.cnf",
    "/etc/resolv.conf",
    "/etc/ssl/cert.pem",
    "/etc/ssl/certs",
    "/etc/ssl/openssl.cnf",
    "/etc/timezone",
    "/lib",
    "/lib32",
    "/lib64",
    "/nix/store",
    "/opt/rocm",
    "/proc",
    "/run/opengl-driver",
    "/sbin",
    "/sys",
    "/usr",
];

/// The devices that every program may use. Terminals are not among them: a program could type into
/// one.
const DEVICES: [&str; 5] = ["/dev/full", "/dev/null", "/dev/random", "/dev/urandom", "/dev/zero"];

/// The start of the names of GPU devices in `/dev`. CUDA opens `nvidiactl`, `nvidia-uvm`,
/// `nvidia-caps` and one device for each GPU; ROCm opens `kfd` and `dri`.
const GPUS: [&str; 3] = ["nvidia", "kfd", "dri"];

/// The device that every program with CUDA opens.
const CUDA: &str = "nvidiactl";

/// The directories of a Python installation that are not only of this Python: in `/usr/local` or a
/// home directory, others are beside them.
const PYTHON: [&str; 5] = ["bin", "include", "lib", "lib64", "share"];

/// A program's sandbox.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Sandbox {
    /// The worker's executable.
    pub(crate) worker: PathBuf,
    /// How it was chosen.
    pub(crate) choice: SandboxChoice,
    permissions: Permissions,
}

impl Sandbox {
    /// Returns the arguments of the worker's executable with which it becomes `program`, which may
    /// also write `writable` and gets these variables.
    pub(super) fn arguments(
        &self,
        program: &Path,
        writable: Option<&Path>,
        variables: Variables,
    ) -> Vec<OsString> {
        let mut permissions = self.permissions.clone();
        permissions.write.extend(writable.map(Path::to_owned));
        permissions.variables =
            variables.into_iter().map(|(name, value)| (name.into(), value)).collect();
        permissions.arguments(program.as_os_str())
    }

    /// Permits to read further paths, which are the operator's: links in them are followed.
    pub(super) fn permit(&mut self, paths: impl IntoIterator<Item = PathBuf>) {
        self.permissions.read.extend(paths);
    }

    /// Permits to read a path beneath a directory, whose path is absolute and without links. The
    /// content of the directory may be a model's.
    pub(super) fn permit_beneath(&mut self, root: &Path, path: &str) {
        self.permissions.beneath.push((root.to_owned(), path.into()));
    }

    /// Returns whether a path without links is in what may be read already.
    pub(super) fn permits(&self, path: &Path) -> bool {
        let Permissions { read, write, beneath, .. } = &self.permissions;
        let all = read
            .iter()
            .chain(write)
            .cloned()
            .chain(beneath.iter().map(|(root, inside)| root.join(inside)));
        all.filter_map(|permitted| fs::canonicalize(permitted).ok())
            .any(|permitted| path.starts_with(permitted))
    }
}

/// Returns the sandbox of a model's programs, which may read its files and the system; `None` for
/// none.
///
/// # Errors
/// The model's parameter is invalid, or switches off what must not be.
pub(super) fn of(program: &Program, model: &Model<'_>) -> Result<Option<Sandbox>, String> {
    let Sandboxes { mode, read, write } = &program.sandboxes;
    let choice = model
        .provenance
        .sandbox(*mode, model.sandbox)
        .map_err(|what| refused_sandbox(model.name, &what))?;
    if choice.isolation == Isolation::None {
        return Ok(None);
    }
    let mut permissions = Permissions {
        required: choice.required,
        network: choice.isolation == Isolation::Network,
        ..Permissions::default()
    };
    permissions.read.extend(SYSTEM.iter().map(PathBuf::from));
    permissions.read.extend([model.directory.to_owned(), program.worker.clone()]);
    // The server has made this directory, with links to an unpacked version or to the files of a
    // single model. Links within an unpacked version lead to files that are not the model's.
    if directories::is_in_own(model.directory) {
        if model.version.is_symlink() {
            permissions
                .beneath
                .extend(fs::canonicalize(model.version).map(|version| (version, ".".into())));
        } else {
            permissions.read.extend(links_in(model.directory).chain(links_in(model.version)));
        }
    }
    permissions.read.extend(of_python_in_etc());
    permissions.read.extend(program.onnxruntime.iter().flat_map(|library| of_library(library)));
    for variable in ["PYTHONPATH", super::LIBRARY_PATH] {
        permissions.read.extend(paths_of(variable));
    }
    // The packages that `pip install --user` installs.
    permissions.read.extend(home(program.user.as_deref()).map(|home| home.join(".local/lib")));
    permissions.read.extend(read.iter().cloned());
    let gpus = gpu_devices(Path::new("/dev"));
    permissions.cuda = has_cuda(&gpus);
    permissions.write.extend(DEVICES.iter().map(PathBuf::from).chain(gpus));
    permissions.write.extend(write.iter().cloned());
    Ok(Some(Sandbox { worker: program.worker.clone(), choice, permissions }))
}

/// The files of the system that pip reads in addition: its settings, and the name and version of
/// the distribution, which it sends to package indexes.
const PIP_FILES: [&str; 4] =
    ["/etc/debian_version", "/etc/lsb-release", "/etc/os-release", "/etc/pip.conf"];

/// The settings of pip, such as the address of a package index, and the packages of the user, in a
/// home directory.
const PIP_SETTINGS: [&str; 3] = [".config/pip", ".pip", ".local/lib"];

/// Returns what a program may use that installs packages for a model whose code came by request,
/// because packages run code while they are installed: the system, its Python interpreter, the
/// settings of pip, and the network. The caller adds the directories that it reads and writes.
/// `None` without sandboxes.
pub(super) fn of_installer(
    sandboxes: &Sandboxes,
    user: Option<&WorkerUser>,
    python: Option<&Path>,
) -> Option<Permissions> {
    let Sandboxes { mode, read, write } = sandboxes;
    if *mode == SandboxMode::Off {
        return None;
    }
    let mut permissions =
        Permissions { required: *mode == SandboxMode::On, network: true, ..Permissions::default() };
    permissions.read.extend(SYSTEM.iter().map(PathBuf::from));
    permissions.read.extend(of_python_in_etc());
    permissions.read.extend(PIP_FILES.iter().map(PathBuf::from));
    permissions.read.extend(python.into_iter().flat_map(of_interpreter));
    let home = home(user);
    permissions.read.extend(home.iter().flat_map(|home| PIP_SETTINGS.map(|name| home.join(name))));
    permissions.read.extend(read.iter().cloned());
    permissions.write.extend(DEVICES.iter().map(PathBuf::from));
    permissions.write.extend(write.iter().cloned());
    Some(permissions)
}

/// Returns the home directory of the user of models.
fn home(user: Option<&WorkerUser>) -> Option<PathBuf> {
    match user {
        Some(user) => Some(user.home().to_owned()),
        None => std::env::var_os("HOME").map(PathBuf::from),
    }
}

/// Returns the paths in a variable of this process, which workers inherit.
fn paths_of(variable: &str) -> Vec<PathBuf> {
    let value = std::env::var_os(variable).unwrap_or_default();
    std::env::split_paths(&value).filter(|path| path.is_absolute()).collect()
}

/// Returns the links in a directory.
fn links_in(directory: &Path) -> impl Iterator<Item = PathBuf> {
    let entries = fs::read_dir(directory).into_iter().flatten().flatten();
    entries.map(|entry| entry.path()).filter(|path| path.is_symlink())
}

/// Returns the settings of Python in `/etc`, where Debian's `sitecustomize` is.
fn of_python_in_etc() -> Vec<PathBuf> {
    beside(Path::new("/etc"), "python3")
}

/// Returns ONNX Runtime's library and its providers, but nothing else of their directory.
fn of_library(library: &Path) -> Vec<PathBuf> {
    let library = fs::canonicalize(library).unwrap_or_else(|_| library.to_owned());
    library.parent().map(|directory| beside(directory, "libonnxruntime")).unwrap_or_default()
}

/// Returns the entries of a directory whose names have this beginning.
fn beside(directory: &Path, beginning: &str) -> Vec<PathBuf> {
    let entries = fs::read_dir(directory).into_iter().flatten().flatten();
    let found = entries.filter(|entry| entry.file_name().to_string_lossy().starts_with(beginning));
    found.map(|entry| entry.path()).collect()
}

fn gpu_devices(directory: &Path) -> Vec<PathBuf> {
    GPUS.iter().flat_map(|beginning| beside(directory, beginning)).collect()
}

fn has_cuda(devices: &[PathBuf]) -> bool {
    devices.iter().any(|device| device.ends_with(CUDA))
}

/// Returns the files that the operator's Python interpreter reads: its virtual environment, and the
/// installation to which its links lead.
pub(super) fn of_interpreter(interpreter: &Path) -> Vec<PathBuf> {
    let mut paths = Vec::new();
    if let Some(home) = home_of(interpreter).filter(|home| is_environment(home)) {
        paths.push(home);
    }
    let real = fs::canonicalize(interpreter).ok();
    if let Some(installation) =
        real.as_deref().and_then(home_of).filter(|home| home != Path::new("/"))
    {
        match is_environment(&installation) {
            true => paths.push(installation),
            false => paths.extend(PYTHON.map(|name| installation.join(name))),
        }
    }
    paths.push(interpreter.to_owned());
    paths
}

/// Returns the directory above the `bin` of an interpreter.
fn home_of(interpreter: &Path) -> Option<PathBuf> {
    Some(interpreter.parent()?.parent()?.to_owned())
}

/// Returns the parts of a model's environment that it may read, in a directory whose path has no
/// links.
pub(super) fn parts_of_environment(home: &Path) -> Vec<&'static str> {
    if is_environment(home) { vec!["."] } else { PYTHON.to_vec() }
}

/// Returns whether a directory contains nothing but a virtual or conda environment.
fn is_environment(home: &Path) -> bool {
    home.join("pyvenv.cfg").is_file() || home.join("conda-meta").is_dir()
}

/// A protection that this machine lacks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Gap {
    /// There are no sandboxes, for this reason.
    Essential(String),
    /// Sandboxes do not restrict something; a sentence.
    Lesser(String),
}

/// Returns the protections that this machine lacks, if sandboxes are used. Blocks while a process
/// checks.
///
/// # Errors
/// A permitted path does not exist, or sandboxes must be used and cannot be made here; the text
/// contains the reason.
pub fn check(worker: &Path, sandboxes: &Sandboxes, are_used: bool) -> Result<Vec<Gap>, String> {
    let Sandboxes { mode, read, write } = sandboxes;
    for (flag, paths) in [("--worker-sandbox-read", read), ("--worker-sandbox-write", write)] {
        if let Some((path, error)) =
            paths.iter().find_map(|path| Some((path, path.metadata().err()?)))
        {
            return Err(format!("{flag}: '{}' cannot be permitted: {error}", path.display()));
        }
    }
    if *mode == SandboxMode::Off || !are_used {
        return Ok(Vec::new());
    }
    let output =
        Command::new(worker).arg(CHECK).stdin(Stdio::null()).stderr(Stdio::null()).output();
    let lines = match output {
        Ok(output) if output.status.success() => {
            String::from_utf8_lossy(&output.stdout).into_owned()
        }
        Ok(output) => format!("{ESSENTIAL}the check failed ({})", output.status),
        Err(error) => format!("{ESSENTIAL}'{}': {error}", worker.display()),
    };
    let gaps: Vec<Gap> = lines.lines().map(gap).collect();
    let essential = gaps.iter().find_map(|gap| match gap {
        Gap::Essential(why) => Some(why),
        Gap::Lesser(_) => None,
    });
    match essential.filter(|_| *mode == SandboxMode::On) {
        Some(why) => Err(format!("--worker-sandbox=on: workers cannot be restricted here: {why}")),
        None => Ok(gaps),
    }
}

fn gap(line: &str) -> Gap {
    match line.strip_prefix(ESSENTIAL) {
        Some(why) => Gap::Essential(why.to_owned()),
        None => Gap::Lesser(line.to_owned()),
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use pharos::model::Provenance;

    use super::super::limits::Parameters;
    use super::*;

    fn sandbox(mode: SandboxMode, parameter: Option<&str>) -> Result<Option<Sandbox>, String> {
        let sandboxes =
            Sandboxes { mode, read: vec!["/data".into()], write: vec!["/cache".into()] };
        let program =
            Program { worker: "/opt/pharos-worker".into(), sandboxes, ..Program::default() };
        let model = Model {
            name: "m",
            backend: "python",
            library: None,
            environment: None,
            sandbox: parameter,
            provenance: Provenance::default(),
            limits: Parameters::default(),
            directory: Path::new("/models/m"),
            version: Path::new("/models/m/1"),
        };
        of(&program, &model)
    }

    #[test]
    fn a_refused_parameter_is_named_with_its_model() {
        assert_eq!(sandbox(SandboxMode::Uploads, None), Ok(None));
        let error = sandbox(SandboxMode::On, Some("off")).unwrap_err();
        assert_eq!(
            error,
            "model 'm': its parameter 'sandbox' is 'off', which --worker-sandbox=on does not allow"
        );
    }

    #[test]
    fn a_model_may_read_its_files_and_write_its_directory() {
        let sandbox = sandbox(SandboxMode::On, None).unwrap().unwrap();
        let Permissions { read, write, .. } = &sandbox.permissions;
        let has =
            |paths: &[PathBuf], path: &str| paths.iter().any(|known| known == Path::new(path));
        assert!(
            ["/usr", "/models/m", "/opt/pharos-worker", "/data"].iter().all(|path| has(read, path))
        );
        assert!(has(write, "/dev/null") && has(write, "/cache"));
        let everything = |path: &&str| has(read, path) || has(write, path);
        assert_eq!(
            ["/", "/etc", "/etc/ssl", "/home", "/root", "/tmp", "/dev", "/dev/shm", "/dev/tty"]
                .iter()
                .find(|path| everything(path)),
            None
        );
        let arguments =
            sandbox.arguments(Path::new("python3"), Some(Path::new("/tmp/own")), Vec::new());
        let (permissions, program, _) = Permissions::parse(arguments.into_iter().skip(1)).unwrap();
        assert_eq!(
            (permissions.write.last().unwrap(), program),
            (&PathBuf::from("/tmp/own"), "python3".into())
        );
    }

    #[test]
    fn an_interpreter_reads_its_environment_and_its_installation() {
        let folder = tempfile::tempdir().unwrap();
        let root = fs::canonicalize(folder.path()).unwrap();
        let home = root.join("home");
        let python = root.join("venv/bin/python3");
        for directory in [home.join("bin"), root.join("venv/bin")] {
            fs::create_dir_all(directory).unwrap();
        }
        fs::write(home.join("bin/python3.11"), "").unwrap();
        fs::write(root.join("venv/pyvenv.cfg"), "").unwrap();
        std::os::unix::fs::symlink(home.join("bin/python3.11"), &python).unwrap();
        let paths = of_interpreter(&python);
        assert!(
            [root.join("venv"), home.join("lib"), python.clone()]
                .iter()
                .all(|path| paths.contains(path))
        );
        assert!(!paths.contains(&home), "others may be beside an installation in a home directory");
    }

    #[test]
    fn gpu_devices_are_found_by_name() {
        let folder = tempfile::tempdir().unwrap();
        for name in ["nvidia0", "nvidiactl", "null", "sda", "kfd"] {
            fs::write(folder.path().join(name), "").unwrap();
        }
        let mut names: Vec<_> = gpu_devices(folder.path())
            .iter()
            .map(|path| path.file_name().unwrap().to_owned())
            .collect();
        names.sort();
        assert_eq!(names, ["kfd", "nvidia0", "nvidiactl"]);
        assert!(has_cuda(&gpu_devices(folder.path())));
        fs::remove_file(folder.path().join("nvidiactl")).unwrap();
        assert!(!has_cuda(&gpu_devices(folder.path())));
    }
}
