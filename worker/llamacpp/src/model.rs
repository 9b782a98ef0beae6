//! A loaded model: its vocabulary, and the tables for structured output.

use std::sync::{Arc, OnceLock};

use llama_cpp_2::llama_backend::LlamaBackend;
use llama_cpp_2::model::params::LlamaModelParams;
use llama_cpp_2::model::{LlamaLoraAdapter, LlamaModel};
use llama_cpp_2::token::LlamaToken;
use llguidance::api::{ParserLimits, TopLevelGrammar};
use llguidance::{Matcher, ParserFactory};

use crate::adapters::{KnownAdapters, Places};
use crate::host::{Context, Failure};
use crate::logs::{self, logged_errors};
use crate::processor;
use crate::sampling::Structure;
use crate::schemas;
use crate::settings::{DEFAULT_CONTEXT, Settings};

/// The most tokens that a grammar may take to compute the tokens that may come next; above it, the
/// request fails. A step delays all requests.
const LIMITS: ParserLimits = ParserLimits {
    max_items_in_row: 2000,
    initial_lexer_fuel: 500_000,
    step_lexer_fuel: 200_000,
    step_max_items: 50_000,
    max_lexer_states: 50_000,
    max_grammar_size: 100_000,
    precompute_large_lexemes: true,
    verbose_errors: false,
};

/// The longest reason of an invalid structure, in characters.
const MAX_REASON: usize = 400;

/// The key of a file with the form of a pair of texts, for a model that scores pairs.
const RERANK_TEMPLATE: &str = "tokenizer.chat_template.rerank";

/// A model with its vocabulary.
pub(crate) struct Model {
    pub(crate) backend: LlamaBackend,
    pub(crate) inner: LlamaModel,
    /// The most tokens of a request.
    pub(crate) context_length: u32,
    /// Tokens that end a text.
    pub(crate) ends: Vec<i32>,
    /// The names of the adapters of `multi_lora.json`.
    pub(crate) adapters: Vec<String>,
    /// Where the files of adapters may be that requests load.
    pub(crate) adapter_places: Places,
    /// The adapters that the engine has loaded by request.
    pub(crate) known_adapters: KnownAdapters,
    structures: OnceLock<Result<ParserFactory, String>>,
}

/// A model and its adapters, which belong to its engine.
pub(crate) struct Loaded {
    pub(crate) model: Model,
    /// In the order of [`Model::adapters`].
    pub(crate) adapters: Vec<LlamaLoraAdapter>,
}

impl Model {
    /// Loads a model.
    ///
    /// # Errors
    /// The file is not a model that llama.cpp runs; for the author of the model.
    pub(crate) fn load(settings: &Settings, context: &Context<'_>) -> Result<Loaded, String> {
        logs::pass_on_to(context.host);
        processor::prepare()?;
        let backend = LlamaBackend::init().map_err(|error| error.to_string())?;
        // SAFETY: llama.cpp calls the function while it loads the model, during the creation.
        let report = unsafe { context.progress_reporter() };
        let parameters = LlamaModelParams::default()
            .with_n_gpu_layers(settings.gpu_layers)
            .with_progress_callback(move |fraction| {
                report(fraction);
                true
            });
        let mut inner =
            LlamaModel::load_from_file(&backend, &settings.file, &parameters).map_err(|_| {
                format!("'{}' cannot be loaded: {}", settings.file.display(), logged_errors())
            })?;
        let trained = inner.n_ctx_train();
        let context_length = match settings.context_length {
            None => trained.min(DEFAULT_CONTEXT),
            Some(length) if length <= trained => length,
            Some(length) => {
                return Err(format!(
                    "the parameter 'context_length' is {length}; the model was trained for at \
                     most {trained} tokens"
                ));
            }
        };
        let vocabulary = inner.vocab();
        let ends = (0..vocabulary.n_tokens())
            .filter(|token| vocabulary.is_eog(LlamaToken(*token)))
            .collect();
        let mut adapters = Vec::new();
        for (name, path) in &settings.adapters {
            adapters.push(inner.lora_adapter_init(path).map_err(|_| {
                format!("the adapter '{name}' cannot be loaded: {}", logged_errors())
            })?);
        }
        let names = settings.adapters.keys().cloned().collect();
        let model = Self {
            backend,
            inner,
            context_length,
            ends,
            adapters: names,
            adapter_places: settings.adapter_places.clone(),
            known_adapters: KnownAdapters::default(),
            structures: OnceLock::new(),
        };
        Ok(Loaded { model, adapters })
    }

    /// Returns the tokens of a pair of texts for a model that scores pairs: in the form of the
    /// model's file, or with the tokens that separate and end texts.
    pub(crate) fn tokenize_pair(&self, first: &str, second: &str) -> Vec<i32> {
        let vocabulary = self.inner.vocab();
        if let Ok(form) = self.inner.meta_val_str(RERANK_TEMPLATE) {
            let text = fill_pair(&form, first, second);
            let tokens = vocabulary.tokenize(text.as_bytes(), false, true);
            return tokens.into_iter().map(|token| token.0).collect();
        }
        let end = [vocabulary.eos(), vocabulary.sep()].into_iter().find(|token| token.0 >= 0);
        let mut tokens = Vec::new();
        let add = |tokens: &mut Vec<LlamaToken>, is_wanted: bool, token: Option<LlamaToken>| {
            tokens.extend(token.filter(|token| is_wanted && token.0 >= 0));
        };
        add(&mut tokens, vocabulary.should_add_bos(), Some(vocabulary.bos()));
        tokens.extend(vocabulary.tokenize(first.as_bytes(), false, false));
        add(&mut tokens, vocabulary.should_add_eos(), end);
        add(&mut tokens, vocabulary.should_add_sep(), Some(vocabulary.sep()));
        tokens.extend(vocabulary.tokenize(second.as_bytes(), false, false));
        add(&mut tokens, vocabulary.should_add_eos(), end);
        tokens.into_iter().map(|token| token.0).collect()
    }

