//! One instance of a text model.

use std::ops::Range;
use std::path::Path;
use std::sync::Arc;

use pharos::error::InferError;
use pharos::model::pooling::PoolingTask;
use pharos::model::text_files::{TOKENIZER, TextFiles, TextModel};
use pharos_backend::runtime::clock;
use pharos_backend::{Backend, Batch, Context, Outputs, Runtime, load_error, run_error};

use crate::directory::VersionDirectory;
use crate::graph::{Computed, Graph, Port};
use crate::metrics::TextMetrics;
use crate::pooling::{TokenVectors, normalize};
use crate::requests::{Row, Rows};
use crate::results::{Places, RowResult, Value, write};
use crate::tokens::{Item, Limit, Texts, Tokens};
use crate::{OpenGraph, batches, heads, operations};

/// The parameter with the most tokens that are computed together, with those that pad.
const MAX_BATCH_TOKENS: &str = "max_batch_tokens";
const DEFAULT_BATCH_TOKENS: usize = 4096;
/// The parameter that says whether clients may send tokens in place of texts.
const ACCEPTS_TOKENS: &str = "accept_token_ids";
/// The most texts that are computed together: the time to choose them grows with its square.
const MAX_ROWS: usize = 4096;

struct TextBackend {
    model: Arc<TextModel>,
    texts: Texts,
    graph: Box<dyn Graph>,
    /// What each input of the graph takes.
    feeds: Vec<Feed>,
    /// The output of the graph that is read.
    output: usize,
    /// Whether it has numbers for each token, not for each text.
    is_of_tokens: bool,
    /// The token in place of which others are found.
    mask: u32,
    max_batch_tokens: usize,
    accepts_tokens: bool,
    places: Places,
    metrics: TextMetrics,
    runtime: Runtime,
}

/// What an input of the graph takes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Feed {
    Ids,
    Mask,
    Types,
    Positions,
}

/// A row that is to be computed.
struct Ready<'a> {
    /// Its position in the batch.
    at: usize,
    row: Row<'a>,
    tokens: Tokens,
}

/// Loads a model.
pub(crate) fn create(
    context: &Context<'_>,
    open: OpenGraph,
) -> Result<Box<dyn Backend>, InferError> {
    let parameter = |name: &str| context.config.parameters.get(name).cloned();
    let model = TextFiles::gather(&VersionDirectory(context.directory))
        .and_then(|files| {
            TextModel::of(&files, &context.config.default_model_filename, &parameter)
        })
        .map_err(load_error)?;
    let positive = |name: &str, default: usize| match parameter(name) {
        None => Ok(default),
        Some(text) => text.parse().ok().filter(|number| *number > 0).ok_or_else(|| {
            load_error(format!("the parameter '{name}' is '{text}'; allowed is an integer above 0"))
        }),
    };
    let accepts_tokens = match parameter(ACCEPTS_TOKENS).as_deref() {
        None | Some("false") => false,
        Some("true") => true,
        Some(other) => {
            return Err(load_error(format!(
                "the parameter '{ACCEPTS_TOKENS}' is '{other}'; allowed are true and false"
            )));
        }
    };
    let max_batch_tokens = positive(MAX_BATCH_TOKENS, DEFAULT_BATCH_TOKENS)?;
    let with_offsets = model.task == PoolingTask::ClassifyTokens;
    let texts = Texts::open(&context.directory.join(TOKENIZER), context.threads, with_offsets)?;
    let path = context.directory.join(&model.graph);
    let graph = open(context, &path)?;
    let in_graph = |text: String| load_error(format!("the graph '{}' {text}", path.display()));
    let feeds = graph.inputs().iter().map(feed).collect::<Result<_, _>>().map_err(in_graph)?;
    let (output, is_of_tokens) = chosen_output(&model, graph.outputs()).map_err(in_graph)?;
    let mask = match (model.task, &model.mask_token) {
        (PoolingTask::FillMask, None) => {
            return Err(load_error("the files of the tokenizer have no 'mask_token'"));
        }
        (PoolingTask::FillMask, Some(token)) => texts.id(token).ok_or_else(|| {
            load_error(format!("the vocabulary does not have the 'mask_token' '{token}'"))
        })?,
        _ => 0,
    };
    let mut backend = TextBackend {
        places: Places::of(context.config),
        metrics: TextMetrics::new(context),
        runtime: context.runtime.clone(),
        model: Arc::new(model),
        texts,
        graph,
        feeds,
        output,
        is_of_tokens,
        mask,
        max_batch_tokens,
        accepts_tokens,
    };
    backend.try_out(&path)?;
    Ok(Box::new(backend))
}

