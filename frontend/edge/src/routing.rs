//! The table of routes of an HTTP listener. Each route is declared once, with its path, its
//! [`Route`] and its handlers. The access check of the route precedes its handler and the 405
//! response. A path that is not declared is [`Route::Unknown`] and reaches no handler.

use std::convert::Infallible;
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;

use axum::body::Body;
use axum::response::Response;
use http::header::{ALLOW, CONTENT_LENGTH, HeaderValue};
use http::{Method, Request};
use http_body::Body as _;
use percent_encoding::percent_decode_str;
use pharos::service::{Protocol, Route};

use crate::access::Refusal;
use crate::call::{Call, Incoming};
use crate::http_service::Handle;
use crate::policy::Policy;
use crate::request_log::FIELDS;

/// The route of a declared path.
#[derive(Clone, Copy, Debug)]
pub enum RouteOf {
    /// One route for every request.
    Fixed(Route),
    /// A route that depends on the received path, which matches the declared path.
    Path(fn(&str) -> Route),
    /// One route for requests with POST, and another one for all others.
    Methods {
        /// The route of POST.
        post: Route,
        /// The route of all other methods.
        others: Route,
    },
}

impl From<Route> for RouteOf {
    fn from(route: Route) -> Self {
        Self::Fixed(route)
    }
}

/// A request for a declared path.
pub struct Routed {
    /// The named segments of the path in order, percent-decoded. `None` without named segments, or
    /// if one is not valid UTF-8: the path then does not exist.
    pub parameters: Option<Vec<String>>,
    /// The request.
    pub request: Request<Body>,
}

/// The future of a response.
pub type Answering = Pin<Box<dyn Future<Output = Response> + Send>>;

/// Answers requests for a path: gets the state of its table, and [finishes](Call::finish) the call.
pub type Handler<T> = Box<dyn Fn(T, Call, Routed) -> Answering + Send + Sync>;

