//! The contract of models that read texts: how texts become tensors, and how tensors become vectors,
//! scores, probabilities of classes, or JSON.
//!
//! [`pharos::model::pooling`] has the names of the tensors. A model of Triton's vllm_backend that embeds
//! has the input `embedding_request` in their place: JSON, whose answer is a list in `text_output`.

use std::collections::BTreeMap;
use std::future::poll_fn;
use std::task::{Context, Poll};

use pharos::error::InferError;
use pharos::infer::{InferInput, InferRequest, InferResponse};
use pharos::model::ModelConfig;
use pharos::model::generation::{PROMPT_TOKEN_IDS, TEXT_OUTPUT, token_counts};
use pharos::model::pooling::{
    EMBEDDING, ENTITIES, IS_MATRYOSHKA, MATRYOSHKA_DIMENSIONS, NORMALIZE, PREDICTIONS,
    PROBABILITIES, PROMPT_NAME, PoolingTask, RAW_SCORES, SCORE, TEXT, TEXT_PAIR, TOP_K, TRUNCATE,
};
use pharos::service::{Responses, Streamed};
use pharos::tensor::{DataType, Tensor};
use pharos::timeline::Timeline;
use pharos_edge::Call;
use serde_json::json;

use crate::answer::Failure;
use crate::contract::{ADD_SPECIAL_TOKENS, strings, violation};
use crate::edge::{Edge, on_a_thread_if};
use crate::error::ApiError;
use crate::prompt::Prompt;
use crate::tensors::{self, no_tensor};

/// The input of a model of Triton's vllm_backend that embeds.
const EMBEDDING_REQUEST: &str = "embedding_request";
/// The inferences of a request that run at the same time. Others wait, so that one request with many
/// texts does not fill the queue of a model.
const MAX_RUNNING: usize = 64;
/// Responses of more bytes than this are read on a blocking thread.
const LONG: usize = 256 << 10;

/// A model that reads texts.
#[derive(Clone, Debug)]
pub(crate) struct PoolingModel {
    pub(crate) name: String,
    pub(crate) task: PoolingTask,
    is_vllm: bool,
    inputs: BTreeMap<String, DataType>,
    /// The most texts of an inference; 0 for a model without batches.
    max_batch_size: usize,
    dimensions: Dimensions,
}

/// The lengths that the vectors of a model can have.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Dimensions {
    Own,
    Any,
    Listed(Vec<usize>),
}

/// A text, or a pair of texts.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Item<'a> {
    pub(crate) text: &'a Prompt,
    pub(crate) pair: Option<&'a str>,
    /// The name of the text that the model puts before the text; the same for all items of a request.
    pub(crate) prompt_name: Option<&'a str>,
}

impl<'a> Item<'a> {
    /// Returns a text.
    pub(crate) fn of(text: &'a Prompt) -> Self {
        Self { text, pair: None, prompt_name: None }
    }
}

/// What applies to all texts of a request.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct PoolingOptions {
    /// The most tokens of a text, or -1 for the context of the model; `None` refuses longer ones.
    pub(crate) truncate: Option<i32>,
    /// Whether vectors get the length 1; `None` for the default of the model.
    pub(crate) normalize: Option<bool>,
    /// Whether the model adds the special tokens that it expects; `None` for its default.
    pub(crate) add_special_tokens: Option<bool>,
    /// The number of elements of a vector.
    pub(crate) dimensions: Option<usize>,
    /// Whether scores are the numbers of the graph, without the function that makes probabilities;
    /// `None` for the default of the model.
    pub(crate) raw_scores: Option<bool>,
    /// The predictions for each mask.
    pub(crate) top_k: Option<i32>,
}

/// What a model has made of texts.
#[derive(Debug, Default)]
pub(crate) struct Pooled {
    /// One for each text: a vector, a score, or probabilities.
    pub(crate) values: Vec<Vec<f32>>,
    /// The tokens of all texts; `None` if the model does not count them.
    pub(crate) tokens: Option<u64>,
    pub(crate) timeline: Timeline,
}

