//! Checks access on TorchServe's ports, for REST and gRPC, and for TorchServe's API and the v2
//! protocol alike.
//!
//! TorchServe's keys are checked first, unless they are disabled; if the server has token files, a
//! token of the same scope is accepted too. Without TorchServe's keys, the token files alone
//! decide. Restricted APIs always require their header. Loading and unloading through the v2
//! protocol requires `enable_model_api`, as registration does. Its log and trace settings, which
//! name files, require a key, a token or a header: TorchServe has no such routes, so its operators
//! do not expect them to be open.

use std::sync::Arc;

use http::HeaderMap;
use http::header::AUTHORIZATION;
use pharos::access::Restrictions;
use pharos::access::tokens::Scope;
use pharos::error::Reason;
use pharos::service::{Protocol, Route};

use super::ErrorResponse;
use super::token::{FAILED, Purpose, Tokens};
use pharos_edge::Refusal;
use pharos_edge::access::routes::Class;
use pharos_edge::access::{self, Access, GRPC_PREFIX};

/// The access checks of the ports.
pub(super) struct Guard {
    /// TorchServe's keys; `None` if they are disabled.
    pub(super) tokens: Option<Arc<Tokens>>,
    /// The tokens of `--inference-token-file` and `--management-token-file`.
    pub access: Access,
    /// `--http-restricted-api`.
    pub(super) http: Arc<Restrictions>,
    /// `--grpc-restricted-protocol`.
    pub(super) grpc: Arc<Restrictions>,
    /// Whether clients may load and unload models.
    pub(super) model_api: bool,
}

/// The access that a request requires.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct RequiredAccess {
    pub(super) route: Route,
    pub(super) class: Class,
    /// The key that is required; `None` if no key is.
    pub(super) purpose: Option<Purpose>,
}

/// The reason for denying a request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Denied {
    /// A valid TorchServe key is missing.
    Key(ErrorResponse),
    /// Clients may not load and unload models.
    ModelApi,
    /// Log and trace settings are not protected.
    Settings,
    /// Denied by the same checks as on the server's own ports.
    Server(access::Denied),
}

/// The code of gRPC for a request without access.
const PERMISSION_DENIED: u16 = 7;

/// The message of [`Denied::Settings`].
const OPEN_SETTINGS: &str = "Log and trace settings are disabled on TorchServe's ports, because \
                             no key protects them: enable TorchServe's keys, give \
                             --management-token-file, or restrict the APIs logging and trace";

/// The message of [`Denied::ModelApi`].
const NO_MODEL_API: &str = "Model API disabled: loading and unloading models by request needs \
                            enable_model_api=true (--enable-model-api)";

impl Denied {
    /// Returns the answer in a protocol.
    pub(super) fn refusal(self, protocol: Protocol) -> Refusal {
        let forbidden = match protocol {
            Protocol::Http => 403,
            Protocol::Grpc => PERMISSION_DENIED,
        };
        match (self, protocol) {
            (Self::Key(refused), Protocol::Http) => refused.into(),
            (Self::Key(_), Protocol::Grpc) => {
                Refusal::new(forbidden, FAILED, Reason::Unauthenticated)
            }
            (Self::ModelApi, _) => Refusal::new(forbidden, NO_MODEL_API, Reason::Restricted),
            (Self::Settings, _) => Refusal::new(forbidden, OPEN_SETTINGS, Reason::Restricted),
            (Self::Server(denied), _) => denied.refusal(protocol),
        }
    }
}

impl From<ErrorResponse> for Refusal {
    fn from(refused: ErrorResponse) -> Self {
        let ErrorResponse { status, exception, message, reason } = refused;
        Self { kind: Some(exception.name()), ..Self::new(status, message, reason) }
    }
}

impl Guard {
    /// Checks whether a request with these headers is allowed.
    ///
    /// # Errors
    /// The request is denied.
    pub(super) fn check(
        &self,
        protocol: Protocol,
        wanted: RequiredAccess,
        headers: &HeaderMap,
    ) -> Result<(), Denied> {
        self.check_key(wanted.purpose, headers)?;
        let api = match wanted.class {
            Class::Open => return Ok(()),
            Class::Unknown => return Err(Denied::Server(access::Denied::Unknown)),
            Class::Part(api) => api,
        };
        if self.tokens.is_none() {
            self.access
                .check(api, headers)
                .map_err(|refusal| Denied::Server(access::Denied::Token(refusal)))?;
        }
        let (restricted, prefix) = match protocol {
            Protocol::Http => (&self.http, ""),
            Protocol::Grpc => (&self.grpc, GRPC_PREFIX),
        };
        // Triton's restrictions do not cover reflection.
        if wanted.route != Route::Reflection {
            let server = access::Guard { access: &self.access, restricted, prefix };
            server.check_restricted(api, headers).map_err(Denied::Server)?;
        }
        let is_protected = || {
            self.tokens.is_some()
                || self.access.guards(Scope::Management)
                || restricted.restricts(api)
        };
        match wanted.route {
            Route::TraceSetting | Route::LogSettings if !is_protected() => Err(Denied::Settings),
            Route::RepositoryLoad | Route::RepositoryUnload if !self.model_api => {
                Err(Denied::ModelApi)
            }
            _ => Ok(()),
        }
    }

    /// Checks for TorchServe's key for a purpose, or a server token with the equivalent scope.
    fn check_key(&self, purpose: Option<Purpose>, headers: &HeaderMap) -> Result<(), Denied> {
        let (Some(tokens), Some(purpose)) = (&self.tokens, purpose) else { return Ok(()) };
        let given = headers.get(AUTHORIZATION).map(|value| value.as_bytes());
        let Err(refused) = tokens.check(purpose, given) else { return Ok(()) };
        let scope = match purpose {
            Purpose::Inference => Some(Scope::Inference),
            Purpose::Management => Some(Scope::Management),
            Purpose::Renewal => None,
        };
        match scope.is_some_and(|scope| self.access.opens(scope, headers)) {
            true => Ok(()),
            false => Err(Denied::Key(refused)),
        }
    }
}

/// Returns the key that a class of routes requires. `otherwise` is the key for unknown routes.
pub(super) fn purpose(class: Class, otherwise: Option<Purpose>) -> Option<Purpose> {
    match class {
        Class::Open => None,
        Class::Unknown => otherwise,
        Class::Part(api) => Some(match Scope::of(api) {
            Some(Scope::Management) => Purpose::Management,
            // TorchServe requires its key for health checks too.
            Some(Scope::Inference) | None => Purpose::Inference,
        }),
    }
}
