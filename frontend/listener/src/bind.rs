//! Listening sockets.

use std::io;
use std::net::SocketAddr;

use tokio::net::{TcpListener, TcpSocket};

/// The maximum number of completed connections that wait to be accepted.
const BACKLOG: u32 = 4096;

/// Listens on an address. With `shared`, several processes of one user may listen on the same port, and the system
/// distributes the connections among them (`SO_REUSEPORT`).
///
/// # Errors
/// The address is in use, or not one of this machine.
pub fn bind(address: SocketAddr, shared: bool) -> io::Result<TcpListener> {
    bound(address, shared)?.listen(BACKLOG)
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
