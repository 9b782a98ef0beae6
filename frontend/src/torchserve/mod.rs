//! A home for TorchServe's users: their `config.properties`, archives and endpoints. What is here reads and writes their
//! forms; models run on the ordinary engine, from a private repository that this module writes.

pub mod archive;
pub mod beside;
// In unit tests nobody starts a server.
#[cfg_attr(test, allow(dead_code))]
mod command;
mod configuration;
pub mod deployment;
#[cfg(not(test))]
mod ended;
pub mod failure;
pub mod form;
// The edges of the v2 protocol have another engine in unit tests (`fake_engine`).
#[cfg(not(test))]
mod grpc;
#[cfg_attr(test, allow(dead_code))]
mod guard;
mod ids;
#[cfg(not(test))]
mod listen;
#[cfg_attr(test, allow(dead_code))]
mod options;
#[cfg_attr(test, allow(dead_code))]
mod pid;
pub mod properties;
pub mod refused;
#[cfg_attr(test, allow(dead_code))]
pub mod registry;
#[cfg(not(test))]
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
#[cfg(not(test))]
pub use listen::{ServerAccess, Start, check_addresses, serve};
pub use refused::Refused;
pub use registry::Registry;
pub use settings::{Address, LoadModels, ModelProperties, Settings, Token};
pub use snapshot::Kind;
pub use token::remove as remove_tokens;
pub use yaml::ModelYaml;

/// Where lines about requests go, each without its time: `/127.0.0.1:1 "GET /ping HTTP/1.1" 200 3`.
pub type AccessSink = Arc<dyn Fn(&str) + Send + Sync>;
