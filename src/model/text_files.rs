//! The files of a text model in Hugging Face's layout whose graph is an ONNX file: what the model is
//! for, how texts become inputs of the graph, and how its outputs become results.
//!
//! Sources of the forms: `PretrainedConfig` and the pipelines of transformers 4.57, `modules.json`,
//! `Pooling` and `CrossEncoder` of sentence-transformers 5.1, and the names of files of Optimum's
//! exporter and of the models on Hugging Face's hub.

use std::collections::BTreeMap;

use serde_json::Value;

use super::generation::CONTEXT_LENGTH;
use super::pooling::{NORMALIZE, PoolingTask};

/// The backend of these models.
pub const TEXT_BACKEND: &str = "text";

/// The file with the tokenizer.
pub const TOKENIZER: &str = "tokenizer.json";
/// The file with the architecture, the labels and the sizes.
pub const CONFIG: &str = "config.json";
/// The directory of graphs.
pub const GRAPHS: &str = "onnx";

/// The most bytes of a file that is read.
pub const MAX_BYTES: u64 = 16 << 20;
/// The most files of a version's directory.
const MAX_FILES: usize = 65_536;

/// The parameter that says what a model is for.
pub(super) const TASK: &str = "task";
/// The parameter with the way from the vectors of tokens to the vector of a text.
const POOLING: &str = "pooling";
/// The parameter that chooses one of several graphs by the type of its weights.
const DTYPE: &str = "dtype";
/// The parameter with the labels of the classes, a JSON list in the order of the outputs.
pub const LABELS: &str = "labels";

const MODULES: &str = "modules.json";
const TOKENIZER_CONFIG: &str = "tokenizer_config.json";
const SPECIAL_TOKENS: &str = "special_tokens_map.json";
const SENTENCE_TRANSFORMER: &str = "config_sentence_transformers.json";
const SENTENCE_BERT: &str = "sentence_bert_config.json";

/// The most tokens of a text if no file says it.
const DEFAULT_TOKENS: u64 = 512;
/// Tokenizers without a limit have a number above this one.
const NO_LIMIT: u64 = 1 << 24;
/// The most names in a message.
const MOST_NAMES: usize = 16;

/// How one vector is made of the vectors of a text's tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TextPooling {
    /// The vector of the first token.
    Cls,
    /// The maximum of each element.
    Max,
    /// The mean of each element.
    Mean,
    /// The sum of each element, divided by the square root of the number of tokens.
    MeanSqrtLength,
    /// The mean with the position of a token, from 1, as its weight.
    WeightedMean,
    /// The vector of the last token.
    LastToken,
}

impl TextPooling {
    /// The names of the parameter and of sentence-transformers' files, in the order in which
    /// sentence-transformers joins the vectors of several ways.
    const NAMED: [(&str, &str, Self); 6] = [
        ("cls", "pooling_mode_cls_token", Self::Cls),
        ("max", "pooling_mode_max_tokens", Self::Max),
        ("mean", "pooling_mode_mean_tokens", Self::Mean),
        ("mean_sqrt_len_tokens", "pooling_mode_mean_sqrt_len_tokens", Self::MeanSqrtLength),
        ("weightedmean", "pooling_mode_weightedmean_tokens", Self::WeightedMean),
        ("lasttoken", "pooling_mode_lasttoken", Self::LastToken),
    ];

    fn named(name: &str) -> Option<Self> {
        // vLLM and text-embeddings-inference have other names for the last one.
        let name = if matches!(name, "last" | "last-token") { "lasttoken" } else { name };
        Self::NAMED.iter().find(|(known, ..)| *known == name).map(|(.., pooling)| *pooling)
    }
}

/// How an output of the graph becomes a number between 0 and 1.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Activation {
    /// Not at all.
    Identity,
    /// Each class by itself.
    Sigmoid,
    /// All classes together: their sum is 1.
    Softmax,
}

/// The files of a version's directory.
#[derive(Clone, Debug, Default)]
pub struct TextFiles {
    /// The paths of all files from the directory, in it and in its subdirectories.
    pub names: Vec<String>,
    /// The content of those for which [`TextFiles::is_read`] is true.
    pub contents: BTreeMap<String, String>,
}

