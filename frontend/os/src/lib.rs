//! What the frontend takes from the operating system and the network: the clock, the server's directories, the limit of
//! file descriptors, files that change, and connections to other servers.

pub mod client;
pub mod clock;
pub mod descriptors;
pub mod directories;
pub mod file_watch;
