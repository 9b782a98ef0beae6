//! Checks that the members of an ensemble fit together: names, datatypes, shapes, batch sizes. The
//! texts are Triton's; they name both ends of a mismatch.

use std::collections::BTreeMap;

use super::graph::{Step, TensorId};
use super::plan::Plan;
use super::shape::agree;
use crate::model::{ModelConfig, Scheduling, TensorSpec};
use crate::tensor::{DataType, format_shape};

/// The properties of an ensemble's tensor, taken from the first model that defines them.
struct Node<'a> {
    model: &'a str,
    datatype: DataType,
    dims: &'a [i64],
    batches: bool,
}

impl<'a> Node<'a> {
    fn new(config: &'a ModelConfig, spec: &'a TensorSpec, dims: &'a [i64]) -> Self {
        Self { model: &config.name, datatype: spec.datatype, dims, batches: config.batches() }
    }

    fn full_dims(&self) -> Vec<i64> {
        self.batches.then_some(-1).into_iter().chain(self.dims.iter().copied()).collect()
    }

    fn agrees(&self, other: &Self) -> bool {
        agree(self.dims, other.dims) || agree(&self.full_dims(), &other.full_dims())
    }
}

/// Checks a plan with these configurations of its steps' models, in the order of the steps.
///
/// # Errors
/// A mismatch, with the models and tensors at both ends.
pub fn check(config: &ModelConfig, plan: &Plan, members: &[&ModelConfig]) -> Result<(), String> {
    let mut nodes: BTreeMap<TensorId, Node<'_>> = BTreeMap::new();
    let ends =
        plan.inputs().iter().zip(&config.inputs).chain(plan.outputs().iter().zip(&config.outputs));
    for (id, spec) in ends {
        let dims = spec.reshape.as_ref().unwrap_or(&spec.dims);
        nodes.entry(*id).or_insert_with(|| Node::new(config, spec, dims));
    }
    for (step, member) in plan.steps().iter().zip(members) {
        if member.batches() && member.max_batch_size < config.max_batch_size {
            return Err(format!(
                "ensemble {} allows maximum batch size {}, but it contains model {} which only \
                 allows maximum batch size to be {}",
                config.name, config.max_batch_size, member.name, member.max_batch_size
            ));
        }
        check_step(config, plan, step, member, &mut nodes)?;
    }
    Ok(())
}

/// Checks that the response cache may be used for an ensemble with these members, including
/// indirect ones: responses of a model that cannot be cached make the ensemble's responses
/// uncacheable too.
///
/// # Errors
/// A member has sequences or is decoupled.
pub fn check_cache(config: &ModelConfig, members: &[&ModelConfig]) -> Result<(), String> {
    let why = |member: &ModelConfig| match member.scheduling {
        Scheduling::Sequence(_) => Some("sequence batching scheduler"),
        _ if member.decoupled => Some("'decoupled' transaction policy"),
        _ => None,
    };
    let Some((member, why)) = members.iter().find_map(|member| Some((member, why(member)?))) else {
        return Ok(());
    };
    Err(format!(
        "Response Cache does not currently support model {} with {why} in its member {}. Please \
         disable the response cache.",
        config.name, member.name
    ))
}

fn check_step<'a>(
    config: &ModelConfig,
    plan: &Plan,
    step: &Step,
    member: &'a ModelConfig,
    nodes: &mut BTreeMap<TensorId, Node<'a>>,
) -> Result<(), String> {
    let ensemble = &config.name;
    let model = &member.name;
    let tensor = |id: &TensorId| plan.tensors().get(*id).map_or("", |tensor| tensor.name.as_str());
    if let Some((name, id)) = step.inputs.iter().find(|(name, _)| member.input(name).is_none()) {
        let tensor = tensor(id);
        return Err(format!(
            "in ensemble {ensemble}, ensemble tensor {tensor} is mapping to non-existing input \
             {name} in model {model}"
        ));
    }
    if let Some(input) = member
        .inputs
        .iter()
        .find(|input| !(input.optional || step.inputs.iter().any(|(name, _)| *name == input.name)))
    {
        return Err(format!(
            "in ensemble {ensemble}, input {} in model {model} is not mapped to any ensemble \
             tensors",
            input.name
        ));
    }
    if let Some((name, id)) = step.outputs.iter().find(|(name, _)| member.output(name).is_none()) {
        let tensor = tensor(id);
        return Err(format!(
            "in ensemble {ensemble}, ensemble tensor {tensor} is mapped from non-existing output \
             {name} in model {model}"
        ));
    }
    let inputs = step.inputs.iter().map(|(name, id)| (id, member.input(name)));
    for (id, spec) in inputs.chain(step.outputs.iter().map(|(name, id)| (id, member.output(name))))
    {
        let Some(spec) = spec else { continue };
        let node = Node::new(member, spec, &spec.dims);
        match nodes.get(id) {
            Some(known) => consistent(known, &node).map_err(|text| {
                format!("in ensemble {ensemble}, ensemble tensor {}: {text}", tensor(id))
            })?,
            None => {
                nodes.insert(*id, node);
            }
        }
    }
    Ok(())
}

/// Checks that two uses of a tensor agree. Variable dimensions are checked for each request. A
/// batch may be a dimension of a model that does not batch.
fn consistent(known: &Node<'_>, node: &Node<'_>) -> Result<(), String> {
    let inconsistent = |what: &str, left: &str, right: &str| {
        let one = known.model;
        let other = node.model;
        Err(format!(
            "inconsistent {what}: {left} is inferred from model {one} while {right} is inferred \
             from model {other}"
        ))
    };
    if known.datatype != node.datatype {
        return inconsistent(
            "data type",
            &config_type(known.datatype),
            &config_type(node.datatype),
        );
    }
    if !known.agrees(node) {
        return inconsistent(
            "shape",
            &format_shape(&known.full_dims()),
            &format_shape(&node.full_dims()),
        );
    }
    Ok(())
}

/// Returns a datatype's name in configurations.
fn config_type(datatype: DataType) -> String {
    match datatype {
        DataType::Bytes => "TYPE_STRING".to_owned(),
        other => format!("TYPE_{other}"),
    }
}
