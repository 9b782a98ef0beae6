//! `POST /v1/responses`, and the paths of stored responses, of which this server has none.

mod input;
mod object;
mod progress;
pub mod request;

use axum::response::Response;
use pharos::error::Reason;
use pharos_edge::Call;
use pharos_edge::routing::Routed;
use pharos_os::clock;

use crate::answer::Failure;
use crate::chat_inference::{self, Begun};
use crate::edge::{Edge, Received, RequestId, finish_failed, random_id};
use crate::error::{ApiError, quoted};
use crate::events::Chunks;
use crate::generation::Deltas;
use crate::respond::{Form, Running, Whole, respond};
use crate::response::logprobs::LogprobsForm;
use crate::response::{Usage, to_json};
use object::{Frame, Outcome};
use progress::{Includes, Progress};
use request::ResponsesRequest;

/// Fields of chats that have other names here.
const NAMES: [(&str, &str); 3] =
    [("messages", "input"), ("max_tokens", "max_output_tokens"), ("logprobs", "top_logprobs")];

/// Answers a request.
pub(crate) async fn answer(mut received: Received) -> Response {
    let begun = begin(&mut received).await;
    respond(received, begun).await
}

/// Answers a request for a stored response.
pub(crate) async fn answer_not_stored(_: Edge, mut call: Call, routed: Routed) -> Response {
    let headers = routed.request.headers();
    let id = RequestId::of(headers);
    call.read_headers(headers);
    let parameters = routed.parameters.unwrap_or_default();
    let name = parameters.first().map(String::as_str).unwrap_or_default();
    let text = format!(
        "the response '{}' is not stored: this server stores no responses, also with store true",
        quoted(name)
    );
    let error = ApiError { status: 404, ..ApiError::invalid_field("response_id", text) };
    finish_failed(call, &id, &Failure { error, reason: Reason::Unsupported })
}

async fn begin(received: &mut Received) -> Result<Running<ResponseForm>, Failure> {
    let ResponsesRequest { chat, echo } = received.parse(ResponsesRequest::parse).await?;
    let begun = chat_inference::begin(received, chat, |id, model, options| {
        id.head_beginning("resp_", options, model)
    });
    let Begun { request: chat, head, generation } = begun.await.map_err(in_own_names)?;
    let is_streamed = chat.options.stream.is_some();
    let includes = Includes {
        logprobs: LogprobsForm::of(&chat.sampling, &chat.options),
        reasoning: chat.include_reasoning,
        events: is_streamed,
    };
    let form = ResponseForm {
        frame: Frame::new(head, ResponsesRequest { chat, echo }),
        progress: Progress::new(includes, new_id),
        has_begun: false,
    };
    Ok(Running { generation, form, is_streamed })
}

/// Returns an error of the chat that answers a request, with the names of this API.
fn in_own_names(mut failure: Failure) -> Failure {
    let error = &mut failure.error;
    let Some(param) = &error.param else { return failure };
    let renamed = NAMES.into_iter().find(|(of_chat, _)| {
        let rest = param.strip_prefix(of_chat);
        rest.is_some_and(|rest| rest.is_empty() || rest.starts_with(['[', '.']))
    });
    let Some((of_chat, own)) = renamed else { return failure };
    if let Some(rest) = error.message.strip_prefix(of_chat) {
        error.message = format!("{own}{rest}");
    }
    error.param = Some(own.to_owned());
    failure
}

/// Returns a random id of an item.
fn new_id(prefix: &str) -> String {
    format!("{prefix}{}", random_id())
}

/// The form of a response.
struct ResponseForm {
    frame: Frame,
    progress: Progress,
    /// Whether the first events of the stream were written.
    has_begun: bool,
}

impl ResponseForm {
    /// Writes the events that a stream begins with, once.
    fn write_begin(&mut self) {
        if std::mem::replace(&mut self.has_begun, true) {
            return;
        }
        let outcome = Outcome::InProgress;
        for kind in ["response.created", outcome.event()] {
            let response_of = |items| self.frame.response(&outcome, items, None, None);
            self.progress.add_event(kind, response_of);
        }
    }

    /// Writes the last events.
    fn write_outcome(&mut self, outcome: &Outcome, usage: Option<Usage>, out: &mut Vec<u8>) {
        self.write_begin();
        let progress = &mut self.progress;
        end(progress, outcome);
        let completed_at = completed_at(outcome);
        progress.add_event(outcome.event(), |items| {
            self.frame.response(outcome, items, usage, completed_at)
        });
        progress.take_events(out);
    }
}

fn end(progress: &mut Progress, outcome: &Outcome) {
    progress.end(outcome.status_of_last_item(), matches!(outcome, Outcome::Failed(_)));
}

/// Returns the current time in seconds since 1970, for a response that is complete.
fn completed_at(outcome: &Outcome) -> Option<i64> {
    let is_complete = *outcome == Outcome::Completed;
    is_complete.then(|| i64::try_from(clock::wall_ms() / 1000).unwrap_or(i64::MAX))
}

impl Form for ResponseForm {
    fn whole(&self, whole: Whole) -> Vec<u8> {
        let Whole { choices, usage, .. } = whole;
        let mut progress = self.progress.restarted();
        choices.into_iter().for_each(|delta| progress.take(delta));
        let outcome = Outcome::of(progress.finish().reason);
        end(&mut progress, &outcome);
        let items = progress.items();
        to_json(&self.frame.response(&outcome, items, usage, completed_at(&outcome)))
    }
}

impl Chunks for ResponseForm {
    /// The last event has the whole response; nothing follows it.
    const END: &'static [u8] = b"";

    fn write(&mut self, deltas: Deltas, _: Option<Usage>, out: &mut Vec<u8>) {
        self.write_begin();
        deltas.into_iter().for_each(|(_, delta)| self.progress.take(delta));
        self.progress.take_events(out);
    }

    fn write_end(&mut self, usage: Option<Usage>, out: &mut Vec<u8>) {
        let outcome = Outcome::of(self.progress.finish().reason);
        self.write_outcome(&outcome, usage, out);
    }

    fn write_error(&mut self, error: &ApiError, usage: Option<Usage>, out: &mut Vec<u8>) {
        self.write_outcome(&Outcome::failed(error), usage, out);
    }
}
