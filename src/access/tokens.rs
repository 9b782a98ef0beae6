//! Bearer tokens (RFC 6750): what a file of them may look like, and whether one that a client sends is among them.
//!
//! A token itself is kept nowhere, only its BLAKE3 hash: what is not there cannot be logged, and comparing hashes tells
//! nothing of a token, not even its length.

use super::Api;

/// What a token opens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Scope {
    /// Inference, and what clients ask for around it.
    Inference,
    /// What changes the server or shows how it is run.
    Management,
}

impl Scope {
    /// What a part of the protocol needs; `None` for health, which load balancers ask for without a token.
    pub fn of(api: Api) -> Option<Self> {
        match api {
            Api::Health => None,
            Api::Metadata | Api::Inference | Api::SharedMemory | Api::ModelConfig | Api::Statistics => {
                Some(Self::Inference)
            }
            Api::ModelRepository | Api::Trace | Api::Logging => Some(Self::Management),
        }
    }

    /// Its name in texts.
    pub fn name(self) -> &'static str {
        match self {
            Self::Inference => "inference",
            Self::Management => "management",
        }
    }
}

/// The tokens of one scope.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Tokens(Vec<blake3::Hash>);

/// The longest token. Headers may be longer, but nobody types such a secret.
const MAX_LENGTH: usize = 4096;
/// The most tokens of a file: each request is compared with all of them.
const MAX_TOKENS: usize = 1024;

impl Tokens {
    /// The tokens of a file's text: one a line; empty lines and those that begin with `#` are left out.
    ///
    /// # Errors
    /// The number of the line that is no token, without its text, or that there is none or too many.
    pub fn parse(text: &str) -> Result<Self, String> {
        let mut tokens = Vec::new();
        for (index, line) in text.lines().enumerate() {
            let line = line.trim();
            if line.is_empty() || line.starts_with('#') {
                continue;
            }
            if !is_token(line) {
                return Err(format!(
                    "line {} is no token: allowed are 1 to {MAX_LENGTH} letters, digits and -._~+/, and = at the end",
                    index + 1
                ));
            }
            tokens.push(blake3::hash(line.as_bytes()));
        }
        match tokens.len() {
            0 => Err("it has no token; one a line is expected".to_owned()),
            count if count > MAX_TOKENS => Err(format!("it has {count} tokens; at most {MAX_TOKENS} are allowed")),
            _ => Ok(Self(tokens)),
        }
    }

    /// How many there are.
    pub fn count(&self) -> usize {
        self.0.len()
    }

    /// Whether `token` is one of them. Takes as long whichever it is, and whether or not it is one.
    fn contain(&self, token: &blake3::Hash) -> bool {
        // Equality of hashes is constant in time; `|` looks at all of them.
        self.0.iter().fold(false, |found, known| found | (known == token))
    }
}

/// `b64token` of RFC 6750, 2.1.
fn is_token(text: &str) -> bool {
    let body = text.trim_end_matches('=');
    let allowed = |byte: u8| byte.is_ascii_alphanumeric() || b"-._~+/".contains(&byte);
    !body.is_empty() && text.len() <= MAX_LENGTH && body.bytes().all(allowed)
}

/// Who may use what: the tokens of both scopes, `None` where no file is given.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Keyring {
    /// Open inference, and management too if that has no tokens of its own.
    pub inference: Option<Tokens>,
    /// Open everything.
    pub management: Option<Tokens>,
}

/// Why a request is refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Refusal {
    /// It has no `Authorization: Bearer` header.
    Missing(Scope),
    /// Its token is none of the server's.
    Unknown(Scope),
    /// Its token is one for inference, and more is asked for.
    Insufficient,
}

impl Refusal {
    /// What the client is told.
    pub fn text(self) -> String {
        match self {
            Self::Missing(scope) => {
                format!("this API needs a token for {}: send the header 'Authorization: Bearer TOKEN'", scope.name())
            }
            Self::Unknown(scope) => format!("the bearer token is not valid for {}", scope.name()),
            Self::Insufficient => "this API needs a token for management; that of the request is for inference".into(),
        }
    }

    /// The value of `WWW-Authenticate` (RFC 6750, 3).
    pub fn challenge(self) -> &'static str {
        match self {
            Self::Missing(_) => "Bearer realm=\"pharos\"",
            Self::Unknown(_) => "Bearer realm=\"pharos\", error=\"invalid_token\"",
            Self::Insufficient => "Bearer realm=\"pharos\", error=\"insufficient_scope\", scope=\"management\"",
        }
    }
}

impl Keyring {
    /// Whether who sends these values of `Authorization` may use a part of the protocol.
    ///
    /// # Errors
    /// Why not.
    pub fn check<'a>(&self, api: Api, given: impl Iterator<Item = &'a [u8]>) -> Result<(), Refusal> {
        Scope::of(api).map_or(Ok(()), |scope| self.check_scope(scope, given))
    }

    /// Whether a token is asked for in this scope.
    pub fn guards(&self, scope: Scope) -> bool {
        self.opening(scope).iter().any(Option::is_some)
    }

    /// The tokens that open a scope; none if it is open.
    fn opening(&self, scope: Scope) -> [Option<&Tokens>; 2] {
        match scope {
            Scope::Inference if self.inference.is_none() => [None, None],
            Scope::Inference => [self.inference.as_ref(), self.management.as_ref()],
            // Giving tokens for inference alone must not leave open what is worse.
            Scope::Management => [self.management.as_ref().or(self.inference.as_ref()), None],
        }
    }

    /// As [`Keyring::check`], for a scope.
    ///
    /// # Errors
    /// Why not.
    pub fn check_scope<'a>(&self, scope: Scope, mut given: impl Iterator<Item = &'a [u8]>) -> Result<(), Refusal> {
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

/// The token of a value of `Authorization`, if its scheme is Bearer.
fn bearer(value: &[u8]) -> Option<&[u8]> {
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
    fn a_file_is_a_token_a_line() {
        let tokens = Tokens::parse("# of the load balancer\n  abc-._~+/09==\n\r\nxyz\r\n").unwrap();
        assert_eq!(tokens.count(), 2);
        assert!(tokens.contain(&blake3::hash(b"abc-._~+/09==")) && tokens.contain(&blake3::hash(b"xyz")));
        assert!(!tokens.contain(&blake3::hash(b"xy")));
        for (text, expected) in [
            ("", "no token"),
            ("# only this\n", "no token"),
            ("good\nsecret words", "line 2 is no token"),
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
    fn tokens_open_what_is_theirs() {
        let (both, one) = (keyring(Some("i\nj"), Some("m")), keyring(Some("i"), None));
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
    fn every_refusal_says_what_to_do() {
        assert!(Refusal::Missing(Scope::Inference).text().contains("'Authorization: Bearer TOKEN'"));
        assert!(Refusal::Insufficient.challenge().contains("insufficient_scope"));
        assert!(Refusal::Unknown(Scope::Management).challenge().contains("invalid_token"));
    }
}
