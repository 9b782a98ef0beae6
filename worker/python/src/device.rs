//! DLPack's device types.

/// DLPack's device type of the CPU.
pub(crate) const CPU: i32 = 1;
/// DLPack's device type of CUDA devices.
pub(crate) const CUDA: i32 = 2;
