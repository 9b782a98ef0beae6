//! `POST /v1/embeddings`.

use axum::response::Response;
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use pharos::model::pooling::PoolingTask;
use serde::Serialize;
use serde::ser::{SerializeMap, Serializer};

use crate::answer::Failure;
use crate::edge::{Received, log_unknown, on_a_thread_if};
use crate::error::ApiError;
use crate::json::{Budget, Fields, invalid};
use crate::options::RequestOptions;
use crate::pooling::{Item, Pooled, PoolingModel, PoolingOptions};
use crate::prompt::Prompt;
use crate::response::{Head, Usage, to_json};

/// The most texts of a request, as OpenAI has it.
pub(crate) const MAX_TEXTS: usize = 2048;
/// Responses with more elements than this are written on a blocking thread.
const LONG: usize = 1 << 16;
/// The longest name of a prompt, in bytes.
pub(crate) const MAX_PROMPT_NAME: usize = 256;
/// The most elements of a vector that a client can ask for.
const MAX_DIMENSIONS: i64 = 1 << 20;

/// A checked request of `POST /v1/embeddings`.
#[derive(Debug, Clone, PartialEq)]
pub struct EmbeddingRequest {
    /// The texts, from 1 to 2,048.
    pub input: Vec<Prompt>,
    /// Whether vectors are sent as base64 of their bytes (little-endian 32-bit floating-point).
    pub is_base64: bool,
    /// The name of the text that the model puts before each text.
    pub prompt_name: Option<String>,
    pub(crate) pooling: PoolingOptions,
    /// Model and extensions.
    pub options: RequestOptions,
    /// The names of unknown fields, at most 16. They have no effect.
    pub unknown: Vec<String>,
}

impl EmbeddingRequest {
    /// Parses and checks the body of a request.
    ///
    /// # Errors
    ///
    /// 400, with the field at fault in dotted form.
    pub fn parse(body: &[u8]) -> Result<Self, ApiError> {
        let mut fields = Fields::of_body(body)?;
        let options = read_options(&mut fields)?;
        let Some(input) = fields.take("input") else { return Err(fields.missing("input")) };
        let input = Prompt::read_all(input, "input", MAX_TEXTS)?;
        let is_base64 = match fields.text("encoding_format", 64)?.as_deref() {
            None | Some("float") => false,
            Some("base64") => true,
            Some(other) => return Err(invalid("encoding_format", other, "float or base64")),
        };
        let dimensions = fields.integer("dimensions", 1..=MAX_DIMENSIONS)?;
        Ok(Self {
            input,
            is_base64,
            prompt_name: fields.text("prompt_name", MAX_PROMPT_NAME)?,
            pooling: PoolingOptions {
                dimensions: dimensions.and_then(|number| usize::try_from(number).ok()),
                ..read_pooling(&mut fields)?
            },
            options,
            unknown: fields.unknown(),
        })
    }
}

/// Reads the fields that requests for vectors and scores share with those for text. A stream is
/// refused.
pub(crate) fn read_options(fields: &mut Fields<'_>) -> Result<RequestOptions, ApiError> {
    let options = RequestOptions::read(fields, &mut Budget::new())?;
    match options.stream {
        None => Ok(options),
        Some(_) => Err(ApiError::invalid_field(
            "stream",
            "stream true is not available here: the response is whole",
        )),
    }
}

/// Reads what applies to all texts of a request.
pub(crate) fn read_pooling(fields: &mut Fields<'_>) -> Result<PoolingOptions, ApiError> {
    let truncate = fields.integer("truncate_prompt_tokens", -1..=i64::from(i32::MAX))?;
    if truncate == Some(0) {
        let allowed = "-1, for the context of the model, or an integer above 0";
        return Err(invalid("truncate_prompt_tokens", "0", allowed));
    }
    Ok(PoolingOptions {
        truncate: truncate.and_then(|number| i32::try_from(number).ok()),
        normalize: fields.boolean("normalize")?,
        add_special_tokens: fields.boolean("add_special_tokens")?,
        ..PoolingOptions::default()
    })
}

/// Returns the model that a request names.
pub(crate) async fn model_of(
    received: &mut Received,
    options: &RequestOptions,
) -> Result<PoolingModel, Failure> {
    let name = received.enter_model(options).await?;
    Ok(PoolingModel::of(&*received.edge.service.model_config(&name, "")?)?)
}

