//! The engine: one thread that computes the next tokens of all requests together, step by step.
//!
//! A step computes one token for each choice that is being generated, and parts of the prompts that
//! wait, up to a number of tokens: a long prompt delays the others by a few steps only. Each choice
//! has a sequence of the KV cache for itself, with room for a whole context: a request that has
//! begun always ends. What is left there of an earlier request serves the next one that begins with
//! the same tokens.
//!
//! The thread never waits for a client. Text for a client that reads slowly is collected and sent
//! as one response.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::ops::Bound;
use std::sync::mpsc::{Receiver, RecvTimeoutError, TryRecvError};
use std::time::{Duration, Instant};

use llama_cpp_2::context::LlamaContext;
use llama_cpp_2::llama_batch::LlamaBatch;
use llama_cpp_2::token::LlamaToken;
use llguidance::Matcher;
use serde_json::{Map, Value, json};

use crate::BatchSize;
use crate::adapters::{AdapterGauges, AdapterId, Adapters, RequestedAdapter, Unavailable};
use crate::host::{Elements, Failure, Gauge, Output, Responder};
use crate::model::SharedModel;
use crate::sampler::{Logprob, Sampler, logprobs};
use crate::sampling::Sampling;
use crate::text::{TextWriter, Written};

/// How long the thread sleeps while it has nothing to do but to wait for slow clients.
const SLOW_CLIENTS: Duration = Duration::from_millis(2);
/// Common beginnings of fewer tokens do not decide which sequence serves a prompt.
const SHORT_PREFIX: usize = 16;
/// The time between two samples of the gauges while the engine runs.
const SAMPLE_EVERY: Duration = Duration::from_millis(100);

/// The most tokens of a prompt that a step computes if the client wants their probabilities.
const MAX_PROMPT_ROWS: usize = 64;

/// Returns the time, for the interval between samples of gauges.
#[allow(clippy::disallowed_methods)] // The clocks of the server are in its own packages.
fn now() -> Instant {
    Instant::now()
}

/// A request, with its prompt as tokens.
pub(crate) struct Request {
    pub(crate) responder: Responder,
    pub(crate) prompt: Vec<i32>,
    pub(crate) sampling: Sampling,
    /// What keeps the text in its structure.
    pub(crate) matcher: Option<Matcher>,
    /// Whether the text is sent as it is generated.
    pub(crate) is_streamed: bool,
    /// The prompt, if the client wants it before the generated text; else empty.
    pub(crate) prefix: String,
    pub(crate) returns: Returns,
    pub(crate) adapter: Option<AdapterId>,
    /// The adapter, if it was loaded by request: the engine may have to load it first.
    pub(crate) requested: Option<RequestedAdapter>,
}

/// What the engine is for.
pub(crate) enum Work {
    Generate(Box<Request>),
    /// Loads an adapter.
    Load(Responder, RequestedAdapter),
    /// Frees the memory of an adapter when no request uses it.
    Unload(Responder, RequestedAdapter),
}

/// The outputs that a client wants besides the text.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Returns {
    pub(crate) finish_reason: bool,
    pub(crate) counts: bool,
    pub(crate) logprobs: bool,
    pub(crate) token_ids: bool,
    pub(crate) prompt_token_ids: bool,
}

/// The positions of the outputs in the configuration; `None` for an output that it lacks.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct OutputPositions {
    pub(crate) text: Option<usize>,
    pub(crate) finish_reason: Option<usize>,
    pub(crate) stop_reason: Option<usize>,
    pub(crate) logprobs: Option<usize>,
    pub(crate) token_ids: Option<usize>,
    pub(crate) num_input_tokens: Option<usize>,
    pub(crate) num_cached_tokens: Option<usize>,
    pub(crate) num_output_tokens: Option<usize>,
    pub(crate) prompt_token_ids: Option<usize>,
    pub(crate) prompt_logprobs: Option<usize>,
    pub(crate) embedding: Option<usize>,
    pub(crate) score: Option<usize>,
}

/// The gauges of an instance.
pub(crate) struct Gauges {
    pub(crate) running: Option<Gauge>,
    pub(crate) waiting: Option<Gauge>,
    pub(crate) cache_usage: Option<Gauge>,
    pub(crate) cache_tokens: Option<Gauge>,
    pub(crate) adapter_slots: Option<Gauge>,
    pub(crate) adapters: AdapterGauges,
}

