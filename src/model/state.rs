//! Implicit state (`sequence_batching { state }`): tensors that the server keeps for each sequence
//! between its requests. The model returns the new value as an output and receives it as an input
//! of the sequence's next request. Rules and texts come from Triton's sequence batcher.

use super::controls::is_made_by_server;
use super::error::{ConfigError, error};
use super::proto::model_config::SchedulingChoice;
use super::proto::model_sequence_batching::initial_state::StateData;
use super::proto::model_sequence_batching::{InitialState as ProtoInitialState, State};
use super::proto::{self, datatype};
use crate::tensor::{DataType, byte_size, bytes_elements, element_count};

/// A state of a model.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StateSpec {
    /// The model's input that receives the previous value.
    pub input_name: String,
    /// The model's output that returns the new value.
    pub output_name: String,
    /// The datatype of its elements.
    pub datatype: DataType,
    /// Dimensions without the batch: 1 or greater, or -1 for a dimension that may change between
    /// requests.
    pub dims: Vec<i64>,
    /// The value before a sequence's first request; `None` for the server's default, which is
    /// zeros.
    pub initial: Option<InitialState>,
    /// The backend's position of this output: that in the configuration's outputs, or a number
    /// after them.
    pub output: usize,
}

/// The value of a state before a sequence's first request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct InitialState {
    /// Dimensions without the batch, all fixed.
    pub dims: Vec<i64>,
    /// The file in the model's directory `initial_state` with its bytes; `None` for zeros.
    pub file: Option<String>,
}

/// The value of a state.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StateValue {
    /// Dimensions without the batch.
    pub shape: Vec<i64>,
    /// The elements, as in [`Tensor`](crate::tensor::Tensor).
    pub data: Vec<u8>,
}

/// The maximum size of an initial value, in bytes. The server needs this memory for each sequence.
const MAX_BYTES: u64 = 1 << 30;

impl StateSpec {
    /// Returns whether a value may have this shape (without the batch).
    pub fn fits(&self, shape: &[i64]) -> bool {
        self.dims.len() == shape.len()
            && self.dims.iter().zip(shape).all(|(&dim, &got)| got >= 0 && (dim == -1 || dim == got))
    }

    /// Returns whether values may differ in shape.
    pub fn is_variable(&self) -> bool {
        self.dims.contains(&-1)
    }

    /// Returns the value before a sequence's first request. `read` returns the content of a file in
    /// the directory `initial_state`. Variable dimensions are 1 initially. Elements without a
    /// configured value are zero, or empty strings for BYTES.
    ///
    /// # Errors
    /// The file cannot be read, or does not contain as many elements as the dimensions require.
    pub fn first_value(
        &self,
        read: impl FnOnce(&str) -> Result<Vec<u8>, String>,
    ) -> Result<StateValue, String> {
        let shape = self
            .initial
            .as_ref()
            .map_or(&self.dims, |initial| &initial.dims)
            .iter()
            .map(|&dim| dim.max(1))
            .collect::<Vec<i64>>();
        let len = first_bytes(self.datatype, &shape).ok_or_else(|| too_large(&self.input_name))?;
        let Some(file) = self.initial.as_ref().and_then(|initial| initial.file.as_deref()) else {
            return Ok(StateValue { shape, data: vec![0; len] });
        };
        let mut data = read(file)?;
        if self.datatype == DataType::Bytes {
            let expected = element_count(&shape).unwrap_or(0);
            let found = bytes_elements(&data)
                .collect::<Result<Vec<_>, _>>()
                .map(|elements| elements.len() as u64);
            if found != Ok(expected) {
                let found = found.map_or_else(
                    |at| format!("a bad length at byte {at}"),
                    |found| found.to_string(),
                );
                return Err(format!(
                    "initial_state setting expects {expected} BYTES elements, but the data \
                     provided from {file} has {found}."
                ));
            }
        } else if data.len() < len {
            let found = data.len();
            return Err(format!(
                "initial_state setting expects {len} bytes, but the data provided from {file} \
                 only has {found} bytes."
            ));
        } else {
            data.truncate(len);
        }
        Ok(StateValue { shape, data })
    }
}

/// Returns the size of zeros of this shape, in bytes. An empty string takes four bytes for its
/// length.
fn first_bytes(datatype: DataType, shape: &[i64]) -> Option<usize> {
    let len = byte_size(datatype, shape).or_else(|| element_count(shape)?.checked_mul(4))?;
    usize::try_from(len).ok().filter(|_| len <= MAX_BYTES)
}

fn too_large(name: &str) -> String {
    format!(
        "the initial value of state '{name}' takes more than {MAX_BYTES} bytes for each sequence"
    )
}

/// Returns the states as written in the configuration.
pub(super) fn configured_states(proto: &proto::ModelConfig) -> &[State] {
    match &proto.scheduling_choice {
        Some(SchedulingChoice::SequenceBatching(sequence)) => &sequence.state,
        _ => &[],
    }
}

/// Checks and converts `sequence_batching { state }`.
pub(super) fn states(proto: &proto::ModelConfig) -> Result<Vec<StateSpec>, ConfigError> {
    let mut states: Vec<StateSpec> = Vec::new();
    let mut hidden = 0;
    for raw in configured_states(proto) {
        if states.iter().any(|state| state.input_name == raw.input_name) {
            return error(format!(
                "State input name '{}' specified more than once.",
                raw.input_name
            ));
        }
        if states.iter().any(|state| state.output_name == raw.output_name) {
            return error(format!(
                "State output name '{}' specified more than once.",
                raw.output_name
            ));
        }
        let configured = proto.output.iter().position(|output| output.name == raw.output_name);
        let output = configured.unwrap_or(proto.output.len() + hidden);
        hidden += usize::from(configured.is_none());
        states.push(state(proto, raw, output)?);
    }
    check_ragged(proto, &states)?;
    Ok(states)
}

