//! The table of routes of an HTTP listener. Each route is declared once, with its path, its [`Route`] and its handlers. The
//! access check of the route precedes its handler and the 405 response. A path that is not declared is [`Route::Unknown`] and
//! reaches no handler.

use std::convert::Infallible;
use std::future::ready;
use std::sync::Arc;

use axum::body::Body;
use axum::extract::{FromRequestParts, State};
use axum::response::Response;
use axum::routing::{MethodRouter, any};
use http::request::Parts;
use http::{HeaderMap, Request};
use percent_encoding::percent_decode_str;
use pharos::error::Reason;
use pharos::load_report::LoadReport;
use pharos::metrics::labels::{Protocol, Route};
use tower::Service as _;

use crate::answering::{self, Count, Gate};
use crate::http_service::Handle;

/// The route of a declared path.
#[derive(Clone, Copy, Debug)]
pub enum RouteOf {
    /// One route for every request.
    Fixed(Route),
    /// A route that depends on the received path, which matches the declared path.
    Path(fn(&str) -> Route),
}

impl From<Route> for RouteOf {
    fn from(route: Route) -> Self {
        Self::Fixed(route)
    }
}

/// Builds a table of routes whose handlers have the state `T`.
pub struct Builder<T> {
    paths: matchit::Router<Declared>,
    state: T,
    wrong_method: fn(&T) -> Response,
}

/// The declaration of a path.
#[derive(Clone)]
struct Declared {
    route: RouteOf,
    methods: MethodRouter,
}

impl<T: Clone + Send + Sync + 'static> Builder<T> {
    /// Returns a builder without routes. `wrong_method` answers requests for a declared path with an undeclared method.
    pub fn new(state: T, wrong_method: fn(&T) -> Response) -> Self {
        Self { paths: matchit::Router::new(), state, wrong_method }
    }

    /// Adds a path in axum's syntax: `{name}` matches a non-empty segment, `{*name}` at the end all remaining segments. Static
    /// segments take precedence over named ones.
    ///
    /// # Panics
    /// The path conflicts with another route.
    #[must_use]
    pub fn route(mut self, path: &str, route: impl Into<RouteOf>, methods: MethodRouter<T>) -> Self {
        let wrong_method = self.wrong_method;
        let methods = methods.fallback(move |State(state): State<T>| ready(wrong_method(&state)));
        let declared = Declared { route: route.into(), methods: methods.with_state(self.state.clone()) };
        self.paths.insert(path, declared).expect("no other route is declared with this path");
        self
    }

    /// Builds the table with the access check of its listener. `not_found` answers requests for undeclared paths.
    pub fn build<G: Gate>(self, gate: G, not_found: fn(&T) -> Response) -> Routes<G> {
        let unknown = any(move |State(state): State<T>| ready(not_found(&state))).with_state(self.state);
        Routes(Arc::new(Table { paths: self.paths, unknown, gate }))
    }
}

/// The routes and the access check of a listener. Cheap to clone.
#[derive(Clone)]
pub struct Routes<G>(Arc<Table<G>>);

struct Table<G> {
    paths: matchit::Router<Declared>,
    unknown: MethodRouter,
    gate: G,
}

impl<G: Gate> Routes<G> {
    /// Returns the access check, for requests that bypass the table.
    pub fn gate(&self) -> &G {
        &self.0.gate
    }

    /// Returns the route of a path.
    pub fn route_of(&self, path: &str) -> Route {
        self.find(path).0
    }

    /// Answers a request: checks access, calls the handler, counts the response.
    pub async fn answer(&self, mut request: Request<Body>) -> Response {
        let (route, found) = self.find(request.uri().path());
        let (methods, parameters) = match found {
            Some(found) => (&found.value.methods, decoded(&found.params)),
            None => (&self.0.unknown, None),
        };
        if parameters.is_some() {
            request.extensions_mut().insert(PathParameters(parameters));
        }
        let handler = async |request| match methods.clone().call(request).await {
            Ok(response) => response,
        };
        answering::answer(self.gate(), route, request, handler).await
    }

