//! Registers models at server start: all models of a snapshot, else those of `load_models`. Without
//! a snapshot, an invalid archive does not prevent the others from being registered.

use std::pin::Pin;
use std::sync::Arc;

use super::{RegistrationParameters, Registry};
use crate::{LoadModels, ModelProperties, snapshot};

/// The file extensions of archives.
const ENDINGS: [&str; 3] = [".mar", ".model", ".tar.gz"];

impl Registry {
    /// Registers the configured models. Their workers start in the background.
    ///
    /// # Errors
    /// A model of a snapshot cannot be registered. The server must not continue without it, because
    /// its next snapshot would lose the model. Invalid models of `load_models` are logged and
    /// skipped.
    pub fn load_at_start(
        self: &Arc<Self>,
    ) -> Pin<Box<dyn Future<Output = Result<(), String>> + Send + '_>> {
        // Boxed, so that it is compiled in this package.
        Box::pin(self.load_configured())
    }

    async fn load_configured(self: &Arc<Self>) -> Result<(), String> {
        let mut defaults = Vec::new();
        for (url, asked, default) in self.at_start() {
            let named = asked.model_name.clone().unwrap_or_default();
            match self.add(&url, asked).await {
                Ok(version) => {
                    version.keep_starting(self);
                    // `models` marks default versions that `load_models` names only by their
                    // archives.
                    let marked = self.settings.model_properties(&version.name, &version.text);
                    let is_marked = self.settings.snapshot.is_none()
                        && marked.is_some_and(|said| said.default_version);
                    if default || is_marked {
                        defaults.push((version.name.clone(), version.text.clone()));
                    }
                }
                Err(refused) if self.settings.snapshot.is_some() => {
                    return Err(snapshot::refused(&named, &refused.message));
                }
                Err(refused) => tracing::error!("failed to register {url}: {refused}"),
            }
        }
        for (name, version) in defaults {
            if let Err(refused) = self.set_default(&name, &version) {
                tracing::warn!("{refused}");
            }
        }
        Ok(())
    }

    /// Returns the URL and parameters of each model, and whether it is the default version.
    fn at_start(&self) -> Vec<(String, RegistrationParameters, bool)> {
        let settings = &self.settings;
        let asked = |name: Option<String>| RegistrationParameters {
            model_name: name,
            at_start: true,
            ..RegistrationParameters::default()
        };
        if let Some(snapshot) = &settings.snapshot {
            if snapshot.is_empty() {
                tracing::warn!("model_snapshot has no models: none is registered at the start");
            }
            return snapshot.iter().filter_map(of_snapshot).collect();
        }
        match &settings.load_models {
            LoadModels::None => Vec::new(),
            LoadModels::All => {
                self.store().into_iter().map(|url| (url, asked(None), false)).collect()
            }
            LoadModels::Listed(models) => {
                models.iter().map(|(name, url)| (url.clone(), asked(name.clone()), false)).collect()
            }
        }
    }

    /// Returns the names of all archives in the model store.
    fn store(&self) -> Vec<String> {
        let Some(store) = &self.settings.model_store else { return Vec::new() };
        let entries = match std::fs::read_dir(store) {
            Ok(entries) => entries,
            Err(error) => {
                tracing::error!("cannot read the model store '{}': {error}", store.display());
                return Vec::new();
            }
        };
        let mut names = Vec::new();
        for entry in entries.flatten() {
            let Ok(name) = entry.file_name().into_string() else { continue };
            let is_archive =
                entry.path().is_dir() || ENDINGS.iter().any(|ending| name.ends_with(ending));
            if is_archive && !name.starts_with('.') {
                names.push(name);
            }
        }
        names.sort();
        names
    }
}

fn of_snapshot(properties: &ModelProperties) -> Option<(String, RegistrationParameters, bool)> {
    let url = properties.mar_name.clone()?;
    let asked = RegistrationParameters {
        model_name: Some(properties.name.clone()),
        handler: None,
        runtime: properties.runtime_type.clone(),
        model: properties.model.clone(),
        at_start: true,
    };
    Some((url, asked, properties.default_version))
}
