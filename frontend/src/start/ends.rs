//! The signals that end the server, and waiting that a second one shortens.

use std::io;
use std::time::Duration;

use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::task::JoinHandle;

/// Maximum time for the connections of all listeners to send the last responses.
const LAST_ANSWERS: Duration = Duration::from_secs(5);

/// Maximum time of each step of the exit after a second signal.
pub(super) const HURRIED: Duration = Duration::from_millis(200);

/// The signals that end the server: SIGTERM and SIGINT.
pub(super) struct Ends {
    terminate: Signal,
    interrupt: Signal,
    /// The number of received signals.
    pub(super) seen: u32,
}

impl Ends {
    pub(super) fn new() -> io::Result<Self> {
        let terminate = signal(SignalKind::terminate())?;
        Ok(Self { terminate, interrupt: signal(SignalKind::interrupt())?, seen: 0 })
    }

    /// Waits for the next signal.
    pub(super) async fn next(&mut self) {
        tokio::select! {
            _ = self.terminate.recv() => {}
            _ = self.interrupt.recv() => {}
        }
        self.seen += 1;
    }

    /// Waits until the listeners have sent the last responses. Their tasks run at the same time.
    pub(super) async fn close(&mut self, listeners: Vec<JoinHandle<()>>) {
        let closed = async {
            for listener in listeners {
                drop(listener.await);
            }
        };
        self.wait(LAST_ANSWERS, closed).await;
    }

    /// Waits for `work` within `timeout`; after a second signal, only for [`HURRIED`].
    pub(super) async fn wait(&mut self, timeout: Duration, work: impl Future<Output = ()>) {
        tokio::pin!(work);
        if self.seen < 2 {
            tokio::select! {
                _ = tokio::time::timeout(timeout, &mut work) => return,
                () = self.next() => {}
            }
        }
        let _ = tokio::time::timeout(HURRIED, work).await;
    }
}
