//! Starts TorchServe's endpoints: registers their models, writes a snapshot, then opens the ports.
//! Each later change writes a snapshot too.

use std::sync::Arc;

use pharos::service::{Management as _, SharedService};
use tokio::task::JoinHandle;

use super::{addresses, open_loading};
use crate::cli::Options;
use pharos_edge::response_timing::ResponseTiming;
use pharos_engine::engine::Engine;
use pharos_grpc as grpc;
use pharos_http as http;
use pharos_listener::PhaseReceiver;
use pharos_listener::receiving::Budget;
use pharos_openai::Models;
use pharos_os::blocking;
use pharos_os::event_loops::EventLoops;
use pharos_telemetry::log;
use pharos_torchserve as torchserve;
use pharos_torchserve::{
    self, Kind, Kserve, ModelProperties, Plan, Registry, ServerAccess, Settings, Start, Uncounted,
    snapshot,
};

/// The settings that the ports share with the server's own listeners.
pub(super) struct PortSettings {
    pub(super) phases: PhaseReceiver,
    pub(super) server: ServerAccess,
    pub(super) budget: Budget,
    pub(super) event_loops: EventLoops,
    pub(super) timing: ResponseTiming,
    pub(super) models: Arc<Models>,
}

/// The endpoints of a plan and their models.
pub(super) struct Endpoints {
    registry: Arc<Registry>,
    settings: Arc<Settings>,
    /// The input of [`Endpoints::start`]; `None` once the ports are open.
    start: Option<Start>,
}

impl Endpoints {
    /// Prepares the endpoints. Opens no port, but checks the addresses, so that one in use is
    /// reported before models load.
    ///
    /// # Errors
    /// An address cannot be used.
    pub(super) fn new(
        plan: &Plan<Options>,
        engine: &Engine,
        ports: PortSettings,
    ) -> Result<Self, String> {
        let PortSettings { phases, server, budget, event_loops, timing, models } = ports;
        plan.begin(&plan.options.tslog.location(|_| None));
        addresses::check(&addresses::of_torchserve(&plan.options, &plan.settings))?;
        torchserve::check_addresses(&plan.settings)?;
        engine.cache().count_by_alias(torchserve::metric_naming(plan.settings.initial_worker_port));
        let protected =
            plan.settings.token.is_some() || open_loading::is_protected(&server, &server.http);
        let engine = &open_loading::with_uploads(engine, &plan.options, protected);
        let max_workers = plan.options.models.load_request_max_instances;
        let registry = Registry::new(
            Arc::new(engine.clone()),
            plan.settings.clone(),
            plan.repository.clone(),
            max_workers,
        );
        let service = engine.with_naming(registry.clone());
        let start = Start {
            kserve: kserve(service.clone(), &plan.settings, models, &budget, &timing)?,
            service,
            uncounted: engine.with_naming(Arc::new(Uncounted)),
            metrics: engine.cache().clone(),
            settings: plan.settings.clone(),
            registry: registry.clone(),
            phases,
            server,
            budget,
            event_loops,
            timing,
            page: http::dashboard::document,
        };
        Ok(Self { registry, settings: plan.settings.clone(), start: Some(start) })
    }

    /// Registers the initial models, writes their snapshot and opens the ports. Workers may still be
    /// loading their models then. Returns the tasks of the ports.
    ///
    /// # Errors
    /// A snapshot cannot be restored, or a port cannot be opened.
    pub(super) async fn start(&mut self) -> Result<Vec<JoinHandle<()>>, String> {
        self.registry.load_at_start().await?;
        let mut changes = self.registry.changes();
        changes.mark_unchanged();
        let registry = self.registry.clone();
        let settings = self.settings.clone();
        write(&settings, Kind::Startup, &registry).await;
        let tasks = match self.start.take() {
            Some(start) => torchserve::serve(start)?,
            None => Vec::new(),
        };
        tokio::spawn(async move {
            while changes.changed().await.is_ok() {
                write(&settings, Kind::Snapshot, &registry).await;
            }
        });
        Ok(tasks)
    }

    /// Prints the line that scripts wait for.
    pub(super) fn announce(&self) {
        log::announce("Model server started.");
    }

    /// Ends downloads and the wait for workers, writes the last snapshot and removes the
    /// invalidated tokens. Writes no snapshot after an incomplete start: not all models are
    /// registered, and their snapshot would replace a complete one.
    pub(super) fn stopping(&self) {
        self.registry.stop_waiting();
        if self.start.is_some() {
            return;
        }
        save(&self.settings, Kind::Shutdown, &self.registry);
        if let Some(token) = &self.settings.token {
            torchserve::remove_tokens(&token.file);
        }
    }
}

/// Returns the services of the v2 protocol for TorchServe's ports, with TorchServe's limits.
fn kserve(
    service: SharedService,
    settings: &Settings,
    models: Arc<Models>,
    budget: &Budget,
    timing: &ResponseTiming,
) -> Result<Kserve, String> {
    let http = http::Settings {
        max_input_size: settings.max_request_size,
        budget: budget.clone(),
        timing: timing.clone(),
        ..http::Settings::default()
    };
    let calls = grpc::Settings {
        other_service: Some(torchserve::inference_service()),
        body_timeout: torchserve::BODY_TIMEOUT,
        budget: budget.clone(),
        timing: timing.clone(),
        limits: torchserve::message_limits(settings),
        ..grpc::Settings::default()
    };
    let services = grpc::services(service.clone(), calls).map_err(|error| error.to_string())?;
    Ok(Kserve {
        http: Box::new(move |policy, refused| http::router(service, http, models, policy, refused)),
        grpc: services,
        with_reflection: |services, names| {
            grpc::with_reflection(services, names).map_err(|error| error.to_string())
        },
    })
}

/// Writes a snapshot of the registered models on a blocking thread.
async fn write(settings: &Arc<Settings>, kind: Kind, registry: &Arc<Registry>) {
    let settings = settings.clone();
    let registry = registry.clone();
    if let Err(error) = blocking::run(move || save(&settings, kind, &registry)).await {
        tracing::error!("cannot write a snapshot: {error}");
    }
}

/// Writes a snapshot of the registered models.
fn save(settings: &Settings, kind: Kind, registry: &Registry) {
    let models: Vec<ModelProperties> = registry
        .deployments()
        .iter()
        .map(|(deployment, default)| deployment.properties(*default))
        .collect();
    if let Err(error) = snapshot::write(settings, kind, &models) {
        tracing::error!("cannot write a snapshot: {error}");
    }
}
