//! The models of a SageMaker multi-model endpoint. A request loads a model from a directory under a
//! name of its choice; later requests list, invoke and unload the model by its SageMaker
//! identifier.

use std::borrow::Cow;
use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::sync::{Arc, LazyLock};
use std::{fs, io};

use axum::body::Body;
use http::{Request, StatusCode};
use parking_lot::{Mutex, MutexGuard};
use pharos::error::{InferError, Reason};
use pharos::repository::check_model_name;
use pharos::service::Service;
use pharos_os::blocking;
use regex::Regex;
use serde::Serialize;
use serde_json::value::RawValue;

use crate::answer::HandlerResult;
use crate::json::{as_string, from_body, object, parse_error};
use crate::{Edge, answer};

/// The header with the name of the archive from which the model was unpacked; it becomes the
/// model's name.
const TARGET: &str = "x-amzn-sagemaker-target-model";
const CONFIG: &str = "config.pbtxt";
/// A configuration larger than this is not searched for `platform: "ensemble"`.
const MAX_CONFIG: u64 = 16 << 20;
/// No models are loaded from these directories, as in Triton.
const SYSTEM: [&str; 3] = ["/dev", "/proc", "/sys"];
/// Error texts that indicate insufficient memory: some of the texts that Triton checks, and the
/// text of the server's own limits of memory. The error of a load or a request has no type:
/// backends and models make its text.
const NO_MEMORY: [&str; 8] = [
    "out of memory",
    "memoryerror",
    "out_of_memory",
    "outofmemory",
    "failed to allocate memory",
    "cannot allocate memory",
    "cublas_status_alloc_failed",
    "not enough memory",
];

object! {
    /// A request to load a model.
    Load { model_name: &'a RawValue, url: &'a RawValue }
}

/// The models loaded by request, by SageMaker identifier. Clones are cheap and share the models.
#[derive(Clone, Debug, Default)]
pub(super) struct Models(Arc<Mutex<Table>>);

#[derive(Debug, Default)]
struct Table {
    loaded: BTreeMap<String, Model>,
    /// The identifiers of models that are being loaded or unloaded.
    changing: BTreeSet<String>,
}

#[derive(Clone, Debug)]
struct Model {
    name: String,
    url: String,
    /// The registered names: the model's and, for an ensemble, those of its members.
    names: Vec<String>,
}

#[derive(Serialize)]
struct Entry<'a> {
    #[serde(rename = "modelName")]
    name: &'a str,
    #[serde(rename = "modelUrl")]
    url: &'a str,
}

#[derive(Serialize)]
struct List<'a> {
    models: Vec<Entry<'a>>,
}

/// An identifier whose model is being loaded or unloaded, until this is dropped.
struct Claim {
    models: Models,
    id: String,
}

impl Drop for Claim {
    fn drop(&mut self) {
        self.models.lock().changing.remove(&self.id);
    }
}

/// The reason for which a model is not loaded.
enum Failure {
    /// The identifier or one of the names is in use.
    Taken(String),
    Error(InferError),
}

impl From<InferError> for Failure {
    fn from(error: InferError) -> Self {
        Self::Error(error)
    }
}

impl Models {
    /// Returns the name of the model with this identifier.
    pub(super) fn name(&self, id: &str) -> Option<String> {
        self.lock().loaded.get(id).map(|model| model.name.clone())
    }

    /// Lists the models that are ready.
    pub(super) async fn list(&self, edge: &Edge) -> HandlerResult {
        let all = self.lock().loaded.clone();
        let mut models = Vec::new();
        for (id, model) in &all {
            if edge.service.model_ready(&model.name, "").await == Ok(true) {
                models.push(Entry { name: id, url: &model.url });
            }
        }
        answer::json_of(&List { models })
    }

    /// Describes a model.
    pub(super) fn describe(&self, id: &str) -> HandlerResult {
        let model = self.lock().loaded.get(id).cloned();
        match model {
            Some(model) => answer::json_of(&Entry { name: id, url: &model.url }),
            None => Err(not_loaded(id)),
        }
    }

    /// Loads the model that the body names. Continues if the client disconnects.
    pub(super) async fn load(&self, edge: &Edge, request: Request<Body>) -> HandlerResult {
        let asked = read_load(edge, request).await;
        let result = match asked {
            Ok((id, name, url)) => {
                let models = self.clone();
                let service = edge.service.clone();
                let loading =
                    tokio::spawn(async move { models.load_from(&*service, id, name, &url).await });
                loading.await.unwrap_or_else(|error| {
                    Err(InferError::internal(format!("the load failed: {error}")).into())
                })
            }
            Err(error) => Err(error.into()),
        };
        let (status, text, reason) = match result {
            Ok(()) => return Ok(answer::empty(StatusCode::OK)),
            Err(Failure::Taken(text)) => (StatusCode::CONFLICT, text, Reason::Invalid),
            // Triton uses the status 400 for all other errors of a load.
            Err(Failure::Error(error)) => (
                status_without_memory(&error).unwrap_or(StatusCode::BAD_REQUEST),
                error.message,
                error.reason,
            ),
        };
        Err(answer::refused(answer::error_text(status, &text), reason))
    }

