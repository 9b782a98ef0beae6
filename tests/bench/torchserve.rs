//! A TorchServe handler, served by this server and by a real TorchServe from the same files.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::models::Scratch;
use crate::server::Ports;
use crate::workload::HANDLER;

/// A minimal handler that returns the body. TorchServe calls it once without requests at the start.
const PROGRAM: &str = r#"def handle(data, context):
    return [bytes(request["body"]) for request in data] if data else None
"#;

/// Returns why the real TorchServe cannot be measured here, if so.
pub(crate) fn missing(home: &Path) -> Option<String> {
    let marker = home.join("ready");
    (!marker.is_file()).then(|| {
        format!(
            "{} does not exist: run `python3 tests/python/torchserve/peer.py install`",
            marker.display()
        )
    })
}

/// Returns the command that starts this server like TorchServe.
///
/// # Errors
/// The folder cannot be written.
pub(crate) fn command(pharos: &Path, ports: Ports, scratch: &Scratch) -> io::Result<Command> {
    let files = Files::write(&scratch.path("pharos-torchserve"), ports)?;
    let mut command = Command::new(pharos);
    command.args(["torchserve", "--start", "--foreground", "--ncs", "--disable-token-auth"]);
    command.arg("--ts-config").arg(&files.config).arg("--model-store").arg(&files.store);
    command.current_dir(&files.folder).env("TMPDIR", &files.folder);
    Ok(command)
}

/// Returns the command that starts the real TorchServe without its launcher, so that its process is
/// the one that is stopped. TorchServe's modules import a stub of `torch`; the handler needs none.
///
/// # Errors
/// The folder cannot be written.
pub(crate) fn peer(home: &Path, ports: Ports, scratch: &Scratch) -> io::Result<Command> {
    let files = Files::write(&scratch.path("torchserve"), ports)?;
    let python = home.join("venv/bin/python");
    let packages = packages(home)?;
    let mut command = Command::new("java");
    command.arg(format!("-Dmodel_server_home={}", packages.display()));
    command.arg(format!("-Djava.io.tmpdir={}", files.folder.display()));
    command.arg("-cp").arg(packages.join("ts/frontend/*")).arg("org.pytorch.serve.ModelServer");
    command.arg("--python").arg(&python).arg("-f").arg(&files.config).arg("-s").arg(&files.store);
    command
        .args(["-ncs", "--disable-token-auth"])
        .current_dir(&files.folder)
        .env("PYTHONPATH", home.join("stub"));
    let path = std::env::var("PATH").unwrap_or_default();
    command.env("PATH", format!("{}:{path}", home.join("venv/bin").display()));
    Ok(command)
}

/// Returns the package folder of the environment.
fn packages(home: &Path) -> io::Result<PathBuf> {
    let mut entries = fs::read_dir(home.join("venv/lib"))?;
    let python = entries.find_map(|entry| entry.ok().map(|entry| entry.path()));
    python
        .map(|python| python.join("site-packages"))
        .ok_or_else(|| io::Error::other("the environment has no packages"))
}

/// The files of either server: one worker, no batching, and metrics in the logs, as is TorchServe's
/// default.
struct Files {
    folder: PathBuf,
    store: PathBuf,
    config: PathBuf,
}

impl Files {
    fn write(folder: &Path, ports: Ports) -> io::Result<Self> {
        let (folder, store) = (folder.to_owned(), folder.join("store"));
        let archive = store.join(HANDLER);
        fs::create_dir_all(archive.join("MAR-INF"))?;
        fs::write(archive.join("handler.py"), PROGRAM)?;
        let model = format!(
            r#"{{"modelName": "{HANDLER}", "handler": "handler.py", "modelVersion": "1.0"}}"#
        );
        let manifest =
            format!(r#"{{"runtime": "python", "archiverVersion": "0.12.0", "model": {model}}}"#);
        fs::write(archive.join("MAR-INF/MANIFEST.json"), manifest)?;
        let config = folder.join("config.properties");
        fs::write(&config, properties(ports))?;
        Ok(Self { folder, store, config })
    }
}

fn properties(ports: Ports) -> String {
    let Ports { http, grpc, metrics, management, grpc_management } = ports;
    let address = |name: &str, port: u16| format!("{name}_address=http://127.0.0.1:{port}\n");
    let addresses = [("inference", http), ("management", management), ("metrics", metrics)];
    let listeners: String = addresses.iter().map(|(name, port)| address(name, *port)).collect();
    format!(
        "{listeners}grpc_inference_port={grpc}\ngrpc_management_port={grpc_management}\n\
         number_of_gpu=0\ndefault_workers_per_model=1\nload_models={HANDLER}\n"
    )
}
