//! Splits a batch's outputs into responses: views of the worker's output arena, without copies.

use std::borrow::Cow;
use std::fmt;
use std::ops::Range;
use std::sync::Arc;

use bytes::Bytes;
use pharos::batch_split::{fixed_ends, text_ends};
use pharos::data::Data;
use pharos::error::InferError;
use pharos::infer::{InferOutput, InferResponse};
use pharos::model::{ModelConfig, TensorSpec};
use pharos::region::Slice;
use pharos::tensor::{DataType, Tensor, byte_size, element_count};
use pharos::wire::OutputBlock;

use super::{BatchedRequest, Link};
use crate::memory::overlap;

/// An output of a batch: its block, and the ends of each request's bytes in it.
struct BatchOutput<'a> {
    name: &'a str,
    datatype: DataType,
    shapes: Shapes<'a>,
    /// The bytes; empty if the worker has written them into the client's memory.
    data: Bytes,
    in_client_memory: bool,
    ends: Ends,
    /// The requests that the output is for; empty for all.
    requests: &'a [u32],
    mismatch: Option<Mismatch>,
}

impl BatchOutput<'_> {
    /// Returns the position of the request at `index` of the batch in this output; `None` if the
    /// output is not for it.
    fn place(&self, index: usize) -> Option<usize> {
        if self.requests.is_empty() {
            return Some(index);
        }
        self.requests.iter().position(|request| usize::try_from(*request) == Ok(index))
    }
}

/// The responses of a batch.
pub(crate) struct Scattered {
    /// The responses, in batch order.
    pub(crate) responses: Vec<InferResponse>,
    /// Outputs that were passed on although they differ from the configuration.
    pub(crate) mismatches: Vec<Mismatch>,
}

/// The shapes of the requests' parts of an output.
enum Shapes<'a> {
    /// The shape of the whole batch, as clients see it; with `rows_first`, its first dimension is
    /// replaced by the request's rows.
    Batch { shape: Cow<'a, [i64]>, rows_first: bool },
    /// One shape for each request.
    Each(Vec<Vec<i64>>),
}

impl Shapes<'_> {
    /// Returns the shape for the request at `index`, which has `rows` rows.
    fn of(&self, index: usize, rows: u64) -> Vec<i64> {
        match self {
            Self::Each(shapes) => shapes.get(index).cloned().unwrap_or_default(),
            Self::Batch { shape, rows_first } => {
                let mut shape = shape.to_vec();
                if *rows_first && let Some(first) = shape.first_mut() {
                    *first = i64::try_from(rows).unwrap_or(i64::MAX);
                }
                shape
            }
        }
    }
}

/// Where the bytes of the requests end in an output.
enum Ends {
    /// All bytes belong to the only request.
    Whole(usize),
    /// One end for each request.
    Each(Vec<usize>),
}

impl Ends {
    /// Returns the range of the request at `index`.
    fn range(&self, index: usize) -> Range<usize> {
        match self {
            Self::Whole(end) => 0..*end,
            Self::Each(ends) => index.checked_sub(1).map_or(0, |before| ends[before])..ends[index],
        }
    }
}

impl Link {
    /// Returns the responses of a batch, in batch order.
    ///
    /// # Errors
    /// The worker described invalid outputs: outside its arena, of another size than their shape
    /// needs, or, with `strict_output_types`, of another datatype or batch dimension than
    /// configured. None of the batch's outputs can be trusted then.
    pub(crate) fn scatter(
        &self,
        config: &ModelConfig,
        version: u64,
        batched_requests: &[Arc<BatchedRequest>],
        blocks: &[OutputBlock],
    ) -> Result<Scattered, InferError> {
        check_apart(config, batched_requests.len(), blocks)?;
        // All blocks are taken before any is checked, so that all return to the worker even after
        // an error.
        let taken: Vec<_> = blocks.iter().map(|block| (block, self.take(block))).collect();
        let mut outputs = Vec::with_capacity(taken.len());
        let mut mismatches = Vec::new();
        for (block, data) in taken {
            let mut output =
                batch_output(config, &part_of(config, batched_requests, block)?, block, data)?;
            mismatches.extend(output.mismatch.take());
            outputs.push(output);
        }
        let responses = batched_requests
            .iter()
            .enumerate()
            .map(|(index, batched)| response(config, version, batched, index, &outputs))
            .collect();
        Ok(Scattered { responses, mismatches })
    }

