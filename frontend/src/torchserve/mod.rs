//! A home for TorchServe's users: their `config.properties`, archives and endpoints. What is here reads and writes their
//! forms; models run on the ordinary engine, from a private repository that this module writes.

pub mod archive;
mod command;
mod configuration;
pub mod deployment;
mod initial;
mod interim;
mod options;
mod pid;
pub mod properties;
pub mod refused;
pub mod settings;
pub mod snapshot;
mod workplace;
pub mod yaml;

pub use archive::{Archive, Unpacked, open};
pub use command::{Plan, Step, run};
pub use deployment::{Asked, Deployment, Device};
pub use initial::{Initial, initial};
pub use interim::{Registry, Start, serve};
pub use refused::Refused;
pub use settings::{Address, LoadModels, ModelProperties, Settings, Token};
pub use snapshot::Kind;
pub use yaml::ModelYaml;
