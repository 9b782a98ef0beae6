//! The worker: one process that runs one instance of one model version, for the frontend that started it.
//!
//! Synchronous on purpose: one batch at a time, read from a socket, computed in place in shared memory, answered. The
//! worker never serves clients and never outlives its frontend.

#[allow(unsafe_code)]
mod descriptors;

pub mod backend;
mod clock;
mod instance;
#[allow(unsafe_code)]
mod memory;
mod metrics;
mod regions;
mod state;
mod watch;
mod wire;

use std::process::ExitCode;

use pharos::wire::regions::PROBE;
use pharos::wire::{ToFrontend, ToWorker, VERSION};

use crate::descriptors::Inherited;
use crate::instance::Instance;
use crate::wire::Connection;

/// Runs the worker until the frontend closes the connection or says to stop.
///
/// The descriptors that [`pharos::wire::descriptors`] lists must have been inherited.
pub fn run() -> ExitCode {
    let mut arguments = std::env::args().skip(1);
    if arguments.next().as_deref() == Some(PROBE) {
        println!("{}", regions::probe(&arguments.next().unwrap_or_default()).line());
        return ExitCode::SUCCESS;
    }
    let inherited = match Inherited::take() {
        Ok(inherited) => inherited,
        Err(error) => {
            eprintln!("pharos-worker is started by the pharos frontend, not by hand: {error}");
            return ExitCode::from(2);
        }
    };
    match serve(inherited) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("pharos-worker: {error}");
            ExitCode::FAILURE
        }
    }
}

/// The life of the process: load, then answer batches.
fn serve(inherited: Inherited) -> std::io::Result<()> {
    watch::exit_with_the_frontend(&inherited.socket)?;
    let mut connection = Connection::new(inherited.socket);
    let Some(ToWorker::Load(load)) = connection.receive()? else {
        return Err(std::io::Error::other("the first frame was not Load"));
    };
    if load.wire_version != VERSION {
        let text =
            format!("frontend and worker are of different builds: wire versions {} and {VERSION}", load.wire_version);
        return connection.send(&ToFrontend::LoadFailed(text));
    }
    let mut instance = match Instance::load(&load, inherited.memory) {
        Ok(instance) => instance,
        Err(error) => return connection.send(&ToFrontend::LoadFailed(error.message)),
    };
    connection.send(&ToFrontend::Loaded(instance.loaded()))?;
    while let Some(frame) = connection.receive()? {
        match frame {
            ToWorker::Execute(execute) => {
                let (done, panicked) = instance.execute(&execute, &mut connection);
                connection.send(&ToFrontend::Done(done))?;
                if panicked {
                    return Err(std::io::Error::other("the backend panicked; its state is not to be trusted any more"));
                }
            }
            ToWorker::Release(offsets) => instance.release(&offsets),
            ToWorker::Metrics(text) => instance.redefine_metrics(&text)?,
            // Their batch is over.
            ToWorker::Credits(credits) => instance.release(&credits.released),
            ToWorker::SequenceEnded(keys) => instance.sequences_ended(&keys),
            ToWorker::Forget(regions) => instance.forget_regions(&regions),
            ToWorker::Shutdown => break,
            ToWorker::Load(_) => return Err(std::io::Error::other("a second Load frame")),
        }
    }
    Ok(())
}
