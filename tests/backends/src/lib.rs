//! The backend `test`: models without files that wait, fail, crash, stream, keep state and record
//! metrics. The configuration's parameter `function` selects one:
//!
//! | function | effect |
//! |---|---|
//! | `identity` | output *i* is input *i*; with `echo_parameters: true`, responses carry the parameters of their requests |
//! | `delay` | identity after `delay_ms` milliseconds for each batch, or sooner if all its requests are cancelled |
//! | `fail` | fails every batch with the text of `message`, or `requested failure` |
//! | `crash` | identity, but aborts the process when the first byte of input 0 is 1 |
//! | `panic` | identity, but panics when the first byte of input 0 is 1 |
//! | `hang` | identity, but never returns when the first byte of input 0 is 1 |
//! | `print` | identity, and prints each element of input 0, which holds BYTES, as a line on standard output |
//! | `accumulate`, `append` | functions of the model's states; see `stateful.rs` |
//! | `repeat` | for decoupled models: one response for each element; see `repeat.rs` for its parameters |
//! | `silent` | for decoupled models: no response at all |
//! | `countdown` | executes a request a given number of times, each batch after `delay_ms`; see `countdown.rs` |
//! | `sequence_sum` | a sum for each sequence, each batch after `delay_ms`; see `sequence_sum.rs` for its outputs |
//! | `emit` | identity that records metrics; see `emit.rs` for its parameters |

mod countdown;
mod emit;
mod repeat;
mod sequence_sum;
mod stateful;

use std::io::{self, Write};
use std::thread;
use std::time::{Duration, Instant};

use pharos::error::InferError;
use pharos::tensor::{DataType, bytes_elements};
use pharos_backend::{Backend, Batch, Context, Outputs, load_error, run_error};

use countdown::Countdown;
use emit::Emitter;
use repeat::Repeat;
use sequence_sum::SequenceSum;
use stateful::Stateful;

const FUNCTIONS: &str = "identity, delay, fail, crash, panic, hang, print, accumulate, append, \
                         repeat, silent, countdown, sequence_sum, emit";

/// How long a delay sleeps before it checks again whether the batch is cancelled.
const CHECK_INTERVAL: Duration = Duration::from_millis(5);

/// What a function does before it returns its inputs.
enum Effect {
    None,
    EchoParameters,
    Delay(Duration),
    Fail(String),
    Crash,
    Panic,
    Hang,
    Print,
    Emit(Emitter),
}

struct Identity {
    effect: Effect,
}

/// A decoupled model without any response.
struct Silent;

/// Creates the function that the configuration selects.
///
/// # Errors
/// There is no such function, or the configuration does not fit it.
pub fn create(context: &Context<'_>) -> Result<Box<dyn Backend>, InferError> {
    let parameter = |name: &str| context.config.parameters.get(name).map(String::as_str);
    let Some(function) = parameter("function") else {
        return Err(load_error(format!(
            "the test backend needs the parameter 'function': one of {FUNCTIONS}"
        )));
    };
    let delay = Duration::from_millis(number(context, "delay_ms")?.unwrap_or(0));
    let effect = match function {
        "repeat" => return Ok(Box::new(Repeat::new(context)?)),
        "silent" => return Ok(Box::new(Silent)),
        "countdown" => return Ok(Box::new(Countdown::new(context.config, delay)?)),
        "sequence_sum" => return Ok(Box::new(SequenceSum::new(context.config, delay)?)),
        "accumulate" => return Ok(Box::new(Stateful::accumulate(context.config)?)),
        "append" => return Ok(Box::new(Stateful::append(context.config)?)),
        "identity" if parameter("echo_parameters") == Some("true") => Effect::EchoParameters,
        "identity" => Effect::None,
        "delay" => Effect::Delay(delay),
        "fail" => Effect::Fail(parameter("message").unwrap_or("requested failure").to_owned()),
        "crash" => Effect::Crash,
        "panic" => Effect::Panic,
        "hang" => Effect::Hang,
        "print" => Effect::Print,
        "emit" => Effect::Emit(Emitter::new(context)?),
        other => {
            return Err(load_error(format!(
                "parameter 'function' is '{other}'; the test backend has {FUNCTIONS}"
            )));
        }
    };
    let inputs = context.config.backend_inputs();
    let outputs = context.config.outputs.len();
    if inputs == 0 || inputs != outputs {
        let text = "the function needs one output for each input";
        return Err(load_error(format!(
            "the configuration has {inputs} inputs and {outputs} outputs; {text}"
        )));
    }
    Ok(Box::new(Identity { effect }))
}

