//! The backend `llamacpp`: language models in GGUF files, run by llama.cpp, with the tensors of
//! Triton's vllm_backend.
//!
//! The server calls three functions of this library, which calls functions of the server (`host`). A request
//! becomes tokens and parameters on the server's thread, and is then answered by the thread of the
//! engine (`engine`), which runs all requests together.

mod adapters;
mod engine;
mod host;
mod logs;
mod model;
mod pooling;
mod processor;
mod requests;
mod sampler;
mod sampling;
mod schemas;
mod settings;
mod text;

use std::ffi::{c_char, c_void};
use std::num::NonZeroU32;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread::{self, JoinHandle};

use llama_cpp_2::context::params::{LlamaContextParams, LlamaPoolingType};
use llama_cpp_2::model::LlamaLoraAdapter;

use crate::adapters::{AdapterGauges, Adapters};
use crate::engine::{Engine, Gauges, OutputPositions, Work};
use crate::host::interface::{
    PHAROS_BACKEND_ABI_VERSION, pharos_batch, pharos_code, pharos_context, pharos_outputs,
};
use crate::host::{Batch, Context, Elements, Failure, Host, Level, Output, Responder};
use crate::model::{Loaded, Model, SharedModel};
use crate::pooling::{Pooled, PoolingEngine, PoolingRequest};
use crate::requests::{Draft, Kind, Prepared, Reader};
use crate::settings::{Pooling, Settings};

/// The way to the engine of a model, by its task.
#[derive(Clone)]
enum Queue {
    Generate(Sender<Work>),
    Pool(Sender<PoolingRequest>),
}

/// What passes requests on to the engine.
#[derive(Clone)]
struct Intake {
    model: SharedModel,
    queue: Queue,
    outputs: OutputPositions,
}

/// An instance of a model.
struct Instance {
    host: Host,
    kind: Kind,
    /// `None` when the instance ends.
    intake: Option<Intake>,
    /// The way to the thread that prepares requests with long texts or structures, so that the
    /// others do not wait for them.
    long: Option<Sender<Draft>>,
    threads: Vec<JoinHandle<()>>,
}

impl Instance {
    /// Loads a model and starts its engine.
    fn create(context: &Context<'_>) -> Result<Self, String> {
        let settings = Settings::read(context)?;
        let outputs = output_positions(&context.outputs());
        let Loaded { model, adapters } = Model::load(&settings, context)?;
        let model = Arc::new(model);
        let gauges = Gauges {
            running: context.gauge("pharos_llm_running_requests"),
            waiting: context.gauge("pharos_llm_waiting_requests"),
            cache_usage: context.gauge("pharos_llm_kv_cache_usage_ratio"),
            cache_tokens: context.gauge("pharos_llm_kv_cache_tokens"),
            adapter_slots: context.gauge("pharos_llm_adapter_slots"),
            adapters: AdapterGauges::new(context.gauges("pharos_llm_adapter_requests")),
        };
        let (report, loaded) = channel();
        let is_pooling = outputs.embedding.is_some() || outputs.score.is_some();
        let max_sequences = settings.max_sequences(is_pooling);
        let start = Start {
            model: model.clone(),
            settings: settings.clone(),
            max_sequences,
            outputs,
            gauges,
            report,
        };
        let (queue, engine) = if is_pooling {
            let (requests, received) = channel();
            (Queue::Pool(requests), spawn("engine", move || start.pool(&received)))
        } else {
            let (requests, received) = channel();
            let run = move || start.generate(adapters, &received);
            (Queue::Generate(requests), spawn("engine", run))
        };
        let cannot_start = |error| format!("the engine cannot start: {error}");
        let engine = engine.map_err(cannot_start)?;
        loaded.recv().map_err(|_| "the engine has ended".to_owned())??;
        let kind = match (outputs.embedding, outputs.score) {
            (Some(_), _) => Kind::Embed,
            (None, Some(_)) => Kind::Score,
            (None, None) => Kind::Generate { max_sequences, is_decoupled: context.is_decoupled },
        };
        context.host.log(
            Level::Info,
            &format!(
                "'{}': {max_sequences} sequences of {} tokens, {} threads",
                settings.file.display(),
                model.context_length,
                settings.threads
            ),
        );
        let intake = Intake { model, queue, outputs };
        let (long, drafts) = channel::<Draft>();
        let preparing = {
            let intake = intake.clone();
            spawn("prepare", move || drafts.into_iter().for_each(|draft| intake.take(draft)))
        };
        Ok(Self {
            host: context.host,
            kind,
            intake: Some(intake),
            long: Some(long),
            threads: vec![preparing.map_err(cannot_start)?, engine],
        })
    }

    /// Passes the requests of a batch to the engine. Those that are wrong fail.
    fn execute(&self, batch: &Batch<'_>) {
        for position in 0..batch.len() {
            if let Err(failure) = self.accept(batch, position) {
                batch.fail(position, &failure);
            }
        }
    }

