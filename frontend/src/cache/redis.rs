//! Responses in a Redis that several servers share: one connection, pipelined, kept by a task of its own.
//!
//! Redis is never waited for longer than the time-out. While there is no connection every look-up is a miss at once; it is
//! tried again after a pause that grows. What waits to be stored is bounded, in bytes.
//!
//! A client of our own, because all that is needed are GET and SET: the `redis` crate brings some forty others (an URL
//! parser with Unicode's tables among them), half a minute of a core for a cold build.

use std::collections::VecDeque;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use bytes::{Bytes, BytesMut};
use pharos::cache::Key;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::sync::{mpsc, oneshot};
use tokio::time::{Instant, sleep, sleep_until, timeout};

use super::resp::{self, LONGEST_VALUE, Reply};
use super::{RedisSettings as Settings, Report, Trouble};

/// What keys begin with: other programs may use the same Redis.
const PREFIX: &str = "pharos:response:1:";
/// Commands that wait to be sent, at most.
const MOST_COMMANDS: usize = 1024;
/// Commands that are sent and not answered, at most.
const MOST_UNANSWERED: usize = 4096;
/// Bytes that wait to be stored, at most.
const MOST_BYTES: u64 = 256 << 20;
/// Bytes that are put together before some of them are sent.
const OUTBOX: usize = 256 << 10;
/// So much of a long value shows that the connection lives.
const PROGRESS: usize = 16 << 10;
/// How long a connection may take, log-in included.
const CONNECT: Duration = Duration::from_secs(2);
/// The first pause after a connection was lost or refused, doubled each time.
const FIRST_PAUSE: Duration = Duration::from_millis(100);
const LONGEST_PAUSE: Duration = Duration::from_secs(5);

/// The client's end of the connection.
pub(super) struct Redis {
    commands: mpsc::Sender<Command>,
    state: Arc<State>,
    settings: Settings,
    report: Arc<Report>,
}

#[derive(Default)]
struct State {
    connected: AtomicBool,
    /// Bytes that wait to be stored.
    storing: AtomicU64,
}

/// Something to be sent.
struct Command {
    bytes: BytesMut,
    answer: Awaited,
}

/// Who waits for a reply.
enum Awaited {
    Get(oneshot::Sender<Reply>),
    Set(#[allow(dead_code, reason = "gives its bytes back when it is dropped")] Budget),
}

/// Bytes that wait to be stored, as long as it lives.
struct Budget(Arc<State>, u64);

impl Drop for Budget {
    fn drop(&mut self) {
        self.0.storing.fetch_sub(self.1, Ordering::Relaxed);
    }
}

impl Redis {
    /// Begins to connect.
    pub(super) fn start(settings: Settings, report: Arc<Report>) -> Self {
        let (commands, waiting) = mpsc::channel(MOST_COMMANDS);
        let state = Arc::new(State::default());
        let keeper =
            Keeper { commands: waiting, state: state.clone(), settings: settings.clone(), report: report.clone() };
        tokio::spawn(keeper.run());
        Self { commands, state, settings, report }
    }

    /// The value of a key; `None` also for all that can go wrong.
    pub(super) async fn get(&self, key: &Key) -> Option<Bytes> {
        if !self.state.connected.load(Ordering::Relaxed) {
            self.report.tell(Trouble::Connection, "there is no connection to Redis");
            return None;
        }
        let mut bytes = BytesMut::with_capacity(160);
        resp::command(&mut bytes, &[b"GET", name(key).as_bytes()]);
        let (sender, answer) = oneshot::channel();
        if self.commands.try_send(Command { bytes, answer: Awaited::Get(sender) }).is_err() {
            self.report.tell(Trouble::Busy, "too many look-ups wait for Redis");
            return None;
        }
        match timeout(self.settings.timeout, answer).await {
            Ok(Ok(Reply::Value(value))) => return Some(value),
            Ok(Ok(Reply::Nothing)) => {}
            Ok(Ok(Reply::Refused(words))) => self.report.tell(Trouble::Reply, &format!("Redis refuses GET: {words}")),
            Ok(Ok(Reply::Done)) => self.report.tell(Trouble::Reply, "Redis answered GET without a value"),
            Ok(Err(_)) => self.report.tell(Trouble::Connection, "the connection to Redis broke"),
            Err(_) => {
                let ms = self.settings.timeout.as_millis();
                self.report.tell(Trouble::Timeout, &format!("Redis did not answer within {ms} ms"));
            }
        }
        None
    }

