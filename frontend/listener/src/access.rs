//! Who may use which part of the protocol: the doer of [`pharos::access`]. It reads token files, and remembers what they
//! said last. [`routes`] gives the part of a route; [`Guard`] decides about a request.

pub mod routes;

use std::path::PathBuf;
use std::sync::{Arc, PoisonError, RwLock};

use http::HeaderMap;
use http::header::AUTHORIZATION;
use pharos::access::tokens::{Keyring, Refusal, Scope, Tokens};
use pharos::access::{Api, Restrictions};
use pharos::error::Reason;
use pharos::metrics::labels::Route;
use regex::bytes::Regex;
use routes::{Class, class};

/// The largest file of tokens.
const MAX_FILE: u64 = 1 << 20;

/// The tokens that open the server. Cheap to clone; all clones see what is read later.
#[derive(Clone, Debug, Default)]
pub struct Access {
    /// `None`: no tokens are asked for. Held to compare or replace.
    keyring: Option<Arc<RwLock<Keyring>>>,
    inference: Option<PathBuf>,
    management: Option<PathBuf>,
}

impl Access {
    /// Reads the files that are given.
    ///
    /// # Errors
    /// Which of them cannot be used, and why.
    pub fn new(inference: Option<PathBuf>, management: Option<PathBuf>) -> Result<Self, String> {
        let read_file = |path: &Option<PathBuf>| path.as_ref().map(read).transpose();
        let keyring = Keyring { inference: read_file(&inference)?, management: read_file(&management)? };
        let given = inference.is_some() || management.is_some();
        Ok(Self { keyring: given.then(|| Arc::new(RwLock::new(keyring))), inference, management })
    }

    /// The files of tokens for inference and for management, as far as they are given.
    pub fn files(&self) -> (Option<PathBuf>, Option<PathBuf>) {
        (self.inference.clone(), self.management.clone())
    }

    /// Reads the tokens for inference again; gives their number.
    ///
    /// # Errors
    /// As [`Access::new`]; then nothing has changed.
    pub fn reload_inference(&self) -> Result<usize, String> {
        let tokens = self.inference.as_ref().map(read).transpose()?;
        Ok(self.replace(tokens, |keyring| &mut keyring.inference))
    }

    /// Reads the tokens for management again; gives their number.
    ///
    /// # Errors
    /// As [`Access::new`]; then nothing has changed.
    pub fn reload_management(&self) -> Result<usize, String> {
        let tokens = self.management.as_ref().map(read).transpose()?;
        Ok(self.replace(tokens, |keyring| &mut keyring.management))
    }

    fn replace(&self, tokens: Option<Tokens>, of: impl FnOnce(&mut Keyring) -> &mut Option<Tokens>) -> usize {
        let count = tokens.as_ref().map_or(0, Tokens::count);
        if let Some(keyring) = &self.keyring {
            *of(&mut keyring.write().unwrap_or_else(PoisonError::into_inner)) = tokens;
        }
        count
    }

    /// Whether anybody may do anything.
    pub fn is_open(&self) -> bool {
        self.keyring.is_none()
    }

    /// Whether who sends these headers may use a part of the protocol.
    ///
    /// # Errors
    /// Why not.
    pub fn check(&self, api: Api, headers: &HeaderMap) -> Result<(), Refusal> {
        let Some(keyring) = &self.keyring else { return Ok(()) };
        let given = headers.get_all(AUTHORIZATION).iter().map(|value| value.as_bytes());
        keyring.read().unwrap_or_else(PoisonError::into_inner).check(api, given)
    }

    /// Whether there are tokens that guard a scope.
    pub fn guards(&self, scope: Scope) -> bool {
        let Some(keyring) = &self.keyring else { return false };
        keyring.read().unwrap_or_else(PoisonError::into_inner).guards(scope)
    }

    /// Whether these headers have a token that opens a scope. `false` where no token is asked for.
    pub fn opens(&self, scope: Scope, headers: &HeaderMap) -> bool {
        let Some(keyring) = &self.keyring else { return false };
        let given = headers.get_all(AUTHORIZATION).iter().map(|value| value.as_bytes());
        let keyring = keyring.read().unwrap_or_else(PoisonError::into_inner);
        keyring.guards(scope) && keyring.check_scope(scope, given).is_ok()
    }
}

/// What headers for restricted calls of gRPC begin with.
pub const GRPC_PREFIX: &str = "triton-grpc-protocol-";

/// Why a request is refused before its handler runs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Denied {
    /// Its route is not known.
    Unknown,
    /// It lacks a token.
    Token(Refusal),
    /// The part is restricted; this is the header that is missing or wrong.
    Restricted(String),
}

/// How an edge answers a request that is denied its route.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeniedAnswer {
    /// The status of HTTP, or the code of gRPC.
    pub code: u16,
    /// The error text.
    pub text: String,
    /// The value of `WWW-Authenticate`; HTTP only.
    pub challenge: Option<&'static str>,
    /// The reason for the metrics.
    pub reason: Reason,
}

