//! Plans with decoupled steps: random plans compared with nested loops, and error texts.

use std::collections::BTreeMap;
use std::sync::Arc;

use proptest::prelude::*;
use proptest::sample::Index;

use super::tests::{ensemble, names, step};
use super::*;
use crate::error::InferError;

/// A random plan: the steps of each stage, with their number of outputs and their inputs.
type Recipe = Vec<Vec<(usize, Vec<Index>)>>;

fn recipes() -> impl Strategy<Value = Recipe> {
    let step = (1usize..3, prop::collection::vec(any::<Index>(), 1..3));
    prop::collection::vec(prop::collection::vec(step, 0..4), 1..4)
}

/// Builds the plan of a recipe: between two stages, a decoupled step takes all unused tensors of
/// the previous stage.
fn build(recipe: &Recipe, shuffle: &[Index]) -> (Arc<Plan>, Arc<Stages>) {
    let mut texts = Vec::new();
    let mut decoupled = Vec::new();
    let mut there = names(&["x0", "x1"]);
    let mut loose = there.clone();
    let mut number = 0;
    let mut add = |takes: &[String], made: &[String], is_decoupled: bool| {
        texts.push((step(number, takes, made), is_decoupled));
        number += 1;
    };
    for (stage, steps) in recipe.iter().enumerate() {
        if stage > 0 {
            let made = names(&[&format!("d{stage}_0"), &format!("d{stage}_1")]);
            add(&loose, &made, true);
            there = made.clone();
            loose = made;
        }
        for (n, (count, wants)) in steps.iter().enumerate() {
            let takes: Vec<String> =
                wants.iter().map(|index| there[index.index(there.len())].clone()).collect();
            let made: Vec<String> =
                (0..*count).map(|output| format!("t{stage}_{n}_{output}")).collect();
            add(&takes, &made, false);
            loose.retain(|name| !takes.contains(name));
            there.extend(made.iter().cloned());
            loose.extend(made);
        }
    }
    // Outputs must be made by a step, so that the response differs from the request; unused inputs
    // need a consumer too.
    if recipe.len() == 1 {
        add(&loose, &names(&["y"]), false);
        loose = names(&["y"]);
    }
    for (n, index) in shuffle.iter().enumerate().take(texts.len()) {
        let other = index.index(texts.len());
        texts.swap(n, other);
    }
    decoupled.extend(texts.iter().map(|(_, is_decoupled)| *is_decoupled));
    let texts: Vec<String> = texts.into_iter().map(|(text, _)| text).collect();
    let plan = Plan::new(&ensemble(&names(&["x0", "x1"]), &loose, &texts)).unwrap().unwrap();
    let stages = Stages::new("e", &plan, &decoupled).unwrap();
    assert_eq!(stages.count(), recipe.len());
    (Arc::new(plan), Arc::new(stages))
}

/// A tensor, represented by its derivation.
type Value = String;

/// Returns the outputs of a step for its inputs, for its response of this number.
fn make(step: &Step, inputs: &[(usize, Value)], response: usize) -> Vec<(usize, Value)> {
    let inputs: Vec<&str> = inputs.iter().map(|(_, value)| value.as_str()).collect();
    // Hash the inputs, since texts would become long in long plans.
    let of = format!("{:x}", crc(&inputs.join(",")));
    (0..step.outputs.len())
        .map(|output| (output, format!("{}({of}).{response}.{output}", step.model)))
        .collect()
}

fn crc(text: &str) -> u64 {
    text.bytes().fold(0xcbf2_9ce4_8422_2325, |hash, byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x100_0000_01b3)
    })
}

/// Returns the number of responses of a decoupled step, which depends only on its inputs.
fn responses(inputs: &[(usize, Value)], most: usize) -> usize {
    crc(&inputs.iter().map(|(_, value)| value.as_str()).collect::<String>()) as usize % (most + 1)
}

