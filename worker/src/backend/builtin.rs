//! Models without files. The configuration's parameter `function` selects one:
//!
//! | function | effect |
//! |---|---|
//! | `identity` | output *i* is input *i*; inputs that the server adds (`batch_input`) follow the others, states come last |
//! | `add_sub` | outputs 0 and 1 are sum and difference of inputs 0 and 1; integers wrap; BYTES hold decimal integers |
//!
//! Both functions are available on a GPU (`on_gpu.rs`), `add_sub` for numbers only. Functions for
//! tests are in `tests/backends`.

use std::sync::Arc;

use pharos::error::InferError;
use pharos::tensor::{DataType, bytes_elements, push_bytes_element};
use pharos_backend::onnx::counts;
use pharos_backend::{Backend, Batch, Context, Input, Outputs, load_error, run_error};

use super::elements::{self, Operation};
use super::{on_gpu, ready_gpu};
use crate::device::Cuda;

const FUNCTIONS: &str = "identity, add_sub";

#[derive(Clone, Copy, PartialEq, Eq)]
enum Function {
    Identity,
    AddSub,
}

struct Builtin {
    function: Function,
    /// Datatypes of the configured outputs, by position.
    outputs: Vec<DataType>,
}

/// Creates the function that the configuration selects.
///
/// # Errors
/// There is no such function, the configuration does not fit it, or the GPU of the instance cannot
/// be used.
pub(super) fn create(
    context: &Context<'_>,
    cuda: &Arc<Cuda>,
) -> Result<Box<dyn Backend>, InferError> {
    let function = match context.config.parameters.get("function").map(String::as_str) {
        Some("identity") => Function::Identity,
        Some("add_sub") => Function::AddSub,
        Some(other) => {
            return Err(load_error(format!(
                "parameter 'function' is '{other}'; the builtin backend has {FUNCTIONS}"
            )));
        }
        None => {
            return Err(load_error(format!(
                "the builtin backend needs the parameter 'function': one of {FUNCTIONS}"
            )));
        }
    };
    check_counts(context, function)?;
    if context.on_gpu {
        let cuda = ready_gpu(cuda)?;
        return match function {
            Function::Identity => on_gpu::identity(&cuda),
            Function::AddSub => on_gpu::add_sub(context, &cuda),
        };
    }
    let outputs = context.config.outputs.iter().map(|output| output.datatype).collect();
    Ok(Box::new(Builtin { function, outputs }))
}

/// Checks that the numbers of inputs and outputs fit the function.
fn check_counts(context: &Context<'_>, function: Function) -> Result<(), InferError> {
    let inputs = context.config.backend_inputs();
    let outputs = context.config.outputs.len();
    let fits = match function {
        Function::Identity => inputs > 0 && outputs == inputs,
        Function::AddSub => inputs == 2 && outputs == 2,
    };
    if fits {
        return Ok(());
    }
    let text = "add_sub needs 2 inputs and 2 outputs, identity one output for each input";
    Err(load_error(format!("the configuration has {inputs} inputs and {outputs} outputs; {text}")))
}

impl Backend for Builtin {
    fn engine(&self) -> String {
        concat!("builtin ", env!("CARGO_PKG_VERSION")).to_owned()
    }

    /// Both functions read their inputs only once.
    fn tolerates_concurrent_writes(&self) -> bool {
        true
    }

    fn execute(&mut self, batch: &Batch<'_>, outputs: &mut Outputs<'_>) -> Result<(), InferError> {
        match self.function {
            Function::Identity => identity(batch, outputs),
            Function::AddSub => self.add_sub(batch, outputs),
        }
    }
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
            let text = format!(
                "add_sub needs inputs of one shape, got {:?} and {:?}",
                left.shape, right.shape
            );
            return Err(InferError::invalid(text));
        }
        for (output, operation) in [(0, Operation::Add), (1, Operation::Subtract)] {
            if !batch.wants(output) {
                continue;
            }
            if left.datatype == DataType::Bytes {
                let text = add_sub_text(batch, left, right, operation, outputs)?;
                outputs
                    .allocate(output, DataType::Bytes, left.shape, text.len())?
                    .copy_from_slice(&text);
                continue;
            }
            let datatype = self.outputs.get(output).copied().unwrap_or(left.datatype);
            if datatype != left.datatype || datatype != right.datatype {
                return Err(run_error("add_sub needs one datatype for its inputs and outputs"));
            }
            let out = outputs.allocate(output, datatype, left.shape, left.data.len())?;
            if !elements::apply(datatype, operation, left.data, right.data, out) {
                return Err(run_error(format!("add_sub has no arithmetic for {datatype}")));
            }
        }
        Ok(())
    }
}

/// Adds or subtracts decimal numbers in strings. A request with an element that is not a number
/// fails alone; its place in the batch is filled with empty elements.
fn add_sub_text(
    batch: &Batch<'_>,
    left: &Input<'_>,
    right: &Input<'_>,
    operation: Operation,
    outputs: &mut Outputs<'_>,
) -> Result<Vec<u8>, InferError> {
    let pairs: Vec<_> = bytes_elements(left.data).zip(bytes_elements(right.data)).collect();
    let elements_of = counts(batch, left, pairs.len());
    let mut result = Vec::with_capacity(left.data.len().max(right.data.len()));
    let mut pairs = pairs.into_iter();
    for (position, request) in batch.requests.iter().enumerate() {
        let mut failure = None;
        for (a, b) in pairs.by_ref().take(elements_of(request)) {
            let operands = number(left.name, a).and_then(|a| Ok((a, number(right.name, b)?)));
            match operands {
                Ok((a, b)) => {
                    let number = match operation {
                        Operation::Add => a.wrapping_add(b),
                        Operation::Subtract => a.wrapping_sub(b),
                    };
                    push_bytes_element(&mut result, number.to_string().as_bytes());
                }
                Err(error) => {
                    failure.get_or_insert(error);
                    push_bytes_element(&mut result, b"");
                }
            }
        }
        if let Some(error) = failure {
            outputs.fail(position, error);
        }
    }
    Ok(result)
}

fn number(input: &str, element: Result<&[u8], usize>) -> Result<i64, InferError> {
    let bytes = element
        .map_err(|at| run_error(format!("input '{input}' is not framed as BYTES at byte {at}")))?;
    let text = str::from_utf8(bytes).unwrap_or("(not UTF-8)");
    text.trim().parse().map_err(|_| {
        InferError::invalid(format!(
            "input '{input}' holds '{text}', which is not a whole decimal number"
        ))
    })
}
