//! Access control: the doer of [`pharos::access`]. Reads token files, classifies [`routes`], and
//! decides on requests ([`Guard`]).

pub mod routes;

use std::path::{Path, PathBuf};
use std::sync::Arc;

use http::HeaderMap;
use http::header::AUTHORIZATION;
use parking_lot::RwLock;
use pharos::access::tokens::{Keyring, Refusal as TokenRefusal, Scope, Tokens};
use pharos::access::{Api, Restrictions};
use pharos::error::Reason;
use pharos::service::{Protocol, Route};
use pharos_listener::receiving::Budget;
use pharos_listener::receiving::grpc::Limits;
use regex::bytes::Regex;
use routes::{Class, class};
use tonic::{Code, Status};

/// The flag of the tokens for inference.
const INFERENCE: &str = "--inference-token-file";

/// The flag of the tokens for management.
const MANAGEMENT: &str = "--management-token-file";

/// The maximum size of a token file.
const MAX_FILE: u64 = 1 << 20;

/// The tokens that grant access. Cheap to clone; all clones share reloaded tokens.
#[derive(Clone, Debug, Default)]
pub struct Access {
    /// `None` if no tokens are required. Held to compare or replace.
    keyring: Option<Arc<RwLock<Keyring>>>,
    inference: Option<PathBuf>,
    management: Option<PathBuf>,
}

impl Access {
    /// Reads the given files.
    ///
    /// # Errors
    /// A file cannot be used.
    pub fn new(inference: Option<PathBuf>, management: Option<PathBuf>) -> Result<Self, String> {
        let keyring = Keyring {
            inference: read(INFERENCE, inference.as_deref())?,
            management: read(MANAGEMENT, management.as_deref())?,
        };
        let given = inference.is_some() || management.is_some();
        Ok(Self { keyring: given.then(|| Arc::new(RwLock::new(keyring))), inference, management })
    }

    /// Returns the tokens, which are replaced when they are reloaded; `None` if no tokens are
    /// required.
    pub fn keyring(&self) -> Option<&Arc<RwLock<Keyring>>> {
        self.keyring.as_ref()
    }

    /// Returns the token files for inference and management, if given.
    pub fn files(&self) -> (Option<PathBuf>, Option<PathBuf>) {
        (self.inference.clone(), self.management.clone())
    }

    /// Reloads the tokens for inference; returns their number.
    ///
    /// # Errors
    /// As [`Access::new`]; nothing changes then.
    pub fn reload_inference(&self) -> Result<usize, String> {
        let tokens = read(INFERENCE, self.inference.as_deref())?;
        Ok(self.replace(tokens, |keyring| &mut keyring.inference))
    }

    /// Reloads the tokens for management; returns their number.
    ///
    /// # Errors
    /// As [`Access::new`]; nothing changes then.
    pub fn reload_management(&self) -> Result<usize, String> {
        let tokens = read(MANAGEMENT, self.management.as_deref())?;
        Ok(self.replace(tokens, |keyring| &mut keyring.management))
    }

    fn replace(
        &self,
        tokens: Option<Tokens>,
        of: impl FnOnce(&mut Keyring) -> &mut Option<Tokens>,
    ) -> usize {
        let count = tokens.as_ref().map_or(0, Tokens::count);
        if let Some(keyring) = &self.keyring {
            *of(&mut keyring.write()) = tokens;
        }
        count
    }

    /// Returns whether no tokens are required.
    pub fn is_open(&self) -> bool {
        self.keyring.is_none()
    }

    /// Checks that a request with these headers may use an API.
    ///
    /// # Errors
    /// The reason for the refusal.
    pub fn check(&self, api: Api, headers: &HeaderMap) -> Result<(), TokenRefusal> {
        let Some(keyring) = &self.keyring else { return Ok(()) };
        let given = headers.get_all(AUTHORIZATION).iter().map(|value| value.as_bytes());
        keyring.read().check(api, given)
    }

    /// Returns whether a scope requires a token.
    pub fn guards(&self, scope: Scope) -> bool {
        let Some(keyring) = &self.keyring else { return false };
        keyring.read().guards(scope)
    }

    /// Returns whether these headers have a token for a scope; `false` if the scope requires none.
    pub fn opens(&self, scope: Scope, headers: &HeaderMap) -> bool {
        let Some(keyring) = &self.keyring else { return false };
        let given = headers.get_all(AUTHORIZATION).iter().map(|value| value.as_bytes());
        let keyring = keyring.read();
        keyring.guards(scope) && keyring.check_scope(scope, given).is_ok()
    }
}

/// The prefix of headers for restricted gRPC calls.
pub const GRPC_PREFIX: &str = "triton-grpc-protocol-";

/// The reason why a request is refused before its handler runs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Denied {
    /// The route is unknown.
    Unknown,
    /// The request lacks a valid token.
    Token(TokenRefusal),
    /// The API is restricted; this header is missing or wrong.
    Restricted(String),
}

impl Denied {
    /// Returns the answer in a protocol.
    pub fn refusal(&self, protocol: Protocol) -> Refusal {
        match protocol {
            Protocol::Http => self.over_http(),
            Protocol::Grpc => self.over_grpc(),
        }
    }

