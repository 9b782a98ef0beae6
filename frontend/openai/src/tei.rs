//! The API of text-embeddings-inference: `/embed`, `/rerank`, `/predict`, `/similarity`,
//! `/tokenize`, `/decode`, `/info`, and `/`, which does what the model is for.
//!
//! A request may name its model in the field `model`, which the original does not have. Without it,
//! the server's only model with the task of the path answers.
//!
//! Source of the forms: text-embeddings-inference 1.8 (`router/src/http/types.rs`, `server.rs`).

use axum::response::Response;
use http::StatusCode;
use pharos::model::generation::context_length;
use pharos::model::pooling::PoolingTask;
use serde::Serialize;
use serde_json::value::RawValue;

use crate::answer::Failure;
use crate::classes::labels;
use crate::edge::{Received, on_a_thread_if};
use crate::embeddings::{MAX_PROMPT_NAME, MAX_TEXTS};
use crate::error::ApiError;
use crate::json::{Fields, bounded_list, invalid};
use crate::operation::only_model;
use crate::options::{MAX_MODEL_BYTES, RequestOptions};
use crate::pooling::{Item, PoolingModel, PoolingOptions};
use crate::prompt::Prompt;
use crate::response::to_json;
use crate::scores::score;
use crate::tokenizer::Tokenizer;

/// Responses with more numbers than this are written on a blocking thread.
const LONG: usize = 1 << 16;
/// The most tokens of a list that is decoded.
const MAX_TOKENS: usize = 1 << 20;

/// What all requests may have.
#[derive(Debug, Clone, Default, PartialEq)]
struct Common {
    model: Option<String>,
    prompt_name: Option<String>,
    pooling: PoolingOptions,
}

impl Common {
    fn read(fields: &mut Fields<'_>) -> Result<Self, ApiError> {
        let model = fields.text("model", MAX_MODEL_BYTES)?;
        Ok(Self { model, ..Self::read_parameters(fields)? })
    }

    /// Reads what may also be in the member `parameters`.
    fn read_parameters(fields: &mut Fields<'_>) -> Result<Self, ApiError> {
        if let Some(side) = fields.text("truncation_direction", 16)?
            && !side.eq_ignore_ascii_case("right")
        {
            let allowed = "Right: the tokenizer of the model decides what is cut off";
            return Err(invalid("truncation_direction", &format!("\"{side}\""), allowed));
        }
        let truncates = fields.boolean("truncate")?.unwrap_or(false);
        Ok(Self {
            model: None,
            prompt_name: fields.text("prompt_name", MAX_PROMPT_NAME)?,
            pooling: PoolingOptions {
                truncate: truncates.then_some(-1),
                ..PoolingOptions::default()
            },
        })
    }
}

/// A request of `POST /embed`.
#[derive(Debug, Clone, PartialEq)]
pub struct EmbedRequest {
    inputs: Vec<Prompt>,
    common: Common,
}

impl EmbedRequest {
    /// Parses and checks the body of a request.
    ///
    /// # Errors
    ///
    /// 400, with the field at fault.
    pub fn parse(body: &[u8]) -> Result<Self, ApiError> {
        let mut fields = Fields::of_body(body)?;
        let mut common = Common::read(&mut fields)?;
        common.pooling.normalize = Some(fields.boolean("normalize")?.unwrap_or(true));
        common.pooling.dimensions = fields
            .integer("dimensions", 1..=1 << 20)?
            .and_then(|number| usize::try_from(number).ok());
        let Some(inputs) = fields.take("inputs") else { return Err(fields.missing("inputs")) };
        Ok(Self { inputs: Prompt::read_all(inputs, "inputs", MAX_TEXTS)?, common })
    }
}

/// A request of `POST /rerank`.
#[derive(Debug, Clone, PartialEq)]
pub struct RerankRequest {
    query: String,
    texts: Vec<String>,
    returns_texts: bool,
    /// Whether scores are the numbers of the graph, without a sigmoid.
    raw_scores: bool,
    common: Common,
}

