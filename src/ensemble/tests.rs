//! Random plans: each step runs once, with all its inputs and as early as possible, and tensors are
//! kept only as long as needed. Also error texts of invalid plans.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use proptest::prelude::*;

use super::*;
use crate::model::{Completion, Draft, ModelConfig};

pub(super) fn config(text: &str) -> ModelConfig {
    let completion = Completion {
        directory: "e",
        files: &[],
        backends: &["builtin"],
        gpus: &[],
        unusable_gpus: &[],
        no_cuda_provider: None,
        compiled: false,
        signature: None,
        gguf: None,
        text: None,
        auto_complete: true,
        default_max_batch_size: 0,
    };
    Draft::from_text(text, "config.pbtxt").unwrap().complete(&completion).unwrap()
}

pub(super) fn tensor(kind: &str, name: &str) -> String {
    format!("{kind} {{ name: '{name}' data_type: TYPE_FP32 dims: [ -1 ] }}\n")
}

/// Formats a step of model `m<number>` with these ensemble tensors, on inputs `i0`, `i1` ... and
/// outputs `o0` ...
pub(super) fn step(number: usize, inputs: &[String], outputs: &[String]) -> String {
    let map = |kind: &str, key: &str, names: &[String]| -> String {
        names
            .iter()
            .enumerate()
            .map(|(n, name)| format!("{kind} {{ key: '{key}{n}' value: '{name}' }} "))
            .collect()
    };
    format!(
        "step {{ model_name: 'm{number}' model_version: -1 {}{}}}\n",
        map("input_map", "i", inputs),
        map("output_map", "o", outputs)
    )
}

pub(super) fn ensemble(inputs: &[String], outputs: &[String], steps: &[String]) -> ModelConfig {
    let ends: String = inputs.iter().map(|name| tensor("input", name)).collect();
    let outputs: String = outputs.iter().map(|name| tensor("output", name)).collect();
    config(&format!(
        "platform: 'ensemble' {ends}{outputs}ensemble_scheduling {{ {} }}",
        steps.concat()
    ))
}

/// A random plan: the number of inputs, and for each step its number of outputs and the earlier
/// tensors that it takes.
type Recipe = (usize, Vec<(usize, Vec<prop::sample::Index>)>);

fn recipes() -> impl Strategy<Value = Recipe> {
    let step = (1usize..3, prop::collection::vec(any::<prop::sample::Index>(), 1..4));
    (1usize..4, prop::collection::vec(step, 1..12))
}

/// Builds the plan. Tensors without a consumer become outputs of the ensemble, so that none is
/// unused. Steps are listed in the order of `shuffle`, not in the order of their dependencies.
fn plan((inputs, steps): &Recipe, shuffle: &[prop::sample::Index]) -> (ModelConfig, Vec<String>) {
    let inputs: Vec<String> = (0..*inputs).map(|n| format!("x{n}")).collect();
    let mut there = inputs.clone();
    let mut taken = BTreeSet::new();
    let mut texts = Vec::new();
    for (number, (count, wants)) in steps.iter().enumerate() {
        let takes: Vec<String> =
            wants.iter().map(|index| there[index.index(there.len())].clone()).collect();
        taken.extend(takes.iter().cloned());
        let made: Vec<String> = (0..*count).map(|n| format!("t{number}_{n}")).collect();
        there.extend(made.iter().cloned());
        texts.push(step(number, &takes, &made));
    }
    for (n, index) in shuffle.iter().enumerate().take(texts.len()) {
        let other = index.index(texts.len());
        texts.swap(n, other);
    }
    let used: Vec<String> = inputs.iter().filter(|name| taken.contains(*name)).cloned().collect();
    let outputs: Vec<String> = there
        .iter()
        .filter(|name| name.starts_with('t') && !taken.contains(*name))
        .cloned()
        .collect();
    (ensemble(&used, &outputs, &texts), outputs)
}

