//! Models that make a vector or a score of texts: which models they are.
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
/// The optional input with the number of tokens of a text at most; the rest is cut off (INT32).
pub const TRUNCATE: &str = "truncate_prompt_tokens";
/// The optional input that says whether vectors have the length 1 (BOOL).
pub const NORMALIZE: &str = "normalize";

/// What a model makes of texts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PoolingTask {
    /// A vector of each text.
    Embed,
    /// A score of each pair of texts.
    Score,
}

impl PoolingTask {
    /// Returns the task of a model; `None` if it has another one.
    pub fn of(config: &ModelConfig) -> Option<Self> {
        let has = |specs: &[TensorSpec], name: &str, datatype: DataType| {
            specs.iter().any(|spec| spec.name == name && spec.datatype == datatype)
        };
        let has_text = |name| has(&config.inputs, name, DataType::Bytes);
        if !has_text(TEXT) {
            return None;
        }
        if has(&config.outputs, EMBEDDING, DataType::Fp32) {
            return Some(Self::Embed);
        }
        (has_text(TEXT_PAIR) && has(&config.outputs, SCORE, DataType::Fp32)).then_some(Self::Score)
    }
}
