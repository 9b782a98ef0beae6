//! The way from a request whose inferences run to its response, whole or streamed: the same for
//! every form of request.

use axum::body::Body;
use axum::response::Response;
use pharos::service::Protocol;
use pharos_edge::Call;

use crate::answer::Failure;
use crate::choice::Delta;
use crate::edge::{Edge, RequestId, add_budget, event_stream, finish_failed, json};
use crate::events::{Chunks, Events};
use crate::generation::{Generation, PromptDetails};
use crate::response::Usage;

/// A request whose inferences run.
pub(crate) struct Running<F> {
    pub(crate) generation: Generation,
    /// Writes the response.
    pub(crate) form: F,
    /// Whether the client wants a stream.
    pub(crate) is_streamed: bool,
}

/// What a request has led to.
pub(crate) struct Whole {
    pub(crate) choices: Vec<Delta>,
    pub(crate) usage: Option<Usage>,
    /// One for each prompt.
    pub(crate) prompts: Vec<PromptDetails>,
}

/// The form of a response.
pub(crate) trait Form: Chunks {
    /// Returns the JSON of a whole response.
    fn whole(&self, whole: Whole) -> Vec<u8>;
}

/// Ends a request, or begins the stream that ends it.
pub(crate) async fn respond<F: Form>(
    edge: &Edge,
    mut call: Call,
    id: &RequestId,
    begun: Result<Running<F>, Failure>,
) -> Response {
    let Running { mut generation, form, is_streamed } = match begun {
        Ok(running) => running,
        Err(failure) => return finish_failed(call, id, &failure),
    };
    if !is_streamed {
        return match generation.collect().await {
            Ok(choices) => {
                call.has_responded();
                call.set_times(generation.timeline());
                let usage = generation.usage();
                let body = form.whole(Whole { choices, usage, prompts: generation.prompts() });
                let mut response = json(id, body);
                add_budget(&call, &mut response);
                call.finish(response, None)
            }
            Err(error) => finish_failed(call, id, &generation.failure(error)),
        };
    }
    let open = edge.service.stream_open(Protocol::Http);
    // The first response determines the status; later errors are events.
    let first = match generation.next().await {
        Some(Err(error)) => return finish_failed(call, id, &generation.failure(error)),
        first => first,
    };
    let mut response = event_stream(id);
    add_budget(&call, &mut response);
    let sending = call.begin_stream(&mut response);
    response.map(|_| Body::new(Events::new(generation, first, form, call, sending, open)))
}
