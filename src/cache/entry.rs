//! The cached part of a response: its outputs and parameters, in separate memory.
//!
//! The binary form, for a cache outside of the process (little-endian; lengths and counts are 8
//! bytes; a text is its length and its bytes):
//!
//! ```text
//! "PHRC", version 1 | key (32) | count of parameters, each: name, type (1), value | count of outputs, each: name,
//! datatype (1), count of dimensions, dimensions (8 each), length of the data | the data of all outputs
//! ```
//!
//! The decoder does not trust the bytes: other programs may have written all or part of them.

use std::mem::size_of;

use bytes::Bytes;

use super::Key;
use super::key::{push_bytes, push_len, push_parameter};
use crate::infer::{InferOutput, InferRequest, InferResponse, Parameter, Parameters};
use crate::model::ModelConfig;
use crate::tensor::{DataType, Tensor, byte_size, bytes_elements, element_count};

const MAGIC: &[u8; 5] = b"PHRC\x01";

/// The memory of an entry besides its outputs: the entry itself, the worst-case share in the lists
/// and tables of a cache, and the allocator's overhead.
const ENTRY_BYTES: u64 = 384;
/// The memory of an output besides its data, its name and its dimensions.
const OUTPUT_BYTES: u64 = size_of::<InferOutput>() as u64 + 32;

/// A response without the parts that belong to its request. Cloning copies everything except the
/// outputs' data.
#[derive(Clone, Debug, PartialEq)]
pub struct Entry {
    parameters: Parameters,
    outputs: Vec<InferOutput>,
}

/// Why bytes are not a valid entry.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Invalid {
    /// They do not start with the header of this version.
    #[error("not an entry of this version")]
    Format,
    /// They belong to another key.
    #[error("an entry of another key")]
    Key,
    /// They are truncated, too long, or inconsistent.
    #[error("inconsistent contents")]
    Contents,
    /// The entry is not a response of this model to this request.
    #[error("not a response of this model to this request")]
    Model,
}

impl Entry {
    /// Returns the number of bytes of memory that a copy of a response will take in total.
    pub fn size_of(response: &InferResponse) -> u64 {
        size(&response.parameters, &response.outputs)
    }

    /// Returns the number of bytes of memory that the entry takes in total.
    pub fn size(&self) -> u64 {
        size(&self.parameters, &self.outputs)
    }

    /// Copies a response. The copy does not refer to the response's memory.
    pub fn copy_of(response: &InferResponse) -> Self {
        let mut data = Vec::with_capacity(
            response.outputs.iter().map(|output| output.tensor.data.len()).sum(),
        );
        for piece in response.outputs.iter().flat_map(|output| output.tensor.data.pieces()) {
            data.extend_from_slice(piece);
        }
        let mut data = Bytes::from(data);
        let outputs = response.outputs.iter().map(|output| {
            let data = data.split_to(output.tensor.data.len()).into();
            InferOutput {
                name: output.name.clone(),
                tensor: Tensor { data, ..output.tensor.clone() },
            }
        });
        Self { outputs: outputs.collect(), parameters: response.parameters.clone() }
    }

    /// Returns the outputs, in the order of the response.
    pub fn outputs(&self) -> &[InferOutput] {
        &self.outputs
    }

    /// Creates the response to a request, with the id and the stamps of that request.
    pub fn to_response(
        &self,
        config: &ModelConfig,
        version: u64,
        request: &InferRequest,
    ) -> InferResponse {
        InferResponse {
            model_name: config.name.clone(),
            model_version: version.to_string(),
            id: request.id.clone(),
            parameters: self.parameters.clone(),
            outputs: self.outputs.clone(),
            timeline: request.timeline,
        }
    }

    /// Encodes a response as bytes.
    pub fn encode(response: &InferResponse, key: &Key) -> Vec<u8> {
        let data: usize = response.outputs.iter().map(|output| output.tensor.data.len()).sum();
        let mut out = Vec::with_capacity(data + 256 + 64 * response.outputs.len());
        out.extend_from_slice(MAGIC);
        out.extend_from_slice(key.as_bytes());
        push_len(&mut out, response.parameters.len());
        for (name, value) in &response.parameters {
            push_bytes(&mut out, name.as_bytes());
            push_parameter(&mut out, value);
        }
        push_len(&mut out, response.outputs.len());
        for InferOutput { name, tensor } in &response.outputs {
            push_bytes(&mut out, name.as_bytes());
            out.push(tensor.datatype.number());
            push_len(&mut out, tensor.shape.len());
            tensor.shape.iter().for_each(|dim| out.extend_from_slice(&dim.to_le_bytes()));
            push_len(&mut out, tensor.data.len());
        }
        for piece in response.outputs.iter().flat_map(|output| output.tensor.data.pieces()) {
            out.extend_from_slice(piece);
        }
        out
    }