    fn accept(&self, batch: &Batch<'_>, position: usize) -> Result<(), Failure> {
        let (Some(intake), Some(long)) = (&self.intake, &self.long) else {
            return Err(Failure::internal("the engine has ended"));
        };
        let draft = Reader { batch, position }.to_draft(self.kind)?;
        match draft.is_long(&intake.model) {
            // Dropping the draft fails the request.
            true => drop(long.send(draft)),
            false => intake.take(draft),
        }
        Ok(())
    }
}

impl Intake {
    /// Passes a request to the engine, or answers it. A request that is not passed on fails when it
    /// is dropped.
    fn take(&self, draft: Draft) {
        match (draft.prepare(&self.model), &self.queue) {
            (Some(Prepared::Generate(request)), Queue::Generate(requests)) => {
                let _ = requests.send(Work::Generate(request));
            }
            (Some(Prepared::Load(responder, adapter)), Queue::Generate(requests)) => {
                let _ = requests.send(Work::Load(responder, adapter));
            }
            (Some(Prepared::Unload(responder, adapter)), Queue::Generate(requests)) => {
                let _ = requests.send(Work::Unload(responder, adapter));
            }
            (Some(Prepared::Pool(request)), Queue::Pool(requests)) => {
                let _ = requests.send(request);
            }
            (Some(Prepared::Tokens(responder, tokens, pieces)), _) => {
                let texts = pieces.iter().map(Vec::as_slice).collect();
                self.answer(&responder, Some(&tokens), texts);
            }
            (Some(Prepared::Text(responder, text)), _) => {
                self.answer(&responder, None, vec![text.as_bytes()]);
            }
            _ => {}
        }
    }

    /// Answers a request for tokens or their text.
    fn answer(&self, responder: &Responder, tokens: Option<&[u32]>, texts: Vec<&[u8]>) {
        let OutputPositions { text: Some(text), prompt_token_ids: Some(ids), .. } = self.outputs
        else {
            return responder.fail(&Failure::invalid(
                "the configuration of the model lacks the outputs text_output and prompt_token_ids",
            ));
        };
        let mut made = vec![Output { index: text, data: Elements::Strings(texts) }];
        if let Some(tokens) = tokens {
            made.push(Output { index: ids, data: Elements::Naturals(tokens) });
        }
        if let Err(failure) = responder.respond(&made, true) {
            responder.fail(&failure);
        }
    }
}

impl Drop for Instance {
    fn drop(&mut self) {
        self.intake = None;
        self.long = None;
        for thread in self.threads.drain(..) {
            let _ = thread.join();
        }
    }
}

/// Returns the positions of outputs by their names.
fn output_positions(names: &[String]) -> OutputPositions {
    let at = |name: &str| names.iter().position(|known| known == name);
    OutputPositions {
        text: at("text_output"),
        finish_reason: at("finish_reason"),
        stop_reason: at("stop_reason"),
        logprobs: at("logprobs"),
        token_ids: at("token_ids"),
        num_input_tokens: at("num_input_tokens"),
        num_cached_tokens: at("num_cached_tokens"),
        num_output_tokens: at("num_output_tokens"),
        prompt_token_ids: at("prompt_token_ids"),
        prompt_logprobs: at("prompt_logprobs"),
        embedding: at("embedding"),
        score: at("score"),
    }
}

/// Starts a thread. A panic ends the process: a new one replaces it.
fn spawn(name: &str, run: impl FnOnce() + Send + 'static) -> std::io::Result<JoinHandle<()>> {
    thread::Builder::new().name(name.to_owned()).spawn(move || {
        if catch_unwind(AssertUnwindSafe(run)).is_err() {
            eprintln!("a thread of llamacpp panicked; this process ends");
            std::process::abort();
        }
    })
}

/// What an engine starts with.
struct Start {
    model: SharedModel,
    settings: Settings,
    max_sequences: u32,
    outputs: OutputPositions,
    gauges: Gauges,
    /// Tells whether the engine has started.
    report: Sender<Result<(), String>>,
}

impl Start {
    /// Returns the parameters of a context for this many tokens, of which a step computes
    /// `batch_tokens`.
    fn parameters(&self, tokens: u32, batch_tokens: u32) -> LlamaContextParams {
        let threads = self.settings.threads as i32;
        LlamaContextParams::default()
            .with_n_ctx(NonZeroU32::new(tokens))
            .with_n_seq_max(self.max_sequences)
            .with_n_batch(batch_tokens)
            .with_n_ubatch(batch_tokens)
            .with_n_threads(threads)
            .with_n_threads_batch(threads)
            // Whole contexts for models with sliding windows: prefixes can be used again.
            .with_swa_full(true)
            .with_no_perf(true)
    }

    /// Runs the engine of a model that generates text.
    fn generate(self, adapters: Vec<LlamaLoraAdapter>, requests: &Receiver<Work>) {
        let model = self.model.clone();
        let batch_tokens = self.settings.batch_tokens;
        let tokens = model.context_length.saturating_mul(self.max_sequences);
        let parameters = self.parameters(tokens, batch_tokens);
        let context = match model.inner.new_context(&model.backend, parameters) {
            Ok(context) => context,
            Err(error) => return self.fail(&error.to_string()),
        };
        let _ = self.report.send(Ok(()));
        let batch =
            BatchSize { sequences: self.max_sequences as usize, tokens: batch_tokens as usize };
        let most = self.settings.max_adapters as usize;
        let adapters = Adapters::new(adapters, most, model.known_adapters.clone());
        Engine::new(self.model, context, adapters, batch, self.outputs, self.gauges).run(requests);
    }