impl RerankRequest {
    /// Parses and checks the body of a request.
    ///
    /// # Errors
    ///
    /// 400, with the field at fault.
    pub fn parse(body: &[u8]) -> Result<Self, ApiError> {
        let mut fields = Fields::of_body(body)?;
        let common = Common::read(&mut fields)?;
        let Some(query) = fields.text("query", usize::MAX)? else {
            return Err(fields.missing("query"));
        };
        Ok(Self {
            query,
            texts: texts(&mut fields, "texts")?,
            returns_texts: fields.boolean("return_text")?.unwrap_or(false),
            raw_scores: fields.boolean("raw_scores")?.unwrap_or(false),
            common,
        })
    }
}

/// A request of `POST /predict`.
#[derive(Debug, Clone, PartialEq)]
pub struct PredictRequest {
    /// Texts, each alone or with the second text of a pair.
    inputs: Vec<(Prompt, Option<String>)>,
    /// Whether the request has a list of texts.
    is_list: bool,
    common: Common,
}

impl PredictRequest {
    /// Parses and checks the body of a request. A list of two strings is a pair, and a list of lists
    /// has a text or a pair in each.
    ///
    /// # Errors
    ///
    /// 400, with the field at fault.
    pub fn parse(body: &[u8]) -> Result<Self, ApiError> {
        let mut fields = Fields::of_body(body)?;
        let mut common = Common::read(&mut fields)?;
        common.pooling.raw_scores = fields.boolean("raw_scores")?;
        if let Some(parameters) = fields.take("parameters") {
            let mut inner = Fields::of_member(parameters, "parameters")?;
            common.pooling.top_k = inner
                .integer("top_k", 1..=i64::from(i32::MAX))?
                .and_then(|k| i32::try_from(k).ok());
        }
        let Some(inputs) = fields.take("inputs") else { return Err(fields.missing("inputs")) };
        let wrong = || {
            let allowed = format_args!(
                "a string, a pair of strings, or a list of 1 to {MAX_TEXTS} lists with one or two strings"
            );
            invalid("inputs", inputs.get(), allowed)
        };
        let first = inputs.get().strip_prefix('[').unwrap_or_default().trim_start();
        let lists = if first.starts_with('[') {
            bounded_list::<Vec<String>>(inputs.get(), MAX_TEXTS)
        } else if first.is_empty() {
            serde_json::from_str(inputs.get()).ok().map(|text: String| vec![vec![text]])
        } else {
            serde_json::from_str(inputs.get()).ok().map(|pair: Vec<String>| vec![pair])
        };
        let pairs = lists.filter(|lists| !lists.is_empty()).ok_or_else(wrong)?.into_iter();
        let pairs = pairs.map(|list| match <[String; 2]>::try_from(list) {
            Ok([text, pair]) => Some((Prompt::Text(text), Some(pair))),
            Err(list) => match <[String; 1]>::try_from(list) {
                Ok([text]) => Some((Prompt::Text(text), None)),
                Err(_) => None,
            },
        });
        let inputs = pairs.collect::<Option<Vec<_>>>().ok_or_else(wrong)?;
        Ok(Self { inputs, is_list: first.starts_with('['), common })
    }
}

/// A request of `POST /similarity`.
#[derive(Debug, Clone, PartialEq)]
pub struct SimilarityRequest {
    source: String,
    sentences: Vec<String>,
    common: Common,
}

impl SimilarityRequest {
    /// Parses and checks the body of a request.
    ///
    /// # Errors
    ///
    /// 400, with the field at fault.
    pub fn parse(body: &[u8]) -> Result<Self, ApiError> {
        let mut fields = Fields::of_body(body)?;
        let model = fields.text("model", MAX_MODEL_BYTES)?;
        let parameters = match fields.take("parameters") {
            None => Common::default(),
            Some(value) => Common::read_parameters(&mut Fields::of_member(value, "parameters")?)?,
        };
        let Some(inputs) = fields.take("inputs") else { return Err(fields.missing("inputs")) };
        let mut inputs = Fields::of_member(inputs, "inputs")?;
        let Some(source) = inputs.text("source_sentence", usize::MAX)? else {
            return Err(inputs.missing("source_sentence"));
        };
        let sentences = texts(&mut inputs, "sentences")?;
        Ok(Self { source, sentences, common: Common { model, ..parameters } })
    }
}

