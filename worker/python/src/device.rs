//! DLPack's numbers of kinds of devices.

/// DLPack's number of the processor as a device.
pub(crate) const CPU: i32 = 1;
/// DLPack's number of CUDA's devices.
pub(crate) const CUDA: i32 = 2;
