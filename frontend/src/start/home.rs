//! TorchServe's endpoints beside the others: opened with them, filled with models once the engine is there, and remembered in
//! snapshots.

use std::io::Write;
use std::sync::Arc;

use tokio::task::JoinHandle;

use crate::engine::Engine;
use crate::listener::Life;
use crate::log;
use crate::receiving::Budget;
use crate::torchserve::{self, Kind, ModelProperties, Plan, Registry, ServerAccess, Settings, Start, snapshot};

/// What the endpoints show.
pub(super) struct Home {
    registry: Arc<Registry>,
    settings: Arc<Settings>,
}

impl Home {
    /// Opens the listeners.
    pub(super) fn open(
        plan: &Plan,
        engine: &Engine,
        (life, server, budget): (Life, ServerAccess, Budget),
        listeners: &mut Vec<JoinHandle<()>>,
    ) -> Result<Self, String> {
        plan.begin();
        let start = Start {
            engine: engine.clone(),
            settings: plan.settings.clone(),
            repository: plan.repository.clone(),
            life,
            access: Some(Arc::new(log::answered_line)),
            server,
            budget,
        };
        let (registry, tasks) = torchserve::serve(start)?;
        listeners.extend(tasks);
        Ok(Self { registry, settings: plan.settings.clone() })
    }

    /// Says so, as those who wait for it expect; registers the models of the start, and remembers each change from then on.
    pub(super) fn started(&self) {
        println!("Model server started.");
        let _ = std::io::stdout().flush();
        let (registry, settings) = (self.registry.clone(), self.settings.clone());
        tokio::spawn(async move {
            // What cannot be registered is told there.
            drop(registry.load_at_start().await);
            let mut changes = registry.changes();
            changes.mark_unchanged();
            save(&settings, Kind::Startup, &registry);
            while changes.changed().await.is_ok() {
                save(&settings, Kind::Snapshot, &registry);
            }
        });
    }

    /// The last snapshot; and the tokens, which are good for nothing any more.
    pub(super) fn stopping(&self) {
        save(&self.settings, Kind::Shutdown, &self.registry);
        if let Some(token) = &self.settings.token {
            let _ = std::fs::remove_file(&token.file);
        }
    }
}

/// Writes a snapshot of what is registered.
fn save(settings: &Settings, kind: Kind, registry: &Registry) {
    let models: Vec<ModelProperties> =
        registry.deployments().iter().map(|(deployment, default)| deployment.properties(*default)).collect();
    if let Err(error) = snapshot::write(settings, kind, &models) {
        tracing::error!("no snapshot can be written: {error}");
    }
}
