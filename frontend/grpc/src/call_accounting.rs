//! Counts the answer of each call exactly once, also if the message cannot be decoded, the method does not exist, or the client
//! disconnects; records when the call was received.

use std::convert::Infallible;
use std::pin::Pin;
use std::sync::atomic::{AtomicU8, Ordering};
use std::sync::{Arc, OnceLock};
use std::task::{Context, Poll};
use std::time::Duration;

use http::{HeaderMap, Request, Response};
use pharos::access::Restrictions;
use pharos::error::{InferError, Reason};
use pharos::infer::{InferRequest, Parameter};
use pharos::service::{EXITING_TEXT, Protocol, Route, Service, SharedService};
use pharos::timeline::Instant;
use tonic::body::Body;
use tonic::{Code, Status};

use super::trace;
use pharos_edge::access::routes::of_grpc;
use pharos_edge::access::{Access, DeniedAnswer, Forward, GRPC_PREFIX, Guard};
use pharos_edge::answering::{Account, Calls};
use pharos_edge::deadline;
use pharos_edge::load_report;
use pharos_edge::observed_body::{BodyEnd, ObservedBody, grpc_status_in_head};
use pharos_edge::request_log::Logged;
use pharos_os::clock;

/// The shared state of a call, through which its handler reports the outcome. Stored in the request's extensions.
#[derive(Clone)]
pub(super) struct CallAccount {
    /// When the call's headers were received.
    pub(super) received: Instant,
    /// The time until the client's deadline.
    pub(super) limit: Option<Duration>,
    /// When the client leaves at its deadline.
    pub(super) deadline: Option<Instant>,
    /// Whether the client asks for a load report.
    is_reported: bool,
    ending: Arc<Ending>,
}

/// The headers that become parameters of a call's requests. Stored in the call's extensions.
#[derive(Clone)]
pub(super) struct Forwarded(pub(super) Vec<(String, String)>);

impl Forwarded {
    /// Returns the forwarded headers in the extensions of `request`.
    pub(super) fn of<T>(request: &tonic::Request<T>) -> Self {
        request.extensions().get::<Self>().cloned().unwrap_or(Self(Vec::new()))
    }

    /// Adds the headers to the request's parameters.
    pub(super) fn add_to(&self, request: &mut InferRequest) {
        let parameters = self.0.iter().map(|(name, value)| (name.clone(), Parameter::String(value.clone())));
        request.parameters.extend(parameters);
    }
}

/// The outcome of the call as reported by its handler.
#[derive(Default)]
struct Ending {
    reason: OnceLock<Reason>,
    /// 1: the handler counts the call's answers itself, because a stream has several.
    counted_by_handler: AtomicU8,
    /// The model and version of the first request, if the client asks for a load report.
    model: OnceLock<(String, String)>,
}

impl CallAccount {
    /// Returns the account in the extensions of `request`, or a new one that starts now.
    pub(super) fn of<T>(request: &tonic::Request<T>, service: &dyn Service) -> Self {
        let account = request.extensions().get::<Self>().cloned();
        account.unwrap_or_else(|| Self::new(service, request.metadata().as_ref(), false))
    }

    /// Returns the account of a call that has just been received.
    fn new(service: &dyn Service, headers: &HeaderMap, is_reported: bool) -> Self {
        let limit = deadline::of(headers);
        let deadline = limit.map(|limit| deadline::at(clock::now(), limit));
        Self { received: service.now(), limit, deadline, is_reported, ending: Arc::default() }
    }

    /// Notes the model of a request for the load report, if the client asks for one.
    pub(super) fn names_model(&self, model: &str, version: &str) {
        if self.is_reported {
            self.ending.model.get_or_init(|| (model.to_owned(), version.to_owned()));
        }
    }

    /// Adds the load report to a response.
    fn report_load(self, response: Response<Body>, service: SharedService) -> Response<Body> {
        let reported = load_report::in_trailers(response, move || {
            let (model, version) = self.ending.model.get().map_or(("", ""), |(model, version)| (model, version));
            service.load_report(model, version)
        });
        reported.map(Body::new)
    }

    /// Records the reason for which the call fails and returns the status of `error`.
    pub(super) fn fail(&self, error: InferError) -> Status {
        let _ = self.ending.reason.set(error.reason);
        status(error)
    }

    /// Declares that the handler counts the answers from now on.
    pub(super) fn counted_by_handler(&self) {
        self.ending.counted_by_handler.store(1, Ordering::Relaxed);
    }

    fn is_counted_by_handler(&self) -> bool {
        self.ending.counted_by_handler.load(Ordering::Relaxed) == 1
    }
}

/// Returns the gRPC status of an error.
pub(super) fn status(error: InferError) -> Status {
    if error.message == EXITING_TEXT {
        // Triton's text for this differs between the protocols.
        return Status::unavailable("GRPC server is shutting down and has stopped accepting new requests.");
    }
    Status::new(Code::from_i32(error.code.grpc_code()), shortened(error.message))
}

/// The maximum encoded size of a status message in bytes. It is sent as a header; clients reject headers of more than 8 KiB in
/// total (gRPC's soft limit) and then report that instead of the actual error.
const MAX_TEXT: usize = 6 << 10;