fn state(proto: &proto::ModelConfig, raw: &State, output: usize) -> Result<StateSpec, ConfigError> {
    let model = proto.name.as_str();
    let name = raw.input_name.as_str();
    if name.is_empty() || raw.output_name.is_empty() {
        return error(format!("state must specify 'input_name' and 'output_name' for {model}"));
    }
    let wrong = |what: &str| error(format!("state '{name}' {what} for {model}"));
    let Some(datatype) = datatype(raw.data_type) else { return wrong("must specify 'data_type'") };
    if raw.dims.is_empty() {
        return wrong("must specify 'dims'");
    }
    if !raw.dims.iter().all(|&dim| dim >= 1 || dim == -1) {
        let rule = "dimension must be integer >= 1, or -1 to indicate a variable-size dimension";
        return error(format!("state '{name}' {rule} for {model}: {:?} is given", raw.dims));
    }
    if proto.input.iter().any(|input| input.name == name) || is_made_by_server(proto, name) {
        return wrong("is listed as an input too");
    }
    if proto.output.get(output).is_some_and(|listed| listed.data_type != raw.data_type) {
        return wrong("does not have the data type of the output that gives it");
    }
    if let Some(listed) = proto.output.get(output) {
        let dims = listed.reshape.as_ref().map_or(&listed.dims, |reshape| &reshape.shape);
        if dims.len() != raw.dims.len()
            || !dims
                .iter()
                .zip(&raw.dims)
                .all(|(one, other)| one == other || *one == -1 || *other == -1)
        {
            let output = &listed.name;
            return wrong(&format!(
                "has dims {:?}, but the output '{output}' that gives it has {dims:?}",
                raw.dims
            ));
        }
    }
    let initial = match raw.initial_state.as_slice() {
        [] => None,
        [initial] => Some(initial_state(proto, raw, initial)?),
        more => {
            let found = more.len();
            return error(format!(
                "initial_state field for state input '{name}' must contain exactly one or zero \
                 element. Found '{found}' elements."
            ));
        }
    };
    let input_name = name.to_owned();
    let output_name = raw.output_name.clone();
    let dims = raw.dims.clone();
    let state = StateSpec { input_name, output_name, datatype, dims, initial, output };
    let shape: Vec<i64> =
        state.initial.as_ref().map_or(&state.dims, |initial| &initial.dims).clone();
    let shape: Vec<i64> = shape.into_iter().map(|dim| dim.max(1)).collect();
    match first_bytes(datatype, &shape) {
        Some(_) => Ok(state),
        None => error(format!("{} for {model}", too_large(name))),
    }
}

fn initial_state(
    proto: &proto::ModelConfig,
    state: &State,
    raw: &ProtoInitialState,
) -> Result<InitialState, ConfigError> {
    let name = state.input_name.as_str();
    if raw.data_type != state.data_type {
        return error(format!(
            "The data type used for 'initial_state' field of state '{name}' does not match the \
             state data type."
        ));
    }
    if raw.name.is_empty() {
        return error(format!(
            "Field 'name' must be set when using initial_state for state input '{name}'."
        ));
    }
    if raw.dims.len() != state.dims.len() {
        return error(format!(
            "Number of dimensions in 'initial_state' doesn't match the size of 'state' dimensions \
             for state input '{name}'. {} != {}",
            raw.dims.len(),
            state.dims.len()
        ));
    }
    for (&dim, &of_state) in raw.dims.iter().zip(&state.dims) {
        if dim == -1 {
            return error(format!(
                "'initial_state' field for state input name '{name}' contains variable dimensions."
            ));
        }
        if dim < 1 || (of_state != -1 && dim != of_state) {
            return error(format!(
                "'initial_state' dim for input name '{name}' doesn't match 'state' dim \
                 description. {dim} != {of_state}"
            ));
        }
    }
    let file = match &raw.state_data {
        Some(StateData::ZeroData(_)) => None,
        Some(StateData::DataFile(file)) => Some(inside(proto, file)?),
        None => {
            return error(format!(
                "initial_state setting expects state'{name}' to have state_data set"
            ));
        }
    };
    Ok(InitialState { dims: raw.dims.clone(), file })
}

/// Checks that a file name stays within the directory `initial_state`.
fn inside(proto: &proto::ModelConfig, file: &str) -> Result<String, ConfigError> {
    let outside = file.is_empty() || file.starts_with('/') || file.contains('\0');
    if outside || file.split('/').any(|part| part == "..") {
        return error(format!(
            "'data_file' must stay in the directory 'initial_state' of {}, got '{}'",
            proto.name,
            file.escape_debug()
        ));
    }
    Ok(file.to_owned())
}

/// Refuses variable states with ragged batches: a batch whose states differ in shape is executed in
/// parts, each with its rows of the inputs, and ragged inputs have no rows.
fn check_ragged(proto: &proto::ModelConfig, states: &[StateSpec]) -> Result<(), ConfigError> {
    let ragged = proto.input.iter().any(|input| input.allow_ragged_batch)
        || !proto.batch_input.is_empty()
        || !proto.batch_output.is_empty();
    let variable = states.iter().find(|state| state.is_variable());
    match variable {
        Some(state) if ragged && proto.max_batch_size > 1 => error(format!(
            "state '{}' has variable dimensions, which cannot be combined with ragged batches for \
             {}",
            state.input_name, proto.name
        )),
        _ => Ok(()),
    }
}
