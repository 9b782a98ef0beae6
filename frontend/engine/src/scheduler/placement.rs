//! The instances of a model version, from its instance groups.

use std::collections::BTreeMap;

use pharos::model::{InstanceGroup, InstanceKind, ModelConfig};
use pharos::scheduler::rate_limiter::{Demand, Need};

/// The device of the resources of instances without a GPU, as in Triton.
const DEVICE_OF_CPUS: u32 = 0;

/// One instance to start.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Placement {
    /// `<group>_<n>`, with the version unless it is 1, so that log lines are unambiguous.
    pub(crate) name: String,
    /// Whether it is loaded but kept out of scheduling.
    pub(crate) passive: bool,
    /// The resources that it needs of the rate limiter.
    pub(crate) demand: Demand,
    /// The GPU that it runs on, if any.
    pub(crate) device: Option<OnGpu>,
    /// The name of its host policy.
    pub(crate) policy: String,
}

/// A place on a GPU.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct OnGpu {
    /// The GPU's number.
    pub(crate) number: u32,
    /// The index of the instance among the instances of its group on this GPU, from 0. If the GPU
    /// is divided into MIG devices, they are assigned in this order.
    pub(crate) turn: u32,
    /// The group's name, for messages.
    pub(crate) group: String,
}

impl Placement {
    /// Returns whether an instance of one placement can serve the other. Names do not matter, as in
    /// Triton.
    pub(crate) fn is_like(&self, other: &Self) -> bool {
        fn of(placement: &Placement) -> (bool, &Demand, Option<u32>, &str) {
            let Placement { passive, demand, device, policy, .. } = placement;
            (*passive, demand, device.as_ref().map(|device| device.number), policy)
        }
        of(self) == of(other)
    }
}

/// Returns the instances of all groups in order. Groups of the same name continue the numbering:
/// `g_0`, `g_1` and so on. As in Triton, a group first has one instance on each of its GPUs, then
/// the second ones, so that a higher count keeps the existing placements.
pub(crate) fn of(config: &ModelConfig, version: u64) -> Vec<Placement> {
    let suffix = if version == 1 { String::new() } else { format!("_v{version}") };
    let mut numbers = BTreeMap::<&str, u32>::new();
    let mut all = Vec::new();
    for group in &config.instance_groups {
        let number = numbers.entry(&group.name).or_default();
        for turn in 0..group.count {
            for device in devices(group) {
                let name = format!("{}_{number}{suffix}", group.name);
                let demand = demand(group, device);
                let policy = policy(group, device);
                let on_gpu = (group.kind == InstanceKind::Gpu).then(|| group.name.clone());
                let device = on_gpu.map(|group| OnGpu { number: device, turn, group });
                all.push(Placement { name, passive: group.passive, demand, device, policy });
                *number += 1;
            }
        }
    }
    all
}

/// Returns the devices on each of which a group has its count of instances.
fn devices(group: &InstanceGroup) -> Vec<u32> {
    match group.kind {
        InstanceKind::Gpu => group.gpus.clone(),
        InstanceKind::Cpu | InstanceKind::Model => vec![DEVICE_OF_CPUS],
    }
}

/// Returns the host policy of an instance, with Triton's default names.
fn policy(group: &InstanceGroup, device: u32) -> String {
    match group.kind {
        _ if !group.host_policy.is_empty() => group.host_policy.clone(),
        InstanceKind::Gpu => format!("gpu_{device}"),
        InstanceKind::Cpu => "cpu".to_owned(),
        InstanceKind::Model => "model".to_owned(),
    }
}

