//! Models without files, for examples, tests and measurements. The configuration's parameter `function` selects one:
//!
//! | function | effect |
//! |---|---|
//! | `identity` | output *i* is input *i*; inputs that the server adds (`batch_input`) follow the others, states come last |
//! | `add_sub` | outputs 0 and 1 are sum and difference of inputs 0 and 1; integers wrap; BYTES hold decimal integers |
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
//! | `sequence_sum` | a sum for each sequence, each batch after `delay_ms`; see `sequence.rs` for its outputs |
//! | `emit` | identity that records metrics; see `emit.rs` for its parameters |

//!
//! With the parameter `echo_parameters: true`, responses of `identity` carry the parameters of their requests.
//!
//! On a GPU, `identity` and `add_sub` are available, the latter for numbers only: see `on_gpu.rs`.

use std::io::{self, Write};
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use pharos::error::InferError;
use pharos::tensor::{DataType, bytes_elements, push_bytes_element};
use pharos_backend::{Backend, Batch, Context, Input, Outputs, load_error, run_error};

use super::delay::delay;
use super::elements::{self, Operation, echo_parameters};
use super::emit::Emitter;
use super::repeat::Repeat;
use super::stateful::Stateful;
use super::{countdown, on_gpu, ready_gpu, sequence};
use crate::device::Cuda;

const FUNCTIONS: &str = "identity, add_sub, delay, fail, crash, panic, hang, print, repeat, silent, sequence_sum, countdown, accumulate, append, emit";

enum Function {
    Identity,
    AddSub,
    Delay(Duration),
    Fail(String),
    Crash,
    Panic,
    Hang,
    Print,
    Repeat(Repeat),
    Silent,
    Emit(Emitter),
    Stateful(Stateful),
}

struct Builtin {
    function: Function,
    /// Datatypes of the configured outputs, by position.
    outputs: Vec<DataType>,
    echo_parameters: bool,
}

/// Creates the function that the configuration selects.
pub(super) fn create(context: &Context<'_>, cuda: &Arc<Cuda>) -> Result<Box<dyn Backend>, InferError> {
    let parameter = |name: &str| context.config.parameters.get(name).map(String::as_str);
    if context.on_gpu {
        return create_on_gpu(context, cuda, parameter("function").unwrap_or("(none)"));
    }
    let function = match parameter("function") {
        Some("identity") => Function::Identity,
        Some("add_sub") => Function::AddSub,
        Some("delay") => Function::Delay(delay_of(parameter("delay_ms"))?),
        Some("sequence_sum") => return sequence::create(context.config, delay_of(parameter("delay_ms"))?),
        Some("countdown") => return countdown::create(context.config, delay_of(parameter("delay_ms"))?),
        Some("fail") => Function::Fail(parameter("message").unwrap_or("requested failure").to_owned()),
        Some("crash") => Function::Crash,
        Some("panic") => Function::Panic,
        Some("hang") => Function::Hang,
        Some("print") => Function::Print,
        Some("repeat") => Function::Repeat(Repeat::create(context)?),
        Some("silent") => Function::Silent,
        Some("emit") => Function::Emit(Emitter::create(context)?),
        Some(name @ ("accumulate" | "append")) => Function::Stateful(Stateful::create(context, name == "append")?),
        Some(other) => {
            return Err(load_error(format!("parameter 'function' is '{other}'; the builtin backend has {FUNCTIONS}")));
        }
        None => {
            return Err(load_error(format!("the builtin backend needs the parameter 'function': one of {FUNCTIONS}")));
        }
    };
    if !matches!(function, Function::Repeat(_) | Function::Silent | Function::Stateful(_)) {
        check_counts(context, matches!(function, Function::AddSub))?;
    }
    let outputs = context.config.outputs.iter().map(|output| output.datatype).collect();
    let echo_parameters = parameter("echo_parameters") == Some("true");
    Ok(Box::new(Builtin { function, outputs, echo_parameters }))
}

/// Checks that the numbers of inputs and outputs fit the function.
fn check_counts(context: &Context<'_>, is_add_sub: bool) -> Result<(), InferError> {
    let (inputs, outputs) = (context.config.backend_inputs(), context.config.outputs.len());
    let wanted = if is_add_sub { (2, 2) } else { (inputs.max(1), inputs.max(1)) };
    if (inputs, outputs) == wanted {
        return Ok(());
    }
    let text = "add_sub needs 2 inputs and 2 outputs, the other functions one output for each input";
    Err(load_error(format!("the configuration has {inputs} inputs and {outputs} outputs; {text}")))
}

/// Like [`create`], for an instance on a GPU.
fn create_on_gpu(context: &Context<'_>, cuda: &Arc<Cuda>, function: &str) -> Result<Box<dyn Backend>, InferError> {
    on_gpu::check(function)?;
    check_counts(context, function == "add_sub")?;
    let cuda = ready_gpu(cuda)?;
    let echo_parameters = context.config.parameters.get("echo_parameters").is_some_and(|value| value == "true");
    on_gpu::create(context, &cuda, (function, echo_parameters))
}

/// Parses the parameter `delay_ms`.
fn delay_of(text: Option<&str>) -> Result<Duration, InferError> {
    let text = text.unwrap_or("0");
    text.parse()
        .map(Duration::from_millis)
        .map_err(|_| load_error(format!("parameter 'delay_ms' is '{text}'; it must be a whole number of milliseconds")))
}

impl Backend for Builtin {
    fn engine(&self) -> String {
        concat!("builtin ", env!("CARGO_PKG_VERSION")).to_owned()
    }

