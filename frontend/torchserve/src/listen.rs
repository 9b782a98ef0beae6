//! Opens TorchServe's listeners.

use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use pharos::access::Restrictions;
use pharos::metrics::cache::Cache;
use pharos::metrics::labels::Listener;
use pharos::service::SharedManagement;
use tokio::net::TcpListener;
use tokio::task::JoinHandle;

use super::grpc::{self, Kserve};
use super::guard::Guard;
use super::ids::Ids;
use super::rest::{BODY_TIMEOUT, Page, Port, Shared, refusal};
use super::routes::Apis;
use super::settings::Age;
use super::token::Tokens;
use super::{Address, Registry, Settings};
use pharos_edge::access::Access;
use pharos_edge::http_service;
use pharos_edge::renderings::{MAX_SCRAPE_WRITE, Renderings};
use pharos_edge::response_timing::ResponseTiming;
use pharos_listener as listener;
use pharos_listener::receiving::Budget;
use pharos_listener::{HttpVersions, Limits, PhaseReceiver, Tls};
use pharos_os::event_loops::EventLoops;

/// The parts that the endpoints are built from.
pub struct Start {
    /// The server for clients, which use TorchServe's model names.
    pub service: SharedManagement,
    /// The same server for internal requests of the endpoints: with the engine's model names, and
    /// without per-name counting.
    pub uncounted: SharedManagement,
    /// The v2 protocol, which TorchServe's ports also serve.
    pub kserve: Kserve,
    /// The metrics cache that counts connections.
    pub metrics: Arc<Cache>,
    /// TorchServe's configuration.
    pub settings: Arc<Settings>,
    /// The registered models.
    pub registry: Arc<Registry>,
    /// The server's lifetime, which ends the listeners.
    pub phases: PhaseReceiver,
    /// The access checks of the server's own ports.
    pub server: ServerAccess,
    /// The memory budget for bodies that are being received.
    pub budget: Budget,
    /// The event loops that serve connections, except connections of metrics.
    pub event_loops: EventLoops,
    /// `--response-timing`.
    pub timing: ResponseTiming,
    /// The documents of the live page.
    pub page: Page,
}

/// The access checks of the server's own ports, which TorchServe's ports apply too.
#[derive(Clone, Debug, Default)]
pub struct ServerAccess {
    /// The tokens of the token files.
    pub tokens: Access,
    /// `--http-restricted-api`.
    pub http: Arc<Restrictions>,
    /// `--grpc-restricted-protocol`.
    pub grpc: Arc<Restrictions>,
}

/// Checks that every address can be bound, without listening, so that conflicts are reported before
/// models load.
///
/// # Errors
/// An address cannot be bound; the text names it and the key that sets it.
pub fn check_addresses(settings: &Settings) -> Result<(), String> {
    for (what, key, address) in named_addresses(settings) {
        let checked = listener::check(address);
        checked.map_err(|error| cannot_listen(&what, &key, address, &error))?;
    }
    Ok(())
}

/// Returns the names of the listeners, the keys that set their addresses, and the addresses.
pub fn named_addresses(settings: &Settings) -> impl Iterator<Item = (String, String, SocketAddr)> {
    let rest = apis(settings).into_iter().map(|(address, apis)| {
        let what = name_of(apis);
        (format!("the {what} API"), format!("{what}_address"), address.socket)
    });
    let grpc = [("inference", settings.grpc_inference), ("management", settings.grpc_management)]
        .map(|(what, address)| {
            (format!("the gRPC {what} API"), format!("grpc_{what}_port"), address.socket)
        });
    rest.chain(grpc)
}

/// Opens the listeners and serves on them. Returns their tasks.
///
/// # Errors
/// An address, a certificate or the key file is unusable.
pub fn serve(start: Start) -> Result<Vec<JoinHandle<()>>, String> {
    let Start {
        service,
        uncounted,
        kserve,
        metrics,
        settings,
        registry,
        phases,
        server,
        budget,
        event_loops,
        timing,
        page,
    } = start;
    let failed = |what: &str, error: io::Error| format!("{what}: {error}");
    let tokens = settings.token.clone().map(|token| Tokens::new(token).map(Arc::new)).transpose();
    let tokens = tokens.map_err(|error| failed("cannot write the key file", error))?;
    if tokens.is_some() && !server.tokens.is_open() {
        tracing::info!(
            "TorchServe's ports accept TorchServe's keys and the tokens of the token files"
        );
    }
    let ServerAccess { tokens: files, http, grpc } = server;
    let guard = Guard { tokens, access: files, http, grpc, model_api: settings.model_api };
    let shared = Arc::new(Shared {
        service,
        uncounted,
        registry,
        metrics,
        guard,
        budget,
        event_loops,
        timing,
        page,
        ids: Ids::new().map_err(|error| failed("cannot generate request ids", error))?,
        renderings: Renderings::default(),
        settings: settings.clone(),
    });
    let Kserve { http, grpc, with_reflection } = kserve;
    let v2 = http(shared.clone(), refusal);
    let mut tasks = Vec::new();
    for (address, apis) in apis(&settings) {
        let port = Port { shared: shared.clone(), apis, v2: v2.clone() };
        tasks.push(rest(port, address, &phases)?);
    }
    let inference = GrpcPort {
        api: "inference",
        address: settings.grpc_inference,
        age: settings.grpc_inference_age,
        service: grpc::inference(&shared, grpc),
    };
    let management = GrpcPort {
        api: "management",
        address: settings.grpc_management,
        age: settings.grpc_management_age,
        service: grpc::management(&shared, with_reflection)?,
    };
    tasks.push(inference.open(&shared, &phases)?);
    tasks.push(management.open(&shared, &phases)?);
    Ok(tasks)
}

