//! The states of sequences: kept in this process between the steps of a sequence, gathered into one tensor for a batch,
//! and taken apart again.
//!
//! Each state of a sequence has one buffer, over which the new value is written once the batch has gone well; so an
//! instance holds no second copy, and a batch that fails leaves its sequences as they were. That is
//! `use_same_buffer_for_input_output` for every model: the flag asks for nothing more here. A model never has its input
//! and output at one place while it runs, because engines read inputs to the end of a run. Buffers grow with their
//! values (`use_growable_memory` asks for nothing more either, where memory is the processor's).
//!
//! A sequence is made by its step with `start`, and dropped after its step with `end`, or by [`States::drop_sequence`].

use std::collections::HashMap;

use pharos::model::{ModelConfig, StateSpec, StateValue};
use pharos::tensor::{DataType, bytes_elements};
use pharos::wire::{BatchRequest, SequenceStep};
use pharos_backend::runtime::{AlignedBuffer, MadeOutput, joined};

/// A state of a sequence.
struct Kept {
    /// Without the batch.
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

/// A state over all requests of a batch, as a backend is given it.
pub(crate) struct Gathered<'a> {
    /// What backends call it.
    pub(crate) input: usize,
    pub(crate) datatype: DataType,
    /// With the batch, if the model batches.
    pub(crate) shape: Vec<i64>,
    data: GatheredData<'a>,
}

enum GatheredData<'a> {
    /// A sequence's own buffer: there is only one request.
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
    /// Of this model.
    model: String,
    specs: Vec<StateSpec>,
    /// What backends call the first of them; the others follow.
    input: usize,
    /// Whether tensors have a batch dimension.
    batches: bool,
    first: Vec<StateValue>,
    sequences: HashMap<u64, Vec<Kept>>,
    bytes: u64,
}

impl States {
    /// For a model that has states. `read` gives the content of a file of the directory `initial_state`.
    ///
    /// # Errors
    /// What is wrong with such a file.
    pub(crate) fn new(
        config: &ModelConfig,
        read: impl Fn(&str) -> Result<Vec<u8>, String>,
    ) -> Result<Option<Self>, String> {
        if config.states.is_empty() {
            return Ok(None);
        }
        let first = config.states.iter().map(|state| state.first_value(&read)).collect::<Result<_, _>>()?;
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

    /// The outputs that are states.
    pub(crate) fn outputs(&self) -> impl Iterator<Item = usize> + '_ {
        self.specs.iter().map(|state| state.output)
    }

    /// The number of the state that this output is.
    pub(crate) fn number(&self, output: usize) -> Option<usize> {
        self.specs.iter().position(|state| state.output == output)
    }

    /// Bytes that the states of all sequences take.
    pub(crate) fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Makes the sequences that start with a batch. Gives the requests, by position, whose sequence is not here: it
    /// began in a process that is lost, or never.
    pub(crate) fn begin(&mut self, requests: &[BatchRequest]) -> Vec<usize> {
        let mut strangers = Vec::new();
        for (position, request) in requests.iter().enumerate() {
            match request.sequence {
                Some(SequenceStep { key, start: true, .. }) => {
                    self.drop_sequence(key);
                    let states: Vec<Kept> = self.first.iter().map(Kept::first).collect();
                    self.bytes += states.iter().map(|state| state.data.capacity()).sum::<u64>();
                    self.sequences.insert(key, states);
                }
                Some(step) if !self.sequences.contains_key(&step.key) => strangers.push(position),
                Some(_) | None => {}
            }
        }
        strangers
    }

    /// Drops the sequences that end with a batch.
    pub(crate) fn end(&mut self, requests: &[BatchRequest]) {
        for step in requests.iter().filter_map(|request| request.sequence).filter(|step| step.end) {
            self.drop_sequence(step.key);
        }
    }

    /// Drops what is kept for a sequence.
    pub(crate) fn drop_sequence(&mut self, key: u64) {
        let states = self.sequences.remove(&key).unwrap_or_default();
        self.bytes -= states.iter().map(|state| state.data.capacity()).sum::<u64>();
        if self.sequences.is_empty() {
            // A burst of sequences leaves no empty table behind.
            self.sequences.shrink_to_fit();
        }
    }

    fn of(&self, request: &BatchRequest) -> Option<&Vec<Kept>> {
        self.sequences.get(&request.sequence?.key)
    }

    /// The parts of a batch whose states have equal shapes, by position: only those can share a tensor. What is no step
    /// of a sequence (padding, a warm-up) goes with the first part.
    pub(crate) fn parts(&self, requests: &[BatchRequest]) -> Vec<Vec<u32>> {
        let mut parts: Vec<(Option<&Vec<Kept>>, Vec<u32>)> = Vec::new();
        for (position, request) in (0u32..).zip(requests) {
            let own = self.of(request);
            let alike = |other: &Option<&Vec<Kept>>| match (own, other) {
                (Some(own), Some(other)) => own.iter().zip(*other).all(|(own, other)| own.shape == other.shape),
                (None, _) | (_, None) => true,
            };
            match parts.iter_mut().find(|(other, _)| alike(other)) {
                Some((other, positions)) => {
                    *other = other.or(own);
                    positions.push(position);
                }
                None => parts.push((own, vec![position])),
            }
        }
        parts.into_iter().map(|(_, positions)| positions).collect()
    }