/// The reference implementation with nested loops. Returns the responses, grouped by request of the
/// last decoupled step.
fn reference(plan: &Plan, stages: &Stages, most: usize) -> Vec<Vec<Vec<Value>>> {
    let mut known: BTreeMap<TensorId, Value> = BTreeMap::new();
    known.extend(plan.inputs().iter().map(|id| (*id, format!("in{id}"))));
    let mut groups = vec![Vec::new()];
    run_stage(plan, stages, 0, most, known, &mut groups);
    groups
}

fn run_stage(
    plan: &Plan,
    stages: &Stages,
    stage: usize,
    most: usize,
    mut known: BTreeMap<TensorId, Value>,
    groups: &mut Vec<Vec<Vec<Value>>>,
) {
    loop {
        let ready = plan.steps().iter().enumerate().find(|(number, step)| {
            stages.ended_by(*number).is_none()
                && step.inputs.iter().all(|(_, id)| known.contains_key(id))
                && !step.outputs.iter().all(|(_, id)| known.contains_key(id))
        });
        let Some((_, step)) = ready else { break };
        let inputs: Vec<_> =
            step.inputs.iter().enumerate().map(|(n, (_, id))| (n, known[id].clone())).collect();
        known.extend(
            make(step, &inputs, 0).into_iter().map(|(n, value)| (step.outputs[n].1, value)),
        );
    }
    let Some(producer) = stages.producer(stage) else {
        groups
            .last_mut()
            .unwrap()
            .push(plan.outputs().iter().map(|id| known[id].clone()).collect());
        return;
    };
    let step = &plan.steps()[producer];
    let inputs: Vec<_> =
        step.inputs.iter().enumerate().map(|(n, (_, id))| (n, known[id].clone())).collect();
    for response in 0..responses(&inputs, most) {
        if stage + 2 == stages.count() && response == 0 {
            groups.push(Vec::new());
        }
        let made =
            make(step, &inputs, response).into_iter().map(|(n, value)| (step.outputs[n].1, value));
        run_stage(plan, stages, stage + 1, most, made.collect(), groups);
    }
}

/// A running step, and the number of its responses so far.
struct Running {
    call: Call<Value>,
    given: usize,
}

/// Runs a plan in an order that `choices` determines; the request fails at the call of this number.
/// Returns the responses.
fn simulate(
    (plan, stages): &(Arc<Plan>, Arc<Stages>),
    choices: &[Index],
    most: usize,
    fails_at: Option<usize>,
) -> Vec<Result<Vec<Value>, InferError>> {
    let requested: Vec<usize> = (0..plan.outputs().len()).collect();
    let given = plan.inputs().iter().enumerate().map(|(n, id)| (n, format!("in{id}")));
    let mut flow = Flow::new(plan.clone(), stages.clone(), &requested, given);
    let mut running: Vec<Running> = Vec::new();
    let mut outputs = Vec::new();
    let mut begun = 0;
    let mut choices = choices.iter().cycle();
    loop {
        while let Some(call) = flow.next_step() {
            assert_eq!(call.decoupled.then_some(call.stage), stages.ended_by(call.step));
            assert_eq!(call.inputs.len(), plan.steps()[call.step].inputs.len());
            begun += 1;
            match fails_at == Some(begun) {
                true => drop(flow.done_or_response(&call, Err(InferError::internal("it failed")))),
                false => running.push(Running { call, given: 0 }),
            }
        }
        while let Some(output) = flow.next_output() {
            outputs.push(output.map(|values| values.into_iter().map(|(_, value)| value).collect()));
        }
        if flow.is_over() {
            assert_eq!(flow.kept(), 0, "no tensor is kept after the request");
            return outputs;
        }
        let position = choices.next().unwrap().index(running.len());
        let Running { call, given } = &mut running[position];
        let step = &plan.steps()[call.step];
        if !call.decoupled {
            flow.done(call.id, Ok(make(step, &call.inputs, 0)));
            running.swap_remove(position);
        } else if *given < responses(&call.inputs, most) {
            flow.response(call.id, Ok(make(step, &call.inputs, *given)));
            *given += 1;
        } else {
            flow.ended(call.id);
            running.swap_remove(position);
        }
    }
}