/// Why a choice ended.
#[derive(Clone, Debug)]
struct Finish {
    reason: &'static str,
    /// JSON: a stop string, the id of a token, or null.
    stop_reason: Value,
}

impl Finish {
    fn stop(stop_reason: Value) -> Self {
        Self { reason: "stop", stop_reason }
    }

    fn length() -> Self {
        Self { reason: "length", stop_reason: Value::Null }
    }
}

/// A choice that is being generated.
struct Sequence {
    job: u64,
    choice: usize,
    /// The prompt and what was generated.
    tokens: Vec<i32>,
    prompt_length: usize,
    /// The tokens that the KV cache has.
    processed: usize,
    /// The position in the batch of the logits of the next token.
    logits_at: Option<i32>,
    /// Positions of the prompt whose probabilities the client wants and whose logits the step
    /// computes.
    prompt_rows: Vec<PromptRow>,
    /// Whether the client wants probabilities of the prompt from this choice.
    has_prompt_logprobs: bool,
    adapter: Option<AdapterId>,
    sampler: Sampler,
    matcher: Option<Matcher>,
    text: TextWriter,
    /// The most tokens to generate.
    limit: usize,
}

/// A token of a prompt whose successor's probability is wanted.
#[derive(Clone, Copy)]
struct PromptRow {
    /// Its position in the prompt.
    position: usize,
    /// The position in the batch of its logits.
    row: i32,
}

/// A sequence of the KV cache.
#[derive(Default)]
struct Slot {
    /// The adapter that has computed the tokens.
    adapter: Option<AdapterId>,
    /// The tokens that it has.
    cached: Vec<i32>,
    /// The number of the last request that it has served; 0 before the first.
    used_at: u64,
    sequence: Option<Sequence>,
}

/// A request that is being answered.
struct Job {
    responder: Responder,
    sampling: Sampling,
    is_streamed: bool,
    returns: Returns,
    prompt_tokens: u32,
    cached_tokens: u32,
    /// The prompt, until the first response has it.
    prompt_ids: Vec<u32>,
    /// The probabilities of the prompt's tokens, until the first response has them.
    prompt_logprobs: Vec<Value>,
    choices: Vec<Pending>,
    /// Choices that have not ended.
    open: usize,
}

/// What a choice has for the client since the last response.
#[derive(Default)]
struct Pending {
    text: String,
    tokens: u32,
    token_ids: Vec<u32>,
    logprobs: Vec<Value>,
    finish: Option<Finish>,
}

impl Job {
    fn has_news(&self) -> bool {
        self.choices.iter().any(|choice| {
            choice.finish.is_some() || !choice.text.is_empty() || !choice.token_ids.is_empty()
        })
    }
}

/// The engine of one instance.
pub(crate) struct Engine<'m> {
    model: SharedModel,
    context: LlamaContext<'m>,
    outputs: OutputPositions,
    gauges: Gauges,
    batch_tokens: usize,
    batch: LlamaBatch<'static>,
    slots: Vec<Slot>,
    /// Requests that wait for sequences, in the order of their arrival.
    waiting: VecDeque<Request>,
    jobs: BTreeMap<u64, Job>,
    next_job: u64,
    adapters: Adapters,
    /// Adapters that clients load.
    loads: Vec<(Responder, RequestedAdapter)>,
    sampled_at: Option<Instant>,
}

/// Whether the engine goes on.
#[derive(PartialEq, Eq)]
enum Received {
    Continues,
    Ends,
}

impl<'m> Engine<'m> {
    pub(crate) fn new(
        model: SharedModel,
        context: LlamaContext<'m>,
        adapters: Adapters,
        batch: BatchSize,
        outputs: OutputPositions,
        gauges: Gauges,
    ) -> Self {
        Self {
            model,
            context,
            outputs,
            gauges,
            batch_tokens: batch.tokens,
            batch: LlamaBatch::new(batch.tokens, 1),
            slots: (0..batch.sequences).map(|_| Slot::default()).collect(),
            waiting: VecDeque::new(),
            jobs: BTreeMap::new(),
            next_job: 0,
            adapters,
            loads: Vec::new(),
            sampled_at: None,
        }
    }

