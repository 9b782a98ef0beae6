//! Configures and opens the listeners, and watches their TLS and token files.

use std::io;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use pharos::access::Restrictions;
use pharos::metrics::labels::{Credentials, Listener};
use pharos::service::SharedService;
use tokio::net::TcpListener;
use tokio::sync::Notify;
use tokio::task::JoinHandle;

use super::torchserve::PortSettings;
use super::{addresses, open_loading};
use crate::cli::{Options, TlsOptions};
use pharos_edge::access::{Access, Forward};
use pharos_edge::renderings::MAX_SCRAPE_WRITE;
use pharos_edge::response_timing::ResponseTiming;
use pharos_engine::engine::Engine;
use pharos_grpc as grpc;
use pharos_http as http;
use pharos_http::cloud::Platform;
use pharos_listener as listener;
use pharos_listener::receiving::Budget;
use pharos_listener::receiving::grpc::Limits as MessageLimits;
use pharos_listener::{HttpVersions, Limits, Phase, PhaseReceiver, Tls};
use pharos_openai::Models;
use pharos_os::descriptors;
use pharos_os::event_loops::EventLoops;
use pharos_os::file_watch::{self, WatchedFiles};
use pharos_telemetry::statsd;
use pharos_torchserve::ServerAccess;

/// Returns the time limit for a scraper to read more of an answer; `write` is the limit of other
/// clients, 0 for none.
fn scrape_timeout(write: Duration) -> Duration {
    if write.is_zero() { MAX_SCRAPE_WRITE } else { write.min(MAX_SCRAPE_WRITE) }
}

/// Serves on a listener that is bound, in a task.
type Bound = Box<dyn FnOnce() -> Result<JoinHandle<()>, String>>;

/// The shared parts of all listeners.
pub(super) struct Listeners<'a> {
    pub(super) options: &'a Options,
    pub(super) engine: &'a Engine,
    pub(super) phases: PhaseReceiver,
    /// Notified to reload the files.
    pub(super) hangup: Arc<Notify>,
    /// The memory limit of requests being received.
    pub(super) budget: Budget,
    /// The event loops that serve connections, except connections of metrics.
    pub(super) event_loops: EventLoops,
    /// When answers carry times.
    pub(super) timing: ResponseTiming,
    /// The language models that clients have asked.
    pub(super) models: Arc<Models>,
}