/// The directory of a version.
pub trait TextDirectory {
    /// Returns the names in a subdirectory, or in the directory itself for an empty path, and whether
    /// each is a directory.
    ///
    /// # Errors
    /// It cannot be read.
    fn entries(&self, path: &str) -> Result<Vec<(String, bool)>, String>;

    /// Returns the text in a file, which has at most [`MAX_BYTES`] bytes.
    ///
    /// # Errors
    /// It cannot be read, is too long, or is not UTF-8.
    fn read(&self, path: &str) -> Result<String, String>;
}

/// A text model.
#[derive(Clone, Debug, PartialEq)]
pub struct TextModel {
    /// What it makes of a text.
    pub task: PoolingTask,
    /// The path of its graph from the directory of its version.
    pub graph: String,
    /// The most tokens of a text, or of a pair of texts, special tokens included.
    pub max_tokens: usize,
    /// The number of a text's first position.
    pub first_position: usize,
    /// The ways that make vectors, which are joined; empty if the graph has to make the vector
    /// itself.
    pub pooling: Vec<TextPooling>,
    /// Whether the vectors of texts have the length 1.
    pub normalize: bool,
    /// Whether a part of the model that is not in the graph of its transformer follows the pooling:
    /// the graph has to make the vector itself.
    pub needs_whole_graph: bool,
    /// How scores and probabilities are made.
    pub activation: Activation,
    /// The labels of the classes, in the order of the graph's output.
    pub labels: Vec<String>,
    /// The texts that are put before a text, by their names.
    pub prompts: BTreeMap<String, String>,
    /// The name of the one that is put before each text.
    pub default_prompt: Option<String>,
    /// The token for which [`PoolingTask::FillMask`] finds others.
    pub mask_token: Option<String>,
    /// The token for what the vocabulary does not have.
    pub unknown_token: Option<String>,
    /// Whether the first elements of a vector are a good vector too.
    pub is_matryoshka: bool,
    /// The lengths of such vectors, as a JSON list.
    pub matryoshka_dimensions: Option<String>,
}

/// The parameters of a model's configuration.
type Parameters<'a> = &'a dyn Fn(&str) -> Option<String>;

impl TextFiles {
    /// Returns whether the content of a file is needed, whose path from the version's directory is
    /// given.
    pub fn is_read(path: &str) -> bool {
        match path.split_once('/') {
            None => [
                CONFIG,
                MODULES,
                TOKENIZER_CONFIG,
                SPECIAL_TOKENS,
                SENTENCE_TRANSFORMER,
                SENTENCE_BERT,
            ]
            .contains(&path),
            // The configurations of sentence-transformers' modules.
            Some((_, name)) => name == CONFIG,
        }
    }

    /// Returns whether the files are a text model, from the names in a version's directory.
    pub fn are_in<'f>(files: impl IntoIterator<Item = &'f str>) -> bool {
        let mut has_config = false;
        let mut has_tokenizer = false;
        let mut has_graph = false;
        for file in files {
            has_config |= file == CONFIG;
            has_tokenizer |= file == TOKENIZER;
            has_graph |= file == GRAPHS || file.ends_with(".onnx");
        }
        has_config && has_tokenizer && has_graph
    }

    /// Reads the files of a directory.
    ///
    /// # Errors
    /// A file or directory cannot be read, or there are too many files.
    pub fn gather(directory: &impl TextDirectory) -> Result<Self, String> {
        let mut found = Self::default();
        for (name, is_directory) in directory.entries("")? {
            if !is_directory {
                found.names.push(name);
                continue;
            }
            let inner = directory.entries(&name)?;
            let files = inner.into_iter().filter(|(_, is_directory)| !is_directory);
            found.names.extend(files.map(|(file, _)| format!("{name}/{file}")));
            if found.names.len() > MAX_FILES {
                return Err(format!("the directory has more than {MAX_FILES} files"));
            }
        }
        found.names.sort();
        for name in found.names.iter().filter(|name| Self::is_read(name)) {
            found.contents.insert(name.clone(), directory.read(name)?);
        }
        Ok(found)
    }

    fn json(&self, path: &str) -> Result<Option<Value>, String> {
        let Some(text) = self.contents.get(path) else { return Ok(None) };
        let value: Value =
            serde_json::from_str(text).map_err(|error| format!("'{path}' is not JSON: {error}"))?;
        Ok(Some(value))
    }

    /// Returns the object in a file; an empty one if the file does not exist.
    fn object(&self, path: &str) -> Result<Value, String> {
        let value = self.json(path)?.unwrap_or_else(|| Value::Object(serde_json::Map::new()));
        if value.is_object() { Ok(value) } else { Err(format!("'{path}' is not a JSON object")) }
    }

    fn has(&self, path: &str) -> bool {
        self.names.iter().any(|name| name == path)
    }
}

