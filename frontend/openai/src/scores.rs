//! `POST /v1/rerank` and `POST /v1/score`: how well texts fit to a query.
//!
//! A model that scores pairs computes each pair. With a model that makes embeddings, the score is
//! the cosine of the angle between the two vectors, as in vLLM.
//!
//! Sources of the forms: Jina's and Cohere's APIs (`rerank`) and vLLM 0.32.

use axum::response::Response;
use pharos::model::pooling::PoolingTask;
use serde::ser::{SerializeMap, Serializer};
use serde::{Deserialize, Serialize};

use crate::answer::Failure;
use crate::edge::{Received, log_unknown};
use crate::embeddings::{MAX_TEXTS, model_of, read_options, read_pooling, usage};
use crate::error::ApiError;
use crate::json::{Fields, bounded_list, invalid};
use crate::options::RequestOptions;
use crate::pooling::{Item, Pooled, PoolingModel, PoolingOptions};
use crate::prompt::Prompt;
use crate::response::{Head, Usage, to_json};

/// A checked request of `POST /v1/rerank`.
#[derive(Debug, Clone, PartialEq)]
pub struct RerankRequest {
    /// The text that documents are compared with.
    pub query: String,
    /// The documents, from 1 to 2,048.
    pub documents: Vec<String>,
    /// The most results; `None` for all.
    pub top_n: Option<usize>,
    /// Whether results have the text of their document.
    pub return_documents: bool,
    pub(crate) pooling: PoolingOptions,
    /// Model and extensions.
    pub options: RequestOptions,
    /// The names of unknown fields, at most 16. They have no effect.
    pub unknown: Vec<String>,
}

/// A checked request of `POST /v1/score`.
#[derive(Debug, Clone, PartialEq)]
pub struct ScoreRequest {
    /// The first texts: one, or as many as second ones.
    pub first: Vec<String>,
    /// The second texts, from 1 to 2,048.
    pub second: Vec<String>,
    pub(crate) pooling: PoolingOptions,
    /// Model and extensions.
    pub options: RequestOptions,
    /// The names of unknown fields, at most 16. They have no effect.
    pub unknown: Vec<String>,
}

/// A document: a text, or an object with one.
#[derive(Deserialize)]
#[serde(untagged)]
enum Document {
    Text(String),
    Object { text: String },
}

impl RerankRequest {
    /// Parses and checks the body of a request.
    ///
    /// # Errors
    ///
    /// 400, with the field at fault in dotted form.
    pub fn parse(body: &[u8]) -> Result<Self, ApiError> {
        let mut fields = Fields::of_body(body)?;
        let options = read_options(&mut fields)?;
        let Some(query) = fields.text("query", usize::MAX)? else {
            return Err(fields.missing("query"));
        };
        let Some(documents) = fields.take("documents") else {
            return Err(fields.missing("documents"));
        };
        let list = bounded_list::<Document>(documents.get(), MAX_TEXTS);
        let list = list.filter(|list| !list.is_empty()).ok_or_else(|| {
            let allowed =
                format_args!("a list of 1 to {MAX_TEXTS} strings or objects with the member text");
            invalid("documents", documents.get(), allowed)
        })?;
        let texts = list.into_iter().map(|document| match document {
            Document::Text(text) | Document::Object { text } => text,
        });
        let top_n = fields.integer("top_n", 0..=i64::from(i32::MAX))?;
        Ok(Self {
            query,
            documents: texts.collect(),
            top_n: top_n.and_then(|most| usize::try_from(most).ok()).filter(|most| *most > 0),
            return_documents: fields.boolean("return_documents")?.unwrap_or(true),
            pooling: read_pooling(&mut fields)?,
            options,
            unknown: fields.unknown(),
        })
    }
}

impl ScoreRequest {
    /// Parses and checks the body of a request.
    ///
    /// # Errors
    ///
    /// 400, with the field at fault in dotted form.
    pub fn parse(body: &[u8]) -> Result<Self, ApiError> {
        let mut fields = Fields::of_body(body)?;
        let options = read_options(&mut fields)?;
        let first = read_side(&mut fields, ["text_1", "queries", "data_1"])?;
        let second = read_side(&mut fields, ["text_2", "documents", "data_2"])?;
        if first.len() != 1 && first.len() != second.len() {
            return Err(ApiError::invalid_field(
                "text_1",
                format!(
                    "text_1 has {} texts and text_2 has {}: text_1 must have one, or as many as \
                     text_2",
                    first.len(),
                    second.len()
                ),
            ));
        }
        Ok(Self {
            first,
            second,
            pooling: read_pooling(&mut fields)?,
            options,
            unknown: fields.unknown(),
        })
    }
}

