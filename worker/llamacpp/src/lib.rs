//! The backend `llamacpp`: language models in GGUF files, run by llama.cpp, with the tensors of
//! Triton's vllm_backend.
//!
//! The server calls three functions of this library, which calls functions of the server (`host`). A request
//! becomes tokens and parameters on the server's thread, and is then answered by the thread of the
//! engine (`engine`), which runs all requests together.

mod engine;
mod host;
mod model;
mod sampler;
mod sampling;
mod settings;
mod text;

use std::ffi::{c_char, c_void};
use std::num::NonZeroU32;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread::{self, JoinHandle};

use llama_cpp_2::context::params::LlamaContextParams;
use serde_json::{Map, Value};

use crate::engine::{Engine, Gauges, OutputPositions, Request, Returns};
use crate::host::interface::{
    PHAROS_BACKEND_ABI_VERSION, pharos_batch, pharos_code, pharos_context, pharos_outputs,
};
use crate::host::{Batch, Context, Failure, Host, Level};
use crate::model::{Model, SharedModel};
use crate::sampling::Sampling;
use crate::settings::Settings;

/// An instance of a model.
struct Instance {
    host: Host,
    model: SharedModel,
    max_sequences: u32,
    is_decoupled: bool,
    /// `None` when the instance ends.
    requests: Option<Sender<Request>>,
    engine: Option<JoinHandle<()>>,
}

