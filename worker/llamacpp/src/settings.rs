//! The settings of a model: its file, and the parameters of its configuration.

use std::path::{Path, PathBuf};

use crate::host::Context;

/// The file of a model that names none.
const MODEL_FILE: &str = "model.gguf";

/// How a model runs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Settings {
    pub(crate) file: PathBuf,
    /// The most tokens of a request: prompt and output; `None` for the context of the training, up
    /// to [`DEFAULT_CONTEXT`].
    pub(crate) context_length: Option<u32>,
    /// The choices that are generated together.
    pub(crate) max_sequences: u32,
    /// The most tokens that a step computes: one for each choice that is generated, and parts of
    /// prompts.
    pub(crate) batch_tokens: u32,
    /// The layers that run on a GPU.
    pub(crate) gpu_layers: u32,
    pub(crate) threads: u32,
}

/// The context of a model whose configuration has none, if it was trained for a longer one.
pub(crate) const DEFAULT_CONTEXT: u32 = 4096;

impl Settings {
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
        Ok(Self {
            file,
            context_length: integer("context_length", 8, 1 << 24)?,
            max_sequences: integer("max_sequences", 1, 256)?.unwrap_or(4),
            batch_tokens: integer("batch_tokens", 1, 1 << 16)?.unwrap_or(512),
            gpu_layers: integer("gpu_layers", 0, 10_000)?.unwrap_or(10_000),
            threads: integer("threads", 1, 1024)?.unwrap_or(context.threads.max(1)),
        })
    }
}
