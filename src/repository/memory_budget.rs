//! A limit of the memory that models use: which models are unloaded so that another one fits, and how much a model needs that was
//! never loaded.

use std::collections::BTreeMap;
use std::time::Duration;

/// A loaded model that may be unloaded.
#[derive(Clone, Copy, Debug)]
pub struct Candidate<'n> {
    /// The name of the model.
    pub name: &'n str,
    /// The bytes that its unload frees.
    pub bytes: u64,
    /// The time since its last request.
    pub unused: Duration,
    /// The duration of its load.
    pub load: Duration,
}

impl Candidate<'_> {
    /// Returns the expected cost of an unload for each of the `missing` bytes that it frees: the time of the next load, divided by
    /// the time until it is needed. A model that has had no requests for some time is expected to have none for as long again.
    fn cost(&self, missing: u64) -> f64 {
        let seconds = |duration: Duration| duration.as_secs_f64().max(0.001);
        seconds(self.load) / (seconds(self.unused) * self.bytes.min(missing).max(1) as f64)
    }
}

/// Returns the models to unload so that at least `bytes` bytes become free, those with the lowest expected cost for each byte of them.
/// Returns `None` if all of them together free less.
pub fn to_unload<'n>(bytes: u64, candidates: &[Candidate<'n>]) -> Option<Vec<&'n str>> {
    let mut left: Vec<&Candidate<'n>> = candidates.iter().filter(|candidate| candidate.bytes > 0).collect();
    let (mut chosen, mut freed) = (Vec::new(), 0u64);
    while freed < bytes {
        let cost = |candidate: &Candidate<'_>| candidate.cost(bytes - freed);
        let (cheapest, _) = left.iter().enumerate().min_by(|(_, one), (_, other)| cost(one).total_cmp(&cost(other)))?;
        let candidate = left.swap_remove(cheapest);
        freed += candidate.bytes;
        chosen.push(candidate);
    }
    // A large model that was chosen last can make earlier, smaller ones unnecessary. The most expensive of them stay first.
    for position in (0..chosen.len()).rev() {
        let without = freed - chosen[position].bytes;
        if without >= bytes {
            freed = without;
            chosen.remove(position);
        }
    }
    Some(chosen.into_iter().map(|candidate| candidate.name).collect())
}

/// What is known of a model version from its last load.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KnownSize {
    /// The bytes that it used.
    pub bytes: u64,
    /// The duration of the load.
    pub load: Duration,
}

/// The files and the program of a model version that was never loaded.
#[derive(Clone, Copy, Debug)]
pub struct Unmeasured<'b> {
    /// The backend.
    pub backend: &'b str,
    /// The bytes of its files.
    pub files: u64,
    /// The number of its instances.
    pub instances: u64,
}

/// The sizes of models that were loaded before.
#[derive(Debug, Default)]
pub struct Sizes {
    versions: BTreeMap<(String, u64), KnownSize>,
    /// The largest number of bytes that an instance used beyond the files of its model, by backend.
    overheads: BTreeMap<String, u64>,
}

/// The bytes that an instance is expected to use beyond the files of its model, before one of its backend was measured.
const OVERHEAD: u64 = 16 << 20;

/// The same for Python models, which import libraries.
const PYTHON_OVERHEAD: u64 = 32 << 20;

impl Sizes {
    /// Returns what is known of a version.
    pub fn known(&self, name: &str, version: u64) -> Option<KnownSize> {
        self.versions.get(&(name.to_owned(), version)).copied()
    }

    /// Returns the bytes that a version that was never loaded is expected to use: each instance its files and the largest
    /// overhead that was measured with this backend.
    pub fn expected(&self, model: Unmeasured<'_>) -> u64 {
        let unknown = if model.backend == "python" { PYTHON_OVERHEAD } else { OVERHEAD };
        let overhead = self.overheads.get(model.backend).copied().unwrap_or(unknown);
        model.files.saturating_add(overhead).saturating_mul(model.instances)
    }

    /// Records the measured size of a version after its load. `model` is given if its size was only expected.
    pub fn loaded(&mut self, name: &str, version: u64, size: KnownSize, model: Option<Unmeasured<'_>>) {
        self.versions.insert((name.to_owned(), version), size);
        let Some(model) = model else { return };
        let overhead = (size.bytes / model.instances.max(1)).saturating_sub(model.files);
        let known = self.overheads.entry(model.backend.to_owned()).or_default();
        *known = overhead.max(*known);
    }

    /// Records the size of a version that has served since; a larger one is expected of its next load.
    pub fn grown(&mut self, name: &str, version: u64, bytes: u64) {
        if let Some(known) = self.versions.get_mut(&(name.to_owned(), version)) {
            known.bytes = known.bytes.max(bytes);
        }
    }
}