impl PoolingModel {
    /// Returns a model.
    ///
    /// # Errors
    /// The model does not make vectors or scores, or its parameters are invalid.
    pub(crate) fn of(config: &ModelConfig) -> Result<Self, ApiError> {
        let is_vllm = config
            .inputs
            .iter()
            .any(|spec| spec.name == EMBEDDING_REQUEST && spec.datatype == DataType::Bytes);
        let own = PoolingTask::of(config);
        let task = own.or(is_vllm.then_some(PoolingTask::Embed)).ok_or_else(|| ApiError {
            code: Some("model_not_supported"),
            ..ApiError::invalid_field(
                "model",
                format!(
                    "the model '{}' makes no embeddings, scores or classes of texts: it needs the \
                     input '{TEXT}' and the output '{EMBEDDING}' or '{PROBABILITIES}', or '{TEXT}', \
                     '{TEXT_PAIR}' and '{SCORE}'",
                    config.name
                ),
            )
        })?;
        let parameter = |name: &str| config.parameters.get(name).map(String::as_str);
        let dimensions = match (parameter(MATRYOSHKA_DIMENSIONS), parameter(IS_MATRYOSHKA)) {
            (Some(list), _) => {
                let list: Option<Vec<usize>> = list
                    .trim_matches(['[', ']'])
                    .split(',')
                    .map(|number| number.trim().parse().ok().filter(|number| *number > 0))
                    .collect();
                Dimensions::Listed(list.ok_or_else(|| {
                    ApiError::internal(format!(
                        "the model '{}' cannot be served: its parameter '{MATRYOSHKA_DIMENSIONS}' must be a \
                         list of integers above 0",
                        config.name
                    ))
                })?)
            }
            (None, Some("true")) => Dimensions::Any,
            _ => Dimensions::Own,
        };
        Ok(Self {
            name: config.name.clone(),
            task,
            is_vllm: own.is_none(),
            inputs: config.inputs.iter().map(|spec| (spec.name.clone(), spec.datatype)).collect(),
            max_batch_size: config.max_batch_size as usize,
            dimensions,
        })
    }

    /// Checks that the model has a task.
    ///
    /// # Errors
    /// It has another one: the text names the path for it.
    pub(crate) fn expect(&self, wanted: PoolingTask) -> Result<(), ApiError> {
        if self.task == wanted {
            return Ok(());
        }
        let (what, instead) = match self.task {
            PoolingTask::Embed => ("makes embeddings", "/v1/embeddings"),
            PoolingTask::Score => ("makes scores of pairs of texts", "/v1/rerank"),
            PoolingTask::Classify => ("classifies texts", "/v1/classify"),
            PoolingTask::ClassifyTokens => ("finds spans in texts", "/predict"),
            PoolingTask::FillMask => ("finds tokens for masks", "/predict"),
        };
        let text = format!("the model '{}' {what}: see {instead}", self.name);
        Err(ApiError::invalid_field("model", text))
    }

    /// Checks that vectors can have this many elements.
    ///
    /// # Errors
    /// The model was not trained for it.
    pub(crate) fn check_dimensions(&self, wanted: usize) -> Result<(), ApiError> {
        let allowed = match &self.dimensions {
            Dimensions::Any => return Ok(()),
            Dimensions::Listed(list) if list.contains(&wanted) => return Ok(()),
            Dimensions::Listed(list) => format!("allowed are {list:?}"),
            Dimensions::Own => format!(
                "the model was not trained for shorter vectors, or its configuration lacks the \
                 parameter '{MATRYOSHKA_DIMENSIONS}' or '{IS_MATRYOSHKA}'"
            ),
        };
        let message = format!(
            "dimensions {wanted} is not available with the model '{}': {allowed}",
            self.name
        );
        Err(ApiError::invalid_field("dimensions", message))
    }