    /// Sends a value of about `size` bytes to be stored, and does not wait for it.
    pub(super) fn set(&self, key: &Key, value: impl FnOnce() -> Vec<u8>, size: u64) {
        if !self.state.connected.load(Ordering::Relaxed) {
            return self.report.tell(Trouble::Connection, "there is no connection to Redis");
        }
        if size > LONGEST_VALUE as u64 {
            let text = format!("a response of {size} bytes is larger than what Redis takes, {LONGEST_VALUE}");
            return self.report.tell(Trouble::TooLarge, &text);
        }
        let before = self.state.storing.fetch_add(size, Ordering::Relaxed);
        let budget = Budget(self.state.clone(), size);
        // One that is larger than the bound may go alone.
        if before > 0 && before + size > MOST_BYTES {
            return self.report.tell(Trouble::Busy, "too many responses wait to be stored in Redis");
        }
        let value = value();
        let (name, mut bytes) = (name(key), BytesMut::with_capacity(value.len() + 192));
        match self.settings.ttl {
            None => resp::command(&mut bytes, &[b"SET", name.as_bytes(), &value]),
            Some(ttl) => {
                let seconds = ttl.as_secs().to_string();
                resp::command(&mut bytes, &[b"SET", name.as_bytes(), &value, b"EX", seconds.as_bytes()]);
            }
        }
        if self.commands.try_send(Command { bytes, answer: Awaited::Set(budget) }).is_err() {
            self.report.tell(Trouble::Busy, "too many responses wait to be stored in Redis");
        }
    }
}

fn name(key: &Key) -> String {
    format!("{PREFIX}{key}")
}

/// Keeps the connection.
struct Keeper {
    commands: mpsc::Receiver<Command>,
    state: Arc<State>,
    settings: Settings,
    report: Arc<Report>,
}

impl Keeper {
    /// Connects again and again, until nobody asks any more.
    async fn run(mut self) {
        let mut pause = FIRST_PAUSE;
        while !self.commands.is_closed() {
            let lost = match timeout(CONNECT, self.connect()).await {
                Ok(Ok(stream)) => {
                    let Settings { host, port, .. } = &self.settings;
                    tracing::info!("response cache: connected to Redis at {host}:{port}");
                    pause = FIRST_PAUSE;
                    self.state.connected.store(true, Ordering::Relaxed);
                    let lost = self.serve(stream).await;
                    self.state.connected.store(false, Ordering::Relaxed);
                    lost
                }
                Ok(Err(error)) => Err(error),
                Err(_) => Err(io::Error::other(format!("no connection within {} s", CONNECT.as_secs()))),
            };
            let Err(error) = lost else { return };
            let Settings { host, port, .. } = &self.settings;
            let slow = error.kind() == io::ErrorKind::TimedOut;
            let trouble = if slow { Trouble::Timeout } else { Trouble::Connection };
            self.report.tell(trouble, &format!("Redis at {host}:{port}: {error}"));
            // Who came just before the connection was lost is not left waiting.
            while self.commands.try_recv().is_ok() {}
            sleep(pause).await;
            pause = (pause * 2).min(LONGEST_PAUSE);
        }
    }

