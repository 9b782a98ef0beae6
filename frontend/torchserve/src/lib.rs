//! TorchServe's interfaces: `config.properties`, model archives, and the REST and gRPC endpoints.
//! This crate reads and writes TorchServe's formats. Models run on the ordinary engine, from a
//! private model repository that this crate writes.

mod access_log;
pub mod archive;
mod arguments;
mod command;
mod configuration;
pub mod deployment;
pub mod error_response;
pub mod failure;
pub mod form;
pub mod fuzzing;
mod grpc;
mod guard;
pub mod handler_call;
mod ids;
mod listen;
pub mod model_parameters;
mod model_policy;
mod options;
mod pid;
pub mod properties;
pub mod registry;
mod rest;
pub mod routes;
pub mod settings;
pub mod snapshot;
pub mod token;
mod work_directory;
pub mod yaml;

pub use archive::{Archive, Unpacked, open};
pub use arguments::Arguments;
pub use command::{Plan, Step, run};
pub use deployment::{Deployment, Device};
pub use error_response::{ErrorResponse, Exception};
pub use grpc::{Kserve, KserveGrpc, KserveRoutes, inference_service, limits as message_limits};
pub use listen::{ServerAccess, Start, check_addresses, named_addresses, serve};
pub use model_parameters::{ModelParameters, RegistrationParameters};
pub use model_policy::{BACKEND, HandlerPolicy, metric_naming};
pub use options::Executable;
pub use registry::{Registry, Uncounted};
pub use rest::{BODY_TIMEOUT, KserveHttp, Page};
pub use settings::{Address, LoadModels, ModelProperties, PipSandbox, Settings, Token};
pub use snapshot::Kind;
pub use token::remove as remove_tokens;
pub use work_directory::DIRECTORY;
pub use yaml::ModelYaml;
