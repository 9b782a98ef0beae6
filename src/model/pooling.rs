//! Models that read texts and generate none: which models they are.
//!
//! The tensors are Pharos's own, the same for every engine.

use super::config::{ModelConfig, TensorSpec};
use crate::tensor::DataType;

/// The input with the texts, one in each row.
pub const TEXT: &str = "text";
/// The input with the second text of each pair.
pub const TEXT_PAIR: &str = "text_pair";
/// The output with the vector of each text (FP32).
pub const EMBEDDING: &str = "embedding";
/// The output with the score of each pair (FP32).
pub const SCORE: &str = "score";
/// The output with the probability of each class (FP32).
pub const PROBABILITIES: &str = "probabilities";
/// The output with the label of the most probable class.
pub const LABEL: &str = "label";
/// The output with the spans of a text that belong to a class, a JSON list of objects with the
/// members `entity_group`, `score`, `word`, `start` and `end`, as transformers has them.
pub const ENTITIES: &str = "entities";
/// The output with the tokens that may stand in place of a mask, a JSON list of objects with the
/// members `score`, `token`, `token_str` and `sequence`, as transformers has them; a list of such
/// lists for a text with several masks.
pub const PREDICTIONS: &str = "predictions";
/// The optional input with the number of tokens of a text at most; the rest is cut off (INT32).
pub const TRUNCATE: &str = "truncate_prompt_tokens";
/// The optional input that says whether vectors have the length 1 (BOOL).
pub const NORMALIZE: &str = "normalize";
/// The optional input with the name of the text that is put before the text.
pub const PROMPT_NAME: &str = "prompt_name";
/// The optional input that says whether scores are the numbers of the graph, without a sigmoid (BOOL).
pub const RAW_SCORES: &str = "raw_scores";
/// The optional input with the number of predictions for each mask (INT32).
pub const TOP_K: &str = "top_k";

/// The parameter of a configuration that says that the first elements of a vector are a vector too
/// (Matryoshka embeddings), with the name of vLLM.
pub const IS_MATRYOSHKA: &str = "is_matryoshka";
/// The parameter with the lengths of such vectors, a JSON list, with the name of vLLM.
pub const MATRYOSHKA_DIMENSIONS: &str = "matryoshka_dimensions";

/// What a model makes of texts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PoolingTask {
    /// A vector of each text.
    Embed,
    /// A score of each pair of texts.
    Score,
    /// The probability of each class.
    Classify,
    /// The spans of the text that belong to a class.
    ClassifyTokens,
    /// The tokens that may stand in place of a mask.
    FillMask,
}

impl PoolingTask {
    const NAMED: [(&str, Self); 5] = [
        ("embed", Self::Embed),
        ("score", Self::Score),
        ("classify", Self::Classify),
        ("token_classify", Self::ClassifyTokens),
        ("fill_mask", Self::FillMask),
    ];

    /// The names of all tasks, which are values of the parameter `task`.
    pub fn names() -> impl Iterator<Item = &'static str> {
        Self::NAMED.iter().map(|(name, _)| *name)
    }

    /// Returns its name.
    pub fn name(self) -> &'static str {
        Self::NAMED.iter().find(|(_, task)| *task == self).map_or("", |(name, _)| name)
    }

    /// Returns the task of this name.
    pub fn named(name: &str) -> Option<Self> {
        Self::NAMED.iter().find(|(known, _)| *known == name).map(|(_, task)| *task)
    }

    /// Returns the task of a model; `None` if it has another one.
    pub fn of(config: &ModelConfig) -> Option<Self> {
        let has = |specs: &[TensorSpec], name: &str, datatype: DataType| {
            specs.iter().any(|spec| spec.name == name && spec.datatype == datatype)
        };
        let has_text = |name| has(&config.inputs, name, DataType::Bytes);
        if !has_text(TEXT) {
            return None;
        }
        let makes = |name, datatype| has(&config.outputs, name, datatype);
        if makes(EMBEDDING, DataType::Fp32) {
            return Some(Self::Embed);
        }
        if has_text(TEXT_PAIR) && makes(SCORE, DataType::Fp32) {
            return Some(Self::Score);
        }
        let others = [
            (PROBABILITIES, DataType::Fp32, Self::Classify),
            (ENTITIES, DataType::Bytes, Self::ClassifyTokens),
            (PREDICTIONS, DataType::Bytes, Self::FillMask),
        ];
        others.into_iter().find(|(name, datatype, _)| makes(name, *datatype)).map(|(.., task)| task)
    }
}
