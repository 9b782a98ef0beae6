//! `POST /v1/classify`: the class of each text.
//!
//! Source of the form: vLLM 0.32.

use axum::response::Response;
use pharos::model::ModelConfig;
use pharos::model::pooling::PoolingTask;
use pharos::model::text_files::LABELS;
use serde::Serialize;
use serde::ser::{SerializeMap, Serializer};

use crate::answer::Failure;
use crate::edge::{Received, log_unknown};
use crate::embeddings::{MAX_TEXTS, model_of, read_options, read_pooling, usage};
use crate::error::ApiError;
use crate::json::Fields;
use crate::options::RequestOptions;
use crate::pooling::{Item, Pooled, PoolingOptions};
use crate::prompt::Prompt;
use crate::response::{Head, Usage, to_json};

/// A checked request of `POST /v1/classify`.
#[derive(Debug, Clone, PartialEq)]
pub struct ClassifyRequest {
    /// The texts, from 1 to 2,048.
    pub input: Vec<Prompt>,
    pub(crate) pooling: PoolingOptions,
    /// Model and extensions.
    pub options: RequestOptions,
    /// The names of unknown fields, at most 16. They have no effect.
    pub unknown: Vec<String>,
}

impl ClassifyRequest {
    /// Parses and checks the body of a request.
    ///
    /// # Errors
    ///
    /// 400, with the field at fault in dotted form.
    pub fn parse(body: &[u8]) -> Result<Self, ApiError> {
        let mut fields = Fields::of_body(body)?;
        let options = read_options(&mut fields)?;
        let Some(input) = fields.take("input") else { return Err(fields.missing("input")) };
        // vLLM's name for the function that makes probabilities, which are logits without it.
        let makes_probabilities =
            fields.boolean("use_activation")?.or(fields.boolean("activation")?);
        Ok(Self {
            input: Prompt::read_all(input, "input", MAX_TEXTS)?,
            pooling: PoolingOptions {
                raw_scores: makes_probabilities.map(|wanted| !wanted),
                ..read_pooling(&mut fields)?
            },
            options,
            unknown: fields.unknown(),
        })
    }
}

/// Returns the labels of a model's classes; empty for a model without them.
pub(crate) fn labels(config: &ModelConfig) -> Vec<String> {
    let list = config.parameters.get(LABELS);
    list.and_then(|list| serde_json::from_str(list).ok()).unwrap_or_default()
}

/// Answers a request.
pub(crate) async fn answer(mut received: Received) -> Response {
    let answer = classify(&mut received).await;
    received.finish(answer)
}

async fn classify(received: &mut Received) -> Result<Vec<u8>, Failure> {
    let request = received.parse(ClassifyRequest::parse).await?;
    let model = model_of(received, &request.options).await?;
    model.expect(PoolingTask::Classify)?;
    let Received { edge, call, id, .. } = received;
    log_unknown(&model.name, &request.unknown);
    let labels = labels(&*edge.service.model_config(&model.name, "")?);
    let items: Vec<Item<'_>> = request.input.iter().map(Item::of).collect();
    let Pooled { values, tokens, timeline } =
        model.run(edge, call, &items, request.pooling).await?;
    call.set_times(&timeline);
    let head = id.head("classify", &request.options, &model.name);
    Ok(to_json(&ClassList { head, labels, probabilities: values, usage: usage(tokens) }))
}

/// The response.
struct ClassList {
    head: Head,
    labels: Vec<String>,
    probabilities: Vec<Vec<f32>>,
    usage: Option<Usage>,
}

#[derive(Serialize)]
struct Class<'a> {
    index: usize,
    label: Option<&'a str>,
    probs: &'a [f32],
    num_classes: usize,
}

impl Serialize for ClassList {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut map = serializer.serialize_map(None)?;
        self.head.write("list", &mut map)?;
        let classes = (0..).zip(&self.probabilities).map(|(index, probs)| {
            // The first of several equal ones.
            let all = probs.iter().enumerate().rev();
            let best = all.max_by(|(_, one), (_, other)| one.total_cmp(other));
            let label = best.and_then(|(at, _)| self.labels.get(at));
            Class { index, label: label.map(String::as_str), probs, num_classes: probs.len() }
        });
        map.serialize_entry("data", &classes.collect::<Vec<_>>())?;
        map.serialize_entry("usage", &self.usage)?;
        map.end()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fields() {
        let request = ClassifyRequest::parse(
            br#"{"model":"m","input":"a","use_activation":false,"truncate_prompt_tokens":-1}"#,
        );
        let pooling = request.unwrap().pooling;
        assert_eq!((pooling.raw_scores, pooling.truncate), (Some(true), Some(-1)));
        let error = ClassifyRequest::parse(br#"{"input":[]}"#).unwrap_err();
        assert_eq!(error.param.as_deref(), Some("input"));
    }
}
