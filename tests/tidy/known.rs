//! The exceptions from the rules. The lists may only shrink: an entry that no longer applies fails.

/// Sibling modules that use each other.
pub(crate) struct Cycle {
    /// The source folder of the crate.
    pub(crate) source: &'static str,
    /// The parent module; empty for the crate's root.
    pub(crate) parent: &'static str,
    /// Their names in alphabetical order.
    pub(crate) modules: &'static [&'static str],
    /// Why the cycle is tolerated.
    #[expect(dead_code, reason = "for the reader")]
    pub(crate) reason: &'static str,
}

/// The tolerated cycles.
pub(crate) const CYCLES: &[Cycle] = &[];

/// Modules that still have a nonstandard name.
pub(crate) const PRIVATE_NAMES_LEFT: &[&str] = &[];

/// Files that name TorchServe outside its packages, and the number of such lines without tests.
pub(crate) const TORCHSERVE_LEFT: &[(&str, usize)] = &[];
