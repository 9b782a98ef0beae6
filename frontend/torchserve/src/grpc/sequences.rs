//! `StreamPredictions2`: requests of any number of sequences in one stream. Different sequences are
//! executed concurrently; requests of one sequence are executed in order, unless the model allows
//! them to overlap. Errors are sent as responses.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;

use futures_util::stream::{BoxStream, SelectAll};
use futures_util::{StreamExt, stream};
use tonic::codegen::tokio_stream::Stream;
use tonic::{Status, Streaming};

use super::RpcStatus;
use super::prediction::Prediction;
use super::proto::inference::{PredictionResponse, PredictionsRequest};
use crate::rest::Shared;
use pharos_edge::SharedCall;

/// The most requests of one stream that are read ahead of their responses.
const MAX_AHEAD: usize = 64;

/// The most started sequences that are remembered for one stream.
const MAX_BEGUN: usize = 1024;

/// Returns the responses to a stream of requests.
pub(super) fn answers(
    shared: Arc<Shared>,
    requests: Streaming<PredictionsRequest>,
    call: SharedCall,
) -> impl Stream<Item = Result<PredictionResponse, Status>> + Send {
    let sequences = Sequences {
        shared,
        call,
        requests: Some(requests),
        predictions: SelectAll::new(),
        waiting: HashMap::new(),
        ahead: 0,
        answers: VecDeque::new(),
        begun: VecDeque::new(),
    };
    stream::unfold(sequences, async |mut sequences| {
        let answer = sequences.next().await?;
        Some((answer, sequences))
    })
}

/// An event of a running request.
enum SequenceEvent {
    Answer(PredictionResponse),
    /// The response to a request of this sequence is complete.
    Ended(String),
}

struct Sequences {
    shared: Arc<Shared>,
    call: SharedCall,
    /// The client's requests; `None` at the end of the stream.
    requests: Option<Streaming<PredictionsRequest>>,
    /// Running requests: at most one of each sequence, unless they overlap.
    predictions: SelectAll<BoxStream<'static, SequenceEvent>>,
    /// For each sequence in `predictions`, the requests queued behind the running one.
    waiting: HashMap<String, VecDeque<PredictionsRequest>>,
    /// The number of running and queued requests.
    ahead: usize,
    /// Responses that are ready to be sent.
    answers: VecDeque<PredictionResponse>,
    /// The sequences whose first request has been seen.
    begun: VecDeque<String>,
}

impl Sequences {
    async fn next(&mut self) -> Option<Result<PredictionResponse, Status>> {
        loop {
            if let Some(answer) = self.answers.pop_front() {
                return Some(Ok(answer));
            }
            let reads = self.ahead < MAX_AHEAD;
            tokio::select! {
                Some(part) = self.predictions.next() => match part {
                    SequenceEvent::Answer(answer) => return Some(Ok(answer)),
                    SequenceEvent::Ended(id) => self.finish(id),
                },
                Some(asked) = message(&mut self.requests), if reads => match asked {
                    Ok(Some(asked)) => self.take(asked),
                    Ok(None) => self.requests = None,
                    Err(status) => {
                        self.requests = None;
                        return Some(Err(status));
                    }
                },
                else => return None,
            }
        }
    }

    /// Starts or queues a request.
    fn take(&mut self, asked: PredictionsRequest) {
        let Some(id) = asked.sequence_id.clone().filter(|id| !id.trim().is_empty()) else {
            let status =
                Status::internal("Parameter sequenceId is required.\nBadRequestException.()");
            return self.answers.push_back(shown(&status, None));
        };
        self.ahead += 1;
        if !self.waiting.contains_key(&id) && self.overlaps(&asked) {
            self.begin(&id, asked);
            return;
        }
        match self.waiting.get_mut(&id) {
            Some(waiting) => waiting.push_back(asked),
            None => {
                self.waiting.insert(id.clone(), VecDeque::from([asked]));
                self.start_next(id);
            }
        }
    }

    /// Handles the end of a response and starts the next request of the sequence.
    fn finish(&mut self, id: String) {
        self.ahead -= 1;
        self.start_next(id);
    }

    /// Whether a request may start while others of its sequence are running. Requests that wait for
    /// the first worker reach the engine in undefined order, so they must run one after the other.
    fn overlaps(&self, asked: &PredictionsRequest) -> bool {
        let found = self.shared.registry.find(&asked.model_name, &asked.model_version);
        found.is_ok_and(|version| version.deployment().overlaps() && !version.is_loading())
    }

    /// Starts the next queued request of a sequence.
    fn start_next(&mut self, id: String) {
        while let Some(asked) = self.waiting.get_mut(&id).and_then(VecDeque::pop_front) {
            if self.begin(&id, asked) {
                return;
            }
        }
        self.waiting.remove(&id);
    }

    /// Starts a request, or queues an error response. Returns whether it was started.
    fn begin(&mut self, id: &str, asked: PredictionsRequest) -> bool {
        let starts = self.starts(id);
        match Prediction::begin(&self.shared, asked, starts, &self.call) {
            Ok(prediction) => {
                self.predictions.push(parts(prediction, id.to_owned()).boxed());
                true
            }
            Err(status) => {
                self.ahead -= 1;
                self.answers.push_back(shown(&status, Some(id.to_owned())));
                false
            }
        }
    }

    /// Whether this is the first request of a sequence.
    fn starts(&mut self, id: &str) -> bool {
        if self.begun.iter().any(|known| known == id) {
            return false;
        }
        if self.begun.len() == MAX_BEGUN {
            self.begun.pop_front();
        }
        self.begun.push_back(id.to_owned());
        true
    }
}

/// Reads the next request; `None` at the end of the stream.
async fn message(
    requests: &mut Option<Streaming<PredictionsRequest>>,
) -> Option<Result<Option<PredictionsRequest>, Status>> {
    Some(requests.as_mut()?.message().await)
}

fn parts(prediction: Prediction, id: String) -> impl Stream<Item = SequenceEvent> + Send {
    let sequence_id = prediction.sequence_id();
    let answers = prediction.parts().map(move |part| {
        SequenceEvent::Answer(part.unwrap_or_else(|status| shown(&status, sequence_id.clone())))
    });
    answers.chain(stream::once(std::future::ready(SequenceEvent::Ended(id))))
}

/// Converts a status to a response: its message, without the exception class.
fn shown(status: &Status, sequence_id: Option<String>) -> PredictionResponse {
    let text = status.message();
    let sentence =
        text.rsplit_once('\n').filter(|(_, class)| class.starts_with("org.pytorch.serve."));
    let message = sentence.map_or(text, |(sentence, _)| sentence).to_owned();
    PredictionResponse {
        sequence_id,
        status: Some(RpcStatus { code: status.code() as i32, message }),
        ..PredictionResponse::default()
    }
}
