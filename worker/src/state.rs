//! The states of sequences: kept in this process between the steps of a sequence, joined into one
//! tensor for a batch, and split again afterwards.
//!
//! Each state of a sequence has one buffer. The new value overwrites it after the batch has
//! succeeded, so an instance holds no second copy, and a batch that fails leaves its sequences
//! unchanged. This has the effect of `use_same_buffer_for_input_output` for every model, so the
//! flag needs no further work. A model's input and output never share memory while it runs, because
//! engines read inputs until the end of a run. Buffers grow with their values, so
//! `use_growable_memory` needs no further work either for host memory.
//!
//! The step of a sequence with `start` creates its states; the step with `end`, or
//! [`States::drop_sequence`], drops them.

use std::collections::HashMap;

use pharos::model::{ModelConfig, StateSpec, StateValue};
use pharos::tensor::{DataType, bytes_elements};
use pharos::wire::{BatchRequest, SequenceStep};
use pharos_backend::runtime::{AlignedBuffer, MadeOutput, joined};

/// A state of a sequence.
struct Kept {
    /// Without the batch dimension.
    shape: Vec<i64>,
    data: AlignedBuffer,
}

/// The number of a state, the shape of each row of its value, and the rows.
type SplitState<'a> = (usize, Vec<i64>, Vec<&'a [u8]>);

impl Kept {
    fn first(value: &StateValue) -> Self {
        let mut data = AlignedBuffer::default();
        data.set(&value.data);
        Self { shape: value.shape.clone(), data }
    }
}

/// A state over all requests of a batch, as a backend receives it.
pub(crate) struct Gathered<'a> {
    /// Its input number for backends.
    pub(crate) input: usize,
    pub(crate) datatype: DataType,
    /// With the batch dimension, if the model batches.
    pub(crate) shape: Vec<i64>,
    data: GatheredData<'a>,
}

enum GatheredData<'a> {
    /// The buffer of a sequence: the batch has only one request.
    Own(&'a AlignedBuffer),
    Copied(AlignedBuffer),
}

impl Gathered<'_> {
    pub(crate) fn data(&self) -> &[u8] {
        match &self.data {
            GatheredData::Own(buffer) => buffer.as_slice(),
            GatheredData::Copied(buffer) => buffer.as_slice(),
        }
    }
}

/// The states of an instance's sequences.
pub(crate) struct States {
    /// The model's name, for messages.
    model: String,
    specs: Vec<StateSpec>,
    /// The input number of the first state for backends; the others follow.
    input: usize,
    /// Whether tensors have a batch dimension.
    batches: bool,
    first: Vec<StateValue>,
    sequences: HashMap<u64, Vec<Kept>>,
    bytes: u64,
}

impl States {
    /// Creates the states of a model, if it has any. `read` returns the content of a file in the
    /// directory `initial_state`.
    ///
    /// # Errors
    /// Such a file is invalid or cannot be read.
    pub(crate) fn new(
        config: &ModelConfig,
        read: impl Fn(&str) -> Result<Vec<u8>, String>,
    ) -> Result<Option<Self>, String> {
        if config.states.is_empty() {
            return Ok(None);
        }
        let first =
            config.states.iter().map(|state| state.first_value(&read)).collect::<Result<_, _>>()?;
        Ok(Some(Self {
            model: config.name.clone(),
            specs: config.states.clone(),
            input: config.state_input(0),
            batches: config.batches(),
            first,
            sequences: HashMap::new(),
            bytes: 0,
        }))
    }

