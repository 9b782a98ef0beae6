//! A batch's outputs into responses: views of the worker's output arena, no copies.

use std::borrow::Cow;
use std::sync::Arc;

use bytes::Bytes;
use pharos::error::InferError;
use pharos::infer::{InferOutput, InferResponse};
use pharos::model::ModelConfig;
use pharos::tensor::{DataType, Tensor, byte_size, element_count};
use pharos::wire::OutputBlock;

use super::{Link, Part};

/// An output of a batch: its block, and where each request's bytes end in it.
struct BatchOutput {
    name: String,
    datatype: DataType,
    shapes: Shapes,
    data: Bytes,
    ends: Vec<usize>,
    /// The requests that it is for; empty for all.
    requests: Vec<u32>,
}

impl BatchOutput {
    /// Where the request at `index` of the batch stands in this output; `None` if it is for others.
    fn place(&self, index: usize) -> Option<usize> {
        if self.requests.is_empty() {
            return Some(index);
        }
        self.requests.iter().position(|request| usize::try_from(*request) == Ok(index))
    }
}

/// What shape each request's part of an output has.
enum Shapes {
    /// That of the whole batch, as clients see it, but for the rows that come first.
    Batch { shape: Vec<i64>, rows_first: bool },
    /// One for each request.
    Each(Vec<Vec<i64>>),
}

impl Shapes {
    /// The shape for the request at `index`, which brings `rows`.
    fn of(&self, index: usize, rows: u64) -> Vec<i64> {
        match self {
            Self::Each(shapes) => shapes.get(index).cloned().unwrap_or_default(),
            Self::Batch { shape, rows_first } => {
                let mut shape = shape.clone();
                if *rows_first && let Some(first) = shape.first_mut() {
                    *first = i64::try_from(rows).unwrap_or(i64::MAX);
                }
                shape
            }
        }
    }
}

impl Link {
    /// The responses of a batch, in batch order.
    ///
    /// # Errors
    /// The worker described outputs that cannot be: outside its arena, of another datatype or size than the
    /// configuration allows. None of the batch's outputs can be trusted then.
    pub(crate) fn scatter(
        &self,
        config: &ModelConfig,
        version: u64,
        parts: &[Arc<Part>],
        blocks: &[OutputBlock],
    ) -> Result<Vec<InferResponse>, InferError> {
        check_apart(config, parts.len(), blocks)?;
        // All are taken before any is judged: whatever is wrong, the blocks go back to the worker.
        let taken: Vec<_> =
            blocks.iter().map(|block| (block, self.arenas.outputs.take(block.offset, block.len))).collect();
        let outputs =
            taken.into_iter().map(|(block, data)| batch_output(config, &part_of(config, parts, block)?, block, data));
        let outputs = outputs.collect::<Result<Vec<_>, _>>()?;
        Ok(parts.iter().enumerate().map(|(index, part)| response(config, version, part, (index, &outputs))).collect())
    }
}

/// The requests that an output is for.
fn part_of<'a>(
    config: &ModelConfig,
    parts: &'a [Arc<Part>],
    block: &OutputBlock,
) -> Result<Cow<'a, [Arc<Part>]>, InferError> {
    if block.requests.is_empty() {
        return Ok(Cow::Borrowed(parts));
    }
    let ascend = block.requests.iter().zip(block.requests.iter().skip(1)).all(|(one, next)| one < next);
    let chosen = block.requests.iter().map(|at| parts.get(usize::try_from(*at).ok()?).cloned());
    let chosen: Option<Vec<_>> = if ascend { chosen.collect() } else { None };
    chosen.map(Cow::Owned).ok_or_else(|| {
        let (model, count) = (&config.name, parts.len());
        let text =
            format!("model '{model}' answered wrongly: an output is for requests {:?} of {count}", block.requests);
        InferError::internal(text)
    })
}

