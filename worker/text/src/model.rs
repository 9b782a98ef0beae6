//! One instance of a text model: loads it, and turns batches into requests of its engine.

use pharos::error::InferError;
use pharos::model::pooling::PoolingTask;
use pharos::model::text_files::{TOKENIZER, TextFiles, TextModel};
use pharos_backend::runtime::clock;
use pharos_backend::{Backend, Batch, Context, Outputs, load_error};

use crate::computer::{Computer, Prepared};
use crate::directory::VersionDirectory;
use crate::engine::{Engine, Limits, Request};
use crate::metrics::TextMetrics;
use crate::requests::{Row, Rows};
use crate::results::Places;
use crate::tokens::{Item, Limit, Texts, Tokens};
use crate::{OpenGraph, operations};

/// The parameter with the most tokens that are computed together, with those that pad.
const MAX_BATCH_TOKENS: &str = "max_batch_tokens";
/// Its value for processors, whose caches have room for the numbers of few tokens, and for GPUs.
const DEFAULT_BATCH_TOKENS: usize = 512;
const DEFAULT_BATCH_TOKENS_ON_GPU: usize = 16_384;
/// The parameter that says whether clients may send tokens in place of texts.
const ACCEPTS_TOKENS: &str = "accept_token_ids";
/// The parameter that says whether long texts are cut off, unless a request says otherwise.
const AUTO_TRUNCATE: &str = "auto_truncate";

struct TextBackend {
    engine: Engine,
    accepts_tokens: bool,
    auto_truncate: bool,
}

/// Loads a model.
pub(crate) fn create(
    context: &Context<'_>,
    open: OpenGraph,
) -> Result<Box<dyn Backend>, InferError> {
    let parameter = |name: &str| context.config.parameters.get(name).cloned();
    let model = TextFiles::gather(&VersionDirectory(context.directory))
        .and_then(|files| TextModel::of(&files, &context.config.default_model_filename, &parameter))
        .map_err(load_error)?;
    let flag = |name: &str| match parameter(name).as_deref() {
        None | Some("false") => Ok(false),
        Some("true") => Ok(true),
        Some(other) => Err(load_error(format!(
            "the parameter '{name}' is '{other}'; allowed are true and false"
        ))),
    };
    let accepts_tokens = flag(ACCEPTS_TOKENS)?;
    let auto_truncate = flag(AUTO_TRUNCATE)?;
    let default = if context.on_gpu { DEFAULT_BATCH_TOKENS_ON_GPU } else { DEFAULT_BATCH_TOKENS };
    let batch_tokens = match parameter(MAX_BATCH_TOKENS) {
        None => default,
        Some(text) => text.parse().ok().filter(|number| *number > 0).ok_or_else(|| {
            load_error(format!(
                "the parameter '{MAX_BATCH_TOKENS}' is '{text}'; allowed is an integer above 0"
            ))
        })?,
    };
    let threads = context.threads.max(1);
    let with_offsets = model.task == PoolingTask::ClassifyTokens;
    let texts = Texts::open(&context.directory.join(TOKENIZER), threads, with_offsets)?;
    let path = context.directory.join(&model.graph);
    let graph = open(context, &path)?;
    let computer = Computer::new(model, texts, graph)
        .map_err(|text| load_error(format!("the graph '{}' {text}", path.display())))?;
    try_out(&computer)
        .map_err(|error| load_error(format!("'{}': {}", path.display(), error.message)))?;
    // One run has all of a GPU.
    let limits = Limits { threads: if context.on_gpu { 1 } else { threads }, batch_tokens };
    let places = Places::of(context.config);
    let metrics = TextMetrics::new(context);
    let engine = Engine::start(computer, metrics, places, context.runtime.clone(), limits)?;
    Ok(Box::new(TextBackend { engine, accepts_tokens, auto_truncate }))
}

/// Computes a short text, to find at the load whether the graph and the files agree.
fn try_out(computer: &Computer) -> Result<(), InferError> {
    let model = &computer.model;
    let text = model.mask_token.as_deref().unwrap_or("a");
    let item = Item {
        prompt: "",
        text,
        pair: (model.task == PoolingTask::Score).then_some(text),
        add_special_tokens: true,
        limit: Limit::Truncate(model.max_tokens),
    };
    let tokens = computer.texts.encode(&item)?;
    let text = Prepared { tokens, predictions: 1, ..Prepared::default() };
    for result in computer.run(&[&text])? {
        result?;
    }
    Ok(())
}

impl Backend for TextBackend {
    fn engine(&self) -> String {
        format!("text on {}", self.engine.computer().engine())
    }

