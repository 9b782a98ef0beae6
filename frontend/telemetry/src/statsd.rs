//! Receives StatsD datagrams over UDP or a Unix datagram socket and passes them to the metrics.
//!
//! Off unless `--statsd-address` is given. Senders are not authenticated. The definition of the
//! metrics limits which samples are accepted and how much memory they use; `TURN` limits the
//! datagrams handled in one turn.

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

/// The requested size of the kernel's receive buffer, bytes; the kernel grants at most
/// `net.core.rmem_max`.
const RECEIVE_BUFFER: usize = 8 << 20;
/// The maximum number of datagrams handled before yielding to the runtime.
const TURN: usize = 64;
/// The maximum number of waiting datagrams handled at shutdown.
const LAST: usize = 4096;
/// The time for which sets collect members: the flush interval of StatsD.
const INTERVAL: Duration = Duration::from_secs(10);
/// The pause after a failed receive.
const PAUSE: Duration = Duration::from_millis(50);

/// The address that receives StatsD datagrams.
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
    /// Removes the file of a Unix socket when dropped.
    _file: Option<SocketFile>,
}

enum Kind {
    Udp(UdpSocket),
    Unix(UnixDatagram),
}

/// The file of a Unix socket, removed when the socket is dropped.
struct SocketFile {
    path: PathBuf,
    /// Device and inode of the file, so that a file of another process is not removed.
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
/// The address cannot be bound; the text has the flag to change.
pub async fn bind(address: &StatsdAddress) -> Result<Socket, String> {
    let (bound, shown) = match address {
        StatsdAddress::Udp(host, port) => {
            let shown = if host.contains(':') {
                format!("[{host}]:{port}")
            } else {
                format!("{host}:{port}")
            };
            (bind_udp(host, *port).await, shown)
        }
        StatsdAddress::Unix(path) => (bind_unix(path), format!("unix:{}", path.display())),
    };
    bound.map_err(|error| {
        format!("cannot receive StatsD on {shown}: {error}; change --statsd-address")
    })
}

async fn bind_udp(host: &str, port: u16) -> io::Result<Socket> {
    let socket = UdpSocket::bind((host, port)).await?;
    widen(&socket);
    tracing::info!("receiving StatsD on {} (UDP)", socket.local_addr()?);
    Ok(Socket { kind: Kind::Udp(socket), _file: None })
}

fn bind_unix(path: &Path) -> io::Result<Socket> {
    remove_stale(path)?;
    let socket = UnixDatagram::bind(path)?;
    widen(&socket);
    tracing::info!("receiving StatsD on {} (Unix datagrams)", path.display());
    let file = SocketFile { path: path.to_owned(), identity: identity(path) };
    Ok(Socket { kind: Kind::Unix(socket), _file: Some(file) })
}

/// Enlarges the receive buffer: UDP senders do not wait, so datagrams beyond the buffer are lost
/// while the server is busy.
fn widen(socket: &impl AsFd) {
    if let Err(error) = sockopt::set_socket_recv_buffer_size(socket, RECEIVE_BUFFER) {
        tracing::debug!(%error, "cannot enlarge the receive buffer of StatsD");
    }
}

/// Removes the socket of a server that has ended, and nothing else.
fn remove_stale(path: &Path) -> io::Result<()> {
    let file = match fs::symlink_metadata(path) {
        Ok(file) => file,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        Err(error) => return Err(error),
    };
    if !file.file_type().is_socket() {
        return Err(io::Error::new(
            io::ErrorKind::AlreadyExists,
            "the path exists and is not a socket",
        ));
    }
    let probe = std::os::unix::net::UnixDatagram::unbound()?;
    match probe.connect(path) {
        Err(error) if error.kind() == io::ErrorKind::ConnectionRefused => fs::remove_file(path),
        Err(error) => Err(error),
        Ok(()) => Err(io::Error::new(io::ErrorKind::AddrInUse, "another process uses this socket")),
    }
}

impl Socket {
    async fn receive(&self, buffer: &mut [u8]) -> io::Result<usize> {
        match &self.kind {
            Kind::Udp(socket) => socket.recv(buffer).await,
            Kind::Unix(socket) => socket.recv(buffer).await,
        }
    }