    /// Returns the bytes of an output; empty if it is in the client's memory.
    fn take(&self, block: &OutputBlock) -> Option<Bytes> {
        match block.loan {
            _ if block.in_client_memory => Some(Bytes::new()),
            Some(key) => self.passed_on(key, block.offset, block.len),
            None => self.arenas.outputs.take(block.offset, block.len),
        }
    }
}

/// Returns the requests that an output is for.
fn part_of<'a>(
    config: &ModelConfig,
    batched_requests: &'a [Arc<BatchedRequest>],
    block: &OutputBlock,
) -> Result<Cow<'a, [Arc<BatchedRequest>]>, InferError> {
    if block.requests.is_empty() {
        return Ok(Cow::Borrowed(batched_requests));
    }
    let ascend =
        block.requests.iter().zip(block.requests.iter().skip(1)).all(|(one, next)| one < next);
    let chosen: Option<Vec<_>> = block
        .requests
        .iter()
        .map(|at| batched_requests.get(usize::try_from(*at).ok()?).cloned())
        .collect();
    chosen.filter(|_| ascend).map(Cow::Owned).ok_or_else(|| {
        let model = &config.name;
        let count = batched_requests.len();
        let text = format!(
            "model '{model}' gave invalid outputs: one is for requests {:?} of {count}",
            block.requests
        );
        InferError::internal(text)
    })
}

/// Returns an error if blocks overlap, or if there are more blocks than outputs (for partial
/// outputs, than outputs times requests). The blocks' total size is thus limited by the arena.
fn check_apart(
    config: &ModelConfig,
    requests: usize,
    blocks: &[OutputBlock],
) -> Result<(), InferError> {
    let in_parts = blocks.iter().any(|block| !block.requests.is_empty());
    let most = config.outputs.len().saturating_mul(if in_parts { requests } else { 1 });
    let own = blocks.iter().filter(|block| !block.in_client_memory && block.loan.is_none());
    if blocks.len() > most || overlap(own.map(|block| (block.offset, block.len))) {
        let text =
            format!("model '{}' gave invalid outputs: they overlap or are too many", config.name);
        return Err(InferError::internal(text));
    }
    Ok(())
}

/// Says that a block cannot be taken.
fn unavailable(block: &OutputBlock) -> String {
    let OutputBlock { offset, len, .. } = block;
    format!(
        "{len} bytes at {offset} are outside its memory, or clients have left too many of its \
         outputs unread"
    )
}

fn batch_output<'a>(
    config: &'a ModelConfig,
    batched_requests: &[Arc<BatchedRequest>],
    block: &'a OutputBlock,
    data: Option<Bytes>,
) -> Result<BatchOutput<'a>, InferError> {
    let invalid = |text: String| {
        InferError::internal(format!("model '{}' gave invalid outputs: {text}", config.name))
    };
    let data = data.ok_or_else(|| invalid(unavailable(block)))?;
    let Some(spec) = config.outputs.get(usize::from(block.output)) else {
        return Err(invalid(format!("output {} does not exist", block.output)));
    };
    let wrong = |text: String| invalid(format!("output '{}' {text}", spec.name));
    let mut mismatch = None;
    if block.datatype != spec.datatype {
        let found = Mismatch::datatype(spec, block.datatype);
        if config.strict_output_types {
            return Err(wrong(found.to_string()));
        }
        mismatch = Some(found);
    }
    let shape = spec.protocol_shape(&block.shape, config.batches());
    if config.scattered_by(&spec.name).is_none() {
        let rows = batched_requests.iter().map(|batched| batched.checked.batch_size).sum();
        if let Some(found) = Mismatch::rows(config, spec, &shape, rows) {
            // An output for several requests must be split by rows.
            if config.strict_output_types || batched_requests.len() != 1 {
                return Err(wrong(found.to_string()));
            }
            mismatch.get_or_insert(found);
        }
    }
    let output = match (block.in_client_memory, config.scattered_by(&spec.name)) {
        (true, _) => placed(batched_requests, block, shape, &spec.name),
        (false, Some(source)) => scattered(config, batched_requests, block, source, data),
        (false, None) => cut_by_rows(config, batched_requests, block, shape, data),
    };
    let Split { shapes, data, ends } = output.map_err(wrong)?;
    let &OutputBlock { datatype, in_client_memory, ref requests, .. } = block;
    Ok(BatchOutput {
        name: &spec.name,
        datatype,
        shapes,
        data,
        in_client_memory,
        ends,
        requests,
        mismatch,
    })
}

