//! The plan of an ensemble: its tensors, with their producers and consumers.
//!
//! Checks the ensemble's own configuration, before any member is known. The texts are Triton's.

use std::collections::{BTreeMap, BTreeSet};

use super::explain;
use super::graph::{Step, Tensor, TensorId};
use crate::model::{EnsembleStep, ModelConfig, Scheduling};

/// A plan whose steps can all run, in some order, once its inputs exist.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Plan {
    tensors: Vec<Tensor>,
    steps: Vec<Step>,
    inputs: Vec<TensorId>,
    outputs: Vec<TensorId>,
}

impl Plan {
    /// Builds the plan of a configuration; `None` if the model is not an ensemble.
    ///
    /// # Errors
    /// A tensor is made twice, or an input, an output or a tensor between steps is not connected.
    pub fn new(config: &ModelConfig) -> Option<Result<Self, String>> {
        let Scheduling::Ensemble { steps, .. } = &config.scheduling else { return None };
        Some(Draft::default().plan(config, steps))
    }

    /// Returns the tensors.
    pub fn tensors(&self) -> &[Tensor] {
        &self.tensors
    }

    /// Returns the steps in the order of the configuration.
    pub fn steps(&self) -> &[Step] {
        &self.steps
    }

    /// Renames the models of the steps. `name` receives each model's namespace and present name.
    pub fn rename(&mut self, name: impl Fn(&str, &str) -> String) {
        for step in &mut self.steps {
            step.model = name(&step.namespace, &step.model);
        }
    }

    /// Returns the tensors of the ensemble's inputs, in the order of the configuration.
    pub fn inputs(&self) -> &[TensorId] {
        &self.inputs
    }

    /// Returns the tensors of the ensemble's outputs, in the order of the configuration.
    pub fn outputs(&self) -> &[TensorId] {
        &self.outputs
    }

    /// Returns the models of the steps, each once, by name.
    pub fn members(&self) -> BTreeSet<&str> {
        self.steps.iter().map(|step| step.model.as_str()).collect()
    }

    /// Returns the step that makes the ensemble's output at `position`, and the model's name of it;
    /// `None` for an output that is an input.
    pub fn origin(&self, position: usize) -> Option<(usize, &str)> {
        let tensor = *self.outputs.get(position)?;
        let step = self.tensors.get(tensor)?.producer?;
        let output = self.steps.get(step)?.outputs.iter().find(|(_, made)| *made == tensor)?;
        Some((step, output.0.as_str()))
    }
}

/// A plan under construction: tensors by name.
#[derive(Default)]
struct Draft {
    tensors: Vec<Tensor>,
    by_name: BTreeMap<String, TensorId>,
}

impl Draft {
    fn plan(mut self, config: &ModelConfig, configured: &[EnsembleStep]) -> Result<Plan, String> {
        let mut steps = Vec::with_capacity(configured.len());
        for (number, step) in configured.iter().enumerate() {
            let outputs = step.output_map.iter().map(|(output, tensor)| {
                let id = self.tensor(tensor);
                match self.tensors.get_mut(id).and_then(|made| made.producer.replace(number)) {
                    Some(_) => Err(twice(&config.name, tensor, number)),
                    None => Ok((output.clone(), id)),
                }
            });
            let outputs = outputs.collect::<Result<Vec<_>, _>>()?;
            let inputs = step.input_map.iter().map(|(input, tensor)| {
                let id = self.tensor(tensor);
                let consumers = self.tensors.get_mut(id).map(|tensor| &mut tensor.consumers);
                if let Some(consumers) =
                    consumers.filter(|consumers| consumers.last() != Some(&number))
                {
                    consumers.push(number);
                }
                (input.clone(), id)
            });
            let inputs = inputs.collect();
            let model = step.model_name.clone();
            steps.push(Step {
                model,
                namespace: step.model_namespace.clone(),
                version: step.model_version,
                inputs,
                outputs,
            });
        }
        let inputs = self.ends("input", config, &steps)?;
        let ready = self.ready(&steps, &inputs);
        let outputs = self.ends("output", config, &steps)?;
        self.check_flow(config, &steps, &ready, &outputs)?;
        // An input exists from the beginning: a step's tensor of the same name would never be used.
        if let Some(tensor) =
            inputs.iter().filter_map(|id| self.tensors.get(*id)).find(|t| t.producer.is_some())
        {
            let name = &config.name;
            return Err(format!(
                "ensemble tensor '{}' is an input of ensemble '{name}' and made by a step",
                tensor.name
            ));
        }
        Ok(Plan { tensors: self.tensors, steps, inputs, outputs })
    }