/// Begins a request of a plan without decoupled steps.
fn begin<T: Clone>(
    plan: &Arc<Plan>,
    requested: &[usize],
    given: impl IntoIterator<Item = (usize, T)>,
) -> Flow<T> {
    let stages = Stages::new("e", plan, &vec![false; plan.steps().len()]).unwrap();
    Flow::new(plan.clone(), Arc::new(stages), requested, given)
}

/// Runs a plan step by step, in an order that `choices` determines, with names as tensors. Returns
/// the outputs and the steps in the order of execution.
fn simulate(
    plan: &Arc<Plan>,
    requested: &[usize],
    choices: &[prop::sample::Index],
) -> (Vec<usize>, Vec<usize>) {
    let given: Vec<(usize, Arc<usize>)> =
        plan.inputs().iter().enumerate().map(|(n, id)| (n, Arc::new(*id))).collect();
    let mut flow = begin(plan, requested, given);
    let mut running = Vec::new();
    let mut order = Vec::new();
    let mut finished = BTreeSet::new();
    let mut choices = choices.iter().cycle();
    loop {
        while let Some(Call { id, step, inputs, .. }) = flow.next_step() {
            let expected: Vec<usize> =
                plan.steps()[step].inputs.iter().map(|(_, id)| *id).collect();
            let got: Vec<usize> = inputs.iter().map(|(_, value)| **value).collect();
            assert_eq!(got, expected, "step {step} has all its inputs");
            order.push(step);
            running.push((id, step, inputs));
        }
        expect_greedy(plan, requested, &finished, &order);
        if running.is_empty() {
            break;
        }
        let (id, number, inputs) =
            running.swap_remove(choices.next().unwrap().index(running.len()));
        drop(inputs);
        let made =
            plan.steps()[number].outputs.iter().enumerate().map(|(n, (_, id))| (n, Arc::new(*id)));
        assert_eq!(flow.done(id, Ok(made.collect())), Vec::<String>::new());
        finished.insert(number);
        expect_lean(plan, requested, &order, &finished, flow.kept());
    }
    let outputs = flow.next_output().unwrap().unwrap();
    assert!(flow.next_output().is_none() && flow.is_over());
    assert!(
        outputs.iter().all(|(_, value)| Arc::strong_count(value) == 1),
        "outputs have no other references"
    );
    (outputs.into_iter().map(|(position, _)| position).collect(), order)
}

/// Returns the steps that outputs need, computed independently of the plan.
fn needed(plan: &Plan, requested: &[usize]) -> BTreeSet<usize> {
    let mut steps = BTreeSet::new();
    let mut wanted: BTreeSet<usize> = requested.iter().map(|at| plan.outputs()[*at]).collect();
    loop {
        let before = steps.len();
        for (number, step) in plan.steps().iter().enumerate() {
            if step.outputs.iter().any(|(_, id)| wanted.contains(id)) {
                steps.insert(number);
                wanted.extend(step.inputs.iter().map(|(_, id)| *id));
            }
        }
        if steps.len() == before {
            return steps;
        }
    }
}

/// Checks that every needed step whose inputs exist has been started.
fn expect_greedy(plan: &Plan, requested: &[usize], finished: &BTreeSet<usize>, started: &[usize]) {
    let there: BTreeSet<usize> = finished
        .iter()
        .flat_map(|step| &plan.steps()[*step].outputs)
        .map(|(_, id)| *id)
        .chain(plan.inputs().iter().copied())
        .collect();
    for number in needed(plan, requested) {
        let can = plan.steps()[number].inputs.iter().all(|(_, id)| there.contains(id));
        assert_eq!(started.contains(&number), can, "step {number} runs as soon as it can");
    }
}