/// The parts of an output for the requests of its batch.
struct Split<'a> {
    shapes: Shapes<'a>,
    data: Bytes,
    ends: Ends,
}

/// Splits an output whose rows belong to consecutive requests.
fn cut_by_rows<'a>(
    config: &ModelConfig,
    batched_requests: &[Arc<BatchedRequest>],
    block: &OutputBlock,
    shape: Cow<'a, [i64]>,
    data: Bytes,
) -> Result<Split<'a>, String> {
    // A single request gets all of it, whatever its shape.
    let batching = config.max_batch_size > 0 && batched_requests.len() != 1;
    let rows_of: Cow<'_, [u64]> = match batched_requests {
        [_] => Cow::Borrowed(&[1]),
        _ if batching => {
            batched_requests.iter().map(|batched| batched.checked.batch_size).collect()
        }
        _ => vec![1; batched_requests.len()].into(),
    };
    let ends = match byte_size(block.datatype, &shape) {
        Some(size) if size == block.len && batched_requests.len() == 1 => Ends::Whole(data.len()),
        Some(size) if size == block.len => Ends::Each(fixed_ends(data.len(), &rows_of)),
        Some(size) => {
            return Err(format!("has {} bytes, but its shape {shape:?} needs {size}", block.len));
        }
        None => {
            let elements = element_count(&shape).ok_or_else(|| format!("has shape {shape:?}"))?;
            let ends = text_ends(&data, elements, &rows_of);
            Ends::Each(ends.ok_or_else(|| format!("does not hold {elements} BYTES elements"))?)
        }
    };
    Ok(Split { shapes: Shapes::Batch { shape, rows_first: batching }, data, ends })
}

/// Checks an output that is in the memory of the only client that it is for.
fn placed<'a>(
    batched_requests: &[Arc<BatchedRequest>],
    block: &OutputBlock,
    shape: Cow<'a, [i64]>,
    name: &str,
) -> Result<Split<'a>, String> {
    let region = batched_requests.iter().filter_map(|batched| region_of(batched, name));
    let room: Vec<u64> = region.map(|slice| slice.len).collect();
    if batched_requests.len() != 1 || room.first().is_none_or(|room| block.len > *room) {
        return Err("is in client memory that was not requested".to_owned());
    }
    let rows = batched_requests.first().map_or(0, |batched| batched.checked.batch_size);
    if byte_size(block.datatype, &shape).is_some_and(|size| size != block.len) {
        return Err(format!("has {} bytes and shape {shape:?} for a batch of {rows}", block.len));
    }
    let ends = Ends::Whole(usize::try_from(block.len).unwrap_or(usize::MAX));
    Ok(Split { shapes: Shapes::Batch { shape, rows_first: false }, data: Bytes::new(), ends })
}

/// Returns the client memory that a request has for an output.
fn region_of<'a>(batched: &'a BatchedRequest, output: &str) -> Option<&'a Slice> {
    let wanted = batched.request.outputs.iter().find(|wanted| wanted.name == output);
    wanted.and_then(|wanted| wanted.region.as_ref())
}

/// Splits an output that contains the consecutive results of all requests, each with the shape of
/// its source input.
fn scattered(
    config: &ModelConfig,
    batched_requests: &[Arc<BatchedRequest>],
    block: &OutputBlock,
    source: usize,
    data: Bytes,
) -> Result<Split<'static>, String> {
    let source = config.inputs.get(source).map_or("", |spec| spec.name.as_str());
    let mut shapes = Vec::with_capacity(batched_requests.len());
    for batched in batched_requests {
        let Some(input) = batched.request.inputs.iter().find(|input| input.name == source) else {
            return Err(format!("has the shape of input '{source}', which a request omits"));
        };
        shapes.push(input.tensor.shape.clone());
    }
    let counts: Vec<u64> = shapes.iter().map(|shape| element_count(shape).unwrap_or(0)).collect();
    let elements: u64 = counts.iter().sum();
    if element_count(&block.shape) != Some(elements) {
        return Err(format!(
            "has shape {:?}, but the inputs '{source}' of its batch have {elements} elements",
            block.shape
        ));
    }
    let ends = match byte_size(block.datatype, &block.shape) {
        Some(size) if size == block.len => fixed_ends(data.len(), &counts),
        Some(size) => {
            return Err(format!(
                "has {} bytes, but its shape {:?} needs {size}",
                block.len, block.shape
            ));
        }
        None => text_ends(&data, elements, &counts)
            .ok_or_else(|| format!("does not hold {elements} BYTES elements"))?,
    };
    Ok(Split { shapes: Shapes::Each(shapes), data, ends: Ends::Each(ends) })
}