impl TextModel {
    /// Reads a model. `parameters` finds a parameter of its configuration, and `graph` is the path of
    /// its graph if the configuration has it (`default_model_filename`), else empty.
    ///
    /// # Errors
    /// A file is missing or contradicts itself, or it allows several tasks: the text says what is
    /// allowed.
    pub fn of(files: &TextFiles, graph: &str, parameters: Parameters<'_>) -> Result<Self, String> {
        let config = files.object(CONFIG)?;
        if !files.has(CONFIG) || !files.has(TOKENIZER) {
            let missing = if files.has(CONFIG) { TOKENIZER } else { CONFIG };
            return Err(format!("a text model needs the file '{missing}'"));
        }
        let modules = Modules::of(files)?;
        let labels = labels(&config, parameters)?;
        let task = task(&config, modules.is_some(), labels.len(), parameters)?;
        let graph = chosen_graph(files, task, graph, parameters(DTYPE).as_deref())?;
        let tokenizer = files.object(TOKENIZER_CONFIG)?;
        let sentences = files.object(SENTENCE_TRANSFORMER)?;
        let prompts = prompts(&sentences)?;
        let default_prompt = text_at(&sentences, "default_prompt_name");
        if let Some(name) = default_prompt.as_ref().filter(|name| !prompts.contains_key(*name)) {
            return Err(format!(
                "'{SENTENCE_TRANSFORMER}' has the default prompt '{name}', but no prompt of this name"
            ));
        }
        let modules = modules.unwrap_or_default();
        let pooling = match parameters(POOLING) {
            None => modules.pooling,
            Some(name) => vec![TextPooling::named(&name).ok_or_else(|| {
                let names = TextPooling::NAMED.map(|(name, ..)| name).join(", ");
                format!("the parameter '{POOLING}' is '{name}'; allowed are {names}")
            })?],
        };
        let normalize = match parameters(NORMALIZE).as_deref() {
            None => modules.normalizes,
            Some("true") => true,
            Some("false") => false,
            Some(other) => {
                return Err(format!(
                    "the parameter '{NORMALIZE}' is '{other}'; allowed are true and false"
                ));
            }
        };
        let special = files.object(SPECIAL_TOKENS)?;
        let token = |name: &str| token(&tokenizer, name).or(token(&special, name));
        Ok(Self {
            task,
            graph,
            max_tokens: max_tokens(files, &config, &tokenizer, parameters)?,
            first_position: usize::try_from(first_position(&config)).unwrap_or(0),
            pooling,
            normalize,
            needs_whole_graph: modules.has_more,
            activation: activation(&config, task),
            labels,
            prompts,
            default_prompt,
            mask_token: token("mask_token"),
            unknown_token: token("unk_token"),
            is_matryoshka: config.get("is_matryoshka").and_then(Value::as_bool).unwrap_or(false),
            matryoshka_dimensions: config
                .get("matryoshka_dimensions")
                .filter(|list| list.is_array())
                .map(Value::to_string),
        })
    }
}

/// The modules of a model of sentence-transformers that follow its transformer.
#[derive(Debug, Default)]
struct Modules {
    pooling: Vec<TextPooling>,
    normalizes: bool,
    /// Whether there are others, such as a dense layer.
    has_more: bool,
}

