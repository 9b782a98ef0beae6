//! The response cache in a Redis server or cluster that several servers share: one connection,
//! maintained by a task.
//!
//! A lookup never waits longer than the timeout. While there is no connection, every lookup is an
//! immediate miss; reconnecting backs off exponentially. The numbers of unanswered commands and of
//! bytes waiting to be stored are bounded.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::time::Duration;

use bytes::Bytes;
use parking_lot::Mutex;
use pharos::cache::Key;
use redis::{Cmd, Value, cmd};
use tokio::runtime::Handle;
use tokio::sync::Notify;
use tokio::time::{sleep, timeout};

use super::connection::{Connection, refusal};
use super::{CacheError, RedisSettings as Settings, Report};

/// The prefix of all keys, because other programs may use the same Redis.
const PREFIX: &str = "pharos:response:1:";
/// The maximum number of unanswered commands.
const MAX_UNANSWERED: usize = 4096;
/// The maximum number of bytes waiting to be stored.
const MAX_BYTES: u64 = 256 << 20;
/// The longest value: Redis's own default limit.
const LONGEST_VALUE: u64 = 512 << 20;
/// The time limit of connecting and authenticating, and of the check of a connection that was too
/// slow.
const CONNECT: Duration = Duration::from_secs(2);
/// The time limit of storing a value.
const STORE: Duration = Duration::from_secs(10);
/// The first pause after a connection was lost or refused; it doubles each time.
const FIRST_PAUSE: Duration = Duration::from_millis(100);
const LONGEST_PAUSE: Duration = Duration::from_secs(5);

/// A client of Redis.
pub(super) struct Redis {
    link: Arc<Link>,
    runtime: Handle,
    settings: Settings,
    report: Arc<Report>,
}

/// The state that lookups share with the task that maintains the connection.
#[derive(Default)]
struct Link {
    // Held only to clone or replace the connection.
    connection: Mutex<Option<Connection>>,
    /// Wakes the task after a lookup has taken the connection out of use.
    suspect: Notify,
    unanswered: AtomicUsize,
    /// Bytes waiting to be stored.
    storing: AtomicU64,
}

/// An unanswered command, and the bytes that it stores.
struct Pending {
    link: Arc<Link>,
    bytes: u64,
}

impl Drop for Pending {
    fn drop(&mut self) {
        self.link.unanswered.fetch_sub(1, Ordering::Relaxed);
        self.link.storing.fetch_sub(self.bytes, Ordering::Relaxed);
    }
}

impl Link {
    fn connection(&self) -> Option<Connection> {
        self.connection.lock().clone()
    }

    fn replace(&self, connection: Option<Connection>) {
        *self.connection.lock() = connection;
    }

    /// Takes the connection out of use until it has answered again. Lookups do not wait for this.
    fn give_up(&self) {
        self.replace(None);
        self.suspect.notify_one();
    }

    /// Counts a command that stores `bytes`; `None` if too many are pending.
    fn begin(self: &Arc<Self>, bytes: u64) -> Option<Pending> {
        let commands = self.unanswered.fetch_add(1, Ordering::Relaxed);
        let before = self.storing.fetch_add(bytes, Ordering::Relaxed);
        let pending = Pending { link: self.clone(), bytes };
        // A value larger than the bound may be stored alone.
        let fits = bytes == 0 || before == 0 || before + bytes <= MAX_BYTES;
        (commands < MAX_UNANSWERED && fits).then_some(pending)
    }
}

impl Redis {
    /// Starts connecting in the background.
    pub(super) fn start(settings: Settings, report: Arc<Report>) -> Self {
        let link = Arc::new(Link::default());
        let reconnector =
            Reconnector { link: link.clone(), settings: settings.clone(), report: report.clone() };
        tokio::spawn(reconnector.run());
        Self { link, runtime: Handle::current(), settings, report }
    }

    /// Returns the value of a key; `None` also on any error.
    pub(super) async fn get(&self, key: &Key) -> Option<Bytes> {
        let Some(mut connection) = self.link.connection() else {
            self.report.record(CacheError::Connection, "not connected to Redis");
            return None;
        };
        let Some(_pending) = self.link.begin(0) else {
            self.report.record(CacheError::Busy, "too many lookups are waiting for Redis");
            return None;
        };
        let mut command = cmd("GET");
        command.arg(name(key));
        match timeout(self.settings.timeout, connection.send(&command)).await {
            Ok(Ok(Value::BulkString(value))) => return Some(value.into()),
            Ok(Ok(Value::Nil)) => {}
            Ok(Ok(_)) => self.report.record(CacheError::Reply, "unexpected reply of Redis to GET"),
            Ok(Err(error)) => match refusal(&error) {
                Some(words) => {
                    self.report.record(CacheError::Reply, &format!("Redis rejected GET: {words}"))
                }
                None => {
                    self.link.give_up();
                    self.report.record(
                        CacheError::Connection,
                        &format!("lost the connection to Redis: {error}"),
                    );
                }
            },
            Err(_) => {
                self.link.give_up();
                let ms = self.settings.timeout.as_millis();
                self.report
                    .record(CacheError::Timeout, &format!("Redis did not answer within {ms} ms"));
            }
        }
        None
    }