    /// Answers requests until their channel is closed.
    pub(crate) fn run(mut self, requests: &Receiver<Work>) {
        while self.receive(requests) == Received::Continues {
            self.drop_cancelled();
            self.change_adapters();
            self.admit();
            if let Err(why) = self.choose_adapter() {
                self.fail_all(&why);
            }
            if self.fill_batch() {
                match self.context.decode(&mut self.batch) {
                    Ok(()) => self.sample(),
                    Err(error) => self.fail_all(&error.to_string()),
                }
            }
            self.send();
            self.record();
        }
    }

    /// Returns whether a step has something to compute.
    fn has_work(&self) -> bool {
        !self.waiting.is_empty()
            || self.adapters.has_unloaded()
            || self.slots.iter().any(|slot| slot.sequence.is_some())
    }

    /// Takes the requests that have arrived; waits for one if there is nothing to do.
    fn receive(&mut self, requests: &Receiver<Work>) -> Received {
        if !self.has_work() {
            let request = match self.jobs.is_empty() {
                true => {
                    self.sampled_at = None;
                    self.record();
                    requests.recv().map_err(|_| RecvTimeoutError::Disconnected)
                }
                false => requests.recv_timeout(SLOW_CLIENTS),
            };
            match request {
                Ok(work) => self.take(work),
                Err(RecvTimeoutError::Timeout) => {}
                Err(RecvTimeoutError::Disconnected) => return Received::Ends,
            }
        }
        loop {
            match requests.try_recv() {
                Ok(work) => self.take(work),
                Err(TryRecvError::Empty) => return Received::Continues,
                Err(TryRecvError::Disconnected) => return Received::Ends,
            }
        }
    }

    fn take(&mut self, work: Work) {
        match work {
            Work::Generate(request) => self.waiting.push_back(*request),
            Work::Load(responder, adapter) => self.loads.push((responder, adapter)),
            Work::Unload(responder, adapter) => {
                self.adapters.unload(adapter.load);
                self.confirm(&responder, &adapter);
            }
        }
    }

    /// Returns the adapters of the requests that run.
    fn adapters_in_use(&self) -> BTreeSet<AdapterId> {
        let running = self.slots.iter().filter_map(|slot| slot.sequence.as_ref());
        running.filter_map(|sequence| sequence.adapter).collect()
    }

    /// Loads and frees the adapters that clients have loaded and unloaded.
    fn change_adapters(&mut self) {
        if self.loads.is_empty() && !self.adapters.has_unloaded() {
            return;
        }
        let in_use = self.adapters_in_use();
        self.adapters.free_unloaded(&mut self.context, &in_use);
        for (responder, adapter) in std::mem::take(&mut self.loads) {
            let inner = &self.model.inner;
            match self.adapters.load(inner, &mut self.context, &adapter, &in_use) {
                Ok(()) => self.confirm(&responder, &adapter),
                Err(Unavailable::Full) => self.loads.push((responder, adapter)),
                Err(Unavailable::Failed(failure)) => responder.fail(&failure),
            }
        }
    }

    /// Answers that an adapter is loaded or unloaded, with its name.
    fn confirm(&self, responder: &Responder, adapter: &RequestedAdapter) {
        let made = self
            .outputs
            .text
            .map(|index| Output { index, data: Elements::Strings(vec![adapter.name.as_bytes()]) });
        if let Err(failure) = responder.respond(made.as_slice(), true) {
            responder.fail(&failure);
        }
    }

    /// Frees the sequences of requests whose clients have left.
    fn drop_cancelled(&mut self) {
        self.loads.retain(|(responder, _)| !responder.is_cancelled());
        self.waiting.retain(|request| !request.responder.is_cancelled());
        let cancelled = self.jobs.iter().filter(|(_, job)| job.responder.is_cancelled());
        let cancelled: Vec<u64> = cancelled.map(|(id, _)| *id).collect();
        for id in cancelled {
            self.remove(id);
        }
    }

    /// Drops a job and its sequences.
    fn remove(&mut self, id: u64) -> Option<Job> {
        for slot in &mut self.slots {
            if slot.sequence.as_ref().is_some_and(|sequence| sequence.job == id) {
                slot.sequence = None;
            }
        }
        self.jobs.remove(&id)
    }

