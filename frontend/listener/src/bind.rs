//! Listening sockets.

use std::io;
use std::net::SocketAddr;

use tokio::net::{TcpListener, TcpSocket, TcpStream};

/// The maximum number of completed connections that wait to be accepted.
const BACKLOG: u32 = 4096;

/// Listens on an address. With `shared`, several processes of one user may listen on the same port,
/// and the system distributes the connections among them (`SO_REUSEPORT`).
///
/// # Errors
/// The address is in use, or not one of this machine.
pub fn bind(address: SocketAddr, shared: bool) -> io::Result<TcpListener> {
    bound(address, shared)?.listen(BACKLOG)
}

/// Returns the connections that wait to be accepted, and closes the listener after them.
pub(crate) fn accept_waiting(listener: TcpListener) -> impl Iterator<Item = TcpStream> {
    let listener = listener.into_std();
    // An error says that no connection waits, or that the system cannot accept one now.
    let accept = move || listener.as_ref().ok()?.accept().ok();
    let streams = std::iter::from_fn(accept).take(BACKLOG as usize);
    streams.filter_map(|(stream, _)| {
        let accepted = stream.set_nonblocking(true).and_then(|()| TcpStream::from_std(stream));
        accepted
            .inspect_err(|error| tracing::debug!(%error, "connection lost before it was served"))
            .ok()
    })
}

/// Checks that an address can be bound, without accepting connections.
///
/// # Errors
/// As [`bind`].
pub fn check(address: SocketAddr) -> io::Result<()> {
    bound(address, false).map(drop)
}

fn bound(address: SocketAddr, shared: bool) -> io::Result<TcpSocket> {
    let socket = if address.is_ipv4() { TcpSocket::new_v4()? } else { TcpSocket::new_v6()? };
    // Connections of a server that has just stopped occupy the port for a minute (TIME_WAIT).
    socket.set_reuseaddr(true)?;
    if shared {
        socket.set_reuseport(true)?;
    }
    socket.bind(address)?;
    Ok(socket)
}