impl Flow<Value> {
    fn done_or_response(&mut self, call: &Call<Value>, made: Output<Value>) -> Vec<String> {
        if call.decoupled { self.response(call.id, made) } else { self.done(call.id, made) }
    }
}

proptest! {
    #[test]
    fn random_plans_have_the_results_of_nested_loops(
        recipe in recipes(),
        shuffle in prop::collection::vec(any::<Index>(), 16),
        choices in prop::collection::vec(any::<Index>(), 1..40),
        most in 0usize..5,
    ) {
        let built = build(&recipe, &shuffle);
        let expected = reference(&built.0, &built.1, most);
        let got: Vec<Vec<Value>> = simulate(&built, &choices, most, None).into_iter().map(Result::unwrap).collect();
        // The responses of a group are in order, possibly interleaved with others.
        for group in &expected {
            let of_group: Vec<_> = got.iter().filter(|response| group.contains(response)).cloned().collect();
            prop_assert_eq!(&of_group, group);
        }
        prop_assert_eq!(got.len(), expected.iter().map(Vec::len).sum::<usize>());
        if built.1.count() < 3 {
            prop_assert_eq!(got, expected.concat());
        }
    }

    #[test]
    fn an_error_follows_all_earlier_responses_and_is_last(
        recipe in recipes(),
        shuffle in prop::collection::vec(any::<Index>(), 16),
        choices in prop::collection::vec(any::<Index>(), 1..40),
        fails_at in 1usize..12,
    ) {
        let built = build(&recipe, &shuffle);
        let expected = reference(&built.0, &built.1, 4).concat();
        let mut got = simulate(&built, &choices, 4, Some(fails_at));
        let last = got.pop();
        // Not all plans have that many steps.
        if let Some(Err(error)) = last {
            prop_assert_eq!(error.message.as_str(), "it failed");
            let got: Vec<Vec<Value>> = got.into_iter().map(Result::unwrap).collect();
            prop_assert!(got.iter().all(|response| expected.contains(response)));
            if built.1.count() < 3 {
                prop_assert_eq!(&got[..], &expected[..got.len()], "nothing is missing in the middle");
            }
        }
    }
}

/// Builds a plan of these steps, each with its inputs and outputs; `decoupled` marks the decoupled
/// ones.
fn stages(
    steps: &[(&[&str], &[&str])],
    outputs: &[&str],
    decoupled: &[bool],
) -> Result<(Arc<Plan>, Arc<Stages>), String> {
    let texts: Vec<String> = steps
        .iter()
        .enumerate()
        .map(|(n, (takes, made))| step(n, &names(takes), &names(made)))
        .collect();
    let plan = Plan::new(&ensemble(&names(&["x"]), &names(outputs), &texts)).unwrap().unwrap();
    let stages = Stages::new("e", &plan, decoupled)?;
    Ok((Arc::new(plan), Arc::new(stages)))
}

#[test]
fn a_step_cannot_take_tensors_of_different_responses() {
    let text = |model, left, right| {
        format!(
            "in ensemble e, step of model '{model}' receives inputs originated from different \
             decoupled models: {left}, {right}"
        )
    };
    let x = "'x' comes of the request";
    let of_m0 = "'a' comes of each response of model 'm0'";
    for (steps, outputs, decoupled, expected) in [
        (
            &[(&["x"][..], &["a"][..]), (&["x", "a"], &["y"])][..],
            &["y"][..],
            &[true, false][..],
            text("m1", x, of_m0),
        ),
        (
            &[(&["x"], &["a"]), (&["x"], &["b"]), (&["a", "b"], &["y"])],
            &["y"],
            &[true, true, false],
            text("m2", of_m0, "'b' comes of each response of model 'm1'"),
        ),
        (
            &[(&["x"], &["a"]), (&["x"], &["b"])],
            &["a", "b"],
            &[true, false],
            text("e", of_m0, "'b' comes of the request"),
        ),
        (
            &[(&["x"], &["a"]), (&["a"], &["b"])],
            &["a", "b"],
            &[false, true],
            text("e", "'a' comes of the request", "'b' comes of each response of model 'm1'"),
        ),
    ] {
        assert_eq!(stages(steps, outputs, decoupled).unwrap_err(), expected);
    }
    let steps: &[(&[&str], &[&str])] =
        &[(&["c"], &["y"]), (&["x"], &["a", "b"]), (&["a"], &["d"]), (&["b", "d"], &["c"])];
    let (_, found) = stages(steps, &["y"], &[true, true, false, false]).unwrap();
    assert_eq!(
        (found.count(), found.producer(0), found.producer(1), found.producer(2)),
        (3, Some(1), Some(0), None)
    );
    assert_eq!((found.ended_by(0), found.ended_by(1), found.ended_by(2)), (Some(1), Some(0), None));
}