    async fn load_from(
        &self,
        service: &dyn Service,
        id: String,
        name: String,
        url: &str,
    ) -> Result<(), Failure> {
        if !service.registers_directories() {
            // Fails with the reason: loading models by request is disabled.
            return Ok(service.load_model(&name, Vec::new()).await?);
        }
        check_model_name(&name).map_err(InferError::invalid)?;
        service.check_registration(&name, url)?;
        let place = url.to_owned();
        let called = name.clone();
        let found = blocking::run(move || find(&place, &called)).await;
        let found = found
            .map_err(|error| InferError::internal(format!("'{url}' cannot be read: {error}")))?;
        let (url, models) = found.map_err(InferError::invalid)?;
        let claim = self.claim(id)?;
        let names: Vec<String> = models.keys().cloned().collect();
        let taken = |name| Failure::Taken(format!("a model '{name}' has already been registered"));
        service.register_directories(&models).map_err(taken)?;
        if let Err(error) = service.load_model(&name, Vec::new()).await {
            // Members of an ensemble may be loaded, and no identifier refers to them.
            for member in names.iter().filter(|member| **member != name) {
                let _ = service.unload_model(member, false).await;
            }
            service.unregister_directories(&names);
            return Err(error.into());
        }
        let model = Model { name, url, names };
        self.lock().loaded.insert(claim.id.clone(), model);
        Ok(())
    }

    /// Claims an identifier for a load.
    ///
    /// # Errors
    /// Its model is loaded, or is being loaded or unloaded.
    fn claim(&self, id: String) -> Result<Claim, Failure> {
        let mut table = self.lock();
        if table.loaded.contains_key(&id) {
            return Err(Failure::Taken(format!("model '{id}' has already been loaded")));
        }
        if !table.changing.insert(id.clone()) {
            return Err(Failure::Taken(format!("model '{id}' is being loaded or unloaded")));
        }
        Ok(Claim { models: self.clone(), id })
    }

    /// Removes a model that is to be unloaded, and claims its identifier.
    fn remove(&self, id: &str) -> Option<(Model, Claim)> {
        let mut table = self.lock();
        let model = table.loaded.remove(id)?;
        table.changing.insert(id.to_owned());
        Some((model, Claim { models: self.clone(), id: id.to_owned() }))
    }

    /// Unloads a model and the dependents that no other model needs. Continues if the client
    /// disconnects.
    pub(super) async fn unload(&self, edge: &Edge, id: &str) -> HandlerResult {
        let Some((model, claim)) = self.remove(id) else { return Err(not_loaded(id)) };
        let service = edge.service.clone();
        let unloading = tokio::spawn(async move {
            let result = service.unload_model(&model.name, true).await;
            match &result {
                Ok(()) => service.unregister_directories(&model.names),
                Err(_) => drop(claim.models.lock().loaded.insert(claim.id.clone(), model)),
            }
            result
        });
        let result = unloading.await.unwrap_or_else(|error| {
            Err(InferError::internal(format!("the unload failed: {error}")))
        });
        answer::done(result)
    }

    fn lock(&self) -> MutexGuard<'_, Table> {
        self.0.lock()
    }
}

/// Returns the answer to a request for a model that is not loaded.
pub(super) fn not_loaded(id: &str) -> answer::Failure {
    let response = answer::error_text(
        StatusCode::NOT_FOUND,
        &format!("model '{}' is not loaded", id.escape_debug()),
    );
    answer::refused(response, Reason::UnknownModel)
}

/// Returns the identifier, the name and the directory of the model in a load request.
async fn read_load(
    edge: &Edge,
    request: Request<Body>,
) -> Result<(String, String, String), InferError> {
    let (parts, body) = request.into_parts();
    let body = edge.read_short(body, "a request to load a model").await?;
    let load: Load<'_> = from_body(&body).map_err(parse_error)?;
    let member = |value: Option<&RawValue>, name: &str| {
        let text = value
            .map(|value| as_string(value, &format!("member '{name}'")))
            .transpose()?
            .map(Cow::into_owned);
        let absent = || {
            InferError::malformed(format!(
                "'{name}' is missing; expected {{\"model_name\": TEXT, \"url\": PATH}}"
            ))
        };
        text.filter(|text| !text.is_empty()).ok_or_else(absent)
    };
    let id = member(load.model_name, "model_name")?;
    let url = member(load.url, "url")?;
    let name = match parts.headers.get(TARGET) {
        Some(target) => target
            .to_str()
            .map_err(|_| InferError::malformed(format!("the header {TARGET} is not valid text")))?,
        None => &id,
    };
    Ok((id.clone(), name.to_owned(), url))
}

