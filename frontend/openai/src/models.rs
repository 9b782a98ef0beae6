//! Models that generate text, with their contract, their chat template and their parsers. These are
//! read with the first request to a model, and again after each load.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Weak};

use parking_lot::Mutex;
use pharos::error::{ErrorCode, InferError, Reason};
use pharos::model::generation::counts_tokens;
use pharos::model::{BOS_TOKEN, CHAT_TEMPLATE, EOS_TOKEN, ModelConfig};
use pharos::service::Service;
use serde::Serialize;
use serde_json::Value;
use tokio::sync::{OnceCell, OwnedMutexGuard};

use crate::answer::Failure;
use crate::contract::Contract;
use crate::error::ApiError;
use crate::reasoning::ReasoningParser;
use crate::renderer::{Launch, NotCompiled, Renderer, Renderers};
use crate::template::{TemplateSource, TokenizerConfig};
use crate::tools::ToolParser;

/// The parameter of a model's configuration that says whether OpenAI's API serves the model:
/// `auto` (the default) or `off`.
const OPENAI: &str = "openai";
const OFF: &str = "off";
const TOOL_PARSER: &str = "tool_call_parser";
const REASONING_PARSER: &str = "reasoning_parser";
const DEFAULT_MAX_TOKENS: &str = "default_max_tokens";

/// The file with the adapters of a model by their names, as Triton's vllm_backend has it.
const ADAPTERS: &str = "multi_lora.json";
/// The most adapters of a model: of its file, and the same number of those that requests load.
const MAX_ADAPTERS: usize = 4096;

/// A model that generates text.
#[derive(Clone, Debug)]
pub(crate) struct TextModel {
    pub(crate) contract: Contract,
    /// `None` if the model has no chat template, as base models have none.
    pub(crate) template: Option<Renderer>,
    pub(crate) tool_parser: Option<ToolParser>,
    pub(crate) reasoning_parser: Option<ReasoningParser>,
    /// The limit of tokens of a chat that sets none.
    pub(crate) default_max_tokens: Option<u64>,
    /// The adapter that a client has loaded and whose name this is.
    pub(crate) adapter: Option<Arc<LoadedAdapter>>,
}

/// The models that were asked.
#[derive(Debug)]
pub struct Models {
    /// By name.
    known: Mutex<HashMap<String, Arc<Known>>>,
    renderers: Arc<Renderers>,
    /// The number of adapters that clients have loaded so far.
    loads: AtomicU64,
}

/// A model as of one load.
#[derive(Debug)]
struct Known {
    /// Identifies the load.
    config: Weak<ModelConfig>,
    /// The names of the adapters of its file. The list of models reads them without the chat template.
    adapters: OnceCell<Result<Vec<String>, Failure>>,
    /// What the files say. The first requests read them once, together.
    files: OnceCell<Files>,
    /// The adapters that clients have loaded, by name.
    loaded: Mutex<BTreeMap<String, Arc<LoadedAdapter>>>,
    /// Held while a client loads or unloads an adapter.
    change: Arc<tokio::sync::Mutex<()>>,
}

/// What the files of a model say.
#[derive(Debug)]
struct Files {
    /// A failure stays until the next load, so that it is found and logged once.
    model: Result<Arc<TextModel>, Failure>,
    /// The model with each of its adapters, by the adapter's name.
    adapters: BTreeMap<String, Arc<TextModel>>,
}

/// An adapter that clients may name in place of its model.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Adapter {
    /// Its name.
    pub name: String,
    /// The model that it belongs to.
    pub model: String,
}

/// An adapter that a client has loaded, as engines get it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub(crate) struct LoadedAdapter {
    pub(crate) name: String,
    pub(crate) path: String,
    /// Differs for each load, so that an engine does not take a new adapter for an old one with the
    /// same name.
    pub(crate) load: u64,
}

/// Where an adapter comes from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Origin {
    /// The file of the model.
    File,
    /// A client.
    Request,
}