/// Returns each address once, with all APIs that it serves.
fn apis(settings: &Settings) -> Vec<(Address, Apis)> {
    let open = Apis::default();
    let wanted = [
        (Some(settings.inference), Apis { inference: true, ..open }),
        (Some(settings.management), Apis { management: true, ..open }),
        (settings.metrics, Apis { metrics: true, ..open }),
    ];
    let mut all: Vec<(Address, Apis)> = Vec::new();
    for (address, apis) in wanted.into_iter().filter_map(|(address, apis)| Some((address?, apis))) {
        match all
            .iter_mut()
            .find(|(known, _)| known.socket == address.socket && address.socket.port() != 0)
        {
            Some((_, known)) => {
                known.inference |= apis.inference;
                known.management |= apis.management;
                known.metrics |= apis.metrics;
            }
            None => all.push((address, apis)),
        }
    }
    all
}

/// Returns the name of a listener in messages and keys.
fn name_of(apis: Apis) -> &'static str {
    match apis {
        Apis { inference: true, .. } => "inference",
        Apis { management: true, .. } => "management",
        _ => "metrics",
    }
}

fn rest(port: Port, address: Address, phases: &PhaseReceiver) -> Result<JoinHandle<()>, String> {
    let what = name_of(port.apis);
    let label = if what == "metrics" { Listener::Metrics } else { Listener::Http };
    let connections = connections(&port.shared, label, address, Age::default())?;
    let socket = bind(&format!("the {what} API"), &format!("{what}_address"), address.socket)?;
    let service = port.shared.service.clone();
    Ok(http_service::serve(socket, port, service, BODY_TIMEOUT, connections, phases.clone()))
}

/// A gRPC port before it listens.
struct GrpcPort {
    /// The name of its API in messages and keys.
    api: &'static str,
    address: Address,
    age: Age,
    service: grpc::Port,
}

impl GrpcPort {
    /// Listens and serves.
    fn open(self, shared: &Shared, phases: &PhaseReceiver) -> Result<JoinHandle<()>, String> {
        let api = self.api;
        let connections = connections(shared, Listener::Grpc, self.address, self.age)?;
        let socket =
            bind(&format!("the gRPC {api} API"), &format!("grpc_{api}_port"), self.address.socket)?;
        Ok(tokio::spawn(listener::serve(socket, connections, self.service, |_| {}, phases.clone())))
    }
}

/// Returns the settings of a listener.
fn connections(
    shared: &Shared,
    listener: Listener,
    address: Address,
    age: Age,
) -> Result<listener::Settings, String> {
    let mut limits = Limits {
        age: age.age.unwrap_or(Duration::ZERO),
        age_grace: age.grace.unwrap_or(Duration::ZERO),
        ..Limits::default()
    };
    let tls = match (&shared.settings.tls, address.tls) {
        (Some(files), true) => {
            let tls = Tls::new(files.clone(), HttpVersions::of(listener))
                .map_err(|reason| format!("TLS of {}: {reason}", address.socket))?;
            Some(Arc::new(tls))
        }
        (None, true) => {
            return Err(format!("{} needs TLS, but no certificate is configured", address.socket));
        }
        (_, false) => None,
    };
    let cache = Some(shared.metrics.clone());
    if listener == Listener::Metrics {
        limits.write = MAX_SCRAPE_WRITE;
    }
    // A scrape takes long and must not delay the requests of an event loop.
    let event_loops = if listener == Listener::Metrics {
        EventLoops::default()
    } else {
        shared.event_loops.clone()
    };
    Ok(listener::Settings {
        listener,
        limits,
        tls,
        cache,
        adds_peer: true,
        event_loops,
        shares_port: false,
    })
}

fn bind(what: &str, key: &str, wanted: SocketAddr) -> Result<TcpListener, String> {
    let unusable = |error: io::Error| cannot_listen(what, key, wanted, &error);
    let listener = listener::bind(wanted, false).map_err(unusable)?;
    let bound = listener.local_addr().map_err(unusable)?;
    tracing::info!("{what} listening on {bound}");
    Ok(listener)
}

fn cannot_listen(what: &str, key: &str, wanted: SocketAddr, error: &io::Error) -> String {
    format!("{what} cannot listen on {wanted}: {error}; set {key} to use another address")
}
