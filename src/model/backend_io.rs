//! The inputs and outputs of a backend by position: what the configuration lists, and what the server makes beside it.

use super::config::ModelConfig;
use super::controls::{ControlInput, ControlKind};
use super::scheduling::Scheduling;
use crate::infer::CorrelationId;
use crate::tensor::DataType;

impl ModelConfig {
    /// The name of what a backend is given as its input number `position`: the configured inputs, then the targets of
    /// the batch inputs, then the control inputs, then the states.
    pub fn input_name(&self, position: usize) -> Option<&str> {
        let made = self.batch_inputs.iter().flat_map(|input| &input.targets);
        let made = made.chain(self.controls().iter().map(|control| &control.name));
        let made = made.chain(self.states.iter().map(|state| &state.input_name));
        self.inputs.iter().map(|input| &input.name).chain(made).nth(position).map(String::as_str)
    }

    /// How many inputs a backend is given at most.
    pub fn backend_inputs(&self) -> usize {
        self.first_control() + self.controls().len() + self.states.len()
    }

    /// The position of the first control input.
    pub fn first_control(&self) -> usize {
        self.inputs.len() + self.batch_inputs.iter().map(|input| input.targets.len()).sum::<usize>()
    }

    /// The position of the input whose shape determines how this output is split; `None` if the output is not split so.
    pub fn scattered_by(&self, output: &str) -> Option<usize> {
        let scattered = self.batch_outputs.iter().find(|scattered| scattered.targets.iter().any(|name| name == output));
        scattered.map(|scattered| scattered.source)
    }

    /// The control inputs; none for a model without sequences.
    pub fn controls(&self) -> &[ControlInput] {
        match &self.scheduling {
            Scheduling::Sequence(sequence) => &sequence.controls,
            _ => &[],
        }
    }

    /// Whether a request may be executed any number of times (`iterative_sequence`).
    pub fn has_iterative_sequences(&self) -> bool {
        matches!(&self.scheduling, Scheduling::Sequence(sequence) if sequence.iterative)
    }

    /// The refusal of a correlation id that is not of the type of the model's control; Triton's text. `None`: it fits.
    pub(super) fn wrong_id_type(&self, id: &CorrelationId) -> Option<String> {
        let control = self.controls().iter().find(|control| control.kind == ControlKind::CorrelationId)?;
        let (is, expected) = match (id, control.datatype) {
            (CorrelationId::String(_), DataType::Bytes) => return None,
            (CorrelationId::String(_), expected) => (DataType::Bytes, expected),
            (CorrelationId::Uint(_), DataType::Bytes) => (DataType::Uint64, DataType::Bytes),
            (CorrelationId::Uint(_), _) => return None,
        };
        Some(format!(
            "sequence batching control '{}' data-type is '{is}', but model '{}' expects '{expected}'",
            control.name, self.name
        ))
    }

    /// What a backend calls the input of the state of this number: states come after all other inputs.
    pub fn state_input(&self, state: usize) -> usize {
        self.backend_inputs() - self.states.len() + state
    }

    /// Every output that a backend has to know: the configured ones, then those that are only states.
    pub fn backend_outputs(&self) -> impl Iterator<Item = (&str, DataType)> {
        let configured = self.outputs.iter().map(|output| (output.name.as_str(), output.datatype));
        let hidden = self.states.iter().filter(|state| state.output >= self.outputs.len());
        configured.chain(hidden.map(|state| (state.output_name.as_str(), state.datatype)))
    }
}