    /// Returns the route of a path and its declaration; `None` for [`Route::Unknown`].
    fn find<'t, 'p>(&'t self, path: &'p str) -> (Route, Option<matchit::Match<'t, 'p, &'t Declared>>) {
        let Ok(found) = self.0.paths.at(path) else { return (Route::Unknown, None) };
        // matchit accepts empty named segments, except the last one.
        let is_complete = found.params.iter().all(|(_, value)| !value.is_empty());
        let route = match found.value.route {
            _ if !is_complete => Route::Unknown,
            RouteOf::Fixed(route) => route,
            RouteOf::Path(of) => of(path),
        };
        (route, (route != Route::Unknown).then_some(found))
    }
}

impl<G: Gate> Handle for Routes<G> {
    async fn handle(self, request: Request<Body>) -> Result<Response, Infallible> {
        Ok(self.answer(request).await)
    }
}

/// The named segments of a path in order, percent-decoded. `None` without named segments, or if one is not valid UTF-8.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PathParameters(pub Option<Vec<String>>);

impl<T: Sync> FromRequestParts<T> for PathParameters {
    type Rejection = Infallible;

    async fn from_request_parts(parts: &mut Parts, _: &T) -> Result<Self, Infallible> {
        Ok(parts.extensions.remove().unwrap_or_default())
    }
}

fn decoded(parameters: &matchit::Params<'_, '_>) -> Option<Vec<String>> {
    if parameters.is_empty() {
        return None;
    }
    let decode = |text: &str| percent_decode_str(text).decode_utf8().ok().map(std::borrow::Cow::into_owned);
    parameters.iter().map(|(_, value)| decode(value)).collect()
}

/// Permits only routes of the class [`Class::Open`](crate::access::routes::Class::Open).
#[derive(Clone, Copy, Debug)]
pub struct OpenOnly(pub fn() -> Response);

impl Count for OpenOnly {
    const PROTOCOL: Protocol = Protocol::Http;

    /// Does not count, because each scrape would change the metrics that it reads.
    fn count(&self, _: Route, _: u16, _: Option<Reason>) {}
}

impl Gate for OpenOnly {
    fn refuse(&self, route: Route, _: &HeaderMap) -> Option<Response> {
        use crate::access::routes::{Class, class};
        matches!(class(route), Class::Part(_)).then(self.0)
    }

    fn load_report(&self, _: &str, _: &str) -> Option<Arc<LoadReport>> {
        None
    }
}

#[cfg(test)]
mod tests {
    use axum::routing::{get, post};
    use http::StatusCode;

    use super::*;

    /// Refuses all routes except [`Route::Live`] unless the request has the header `manager`.
    #[derive(Clone)]
    struct Manager;

    impl Count for Manager {
        const PROTOCOL: Protocol = Protocol::Http;

        fn count(&self, _: Route, _: u16, _: Option<Reason>) {}
    }

    impl Gate for Manager {
        fn refuse(&self, route: Route, headers: &HeaderMap) -> Option<Response> {
            let refused = route != Route::Live && !headers.contains_key("manager");
            refused.then(|| with(StatusCode::UNAUTHORIZED, format!("{route:?}")))
        }

        fn load_report(&self, model: &str, version: &str) -> Option<Arc<LoadReport>> {
            assert_eq!((model, version), ("m", "1"));
            Some(Arc::default())
        }
    }

    fn with(status: StatusCode, text: impl Into<Body>) -> Response {
        let mut response = Response::new(text.into());
        *response.status_mut() = status;
        response
    }

    fn last(path: &str) -> Route {
        if path.ends_with("nowhere") { Route::Unknown } else { Route::RepositoryLoad }
    }

    async fn names(PathParameters(names): PathParameters) -> String {
        names.map_or_else(|| "none".to_owned(), |names| names.join(" "))
    }

    fn routes() -> Routes<Manager> {
        Builder::new((), |()| with(StatusCode::METHOD_NOT_ALLOWED, "wrong method"))
            .route("/live", Route::Live, get(names))
            .route("/models/{model}/{version}", Route::ModelConfig, get(names).post(names))
            .route("/repository/{*rest}", RouteOf::Path(last), post(names))
            .build(Manager, |()| with(StatusCode::NOT_FOUND, "not found"))
    }