/// Checks that only tensors are kept that a needed step has yet to take, or that belong to the
/// response.
fn expect_lean(
    plan: &Plan,
    requested: &[usize],
    started: &[usize],
    finished: &BTreeSet<usize>,
    kept: usize,
) {
    let waiting: BTreeSet<usize> =
        needed(plan, requested).into_iter().filter(|n| !started.contains(n)).collect();
    let still = waiting.iter().flat_map(|step| &plan.steps()[*step].inputs).map(|(_, id)| *id);
    let still: BTreeSet<usize> =
        still.chain(requested.iter().map(|at| plan.outputs()[*at])).collect();
    let is_there =
        |id: &usize| plan.tensors()[*id].producer.is_none_or(|step| finished.contains(&step));
    assert_eq!(kept, still.iter().filter(|id| is_there(id)).count());
}

proptest! {
    #[test]
    fn random_plans_run_to_the_end(
        recipe in recipes(),
        shuffle in prop::collection::vec(any::<prop::sample::Index>(), 12),
        choices in prop::collection::vec(any::<prop::sample::Index>(), 1..20),
        subset in prop::collection::vec(any::<bool>(), 24),
    ) {
        let (config, names) = plan(&recipe, &shuffle);
        let plan = Arc::new(Plan::new(&config).unwrap().unwrap());
        prop_assert_eq!(plan.outputs().len(), names.len());
        let all: Vec<usize> = (0..names.len()).collect();
        let some: Vec<usize> = all.iter().copied().filter(|at| subset[*at % subset.len()]).collect();
        for requested in [all, some] {
            let (outputs, order) = simulate(&plan, &requested, &choices);
            prop_assert_eq!(&outputs, &requested);
            let once: BTreeSet<usize> = order.iter().copied().collect();
            prop_assert_eq!(once.len(), order.len(), "no step runs twice");
            prop_assert_eq!(once, needed(&plan, &requested), "only needed steps run");
        }
    }
}

pub(super) fn names(list: &[&str]) -> Vec<String> {
    list.iter().map(|name| (*name).to_owned()).collect()
}

#[test]
fn unset_tensors_stay_unset_in_later_steps() {
    let steps = [
        step(0, &names(&["x", "w"]), &names(&["a", "b"])),
        step(1, &names(&["b"]), &names(&["c"])),
    ];
    let config = ensemble(&names(&["x", "w"]), &names(&["a", "c"]), &steps);
    let plan = Arc::new(Plan::new(&config).unwrap().unwrap());
    let mut flow = begin(&plan, &[0, 1], [(0, "x")]);
    let first = flow.next_step().unwrap();
    assert_eq!((first.step, first.inputs), (0, vec![(0, "x")]), "the optional input is missing");
    assert_eq!(first.outputs, [0, 1]);
    assert_eq!(
        flow.done(first.id, Ok(vec![(0, "a")])),
        ["o1"],
        "returns the outputs that the step has not made"
    );
    let second = flow.next_step().unwrap();
    assert_eq!((second.step, second.inputs), (1, vec![]), "the consumer runs without the tensor");
    assert_eq!(flow.done(second.id, Ok(vec![])), ["o0"]);
    assert_eq!(flow.next_output(), Some(Ok(vec![(0, "a")])), "the output is omitted");
}

#[test]
fn there_is_no_output_while_a_step_runs() {
    let config =
        ensemble(&names(&["x"]), &names(&["y"]), &[step(0, &names(&["x"]), &names(&["y"]))]);
    let plan = Arc::new(Plan::new(&config).unwrap().unwrap());
    let mut flow = begin(&plan, &[0], [(0, ())]);
    assert!(flow.next_step().is_some() && flow.next_step().is_none());
    assert!(flow.next_output().is_none() && !flow.is_over());
}