fn demand(group: &InstanceGroup, device: u32) -> Demand {
    let needs = group.resources.iter().map(|resource| Need {
        name: resource.name.clone(),
        device: (!resource.global).then_some(device),
        count: resource.count,
    });
    Demand { resources: needs.collect(), priority: group.priority }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use pharos::model::{Completion, Draft};

    use super::*;

    const MODEL: &str = "backend: 'builtin' input { name: 'a' data_type: TYPE_FP32 dims: 1 }
        output { name: 'b' data_type: TYPE_FP32 dims: 1 }";

    fn placements(groups: &str, version: u64) -> Vec<Placement> {
        let draft = Draft::from_text(&format!("{MODEL} {groups}"), "config.pbtxt").unwrap();
        let completion = Completion { directory: "m", gpus: &[0, 3], ..Completion::default() };
        of(&draft.complete(&completion).unwrap(), version)
    }

    fn names(groups: &str, version: u64) -> Vec<String> {
        placements(groups, version).into_iter().map(|placement| placement.name).collect()
    }

    #[test]
    fn instances_are_named_by_group_and_number() {
        assert_eq!(names("", 1), ["m_0"]);
        assert_eq!(names("", 3), ["m_0_v3"]);
        assert_eq!(
            names("instance_group [ { count: 2 }, { name: 'x' kind: KIND_MODEL } ]", 1),
            ["m_0_0", "m_0_1", "x_0"]
        );
        assert_eq!(
            names("instance_group [ { name: 'x' count: 2 }, { name: 'x' } ]", 1),
            ["x_0", "x_1", "x_2"]
        );
        assert_eq!(
            names("instance_group { name: 'g' kind: KIND_GPU count: 2 }", 1),
            ["g_0", "g_1", "g_2", "g_3"]
        );
    }

    #[test]
    fn resources_are_those_of_the_device_or_global() {
        let limiter = "rate_limiter { resources [ { name: 'R' count: 2 }, { name: 'S' global: \
                       true count: 1 } ] priority: 4 }";
        let demand = |group: &str, instance: usize| {
            let demand = placements(&format!("instance_group {{ {group} {limiter} }}"), 1)
                .swap_remove(instance)
                .demand;
            let needs =
                demand.resources.into_iter().map(|need| (need.name, need.device, need.count));
            (needs.collect::<Vec<_>>(), demand.priority)
        };
        let needs = |device| vec![("R".to_owned(), Some(device), 2), ("S".to_owned(), None, 1)];
        assert_eq!(demand("kind: KIND_CPU", 0), (needs(0), 4));
        assert_eq!(demand("kind: KIND_MODEL", 0), (needs(0), 4));
        assert_eq!(demand("kind: KIND_GPU count: 2", 1), (needs(3), 4));
        assert_eq!(demand("kind: KIND_GPU count: 2", 2), (needs(0), 4));
    }

    #[test]
    fn a_group_has_its_count_on_each_gpu() {
        let devices = |groups: &str| {
            let device = |placement: Placement| {
                placement.device.map(|device| (device.number, device.turn, device.group))
            };
            placements(groups, 1).into_iter().map(device).collect::<Vec<_>>()
        };
        let on = |number, turn| Some((number, turn, "g".to_owned()));
        assert_eq!(devices("instance_group { kind: KIND_CPU }"), [None]);
        let group = |more: &str| format!("instance_group {{ name: 'g' kind: KIND_GPU {more} }}");
        assert_eq!(devices(&group("")), [on(0, 0), on(3, 0)]);
        assert_eq!(devices(&group("count: 2")), [on(0, 0), on(3, 0), on(0, 1), on(3, 1)]);
        assert_eq!(devices(&group("gpus: [3] count: 2")), [on(3, 0), on(3, 1)]);
    }

    #[test]
    fn instances_are_alike_if_only_their_names_and_turns_differ() {
        let one =
            |group: &str| placements(&format!("instance_group {{ {group} }}"), 1).swap_remove(0);
        let usual = one("name: 'g' kind: KIND_CPU");
        for (group, expected) in [
            ("name: 'other' kind: KIND_CPU", true),
            ("kind: KIND_CPU passive: true", false),
            ("kind: KIND_CPU rate_limiter { priority: 2 }", false),
            ("kind: KIND_GPU", false),
            ("kind: KIND_CPU host_policy: 'p'", false),
        ] {
            assert_eq!(usual.is_like(&one(group)), expected, "{group}");
        }
    }

    #[test]
    fn passive_groups_have_passive_instances() {
        let passive =
            |groups| placements(groups, 1).into_iter().map(|one| one.passive).collect::<Vec<_>>();
        assert_eq!(
            passive("instance_group [ { count: 1 }, { passive: true count: 2 } ]"),
            [false, true, true]
        );
    }
}
