//! Receives StatsD datagrams, over UDP or a Unix datagram socket, and hands them to the metrics.
//!
//! Off unless `--statsd-address` is given. Nobody is asked who they are: what comes is believed as far as the definition of
//! the metrics allows it, bounded in memory by that definition and in time by a turn's `TURN` datagrams.

use std::fs;
use std::io;
use std::os::fd::AsFd;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use pharos::metrics::cache::Cache;
use pharos::metrics::intake::Statsd;
use pharos::metrics::statsd::MAX_DATAGRAM;
use rustix::net::{RecvFlags, recv, sockopt};
use tokio::net::{UdpSocket, UnixDatagram};
use tokio::time::{Instant, sleep, sleep_until};

use crate::metrics::RefusedLinesLog;

/// Bytes that the kernel is asked to keep for us; it gives no more than `net.core.rmem_max`.
const RECEIVE_BUFFER: usize = 8 << 20;
/// The most datagrams that are taken before others of the runtime get their turn.
const TURN: usize = 64;
/// The most that are taken at the end of what senders had sent before.
const LAST: usize = 4096;
/// How long sets collect members: the interval of StatsD's own flushes.
const INTERVAL: Duration = Duration::from_secs(10);
/// What a failing socket is left alone for.
const PAUSE: Duration = Duration::from_millis(50);

/// Where StatsD datagrams are received.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum StatsdAddress {
    /// UDP on this host (an address or a name) and port.
    Udp(String, u16),
    /// A Unix datagram socket at this path.
    Unix(PathBuf),
}

/// A bound socket.
pub struct Socket {
    kind: Kind,
    /// Kept as long as the socket is read.
    _file: Option<SocketFile>,
}

enum Kind {
    Udp(UdpSocket),
    Unix(UnixDatagram),
}

/// The file of a Unix socket, which goes with it.
struct SocketFile {
    path: PathBuf,
    /// Device and number of the file, so that nobody else's is removed.
    identity: Option<(u64, u64)>,
}

impl Drop for SocketFile {
    fn drop(&mut self) {
        if self.identity.is_some() && identity(&self.path) == self.identity {
            let _ = fs::remove_file(&self.path);
        }
    }
}

fn identity(path: &Path) -> Option<(u64, u64)> {
    fs::symlink_metadata(path).ok().map(|file| (file.dev(), file.ino()))
}

/// Binds the address.
///
/// # Errors
/// Why it cannot be, with the flag and what helps.
pub async fn bind(address: &StatsdAddress) -> Result<Socket, String> {
    let (bound, shown) = match address {
        StatsdAddress::Udp(host, port) => {
            let shown = if host.contains(':') { format!("[{host}]:{port}") } else { format!("{host}:{port}") };
            (bind_udp(host, *port).await, shown)
        }
        StatsdAddress::Unix(path) => (bind_unix(path), format!("unix:{}", path.display())),
    };
    bound.map_err(|error| format!("StatsD cannot listen on {shown}: {error}; --statsd-address chooses another address"))
}

async fn bind_udp(host: &str, port: u16) -> io::Result<Socket> {
    let socket = UdpSocket::bind((host, port)).await?;
    widen(&socket);
    tracing::info!("StatsD on {} (UDP)", socket.local_addr()?);
    Ok(Socket { kind: Kind::Udp(socket), _file: None })
}

fn bind_unix(path: &Path) -> io::Result<Socket> {
    remove_stale(path)?;
    let socket = UnixDatagram::bind(path)?;
    widen(&socket);
    tracing::info!("StatsD on {} (Unix datagrams)", path.display());
    let file = SocketFile { path: path.to_owned(), identity: identity(path) };
    Ok(Socket { kind: Kind::Unix(socket), _file: Some(file) })
}

/// Senders of UDP do not wait: what the kernel cannot keep while we are busy is lost.
fn widen(socket: &impl AsFd) {
    if let Err(error) = sockopt::set_socket_recv_buffer_size(socket, RECEIVE_BUFFER) {
        tracing::debug!(%error, "the receive buffer of StatsD cannot be made larger");
    }
}