    /// Returns the HTTP response; for tokens as in RFC 6750, 3.1.
    fn over_http(&self) -> Refusal {
        match self {
            Self::Unknown => Refusal::new(404, "Not Found", Reason::Unsupported),
            Self::Token(refusal) => {
                let code = if *refusal == TokenRefusal::Insufficient { 403 } else { 401 };
                let challenge = Some(refusal.challenge());
                Refusal { challenge, ..Refusal::new(code, refusal.text(), Reason::Unauthenticated) }
            }
            Self::Restricted(key) => {
                let text = format!("This API is restricted, expecting header '{key}'");
                Refusal::new(403, text, Reason::Restricted)
            }
        }
    }

    /// Returns the gRPC response.
    fn over_grpc(&self) -> Refusal {
        const PERMISSION_DENIED: u16 = 7;
        const UNIMPLEMENTED: u16 = 12;
        const UNAVAILABLE: u16 = 14;
        const UNAUTHENTICATED: u16 = 16;
        match self {
            // The same as for an unknown method.
            Self::Unknown => Refusal::new(UNIMPLEMENTED, "", Reason::Unsupported),
            Self::Token(refusal) => {
                let is_insufficient = *refusal == TokenRefusal::Insufficient;
                let code = if is_insufficient { PERMISSION_DENIED } else { UNAUTHENTICATED };
                Refusal::new(code, refusal.text(), Reason::Unauthenticated)
            }
            Self::Restricted(key) => {
                let text = format!("This protocol is restricted, expecting header '{key}'");
                Refusal::new(UNAVAILABLE, text, Reason::Restricted)
            }
        }
    }
}

/// The answer to a request without access to its route. The edge renders it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Refusal {
    /// The HTTP status or gRPC code.
    pub code: u16,
    /// The error text.
    pub text: String,
    /// The reason for the metrics.
    pub reason: Reason,
    /// The value of `WWW-Authenticate`; HTTP only.
    pub challenge: Option<&'static str>,
    /// The class of the error, in protocols whose errors have one.
    pub kind: Option<&'static str>,
}

impl Refusal {
    /// Returns a refusal with an error text.
    pub fn new(code: u16, text: impl Into<String>, reason: Reason) -> Self {
        Self { code, text: text.into(), reason, challenge: None, kind: None }
    }

    /// Returns the refusal as a status of gRPC.
    pub fn into_status(self) -> Status {
        Status::new(Code::from_i32(self.code.into()), self.text)
    }
}

/// Decides whether a request may use its route. Every listener checks it before a handler runs.
#[derive(Clone, Copy)]
pub struct Guard<'a> {
    /// The tokens.
    pub access: &'a Access,
    /// The restricted APIs.
    pub restricted: &'a Restrictions,
    /// The prefix of the names of their headers.
    pub prefix: &'static str,
}

impl Guard<'_> {
    /// Returns whether all known routes are permitted to all requests.
    pub fn is_open(&self) -> bool {
        self.restricted.is_empty() && self.access.is_open()
    }

    /// Checks that a request with these headers may use this route.
    ///
    /// # Errors
    /// The reason for the refusal.
    pub fn check(&self, route: Route, headers: &HeaderMap) -> Result<(), Denied> {
        match class(route) {
            Class::Open => Ok(()),
            Class::Unknown => Err(Denied::Unknown),
            Class::Part(api) => {
                self.access.check(api, headers).map_err(Denied::Token)?;
                // Triton's restrictions do not cover reflection.
                if route == Route::Reflection {
                    Ok(())
                } else {
                    self.check_restricted(api, headers)
                }
            }
        }
    }

    /// Checks that the restrictions permit a request with these headers to use an API.
    ///
    /// # Errors
    /// [`Denied::Restricted`].
    pub fn check_restricted(&self, api: Api, headers: &HeaderMap) -> Result<(), Denied> {
        let name = |key: &str| format!("{}{}", self.prefix, key.to_ascii_lowercase());
        let given = |key: &str| headers.get(name(key)).map(|value| value.as_bytes());
        let denied = |key: &str| Denied::Restricted(format!("{}{key}", self.prefix));
        self.restricted.check(api, given).map_err(denied)
    }
}

/// Returns the bounds of the messages of a call of `route`. Clients without a token must not use up
/// the memory budget, so messages of calls that need no token are small, and not counted.
pub fn bounds_of(route: Route, budget: &Budget, limits: Limits) -> (Budget, Limits) {
    match class(route) {
        Class::Part(Api::Health) => (budget.without_limit(), Limits::small()),
        _ => (budget.clone(), limits),
    }
}

/// Reads the token file of a flag, if one is given.
fn read(flag: &str, path: Option<&Path>) -> Result<Option<Tokens>, String> {
    use std::io::Read;
    let Some(path) = path else { return Ok(None) };
    let mut text = String::new();
    let file = format!("the token file '{}' ({flag})", path.display());
    let unread = |error: std::io::Error| format!("{file} cannot be read: {error}");
    let opened = std::fs::File::open(path).map_err(unread)?;
    opened.take(MAX_FILE + 1).read_to_string(&mut text).map_err(unread)?;
    if text.len() as u64 > MAX_FILE {
        // The beginning of a token would be accepted as a token.
        return Err(format!("{file} is larger than {MAX_FILE} bytes"));
    }
    Tokens::parse(&text).map(Some).map_err(|reason| format!("{file} cannot be used: {reason}"))
}