    /// The states of requests that can share tensors, row by row in their order. Requests that are no step of a sequence
    /// have the shape of the others and zeros; if there are no others, the first value.
    pub(crate) fn gather(&self, requests: &[&BatchRequest]) -> Vec<Gathered<'_>> {
        (0..self.specs.len()).filter_map(|state| self.gather_one(state, requests)).collect()
    }

    fn gather_one(&self, state: usize, requests: &[&BatchRequest]) -> Option<Gathered<'_>> {
        let (spec, first) = (self.specs.get(state)?, self.first.get(state)?);
        let of = |request: &&BatchRequest| self.of(request)?.get(state);
        let model = requests.iter().find_map(of);
        let shape = model.map_or(&first.shape, |model| &model.shape);
        let rows: usize = requests.iter().map(|request| request.rows as usize).sum();
        let batch = self.batches.then(|| i64::try_from(rows).unwrap_or(i64::MAX));
        let whole = batch.into_iter().chain(shape.iter().copied()).collect();
        let data = match (requests, model) {
            ([_], Some(model)) => GatheredData::Own(&model.data),
            _ => {
                // Zeros are a valid value of every type: an empty text is a length of zero.
                let zeros = match (model, spec.datatype.size()) {
                    (None, _) => first.data.clone(),
                    (Some(model), Some(_)) => vec![0; model.data.as_slice().len()],
                    (Some(model), None) => vec![0; 4 * bytes_elements(model.data.as_slice()).count()],
                };
                let of = |request: &&BatchRequest| of(request).map_or(zeros.as_slice(), |kept| kept.data.as_slice());
                let pieces = requests.iter().flat_map(|request| (0..request.rows).map(move |_| of(request)));
                GatheredData::Copied(joined(pieces))
            }
        };
        Some(Gathered { input: self.input + state, datatype: spec.datatype, shape: whole, data })
    }

    /// Takes the values that the model has made for these requests. A state without a value stays as it is; so do the
    /// sequences of requests that are not to be `kept`.
    ///
    /// # Errors
    /// A value is not what the configuration says; then nothing has changed.
    pub(crate) fn keep(
        &mut self,
        requests: &[&BatchRequest],
        made: &[MadeOutput<'_>],
        kept: impl Fn(usize) -> bool,
    ) -> Result<(), String> {
        let values: Result<Vec<_>, String> = made.iter().map(|output| self.split(requests, output)).collect();
        for (state, shape, rows) in values? {
            let mut rows = rows.into_iter();
            for (position, request) in requests.iter().enumerate() {
                // The rows of all that belongs to this request; a step of a sequence has one.
                let row = rows.by_ref().take(request.rows as usize).last();
                let own =
                    request.sequence.filter(|_| kept(position)).and_then(|step| self.sequences.get_mut(&step.key));
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

    /// The number of a state, the shape of each row of its value, and the rows.
    fn split<'a>(&self, requests: &[&BatchRequest], made: &MadeOutput<'a>) -> Result<SplitState<'a>, String> {
        let state = self.number(made.output).ok_or("there is no such state")?;
        let spec = self.specs.get(state).ok_or("there is no such state")?;
        let wrong = |what: String| format!("state output '{}' of model '{}' {what}", spec.output_name, self.model);
        if made.datatype != spec.datatype {
            return Err(wrong(format!("is {}, the configuration says {}", made.datatype, spec.datatype)));
        }
        let rows: u64 = requests.iter().map(|request| u64::from(request.rows)).sum();
        let shape = match made.shape.split_first() {
            Some((first, shape)) if self.batches && u64::try_from(*first) == Ok(rows) => shape,
            _ if self.batches => return Err(wrong(format!("has shape {:?} for a batch of {rows}", made.shape))),
            _ => made.shape,
        };
        if !spec.fits(shape) {
            return Err(wrong(format!("has shape {shape:?}, the configuration says {:?}", spec.dims)));
        }
        let rows = if self.batches { rows } else { 1 };
        let rows = rows_of(made.datatype, made.data, rows).ok_or_else(|| wrong("is not framed as BYTES".to_owned()))?;
        Ok((state, shape.to_vec(), rows))
    }
}

/// The rows of a tensor with a batch dimension; `None` if the elements of BYTES are not framed, or not as many as rows
/// need.
pub(crate) fn rows_of(datatype: DataType, data: &[u8], rows: u64) -> Option<Vec<&[u8]>> {
    let rows = usize::try_from(rows).ok()?;
    if rows == 0 {
        return Some(Vec::new());
    }
    if datatype != DataType::Bytes {
        let len = data.len() / rows;
        return (0..rows).map(|row| data.get(row * len..(row + 1) * len)).collect();
    }
    let lengths = bytes_elements(data).map(|element| element.map(|element| 4 + element.len()));
    let lengths: Vec<usize> = lengths.collect::<Result<_, _>>().ok()?;
    if !lengths.len().is_multiple_of(rows) {
        return None;
    }
    let mut rest = data;
    let per_row = lengths.len() / rows;
    let row = |row: usize| {
        let lengths = lengths.get(row * per_row..(row + 1) * per_row)?;
        let (row, after) = rest.split_at_checked(lengths.iter().sum())?;
        rest = after;
        Some(row)
    };
    (0..rows).map(row).collect()
}