    /// Sends a value of about `size` bytes to be stored, without waiting for the reply.
    pub(super) fn set(&self, key: &Key, value: impl FnOnce() -> Vec<u8>, size: u64) {
        let Some(connection) = self.link.connection() else {
            return self.report.record(CacheError::Connection, "not connected to Redis");
        };
        if size > LONGEST_VALUE {
            let text = format!(
                "a response of {size} bytes exceeds the limit of Redis of {LONGEST_VALUE} bytes"
            );
            return self.report.record(CacheError::TooLarge, &text);
        }
        let Some(pending) = self.link.begin(size) else {
            return self
                .report
                .record(CacheError::Busy, "too many responses are waiting to be stored in Redis");
        };
        let mut command = cmd("SET");
        command.arg(name(key)).arg(value());
        if let Some(ttl) = self.settings.ttl {
            command.arg("EX").arg(ttl.as_secs());
        }
        self.runtime.spawn(store(connection, command, pending, self.report.clone()));
    }
}

/// Stores a value.
async fn store(mut connection: Connection, command: Cmd, pending: Pending, report: Arc<Report>) {
    match timeout(STORE, connection.send(&command)).await {
        Ok(Ok(_)) => {}
        Ok(Err(error)) => match refusal(&error) {
            Some(words) => {
                report.record(CacheError::Reply, &format!("Redis rejected SET: {words}"))
            }
            None => report
                .record(CacheError::Connection, &format!("lost the connection to Redis: {error}")),
        },
        Err(_) => report.record(
            CacheError::Timeout,
            &format!("storing in Redis exceeded {} s", STORE.as_secs()),
        ),
    }
    drop(pending);
}

fn name(key: &Key) -> String {
    format!("{PREFIX}{key}")
}

/// The task that maintains the connection.
struct Reconnector {
    link: Arc<Link>,
    settings: Settings,
    report: Arc<Report>,
}

impl Reconnector {
    /// Connects, and reconnects after each loss, while the process runs.
    async fn run(self) {
        let mut pause = FIRST_PAUSE;
        let Settings { host, port, .. } = &self.settings;
        loop {
            let opened = timeout(CONNECT, Connection::open(&self.settings, CONNECT)).await;
            let (reason, lost) = match opened {
                Ok(Ok(connection)) => {
                    tracing::info!("response cache: connected to Redis at {host}:{port}");
                    pause = FIRST_PAUSE;
                    self.serve(connection).await
                }
                Ok(Err(error)) => (CacheError::Connection, error),
                Err(_) => (
                    CacheError::Connection,
                    format!("no connection within {} s", CONNECT.as_secs()),
                ),
            };
            self.report.record(reason, &format!("Redis at {host}:{port}: {lost}"));
            sleep(pause).await;
            pause = (pause * 2).min(LONGEST_PAUSE);
        }
    }

    /// Offers the connection to lookups while it answers. Returns why it stopped.
    async fn serve(&self, mut connection: Connection) -> (CacheError, String) {
        loop {
            self.link.replace(Some(connection.clone()));
            self.link.suspect.notified().await;
            // A lookup timed out: a long value may be in transit, or the server hangs.
            match timeout(CONNECT, connection.answers()).await {
                Ok(true) => {}
                Ok(false) => {
                    return (CacheError::Connection, "the server closed the connection".to_owned());
                }
                Err(_) => {
                    return (
                        CacheError::Timeout,
                        format!("no answer within {} s", CONNECT.as_secs()),
                    );
                }
            }
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    fn pending(link: &Link) -> (usize, u64) {
        (link.unanswered.load(Ordering::Relaxed), link.storing.load(Ordering::Relaxed))
    }

    #[test]
    fn unanswered_commands_are_limited_until_some_are_answered() {
        let link = Arc::new(Link::default());
        let mut commands: Vec<Pending> =
            (0..MAX_UNANSWERED).map(|_| link.begin(0).unwrap()).collect();
        assert!(link.begin(0).is_none());
        assert_eq!(pending(&link), (MAX_UNANSWERED, 0), "a refused command is not pending");
        commands.pop();
        commands.push(link.begin(0).unwrap());
        assert!(link.begin(0).is_none());
        drop(commands);
        assert_eq!(pending(&link), (0, 0));
    }

    #[test]
    fn bytes_that_wait_to_be_stored_are_limited() {
        let link = Arc::new(Link::default());
        let first = link.begin(MAX_BYTES - 1).unwrap();
        assert!(link.begin(2).is_none());
        let second = link.begin(1).unwrap();
        assert!(link.begin(1).is_none());
        assert!(link.begin(0).is_some(), "a look-up stores nothing");
        drop((first, second));
        assert_eq!(pending(&link), (0, 0));
        let alone = link.begin(MAX_BYTES + 1).unwrap();
        assert!(link.begin(1).is_none());
        drop(alone);
        assert!(link.begin(1).is_some());
    }
}
