//! The key of a request: a hash of everything that its response may depend on.
//!
//! BLAKE3, because a client that found two requests with one key could make the cache return wrong
//! responses, and because servers that share a Redis must compute equal keys. Triton hashes the
//! model's name and version and the inputs' names and bytes to 64 bits. This hash also includes the
//! inputs' datatypes and shapes, the requested outputs, the parameters that reach the backend, and
//! the model's configuration and files.

use std::fmt;

use blake3::Hasher;

use crate::id::ModelVersion;
use crate::infer::{InferRequest, Parameter};
use crate::model::ModelConfig;

/// The context of the hash, which separates it from all other uses of BLAKE3. Change it whenever
/// the hashed data changes.
const CONTEXT: &str = "Pharos response cache, keys of version 1";

/// The key of a request. Displayed as 64 hexadecimal digits.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Key([u8; Key::LEN]);

impl Key {
    /// The length in bytes.
    pub const LEN: usize = 32;

    /// Returns the bytes.
    pub fn as_bytes(&self) -> &[u8; Key::LEN] {
        &self.0
    }
}

impl fmt::Display for Key {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

/// A hash of what all requests of one loaded model version have in common. Equal on all servers
/// that load the same files.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Identity([u8; Key::LEN]);

/// Computes an [`Identity`]. The version's files must be added in an order that depends only on
/// their names.
pub struct Identifier(Box<Hasher>);

impl Identifier {
    /// Starts with the model's name, version and configuration. Ignores where instances run.
    pub fn new(model: &ModelVersion, config: &ModelConfig) -> Self {
        let mut head = Vec::new();
        push_bytes(&mut head, model.name.as_bytes());
        head.extend_from_slice(&model.version.to_le_bytes());
        push_bytes(&mut head, &config.encode_without_instances());
        let mut hasher = Box::new(Hasher::new_derive_key(CONTEXT));
        hasher.update(&head);
        Self(hasher)
    }

    /// Starts a file of the model with `len` bytes.
    pub fn file(&mut self, name: &[u8], len: u64) {
        let mut head = Vec::new();
        push_bytes(&mut head, name);
        head.extend_from_slice(&len.to_le_bytes());
        self.0.update(&head);
    }

    /// Adds the next bytes of the file.
    pub fn bytes(&mut self, bytes: &[u8]) {
        self.0.update(bytes);
    }

    /// Returns the identity.
    pub fn finish(self) -> Identity {
        Identity(*self.0.finalize().as_bytes())
    }
}

impl Identity {
    /// Returns the identity of a model whose responses also depend on another: an ensemble and its
    /// next member.
    #[must_use]
    pub fn and(&self, other: &Identity) -> Self {
        Self(*blake3::keyed_hash(&self.0, &other.0).as_bytes())
    }

    /// Computes the key of a request that has passed the model's check, so its inputs are in the
    /// configuration's order.
    ///
    /// Ignores the request's id, priority, timeout and the encoding of outputs. Reads every byte of
    /// the inputs.
    pub fn key(&self, request: &InferRequest) -> Key {
        // All lengths come first, so that different requests never produce the same bytes.
        let mut head = Vec::with_capacity(256);
        push_outputs(&mut head, request);
        push_parameters(&mut head, request);
        push_len(&mut head, request.inputs.len());
        for input in &request.inputs {
            push_bytes(&mut head, input.name.as_bytes());
            head.push(input.tensor.datatype.number());
            push_len(&mut head, input.tensor.shape.len());
            input.tensor.shape.iter().for_each(|dim| head.extend_from_slice(&dim.to_le_bytes()));
            push_len(&mut head, input.tensor.data.len());
        }
        let mut hasher = Hasher::new_keyed(&self.0);
        hasher.update(&head);
        for piece in request.inputs.iter().flat_map(|input| input.tensor.data.pieces()) {
            hasher.update(piece);
        }
        Key(*hasher.finalize().as_bytes())
    }
}

/// Adds the requested outputs, sorted: the order of a response does not depend on theirs.
fn push_outputs(head: &mut Vec<u8>, request: &InferRequest) {
    let mut names: Vec<&str> = request.outputs.iter().map(|output| output.name.as_str()).collect();
    names.sort_unstable();
    names.dedup();
    push_len(head, names.len());
    names.iter().for_each(|name| push_bytes(head, name.as_bytes()));
}

fn push_parameters(head: &mut Vec<u8>, request: &InferRequest) {
    let mut parameters: Vec<&(String, Parameter)> = request.parameters.iter().collect();
    // A stable sort keeps the order of equal names, which is significant to a backend that reads
    // only the first or the last.
    parameters.sort_by(|(a, _), (b, _)| a.cmp(b));
    push_len(head, parameters.len());
    for (name, value) in parameters {
        push_bytes(head, name.as_bytes());
        push_parameter(head, value);
    }
}

/// Adds a parameter's type and value.
pub(super) fn push_parameter(out: &mut Vec<u8>, value: &Parameter) {
    let mut number = |tag: u8, bytes: [u8; 8]| {
        out.push(tag);
        out.extend_from_slice(&bytes);
    };
    match value {
        Parameter::Bool(value) => out.extend_from_slice(&[0, u8::from(*value)]),
        Parameter::Int(value) => number(1, value.to_le_bytes()),
        Parameter::Uint(value) => number(2, value.to_le_bytes()),
        Parameter::Double(value) => number(3, value.to_bits().to_le_bytes()),
        Parameter::String(value) => {
            out.push(4);
            push_bytes(out, value.as_bytes());
        }
    }
}

pub(super) fn push_len(out: &mut Vec<u8>, len: usize) {
    out.extend_from_slice(&(len as u64).to_le_bytes());
}

pub(super) fn push_bytes(out: &mut Vec<u8>, bytes: &[u8]) {
    push_len(out, bytes.len());
    out.extend_from_slice(bytes);
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::infer::InferInput;
    use crate::tensor::{DataType, Tensor};

    /// Servers that share a Redis must agree on keys. If this changes on purpose, the context must
    /// change too.
    #[test]
    fn keys_do_not_change_between_versions() {
        let tensor =
            Tensor { datatype: DataType::Int16, shape: vec![1, 2], data: vec![1, 0, 2, 0].into() };
        let inputs = vec![InferInput { name: "A".into(), tensor }];
        let key = Identity([7; Key::LEN]).key(&InferRequest {
            inputs,
            parameters: vec![("p".into(), Parameter::Double(0.5))],
            ..InferRequest::default()
        });
        assert_eq!(
            key.to_string(),
            "ee590fbec4570cbeaff6202e2771dd60f19c6962c082c008ec350d271bb266db"
        );
    }
}