impl Modules {
    /// Reads them; `None` for a model of transformers.
    fn of(files: &TextFiles) -> Result<Option<Self>, String> {
        let Some(list) = files.json(MODULES)? else { return Ok(None) };
        let wrong = || format!("'{MODULES}' is not a list of modules with their types");
        let mut found = Self::default();
        for module in list.as_array().ok_or_else(wrong)? {
            let kind = text_at(module, "type").ok_or_else(wrong)?;
            let path = text_at(module, "path").unwrap_or_default();
            match kind.rsplit('.').next().unwrap_or_default() {
                "Transformer" => {}
                "Normalize" => found.normalizes = true,
                "Pooling" => {
                    let path = format!("{}/{CONFIG}", path.trim_matches('/'));
                    let config = files
                        .json(&path)?
                        .ok_or_else(|| format!("'{MODULES}' needs the file '{path}'"))?;
                    found.pooling = pooling(&config, &path)?;
                }
                _ => found.has_more = true,
            }
        }
        Ok(Some(found))
    }
}

/// Reads the configuration of a pooling module: a flag for each way, or their names.
fn pooling(config: &Value, path: &str) -> Result<Vec<TextPooling>, String> {
    if config.get("include_prompt") == Some(&Value::Bool(false)) {
        return Err(format!(
            "'{path}' has 'include_prompt': false, which is not available here: prompts are pooled"
        ));
    }
    let names: Vec<&str> = match config.get("pooling_mode") {
        Some(Value::String(name)) => vec![name],
        Some(Value::Array(list)) => list.iter().filter_map(Value::as_str).collect(),
        _ => TextPooling::NAMED
            .iter()
            .filter(|(_, flag, _)| config.get(*flag) == Some(&Value::Bool(true)))
            .map(|(name, ..)| *name)
            .collect(),
    };
    let ways: Option<Vec<TextPooling>> =
        names.iter().map(|name| TextPooling::named(name)).collect();
    ways.filter(|ways| !ways.is_empty()).ok_or_else(|| {
        format!(
            "'{path}' has no pooling that is available here; available are {}",
            TextPooling::NAMED.map(|(_, flag, _)| flag).join(", ")
        )
    })
}

/// Returns the task of a model.
fn task(
    config: &Value,
    is_sentence_transformer: bool,
    labels: usize,
    parameters: Parameters<'_>,
) -> Result<PoolingTask, String> {
    let choices = || PoolingTask::names().collect::<Vec<_>>().join(", ");
    if let Some(name) = parameters(TASK) {
        return PoolingTask::named(&name).ok_or_else(|| {
            format!("the parameter '{TASK}' is '{name}'; allowed are {}", choices())
        });
    }
    let list = config.get("architectures").and_then(Value::as_array);
    let architectures: Vec<&str> =
        list.map(|list| list.iter().filter_map(Value::as_str).collect()).unwrap_or_default();
    let mut found: Vec<PoolingTask> = Vec::new();
    for name in &architectures {
        let task = if name.ends_with("ForSequenceClassification") {
            if labels == 1 { PoolingTask::Score } else { PoolingTask::Classify }
        } else if name.ends_with("ForTokenClassification") {
            PoolingTask::ClassifyTokens
        } else if is_sentence_transformer || name.ends_with("Model") {
            // The graph of such a model has no head, whatever it was trained with.
            PoolingTask::Embed
        } else if name.ends_with("ForMaskedLM") {
            PoolingTask::FillMask
        } else {
            continue;
        };
        if !found.contains(&task) {
            found.push(task);
        }
    }
    match found.as_slice() {
        [task] => Ok(*task),
        [] if is_sentence_transformer => Ok(PoolingTask::Embed),
        _ => Err(format!(
            "'{CONFIG}' has the architectures [{}], which name {} task: set the parameter '{TASK}' to \
             one of {}",
            architectures.iter().take(MOST_NAMES).copied().collect::<Vec<_>>().join(", "),
            if found.is_empty() { "no" } else { "more than one" },
            choices()
        )),
    }
}