/// A change of the adapters that clients have loaded for a model. Another one waits until it ends.
#[derive(Debug)]
pub(crate) struct AdapterChange {
    model: String,
    known: Arc<Known>,
    _turn: OwnedMutexGuard<()>,
}

impl AdapterChange {
    /// Adds an adapter. Returns the one that had its name.
    ///
    /// # Errors
    /// The model was loaded again since the change began, or has too many adapters.
    pub(crate) fn insert(
        &self,
        service: &dyn Service,
        adapter: LoadedAdapter,
    ) -> Result<Option<Arc<LoadedAdapter>>, Failure> {
        if !self.known.is_current(service, &self.model) {
            let text = format!(
                "the model '{}' was loaded again, without the adapters of requests",
                self.model
            );
            return Err(ApiError::unavailable(text, None).into());
        }
        let mut loaded = self.known.loaded.lock();
        if loaded.len() >= MAX_ADAPTERS && !loaded.contains_key(&adapter.name) {
            let text = format!(
                "the model '{}' has {MAX_ADAPTERS} adapters of requests already: unload one first",
                self.model
            );
            return Err(ApiError::invalid_field("lora_name", text).into());
        }
        Ok(loaded.insert(adapter.name.clone(), Arc::new(adapter)))
    }

    /// Removes an adapter; `None` if it is not loaded.
    pub(crate) fn remove(&self, name: &str) -> Option<Arc<LoadedAdapter>> {
        self.known.loaded.lock().remove(name)
    }
}

impl Models {
    /// Knows no model. Chat templates are rendered in processes that `launch` starts.
    #[must_use]
    pub fn new(launch: Arc<dyn Launch>) -> Self {
        Self {
            known: Mutex::default(),
            renderers: Renderers::new(launch),
            loads: AtomicU64::new(0),
        }
    }

    /// Returns a model that is ready, with the adapter of this name, unless `name` is the model's own.
    ///
    /// # Errors
    /// The model is unknown or not ready, does not generate text, or its chat template or its
    /// parameters are invalid.
    pub(crate) async fn get(
        &self,
        service: &dyn Service,
        model: &str,
        name: &str,
    ) -> Result<Arc<TextModel>, Failure> {
        let config = service.model_config(model, "")?;
        let known = self.entry(model, &config);
        let files = self.read(service, model, &config, &known).await?;
        if name == model {
            return files.model.clone();
        }
        let loaded = known.loaded.lock().get(name).cloned();
        match (loaded, files.adapters.get(name), &files.model) {
            (Some(adapter), _, Ok(model)) => {
                Ok(Arc::new(TextModel { adapter: Some(adapter), ..(**model).clone() }))
            }
            (_, _, Err(failure)) => Err(failure.clone()),
            (None, Some(adapted), Ok(_)) => Ok(adapted.clone()),
            // It was unloaded meanwhile.
            (None, None, Ok(_)) => Err(ApiError::unknown_model(name).into()),
        }
    }

    /// Begins a change of the adapters that clients have loaded for a model.
    ///
    /// # Errors
    /// The model is unknown or not ready.
    pub(crate) async fn change_adapters(
        &self,
        service: &dyn Service,
        model: &str,
    ) -> Result<AdapterChange, Failure> {
        let known = self.entry(model, &service.model_config(model, "")?);
        let turn = known.change.clone().lock_owned().await;
        Ok(AdapterChange { model: model.to_owned(), known, _turn: turn })
    }

    /// Returns an adapter with a number that no other one has.
    pub(crate) fn new_adapter(&self, name: String, path: String) -> LoadedAdapter {
        LoadedAdapter { name, path, load: self.loads.fetch_add(1, Ordering::Relaxed) + 1 }
    }

    /// Returns the model with an adapter of this name, and where the adapter comes from.
    pub(crate) async fn find_adapter(
        &self,
        service: &dyn Service,
        name: &str,
    ) -> Option<(String, Origin)> {
        let model = self.find_base(service, name).await?;
        let known = self.known.lock().get(&model).cloned()?;
        let is_loaded = known.loaded.lock().contains_key(name);
        Some((model, if is_loaded { Origin::Request } else { Origin::File }))
    }