    async fn check(method: &str, path: &str, manager: bool, expected: (u16, &str)) {
        let request = Request::builder().method(method).uri(path);
        let request = if manager { request.header("manager", "") } else { request };
        let response = routes().answer(request.body(Body::empty()).expect("a request")).await;
        let (status, allow) = (response.status().as_u16(), response.headers().contains_key("allow"));
        let body = axum::body::to_bytes(response.into_body(), 100).await.expect("a body");
        assert_eq!((status, String::from_utf8_lossy(&body).as_ref()), expected, "{method} {path}");
        assert_eq!(allow, status == 405, "{method} {path}");
    }

    #[tokio::test]
    async fn checks_access_before_every_response() {
        for (method, path, refused, allowed) in [
            ("GET", "/models/a%20b/1", (401, "ModelConfig"), (200, "a b 1")),
            ("POST", "/models/a/b?x=y", (401, "ModelConfig"), (200, "a b")),
            ("GET", "/models/%ff/1", (401, "ModelConfig"), (200, "none")),
            ("PUT", "/models/a/1", (401, "ModelConfig"), (405, "wrong method")),
            ("GET", "/repository/a/b", (401, "RepositoryLoad"), (405, "wrong method")),
            ("POST", "/repository/a/b%2fc", (401, "RepositoryLoad"), (200, "a/b/c")),
            ("POST", "/repository/nowhere", (401, "Unknown"), (404, "not found")),
            ("POST", "/repository/", (401, "Unknown"), (404, "not found")),
            ("GET", "/models//1", (401, "Unknown"), (404, "not found")),
            ("GET", "/models/a/1/", (401, "Unknown"), (404, "not found")),
            ("GET", "//models/a/1", (401, "Unknown"), (404, "not found")),
            ("GET", "/%6dodels/a/1", (401, "Unknown"), (404, "not found")),
            ("GET", "/live/", (401, "Unknown"), (404, "not found")),
            ("GET", "/live", (200, "none"), (200, "none")),
            ("DELETE", "/live", (405, "wrong method"), (405, "wrong method")),
        ] {
            check(method, path, false, refused).await;
            check(method, path, true, allowed).await;
        }
    }

    #[tokio::test]
    async fn only_permitted_inference_that_asks_gets_a_load_report() {
        let routes = || {
            Builder::new((), |()| with(StatusCode::METHOD_NOT_ALLOWED, ""))
                .route("/v2/models/{model}/versions/{version}/infer", Route::Infer, post(names))
                .route("/live", Route::Live, get(names))
                .build(Manager, |()| with(StatusCode::NOT_FOUND, ""))
        };
        let infer = "/v2/models/m/versions/1/infer";
        for (method, path, format, manager, expected) in [
            ("POST", infer, Some("text"), true, Some("TEXT ")),
            ("POST", infer, Some("other"), true, None),
            ("POST", infer, None, true, None),
            ("POST", infer, Some("text"), false, None),
            ("GET", "/live", Some("text"), true, None),
        ] {
            let request = Request::builder().method(method).uri(path);
            let request = if manager { request.header("manager", "") } else { request };
            let request = format
                .into_iter()
                .fold(request, |request, value| request.header("Endpoint-Load-Metrics-Format", value));
            let response = routes().answer(request.body(Body::empty()).expect("a request")).await;
            let report =
                response.headers().get("endpoint-load-metrics").map(|value| value.to_str().unwrap_or_default());
            assert_eq!(report, expected, "{path} {format:?} {manager}");
        }
    }

    #[test]
    fn open_only_refuses_other_routes() {
        let gate = OpenOnly(|| with(StatusCode::NOT_FOUND, ""));
        let refused = |route| gate.refuse(route, &HeaderMap::new()).is_some();
        assert!(!refused(Route::Metrics) && refused(Route::Live) && refused(Route::LogSettings));
    }
}
