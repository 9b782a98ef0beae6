//! Models that implement OpenAI's API themselves: the JSON of a request goes to the model as it is, and
//! the JSON of the model is the response, or a chunk of a stream.
//!
//! [`pharos::model::openai`] has the names of the tensors. Of a request, only what the server itself
//! needs is read: the model, the stream, and the ids. Of an answer, only whether it is an object and
//! an error.

use std::future::poll_fn;
use std::task::{Context, Poll, ready};

use axum::body::Body;
use axum::response::Response;
use pharos::error::InferError;
use pharos::infer::{InferInput, InferResponse};
use pharos::model::ModelConfig;
use pharos::model::openai::{OPENAI_PATH, OPENAI_REQUEST, OPENAI_RESPONSE, implements_openai};
use pharos::request_trace::Operation;
use pharos::service::{Protocol, Responses, Streamed};
use pharos::tensor::DataType;
use pharos::timeline::Timeline;
use serde::Deserialize;
use serde_json::value::RawValue;
use serde_json::{Value, json};

use crate::answer::Failure;
use crate::contract::{strings, violation};
use crate::edge::{Edge, LONG, Received, on_a_thread_if};
use crate::error::{ApiError, quoted};
use crate::events::{Source, Written};
use crate::json::Fields;
use crate::models::is_switched_off;
use crate::options::RequestOptions;
use crate::respond::stream;
use crate::response::DONE_EVENT;
use crate::tensors;

/// The paths of requests to models, below `/v1`.
pub(crate) const CHATS: &str = "chat/completions";
pub(crate) const COMPLETIONS: &str = "completions";
pub(crate) const EMBEDDINGS: &str = "embeddings";
pub(crate) const RESPONSES: &str = "responses";
pub(crate) const RERANK: &str = "rerank";
pub(crate) const SCORE: &str = "score";
pub(crate) const CLASSIFY: &str = "classify";
pub(crate) const TOKENIZE: &str = "tokenize";
pub(crate) const DETOKENIZE: &str = "detokenize";
const PATHS: [&str; 9] =
    [CHATS, COMPLETIONS, EMBEDDINGS, RESPONSES, RERANK, SCORE, CLASSIFY, TOKENIZE, DETOKENIZE];

/// The parameter of a model's configuration with the paths that it answers, separated by commas.
const OPENAI_PATHS: &str = "openai_paths";
/// The input that says whether the client wants a stream, as vllm_backend has it.
const STREAM: &str = "stream";

/// A model that implements OpenAI's API itself.
#[derive(Clone, Debug)]
pub(crate) struct Passthrough {
    name: String,
    /// The value of the parameter with its paths.
    paths: Option<String>,
    has_path: bool,
    has_stream: bool,
    has_batch: bool,
    is_decoupled: bool,
}

impl Passthrough {
    /// Returns a model if it implements OpenAI's API itself, and the API serves it.
    fn of(config: &ModelConfig) -> Option<Self> {
        let has = |name: &str, datatype: DataType| {
            config.inputs.iter().any(|spec| spec.name == name && spec.datatype == datatype)
        };
        let is_served = implements_openai(config) && !is_switched_off(config);
        is_served.then(|| Self {
            name: config.name.clone(),
            paths: config.parameters.get(OPENAI_PATHS).cloned(),
            has_path: has(OPENAI_PATH, DataType::Bytes),
            has_stream: has(STREAM, DataType::Bool),
            has_batch: config.max_batch_size > 0,
            is_decoupled: config.decoupled,
        })
    }

    /// Returns the model that a request names if it implements OpenAI's API itself. A model that is
    /// loaded on demand is loaded. Other requests, also wrong ones, are for the other handlers.
    pub(crate) async fn named_by(received: &Received) -> Option<Self> {
        let Edge { service, models, .. } = &received.edge;
        let of_path = received.segments.as_ref().and_then(|segments| segments.first());
        let named = match of_path {
            Some(name) => Some(name.clone()),
            None => received.parse(model_named_in).await.ok()?,
        };
        let name = match named {
            Some(name) => name,
            None => models.only(&**service).await?,
        };
        let config = match service.model_config(&name, "") {
            Ok(config) => config,
            Err(_) => {
                service.demand(&name, "", 0).await.ok()?;
                service.model_config(&name, "").ok()?
            }
        };
        Self::of(&config)
    }