    /// Returns the name of the model that a client names: itself, or by one of its adapters.
    pub async fn base_of(&self, service: &dyn Service, name: &str) -> String {
        let base = match service.model_config(name, "") {
            Ok(_) => None,
            Err(_) => self.find_base(service, name).await,
        };
        base.unwrap_or_else(|| name.to_owned())
    }

    /// Returns the adapters of these models, in their order.
    pub async fn adapters(&self, service: &dyn Service, models: &BTreeSet<&str>) -> Vec<Adapter> {
        let mut adapters = Vec::new();
        for &model in models {
            if let Ok(config) = service.model_config(model, "")
                && Contract::of(&config).is_some()
            {
                let known = self.entry(model, &config);
                // A failure is the answer to requests to the model.
                let mut names = known.adapters(service, model).await.unwrap_or_default();
                names.extend(known.loaded.lock().keys().cloned());
                let of_model = |name| Adapter { name, model: model.to_owned() };
                adapters.extend(names.into_iter().map(of_model));
            }
        }
        adapters
    }

    /// Returns the name of the only ready model that OpenAI's API serves; `None` if there are
    /// several, or none.
    pub(crate) async fn only(&self, service: &dyn Service) -> Option<String> {
        let index = service.repository_index(true).await.ok()?;
        let names: BTreeSet<String> = index.into_iter().map(|entry| entry.name).collect();
        let mut served = names.into_iter().filter(|name| {
            let config = service.model_config(name, "");
            config.is_ok_and(|config| counts_tokens(&config))
        });
        let first = served.next()?;
        served.next().is_none().then_some(first)
    }

    /// Returns the model that has an adapter with this name.
    async fn find_base(&self, service: &dyn Service, name: &str) -> Option<String> {
        if let Some(model) = self.known_base(service, name) {
            return Some(model);
        }
        let index = service.repository_index(true).await.ok()?;
        let models: BTreeSet<&str> = index.iter().map(|entry| entry.name.as_str()).collect();
        let mut adapters = self.adapters(service, &models).await.into_iter();
        adapters.find_map(|adapter| (adapter.name == name).then_some(adapter.model))
    }

    /// Does the same among the models whose adapters were read.
    fn known_base(&self, service: &dyn Service, name: &str) -> Option<String> {
        let models = self.known.lock();
        let found = models.iter().find(|(model, known)| {
            let names = known.adapters.get().and_then(|read| read.as_ref().ok());
            let is_adapter = names.is_some_and(|names| names.iter().any(|own| own == name))
                || known.loaded.lock().contains_key(name);
            is_adapter && known.is_current(service, model)
        });
        found.map(|(model, _)| model.clone())
    }

    /// Reads the files of a model with the first requests.
    async fn read<'k>(
        &self,
        service: &dyn Service,
        name: &str,
        config: &ModelConfig,
        known: &'k Known,
    ) -> Result<&'k Files, Failure> {
        known
            .files
            .get_or_try_init(|| async {
                let model =
                    TextModel::read(service, &self.renderers, name, config).await.map(Arc::new);
                let names = match &model {
                    Ok(_) => known.adapters(service, name).await,
                    Err(_) => Ok(Vec::new()),
                };
                let (model, names) = match names {
                    Ok(names) => (model, names),
                    Err(failure) => (Err(failure), Vec::new()),
                };
                match model {
                    // It may succeed with the next request.
                    Err(failure) if is_transient(&failure) => Err(failure),
                    model => Ok(Files::new(model, names)),
                }
            })
            .await
    }

    /// Returns the entry of a model, a new one after each load.
    fn entry(&self, name: &str, config: &Arc<ModelConfig>) -> Arc<Known> {
        let mut models = self.known.lock();
        if let Some(known) = models.get(name)
            && known.config.as_ptr() == Arc::as_ptr(config)
        {
            return known.clone();
        }
        let config = Arc::downgrade(config);
        let known = Arc::new(Known {
            config,
            adapters: OnceCell::new(),
            files: OnceCell::new(),
            loaded: Mutex::default(),
            change: Arc::default(),
        });
        // Models that are not loaded any more.
        models.retain(|_, known| known.config.strong_count() > 0);
        models.insert(name.to_owned(), known.clone());
        known
    }
}