/// Reads one side of the pairs, which has several names.
fn read_side(fields: &mut Fields<'_>, names: [&str; 3]) -> Result<Vec<String>, ApiError> {
    let found = names.into_iter().find_map(|name| Some((name, fields.take(name)?)));
    let Some((name, value)) = found else { return Err(fields.missing(names[0])) };
    let texts = match serde_json::from_str::<String>(value.get()) {
        Ok(text) => Some(vec![text]),
        Err(_) => bounded_list::<String>(value.get(), MAX_TEXTS),
    };
    texts.filter(|texts| !texts.is_empty()).ok_or_else(|| {
        let allowed = format_args!("a string or a list of 1 to {MAX_TEXTS} strings");
        invalid(name, value.get(), allowed)
    })
}

/// The scores of pairs.
pub(crate) struct Scores {
    pub(crate) values: Vec<f32>,
    usage: Option<Usage>,
}

/// Computes the score of each second text with its first one.
pub(crate) async fn score(
    received: &mut Received,
    model: &PoolingModel,
    first: &[String],
    second: &[String],
    options: PoolingOptions,
) -> Result<Scores, Failure> {
    let Received { edge, call, .. } = received;
    let prompts = |texts: &[String]| -> Vec<Prompt> {
        texts.iter().map(|text| Prompt::Text(text.clone())).collect()
    };
    let firsts = prompts(first);
    let Pooled { values, tokens, timeline } = match model.task {
        PoolingTask::Score => {
            let pairs = firsts.iter().cycle().zip(second);
            let items: Vec<Item<'_>> =
                pairs.map(|(text, pair)| Item { pair: Some(pair), ..Item::of(text) }).collect();
            model.run(edge, call, &items, options).await?
        }
        PoolingTask::Embed => {
            let seconds = prompts(second);
            let all = firsts.iter().chain(&seconds);
            let items: Vec<Item<'_>> = all.map(Item::of).collect();
            let mut pooled = model.run(edge, call, &items, options).await?;
            let of_second = pooled.values.split_off(firsts.len().min(pooled.values.len()));
            let pairs = pooled.values.iter().cycle().zip(&of_second);
            pooled.values = pairs.map(|(one, other)| vec![cosine(one, other)]).collect();
            pooled
        }
        _ => {
            model.expect(PoolingTask::Score)?;
            Pooled::default()
        }
    };
    call.set_times(&timeline);
    let values = values.iter().filter_map(|values| values.first().copied()).collect();
    Ok(Scores { values, usage: usage(tokens) })
}

/// Returns the cosine of the angle between two vectors; 0 for one without a direction.
fn cosine(one: &[f32], other: &[f32]) -> f32 {
    let product = |a: &[f32], b: &[f32]| -> f64 {
        a.iter().zip(b).map(|(a, b)| f64::from(*a) * f64::from(*b)).sum()
    };
    let lengths = (product(one, one) * product(other, other)).sqrt();
    if lengths > 0.0 { (product(one, other) / lengths) as f32 } else { 0.0 }
}

/// Answers a request of `POST /v1/rerank`.
pub(crate) async fn rerank(mut received: Received) -> Response {
    let ranked = ranking(&mut received).await;
    received.finish(ranked)
}

/// Answers a request of `POST /v1/score`.
pub(crate) async fn pairs(mut received: Received) -> Response {
    let scored = scoring(&mut received).await;
    received.finish(scored)
}

