//! Snapshots: files with the server's configuration and its registered models, from which the next
//! start restores them.

use std::ffi::OsString;
use std::fs::{self, DirBuilder};
use std::io::{self, Write};
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};

use jiff::Timestamp;
use jiff::tz::TimeZone;
use serde_json::{Map, Value, json};

use super::{ModelProperties, Settings, archive};
use pharos_os::clock;

/// The occasion of a snapshot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// The server has started.
    Startup,
    /// The registered models have changed.
    Snapshot,
    /// The server is shutting down.
    Shutdown,
}

impl Kind {
    fn name(self) -> &'static str {
        match self {
            Self::Startup => "startup",
            Self::Snapshot => "snapshot",
            Self::Shutdown => "shutdown",
        }
    }
}

/// Returns the directory of snapshots, which is below the directory of logs.
pub(super) fn directory(variables: &dyn Fn(&str) -> Option<OsString>) -> PathBuf {
    let logs = variables("LOG_LOCATION")
        .filter(|place| !place.is_empty())
        .map_or_else(|| "logs".into(), PathBuf::from);
    logs.join("config")
}

/// Returns the newest snapshot, by the time in its name.
pub(super) fn newest(directory: &Path) -> Option<PathBuf> {
    let entries = fs::read_dir(directory).ok()?.flatten();
    let names = entries.filter_map(|entry| entry.file_name().into_string().ok());
    names.filter(|name| is_snapshot(name)).max().map(|name| directory.join(name))
}

/// Returns whether a file name has the form `yyyyMMddHHmmssSSS-KIND.cfg`.
fn is_snapshot(name: &str) -> bool {
    let Some((time, rest)) = name.split_once('-') else { return false };
    let kinds = [Kind::Startup, Kind::Snapshot, Kind::Shutdown];
    let kind = rest
        .strip_suffix(".cfg")
        .is_some_and(|kind| kinds.iter().any(|known| known.name() == kind));
    kind && time.len() == 17 && time.bytes().all(|byte| byte.is_ascii_digit())
}

/// Writes a snapshot unless the settings disable snapshots. Returns the file.
///
/// # Errors
/// Writing failed.
pub fn write(
    settings: &Settings,
    kind: Kind,
    models: &[ModelProperties],
) -> io::Result<Option<PathBuf>> {
    if !settings.snapshots {
        return Ok(None);
    }
    let directory = directory(&|name| std::env::var_os(name));
    DirBuilder::new().recursive(true).mode(0o755).create(&directory)?;
    let now = i64::try_from(clock::wall_ms()).unwrap_or(i64::MAX);
    write_at(settings, &directory, now, kind, models).map(Some)
}

fn write_at(
    settings: &Settings,
    directory: &Path,
    now: i64,
    kind: Kind,
    models: &[ModelProperties],
) -> io::Result<PathBuf> {
    let time = Timestamp::from_millisecond(now).unwrap_or_default().to_zoned(TimeZone::system());
    let name = format!("{}-{}.cfg", time.strftime("%Y%m%d%H%M%S%3f"), kind.name());
    let mut text = format!("#Saving snapshot\n#{}\n", time.strftime("%a %b %d %H:%M:%S %Z %Y"));
    let kept = settings
        .properties
        .iter()
        .filter(|(key, _)| !["model_snapshot", "load_models"].contains(&key.as_str()));
    for (key, value) in kept {
        text.push_str(&format!("{}={}\n", escaped(key, true), escaped(value, false)));
    }
    let snapshot =
        json!({"name": name, "modelCount": models.len(), "created": now, "models": tree(models)});
    let shown = serde_json::to_string_pretty(&snapshot).map_err(io::Error::other)?;
    text.push_str(&format!("model_snapshot={}\n", escaped(&shown, false)));
    let path = directory.join(&name);
    // Rename, so that a server that starts now does not read half of the file.
    let part = directory.join(format!(".{name}.part"));
    let mut file = fs::OpenOptions::new().write(true).create_new(true).open(&part)?;
    let written = file.write_all(text.as_bytes()).and_then(|()| fs::rename(&part, &path));
    written.inspect_err(|_| drop(fs::remove_file(&part)))?;
    Ok(path)
}