    /// Returns the outputs that are states.
    pub(crate) fn outputs(&self) -> impl Iterator<Item = usize> + '_ {
        self.specs.iter().map(|state| state.output)
    }

    /// Returns the number of the state for this output.
    pub(crate) fn number(&self, output: usize) -> Option<usize> {
        self.specs.iter().position(|state| state.output == output)
    }

    /// Returns the bytes that the states of all sequences occupy.
    pub(crate) fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Creates the sequences that start with a batch. Returns the positions of requests whose
    /// sequence is unknown: it began in a process that has ended, or it never began.
    pub(crate) fn begin(&mut self, requests: &[BatchRequest]) -> Vec<usize> {
        let mut unknown = Vec::new();
        for (position, request) in requests.iter().enumerate() {
            match request.sequence {
                Some(SequenceStep { key, start: true, .. }) => {
                    self.drop_sequence(key);
                    let states: Vec<Kept> = self.first.iter().map(Kept::first).collect();
                    self.bytes += states.iter().map(|state| state.data.capacity()).sum::<u64>();
                    self.sequences.insert(key, states);
                }
                Some(step) if !self.sequences.contains_key(&step.key) => unknown.push(position),
                Some(_) | None => {}
            }
        }
        unknown
    }

    /// Drops the sequences that end with a batch.
    pub(crate) fn end(&mut self, requests: &[BatchRequest]) {
        for step in requests.iter().filter_map(|request| request.sequence).filter(|step| step.end) {
            self.drop_sequence(step.key);
        }
    }

    /// Drops the states of a sequence.
    pub(crate) fn drop_sequence(&mut self, key: u64) {
        let states = self.sequences.remove(&key).unwrap_or_default();
        self.bytes -= states.iter().map(|state| state.data.capacity()).sum::<u64>();
        if self.sequences.is_empty() {
            // Frees the table after a burst of sequences.
            self.sequences.shrink_to_fit();
        }
    }

    fn of(&self, request: &BatchRequest) -> Option<&Vec<Kept>> {
        self.sequences.get(&request.sequence?.key)
    }

    /// Splits a batch into parts whose states have equal shapes, by position: only those can share
    /// a tensor. Requests that are no step of a sequence (padding, a warm-up) belong to the first
    /// part.
    pub(crate) fn parts(&self, requests: &[BatchRequest]) -> Vec<Vec<u32>> {
        let mut parts: Vec<(Option<&Vec<Kept>>, Vec<u32>)> = Vec::new();
        for (position, request) in (0u32..).zip(requests) {
            let own = self.of(request);
            let part = parts.iter_mut().find(|(other, _)| match (own, other) {
                (Some(own), Some(other)) => {
                    own.iter().zip(*other).all(|(own, other)| own.shape == other.shape)
                }
                (None, _) | (_, None) => true,
            });
            match part {
                Some((other, positions)) => {
                    *other = other.or(own);
                    positions.push(position);
                }
                None => parts.push((own, vec![position])),
            }
        }
        parts.into_iter().map(|(_, positions)| positions).collect()
    }

    /// Joins the states of requests that can share tensors, row by row in their order. A request
    /// that is no step of a sequence gets zeros in the shape of the others; if there are no others,
    /// the first value.
    pub(crate) fn gather(&self, requests: &[&BatchRequest]) -> Vec<Gathered<'_>> {
        (0..self.specs.len()).filter_map(|state| self.gather_one(state, requests)).collect()
    }

    fn gather_one(&self, state: usize, requests: &[&BatchRequest]) -> Option<Gathered<'_>> {
        let spec = self.specs.get(state)?;
        let first = self.first.get(state)?;
        let of = |request: &&BatchRequest| self.of(request)?.get(state);
        let model = requests.iter().find_map(of);
        let shape = model.map_or(&first.shape, |model| &model.shape);
        let rows: usize = requests.iter().map(|request| request.rows as usize).sum();
        let batch = self.batches.then(|| i64::try_from(rows).unwrap_or(i64::MAX));
        let whole = batch.into_iter().chain(shape.iter().copied()).collect();
        let data = match (requests, model) {
            ([_], Some(model)) => GatheredData::Own(&model.data),
            _ => {
                // Zeros are a valid value of every type: an empty string is a length of zero.
                let zeros = match (model, spec.datatype.size()) {
                    (None, _) => first.data.clone(),
                    (Some(model), Some(_)) => vec![0; model.data.as_slice().len()],
                    (Some(model), None) => {
                        vec![0; 4 * bytes_elements(model.data.as_slice()).count()]
                    }
                };
                let of = |request: &&BatchRequest| {
                    of(request).map_or(zeros.as_slice(), |kept| kept.data.as_slice())
                };
                let pieces =
                    requests.iter().flat_map(|request| (0..request.rows).map(move |_| of(request)));
                GatheredData::Copied(joined(pieces))
            }
        };
        Some(Gathered { input: self.input + state, datatype: spec.datatype, shape: whole, data })
    }

    /// Stores the values that the model has produced for these requests. A state without a value
    /// does not change; neither do sequences of requests for which `kept` returns false.
    ///
    /// # Errors
    /// A value does not match the configuration; nothing changes then.
    pub(crate) fn keep(
        &mut self,
        requests: &[&BatchRequest],
        made: &[MadeOutput<'_>],
        kept: impl Fn(usize) -> bool,
    ) -> Result<(), String> {
        let values: Result<Vec<_>, String> =
            made.iter().map(|output| self.split(requests, output)).collect();
        for (state, shape, rows) in values? {
            let mut rows = rows.into_iter();
            for (position, request) in requests.iter().enumerate() {
                // All rows of this request; a step of a sequence has one.
                let row = rows.by_ref().take(request.rows as usize).last();
                let own = request
                    .sequence
                    .filter(|_| kept(position))
                    .and_then(|step| self.sequences.get_mut(&step.key));
                let own = own.and_then(|states| states.get_mut(state));
                if let (Some(own), Some(row)) = (own, row) {
                    let before = own.data.capacity();
                    own.shape.clone_from(&shape);
                    own.data.set(row);
                    self.bytes = self.bytes - before + own.data.capacity();
                }
            }
        }
        Ok(())
    }

    /// Returns the number of a state, the shape of each row of its value, and the rows.
    fn split<'a>(
        &self,
        requests: &[&BatchRequest],
        made: &MadeOutput<'a>,
    ) -> Result<SplitState<'a>, String> {
        let state = self.number(made.output).ok_or("there is no such state")?;
        let spec = self.specs.get(state).ok_or("there is no such state")?;
        let wrong = |what: String| {
            format!("state output '{}' of model '{}' {what}", spec.output_name, self.model)
        };
        if made.datatype != spec.datatype {
            return Err(wrong(format!(
                "is {}, but its configured datatype is {}",
                made.datatype, spec.datatype
            )));
        }
        let rows: u64 = requests.iter().map(|request| u64::from(request.rows)).sum();
        let shape = match made.shape.split_first() {
            Some((first, shape)) if self.batches && u64::try_from(*first) == Ok(rows) => shape,
            _ if self.batches => {
                return Err(wrong(format!("has shape {:?} for a batch of {rows}", made.shape)));
            }
            _ => made.shape,
        };
        if !spec.fits(shape) {
            return Err(wrong(format!(
                "has shape {shape:?}, but its configured shape is {:?}",
                spec.dims
            )));
        }
        let rows = if self.batches { rows } else { 1 };
        let rows = rows_of(made.datatype, made.data, rows)
            .ok_or_else(|| wrong("is not framed as BYTES".to_owned()))?;
        Ok((state, shape.to_vec(), rows))
    }
}

/// Splits a tensor with a batch dimension into rows; `None` if the elements of BYTES are not framed
/// or their number does not match the rows.
pub(crate) fn rows_of(datatype: DataType, data: &[u8], rows: u64) -> Option<Vec<&[u8]>> {
    let rows = usize::try_from(rows).ok()?;
    if rows == 0 {
        return Some(Vec::new());
    }
    if datatype != DataType::Bytes {
        let len = data.len() / rows;
        return (0..rows).map(|row| data.get(row * len..(row + 1) * len)).collect();
    }
    let lengths: Vec<usize> = bytes_elements(data)
        .map(|element| element.map(|element| 4 + element.len()))
        .collect::<Result<_, _>>()
        .ok()?;
    if !lengths.len().is_multiple_of(rows) {
        return None;
    }
    let mut rest = data;
    let per_row = lengths.len() / rows;
    (0..rows)
        .map(|row| {
            let lengths = lengths.get(row * per_row..(row + 1) * per_row)?;
            let (row, after) = rest.split_at_checked(lengths.iter().sum())?;
            rest = after;
            Some(row)
        })
        .collect()
}
