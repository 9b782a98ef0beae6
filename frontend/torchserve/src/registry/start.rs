//! What is registered when the server starts: all models of a snapshot, else the models that the settings name. Of the latter
//! an archive that cannot be used hides no other.

use pharos::service::Management;
use std::sync::Arc;

use super::{RegistrationParameters, Registry};
use crate::{LoadModels, ModelProperties, snapshot};

/// What an archive's file may end with.
const ENDINGS: [&str; 3] = [".mar", ".model", ".tar.gz"];

impl<S: Management> Registry<S> {
    /// Registers what is to be there at the start. The workers start in the background.
    ///
    /// # Errors
    /// A model of a snapshot cannot be registered. The server must not go on without it: its next snapshot would have lost
    /// the model. Models that `load_models` names are logged and left out.
    pub async fn load_at_start(self: &Arc<Self>) -> Result<(), String> {
        let mut defaults = Vec::new();
        for (url, asked, default) in self.at_start() {
            let named = asked.model_name.clone().unwrap_or_default();
            match self.add(&url, asked).await {
                Ok(version) => {
                    version.keep_starting(self);
                    defaults.extend(default.then(|| (version.name.clone(), version.text.clone())));
                }
                Err(refused) if self.restores() => return Err(snapshot::refused(&named, &refused.message)),
                Err(refused) => tracing::error!("{url} is not registered: {refused}"),
            }
        }
        for (name, version) in defaults {
            if let Err(refused) = self.set_default(&name, &version) {
                tracing::warn!("{refused}");
            }
        }
        Ok(())
    }

    /// Whether a snapshot says what is registered at the start.
    fn restores(&self) -> bool {
        !self.settings.snapshot.is_empty()
    }

    /// URLs, what is said about them, and whether a default version is named so.
    fn at_start(&self) -> Vec<(String, RegistrationParameters, bool)> {
        let settings = &self.settings;
        let asked = |name: Option<String>| RegistrationParameters {
            model_name: name,
            at_start: true,
            ..RegistrationParameters::default()
        };
        if self.restores() {
            return settings.snapshot.iter().filter_map(of_snapshot).collect();
        }
        match &settings.load_models {
            LoadModels::None => Vec::new(),
            LoadModels::All => self.store().into_iter().map(|url| (url, asked(None), false)).collect(),
            LoadModels::Listed(models) => {
                models.iter().map(|(name, url)| (url.clone(), asked(name.clone()), false)).collect()
            }
        }
    }

    /// Everything in the model store, by name.
    fn store(&self) -> Vec<String> {
        let Some(store) = &self.settings.model_store else { return Vec::new() };
        let entries = match std::fs::read_dir(store) {
            Ok(entries) => entries,
            Err(error) => {
                tracing::error!("the model store '{}' cannot be read: {error}", store.display());
                return Vec::new();
            }
        };
        let archive = |entry: std::fs::DirEntry| {
            let name = entry.file_name().into_string().ok()?;
            let usable = entry.path().is_dir() || ENDINGS.iter().any(|ending| name.ends_with(ending));
            (usable && !name.starts_with('.')).then_some(name)
        };
        let mut names: Vec<String> = entries.flatten().filter_map(archive).collect();
        names.sort();
        names
    }
}

fn of_snapshot(said: &ModelProperties) -> Option<(String, RegistrationParameters, bool)> {
    let url = said.mar_name.clone()?;
    let asked = RegistrationParameters {
        model_name: Some(said.name.clone()),
        handler: None,
        runtime: said.runtime_type.clone(),
        batch_size: said.batch_size,
        max_batch_delay: said.max_batch_delay,
        initial_workers: said.min_workers,
        max_workers: said.max_workers,
        response_timeout: said.response_timeout,
        startup_timeout: said.startup_timeout,
        at_start: true,
    };
    Some((url, asked, said.default_version))
}