    /// Gives free sequences to requests that wait, in the order of their arrival.
    fn admit(&mut self) {
        while let Some(first) = self.waiting.front() {
            let free = self.slots.iter().filter(|slot| slot.sequence.is_none()).count();
            if free < first.sampling.n as usize {
                return;
            }
            let outcome = match &first.requested {
                None => Ok(()),
                Some(adapter) => {
                    let in_use = self.adapters_in_use();
                    let inner = &self.model.inner;
                    self.adapters.load(inner, &mut self.context, adapter, &in_use)
                }
            };
            if matches!(outcome, Err(Unavailable::Full)) {
                return;
            }
            let Some(request) = self.waiting.pop_front() else { return };
            match outcome {
                Err(Unavailable::Failed(failure)) => request.responder.fail(&failure),
                _ => self.begin(request),
            }
        }
    }

    fn begin(&mut self, request: Request) {
        let Request {
            responder,
            prompt,
            sampling,
            matcher,
            is_streamed,
            prefix,
            returns,
            adapter,
            requested: _,
        } = request;
        let id = self.next_job;
        self.next_job += 1;
        let room = (self.model.context_length as usize).saturating_sub(prompt.len());
        let wanted = sampling.max_tokens.map_or(usize::MAX, |limit| limit as usize);
        let mut job = Job {
            responder,
            is_streamed,
            returns,
            prompt_tokens: prompt.len() as u32,
            cached_tokens: 0,
            prompt_ids: match returns.prompt_token_ids {
                true => prompt.iter().map(|token| token.cast_unsigned()).collect(),
                false => Vec::new(),
            },
            // Nothing comes before the first token.
            prompt_logprobs: sampling.prompt_logprobs.map(|_| Value::Null).into_iter().collect(),
            choices: Vec::new(),
            open: sampling.n as usize,
            sampling,
        };
        let random_seed = fastrand::u64(..);
        for choice in 0..job.sampling.n {
            let has_prompt_logprobs = choice == 0 && job.sampling.prompt_logprobs.is_some();
            let (at, common) = self.best_slot(&prompt, adapter);
            let kept = self.keep_prefix(at, if has_prompt_logprobs { 0 } else { common });
            self.slots[at].used_at = id + 1;
            self.slots[at].adapter = adapter;
            job.cached_tokens = job.cached_tokens.max(kept as u32);
            job.choices.push(Pending { text: prefix.clone(), ..Pending::default() });
            self.slots[at].sequence = Some(Sequence {
                job: id,
                choice: choice as usize,
                sampler: Sampler::new(&job.sampling, &prompt, choice, random_seed),
                matcher: matcher.as_ref().map(Matcher::deep_clone),
                text: TextWriter::new(&job.sampling.stop, job.sampling.include_stop),
                tokens: prompt.clone(),
                prompt_length: prompt.len(),
                processed: kept,
                logits_at: None,
                prompt_rows: Vec::new(),
                has_prompt_logprobs,
                adapter,
                limit: wanted.min(room),
            });
        }
        self.jobs.insert(id, job);
    }

    /// Returns the free sequence for a prompt, and the number of tokens that both have in common. At
    /// least one token of the prompt is always computed, for the logits of the next one.
    ///
    /// A long common beginning decides. Otherwise the sequence that was used least recently is
    /// taken, so that the others keep what may be used again; of unused ones the first, because
    /// llama.cpp computes neighbours together.
    fn best_slot(&self, prompt: &[i32], adapter: Option<AdapterId>) -> (usize, usize) {
        let free = self.slots.iter().enumerate().filter(|(_, slot)| slot.sequence.is_none());
        let rated = free.map(|(at, slot)| {
            let equal = slot.cached.iter().zip(prompt).take_while(|(old, new)| old == new).count();
            let common = if slot.adapter == adapter { equal.min(prompt.len() - 1) } else { 0 };
            let worth = if common < SHORT_PREFIX { 0 } else { common };
            (Reverse(worth), slot.used_at, at, common)
        });
        rated.min().map_or((0, 0), |(_, _, at, common)| (at, common))
    }

    /// Removes all but the first tokens of a sequence from the KV cache. Returns how many are left:
    /// some models can only remove all.
    fn keep_prefix(&mut self, at: usize, tokens: usize) -> usize {
        let slot = &mut self.slots[at];
        if slot.cached.is_empty() {
            return 0;
        }
        let sequence = at as u32;
        let removed = self.context.clear_kv_cache_seq(Some(sequence), Some(tokens as u32), None);
        let kept = if removed == Ok(true) { tokens } else { 0 };
        if kept == 0 {
            // This can always be removed.
            let _ = self.context.clear_kv_cache_seq(Some(sequence), None, None);
        }
        slot.cached.truncate(kept);
        kept
    }

