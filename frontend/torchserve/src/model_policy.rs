//! Applies the `torchserve_*` parameters of a model's configuration to the engine.

use std::time::Duration;

use pharos::metrics::alias;
use pharos::model::{CodeOrigin, ModelConfig};
use pharos::service::ModelPolicy;
use pharos::supervisor::{self, Backoff, RestartPolicy};

/// The backend that executes handlers.
pub const BACKEND: &str = "torchserve";

/// TorchServe's backoff before restarts, in seconds.
const PAUSES: &[u64] = &[1, 1, 2, 3, 5, 8, 13, 21, 34, 55, 89, 144, 233, 377, 610, 987, 1597];

/// The parameter of a model whose archive came by request, and its value.
pub(crate) const ORIGIN: &str = "torchserve_origin";
pub(crate) const BY_REQUEST: &str = "request";

/// The model policy that reads `torchserve_*` parameters.
#[derive(Debug)]
pub struct HandlerPolicy;

impl ModelPolicy for HandlerPolicy {
    fn supervision(
        &self,
        config: &ModelConfig,
        settings: supervisor::Settings,
    ) -> supervisor::Settings {
        if config.backend != BACKEND {
            return settings;
        }
        let seconds = |name: &str| {
            let value = config
                .parameters
                .get(&format!("torchserve_{name}"))
                .and_then(|text| text.parse().ok());
            value.map(Duration::from_secs)
        };
        let restart = match seconds("max_retry_timeout") {
            // The backoff starts over each time the worker becomes ready.
            Some(window) => RestartPolicy {
                backoff: Backoff::Schedule(PAUSES),
                healthy_after: Duration::ZERO,
                window: Some(window),
            },
            None => settings.restart,
        };
        supervisor::Settings {
            start_timeout: seconds("startup_timeout").unwrap_or(settings.start_timeout),
            execution_timeout: seconds("response_timeout").unwrap_or(settings.execution_timeout),
            restart,
        }
    }

    fn metric_name<'a>(&self, config: &'a ModelConfig) -> Option<(&'a str, &'a str)> {
        let parameter = |name: &str| config.parameters.get(name).map(String::as_str);
        parameter("torchserve_model_name").zip(parameter("torchserve_model_version"))
    }

    fn origin<'a>(&self, parameter: &dyn Fn(&str) -> Option<&'a str>) -> CodeOrigin {
        match parameter(ORIGIN) {
            Some(BY_REQUEST) => CodeOrigin::Request,
            _ => CodeOrigin::Operator,
        }
    }
}

/// Returns the naming for counting requests by the names that clients use. Workers are numbered
/// from `first_worker`.
pub fn metric_naming(first_worker: u16) -> alias::Naming {
    let first = u32::from(first_worker);
    alias::Naming {
        default_version: "default",
        worker: Box::new(move |number, name: &str, version: &str| {
            format!("W-{}-{name}_{version}", first + number)
        }),
    }
}
