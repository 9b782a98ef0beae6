//! Plans the changes that bring the running versions of a model to the wanted ones: a pure function
//! of both.

use std::collections::{BTreeMap, BTreeSet};
use std::hash::{DefaultHasher, Hash, Hasher};

use crate::model::ModelConfig;

/// A fingerprint of files or of a part of a configuration: equal for equal content. Not meaningful
/// outside this process.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Stamp(u64);

impl Stamp {
    /// Computes the fingerprint of a value.
    pub fn of(value: &impl Hash) -> Self {
        let mut hasher = DefaultHasher::new();
        value.hash(&mut hasher);
        Self(hasher.finish())
    }
}

/// A fingerprint of the configuration and files of a version that runs, or should run.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct VersionFingerprint {
    /// Its instance groups.
    pub instances: Stamp,
    /// The version policy, which does not affect what the version does.
    pub version_policy: Stamp,
    /// The rest of its configuration.
    pub config: Stamp,
    /// The files of the version and those next to the version directories.
    pub files: Stamp,
}

impl VersionFingerprint {
    /// Computes the fingerprint of a configuration and its files.
    pub fn new(config: &ModelConfig, files: Stamp) -> Self {
        Self::of_parts(&config.encode_parts(), files)
    }

    /// Computes the fingerprint from the result of [`ModelConfig::encode_parts`] and the files.
    pub fn of_parts(parts: &[Vec<u8>; 3], files: Stamp) -> Self {
        let [instances, version_policy, config] = parts.each_ref().map(Stamp::of);
        Self { instances, version_policy, config, files }
    }
}

/// The change of a version.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Change {
    /// No change.
    Keep,
    /// Keep it running and replace its configuration, of which only the version policy differs.
    Describe,
    /// Keep it running and start or stop instances.
    Resize,
    /// Load it.
    Load,
    /// Load it again; the running one serves until the new one is ready.
    Replace,
    /// Unload it.
    Unload,
}

/// Returns the change of each version that runs or is wanted. With `reload`, if no version would
/// change, all are loaded again: a client requested the reload by name.
pub fn changes(
    running: &BTreeMap<u64, VersionFingerprint>,
    wanted: &BTreeMap<u64, VersionFingerprint>,
    reload: bool,
) -> BTreeMap<u64, Change> {
    let versions: BTreeSet<u64> = running.keys().chain(wanted.keys()).copied().collect();
    let mut changes: BTreeMap<u64, Change> = versions
        .into_iter()
        .map(|version| (version, change(running.get(&version), wanted.get(&version))))
        .collect();
    if reload && changes.values().all(|change| *change == Change::Keep) {
        changes.values_mut().for_each(|change| *change = Change::Replace);
    }
    changes
}

fn change(running: Option<&VersionFingerprint>, wanted: Option<&VersionFingerprint>) -> Change {
    let (Some(running), Some(wanted)) = (running, wanted) else {
        return if wanted.is_some() { Change::Load } else { Change::Unload };
    };
    if (running.config, running.files) != (wanted.config, wanted.files) {
        return Change::Replace;
    }
    match (running.instances == wanted.instances, running.version_policy == wanted.version_policy) {
        (true, true) => Change::Keep,
        (true, false) => Change::Describe,
        (false, _) => Change::Resize,
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn made(instances: u8, policy: u8, config: u8, files: u8) -> VersionFingerprint {
        let [instances, version_policy, config, files] =
            [instances, policy, config, files].map(|n| Stamp::of(&n));
        VersionFingerprint { instances, version_policy, config, files }
    }

    #[test]
    fn each_part_has_its_change() {
        let runs = made(0, 0, 0, 0);
        for (wanted, expected) in [
            (Some(runs), Change::Keep),
            (Some(made(0, 1, 0, 0)), Change::Describe),
            (Some(made(1, 0, 0, 0)), Change::Resize),
            (Some(made(1, 1, 0, 0)), Change::Resize),
            (Some(made(0, 0, 1, 0)), Change::Replace),
            (Some(made(1, 1, 0, 1)), Change::Replace),
            (None, Change::Unload),
        ] {
            assert_eq!(change(Some(&runs), wanted.as_ref()), expected, "{wanted:?}");
        }
        assert_eq!(change(None, Some(&runs)), Change::Load);
    }

    #[test]
    fn reload_replaces_all_versions_only_if_none_changed() {
        let runs = BTreeMap::from([(1, made(0, 0, 0, 0)), (2, made(0, 0, 0, 0))]);
        assert!(changes(&runs, &runs, true).values().all(|change| *change == Change::Replace));
        let mut wanted = runs.clone();
        wanted.insert(3, made(0, 0, 0, 0));
        wanted.remove(&1);
        let expected = BTreeMap::from([(1, Change::Unload), (2, Change::Keep), (3, Change::Load)]);
        assert_eq!(changes(&runs, &wanted, true), expected);
    }

    fn versions() -> impl Strategy<Value = BTreeMap<u64, VersionFingerprint>> {
        let one = (0..2u8, 0..2u8, 0..2u8, 0..2u8).prop_map(|(i, p, c, f)| made(i, p, c, f));
        proptest::collection::btree_map(1..6u64, one, 0..5)
    }

    /// Returns the versions that run after a plan has been carried out.
    fn carried_out(
        running: &BTreeMap<u64, VersionFingerprint>,
        wanted: &BTreeMap<u64, VersionFingerprint>,
        plan: &BTreeMap<u64, Change>,
    ) -> BTreeMap<u64, VersionFingerprint> {
        let mut now = running.clone();
        for (version, change) in plan {
            match (change, wanted.get(version)) {
                (Change::Unload, _) => drop(now.remove(version)),
                (Change::Keep, _) | (_, None) => {}
                (_, Some(made)) => drop(now.insert(*version, *made)),
            }
        }
        now
    }

    proptest! {
        #[test]
        fn a_plan_leads_to_the_wanted_versions(running in versions(), wanted in versions(), reload: bool) {
            let plan = changes(&running, &wanted, reload);
            prop_assert_eq!(&carried_out(&running, &wanted, &plan), &wanted);
            // A second plan has nothing to do.
            prop_assert!(changes(&wanted, &wanted, false).values().all(|change| *change == Change::Keep));
            for (version, change) in plan {
                let runs = running.get(&version);
                let is_wanted = wanted.get(&version);
                prop_assert_eq!(change == Change::Load, runs.is_none());
                prop_assert_eq!(change == Change::Unload, is_wanted.is_none());
                // An unchanged version changes only in a reload of all.
                if runs == is_wanted && change != Change::Keep {
                    prop_assert!(reload && running == wanted && change == Change::Replace);
                }
            }
        }
    }
}
