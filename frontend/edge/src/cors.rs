//! Cross-origin requests: browsers let a page of another origin read answers only if these say so.
//!
//! Source of the protocol: the Fetch standard, section "CORS protocol".

use axum::body::Body;
use axum::response::Response;
use http::header::{
    ACCESS_CONTROL_ALLOW_HEADERS, ACCESS_CONTROL_ALLOW_METHODS, ACCESS_CONTROL_ALLOW_ORIGIN,
    ACCESS_CONTROL_EXPOSE_HEADERS, ACCESS_CONTROL_MAX_AGE, ACCESS_CONTROL_REQUEST_HEADERS,
    ACCESS_CONTROL_REQUEST_METHOD, HeaderValue, ORIGIN, VARY,
};
use http::{HeaderMap, Method, Request, StatusCode};

/// How long a browser may remember the answer to a preflight request, in seconds.
const MAX_AGE_S: u32 = 600;

/// The origins whose pages may read answers.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Origins {
    /// None.
    #[default]
    None,
    /// These, as browsers write them: `https://example.com` or `http://localhost:3000`.
    Listed(Vec<String>),
    /// All.
    Any,
}

/// The permission for the page that has sent a request.
#[derive(Clone, Debug)]
pub struct Permission(HeaderValue);

impl Origins {
    /// Parses the values of a flag: origins, or `*` for all.
    ///
    /// # Errors
    /// A value is not an origin. Names it and says what is expected.
    pub fn parse(values: &[String]) -> Result<Self, String> {
        if values.iter().any(|value| value == "*") {
            return Ok(Self::Any);
        }
        if let Some(wrong) = values.iter().find(|value| !is_origin(value)) {
            return Err(format!(
                "invalid origin \"{}\": expected *, or a scheme and a host with an optional port, \
                 for example https://example.com or http://localhost:3000",
                wrong.escape_debug()
            ));
        }
        match values.is_empty() {
            true => Ok(Self::None),
            false => Ok(Self::Listed(values.to_vec())),
        }
    }

    /// Returns the permission for the origin of a request; `None` if it has none, or another one.
    pub fn permission(&self, headers: &HeaderMap) -> Option<Permission> {
        let origin = headers.get(ORIGIN)?;
        match self {
            Self::None => None,
            Self::Any => Some(Permission(HeaderValue::from_static("*"))),
            Self::Listed(origins) => origins
                .iter()
                .any(|own| own.as_bytes() == origin.as_bytes())
                .then(|| Permission(origin.clone())),
        }
    }
}

/// Returns whether a text has the form of an origin.
fn is_origin(text: &str) -> bool {
    let Some((scheme, host)) = text.split_once("://") else { return false };
    let is_host = |byte: u8| byte.is_ascii_alphanumeric() || b".-_:[]".contains(&byte);
    !host.is_empty()
        && host.bytes().all(is_host)
        && !scheme.is_empty()
        && scheme.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"+-.".contains(&byte))
}

/// Returns whether a request asks for permission to send another one.
pub fn is_preflight(request: &Request<Body>) -> bool {
    request.method() == Method::OPTIONS
        && request.headers().contains_key(ACCESS_CONTROL_REQUEST_METHOD)
}

impl Permission {
    /// Returns the answer to a preflight request: the page may send requests with the headers that
    /// it names. Credentials that the browser keeps are not sent; a token is a header.
    pub fn preflight(self, request: &HeaderMap) -> Response {
        let mut response = Response::default();
        *response.status_mut() = StatusCode::NO_CONTENT;
        let headers = response.headers_mut();
        let methods = HeaderValue::from_static("GET, HEAD, POST");
        headers.insert(ACCESS_CONTROL_ALLOW_METHODS, methods);
        if let Some(wanted) = request.get(ACCESS_CONTROL_REQUEST_HEADERS) {
            headers.insert(ACCESS_CONTROL_ALLOW_HEADERS, wanted.clone());
        }
        headers.insert(ACCESS_CONTROL_MAX_AGE, MAX_AGE_S.into());
        self.grant(&mut response);
        response
    }

    /// Lets the page read an answer.
    pub fn grant(self, response: &mut Response) {
        let headers = response.headers_mut();
        headers.append(VARY, HeaderValue::from_static("origin"));
        headers.insert(ACCESS_CONTROL_ALLOW_ORIGIN, self.0);
        let exposed = HeaderValue::from_static("x-request-id, retry-after, endpoint-load-metrics");
        headers.insert(ACCESS_CONTROL_EXPOSE_HEADERS, exposed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn origins(values: &[&str]) -> Result<Origins, String> {
        Origins::parse(&values.iter().map(|value| (*value).to_owned()).collect::<Vec<_>>())
    }

    fn allows(origins: &Origins, origin: &'static str) -> bool {
        let headers = HeaderMap::from_iter([(ORIGIN, HeaderValue::from_static(origin))]);
        origins.permission(&headers).is_some()
    }

    #[test]
    fn only_listed_origins_get_a_permission() {
        let listed = origins(&["https://a.example", "http://localhost:3000"]).unwrap();
        assert!(allows(&listed, "https://a.example"));
        assert!(!allows(&listed, "https://a.example.evil"));
        assert!(!allows(&listed, "http://a.example"));
        assert!(!allows(&Origins::None, "https://a.example"));
        assert!(allows(&origins(&["*"]).unwrap(), "null"));
        assert_eq!(origins(&[]), Ok(Origins::None));
        assert!(listed.permission(&HeaderMap::new()).is_none());
    }

    #[test]
    fn what_is_no_origin_is_refused() {
        for wrong in ["example.com", "https://", "https://a/b", "https://a b", "://a"] {
            assert!(origins(&[wrong]).unwrap_err().contains("expected *, or a scheme"), "{wrong}");
        }
    }

    #[test]
    fn a_preflight_allows_the_headers_that_it_names() {
        let headers = HeaderMap::from_iter([
            (ORIGIN, HeaderValue::from_static("https://a.example")),
            (ACCESS_CONTROL_REQUEST_HEADERS, HeaderValue::from_static("authorization")),
        ]);
        let permission = origins(&["https://a.example"]).unwrap().permission(&headers).unwrap();
        let response = permission.preflight(&headers);
        assert_eq!(response.status(), StatusCode::NO_CONTENT);
        assert_eq!(response.headers()[ACCESS_CONTROL_ALLOW_HEADERS], "authorization");
        assert_eq!(response.headers()[ACCESS_CONTROL_ALLOW_ORIGIN], "https://a.example");
    }
}
