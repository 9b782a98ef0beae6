//! Responses in a Redis, or in a cluster of them, that several servers share: one connection, kept by a task.
//!
//! A look-up never waits longer than the time-out. While there is no connection every look-up is a miss at once; connecting
//! is tried again after a pause that grows. The commands that are unanswered and the bytes that wait to be stored are bounded.

use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use bytes::Bytes;
use pharos::cache::Key;
use redis::{Cmd, Value, cmd};
use tokio::runtime::Handle;
use tokio::sync::Notify;
use tokio::time::{sleep, timeout};

use super::connection::{Connection, refusal};
use super::{CacheError, RedisSettings as Settings, Report};

/// What keys begin with: other programs may use the same Redis.
const PREFIX: &str = "pharos:response:1:";
/// Commands that are not answered, at most.
const MOST_UNANSWERED: usize = 4096;
/// Bytes that wait to be stored, at most.
const MOST_BYTES: u64 = 256 << 20;
/// The longest value: Redis' own limit by default.
const LONGEST_VALUE: u64 = 512 << 20;
/// How long a connection may take, log-in included, and how long one that was too slow may take to answer.
const CONNECT: Duration = Duration::from_secs(2);
/// How long storing a value may take.
const STORE: Duration = Duration::from_secs(10);
/// The first pause after a connection was lost or refused, doubled each time.
const FIRST_PAUSE: Duration = Duration::from_millis(100);
const LONGEST_PAUSE: Duration = Duration::from_secs(5);

/// A client of Redis.
pub(super) struct Redis {
    link: Arc<Link>,
    runtime: Handle,
    settings: Settings,
    report: Arc<Report>,
}

/// What look-ups share with the task that keeps the connection.
#[derive(Default)]
struct Link {
    // Held to clone or replace it.
    connection: Mutex<Option<Connection>>,
    /// The connection was given up.
    suspect: Notify,
    unanswered: AtomicUsize,
    /// Bytes that wait to be stored.
    storing: AtomicU64,
}

/// A command that is not answered, and the bytes that it stores.
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
        self.connection.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    fn replace(&self, connection: Option<Connection>) {
        *self.connection.lock().unwrap_or_else(PoisonError::into_inner) = connection;
    }

    /// Takes the connection out of use until it has answered again. Look-ups do not wait for that.
    fn give_up(&self) {
        self.replace(None);
        self.suspect.notify_one();
    }

    /// Counts a command that stores `bytes`; `None` when there are too many.
    fn begin(self: &Arc<Self>, bytes: u64) -> Option<Pending> {
        let commands = self.unanswered.fetch_add(1, Ordering::Relaxed);
        let before = self.storing.fetch_add(bytes, Ordering::Relaxed);
        let pending = Pending { link: self.clone(), bytes };
        // A value that is larger than the bound may be stored alone.
        let fits = bytes == 0 || before == 0 || before + bytes <= MOST_BYTES;
        (commands < MOST_UNANSWERED && fits).then_some(pending)
    }
}

impl Redis {
    /// Begins to connect.
    pub(super) fn start(settings: Settings, report: Arc<Report>) -> Self {
        let link = Arc::new(Link::default());
        let keeper = Keeper { link: link.clone(), settings: settings.clone(), report: report.clone() };
        tokio::spawn(keeper.run());
        Self { link, runtime: Handle::current(), settings, report }
    }

    /// The value of a key; `None` also for all that can go wrong.
    pub(super) async fn get(&self, key: &Key) -> Option<Bytes> {
        let Some(mut connection) = self.link.connection() else {
            self.report.tell(CacheError::Connection, "there is no connection to Redis");
            return None;
        };
        let Some(_pending) = self.link.begin(0) else {
            self.report.tell(CacheError::Busy, "too many look-ups wait for Redis");
            return None;
        };
        let mut command = cmd("GET");
        command.arg(name(key));
        match timeout(self.settings.timeout, connection.ask(&command)).await {
            Ok(Ok(Value::BulkString(value))) => return Some(value.into()),
            Ok(Ok(Value::Nil)) => {}
            Ok(Ok(_)) => self.report.tell(CacheError::Reply, "Redis answered GET without a value"),
            Ok(Err(error)) => match refusal(&error) {
                Some(words) => self.report.tell(CacheError::Reply, &format!("Redis refuses GET: {words}")),
                None => {
                    self.link.give_up();
                    self.report.tell(CacheError::Connection, &format!("the connection to Redis broke: {error}"));
                }
            },
            Err(_) => {
                self.link.give_up();
                let ms = self.settings.timeout.as_millis();
                self.report.tell(CacheError::Timeout, &format!("Redis did not answer within {ms} ms"));
            }
        }
        None
    }

    /// Sends a value of about `size` bytes to be stored, and does not wait for it.
    pub(super) fn set(&self, key: &Key, value: impl FnOnce() -> Vec<u8>, size: u64) {
        let Some(connection) = self.link.connection() else {
            return self.report.tell(CacheError::Connection, "there is no connection to Redis");
        };
        if size > LONGEST_VALUE {
            let text = format!("a response of {size} bytes is larger than what Redis takes, {LONGEST_VALUE}");
            return self.report.tell(CacheError::TooLarge, &text);
        }
        let Some(pending) = self.link.begin(size) else {
            return self.report.tell(CacheError::Busy, "too many responses wait to be stored in Redis");
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
    match timeout(STORE, connection.ask(&command)).await {
        Ok(Ok(_)) => {}
        Ok(Err(error)) => match refusal(&error) {
            Some(words) => report.tell(CacheError::Reply, &format!("Redis refuses SET: {words}")),
            None => report.tell(CacheError::Connection, &format!("the connection to Redis broke: {error}")),
        },
        Err(_) => report.tell(CacheError::Timeout, &format!("Redis stored nothing within {} s", STORE.as_secs())),
    }
    drop(pending);
}

fn name(key: &Key) -> String {
    format!("{PREFIX}{key}")
}

/// Keeps the connection.
struct Keeper {
    link: Arc<Link>,
    settings: Settings,
    report: Arc<Report>,
}

impl Keeper {
    /// Connects, and connects again after each loss, for as long as the process runs.
    async fn run(self) {
        let mut pause = FIRST_PAUSE;
        let Settings { host, port, .. } = &self.settings;
        loop {
            let opened = timeout(CONNECT, Connection::open(&self.settings, CONNECT)).await;
            let (trouble, lost) = match opened {
                Ok(Ok(connection)) => {
                    tracing::info!("response cache: connected to Redis at {host}:{port}");
                    pause = FIRST_PAUSE;
                    self.serve(connection).await
                }
                Ok(Err(error)) => (CacheError::Connection, error),
                Err(_) => (CacheError::Connection, format!("no connection within {} s", CONNECT.as_secs())),
            };
            self.report.tell(trouble, &format!("Redis at {host}:{port}: {lost}"));
            sleep(pause).await;
            pause = (pause * 2).min(LONGEST_PAUSE);
        }
    }

    /// Lends the connection to look-ups for as long as it answers. Returns why it no longer does.
    async fn serve(&self, mut connection: Connection) -> (CacheError, String) {
        loop {
            self.link.replace(Some(connection.clone()));
            self.link.suspect.notified().await;
            // It was too slow for a look-up: a long value may be on its way, or the server hangs.
            match timeout(CONNECT, connection.answers()).await {
                Ok(true) => {}
                Ok(false) => return (CacheError::Connection, "it closed the connection".to_owned()),
                Err(_) => return (CacheError::Timeout, format!("no answer within {} s", CONNECT.as_secs())),
            }
        }
    }
}
