//! Resolves host policies to the processors that this process may use.

use std::collections::BTreeMap;
use std::fs;
use std::ops::RangeInclusive;
use std::path::Path;

use rustix::thread::{CpuSet, sched_getaffinity};

/// One `--host-policy`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HostPolicy {
    /// The policy's name.
    pub name: String,
    /// The processors that it allows.
    pub processors: Processors,
}

/// The processors of a policy.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Processors {
    /// The processors of a NUMA node.
    Node(u32),
    /// A list of processors.
    Cores(Vec<usize>),
}

/// Processors by the name of the policy.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct HostPolicies(BTreeMap<String, Vec<usize>>);

impl HostPolicies {
    /// Resolves the settings of the command line on this machine; `nodes` is the system's directory
    /// of NUMA nodes. Returns a warning for each policy without a processor that this process may
    /// use.
    pub fn new(given: &[HostPolicy], nodes: &Path) -> (Self, Vec<String>) {
        let mut all = BTreeMap::new();
        let mut warnings = Vec::new();
        let of_nodes =
            given.iter().filter(|policy| matches!(policy.processors, Processors::Node(_)));
        let of_cores =
            given.iter().filter(|policy| matches!(policy.processors, Processors::Cores(_)));
        // cpu-cores overrides numa-node; among equal settings, the last one counts.
        for HostPolicy { name, processors } in of_nodes.chain(of_cores) {
            let (listed, what) = match processors {
                Processors::Node(node) => (of_node(nodes, *node), format!("numa-node={node}")),
                Processors::Cores(cores) => (cores.clone(), "cpu-cores".to_owned()),
            };
            let usable = allowed(listed);
            if usable.is_empty() {
                warnings.push(format!(
                    "--host-policy={name},{what} has no effect: this process may use none of its \
                     processors"
                ));
                continue;
            }
            all.insert(name.clone(), usable);
        }
        (Self(all), warnings)
    }

    /// Returns the processors of this policy; none for an unknown policy.
    pub fn processors(&self, name: &str) -> &[usize] {
        self.0.get(name).map_or(&[], Vec::as_slice)
    }

    /// Returns whether a policy has this name.
    pub fn has(&self, name: &str) -> bool {
        self.0.contains_key(name)
    }
}

/// Removes processors that this process may not use.
pub(super) fn allowed(mut cpus: Vec<usize>) -> Vec<usize> {
    let Ok(allowed) = sched_getaffinity(None) else { return Vec::new() };
    cpus.retain(|cpu| *cpu < CpuSet::MAX_CPU && allowed.is_set(*cpu));
    cpus
}

fn of_node(nodes: &Path, node: u32) -> Vec<usize> {
    let list = fs::read_to_string(nodes.join(format!("node{node}/cpulist"))).unwrap_or_default();
    cores(list.trim()).unwrap_or_default()
}

/// Parses a list such as `0-3,8`; a process can be bound to 1024 processors.
pub fn cores(list: &str) -> Option<Vec<usize>> {
    let mut cores = Vec::new();
    for part in list.split(',') {
        let range = range(part)?;
        if range.is_empty() || *range.end() >= 1024 {
            return None;
        }
        cores.extend(range);
    }
    Some(cores)
}

/// Parses a part of a list of processors: `8` or `0-3`.
pub(super) fn range(part: &str) -> Option<RangeInclusive<usize>> {
    let (first, last) = part.split_once('-').unwrap_or((part, part));
    Some(first.parse().ok()?..=last.parse().ok()?)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn a_policy_resolves_to_its_cores_or_its_node() {
        let first = sched_getaffinity(None)
            .map(|set| (0..CpuSet::MAX_CPU).find(|cpu| set.is_set(*cpu)).unwrap())
            .unwrap();
        let nodes = tempfile::tempdir().unwrap();
        fs::create_dir_all(nodes.path().join("node0")).unwrap();
        fs::write(nodes.path().join("node0/cpulist"), format!("{first},1023\n")).unwrap();
        let policy = |name: &str, processors| HostPolicy { name: name.to_owned(), processors };
        let given = [
            policy("both", Processors::Cores(vec![first])),
            policy("both", Processors::Node(7)),
            policy("node", Processors::Node(0)),
            policy("none", Processors::Cores(vec![1023])),
        ];
        let (policies, warnings) = HostPolicies::new(&given, nodes.path());
        assert_eq!(
            (policies.processors("both"), policies.processors("node")),
            (&[first][..], &[first][..])
        );
        assert_eq!((policies.has("none"), policies.processors("other")), (false, &[][..]));
        assert_eq!(warnings.len(), 2, "{warnings:?}");
        assert!(
            warnings[1].starts_with("--host-policy=none,cpu-cores has no effect"),
            "{warnings:?}"
        );
    }
}