    /// Gives the context the adapter of the next step: each adapter that requests use has its turn,
    /// because one step computes all of its sequences with one.
    fn choose_adapter(&mut self) -> Result<(), String> {
        let sequences = self.slots.iter().filter_map(|slot| slot.sequence.as_ref());
        let wanted: BTreeSet<Option<AdapterId>> =
            sequences.map(|sequence| sequence.adapter).collect();
        let after = (Bound::Excluded(self.adapters.active()), Bound::Unbounded);
        match wanted.range(after).next().or(wanted.first()) {
            Some(next) => self.adapters.activate(&mut self.context, *next),
            None => Ok(()),
        }
    }

    /// Collects the tokens of a step: of choices that are being generated first, then of prompts in
    /// the order of their arrival, while there is room. Returns whether there are any.
    ///
    /// The batch has the sequences in the order of their numbers: llama.cpp computes a run of
    /// ascending sequences together, and others one after the other.
    fn fill_batch(&mut self) -> bool {
        self.batch.clear();
        let mut wanted: Vec<(bool, u64, usize, usize)> = Vec::with_capacity(self.slots.len());
        for (at, slot) in self.slots.iter().enumerate() {
            if let Some(sequence) = &slot.sequence
                && sequence.adapter == self.adapters.active()
            {
                let missing = sequence.tokens.len() - sequence.processed;
                // Rows of logits are large.
                let missing = match sequence.has_prompt_logprobs {
                    true => missing.min(MAX_PROMPT_ROWS),
                    false => missing,
                };
                wanted.push((missing > 1, sequence.job, at, missing));
            }
        }
        wanted.sort_unstable();
        let mut room = self.batch_tokens;
        let mut chosen: Vec<(usize, usize)> = Vec::with_capacity(wanted.len());
        for (_, _, at, missing) in wanted {
            let count = missing.min(room);
            room -= count;
            chosen.push((at, count));
        }
        chosen.sort_unstable();
        for (at, count) in chosen {
            let slot = &mut self.slots[at];
            let Some(sequence) = &mut slot.sequence else { continue };
            let end = sequence.processed + count;
            for position in sequence.processed..end {
                let is_last = position + 1 == sequence.tokens.len();
                let row = self.batch.n_tokens();
                if is_last {
                    sequence.logits_at = Some(row);
                }
                let is_scored =
                    sequence.has_prompt_logprobs && position + 1 < sequence.prompt_length;
                if is_scored {
                    sequence.prompt_rows.push(PromptRow { position, row });
                }
                let token = LlamaToken(sequence.tokens[position]);
                // There is room: see above.
                let has_logits = is_last || is_scored;
                let _ = self.batch.add(token, position as i32, &[at as i32], has_logits);
            }
            slot.cached.extend_from_slice(&sequence.tokens[sequence.processed..end]);
            sequence.processed = end;
        }
        self.batch.n_tokens() > 0
    }

    /// Fails all requests that run, because a step has failed.
    fn fail_all(&mut self, why: &str) {
        let failure = Failure::internal(format!("llama.cpp failed to compute a step: {why}"));
        self.context.clear_kv_cache();
        for slot in &mut self.slots {
            *slot = Slot::default();
        }
        for job in std::mem::take(&mut self.jobs).into_values() {
            job.responder.fail(&failure);
        }
    }

    /// Chooses the next token of each choice that has logits.
    fn sample(&mut self) {
        for at in 0..self.slots.len() {
            let Some(mut sequence) = self.slots[at].sequence.take() else { continue };
            for PromptRow { position, row } in sequence.prompt_rows.drain(..) {
                let logits = self.context.get_logits_ith(row);
                if let Some(job) = self.jobs.get_mut(&sequence.job) {
                    let count = job.sampling.prompt_logprobs.unwrap_or(0);
                    let found = logprobs(logits, sequence.tokens[position + 1], count);
                    job.prompt_logprobs.push(logprobs_json(&self.model, &found));
                }
            }
            let Some(row) = sequence.logits_at.take() else {
                self.slots[at].sequence = Some(sequence);
                continue;
            };
            let logits = self.context.get_logits_ith(row);
            let Some(job) = self.jobs.get_mut(&sequence.job) else { continue };
            match next_token(&self.model, &mut sequence, job, logits) {
                Ok(true) => self.slots[at].sequence = Some(sequence),
                Ok(false) => job.open -= 1,
                Err(failure) => {
                    let id = sequence.job;
                    if let Some(job) = self.remove(id) {
                        job.responder.fail(&failure);
                    }
                }
            }
        }
    }