/// Reads a list of texts.
fn texts(fields: &mut Fields<'_>, name: &str) -> Result<Vec<String>, ApiError> {
    let path = fields.path(name);
    let Some(value) = fields.take(name) else { return Err(fields.missing(name)) };
    let list = bounded_list::<String>(value.get(), MAX_TEXTS).filter(|list| !list.is_empty());
    list.ok_or_else(|| {
        invalid(&path, value.get(), format_args!("a list of 1 to {MAX_TEXTS} strings"))
    })
}

/// A request of `POST /tokenize`.
#[derive(Debug, Clone, PartialEq)]
pub struct TokenizeRequest {
    inputs: Vec<Prompt>,
    add_special_tokens: bool,
    model: Option<String>,
}

impl TokenizeRequest {
    /// Parses and checks the body of a request.
    ///
    /// # Errors
    ///
    /// 400, with the field at fault.
    pub fn parse(body: &[u8]) -> Result<Self, ApiError> {
        let mut fields = Fields::of_body(body)?;
        let Some(inputs) = fields.take("inputs") else { return Err(fields.missing("inputs")) };
        let inputs = Prompt::read_all(inputs, "inputs", MAX_TEXTS)?;
        if inputs.iter().any(|input| input.tokens().is_some()) {
            return Err(ApiError::invalid_field("inputs", "inputs must be a string or strings"));
        }
        Ok(Self {
            inputs,
            add_special_tokens: fields.boolean("add_special_tokens")?.unwrap_or(true),
            model: fields.text("model", MAX_MODEL_BYTES)?,
        })
    }
}

/// A request of `POST /decode`.
#[derive(Debug, Clone, PartialEq)]
pub struct DecodeRequest {
    ids: Vec<Vec<u32>>,
    skips_special: bool,
    model: Option<String>,
}

impl DecodeRequest {
    /// Parses and checks the body of a request.
    ///
    /// # Errors
    ///
    /// 400, with the field at fault.
    pub fn parse(body: &[u8]) -> Result<Self, ApiError> {
        let mut fields = Fields::of_body(body)?;
        let Some(ids) = fields.take("ids") else { return Err(fields.missing("ids")) };
        let first = ids.get().strip_prefix('[').unwrap_or_default().trim_start();
        let lists = match first.starts_with('[') {
            true => bounded_list::<Vec<u32>>(ids.get(), MAX_TEXTS),
            false => bounded_list::<u32>(ids.get(), MAX_TOKENS).map(|list| vec![list]),
        };
        let allowed = format_args!("a list of token ids, or a list of 1 to {MAX_TEXTS} such lists");
        Ok(Self {
            ids: lists
                .filter(|lists| !lists.is_empty())
                .ok_or_else(|| invalid("ids", ids.get(), allowed))?,
            skips_special: fields.boolean("skip_special_tokens")?.unwrap_or(true),
            model: fields.text("model", MAX_MODEL_BYTES)?,
        })
    }
}

/// The members of a body that decide which API or which task a request is for. A body that is no JSON
/// object has none of them.
#[derive(Debug, Default, PartialEq)]
pub(crate) struct Form {
    pub(crate) has_texts: bool,
    pub(crate) has_inputs: bool,
    has_query: bool,
    has_object_of_inputs: bool,
    model: Option<String>,
}

impl Form {
    /// Reads the form of a request, on another thread if its body is long.
    pub(crate) async fn of(received: &Received) -> Self {
        received.parse(Self::parse).await.unwrap_or_default()
    }

    fn parse(body: &[u8]) -> Result<Self, ApiError> {
        let mut fields = Fields::of_body(body)?;
        let inputs = fields.take("inputs");
        Ok(Self {
            has_texts: fields.take("texts").is_some(),
            has_inputs: inputs.is_some(),
            has_query: fields.take("query").is_some(),
            has_object_of_inputs: inputs.is_some_and(|inputs| inputs.get().starts_with('{')),
            model: fields.text("model", MAX_MODEL_BYTES).unwrap_or_default(),
        })
    }
}

/// Answers a request of `POST /embed`.
pub(crate) async fn embed(mut received: Received) -> Response {
    let answer = vectors(&mut received).await;
    finish(received, answer)
}

/// Answers a request of `POST /rerank`.
pub(crate) async fn rerank(mut received: Received) -> Response {
    let answer = ranks(&mut received).await;
    finish(received, answer)
}

