//! `pharos torchserve`: TorchServe's launcher. Stops a server, starts a server in the background,
//! or returns the plan of a server in this process.

use std::ffi::OsString;
use std::fs::{self, OpenOptions};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::time::Duration;

use super::configuration::Configuration;
use super::options::Executable;
use super::pid::{self, PidFile, Stop};
use super::settings::Note;
use super::work_directory::WorkDirectory;
use super::{Settings, options, snapshot};
use crate::arguments::Arguments;

/// The TorchServe release that this command emulates.
const VERSION: &str = "0.12.0";

/// The class of TorchServe's server. `sagemaker-pytorch-inference-toolkit` waits for a process that
/// has this argument.
const MAIN_CLASS: &str = "org.pytorch.serve.ModelServer";

/// The time for which the launcher watches a background server. If the server exits within this
/// time, the launcher fails too.
const WATCHED: Duration = Duration::from_millis(500);

/// The configuration of a server in the foreground.
#[derive(Debug)]
pub struct Plan<O> {
    /// The options, as if given on the command line of `pharos`.
    pub options: O,
    /// TorchServe's configuration.
    pub settings: Arc<Settings>,
    /// The engine's model repository.
    pub repository: PathBuf,
    /// The directory of the logs.
    pub logs: PathBuf,
    notes: Vec<Note>,
    _pid: PidFile,
    _workplace: WorkDirectory,
}

impl<O> Plan<O> {
    /// Creates the files of the metric logs in the directory `metrics`: they exist from the start
    /// in every mode. Logs notes about the configuration.
    pub fn begin(&self, metrics: &Path) {
        for name in ["ts_metrics.log", "model_metrics.log"] {
            let path = metrics.join(name);
            let made = fs::create_dir_all(metrics)
                .and_then(|()| OpenOptions::new().create(true).append(true).open(&path));
            if let Err(error) = made {
                tracing::error!("cannot create '{}': {error}", path.display());
            }
        }
        for Note { warning, text } in &self.notes {
            if *warning { tracing::warn!("{text}") } else { tracing::info!("{text}") }
        }
    }
}

/// The next step after the arguments are handled.
#[derive(Debug)]
pub enum Step<O> {
    /// Exit: everything is done.
    Done,
    /// Serve according to the plan.
    Serve(Box<Plan<O>>),
}

/// Executes the command line.
///
/// # Errors
/// The command failed; the text says why.
pub fn run<E: Executable>(
    arguments: &Arguments,
    executable: &E,
) -> Result<Step<E::Options>, String> {
    if arguments.version {
        println!(
            "TorchServe Version is {VERSION} (served by pharos {})",
            env!("CARGO_PKG_VERSION")
        );
        return Ok(Step::Done);
    }
    if arguments.stop {
        match pid::stop()? {
            Stop::Ended => println!("TorchServe has stopped."),
            Stop::NoServer(why) => {
                println!("TorchServe is not currently running.");
                eprintln!("no server was stopped: {why}");
            }
        }
        return Ok(Step::Done);
    }
    if pid::running().is_ok() && !is_background() {
        return Err("TorchServe is already running, please use torchserve --stop to stop \
                    TorchServe."
            .to_owned());
    }
    let configuration = Configuration::read(arguments, &|name: &str| std::env::var_os(name))?;
    if arguments.foreground {
        return plan(arguments, configuration, executable).map(|plan| Step::Serve(Box::new(plan)));
    }
    // Check the configuration in the launcher, while its errors still reach the terminal.
    let (settings, _) = Settings::new(configuration.properties, Vec::new(), PathBuf::new())?;
    check_store(&settings)?;
    snapshot::check(&settings)?;
    options::options(&settings, &arguments.options, executable)?;
    background().map(|()| Step::Done)
}

/// Set for a server in the background, whose process id file the launcher has already written.
const BACKGROUND: &str = "PHAROS_TORCHSERVE_BACKGROUND";

fn is_background() -> bool {
    std::env::var_os(BACKGROUND).is_some()
}

fn plan<E: Executable>(
    arguments: &Arguments,
    configuration: Configuration,
    executable: &E,
) -> Result<Plan<E::Options>, String> {
    let work_directory = WorkDirectory::new()
        .map_err(|error| format!("cannot create the work directory: {error}"))?;
    let Configuration { properties, mut notes } = configuration;
    let wanted = options::with_repository(&arguments.options);
    // Invalid options are reported later, with the options that the settings add.
    let gpus = executable.gpus(executable.parse(wanted).ok().as_ref());
    let (mut settings, more) = Settings::new(properties, gpus, work_directory.path().to_owned())?;
    notes.extend(more);
    settings.snapshots = !arguments.no_config_snapshots;
    check_store(&settings)?;
    snapshot::check(&settings)?;
    let (arguments, more) = options::options(&settings, &arguments.options, executable)?;
    notes.extend(more);
    let mut given = vec![OsString::from("pharos")];
    given.push("--model-repository".into());
    given.push(work_directory.repository().into_os_string());
    given.extend(arguments);
    let options = executable.parse(given)?;
    if let Some(python) = executable.python(&options) {
        settings.pip.python = python;
    }
    settings.pip.user = executable.worker_user(&options);
    settings.pip.sandbox = executable.pip_sandbox(&options, &settings.pip.python);
    Ok(Plan {
        options,
        settings: Arc::new(settings),
        repository: work_directory.repository(),
        logs: options::logs(),
        notes,
        _pid: PidFile::write(std::process::id())?,
        _workplace: work_directory,
    })
}

/// Checks that the model store exists. TorchServe does not start without one.
fn check_store(settings: &Settings) -> Result<(), String> {
    match &settings.model_store {
        None => Err("Missing mandatory parameter --model-store".to_owned()),
        Some(store) if !store.is_dir() => {
            Err(format!("--model-store directory not found: {}", store.display()))
        }
        Some(_) => Ok(()),
    }
}

/// Starts this program again in the background, in its own process group.
fn background() -> Result<(), String> {
    let failed = |error: std::io::Error| format!("cannot start the server: {error}");
    let own = std::env::current_exe().map_err(failed)?;
    let mut arguments: Vec<OsString> = std::env::args_os().skip(1).collect();
    let at = arguments.iter().position(|argument| argument == pid::COMMAND).map_or(0, |at| at + 1);
    arguments.splice(at..at, ["--foreground", "--main-class", MAIN_CLASS].map(OsString::from));
    let mut command = Command::new(own);
    command.args(arguments).env(BACKGROUND, "1").stdin(Stdio::null()).process_group(0);
    let mut child = command.spawn().map_err(failed)?;
    PidFile::write(child.id())?.keep();
    let step = Duration::from_millis(20);
    for _ in 0..WATCHED.as_millis() / step.as_millis() {
        if let Some(status) = child.try_wait().map_err(failed)? {
            return Err(format!("the server exited during startup: {status}"));
        }
        std::thread::sleep(step);
    }
    Ok(())
}