/// Removes the socket that an ended server has left, and nothing else.
fn remove_stale(path: &Path) -> io::Result<()> {
    let file = match fs::symlink_metadata(path) {
        Ok(file) => file,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        Err(error) => return Err(error),
    };
    if !file.file_type().is_socket() {
        return Err(io::Error::new(io::ErrorKind::AlreadyExists, "the path exists and is no socket"));
    }
    let probe = std::os::unix::net::UnixDatagram::unbound()?;
    match probe.connect(path) {
        Err(error) if error.kind() == io::ErrorKind::ConnectionRefused => fs::remove_file(path),
        Err(error) => Err(error),
        Ok(()) => Err(io::Error::new(io::ErrorKind::AddrInUse, "another process receives there")),
    }
}

impl Socket {
    async fn receive(&self, buffer: &mut [u8]) -> io::Result<usize> {
        match &self.kind {
            Kind::Udp(socket) => socket.recv(buffer).await,
            Kind::Unix(socket) => socket.recv(buffer).await,
        }
    }

    /// A datagram that is there already; `None` if there is none. Asks the kernel itself: what the runtime knows may be older.
    fn receive_now(&self, buffer: &mut [u8]) -> Option<usize> {
        let received = match &self.kind {
            Kind::Udp(socket) => recv(socket, buffer, RecvFlags::DONTWAIT),
            Kind::Unix(socket) => recv(socket, buffer, RecvFlags::DONTWAIT),
        };
        received.ok().map(|(length, _)| length)
    }
}

/// What has been received and where it goes.
struct Receiver {
    socket: Socket,
    cache: Arc<Cache>,
    statsd: Statsd,
    complaints: RefusedLinesLog,
    /// One byte more than a datagram may have, to see when one has.
    buffer: Vec<u8>,
}

impl Receiver {
    /// Takes the datagram of this length.
    fn take(&mut self, length: usize) {
        let Self { cache, statsd, complaints, buffer, .. } = self;
        let datagram = buffer.get(..length).unwrap_or(buffer);
        statsd.datagram(cache, datagram, |line, refusal| complaints.tell(line, &refusal));
    }

    /// Takes what has come already, `most` datagrams at most.
    fn take_waiting(&mut self, most: usize) {
        for _ in 0..most {
            let Some(length) = self.socket.receive_now(&mut self.buffer) else { return };
            self.take(length);
        }
    }
}

/// Receives until `shutdown` is ready; what had been sent before is taken.
pub async fn serve(socket: Socket, cache: Arc<Cache>, shutdown: impl Future<Output = ()>) {
    receive(socket, cache, INTERVAL, shutdown).await;
}

/// As [`serve`]; sets collect members for `interval`.
async fn receive(socket: Socket, cache: Arc<Cache>, interval: Duration, shutdown: impl Future<Output = ()>) {
    let mut shutdown = std::pin::pin!(shutdown);
    let (statsd, complaints) = (Statsd::default(), RefusedLinesLog::new("StatsD".to_owned()));
    let mut receiver = Receiver { socket, cache, statsd, complaints, buffer: vec![0; MAX_DATAGRAM + 1] };
    // Only while there are sets: a server without them is never woken.
    let mut interval_end: Option<Instant> = None;
    loop {
        tokio::select! {
            received = receiver.socket.receive(&mut receiver.buffer) => match received {
                Ok(length) => {
                    receiver.take(length);
                    receiver.take_waiting(TURN);
                    tokio::task::yield_now().await;
                }
                Err(error) => {
                    tracing::warn!(%error, "StatsD cannot receive; trying again in {} ms", PAUSE.as_millis());
                    sleep(PAUSE).await;
                }
            },
            () = until(interval_end) => {
                receiver.statsd.flush(&receiver.cache);
                interval_end = None;
            }
            () = &mut shutdown => break,
        }
        if interval_end.is_none() && receiver.statsd.has_sets() {
            interval_end = Some(Instant::now() + interval);
        }
    }
    receiver.take_waiting(LAST);
}

