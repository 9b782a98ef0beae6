//! The descriptors that a worker process inherits, by number.

/// A connected Unix stream socket: each byte wakes the other side, and its end is the end of the
/// connection.
pub const SOCKET: i32 = 3;
/// The input arena, written by the frontend.
pub const INPUTS: i32 = 4;
/// The output arena, written by the worker.
pub const OUTPUTS: i32 = 5;
/// The ring of metric samples, written by the worker.
pub const METRICS: i32 = 6;
/// A pipe into which the worker writes a byte when the ring should be read soon.
pub const WAKE_UP: i32 = 7;
/// A connected Unix `SOCK_SEQPACKET` socket for descriptions of client memory.
pub const REGIONS: i32 = 8;
/// The rings of frames.
pub const FRAMES: i32 = 9;
/// Not a descriptor of the worker: a copy of a fork server writes `0` into this file, and so enters
/// its control group.
pub const CONTROL_GROUP: i32 = 10;
