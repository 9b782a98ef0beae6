//! Reports the state of this process to systemd with the datagrams of `sd_notify(3)`: ready,
//! stopping, and alive.
//!
//! systemd passes the address of its socket in `NOTIFY_SOCKET`, and the interval of its watchdog in
//! `WATCHDOG_USEC`. Without these variables nothing is sent. A send never blocks.

use std::ffi::{OsStr, OsString};
use std::io;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::net::{SocketAddr, UnixDatagram};
use std::time::Duration;

/// The variables of systemd. They are for this process only: workers must not inherit them.
pub const VARIABLES: [&str; 3] = ["NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID"];

/// How often a message is sent if the socket's queue is full, and the delay between two attempts.
const ATTEMPTS: u32 = 20;
const RETRY: Duration = Duration::from_millis(100);

/// The connection to the service manager that started this process, if it expects messages.
#[derive(Clone, Debug, Default)]
pub struct ServiceManager {
    address: Option<SocketAddr>,
    watchdog: Option<Duration>,
}

impl ServiceManager {
    /// Reads the variables of this process, and starts the task of the watchdog. An address that
    /// cannot be used is logged, and nothing is sent. Must be called in a tokio runtime.
    #[must_use]
    pub fn start() -> Self {
        let manager =
            Self::new(|name| std::env::var_os(name), std::process::id()).unwrap_or_else(|reason| {
                tracing::warn!("{reason}");
                Self::default()
            });
        tokio::spawn(manager.clone().keep_alive());
        manager
    }

    /// `variable` looks up an environment variable; `pid` is the id of this process.
    fn new(variable: impl Fn(&str) -> Option<OsString>, pid: u32) -> Result<Self, String> {
        let number = |name| variable(name).and_then(|value| value.to_str()?.parse::<u64>().ok());
        let Some(value) = variable("NOTIFY_SOCKET").filter(|value| !value.is_empty()) else {
            return Ok(Self::default());
        };
        let address = address(&value)
            .map_err(|reason| format!("NOTIFY_SOCKET={value:?} is ignored: {reason}"))?;
        let for_this_process =
            number("WATCHDOG_PID").is_none_or(|expected| expected == u64::from(pid));
        let timeout = number("WATCHDOG_USEC").filter(|timeout| *timeout > 0 && for_this_process);
        Ok(Self { address: Some(address), watchdog: timeout.map(Duration::from_micros) })
    }

    /// Reports that all models are loaded and requests are served.
    pub async fn ready(&self) {
        self.notify("READY=1\nSTATUS=Serving").await;
    }

    /// Reports that the server shuts down.
    pub async fn stopping(&self) {
        self.notify("STOPPING=1\nSTATUS=Finishing requests in flight").await;
    }

    /// Sends the messages of the watchdog, two in each of its intervals, until the runtime ends or
    /// stops executing tasks. Returns at once without a watchdog.
    async fn keep_alive(self) {
        let Some(timeout) = self.watchdog else { return };
        let mut ticks = tokio::time::interval(timeout / 2);
        loop {
            ticks.tick().await;
            self.notify("WATCHDOG=1").await;
        }
    }

    /// Sends a message; waits in steps if the queue of the socket is full. Failures are logged.
    async fn notify(&self, state: &str) {
        let Some(address) = &self.address else { return };
        let mut sent = send(address, state);
        for _ in 1..ATTEMPTS {
            match &sent {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    tokio::time::sleep(RETRY).await
                }
                _ => break,
            }
            sent = send(address, state);
        }
        if let Err(error) = sent {
            let name = state.split('=').next().unwrap_or(state);
            tracing::warn!("cannot send {name} to the service manager at NOTIFY_SOCKET: {error}");
        }
    }
}

/// Returns the address that `NOTIFY_SOCKET` names: an absolute path, or the name of an abstract
/// socket after `@`.
fn address(value: &OsStr) -> Result<SocketAddr, String> {
    let address = match value.as_bytes() {
        [b'@', name @ ..] => SocketAddr::from_abstract_name(name),
        [b'/', ..] => SocketAddr::from_pathname(value),
        _ => return Err("expected an absolute path, or @NAME for an abstract socket".to_owned()),
    };
    address.map_err(|error| error.to_string())
}

