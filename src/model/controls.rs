//! Control inputs of models with sequences (`sequence_batching.control_input`): inputs that the
//! server adds for each slot of a batch. The kinds and the error texts are Triton's.

use super::error::{ConfigError, error};
use super::proto::model_sequence_batching::{Control as ProtoControl, control::Kind};
use super::proto::{self, model_config::SchedulingChoice};
use crate::infer::CorrelationId;
use crate::tensor::{DataType, push_bytes_element};

/// An input that the server generates, with one element for each slot of a batch.
#[derive(Clone, Debug, PartialEq)]
pub struct ControlInput {
    /// The input's name.
    pub name: String,
    /// The datatype of its elements.
    pub datatype: DataType,
    /// The meaning of its elements.
    pub kind: ControlKind,
}

/// The meaning of a [`ControlInput`].
#[derive(Clone, Debug, PartialEq)]
pub enum ControlKind {
    /// Whether the request starts its sequence.
    Start(FalseTrue),
    /// Whether the request ends its sequence.
    End(FalseTrue),
    /// Whether this slot contains a request.
    Ready(FalseTrue),
    /// The sequence's correlation id; 0 or empty without a request. A number that is too large for
    /// the datatype is truncated to its low bits.
    CorrelationId,
}

/// The bytes of an element that means "no" and of one that means "yes".
#[derive(Clone, Debug, PartialEq)]
pub struct FalseTrue([Vec<u8>; 2]);

/// The values for one slot of a batch.
#[derive(Clone, Copy, Debug)]
pub struct ControlValues<'a> {
    /// Whether this is the first request of its sequence.
    pub start: bool,
    /// Whether this is the last request of its sequence.
    pub end: bool,
    /// The sequence's id.
    pub id: &'a CorrelationId,
}

impl ControlInput {
    /// Returns the tensor's bytes for these slots; `None` is padding.
    pub fn make<'a>(&self, slots: impl Iterator<Item = Option<ControlValues<'a>>>) -> Vec<u8> {
        let mut bytes = Vec::new();
        for slot in slots {
            let (values, yes) = match &self.kind {
                ControlKind::Start(values) => (values, slot.is_some_and(|slot| slot.start)),
                ControlKind::End(values) => (values, slot.is_some_and(|slot| slot.end)),
                ControlKind::Ready(values) => (values, slot.is_some()),
                ControlKind::CorrelationId => {
                    self.push_id(slot.map(|slot| slot.id), &mut bytes);
                    continue;
                }
            };
            bytes.extend_from_slice(&values.0[usize::from(yes)]);
        }
        bytes
    }

    fn push_id(&self, id: Option<&CorrelationId>, bytes: &mut Vec<u8>) {
        match (self.datatype.size(), id) {
            (Some(size), Some(CorrelationId::Uint(number))) => {
                bytes.extend_from_slice(&number.to_le_bytes()[..size])
            }
            (Some(size), _) => bytes.extend_from_slice(&[0; 8][..size]),
            (None, Some(CorrelationId::String(text))) => {
                let _ = push_bytes_element(bytes, text.as_bytes());
            }
            (None, _) => drop(push_bytes_element(bytes, b"")),
        }
    }
}

/// Returns whether the server generates the input: from the batch as a whole, or as a control input
/// of sequences.
pub(super) fn is_made_by_server(config: &proto::ModelConfig, input: &str) -> bool {
    let controls = match &config.scheduling_choice {
        Some(SchedulingChoice::SequenceBatching(sequence)) => sequence.control_input.as_slice(),
        _ => &[],
    };
    config.batch_input.iter().any(|made| made.target_name.iter().any(|name| name == input))
        || controls.iter().any(|control| control.name == input)
}