impl Files {
    fn new(model: Result<Arc<TextModel>, Failure>, adapters: Vec<String>) -> Self {
        let adapted = adapters.into_iter().filter_map(|name| {
            let model = model.as_ref().ok()?.with_adapter(&name);
            Some((name, Arc::new(model)))
        });
        Self { adapters: adapted.collect(), model }
    }
}

impl Known {
    /// Whether it is the model as it is loaded now.
    fn is_current(&self, service: &dyn Service, name: &str) -> bool {
        let now = service.model_config(name, "");
        now.is_ok_and(|config| self.config.as_ptr() == Arc::as_ptr(&config))
    }

    /// Returns the names of the adapters, in their order.
    async fn adapters(&self, service: &dyn Service, name: &str) -> Result<Vec<String>, Failure> {
        let read = self.adapters.get_or_try_init(|| async {
            match adapters_of(service, name).await {
                Err(failure) if is_transient(&failure) => Err(failure),
                read => Ok(read),
            }
        });
        read.await?.clone()
    }
}

/// Whether the files of a model may be read with the next request.
fn is_transient(failure: &Failure) -> bool {
    matches!(failure.reason, Reason::NotReady | Reason::UnknownModel)
}

/// Returns the names of the adapters of a model.
async fn adapters_of(service: &dyn Service, name: &str) -> Result<Vec<String>, Failure> {
    let Some(file) = service.model_file(name, "", ADAPTERS).await? else { return Ok(Vec::new()) };
    let read = serde_json::from_slice::<BTreeMap<String, Value>>(&file);
    match read {
        Ok(adapters) if adapters.len() <= MAX_ADAPTERS => Ok(adapters.into_keys().collect()),
        Ok(adapters) => {
            let count = adapters.len();
            let why =
                format!("'{ADAPTERS}' has {count} adapters; at most {MAX_ADAPTERS} are allowed");
            Err(broken(name, &why))
        }
        Err(error) => Err(broken(name, &format!("'{ADAPTERS}' is not an object: {error}"))),
    }
}

impl TextModel {
    /// Returns the model with an adapter.
    fn with_adapter(&self, name: &str) -> Self {
        Self { contract: self.contract.with_adapter(name), ..self.clone() }
    }

    async fn read(
        service: &dyn Service,
        renderers: &Arc<Renderers>,
        name: &str,
        config: &ModelConfig,
    ) -> Result<Self, Failure> {
        let parameter = |key: &str| config.parameters.get(key).map(String::as_str);
        if let Some(other) = parameter(OPENAI).filter(|value| !["auto", OFF].contains(value)) {
            return Err(invalid(name, OPENAI, other, "auto and off"));
        }
        let Some(contract) = Contract::of(config).filter(|_| !is_switched_off(config)) else {
            return Err(no_text(name).into());
        };
        let tool_parser = parameter(TOOL_PARSER)
            .map(|parser| {
                let allowed = "hermes, llama3_json, mistral, pythonic and json";
                ToolParser::named(parser).ok_or_else(|| invalid(name, TOOL_PARSER, parser, allowed))
            })
            .transpose()?;
        let reasoning_parser = parameter(REASONING_PARSER)
            .map(|parser| {
                let allowed = "deepseek_r1 and qwen3";
                ReasoningParser::named(parser)
                    .ok_or_else(|| invalid(name, REASONING_PARSER, parser, allowed))
            })
            .transpose()?;
        let default_max_tokens = parameter(DEFAULT_MAX_TOKENS)
            .map(|limit| {
                let number = limit.parse().ok().filter(|number| *number > 0);
                number.ok_or_else(|| invalid(name, DEFAULT_MAX_TOKENS, limit, "integers above 0"))
            })
            .transpose()?;
        Ok(Self {
            contract,
            template: template_of(service, renderers, name, config).await?,
            tool_parser,
            reasoning_parser,
            default_max_tokens,
            adapter: None,
        })
    }
}