/// Returns what an input of a graph takes.
fn feed(port: &Port) -> Result<Feed, String> {
    match port.name.as_str() {
        "input_ids" => Ok(Feed::Ids),
        "attention_mask" => Ok(Feed::Mask),
        "token_type_ids" => Ok(Feed::Types),
        "position_ids" => Ok(Feed::Positions),
        name => Err(format!(
            "has the input '{name}'; a text model has input_ids, attention_mask, token_type_ids and \
             position_ids"
        )),
    }
}

/// Returns the output of a graph that a model needs, and whether it has numbers for each token.
fn chosen_output(model: &TextModel, outputs: &[Port]) -> Result<(usize, bool), String> {
    let named = |names: &[&str]| {
        names.iter().find_map(|name| outputs.iter().position(|output| output.name == *name))
    };
    let of_rank = |rank: usize| {
        outputs
            .iter()
            .position(|output| output.rank == Some(rank) && output.name != "pooler_output")
    };
    let listed =
        || outputs.iter().map(|output| output.name.as_str()).collect::<Vec<_>>().join(", ");
    match model.task {
        PoolingTask::Embed => {
            let of_texts = named(&["sentence_embedding"]).or(of_rank(2));
            let of_tokens = named(&["last_hidden_state", "token_embeddings"]).or(of_rank(3));
            if model.needs_whole_graph || model.pooling.is_empty() {
                let found = of_texts.map(|output| (output, false));
                return found.ok_or_else(|| match model.needs_whole_graph {
                    true => format!(
                        "has the outputs {}: the model has more modules than a transformer and a pooling, \
                         and needs a graph with all of them and the output 'sentence_embedding'",
                        listed()
                    ),
                    false => format!(
                        "has the outputs {}, and no file says how the vector of a text is made of them: \
                         set the parameter 'pooling' to cls, mean, max or lasttoken",
                        listed()
                    ),
                });
            }
            of_tokens
                .map(|output| (output, true))
                .or(of_texts.map(|output| (output, false)))
                .ok_or_else(|| format!("has the outputs {} and no 'last_hidden_state'", listed()))
        }
        task => {
            let is_of_tokens = matches!(task, PoolingTask::ClassifyTokens | PoolingTask::FillMask);
            let only = (outputs.len() == 1).then_some(0);
            named(&["logits"])
                .or(only)
                .map(|output| (output, is_of_tokens))
                .ok_or_else(|| format!("has the outputs {} and no 'logits'", listed()))
        }
    }
}

impl Backend for TextBackend {
    fn engine(&self) -> String {
        format!("text on {}", self.graph.engine())
    }

    fn execute(&mut self, batch: &Batch<'_>, outputs: &mut Outputs<'_>) -> Result<(), InferError> {
        let model = Arc::clone(&self.model);
        let rows = Rows::of(batch)?;
        let mut results: Vec<Option<RowResult>> = vec![None; rows.len()];
        let began = clock::now();
        let mut ready = self.ready(&rows, &model, batch, outputs)?;
        outputs.inputs_ready();
        if ready.is_empty() {
            return Ok(());
        }
        let truncated = ready.iter().filter(|ready| ready.tokens.is_truncated).count();
        self.metrics.tokenised(truncated, clock::now().ns_since(began) as f64 / 1e9);
        ready.sort_by_key(|ready| ready.tokens.ids.len());
        for ready in ready.chunks(MAX_ROWS) {
            let lengths: Vec<usize> = ready.iter().map(|ready| ready.tokens.ids.len()).collect();
            for range in batches::split(&lengths, self.max_batch_tokens) {
                self.compute(ready, range, batch, outputs, &mut results);
            }
        }
        outputs.computed();
        write(&results, &self.model, &self.places, batch, outputs)
    }
}