/// Checks and converts `control_input`.
pub(super) fn controls(
    model: &proto::ModelConfig,
    raw: &proto::ModelSequenceBatching,
) -> Result<Vec<ControlInput>, ConfigError> {
    let name = &model.name;
    let made = model.batch_input.iter().flat_map(|input| &input.target_name);
    let inputs: Vec<&String> = model.input.iter().map(|input| &input.name).chain(made).collect();
    let mut all = Vec::<ControlInput>::new();
    let mut kinds = Vec::new();
    for input in &raw.control_input {
        if input.name.is_empty() {
            return error(format!("sequence batching control tensor must have a name for {name}"));
        }
        if all.iter().any(|control| control.name == input.name) || input.control.len() > 1 {
            let text = format!(
                "sequence batching control tensor '{}' is specified for multiple control kinds",
                input.name
            );
            return error(format!("{text} for {name}"));
        }
        if inputs.contains(&&input.name) {
            let text = format!(
                "sequence batching control tensor '{}' is also an input of the model",
                input.name
            );
            return error(format!("{text} for {name}"));
        }
        for control in &input.control {
            if kinds.contains(&control.kind()) {
                let kind = control.kind().as_str_name();
                return error(format!(
                    "sequence batching specifies multiple {kind} tensors for {name}"
                ));
            }
            kinds.push(control.kind());
            let (datatype, kind) = kind(control, name).map_err(ConfigError::new)?;
            all.push(ControlInput { name: input.name.clone(), datatype, kind });
        }
    }
    Ok(all)
}

/// Returns the datatype and the meaning of a control input.
fn kind(control: &ProtoControl, model: &str) -> Result<(DataType, ControlKind), String> {
    let made: fn(FalseTrue) -> ControlKind = match control.kind() {
        Kind::ControlSequenceStart => ControlKind::Start,
        Kind::ControlSequenceEnd => ControlKind::End,
        Kind::ControlSequenceReady => ControlKind::Ready,
        Kind::ControlSequenceCorrid => return correlation_id(control, model),
    };
    let (datatype, values) = false_true(control).map_err(|text| format!("{text} for {model}"))?;
    Ok((datatype, made(values)))
}

const CHOICES: [&str; 3] = ["int32_false_true", "fp32_false_true", "bool_false_true"];

fn false_true(control: &ProtoControl) -> Result<(DataType, FalseTrue), String> {
    let kind = control.kind().as_str_name();
    let int32: Vec<Vec<u8>> =
        control.int32_false_true.iter().map(|value| value.to_le_bytes().to_vec()).collect();
    let fp32 = control.fp32_false_true.iter().map(|value| value.to_le_bytes().to_vec()).collect();
    let boolean = control.bool_false_true.iter().map(|value| vec![u8::from(*value)]).collect();
    let choices = CHOICES
        .into_iter()
        .zip([DataType::Int32, DataType::Fp32, DataType::Bool])
        .zip([int32, fp32, boolean]);
    let mut given = choices.filter(|(_, values)| !values.is_empty());
    let [int, fp, boolean] = CHOICES;
    let Some(((choice, datatype), values)) = given.next() else {
        return Err(format!(
            "sequence batching must specify either '{int}', '{fp}' or '{boolean}' for {kind}"
        ));
    };
    if given.next().is_some() {
        return Err(format!(
            "sequence batching specifies more than one from '{int}', '{fp}' and '{boolean}' for \
             {kind}"
        ));
    }
    let values = <[Vec<u8>; 2]>::try_from(values);
    let values = values.map_err(|_| {
        format!("sequence batching control '{choice}' must have exactly 2 entries for {kind}")
    })?;
    Ok((datatype, FalseTrue(values)))
}

fn correlation_id(control: &ProtoControl, model: &str) -> Result<(DataType, ControlKind), String> {
    let kind = control.kind().as_str_name();
    let counts = [
        control.int32_false_true.len(),
        control.fp32_false_true.len(),
        control.bool_false_true.len(),
    ];
    if counts != [0, 0, 0] {
        let [int, fp, boolean] = CHOICES;
        return Err(format!(
            "sequence batching must not specify either '{int}', '{fp}' or '{boolean}' for {kind} \
             for {model}"
        ));
    }
    let datatype = match control.data_type() {
        proto::DataType::TypeUint64 => DataType::Uint64,
        proto::DataType::TypeInt64 => DataType::Int64,
        proto::DataType::TypeUint32 => DataType::Uint32,
        proto::DataType::TypeInt32 => DataType::Int32,
        proto::DataType::TypeString => DataType::Bytes,
        _ => {
            return Err(format!(
                "unexpected data type for control {kind} for {model}. Allowed data types are \
                 TYPE_UINT64, TYPE_INT64, TYPE_UINT32, TYPE_INT32 and TYPE_STRING: it is {}",
                control.data_type().as_str_name()
            ));
        }
    };
    Ok((datatype, ControlKind::CorrelationId))
}