    /// Sends what clients can take.
    fn send(&mut self) {
        let mut ended = Vec::new();
        if let Some(job) = self.jobs.values().next() {
            job.responder.hold_responses(true);
        }
        for (id, job) in &mut self.jobs {
            let is_due = if job.is_streamed { job.has_news() } else { job.open == 0 };
            if !is_due || !job.responder.is_ready() {
                continue;
            }
            let is_last = job.open == 0;
            let sent = respond(&self.outputs, job, is_last);
            if is_last || sent.is_err() {
                ended.push(*id);
            }
            if let Err(failure) = sent {
                job.responder.fail(&failure);
            }
        }
        if let Some(job) = self.jobs.values().next() {
            job.responder.hold_responses(false);
        }
        for id in ended {
            self.remove(id);
        }
    }

    /// Records the gauges.
    fn record(&mut self) {
        if self.sampled_at.is_some_and(|at| at.elapsed() < SAMPLE_EVERY) {
            return;
        }
        self.sampled_at = Some(now());
        let running = self.slots.iter().filter_map(|slot| slot.sequence.as_ref());
        let used: usize = running.clone().map(|sequence| sequence.processed).sum();
        let all = self.slots.len() * self.model.context_length as usize;
        let set = |gauge: &Option<Gauge>, value: f64| {
            if let Some(gauge) = gauge {
                gauge.set(value);
            }
        };
        set(&self.gauges.running, running.count() as f64);
        set(&self.gauges.waiting, self.waiting.len() as f64);
        set(&self.gauges.cache_usage, used as f64 / all as f64);
        set(&self.gauges.cache_tokens, all as f64);
        // The adapters of a context apply to whole steps.
        set(&self.gauges.adapter_slots, 1.0);
        let choices = |sampling: &Sampling, count: usize| Some((sampling.adapter.clone()?, count));
        let running = self.jobs.values().filter_map(|job| choices(&job.sampling, job.open));
        let waiting = self.waiting.iter().map(|request| &request.sampling);
        let waiting = waiting.filter_map(|sampling| choices(sampling, sampling.n as usize));
        self.gauges.adapters.set(running, waiting);
    }
}

/// Chooses the next token of a choice. Returns whether the choice goes on.
fn next_token(
    model: &SharedModel,
    sequence: &mut Sequence,
    job: &mut Job,
    logits: &[f32],
) -> Result<bool, Failure> {
    if sequence.limit == 0 {
        // The client wants the probabilities of its prompt only.
        job.choices[sequence.choice].finish = Some(Finish::length());
        return Ok(false);
    }
    let sampling = &job.sampling;
    let generated = sequence.tokens.len() - sequence.prompt_length;
    let too_early = (generated as u64) < sampling.min_tokens;
    let banned: &[i32] = if too_early { &model.ends } else { &[] };
    let allowed = match &mut sequence.matcher {
        Some(matcher) => Some(matcher.compute_mask_or_eos().map_err(|error| too_costly(&error))?),
        None => None,
    };
    let sampled = sequence.sampler.sample(logits, allowed.as_ref(), banned);
    let token = sampled.token;
    let pending = &mut job.choices[sequence.choice];
    pending.tokens += 1;
    if job.returns.token_ids {
        pending.token_ids.push(token.cast_unsigned());
    }
    if job.returns.logprobs {
        pending.logprobs.push(logprobs_json(model, &sampled.logprobs));
    }
    let is_end = model.ends.contains(&token);
    let mut finish = None;
    if is_end && (!sampling.ignore_eos || sequence.matcher.is_some()) {
        finish = Some(Finish::stop(Value::Null));
    } else if sampling.stop_token_ids.contains(&token) && !too_early {
        finish = Some(Finish::stop(token.into()));
    } else {
        let piece = model.piece(token, !sampling.skip_special_tokens);
        match sequence.text.push(&piece) {
            Written::Text(text) => pending.text.push_str(&text),
            Written::Stopped(text, which) => {
                pending.text.push_str(&text);
                finish = Some(Finish::stop(sampling.stop[which].as_str().into()));
            }
        }
        if let Some(matcher) = &mut sequence.matcher
            && finish.is_none()
        {
            let consumed = matcher.consume_token(token.cast_unsigned());
            consumed.map_err(|error| too_costly(&error))?;
            if matcher.is_stopped() {
                finish = Some(Finish::stop(Value::Null));
            }
        }
    }
    if finish.is_none() && generated + 1 >= sequence.limit {
        finish = Some(Finish::length());
    }
    if finish.is_none() {
        sequence.tokens.push(token);
        return Ok(true);
    }
    let is_cut = finish.as_ref().is_some_and(|finish| finish.stop_reason.is_string());
    if !is_cut {
        pending.text.push_str(&sequence.text.finish());
    }
    pending.finish = finish;
    Ok(false)
}