impl Instance {
    /// Loads a model and starts its engine.
    fn create(context: &Context<'_>) -> Result<Self, String> {
        let settings = Settings::read(context)?;
        let model = Arc::new(Model::load(&settings, context.host)?);
        let (requests, received) = channel();
        let (report, loaded) = channel();
        let engine = {
            let model = model.clone();
            let settings = settings.clone();
            let outputs = output_positions(&context.outputs());
            let gauges = Gauges {
                running: context.gauge("pharos_llm_running_requests"),
                waiting: context.gauge("pharos_llm_waiting_requests"),
                cache_usage: context.gauge("pharos_llm_kv_cache_usage_ratio"),
            };
            let run = move || run_engine(&model, &settings, outputs, gauges, &received, &report);
            thread::Builder::new().name("engine".to_owned()).spawn(run)
        };
        let engine = engine.map_err(|error| format!("the engine cannot start: {error}"))?;
        loaded.recv().map_err(|_| "the engine has ended".to_owned())??;
        context.host.log(
            Level::Info,
            &format!(
                "'{}': {} sequences of {} tokens, {} threads",
                settings.file.display(),
                settings.max_sequences,
                model.context_length,
                settings.threads
            ),
        );
        Ok(Self {
            host: context.host,
            model,
            max_sequences: settings.max_sequences,
            is_decoupled: context.is_decoupled,
            requests: Some(requests),
            engine: Some(engine),
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
        let wrong = |name: &str, what: &str| {
            Failure::invalid(format!("the input '{name}' must have {what} for each request"))
        };
        let text = |name: &str| match batch.input(name) {
            None => Ok(None),
            Some(input) => match input.string(position) {
                Some(text) => Ok(Some(text)),
                None => Err(wrong(name, "one string in UTF-8")),
            },
        };
        let flag = |name: &str, default: bool| match batch.input(name) {
            None => Ok(default),
            Some(input) => input.boolean(position).ok_or_else(|| wrong(name, "one boolean")),
        };
        let prompt = text("text_input")?.ok_or_else(|| wrong("text_input", "one string"))?;
        let sampling = match text("sampling_parameters")? {
            Some(json) => Sampling::read(members(json)?)?,
            None => Sampling::read(batch.parameters(position))?,
        };
        let is_streamed = flag("stream", false)?;
        let excludes_prompt = flag("exclude_input_in_output", is_streamed)?;
        if is_streamed && !excludes_prompt {
            return Err(Failure::invalid(
                "a stream has no prompt in its output: exclude_input_in_output must be true",
            ));
        }
        if is_streamed && !self.is_decoupled {
            return Err(Failure::invalid(
                "stream is true, but the configuration of the model is not decoupled",
            ));
        }
        if sampling.n > self.max_sequences {
            return Err(Failure::invalid(format!(
                "n {} is not allowed: the model generates at most {} choices together \
                 (its parameter 'max_sequences')",
                sampling.n, self.max_sequences
            )));
        }
        let tokens = self.tokens(prompt, &sampling)?;
        let matcher = sampling.structure.as_ref();
        let matcher = matcher.map(|structure| self.model.matcher(structure)).transpose()?;
        let returns = Returns {
            finish_reason: flag("return_finish_reason", true)?,
            counts: flag("return_num_output_tokens", true)?,
            logprobs: sampling.logprobs.is_some() && flag("return_logprobs", true)?,
            token_ids: flag("return_token_ids", false)? && sampling.n == 1,
        };
        let request = Request {
            prefix: if excludes_prompt { String::new() } else { prompt.to_owned() },
            prompt: tokens,
            sampling,
            matcher,
            is_streamed,
            returns,
            responder: batch.detach(position)?,
        };
        match &self.requests {
            Some(requests) if requests.send(request).is_ok() => Ok(()),
            _ => Err(Failure::internal("the engine has ended")),
        }
    }

    /// Returns the tokens of a prompt.
    fn tokens(&self, prompt: &str, sampling: &Sampling) -> Result<Vec<i32>, Failure> {
        let limit = self.model.context_length as usize;
        let mut tokens = self.model.tokenize(prompt);
        if let Some(wanted) = sampling.truncate_prompt {
            tokens.drain(..tokens.len().saturating_sub(wanted));
        }
        match tokens.len() {
            0 => Err(Failure::invalid("the prompt has no tokens")),
            length if length >= limit => Err(Failure::invalid(format!(
                "the prompt has {length} tokens, and the context of the model is {limit} tokens: \
                 a shorter prompt leaves room for the output"
            ))),
            _ => Ok(tokens),
        }
    }
}

impl Drop for Instance {
    fn drop(&mut self) {
        self.requests = None;
        if let Some(engine) = self.engine.take() {
            let _ = engine.join();
        }
    }
}

/// Reads JSON with the parameters of sampling.
fn members(json: &str) -> Result<Map<String, Value>, Failure> {
    let wrong = |why: &str| {
        Failure::invalid(format!("the input 'sampling_parameters' is not a JSON object: {why}"))
    };
    match serde_json::from_str(json) {
        Ok(Value::Object(members)) => Ok(members),
        Ok(_) => Err(wrong("it is another value")),
        Err(error) => Err(wrong(&error.to_string())),
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
    }
}

/// Runs the thread of the engine. A panic ends the process: a new one replaces it.
fn run_engine(
    model: &SharedModel,
    settings: &Settings,
    outputs: OutputPositions,
    gauges: Gauges,
    requests: &Receiver<Request>,
    report: &Sender<Result<(), String>>,
) {
    let run = || {
        let tokens = model.context_length.saturating_mul(settings.max_sequences);
        let threads = settings.threads as i32;
        let parameters = LlamaContextParams::default()
            .with_n_ctx(NonZeroU32::new(tokens))
            .with_n_seq_max(settings.max_sequences)
            .with_n_batch(settings.batch_tokens)
            .with_n_ubatch(settings.batch_tokens)
            .with_n_threads(threads)
            .with_n_threads_batch(threads)
            // Whole contexts for models with sliding windows: prefixes can be used again.
            .with_swa_full(true)
            .with_no_perf(true);
        let context = match model.inner.new_context(&model.backend, parameters) {
            Ok(context) => context,
            Err(error) => {
                let _ = report.send(Err(format!(
                    "a context of {} sequences of {} tokens cannot be created: {error}",
                    settings.max_sequences, model.context_length
                )));
                return;
            }
        };
        let _ = report.send(Ok(()));
        let sequences = settings.max_sequences as usize;
        let batch_tokens = settings.batch_tokens as usize;
        Engine::new(model.clone(), context, sequences, batch_tokens, outputs, gauges).run(requests);
    };
    if catch_unwind(AssertUnwindSafe(run)).is_err() {
        eprintln!("the engine of llamacpp panicked; this process ends");
        std::process::abort();
    }
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