/// Answers a request of `POST /predict`.
pub(crate) async fn predict(mut received: Received) -> Response {
    let answer = predictions(&mut received).await;
    finish(received, answer)
}

/// Answers a request of `POST /similarity`.
pub(crate) async fn similarity(mut received: Received) -> Response {
    let answer = similarities(&mut received).await;
    finish(received, answer)
}

/// Answers a request of `POST /tokenize`.
pub(crate) async fn tokenize(mut received: Received) -> Response {
    let answer = tokens(&mut received).await;
    finish(received, answer)
}

/// Answers a request of `POST /decode`.
pub(crate) async fn decode(mut received: Received) -> Response {
    let answer = decoded(&mut received).await;
    finish(received, answer)
}

/// Answers a request of `GET /info`.
pub(crate) async fn info(mut received: Received) -> Response {
    let answer = information(&mut received).await;
    finish(received, answer)
}

/// Answers a request of `POST /embed_sparse` or `POST /embed_all`, which no model here can do.
pub(crate) async fn refuse(received: Received) -> Response {
    let path = received.uri.path().to_owned();
    let error = ApiError::not_implemented(format!(
        "{path} is not available here: models make one dense vector of a text (POST /embed)"
    ));
    finish(received, Err(error.into()))
}

/// Answers a request of `POST /`: what the form of the request and the model are for.
pub(crate) async fn root(received: Received) -> Response {
    let form = Form::of(&received).await;
    if form.has_query {
        return rerank(received).await;
    }
    if form.has_object_of_inputs {
        return similarity(received).await;
    }
    match task_of(&received, form.model).await {
        Ok(None | Some(PoolingTask::Embed)) | Err(_) => embed(received).await,
        Ok(Some(_)) => predict(received).await,
    }
}

/// Returns the task of the model that a request names, or of the server's only text model; `None` for
/// a model that reads no texts.
async fn task_of(
    received: &Received,
    named: Option<String>,
) -> Result<Option<PoolingTask>, Failure> {
    let name = match named {
        Some(name) => name,
        None => only(received, "read texts", |_| true).await?,
    };
    Ok(PoolingTask::of(&*received.edge.service.model_config(&name, "")?))
}

/// Returns the name of the server's only model whose task a condition accepts.
async fn only(
    received: &Received,
    ability: &str,
    accepts: impl Fn(PoolingTask) -> bool,
) -> Result<String, Failure> {
    let service = &*received.edge.service;
    only_model(service, ability, |config| PoolingTask::of(config).is_some_and(&accepts)).await
}

/// Returns the model of a request, loaded.
async fn model_of(
    received: &mut Received,
    named: Option<&str>,
    ability: &str,
    accepts: impl Fn(PoolingTask) -> bool,
) -> Result<PoolingModel, Failure> {
    // A named model may not be loaded yet, and then has no task to choose it by.
    let name = match named {
        Some(name) => name.to_owned(),
        None => only(received, ability, accepts).await?,
    };
    let options = RequestOptions { model: Some(name), ..RequestOptions::default() };
    let name = received.enter_model(&options).await?;
    Ok(PoolingModel::of(&*received.edge.service.model_config(&name, "")?)?)
}

async fn vectors(received: &mut Received) -> Result<Vec<u8>, Failure> {
    let request = received.parse(EmbedRequest::parse).await?;
    let Common { model, prompt_name, pooling } = request.common;
    let model =
        model_of(received, model.as_deref(), "make embeddings", |task| task == PoolingTask::Embed);
    let model = model.await?;
    model.expect(PoolingTask::Embed)?;
    let prompt_name = prompt_name.as_deref();
    let items: Vec<Item<'_>> =
        request.inputs.iter().map(|text| Item { prompt_name, ..Item::of(text) }).collect();
    let Received { edge, call, .. } = received;
    let pooled = model.run(edge, call, &items, pooling).await?;
    call.set_times(&pooled.timeline);
    let numbers: usize = pooled.values.iter().map(Vec::len).sum();
    Ok(on_a_thread_if(numbers > LONG, move || to_json(&pooled.values)).await?)
}