    /// Checks that the model answers a path.
    fn check_path(&self, path: &str) -> Result<(), Failure> {
        let listed = self.paths.as_deref().unwrap_or(CHATS).split(',').map(str::trim);
        let paths: Vec<&str> = listed.collect();
        let wrong = paths.iter().find(|path| !PATHS.contains(path));
        let why = match wrong {
            Some(wrong) => format!(
                "its parameter '{OPENAI_PATHS}' has '{}'; allowed are {}",
                wrong.escape_debug(),
                PATHS.join(", ")
            ),
            None if paths.len() > 1 && !self.has_path => format!(
                "its parameter '{OPENAI_PATHS}' has {} paths, and it has no input '{OPENAI_PATH}'",
                paths.len()
            ),
            None if paths.contains(&path) => return Ok(()),
            None => {
                let message = format!(
                    "the model '{}' does not answer /v1/{path}: its paths are {}",
                    self.name,
                    paths.join(", ")
                );
                let code = Some("model_not_supported");
                return Err(ApiError { code, ..ApiError::invalid_field("model", message) }.into());
            }
        };
        let message = format!("the model '{}' cannot be served: {why}", self.name);
        Err(ApiError::internal(message).into())
    }

    fn inputs(
        &self,
        path: &str,
        request: &str,
        is_streamed: bool,
    ) -> Result<Vec<InferInput>, ApiError> {
        let mut inputs = vec![self.string(OPENAI_REQUEST, request)?];
        if self.has_path {
            inputs.push(self.string(OPENAI_PATH, path)?);
        }
        if self.has_stream {
            inputs.push(self.input(STREAM, DataType::Bool, vec![is_streamed.into()]));
        }
        Ok(inputs)
    }

    fn string(&self, name: &str, text: &str) -> Result<InferInput, ApiError> {
        Ok(self.input(name, DataType::Bytes, tensors::texts([text])?))
    }

    /// Returns an input of one element.
    fn input(&self, name: &str, datatype: DataType, data: Vec<u8>) -> InferInput {
        tensors::input(name, datatype, 1 + usize::from(self.has_batch), 1, data)
    }
}

/// Returns the model that the JSON of a request names.
fn model_named_in(body: &[u8]) -> Result<Option<String>, ApiError> {
    #[derive(Deserialize)]
    struct Named {
        model: Option<String>,
    }
    let named = serde_json::from_slice::<Named>(body);
    named.map(|named| named.model).map_err(|error| ApiError::invalid_request(error.to_string()))
}

/// Reads the fields of a request that the server itself needs.
fn read_options(body: &[u8]) -> Result<RequestOptions, ApiError> {
    RequestOptions::read_common(&mut Fields::of_body(body)?)
}

/// Answers a request to a path of the API with what the model answers.
pub(crate) async fn answer(
    mut received: Received,
    model: &Passthrough,
    path: &'static str,
) -> Response {
    let (mut answers, is_streamed) = match begin(&mut received, model, path).await {
        Ok(begun) => begun,
        Err(failure) => return received.fail(&failure),
    };
    if !is_streamed {
        return match answers.whole().await {
            Ok((Answer { text, error: None, .. }, timeline)) => {
                received.call.set_times(&timeline);
                received.finish(Ok(text.into_bytes()))
            }
            Ok((Answer { text, error: Some(error), .. }, _)) => fail_with(received, error, text),
            Err(error) => received.fail(&error.into()),
        };
    }
    let open = received.edge.service.stream_open(Protocol::Http);
    // The first response determines the status; later errors are events.
    let first = match answers.next().await {
        Some(Err(error)) => return received.fail(&error.into()),
        first => first,
    };
    let first = first.transpose().unwrap_or_default().unwrap_or_default();
    if let Some(Answer { error: Some(error), text, .. }) = first.first() {
        return fail_with(received, error.clone(), text.clone());
    }
    stream(received, Passed { answers, first, path, written: 0 }, open)
}

