//! What `CUDA_VISIBLE_DEVICES` leaves of the devices.

use std::collections::BTreeMap;

use crate::system::gpu::Found;

/// The devices that this process may use.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Shown {
    /// By number; with the MIG devices that alone may be used of it, if the variable names some.
    devices: BTreeMap<u32, Vec<String>>,
}

impl Shown {
    /// Those that `visible` names as CUDA reads it: numbers, and UUIDs of which the end may be missing; what stands behind a
    /// name that is no device's does not count. Without it, all.
    pub(super) fn new(found: &[Found], visible: Option<&str>) -> Self {
        let mut devices: BTreeMap<u32, Vec<String>> = BTreeMap::new();
        let Some(visible) = visible else {
            return Self { devices: (0..).zip(found).map(|(number, _)| (number, Vec::new())).collect() };
        };
        for name in visible.split(',').map(str::trim) {
            let Some((number, part)) = named(found, name) else { break };
            devices.entry(number).or_default().extend(part);
        }
        Self { devices }
    }

    /// The numbers, ascending.
    pub(super) fn numbers(&self) -> impl Iterator<Item = u32> {
        self.devices.keys().copied()
    }

    /// Whether a MIG device may be used.
    pub(super) fn shows_part(&self, number: u32, uuid: &str) -> bool {
        self.devices.get(&number).is_some_and(|parts| parts.is_empty() || parts.iter().any(|part| part == uuid))
    }
}

/// The number of the device that is called so, and the MIG device if it is one's name.
fn named(found: &[Found], name: &str) -> Option<(u32, Option<String>)> {
    if let Ok(number) = name.parse::<u32>() {
        return (usize::try_from(number).ok()? < found.len()).then_some((number, None));
    }
    let mut all = (0..).zip(found);
    if name.starts_with("MIG-") {
        return all.find_map(|(number, device)| {
            let part = device.mig.iter().find(|uuid| uuid.starts_with(name))?;
            Some((number, Some(part.clone())))
        });
    }
    let is_it = |uuid: &String| name.starts_with("GPU-") && uuid.starts_with(name);
    all.find(|(_, device)| device.uuid.as_ref().is_some_and(is_it)).map(|(number, _)| (number, None))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_variable_takes_devices_away() {
        let device = |uuid: &str, mig: &[&str]| Found {
            uuid: Some(uuid.to_owned()),
            mig: mig.iter().map(|uuid| (*uuid).to_owned()).collect(),
            trouble: None,
        };
        let found = [device("GPU-aa", &[]), device("GPU-bb", &["MIG-1", "MIG-2"]), device("GPU-bc", &[])];
        let numbers = |visible| Shown::new(&found, visible).numbers().collect::<Vec<_>>();
        for (visible, expected) in [
            (None, &[0, 1, 2][..]),
            (Some(""), &[]),
            (Some("2,0"), &[0, 2]),
            (Some(" 1 , GPU-a"), &[0, 1]),
            (Some("GPU-bc,7,0"), &[2]),
            (Some("-1,0"), &[]),
            (Some("MIG-2"), &[1]),
            (Some("NoDevFiles"), &[]),
        ] {
            assert_eq!(numbers(visible), expected, "{visible:?}");
        }
        let shown = Shown::new(&found, Some("MIG-2"));
        assert!(shown.shows_part(1, "MIG-2") && !shown.shows_part(1, "MIG-1") && !shown.shows_part(0, "x"));
        assert!(Shown::new(&found, None).shows_part(1, "MIG-1"));
    }
}
