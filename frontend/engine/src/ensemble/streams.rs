//! The responses of the decoupled steps of one stage, from any number of concurrent requests.

use std::collections::BTreeMap;
use std::future::{Future, poll_fn};
use std::pin::{Pin, pin};
use std::task::{Context, Poll, ready};

use futures_util::StreamExt;
use futures_util::stream::FuturesUnordered;
use pharos::ensemble::CallId;
use pharos::error::InferError;
use tokio::task::coop::{poll_proceed, unconstrained};

use super::slots::StepPermit;
use crate::scheduler::Streamed;

/// The number of fully processed responses of a request that may wait for an earlier response.
/// Beyond it, no further responses of that request are taken.
const BEHIND: usize = 256;

/// A source of responses.
pub(crate) trait ResponseSource: Unpin {
    /// Returns the next response, or `None` after the last.
    fn poll_next(&mut self, cx: &mut Context<'_>) -> Poll<Option<Streamed>>;
}

/// A running decoupled step.
pub(super) struct Stream<S> {
    pub(super) id: CallId,
    pub(super) responses: S,
    pub(super) permit: StepPermit,
}

/// A future of a step's next response, with the step.
struct NextResponse<S>(Option<Stream<S>>);

impl<S: ResponseSource> Future for NextResponse<S> {
    type Output = Option<(Stream<S>, Streamed)>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let Some(stream) = &mut self.0 else { return Poll::Ready(None) };
        let streamed = ready!(stream.poll_next(cx));
        Poll::Ready(self.0.take().map(|stream| (stream, streamed)))
    }
}

impl<S: ResponseSource> Stream<S> {
    fn poll_next(&mut self, cx: &mut Context<'_>) -> Poll<Streamed> {
        let next = ready!(self.responses.poll_next(cx));
        Poll::Ready(next.unwrap_or_else(|| {
            let error =
                InferError::internal("the model's responses ended without a final response");
            Streamed { answer: Err(error), last: true, empty: false }
        }))
    }
}

/// The decoupled steps of one stage.
///
/// Responses are taken in the order of arrival: another request's response only when the current
/// request has none. A model with one instance answers its requests one after the other, and its
/// responses must keep that order. If several requests have responses, the earliest request goes
/// first, because such a model served it first.
pub(super) struct Streams<S> {
    /// The request whose response was taken last.
    current: Option<Stream<S>>,
    /// Responses of other requests that arrived while `current` had none.
    held: BTreeMap<CallId, (Stream<S>, Streamed)>,
    others: FuturesUnordered<NextResponse<S>>,
    /// Steps that are too far ahead of the processing of their responses.
    parked: Vec<Stream<S>>,
}

impl<S> Default for Streams<S> {
    fn default() -> Self {
        Self {
            current: None,
            held: BTreeMap::new(),
            others: FuturesUnordered::new(),
            parked: Vec::new(),
        }
    }
}

impl<S: ResponseSource> Streams<S> {
    /// Adds a request.
    pub(super) fn push(&mut self, stream: Stream<S>) {
        match &self.current {
            None if self.others.is_empty() && self.held.is_empty() => self.current = Some(stream),
            _ => self.others.push(NextResponse(Some(stream))),
        }
    }

    /// Returns the next response with its step, and with the step's permit if it was the last.
    /// `waiting` returns how many responses of a step wait for an earlier one.
    ///
    /// Tokio's cooperative budget is checked once, here. A channel that checked it would return
    /// pending although it has a response, and a response of another request would be taken too
    /// early.
    pub(super) fn poll_next(
        &mut self,
        cx: &mut Context<'_>,
        waiting: impl Fn(CallId) -> usize,
    ) -> Poll<(CallId, Streamed, StepPermit)> {
        let allowed = ready!(poll_proceed(cx));
        let next = pin!(unconstrained(poll_fn(|cx| self.poll_in_turn(cx, &waiting)))).poll(cx);
        if next.is_ready() {
            allowed.made_progress();
        }
        next
    }

    fn poll_in_turn(
        &mut self,
        cx: &mut Context<'_>,
        waiting: &impl Fn(CallId) -> usize,
    ) -> Poll<(CallId, Streamed, StepPermit)> {
        let is_ahead = |stream: &mut Stream<S>| waiting(stream.id) >= BEHIND;
        for stream in self.parked.extract_if(.., |stream| !is_ahead(stream)) {
            self.others.push(NextResponse(Some(stream)));
        }
        self.parked.extend(self.current.take_if(is_ahead));
        loop {
            if let Some(mut stream) = self.current.take() {
                match stream.poll_next(cx) {
                    Poll::Ready(streamed) => return Poll::Ready(self.taken(stream, streamed)),
                    Poll::Pending => self.current = Some(stream),
                }
            }
            if let Some((_, (stream, streamed))) = self.held.pop_first() {
                self.others.extend(self.current.take().map(|stream| NextResponse(Some(stream))));
                return Poll::Ready(self.taken(stream, streamed));
            }
            while let Poll::Ready(Some(Some((stream, streamed)))) = self.others.poll_next_unpin(cx)
            {
                self.held.insert(stream.id, (stream, streamed));
            }
            // Responses of the current step that arrived meanwhile are found in the next iteration.
            if self.held.is_empty() {
                return Poll::Pending;
            }
        }
    }

    fn taken(&mut self, stream: Stream<S>, streamed: Streamed) -> (CallId, Streamed, StepPermit) {
        let id = stream.id;
        if streamed.last {
            return (id, streamed, stream.permit);
        }
        self.current = Some(stream);
        (id, streamed, None)
    }