/// Returns the text for a model that does not fit: `needed` bytes of `limit`, of which `used` are in use and `unused` could become
/// free by unloading models.
pub fn refusal(name: &str, (needed, limit): (u64, u64), (used, unused): (u64, u64)) -> String {
    let [needed, limit, used, unused] = [needed, limit, used, unused].map(megabytes);
    format!(
        "not enough memory: model '{name}' needs about {needed}; models use {used} of at most {limit} (--model-memory-limit), \
         and unloading those that may be unloaded would free {unused}"
    )
}

fn megabytes(bytes: u64) -> String {
    format!("{:.1} MB", bytes as f64 / 1e6)
}

/// The share of time in which all processes waited for memory, in percent, from which models are unloaded.
const PRESSURE: f64 = 10.0;

/// Returns whether the machine lacks memory, from the text of `/proc/pressure/memory` or `memory.pressure` of a control group
/// (`Documentation/accounting/psi.rst` of the kernel): whether all processes waited for memory in a tenth of the last 10 seconds.
pub fn under_pressure(text: &str) -> bool {
    let full = text.lines().find_map(|line| line.strip_prefix("full "));
    let average = full.and_then(|full| full.split(' ').find_map(|field| field.strip_prefix("avg10=")));
    average.and_then(|average| average.parse::<f64>().ok()).is_some_and(|percent| percent >= PRESSURE)
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use proptest::prelude::*;

    use super::*;

    fn candidate(name: &str, bytes: u64, unused_s: u64, load_ms: u64) -> Candidate<'_> {
        Candidate { name, bytes, unused: Duration::from_secs(unused_s), load: Duration::from_millis(load_ms) }
    }

    #[test]
    fn the_cheapest_models_for_each_byte_are_unloaded_and_no_more_than_needed() {
        let old = candidate("old", 100, 50, 100);
        let slow = candidate("slow", 100, 50, 1000);
        let new = candidate("new", 100, 1, 100);
        let all = [new, slow, old];
        assert_eq!(to_unload(100, &all), Some(vec!["old"]));
        assert_eq!(to_unload(101, &all), Some(vec!["old", "slow"]));
        assert_eq!(to_unload(300, &all), Some(vec!["old", "slow", "new"]));
        assert_eq!(to_unload(301, &all), None);
        assert_eq!(to_unload(0, &all), Some(vec![]));
        // The large one is enough without the small one, which is cheaper for each byte.
        let (small, large) = (candidate("small", 10, 500, 1), candidate("large", 500, 20, 1000));
        assert_eq!(to_unload(400, &[small, large]), Some(vec!["large"]));
        // An ensemble whose members stay frees nothing.
        assert_eq!(to_unload(1, &[candidate("ensemble", 0, 1000, 1)]), None);
    }

    #[test]
    fn sizes_are_expected_from_files_and_from_models_of_the_same_backend() {
        let mut sizes = Sizes::default();
        let model = Unmeasured { backend: "onnxruntime", files: 1000, instances: 2 };
        assert_eq!(sizes.expected(model), 2 * (1000 + OVERHEAD));
        assert_eq!(sizes.expected(Unmeasured { backend: "python", ..model }), 2 * (1000 + PYTHON_OVERHEAD));
        let size = |bytes| KnownSize { bytes, load: Duration::from_secs(1) };
        sizes.loaded("m", 1, size(2 * (1000 + 70)), Some(model));
        assert_eq!((sizes.known("m", 1), sizes.known("m", 2)), (Some(size(2140)), None));
        assert_eq!(sizes.expected(Unmeasured { files: 5, instances: 1, ..model }), 75);
        sizes.grown("m", 1, 5000);
        sizes.grown("m", 1, 4000);
        assert_eq!(sizes.known("m", 1), Some(size(5000)));
        sizes.loaded("m", 1, size(3000), None);
        assert_eq!(sizes.known("m", 1), Some(size(3000)));
        assert_eq!(sizes.expected(Unmeasured { backend: "onnxruntime", files: u64::MAX, instances: 3 }), u64::MAX);
    }

    #[test]
    fn pressure_is_the_time_in_which_all_processes_wait() {
        let text = |some: &str, full: &str| {
            format!(
                "some avg10={some} avg60=0.00 avg300=0.00 total=1\nfull avg10={full} avg60=50.00 avg300=0.00 total=1\n"
            )
        };
        assert!(under_pressure(&text("20.00", "10.00")));
        assert!(!under_pressure(&text("90.00", "9.99")));
        assert!(!under_pressure(""));
        assert!(!under_pressure("full avg10=many"));
    }

    #[test]
    fn a_refusal_names_all_numbers() {
        let text = refusal("m", (2_000_000, 5_000_000), (4_500_000, 0));
        assert_eq!(
            text,
            "not enough memory: model 'm' needs about 2.0 MB; models use 4.5 MB of at most 5.0 MB (--model-memory-limit), and \
             unloading those that may be unloaded would free 0.0 MB"
        );
    }

    /// A server that loads models for requests, one after the other.
    struct Server<'m> {
        limit: u64,
        /// The bytes and the duration of the load of each model.
        models: &'m [(u64, Duration)],
        /// The time of the last request to each loaded model.
        loaded: BTreeMap<usize, Duration>,
        now: Duration,
        loads: Vec<usize>,
        refused: usize,
    }

    impl<'m> Server<'m> {
        fn new(limit: u64, models: &'m [(u64, Duration)]) -> Self {
            let (loaded, loads) = Default::default();
            Self { limit, models, loaded, now: Duration::ZERO, loads, refused: 0 }
        }

        fn used(&self) -> u64 {
            self.loaded.keys().map(|model| self.models[*model].0).sum()
        }

        /// Sends a request to a model after `pause`, while the models `busy` execute requests.
        fn request(&mut self, model: usize, pause: Duration, busy: &[usize]) {
            self.now += pause;
            if !self.loaded.contains_key(&model) {
                let bytes = self.models[model].0;
                let missing = (self.used() + bytes).saturating_sub(self.limit);
                let idle: Vec<usize> = self.loaded.keys().copied().filter(|other| !busy.contains(other)).collect();
                let names: Vec<String> = idle.iter().map(usize::to_string).collect();
                let of = |(other, name): (&usize, &'_ String)| {
                    let (bytes, load) = self.models[*other];
                    (name.clone(), bytes, self.now - self.loaded[other], load)
                };
                let facts: Vec<_> = idle.iter().zip(&names).map(of).collect();
                let candidates: Vec<Candidate<'_>> = facts
                    .iter()
                    .map(|(name, bytes, unused, load)| Candidate { name, bytes: *bytes, unused: *unused, load: *load })
                    .collect();
                let Some(gone) = to_unload(missing, &candidates) else {
                    // It is refused only if all that may be unloaded is not enough.
                    assert!(candidates.iter().map(|candidate| candidate.bytes).sum::<u64>() < missing);
                    self.refused += 1;
                    return;
                };
                for name in gone {
                    let gone: usize = name.parse().unwrap_or_default();
                    assert!(!busy.contains(&gone), "{gone} is in use");
                    self.loaded.remove(&gone);
                }
                self.now += self.models[model].1;
                self.loads.push(model);
            }
            self.loaded.insert(model, self.now);
            assert!(self.used() <= self.limit, "{} of {} bytes", self.used(), self.limit);
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
            let models: Vec<_> = sizes.iter().map(|(bytes, load)| (*bytes, Duration::from_millis(*load))).collect();
            let mut server = Server::new(limit, &models);
            for (model, pause, busy) in requests {
                server.request(model % models.len(), Duration::from_millis(pause), &busy);
            }
        }

        #[test]
        fn two_alternating_models_that_fit_are_loaded_once(
            idle in prop::collection::vec((10u64..100, 1u64..5000), 1..20),
            (first, second) in (1u64..250, 1u64..250),
            load in 500u64..5000,
        ) {
            let of = |(bytes, load): (u64, u64)| (bytes, Duration::from_millis(load));
            let models: Vec<_> = [(first, load), (second, load)].into_iter().chain(idle).map(of).collect();
            let mut server = Server::new(500, &models);
            (2..models.len()).for_each(|model| server.request(model, Duration::from_secs(1), &[]));
            // Models without requests become ever cheaper to unload, so only the first rounds may reload one of the two. A model
            // that loads 10 times as slowly, in 25 times fewer bytes, is the cheapest after 10 * 25 rounds of a second.
            (0..400).for_each(|round| server.request(round % 2, Duration::from_secs(1), &[]));
            server.loads.clear();
            (0..100).for_each(|round| server.request(round % 2, Duration::from_secs(1), &[]));
            prop_assert!(server.loads.is_empty(), "{:?}", server.loads);
        }
    }

    #[test]
    fn less_time_is_spent_loading_than_with_the_least_recently_used() {
        // Small models that load quickly and large ones that load slowly, with equally many requests, by a fixed generator
        // (SplitMix64: Steele, Lea and Flood, 2014).
        let models: Vec<(u64, Duration)> = (0..40)
            .map(|model| if model % 2 == 0 { (100, Duration::from_millis(50)) } else { (20, Duration::from_secs(2)) })
            .collect();
        let mut state = 1u64;
        let mut next = || {
            state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
            let mixed = (state ^ (state >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
            let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
            mixed ^ (mixed >> 31)
        };
        let requests: Vec<usize> = (0..5000).map(|_| (next() % 40) as usize).collect();
        let spent = |loads: &[usize]| loads.iter().map(|model| models[*model].1).sum::<Duration>();
        let mut server = Server::new(900, &models);
        requests.iter().for_each(|model| server.request(*model, Duration::from_millis(100), &[]));
        let (mut order, mut loads): (Vec<usize>, Vec<usize>) = Default::default();
        for model in &requests {
            if !order.contains(model) {
                loads.push(*model);
            }
            order.retain(|other| other != model);
            order.push(*model);
            while order.iter().map(|model| models[*model].0).sum::<u64>() > 900 {
                order.remove(0);
            }
        }
        let (ours, least_recently_used) = (spent(&server.loads), spent(&loads));
        assert!(ours * 2 < least_recently_used, "{ours:?}, {least_recently_used:?}");
    }
}
