//! The devices that `CUDA_VISIBLE_DEVICES` leaves visible, and their numbers.

use crate::system::gpu::Found;

/// The devices that this process may use.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct VisibleDevices {
    /// By number: the number on the bus, and the MIG devices to which the variable restricts the
    /// device, if any.
    devices: Vec<(u32, Vec<String>)>,
}

impl VisibleDevices {
    /// Interprets `visible` as CUDA does: device numbers, or prefixes of UUIDs, all of the kind of
    /// the first name. Names after an unknown one or one of another kind are ignored; a repeated
    /// name hides all devices. `None` shows all.
    pub(super) fn new(found: &[Found], visible: Option<&str>) -> Self {
        let mut devices: Vec<(u32, Vec<String>)> = Vec::new();
        let Some(visible) = visible else {
            return Self { devices: (0..).zip(found).map(|(bus, _)| (bus, Vec::new())).collect() };
        };
        let names: Vec<&str> = visible.split(',').map(str::trim).collect();
        let first = names.first().map(|name| kind(name));
        for name in names.into_iter().take_while(|name| Some(kind(name)) == first) {
            let Some((bus, part)) = named(found, name) else { break };
            match (devices.iter_mut().find(|(known, _)| *known == bus), part) {
                (None, part) => devices.push((bus, part.into_iter().collect())),
                (Some((_, parts)), Some(part)) if !parts.contains(&part) => parts.push(part),
                (Some(_), _) => return Self::default(),
            }
        }
        Self { devices }
    }

    /// Returns the numbers in ascending order, as CUDA counts devices in a process with this
    /// variable.
    pub(super) fn numbers(&self) -> impl Iterator<Item = u32> {
        (0..).zip(&self.devices).map(|(number, _)| number)
    }

    /// Returns the number on the bus, which NVML uses.
    pub(super) fn bus_number(&self, number: u32) -> Option<u32> {
        self.get(number).map(|(bus, _)| *bus)
    }

    /// Returns whether a MIG device may be used.
    pub(super) fn shows_part(&self, number: u32, uuid: &str) -> bool {
        self.get(number)
            .is_some_and(|(_, parts)| parts.is_empty() || parts.iter().any(|part| part == uuid))
    }

    fn get(&self, number: u32) -> Option<&(u32, Vec<String>)> {
        self.devices.get(usize::try_from(number).ok()?)
    }
}

/// Returns the kind of a name by its prefix: the UUID of a device or of a MIG device; `None` for a
/// number.
fn kind(name: &str) -> Option<&'static str> {
    ["GPU-", "MIG-"].into_iter().find(|prefix| name.starts_with(prefix))
}

/// Returns the number on the bus of the device with this name, and the MIG device if the name is of
/// one.
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
    if !name.starts_with("GPU-") {
        return None;
    }
    let (number, _) =
        all.find(|(_, device)| device.uuid.as_ref().is_some_and(|uuid| uuid.starts_with(name)))?;
    Some((number, None))
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn cuda_visible_devices_selects_devices() {
        let device = |uuid: &str, mig: &[&str]| Found {
            uuid: Some(uuid.to_owned()),
            mig: mig.iter().map(|uuid| (*uuid).to_owned()).collect(),
            memory: None,
            error: None,
        };
        let found =
            [device("GPU-aa", &[]), device("GPU-bb", &["MIG-1", "MIG-2"]), device("GPU-bc", &[])];
        let numbers = |visible| {
            let shown = VisibleDevices::new(&found, visible);
            shown.numbers().map(|number| shown.bus_number(number).unwrap()).collect::<Vec<_>>()
        };
        for (visible, expected) in [
            (None, &[0, 1, 2][..]),
            (Some(""), &[]),
            (Some("2,0"), &[2, 0]),
            (Some("2,0,2"), &[]),
            (Some(" 1 , GPU-a"), &[1]),
            (Some("GPU-bb, GPU-a"), &[1, 0]),
            (Some("MIG-2,MIG-1,MIG-2"), &[]),
            (Some("MIG-2,MIG-1"), &[1]),
            (Some("GPU-bc,7,0"), &[2]),
            (Some("-1,0"), &[]),
            (Some("MIG-2"), &[1]),
            (Some("NoDevFiles"), &[]),
        ] {
            assert_eq!(numbers(visible), expected, "{visible:?}");
        }
        let shown = VisibleDevices::new(&found, Some("MIG-2"));
        assert!(
            shown.shows_part(0, "MIG-2")
                && !shown.shows_part(0, "MIG-1")
                && !shown.shows_part(1, "x")
        );
        assert_eq!((shown.bus_number(0), shown.bus_number(1)), (Some(1), None));
        assert!(VisibleDevices::new(&found, None).shows_part(1, "MIG-1"));
    }
}