    fn tensor(&mut self, name: &str) -> TensorId {
        if let Some(id) = self.by_name.get(name) {
            return *id;
        }
        let id = self.tensors.len();
        self.tensors.push(Tensor { name: name.to_owned(), producer: None, consumers: Vec::new() });
        self.by_name.insert(name.to_owned(), id);
        id
    }

    /// Returns the tensors of the ensemble's inputs or outputs, which steps must name.
    fn ends(
        &self,
        role: &str,
        config: &ModelConfig,
        steps: &[Step],
    ) -> Result<Vec<TensorId>, String> {
        let specs = if role == "input" { &config.inputs } else { &config.outputs };
        let find = |name: &str| {
            self.by_name.get(name).copied().ok_or_else(|| {
                let known: Vec<&str> = specs.iter().map(|spec| spec.name.as_str()).collect();
                let why = self.explain(steps).explain_unmapped(role, name, &known);
                format!(
                    "ensemble {role} '{name}' for ensemble '{}' is not used: {why}",
                    config.name
                )
            })
        };
        specs.iter().map(|spec| find(&spec.name)).collect()
    }

    fn explain<'a>(&'a self, steps: &'a [Step]) -> explain::Draft<'a> {
        explain::Draft { tensors: &self.tensors, steps }
    }

    /// Returns which tensors exist once all steps that can run have run.
    fn ready(&self, steps: &[Step], inputs: &[TensorId]) -> Vec<bool> {
        let mut ready = vec![false; self.tensors.len()];
        let mut missing: Vec<BTreeSet<TensorId>> =
            steps.iter().map(|step| step.inputs.iter().map(|(_, id)| *id).collect()).collect();
        let mut news = inputs.to_vec();
        while let Some(id) = news.pop() {
            let Some(seen) = ready.get_mut(id).filter(|seen| !**seen) else { continue };
            *seen = true;
            for &number in self.tensors.get(id).map_or(&[][..], |tensor| &tensor.consumers) {
                let (Some(waits), Some(step)) = (missing.get_mut(number), steps.get(number)) else {
                    continue;
                };
                if waits.remove(&id) && waits.is_empty() {
                    news.extend(step.outputs.iter().map(|(_, made)| *made));
                }
            }
        }
        ready
    }

    /// Returns the root cause for a tensor that cannot be made: a tensor that no step makes, or the
    /// last one before a cycle closes.
    fn cause(
        &self,
        steps: &[Step],
        tensor: TensorId,
        is_ready: impl Fn(&TensorId) -> bool,
    ) -> TensorId {
        let mut cause = tensor;
        let mut seen = BTreeSet::from([tensor]);
        loop {
            let producer = self.tensors.get(cause).and_then(|tensor| steps.get(tensor.producer?));
            let missing = producer.into_iter().flat_map(|step| &step.inputs).map(|(_, id)| *id);
            match missing.filter(|id| !is_ready(id)).find(|id| seen.insert(*id)) {
                Some(id) => cause = id,
                None => return cause,
            }
        }
    }

    /// Checks that every output can be made, and that every tensor is used.
    fn check_flow(
        &self,
        config: &ModelConfig,
        steps: &[Step],
        ready: &[bool],
        outputs: &[TensorId],
    ) -> Result<(), String> {
        let is_ready = |id: &TensorId| ready.get(*id) == Some(&true);
        let name_of = |id: TensorId| self.tensors.get(id).map_or("", |tensor| tensor.name.as_str());
        if let Some(&output) = outputs.iter().find(|id| !is_ready(id)) {
            let missing = self.cause(steps, output, is_ready);
            return Err(format!(
                "output '{}' for ensemble '{}' is not written: at least one of its depending \
                 tensors, '{}', is not connected: {}",
                name_of(output),
                config.name,
                name_of(missing),
                self.explain(steps).explain_unusable(output, |id| is_ready(&id)),
            ));
        }
        match self.tensors.iter().enumerate().find(|(id, tensor)| {
            !outputs.contains(id) && (!is_ready(id) || tensor.consumers.is_empty())
        }) {
            Some((id, tensor)) => {
                let why = self.explain(steps).explain_unusable(id, |id| is_ready(&id));
                Err(format!(
                    "ensemble tensor '{}' is unused in ensemble '{}': {why}",
                    tensor.name, config.name
                ))
            }
            None => Ok(()),
        }
    }
}

fn twice(ensemble: &str, tensor: &str, step: usize) -> String {
    format!(
        "ensemble tensor '{tensor}' can appear in an output map only once for ensemble \
         '{ensemble}' step {step}"
    )
}
