//! The settings of a model: its file, and the parameters of its configuration.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use crate::adapters::Places;
use crate::host::Context;

/// The file with the adapters of a model, as Triton's vllm_backend has it.
const ADAPTERS_FILE: &str = "multi_lora.json";
/// The file of a model that names none.
const MODEL_FILE: &str = "model.gguf";

/// How a model runs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Settings {
    pub(crate) file: PathBuf,
    /// The most tokens of a request: prompt and output; `None` for the context of the training, up
    /// to [`DEFAULT_CONTEXT`].
    pub(crate) context_length: Option<u32>,
    /// The choices that are generated together, or the texts of a step.
    max_sequences: Option<u32>,
    /// The most tokens that a step computes: one for each choice that is generated, and parts of
    /// prompts.
    pub(crate) batch_tokens: u32,
    /// The layers that run on a GPU.
    pub(crate) gpu_layers: u32,
    pub(crate) threads: u32,
    /// How the vectors of the tokens of a text become its embedding; `None` for the way of the file.
    pub(crate) pooling: Option<Pooling>,
    /// The files of adapters, by their names.
    pub(crate) adapters: BTreeMap<String, PathBuf>,
    /// Where the files of adapters may be that requests load.
    pub(crate) adapter_places: Places,
    /// The most adapters that are in memory because requests have loaded them.
    pub(crate) max_adapters: u32,
}

/// How the vectors of the tokens of a text become its embedding.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Pooling {
    Mean,
    /// The vector of the first token.
    First,
    /// The vector of the last token.
    Last,
}

/// The choices of a model that generates text that run together, unless its configuration says
/// otherwise.
const DEFAULT_SEQUENCES: u32 = 4;
/// The same for texts of a model that makes embeddings or scores, which keep nothing.
const DEFAULT_TEXTS: u32 = 32;

/// The adapters of requests that are in memory, unless the configuration says otherwise.
const DEFAULT_ADAPTERS: u32 = 16;

/// The context of a model whose configuration has none, if it was trained for a longer one.
pub(crate) const DEFAULT_CONTEXT: u32 = 4096;

impl Settings {
    /// Returns the choices or texts that run together.
    pub(crate) fn max_sequences(&self, is_pooling: bool) -> u32 {
        self.max_sequences.unwrap_or(if is_pooling { DEFAULT_TEXTS } else { DEFAULT_SEQUENCES })
    }

    /// Reads the settings.
    ///
    /// # Errors
    /// A parameter has a value that is not allowed, or the file is missing.
    pub(crate) fn read(context: &Context<'_>) -> Result<Self, String> {
        let integer = |name: &str, least: u32, most: u32| {
            let Some(text) = context.parameter(name) else { return Ok(None) };
            let number = text.trim().parse().ok().filter(|number| (least..=most).contains(number));
            number.map(Some).ok_or_else(|| {
                format!("the parameter '{name}' is '{text}'; allowed are {least} to {most}")
            })
        };
        let name = context.model_file();
        let file = Path::new(&context.directory).join(name.as_deref().unwrap_or(MODEL_FILE));
        if !file.is_file() {
            return Err(format!("'{}' does not exist", file.display()));
        }
        let pooling = match context.parameter("pooling").as_deref() {
            None => None,
            Some("mean") => Some(Pooling::Mean),
            Some("cls") => Some(Pooling::First),
            Some("last") => Some(Pooling::Last),
            Some(other) => {
                return Err(format!(
                    "the parameter 'pooling' is '{other}'; allowed are mean, cls and last"
                ));
            }
        };
        if let Some(task) = context.parameter("task")
            && !["generate", "embed", "score"].contains(&task.as_str())
        {
            return Err(format!(
                "the parameter 'task' is '{task}'; allowed are generate, embed and score"
            ));
        }
        Ok(Self {
            pooling,
            adapters: adapters(Path::new(&context.directory))?,
            adapter_places: Places::new(
                Path::new(&context.directory),
                context.parameter("adapter_directory").as_deref(),
            )?,
            max_adapters: integer("max_adapters", 1, 4096)?.unwrap_or(DEFAULT_ADAPTERS),
            file,
            context_length: integer("context_length", 8, 1 << 24)?,
            max_sequences: integer("max_sequences", 1, 256)?,
            batch_tokens: integer("batch_tokens", 1, 1 << 16)?.unwrap_or(512),
            gpu_layers: integer("gpu_layers", 0, 10_000)?.unwrap_or(10_000),
            threads: integer("threads", 1, 1024)?.unwrap_or(context.threads.max(1)),
        })
    }
}

/// Returns the files of adapters by their names.
fn adapters(directory: &Path) -> Result<BTreeMap<String, PathBuf>, String> {
    let file = directory.join(ADAPTERS_FILE);
    if !file.is_file() {
        return Ok(BTreeMap::new());
    }
    let wrong = |why: String| format!("'{}': {why}", file.display());
    let text = fs::read(&file).map_err(|error| wrong(error.to_string()))?;
    let paths: BTreeMap<String, PathBuf> = serde_json::from_slice(&text)
        .map_err(|error| wrong(format!("it must have the paths of adapters by name: {error}")))?;
    let paths = paths.into_iter().map(|(name, path)| {
        let path = directory.join(path);
        match path.is_file() {
            true => Ok((name, path)),
            false => Err(wrong(format!("the adapter '{name}': '{}' is missing", path.display()))),
        }
    });
    paths.collect()
}