    /// Returns the length of a waiting datagram; `None` if none waits. Queries the kernel: the
    /// runtime's readiness may be stale.
    fn receive_now(&self, buffer: &mut [u8]) -> Option<usize> {
        let received = match &self.kind {
            Kind::Udp(socket) => recv(socket, buffer, RecvFlags::DONTWAIT),
            Kind::Unix(socket) => recv(socket, buffer, RecvFlags::DONTWAIT),
        };
        received.ok().map(|(length, _)| length)
    }
}

/// The state of the receiver.
struct Receiver {
    socket: Socket,
    cache: Arc<Cache>,
    statsd: Statsd,
    refused_lines: RefusedLinesLog,
    /// One byte longer than a datagram may be, to detect longer datagrams.
    buffer: Vec<u8>,
}

impl Receiver {
    /// Handles the datagram of this length in the buffer.
    fn take(&mut self, length: usize) {
        let Self { cache, statsd, refused_lines, buffer, .. } = self;
        let datagram = buffer.get(..length).unwrap_or(buffer);
        statsd.datagram(cache, datagram, |line, refusal| refused_lines.report(line, &refusal));
    }

    /// Handles at most `most` waiting datagrams.
    fn take_waiting(&mut self, most: usize) {
        for _ in 0..most {
            let Some(length) = self.socket.receive_now(&mut self.buffer) else { return };
            self.take(length);
        }
    }
}

/// Receives until `shutdown` is ready, then handles the datagrams that were sent before.
pub async fn serve(socket: Socket, cache: Arc<Cache>, shutdown: impl Future<Output = ()>) {
    receive(socket, cache, INTERVAL, shutdown).await;
}

/// Does the same as [`serve`], with `interval` as the time for which sets collect members.
async fn receive(
    socket: Socket,
    cache: Arc<Cache>,
    interval: Duration,
    shutdown: impl Future<Output = ()>,
) {
    let mut shutdown = std::pin::pin!(shutdown);
    let mut receiver = Receiver {
        socket,
        cache,
        statsd: Statsd::default(),
        refused_lines: RefusedLinesLog::new("StatsD".to_owned()),
        buffer: vec![0; MAX_DATAGRAM + 1],
    };
    // Set only while sets exist, so that a server without sets is never woken.
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
                    tracing::warn!(%error, "StatsD receive failed; retrying in {} ms", PAUSE.as_millis());
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
    async fn shutdown_handles_waiting_datagrams_and_removes_the_file() {
        let folder = tempfile::tempdir().unwrap();
        let cache = cache();
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
    async fn removes_only_a_socket_without_a_reader() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("socket");
        let at = StatsdAddress::Unix(path.clone());
        drop(std::os::unix::net::UnixDatagram::bind(&path).unwrap());
        let socket = bind(&at).await.unwrap();
        let error = bind(&at).await.err().unwrap();
        assert!(
            error.contains("another process uses this socket")
                && error.contains("--statsd-address"),
            "{error}"
        );
        fs::remove_file(&path).unwrap();
        fs::write(&path, "mine").unwrap();
        drop(socket);
        assert_eq!(fs::read_to_string(&path).unwrap(), "mine", "a file of another process is kept");
        let error = bind(&at).await.err().unwrap();
        assert!(error.contains("is not a socket"), "{error}");
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
        let task =
            tokio::spawn(receive(socket, cache.clone(), interval, async { drop(stopped.await) }));
        let users = cache.gauge("Users", &[]).unwrap();
        for expected in [2.0, 0.0] {
            let deadline = Instant::now() + Duration::from_secs(20);
            while users.value() != expected {
                assert!(
                    Instant::now() < deadline,
                    "expected {expected} users, got {}",
                    users.value()
                );
                sleep(Duration::from_millis(1)).await;
            }
        }
        drop(stop);
        task.await.unwrap();
    }
}