/// Begins the inference of a request. Returns also whether the client wants a stream.
async fn begin(
    received: &mut Received,
    model: &Passthrough,
    path: &str,
) -> Result<(Answers, bool), Failure> {
    let mut options = received.parse(read_options).await?;
    options.set_path(received.segments.take());
    let is_streamed = options.stream.is_some();
    received.enter_model(&options).await?;
    if let Some(traced) = received.call.traced()
        && [CHATS, RESPONSES].contains(&path)
    {
        traced.operation(Operation::Chat);
    }
    model.check_path(path)?;
    if is_streamed && !model.is_decoupled {
        let message =
            format!("stream true is not available: the model '{}' is not decoupled", model.name);
        return Err(ApiError::invalid_field("stream", message).into());
    }
    let body = received.body.clone();
    let request = String::from_utf8_lossy(&body);
    let inputs = model.inputs(path, &request, is_streamed)?;
    let id = received.id.head_beginning("", &options, &model.name).id;
    let responses = received.infer(&model.name, &id, &options, None, inputs)?;
    Ok((Answers { responses: Some(responses), timeline: Timeline::default() }, is_streamed))
}

/// Ends a request to which the model answers an error, with the JSON of the model.
fn fail_with(received: Received, error: ApiError, text: String) -> Response {
    let mut response = received.fail(&error.into());
    *response.body_mut() = Body::from(text);
    response
}

/// The answers of a model to one request. Dropping them before the last one cancels the request.
struct Answers {
    /// `None` after the last response.
    responses: Option<Box<dyn Responses>>,
    /// The times of the latest response.
    timeline: Timeline,
}

impl Answers {
    /// Returns the answers in the next response; `None` after the last one.
    fn next(&mut self) -> impl Future<Output = Option<Result<Vec<Answer>, InferError>>> {
        poll_fn(|cx| self.poll_next(cx))
    }

    fn poll_next(&mut self, cx: &mut Context<'_>) -> Poll<Option<Result<Vec<Answer>, InferError>>> {
        let Some(responses) = &mut self.responses else { return Poll::Ready(None) };
        let Some(Streamed { answer, last, empty }) = ready!(responses.poll_next(cx)) else {
            self.responses = None;
            return Poll::Ready(None);
        };
        if last {
            self.responses = None;
        }
        Poll::Ready(Some(answer.and_then(|response| {
            self.timeline = response.timeline;
            if empty { Ok(Vec::new()) } else { texts(&response)?.map(Answer::read).collect() }
        })))
    }

    /// Returns the only answer.
    async fn whole(&mut self) -> Result<(Answer, Timeline), InferError> {
        let mut only = None;
        while let Some(responses) = &mut self.responses {
            let Some(Streamed { answer, last, empty }) = responses.next_response().await else {
                break;
            };
            let response = answer?;
            if !empty {
                self.timeline = response.timeline;
                for text in texts(&response)? {
                    if only.replace(text).is_some() {
                        return Err(violation(OPENAI_RESPONSE));
                    }
                }
            }
            if last {
                break;
            }
        }
        let text = only.ok_or_else(|| violation(OPENAI_RESPONSE))?;
        let answer = on_a_thread_if(text.len() > LONG, || Answer::read(text)).await??;
        Ok((answer, self.timeline))
    }
}

/// Returns the JSON texts of a response.
fn texts(response: &InferResponse) -> Result<impl Iterator<Item = String> + use<>, InferError> {
    let found = response.outputs.iter().find(|output| output.name == OPENAI_RESPONSE);
    let output = found.ok_or_else(|| violation(OPENAI_RESPONSE))?;
    Ok(strings(&output.name, &output.tensor)?.into_iter())
}

/// An answer of a model, or a chunk: an object of JSON.
#[derive(Clone, Debug)]
struct Answer {
    /// The JSON, in one line.
    text: String,
    /// The type of an event of `responses`.
    kind: Option<String>,
    /// The error that the answer has.
    error: Option<ApiError>,
}