impl Denied {
    /// The answer over HTTP; for tokens that of RFC 6750, 3.1.
    pub fn over_http(&self) -> DeniedAnswer {
        let answer = |code, text: String, reason| DeniedAnswer { code, text, challenge: None, reason };
        match self {
            Self::Unknown => answer(404, "Not Found".to_owned(), Reason::Unsupported),
            Self::Token(refusal) => {
                let code = if *refusal == Refusal::Insufficient { 403 } else { 401 };
                let answer = answer(code, refusal.text(), Reason::Unauthenticated);
                DeniedAnswer { challenge: Some(refusal.challenge()), ..answer }
            }
            Self::Restricted(key) => {
                let text = format!("This API is restricted, expecting header '{key}'");
                answer(403, text, Reason::Restricted)
            }
        }
    }

    /// The answer over gRPC.
    pub fn over_grpc(&self) -> DeniedAnswer {
        const PERMISSION_DENIED: u16 = 7;
        const UNIMPLEMENTED: u16 = 12;
        const UNAVAILABLE: u16 = 14;
        const UNAUTHENTICATED: u16 = 16;
        let answer = |code, text: String, reason| DeniedAnswer { code, text, challenge: None, reason };
        match self {
            // As for a method that no service has.
            Self::Unknown => answer(UNIMPLEMENTED, String::new(), Reason::Unsupported),
            Self::Token(refusal) => {
                let code = if *refusal == Refusal::Insufficient { PERMISSION_DENIED } else { UNAUTHENTICATED };
                answer(code, refusal.text(), Reason::Unauthenticated)
            }
            Self::Restricted(key) => {
                let text = format!("This protocol is restricted, expecting header '{key}'");
                answer(UNAVAILABLE, text, Reason::Restricted)
            }
        }
    }
}

/// Decides whether a request may have its route. Every listener asks it before a handler runs.
#[derive(Clone, Copy)]
pub struct Guard<'a> {
    /// Tokens.
    pub access: &'a Access,
    /// Restricted parts.
    pub restricted: &'a Restrictions,
    /// What the names of their headers begin with.
    pub prefix: &'static str,
}

impl Guard<'_> {
    /// Whether there is nothing to ask.
    pub fn is_open(&self) -> bool {
        self.restricted.is_empty() && self.access.is_open()
    }

    /// Whether a request with these headers may have this route.
    ///
    /// # Errors
    /// Why not.
    pub fn check(&self, route: Route, headers: &HeaderMap) -> Result<(), Denied> {
        match class(route) {
            Class::Open => Ok(()),
            Class::Unknown => Err(Denied::Unknown),
            Class::Part(api) => {
                self.access.check(api, headers).map_err(Denied::Token)?;
                // Triton's restrictions do not cover reflection.
                if route == Route::Reflection { Ok(()) } else { self.check_restricted(api, headers) }
            }
        }
    }

    /// Whether a request with these headers may use a part, as far as restrictions go.
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

fn read(path: &PathBuf) -> Result<Tokens, String> {
    use std::io::Read;
    let mut text = String::new();
    let unread = |error: std::io::Error| format!("the token file '{}' cannot be read: {error}", path.display());
    let file = std::fs::File::open(path).map_err(unread)?;
    file.take(MAX_FILE).read_to_string(&mut text).map_err(unread)?;
    Tokens::parse(&text).map_err(|reason| format!("the token file '{}' cannot be used: {reason}", path.display()))
}

/// Which headers of a request become parameters of it (`--http-header-forward-pattern`, `--grpc-header-forward-pattern`).
#[derive(Clone, Debug, Default)]
pub struct Forward {
    pattern: Option<Regex>,
    /// What is a secret of the server's and not the model's business.
    without_tokens: bool,
}

/// Names of parameters that mean something to the server: a header must not say that by accident.
const RESERVED: [&str; 7] =
    ["sequence_id", "sequence_start", "sequence_end", "priority", "timeout", "binary_data_output", "headers"];

impl Forward {
    /// Forwards headers in whose name the pattern is found, if there is one. Names come in small letters.
    pub fn new(pattern: Option<Regex>, access: &Access) -> Self {
        Self { pattern, without_tokens: !access.is_open() }
    }

    /// Whether no header is forwarded.
    pub fn is_empty(&self) -> bool {
        self.pattern.is_none()
    }

    /// The headers that become parameters, with their values.
    ///
    /// # Errors
    /// A header that matches and whose name is reserved, or whose value is no text.
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
                    "header '{name}' cannot be forwarded: parameters of this name are reserved for Triton usage and should not \
                     be specified."
                ));
            }
            let mut values = Vec::new();
            for value in headers.get_all(name) {
                let text = std::str::from_utf8(value.as_bytes());
                values.push(text.map_err(|_| format!("header '{name}' cannot be forwarded: its value is no UTF-8"))?);
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
        let pairs = pairs.iter().map(|(name, value)| (name.parse().unwrap(), HeaderValue::from_bytes(value).unwrap()));
        pairs.collect()
    }

    #[test]
    fn headers_that_match_become_parameters() {
        let forward = |pattern: &str| {
            let pattern = RegexBuilder::new(pattern).unicode(false).case_insensitive(true).build().unwrap();
            Forward { pattern: Some(pattern), without_tokens: true }
        };
        let mut given = headers(&[("my-a", b"1"), ("x-my-b", b"2"), ("other", b"3"), ("authorization", b"Bearer x")]);
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
                "'timeout' cannot be forwarded: parameters of this name are reserved for Triton usage",
            ),
            ("triton_x", b"1", "reserved"),
            ("plain", b"\xff", "no UTF-8"),
        ] {
            let error = forward(".*").parameters(&headers(&[(name, value)])).unwrap_err();
            assert!(error.contains(expected), "{error}");
        }
    }
}