/// Answers a request.
pub(crate) async fn answer(mut received: Received) -> Response {
    let answer = embed(&mut received).await;
    received.finish(answer)
}

async fn embed(received: &mut Received) -> Result<Vec<u8>, Failure> {
    let mut request = received.parse(EmbeddingRequest::parse).await?;
    request.options.set_path(received.segments.take());
    let model = model_of(received, &request.options).await?;
    let Received { edge, call, id, .. } = received;
    log_unknown(&model.name, &request.unknown);
    model.expect(PoolingTask::Embed)?;
    let prompt_name = request.prompt_name.as_deref();
    let items: Vec<Item<'_>> =
        request.input.iter().map(|text| Item { prompt_name, ..Item::of(text) }).collect();
    let Pooled { values, tokens, timeline } =
        model.run(edge, call, &items, request.pooling).await?;
    call.set_times(&timeline);
    let response = EmbeddingList {
        head: id.head("embd", &request.options, &model.name),
        vectors: values,
        is_base64: request.is_base64,
        usage: usage(tokens),
    };
    let elements: usize = response.vectors.iter().map(Vec::len).sum();
    Ok(on_a_thread_if(elements > LONG, move || to_json(&response)).await?)
}

/// Returns the usage of a request without output.
pub(crate) fn usage(tokens: Option<u64>) -> Option<Usage> {
    tokens.map(|prompt_tokens| Usage { prompt_tokens, ..Usage::default() })
}

/// The response.
struct EmbeddingList {
    head: Head,
    vectors: Vec<Vec<f32>>,
    is_base64: bool,
    usage: Option<Usage>,
}

impl Serialize for EmbeddingList {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut map = serializer.serialize_map(None)?;
        self.head.write("list", &mut map)?;
        let data: Vec<Embedding<'_>> = (0..)
            .zip(&self.vectors)
            .map(|(index, vector)| Embedding { index, vector, is_base64: self.is_base64 })
            .collect();
        map.serialize_entry("data", &data)?;
        map.serialize_entry("usage", &self.usage)?;
        map.end()
    }
}

struct Embedding<'a> {
    index: usize,
    vector: &'a [f32],
    is_base64: bool,
}

impl Serialize for Embedding<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut map = serializer.serialize_map(Some(3))?;
        map.serialize_entry("index", &self.index)?;
        map.serialize_entry("object", "embedding")?;
        if self.is_base64 {
            let bytes: Vec<u8> = self.vector.iter().flat_map(|value| value.to_le_bytes()).collect();
            map.serialize_entry("embedding", &STANDARD.encode(bytes))?;
        } else {
            map.serialize_entry("embedding", self.vector)?;
        }
        map.end()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(body: &str) -> Result<EmbeddingRequest, ApiError> {
        EmbeddingRequest::parse(body.as_bytes())
    }

    #[test]
    fn fields() {
        let request = parse(
            r#"{"model":"m","input":["a","b"],"encoding_format":"base64","dimensions":8,
            "truncate_prompt_tokens":-1,"normalize":false,"user":"u","x":1}"#,
        )
        .unwrap();
        assert_eq!(request.input.len(), 2);
        assert!(request.is_base64);
        assert_eq!(request.pooling.dimensions, Some(8));
        assert_eq!(request.pooling.truncate, Some(-1));
        assert_eq!(request.pooling.normalize, Some(false));
        assert_eq!(request.unknown, ["x"]);
    }

    #[test]
    fn wrong_fields_are_named() {
        for (body, param, part) in [
            (r#"{"input":[]}"#, "input", "none of them empty"),
            (r#"{}"#, "input", "missing"),
            (r#"{"input":"a","encoding_format":"hex"}"#, "encoding_format", "float or base64"),
            (r#"{"input":"a","dimensions":0}"#, "dimensions", "from 1"),
            (r#"{"input":"a","truncate_prompt_tokens":0}"#, "truncate_prompt_tokens", "-1"),
            (r#"{"input":"a","stream":true}"#, "stream", "whole"),
        ] {
            let error = parse(body).unwrap_err();
            assert_eq!(error.param.as_deref(), Some(param), "{body}");
            assert!(error.message.contains(part), "{body}: {}", error.message);
        }
        let many = format!(r#"{{"input":[{}"a"]}}"#, "\"a\",".repeat(MAX_TEXTS));
        assert!(parse(&many).is_err());
    }
}
