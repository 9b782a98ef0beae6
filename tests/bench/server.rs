//! The measured processes: start, wait until ready, memory, stop.

use std::fs::{self, File};
use std::net::{Ipv4Addr, SocketAddr, TcpListener};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};

use crate::client::Protocol;
use crate::compiled::{Interface, backends};
use crate::http_client::get_status;
use crate::load::Target;
use crate::models::{Scratch, write_builtin, write_common, write_compiled, write_python};
use crate::observed;
use crate::torchserve;
use crate::workload::Workload;

/// The time limit for a server to become ready; Triton starts a Python process for each model.
const START_LIMIT: Duration = Duration::from_secs(60);

/// The time limit for a server to exit after SIGTERM.
const END_LIMIT: Duration = Duration::from_secs(30);

/// The kind of a server.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Kind {
    /// The limit of the libraries, with tokio's usual runtime.
    Echo,
    /// The same with an event loop for each processor.
    EchoLoops,
    /// This server.
    Pharos,
    /// This server without metrics.
    Bare,
    /// This server with all metrics, tenants, objectives, times in answers, and a push of metrics;
    /// without metric logs.
    Observed,
    /// This server with a compiled backend that has Triton's interface.
    Compiled,
    /// The peer for models.
    Triton,
    /// This server, started like TorchServe.
    PharosTorchserve,
    /// The peer for handlers.
    Torchserve,
}

impl Kind {
    /// All kinds, in the order of the report.
    pub(crate) const ALL: [Self; 9] = [
        Self::Echo,
        Self::EchoLoops,
        Self::Pharos,
        Self::Bare,
        Self::Observed,
        Self::Compiled,
        Self::Triton,
        Self::PharosTorchserve,
        Self::Torchserve,
    ];

    /// Returns the name in the report.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Echo => "echo",
            Self::EchoLoops => "echo-loops",
            Self::Pharos => "pharos",
            Self::Bare => "pharos-no-metrics",
            Self::Observed => "pharos-observed",
            Self::Compiled => "pharos-triton",
            Self::Triton => "triton",
            Self::PharosTorchserve => "pharos-torchserve",
            Self::Torchserve => "torchserve",
        }
    }

    /// Returns whether the server only echoes.
    pub(crate) fn is_echo(self) -> bool {
        matches!(self, Self::Echo | Self::EchoLoops)
    }

    /// Returns whether the server is only a reference and may be missing.
    pub(crate) fn is_peer(self) -> bool {
        matches!(self, Self::Triton | Self::Torchserve)
    }

    /// Returns whether the server is measured with a workload. The cost of metrics shows with small
    /// requests. Sequences are compared with the dynamic batcher of the same server, models in Python
    /// with Triton and TorchServe, and Triton's interface with the server's own interface.
    pub(crate) fn serves(self, workload: Workload) -> bool {
        let handlers = matches!(self, Self::PharosTorchserve | Self::Torchserve);
        match workload {
            Workload::Simple => !handlers && self != Self::Compiled,
            Workload::Identity => {
                !handlers && !matches!(self, Self::Bare | Self::Observed | Self::Compiled)
            }
            Workload::Compiled(_) => matches!(self, Self::Pharos | Self::Compiled),
            Workload::Sequences => self == Self::Pharos,
            Workload::Python(_) => matches!(self, Self::Pharos | Self::Triton),
            Workload::Handler => handlers,
            Workload::Growth(_) => false,
        }
    }

    /// Returns the path that answers 200 when the server is ready.
    fn ready_path(self) -> &'static str {
        match self {
            // `/ping` does not cover the model: TorchServe is healthy before it has loaded any.
            Self::PharosTorchserve | Self::Torchserve => "/predictions/handler",
            _ => "/v2/health/ready",
        }
    }
}

/// A running server, stopped by its process id when dropped.
pub(crate) struct Server {
    pub(crate) kind: Kind,
    child: Child,
    ports: Ports,
    log: PathBuf,
}

/// Free ports on loopback.
#[derive(Clone, Copy)]
pub(crate) struct Ports {
    pub(crate) http: u16,
    pub(crate) grpc: u16,
    pub(crate) metrics: u16,
    pub(crate) management: u16,
    pub(crate) grpc_management: u16,
}

impl Server {
    /// Starts a server and waits until it is ready.
    ///
    /// # Errors
    /// The server cannot be started, exits, or is not ready in time; the text has the end of its
    /// log.
    pub(crate) fn start(
        kind: Kind,
        programs: &Programs,
        scratch: &Scratch,
    ) -> Result<Self, String> {
        let log = scratch.path(&format!("{}.log", kind.name()));
        let failed = |error: std::io::Error| format!("cannot start {}: {error}", kind.name());
        let ports = Ports::free().map_err(failed)?;
        let mut command = programs.command(kind, ports, scratch).map_err(failed)?;
        let output = File::create(&log).map_err(failed)?;
        command.stderr(output.try_clone().map_err(failed)?).stdout(output);
        // The echo exits when its standard input ends, so it cannot outlive this process.
        command.stdin(if kind.is_echo() { Stdio::piped() } else { Stdio::null() });
        let child = command.spawn().map_err(failed)?;
        let mut server = Self { kind, child, ports, log };
        server.wait_until_ready()?;
        Ok(server)
    }