impl Answer {
    /// Reads the JSON of a model.
    ///
    /// # Errors
    /// The text is not an object of JSON.
    fn read(text: String) -> Result<Self, InferError> {
        #[derive(Deserialize)]
        struct Members<'a> {
            #[serde(borrow)]
            error: Option<&'a RawValue>,
            #[serde(borrow)]
            object: Option<&'a RawValue>,
            #[serde(borrow)]
            r#type: Option<&'a RawValue>,
        }
        let not_json = |error: serde_json::Error| {
            InferError::internal(format!(
                "the output '{OPENAI_RESPONSE}' of the model must be a JSON object: {error}"
            ))
        };
        // A list would be accepted too.
        if !text.trim_start().starts_with('{') {
            let message = format!("it is {}", quoted(&text));
            return Err(not_json(<serde_json::Error as serde::de::Error>::custom(message)));
        }
        let Members { error, object, r#type } =
            serde_json::from_str::<Members<'_>>(&text).map_err(not_json)?;
        let error = match (error, object.map(RawValue::get)) {
            // The older form of vLLM.
            (None, Some("\"error\"")) => Some(error_of(&text)),
            // A response of `responses` that failed has its error, and is complete.
            (Some(_), Some("\"response\"")) | (None, _) => None,
            (Some(error), _) => Some(error_of(error.get())),
        };
        let kind = r#type.and_then(|kind| serde_json::from_str(kind.get()).ok());
        // Line breaks are only between the tokens of JSON, never in its texts.
        let text = if text.contains(['\n', '\r']) { text.replace(['\n', '\r'], " ") } else { text };
        Ok(Self { text, kind, error })
    }
}

/// Returns the error of a model. Its status is the member `code`, if that is a status.
fn error_of(json: &str) -> ApiError {
    let value = serde_json::from_str::<Value>(json).unwrap_or_default();
    let member = |name: &str| value.get(name);
    let text = |name: &str| member(name).and_then(Value::as_str).map(str::to_owned);
    let message = text("message").or_else(|| value.as_str().map(str::to_owned));
    let message = message.unwrap_or_else(|| "the model answered with an error".to_owned());
    let number = |code: &Value| code.as_u64().or_else(|| code.as_str()?.parse().ok());
    let status = member("code").and_then(number).and_then(|code| u16::try_from(code).ok());
    let is_of_client = text("type").is_some_and(|kind| kind == "invalid_request_error");
    let status = status.filter(|status| (400..600).contains(status));
    let error = match status.unwrap_or(if is_of_client { 400 } else { 500 }) {
        status @ 500.. => ApiError { status, ..ApiError::internal(message) },
        status => ApiError { status, ..ApiError::invalid_request(message) },
    };
    ApiError { param: text("param"), ..error }
}

/// The events of a stream.
struct Passed {
    answers: Answers,
    /// The first answers, which were received before the body began.
    first: Vec<Answer>,
    path: &'static str,
    /// The number of events.
    written: u64,
}

impl Passed {
    fn write(&mut self, kind: Option<&str>, text: &str, out: &mut Vec<u8>) {
        if let Some(kind) = kind.filter(|_| self.path == RESPONSES) {
            out.extend_from_slice(format!("event: {}\n", kind.escape_debug()).as_bytes());
        }
        out.extend_from_slice(b"data: ");
        out.extend_from_slice(text.as_bytes());
        out.extend_from_slice(b"\n\n");
        self.written += 1;
    }

    fn write_end(&self, out: &mut Vec<u8>) {
        if self.path != RESPONSES {
            out.extend_from_slice(DONE_EVENT);
        }
    }

    /// Writes the event of a failure, in the form of the path.
    fn write_failure(&mut self, error: &ApiError, out: &mut Vec<u8>) {
        if self.path == RESPONSES {
            let ApiError { message, param, code, .. } = error;
            let event = json!({
                "type": "error",
                "code": code,
                "message": message,
                "param": param,
                "sequence_number": self.written,
            });
            self.write(Some("error"), &event.to_string(), out);
        } else {
            out.extend(error.to_event());
        }
    }
}