#[derive(Serialize)]
struct Rank<'a> {
    index: usize,
    #[serde(skip_serializing_if = "Option::is_none")]
    text: Option<&'a str>,
    score: f32,
}

async fn ranks(received: &mut Received) -> Result<Vec<u8>, Failure> {
    let request = received.parse(RerankRequest::parse).await?;
    let named = request.common.model.as_deref();
    let model =
        model_of(received, named, "score pairs of texts", |task| task == PoolingTask::Score);
    let model = model.await?;
    model.expect(PoolingTask::Score)?;
    // The original always has probabilities, whatever the files of the model say.
    let has_raw = model.has_raw_scores();
    let mut options = request.common.pooling;
    options.raw_scores = (has_raw || request.raw_scores).then_some(true);
    let query = std::slice::from_ref(&request.query);
    let mut scores = score(received, &model, query, &request.texts, options).await?.values;
    if has_raw && !request.raw_scores {
        scores.iter_mut().for_each(|score| {
            *score = (1.0 / (1.0 + f64::from(-*score).exp())) as f32;
        });
    }
    let mut ranks: Vec<Rank<'_>> = (0..)
        .zip(request.texts.iter().zip(scores))
        .map(|(index, (text, score))| Rank {
            index,
            text: request.returns_texts.then_some(text),
            score,
        })
        .collect();
    ranks.sort_by(|one, other| other.score.total_cmp(&one.score));
    Ok(to_json(&ranks))
}

#[derive(Serialize)]
struct Prediction<'a> {
    score: f32,
    label: &'a str,
}

async fn predictions(received: &mut Received) -> Result<Vec<u8>, Failure> {
    let request = received.parse(PredictRequest::parse).await?;
    let model = model_of(received, request.common.model.as_deref(), "classify texts", |task| {
        !matches!(task, PoolingTask::Embed | PoolingTask::Score)
    });
    let model = model.await?;
    let items: Vec<Item<'_>> = request
        .inputs
        .iter()
        .map(|(text, pair)| Item { pair: pair.as_deref(), ..Item::of(text) })
        .collect();
    let Received { edge, call, .. } = received;
    let mut options = request.common.pooling;
    if matches!(model.task, PoolingTask::ClassifyTokens | PoolingTask::FillMask) {
        let found = model.run_to_json(edge, call, &items, options).await?;
        let raw: Result<Vec<Box<RawValue>>, _> =
            found.into_iter().map(RawValue::from_string).collect();
        let raw = raw.map_err(|_| ApiError::internal("the model has computed invalid JSON"))?;
        return Ok(match raw.as_slice() {
            [only] if !request.is_list => to_json(only),
            all => to_json(&all),
        });
    }
    model.expect(PoolingTask::Classify)?;
    let most = options.top_k.take().and_then(|most| usize::try_from(most).ok());
    let labels = labels(&*edge.service.model_config(&model.name, "")?);
    let pooled = model.run(edge, call, &items, options).await?;
    call.set_times(&pooled.timeline);
    let classes = pooled.values.iter().map(|scores| {
        // A class without a label has an empty one.
        let labels = labels.iter().map(String::as_str).chain(std::iter::repeat(""));
        let mut all: Vec<Prediction<'_>> = scores
            .iter()
            .zip(labels)
            .map(|(score, label)| Prediction { score: *score, label })
            .collect();
        all.sort_by(|one, other| other.score.total_cmp(&one.score));
        all.truncate(most.unwrap_or(usize::MAX));
        all
    });
    let classes: Vec<Vec<Prediction<'_>>> = classes.collect();
    Ok(match classes.as_slice() {
        [only] if !request.is_list => to_json(only),
        all => to_json(&all),
    })
}

async fn similarities(received: &mut Received) -> Result<Vec<u8>, Failure> {
    let request = received.parse(SimilarityRequest::parse).await?;
    let Common { model, prompt_name, pooling } = request.common;
    if prompt_name.is_some() {
        let text = "parameters.prompt_name is not available here";
        return Err(ApiError::invalid_field("parameters.prompt_name", text).into());
    }
    let model =
        model_of(received, model.as_deref(), "make embeddings", |task| task == PoolingTask::Embed);
    let model = model.await?;
    model.expect(PoolingTask::Embed)?;
    let source = std::slice::from_ref(&request.source);
    let scores = score(received, &model, source, &request.sentences, pooling).await?;
    Ok(to_json(&scores.values))
}

