//! Reads an archive's `MAR-INF/MANIFEST.json` and the configuration that it names.

use std::fs;
use std::path::{Component, Path};
use std::sync::Arc;

use pharos::model::CodeOrigin;
use serde_json::{Value, json};

use super::{Archive, Unpacked};
use crate::{ErrorResponse, ModelYaml};

/// The directory of the manifest in an archive.
pub(super) const DIRECTORY: &str = "MAR-INF";

/// The largest size of a manifest, in bytes.
const MAX_BYTES: u64 = 1 << 20;

/// The configuration file if the manifest names none.
const CONFIGURATION: &str = "model-config.yaml";

/// Reads the manifest and configuration of unpacked files. Without a manifest the archive gets the
/// name of its file. An archive without any files is only valid if the registration gives a name
/// (`named`).
///
/// # Errors
/// The manifest or the configuration is invalid; the text names the archive.
pub(super) fn read(url: &str, files: Unpacked, named: bool) -> Result<Archive, ErrorResponse> {
    let refuse = |why: String| {
        ErrorResponse::invalid_model(format!("The archive '{url}' cannot be used: {why}"))
    };
    let manifest = manifest(files.path()).map_err(refuse)?;
    let runtime = text(manifest.as_ref(), "/runtime").unwrap_or_else(|| "python".to_owned());
    if manifest.is_some() && !["python", "python3"].contains(&runtime.to_ascii_lowercase().as_str())
    {
        return Err(refuse(format!("its runtime is '{runtime}'; allowed are python and python3")));
    }
    let model = |key: &str| text(manifest.as_ref(), &format!("/model/{key}"));
    if manifest
        .as_ref()
        .is_some_and(|manifest| manifest.get("model").is_none_or(|model| !model.is_object()))
    {
        return Err(refuse("Missing Model entry in manifest file.".to_owned()));
    }
    let model_name = match (model("modelName"), &manifest) {
        (Some(name), _) => name,
        (None, None) if named || !is_empty(files.path()) => name_of(url),
        (None, _) => return Err(refuse("Model name is not defined.".to_owned())),
    };
    let version = match (model("modelVersion"), &manifest) {
        (Some(version), _) => version,
        (None, None) => "1.0".to_owned(),
        (None, Some(_)) => return Err(refuse("Model version is not defined.".to_owned())),
    };
    let yaml = yaml(files.path(), model("configFile").as_deref(), &model_name).map_err(refuse)?;
    let made =
        json!({"runtime": runtime, "model": {"modelName": model_name, "modelVersion": version}});
    Ok(Archive {
        handler: model("handler"),
        manifest: manifest.unwrap_or(made),
        model_name,
        version,
        url: url.to_owned(),
        runtime,
        directory: Arc::new(files),
        packages: None,
        stored: None,
        kept: None,
        yaml,
        origin: CodeOrigin::Operator,
    })
}

fn is_empty(directory: &Path) -> bool {
    fs::read_dir(directory).is_ok_and(|mut entries| entries.next().is_none())
}

fn manifest(directory: &Path) -> Result<Option<Value>, String> {
    let path = directory.join(DIRECTORY).join("MANIFEST.json");
    let Ok(metadata) = fs::metadata(&path) else { return Ok(None) };
    if metadata.len() > MAX_BYTES {
        return Err(format!(
            "its manifest has {} bytes; at most {MAX_BYTES} are allowed",
            metadata.len()
        ));
    }
    let text = fs::read_to_string(&path).map_err(|error| format!("invalid manifest: {error}"))?;
    let value: Value =
        serde_json::from_str(&text).map_err(|error| format!("invalid manifest: {error}"))?;
    if value.is_object() {
        Ok(Some(value))
    } else {
        Err("invalid manifest: expected a JSON object".to_owned())
    }
}

/// Returns the non-empty string at a JSON pointer. Numbers and booleans count as their text, as in
/// Gson, with which TorchServe reads manifests: versions are often written without quotes.
fn text(manifest: Option<&Value>, pointer: &str) -> Option<String> {
    match manifest?.pointer(pointer)? {
        Value::String(text) => Some(text.clone()).filter(|text| !text.is_empty()),
        value @ (Value::Number(_) | Value::Bool(_)) => Some(value.to_string()),
        _ => None,
    }
}

/// Returns the name of an archive without a manifest: the file name without its extension.
fn name_of(url: &str) -> String {
    let path = url.split(['?', '#']).next().unwrap_or(url).trim_end_matches('/');
    let file = path.rsplit('/').next().unwrap_or(path);
    let lower = file.to_ascii_lowercase();
    let ending = [".mar", ".tar.gz", ".tgz", ".zip", ".model"]
        .into_iter()
        .find(|ending| lower.ends_with(ending));
    file.get(..file.len() - ending.map_or(0, str::len)).unwrap_or(file).to_owned()
}

fn yaml(directory: &Path, named: Option<&str>, model: &str) -> Result<ModelYaml, String> {
    let name = named.unwrap_or(CONFIGURATION);
    if !Path::new(name)
        .components()
        .all(|part| matches!(part, Component::Normal(_) | Component::CurDir))
    {
        return Err(format!("its configFile '{name}' is outside the archive"));
    }
    let path = directory.join(name);
    if named.is_none() && !path.is_file() {
        return ModelYaml::parse("", &mut |_| {});
    }
    ModelYaml::read(&path, &mut |what| tracing::warn!(model, "{name}: {what}"))
}