/// Returns the response to the request at `index` of the batch.
fn response(
    config: &ModelConfig,
    version: u64,
    batched: &BatchedRequest,
    index: usize,
    outputs: &[BatchOutput<'_>],
) -> InferResponse {
    let asked = &batched.request.outputs;
    // In the order of the worker, as in Triton: neither the order of the request nor the order of
    // the configuration matters.
    let mut chosen: Vec<InferOutput> = Vec::with_capacity(asked.len());
    for output in outputs {
        if !asked.is_empty() && asked.iter().all(|wanted| wanted.name != output.name) {
            continue;
        }
        let Some(place) = output.place(index) else { continue };
        // Keep the first of several outputs with one name.
        if chosen.iter().any(|earlier| earlier.name == output.name) {
            continue;
        }
        let range = output.ends.range(place);
        let shape = output.shapes.of(place, batched.checked.batch_size);
        let data = match region_of(batched, output.name) {
            Some(slice) => slice.first(range.len() as u64).into(),
            None if output.in_client_memory => Data::new(),
            None => output.data.slice(range).into(),
        };
        let tensor = Tensor { datatype: output.datatype, shape, data };
        chosen.push(InferOutput { name: output.name.to_owned(), tensor });
    }
    InferResponse {
        model_name: config.name.clone(),
        model_version: version.to_string(),
        id: batched.request.id.clone(),
        parameters: Vec::new(),
        outputs: chosen,
        timeline: batched.request.timeline,
    }
}

/// A difference between an output and the model's configuration.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Mismatch {
    /// The output's name.
    pub(crate) output: String,
    what: MismatchKind,
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum MismatchKind {
    Datatype { configured: DataType, given: DataType },
    Rows { shape: Vec<i64>, rows: u64 },
}

impl Mismatch {
    /// Creates the mismatch of an output with another datatype.
    fn datatype(spec: &TensorSpec, given: DataType) -> Self {
        Self {
            output: spec.name.clone(),
            what: MismatchKind::Datatype { configured: spec.datatype, given },
        }
    }

    /// Checks that the first dimension of an output is the number of rows of its requests; `None`
    /// if it is, or the model does not batch.
    fn rows(config: &ModelConfig, spec: &TensorSpec, shape: &[i64], rows: u64) -> Option<Self> {
        let fits = shape.first().and_then(|first| u64::try_from(*first).ok()) == Some(rows);
        let mismatch = config.batches() && !fits;
        mismatch.then(|| Self {
            output: spec.name.clone(),
            what: MismatchKind::Rows { shape: shape.to_vec(), rows },
        })
    }

    /// Returns the change that makes model and configuration agree.
    pub(crate) fn fix(&self) -> String {
        match &self.what {
            MismatchKind::Datatype { configured, given } => {
                format!(
                    "return {configured} from the model, or set data_type: TYPE_{} in config.pbtxt",
                    config_name(*given)
                )
            }
            MismatchKind::Rows { rows, .. } => {
                format!(
                    "return {rows} as the first dimension, or set max_batch_size: 0 in \
                     config.pbtxt"
                )
            }
        }
    }
}

impl fmt::Display for Mismatch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.what {
            MismatchKind::Datatype { configured, given } => {
                write!(f, "is {given}, but its configured datatype is {configured}")
            }
            MismatchKind::Rows { shape, rows } => {
                write!(f, "has shape {shape:?} for a batch of {rows}")
            }
        }
    }
}

