//! Fields that chat and completion requests share, apart from sampling.

use serde_json::{Map, Value};

use crate::error::ApiError;
use crate::json::{Budget, Fields, invalid};

/// The longest name of a model, in bytes.
pub const MAX_MODEL_BYTES: usize = 1_024;
/// The longest id of a request or session, in bytes.
pub const MAX_ID_BYTES: usize = 256;
/// The longest cache salt, in characters.
pub const MAX_CACHE_SALT_CHARACTERS: usize = 128;
/// The most tokens between two chunks of a stream that a client may ask for.
pub const MAX_STREAM_INTERVAL: i64 = 1_024;

/// OpenAI's fields that have no effect here.
const IGNORED: [&str; 7] = [
    "user",
    "store",
    "metadata",
    "service_tier",
    "prompt_cache_key",
    "safety_identifier",
    "prompt_cache_retention",
];

/// What a streamed response includes.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct StreamOptions {
    /// A last chunk without choices has the usage.
    pub include_usage: bool,
    /// Every chunk has the usage so far (vLLM's extension).
    pub continuous_usage_stats: bool,
}

/// Fields that are neither the prompt nor sampling.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct RequestOptions {
    /// The name of the model; `None` means the server's only model.
    pub model: Option<String>,
    /// The version in the path of the request.
    pub version: Option<String>,
    /// Set if the response is a stream.
    pub stream: Option<StreamOptions>,
    /// The client's id of the request (vLLM's extension), at most 256 bytes.
    pub request_id: Option<String>,
    /// The client's id of the session (vLLM's extension), at most 256 bytes.
    pub session_id: Option<String>,
    /// Separates prefix caches: at most 128 characters without `@`, `/` and `\` (vLLM's extension).
    pub cache_salt: Option<String>,
    /// Choices include token ids (vLLM's extension).
    pub return_token_ids: bool,
    /// Tokens of log probabilities are written as `token_id:N` (vLLM's extension).
    pub return_tokens_as_token_ids: bool,
    /// Tokens between two chunks of a stream (vLLM's extension).
    pub stream_interval: Option<u32>,
    /// Parameters for extensions of the engine (vLLM's extension).
    pub vllm_xargs: Option<Map<String, Value>>,
    /// Parameters of a transfer of key-value caches between engines (vLLM's extension).
    pub kv_transfer_params: Option<Map<String, Value>>,
}

impl RequestOptions {
    /// Reads the fields that the server itself needs, whatever the model is.
    pub(crate) fn read_common(fields: &mut Fields<'_>) -> Result<Self, ApiError> {
        Ok(Self {
            model: fields.text("model", MAX_MODEL_BYTES)?,
            stream: read_stream(fields)?,
            request_id: read_request_id(fields)?,
            session_id: fields.text("session_id", MAX_ID_BYTES)?,
            cache_salt: read_cache_salt(fields)?,
            ..Self::default()
        })
    }

    pub(crate) fn read(fields: &mut Fields<'_>, budget: &mut Budget) -> Result<Self, ApiError> {
        fields.ignore(&IGNORED);
        Ok(Self {
            return_token_ids: fields.boolean("return_token_ids")?.unwrap_or(false),
            return_tokens_as_token_ids: fields
                .boolean("return_tokens_as_token_ids")?
                .unwrap_or(false),
            stream_interval: fields
                .integer("stream_interval", 1..=MAX_STREAM_INTERVAL)?
                .and_then(|tokens| u32::try_from(tokens).ok()),
            vllm_xargs: fields.object("vllm_xargs", budget)?,
            kv_transfer_params: fields.object("kv_transfer_params", budget)?,
            ..Self::read_common(fields)?
        })
    }

    /// Takes the model, and the version if there is one, from the segments of a path.
    pub(crate) fn set_path(&mut self, segments: Option<Vec<String>>) {
        let mut segments = segments.into_iter().flatten();
        if let Some(model) = segments.next() {
            self.model = Some(model);
            self.version = segments.next();
        }
    }

    /// Adds the parameters of extensions where vLLM expects them: in `extra_args` of its sampling
    /// parameters.
    pub(crate) fn add_extra_args(&self, extra_args: &mut Map<String, Value>) {
        if let Some(own) = &self.vllm_xargs {
            extra_args.extend(own.iter().map(|(name, value)| (name.clone(), value.clone())));
        }
        if let Some(transfer) = &self.kv_transfer_params {
            extra_args.insert("kv_transfer_params".to_owned(), Value::Object(transfer.clone()));
        }
    }
}