/// Returns the chat template of a model: of its configuration (a template, or the name of its file
/// in the model's directory), `chat_template.jinja`, or `tokenizer_config.json`. That file and the
/// configuration also have the special tokens.
async fn template_of(
    service: &dyn Service,
    renderers: &Arc<Renderers>,
    name: &str,
    config: &ModelConfig,
) -> Result<Option<Renderer>, Failure> {
    let parameter = config.parameters.get(CHAT_TEMPLATE).map(String::as_str);
    let tokenizer = match service.model_file(name, "", "tokenizer_config.json").await? {
        Some(file) => TokenizerConfig::parse(&file).map_err(|why| broken(name, &why))?,
        None => TokenizerConfig::default(),
    };
    let file = match parameter {
        // A template has tags; the name of a file has none.
        Some(text) if text.contains('{') => None,
        Some(file) => Some(file),
        None => Some("chat_template.jinja"),
    };
    let source = match (file, parameter) {
        (Some(file), _) => match service.model_file(name, "", file).await? {
            Some(text) => {
                let text = String::from_utf8(text)
                    .map_err(|_| broken(name, &format!("the file '{file}' is not UTF-8")))?;
                Some(TemplateSource::Single(text))
            }
            None if parameter.is_some() => {
                let why =
                    format!("the file '{file}' of the parameter '{CHAT_TEMPLATE}' is missing");
                return Err(broken(name, &why));
            }
            None => tokenizer.chat_template,
        },
        (None, text) => text.map(|text| TemplateSource::Single(text.to_owned())),
    };
    let Some(source) = source else { return Ok(None) };
    let mut special_tokens = tokenizer.special_tokens;
    for token in [BOS_TOKEN, EOS_TOKEN] {
        if let Some(text) = config.parameters.get(token) {
            special_tokens.insert(token.to_owned(), text.clone());
        }
    }
    let compiled = renderers.compile(name, source, special_tokens).await;
    compiled.map(Some).map_err(|error| match error {
        NotCompiled::Invalid(why) => broken(name, &format!("its chat template is invalid: {why}")),
        NotCompiled::Failed(failure) => failure,
    })
}

/// Whether OpenAI's API does not serve a model because of its configuration.
pub(crate) fn is_switched_off(config: &ModelConfig) -> bool {
    config.parameters.get(OPENAI).is_some_and(|value| value == OFF)
}

/// Refuses a model that OpenAI's API does not serve because of its configuration.
pub(crate) fn check_is_served(name: &str, config: &ModelConfig) -> Result<(), ApiError> {
    if !is_switched_off(config) {
        return Ok(());
    }
    let text = format!(
        "OpenAI's API does not serve the model '{name}': its parameter '{OPENAI}' is '{OFF}'"
    );
    let code = Some("model_not_supported");
    Err(ApiError { code, ..ApiError::invalid_field("model", text) })
}

fn no_text(name: &str) -> ApiError {
    ApiError {
        code: Some("model_not_supported"),
        ..ApiError::invalid_field(
            "model",
            format!(
                "the model '{name}' does not generate text: it needs the tensors of Triton's \
                 vllm_backend, of TensorRT-LLM or of OpenAI's JSON; POST /v2/models/{name}/infer \
                 runs any model"
            ),
        )
    }
}

fn invalid(name: &str, parameter: &str, value: &str, allowed: &str) -> Failure {
    let why =
        format!("its parameter '{parameter}' is '{}'; allowed are {allowed}", value.escape_debug());
    broken(name, &why)
}

/// Returns the failure of a model whose files or parameters are wrong, which is the operator's
/// concern.
fn broken(name: &str, why: &str) -> Failure {
    tracing::warn!(model = name, "OpenAI's API cannot serve the model: {why}");
    let message = format!("the model '{name}' cannot be served: {why}");
    InferError::new(ErrorCode::Internal, Reason::Internal, message).into()
}