    /// Functions that read their inputs only once.
    fn tolerates_concurrent_writes(&self) -> bool {
        use Function::{AddSub, Crash, Delay, Fail, Hang, Identity};
        matches!(self.function, Identity | AddSub | Delay(_) | Fail(_) | Crash | Hang)
    }

    fn execute(&mut self, batch: &Batch<'_>, outputs: &mut Outputs<'_>) -> Result<(), InferError> {
        let marked = batch.inputs.first().is_some_and(|input| input.data.first() == Some(&1));
        match &self.function {
            Function::AddSub => return self.add_sub(batch, outputs),
            Function::Stateful(stateful) => return stateful.execute(batch, outputs),
            Function::Fail(message) => return Err(run_error(message.clone())),
            Function::Delay(duration) => delay(*duration, batch)?,
            Function::Emit(emitter) => emitter.execute(batch, outputs),
            Function::Crash if marked => std::process::abort(),
            #[allow(clippy::panic)] // this function tests panics
            Function::Panic if marked => panic!("requested panic"),
            Function::Hang if marked => loop {
                thread::park();
            },
            Function::Print => print(batch)?,
            Function::Repeat(repeat) => return repeat.execute(batch, outputs),
            Function::Silent => return Ok(()),
            Function::Identity | Function::Crash | Function::Panic | Function::Hang => {}
        }
        if self.echo_parameters {
            echo_parameters(batch, outputs);
        }
        identity(batch, outputs)
    }
}

/// Prints each element of a batch as a line.
fn print(batch: &Batch<'_>) -> Result<(), InferError> {
    let Some(input) = batch.inputs.first().filter(|input| input.datatype == DataType::Bytes) else {
        return Err(run_error("print needs an input of datatype BYTES"));
    };
    let mut text = Vec::new();
    for element in bytes_elements(input.data) {
        let line =
            element.map_err(|at| run_error(format!("input '{}' is not framed as BYTES at byte {at}", input.name)))?;
        text.extend_from_slice(line);
        text.push(b'\n');
    }
    let mut out = io::stdout().lock();
    out.write_all(&text).and_then(|()| out.flush()).map_err(|error| run_error(format!("cannot print: {error}")))
}

fn identity(batch: &Batch<'_>, outputs: &mut Outputs<'_>) -> Result<(), InferError> {
    for input in batch.inputs.iter().filter(|input| batch.wants(input.index)) {
        let out = outputs.allocate(input.index, input.datatype, input.shape, input.data.len())?;
        out.copy_from_slice(input.data);
    }
    Ok(())
}

impl Builtin {
    fn add_sub(&self, batch: &Batch<'_>, outputs: &mut Outputs<'_>) -> Result<(), InferError> {
        let [left, right] = batch.inputs.as_slice() else {
            return Err(run_error(format!("add_sub needs 2 inputs, got {}", batch.inputs.len())));
        };
        if left.shape != right.shape {
            let text = format!("add_sub needs inputs of one shape, got {:?} and {:?}", left.shape, right.shape);
            return Err(InferError::invalid(text));
        }
        for (output, operation) in [(0, Operation::Add), (1, Operation::Subtract)] {
            if !batch.wants(output) {
                continue;
            }
            if left.datatype == DataType::Bytes {
                let text = add_sub_text(batch, (left, right), operation, outputs)?;
                outputs.allocate(output, DataType::Bytes, left.shape, text.len())?.copy_from_slice(&text);
                continue;
            }
            let datatype = self.outputs.get(output).copied().unwrap_or(left.datatype);
            if datatype != left.datatype || datatype != right.datatype {
                return Err(run_error("add_sub needs one datatype for its inputs and outputs"));
            }
            let out = outputs.allocate(output, datatype, left.shape, left.data.len())?;
            if !elements::apply(datatype, operation, (left.data, right.data), out) {
                return Err(run_error(format!("add_sub has no arithmetic for {datatype}")));
            }
        }
        Ok(())
    }
}

/// Adds and subtracts decimal numbers in strings. A request with an element that is not a number fails alone; its place in the
/// batch is filled with empty elements.
fn add_sub_text(
    batch: &Batch<'_>,
    (left, right): (&Input<'_>, &Input<'_>),
    operation: Operation,
    outputs: &mut Outputs<'_>,
) -> Result<Vec<u8>, InferError> {
    let pairs: Vec<_> = bytes_elements(left.data).zip(bytes_elements(right.data)).collect();
    let of_request = elements::counts(batch, left, pairs.len());
    let mut result = Vec::with_capacity(left.data.len().max(right.data.len()));
    let mut pairs = pairs.into_iter();
    for (position, request) in batch.requests.iter().enumerate() {
        let mut failure = None;
        for (a, b) in pairs.by_ref().take(of_request(request)) {
            let sum =
                number(left.name, a).and_then(|a| Ok((a, number(right.name, b)?))).map(|(a, b)| match operation {
                    Operation::Add => a.wrapping_add(b),
                    Operation::Subtract => a.wrapping_sub(b),
                });
            match sum {
                Ok(sum) => push_bytes_element(&mut result, sum.to_string().as_bytes()),
                Err(error) => {
                    failure.get_or_insert(error);
                    push_bytes_element(&mut result, b"")
                }
            };
        }
        if let Some(error) = failure {
            outputs.fail(position, error);
        }
    }
    Ok(result)
}

fn number(input: &str, element: Result<&[u8], usize>) -> Result<i64, InferError> {
    let bytes = element.map_err(|at| run_error(format!("input '{input}' is not framed as BYTES at byte {at}")))?;
    let text = str::from_utf8(bytes).unwrap_or("(not UTF-8)");
    text.trim().parse().map_err(|_| {
        InferError::invalid(format!("input '{input}' holds '{text}', which is not a whole decimal number"))
    })
}
