//! Limits of the memories that models use: which models are unloaded so that another one fits, and
//! how much a model needs that was never loaded.

mod bytes;
mod sizes;
#[cfg(test)]
mod tests;

use std::time::Duration;

pub use bytes::{Memory, MemoryBytes};
pub use sizes::{Expectation, KnownSize, Sizes, Unmeasured, after_first_requests};

/// A loaded model that may be unloaded.
#[derive(Clone, Copy, Debug)]
pub struct Candidate<'n> {
    /// The name of the model.
    pub name: &'n str,
    /// The bytes that its unload frees.
    pub bytes: &'n MemoryBytes,
    /// How many uses a second are expected, see [`Uses`](crate::repository::Uses).
    pub uses_per_second: f64,
    /// The duration of its load.
    pub load: Duration,
}

impl Candidate<'_> {
    /// Returns the sum of the shares of the missing bytes of each memory that an unload frees; 0 if
    /// it frees none of them.
    fn share(&self, missing: &MemoryBytes) -> f64 {
        let lacking = missing.iter().filter(|(_, bytes)| *bytes > 0);
        lacking.map(|(memory, bytes)| self.bytes.of(memory).min(bytes) as f64 / bytes as f64).sum()
    }

    /// Returns the expected cost of an unload for the share of the missing bytes that it frees: the
    /// part of the time that further loads take.
    fn cost(&self, missing: &MemoryBytes) -> f64 {
        self.load.as_secs_f64().max(0.001) * self.uses_per_second / self.share(missing)
    }
}

/// Returns the models to unload so that at least the `missing` bytes of each memory become free,
/// those with the lowest expected cost for the freed share of them. Returns `None` if all of them
/// together free less.
pub fn to_unload<'n>(missing: &MemoryBytes, candidates: &[Candidate<'n>]) -> Option<Vec<&'n str>> {
    let mut left: Vec<&Candidate<'n>> = candidates.iter().collect();
    let mut chosen = Vec::new();
    let mut freed = MemoryBytes::default();
    let mut still_missing = missing.clone();
    while !still_missing.is_zero() {
        left.retain(|candidate| candidate.share(&still_missing) > 0.0);
        let cost = |candidate: &Candidate<'_>| candidate.cost(&still_missing);
        let (cheapest, _) = left
            .iter()
            .enumerate()
            .min_by(|(_, one), (_, other)| cost(one).total_cmp(&cost(other)))?;
        let candidate = left.swap_remove(cheapest);
        still_missing.subtract(candidate.bytes);
        freed.add(candidate.bytes);
        chosen.push(candidate);
    }
    // A large model that was chosen last can make earlier, smaller ones unnecessary. The most
    // expensive of them stay first.
    for position in (0..chosen.len()).rev() {
        let mut without = freed.clone();
        without.subtract(chosen[position].bytes);
        if without.covers(missing) {
            freed = without;
            chosen.remove(position);
        }
    }
    Some(chosen.into_iter().map(|candidate| candidate.name).collect())
}

/// Returns the memories of which all candidates together free less than is missing.
pub fn insufficient(missing: &MemoryBytes, candidates: &[Candidate<'_>]) -> Vec<Memory> {
    let mut freed = MemoryBytes::default();
    candidates.iter().for_each(|candidate| freed.add(candidate.bytes));
    missing
        .iter()
        .filter(|(memory, bytes)| freed.of(*memory) < *bytes)
        .map(|(memory, _)| memory)
        .collect()
}

/// Why a model does not fit into a memory, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shortage {
    /// The memory.
    pub memory: Memory,
    /// What the model needs there.
    pub needed: u64,
    /// The most that models may use.
    pub limit: u64,
    /// What other models use.
    pub used: u64,
    /// What could become free by unloading models.
    pub unused: u64,
}

/// Returns the text for a model that does not fit.
pub fn refusal(name: &str, shortage: Shortage) -> String {
    let Shortage { memory, needed, limit, used, unused } = shortage;
    let [needed, limit, used, unused] = [needed, limit, used, unused].map(megabytes);
    let (on_gpu, there, flag) = match memory {
        Memory::Main => (String::new(), "", "--model-memory-limit"),
        Memory::Gpu(number) => (format!(" on GPU {number}"), " there", "--model-gpu-memory-limit"),
    };
    format!(
        "not enough memory{on_gpu}: model '{name}' needs about {needed}{there}; others use {used} \
         of at most {limit} ({flag}), and unloading those that may be unloaded would free {unused}"
    )
}

fn megabytes(bytes: u64) -> String {
    format!("{:.1} MB", bytes as f64 / 1e6)
}

/// The share of time in which all processes waited for memory, in percent, from which models are
/// unloaded.
const PRESSURE: f64 = 10.0;

/// Returns whether the machine lacks memory, from the text of `/proc/pressure/memory` or
/// `memory.pressure` of a control group (`Documentation/accounting/psi.rst` of the kernel): whether
/// all processes waited for memory in a tenth of the last 10 seconds.
pub fn under_pressure(text: &str) -> bool {
    let full = text.lines().find_map(|line| line.strip_prefix("full "));
    let average =
        full.and_then(|full| full.split(' ').find_map(|field| field.strip_prefix("avg10=")));
    average
        .and_then(|average| average.parse::<f64>().ok())
        .is_some_and(|percent| percent >= PRESSURE)
}
