//! What is registered at the start.

use std::fs;

use super::{Asked, LoadModels, ModelProperties, Settings};

/// A model that is to be registered at the start.
#[derive(Clone, Debug)]
pub struct Initial {
    /// Its archive.
    pub url: String,
    /// What is said about it.
    pub asked: Asked,
    /// Requests without a version mean this one, if a snapshot says so.
    pub default_version: bool,
}

/// Everything that is to be registered at the start: what a snapshot says, else what `load_models` says. Reads the model
/// store if that is `all`.
///
/// # Errors
/// The model store cannot be read.
pub fn initial(settings: &Settings) -> Result<Vec<Initial>, String> {
    if !settings.snapshot.is_empty() {
        return Ok(settings.snapshot.iter().filter_map(of_snapshot).collect());
    }
    let listed = match &settings.load_models {
        LoadModels::None => Vec::new(),
        LoadModels::All => all(settings)?.into_iter().map(|name| (None, name)).collect(),
        LoadModels::Listed(listed) => listed.clone(),
    };
    let asked = |name| Asked { model_name: name, at_start: true, ..Asked::default() };
    Ok(listed.into_iter().map(|(name, url)| Initial { url, asked: asked(name), default_version: false }).collect())
}

fn of_snapshot(said: &ModelProperties) -> Option<Initial> {
    let Some(url) = said.mar_name.clone() else {
        tracing::error!(model = said.name, version = said.version, "model_snapshot names no archive (marName) of it");
        return None;
    };
    let asked = Asked {
        model_name: Some(said.name.clone()),
        batch_size: said.batch_size,
        max_batch_delay: said.max_batch_delay,
        initial_workers: said.min_workers,
        max_workers: said.max_workers,
        response_timeout: said.response_timeout,
        startup_timeout: said.startup_timeout,
        at_start: true,
        ..Asked::default()
    };
    Some(Initial { url, asked, default_version: said.default_version })
}

/// The archives and directories of the model store, by name.
fn all(settings: &Settings) -> Result<Vec<String>, String> {
    let Some(store) = &settings.model_store else { return Ok(Vec::new()) };
    let unreadable = |error: std::io::Error| format!("the model store '{}' cannot be read: {error}", store.display());
    let mut names = Vec::new();
    for entry in fs::read_dir(store).map_err(unreadable)? {
        let entry = entry.map_err(unreadable)?;
        let Ok(name) = entry.file_name().into_string() else { continue };
        let lower = name.to_ascii_lowercase();
        let archive = [".mar", ".model", ".tar.gz"].iter().any(|ending| lower.ends_with(ending));
        if !name.starts_with('.') && (archive || entry.path().is_dir()) {
            names.push(name);
        }
    }
    names.sort_unstable();
    Ok(names)
}