    /// Returns the address of the listener.
    pub(crate) fn address(&self, protocol: Protocol) -> SocketAddr {
        let port = match protocol {
            Protocol::Http => self.ports.http,
            Protocol::Grpc => self.ports.grpc,
        };
        (Ipv4Addr::LOCALHOST, port).into()
    }

    /// Returns what measurements need to know.
    pub(crate) fn target(&self, protocol: Protocol) -> Target {
        Target {
            address: self.address(protocol),
            process: Some(self.pid()),
            verify: !self.kind.is_echo(),
        }
    }

    /// Returns the process id.
    pub(crate) fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Returns the last lines of the log.
    pub(crate) fn log_tail(&self) -> String {
        let text = fs::read(&self.log).unwrap_or_default();
        let text = String::from_utf8_lossy(&text);
        let lines: Vec<_> = text.lines().collect();
        lines[lines.len().saturating_sub(15)..].join("\n")
    }

    fn wait_until_ready(&mut self) -> Result<(), String> {
        let deadline = Instant::now() + START_LIMIT;
        let name = self.kind.name();
        loop {
            if let Ok(Some(status)) = self.child.try_wait() {
                return Err(format!(
                    "{name} exited before it was ready ({status}):\n{}",
                    self.log_tail()
                ));
            }
            let seen = match get_status(self.address(Protocol::Http), self.kind.ready_path()) {
                Ok(200) => return Ok(()),
                Ok(status) => format!("HTTP status {status}"),
                Err(error) => error,
            };
            if Instant::now() > deadline {
                let limit = START_LIMIT.as_secs();
                return Err(format!(
                    "{name} was not ready in {limit} s; last result: {seen}\n{}",
                    self.log_tail()
                ));
            }
            thread::sleep(Duration::from_millis(50));
        }
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        if let Some(pid) = i32::try_from(self.child.id()).ok().and_then(Pid::from_raw) {
            // The process is not reaped yet, so its id cannot belong to another process.
            let _ = kill_process(pid, Signal::TERM);
        }
        let deadline = Instant::now() + END_LIMIT;
        while Instant::now() < deadline {
            if !matches!(self.child.try_wait(), Ok(None)) {
                return;
            }
            thread::sleep(Duration::from_millis(20));
        }
        eprintln!(
            "{} did not exit within {} s after SIGTERM: killed",
            self.kind.name(),
            END_LIMIT.as_secs()
        );
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Ports {
    /// Reserves free ports, all at once so that they differ.
    fn free() -> std::io::Result<Self> {
        let bind = || TcpListener::bind((Ipv4Addr::LOCALHOST, 0));
        let all = [bind()?, bind()?, bind()?, bind()?, bind()?];
        let port = |at: usize| all[at].local_addr().map(|address| address.port());
        let (management, grpc_management) = (port(3)?, port(4)?);
        Ok(Self { http: port(0)?, grpc: port(1)?, metrics: port(2)?, management, grpc_management })
    }
}

/// The paths of the programs.
pub(crate) struct Programs {
    /// The server under test: `PHAROS_BIN`, by default the output of `cargo build --release`.
    pharos: PathBuf,
    /// The folder with the script `triton`: `PHAROS_PEERS`.
    peers: PathBuf,
    /// The folder into which that script installs: `PEERS_HOME`, by default in the user's cache
    /// folder.
    peers_home: PathBuf,
    /// The interpreter for Python models: `PHAROS_PYTHON`, by default `python3`.
    python: PathBuf,
    /// The folder into which `tests/python/torchserve/peer.py` installs TorchServe.
    torchserve: PathBuf,
}

impl Programs {
    /// Reads the environment.
    pub(crate) fn find() -> Self {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap_or(Path::new("."));
        let from = |name: &str| {
            std::env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from)
        };
        let cache =
            || from("XDG_CACHE_HOME").or_else(|| from("HOME").map(|home| home.join(".cache")));
        Self {
            pharos: from("PHAROS_BIN").unwrap_or_else(|| root.join("target/release/pharos")),
            peers: from("PHAROS_PEERS").unwrap_or_else(|| root.join("../shared/peers")),
            peers_home: from("PEERS_HOME")
                .unwrap_or_else(|| cache().unwrap_or_default().join("pharos-peers")),
            python: from("PHAROS_PYTHON").unwrap_or_else(|| "python3".into()),
            torchserve: from("PHAROS_TORCHSERVE_HOME")
                .unwrap_or_else(|| root.join("target/torchserve")),
        }
    }

    /// Returns why a server cannot be measured here, if so.
    pub(crate) fn missing(&self, kind: Kind) -> Option<String> {
        let (script, marker) = (self.peers.join("triton"), self.peers_home.join("triton/ready"));
        match kind {
            Kind::Pharos
            | Kind::Bare
            | Kind::Observed
            | Kind::Compiled
            | Kind::PharosTorchserve
                if !self.pharos.is_file() =>
            {
                Some(format!(
                    "{} does not exist: `make build`, or set PHAROS_BIN",
                    self.pharos.display()
                ))
            }
            Kind::Triton if !script.is_file() => {
                Some(format!("{} does not exist: set PHAROS_PEERS to its folder", script.display()))
            }
            Kind::Triton if !marker.is_file() => Some(format!(
                "{} does not exist: run `{}` once to install it",
                marker.display(),
                script.display()
            )),
            Kind::Torchserve => torchserve::missing(&self.torchserve),
            _ => None,
        }
    }

    /// Returns why Python models cannot be measured here, if so.
    pub(crate) fn no_python(&self) -> Option<String> {
        let name = self.python.display();
        match Command::new(&self.python)
            .args(["-c", "import pharos_worker"])
            .stderr(Stdio::null())
            .status()
        {
            Ok(status) if status.success() => None,
            Ok(_) => Some(format!(
                "{name} lacks the package pharos-worker: run `{name} -m pip install \
                 ./worker/python`"
            )),
            Err(error) => Some(format!("{name}: {error}; set PHAROS_PYTHON to an interpreter")),
        }
    }

    fn command(&self, kind: Kind, ports: Ports, scratch: &Scratch) -> std::io::Result<Command> {
        let models = scratch.path(&format!("{}-models", kind.name()));
        let mut command = match kind {
            Kind::Echo | Kind::EchoLoops => Command::new(std::env::current_exe()?),
            Kind::Pharos | Kind::Bare | Kind::Observed | Kind::Compiled => {
                Command::new(&self.pharos)
            }
            Kind::Triton => Command::new(self.peers.join("triton")),
            Kind::PharosTorchserve => {
                let mut command = torchserve::command(&self.pharos, ports, scratch)?;
                command.env("PHAROS_PYTHON", &self.python);
                return Ok(command);
            }
            Kind::Torchserve => return torchserve::peer(&self.torchserve, ports, scratch),
        };
        match kind {
            Kind::Echo | Kind::EchoLoops => {
                command.args([
                    kind.name().to_owned(),
                    ports.http.to_string(),
                    ports.grpc.to_string(),
                ]);
            }
            Kind::Pharos | Kind::Bare | Kind::Observed | Kind::Compiled => {
                write_builtin(&models)?;
                let interface = match kind {
                    Kind::Pharos => Some(Interface::Pharos),
                    Kind::Compiled => Some(Interface::Triton),
                    _ => None,
                };
                if let Some(interface) = interface {
                    write_compiled(&models)?;
                    command.arg("--backend-directory").arg(backends(scratch, interface)?);
                }
                if kind == Kind::Pharos && self.no_python().is_none() {
                    write_common(&models)?;
                    command.env("PHAROS_PYTHON", &self.python);
                }
                if kind == Kind::Bare {
                    let nothing = scratch.path("no-metrics.yaml");
                    fs::write(&nothing, "mode: prometheus\n")?;
                    command.arg("--metrics-config").arg(nothing);
                }
                if kind == Kind::Observed {
                    observed::switch_on(&mut command, scratch)?;
                }
                command.arg("--model-repository").arg(models);
                command
                    .arg("--metrics-location")
                    .arg(scratch.path(&format!("{}-logs", kind.name())));
                // The largest request has eight rows of 16 MiB.
                command.arg(format!("--http-max-input-size={}", 256 << 20));
                for (listener, port) in
                    [("http", ports.http), ("grpc", ports.grpc), ("metrics", ports.metrics)]
                {
                    command
                        .arg(format!("--{listener}-port={port}"))
                        .arg(format!("--{listener}-address=127.0.0.1"));
                }
            }
            Kind::PharosTorchserve | Kind::Torchserve => {}
            Kind::Triton => {
                write_python(&models)?;
                write_common(&models)?;
                command.arg(models);
                for (name, port) in
                    [("HTTP", ports.http), ("GRPC", ports.grpc), ("METRICS", ports.metrics)]
                {
                    command.env(format!("{name}_PORT"), port.to_string());
                }
            }
        }
        Ok(command)
    }
}