#[test]
fn a_step_can_take_a_tensor_twice_and_it_can_be_an_output() {
    let steps =
        [step(0, &names(&["x"]), &names(&["a"])), step(1, &names(&["a", "a"]), &names(&["y"]))];
    let config = ensemble(&names(&["x"]), &names(&["y", "a"]), &steps);
    let plan = Arc::new(Plan::new(&config).unwrap().unwrap());
    for (requested, holders) in [(&[0][..], 2), (&[0, 1], 3)] {
        let value = Arc::new(());
        let mut flow = begin(&plan, requested, [(0, Arc::new(()))]);
        let first = flow.next_step().unwrap();
        assert_eq!(first.step, 0);
        flow.done(first.id, Ok(vec![(0, value.clone())]));
        let second = flow.next_step().unwrap();
        assert_eq!(second.inputs.len(), 2);
        assert_eq!(Arc::strong_count(&value), holders + 1, "the flow holds only requested outputs");
    }
}

#[test]
#[allow(clippy::too_many_lines)] // a table
fn errors_of_invalid_plans_have_reasons() {
    let s =
        |number, inputs: &[&str], outputs: &[&str]| step(number, &names(inputs), &names(outputs));
    for (inputs, outputs, steps, expected) in [
        (
            &["x"][..],
            &["y"][..],
            vec![s(0, &["x"], &["y"]), s(1, &["x"], &["y"])],
            "ensemble tensor 'y' can appear in an output map only once for ensemble 'e' step 1",
        ),
        (
            &["x"],
            &["y"],
            vec![s(0, &["x"], &["y", "y"])],
            "ensemble tensor 'y' can appear in an output map only once for ensemble 'e' step 0",
        ),
        (
            &["x"],
            &["y"],
            vec![s(0, &["x", "a"], &["b"]), s(1, &["b"], &["a"]), s(2, &["b"], &["y"])],
            "output 'y' for ensemble 'e' is not written: at least one of its depending tensors, \
             'a', is not connected: it can never be made: 'b' needs 'a' needs 'b' (step 0, model \
             'm0', step 1, model 'm1')",
        ),
        (
            &["x"],
            &["y"],
            vec![s(0, &["x", "z"], &["y"])],
            "output 'y' for ensemble 'e' is not written: at least one of its depending tensors, \
             'z', is not connected: input 'i1' of step 0 (model 'm0') takes 'z', which is neither \
             an output of a step nor an input of the ensemble",
        ),
        (
            &["x"],
            &["y"],
            vec![s(0, &["x"], &["z"])],
            "ensemble output 'y' for ensemble 'e' is not used: no output_map has the value 'y'; \
             values that are taken nowhere: 'z' of output 'o0' of step 0 (model 'm0')",
        ),
        (
            &["x", "w"],
            &["y"],
            vec![s(0, &["x"], &["y"])],
            "ensemble input 'w' for ensemble 'e' is not used: no input_map has the value 'w'",
        ),
        (
            &["x"],
            &["y"],
            vec![s(0, &[""], &["t"]), s(1, &["t", "v"], &["y"])],
            "ensemble input 'x' for ensemble 'e' is not used: no input_map has the value 'x'; \
             values that are made nowhere: '' of input 'i0' of step 0 (model 'm0'), 'v' of input \
             'i1' of step 1 (model 'm1')",
        ),
        (
            &["x"],
            &["y"],
            vec![s(0, &["x"], &["y", "z"])],
            "ensemble tensor 'z' is unused in ensemble 'e': output 'o1' of step 0 (model 'm0') \
             makes it, but no step takes it, nor is it an output of the ensemble",
        ),
        (
            &["x"],
            &["y"],
            vec![s(0, &["nowhere"], &["u"]), s(1, &["x"], &["y"])],
            "ensemble tensor 'u' is unused in ensemble 'e': input 'i0' of step 0 (model 'm0') \
             takes 'nowhere', which is neither an output of a step nor an input of the ensemble",
        ),
        (
            &["x"],
            &["y"],
            vec![s(0, &["t"], &["u"]), s(1, &["u"], &["t"]), s(2, &["x"], &["y"])],
            "ensemble tensor 'u' is unused in ensemble 'e': it can never be made: 'u' needs 't' \
             needs 'u' (step 0, model 'm0', step 1, model 'm1')",
        ),
        (
            &["x"],
            &["y"],
            vec![s(0, &["x"], &["x"]), s(1, &["x"], &["y"])],
            "ensemble tensor 'x' is an input of ensemble 'e' and made by a step",
        ),
    ] {
        let config = ensemble(&names(inputs), &names(outputs), &steps);
        assert_eq!(Plan::new(&config).unwrap().unwrap_err(), expected);
    }
}

