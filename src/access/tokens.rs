//! Bearer tokens (RFC 6750): the format of token files, and the check of the token that a client
//! sends.
//!
//! Keeps only the BLAKE3 hash of each token, so that no token can be logged. Comparing hashes
//! reveals not even its length.

use std::sync::Arc;

use super::Api;
use crate::id::TenantId;

named_enum! {
    /// The part of the protocol to which a token gives access.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub enum Scope {
        /// Inference, and the requests of inference clients for metadata, configurations,
        /// statistics, load reports and shared memory.
        Inference => "inference",
        /// Requests that change the server or show how it is operated.
        Management => "management",
    }
    /// Returns the name in texts.
    pub fn name;
}

impl Scope {
    /// Returns the scope that a part of the protocol needs; `None` for health, which load balancers
    /// query without a token.
    pub fn of(api: Api) -> Option<Self> {
        match api {
            Api::Health => None,
            Api::Metadata
            | Api::Inference
            | Api::SharedMemory
            | Api::ModelConfig
            | Api::Statistics
            | Api::LoadReport => Some(Self::Inference),
            Api::ModelRepository | Api::Trace | Api::Logging => Some(Self::Management),
        }
    }
}

/// One token.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Token {
    hash: blake3::Hash,
    /// The tenant that uses it; empty if the file does not name one.
    tenant: Arc<str>,
}

/// The tokens of one scope.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Tokens(Vec<Token>);

/// The beginning of a comment that names the tenant of the tokens below it.
const TENANT: &str = "tenant:";

/// The maximum length of a token. Headers may be longer, but secrets are not.
const MAX_LENGTH: usize = 4096;
/// The maximum number of tokens in a file: each request is compared with all of them.
const MAX_TOKENS: usize = 1024;

impl Tokens {
    /// Parses the text of a token file: one token per line; empty lines and lines that begin with
    /// `#` are ignored, except `# tenant: NAME`, which names the tenant of the tokens below it, up
    /// to the next such line.
    ///
    /// # Errors
    /// A line is not a token (the error has its number, not its text), or the file has no tokens or
    /// too many.
    pub fn parse(text: &str) -> Result<Self, String> {
        let mut tokens = Vec::new();
        let mut tenant = Arc::from("");
        for (index, line) in text.lines().enumerate() {
            let line = line.trim();
            if let Some(name) =
                line.strip_prefix('#').and_then(|line| line.trim().strip_prefix(TENANT))
            {
                tenant = tenant_of_line(name.trim(), index + 1)?;
            }
            if line.is_empty() || line.starts_with('#') {
                continue;
            }
            if !is_token(line) {
                return Err(format!(
                    "line {} is not a token: allowed are 1 to {MAX_LENGTH} letters, digits and \
                     -._~+/, and = at the end",
                    index + 1
                ));
            }
            tokens.push(Token { hash: blake3::hash(line.as_bytes()), tenant: Arc::clone(&tenant) });
        }
        match tokens.len() {
            0 => Err("the file has no tokens; expected one per line".to_owned()),
            count if count > MAX_TOKENS => {
                Err(format!("the file has {count} tokens; at most {MAX_TOKENS} are allowed"))
            }
            _ => Ok(Self(tokens)),
        }
    }

    /// Returns the number of tokens.
    pub fn count(&self) -> usize {
        self.0.len()
    }

    /// Returns whether `token` is one of them, in a time that does not depend on the result.
    fn contain(&self, token: &blake3::Hash) -> bool {
        // Hashes compare in constant time; `|` does not short-circuit.
        self.0.iter().fold(false, |found, known| found | (known.hash == *token))
    }
}

/// Checks the tenant's name in the line with this number; empty ends the tokens of a tenant.
fn tenant_of_line(name: &str, line: usize) -> Result<Arc<str>, String> {
    match name.is_empty() || TenantId::is_name(name.as_bytes()) {
        true => Ok(name.into()),
        false => {
            Err(format!("line {line} does not name a tenant: allowed are {}", TenantId::ALLOWED))
        }
    }
}

/// Returns whether `text` is a `b64token` of RFC 6750, 2.1.
fn is_token(text: &str) -> bool {
    let body = text.trim_end_matches('=');
    !body.is_empty()
        && text.len() <= MAX_LENGTH
        && body.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"-._~+/".contains(&byte))
}

