//! Loading models by request: whether a load may bring code, and a warning when other machines can
//! load models without a token.

use std::net::{IpAddr, SocketAddr};

use pharos::access::tokens::Scope;
use pharos::access::{Api, Restrictions};

use crate::cli::Options;
use pharos_engine::engine::{Engine, Uploads};
use pharos_torchserve::{Plan, ServerAccess, Settings};

/// Returns the server for the clients of a listener. Their loads may bring code if
/// `--allow-model-upload` permits it; without that flag, if loading is protected. Requests of
/// SageMaker and TorchServe, which name directories and archives, are then permitted too:
/// both platforms protect their ports themselves.
pub(super) fn with_uploads(engine: &Engine, options: &Options, protected: bool) -> Engine {
    let permitted = options.models.allow_upload;
    engine.with_uploads(Uploads {
        code: permitted.unwrap_or(protected),
        registrations: permitted.unwrap_or(true),
    })
}

/// Returns whether loading by request requires a token of the server or a key of a restricted API.
pub(super) fn is_protected(guards: &ServerAccess, rules: &Restrictions) -> bool {
    guards.tokens.guards(Scope::Management) || rules.restricts(Api::ModelRepository)
}

/// Logs a warning with the addresses at which other machines can load models without a token.
pub(super) fn warn(options: &Options, plan: Option<&Plan<Options>>, guards: &ServerAccess) {
    if guards.tokens.guards(Scope::Management) {
        return;
    }
    let mut open = of_server(options, guards);
    // Registrations name files and addresses outside of the repositories.
    let registers = match plan {
        None => of_clouds(options, guards),
        Some(plan) => of_torchserve(&plan.settings, guards),
    };
    let runs_code = match options.models.allow_upload {
        Some(allowed) => allowed,
        None => !registers.is_empty(),
    };
    open.extend(registers);
    if open.is_empty() {
        return;
    }
    let can = match runs_code {
        true => "run code on this machine",
        false => "load and unload the models of the repositories",
    };
    // One event per line, because the log escapes line breaks.
    tracing::warn!(
        "models can be loaded by request without a token: every client that reaches one of these \
         addresses can {can}"
    );
    open.iter().for_each(|address| tracing::warn!("    {address}"));
    tracing::warn!(
        "    to prevent that, give --management-token-file, listen on a loopback address \
         (--http-address=127.0.0.1, --grpc-address=127.0.0.1), or disable loading by request \
         (--model-control-mode=none; for TorchServe's ports enable_model_api=false)"
    );
}

/// Returns the open addresses of the server's own listeners.
fn of_server(options: &Options, guards: &ServerAccess) -> Vec<String> {
    if !options.models.control_mode.by_request() {
        return Vec::new();
    }
    let listeners = [
        ("HTTP", options.http.allow, options.http.address, options.http.port, &guards.http),
        ("gRPC", options.grpc.allow, options.grpc.address, options.grpc.port, &guards.grpc),
    ];
    let open = listeners
        .into_iter()
        .filter(|(_, allowed, address, _, rules)| *allowed && is_open(*address, rules));
    open.map(|(name, _, address, port, _)| format!("{name} on {}", SocketAddr::new(address, port)))
        .collect()
}

/// Returns the open addresses of cloud platforms. Their listeners bind all interfaces.
fn of_clouds(options: &Options, guards: &ServerAccess) -> Vec<String> {
    if !options.models.control_mode.by_request() {
        return Vec::new();
    }
    let any = IpAddr::from([0, 0, 0, 0]);
    let listeners = [
        ("SageMaker", options.sagemaker.allow, options.sagemaker.port),
        ("Vertex AI", options.vertex_ai.allow, options.vertex_ai.port),
    ];
    let open =
        listeners.into_iter().filter(|(_, allowed, _)| *allowed && is_open(any, &guards.http));
    open.map(|(name, _, port)| format!("{name} on {}", SocketAddr::new(any, port))).collect()
}

/// Returns TorchServe's open addresses. For each protocol, the management address accepts
/// TorchServe's load requests and the inference address load requests of the v2 protocol.
fn of_torchserve(settings: &Settings, guards: &ServerAccess) -> Vec<String> {
    if !settings.model_api || settings.token.is_some() {
        return Vec::new();
    }
    let listeners = [
        ("TorchServe's inference API", settings.inference, &guards.http),
        ("TorchServe's management API", settings.management, &guards.http),
        ("TorchServe's gRPC inference API", settings.grpc_inference, &guards.grpc),
        ("TorchServe's gRPC management API", settings.grpc_management, &guards.grpc),
    ];
    let open =
        listeners.into_iter().filter(|(_, address, rules)| is_open(address.socket.ip(), rules));
    open.map(|(name, address, _)| format!("{name} on {}", address.socket)).collect()
}

/// Returns whether other machines can load models at this address.
fn is_open(address: IpAddr, rules: &Restrictions) -> bool {
    !address.to_canonical().is_loopback() && !rules.restricts(Api::ModelRepository)
}