#[derive(Serialize)]
struct Token<'a> {
    id: u32,
    text: &'a str,
    special: bool,
    start: Option<usize>,
    stop: Option<usize>,
}

async fn tokens(received: &mut Received) -> Result<Vec<u8>, Failure> {
    let request = received.parse(TokenizeRequest::parse).await?;
    let model = model_of(received, request.model.as_deref(), "read texts", |_| true).await?;
    let Received { edge, call, .. } = received;
    let tokenizer = Tokenizer::of(&*edge.service.model_config(&model.name, "")?)?;
    // The tokens that the model adds before a text are special, and those after it.
    let mut before = 0;
    if request.add_special_tokens {
        let letter = Prompt::Text("a".to_owned());
        let with = tokenizer.tokenize(edge, call, &letter, true).await?.ids;
        let own = tokenizer.tokenize(edge, call, &letter, false).await?.ids;
        before = with.windows(own.len().max(1)).position(|ids| ids == own).unwrap_or(0);
    }
    let mut all = Vec::with_capacity(request.inputs.len());
    for input in &request.inputs {
        let with = tokenizer.tokenize(edge, call, input, request.add_special_tokens).await?;
        let own = match request.add_special_tokens {
            true => tokenizer.tokenize(edge, call, input, false).await?.ids.len(),
            false => with.ids.len(),
        };
        all.push((with, before..before + own));
    }
    let lists = all.iter().map(|(tokens, own)| {
        let tokens = tokens.ids.iter().zip(&tokens.texts).enumerate();
        tokens
            .map(|(at, (id, text))| Token {
                id: *id,
                text,
                special: !own.contains(&at),
                start: None,
                stop: None,
            })
            .collect()
    });
    Ok(to_json(&lists.collect::<Vec<Vec<Token<'_>>>>()))
}

async fn decoded(received: &mut Received) -> Result<Vec<u8>, Failure> {
    let request = received.parse(DecodeRequest::parse).await?;
    let model = model_of(received, request.model.as_deref(), "read texts", |_| true).await?;
    let Received { edge, call, .. } = received;
    let tokenizer = Tokenizer::of(&*edge.service.model_config(&model.name, "")?)?;
    let mut texts = Vec::with_capacity(request.ids.len());
    for ids in &request.ids {
        texts.push(tokenizer.detokenize(edge, call, ids, !request.skips_special).await?);
    }
    Ok(to_json(&texts))
}

#[derive(Serialize)]
struct Information<'a> {
    model_id: &'a str,
    model_type: Kind,
    max_input_length: Option<u64>,
    max_client_batch_size: usize,
    version: &'static str,
}

/// What a model is for, in the words of the original.
#[derive(Serialize)]
#[serde(rename_all = "lowercase")]
enum Kind {
    Embedding {},
    Classifier { id2label: std::collections::BTreeMap<String, String> },
    Reranker {},
}

async fn information(received: &mut Received) -> Result<Vec<u8>, Failure> {
    let model = model_of(received, None, "read texts", |_| true).await?;
    let config = received.edge.service.model_config(&model.name, "")?;
    let model_type = match model.task {
        PoolingTask::Embed => Kind::Embedding {},
        PoolingTask::Score => Kind::Reranker {},
        _ => {
            let labels = labels(&config).into_iter().enumerate();
            Kind::Classifier {
                id2label: labels.map(|(at, label)| (at.to_string(), label)).collect(),
            }
        }
    };
    Ok(to_json(&Information {
        model_id: &model.name,
        model_type,
        max_input_length: context_length(&config),
        max_client_batch_size: MAX_TEXTS,
        version: env!("CARGO_PKG_VERSION"),
    }))
}

#[derive(Serialize)]
struct ErrorBody<'a> {
    error: &'a str,
    error_type: &'static str,
}