/// Reads the client's id of the request, which log lines and answers have.
fn read_request_id(fields: &mut Fields<'_>) -> Result<Option<String>, ApiError> {
    let Some(id) = fields.text("request_id", MAX_ID_BYTES)? else { return Ok(None) };
    if id.is_empty() || !id.bytes().all(|byte| byte.is_ascii_graphic()) {
        let allowed = format_args!("1 to {MAX_ID_BYTES} characters of ASCII without spaces");
        return Err(invalid("request_id", &id.escape_debug().to_string(), allowed));
    }
    Ok(Some(id))
}

fn read_stream(fields: &mut Fields<'_>) -> Result<Option<StreamOptions>, ApiError> {
    let stream = fields.boolean("stream")?.unwrap_or(false);
    let Some(value) = fields.take("stream_options") else {
        return Ok(stream.then(StreamOptions::default));
    };
    if !stream {
        return Err(ApiError::invalid_field(
            "stream_options",
            "stream_options is only allowed with stream true",
        ));
    }
    let mut options = Fields::of_member(value, "stream_options")?;
    Ok(Some(StreamOptions {
        include_usage: options.boolean("include_usage")?.unwrap_or(false),
        continuous_usage_stats: options.boolean("continuous_usage_stats")?.unwrap_or(false),
    }))
}

fn read_cache_salt(fields: &mut Fields<'_>) -> Result<Option<String>, ApiError> {
    let Some(value) = fields.take("cache_salt") else { return Ok(None) };
    match serde_json::from_str::<String>(value.get()) {
        Ok(salt)
            if !salt.is_empty()
                && salt.chars().count() <= MAX_CACHE_SALT_CHARACTERS
                && !salt.contains(['@', '/', '\\']) =>
        {
            Ok(Some(salt))
        }
        _ => {
            let allowed = format_args!(
                "a string of 1 to {MAX_CACHE_SALT_CHARACTERS} characters without @, / and \\"
            );
            Err(invalid("cache_salt", value.get(), allowed))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(body: &str) -> Result<RequestOptions, ApiError> {
        let mut fields = Fields::of_body(body.as_bytes())?;
        let options = RequestOptions::read(&mut fields, &mut Budget::new())?;
        assert!(fields.unknown().is_empty());
        Ok(options)
    }

    #[test]
    fn streams() {
        assert_eq!(read("{}").unwrap().stream, None);
        assert_eq!(read(r#"{"stream_options":null}"#).unwrap().stream, None);
        assert_eq!(read(r#"{"stream":true}"#).unwrap().stream, Some(StreamOptions::default()));
        let options = read(r#"{"stream":true,"stream_options":{"include_usage":true,"x":1}}"#);
        assert!(options.unwrap().stream.unwrap().include_usage);
        for body in [r#"{"stream_options":{}}"#, r#"{"stream":true,"stream_options":7}"#] {
            assert_eq!(read(body).unwrap_err().param.as_deref(), Some("stream_options"));
        }
        let error = read(r#"{"stream":true,"stream_options":{"include_usage":1}}"#).unwrap_err();
        assert_eq!(error.param.as_deref(), Some("stream_options.include_usage"));
    }

    #[test]
    fn extensions() {
        let options = read(
            r#"{"model":"m","request_id":"r","session_id":"s","cache_salt":"c",
                "return_token_ids":true,"return_tokens_as_token_ids":true,"stream_interval":4,
                "vllm_xargs":{"a":1},"kv_transfer_params":{"b":2},"user":"u","store":true,
                "metadata":{},"service_tier":"auto","prompt_cache_key":"k","safety_identifier":"i"}"#,
        )
        .unwrap();
        assert_eq!(options.model.as_deref(), Some("m"));
        assert_eq!(options.stream_interval, Some(4));
        assert_eq!(options.vllm_xargs.unwrap()["a"], 1);
        for salt in ["", "a/b", "a@b", "a\\\\b", &"x".repeat(129)] {
            let error = read(&format!(r#"{{"cache_salt":"{salt}"}}"#)).unwrap_err();
            assert_eq!(error.param.as_deref(), Some("cache_salt"));
        }
    }
}