impl TextBackend {
    /// Computes a short text, to find at the load whether the graph and the files agree.
    fn try_out(&mut self, path: &Path) -> Result<(), InferError> {
        let model = Arc::clone(&self.model);
        let mask = model.mask_token.as_deref().unwrap_or("a");
        let item = Item {
            prompt: "",
            text: mask,
            pair: (self.model.task == PoolingTask::Score).then_some(mask),
            add_special_tokens: true,
            limit: Limit::Truncate(self.model.max_tokens),
        };
        let tokens = self.texts.encode(&item)?;
        let row = Row {
            item,
            operation: "",
            tokens: None,
            normalize: false,
            raw_scores: true,
            predictions: 1,
        };
        let ready = [Ready { at: 0, row, tokens }];
        self.run(&ready)
            .map(|_| ())
            .map_err(|error| load_error(format!("'{}': {}", path.display(), error.message)))
    }

    /// Answers operations, and returns the other rows with their tokens. Requests that are invalid
    /// fail.
    fn ready<'a>(
        &self,
        rows: &Rows<'a>,
        model: &'a TextModel,
        batch: &Batch<'_>,
        outputs: &mut Outputs<'_>,
    ) -> Result<Vec<Ready<'a>>, InferError> {
        let mut found = Vec::with_capacity(rows.len());
        let mut at = 0;
        for (position, request) in batch.requests.iter().enumerate() {
            let own: Result<Vec<Row<'a>>, InferError> =
                (at..at + request.rows as usize).map(|at| rows.row(at, model)).collect();
            let first = at;
            at += request.rows as usize;
            let own = match own.and_then(|own| self.check(own)) {
                Ok(own) => own,
                Err(error) => {
                    outputs.fail(position, error);
                    continue;
                }
            };
            match own.as_slice() {
                [row] if !row.operation.is_empty() => {
                    match operations::reply(row, &self.texts, &self.places, &self.runtime) {
                        Ok(reply) => outputs.detach(position)?.respond(reply, true)?,
                        Err(error) => outputs.fail(position, error),
                    }
                }
                _ => found.extend((first..).zip(own).map(|(at, row)| (position, at, row))),
            }
        }
        let items: Vec<Item<'_>> = found.iter().map(|(.., row)| row.item.clone()).collect();
        let encoded = self.texts.encode_all(&items);
        let mut ready = Vec::with_capacity(found.len());
        for ((position, at, mut row), tokens) in found.into_iter().zip(encoded) {
            let given = row.tokens.take().filter(|given| !given.is_empty());
            let tokens = match given {
                Some(ids) => self.given(ids, row.item.limit),
                None => tokens,
            };
            match tokens {
                Ok(tokens) if tokens.ids.is_empty() => {
                    outputs.fail(position, InferError::invalid("a text has no tokens"));
                }
                Ok(tokens) => ready.push(Ready { at, row, tokens }),
                Err(error) => outputs.fail(position, error),
            }
        }
        Ok(ready)
    }

    /// Checks the rows of a request together with the task of the model.
    fn check<'a>(&self, rows: Vec<Row<'a>>) -> Result<Vec<Row<'a>>, InferError> {
        let is_operation = rows.iter().any(|row| !row.operation.is_empty());
        if is_operation && rows.len() != 1 {
            return Err(InferError::invalid("an operation takes one text for each request"));
        }
        if is_operation {
            return Ok(rows);
        }
        if self.model.task == PoolingTask::Score && rows.iter().any(|row| row.item.pair.is_none()) {
            return Err(InferError::invalid("the input 'text_pair' is missing: a score is of two texts"));
        }
        if !self.accepts_tokens && rows.iter().any(|row| row.tokens.is_some()) {
            return Err(InferError::invalid(format!(
                "tokens in place of texts are refused, because their numbers depend on the tokenizer, and \
                 clients for OpenAI's models have another one: send texts (LangChain: \
                 check_embedding_ctx_length=False), or set the parameter '{ACCEPTS_TOKENS}' of the model to \
                 true"
            )));
        }
        Ok(rows)
    }

    /// Checks tokens that a client gives.
    fn given(&self, ids: Vec<u32>, limit: Limit) -> Result<Tokens, InferError> {
        operations::check_tokens(&ids, &self.texts)?;
        let (most, truncates) = match limit {
            Limit::Refuse(most) => (most, false),
            Limit::Truncate(most) => (most, true),
        };
        let is_long = ids.len() > most;
        if is_long && !truncates {
            return Err(InferError::invalid(format!(
                "this model's maximum context length is {most} tokens, and a text has {} tokens: \
                 truncate_prompt_tokens -1 cuts the rest off",
                ids.len()
            )));
        }
        let ids: Vec<u32> = ids.into_iter().take(most).collect();
        let zeros = vec![0; ids.len()];
        Ok(Tokens { types: zeros.clone(), special: zeros, ids, is_truncated: is_long, ..Tokens::default() })
    }

    /// Computes rows together, and stores their results. A failure is one of their requests.
    fn compute(
        &mut self,
        ready: &[Ready<'_>],
        range: Range<usize>,
        batch: &Batch<'_>,
        outputs: &mut Outputs<'_>,
        results: &mut [Option<RowResult>],
    ) {
        let request_of = |at: usize| {
            let mut end = 0;
            batch.requests.iter().position(|request| {
                end += request.rows as usize;
                at < end
            })
        };
        let wanted = |ready: &&Ready<'_>| {
            request_of(ready.at).is_some_and(|request| !batch.is_cancelled(request))
        };
        let ready = ready.get(range).unwrap_or_default();
        if !ready.iter().any(|ready| wanted(&ready)) {
            return;
        }
        let tokens = ready.iter().map(|ready| ready.tokens.ids.len());
        let padded = tokens.clone().max().unwrap_or(0) * ready.len();
        let tokens: usize = tokens.sum();
        match self.run(ready) {
            Ok(values) => {
                self.metrics.ran(tokens, padded - tokens);
                for (ready, value) in ready.iter().zip(values) {
                    let Some(place) = results.get_mut(ready.at) else { continue };
                    match value {
                        Ok(value) => {
                            let tokens = u32::try_from(ready.tokens.ids.len()).unwrap_or(u32::MAX);
                            *place = Some(RowResult { value, tokens });
                        }
                        Err(error) => {
                            if let Some(request) = request_of(ready.at) {
                                outputs.fail(request, error);
                            }
                        }
                    }
                }
            }
            Err(error) => {
                for request in ready.iter().filter_map(|ready| request_of(ready.at)) {
                    outputs.fail(request, error.clone());
                }
            }
        }
    }

    /// Runs the graph, and returns a result for each row.
    fn run(&mut self, ready: &[Ready<'_>]) -> Result<Vec<Result<Value, InferError>>, InferError> {
        let rows = ready.len();
        let length = ready.iter().map(|ready| ready.tokens.ids.len()).max().unwrap_or(0);
        let inputs: Vec<Vec<i64>> = self.feeds.iter().map(|feed| fed(*feed, ready, length)).collect();
        let mut values = Vec::with_capacity(rows);
        let Self { model, texts, graph, is_of_tokens, mask, .. } = self;
        let head = Head { model, texts, is_of_tokens: *is_of_tokens, mask: *mask };
        graph.run(rows, length, &inputs, self.output, &mut |computed| {
            values = head.read(&computed, ready, length)?;
            Ok(())
        })?;
        Ok(values)
    }
}

