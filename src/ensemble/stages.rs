//! Decoupled steps in a plan: which steps run once for a request, and which run once for each
//! response of a decoupled step.

use std::sync::Arc;

use super::goal::Goal;
use super::graph::{Step, TensorId};
use super::plan::Plan;

/// The stages of a plan. Stage 0 begins with the request; each other stage begins with a response
/// of the decoupled step that ends the stage before it. The last stage produces the ensemble's
/// outputs.
///
/// Every plan has this form: as in Triton, the inputs of a step must originate from the same
/// response, so stages cannot join; and every tensor must be used, so no stage ends without a
/// consumer.
#[derive(Debug, Default)]
pub struct Stages {
    /// The decoupled steps: the one at `n` ends stage `n`.
    producers: Vec<usize>,
    /// The goal of each stage if all outputs are requested, which is the usual case.
    whole: Vec<Arc<Goal>>,
}

impl Stages {
    /// Splits the plan of an ensemble into stages. `decoupled` is whether the model of each step is
    /// decoupled.
    ///
    /// # Errors
    /// A step, or the response, would consume tensors of different responses.
    pub fn new(ensemble: &str, plan: &Plan, decoupled: &[bool]) -> Result<Self, String> {
        // For each tensor the decoupled step from whose response it originates, or `None` for the
        // request; and the number of decoupled steps before it.
        let mut origins: Vec<Option<Origin>> = vec![None; plan.tensors().len()];
        for id in plan.inputs() {
            set(&mut origins, *id, Origin::default());
        }
        let mut producers = Vec::new();
        let mut left: Vec<usize> = (0..plan.steps().len()).collect();
        while !left.is_empty() {
            // In a plan, a step can always run once others have run.
            let Some(position) = left.iter().position(|number| {
                plan.steps().get(*number).is_some_and(|step| {
                    step.inputs.iter().all(|(_, id)| origins.get(*id).is_some_and(Option::is_some))
                })
            }) else {
                break;
            };
            let number = left.remove(position);
            let Some(step) = plan.steps().get(number) else { break };
            let model = step.model.as_str();
            let mut origin =
                common(plan, ensemble, model, &origins, step.inputs.iter().map(|(_, id)| *id))?;
            if decoupled.get(number) == Some(&true) {
                producers.push((origin.depth, number));
                origin = Origin { step: Some(number), depth: origin.depth + 1 };
            }
            step.outputs.iter().for_each(|(_, id)| set(&mut origins, *id, origin));
        }
        common(plan, ensemble, ensemble, &origins, plan.outputs().iter().copied())?;
        producers.sort_unstable();
        let producers: Vec<usize> = producers.into_iter().map(|(_, step)| step).collect();
        let all: Vec<usize> = (0..plan.outputs().len()).collect();
        Ok(Self { whole: Goal::of(plan, &producers, &all), producers })
    }

    /// Returns the goal of each stage for the outputs at these positions, ascending and each once.
    pub(super) fn goals(&self, plan: &Plan, requested: &[usize]) -> Vec<Arc<Goal>> {
        match requested.len() == plan.outputs().len() {
            true => self.whole.clone(),
            false => Goal::of(plan, &self.producers, requested),
        }
    }

    /// Returns whether a request may have any number of responses.
    pub fn is_decoupled(&self) -> bool {
        !self.producers.is_empty()
    }

    /// Returns the number of stages.
    pub fn count(&self) -> usize {
        self.producers.len() + 1
    }

    /// Returns the decoupled step that ends a stage; `None` for the last stage.
    pub fn producer(&self, stage: usize) -> Option<usize> {
        self.producers.get(stage).copied()
    }

    /// Returns the stage that a decoupled step ends; `None` for a step that answers once.
    pub fn ended_by(&self, step: usize) -> Option<usize> {
        self.producers.iter().position(|producer| *producer == step)
    }
}

/// The response or request from which a tensor originates.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Origin {
    /// A decoupled step; `None` for the request.
    step: Option<usize>,
    depth: usize,
}

fn set(origins: &mut [Option<Origin>], tensor: TensorId, origin: Origin) {
    if let Some(place) = origins.get_mut(tensor) {
        *place = Some(origin);
    }
}

/// Returns the common origin of these tensors, which are inputs of a model.
fn common(
    plan: &Plan,
    ensemble: &str,
    model: &str,
    origins: &[Option<Origin>],
    tensors: impl Iterator<Item = TensorId>,
) -> Result<Origin, String> {
    let mut known = tensors.filter_map(|id| Some((id, (*origins.get(id)?)?)));
    let Some((first, origin)) = known.next() else { return Ok(Origin::default()) };
    let Some((other, different)) = known.find(|(_, other)| *other != origin) else {
        return Ok(origin);
    };
    let describe = |id: TensorId, origin: Origin| {
        let name = plan.tensors().get(id).map_or("", |tensor| tensor.name.as_str());
        match origin.step.and_then(|step| plan.steps().get(step)) {
            None => format!("'{name}' comes of the request"),
            Some(Step { model, .. }) => {
                format!("'{name}' comes of each response of model '{model}'")
            }
        }
    };
    // The first half is Triton's.
    Err(format!(
        "in ensemble {ensemble}, step of model '{model}' receives inputs originated from \
         different decoupled models: {}, {}",
        describe(first, origin),
        describe(other, different)
    ))
}