/// Returns the labels of the classes, from the parameter or else from the file of the model.
fn labels(config: &Value, parameters: Parameters<'_>) -> Result<Vec<String>, String> {
    if let Some(list) = parameters(LABELS) {
        return serde_json::from_str(&list)
            .map_err(|_| format!("the parameter '{LABELS}' must be a JSON list of strings"));
    }
    let Some(map) = config.get("id2label").and_then(Value::as_object) else {
        let count = config.get("num_labels").and_then(Value::as_u64).unwrap_or(2);
        let count = usize::try_from(count).unwrap_or(usize::MAX).min(MAX_LABELS);
        return Ok((0..count).map(|number| format!("LABEL_{number}")).collect());
    };
    let mut labels: Vec<Option<&str>> = vec![None; map.len()];
    for (number, label) in map {
        let place = number.parse().ok().and_then(|number: usize| labels.get_mut(number));
        let (Some(place), Some(label)) = (place, label.as_str()) else {
            return Err(format!(
                "'{CONFIG}' has the label '{}' in 'id2label'; its keys must be the numbers from 0 to \
                 {}, and its values strings",
                number.escape_debug(),
                map.len().saturating_sub(1)
            ));
        };
        *place = Some(label);
    }
    Ok(labels.into_iter().map(|label| label.unwrap_or_default().to_owned()).collect())
}

/// The most labels without names.
const MAX_LABELS: usize = 65_536;

/// Returns the path of the graph: the one that the configuration names, the usual one of the type of
/// weights, or the only one.
fn chosen_graph(
    files: &TextFiles,
    task: PoolingTask,
    named: &str,
    dtype: Option<&str>,
) -> Result<String, String> {
    let graphs: Vec<&str> =
        files.names.iter().map(String::as_str).filter(|name| name.ends_with(".onnx")).collect();
    let listed = || graphs.iter().take(MOST_NAMES).copied().collect::<Vec<_>>().join(", ");
    if !named.is_empty() {
        return match files.has(named) {
            true => Ok(named.to_owned()),
            false => Err(format!(
                "the file '{named}' ('default_model_filename') does not exist; the graphs here are [{}]",
                listed()
            )),
        };
    }
    if graphs.is_empty() {
        let task = match task {
            PoolingTask::Embed => "feature-extraction",
            PoolingTask::Score | PoolingTask::Classify => "text-classification",
            PoolingTask::ClassifyTokens => "token-classification",
            PoolingTask::FillMask => "fill-mask",
        };
        return Err(format!(
            "the directory has no graph ('model.onnx', or '*.onnx' in 'onnx'). Optimum makes one of \
             the weights: `optimum-cli export onnx --model DIRECTORY --task {task} DIRECTORY` (`pip \
             install optimum-onnx[onnxruntime]`)"
        ));
    }
    let is_of = |path: &str, stems: &[&str]| {
        let name = path.rsplit('/').next().unwrap_or_default();
        let stem = name.strip_suffix(".onnx").unwrap_or_default();
        stems.iter().any(|known| match known.strip_suffix('*') {
            Some(start) => stem.starts_with(start),
            None => stem == *known,
        })
    };
    let stems: &[&str] = match dtype {
        None | Some("fp32" | "float32") => &["model"],
        Some("fp16" | "float16") => &["model_fp16", "model_O4"],
        Some("int8" | "q8") => &["model_int8", "model_quantized", "model_qint8_*"],
        Some("uint8") => &["model_uint8", "model_quint8_*"],
        Some("q4") => &["model_q4"],
        Some("bnb4") => &["model_bnb4"],
        Some(other) => {
            return Err(format!(
                "the parameter '{DTYPE}' is '{}'; allowed are fp32, fp16, int8, uint8, q4 and bnb4",
                other.escape_debug()
            ));
        }
    };
    let mut found: Vec<&str> = graphs.iter().copied().filter(|path| is_of(path, stems)).collect();
    // The directory itself comes before its subdirectories.
    found.sort_by_key(|path| path.contains('/'));
    match (found.as_slice(), graphs.as_slice(), dtype) {
        ([first, rest @ ..], ..)
            if rest.iter().all(|other| other.contains('/') && !first.contains('/')) =>
        {
            Ok((*first).to_owned())
        }
        ([], [only], None) => Ok((*only).to_owned()),
        _ => Err(format!(
            "{} of the graphs [{}] is of the type '{}': choose one with the parameter '{DTYPE}', or name \
             it in 'default_model_filename'",
            if found.is_empty() { "none" } else { "more than one" },
            listed(),
            dtype.unwrap_or("fp32")
        )),
    }
}

