//! The threads that serve requests, load models and do the rest.

use std::io;
use std::time::Duration;

use tokio::runtime::{Builder, Runtime};

use pharos_engine::loader::Threads;
use pharos_os::background;
use pharos_os::event_loops::EventLoops;

/// Maximum time to remove temporary files at the end.
const LAST_REMOVALS: Duration = Duration::from_secs(1);

/// The runtimes of the server.
pub(super) struct Runtimes {
    /// Serves requests.
    event_loops: EventLoops,
    /// Does what neither of the others does: the start, supervision, scrapes.
    pub(super) main: Runtime,
    /// Loads and unloads models while requests are served, in the background.
    loading: Runtime,
}

impl Runtimes {
    /// Starts them, with `loops` event loops.
    ///
    /// # Errors
    /// A thread or its descriptors cannot be created.
    pub(super) fn start(loops: usize) -> io::Result<Self> {
        let single = || {
            let mut builder = Builder::new_multi_thread();
            builder.worker_threads(1).enable_all();
            builder
        };
        let main = single().build()?;
        let loading = single().thread_name("loading").on_thread_start(background::enter).build()?;
        Ok(Self { event_loops: EventLoops::start(loops)?, main, loading })
    }

    /// Returns those that the engine uses.
    pub(super) fn threads(&self) -> Threads {
        Threads { event_loops: self.event_loops.clone(), loading: Some(self.loading.handle().clone()) }
    }

    /// Ends the runtimes. Their blocking threads may be removing temporary files.
    pub(super) fn stop(self) {
        self.loading.shutdown_timeout(LAST_REMOVALS);
        self.main.shutdown_timeout(LAST_REMOVALS);
    }
}
