//! Tests of the policy with a simulated server: single decisions, random requests, and recorded
//! ones.

use std::collections::BTreeMap;

use proptest::prelude::*;

use super::*;
use crate::repository::{Stamp, Uses, VersionFingerprint};
use crate::timeline::Instant;

/// A second in nanoseconds.
const SECOND: u64 = 1_000_000_000;

/// Main memory only.
fn main_memory(bytes: u64) -> MemoryBytes {
    MemoryBytes::from_iter([(Memory::Main, bytes)])
}

/// Main memory and two GPUs.
fn three(main: u64, first: u64, second: u64) -> MemoryBytes {
    MemoryBytes::from_iter([
        (Memory::Main, main),
        (Memory::Gpu(0), first),
        (Memory::Gpu(1), second),
    ])
}

/// A candidate that owns its bytes.
#[derive(Clone)]
struct Model {
    name: String,
    bytes: MemoryBytes,
    uses_per_second: f64,
    load: Duration,
}

/// A model that is expected to be used once in `interval_s` seconds.
fn model(name: &str, bytes: MemoryBytes, interval_s: u64, load_ms: u64) -> Model {
    let uses_per_second = 1.0 / interval_s as f64;
    let load = Duration::from_millis(load_ms);
    Model { name: name.to_owned(), bytes, uses_per_second, load }
}

fn candidates(models: &[Model]) -> Vec<Candidate<'_>> {
    let all = models.iter();
    all.map(|Model { name, bytes, uses_per_second, load }| Candidate {
        name,
        bytes,
        uses_per_second: *uses_per_second,
        load: *load,
    })
    .collect()
}

#[test]
fn the_cheapest_models_for_each_byte_are_unloaded_and_no_more_than_needed() {
    let of =
        |name, bytes, interval_s, load_ms| model(name, main_memory(bytes), interval_s, load_ms);
    let all = [of("often", 100, 1, 100), of("slow", 100, 50, 1000), of("seldom", 100, 50, 100)];
    let unloaded = |bytes| to_unload(&main_memory(bytes), &candidates(&all));
    assert_eq!(unloaded(100), Some(vec!["seldom"]));
    assert_eq!(unloaded(101), Some(vec!["seldom", "slow"]));
    assert_eq!(unloaded(300), Some(vec!["seldom", "slow", "often"]));
    assert_eq!(unloaded(301), None);
    assert_eq!(unloaded(0), Some(vec![]));
    // The large one is enough without the small one, which is cheaper for each byte.
    let two = [of("small", 10, 500, 1), of("large", 500, 20, 1000)];
    assert_eq!(to_unload(&main_memory(400), &candidates(&two)), Some(vec!["large"]));
    // An ensemble whose members stay frees nothing.
    assert_eq!(to_unload(&main_memory(1), &candidates(&[of("ensemble", 0, 1000, 1)])), None);
}

#[test]
fn models_on_the_gpu_that_lacks_memory_make_room() {
    let all = [
        model("first", three(10, 100, 0), 5, 100),
        model("second", three(10, 0, 100), 500, 100),
        model("both", three(10, 50, 50), 50, 100),
        model("none", three(1000, 0, 0), 5000, 1),
    ];
    let unloaded = |missing: MemoryBytes| to_unload(&missing, &candidates(&all));
    assert_eq!(unloaded(three(0, 50, 0)), Some(vec!["both"]));
    assert_eq!(
        unloaded(three(0, 60, 0)),
        Some(vec!["first"]),
        "enough alone, though the other one is cheaper"
    );
    assert_eq!(unloaded(three(0, 0, 60)), Some(vec!["second"]));
    assert_eq!(unloaded(three(0, 150, 0)), Some(vec!["both", "first"]));
    assert_eq!(
        unloaded(three(0, 50, 50)),
        Some(vec!["both"]),
        "it is enough without the cheaper second one"
    );
    assert_eq!(unloaded(three(1000, 0, 100)), Some(vec!["none", "second"]));
    assert_eq!(unloaded(three(0, 151, 0)), None, "the others free nothing of that GPU");
    assert_eq!(insufficient(&three(0, 151, 150), &candidates(&all)), [Memory::Gpu(0)]);
    assert!(insufficient(&three(0, 150, 150), &candidates(&all)).is_empty());
}