#[test]
fn responses_are_passed_on_in_order_even_with_missing_tensors() {
    let (plan, stages) =
        stages(&[(&["x"], &["a"]), (&["a"], &["y"])], &["y"], &[true, false]).unwrap();
    let mut flow = Flow::new(plan, stages, &[0], [(0, "x")]);
    let producer = flow.next_step().unwrap();
    assert_eq!(
        (producer.step, producer.stage, producer.decoupled, producer.outputs),
        (0, 0, true, vec![0])
    );
    assert_eq!(flow.response(producer.id, Ok(vec![(0, "first")])), Vec::<String>::new());
    assert_eq!(flow.response(producer.id, Ok(vec![])), ["o0"]);
    let first = flow.next_step().unwrap();
    let second = flow.next_step().unwrap();
    assert_eq!((first.inputs, second.inputs), (vec![(0, "first")], vec![]));
    flow.done(second.id, Ok(vec![(0, "2")]));
    assert_eq!((flow.next_output(), flow.waiting(producer.id)), (None, 1));
    flow.ended(producer.id);
    assert!(!flow.is_over() && !flow.is_open(producer.id));
    flow.done(first.id, Ok(vec![(0, "1")]));
    assert_eq!(flow.next_output(), Some(Ok(vec![(0, "1")])));
    assert!(!flow.is_over());
    assert_eq!((flow.next_output(), flow.is_over()), (Some(Ok(vec![(0, "2")])), true));
}

#[test]
fn an_error_waits_for_earlier_responses_and_drops_later_ones() {
    let (plan, stages) =
        stages(&[(&["x"], &["a"]), (&["a"], &["y"])], &["y"], &[true, false]).unwrap();
    let mut flow = Flow::new(plan, stages, &[0], [(0, "x")]);
    let producer = flow.next_step().unwrap();
    for response in ["first", "second", "third"] {
        flow.response(producer.id, Ok(vec![(0, response)]));
    }
    let [first, second, third] = [(); 3].map(|()| flow.next_step().unwrap());
    flow.done(third.id, Ok(vec![(0, "3")]));
    flow.done(second.id, Err(InferError::internal("it failed")));
    assert!(flow.next_output().is_none() && !flow.is_over());
    flow.done(first.id, Ok(vec![(0, "1")]));
    assert_eq!(flow.next_output(), Some(Ok(vec![(0, "1")])));
    let last = flow.next_output().unwrap();
    assert_eq!((last.unwrap_err().message.as_str(), flow.is_over()), ("it failed", true));
    assert!(flow.next_output().is_none());
}

#[test]
fn a_request_without_responses_is_not_a_deadlock() {
    let (plan, stages) =
        stages(&[(&["x"], &["a"]), (&["a"], &["y"])], &["y"], &[true, false]).unwrap();
    let mut flow = Flow::new(plan, stages, &[0], [(0, "x")]);
    let producer = flow.next_step().unwrap();
    flow.ended(producer.id);
    assert!(flow.is_over() && flow.next_output().is_none());
}