/// Returns the numbers of an input of the graph: those of each row, padded.
fn fed(feed: Feed, ready: &[Ready<'_>], length: usize) -> Vec<i64> {
    let mut numbers = Vec::with_capacity(ready.len() * length);
    for Ready { tokens, .. } in ready {
        let end = numbers.len() + length;
        let count = tokens.ids.len() as i64;
        match feed {
            Feed::Ids => numbers.extend(tokens.ids.iter().map(|id| i64::from(*id))),
            Feed::Mask => numbers.extend((0..count).map(|_| 1)),
            Feed::Types => numbers.extend(tokens.types.iter().map(|kind| i64::from(*kind))),
            Feed::Positions => numbers.extend(0..count),
        }
        numbers.resize(end, 0);
    }
    numbers
}

/// Makes results of the output of a graph.
struct Head<'a> {
    model: &'a TextModel,
    texts: &'a Texts,
    is_of_tokens: bool,
    mask: u32,
}

impl Head<'_> {
    fn read(
        &self,
        computed: &Computed<'_>,
        ready: &[Ready<'_>],
        length: usize,
    ) -> Result<Vec<Result<Value, InferError>>, InferError> {
        let width = match (computed.shape, self.is_of_tokens) {
            ([rows, width], false) if *rows == ready.len() => *width,
            // A graph with one logit may leave its dimension out.
            ([rows], false) if *rows == ready.len() => 1,
            ([rows, tokens, width], true) if *rows == ready.len() && *tokens == length => *width,
            (shape, _) => {
                return Err(run_error(format!(
                    "the graph has computed an output of the shape {shape:?} from {} texts of {length} \
                     tokens",
                    ready.len()
                )));
            }
        };
        let classes = match self.model.task {
            PoolingTask::Score => 1,
            PoolingTask::Classify | PoolingTask::ClassifyTokens => self.model.labels.len(),
            PoolingTask::Embed | PoolingTask::FillMask => width.max(1),
        };
        if width != classes {
            return Err(run_error(format!(
                "the graph has computed {width} numbers for each text or token, and the model has {classes} \
                 classes ('id2label' of config.json)"
            )));
        }
        let row = if self.is_of_tokens { length * width } else { width };
        let rows = computed.values.chunks_exact(row.max(1)).zip(ready);
        Ok(rows.map(|(values, ready)| self.value(values, ready, width)).collect())
    }

    /// Makes the result of a row.
    fn value(&self, values: &[f32], ready: &Ready<'_>, width: usize) -> Result<Value, InferError> {
        let own = values.get(..ready.tokens.ids.len() * width).unwrap_or(values);
        match self.model.task {
            PoolingTask::Embed => {
                let mut vector = Vec::with_capacity(width);
                if self.is_of_tokens {
                    let vectors = TokenVectors { values: own, width };
                    self.model.pooling.iter().for_each(|way| vectors.pool(*way, &mut vector));
                } else {
                    vector.extend(values);
                }
                if ready.row.normalize {
                    normalize(&mut vector);
                }
                Ok(Value::Numbers(vector))
            }
            PoolingTask::Score | PoolingTask::Classify => {
                let mut numbers = values.to_vec();
                if !ready.row.raw_scores {
                    heads::activate(&mut numbers, self.model.activation);
                }
                Ok(Value::Numbers(numbers))
            }
            PoolingTask::ClassifyTokens => {
                let text = ready.row.item.text;
                heads::entities(own, text, &ready.tokens, self.model, self.texts).map(Value::Text)
            }
            PoolingTask::FillMask => {
                let count = ready.row.predictions;
                heads::predictions(own, &ready.tokens, self.mask, count, self.texts).map(Value::Text)
            }
        }
    }
}