/// Returns a size that was measured at the time 100 s.
fn known(bytes: MemoryBytes) -> KnownSize {
    let measured = Instant(100 * SECOND);
    let (instances, fingerprint) = Default::default();
    KnownSize { bytes, instances, load: Duration::from_secs(1), fingerprint, measured }
}

#[test]
fn a_measurement_counts_for_a_minute_while_the_version_does_not_change() {
    let mut sizes = Sizes::default();
    let unchanged = VersionFingerprint::default();
    let memories = [Memory::Main, Memory::Gpu(0)];
    let changed = VersionFingerprint { files: Stamp::of(&2), ..unchanged };
    sizes.loaded("m", 1, known(main_memory(5)), None);
    // The largest size since.
    sizes.grown("m", 1, &main_memory(7), &BTreeMap::new());
    let recent = |name: &str, fingerprint, second: u64, memories: &[Memory]| {
        let instances = memories.iter().map(|memory| (*memory, 1)).collect();
        sizes
            .recent(name, 1, fingerprint, Instant(second * SECOND), &instances)
            .map(|(bytes, _)| bytes)
    };
    assert_eq!(recent("m", unchanged, 159, &memories[..1]), Some(main_memory(7)));
    assert_eq!(recent("m", unchanged, 160, &memories[..1]), None);
    assert_eq!(recent("m", changed, 159, &memories[..1]), None);
    assert_eq!(recent("n", unchanged, 159, &memories[..1]), None);
    assert_eq!(
        recent("m", unchanged, 159, &memories),
        None,
        "it was not measured in the memory of the GPU"
    );
}

#[test]
fn sizes_are_expected_from_files_and_from_models_of_the_same_backend() {
    const MIB: u64 = 1 << 20;
    let mut sizes = Sizes::default();
    let on = |instances| BTreeMap::from([(Memory::Main, instances)]);
    let model = Unmeasured { backend: "onnxruntime", files: 1000, instances: on(2) };
    let expected = |sizes: &Sizes, name: &str, model: &Unmeasured<'_>| {
        sizes.expected(name, 1, model).within(&MemoryBytes::default()).of(Memory::Main)
    };
    assert_eq!(expected(&sizes, "m", &model), 2 * (1000 + 16 * MIB));
    assert_eq!(
        expected(&sizes, "m", &Unmeasured { backend: "python", ..model.clone() }),
        2 * (1000 + 32 * MIB)
    );
    let size = |bytes| known(main_memory(bytes));
    sizes.loaded("m", 1, size(2 * (1000 + 70)), Some(&model));
    assert_eq!((sizes.known("m", 1), sizes.known("m", 2)), (Some(&size(2140)), None));
    assert_eq!(expected(&sizes, "m", &model), 2140);
    assert_eq!(
        expected(&sizes, "n", &Unmeasured { files: 5, instances: on(1), ..model.clone() }),
        75
    );
    sizes.grown("m", 1, &main_memory(5000), &BTreeMap::new());
    sizes.grown("m", 1, &main_memory(4000), &BTreeMap::new());
    assert_eq!(sizes.known("m", 1), Some(&size(5000)));
    sizes.loaded("m", 1, size(3000), None);
    assert_eq!(sizes.known("m", 1), Some(&size(3000)));
    assert_eq!(
        expected(&sizes, "n", &Unmeasured { files: u64::MAX, instances: on(3), ..model }),
        u64::MAX
    );
}

