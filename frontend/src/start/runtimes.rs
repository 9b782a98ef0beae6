//! The runtimes of the server, one for each kind of work.

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
    /// Runs everything else: the start, supervision, scrapes.
    pub(super) main: Runtime,
    /// Loads and unloads models while requests are served, in the background.
    loading: Runtime,
}

impl Runtimes {
    /// Starts the runtimes, with `loops` event loops.
    ///
    /// # Errors
    /// A thread or its descriptors cannot be created.
    pub(super) fn start(loops: usize) -> io::Result<Self> {
        let main = Builder::new_multi_thread().worker_threads(1).enable_all().build()?;
        let loading = Builder::new_multi_thread()
            .worker_threads(1)
            .enable_all()
            .thread_name("loading")
            .on_thread_start(background::enter)
            .build()?;
        Ok(Self { event_loops: EventLoops::start(loops)?, main, loading })
    }

    /// Returns the runtimes that the engine uses.
    pub(super) fn threads(&self) -> Threads {
        Threads {
            event_loops: self.event_loops.clone(),
            loading: Some(self.loading.handle().clone()),
        }
    }

    /// Ends the runtimes. Their blocking threads may be removing temporary files.
    pub(super) fn stop(self) {
        self.loading.shutdown_timeout(LAST_REMOVALS);
        self.main.shutdown_timeout(LAST_REMOVALS);
    }
}
