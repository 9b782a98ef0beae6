//! Calls of a running model to the server: inference with other models, and operations of the
//! repository.

use super::codec::{DecodeError, Result, Wire, fields};
use super::error::WireError;
use crate::id::CorrelationId;
use crate::infer::Parameters;
use crate::tensor::DataType;

/// The first number of a loan that is the memory of an [`Answer`]. Loans of batches have smaller
/// numbers.
pub const FIRST_CALL_LOAN: u64 = 1 << 62;

/// A request to another model.
#[derive(Clone, Debug, PartialEq, Default)]
pub struct Call {
    /// The number, unique within the connection and shared with [`Manage::call`].
    pub call: u64,
    /// The model and the parameters.
    pub request: CallRequest,
    /// The inputs.
    pub inputs: Vec<CallInput>,
}

/// A request to another model, without its inputs.
#[derive(Clone, Debug, PartialEq, Default)]
pub struct CallRequest {
    /// The model.
    pub model: String,
    /// Its version; empty for the latest.
    pub version: String,
    /// The request's id; may be empty.
    pub id: String,
    /// `sequence_id`.
    pub correlation: CorrelationId,
    /// `sequence_start`.
    pub start: bool,
    /// `sequence_end`.
    pub end: bool,
    /// `priority`; 0 for the model's default.
    pub priority: u64,
    /// `timeout`, microseconds; 0 for none.
    pub timeout_us: u64,
    /// The requested outputs; empty for all.
    pub outputs: Vec<String>,
    /// Free parameters.
    pub parameters: Parameters,
    /// Whether any number of answers may follow. If false, the model must not be decoupled.
    pub decoupled: bool,
    /// The batch, and the position in it, of the request whose trace includes the call; `None` if
    /// not traced.
    pub parent: Option<(u64, u32)>,
}

/// An input of a [`Call`].
#[derive(Clone, Debug, PartialEq)]
pub struct CallInput {
    /// Its name.
    pub name: String,
    /// The datatype of the elements.
    pub datatype: DataType,
    /// Its shape.
    pub shape: Vec<i64>,
    /// The first byte: in the output arena, in a block that is released like an output; in the
    /// input arena if `loan` is set.
    pub offset: u64,
    /// Bytes.
    pub len: u64,
    /// The batch or loan that contains it, if an input is passed on.
    pub loan: Option<u64>,
}

/// An operation of the repository.
#[derive(Clone, Debug, PartialEq)]
pub struct Manage {
    /// The number, unique within the connection and shared with [`Call::call`].
    pub call: u64,
    /// The model.
    pub model: String,
    /// The operation.
    pub verb: Verb,
}

/// An operation of the repository on a model.
#[derive(Clone, Debug, PartialEq)]
pub enum Verb {
    /// Load it, with these parameters of the repository extension by name (`config`, `file:PATH`)
    /// instead of its files.
    Load(Vec<(String, Vec<u8>)>),
    /// Unload it, and its dependents if true.
    Unload(bool),
    /// Return whether this version (empty: any) can infer: [`Answer::holds`].
    IsReady(String),
    /// Return whether this version (empty: the latest) is decoupled: [`Answer::holds`].
    IsDecoupled(String),
}

/// One answer to a [`Call`], or the only answer to a [`Manage`].
#[derive(Clone, Debug, PartialEq, Default)]
pub struct Answer {
    /// The call's number.
    pub call: u64,
    /// The version that answered.
    pub version: String,
    /// The outputs.
    pub outputs: Vec<AnswerOutput>,
    /// The number of the loan with the memory of the outputs, which the worker returns; 0 without
    /// memory.
    pub loan: u64,
    /// The response's parameters.
    pub parameters: Parameters,
    /// The error, if the call failed.
    pub error: Option<WireError>,
    /// Whether it has no content and only marks the end.
    pub empty: bool,
    /// Whether it is the last answer.
    pub last: bool,
    /// The result of [`Verb::IsReady`] and [`Verb::IsDecoupled`].
    pub holds: bool,
}

/// An output in an [`Answer`].
#[derive(Clone, Debug, PartialEq)]
pub struct AnswerOutput {
    /// Its name.
    pub name: String,
    /// The datatype of the elements.
    pub datatype: DataType,
    /// Its shape.
    pub shape: Vec<i64>,
    /// First byte in the input arena.
    pub offset: u64,
    /// Bytes.
    pub len: u64,
}

fields!(Call { call, request, inputs });
fields!(CallRequest {
    model,
    version,
    id,
    correlation,
    start,
    end,
    priority,
    timeout_us,
    outputs,
    parameters,
    decoupled,
    parent
});
fields!(CallInput { name, datatype, shape, offset, len, loan });
fields!(Manage { call, model, verb });
fields!(Answer { call, version, outputs, loan, parameters, error, empty, last, holds });
fields!(AnswerOutput { name, datatype, shape, offset, len });

impl Wire for Verb {
    fn put(&self, out: &mut Vec<u8>) {
        match self {
            Self::Load(files) => {
                out.push(0);
                files.put(out);
            }
            Self::Unload(dependents) => {
                out.push(1);
                dependents.put(out);
            }
            Self::IsReady(version) => {
                out.push(2);
                version.put(out);
            }
            Self::IsDecoupled(version) => {
                out.push(3);
                version.put(out);
            }
        }
    }
    fn get(input: &mut &[u8]) -> Result<Self> {
        match u8::get(input)? {
            0 => Wire::get(input).map(Self::Load),
            1 => Wire::get(input).map(Self::Unload),
            2 => Wire::get(input).map(Self::IsReady),
            3 => Wire::get(input).map(Self::IsDecoupled),
            other => Err(DecodeError::new("verb", other.into())),
        }
    }
}
