//! `ManagementAPIsService`: the registry's operations, with the same responses as REST.

use std::sync::Arc;

use serde::Serialize;
use tonic::{Request, Response, Status};

use super::failure;
use super::proto::management::management_ap_is_service_server::ManagementApIsService;
use super::proto::management::{
    DescribeModelRequest, ListModelsRequest, ManagementResponse, RegisterModelRequest,
    ScaleWorkerRequest, SetDefaultRequest, UnregisterModelRequest,
};
use crate::ErrorResponse;
use crate::handler_call;
use crate::registry::{ManagementOutcome, ModelReference, Scale};
use crate::rest::{DescriptionCall, Registration, Shared, descriptions};

/// The implementation of `ManagementAPIsService`.
pub(super) struct ManagementService(pub(super) Arc<Shared>);

type Answer = Result<Response<ManagementResponse>, Status>;

impl ManagementService {
    /// Fails unless `enable_model_api` is set.
    fn allowed(&self) -> Result<(), Status> {
        match self.0.settings.model_api {
            true => Ok(()),
            false => Err(Status::permission_denied("Model API disabled")),
        }
    }
}

fn answer(text: String) -> Answer {
    Ok(Response::new(ManagementResponse { msg: text }))
}

fn done(done: Result<ManagementOutcome, ErrorResponse>) -> Answer {
    answer(done.map_err(|refused| failure::status(&refused))?.text)
}

fn json(value: &impl Serialize) -> Answer {
    answer(
        serde_json::to_string_pretty(value).map_err(|error| Status::internal(error.to_string()))?,
    )
}

/// Returns a positive number; the default of protobuf, 0, and negative numbers count as absent.
fn positive(number: i32) -> Option<i64> {
    Some(i64::from(number)).filter(|number| *number > 0)
}

fn text(text: String) -> Option<String> {
    Some(text).filter(|text| !text.is_empty())
}

#[tonic::async_trait]
impl ManagementApIsService for ManagementService {
    async fn describe_model(self: Arc<Self>, request: Request<DescribeModelRequest>) -> Answer {
        let headers = handler_call::headers(request.metadata().as_ref());
        let DescribeModelRequest { model_name, model_version, customized } = request.into_inner();
        let id = self.0.ids.next();
        let call = customized.then_some(DescriptionCall { id: &id, headers });
        let reference = ModelReference { name: &model_name, version: &model_version };
        let described = descriptions(&self.0, reference, call).await;
        json(&described.map_err(|refused| failure::status(&refused))?)
    }

    async fn list_models(self: Arc<Self>, request: Request<ListModelsRequest>) -> Answer {
        let ListModelsRequest { limit, next_page_token } = request.into_inner();
        // A missing limit arrives as 0, which would list nothing.
        json(&self.0.registry.list(positive(limit).unwrap_or(100), next_page_token.into()))
    }

    async fn register_model(self: Arc<Self>, request: Request<RegisterModelRequest>) -> Answer {
        self.allowed()?;
        let asked = request.into_inner();
        let wait = asked.synchronous;
        let registration = Registration {
            url: text(asked.url),
            model_name: text(asked.model_name),
            handler: text(asked.handler),
            runtime: text(asked.runtime),
            batch_size: positive(asked.batch_size),
            max_batch_delay: positive(asked.max_batch_delay),
            initial_workers: positive(asked.initial_workers),
            response_timeout: positive(asked.response_timeout),
            startup_timeout: positive(asked.startup_timeout),
            synchronous: Some(wait),
            s3_sse_kms: Some(asked.s3_sse_kms),
        };
        let (url, wanted) =
            registration.into_parts().map_err(|refused| failure::status(&refused))?;
        done(self.0.registry.register(&url, wanted, wait).await)
    }

    async fn scale_worker(self: Arc<Self>, request: Request<ScaleWorkerRequest>) -> Answer {
        let asked = request.into_inner();
        let number =
            |value: i32| positive(value).map(|number| u32::try_from(number).unwrap_or(u32::MAX));
        let min = number(asked.min_worker).unwrap_or(1);
        let scale =
            Scale { min, max: number(asked.max_worker).unwrap_or(min), wait: asked.synchronous };
        done(self.0.registry.scale(&asked.model_name, &asked.model_version, scale).await)
    }

    async fn set_default(self: Arc<Self>, request: Request<SetDefaultRequest>) -> Answer {
        let SetDefaultRequest { model_name, model_version } = request.into_inner();
        done(self.0.registry.set_default(&model_name, &model_version))
    }

    async fn unregister_model(self: Arc<Self>, request: Request<UnregisterModelRequest>) -> Answer {
        self.allowed()?;
        let UnregisterModelRequest { model_name, model_version } = request.into_inner();
        if model_name.is_empty() {
            return Err(failure::status(&ErrorResponse::bad_request(
                "Parameter model_name is required.",
            )));
        }
        done(self.0.registry.unregister(&model_name, &model_version).await)
    }
}