/// Ends a request. Errors have the form and the status of the original: 413 for too many or too long
/// texts, 422 for other invalid requests, 424 for a failure of the model, 429 and 503.
fn finish(received: Received, answer: Result<Vec<u8>, Failure>) -> Response {
    let failure = match answer {
        Ok(body) => return received.finish(Ok(body)),
        Err(failure) => failure,
    };
    let (status, error_type) = match failure.error.status {
        400 if failure.error.code == Some("context_length_exceeded") => (413, "Validation"),
        400 => (422, "Validation"),
        429 => (429, "Overloaded"),
        500 => (424, "Backend"),
        503 => (503, "Unhealthy"),
        other => (other, "Validation"),
    };
    // The field of this API with the same effect.
    let error = failure.error.message.replace("truncate_prompt_tokens -1", "truncate true");
    let body = to_json(&ErrorBody { error: &error, error_type });
    received.fail_as(
        &failure,
        StatusCode::from_u16(status).unwrap_or(StatusCode::BAD_REQUEST),
        body,
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn inputs_of_predictions() {
        let parse = |inputs: &str| {
            PredictRequest::parse(format!(r#"{{"inputs":{inputs},"raw_scores":true}}"#).as_bytes())
        };
        let text = |text: &str| Prompt::Text(text.to_owned());
        let request = parse(r#""a""#).unwrap();
        assert_eq!((request.inputs, request.is_list), (vec![(text("a"), None)], false));
        assert_eq!(request.common.pooling.raw_scores, Some(true));
        let request = parse(r#"["a","b"]"#).unwrap();
        assert_eq!((request.inputs, request.is_list), (vec![(text("a"), Some("b".into()))], false));
        let request = parse(r#"[["a"],["b","c"]]"#).unwrap();
        let expected = vec![(text("a"), None), (text("b"), Some("c".into()))];
        assert_eq!((request.inputs, request.is_list), (expected, true));
        for wrong in ["5", "[]", "[[]]", r#"["a","b","c"]"#, r#"[["a"],"b"]"#, r#"[["a",1]]"#] {
            assert_eq!(parse(wrong).unwrap_err().param.as_deref(), Some("inputs"), "{wrong}");
        }
    }

    #[test]
    fn vectors_have_the_length_1_by_default() {
        let request = EmbedRequest::parse(br#"{"inputs":["a","b"],"truncate":true}"#).unwrap();
        assert_eq!(request.inputs.len(), 2);
        let pooling = request.common.pooling;
        assert_eq!((pooling.normalize, pooling.truncate), (Some(true), Some(-1)));
        let error = EmbedRequest::parse(br#"{"inputs":"a","truncation_direction":"Left"}"#);
        assert_eq!(error.unwrap_err().param.as_deref(), Some("truncation_direction"));
    }

    #[test]
    fn forms_of_requests() {
        let form = Form::parse(br#"{"query":"q","texts":["a"],"model":"m"}"#).unwrap();
        assert!(form.has_texts && form.has_query && !form.has_inputs);
        assert_eq!(form.model.as_deref(), Some("m"));
        let form = Form::parse(br#"{"inputs":{"source_sentence":"s"},"model":5}"#).unwrap();
        assert!(form.has_inputs && form.has_object_of_inputs && form.model.is_none());
        assert!(!Form::parse(br#"{"inputs":["{"]}"#).unwrap().has_object_of_inputs);
        assert!(Form::parse(b"[]").is_err());
    }

    #[test]
    fn other_requests() {
        let body = br#"{"query":"q","texts":["a"],"return_text":true}"#;
        let request = RerankRequest::parse(body).unwrap();
        assert!(request.returns_texts && !request.raw_scores);
        let body = br#"{"inputs":{"source_sentence":"s","sentences":["a"]},"parameters":{"truncate":true}}"#;
        assert_eq!(SimilarityRequest::parse(body).unwrap().common.pooling.truncate, Some(-1));
        let error =
            SimilarityRequest::parse(br#"{"inputs":{"source_sentence":"s","sentences":[]}}"#);
        assert_eq!(error.unwrap_err().param.as_deref(), Some("inputs.sentences"));
        assert_eq!(DecodeRequest::parse(br#"{"ids":[1,2]}"#).unwrap().ids, [[1, 2]]);
        assert_eq!(DecodeRequest::parse(br#"{"ids":[[1],[2]]}"#).unwrap().ids.len(), 2);
        assert!(TokenizeRequest::parse(br#"{"inputs":[1,2]}"#).is_err());
    }
}