#[test]
fn sizes_on_gpus_are_separate_from_those_in_main_memory() {
    const MIB: u64 = 1 << 20;
    let mut sizes = Sizes::default();
    let on = |gpu| BTreeMap::from([(Memory::Main, 1), (Memory::Gpu(gpu), 1)]);
    let of = |gpu| Unmeasured { backend: "onnxruntime", files: 100, instances: on(gpu) };
    let none = MemoryBytes::default();
    let expected = |sizes: &Sizes, name: &str, gpu| sizes.expected(name, 1, &of(gpu)).within(&none);
    let first =
        MemoryBytes::from_iter([(Memory::Main, 100 + 16 * MIB), (Memory::Gpu(0), 100 + 512 * MIB)]);
    assert_eq!(expected(&sizes, "m", 0), first);
    let bytes = MemoryBytes::from_iter([(Memory::Main, 130), (Memory::Gpu(0), 700)]);
    sizes.loaded("m", 1, known(bytes.clone()), Some(&of(0)));
    assert_eq!(expected(&sizes, "m", 0), bytes);
    // On another GPU, and for another model of this backend, the files and the overhead are
    // expected.
    let guessed = MemoryBytes::from_iter([(Memory::Main, 130), (Memory::Gpu(1), 700)]);
    assert_eq!(expected(&sizes, "m", 1), guessed);
    assert_eq!(expected(&sizes, "n", 1), guessed);
    assert!(sizes.is_known("m", 1, [Memory::Main, Memory::Gpu(0)].iter()));
    assert!(
        !sizes.is_known("m", 1, [Memory::Gpu(1)].iter())
            && !sizes.is_known("n", 1, [Memory::Main].iter())
    );
}

#[test]
fn only_a_guess_is_reduced_to_the_limit() {
    let mut sizes = Sizes::default();
    let on = |gpu| BTreeMap::from([(Memory::Gpu(gpu), 1)]);
    let of = |gpu| Unmeasured { backend: "b", files: 0, instances: on(gpu) };
    let bytes = MemoryBytes::from_iter([(Memory::Gpu(0), 700)]);
    sizes.loaded("m", 1, known(bytes.clone()), Some(&of(0)));
    let limits = three(0, 100, 100);
    assert_eq!(
        sizes.expected("m", 1, &of(0)).within(&limits),
        bytes,
        "it needs more than the limit"
    );
    let known = sizes.expected("m", 1, &of(0));
    let guessed = sizes.expected("n", 1, &of(0));
    assert_eq!(guessed.within(&limits).of(Memory::Gpu(0)), 100);
    let mut both = known.clone();
    both.add(&guessed);
    let whole = both.within(&limits);
    assert_eq!(whole.of(Memory::Gpu(0)), 100);
    assert_eq!([known, guessed].map(|one| one.part_of(&whole, &both).of(Memory::Gpu(0))), [50, 50]);
}

#[test]
fn pressure_is_the_time_in_which_all_processes_wait() {
    let text = |some: &str, full: &str| {
        format!(
            "some avg10={some} avg60=0.00 avg300=0.00 total=1\nfull avg10={full} avg60=50.00 \
             avg300=0.00 total=1\n"
        )
    };
    assert!(under_pressure(&text("20.00", "10.00")));
    assert!(!under_pressure(&text("90.00", "9.99")));
    assert!(!under_pressure(""));
    assert!(!under_pressure("full avg10=many"));
}

#[test]
fn a_refusal_names_all_numbers() {
    let shortage = Shortage {
        memory: Memory::Main,
        needed: 2_000_000,
        limit: 5_000_000,
        used: 4_500_000,
        unused: 0,
    };
    assert_eq!(
        refusal("m", shortage),
        "not enough memory: model 'm' needs about 2.0 MB; others use 4.5 MB of at most 5.0 MB \
         (--model-memory-limit), and unloading those that may be unloaded would free 0.0 MB"
    );
    assert_eq!(
        refusal("m", Shortage { memory: Memory::Gpu(1), ..shortage }),
        "not enough memory on GPU 1: model 'm' needs about 2.0 MB there; others use 4.5 MB of at \
         most 5.0 MB (--model-gpu-memory-limit), and unloading those that may be unloaded would \
         free 0.0 MB"
    );
}

/// A server that loads models for requests, one after the other.
struct Server<'m> {
    limits: MemoryBytes,
    /// The bytes and the duration of the load of each model.
    models: &'m [(MemoryBytes, Duration)],
    /// The number of requests to each loaded model.
    loaded: BTreeMap<usize, u64>,
    uses: Uses,
    now: Duration,
    loads: Vec<usize>,
    refused: usize,
}

impl<'m> Server<'m> {
    fn new(limits: MemoryBytes, models: &'m [(MemoryBytes, Duration)]) -> Self {
        let (loaded, uses, loads) = Default::default();
        Self { limits, models, loaded, uses, now: Duration::ZERO, loads, refused: 0 }
    }

