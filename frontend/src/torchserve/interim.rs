//! Serves no endpoints yet: the models of the start are there through KServe's protocol.

use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};

use tokio::sync::watch;
use tokio::task::JoinHandle;

use super::{Deployment, Initial, Settings, initial, open};
use crate::engine::Engine;
use crate::listener::Life;

/// Gets the lines of requests.
pub(crate) type AccessSink = Arc<dyn Fn(&str) + Send + Sync>;

/// What the endpoints need.
pub struct Start {
    /// Where models run.
    pub engine: Engine,
    /// What TorchServe's configuration says.
    pub settings: Arc<Settings>,
    /// The repository of the engine.
    pub repository: PathBuf,
    /// Where the server is in its life.
    pub life: Life,
    /// Gets the lines of requests.
    pub access: Option<AccessSink>,
}

/// What is registered.
pub struct Registry {
    start: Start,
    /// Held to look and to add.
    models: Mutex<Vec<Arc<Deployment>>>,
    changes: watch::Sender<u64>,
}

/// Serves.
///
/// # Errors
/// An address is in use.
#[allow(clippy::unused_async)]
pub async fn serve(start: Start) -> Result<(Arc<Registry>, Vec<JoinHandle<()>>), String> {
    let registry = Registry { start, models: Mutex::default(), changes: watch::Sender::new(0) };
    Ok((Arc::new(registry), Vec::new()))
}

impl Registry {
    /// Registers the models of the start; gives those that cannot be.
    pub async fn load_at_start(&self) -> Vec<(String, String)> {
        let all = match initial(&self.start.settings) {
            Ok(all) => all,
            Err(reason) => return vec![("all".to_owned(), reason)],
        };
        let mut refused = Vec::new();
        for one in all {
            let url = one.url.clone();
            if let Err(reason) = self.register(one).await {
                refused.push((url, reason));
            }
        }
        refused
    }

    async fn register(&self, one: Initial) -> Result<(), String> {
        let settings = self.start.settings.clone();
        let opened = tokio::task::spawn_blocking(move || {
            let archive = open(&settings, &one.url).map_err(|refused| refused.message)?;
            let name = one.asked.model_name.clone().unwrap_or_else(|| archive.model_name.clone());
            Deployment::new(&settings, Arc::new(archive), &one.asked, name).map_err(|refused| refused.message)
        });
        let deployment = Arc::new(opened.await.map_err(|error| error.to_string())??);
        deployment.write(&self.start.repository).map_err(|error| error.to_string())?;
        self.models.lock().unwrap_or_else(PoisonError::into_inner).push(deployment.clone());
        self.changes.send_modify(|count| *count += 1);
        self.start.engine.load_model(&deployment.name, Vec::new()).await.map_err(|error| error.message)
    }

    /// Tells when something has changed.
    pub fn changes(&self) -> watch::Receiver<u64> {
        self.changes.subscribe()
    }

    /// What is registered, and whether it is its model's default version.
    pub fn deployments(&self) -> Vec<(Arc<Deployment>, bool)> {
        let models = self.models.lock().unwrap_or_else(PoisonError::into_inner);
        models.iter().map(|deployment| (deployment.clone(), true)).collect()
    }
}