/// Returns the failure of a request whose structure exceeds a limit of llguidance.
fn too_costly(error: &impl std::fmt::Display) -> Failure {
    let error = error.to_string();
    let why = error.lines().next().unwrap_or_default();
    Failure::invalid(format!("structured_outputs is too costly: {why}"))
}

/// Returns the probabilities of a position in the form of vllm_backend.
fn logprobs_json(model: &SharedModel, logprobs: &[Logprob]) -> Value {
    let members = logprobs.iter().map(|one| {
        let text = String::from_utf8_lossy(&model.piece(one.token, true)).into_owned();
        let value = json!({"logprob": one.logprob, "rank": one.rank, "decoded_token": text});
        (one.token.to_string(), value)
    });
    Value::Object(members.collect::<Map<String, Value>>())
}

/// Sends what a job has for its client.
fn respond(outputs: &OutputPositions, job: &mut Job, is_last: bool) -> Result<(), Failure> {
    let choices: Vec<Pending> = job.choices.iter_mut().map(std::mem::take).collect();
    let strings = |of: &dyn Fn(&Pending) -> String| choices.iter().map(of).collect::<Vec<_>>();
    let reasons = strings(&|choice| {
        choice.finish.as_ref().map_or_else(|| "None".to_owned(), |finish| finish.reason.to_owned())
    });
    let stops = strings(&|choice| {
        let finish = choice.finish.as_ref();
        finish.map_or_else(|| "null".to_owned(), |finish| finish.stop_reason.to_string())
    });
    let probabilities = match job.returns.logprobs {
        true => strings(&|choice| Value::from(choice.logprobs.clone()).to_string()),
        false => Vec::new(),
    };
    let prompt_ids = std::mem::take(&mut job.prompt_ids);
    let prompt_logprobs = std::mem::take(&mut job.prompt_logprobs);
    let has_prompt_logprobs = !prompt_logprobs.is_empty();
    let prompt_logprobs = match has_prompt_logprobs {
        true => vec![Value::from(prompt_logprobs).to_string()],
        false => Vec::new(),
    };
    let texts = choices.iter().map(|choice| choice.text.as_bytes()).collect();
    let counts: Vec<u32> = choices.iter().map(|choice| choice.tokens).collect();
    let ids = choices.first().map(|choice| choice.token_ids.as_slice()).unwrap_or_default();
    let prompt = [job.prompt_tokens];
    let cached = [job.cached_tokens];
    let mut made = Vec::with_capacity(8);
    let mut add = |index: Option<usize>, is_wanted: bool, data| {
        if let Some(index) = index.filter(|_| is_wanted) {
            made.push(Output { index, data });
        }
    };
    let returns = job.returns;
    add(outputs.text, true, Elements::Strings(texts));
    add(outputs.finish_reason, returns.finish_reason, Elements::Strings(bytes(&reasons)));
    add(outputs.stop_reason, returns.finish_reason, Elements::Strings(bytes(&stops)));
    add(outputs.logprobs, returns.logprobs, Elements::Strings(bytes(&probabilities)));
    add(outputs.token_ids, returns.token_ids, Elements::Naturals(ids));
    add(outputs.prompt_token_ids, !prompt_ids.is_empty(), Elements::Naturals(&prompt_ids));
    let prompt_probabilities = Elements::Strings(bytes(&prompt_logprobs));
    add(outputs.prompt_logprobs, has_prompt_logprobs, prompt_probabilities);
    add(outputs.num_input_tokens, returns.counts, Elements::Naturals(&prompt));
    add(outputs.num_cached_tokens, returns.counts, Elements::Naturals(&cached));
    add(outputs.num_output_tokens, returns.counts, Elements::Naturals(&counts));
    job.responder.respond(&made, is_last)
}

fn bytes(texts: &[String]) -> Vec<&[u8]> {
    texts.iter().map(String::as_bytes).collect()
}