/// The tokens of both scopes; `None` where no file is configured.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Keyring {
    /// Give access to inference, and also to management if `management` is `None`.
    pub inference: Option<Tokens>,
    /// Give access to everything.
    pub management: Option<Tokens>,
}

/// Why a request is refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Refusal {
    /// The request has no `Authorization: Bearer` header.
    Missing(Scope),
    /// The token is not configured.
    Unknown(Scope),
    /// The token is one for inference, and the request needs one for management.
    Insufficient,
}

impl Refusal {
    /// Returns the error text for the client.
    pub fn text(self) -> String {
        match self {
            Self::Missing(scope) => {
                format!(
                    "this API needs a token for {}: send the header 'Authorization: Bearer TOKEN'",
                    scope.name()
                )
            }
            Self::Unknown(scope) => format!("the bearer token is not valid for {}", scope.name()),
            Self::Insufficient => {
                "this API needs a token for management; the request has one for inference".into()
            }
        }
    }

    /// Returns the value of `WWW-Authenticate` (RFC 6750, 3).
    pub fn challenge(self) -> &'static str {
        match self {
            Self::Missing(_) => "Bearer realm=\"pharos\"",
            Self::Unknown(_) => "Bearer realm=\"pharos\", error=\"invalid_token\"",
            Self::Insufficient => {
                "Bearer realm=\"pharos\", error=\"insufficient_scope\", scope=\"management\""
            }
        }
    }
}

impl Keyring {
    /// Checks whether a request with these values of `Authorization` may use a part of the
    /// protocol.
    ///
    /// # Errors
    /// The reason of the refusal.
    pub fn check<'a>(
        &self,
        api: Api,
        given: impl Iterator<Item = &'a [u8]>,
    ) -> Result<(), Refusal> {
        Scope::of(api).map_or(Ok(()), |scope| self.check_scope(scope, given))
    }

    /// Returns the tenant that uses a token; empty if the token is not configured, or the file does
    /// not name its tenant.
    pub fn tenant(&self, token: &[u8]) -> &str {
        let token = blake3::hash(token);
        let all =
            [&self.inference, &self.management].into_iter().flatten().flat_map(|tokens| &tokens.0);
        // Hashes compare in constant time.
        all.fold("", |found, known| if known.hash == token { &known.tenant } else { found })
    }

    /// Returns whether requests of this scope need a token.
    pub fn guards(&self, scope: Scope) -> bool {
        self.opening(scope).iter().any(Option::is_some)
    }

    /// Returns the tokens that give access to a scope; only `None` if the scope needs no token.
    fn opening(&self, scope: Scope) -> [Option<&Tokens>; 2] {
        match scope {
            Scope::Inference if self.inference.is_none() => [None, None],
            Scope::Inference => [self.inference.as_ref(), self.management.as_ref()],
            // If only inference has tokens, management must not be left open.
            Scope::Management => [self.management.as_ref().or(self.inference.as_ref()), None],
        }
    }

    /// Does the same as [`Keyring::check`] for a scope.
    ///
    /// # Errors
    /// The reason of the refusal.
    pub fn check_scope<'a>(
        &self,
        scope: Scope,
        mut given: impl Iterator<Item = &'a [u8]>,
    ) -> Result<(), Refusal> {
        let opening = self.opening(scope);
        if opening.iter().all(Option::is_none) {
            return Ok(());
        }
        let Some(token) = given.find_map(bearer) else { return Err(Refusal::Missing(scope)) };
        let token = blake3::hash(token);
        let among = |tokens: &Tokens| tokens.contain(&token);
        if opening.into_iter().flatten().fold(false, |found, tokens| found | among(tokens)) {
            return Ok(());
        }
        let inference = scope == Scope::Management && self.inference.as_ref().is_some_and(among);
        Err(if inference { Refusal::Insufficient } else { Refusal::Unknown(scope) })
    }
}

