//! Joins TorchServe's endpoints to the server: models are registered first, then a snapshot is written, then the ports open. Each
//! later change is written to a snapshot too.

use std::sync::Arc;

use pharos::service::Management as _;
use tokio::task::JoinHandle;

use crate::cli::Options;
use pharos_engine::engine::Engine;
use pharos_grpc as grpc;
use pharos_http as http;
use pharos_listener::Life;
use pharos_listener::receiving::Budget;
use pharos_telemetry::log;
use pharos_torchserve as torchserve;
use pharos_torchserve::{
    self, Kind, Kserve, ModelProperties, Plan, Registry, ServerAccess, Settings, Start, Uncounted, snapshot,
};

/// The endpoints of a plan, and the models that they show.
pub(super) struct Endpoints {
    registry: Arc<Registry<Engine>>,
    settings: Arc<Settings>,
    /// What [`Endpoints::start`] opens the ports with; `None` once they are open.
    start: Option<Start<Engine, grpc::Services<Engine>>>,
}

impl Endpoints {
    /// Prepares the endpoints. No port is open yet; addresses that are in use are reported now, before models load.
    ///
    /// # Errors
    /// An address cannot be used.
    pub(super) fn new(
        plan: &Plan<Options>,
        engine: &Engine,
        (life, server, budget): (Life, ServerAccess, Budget),
    ) -> Result<Self, String> {
        plan.begin(&plan.options.tslog.location(|_| None));
        torchserve::check_addresses(&plan.settings)?;
        engine.cache().count_by_alias(torchserve::metric_naming(plan.settings.initial_worker_port));
        let registry = Registry::new(engine.clone(), plan.settings.clone(), plan.repository.clone());
        let service = engine.with_naming(registry.clone());
        let start = Start {
            kserve: kserve(&service, &plan.settings, &budget)?,
            service,
            uncounted: engine.with_naming(Arc::new(Uncounted)),
            metrics: engine.cache().clone(),
            settings: plan.settings.clone(),
            registry: registry.clone(),
            life,
            server,
            budget,
        };
        Ok(Self { registry, settings: plan.settings.clone(), start: Some(start) })
    }

    /// Registers the models of the start, writes their snapshot, opens the ports, and prints the line that scripts wait for.
    /// Workers may still load their models then. Gives the tasks of the ports.
    ///
    /// # Errors
    /// A snapshot cannot be restored, or a port cannot be opened.
    pub(super) async fn start(&mut self) -> Result<Vec<JoinHandle<()>>, String> {
        self.registry.load_at_start().await?;
        let mut changes = self.registry.changes();
        changes.mark_unchanged();
        let (registry, settings) = (self.registry.clone(), self.settings.clone());
        write(&settings, Kind::Startup, &registry).await;
        let tasks = match self.start.take() {
            Some(start) => torchserve::serve(start)?,
            None => Vec::new(),
        };
        log::announce("Model server started.");
        tokio::spawn(async move {
            while changes.changed().await.is_ok() {
                write(&settings, Kind::Snapshot, &registry).await;
            }
        });
        Ok(tasks)
    }

    /// Ends the wait for workers, writes the last snapshot and removes the tokens, which are no longer valid. After an
    /// unfinished start it does nothing: not all models are registered, and their snapshot would replace a complete one.
    pub(super) fn stopping(&self) {
        if self.start.is_some() {
            return;
        }
        self.registry.stop_waiting();
        save(&self.settings, Kind::Shutdown, &self.registry);
        if let Some(token) = &self.settings.token {
            torchserve::remove_tokens(&token.file);
        }
    }
}

/// The v2 protocol for the ports of TorchServe, with TorchServe's limits.
fn kserve(
    service: &Engine,
    settings: &Settings,
    budget: &Budget,
) -> Result<Kserve<Engine, grpc::Services<Engine>>, String> {
    let http = http::Settings {
        max_input_size: settings.max_request_size,
        budget: budget.clone(),
        ..http::Settings::default()
    };
    let calls = grpc::Settings {
        beside: Some(torchserve::inference_service()),
        budget: budget.clone(),
        limits: torchserve::message_limits(settings),
        ..grpc::Settings::default()
    };
    let edge = service.clone();
    Ok(Kserve {
        http: Box::new(move |gate| http::router(edge, http, gate)),
        grpc: grpc::services(service.clone(), calls).map_err(|error| error.to_string())?,
        with_reflection: |services, names| grpc::with_reflection(services, names).map_err(|error| error.to_string()),
    })
}

/// Writes a snapshot of what is registered, on a thread that may block.
async fn write(settings: &Arc<Settings>, kind: Kind, registry: &Arc<Registry<Engine>>) {
    let (settings, registry) = (settings.clone(), registry.clone());
    if let Err(error) = tokio::task::spawn_blocking(move || save(&settings, kind, &registry)).await {
        tracing::error!("no snapshot can be written: {error}");
    }
}

/// Writes a snapshot of what is registered.
fn save(settings: &Settings, kind: Kind, registry: &Registry<Engine>) {
    let models: Vec<ModelProperties> =
        registry.deployments().iter().map(|(deployment, default)| deployment.properties(*default)).collect();
    if let Err(error) = snapshot::write(settings, kind, &models) {
        tracing::error!("no snapshot can be written: {error}");
    }
}