/// Returns a function as a handler.
pub fn handler<T, F>(answer: impl Fn(T, Call, Routed) -> F + Send + Sync + 'static) -> Handler<T>
where
    F: Future<Output = Response> + Send + 'static,
{
    Box::new(move |state, call, routed| Box::pin(answer(state, call, routed)))
}

/// The handlers of a path, by method. The handler of GET also answers HEAD.
pub struct Methods<T> {
    get: Option<Handler<T>>,
    post: Option<Handler<T>>,
    delete: Option<Handler<T>>,
}

impl<T> Methods<T> {
    /// Returns the handler of GET.
    pub fn get(handler: Handler<T>) -> Self {
        Self { get: Some(handler), post: None, delete: None }
    }

    /// Returns the handler of POST.
    pub fn post(handler: Handler<T>) -> Self {
        Self { get: None, post: Some(handler), delete: None }
    }

    /// Adds the handler of POST.
    #[must_use]
    pub fn and_post(self, handler: Handler<T>) -> Self {
        Self { post: Some(handler), ..self }
    }

    /// Adds the handler of DELETE.
    #[must_use]
    pub fn and_delete(self, handler: Handler<T>) -> Self {
        Self { delete: Some(handler), ..self }
    }

    /// Returns the methods of a table with another state, whose handlers keep this one.
    fn with<S: 'static>(self, state: &T) -> Methods<S>
    where
        T: Clone + Send + Sync + 'static,
    {
        let keep = |handler: Handler<T>| -> Handler<S> {
            let state = state.clone();
            Box::new(move |_, call, routed| handler(state.clone(), call, routed))
        };
        Methods {
            get: self.get.map(keep),
            post: self.post.map(keep),
            delete: self.delete.map(keep),
        }
    }

    fn of(&self, method: &Method) -> Option<&Handler<T>> {
        match *method {
            Method::GET | Method::HEAD => self.get.as_ref(),
            Method::POST => self.post.as_ref(),
            Method::DELETE => self.delete.as_ref(),
            _ => None,
        }
    }

    /// Returns the value of `Allow`.
    fn allowed(&self) -> HeaderValue {
        HeaderValue::from_static(match (&self.get, &self.post, &self.delete) {
            (Some(_), Some(_), Some(_)) => "GET,HEAD,POST,DELETE",
            (Some(_), Some(_), None) => "GET,HEAD,POST",
            (Some(_), None, Some(_)) => "GET,HEAD,DELETE",
            (Some(_), None, None) => "GET,HEAD",
            (None, Some(_), Some(_)) => "POST,DELETE",
            (None, Some(_), None) => "POST",
            (None, None, Some(_)) => "DELETE",
            (None, None, None) => "",
        })
    }
}

/// The answers of a table to requests that reach no handler.
#[derive(Clone, Copy)]
pub struct Fallbacks {
    /// For an undeclared path.
    pub not_found: fn(&str) -> Response,
    /// For a declared path with an undeclared method.
    pub wrong_method: fn() -> Response,
    /// Without access to the route.
    pub refused: fn(Refusal) -> Response,
}

/// Builds a table of routes whose handlers have the state `T`.
pub struct Builder<T> {
    declared: Vec<(String, Declared<T>)>,
}

/// The declaration of a path.
struct Declared<T> {
    route: RouteOf,
    methods: Methods<T>,
    /// The fallbacks of the edge that has declared the path; `None` if the fallbacks of the table
    /// count.
    fallbacks: Option<Fallbacks>,
}

impl<T> Default for Builder<T> {
    fn default() -> Self {
        Self { declared: Vec::new() }
    }
}

impl<T: Clone + Send + Sync + 'static> Builder<T> {
    /// Adds a path: `{name}` matches a non-empty segment, `{*name}` at the end all remaining
    /// segments. Static segments take precedence over named ones.
    #[must_use]
    pub fn route(mut self, path: &str, route: impl Into<RouteOf>, methods: Methods<T>) -> Self {
        let declared = Declared { route: route.into(), methods, fallbacks: None };
        self.declared.push((path.to_owned(), declared));
        self
    }

    /// Adds the paths of another edge that shares the port. Its handlers keep their state, and its
    /// paths their form of refusals and of the answer to a wrong method.
    #[must_use]
    pub fn include<U>(mut self, other: Builder<U>, state: U, fallbacks: Fallbacks) -> Self
    where
        U: Clone + Send + Sync + 'static,
    {
        for (path, Declared { route, methods, .. }) in other.declared {
            let declared =
                Declared { route, methods: methods.with(&state), fallbacks: Some(fallbacks) };
            self.declared.push((path, declared));
        }
        self
    }

    /// Adds the handler of POST of another edge that shares the port to a path, which this table may
    /// have with another method and one route for all requests. `route` is the route of POST. Any other
    /// declaration of the path conflicts: see [`Builder::build`].
    #[must_use]
    pub fn include_post<U>(
        mut self,
        path: &str,
        route: Route,
        handler: Handler<U>,
        state: U,
    ) -> Self
    where
        U: Clone + Send + Sync + 'static,
    {
        let methods = Methods::post(handler).with(&state);
        let declared = self.declared.iter_mut().find(|(known, _)| known == path);
        if let Some((_, shared)) = declared
            && let RouteOf::Fixed(others) = shared.route
            && shared.methods.post.is_none()
        {
            shared.route = RouteOf::Methods { post: route, others };
            shared.methods.post = methods.post;
            return self;
        }
        self.route(path, route, methods)
    }

    /// Builds the table with the policy of its port.
    ///
    /// # Panics
    /// Two declared paths conflict.
    pub fn build(self, state: T, policy: Arc<dyn Policy>, fallbacks: Fallbacks) -> Routes<T> {
        let mut paths = matchit::Router::new();
        for (path, declared) in self.declared {
            paths.insert(path, declared).expect("no other route is declared with this path");
        }
        Routes(Arc::new(Table { paths, state, policy, fallbacks }))
    }
}

