//! Operating system services of the frontend: the clock, the server's directories, the limit of
//! file descriptors, watched files, connections to other servers, child processes, limits that a
//! process sets for itself, control groups, the user of workers, the order of processes when memory
//! runs out, threads and their scheduling, work in the background, the headers of tar archives, and
//! messages to systemd.

pub mod background;
pub mod blocking;
pub mod children;
pub mod client;
pub mod clock;
pub mod confinement;
#[allow(unsafe_code)]
pub mod control_groups;
pub mod descriptors;
pub mod directories;
pub mod event_loops;
pub mod file_watch;
pub mod out_of_memory;
pub mod removal;
#[allow(unsafe_code)]
pub mod scheduling;
pub mod service_manager;
#[allow(unsafe_code)]
pub mod sockets;
pub mod tar_attributes;
pub mod threads;
pub mod variables;
#[allow(unsafe_code)]
pub mod worker_user;