    /// Whether the architecture makes probabilities of its scores, as Qwen3's does in llama.cpp.
    pub(crate) fn scores_are_probabilities(&self) -> bool {
        let architecture = self.inner.meta_val_str("general.architecture").unwrap_or_default();
        ["qwen3", "qwen3vl"].contains(&architecture.as_str())
    }

    /// Returns the text of tokens. Bytes that are not UTF-8 become replacement characters.
    pub(crate) fn detokenize(&self, tokens: &[i32]) -> String {
        let bytes: Vec<u8> = tokens.iter().flat_map(|token| self.piece(*token, true)).collect();
        String::from_utf8_lossy(&bytes).into_owned()
    }

    /// Returns the tokens of a prompt. Special tokens in the text count as such. `with_special` adds
    /// the token that begins a text, unless the text has it, and others that the model expects.
    pub(crate) fn tokenize(&self, text: &str, with_special: bool) -> Vec<i32> {
        let vocabulary = self.inner.vocab();
        let mut tokens = vocabulary.tokenize(text.as_bytes(), with_special, true);
        let first = vocabulary.bos();
        if vocabulary.should_add_bos() && tokens.starts_with(&[first, first]) {
            tokens.remove(0);
        }
        tokens.into_iter().map(|token| token.0).collect()
    }

    /// Returns the bytes of a token.
    pub(crate) fn piece(&self, token: i32, with_special: bool) -> Vec<u8> {
        let vocabulary = self.inner.vocab();
        match (0..vocabulary.n_tokens()).contains(&token) {
            true => vocabulary.token_to_piece(LlamaToken(token), with_special, None),
            false => Vec::new(),
        }
    }

    /// Returns what keeps a text in a structure.
    ///
    /// # Errors
    /// The structure is invalid or too large.
    pub(crate) fn matcher(&self, structure: &Structure) -> Result<Matcher, Failure> {
        let factory = self.structures.get_or_init(|| {
            let tokens = llama_cpp_2::sampling::LlamaSampler::llguidance_tok_env(&self.inner);
            let mut factory =
                ParserFactory::new_simple(&tokens).map_err(|error| error.to_string())?;
            *factory.limits_mut() = LIMITS;
            factory.quiet();
            Ok(factory)
        });
        let factory = factory.as_ref().map_err(Failure::internal)?;
        let invalid =
            |error: &str| Failure::invalid(format!("structured_outputs is invalid: {error}"));
        if let Structure::Json(schema) = structure {
            schemas::check(schema).map_err(|why| invalid(&why))?;
        }
        let grammar = match structure {
            Structure::Json(schema) => TopLevelGrammar::from_json_schema(schema.clone()),
            Structure::Regex(expression) => TopLevelGrammar::from_regex(expression),
            Structure::Grammar(grammar) => TopLevelGrammar::from_lark(grammar.clone()),
            Structure::Choice(texts) => TopLevelGrammar::from_lark(choice_grammar(texts)),
        };
        let mut matcher = Matcher::new(factory.create_parser(grammar));
        match matcher.get_error() {
            Some(error) => Err(invalid(&reason(&error))),
            None => match matcher.compute_mask_or_eos() {
                Ok(_) => Ok(matcher),
                Err(error) => Err(invalid(&reason(&error.to_string()))),
            },
        }
    }
}

/// Puts texts into the form of a pair.
fn fill_pair(form: &str, first: &str, second: &str) -> String {
    let mut text = String::with_capacity(form.len() + first.len() + second.len());
    let mut rest = form;
    // The texts themselves may have braces.
    while let Some(at) = rest.find('{') {
        let (before, after) = rest.split_at(at);
        text.push_str(before);
        if let Some(after) = after.strip_prefix("{query}") {
            text.push_str(first);
            rest = after;
        } else if let Some(after) = after.strip_prefix("{document}") {
            text.push_str(second);
            rest = after;
        } else {
            text.push('{');
            rest = &after[1..];
        }
    }
    text.push_str(rest);
    text
}

/// Returns llguidance's reason in one line. It has marks for developers, and an internal name for a
/// schema that is nothing but a reference to itself.
fn reason(error: &str) -> String {
    if error.contains("NoExtensionBias") {
        return "a $ref refers to nothing but itself".to_owned();
    }
    let lines = error.lines().map(str::trim).filter(|line| !line.is_empty());
    let lines: Vec<&str> = lines.filter(|line| !line.starts_with('<')).collect();
    let mut text = lines.join(" ");
    if let Some((end, _)) = text.char_indices().nth(MAX_REASON) {
        text.truncate(end);
        text.push_str("...");
    }
    text
}

/// Returns a grammar of some texts.
fn choice_grammar(texts: &[String]) -> String {
    let quoted: Vec<String> =
        texts.iter().map(|text| serde_json::Value::from(text.as_str()).to_string()).collect();
    format!("start: {}", quoted.join(" | "))
}

/// A model that its engine and its clients share.
pub(crate) type SharedModel = Arc<Model>;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_form_of_a_pair_is_filled_once() {
        let text = fill_pair("<q>{query}<d>{document}{x}", "{document}", "b");
        assert_eq!(text, "<q>{document}<d>b{x}");
    }
}