/// Truncates a text that is too long for a header: names, ids and shapes in it have any length that the client chooses.
fn shortened(text: String) -> String {
    // All other characters are percent-encoded on the wire.
    let on_the_wire = |c: char| if c.is_ascii_alphanumeric() { 1 } else { 3 * c.len_utf8() };
    let mut size = 0usize;
    let cut = text.char_indices().find(|(_, c)| {
        size += on_the_wire(*c);
        size > MAX_TEXT
    });
    match cut.and_then(|(at, _)| text.get(..at)) {
        Some(start) => format!("{start}... ({} bytes in all)", text.len()),
        None => text,
    }
}

/// Returns the reason of a failure that the transport reported before any handler ran.
pub(super) fn transport_reason(code: Code) -> Reason {
    match code {
        Code::Ok | Code::Unimplemented => Reason::Unsupported,
        Code::Cancelled => Reason::Cancelled,
        Code::ResourceExhausted | Code::OutOfRange => Reason::TooLarge,
        _ => Reason::Malformed,
    }
}

/// A service that stamps and counts the calls of `inner`.
#[derive(Clone)]
pub(super) struct Counted<D> {
    pub(super) service: SharedService,
    pub(super) restricted: Arc<Restrictions>,
    pub(super) access: Access,
    pub(super) forward: Forward,
    pub(super) inner: D,
}

impl CallAccount {
    /// Counts the call unless its handler does.
    fn end(&self, count: Account<Calls>, code: Code) {
        if self.is_counted_by_handler() {
            return count.end_uncounted();
        }
        let failed = code != Code::Ok;
        let reason = self.ending.reason.get().copied();
        count.end(code as u16, failed.then(|| reason.unwrap_or_else(|| transport_reason(code))));
    }
}

impl<D, B> tower::Service<Request<B>> for Counted<D>
where
    D: tower::Service<Request<B>, Response = Response<Body>, Error = Infallible>,
    D::Future: Send + 'static,
{
    type Response = Response<Body>;
    type Error = Infallible;
    type Future = Pin<Box<dyn Future<Output = Result<Response<Body>, Infallible>> + Send>>;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        self.inner.poll_ready(cx)
    }

    fn call(&mut self, mut request: Request<B>) -> Self::Future {
        let route = of_grpc(request.uri().path());
        let is_reported = load_report::requested(route, request.headers()).is_some();
        let account = CallAccount::new(&*self.service, request.headers(), is_reported);
        request.extensions_mut().insert(account.clone());
        let called = || request.uri().path().to_owned();
        let logged = Logged::unless_by_port(request.extensions(), Protocol::Grpc, called);
        let logged = logged.map(|logged| logged.with_deadline(account.deadline));
        let count = Account::new(Calls(self.service.clone()), route).with_deadline(account.deadline);
        let refused = self.refusal(route, &account, &request);
        let refused = refused.or_else(|| self.forward_headers(route, &account, &mut request));
        let call = refused.is_none().then(|| self.inner.call(request));
        let reported = (is_reported && call.is_some()).then(|| self.service.clone());
        Box::pin(async move {
            let response = match (call, refused) {
                (Some(call), _) => call.await?,
                (None, refused) => refused.unwrap_or_default(),
            };
            let status = grpc_status_in_head(&response);
            account.end(count, status.map_or(Code::Ok, |code| Code::from_i32(code.into())));
            let mut response = trace::sent(response);
            if let Some(logged) = logged {
                match status {
                    Some(code) => logged.answered(code),
                    None => {
                        let code_of = |status: &Status| status.code() as u16;
                        let ended = move |end: BodyEnd<'_, Status>| logged.answered(end.grpc_status(code_of));
                        response = response.map(|body| Body::new(ObservedBody::new(body, ended)));
                    }
                }
            }
            Ok(match reported {
                Some(service) => account.report_load(response, service),
                None => response,
            })
        })
    }
}

impl<D> Counted<D> {
    /// Adds the forwarded headers of an inference call to its extensions; returns the refusal if a header is not allowed.
    fn forward_headers<B>(
        &self,
        route: Route,
        account: &CallAccount,
        request: &mut Request<B>,
    ) -> Option<Response<Body>> {
        if self.forward.is_empty() || !matches!(route, Route::Infer | Route::StreamInfer) {
            return None;
        }
        match self.forward.parameters(request.headers()) {
            Ok(parameters) => {
                request.extensions_mut().insert(Forwarded(parameters));
                None
            }
            Err(text) => Some(account.fail(InferError::invalid(text)).into_http()),
        }
    }

    /// Returns the refusal of a call to an unknown route, or of one without the required token or key.
    fn refusal<B>(&self, route: Route, account: &CallAccount, request: &Request<B>) -> Option<Response<Body>> {
        let guard = Guard { access: &self.access, restricted: &self.restricted, prefix: GRPC_PREFIX };
        if guard.is_open() {
            return None;
        }
        let denied = guard.check(route, request.headers()).err()?;
        let DeniedAnswer { code, text, reason, .. } = denied.over_grpc();
        let _ = account.ending.reason.set(reason);
        Some(Status::new(Code::from_i32(code.into()), text).into_http())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_long_text_is_truncated_between_characters() {
        for (text, kept) in [("x".repeat(6144), 6144), ("x".repeat(6145), 6144), ("\u{65e5}".repeat(4000), 3 * 682)] {
            let message = status(InferError::invalid(text.clone())).message().to_owned();
            if kept == text.len() {
                assert_eq!(message, text);
            } else {
                let expected = format!("... ({} bytes in all)", text.len());
                assert_eq!(message.strip_prefix(&text[..kept]), Some(expected.as_str()));
            }
        }
    }
}
