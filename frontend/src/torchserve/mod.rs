//! A home for TorchServe's users: their `config.properties`, archives and endpoints. What is here reads and writes their
//! forms; models run on the ordinary engine, from a private repository that this module writes.

pub mod archive;
pub mod beside;
mod command;
mod configuration;
pub mod deployment;
pub mod failure;
pub mod form;
mod grpc;
mod guard;
mod ids;
mod listen;
mod options;
mod pid;
mod policy;
pub mod properties;
pub mod refused;
pub mod registry;
mod rest;
pub mod settings;
pub mod snapshot;
pub mod token;
pub mod ways;
mod workplace;
pub mod yaml;

use std::sync::Arc;

pub use archive::{Archive, Unpacked, open};
pub use command::{Plan, Step, run};
pub use deployment::{Asked, Deployment, Device};
pub use grpc::{Kserve, KserveGrpc, inference_service, limits as message_limits};
pub use listen::{ServerAccess, Start, check_addresses, serve};
pub use options::Executable;
pub use policy::{BACKEND, Policy};
pub use refused::Refused;
pub use registry::{Quiet, Registry};
pub use settings::{Address, LoadModels, ModelProperties, Settings, Token};
pub use snapshot::Kind;
pub use token::remove as remove_tokens;
#[cfg(not(test))]
pub(crate) use workplace::DIRECTORY;
pub use yaml::ModelYaml;

/// Where lines about requests go, each without its time: `/127.0.0.1:1 "GET /ping HTTP/1.1" 200 3`.
pub type AccessSink = Arc<dyn Fn(&str) + Send + Sync>;