/// Returns the name of a datatype in a configuration, without `TYPE_`.
fn config_name(datatype: DataType) -> String {
    match datatype {
        DataType::Bytes => "STRING".to_owned(),
        other => other.to_string(),
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use pharos::infer::{InferRequest, RequestedOutput};
    use pharos::model::{Checked, Completion, Draft};

    use super::*;

    /// Returns an output with this data, for the requests that its block names.
    fn output<'a>(
        config: &'a ModelConfig,
        batched_requests: &[Arc<BatchedRequest>],
        block: &'a OutputBlock,
        data: &'static [u8],
    ) -> Result<BatchOutput<'a>, InferError> {
        let own = part_of(config, batched_requests, block)?;
        batch_output(config, &own, block, Some(Bytes::from_static(data)))
    }

    #[test]
    fn partial_outputs_go_to_their_requests() {
        let source =
            "backend: 'b' output { name: 'Y' data_type: TYPE_INT8 dims: [-1] } max_batch_size: 4";
        let completion = Completion { directory: "m", ..Completion::default() };
        let config = Draft::from_text(source, "f").unwrap().complete(&completion).unwrap();
        let batched = |id: &str| {
            let request = InferRequest { id: id.to_owned(), ..InferRequest::default() };
            Arc::new(BatchedRequest {
                request,
                checked: Checked { batch_size: 1, shape_key: 0 },
                padding: false,
            })
        };
        let batched_requests = ["a", "b", "c"].map(batched);
        let block = |requests: &[u32], shape: &[i64], offset: u64| OutputBlock {
            output: 0,
            requests: requests.to_vec(),
            datatype: DataType::Int8,
            shape: shape.to_vec(),
            offset,
            len: element_count(shape).unwrap(),
            in_client_memory: false,
            loan: None,
        };
        let made = |block, data| output(&config, &batched_requests, block, data).unwrap();
        let blocks = [block(&[0, 2], &[2, 2], 0), block(&[1], &[1, 3], 64)];
        let outputs = [made(&blocks[0], &[1, 2, 3, 4]), made(&blocks[1], &[5, 6, 7])];
        let answers = batched_requests
            .iter()
            .enumerate()
            .map(|(at, batched)| response(&config, 1, batched, at, &outputs));
        let answers: Vec<_> =
            answers.map(|answer| (answer.id, answer.outputs[0].tensor.clone())).collect();
        let expected = [
            ("a", vec![1, 2], vec![1u8, 2]),
            ("b", vec![1, 3], vec![5, 6, 7]),
            ("c", vec![1, 2], vec![3, 4]),
        ];
        for ((id, tensor), (expected, shape, data)) in answers.into_iter().zip(expected) {
            assert_eq!(
                (id.as_str(), &tensor.shape, &tensor.data),
                (expected, &shape, &data.into())
            );
        }
        // Invalid: more blocks than responses can need, and unknown or repeated requests.
        assert!(check_apart(&config, 3, &blocks).is_ok());
        let many: Vec<_> = (0..4).map(|at| block(&[0], &[1, 1], at * 64)).collect();
        assert!(check_apart(&config, 3, &many).is_err());
        assert!(
            check_apart(&config, 3, &[block(&[], &[3, 1], 0), block(&[], &[3, 1], 64)]).is_err()
        );
        for requests in [&[3][..], &[0, 0], &[1, 0], &[u32::MAX]] {
            assert!(
                part_of(&config, &batched_requests, &block(requests, &[1, 1], 0)).is_err(),
                "{requests:?}"
            );
        }
    }

    /// Returns the names of the outputs in the response to each request. `requests` has the
    /// requested outputs of each; `blocks` are an output of the configuration [A, B, M, Z], the
    /// requests that it is for, and whether it is in client memory.
    fn orders(requests: &[&[&str]], blocks: &[(u16, &[u32], bool)]) -> Vec<String> {
        let spec = |name| format!("output {{ name: '{name}' data_type: TYPE_INT8 dims: [1] }} ");
        let source = ["A", "B", "M", "Z"].map(spec).concat() + "backend: 'b' max_batch_size: 4";
        let completion = Completion { directory: "m", ..Completion::default() };
        let config = Draft::from_text(&source, "f").unwrap().complete(&completion).unwrap();
        let batched_requests = requests.iter().map(|names| {
            let region = |name: &str| (name == "M").then(|| Slice::new("r".to_owned(), 0, 1));
            let wanted = |name: &&str| RequestedOutput {
                name: (*name).to_owned(),
                region: region(name),
                ..Default::default()
            };
            let request = InferRequest {
                outputs: names.iter().map(wanted).collect(),
                ..InferRequest::default()
            };
            Arc::new(BatchedRequest {
                request,
                checked: Checked { batch_size: 1, shape_key: 0 },
                padding: false,
            })
        });
        let batched_requests: Vec<Arc<BatchedRequest>> = batched_requests.collect();
        let blocks: Vec<OutputBlock> = blocks
            .iter()
            .map(|&(output, requests, in_client_memory)| {
                let rows =
                    if requests.is_empty() { batched_requests.len() } else { requests.len() };
                let requests = requests.to_vec();
                let shape = vec![rows as i64, 1];
                let len = rows as u64;
                let datatype = DataType::Int8;
                let offset = 0;
                let loan = None;
                OutputBlock {
                    output,
                    requests,
                    datatype,
                    shape,
                    offset,
                    len,
                    in_client_memory,
                    loan,
                }
            })
            .collect();
        let data = |block: &OutputBlock| {
            if block.in_client_memory { &[][..] } else { &[0; 4][..block.shape[0] as usize] }
        };
        let outputs: Vec<_> = blocks
            .iter()
            .map(|block| output(&config, &batched_requests, block, data(block)).unwrap())
            .collect();
        let names = |(index, batched): (usize, &Arc<BatchedRequest>)| {
            let answer = response(&config, 1, batched, index, &outputs);
            answer.outputs.into_iter().map(|output| output.name).collect::<String>()
        };
        batched_requests.iter().enumerate().map(names).collect()
    }

    #[test]
    fn outputs_keep_the_order_of_the_worker() {
        const ALL: &[u32] = &[];
        let whole = [(3, ALL, false), (0, ALL, false), (2, ALL, false), (1, ALL, false)];
        // All outputs, some of them in whatever order, and requests of one batch that differ in
        // this.
        assert_eq!(orders(&[&[]], &whole), ["ZAMB"]);
        assert_eq!(orders(&[&["A", "Z"]], &whole), ["ZA"]);
        assert_eq!(orders(&[&["B", "A", "Z"], &[], &["M"]], &whole), ["ZAB", "ZAMB", "M"]);
        // One reply for each request.
        let one = &[0][..];
        let two = &[1][..];
        let replies =
            [(3, one, false), (0, one, false), (0, two, false), (2, two, true), (3, two, false)];
        assert_eq!(orders(&[&[], &["Z", "M", "A"]], &replies), ["ZA", "AMZ"]);
        // Rows of one output in client memory and in the arena.
        let pieces = [(3, ALL, false), (2, two, false), (2, one, true), (0, ALL, false)];
        assert_eq!(orders(&[&["A", "M", "Z"], &[]], &pieces), ["ZMA", "ZMA"]);
        // An output that occurs twice appears once.
        assert_eq!(orders(&[&[]], &[(1, ALL, false), (0, ALL, false), (1, ALL, false)]), ["BA"]);
    }

    #[test]
    fn splits_outputs_between_client_memory_and_the_arena() {
        let source =
            "backend: 'b' output { name: 'Y' data_type: TYPE_INT8 dims: [2] } max_batch_size: 4";
        let completion = Completion { directory: "m", ..Completion::default() };
        let config = Draft::from_text(source, "f").unwrap().complete(&completion).unwrap();
        let batched = |(batch_size, region): (u64, Option<Slice>)| {
            let wanted =
                RequestedOutput { name: "Y".to_owned(), region, ..RequestedOutput::default() };
            let request = InferRequest { outputs: vec![wanted], ..InferRequest::default() };
            Arc::new(BatchedRequest {
                request,
                checked: Checked { batch_size, shape_key: 0 },
                padding: false,
            })
        };
        let region = |len| Some(Slice::new("r".to_owned(), 8, len));
        let batched_requests = [(1, None), (2, region(9)), (1, None)].map(batched);
        let block = |requests: &[u32], rows: i64, in_client_memory: bool| OutputBlock {
            output: 0,
            requests: requests.to_vec(),
            datatype: DataType::Int8,
            shape: vec![rows, 2],
            offset: 0,
            len: rows.unsigned_abs() * 2,
            in_client_memory,
            loan: None,
        };
        let made = |block, data| output(&config, &batched_requests, block, data).unwrap();
        let blocks = [block(&[1], 2, true), block(&[0, 2], 2, false)];
        let outputs = [made(&blocks[0], &[]), made(&blocks[1], &[1, 2, 3, 4])];
        let tensor = |at: usize| {
            let answer = response(&config, 1, &batched_requests[at], at, &outputs);
            (answer.outputs[0].tensor.shape.clone(), answer.outputs[0].tensor.data.clone())
        };
        assert_eq!(tensor(0), (vec![1, 2], vec![1u8, 2].into()));
        assert_eq!(tensor(1), (vec![2, 2], Slice::new("r".to_owned(), 8, 4).into()));
        assert_eq!(tensor(2), (vec![1, 2], vec![3u8, 4].into()));
        // Invalid: in client memory that was not requested, of several clients, or beyond its
        // range.
        for (requests, rows) in [(&[0][..], 1), (&[0, 1], 3), (&[1], 5)] {
            assert!(
                output(&config, &batched_requests, &block(requests, rows, true), &[]).is_err(),
                "{requests:?} {rows}"
            );
        }
    }
}
