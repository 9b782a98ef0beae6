//! What a model asks of the server while it runs: that other models infer, and what the repository can do.

use super::codec::{DecodeError, Result, Wire, fields};
use super::error::WireError;
use crate::id::CorrelationId;
use crate::infer::Parameters;
use crate::tensor::DataType;

/// The first number of a loan that is no batch: the memory of an [`Answer`]. Batches have smaller numbers.
pub const FIRST_LOAN: u64 = 1 << 62;

/// A request to another model.
#[derive(Clone, Debug, PartialEq, Default)]
pub struct Call {
    /// Its number, unique within the connection and shared with [`Manage::call`].
    pub call: u64,
    /// What is called, and how.
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
    /// The outputs that are asked for; empty for all.
    pub outputs: Vec<String>,
    /// Free parameters.
    pub parameters: Parameters,
    /// Any number of answers may come: else the model must not be decoupled.
    pub decoupled: bool,
    /// The request that it is made for, if it is to be in the trace of that one: the batch, and the position in it.
    pub parent: Option<(u64, u32)>,
}

/// An input of a [`Call`].
#[derive(Clone, Debug, PartialEq)]
pub struct CallInput {
    /// Its name.
    pub name: String,
    /// What the elements are.
    pub datatype: DataType,
    /// Its shape.
    pub shape: Vec<i64>,
    /// First byte in the arena of the outputs, where it is a block that is released like an output; or, if it is lent, in
    /// that of the inputs.
    pub offset: u64,
    /// Bytes.
    pub len: u64,
    /// The batch or loan that it is a part of, for an input that is passed on.
    pub lent: Option<u64>,
}

/// Something that the repository is to do.
#[derive(Clone, Debug, PartialEq)]
pub struct Manage {
    /// Its number, unique within the connection and shared with [`Call::call`].
    pub call: u64,
    /// The model.
    pub model: String,
    /// What.
    pub verb: Verb,
}

/// What the repository is to do with a model.
#[derive(Clone, Debug, PartialEq)]
pub enum Verb {
    /// Load it, with this in place of its files, by the names of the repository extension (`config`, `file:PATH`).
    Load(Vec<(String, Vec<u8>)>),
    /// Unload it, and its dependents if so.
    Unload(bool),
    /// Say whether this version (empty: any) can infer: [`Answer::ready`].
    IsReady(String),
}

/// One answer to a [`Call`], or the only one to a [`Manage`].
#[derive(Clone, Debug, PartialEq, Default)]
pub struct Answer {
    /// The call's number.
    pub call: u64,
    /// The version that has answered.
    pub version: String,
    /// The outputs.
    pub outputs: Vec<AnswerOutput>,
    /// The number under which the memory of the outputs is to be given back; 0 if there is none.
    pub loan: u64,
    /// The response's parameters.
    pub parameters: Parameters,
    /// It is an error.
    pub error: Option<WireError>,
    /// It says nothing but that it is the last.
    pub empty: bool,
    /// None follows.
    pub last: bool,
    /// What [`Verb::IsReady`] has asked.
    pub ready: bool,
}

/// An output in an [`Answer`].
#[derive(Clone, Debug, PartialEq)]
pub struct AnswerOutput {
    /// Its name.
    pub name: String,
    /// What the elements are.
    pub datatype: DataType,
    /// Its shape.
    pub shape: Vec<i64>,
    /// First byte in the arena of the inputs.
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
fields!(CallInput { name, datatype, shape, offset, len, lent });
fields!(Manage { call, model, verb });
fields!(Answer { call, version, outputs, loan, parameters, error, empty, last, ready });
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
        }
    }
    fn get(input: &mut &[u8]) -> Result<Self> {
        match u8::get(input)? {
            0 => Wire::get(input).map(Self::Load),
            1 => Wire::get(input).map(Self::Unload),
            2 => Wire::get(input).map(Self::IsReady),
            other => Err(DecodeError::new("verb", other.into())),
        }
    }
}