/// Returns the most tokens of a text: the least of what its files and the parameter say.
fn max_tokens(
    files: &TextFiles,
    config: &Value,
    tokenizer: &Value,
    parameters: Parameters<'_>,
) -> Result<usize, String> {
    let of_graph = positions(config);
    let of_files = natural(&files.object(SENTENCE_BERT)?, "max_seq_length")
        .or_else(|| natural(tokenizer, "model_max_length").filter(|number| *number < NO_LIMIT))
        .or(of_graph)
        .unwrap_or(DEFAULT_TOKENS);
    let own = match parameters(CONTEXT_LENGTH) {
        None => of_files,
        Some(text) => text.parse().ok().filter(|number| *number > 0).ok_or_else(|| {
            format!("the parameter '{CONTEXT_LENGTH}' is '{text}'; allowed is an integer above 0")
        })?,
    };
    let most = own.min(of_graph.unwrap_or(NO_LIMIT)).clamp(1, NO_LIMIT);
    Ok(usize::try_from(most).unwrap_or(usize::MAX))
}

/// Returns the number of positions of a graph; `None` if it has no limit, or the file does not say
/// it.
fn positions(config: &Value) -> Option<u64> {
    let most = natural(config, "max_position_embeddings")?;
    // Models with relative positions alone have a number that is no limit.
    let is_relative = config.get("position_biased_input") == Some(&Value::Bool(false));
    let most = most.saturating_sub(first_position(config));
    (!is_relative).then_some(most).filter(|number| *number > 0)
}

/// Returns the number of a text's first position: in some models, the one after the number of the
/// token that pads.
fn first_position(config: &Value) -> u64 {
    let kind = text_at(config, "model_type").unwrap_or_default();
    let is_shifted = matches!(
        kind.as_str(),
        "roberta"
            | "xlm-roberta"
            | "xlm-roberta-xl"
            | "camembert"
            | "mpnet"
            | "longformer"
            | "ibert"
            | "data2vec-text"
    );
    if is_shifted { natural(config, "pad_token_id").unwrap_or(1).saturating_add(1) } else { 0 }
}

/// Returns how scores and probabilities are made.
fn activation(config: &Value, task: PoolingTask) -> Activation {
    let named = config
        .get("sentence_transformers")
        .and_then(|own| text_at(own, "activation_fn"))
        .or_else(|| text_at(config, "sbert_ce_default_activation_function"));
    match task {
        PoolingTask::Score if named.is_some_and(|name| name.ends_with("Identity")) => {
            Activation::Identity
        }
        PoolingTask::Score => Activation::Sigmoid,
        _ => match text_at(config, "problem_type").as_deref() {
            Some("multi_label_classification") => Activation::Sigmoid,
            Some("regression") => Activation::Identity,
            _ => Activation::Softmax,
        },
    }
}

fn prompts(sentences: &Value) -> Result<BTreeMap<String, String>, String> {
    let Some(map) = sentences.get("prompts").and_then(Value::as_object) else {
        return Ok(BTreeMap::new());
    };
    map.iter()
        .map(|(name, prompt)| {
            let prompt = prompt.as_str().ok_or_else(|| {
                format!(
                    "'{SENTENCE_TRANSFORMER}' has a prompt '{}' that is not a string",
                    name.escape_debug()
                )
            })?;
            Ok((name.clone(), prompt.to_owned()))
        })
        .collect()
}

/// Returns a special token, which is a string or an object with its `content`.
fn token(object: &Value, key: &str) -> Option<String> {
    text_at(object, key).or_else(|| text_at(object.get(key)?, "content"))
}

fn text_at(object: &Value, key: &str) -> Option<String> {
    object.get(key)?.as_str().map(str::to_owned)
}

/// Returns an integer above 0. Tokenizers without a limit have a floating-point number there.
fn natural(object: &Value, key: &str) -> Option<u64> {
    object.get(key)?.as_u64().filter(|number| *number > 0)
}

#[cfg(test)]
#[path = "tests/text_files.rs"]
mod tests;
