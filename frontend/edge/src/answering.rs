//! The layer in front of every handler of every listener: the access check of the request's route, the response count, and load
//! reports in responses to inference requests.
//!
//! Each request that hyper has begun to handle is counted exactly once, with the status of its response, even if the client
//! disconnects early. hyper does not begin with a request whose client has already disconnected. This is a function and a guard
//! instead of `tower` layers, which would allocate a boxed future each for every inference.

use std::sync::Arc;

use axum::body::Body;
use axum::response::Response;
use http::{HeaderMap, Request};
use pharos::error::Reason;
use pharos::load_report::LoadReport;
use pharos::service::{Protocol, Route, SharedService};
use pharos::timeline::Instant;
use pharos_os::clock;

use crate::deadline;
use crate::load_report::Requested;

/// Counts the responses of a listener.
pub trait Count {
    /// The protocol of the listener.
    const PROTOCOL: Protocol;

    /// Counts one response: the HTTP status or gRPC code, and the reason if the request was refused or failed.
    fn count(&self, route: Route, code: u16, reason: Option<Reason>);
}

impl<C: Count> Count for &C {
    const PROTOCOL: Protocol = C::PROTOCOL;

    fn count(&self, route: Route, code: u16, reason: Option<Reason>) {
        C::count(self, route, code, reason);
    }
}

/// Counts the gRPC calls of a service.
#[derive(Clone)]
pub struct Calls(pub SharedService);

impl Count for Calls {
    const PROTOCOL: Protocol = Protocol::Grpc;

    fn count(&self, route: Route, code: u16, reason: Option<Reason>) {
        self.0.record_answered(Self::PROTOCOL, route, code, reason);
    }
}

/// The access check and the counters of an HTTP listener. The [table of routes](crate::routing::Routes) applies it to every
/// request.
pub trait Gate: Count + Clone + Send + Sync + 'static {
    /// Returns the response to a request without access to the route; `None` if access is granted. For [`Route::Unknown`],
    /// `None` leads to the table's 404 response.
    fn refuse(&self, route: Route, headers: &HeaderMap) -> Option<Response>;

    /// Returns the load report for a model and version, which are empty if the request names none; `None` if the listener gives no
    /// load reports.
    fn load_report(&self, model: &str, version: &str) -> Option<Arc<LoadReport>>;
}

/// The outcome of a request other than plain success. Handlers add it to the extensions of their response.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// The request was refused or failed for this reason.
    Failed(Reason),
    /// The path, method or resource does not exist: counted under [`Route::Unknown`].
    Unknown,
    /// The handler counts the request when its last response is sent.
    CountedByHandler,
}

/// Counts a request when it ends. If dropped earlier, it counts as cancelled, or as too late at the client's deadline.
#[derive(Debug)]
pub struct Account<C: Count> {
    counter: C,
    route: Route,
    /// The client's deadline, as [`deadline::at`] returns it.
    deadline: Option<Instant>,
    is_counted: bool,
}

impl<C: Count> Account<C> {
    /// Returns an account of a new request.
    pub fn new(counter: C, route: Route) -> Self {
        Self { counter, route, deadline: None, is_counted: false }
    }

    /// Sets the deadline of the request's client, as [`deadline::at`] returns it.
    #[must_use]
    pub fn with_deadline(mut self, deadline: Option<Instant>) -> Self {
        self.deadline = deadline;
        self
    }

    /// Counts the request with this status.
    pub fn end(mut self, code: u16, reason: Option<Reason>) {
        self.is_counted = true;
        self.counter.count(self.route, code, reason);
    }

    /// Does not count the request, because its handler does.
    pub fn end_uncounted(mut self) {
        self.is_counted = true;
    }

    /// Counts a response with the [`Outcome`] in its extensions, and removes that.
    #[must_use]
    pub fn finish(mut self, mut response: Response) -> Response {
        let code = response.status().as_u16();
        match response.extensions_mut().remove() {
            None => self.end(code, None),
            Some(Outcome::Failed(reason)) => self.end(code, Some(reason)),
            Some(Outcome::Unknown) => {
                self.route = Route::Unknown;
                self.end(code, Some(Reason::Unsupported));
            }
            Some(Outcome::CountedByHandler) => self.end_uncounted(),
        }
        response
    }
}

impl<C: Count> Drop for Account<C> {
    fn drop(&mut self) {
        if !self.is_counted {
            let (code, reason) = deadline::abandoned_status(C::PROTOCOL, self.deadline, clock::now());
            self.counter.count(self.route, code, Some(reason));
        }
    }
}

/// A request with access to its route. Counts it as cancelled if dropped before [`Admitted::finish`].
#[derive(Debug)]
pub struct Admitted<'g, G: Gate> {
    gate: &'g G,
    account: Account<&'g G>,
    requested: Option<Requested>,
}

impl<'g, G: Gate> Admitted<'g, G> {
    /// Checks the access of a request of `route`.
    ///
    /// # Errors
    /// The refusal of `gate`, which is counted.
    // A refusal is passed on as it is, so there is nothing to gain from a box.
    #[allow(clippy::result_large_err)]
    pub fn new(gate: &'g G, route: Route, request: &Request<Body>) -> Result<Self, Response> {
        let account = Account::new(gate, route);
        match gate.refuse(route, request.headers()) {
            Some(refused) => Err(account.finish(refused)),
            None => Ok(Self { gate, account, requested: Requested::of(route, request.headers(), request.uri()) }),
        }
    }

    /// Counts the response of the handler. Adds a load report if an inference request asks for one.
    pub fn finish(self, mut response: Response) -> Response {
        let Self { gate, account, requested } = self;
        if let Some(requested) = requested {
            requested.add_to(&mut response, |model, version| gate.load_report(model, version));
        }
        account.finish(response)
    }
}

/// Answers a request of `route` with the refusal of `gate`, else with `handler`, and counts the response. Adds a load report if an
/// inference request asks for one.
pub async fn answer<G: Gate, F: Future<Output = Response>>(
    gate: &G,
    route: Route,
    request: Request<Body>,
    handler: impl FnOnce(Request<Body>) -> F,
) -> Response {
    match Admitted::new(gate, route, &request) {
        Ok(admitted) => admitted.finish(handler(request).await),
        Err(refused) => refused,
    }
}
