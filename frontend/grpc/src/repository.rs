//! The model repository: its index, and loading and unloading models (spec 2.9).

use bytes::Bytes;
use pharos::error::InferError;
use pharos::repository::{LoadParameter, State};
use pharos::service::SharedService;

use super::proto::model_repository_parameter::ParameterChoice;
use super::proto::repository_index_response::ModelIndex;
use super::proto::{
    ModelRepositoryParameter, RepositoryIndexRequest, RepositoryIndexResponse,
    RepositoryModelLoadRequest, RepositoryModelLoadResponse, RepositoryModelUnloadRequest,
    RepositoryModelUnloadResponse,
};

/// Refuses a repository name: the request cannot select a repository.
fn refuse_name(repository: &str) -> Result<(), InferError> {
    if repository.is_empty() {
        return Ok(());
    }
    Err(InferError::unsupported("'repository_name' specification is not supported"))
}

pub(super) async fn index(
    service: SharedService,
    request: RepositoryIndexRequest,
) -> Result<RepositoryIndexResponse, InferError> {
    refuse_name(&request.repository_name)?;
    let models =
        service.repository_index(request.ready).await?.into_iter().map(|entry| ModelIndex {
            name: entry.name,
            version: entry.version.map_or_else(String::new, |version| version.to_string()),
            state: entry.state.map_or("", State::as_str).to_owned(),
            reason: entry.reason.to_string(),
        });
    Ok(RepositoryIndexResponse { models: models.collect() })
}

pub(super) async fn load(
    service: SharedService,
    request: RepositoryModelLoadRequest,
) -> Result<RepositoryModelLoadResponse, InferError> {
    refuse_name(&request.repository_name)?;
    let parameters =
        request.parameters.into_iter().map(|(name, parameter)| load_parameter(name, parameter));
    let parameters = parameters.collect::<Result<Vec<_>, _>>()?;
    service.load_model(&request.model_name, parameters).await?;
    Ok(RepositoryModelLoadResponse {})
}

/// Converts a parameter of a load.
fn load_parameter(
    name: String,
    parameter: ModelRepositoryParameter,
) -> Result<(String, Bytes), InferError> {
    let wrong = |expected: &str| {
        let text = format!("invalid value type for load parameter '{name}', expected {expected}.");
        Err(InferError::invalid(text))
    };
    let value = match (LoadParameter::of(&name), parameter.parameter_choice) {
        (Some(LoadParameter::Config), Some(ParameterChoice::StringParam(text))) => {
            Bytes::from(text)
        }
        (Some(LoadParameter::Config), _) => return wrong("string_param"),
        (Some(LoadParameter::File), Some(ParameterChoice::BytesParam(bytes))) => bytes,
        (Some(LoadParameter::File), _) => return wrong("bytes_param"),
        (None, _) => {
            return Err(InferError::invalid(format!("unrecognized load parameter '{name}'.")));
        }
    };
    Ok((name, value))
}

pub(super) async fn unload(
    service: SharedService,
    request: RepositoryModelUnloadRequest,
) -> Result<RepositoryModelUnloadResponse, InferError> {
    refuse_name(&request.repository_name)?;
    // Unknown parameters are ignored, as by Triton.
    let dependents = match request.parameters.get("unload_dependents") {
        None => false,
        Some(ModelRepositoryParameter {
            parameter_choice: Some(ParameterChoice::BoolParam(value)),
        }) => *value,
        Some(_) => {
            let text = "invalid value type for 'unload_dependents' parameter, expected bool_param.";
            return Err(InferError::invalid(text));
        }
    };
    service.unload_model(&request.model_name, dependents).await?;
    Ok(RepositoryModelUnloadResponse {})
}