    /// Runs the engine of a model that makes embeddings or scores.
    fn pool(self, requests: &Receiver<PoolingRequest>) {
        let model = self.model.clone();
        // A step has whole texts.
        let batch_tokens = self.settings.batch_tokens.max(model.context_length);
        let mut parameters =
            self.parameters(batch_tokens, batch_tokens).with_embeddings(true).with_kv_unified(true);
        let is_embedding = self.outputs.embedding.is_some();
        match self.settings.pooling {
            _ if !is_embedding => {
                parameters = parameters.with_pooling_type(LlamaPoolingType::Rank);
            }
            Some(pooling) => {
                parameters = parameters.with_pooling_type(match pooling {
                    Pooling::Mean => LlamaPoolingType::Mean,
                    Pooling::First => LlamaPoolingType::Cls,
                    Pooling::Last => LlamaPoolingType::Last,
                });
            }
            None => {
                let architecture = model.inner.meta_val_str("general.architecture");
                let key = format!("{}.pooling_type", architecture.unwrap_or_default());
                if !["1", "2", "3"]
                    .contains(&model.inner.meta_val_str(&key).unwrap_or_default().as_str())
                {
                    return self.fail(
                        "the file does not say how embeddings are made: set the parameter \
                         'pooling' to mean, cls or last",
                    );
                }
            }
        }
        let result = match (is_embedding, model.scores_are_probabilities()) {
            (true, _) => Pooled::Embedding,
            (false, true) => Pooled::Probability,
            (false, false) => Pooled::Logit,
        };
        let context = match model.inner.new_context(&model.backend, parameters) {
            Ok(context) => context,
            Err(error) => return self.fail(&error.to_string()),
        };
        let _ = self.report.send(Ok(()));
        let batch =
            BatchSize { sequences: self.max_sequences as usize, tokens: batch_tokens as usize };
        PoolingEngine::new(context, result, batch, self.outputs, self.gauges).run(requests);
    }

    fn fail(&self, why: &str) {
        let _ = self.report.send(Err(format!(
            "a context of {} sequences of {} tokens cannot be created: {why}",
            self.max_sequences, self.model.context_length
        )));
    }
}

/// What a step can have.
#[derive(Clone, Copy, Debug)]
pub(crate) struct BatchSize {
    pub(crate) sequences: usize,
    pub(crate) tokens: usize,
}

/// See `pharos_backend.h`.
#[unsafe(no_mangle)]
pub extern "C" fn pharos_backend_abi_version() -> u32 {
    PHAROS_BACKEND_ABI_VERSION
}

/// See `pharos_backend.h`.
#[unsafe(no_mangle)]
pub extern "C" fn pharos_backend_engine() -> *const c_char {
    concat!("llama.cpp of llama-cpp-2 0.1.160, backend ", env!("CARGO_PKG_VERSION"), "\0")
        .as_ptr()
        .cast()
}

/// See `pharos_backend.h`.
///
/// # Safety
/// The server calls it as the header says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pharos_backend_create(
    context: *const pharos_context,
    instance: *mut *mut c_void,
) -> pharos_code {
    // SAFETY: the caller guarantees it.
    let Some(context) = (unsafe { Context::read(context) }) else {
        return Failure::internal("").code;
    };
    let created = catch_unwind(AssertUnwindSafe(|| Instance::create(&context)));
    match created.unwrap_or_else(|_| Err("the backend panicked".to_owned())) {
        Ok(created) => {
            // SAFETY: the caller guarantees that the pointer can be written.
            unsafe { instance.write(Box::into_raw(Box::new(created)).cast()) };
            0
        }
        Err(message) => context.fail_load(&message),
    }
}

/// See `pharos_backend.h`.
///
/// # Safety
/// The server calls it as the header says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pharos_backend_execute(
    instance: *mut c_void,
    batch: *const pharos_batch,
    outputs: *mut pharos_outputs,
) -> pharos_code {
    // SAFETY: `pharos_backend_create` has made the instance.
    let Some(instance) = (unsafe { instance.cast::<Instance>().as_ref() }) else {
        return Failure::internal("").code;
    };
    // SAFETY: the caller guarantees it.
    let Some(batch) = (unsafe { Batch::new(instance.host, batch, outputs) }) else {
        return Failure::internal("").code;
    };
    match catch_unwind(AssertUnwindSafe(|| instance.execute(&batch))) {
        Ok(()) => 0,
        Err(_) => Failure::internal("").code,
    }
}

/// See `pharos_backend.h`.
///
/// # Safety
/// The server calls it as the header says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pharos_backend_destroy(instance: *mut c_void) {
    if !instance.is_null() {
        // SAFETY: `pharos_backend_create` has made the instance, and nothing uses it afterwards.
        drop(unsafe { Box::from_raw(instance.cast::<Instance>()) });
    }
}
