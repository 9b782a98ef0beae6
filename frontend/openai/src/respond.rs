//! The way from a request whose inferences run to its response, whole or streamed: the same for
//! every form of request.

use axum::body::Body;
use axum::response::Response;
use pharos::service::{OpenStream, Protocol};

use crate::answer::Failure;
use crate::choice::Delta;
use crate::edge::{Received, add_budget, event_stream};
use crate::events::{Chunks, Events, Generated, Source};
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
    mut received: Received,
    begun: Result<Running<F>, Failure>,
) -> Response {
    let Running { mut generation, form, is_streamed } = match begun {
        Ok(running) => running,
        Err(failure) => return received.fail(&failure),
    };
    if !is_streamed {
        return match generation.collect().await {
            Ok(choices) => {
                received.call.set_times(generation.timeline());
                let usage = generation.usage();
                let whole = Whole { choices, usage, prompts: generation.prompts() };
                received.finish(Ok(form.whole(whole)))
            }
            Err(error) => received.fail(&generation.failure(error)),
        };
    }
    let open = received.edge.service.stream_open(Protocol::Http);
    // The first response determines the status; later errors are events.
    let first = match generation.next().await {
        Some(Err(error)) => return received.fail(&generation.failure(error)),
        first => first,
    };
    stream(received, Generated { generation, first, chunks: form }, open)
}

/// Begins a stream of events. `open` was taken before its first response arrived.
pub(crate) fn stream(received: Received, events: impl Source, open: OpenStream) -> Response {
    let Received { mut call, id, .. } = received;
    let mut response = event_stream(&id);
    add_budget(&call, &mut response);
    let sending = call.begin_stream(&mut response);
    response.map(|_| Body::new(Events::new(events, call, sending, open)))
}