/// Selects the headers to forward as request parameters (`--http-header-forward-pattern`,
/// `--grpc-header-forward-pattern`).
#[derive(Clone, Debug, Default)]
pub struct Forward {
    pattern: Option<Regex>,
    /// Whether to omit `authorization`, because it contains tokens of the server.
    without_tokens: bool,
}

/// Parameter names that have a meaning for the server, which headers must not set by accident.
const RESERVED: [&str; 7] = [
    "sequence_id",
    "sequence_start",
    "sequence_end",
    "priority",
    "timeout",
    "binary_data_output",
    "headers",
];

impl Forward {
    /// Forwards headers whose names contain a match of the pattern. Names are in lower case.
    pub fn new(pattern: Option<Regex>, access: &Access) -> Self {
        Self { pattern, without_tokens: !access.is_open() }
    }

    /// Returns whether no header is forwarded.
    pub fn is_empty(&self) -> bool {
        self.pattern.is_none()
    }

    /// Returns the forwarded headers with their values.
    ///
    /// # Errors
    /// A matching header has a reserved name, or a value that is not valid UTF-8.
    pub fn parameters(&self, headers: &HeaderMap) -> Result<Vec<(String, String)>, String> {
        let Some(pattern) = &self.pattern else { return Ok(Vec::new()) };
        let mut found = Vec::new();
        for name in headers.keys().filter(|name| pattern.is_match(name.as_str().as_bytes())) {
            let name = name.as_str();
            if self.without_tokens && name == AUTHORIZATION {
                continue;
            }
            if RESERVED.contains(&name) || name.starts_with("triton_") {
                return Err(format!(
                    "header '{name}' cannot be forwarded: parameters of this name are reserved \
                     for Triton usage and should not be specified."
                ));
            }
            let mut values = Vec::new();
            for value in headers.get_all(name) {
                let text = std::str::from_utf8(value.as_bytes());
                values.push(text.map_err(|_| {
                    format!("header '{name}' cannot be forwarded: its value is not valid UTF-8")
                })?);
            }
            found.push((name.to_owned(), values.join(", ")));
        }
        Ok(found)
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use http::HeaderValue;
    use regex::bytes::RegexBuilder;

    use super::*;

    fn headers(pairs: &[(&'static str, &'static [u8])]) -> HeaderMap {
        let pairs = pairs
            .iter()
            .map(|(name, value)| (name.parse().unwrap(), HeaderValue::from_bytes(value).unwrap()));
        pairs.collect()
    }

    #[test]
    fn a_token_file_that_is_too_large_is_refused() {
        let path = std::env::temp_dir().join(format!("pharos-tokens-{}", std::process::id()));
        let most = usize::try_from(MAX_FILE).unwrap();
        for (comment, accepted) in [(most - "\nsecret".len(), true), (most - "\nsec".len(), false)]
        {
            std::fs::write(&path, format!("{}\nsecret", "#".repeat(comment))).unwrap();
            let read = read(INFERENCE, Some(&path));
            std::fs::remove_file(&path).unwrap();
            assert_eq!(read.is_ok(), accepted, "{read:?}");
        }
    }

    #[test]
    fn forwards_matching_headers_as_parameters() {
        let forward = |pattern: &str| {
            let pattern =
                RegexBuilder::new(pattern).unicode(false).case_insensitive(true).build().unwrap();
            Forward { pattern: Some(pattern), without_tokens: true }
        };
        let mut given = headers(&[
            ("my-a", b"1"),
            ("x-my-b", b"2"),
            ("other", b"3"),
            ("authorization", b"Bearer x"),
        ]);
        given.append("my-a", HeaderValue::from_static("4"));
        let names = |pattern: &str| {
            let mut found = forward(pattern).parameters(&given).unwrap();
            found.sort();
            found.into_iter().map(|(name, value)| format!("{name}={value}")).collect::<Vec<_>>()
        };
        assert_eq!(names("MY-"), ["my-a=1, 4", "x-my-b=2"]);
        assert_eq!(names("^my-"), ["my-a=1, 4"]);
        assert_eq!(names("(?-i)MY-"), [""; 0]);
        assert_eq!(names(".*"), ["my-a=1, 4", "other=3", "x-my-b=2"], "a token is never forwarded");
        assert_eq!(Forward::default().parameters(&given), Ok(Vec::new()));
        for (name, value, expected) in [
            (
                "timeout",
                &b"1"[..],
                "'timeout' cannot be forwarded: parameters of this name are reserved for Triton \
                 usage",
            ),
            ("triton_x", b"1", "reserved"),
            ("plain", b"\xff", "not valid UTF-8"),
        ] {
            let error = forward(".*").parameters(&headers(&[(name, value)])).unwrap_err();
            assert!(error.contains(expected), "{error}");
        }
    }
}
