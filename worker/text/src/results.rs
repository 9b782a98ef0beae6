//! The results of the rows of a batch, and the outputs that they fill.

use pharos::error::InferError;
use pharos::model::ModelConfig;
use pharos::model::generation::NUM_INPUT_TOKENS;
use pharos::model::pooling::{
    EMBEDDING, ENTITIES, LABEL, PREDICTIONS, PROBABILITIES, PoolingTask, SCORE,
};
use pharos::model::text_files::TextModel;
use pharos::tensor::{DataType, push_bytes_element};
use pharos_backend::{Batch, Outputs};

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
}

/// What a model makes of a text.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Value {
    /// A vector, a score or probabilities.
    Numbers(Vec<f32>),
    /// JSON.
    Text(String),
}

/// The result of a row.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct RowResult {
    pub(crate) value: Value,
    /// The number of tokens of its texts.
    pub(crate) tokens: u32,
}

/// Writes the results of a batch; a row without a result gets zeros or empty strings.
///
/// # Errors
/// There is no memory for an output.
pub(crate) fn write(
    results: &[Option<RowResult>],
    model: &TextModel,
    places: &Places,
    batch: &Batch<'_>,
    outputs: &mut Outputs<'_>,
) -> Result<(), InferError> {
    let wanted = |name: &str| places.named(name).filter(|position| batch.wants(*position));
    let rows = i64::try_from(results.len()).unwrap_or(i64::MAX);
    let values = || results.iter().map(|result| result.as_ref().map(|result| &result.value));
    let (numbers, texts) = match model.task {
        PoolingTask::Embed => (Some(EMBEDDING), None),
        PoolingTask::Score => (Some(SCORE), None),
        PoolingTask::Classify => (Some(PROBABILITIES), None),
        PoolingTask::ClassifyTokens => (None, Some(ENTITIES)),
        PoolingTask::FillMask => (None, Some(PREDICTIONS)),
    };
    if let Some(position) = numbers.and_then(wanted) {
        let widths = values().flatten().map(|value| match value {
            Value::Numbers(numbers) => numbers.len(),
            Value::Text(_) => 0,
        });
        let width = widths.max().unwrap_or(1);
        let shape = [rows, i64::try_from(width).unwrap_or(i64::MAX)];
        let memory = outputs.allocate_fixed(position, DataType::Fp32, &shape)?;
        memory.fill(0);
        for (memory, value) in memory.chunks_exact_mut(width * 4).zip(values()) {
            let Some(Value::Numbers(numbers)) = value else { continue };
            for (bytes, number) in memory.as_chunks_mut().0.iter_mut().zip(numbers) {
                *bytes = number.to_le_bytes();
            }
        }
    }
    if let Some(position) = wanted(LABEL) {
        let labels = values().map(|value| match value {
            Some(Value::Numbers(numbers)) => {
                model.labels.get(greatest(numbers)).map_or("", String::as_str)
            }
            _ => "",
        });
        write_texts(position, labels, rows, outputs)?;
    }
    if let Some(position) = texts.and_then(wanted) {
        let texts = values().map(|value| match value {
            Some(Value::Text(text)) => text.as_str(),
            _ => "",
        });
        write_texts(position, texts, rows, outputs)?;
    }
    if let Some(position) = wanted(NUM_INPUT_TOKENS) {
        let memory = outputs.allocate_fixed(position, DataType::Uint32, &[rows, 1])?;
        for (bytes, result) in memory.as_chunks_mut().0.iter_mut().zip(results) {
            *bytes = result.as_ref().map_or(0, |result| result.tokens).to_le_bytes();
        }
    }
    // The outputs have the order of this function.
    outputs.sort();
    Ok(())
}

fn write_texts<'t>(
    position: usize,
    texts: impl Iterator<Item = &'t str>,
    rows: i64,
    outputs: &mut Outputs<'_>,
) -> Result<(), InferError> {
    let mut data = Vec::new();
    for text in texts {
        push_bytes_element(&mut data, text.as_bytes());
    }
    outputs.allocate(position, DataType::Bytes, &[rows, 1], data.len())?.copy_from_slice(&data);
    Ok(())
}
