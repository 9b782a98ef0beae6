//! The process that renders the chat template of one model. The server starts it; see
//! `pharos_openai::renderer`.

use std::ffi::OsStr;
use std::io::{self, Read, Write};
use std::process::ExitCode;

use pharos_openai::renderer::{MEMORY_BYTES, serve};
use pharos_os::confinement;

/// The first argument of the process, which no help lists.
pub(crate) const NAME: &str = "chat-template-process";

/// Whether these are the arguments of the process.
pub(crate) fn is_meant(mut arguments: impl Iterator<Item = impl AsRef<OsStr>>) -> bool {
    arguments.nth(1).is_some_and(|argument| argument.as_ref() == NAME)
}

/// Renders prompts until the standard input ends, within limits that nothing can raise again.
pub(crate) fn run() -> ExitCode {
    let served = confinement::apply(MEMORY_BYTES).and_then(|()| {
        serve(Stream(rustix::stdio::stdin()), Stream(rustix::stdio::stdout()), |seconds| {
            confinement::limit_processor_time(seconds)
        })
    });
    match served {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("pharos {NAME}: {error}");
            ExitCode::FAILURE
        }
    }
}

/// A standard stream without a buffer: frames are read and written as a whole.
struct Stream(rustix::fd::BorrowedFd<'static>);

impl Read for Stream {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        Ok(rustix::io::read(self.0, buffer)?)
    }
}

impl Write for Stream {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        Ok(rustix::io::write(self.0, bytes)?)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}