/// Returns the URL of the repository and the models to register. A directory that is a model, or
/// that contains only one, is registered under `name`. An ensemble is registered under `name` and
/// its members under their own names. Blocks.
fn find(url: &str, name: &str) -> Result<(String, BTreeMap<String, PathBuf>), String> {
    let refused =
        |error: io::Error| format!("failed to register '{url}', repository not found: {error}");
    let place = fs::canonicalize(url).map_err(refused)?;
    if let Some(system) = SYSTEM.iter().find(|system| place.starts_with(system)) {
        return Err(format!("invalid url '{url}': models are not loaded from {system}"));
    }
    if place.join(CONFIG).is_file() {
        let above = place.parent().unwrap_or(&place).display().to_string();
        return Ok((above, BTreeMap::from([(name.to_owned(), place)])));
    }
    let mut models = directories(&place).map_err(refused)?;
    let chosen = match models.keys().collect::<Vec<_>>().as_slice() {
        [] => return Err(format!("'{}' contains no model directory", place.display())),
        [only] => (*only).clone(),
        several => {
            let ensembles: Vec<&&String> = several
                .iter()
                .filter(|name| models.get(**name).is_some_and(|path| is_ensemble(path)))
                .collect();
            let [only] = ensembles.as_slice() else {
                return Err(format!(
                    "'{}' has {} models, {} of them ensembles: expected one model, or one \
                     ensemble and its members",
                    place.display(),
                    several.len(),
                    ensembles.len()
                ));
            };
            (**only).clone()
        }
    };
    if let Some(path) = models.remove(&chosen) {
        if models.contains_key(name) {
            return Err(format!(
                "the name '{name}' is already used by a member of the ensemble '{chosen}'"
            ));
        }
        models.insert(name.to_owned(), path);
    }
    Ok((place.display().to_string(), models))
}

/// Returns the subdirectories by name, without hidden ones.
fn directories(place: &Path) -> io::Result<BTreeMap<String, PathBuf>> {
    let mut found = BTreeMap::new();
    for entry in fs::read_dir(place)? {
        let entry = entry?;
        if let Ok(name) = entry.file_name().into_string()
            && !name.starts_with('.')
            && entry.path().is_dir()
        {
            found.insert(name, entry.path());
        }
    }
    Ok(found)
}

fn is_ensemble(model: &Path) -> bool {
    static ENSEMBLE: LazyLock<Option<Regex>> =
        LazyLock::new(|| Regex::new(r#"(?m)^\s*platform\s*:\s*["']ensemble["']"#).ok());
    let path = model.join(CONFIG);
    let is_short = fs::metadata(&path)
        .is_ok_and(|metadata| metadata.is_file() && metadata.len() <= MAX_CONFIG);
    let text = if is_short { fs::read_to_string(path).ok() } else { None };
    text.zip(ENSEMBLE.as_ref()).is_some_and(|(text, ensemble)| ensemble.is_match(&text))
}

/// Returns the status with which SageMaker unloads other models, if the error says
/// that memory is insufficient.
pub(super) fn status_without_memory(error: &InferError) -> Option<StatusCode> {
    let text = error.message.to_ascii_lowercase();
    NO_MEMORY.iter().any(|words| text.contains(words)).then_some(StatusCode::INSUFFICIENT_STORAGE)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn a_directory_is_a_model_or_has_one_or_an_ensemble() {
        let folder = std::env::temp_dir().join(format!("pharos-sagemaker-{}", std::process::id()));
        let model = |path: &str, config: &str| {
            let path = folder.join(path);
            fs::create_dir_all(&path).unwrap();
            fs::write(path.join(CONFIG), config).unwrap();
        };
        model("itself", "");
        model("only/m", "");
        model("ensemble/e", "\nplatform: \"ensemble\"\n");
        model("ensemble/m", "backend: \"python\"");
        model("two/a", "");
        model("two/b", "");
        fs::create_dir_all(folder.join("none")).unwrap();
        let folder = fs::canonicalize(&folder).unwrap();
        let names = |path: &str| {
            let found = find(folder.join(path).to_str().unwrap(), "n")?;
            let relative = |path: &Path| path.strip_prefix(&folder).unwrap().display().to_string();
            let models = found.1.iter().map(|(name, path)| format!("{name}={}", relative(path)));
            Ok::<_, String>((relative(Path::new(&found.0)), models.collect::<Vec<_>>().join(" ")))
        };
        let found = |url: &str, models: &str| Ok((url.to_owned(), models.to_owned()));
        assert_eq!(names("itself"), found("", "n=itself"));
        assert_eq!(names("only"), found("only", "n=only/m"));
        assert_eq!(names("ensemble"), found("ensemble", "m=ensemble/m n=ensemble/e"));
        assert!(names("two").unwrap_err().contains("has 2 models, 0 of them ensembles"));
        assert!(names("none").unwrap_err().contains("contains no model directory"));
        assert!(names("nowhere").unwrap_err().contains("repository not found"));
        assert!(names("/proc/self").unwrap_err().contains("not loaded from /proc"));
        fs::remove_dir_all(&folder).unwrap();
    }
}