#[test]
fn shapes_are_converted_between_models_with_and_without_batching() {
    for (dims, batches, shape, batch, expected) in [
        (&[4][..], true, &[2, 4][..], Some(2), &[2, 4][..]),
        (&[4], true, &[4], None, &[1, 4]),
        (&[4], true, &[3, 4], None, &[3, 4]),
        (&[4], false, &[1, 4], Some(1), &[4]),
        (&[4], false, &[2, 4], Some(2), &[2, 4]),
        (&[-1, 4], false, &[1, 4], Some(1), &[1, 4]),
        (&[-1, 4], false, &[2, 4], Some(2), &[2, 4]),
        (&[4], false, &[4], None, &[4]),
    ] {
        assert_eq!(fit(dims, batches, shape, batch), expected, "{shape:?} as {dims:?}");
    }
}

#[test]
fn dependencies_find_cycles_and_dependents() {
    let mut known = Dependencies::default();
    for (ensemble, members) in [
        ("self", "self"),
        ("a", "b"),
        ("b", "c plain"),
        ("c", "a plain"),
        ("outside", "a"),
        ("good", "plain"),
        ("on", "good other"),
    ] {
        known.insert(ensemble, members.split(' '));
    }
    for (ensemble, expected) in [
        ("self", Some("self self")),
        ("a", Some("a b c a")),
        ("b", Some("b c a b")),
        ("outside", None),
        ("good", None),
        ("plain", None),
    ] {
        assert_eq!(
            known.cycle(ensemble).map(|path| path.join(" ")).as_deref(),
            expected,
            "{ensemble}"
        );
    }
    let with: Vec<_> = known.with_member(|member| member == "plain" || member == "other").collect();
    assert_eq!(with, ["b", "c", "good", "on"]);
    for (model, expected) in [
        ("plain", "b c good a on outside"),
        ("good", "on"),
        ("other", "on"),
        ("a", "c outside b"),
        ("outside", ""),
    ] {
        assert_eq!(known.dependents(model).join(" "), expected, "{model}");
    }
    known.remove("on");
    assert_eq!(known.dependents("other"), Vec::<&str>::new());
}

#[test]
fn members_are_released_with_the_last_ensemble_that_needs_them() {
    let mut known = Dependencies::default();
    for (ensemble, members) in
        [("top", "ab c"), ("ab", "a b"), ("bc", "b c"), ("circle", "ring x"), ("ring", "circle")]
    {
        known.insert(ensemble, members.split(' '));
    }
    for (ensemble, kept, loaded, expected) in [
        ("ab", "", "ab", "a b"),
        ("ab", "a", "ab", "b"),
        ("ab", "", "ab bc", "a"),
        ("ab", "", "ab top", "a b"),
        ("top", "", "top ab", "a ab b c"),
        ("top", "", "top ab bc", "a ab"),
        ("top", "ab", "top ab", "c"),
        ("top", "ab", "top ab bc", ""),
        ("circle", "", "circle ring", "ring x"),
        ("a", "", "ab", ""),
        ("nothing", "", "", ""),
    ] {
        let is = |names: &str, name: &str| names.split(' ').any(|one| one == name);
        let gone = known.released(ensemble, |name| is(kept, name), |name| is(loaded, name));
        assert_eq!(
            gone.into_iter().collect::<Vec<_>>().join(" "),
            expected,
            "{ensemble} beside {loaded}, kept {kept}"
        );
    }
}