impl Source for Passed {
    fn poll_events(&mut self, cx: &mut Context<'_>, out: &mut Vec<u8>) -> Poll<Written> {
        let next = match std::mem::take(&mut self.first) {
            first if first.is_empty() => ready!(self.answers.poll_next(cx)),
            first => Some(Ok(first)),
        };
        let failure = match next {
            None => {
                self.write_end(out);
                return Poll::Ready(Written::End);
            }
            Some(Ok(answers)) => {
                let mut failure = None;
                for Answer { text, kind, error } in answers {
                    self.write(kind.as_deref(), &text, out);
                    if let Some(error) = error {
                        failure = Some(Failure::from(error).to_infer_error());
                        break;
                    }
                }
                let Some(failure) = failure else { return Poll::Ready(Written::Response) };
                failure
            }
            Some(Err(error)) => {
                self.write_failure(&Failure::from(error.clone()).error, out);
                error
            }
        };
        // Cancels the request, if it runs.
        self.answers.responses = None;
        self.write_end(out);
        Poll::Ready(Written::Failure(failure))
    }
}

#[cfg(test)]
mod tests {
    use pharos::model::{Completion, Draft};

    use super::*;

    fn model(more: &str) -> Passthrough {
        let completion =
            Completion { directory: "m", backends: &["python"], ..Completion::default() };
        let text = format!(
            "name: \"m\" backend: \"python\" \
             input {{ name: \"openai_request\" data_type: TYPE_STRING dims: [ 1 ] }} \
             output {{ name: \"openai_response\" data_type: TYPE_STRING dims: [ -1 ] }} {more}"
        );
        let draft = Draft::from_text(&text, "config.pbtxt").unwrap();
        Passthrough::of(&draft.complete(&completion).unwrap()).unwrap()
    }

    fn paths(paths: &str) -> String {
        format!("parameters {{ key: \"openai_paths\" value: {{ string_value: \"{paths}\" }} }} ")
    }

    const PATH: &str = "input { name: \"openai_path\" data_type: TYPE_STRING dims: [ 1 ] } ";

    #[test]
    fn a_model_answers_its_paths() {
        let status = |model: &Passthrough, path: &str| {
            model.check_path(path).map_or_else(|failure| failure.error.status, |()| 200)
        };
        let chats = model("");
        assert_eq!([CHATS, COMPLETIONS].map(|path| status(&chats, path)), [200, 400]);
        let several = model(&(paths("responses, score") + PATH));
        assert_eq!([CHATS, RESPONSES, SCORE].map(|path| status(&several, path)), [400, 200, 200]);
        for (more, part) in [
            (paths("responses,score"), "no input 'openai_path'"),
            (paths("chats") + PATH, "has 'chats'; allowed are chat/completions"),
        ] {
            let failure = model(&more).check_path(CHATS).unwrap_err();
            assert_eq!(failure.error.status, 500);
            assert!(failure.error.message.contains(part), "{}", failure.error.message);
        }
    }

    #[test]
    fn errors_are_found_in_answers() {
        let status = |json: &str| {
            let answer = Answer::read(json.to_owned()).unwrap();
            answer.error.map_or(200, |error| error.status)
        };
        for (json, expected) in [
            (r#"{"choices":[]}"#, 200),
            (r#"{"error":null}"#, 200),
            (r#"{"object":"response","status":"failed","error":{"code":"x"}}"#, 200),
            (r#"{"error":{"message":"m","code":404}}"#, 404),
            (r#"{"error":{"message":"m","code":"429"}}"#, 429),
            (r#"{"error":{"message":"m","code":200}}"#, 500),
            (r#"{"error":{"type":"invalid_request_error","code":"x"}}"#, 400),
            (r#"{"error":"Unauthorized"}"#, 500),
            (r#"{"object":"error","message":"m","code":400}"#, 400),
        ] {
            assert_eq!(status(json), expected, "{json}");
        }
        let error = Answer::read(r#"{"error":{"message":"m","param":"n"}}"#.to_owned());
        let error = error.unwrap().error.unwrap();
        assert_eq!((error.message.as_str(), error.param.as_deref()), ("m", Some("n")));
    }

    #[test]
    fn answers_are_objects_in_one_line() {
        let answer = Answer::read("{\n\"a\":\r\n\"\\n\"}".to_owned()).unwrap();
        assert_eq!(answer.text, "{ \"a\":  \"\\n\"}");
        for text in ["", "[1]", "data: {}", "{\"a\":", "[null, null, null]", "{} {}"] {
            let error = Answer::read(text.to_owned()).unwrap_err();
            assert!(error.message.contains("must be a JSON object"), "{}", error.message);
        }
    }
}