    /// Cancels the step whose response was returned last.
    pub(super) fn give_up(&mut self, id: CallId) {
        drop(self.current.take_if(|stream| stream.id == id));
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, clippy::indexing_slicing)]
mod tests {
    use std::sync::Arc;
    use std::task::Waker;

    use pharos::ensemble::{Flow, Plan, Stages};
    use pharos::infer::InferResponse;
    use pharos::model::{Completion, Draft};
    use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel};

    use super::*;

    impl ResponseSource for UnboundedReceiver<Streamed> {
        fn poll_next(&mut self, cx: &mut Context<'_>) -> Poll<Option<Streamed>> {
            self.poll_recv(cx)
        }
    }

    /// Returns the ids of `count` steps.
    fn ids(count: usize) -> Vec<CallId> {
        let step = |n| {
            format!(
                "step {{ model_name: 'm' model_version: -1 input_map {{ key: 'i' value: 'x' }} \
                 output_map {{ key: 'o' value: 'y{n}' }} }}"
            )
        };
        let steps: String = (0..count).map(step).collect();
        let io = |kind, name: String| {
            format!("{kind} {{ name: '{name}' data_type: TYPE_FP32 dims: [ -1 ] }} ")
        };
        let outputs: String = (0..count).map(|n| io("output", format!("y{n}"))).collect();
        let input = io("input", "x".to_owned());
        let text =
            format!("platform: 'ensemble' {input}{outputs}ensemble_scheduling {{ {steps} }}");
        let draft = Draft::from_text(&text, "config.pbtxt").unwrap();
        let config =
            draft.complete(&Completion { directory: "e", ..Completion::default() }).unwrap();
        let plan = Arc::new(Plan::new(&config).unwrap().unwrap());
        let stages = Stages::new("e", &plan, &vec![false; count]).unwrap();
        let all: Vec<usize> = (0..count).collect();
        let mut flow = Flow::new(plan, Arc::new(stages), &all, [(0, ())]);
        std::iter::from_fn(|| flow.next_step()).map(|call| call.id).collect()
    }

    fn respond(sender: &UnboundedSender<Streamed>, id: &str, last: bool) {
        let answer = Ok(InferResponse { id: id.to_owned(), ..InferResponse::default() });
        sender.send(Streamed { answer, last, empty: false }).unwrap();
    }

    /// Takes all available responses.
    fn taken(
        streams: &mut Streams<UnboundedReceiver<Streamed>>,
        waiting: impl Fn(CallId) -> usize,
    ) -> Vec<String> {
        let cx = &mut Context::from_waker(Waker::noop());
        let next = || match streams.poll_next(cx, &waiting) {
            Poll::Ready((_, streamed, _)) => Some(streamed.answer.unwrap().id),
            Poll::Pending => None,
        };
        std::iter::from_fn(next).collect()
    }

    #[test]
    fn responses_keep_arrival_order_and_requests_stay_together() {
        let ids = ids(3);
        let mut streams = Streams::default();
        let senders: Vec<_> = ids
            .iter()
            .map(|id| {
                let (sender, responses) = unbounded_channel();
                streams.push(Stream { id: *id, responses, permit: None });
                sender
            })
            .collect();
        let none = |_| 0;
        assert_eq!(taken(&mut streams, none), Vec::<String>::new());
        for (stream, id, last) in
            [(0, "a0", false), (0, "a1", true), (1, "b0", false), (2, "c0", false), (2, "c1", true)]
        {
            respond(&senders[stream], id, last);
        }
        assert_eq!(taken(&mut streams, none), ["a0", "a1", "b0", "c0", "c1"]);
        respond(&senders[1], "b1", false);
        assert_eq!(taken(&mut streams, none), ["b1"]);
        respond(&senders[1], "b2", true);
        let ahead = |id| if id == ids[1] { BEHIND } else { 0 };
        assert_eq!(taken(&mut streams, ahead), Vec::<String>::new(), "the step is too far ahead");
        assert_eq!(taken(&mut streams, none), ["b2"]);
    }

    #[tokio::test]
    async fn simultaneous_responses_keep_the_order_of_their_requests() {
        let mut streams = Streams::default();
        let mut senders = Vec::new();
        for (n, id) in ids(100).into_iter().enumerate() {
            let (sender, responses) = unbounded_channel();
            streams.push(Stream { id, responses, permit: None });
            senders.push(sender);
            // Some requests are polled once, the others not yet.
            if n == 40 {
                assert_eq!(taken(&mut streams, |_| 0), Vec::<String>::new());
            }
        }
        for (n, sender) in senders.iter().enumerate() {
            for part in 0..3 {
                respond(sender, &format!("{n}.{part}"), part == 2);
            }
        }
        let mut all = Vec::new();
        while all.len() < 300 {
            let (_, streamed, _) = poll_fn(|cx| streams.poll_next(cx, |_| 0)).await;
            all.push(streamed.answer.unwrap().id);
        }
        let expected: Vec<String> =
            (0..100).flat_map(|n| (0..3).map(move |part| format!("{n}.{part}"))).collect();
        assert_eq!(all, expected);
    }

    #[test]
    fn giving_up_drops_the_responses() {
        let ids = ids(1);
        let mut streams = Streams::default();
        let (sender, responses) = unbounded_channel();
        streams.push(Stream { id: ids[0], responses, permit: None });
        respond(&sender, "a0", false);
        assert_eq!(taken(&mut streams, |_| 0), ["a0"]);
        streams.give_up(ids[0]);
        assert!(sender.is_closed());
    }
}
