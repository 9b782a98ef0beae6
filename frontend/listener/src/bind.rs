//! Sockets to listen on.

use std::io;
use std::net::SocketAddr;

use tokio::net::{TcpListener, TcpSocket};

/// Connections that the system completes before they are accepted.
const BACKLOG: u32 = 4096;

/// Listens on an address. With `shared` several processes of one user may listen on the same port, and the system gives
/// each connection to one of them (`SO_REUSEPORT`).
///
/// # Errors
/// Somebody else listens there, or the address is not this machine's.
pub fn bind(address: SocketAddr, shared: bool) -> io::Result<TcpListener> {
    bound(address, shared)?.listen(BACKLOG)
}

/// Whether an address can be bound now. No connection is accepted meanwhile.
///
/// # Errors
/// As [`bind`].
pub fn check(address: SocketAddr) -> io::Result<()> {
    bound(address, false).map(drop)
}

fn bound(address: SocketAddr, shared: bool) -> io::Result<TcpSocket> {
    let socket = if address.is_ipv4() { TcpSocket::new_v4()? } else { TcpSocket::new_v6()? };
    // A server that was just stopped leaves connections behind that keep the port for a minute.
    socket.set_reuseaddr(true)?;
    if shared {
        socket.set_reuseport(true)?;
    }
    socket.bind(address)?;
    Ok(socket)
}