/// The routes and the policy of a port. Cheap to clone.
pub struct Routes<T>(Arc<Table<T>>);

impl<T> Clone for Routes<T> {
    fn clone(&self) -> Self {
        Self(self.0.clone())
    }
}

struct Table<T> {
    paths: matchit::Router<Declared<T>>,
    state: T,
    policy: Arc<dyn Policy>,
    fallbacks: Fallbacks,
}

impl<T: Clone + Send + Sync + 'static> Routes<T> {
    /// Returns the state of the handlers.
    pub fn state(&self) -> &T {
        &self.0.state
    }

    /// Admits a request that bypasses the table.
    ///
    /// # Errors
    /// The request has no access, and this is its answer.
    // The answer is passed on as it is, so there is nothing to gain from a box.
    #[allow(clippy::result_large_err)]
    pub fn admit(&self, route: Route, incoming: &mut Incoming<Body>) -> Result<Call, Response> {
        Call::admit(Protocol::Http, route, incoming, &self.0.policy)
            .map_err(self.0.fallbacks.refused)
    }

    /// Returns the answer to a request without access to a route, which is counted; `None` if it
    /// has access.
    pub fn refusal(&self, route: Route, incoming: &mut Incoming<Body>) -> Option<Response> {
        let refusal =
            self.0.policy.check(Protocol::Http, route, incoming.request.headers()).err()?;
        let refused =
            Call::admit_if(Err(refusal), Protocol::Http, route, incoming, &self.0.policy).err()?;
        Some((self.0.fallbacks.refused)(refused))
    }

    /// Answers a request whose path or method does not exist.
    pub fn answer_unknown(&self, incoming: Incoming<Body>, response: Response) -> Response {
        Call::answer_unrouted(incoming, &self.0.policy, response)
    }

    /// Returns the route of a path.
    pub fn route_of(&self, path: &str) -> Route {
        self.find(path, &Method::GET).0
    }

    /// Answers a request: admits it and calls its handler.
    pub async fn answer(&self, mut incoming: Incoming<Body>) -> Response {
        let (route, found) = self.find(incoming.request.uri().path(), incoming.request.method());
        let fallbacks =
            found.as_ref().and_then(|found| found.value.fallbacks).unwrap_or(self.0.fallbacks);
        let found = found.map(|found| (&found.value.methods, decoded(&found.params)));
        let call = match Call::admit(Protocol::Http, route, &mut incoming, &self.0.policy) {
            Ok(call) => call,
            Err(refusal) => return (fallbacks.refused)(refusal),
        };
        let request = incoming.request;
        let method = request.method().clone();
        let mut response = match found {
            None => call.finish_unknown((self.0.fallbacks.not_found)(request.uri().path())),
            Some((methods, parameters)) => match methods.of(&method) {
                Some(handler) => {
                    handler(self.0.state.clone(), call, Routed { parameters, request }).await
                }
                None => {
                    let mut response = call.finish_unknown((fallbacks.wrong_method)());
                    response.headers_mut().insert(ALLOW, methods.allowed());
                    response
                }
            },
        };
        // hyper adds the length too, but not without a body over HTTP/2.
        if let Some(size) = response.body().size_hint().exact() {
            response.headers_mut().entry(CONTENT_LENGTH).or_insert_with(|| size.into());
        }
        if method == Method::HEAD {
            *response.body_mut() = Body::empty();
        }
        response
    }

    /// Returns the route of a path and its declaration; `None` for [`Route::Unknown`].
    fn find<'t, 'p>(
        &'t self,
        path: &'p str,
        method: &Method,
    ) -> (Route, Option<matchit::Match<'t, 'p, &'t Declared<T>>>) {
        let Ok(found) = self.0.paths.at(path) else { return (Route::Unknown, None) };
        // matchit accepts empty named segments, except the last one.
        let is_complete = found.params.iter().all(|(_, value)| !value.is_empty());
        let route = match found.value.route {
            _ if !is_complete => Route::Unknown,
            RouteOf::Fixed(route) => route,
            RouteOf::Path(of) => of(path),
            RouteOf::Methods { post, .. } if *method == Method::POST => post,
            RouteOf::Methods { others, .. } => others,
        };
        (route, (route != Route::Unknown).then_some(found))
    }
}