    fn used(&self) -> MemoryBytes {
        let mut used = MemoryBytes::default();
        self.loaded.keys().for_each(|model| used.add(&self.models[*model].0));
        used
    }

    /// Returns the bytes that a model needs beyond the free ones, in the memories that it uses.
    fn missing(&self, model: usize) -> MemoryBytes {
        let used = self.used();
        let needed = &self.models[model].0;
        needed
            .iter()
            .filter(|(_, bytes)| *bytes > 0)
            .map(|(memory, bytes)| {
                (memory, (used.of(memory) + bytes).saturating_sub(self.limits.of(memory)))
            })
            .collect()
    }

    /// Sends a request to a model after `pause`, while the models `busy` execute requests.
    fn request(&mut self, model: usize, pause: Duration, busy: &[usize]) {
        self.now += pause;
        if !self.loaded.contains_key(&model) && !self.load(model, busy) {
            self.refused += 1;
            return;
        }
        *self.loaded.entry(model).or_default() += 1;
        self.look(busy);
        assert!(self.limits.covers(&self.used()), "{:?} of {:?}", self.used(), self.limits);
    }

    /// Looks at the numbers of requests.
    fn look(&mut self, busy: &[usize]) {
        let names: Vec<(String, usize)> =
            self.loaded.keys().map(|model| (model.to_string(), *model)).collect();
        let requests =
            |model: &usize| self.loaded.get(model).copied().filter(|_| !busy.contains(model));
        let models = names.iter().map(|(name, model)| (name.as_str(), requests(model)));
        self.uses.look(Instant::default() + self.now, Duration::MAX, models);
    }

