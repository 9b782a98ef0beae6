//! The echo with an event loop for each processor: a connection stays on one thread.

use std::io;
use std::net::{TcpListener, TcpStream};
use std::thread;

use axum::serve::Listener;
use futures_util::stream;
use tokio::runtime::Builder;
use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel};

use crate::echo::{GrpcEcho, exit_with_parent, loopback, router};

/// The connections of one event loop.
struct Dealt(UnboundedReceiver<TcpStream>);

impl Dealt {
    /// Returns the next connection, on the event loop of this thread.
    async fn next(&mut self) -> Option<io::Result<tokio::net::TcpStream>> {
        self.0.recv().await.map(tokio::net::TcpStream::from_std)
    }
}

impl Listener for Dealt {
    type Io = tokio::net::TcpStream;
    type Addr = ();

    async fn accept(&mut self) -> (Self::Io, ()) {
        loop {
            match self.next().await {
                Some(Ok(stream)) => return (stream, ()),
                Some(Err(error)) => eprintln!("the echo: {error}"),
                None => std::future::pending().await,
            }
        }
    }

    fn local_addr(&self) -> io::Result<()> {
        Ok(())
    }
}

/// Serves both protocols on loopback until standard input ends. Connections go to the event loops
/// in turn.
///
/// # Errors
/// A port is in use, a thread cannot be created, or a listener fails.
pub(crate) fn serve(http: u16, grpc: u16) -> Result<(), String> {
    exit_with_parent();
    let failed = |error: io::Error| format!("the echo's event loops: {error}");
    let (http, grpc) = (TcpListener::bind(loopback(http)), TcpListener::bind(loopback(grpc)));
    let (http, grpc) = (http.map_err(failed)?, grpc.map_err(failed)?);
    let processors = thread::available_parallelism().map_err(failed)?.get();
    let loops: io::Result<Vec<_>> = (0..processors).map(|_| start()).collect();
    let (http_loops, grpc_loops): (Vec<_>, Vec<_>) = loops.map_err(failed)?.into_iter().unzip();
    thread::spawn(move || {
        deal(&grpc, &grpc_loops).inspect_err(|error| eprintln!("the gRPC echo: {error}"))
    });
    deal(&http, &http_loops).map_err(failed)
}

/// Starts an event loop, and returns the ways to give it connections of HTTP and of gRPC.
fn start() -> io::Result<(UnboundedSender<TcpStream>, UnboundedSender<TcpStream>)> {
    let ((http, of_http), (grpc, of_grpc)) = (unbounded_channel(), unbounded_channel());
    let runtime = Builder::new_current_thread().enable_all().build()?;
    thread::spawn(move || {
        runtime.block_on(async {
            let calls = stream::unfold(Dealt(of_grpc), async |mut dealt| Some((dealt.next().await?, dealt)));
            let grpc = tonic::transport::Server::builder().add_service(GrpcEcho).serve_with_incoming(calls);
            tokio::select! {
                result = axum::serve(Dealt(of_http), router()) => eprintln!("the HTTP echo: {result:?}"),
                result = grpc => eprintln!("the gRPC echo: {result:?}"),
            }
        });
    });
    Ok((http, grpc))
}

/// Accepts connections and gives them to the loops in turn.
fn deal(listener: &TcpListener, loops: &[UnboundedSender<TcpStream>]) -> io::Result<()> {
    for one in loops.iter().cycle() {
        let (stream, _) = listener.accept()?;
        stream.set_nodelay(true)?;
        stream.set_nonblocking(true)?;
        // An error if the loop has ended.
        let _ = one.send(stream);
    }
    Ok(())
}