async fn until(end: Option<Instant>) {
    match end {
        Some(end) => sleep_until(end).await,
        None => std::future::pending().await,
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use pharos::metrics::cache::Settings;
    use pharos::metrics::catalog::Catalog;
    use tokio::sync::oneshot;

    const OWN: &str = "
model_metrics:
  counter:
    - {name: Hits, unit: Count, dimensions: [page]}
  gauge:
    - {name: Users, unit: Count}
";

    fn cache() -> Arc<Cache> {
        Arc::new(Cache::new(Catalog::parse(OWN, "m.yaml").unwrap(), Settings::new("here")))
    }

    #[tokio::test]
    async fn what_was_sent_before_the_end_is_taken_and_the_file_goes() {
        let (folder, cache) = (tempfile::tempdir().unwrap(), cache());
        let path = folder.path().join("socket");
        let socket = bind(&StatsdAddress::Unix(path.clone())).await.unwrap();
        let sender = std::os::unix::net::UnixDatagram::unbound().unwrap();
        let (stop, stopped) = oneshot::channel::<()>();
        for _ in 0..3 {
            sender.send_to(b"Hits:2|c|#page:a\nHits:1|c|#page:b", &path).unwrap();
        }
        drop(stop);
        serve(socket, cache.clone(), async { drop(stopped.await) }).await;
        assert_eq!(cache.counter("Hits", &["a"]).unwrap().value(), 6.0);
        assert_eq!(cache.counter("Hits", &["b"]).unwrap().value(), 3.0);
        assert!(!path.exists());
    }

    #[tokio::test]
    async fn only_a_socket_that_nobody_reads_is_removed() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("socket");
        let at = StatsdAddress::Unix(path.clone());
        drop(std::os::unix::net::UnixDatagram::bind(&path).unwrap());
        let socket = bind(&at).await.unwrap();
        let error = bind(&at).await.err().unwrap();
        assert!(error.contains("another process receives there") && error.contains("--statsd-address"), "{error}");
        fs::remove_file(&path).unwrap();
        fs::write(&path, "mine").unwrap();
        drop(socket);
        assert_eq!(fs::read_to_string(&path).unwrap(), "mine", "what is not ours stays");
        let error = bind(&at).await.err().unwrap();
        assert!(error.contains("is no socket"), "{error}");
        fs::remove_file(&path).unwrap();
        let nowhere = bind(&StatsdAddress::Unix(path.join("x"))).await.err().unwrap();
        assert!(nowhere.contains("No such file"), "{nowhere}");
    }

    #[tokio::test]
    async fn sets_are_counted_each_interval() {
        let cache = cache();
        let socket = bind(&StatsdAddress::Udp("127.0.0.1".to_owned(), 0)).await.unwrap();
        let Kind::Udp(udp) = &socket.kind else { unreachable!() };
        let at = udp.local_addr().unwrap();
        let sender = std::net::UdpSocket::bind("127.0.0.1:0").unwrap();
        sender.send_to(b"Users:ann|s\nUsers:bob|s\nUsers:ann|s", at).unwrap();
        let (stop, stopped) = oneshot::channel::<()>();
        let interval = Duration::from_millis(200);
        let task = tokio::spawn(receive(socket, cache.clone(), interval, async { drop(stopped.await) }));
        let users = cache.gauge("Users", &[]).unwrap();
        for expected in [2.0, 0.0] {
            let deadline = Instant::now() + Duration::from_secs(20);
            while users.value() != expected {
                assert!(Instant::now() < deadline, "{expected} users were not shown, but {}", users.value());
                sleep(Duration::from_millis(1)).await;
            }
        }
        drop(stop);
        task.await.unwrap();
    }
}