/// Refuses blocks that share bytes, and more of them than there are outputs, for each request at most: together they never
/// pass the arena.
fn check_apart(config: &ModelConfig, requests: usize, blocks: &[OutputBlock]) -> Result<(), InferError> {
    let in_parts = blocks.iter().any(|block| !block.requests.is_empty());
    let most = config.outputs.len().saturating_mul(if in_parts { requests } else { 1 });
    let mut spans: Vec<_> = blocks.iter().map(|b| (b.offset, b.offset.saturating_add(b.len.max(1)))).collect();
    spans.sort_unstable();
    if blocks.len() > most || spans.windows(2).any(|pair| pair[0].1 > pair[1].0) {
        let text = format!("model '{}' answered wrongly: its outputs overlap or are too many", config.name);
        return Err(InferError::internal(text));
    }
    Ok(())
}

fn batch_output(
    config: &ModelConfig,
    parts: &[Arc<Part>],
    block: &OutputBlock,
    data: Option<Bytes>,
) -> Result<BatchOutput, InferError> {
    let wrong = |text: String| InferError::internal(format!("model '{}' answered wrongly: {text}", config.name));
    let data = data.ok_or_else(|| wrong(format!("{} bytes at {} are outside its memory", block.len, block.offset)))?;
    let spec = config.outputs.get(usize::from(block.output));
    let spec = spec.ok_or_else(|| wrong(format!("there is no output {}", block.output)))?;
    let wrong = |text: String| wrong(format!("output '{}' {text}", spec.name));
    if block.datatype != spec.datatype {
        return Err(wrong(format!("is {}, the configuration says {}", block.datatype, spec.datatype)));
    }
    let shape = spec.protocol_shape(&block.shape, config.batches());
    if let Some(source) = config.scattered_by(&spec.name) {
        return scattered(config, parts, (block, source), data).map_err(wrong);
    }
    let batching = config.max_batch_size > 0;
    let rows: u64 = parts.iter().map(|part| part.checked.batch_size).sum();
    if batching && shape.first().and_then(|first| u64::try_from(*first).ok()) != Some(rows) {
        return Err(wrong(format!("has shape {shape:?} for a batch of {rows}")));
    }
    let rows_of: Vec<u64> =
        if batching { parts.iter().map(|part| part.checked.batch_size).collect() } else { vec![1; parts.len()] };
    let ends = match byte_size(block.datatype, &shape) {
        Some(size) if size == block.len => fixed_ends(data.len(), &rows_of),
        Some(size) => return Err(wrong(format!("has {} bytes, its shape {shape:?} needs {size}", block.len))),
        None => {
            let elements = element_count(&shape).ok_or_else(|| wrong(format!("has shape {shape:?}")))?;
            text_ends(&data, elements, &rows_of)
                .ok_or_else(|| wrong(format!("does not hold {elements} BYTES elements")))?
        }
    };
    let shapes = Shapes::Batch { shape, rows_first: batching };
    let (name, requests) = (spec.name.clone(), block.requests.clone());
    Ok(BatchOutput { name, datatype: block.datatype, shapes, data, ends, requests })
}

/// An output that holds the results of all requests one behind the other, each of the shape of its source input.
fn scattered(
    config: &ModelConfig,
    parts: &[Arc<Part>],
    (block, source): (&OutputBlock, usize),
    data: Bytes,
) -> Result<BatchOutput, String> {
    let source = config.inputs.get(source).map_or("", |spec| spec.name.as_str());
    let shape = |part: &Arc<Part>| {
        let input = part.request.inputs.iter().find(|input| input.name == source)?;
        Some(input.tensor.shape.clone())
    };
    let shapes: Option<Vec<Vec<i64>>> = parts.iter().map(shape).collect();
    let shapes = shapes.ok_or_else(|| format!("has the shape of input '{source}', which a request leaves out"))?;
    let counts: Vec<u64> = shapes.iter().map(|shape| element_count(shape).unwrap_or(0)).collect();
    let elements: u64 = counts.iter().sum();
    if element_count(&block.shape) != Some(elements) {
        return Err(format!(
            "has shape {:?}, the inputs '{source}' of its batch have {elements} elements",
            block.shape
        ));
    }
    let ends = match byte_size(block.datatype, &block.shape) {
        Some(size) if size == block.len => fixed_ends(data.len(), &counts),
        Some(size) => return Err(format!("has {} bytes, its shape {:?} needs {size}", block.len, block.shape)),
        None => {
            text_ends(&data, elements, &counts).ok_or_else(|| format!("does not hold {elements} BYTES elements"))?
        }
    };
    let name = config.outputs.get(usize::from(block.output)).map(|spec| spec.name.clone()).unwrap_or_default();
    let requests = block.requests.clone();
    Ok(BatchOutput { name, datatype: block.datatype, shapes: Shapes::Each(shapes), data, ends, requests })
}

