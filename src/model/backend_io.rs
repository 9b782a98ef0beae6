//! The inputs and outputs of a backend by position: the configured ones, and those that the server
//! adds.

use super::config::ModelConfig;
use super::controls::{ControlInput, ControlKind};
use super::scheduling::Scheduling;
use crate::infer::CorrelationId;
use crate::tensor::DataType;

impl ModelConfig {
    /// Returns the name of a backend's input number `position`. The order is: configured inputs,
    /// targets of the batch inputs, control inputs, states.
    pub fn input_name(&self, position: usize) -> Option<&str> {
        let made = self.batch_inputs.iter().flat_map(|input| &input.targets);
        let made = made.chain(self.controls().iter().map(|control| &control.name));
        let made = made.chain(self.states.iter().map(|state| &state.input_name));
        self.inputs.iter().map(|input| &input.name).chain(made).nth(position).map(String::as_str)
    }

    /// Returns the maximum number of inputs that a backend receives.
    pub fn backend_inputs(&self) -> usize {
        self.first_control() + self.controls().len() + self.states.len()
    }

    /// Returns the position of the first control input.
    pub fn first_control(&self) -> usize {
        self.inputs.len() + self.batch_inputs.iter().map(|input| input.targets.len()).sum::<usize>()
    }

    /// Returns the position of the input whose shape determines how `output` is split; `None` if it
    /// is not a batch output.
    pub fn scattered_by(&self, output: &str) -> Option<usize> {
        let scattered = self
            .batch_outputs
            .iter()
            .find(|scattered| scattered.targets.iter().any(|name| name == output));
        scattered.map(|scattered| scattered.source)
    }

    /// Returns the control inputs; empty for a model without sequences.
    pub fn controls(&self) -> &[ControlInput] {
        match &self.scheduling {
            Scheduling::Sequence(sequence) => &sequence.controls,
            _ => &[],
        }
    }

    /// Returns whether a request may be executed repeatedly (`iterative_sequence`).
    pub fn has_iterative_sequences(&self) -> bool {
        matches!(&self.scheduling, Scheduling::Sequence(sequence) if sequence.iterative)
    }

    /// Returns Triton's error text if the type of `id` does not match the model's control input;
    /// `None` if it does.
    pub(super) fn wrong_id_type(&self, id: &CorrelationId) -> Option<String> {
        let control =
            self.controls().iter().find(|control| control.kind == ControlKind::CorrelationId)?;
        let (is, expected) = match (id, control.datatype) {
            (CorrelationId::String(_), DataType::Bytes) => return None,
            (CorrelationId::String(_), expected) => (DataType::Bytes, expected),
            (CorrelationId::Uint(_), DataType::Bytes) => (DataType::Uint64, DataType::Bytes),
            (CorrelationId::Uint(_), _) => return None,
        };
        Some(format!(
            "sequence batching control '{}' data-type is '{is}', but model '{}' expects \
             '{expected}'",
            control.name, self.name
        ))
    }

    /// Returns the backend's input position of the state with this index. States come after all
    /// other inputs.
    pub fn state_input(&self, state: usize) -> usize {
        self.backend_inputs() - self.states.len() + state
    }

    /// Returns every output that a backend must produce: the configured ones, then those that exist
    /// only as states.
    pub fn backend_outputs(&self) -> impl Iterator<Item = (&str, DataType)> {
        let configured = self.outputs.iter().map(|output| (output.name.as_str(), output.datatype));
        let hidden = self.states.iter().filter(|state| state.output >= self.outputs.len());
        configured.chain(hidden.map(|state| (state.output_name.as_str(), state.datatype)))
    }
}