/// Returns the token in a value of `Authorization`, if its scheme is Bearer.
pub fn bearer(value: &[u8]) -> Option<&[u8]> {
    let (scheme, token) = value.split_at_checked("Bearer ".len())?;
    scheme.eq_ignore_ascii_case(b"Bearer ").then(|| token.trim_ascii())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn keyring(inference: Option<&str>, management: Option<&str>) -> Keyring {
        let tokens = |text: Option<&str>| text.map(|text| Tokens::parse(text).unwrap());
        Keyring { inference: tokens(inference), management: tokens(management) }
    }

    #[test]
    fn files_name_the_tenants_of_tokens() {
        let inference = "first\n# tenant: acme\n# the old one\nold\nnew\n#tenant:globex\nother\n# \
                         tenant:\nlast\n";
        let keyring = keyring(Some(inference), Some("# tenant: operator\nadmin"));
        for (authorization, expected) in [
            ("Bearer first", ""),
            ("Bearer old", "acme"),
            ("bearer new", "acme"),
            ("Bearer other", "globex"),
            ("Bearer last", ""),
            ("Bearer admin", "operator"),
            ("Bearer unknown", ""),
            ("Basic old", ""),
            ("", ""),
        ] {
            let token = bearer(authorization.as_bytes());
            assert_eq!(
                token.map_or("", |token| keyring.tenant(token)),
                expected,
                "{authorization}"
            );
        }
        assert_eq!(Keyring::default().tenant(b"old"), "");
        let error = Tokens::parse("good\n# tenant: two words\nbetter").unwrap_err();
        assert!(
            error.starts_with("line 2 does not name a tenant: allowed are up to 64 letters"),
            "{error}"
        );
    }

    #[test]
    fn parses_one_token_per_line() {
        let tokens = Tokens::parse("# of the load balancer\n  abc-._~+/09==\n\r\nxyz\r\n").unwrap();
        assert_eq!(tokens.count(), 2);
        assert!(
            tokens.contain(&blake3::hash(b"abc-._~+/09=="))
                && tokens.contain(&blake3::hash(b"xyz"))
        );
        assert!(!tokens.contain(&blake3::hash(b"xy")));
        for (text, expected) in [
            ("", "no tokens"),
            ("# only this\n", "no tokens"),
            ("good\nsecret words", "line 2 is not a token"),
            ("secret\u{e9}", "line 1"),
            ("====", "line 1"),
            (&"x".repeat(4097), "line 1"),
            (&"x\n".repeat(1025), "1025 tokens"),
        ] {
            let error = Tokens::parse(text).unwrap_err();
            assert!(error.contains(expected) && !error.contains("secret"), "{error}");
        }
        assert!(!format!("{:?}", keyring(Some("secret"), None)).contains("secret"));
    }

    #[test]
    fn tokens_give_access_to_their_scope() {
        let both = keyring(Some("i\nj"), Some("m"));
        let one = keyring(Some("i"), None);
        let management = keyring(None, Some("m"));
        let missing = Refusal::Missing;
        let unknown = Refusal::Unknown;
        for (ring, api, header, expected) in [
            (&both, Api::Health, None, Ok(())),
            (&both, Api::Inference, Some("Bearer i"), Ok(())),
            (&both, Api::Inference, Some("bearer  j "), Ok(())),
            (&both, Api::Inference, Some("Bearer m"), Ok(())),
            (&both, Api::Inference, Some("Bearer x"), Err(unknown(Scope::Inference))),
            (&both, Api::Inference, Some("Basic aTpp"), Err(missing(Scope::Inference))),
            (&both, Api::Inference, Some("Bearer"), Err(missing(Scope::Inference))),
            (&both, Api::Metadata, None, Err(missing(Scope::Inference))),
            (&both, Api::ModelRepository, Some("Bearer m"), Ok(())),
            (&both, Api::ModelRepository, Some("Bearer i"), Err(Refusal::Insufficient)),
            (&both, Api::Trace, Some("Bearer "), Err(unknown(Scope::Management))),
            (&one, Api::Logging, None, Err(missing(Scope::Management))),
            (&one, Api::Logging, Some("Bearer i"), Ok(())),
            (&management, Api::Inference, None, Ok(())),
            (&management, Api::Logging, None, Err(missing(Scope::Management))),
            (&management, Api::Logging, Some("Bearer m"), Ok(())),
            (&Keyring::default(), Api::Logging, None, Ok(())),
        ] {
            let given = header.map(str::as_bytes).into_iter();
            assert_eq!(ring.check(api, given), expected, "{api:?} {header:?} {ring:?}");
        }
    }

    #[test]
    fn each_refusal_has_its_text_and_challenge() {
        assert!(
            Refusal::Missing(Scope::Inference).text().contains("'Authorization: Bearer TOKEN'")
        );
        assert!(Refusal::Insufficient.challenge().contains("insufficient_scope"));
        assert!(Refusal::Unknown(Scope::Management).challenge().contains("invalid_token"));
    }
}