impl<T: Clone + Send + Sync + 'static> Handle for Routes<T> {
    async fn handle(self, request: Request<Body>) -> Result<Response, Infallible> {
        Ok(self.answer(Incoming::over_http(request, &FIELDS)).await)
    }

    fn refuse(&self, request: Request<Body>, response: Response) -> Response {
        self.answer_unknown(Incoming::over_http(request, &FIELDS), response)
    }
}

fn decoded(parameters: &matchit::Params<'_, '_>) -> Option<Vec<String>> {
    if parameters.is_empty() {
        return None;
    }
    let decode =
        |text: &str| percent_decode_str(text).decode_utf8().ok().map(std::borrow::Cow::into_owned);
    parameters.iter().map(|(_, value)| decode(value)).collect()
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use http::{HeaderMap, StatusCode};
    use pharos::error::Reason;
    use pharos::service::Service;
    use pharos_service_double::EchoService;

    use tower::Service as _;

    use super::*;
    use crate::http_service::HttpService;
    use crate::response_timing::ResponseTiming;

    /// Refuses all routes except [`Route::Live`] unless the request has the header `manager`.
    struct Manager {
        service: EchoService,
        timing: ResponseTiming,
    }

    impl Policy for Manager {
        fn service(&self) -> &dyn Service {
            &self.service
        }

        fn timing(&self) -> &ResponseTiming {
            &self.timing
        }

        fn check(&self, _: Protocol, route: Route, headers: &HeaderMap) -> Result<(), Refusal> {
            match route == Route::Live || headers.contains_key("manager") {
                true => Ok(()),
                false => Err(Refusal::new(401, format!("{route:?}"), Reason::Unauthenticated)),
            }
        }
    }

    const FALLBACKS: Fallbacks = Fallbacks {
        not_found: |_| with(StatusCode::NOT_FOUND, "not found"),
        wrong_method: || with(StatusCode::METHOD_NOT_ALLOWED, "wrong method"),
        refused: |refusal| with(StatusCode::UNAUTHORIZED, refusal.text),
    };

    fn with(status: StatusCode, text: impl Into<Body>) -> Response {
        let mut response = Response::new(text.into());
        *response.status_mut() = status;
        response
    }

    fn last(path: &str) -> Route {
        if path.ends_with("nowhere") { Route::Unknown } else { Route::RepositoryLoad }
    }

    fn names() -> Handler<()> {
        handler(async |(), call: Call, routed: Routed| {
            let names =
                routed.parameters.map_or_else(|| "none".to_owned(), |names| names.join(" "));
            call.finish(Response::new(names.into()), None)
        })
    }

    fn routes(service: &EchoService) -> Routes<()> {
        let policy = Manager { service: service.clone(), timing: ResponseTiming::default() };
        Builder::default()
            .route("/live", Route::Live, Methods::get(names()))
            .route(
                "/models/{model}/{version}",
                Route::ModelConfig,
                Methods::get(names()).and_post(names()),
            )
            .route("/stored/{id}", Route::ModelConfig, Methods::get(names()).and_delete(names()))
            .route("/repository/{*rest}", RouteOf::Path(last), Methods::post(names()))
            .route(
                "/v2/models/{model}/versions/{version}/infer",
                Route::Infer,
                Methods::post(names()),
            )
            .build((), Arc::new(policy), FALLBACKS)
    }

    async fn answer(service: &EchoService, request: Request<Body>) -> Response {
        routes(service).answer(Incoming { request, line: None }).await
    }

    async fn check(method: &str, path: &str, manager: bool, expected: (u16, &str)) {
        let request = Request::builder().method(method).uri(path);
        let request = if manager { request.header("manager", "") } else { request };
        let service = EchoService::default();
        let response = answer(&service, request.body(Body::empty()).expect("a request")).await;
        let status = response.status().as_u16();
        let allow = response.headers().contains_key("allow");
        let body = axum::body::to_bytes(response.into_body(), 100).await.expect("a body");
        assert_eq!((status, String::from_utf8_lossy(&body).as_ref()), expected, "{method} {path}");
        assert_eq!(allow, status == 405, "{method} {path}");
        let counted: Vec<u16> = service.records().iter().map(|(_, _, code, _)| *code).collect();
        assert_eq!(counted, [status], "{method} {path}");
    }

    #[tokio::test]
    async fn checks_access_before_every_response() {
        for (method, path, refused, allowed) in [
            ("GET", "/models/a%20b/1", (401, "ModelConfig"), (200, "a b 1")),
            ("POST", "/models/a/b?x=y", (401, "ModelConfig"), (200, "a b")),
            ("GET", "/models/%ff/1", (401, "ModelConfig"), (200, "none")),
            ("DELETE", "/stored/a", (401, "ModelConfig"), (200, "a")),
            ("POST", "/stored/a", (401, "ModelConfig"), (405, "wrong method")),
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

    /// The service refuses such a request before it is routed; it is counted all the same.
    #[tokio::test]
    async fn an_unsupported_transfer_coding_is_counted() {
        let service = EchoService::default();
        let mut server = HttpService::new(routes(&service), Duration::ZERO);
        let request = Request::builder().uri("/live").header("transfer-encoding", "gzip, chunked");
        let response =
            server.call(request.body(Body::empty()).expect("a request")).await.expect("a response");
        assert_eq!(response.status(), StatusCode::NOT_IMPLEMENTED);
        assert_eq!(
            service.records(),
            [(Protocol::Http, Route::Unknown, 501, Some(Reason::Unsupported))]
        );
    }

    #[tokio::test]
    async fn the_head_of_a_response_is_that_of_its_get() {
        let request =
            Request::builder().method("HEAD").uri("/live").body(Body::empty()).expect("a request");
        let response = answer(&EchoService::default(), request).await;
        assert_eq!(
            response.headers().get(CONTENT_LENGTH).map(HeaderValue::as_bytes),
            Some(&b"4"[..])
        );
        assert_eq!(axum::body::to_bytes(response.into_body(), 100).await.expect("a body"), "");
    }

    #[tokio::test]
    async fn only_permitted_inference_that_asks_gets_a_load_report() {
        let infer = "/v2/models/m/versions/1/infer";
        for (method, path, format, manager, expected) in [
            ("POST", infer, Some("text"), true, true),
            ("POST", infer, Some("other"), true, false),
            ("POST", infer, None, true, false),
            ("POST", infer, Some("text"), false, false),
            ("GET", "/live", Some("text"), true, false),
        ] {
            let request = Request::builder().method(method).uri(path);
            let request = if manager { request.header("manager", "") } else { request };
            let request = format.into_iter().fold(request, |request, value| {
                request.header("Endpoint-Load-Metrics-Format", value)
            });
            let response =
                answer(&EchoService::default(), request.body(Body::empty()).expect("a request"))
                    .await;
            let report = response
                .headers()
                .get("endpoint-load-metrics")
                .map(|value| value.to_str().unwrap_or_default());
            let is_text = report.is_some_and(|report| report.starts_with("TEXT "));
            assert_eq!(is_text, expected, "{path} {format:?} {manager}: {report:?}");
        }
    }
}
