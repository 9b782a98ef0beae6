//! Explains why a tensor makes a plan invalid: the end of an error whose beginning is Triton's
//! text, which names an ensemble and at most a tensor.

use std::collections::BTreeSet;

use super::graph::{Step, Tensor, TensorId};

/// A plan that is being checked.
#[derive(Clone, Copy)]
pub(super) struct Draft<'a> {
    pub(super) tensors: &'a [Tensor],
    pub(super) steps: &'a [Step],
}

impl Draft<'_> {
    /// Explains an input of the ensemble that no step takes, or an output that no step makes: lists
    /// maps that lead nowhere.
    pub(super) fn explain_unmapped(&self, role: &str, name: &str, known: &[&str]) -> String {
        let (map, other) =
            if role == "input" { ("input_map", "made") } else { ("output_map", "taken") };
        let loose = self.tensors.iter().enumerate().filter(|(_, tensor)| match role {
            "input" => tensor.producer.is_none() && !known.contains(&tensor.name.as_str()),
            _ => tensor.consumers.is_empty() && !known.contains(&tensor.name.as_str()),
        });
        let loose: Vec<String> = loose
            .map(|(id, tensor)| {
                let at = if role == "input" { self.consumer(id) } else { self.producer(id) };
                format!("'{}' of {at}", tensor.name)
            })
            .collect();
        let no_map = format!("no {map} has the value '{name}'");
        if loose.is_empty() {
            return no_map;
        }
        format!("{no_map}; values that are {other} nowhere: {}", loose.join(", "))
    }

    /// Explains a tensor that no step can make, or that no step takes.
    pub(super) fn explain_unusable(
        &self,
        tensor: TensorId,
        is_ready: impl Fn(TensorId) -> bool,
    ) -> String {
        if is_ready(tensor) {
            return format!(
                "{} makes it, but no step takes it, nor is it an output of the ensemble",
                self.producer(tensor)
            );
        }
        let mut path = Vec::<TensorId>::new();
        let mut here = tensor;
        loop {
            if let Some(begin) = path.iter().position(|passed| *passed == here) {
                let cycle = path.get(begin..).unwrap_or_default();
                let names: Vec<String> =
                    cycle.iter().chain([&here]).map(|id| format!("'{}'", self.name(*id))).collect();
                let steps: BTreeSet<String> =
                    cycle.iter().filter_map(|id| self.step_of(*id)).collect();
                let steps: Vec<String> = steps.into_iter().collect();
                let names = names.join(" needs ");
                let steps = steps.join(", ");
                return format!("it can never be made: {names} ({steps})");
            }
            path.push(here);
            let producer = self.tensors.get(here).and_then(|tensor| tensor.producer);
            let Some(step) = producer.and_then(|number| self.steps.get(number)) else {
                let consumer = self.consumer(here);
                let name = self.name(here);
                return format!(
                    "{consumer} takes '{name}', which is neither an output of a step nor an input \
                     of the ensemble"
                );
            };
            match step.inputs.iter().map(|(_, id)| *id).find(|id| !is_ready(*id)) {
                Some(missing) => here = missing,
                None => return format!("step {} cannot be run", producer.unwrap_or_default()),
            }
        }
    }

    fn name(&self, id: TensorId) -> &str {
        self.tensors.get(id).map_or("", |tensor| tensor.name.as_str())
    }

    /// Describes the step that makes a tensor.
    fn step_of(&self, id: TensorId) -> Option<String> {
        let number = self.tensors.get(id)?.producer?;
        Some(format!("step {number}, model '{}'", self.steps.get(number)?.model))
    }

    /// Describes the first input that takes a tensor.
    fn consumer(&self, id: TensorId) -> String {
        let number = self.tensors.get(id).and_then(|tensor| tensor.consumers.first().copied());
        let found = number.and_then(|number| {
            let step = self.steps.get(number)?;
            let (input, _) = step.inputs.iter().find(|(_, tensor)| *tensor == id)?;
            Some(format!("input '{input}' of step {number} (model '{}')", step.model))
        });
        found.unwrap_or_else(|| "no input".to_owned())
    }

    /// Describes the output that makes a tensor.
    fn producer(&self, id: TensorId) -> String {
        let number = self.tensors.get(id).and_then(|tensor| tensor.producer);
        let found = number.and_then(|number| {
            let step = self.steps.get(number)?;
            let (output, _) = step.outputs.iter().find(|(_, tensor)| *tensor == id)?;
            Some(format!("output '{output}' of step {number} (model '{}')", step.model))
        });
        found.unwrap_or_else(|| "no output".to_owned())
    }
}