/// Where each request's bytes end when all rows are of one size.
fn fixed_ends(len: usize, rows_of: &[u64]) -> Vec<usize> {
    let rows: u64 = rows_of.iter().sum::<u64>().max(1);
    let mut before = 0;
    let ends = rows_of.iter().map(|rows_here| {
        before += rows_here;
        usize::try_from(len as u128 * u128::from(before) / u128::from(rows)).unwrap_or(len)
    });
    ends.collect()
}

/// Where each request's elements end in a serialized BYTES tensor; `None` if it does not hold `elements` whole ones.
fn text_ends(data: &[u8], elements: u64, rows_of: &[u64]) -> Option<Vec<usize>> {
    let per_row = elements / rows_of.iter().sum::<u64>().max(1);
    let mut at: usize = 0;
    let mut ends = Vec::with_capacity(rows_of.len());
    for rows in rows_of {
        for _ in 0..per_row.checked_mul(*rows)? {
            let prefix = data.get(at..at.checked_add(4)?)?.try_into().ok()?;
            at = at.checked_add(4)?.checked_add(u32::from_le_bytes(prefix) as usize)?;
        }
        ends.push(at);
    }
    (at == data.len()).then_some(ends)
}

fn response(
    config: &ModelConfig,
    version: u64,
    part: &Part,
    (index, outputs): (usize, &[BatchOutput]),
) -> InferResponse {
    let view = |(output, index): (&BatchOutput, usize)| {
        let start = index.checked_sub(1).map_or(0, |before| output.ends[before]);
        let shape = output.shapes.of(index, part.checked.batch_size);
        let data = output.data.slice(start..output.ends[index]).into();
        InferOutput { name: output.name.clone(), tensor: Tensor { datatype: output.datatype, shape, data } }
    };
    let find = |name: &str| {
        let named = outputs.iter().filter(|output| output.name == name);
        named.filter_map(|output| Some((output, output.place(index)?))).next()
    };
    let asked = &part.request.outputs;
    let wanted = |name: &str| asked.is_empty() || asked.iter().any(|output| output.name == name);
    // In the model's order, whatever the order in which they were asked for: so does Triton, and clients look by name.
    let chosen = config.outputs.iter().filter(|spec| wanted(&spec.name)).filter_map(|spec| find(&spec.name));
    InferResponse {
        model_name: config.name.clone(),
        model_version: version.to_string(),
        id: part.request.id.clone(),
        parameters: Vec::new(),
        outputs: chosen.map(view).collect(),
        timeline: part.request.timeline,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_are_cut_where_the_requests_are() {
        assert_eq!(fixed_ends(60, &[1, 3, 2]), [10, 40, 60]);
        assert_eq!(fixed_ends(0, &[1, 1]), [0, 0]);
        let data = b"\x01\0\0\0a\0\0\0\0\x02\0\0\0bc";
        assert_eq!(text_ends(data, 3, &[2, 1]), Some(vec![9, 15]));
        assert_eq!(text_ends(data, 2, &[1, 1]), None);
        assert_eq!(text_ends(&data[..10], 3, &[3]), None);
    }
}