#[test]
fn mismatching_members_are_refused_with_both_ends_named() {
    let member = |name: &str, batch: u32, datatype: &str, dims: &str| {
        let io = |kind, name| {
            format!("{kind} {{ name: '{name}' data_type: {datatype} dims: [ {dims} ] }}")
        };
        config_of(
            name,
            &format!("max_batch_size: {batch} {} {}", io("input", "i0"), io("output", "o0")),
        )
    };
    let members: BTreeMap<&str, ModelConfig> = [
        ("good", member("good", 8, "TYPE_FP32", "-1")),
        ("texts", member("texts", 8, "TYPE_STRING", "-1")),
        ("square", member("square", 8, "TYPE_FP32", "2, 2")),
        ("row", member("row", 8, "TYPE_FP32", "4")),
        ("small", member("small", 2, "TYPE_FP32", "-1")),
        ("flat", member("flat", 0, "TYPE_FP32", "-1, 4")),
    ]
    .into();
    for (chain, expected) in [
        (["good", "good"], ""),
        (["row", "flat"], ""),
        (["flat", "row"], ""),
        (
            ["good", "texts"],
            "in ensemble e, ensemble tensor t: inconsistent data type: TYPE_FP32 is inferred from \
             model good while TYPE_STRING is inferred from model texts",
        ),
        (
            ["row", "square"],
            "in ensemble e, ensemble tensor t: inconsistent shape: [-1,4] is inferred from model \
             row while [-1,2,2] is inferred from model square",
        ),
        (
            ["good", "small"],
            "ensemble e allows maximum batch size 4, but it contains model small which only \
             allows maximum batch size to be 2",
        ),
    ] {
        let [first, second] = chain;
        let steps =
            [step(0, &names(&["x"]), &names(&["t"])), step(1, &names(&["t"]), &names(&["y"]))];
        let mut config = ensemble(&names(&["x"]), &names(&["y"]), &steps);
        config.max_batch_size = 4;
        let plan = Plan::new(&config).unwrap().unwrap();
        let result = check(&config, &plan, &[&members[first], &members[second]]);
        assert_eq!(result.err().unwrap_or_default(), expected, "{chain:?}");
    }
}

#[test]
fn the_response_cache_is_refused_for_uncacheable_members() {
    let ends = |kind: &str| format!("{} {}", tensor("input", kind), tensor("output", "o0"));
    let member = |name: &str, more: &str| {
        config_of(name, &format!("max_batch_size: 4 {} {more}", ends("i0")))
    };
    let plain = member("plain", "");
    let of_sequences = "sequence batching scheduler";
    for (name, more, why) in [
        ("seq", "sequence_batching { direct { } }", of_sequences),
        (
            "iterative",
            "sequence_batching { iterative_sequence: true oldest { max_candidate_sequences: 2 } }",
            of_sequences,
        ),
        ("many", "model_transaction_policy { decoupled: true }", "'decoupled' transaction policy"),
    ] {
        let refused = check_cache(&plain, &[&plain, &member(name, more), &plain]);
        let text = format!(
            "Response Cache does not currently support model plain with {why} in its member \
             {name}. Please disable the response cache."
        );
        assert_eq!(refused, Err(text));
    }
    assert_eq!(check_cache(&plain, &[&plain, &plain]), Ok(()));
}

pub(super) fn config_of(name: &str, text: &str) -> ModelConfig {
    let text = format!("name: '{name}' backend: 'builtin' {text}");
    let completion = Completion {
        directory: name,
        files: &[],
        backends: &["builtin"],
        gpus: &[],
        unusable_gpus: &[],
        no_cuda_provider: None,
        compiled: false,
        signature: None,
        gguf: None,
        text: None,
        auto_complete: true,
        default_max_batch_size: 0,
    };
    Draft::from_text(&text, "config.pbtxt").unwrap().complete(&completion).unwrap()
}
