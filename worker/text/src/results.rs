//! The results of the texts of a request, and the response with them.

use pharos::error::InferError;
use pharos::model::ModelConfig;
use pharos::model::generation::NUM_INPUT_TOKENS;
use pharos::model::pooling::{
    EMBEDDING, ENTITIES, LABEL, PREDICTIONS, PROBABILITIES, PoolingTask, SCORE,
};
use pharos::model::text_files::TextModel;
use pharos::tensor::{DataType, push_bytes_element};
use pharos_backend::{Content, Reply, ReplyOutput, Runtime};

use crate::heads::greatest;

/// The positions of outputs in the configuration, by their names.
pub(crate) struct Places(Vec<String>);

impl Places {
    pub(crate) fn of(config: &ModelConfig) -> Self {
        Self(config.backend_outputs().map(|(name, _)| name.to_owned()).collect())
    }

    /// Returns the position of an output.
    pub(crate) fn named(&self, name: &str) -> Option<usize> {
        self.0.iter().position(|own| own == name)
    }

    /// Returns all positions.
    pub(crate) fn all(&self) -> impl Iterator<Item = usize> + use<> {
        0..self.0.len()
    }
}

/// What a model makes of a text.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Value {
    /// A vector, a score or probabilities.
    Numbers(Vec<f32>),
    /// JSON.
    Text(String),
}

/// The result of a text.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct RowResult {
    pub(crate) value: Value,
    /// The number of its tokens.
    pub(crate) tokens: u32,
}

impl RowResult {
    fn numbers(&self) -> &[f32] {
        match &self.value {
            Value::Numbers(numbers) => numbers,
            Value::Text(_) => &[],
        }
    }

    fn text(&self) -> &str {
        match &self.value {
            Value::Numbers(_) => "",
            Value::Text(text) => text,
        }
    }
}

/// Returns the response with the results of all texts of a request, in their order.
///
/// # Errors
/// There is no memory for an output.
pub(crate) fn reply(
    results: &[Option<RowResult>],
    model: &TextModel,
    places: &Places,
    wanted: &[usize],
    runtime: &Runtime,
) -> Result<Reply, InferError> {
    let results: Vec<&RowResult> = results.iter().flatten().collect();
    let (numbers, texts) = match model.task {
        PoolingTask::Embed => (EMBEDDING, ""),
        PoolingTask::Score => (SCORE, ""),
        PoolingTask::Classify => (PROBABILITIES, ""),
        PoolingTask::ClassifyTokens => ("", ENTITIES),
        PoolingTask::FillMask => ("", PREDICTIONS),
    };
    let mut reply = Reply::default();
    for &output in wanted {
        let Some(name) = places.0.get(output).map(String::as_str) else { continue };
        let (datatype, width, data) = if name == numbers {
            let width = results.first().map_or(1, |result| result.numbers().len());
            let all = results.iter().flat_map(|result| result.numbers());
            (DataType::Fp32, width, all.flat_map(|number| number.to_le_bytes()).collect())
        } else if name == texts {
            (DataType::Bytes, 1, strings(results.iter().map(|result| result.text())))
        } else if name == LABEL {
            let label = |result: &&RowResult| {
                model.labels.get(greatest(result.numbers())).map_or("", String::as_str)
            };
            (DataType::Bytes, 1, strings(results.iter().map(label)))
        } else if name == NUM_INPUT_TOKENS {
            let all = results.iter().flat_map(|result| result.tokens.to_le_bytes());
            (DataType::Uint32, 1, all.collect::<Vec<u8>>())
        } else {
            continue;
        };
        let mut memory = runtime.memory(data.len())?;
        memory.copy_from_slice(&data);
        let shape = [results.len(), width].map(|size| i64::try_from(size).unwrap_or(i64::MAX));
        let content = Content::Memory(memory);
        reply.outputs.push(ReplyOutput { output, datatype, shape: shape.to_vec(), content });
    }
    Ok(reply)
}

fn strings<'t>(texts: impl Iterator<Item = &'t str>) -> Vec<u8> {
    let mut data = Vec::new();
    for text in texts {
        push_bytes_element(&mut data, text.as_bytes());
    }
    data
}