    fn execute(&mut self, batch: &Batch<'_>, outputs: &mut Outputs<'_>) -> Result<(), InferError> {
        let began = clock::now();
        let rows = Rows::of(batch)?;
        let found = self.read(&rows, batch, outputs)?;
        let items: Vec<Item<'_>> =
            found.iter().flat_map(|(_, rows)| rows).map(|row| row.item.clone()).collect();
        let mut tokens = self.engine.computer().texts.encode_all(&items).into_iter();
        let mut prepared = Vec::with_capacity(found.len());
        for (position, rows) in found {
            let own: Vec<_> = tokens.by_ref().take(rows.len()).collect();
            let texts = rows.into_iter().zip(own).map(|(row, tokens)| self.prepared(row, tokens));
            match texts.collect::<Result<Vec<Prepared>, InferError>>() {
                Ok(texts) => prepared.push((position, texts)),
                Err(error) => outputs.fail(position, error),
            }
        }
        outputs.inputs_ready();
        if prepared.is_empty() {
            return Ok(());
        }
        let texts = prepared.iter().flat_map(|(_, texts)| texts);
        let truncated = texts.filter(|text| text.tokens.is_truncated).count();
        self.engine.metrics().tokenised(truncated, clock::now().ns_since(began) as f64 / 1e9);
        let wanted: Vec<usize> =
            self.engine.places().all().filter(|position| batch.wants(*position)).collect();
        let mut requests = Vec::with_capacity(prepared.len());
        for (position, texts) in prepared {
            let responder = outputs.detach(position)?;
            requests.push(Request { responder, texts, wanted: wanted.clone() });
        }
        self.engine.add(requests);
        Ok(())
    }
}

impl TextBackend {
    /// Reads the requests of a batch, with their positions. Answers operations; invalid requests fail.
    fn read<'a>(
        &'a self,
        rows: &Rows<'a>,
        batch: &Batch<'_>,
        outputs: &mut Outputs<'_>,
    ) -> Result<Vec<(usize, Vec<Row<'a>>)>, InferError> {
        let computer = self.engine.computer();
        let mut found = Vec::with_capacity(batch.requests.len());
        let mut next = 0;
        for (position, request) in batch.requests.iter().enumerate() {
            let first = next;
            next += request.rows as usize;
            let own = (first..next).map(|at| rows.row(at, &computer.model, self.auto_truncate));
            let own = own.collect::<Result<Vec<_>, _>>().and_then(|own| self.checked(own));
            match own {
                Err(error) => outputs.fail(position, error),
                Ok(own) => match own.as_slice() {
                    [row] if !row.operation.is_empty() => {
                        let places = self.engine.places();
                        let runtime = self.engine.runtime();
                        match operations::reply(row, &computer.texts, places, runtime) {
                            Ok(reply) => outputs.detach(position)?.respond(reply, true)?,
                            Err(error) => outputs.fail(position, error),
                        }
                    }
                    _ => found.push((position, own)),
                },
            }
        }
        Ok(found)
    }

    /// Checks the rows of a request together with the task of the model.
    fn checked<'a>(&self, rows: Vec<Row<'a>>) -> Result<Vec<Row<'a>>, InferError> {
        let is_operation = rows.iter().any(|row| !row.operation.is_empty());
        if is_operation && rows.len() != 1 {
            return Err(InferError::invalid("an operation takes one text for each request"));
        }
        if is_operation {
            return Ok(rows);
        }
        let is_score = self.engine.computer().model.task == PoolingTask::Score;
        if is_score && rows.iter().any(|row| row.item.pair.is_none()) {
            return Err(InferError::invalid(
                "the input 'text_pair' is missing: a score is of two texts",
            ));
        }
        if !self.accepts_tokens && rows.iter().any(|row| row.tokens.is_some()) {
            return Err(InferError::invalid(format!(
                "tokens in place of texts are refused, because their numbers depend on the \
                 tokenizer, and clients for OpenAI's models have another one: send texts (LangChain: \
                 check_embedding_ctx_length=False), or set the parameter '{ACCEPTS_TOKENS}' of the \
                 model to true"
            )));
        }
        Ok(rows)
    }

    /// Returns what the engine needs about one text.
    fn prepared(
        &self,
        row: Row<'_>,
        encoded: Result<Tokens, InferError>,
    ) -> Result<Prepared, InferError> {
        let tokens = match row.tokens.filter(|given| !given.is_empty()) {
            Some(given) => operations::given(given, row.item.limit, &self.engine.computer().texts)?,
            None => encoded?,
        };
        if tokens.ids.is_empty() {
            return Err(InferError::invalid("a text has no tokens"));
        }
        let quotes = self.engine.computer().model.task == PoolingTask::ClassifyTokens;
        Ok(Prepared {
            tokens,
            text: if quotes { row.item.text.to_owned() } else { String::new() },
            normalize: row.normalize,
            raw_scores: row.raw_scores,
            predictions: row.predictions,
        })
    }
}