async fn ranking(received: &mut Received) -> Result<Vec<u8>, Failure> {
    let request = received.parse(RerankRequest::parse).await?;
    let model = model_of(received, &request.options).await?;
    log_unknown(&model.name, &request.unknown);
    let query = std::slice::from_ref(&request.query);
    let scores = score(received, &model, query, &request.documents, request.pooling).await?;
    let mut results: Vec<RankedDocument<'_>> = (0..)
        .zip(&request.documents)
        .zip(&scores.values)
        .map(|((index, text), score)| RankedDocument {
            index,
            document: request.return_documents.then_some(DocumentText { text }),
            relevance_score: *score,
        })
        .collect();
    // Equal documents keep their order.
    results.sort_by(|one, other| other.relevance_score.total_cmp(&one.relevance_score));
    results.truncate(request.top_n.unwrap_or(usize::MAX));
    Ok(to_json(&Ranking {
        id: received.id.head("rerank", &request.options, &model.name).id,
        model: &model.name,
        usage: scores.usage.map(TotalUsage::of),
        results,
    }))
}

async fn scoring(received: &mut Received) -> Result<Vec<u8>, Failure> {
    let request = received.parse(ScoreRequest::parse).await?;
    let model = model_of(received, &request.options).await?;
    log_unknown(&model.name, &request.unknown);
    let scores = score(received, &model, &request.first, &request.second, request.pooling).await?;
    let head = received.id.head("score", &request.options, &model.name);
    Ok(to_json(&ScoreList { head, scores }))
}

#[derive(Serialize)]
struct Ranking<'a> {
    id: String,
    model: &'a str,
    usage: Option<TotalUsage>,
    results: Vec<RankedDocument<'a>>,
}

#[derive(Serialize)]
struct TotalUsage {
    prompt_tokens: u64,
    total_tokens: u64,
}

impl TotalUsage {
    fn of(usage: Usage) -> Self {
        Self { prompt_tokens: usage.prompt_tokens, total_tokens: usage.prompt_tokens }
    }
}

#[derive(Serialize)]
struct RankedDocument<'a> {
    index: usize,
    #[serde(skip_serializing_if = "Option::is_none")]
    document: Option<DocumentText<'a>>,
    relevance_score: f32,
}

#[derive(Serialize)]
struct DocumentText<'a> {
    text: &'a str,
}

struct ScoreList {
    head: Head,
    scores: Scores,
}

#[derive(Serialize)]
struct Score {
    index: usize,
    object: &'static str,
    score: f32,
}

impl Serialize for ScoreList {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut map = serializer.serialize_map(None)?;
        self.head.write("list", &mut map)?;
        let scores = (0..).zip(&self.scores.values);
        let data: Vec<Score> =
            scores.map(|(index, score)| Score { index, object: "score", score: *score }).collect();
        map.serialize_entry("data", &data)?;
        map.serialize_entry("usage", &self.scores.usage)?;
        map.end()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn documents_are_texts_or_objects() {
        let body = br#"{"query":"q","documents":["a",{"text":"b","x":1}],"top_n":0}"#;
        let request = RerankRequest::parse(body).unwrap();
        assert_eq!(request.documents, ["a", "b"]);
        assert_eq!((request.top_n, request.return_documents), (None, true));
        for body in [r#"{"query":"q","documents":[]}"#, r#"{"query":"q","documents":[5]}"#] {
            let error = RerankRequest::parse(body.as_bytes()).unwrap_err();
            assert_eq!(error.param.as_deref(), Some("documents"));
        }
    }

    #[test]
    fn pairs_have_several_names() {
        for body in [
            r#"{"text_1":"a","text_2":["b","c"]}"#,
            r#"{"queries":"a","documents":["b","c"]}"#,
            r#"{"data_1":["a"],"data_2":["b","c"]}"#,
        ] {
            let request = ScoreRequest::parse(body.as_bytes()).unwrap();
            assert_eq!((request.first.len(), request.second.len()), (1, 2));
        }
        let body = br#"{"text_1":["a","b"],"text_2":["c","d","e"]}"#;
        assert!(
            ScoreRequest::parse(body).unwrap_err().message.contains("2 texts and text_2 has 3")
        );
    }

    #[test]
    fn the_cosine_of_vectors_of_any_length() {
        assert_eq!(cosine(&[2.0, 0.0], &[3.0, 0.0]), 1.0);
        assert_eq!(cosine(&[1.0, 0.0], &[0.0, 1.0]), 0.0);
        assert_eq!(cosine(&[0.0, 0.0], &[0.0, 1.0]), 0.0);
    }
}