/// Sends one datagram without blocking.
fn send(address: &SocketAddr, state: &str) -> io::Result<()> {
    let socket = UnixDatagram::unbound()?;
    socket.set_nonblocking(true)?;
    socket.send_to_addr(state.as_bytes(), address).map(|_| ())
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;

    use super::*;

    const PID: u32 = 42;

    fn manager(variables: &[(&str, &str)]) -> Result<ServiceManager, String> {
        let variables: HashMap<&str, &str> = variables.iter().copied().collect();
        ServiceManager::new(|name| variables.get(name).map(OsString::from), PID)
    }

    /// Binds a socket with an abstract name that no other test has.
    fn socket(name: &str) -> (UnixDatagram, String) {
        let name = format!("pharos-test-{}-{name}", std::process::id());
        let address = SocketAddr::from_abstract_name(&name).unwrap();
        let socket = UnixDatagram::bind_addr(&address).unwrap();
        socket.set_read_timeout(Some(Duration::from_secs(10))).unwrap();
        (socket, format!("@{name}"))
    }

    fn received(socket: &UnixDatagram) -> String {
        let mut buffer = [0; 256];
        let length = socket.recv(&mut buffer).unwrap();
        String::from_utf8_lossy(&buffer[..length]).into_owned()
    }

    #[tokio::test]
    async fn sends_ready_and_stopping_to_an_abstract_socket() {
        let (socket, name) = socket("abstract");
        let manager = manager(&[("NOTIFY_SOCKET", &name)]).unwrap();
        manager.ready().await;
        assert_eq!(received(&socket), "READY=1\nSTATUS=Serving");
        manager.stopping().await;
        assert_eq!(received(&socket), "STOPPING=1\nSTATUS=Finishing requests in flight");
        manager.keep_alive().await;
    }

    #[tokio::test]
    async fn sends_to_a_socket_with_a_path() {
        let path = std::env::temp_dir().join(format!("pharos-notify-{}", std::process::id()));
        let socket = UnixDatagram::bind(&path).unwrap();
        let manager = manager(&[("NOTIFY_SOCKET", path.to_str().unwrap())]).unwrap();
        manager.ready().await;
        std::fs::remove_file(&path).unwrap();
        assert_eq!(received(&socket), "READY=1\nSTATUS=Serving");
        // The socket is gone: the failure is logged, and the server continues.
        manager.stopping().await;
    }

    #[tokio::test(flavor = "multi_thread", worker_threads = 1)]
    async fn sends_two_messages_of_the_watchdog_in_each_interval() {
        let (socket, name) = socket("watchdog");
        let variables =
            [("NOTIFY_SOCKET", name.as_str()), ("WATCHDOG_USEC", "200000"), ("WATCHDOG_PID", "42")];
        let task = tokio::spawn(manager(&variables).unwrap().keep_alive());
        let started = tokio::time::Instant::now();
        for _ in 0..4 {
            assert_eq!(received(&socket), "WATCHDOG=1");
        }
        assert!(started.elapsed() >= Duration::from_millis(250), "at 0, 100, 200 and 300 ms");
        task.abort();
    }

    #[tokio::test(flavor = "multi_thread", worker_threads = 1)]
    async fn a_full_queue_delays_a_message_and_does_not_block() {
        let (socket, name) = socket("full");
        let manager = manager(&[("NOTIFY_SOCKET", &name)]).unwrap();
        let address = manager.address.clone().unwrap();
        let mut queued = 0;
        while send(&address, "x").is_ok() {
            queued += 1;
        }
        let sending = tokio::spawn(async move { manager.ready().await });
        tokio::time::sleep(RETRY * 2).await;
        assert!(!sending.is_finished());
        (0..queued).for_each(|_| assert_eq!(received(&socket), "x"));
        sending.await.unwrap();
        assert_eq!(received(&socket), "READY=1\nSTATUS=Serving");
    }

    #[test]
    fn the_watchdog_is_off_without_an_interval_for_this_process() {
        let watchdog = |variables: &[(&str, &str)]| {
            manager(&[&[("NOTIFY_SOCKET", "@x")][..], variables].concat()).unwrap().watchdog
        };
        assert_eq!(watchdog(&[("WATCHDOG_USEC", "3000000")]), Some(Duration::from_secs(3)));
        assert_eq!(
            watchdog(&[("WATCHDOG_USEC", "3000000"), ("WATCHDOG_PID", "42")]),
            Some(Duration::from_secs(3))
        );
        for off in [
            &[("WATCHDOG_USEC", "3000000"), ("WATCHDOG_PID", "41")][..],
            &[("WATCHDOG_USEC", "0")],
            &[],
        ] {
            assert_eq!(watchdog(off), None, "{off:?}");
        }
    }

    #[test]
    fn refuses_addresses_of_other_kinds() {
        for value in ["relative/path", "vsock:2:1234"] {
            let reason = manager(&[("NOTIFY_SOCKET", value)]).unwrap_err();
            assert!(
                reason.contains(value) && reason.contains("expected an absolute path"),
                "{reason}"
            );
        }
        let long = format!("/{}", "x".repeat(200));
        assert!(manager(&[("NOTIFY_SOCKET", &long)]).is_err());
        assert!(manager(&[("NOTIFY_SOCKET", "")]).unwrap().address.is_none());
        assert!(manager(&[]).unwrap().address.is_none());
    }
}