impl Listeners<'_> {
    /// Opens the listeners, including one for each of `platforms`, and returns their tasks.
    pub(super) async fn open(
        &self,
        guards: &ServerAccess,
        platforms: Vec<Platform>,
    ) -> Result<Vec<JoinHandle<()>>, String> {
        let Self { options, engine, .. } = self;
        addresses::check(&addresses::of_server(options, &platforms))?;
        let mut bound = Vec::new();
        if options.http.allow {
            bound.push(self.http(guards)?);
        }
        if options.grpc.allow {
            bound.push(self.grpc(guards)?);
        }
        if let Some(port) = options.openai.port {
            bound.push(self.openai(guards, port)?);
        }
        for platform in platforms {
            bound.push(self.cloud(guards, platform)?);
        }
        if options.metrics.allow {
            bound.push(self.metrics()?);
        }
        // A client that gets an answer from one listener can connect to all of them.
        let mut tasks =
            bound.into_iter().map(|serve| serve()).collect::<Result<Vec<_>, String>>()?;
        if let Some(address) = &options.metrics.statsd {
            let socket = statsd::bind(address).await?;
            let mut phases = self.phases.clone();
            let stopped = async move {
                // An error means that the sender was dropped, so the server ends.
                let _ = phases.wait_for(|phase| *phase == Phase::Stopping).await;
            };
            tasks.push(tokio::spawn(statsd::serve(socket, engine.cache().clone(), stopped)));
        }
        Ok(tasks)
    }

    /// Returns the settings that the ports of TorchServe's endpoints share with these listeners.
    pub(super) fn ports(&self, server: ServerAccess) -> PortSettings {
        PortSettings {
            phases: self.phases.clone(),
            server,
            budget: self.budget.clone(),
            event_loops: self.event_loops.clone(),
            timing: self.timing.clone(),
            models: self.models.clone(),
        }
    }

    /// Returns the server for the clients of a listener with these restrictions.
    fn service(&self, guards: &ServerAccess, rules: &Restrictions) -> SharedService {
        Arc::new(open_loading::with_uploads(
            self.engine,
            self.options,
            open_loading::is_protected(guards, rules),
        ))
    }

    fn http(&self, guards: &ServerAccess) -> Result<Bound, String> {
        let options = self.options;
        let clients = &options.http_clients;
        let serves_metrics = options.openai.http_metrics;
        let settings = http::Settings { serves_metrics, ..self.client_settings(guards)? };
        let tls = self.tls(Listener::Http, options.http_tls.options())?;
        let address = SocketAddr::new(options.http.address, options.http.port);
        let listener = bind("HTTP", "--http-port", address, clients.reuse_port)?;
        let most = clients.max_connections.unwrap_or_else(descriptors::connections);
        let mut connections = self.connections(Listener::Http, tls, most);
        connections.shares_port = clients.reuse_port;
        let service = self.service(guards, &guards.http);
        let models = self.models.clone();
        let phases = self.phases.clone();
        Ok(Box::new(move || {
            Ok(http::serve(listener, service, settings, models, connections, phases))
        }))
    }

    /// Binds the listener with OpenAI's API alone.
    fn openai(&self, guards: &ServerAccess, port: u16) -> Result<Bound, String> {
        let options = self.options;
        let settings = http::Settings { serves_metrics: true, ..self.client_settings(guards)? };
        let tls = self.tls(Listener::Http, options.http_tls.options())?;
        let address = SocketAddr::new(options.http.address, port);
        let listener = bind("OpenAI's API", "--openai-port", address, false)?;
        let most = options.http_clients.max_connections.unwrap_or_else(descriptors::connections);
        let connections = self.connections(Listener::Http, tls, most);
        let service = self.service(guards, &guards.http);
        let models = self.models.clone();
        let phases = self.phases.clone();
        Ok(Box::new(move || {
            Ok(http::serve_openai(listener, service, settings, models, connections, phases))
        }))
    }

    /// Returns the settings of the HTTP listeners for clients, whose headers are forwarded.
    fn client_settings(&self, guards: &ServerAccess) -> Result<http::Settings, String> {
        let options = self.options;
        Ok(http::Settings {
            forward: Forward::new(options.http_clients.forward.clone(), &guards.tokens),
            origins: Arc::new(options.openai.origins()?),
            ..self.http_settings(guards)
        })
    }

    /// Returns the settings shared by all HTTP listeners of the v2 protocol; they forward no
    /// headers.
    fn http_settings(&self, guards: &ServerAccess) -> http::Settings {
        http::Settings {
            max_input_size: self.options.http.max_input_size,
            restricted: guards.http.clone(),
            access: guards.tokens.clone(),
            forward: Forward::default(),
            body_timeout: self.options.client_timeouts.body,
            budget: self.budget.clone(),
            timing: self.timing.clone(),
            ..http::Settings::default()
        }
    }

    fn metrics(&self) -> Result<Bound, String> {
        let options = self.options;
        let address = SocketAddr::new(options.metrics_address(), options.metrics.port);
        let listener = bind("metrics", "--metrics-port", address, false)?;
        let tls = self.tls(Listener::Metrics, options.metrics_tls.options())?;
        let most = options.http_clients.metrics_max_connections;
        let mut connections = self.connections(Listener::Metrics, tls, most);
        connections.limits.write = scrape_timeout(connections.limits.write);
        let service = Arc::new(self.engine.clone());
        let phases = self.phases.clone();
        Ok(Box::new(move || Ok(http::metrics::serve(listener, service, connections, phases))))
    }

    /// Binds the listener of a cloud platform, without TLS, as in Triton.
    fn cloud(&self, guards: &ServerAccess, platform: Platform) -> Result<Bound, String> {
        let (what, flag, address) = addresses::of_cloud(self.options, &platform);
        let listener = bind(what, flag, address, false)?;
        let most =
            self.options.http_clients.max_connections.unwrap_or_else(descriptors::connections);
        let connections = self.connections(Listener::Http, None, most);
        let service = self.service(guards, &guards.http);
        let settings = self.http_settings(guards);
        let models = self.models.clone();
        let endpoints = http::cloud::Endpoints::new(service, settings, models, platform);
        let phases = self.phases.clone();
        Ok(Box::new(move || Ok(endpoints.serve(listener, connections, phases))))
    }

    fn grpc(&self, guards: &ServerAccess) -> Result<Bound, String> {
        let options = self.options;
        let clients = &options.grpc_clients;
        let settings = grpc::Settings {
            restricted: guards.grpc.clone(),
            access: guards.tokens.clone(),
            forward: Forward::new(clients.forward.clone(), &guards.tokens),
            body_timeout: options.client_timeouts.body,
            compress: clients.compress(),
            budget: self.budget.clone(),
            limits: MessageLimits::new(options.grpc.max_input_size),
            other_service: None,
            timing: self.timing.clone(),
        };
        let tls = self.tls(Listener::Grpc, options.grpc_tls.options())?;
        let address = SocketAddr::new(options.grpc.address, options.grpc.port);
        let listener = bind("gRPC", "--grpc-port", address, clients.reuse_port)?;
        let most = clients.max_connections.unwrap_or_else(descriptors::connections);
        let mut connections = self.connections(Listener::Grpc, tls, most);
        connections.shares_port = clients.reuse_port;
        let limits = &mut connections.limits;
        limits.ping_interval = clients.keepalive_time;
        limits.ping_timeout = clients.keepalive_timeout;
        limits.age = clients.max_age.unwrap_or_default();
        limits.age_grace = clients.max_age_grace.unwrap_or_default();
        let service = self.service(guards, &guards.grpc);
        let phases = self.phases.clone();
        Ok(Box::new(move || {
            let served = grpc::serve(listener, service, settings, connections, phases);
            served.map_err(|error| format!("gRPC: {error}"))
        }))
    }

    fn connections(
        &self,
        listener: Listener,
        tls: Option<Arc<Tls>>,
        connections: usize,
    ) -> listener::Settings {
        let timeouts = &self.options.client_timeouts;
        let limits = Limits {
            connections,
            handshake: timeouts.handshake,
            head: timeouts.head,
            idle: timeouts.idle,
            write: timeouts.write,
            ..Limits::default()
        };
        // A scrape takes long and must not delay the requests of an event loop.
        let event_loops = if listener == Listener::Metrics {
            EventLoops::default()
        } else {
            self.event_loops.clone()
        };
        let cache = Some(self.engine.cache().clone());
        listener::Settings {
            listener,
            limits,
            tls,
            cache,
            adds_peer: false,
            event_loops,
            shares_port: false,
        }
    }

    /// Returns the TLS configuration of a listener, if enabled, and watches its files.
    fn tls(&self, listener: Listener, options: TlsOptions) -> Result<Option<Arc<Tls>>, String> {
        let Some(files) = options.paths(|unused| tracing::warn!("{unused}"))? else {
            return Ok(None);
        };
        let tls = Tls::new(files, HttpVersions::of(listener))
            .map(Arc::new)
            .map_err(|reason| format!("TLS of {}: {reason}", options.listener))?;
        let reloaded = tls.clone();
        self.watch(Credentials::Tls(listener), tls.paths(), move || {
            reloaded.reload().map(|()| "for new connections".to_owned())
        });
        Ok(Some(tls))
    }

    /// Returns the access control of the listeners: tokens and restrictions.
    pub(super) fn guards(&self) -> Result<ServerAccess, String> {
        Ok(ServerAccess {
            tokens: self.access()?,
            http: restricted(&self.options.http.restricted, "--http-restricted-api", "api")?,
            grpc: restricted(
                &self.options.grpc.restricted,
                "--grpc-restricted-protocol",
                "protocol",
            )?,
        })
    }

    /// Reads the token files and watches them.
    fn access(&self) -> Result<Access, String> {
        let tokens = &self.options.tokens;
        let access = Access::new(tokens.inference.clone(), tokens.management.clone())?;
        let has_certificates =
            self.options.http_tls.options().mutual || self.options.grpc_tls.options().mutual;
        self.engine.name_tenants_by(access.keyring(), has_certificates)?;
        let counted = |count: usize| format!("{count} tokens");
        let (inference, management) = access.files();
        if let Some(path) = inference {
            let reloaded = access.clone();
            self.watch(Credentials::InferenceTokens, vec![path], move || {
                reloaded.reload_inference().map(counted)
            });
        }
        if let Some(path) = management {
            let reloaded = access.clone();
            self.watch(Credentials::ManagementTokens, vec![path], move || {
                reloaded.reload_management().map(counted)
            });
        }
        Ok(access)
    }

    fn watch(
        &self,
        what: Credentials,
        paths: Vec<PathBuf>,
        read: impl Fn() -> Result<String, String> + Send + Sync + 'static,
    ) {
        let files = WatchedFiles { what, paths, read: Box::new(read) };
        tokio::spawn(file_watch::watch(files, self.hangup.clone(), self.engine.cache().clone()));
    }
}

/// Parses the restrictions of an edge.
fn restricted(groups: &[String], flag: &str, what: &str) -> Result<Arc<Restrictions>, String> {
    let mut restrictions = Restrictions::default();
    for group in groups {
        restrictions.add(group, flag, what)?;
    }
    Ok(Arc::new(restrictions))
}

fn bind(
    what: &str,
    flag: &str,
    address: SocketAddr,
    shares_port: bool,
) -> Result<TcpListener, String> {
    let unusable = |error: io::Error| {
        format!("{what} cannot listen on {address}: {error}; {flag} chooses another port")
    };
    let listener = listener::bind(address, shares_port).map_err(unusable)?;
    let bound = listener.local_addr().map_err(unusable)?;
    tracing::info!("{what} listening on {bound}");
    Ok(listener)
}
