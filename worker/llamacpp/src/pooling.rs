//! The engine of models that make an embedding or a score of a text: one thread that computes the
//! texts of several requests together.
//!
//! A step takes requests in the order of their arrival, as many as have room in it with all of their
//! tokens. Nothing is kept between two steps.

use std::collections::VecDeque;
use std::sync::mpsc::{Receiver, TryRecvError};

use llama_cpp_2::context::LlamaContext;
use llama_cpp_2::llama_batch::LlamaBatch;
use llama_cpp_2::token::LlamaToken;

use crate::BatchSize;
use crate::engine::{Gauges, OutputPositions};
use crate::host::{Elements, Failure, Output, Responder};

/// A request, with its text as tokens.
pub(crate) struct PoolingRequest {
    pub(crate) responder: Responder,
    pub(crate) tokens: Vec<i32>,
    /// Whether the embedding gets the length 1.
    pub(crate) normalize: bool,
    pub(crate) returns_tokens: bool,
}

/// What a model makes of a text.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Pooled {
    Embedding,
    /// A score that is a probability already.
    Probability,
    /// A score without bounds, which becomes a probability here.
    Logit,
}

/// The engine of one instance.
pub(crate) struct PoolingEngine<'m> {
    context: LlamaContext<'m>,
    result: Pooled,
    outputs: OutputPositions,
    gauges: Gauges,
    /// The most tokens of a step.
    batch_tokens: usize,
    /// The most texts of a step.
    sequences: usize,
    batch: LlamaBatch<'static>,
    waiting: VecDeque<PoolingRequest>,
}

impl<'m> PoolingEngine<'m> {
    pub(crate) fn new(
        context: LlamaContext<'m>,
        result: Pooled,
        batch: BatchSize,
        outputs: OutputPositions,
        gauges: Gauges,
    ) -> Self {
        Self {
            context,
            result,
            outputs,
            gauges,
            batch_tokens: batch.tokens,
            sequences: batch.sequences,
            batch: LlamaBatch::new(batch.tokens, 1),
            waiting: VecDeque::new(),
        }
    }

    /// Answers requests until their channel is closed.
    pub(crate) fn run(mut self, requests: &Receiver<PoolingRequest>) {
        loop {
            if self.waiting.is_empty() {
                self.record(0);
                match requests.recv() {
                    Ok(request) => self.waiting.push_back(request),
                    Err(_) => return,
                }
            }
            loop {
                match requests.try_recv() {
                    Ok(request) => self.waiting.push_back(request),
                    Err(TryRecvError::Empty) => break,
                    Err(TryRecvError::Disconnected) => return,
                }
            }
            self.waiting.retain(|request| !request.responder.is_cancelled());
            let chosen = self.choose();
            if !chosen.is_empty() {
                self.record(chosen.len());
                self.step(&chosen);
            }
        }
    }

    /// Takes the requests of a step.
    fn choose(&mut self) -> Vec<PoolingRequest> {
        let mut chosen = Vec::new();
        let mut room = self.batch_tokens;
        while chosen.len() < self.sequences {
            let next = self.waiting.pop_front_if(|request| request.tokens.len() <= room);
            let Some(next) = next else { break };
            room -= next.tokens.len();
            chosen.push(next);
        }
        chosen
    }

    fn step(&mut self, chosen: &[PoolingRequest]) {
        self.batch.clear();
        for (sequence, request) in (0..).zip(chosen) {
            for (position, token) in (0..).zip(&request.tokens) {
                // There is room: see `choose`.
                let _ = self.batch.add(LlamaToken(*token), position, &[sequence], true);
            }
        }
        self.context.clear_kv_cache();
        let computed = self.context.decode(&mut self.batch);
        for (sequence, request) in (0..).zip(chosen) {
            let failure = match &computed {
                Err(error) => Some(error.to_string()),
                Ok(()) => match self.context.embeddings_seq_ith(sequence) {
                    Ok(vector) => {
                        let values = finish(vector, self.result, request.normalize);
                        respond(&self.outputs, request, &values).err().map(|error| error.message)
                    }
                    Err(error) => Some(error.to_string()),
                },
            };
            if let Some(why) = failure {
                let why = format!("llama.cpp failed to compute a text: {why}");
                request.responder.fail(&Failure::internal(why));
            }
        }
    }

    /// Records the gauges, with the number of texts that are computed.
    fn record(&self, running: usize) {
        if let Some(gauge) = &self.gauges.running {
            gauge.set(running as f64);
        }
        if let Some(gauge) = &self.gauges.waiting {
            gauge.set(self.waiting.len() as f64);
        }
    }
}

/// Returns the result for the client from what the model has computed.
fn finish(vector: &[f32], result: Pooled, normalize: bool) -> Vec<f32> {
    match result {
        Pooled::Embedding if normalize => {
            let length = vector.iter().map(|value| f64::from(*value).powi(2)).sum::<f64>().sqrt();
            let factor = if length > 0.0 { 1.0 / length } else { 0.0 };
            vector.iter().map(|value| (f64::from(*value) * factor) as f32).collect()
        }
        Pooled::Embedding => vector.to_vec(),
        Pooled::Probability => vector.iter().copied().take(1).collect(),
        Pooled::Logit => vector.iter().take(1).map(|logit| 1.0 / (1.0 + (-logit).exp())).collect(),
    }
}

fn respond(
    outputs: &OutputPositions,
    request: &PoolingRequest,
    values: &[f32],
) -> Result<(), Failure> {
    let count = [request.tokens.len() as u32];
    let ids: Vec<u32> = request.tokens.iter().map(|token| token.cast_unsigned()).collect();
    let mut made = Vec::with_capacity(3);
    let mut add = |index: Option<usize>, data| {
        if let Some(index) = index {
            made.push(Output { index, data });
        }
    };
    add(outputs.embedding.or(outputs.score), Elements::Reals(values));
    add(outputs.num_input_tokens, Elements::Naturals(&count));
    add(outputs.prompt_token_ids.filter(|_| request.returns_tokens), Elements::Naturals(&ids));
    request.responder.respond(&made, true)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn embeddings_have_the_length_1_if_the_client_wants_it() {
        let vector = [3.0, -4.0];
        assert_eq!(finish(&vector, Pooled::Embedding, true), [0.6, -0.8]);
        assert_eq!(finish(&vector, Pooled::Embedding, false), vector);
        assert_eq!(finish(&[0.0, 0.0], Pooled::Embedding, true), [0.0, 0.0]);
    }

    #[test]
    fn scores_are_probabilities() {
        assert_eq!(finish(&[0.0], Pooled::Logit, true), [0.5]);
        assert_eq!(finish(&[0.75, 0.25], Pooled::Probability, true), [0.75]);
        assert_eq!(finish(&[-1000.0], Pooled::Logit, true), [0.0]);
    }
}