    /// A connection that is logged in and answers.
    async fn connect(&self) -> io::Result<TcpStream> {
        let Settings { host, port, user, password, db, .. } = &self.settings;
        let mut stream = TcpStream::connect((host.as_str(), *port)).await?;
        stream.set_nodelay(true)?;
        let (mut greeting, db) = (BytesMut::new(), db.to_string());
        let mut expected = 1;
        if !password.is_empty() {
            let words: &[&[u8]] = match user.is_empty() {
                true => &[b"AUTH", password.as_bytes()],
                false => &[b"AUTH", user.as_bytes(), password.as_bytes()],
            };
            resp::command(&mut greeting, words);
            expected += 1;
        }
        // Also shows whether the other end is a Redis that lets us in.
        resp::command(&mut greeting, &[b"SELECT", db.as_bytes()]);
        stream.write_all(&greeting).await?;
        let mut input = BytesMut::new();
        while expected > 0 {
            match resp::reply(&mut input).map_err(other_end)? {
                Some(Reply::Done) => expected -= 1,
                Some(Reply::Refused(words)) => return Err(io::Error::other(format!("it refuses us: {words}"))),
                Some(_) => return Err(other_end("a value that nobody asked for".to_owned())),
                None if stream.read_buf(&mut input).await? == 0 => return Err(closed()),
                None => {}
            }
        }
        Ok(stream)
    }

    /// Sends commands and takes replies until nobody asks any more, or until something is wrong with the connection.
    async fn serve(&mut self, mut stream: TcpStream) -> io::Result<()> {
        let (mut reader, mut writer) = stream.split();
        let (mut input, mut output) = (BytesMut::with_capacity(16 << 10), BytesMut::new());
        let mut flow =
            Flow { unanswered: VecDeque::new(), patience: self.settings.timeout, moved: Instant::now(), read: 0 };
        loop {
            let (busy, room) = (!output.is_empty(), flow.unanswered.len() < MOST_UNANSWERED && output.len() < OUTBOX);
            tokio::select! {
                command = self.commands.recv(), if room => match command {
                    Some(command) => flow.send(command, &mut output),
                    None => return Ok(()),
                },
                written = writer.write_buf(&mut output), if busy => {
                    written?;
                    flow.moved = Instant::now();
                }
                read = reader.read_buf(&mut input) => match read? {
                    0 => return Err(closed()),
                    read => self.take(&mut flow, &mut input, read)?,
                },
                () = sleep_until(flow.moved + flow.patience), if !flow.unanswered.is_empty() => {
                    let text = format!("no answer within {} ms", flow.patience.as_millis());
                    return Err(io::Error::new(io::ErrorKind::TimedOut, text));
                }
            }
        }
    }

    /// Hands out the replies that are whole.
    fn take(&self, flow: &mut Flow, input: &mut BytesMut, read: usize) -> io::Result<()> {
        flow.read += read;
        if flow.read >= PROGRESS {
            (flow.moved, flow.read) = (Instant::now(), 0);
        }
        while let Some(reply) = resp::reply(input).map_err(other_end)? {
            (flow.moved, flow.read) = (Instant::now(), 0);
            match (flow.unanswered.pop_front(), reply) {
                // Who waited no longer does not take it.
                (Some(Awaited::Get(waiting)), reply) => drop(waiting.send(reply)),
                (Some(Awaited::Set(_)), Reply::Done) => {}
                (Some(Awaited::Set(_)), Reply::Refused(words)) => {
                    self.report.tell(Trouble::Reply, &format!("Redis refuses SET: {words}"));
                }
                (Some(Awaited::Set(_)), _) => return Err(other_end("a value that nobody asked for".to_owned())),
                (None, _) => return Err(other_end("a reply that nobody asked for".to_owned())),
            }
        }
        Ok(())
    }
}

/// What is on its way.
struct Flow {
    unanswered: VecDeque<Awaited>,
    /// How long nothing may move while something is unanswered.
    patience: Duration,
    moved: Instant,
    /// Bytes of an unfinished reply since then.
    read: usize,
}

impl Flow {
    fn send(&mut self, command: Command, output: &mut BytesMut) {
        if matches!(&command.answer, Awaited::Get(waiting) if waiting.is_closed()) {
            return;
        }
        if self.unanswered.is_empty() {
            self.moved = Instant::now();
        }
        if output.is_empty() {
            *output = command.bytes;
        } else {
            output.extend_from_slice(&command.bytes);
        }
        self.unanswered.push_back(command.answer);
    }
}

fn closed() -> io::Error {
    io::Error::new(io::ErrorKind::ConnectionReset, "it closed the connection")
}

fn other_end(text: String) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, format!("it answered {text}"))
}