    /// Makes room for a model; returns whether it could be loaded.
    fn load(&mut self, model: usize, busy: &[usize]) -> bool {
        let missing = self.missing(model);
        let idle = self.loaded.keys().filter(|other| !busy.contains(other));
        let facts = idle.map(|other| {
            let (bytes, load) = self.models[*other].clone();
            let name = other.to_string();
            let uses_per_second = self.uses.per_second(Instant::default() + self.now, &name);
            Model { name, bytes, uses_per_second, load }
        });
        let facts: Vec<Model> = facts.collect();
        let Some(gone) = to_unload(&missing, &candidates(&facts)) else {
            // It is refused only if all that may be unloaded is not enough.
            assert!(!insufficient(&missing, &candidates(&facts)).is_empty());
            return false;
        };
        let gone: Vec<usize> = gone.iter().map(|name| name.parse().unwrap_or_default()).collect();
        for model in &gone {
            assert!(!busy.contains(model), "{model} is in use");
            let useful = missing
                .iter()
                .any(|(memory, bytes)| bytes > 0 && self.models[*model].0.of(memory) > 0);
            assert!(useful, "{model} frees nothing of {missing:?}");
            self.loaded.remove(model);
        }
        self.loads.push(model);
        self.now += self.models[model].1;
        true
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 200, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn the_limit_holds_and_nothing_in_use_is_unloaded(
        sizes in prop::collection::vec((1u64..200, 1u64..5000), 2..40),
        limit in 200u64..1000,
        requests in prop::collection::vec((0usize..1000, 0u64..3000, prop::collection::vec(0usize..40, 0..3)), 1..300),
    ) {
        let models: Vec<_> =
            sizes.iter().map(|(bytes, load)| (main_memory(*bytes), Duration::from_millis(*load))).collect();
        let mut server = Server::new(main_memory(limit), &models);
        for (model, pause, busy) in requests {
            server.request(model % models.len(), Duration::from_millis(pause), &busy);
        }
    }

    #[test]
    fn the_limits_of_several_memories_hold_and_only_useful_models_are_unloaded(
        sizes in prop::collection::vec((1u64..200, 0u64..3, 0u64..200, 0u64..200, 1u64..5000), 2..40),
        limits in (200u64..1000, 200u64..1000, 200u64..1000),
        requests in prop::collection::vec((0usize..1000, 0u64..3000, prop::collection::vec(0usize..40, 0..3)), 1..300),
    ) {
        // A third of the models runs on each GPU alone, the others on both.
        let models: Vec<_> = sizes.iter().map(|(main, place, first, second, load)| {
            let bytes = three(*main, if *place == 1 { 0 } else { *first }, if *place == 0 { 0 } else { *second });
            (bytes, Duration::from_millis(*load))
        }).collect();
        let mut server = Server::new(three(limits.0, limits.1, limits.2), &models);
        for (model, pause, busy) in requests {
            server.request(model % models.len(), Duration::from_millis(pause), &busy);
        }
    }

    #[test]
    fn each_unloaded_model_is_needed_to_free_the_missing_bytes(
        models in prop::collection::vec((0u64..100, 0u64..100, 0u64..100, 1u64..1000, 1u64..1000), 0..12),
        missing in (0u64..300, 0u64..300, 0u64..300),
    ) {
        let models: Vec<_> = models.iter().enumerate().map(|(number, (main, first, second, unused, load))| {
            model(&number.to_string(), three(*main, *first, *second), *unused, *load)
        }).collect();
        let missing = three(missing.0, missing.1, missing.2);
        let sum = |names: &[&str]| {
            let mut sum = MemoryBytes::default();
            models.iter().filter(|model| names.contains(&model.name.as_str())).for_each(|model| sum.add(&model.bytes));
            sum
        };
        match to_unload(&missing, &candidates(&models)) {
            Some(chosen) => {
                prop_assert!(sum(&chosen).covers(&missing));
                for without in 0..chosen.len() {
                    let mut others = chosen.clone();
                    others.remove(without);
                    prop_assert!(!sum(&others).covers(&missing), "{} is not needed", chosen[without]);
                }
            }
            None => prop_assert!(!insufficient(&missing, &candidates(&models)).is_empty()),
        }
    }

    #[test]
    fn two_alternating_models_that_fit_are_loaded_once(
        idle in prop::collection::vec((10u64..100, 1u64..5000), 1..20),
        (first, second) in (1u64..250, 1u64..250),
        load in 500u64..5000,
    ) {
        let models: Vec<_> = [(first, load), (second, load)].into_iter().chain(idle).map(|(bytes, load)| (main_memory(bytes), Duration::from_millis(load))).collect();
        let mut server = Server::new(main_memory(500), &models);
        (2..models.len()).for_each(|model| server.request(model, Duration::from_secs(1), &[]));
        // Models without requests become ever cheaper to unload, so only the first rounds may
        // reload one of the two, even if the others load 10 times as slowly, in 25 times fewer
        // bytes.
        (0..400).for_each(|round| server.request(round % 2, Duration::from_secs(1), &[]));
        server.loads.clear();
        (0..100).for_each(|round| server.request(round % 2, Duration::from_secs(1), &[]));
        prop_assert!(server.loads.is_empty(), "{:?}", server.loads);
    }
}

#[test]
fn less_time_is_spent_loading_than_with_the_least_recently_used() {
    // Small models that load quickly and large ones that load slowly, with equally many requests,
    // by a fixed generator (SplitMix64: Steele, Lea and Flood, 2014).
    let of = |(bytes, ms)| (main_memory(bytes), Duration::from_millis(ms));
    let models: Vec<_> =
        (0..40).map(|model| of(if model % 2 == 0 { (100, 50) } else { (20, 2000) })).collect();
    let mut state = 1u64;
    let mut next = || {
        state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mixed = (state ^ (state >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    };
    let requests: Vec<usize> = (0..5000).map(|_| (next() % 40) as usize).collect();
    let spent = |loads: &[usize]| loads.iter().map(|model| models[*model].1).sum::<Duration>();
    let mut server = Server::new(main_memory(900), &models);
    requests.iter().for_each(|model| server.request(*model, Duration::from_millis(100), &[]));
    let ours = spent(&server.loads);
    let least_recently_used = spent(&least_recently_used(&requests, |loaded: &[usize]| {
        loaded.iter().map(|model| models[*model].0.of(Memory::Main)).sum::<u64>() <= 900
    }));
    assert!(ours * 2 < least_recently_used, "{ours:?}, {least_recently_used:?}");
}

/// Returns the loads if the least recently used model is unloaded until the others fit.
fn least_recently_used(requests: &[usize], fits: impl Fn(&[usize]) -> bool) -> Vec<usize> {
    let (mut order, mut loads): (Vec<usize>, Vec<usize>) = Default::default();
    for model in requests {
        if !order.contains(model) {
            loads.push(*model);
        }
        order.retain(|other| other != model);
        order.push(*model);
        while !fits(&order) {
            order.remove(0);
        }
    }
    loads
}

/// Returns the fewest possible loads with room for `most` models of equal sizes: the model whose
/// next request is the latest is unloaded (Belady, "A study of replacement algorithms for a
/// virtual-storage computer", 1966).
fn fewest_loads(requests: &[usize], most: usize) -> usize {
    let mut next_requests = vec![usize::MAX; requests.len()];
    let mut next_of = BTreeMap::new();
    for (position, model) in requests.iter().enumerate().rev() {
        next_requests[position] = next_of.insert(*model, position).unwrap_or(usize::MAX);
    }
    let mut loaded = BTreeMap::new();
    let mut loads = 0;
    for (model, next) in requests.iter().zip(next_requests) {
        if !loaded.contains_key(model) {
            loads += 1;
            if loaded.len() == most {
                let latest = loaded.iter().max_by_key(|(_, next)| **next).map(|(model, _)| *model);
                latest.and_then(|model: usize| loaded.remove(&model));
            }
        }
        loaded.insert(*model, next);
    }
    loads
}

/// Requests of a measured load, in order: the time since the start, and the model. The head of the
/// file says how it was recorded.
fn recorded() -> Vec<(Duration, usize)> {
    let lines =
        include_str!("../testdata/zipf_requests.txt").lines().filter(|line| !line.starts_with('#'));
    lines
        .filter_map(|line| {
            let (ms, model) = line.split_once(' ')?;
            Some((Duration::from_millis(ms.parse().ok()?), model.parse().ok()?))
        })
        .collect()
}

/// How long a model executes a recorded request.
const EXECUTION: Duration = Duration::from_millis(5);

/// Sends the recorded requests to a server.
fn replay(server: &mut Server<'_>) {
    let requests = recorded();
    for (position, (time, model)) in requests.iter().enumerate() {
        let earlier = requests[..position].iter().rev();
        let busy: Vec<usize> = earlier
            .take_while(|(other, _)| *time - *other < EXECUTION)
            .map(|(_, model)| *model)
            .collect();
        server.now = server.now.max(*time);
        server.request(*model, Duration::ZERO, &busy);
    }
}

#[test]
fn recorded_requests_need_fewer_loads_than_with_the_least_recently_used_and_few_more_than_the_optimum()
 {
    let requests: Vec<usize> = recorded().into_iter().map(|(_, model)| model).collect();
    assert_eq!(requests.len(), 2040);
    let models = vec![(main_memory(10), Duration::ZERO); 1000];
    for (most, of_recent, of_fewest) in [(20, 85, 122), (100, 95, 142)] {
        let mut server = Server::new(main_memory(10 * most as u64), &models);
        replay(&mut server);
        assert_eq!(server.refused, 0);
        let ours = server.loads.len();
        let recent = least_recently_used(&requests, |loaded| loaded.len() <= most).len();
        let fewest = fewest_loads(&requests, most);
        assert!(
            ours < of_recent * recent / 100,
            "room for {most}: {ours} loads, {recent} with the least recently used"
        );
        assert!(
            ours < of_fewest * fewest / 100,
            "room for {most}: {ours} loads, at least {fewest}"
        );
    }
}

#[test]
fn the_limits_hold_for_recorded_requests_to_models_on_two_gpus() {
    let models: Vec<_> = (0..1000)
        .map(|model| {
            let size = 10 + 7 * (model % 5);
            let (first, second) = [(size, 0), (0, size), (size, size)][(model % 3) as usize];
            (three(5 + model % 3, first, second), Duration::from_millis(1 + model % 7))
        })
        .collect();
    let mut server = Server::new(three(200, 400, 400), &models);
    replay(&mut server);
    assert_eq!(server.refused, 0);
    assert!(server.loads.len() > 1000, "{} loads", server.loads.len());
}