impl Backend for Identity {
    fn engine(&self) -> String {
        engine()
    }

    /// Functions that read their inputs only once.
    fn tolerates_concurrent_writes(&self) -> bool {
        matches!(
            self.effect,
            Effect::None | Effect::Delay(_) | Effect::Fail(_) | Effect::Crash | Effect::Hang
        )
    }

    fn execute(&mut self, batch: &Batch<'_>, outputs: &mut Outputs<'_>) -> Result<(), InferError> {
        let is_marked = batch.inputs.first().is_some_and(|input| input.data.first() == Some(&1));
        match &self.effect {
            Effect::Delay(duration) => {
                wait(*duration, batch);
                if batch.all_cancelled() {
                    return Err(InferError::cancelled());
                }
            }
            Effect::Fail(message) => return Err(run_error(message.clone())),
            Effect::Crash if is_marked => std::process::abort(),
            #[allow(clippy::panic)] // this function tests panics
            Effect::Panic if is_marked => panic!("requested panic"),
            Effect::Hang if is_marked => loop {
                thread::park();
            },
            Effect::None | Effect::Crash | Effect::Panic | Effect::Hang => {}
            Effect::EchoParameters => {
                for (position, request) in batch.requests.iter().enumerate() {
                    for (name, value) in &request.parameters {
                        outputs.parameter(position, name, value.clone());
                    }
                }
            }
            Effect::Print => print(batch)?,
            Effect::Emit(emitter) => emitter.execute(batch, outputs),
        }
        for input in batch.inputs.iter().filter(|input| batch.wants(input.index)) {
            let out =
                outputs.allocate(input.index, input.datatype, input.shape, input.data.len())?;
            out.copy_from_slice(input.data);
        }
        Ok(())
    }
}

impl Backend for Silent {
    fn engine(&self) -> String {
        engine()
    }

    fn execute(&mut self, _: &Batch<'_>, _: &mut Outputs<'_>) -> Result<(), InferError> {
        Ok(())
    }
}

fn engine() -> String {
    concat!("test ", env!("CARGO_PKG_VERSION")).to_owned()
}

/// Parses a parameter that is a whole number.
///
/// # Errors
/// The parameter is something else.
fn number(context: &Context<'_>, name: &str) -> Result<Option<u64>, InferError> {
    let Some(text) = context.config.parameters.get(name) else { return Ok(None) };
    match text.parse() {
        Ok(number) => Ok(Some(number)),
        Err(_) => {
            Err(load_error(format!("parameter '{name}' is '{text}'; it must be a whole number")))
        }
    }
}

/// Waits for this duration, or until all requests of the batch are cancelled.
fn wait(duration: Duration, batch: &Batch<'_>) {
    let end = Instant::now() + duration;
    while !batch.all_cancelled() {
        let left = end.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return;
        }
        thread::sleep(left.min(CHECK_INTERVAL));
    }
}

/// Prints each element of a batch as a line.
fn print(batch: &Batch<'_>) -> Result<(), InferError> {
    let Some(input) = batch.inputs.first().filter(|input| input.datatype == DataType::Bytes) else {
        return Err(run_error("print needs an input of datatype BYTES"));
    };
    let mut text = Vec::new();
    for element in bytes_elements(input.data) {
        let line = element.map_err(|at| {
            run_error(format!("input '{}' is not framed as BYTES at byte {at}", input.name))
        })?;
        text.extend_from_slice(line);
        text.push(b'\n');
    }
    let mut out = io::stdout().lock();
    out.write_all(&text)
        .and_then(|()| out.flush())
        .map_err(|error| run_error(format!("cannot print: {error}")))
}