    /// Decodes an entry that [`Entry::encode`] wrote for this key. The outputs are slices of
    /// `bytes`.
    ///
    /// # Errors
    /// The bytes are not such an entry, or the size of a tensor does not match its shape.
    pub fn decode(bytes: &Bytes, key: &Key) -> Result<Self, Invalid> {
        let mut rest = Reader(bytes);
        if rest.take(MAGIC.len()) != Some(MAGIC) {
            return Err(Invalid::Format);
        }
        if rest.take(Key::LEN) != Some(key.as_bytes()) {
            return Err(Invalid::Key);
        }
        rest.entry(bytes).ok_or(Invalid::Contents)
    }

    /// Checks that the entry can be the model's response to a request of `batch_size`: requested
    /// outputs in any order, each once, with the right datatypes and batch dimensions.
    ///
    /// # Errors
    /// [`Invalid::Model`] if it cannot.
    pub fn check(
        &self,
        config: &ModelConfig,
        request: &InferRequest,
        batch_size: u64,
    ) -> Result<(), Invalid> {
        // The model has no more outputs than this, so the search for repeated names is short.
        let few = self.outputs.len() <= config.outputs.len();
        let fits = few
            && self.outputs.iter().enumerate().all(|(at, InferOutput { name, tensor })| {
                config.output(name).is_some_and(|spec| spec.datatype == tensor.datatype)
                    && (request.outputs.is_empty()
                        || request.outputs.iter().any(|output| output.name == *name))
                    && !self.outputs.iter().take(at).any(|earlier| earlier.name == *name)
                    && (!config.batches()
                        || tensor.shape.first() == i64::try_from(batch_size).ok().as_ref())
            });
        if fits { Ok(()) } else { Err(Invalid::Model) }
    }
}

fn size(parameters: &Parameters, outputs: &[InferOutput]) -> u64 {
    ENTRY_BYTES
        + outputs
            .iter()
            .map(|InferOutput { name, tensor }| {
                OUTPUT_BYTES + (name.len() + 8 * tensor.shape.len() + tensor.data.len()) as u64
            })
            .sum::<u64>()
        + parameters
            .iter()
            .map(|(name, value)| {
                let text = if let Parameter::String(text) = value { text.len() } else { 0 };
                (size_of::<(String, Parameter)>() + name.len() + text + 32) as u64
            })
            .sum::<u64>()
}

/// Reads bytes from the front; returns `None` when they run out.
struct Reader<'a>(&'a [u8]);

impl<'a> Reader<'a> {
    fn take(&mut self, len: usize) -> Option<&'a [u8]> {
        let (taken, rest) = self.0.split_at_checked(len)?;
        self.0 = rest;
        Some(taken)
    }

    fn byte(&mut self) -> Option<u8> {
        self.take(1)?.first().copied()
    }

    fn number(&mut self) -> Option<[u8; 8]> {
        self.take(8)?.try_into().ok()
    }

    fn len(&mut self) -> Option<usize> {
        usize::try_from(u64::from_le_bytes(self.number()?)).ok()
    }

    fn text(&mut self) -> Option<String> {
        let len = self.len()?;
        String::from_utf8(self.take(len)?.to_vec()).ok()
    }

    fn parameter(&mut self) -> Option<Parameter> {
        Some(match self.byte()? {
            0 => Parameter::Bool(self.byte()? == 1),
            1 => Parameter::Int(i64::from_le_bytes(self.number()?)),
            2 => Parameter::Uint(u64::from_le_bytes(self.number()?)),
            3 => Parameter::Double(f64::from_le_bytes(self.number()?)),
            4 => Parameter::String(self.text()?),
            _ => return None,
        })
    }

    /// Reads everything after the key. `all` is the whole input, for slices of it.
    fn entry(&mut self, all: &Bytes) -> Option<Entry> {
        // Counts are not trusted: nothing is allocated for elements before their bytes have been
        // read.
        let mut parameters = Vec::new();
        for _ in 0..self.len()? {
            parameters.push((self.text()?, self.parameter()?));
        }
        let mut heads = Vec::new();
        for _ in 0..self.len()? {
            let name = self.text()?;
            let datatype = DataType::from_number(self.byte()?)?;
            let mut shape = Vec::new();
            for _ in 0..self.len()? {
                shape.push(i64::from_le_bytes(self.number()?));
            }
            heads.push((name, datatype, shape, self.len()?));
        }
        let mut outputs = Vec::with_capacity(heads.len());
        for (name, datatype, shape, len) in heads {
            let data = all.slice_ref(self.take(len)?);
            holds(datatype, &shape, &data).then_some(())?;
            outputs
                .push(InferOutput { name, tensor: Tensor { datatype, shape, data: data.into() } });
        }
        self.0.is_empty().then_some(Entry { parameters, outputs })
    }
}

/// Returns whether the data has the size of this shape.
fn holds(datatype: DataType, shape: &[i64], data: &[u8]) -> bool {
    match (byte_size(datatype, shape), element_count(shape)) {
        (Some(size), _) => size == data.len() as u64,
        (None, Some(elements)) if datatype == DataType::Bytes => {
            let mut found = 0;
            bytes_elements(data).all(|element| {
                found += 1;
                element.is_ok()
            }) && found == elements
        }
        _ => false,
    }
}
