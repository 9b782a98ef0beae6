//! OpenAPI 3.0.1 documents of the API.

use serde_json::{Map, Value, json};

use crate::routes::Apis;

/// An endpoint: path, method, operation id, description, query parameters.
type Endpoint = (&'static str, &'static str, &'static str, &'static str, &'static [&'static str]);

const EVERYWHERE: [Endpoint; 1] = [("/", "options", "apiDescription", "This description.", &[])];

const INFERENCE: [Endpoint; 9] = [
    ("/ping", "get", "ping", "Whether the default version of each model has its workers.", &[]),
    (
        "/predictions/{model_name}",
        "post",
        "predictions",
        "A prediction of the default version.",
        &[],
    ),
    (
        "/predictions/{model_name}/{model_version}",
        "post",
        "version_predictions",
        "A prediction of a version.",
        &[],
    ),
    (
        "/explanations/{model_name}",
        "post",
        "explanations",
        "An explanation by the default version.",
        &[],
    ),
    ("/invocations", "post", "invocations", "A prediction in SageMaker's format.", &["model_name"]),
    ("/models/{model_name}/invoke", "post", "invoke", "A prediction in SageMaker's format.", &[]),
    (
        "/v1/models/{model_name}:predict",
        "post",
        "v1Predict",
        "A prediction in KServe's v1 protocol.",
        &[],
    ),
    ("/v2/models/{model_name}/infer", "post", "v2Infer", "An inference of the v2 protocol.", &[]),
    ("/v2/health/ready", "get", "v2Ready", "Whether the server is ready.", &[]),
];

const MANAGEMENT: [Endpoint; 7] = [
    ("/models", "get", "listModels", "The models, sorted by name.", &["limit", "next_page_token"]),
    (
        "/models",
        "post",
        "registerModel",
        "Registers an archive.",
        &[
            "url",
            "model_name",
            "handler",
            "runtime",
            "batch_size",
            "max_batch_delay",
            "initial_workers",
            "synchronous",
            "response_timeout",
            "startup_timeout",
        ],
    ),
    (
        "/models/{model_name}",
        "get",
        "describeModel",
        "The description of the default version.",
        &["customized"],
    ),
    (
        "/models/{model_name}",
        "put",
        "setAutoScale",
        "Changes the number of workers.",
        &["min_worker", "max_worker", "synchronous"],
    ),
    (
        "/models/{model_name}",
        "delete",
        "unregisterModel",
        "Unregisters the default version, if it is the last.",
        &[],
    ),
    (
        "/models/{model_name}/{model_version}",
        "get",
        "version_describeModel",
        "The description of a version, or of all.",
        &["customized"],
    ),
    (
        "/models/{model_name}/{model_version}/set-default",
        "put",
        "setDefault",
        "Makes a version the default one.",
        &[],
    ),
];

const METRICS: [Endpoint; 1] =
    [("/metrics", "get", "metrics", "The metrics, in Prometheus' text format.", &["name[]"])];

/// Describes the APIs of a listener.
pub(super) fn description(apis: Apis) -> Value {
    let mut endpoints = EVERYWHERE.to_vec();
    for (open, part) in [
        (apis.inference, &INFERENCE[..]),
        (apis.management, &MANAGEMENT[..]),
        (apis.metrics, &METRICS[..]),
    ] {
        endpoints.extend(part.iter().filter(|_| open));
    }
    document("TorchServe APIs", &endpoints, None)
}

/// Describes the inference endpoints of a model.
pub(super) fn of_model(model: &str) -> Value {
    let endpoints =
        INFERENCE.into_iter().filter(|endpoint| endpoint.0.starts_with("/predictions/"));
    document(&format!("RESTful API for: {model}"), &endpoints.collect::<Vec<_>>(), Some(model))
}

/// Describes the management endpoints of a model.
pub(super) fn of_management(model: &str) -> Value {
    let endpoints = MANAGEMENT.into_iter().filter(|endpoint| endpoint.0.starts_with("/models/"));
    document(
        &format!("RESTful Management API for: {model}"),
        &endpoints.collect::<Vec<_>>(),
        Some(model),
    )
}

fn document(title: &str, endpoints: &[Endpoint], model: Option<&str>) -> Value {
    let mut paths = Map::new();
    for (path, method, operation, description, query) in endpoints {
        let path =
            model.map_or_else(|| (*path).to_owned(), |model| path.replace("{model_name}", model));
        let of_path =
            path.split('/').filter_map(|segment| segment.strip_prefix('{')?.split('}').next());
        let parameter = |name: &str, place: &str| json!({ "in": place, "name": name, "required": place == "path", "schema": { "type": "string" } });
        let parameters: Vec<Value> = of_path
            .map(|name| parameter(name, "path"))
            .chain(query.iter().map(|name| parameter(name, "query")))
            .collect();
        let error = json!({
            "description": "An error",
            "content": { "application/json": { "schema": {
                "type": "object",
                "required": ["code", "type", "message"],
                "properties": {
                    "code": { "type": "integer" }, "type": { "type": "string" }, "message": { "type": "string" },
                },
            } } },
        });
        let does = json!({
            "description": description,
            "operationId": operation,
            "parameters": parameters,
            "responses": { "200": { "description": "Done" }, "default": error },
        });
        let methods = paths.entry(path).or_insert_with(|| json!({}));
        if let Value::Object(methods) = methods {
            methods.insert((*method).to_owned(), does);
        }
    }
    let info = json!({ "title": title, "version": env!("CARGO_PKG_VERSION") });
    json!({ "openapi": "3.0.1", "info": info, "paths": paths })
}