/// Checks that the archives of the snapshot to be restored exist.
///
/// # Errors
/// An archive is missing; the text names it and says what to do.
pub(super) fn check(settings: &Settings) -> Result<(), String> {
    for ModelProperties { name, version, mar_name, .. } in settings.snapshot.iter().flatten() {
        let Some(mar_name) = mar_name else {
            return Err(refused(
                name,
                &format!("model_snapshot has no marName for version {version}"),
            ));
        };
        let Some(path) = archive::local_path(settings, mar_name) else { continue };
        if !path.exists() {
            let shown = path.display();
            let why = format!(
                "Model archive file for model {name}, version {version} not found in model store \
                 ('{shown}')"
            );
            return Err(refused(name, &why));
        }
    }
    Ok(())
}

/// Returns the error for a model of the snapshot that cannot be registered.
pub(super) fn refused(model: &str, why: &str) -> String {
    format!(
        "cannot restore the snapshot: failed to register model {model}: {why}. Put the archive \
         back, or remove the model from model_snapshot, or start with --ncs and a configuration \
         without model_snapshot"
    )
}

/// Builds the JSON of `model_snapshot`: names map to versions, which map to properties.
fn tree(models: &[ModelProperties]) -> Value {
    let mut tree = Map::new();
    for model in models {
        let versions = tree.entry(model.name.clone()).or_insert_with(|| json!({}));
        if let Value::Object(versions) = versions {
            versions.insert(model.version.clone(), json!(model));
        }
    }
    Value::Object(tree)
}

/// Escapes a key or a value as Java does: puts a `\` before characters with a special meaning.
fn escaped(text: &str, key: bool) -> String {
    let mut escaped = String::with_capacity(text.len());
    for (at, c) in text.chars().enumerate() {
        match c {
            '\n' => escaped.push_str("\\n"),
            '\r' => escaped.push_str("\\r"),
            '\t' => escaped.push_str("\\t"),
            '\x0c' => escaped.push_str("\\f"),
            '\\' | '=' | ':' | '#' | '!' => escaped.extend(['\\', c]),
            ' ' if key || at == 0 => escaped.push_str("\\ "),
            c => escaped.push(c),
        }
    }
    escaped
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use crate::{ModelParameters, properties};

    #[test]
    fn a_snapshot_reads_back_as_written() {
        let directory = tempfile::tempdir().unwrap();
        let folder = directory.path().to_owned();
        let said = [
            ("inference_address", "http://127.0.0.1:1"),
            ("model_store", " a=b#\\c "),
            ("load_models", "all"),
        ];
        let said: Vec<_> =
            said.iter().map(|(key, value)| ((*key).to_owned(), (*value).to_owned())).collect();
        let (settings, _) = Settings::new(said.clone(), Vec::new(), folder.clone()).unwrap();
        let model = |name: &str, version: &str| ModelProperties {
            name: name.to_owned(),
            version: version.to_owned(),
            default_version: version == "1.0",
            mar_name: Some(format!("{name}.mar")),
            model: ModelParameters {
                min_workers: Some(0),
                max_workers: Some(2),
                batch_size: Some(4),
                max_batch_delay: Some(50),
                response_timeout: Some(60),
                startup_timeout: Some(61),
            },
            runtime_type: Some("python3".to_owned()),
        };
        let models = [model("a \"b\"", "1.0"), model("a \"b\"", "2.0"), model("c", "1.0")];
        let path = write_at(&settings, &folder, 1_795_189_648_123, Kind::Startup, &models).unwrap();
        assert!(is_snapshot(path.file_name().unwrap().to_str().unwrap()), "{path:?}");
        assert_eq!(newest(&folder), Some(path.clone()));
        let read = properties::parse(&fs::read_to_string(&path).unwrap()).unwrap();
        let (again, notes) = Settings::new(read, Vec::new(), folder.clone()).unwrap();
        assert_eq!((again.snapshot.as_deref(), notes), (Some(&models[..]), Vec::new()));
        assert_eq!(again.inference, settings.inference);
        assert_eq!(again.model_store, settings.model_store);
        assert_eq!(again.load_models, super::super::LoadModels::None);
    }
}
