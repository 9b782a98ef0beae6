//! Operating system services of the frontend: the clock, the server's directories, the limit of file descriptors, watched files,
//! and connections to other servers.

pub mod client;
pub mod clock;
pub mod descriptors;
pub mod directories;
pub mod event_loops;
pub mod file_watch;
