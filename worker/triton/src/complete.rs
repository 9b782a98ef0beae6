//! Lets a backend complete the configuration of a model: `pharos-worker --auto-complete OUT` reads a
//! question from standard input, initializes the backend and the model, and writes the configuration
//! that they leave, or an error, to the file OUT. Triton asks in the same function in which the
//! model is loaded; here that is a process that ends afterwards, so a failure harms nothing.

use std::io::{self, Read};
use std::path::Path;

use pharos::error::InferError;
use pharos_backend::load_error;
use serde_json::{Value, json};

use crate::backend::Host;
use crate::model::{BackendDescription, ModelDescription, PreferredGroup};

/// Answers a question for the library at `path`.
///
/// # Errors
/// The question cannot be read, or the answer cannot be written.
pub fn complete(path: &Path, out: &Path) -> io::Result<()> {
    let mut question = String::new();
    io::stdin().read_to_string(&mut question)?;
    let question: Value = serde_json::from_str(&question)?;
    let answer = match completed(path, &question) {
        Ok(Completed { config, preferred }) => {
            format!("{{\"config\":{config},\"preferred_groups\":{preferred}}}")
        }
        Err(error) => json!({ "error": error.message }).to_string(),
    };
    std::fs::write(out, answer)
}

/// What a backend says about a model.
struct Completed {
    /// The completed configuration as JSON.
    config: String,
    /// The groups of instances that the backend prefers, as in a configuration.
    preferred: Value,
}

fn completed(path: &Path, question: &Value) -> Result<Completed, InferError> {
    let text = |name: &str| question.get(name).and_then(Value::as_str).unwrap_or_default();
    let config = question.get("config").cloned().unwrap_or_default();
    let name = config.get("name").and_then(Value::as_str).unwrap_or_default().to_owned();
    let settings: Vec<(String, String)> = question
        .get("backend_settings")
        .and_then(Value::as_object)
        .into_iter()
        .flatten()
        .filter_map(|(name, value)| Some((name.clone(), value.as_str()?.to_owned())))
        .collect();
    let directory = path.parent().unwrap_or(Path::new("/")).to_string_lossy();
    let host = Host::open(
        path,
        &BackendDescription {
            name: text("backend"),
            config: &crate::settings::backend_config(&settings, &directory),
            directory: &directory,
            runtime: None,
        },
    )?;
    let model = host.load(&ModelDescription {
        name: &name,
        version: question.get("version").and_then(Value::as_u64).unwrap_or(1),
        directory: text("model_directory"),
        config: &config.to_string(),
        completes: true,
    })?;
    let config = model.config();
    serde_json::from_str::<Value>(&config)
        .map_err(|error| load_error(format!("the backend has set invalid JSON: {error}")))?;
    let preferred = model.preferred_groups().into_iter();
    let preferred = preferred.map(|PreferredGroup { kind, count, gpus }| {
        json!({ "kind": kind, "count": count, "gpus": gpus })
    });
    Ok(Completed { config, preferred: preferred.collect() })
}
