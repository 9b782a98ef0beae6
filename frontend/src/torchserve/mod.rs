//! A home for TorchServe's users: their `config.properties`, archives and endpoints. What is here reads and writes their
//! forms; models run on the ordinary engine, from a private repository that this module writes.

pub mod archive;
pub mod deployment;
pub mod properties;
pub mod refused;
pub mod settings;
pub mod yaml;

pub use archive::{Archive, Unpacked, open};
pub use deployment::{Asked, Deployment, Device};
pub use refused::Refused;
pub use settings::{Address, LoadModels, ModelProperties, Settings, Token};
pub use yaml::ModelYaml;
