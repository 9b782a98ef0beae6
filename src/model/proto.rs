//! The generated types of `proto/model_config.proto` and their descriptors. Private to this module:
//! the rest of the server uses the checked [`ModelConfig`](super::ModelConfig) or protobuf bytes.

use std::sync::LazyLock;

use prost_reflect::{DescriptorPool, DynamicMessage, MessageDescriptor};

use super::ConfigError;
use crate::tensor;

#[allow(missing_docs, unreachable_pub, unused_qualifications, clippy::all)]
mod generated {
    include!(concat!(env!("OUT_DIR"), "/inference.rs"));
}

pub(super) use generated::*;

/// The schema's descriptors, decoded once.
static POOL: LazyLock<DescriptorPool> = LazyLock::new(|| {
    DescriptorPool::decode(include_bytes!(concat!(env!("OUT_DIR"), "/model_config.bin")).as_slice())
        .expect("the build script writes valid descriptors")
});

/// Returns the descriptor of `inference.ModelConfig`.
pub(super) fn descriptor() -> MessageDescriptor {
    POOL.get_message_by_name("inference.ModelConfig")
        .expect("the schema defines inference.ModelConfig")
}

/// Converts the generic form, which the parsers build, to the generated type.
pub(super) fn from_dynamic(message: &DynamicMessage) -> Result<ModelConfig, ConfigError> {
    message.transcode_to().map_err(|error| {
        ConfigError::new(format!("cannot encode the model configuration: {error}"))
    })
}

/// Converts the generated type to the generic form.
pub(super) fn to_dynamic(config: &ModelConfig) -> DynamicMessage {
    let mut message = DynamicMessage::new(descriptor());
    message
        .transcode_from(config)
        .expect("the generated type and its descriptor come from one schema");
    message
}

/// Returns the datatype for a number of the schema's `DataType`; `None` for an unknown number.
pub(super) fn datatype(number: i32) -> Option<tensor::DataType> {
    u8::try_from(number).ok().and_then(tensor::DataType::from_number)
}