    /// Makes vectors, scores or probabilities of texts.
    pub(crate) async fn run(
        &self,
        edge: &Edge,
        call: &mut Call,
        items: &[Item<'_>],
        options: PoolingOptions,
    ) -> Result<Pooled, Failure> {
        if let Some(dimensions) = options.dimensions {
            self.check_dimensions(dimensions)?;
        }
        let (responses, rows) = self.infer(edge, call, items, options).await?;
        let bytes: usize = responses.iter().map(response_bytes).sum();
        let model = self.clone();
        on_a_thread_if(bytes > LONG, move || model.pool(&responses, &rows, options)).await?
    }

    /// Makes JSON of texts: spans, or predictions.
    pub(crate) async fn run_to_json(
        &self,
        edge: &Edge,
        call: &mut Call,
        items: &[Item<'_>],
        options: PoolingOptions,
    ) -> Result<Vec<String>, Failure> {
        let name = self.output();
        let (responses, _) = self.infer(edge, call, items, options).await?;
        let mut found = Vec::with_capacity(items.len());
        for response in &responses {
            call.set_times(&response.timeline);
            let output = response.outputs.iter().find(|output| output.name == name);
            found.extend(strings(name, &output.ok_or_else(|| violation(name))?.tensor)?);
        }
        if found.len() != items.len() {
            return Err(violation(name).into());
        }
        Ok(found)
    }

    /// Runs the inferences of texts. Returns the responses, and the number of texts of each.
    async fn infer(
        &self,
        edge: &Edge,
        call: &mut Call,
        items: &[Item<'_>],
        options: PoolingOptions,
    ) -> Result<(Vec<InferResponse>, Vec<usize>), Failure> {
        let has_tokens = items.iter().any(|item| item.text.tokens().is_some());
        // Lists of tokens have different lengths.
        let of_one = if has_tokens || self.is_vllm { 1 } else { self.max_batch_size.max(1) };
        let batches: Vec<&[Item<'_>]> = items
            // The pair of a text is a tensor that all texts of an inference have, or none.
            .chunk_by(|one, next| one.pair.is_some() == next.pair.is_some())
            .flat_map(|alike| alike.chunks(of_one))
            .collect();
        let mut requests = Vec::with_capacity(batches.len());
        for batch in &batches {
            let mut request = InferRequest {
                model_name: self.name.clone(),
                inputs: self.inputs(batch, options)?,
                ..InferRequest::default()
            };
            call.describe_client_in(&mut request, edge.service.now());
            requests.push(request);
        }
        let mut running = Running { edge, waiting: requests.into_iter(), runs: Vec::new() };
        let responses = poll_fn(|cx| running.poll(cx)).await;
        let responses =
            responses.map_err(|error| Failure::of_model(error, self.text_field(), None))?;
        Ok((responses, batches.into_iter().map(<[Item<'_>]>::len).collect()))
    }

    /// Reads responses, each with a number of texts.
    fn pool(
        &self,
        responses: &[InferResponse],
        rows: &[usize],
        options: PoolingOptions,
    ) -> Result<Pooled, Failure> {
        let mut pooled = Pooled { tokens: Some(0), ..Pooled::default() };
        for (response, rows) in responses.iter().zip(rows) {
            pooled.timeline = response.timeline;
            let prompt = token_counts(&response.outputs, *rows).prompt;
            pooled.tokens = pooled.tokens.zip(prompt).map(|(all, own)| all.saturating_add(own));
            self.read(response, *rows, &mut pooled.values)?;
        }
        if let Some(dimensions) = options.dimensions {
            for vector in &mut pooled.values {
                shorten(vector, dimensions, options.normalize.unwrap_or(true))?;
            }
        }
        Ok(pooled)
    }

    fn inputs(
        &self,
        items: &[Item<'_>],
        options: PoolingOptions,
    ) -> Result<Vec<InferInput>, ApiError> {
        let rows = items.len();
        if self.is_vllm {
            let Some(item) = items.first() else { return Ok(Vec::new()) };
            let input = match item.text {
                Prompt::Text(text) => json!(text),
                Prompt::Tokens(tokens) => json!(tokens),
            };
            let mut request = json!({"input": input, "pooling_params": {}});
            if let Some(truncate) = options.truncate {
                request["pooling_params"]["truncate_prompt_tokens"] = truncate.into();
            }
            return Ok(vec![
                self.strings(EMBEDDING_REQUEST, [request.to_string().as_str()].into_iter())?,
            ]);
        }
        let mut inputs = vec![self.strings(TEXT, items.iter().map(|item| item.text.text()))?];
        if let Some(tokens) = items.first().and_then(|item| item.text.tokens()) {
            let datatype = self.demand(PROMPT_TOKEN_IDS, "input as token ids")?;
            let data = tensors::tokens(datatype, tokens);
            inputs.push(self.input(PROMPT_TOKEN_IDS, datatype, 1, tokens.len(), data));
        }
        if items.iter().any(|item| item.pair.is_some()) {
            let pairs = items.iter().map(|item| item.pair.unwrap_or_default());
            inputs.push(self.strings(TEXT_PAIR, pairs)?);
        }
        if let Some(prompt) = items.iter().find_map(|item| item.prompt_name) {
            self.demand(PROMPT_NAME, PROMPT_NAME)?;
            inputs.push(self.strings(PROMPT_NAME, std::iter::repeat_n(prompt, rows))?);
        }
        for (name, number) in [(TRUNCATE, options.truncate), (TOP_K, options.top_k)] {
            let Some(number) = number else { continue };
            self.demand(name, name)?;
            let data = number.to_le_bytes().repeat(rows);
            inputs.push(self.input(name, DataType::Int32, rows, 1, data));
        }
        let flags = [
            (NORMALIZE, options.normalize, None),
            (ADD_SPECIAL_TOKENS, options.add_special_tokens, Some(true)),
            (RAW_SCORES, options.raw_scores, Some(false)),
        ];
        for (name, flag, default) in flags {
            let Some(flag) = flag.filter(|flag| Some(*flag) != default) else { continue };
            self.demand(name, name)?;
            inputs.push(self.input(name, DataType::Bool, rows, 1, vec![flag.into(); rows]));
        }
        Ok(inputs)
    }

    /// Returns the field of clients with the texts.
    fn text_field(&self) -> &'static str {
        match self.task {
            PoolingTask::Score => "documents",
            _ => "input",
        }
    }

    /// Returns the output with the results.
    fn output(&self) -> &'static str {
        match self.task {
            _ if self.is_vllm => TEXT_OUTPUT,
            PoolingTask::Embed => EMBEDDING,
            PoolingTask::Score => SCORE,
            PoolingTask::Classify => PROBABILITIES,
            PoolingTask::ClassifyTokens => ENTITIES,
            PoolingTask::FillMask => PREDICTIONS,
        }
    }

    /// Returns whether the model can give scores without the function that makes probabilities.
    pub(crate) fn has_raw_scores(&self) -> bool {
        self.inputs.contains_key(RAW_SCORES)
    }

    /// Returns the datatype of the tensor for something that the client wants.
    fn demand(&self, tensor: &str, field: &str) -> Result<DataType, ApiError> {
        self.inputs.get(tensor).copied().ok_or_else(|| no_tensor(&self.name, field, tensor))
    }

    fn strings<'t>(
        &self,
        name: &str,
        texts: impl ExactSizeIterator<Item = &'t str>,
    ) -> Result<InferInput, ApiError> {
        let rows = texts.len();
        Ok(self.input(name, DataType::Bytes, rows, 1, tensors::texts(texts)?))
    }

    /// Returns an input with rows of this many elements.
    fn input(
        &self,
        name: &str,
        datatype: DataType,
        rows: usize,
        elements: usize,
        data: Vec<u8>,
    ) -> InferInput {
        let shape = match self.max_batch_size {
            0 => vec![elements as i64],
            _ => vec![rows as i64, elements as i64],
        };
        InferInput { name: name.to_owned(), tensor: Tensor { datatype, shape, data: data.into() } }
    }

    /// Reads the numbers of one response, which are finite.
    fn read(
        &self,
        response: &InferResponse,
        rows: usize,
        values: &mut Vec<Vec<f32>>,
    ) -> Result<(), InferError> {
        let name = self.output();
        let found = response.outputs.iter().find(|output| output.name == name);
        let tensor = &found.ok_or_else(|| violation(name))?.tensor;
        if self.is_vllm {
            let texts = strings(name, tensor)?;
            let vector = texts.first().and_then(|json| serde_json::from_str(json).ok());
            values.push(vector.ok_or_else(|| violation(name))?);
            return Ok(());
        }
        let bytes = tensor.data.as_slice();
        let (chunks, rest) = bytes.as_chunks::<4>();
        let is_whole = rest.is_empty()
            && tensor.datatype == DataType::Fp32
            && rows > 0
            && !chunks.is_empty()
            && chunks.len().is_multiple_of(rows);
        if !is_whole {
            return Err(violation(name));
        }
        for row in chunks.chunks(chunks.len() / rows) {
            let vector: Vec<f32> = row.iter().map(|bytes| f32::from_le_bytes(*bytes)).collect();
            if !vector.iter().all(|value| value.is_finite()) {
                return Err(InferError::internal(format!(
                    "the model '{}' has computed a value that is not a finite number",
                    self.name
                )));
            }
            values.push(vector);
        }
        Ok(())
    }
}

/// Returns the bytes of the outputs of a response.
fn response_bytes(response: &InferResponse) -> usize {
    response.outputs.iter().map(|output| output.tensor.data.len()).sum()
}

/// Keeps the first elements of a vector.
fn shorten(vector: &mut Vec<f32>, dimensions: usize, normalize: bool) -> Result<(), ApiError> {
    if dimensions > vector.len() {
        let message = format!(
            "invalid dimensions {dimensions}: the vectors of the model have {} elements",
            vector.len()
        );
        return Err(ApiError::invalid_field("dimensions", message));
    }
    vector.truncate(dimensions);
    if normalize {
        let length = vector.iter().map(|value| f64::from(*value).powi(2)).sum::<f64>().sqrt();
        if length > 0.0 {
            vector.iter_mut().for_each(|value| *value = (f64::from(*value) / length) as f32);
        }
    }
    Ok(())
}

/// The inferences of a request, a few at a time. Dropping them cancels those that run.
struct Running<'a> {
    edge: &'a Edge,
    waiting: std::vec::IntoIter<InferRequest>,
    runs: Vec<Run>,
}

/// One inference.
enum Run {
    Open(Box<dyn Responses>, Option<InferResponse>),
    Ended(InferResponse),
}

impl Running<'_> {
    /// Polls for all responses, in the order of the requests. The first error ends the others.
    fn poll(&mut self, cx: &mut Context<'_>) -> Poll<Result<Vec<InferResponse>, InferError>> {
        loop {
            let mut open = 0;
            for run in &mut self.runs {
                if let Err(error) = run.poll(cx) {
                    self.runs.clear();
                    return Poll::Ready(Err(error));
                }
                open += usize::from(matches!(run, Run::Open(..)));
            }
            let mut has_begun = false;
            while open < MAX_RUNNING {
                let Some(request) = self.waiting.next() else { break };
                match self.edge.service.stream(request) {
                    Ok(responses) => self.runs.push(Run::Open(responses, None)),
                    Err(error) => return Poll::Ready(Err(error)),
                }
                open += 1;
                has_begun = true;
            }
            // The new ones must be polled once.
            if has_begun {
                continue;
            }
            if open > 0 {
                return Poll::Pending;
            }
            let ended = std::mem::take(&mut self.runs).into_iter().filter_map(|run| match run {
                Run::Ended(response) => Some(response),
                Run::Open(..) => None,
            });
            return Poll::Ready(Ok(ended.collect()));
        }
    }
}

impl Run {
    fn poll(&mut self, cx: &mut Context<'_>) -> Result<(), InferError> {
        while let Self::Open(responses, latest) = self {
            let Poll::Ready(streamed) = responses.poll_next(cx) else { return Ok(()) };
            let is_last = streamed.as_ref().is_none_or(|streamed| streamed.last);
            if let Some(Streamed { answer, empty, .. }) = streamed {
                let response = answer?;
                if !empty {
                    *latest = Some(response);
                }
            }
            if is_last {
                *self = Self::Ended(latest.take().unwrap_or_default());
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_shorter_vector_has_the_length_1_again() {
        let mut vector = vec![0.6, 0.0, 0.8];
        shorten(&mut vector, 1, true).unwrap();
        assert_eq!(vector, [1.0]);
        let mut vector = vec![3.0, 4.0];
        shorten(&mut vector, 1, false).unwrap();
        assert_eq!(vector, [3.0]);
        let error = shorten(&mut vector, 2, true).unwrap_err();
        assert!(error.message.contains("dimensions 2: the vectors of the model have 1"));
    }
}
