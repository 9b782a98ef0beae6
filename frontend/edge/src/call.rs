//! One request, of every protocol, from its head until its response is handed to the connection or,
//! if the response is streamed, until its body ends.
//!
//! Each request that hyper has begun to handle is a [`Call`]. It is counted and logged exactly
//! once: with the status of its response, or as abandoned if the call is dropped before. hyper does
//! not begin with a request whose client has already disconnected. A call is a value and not a
//! chain of `tower` layers, which would allocate a boxed future each for every inference.
//!
//! | response | counted | logged |
//! |---|---|---|
//! | HTTP, whole ([`Call::finish`]) | when the handler returns | with the count |
//! | HTTP, events of `generate_stream` ([`Call::begin_stream`], [`Call::end_stream`]) | with the last event | with the head, or the last event if the format waits for the body |
//! | HTTP, streamed by a handler ([`Call::finish_with_body`]) | at the end of the body | with the count |
//! | gRPC ([`SharedCall::finish`]) | when the response begins, or at the end ([`Policy::counts_calls_at_end`]) | with the trailers |
//! | `ModelStreamInfer` ([`Call::child`]) | each request with its last response | not |
//! | refused ([`Call::admit`]) | at once | with the count |
//! | none: the call is dropped | as abandoned | as abandoned |
//!
//! Where the log line precedes the count, both can differ: a stream that its client leaves is
//! logged with 200 and counted with 499.

mod body;

use std::mem;
use std::sync::Arc;

use axum::body::Body;
use axum::response::Response;
use http::header::{AUTHORIZATION, HeaderValue};
use http::{HeaderMap, Method, Request};
use parking_lot::{Mutex, MutexGuard};
use pharos::access::tokens::bearer;
use pharos::error::{InferError, Reason};
use pharos::id::{TenantId, TraceId};
use pharos::infer::{InferRequest, InferResponse, Parameter};
use pharos::metrics::cache::TokenBudget;
use pharos::metrics::catalog::TenantSource;
use pharos::request_trace::Traced;
use pharos::service::{Endpoint, Protocol, Route};
use pharos::timeline::{Instant, Timeline};
use pharos_listener::Peer;
use pharos_os::clock;
use tonic::{Code, Status};

use self::body::{BodyEnd, CallBody, grpc_status_in_head, is_streamed};
use crate::access::{Forward, Refusal};
use crate::deadline::{self, Deadline};
use crate::headers::{TRACEPARENT, text};
use crate::load_report::{Report, Requested};
use crate::policy::Policy;
use crate::request_log::{LogEnd, LogFormat, LogLine};
use crate::request_trace::{Activities, Sending};
use crate::response_timing::AnswerTiming;

/// A request as its port has received it, with its log line.
pub struct Incoming<B> {
    /// The request.
    pub request: Request<B>,
    /// `None` if requests are not logged.
    pub line: Option<Box<LogLine>>,
}

impl<B> Incoming<B> {
    /// Returns a request over HTTP whose log line begins now.
    pub fn over_http(request: Request<B>, format: &'static LogFormat) -> Self {
        let text = || (format.request)(request.method(), request.uri(), request.version());
        let line = LogLine::begin(format, Protocol::Http, address(&request), text);
        Self { request, line }
    }
}

/// Returns the address of the client of a request, if its listener adds it.
pub fn address<B>(request: &Request<B>) -> Option<std::net::SocketAddr> {
    request.extensions().get::<Peer>()?.address
}

/// A request with access to its route.
pub struct Call {
    policy: Arc<dyn Policy>,
    protocol: Protocol,
    route: Route,
    received: Instant,
    /// Of calls over gRPC.
    deadline: Option<Deadline>,
    /// The name in the certificate of the client.
    certificate_name: Option<Arc<str>>,
    tenant: TenantId,
    /// The trace that the client's `traceparent` names.
    trace: Option<TraceId>,
    /// The trace of the server, if the request is sampled.
    traced: Option<Traced>,
    /// What the response returns to the client; `None` until an inference begins.
    timing: Option<AnswerTiming>,
    /// The times of the request, if they are known and the response carries them.
    times: Option<HeaderValue>,
    /// The headers that become parameters of the request.
    parameters: Vec<(String, String)>,
    /// The load report that the client asks for.
    report: Option<Box<Report>>,
    line: Option<Box<LogLine>>,
    /// Whether the call was counted, or is not to be counted.
    is_counted: bool,
    /// The status of a response over HTTP whose body is being sent.
    status: u16,
    /// The reason for which the request failed.
    reason: Option<Reason>,
}

impl Call {
    /// Begins a request that has access to its route.
    ///
    /// # Errors
    /// It has no access. The refusal is counted and logged.
    pub fn admit<B>(
        protocol: Protocol,
        route: Route,
        incoming: &mut Incoming<B>,
        policy: &Arc<dyn Policy>,
    ) -> Result<Self, Refusal> {
        let access = policy.check(protocol, route, incoming.request.headers());
        Self::admit_if(access, protocol, route, incoming, policy)
    }

    /// Begins a request whose access was checked.
    ///
    /// # Errors
    /// As [`Call::admit`].
    pub fn admit_if<B>(
        access: Result<(), Refusal>,
        protocol: Protocol,
        route: Route,
        incoming: &mut Incoming<B>,
        policy: &Arc<dyn Policy>,
    ) -> Result<Self, Refusal> {
        let mut call = Self::new(protocol, route, incoming, policy);
        if let Err(refusal) = access {
            call.count_and_log(refusal.code, Some(refusal.reason));
            return Err(refusal);
        }
        let request = &incoming.request;
        call.report = match protocol {
            Protocol::Http => {
                Requested::of(route, request.headers(), request.uri()).map(Report::Header)
            }
            Protocol::Grpc => Report::in_trailers(route, request.headers()),
        }
        .map(Box::new);
        Ok(call)
    }

    /// Counts and logs a request over HTTP that reaches no route, with this response. Returns the
    /// response to send.
    pub fn answer_unrouted<B>(
        mut incoming: Incoming<B>,
        policy: &Arc<dyn Policy>,
        response: Response,
    ) -> Response {
        let call = Self::new(Protocol::Http, Route::Unknown, &mut incoming, policy);
        call.finish(response, Some(Reason::Unsupported))
    }

    fn new<B>(
        protocol: Protocol,
        route: Route,
        incoming: &mut Incoming<B>,
        policy: &Arc<dyn Policy>,
    ) -> Self {
        let request = &incoming.request;
        let headers = request.headers();
        Self {
            protocol,
            route,
            received: policy.service().now(),
            deadline: if protocol == Protocol::Grpc { Deadline::of(headers) } else { None },
            certificate_name: request
                .extensions()
                .get::<Peer>()
                .and_then(|peer| peer.certificate_name.clone()),
            tenant: TenantId::default(),
            trace: None,
            traced: None,
            timing: None,
            times: None,
            parameters: Vec::new(),
            report: None,
            line: incoming.line.take(),
            is_counted: !policy.counts(),
            status: 0,
            reason: None,
            policy: policy.clone(),
        }
    }

    /// Begins one of several requests that a client sends within this call.
    pub fn child(&self, received: Instant) -> Self {
        Self {
            policy: self.policy.clone(),
            protocol: self.protocol,
            route: self.route,
            received,
            deadline: self.deadline,
            certificate_name: None,
            tenant: self.tenant,
            trace: self.trace,
            traced: None,
            timing: None,
            times: None,
            parameters: self.parameters.clone(),
            report: None,
            line: None,
            is_counted: !self.policy.counts(),
            status: 0,
            reason: None,
        }
    }

    /// Does not count this call: its [requests](Call::child) are counted, or nothing is.
    pub fn do_not_count(&mut self) {
        self.is_counted = true;
    }

    /// Returns the deadline of the client.
    pub fn deadline(&self) -> Option<Deadline> {
        self.deadline
    }

    /// Returns the trace of the server, if the request is sampled.
    pub fn traced(&self) -> Option<&Traced> {
        self.traced.as_ref()
    }

    /// Begins an inference: names its tenant, and reads what its response returns to the client.
    pub fn read_headers(&mut self, headers: &HeaderMap) {
        let timing = self.policy.timing().of(headers);
        self.trace = timing.trace();
        self.timing = Some(timing);
        let certificate_name = self.certificate_name.as_deref();
        self.tenant = self.policy.service().tenant(&|source| match source {
            // A search costs less than the hash of a name that has not been parsed.
            TenantSource::Header(name) => headers
                .iter()
                .find(|(known, _)| known.as_str() == name)
                .map(|(_, value)| value.as_bytes()),
            // The same token as in the check of access, which also ignores other schemes.
            TenantSource::Token => {
                headers.get_all(AUTHORIZATION).iter().find_map(|value| bearer(value.as_bytes()))
            }
            TenantSource::Certificate => certificate_name.map(str::as_bytes),
        });
    }

    /// Returns the state of the budget of tokens of the request's tenant; `None` without a budget.
    pub fn token_budget(&self) -> Option<TokenBudget> {
        self.policy.service().token_budget(self.tenant)
    }

    /// Begins the trace of an inference by a model, if it is sampled.
    pub fn begin_trace(&mut self, model: &str, headers: &HeaderMap) {
        self.traced = self.policy.service().trace(model, &|name| match self.protocol {
            Protocol::Http => text(headers, name).map(std::borrow::Cow::into_owned),
            Protocol::Grpc => headers.get(name)?.to_str().ok().map(str::to_owned),
        });
    }

    /// Finds the headers that become parameters of the request.
    ///
    /// # Errors
    /// A matching header has a reserved name, or a value that is not valid UTF-8.
    pub fn forward(&mut self, forward: &Forward, headers: &HeaderMap) -> Result<(), InferError> {
        if !forward.is_empty() {
            self.parameters = forward.parameters(headers).map_err(InferError::invalid)?;
        }
        Ok(())
    }

    /// Names the model of the load report in a response; the first one counts. Over HTTP, it is the
    /// model in the path if this is not called.
    pub fn name_model(&mut self, model: &str, version: &str) {
        if let Some(report) = &mut self.report {
            report.name_model(model, version);
        }
    }

    /// Adds to a request of an inference what is known of its client, and begins it: the call of
    /// the engine follows at once. Its message was read at `read`.
    pub fn describe_client_in(&mut self, request: &mut InferRequest, read: Instant) {
        request.tenant = self.tenant;
        request.trace = self.trace;
        request.leaves_at = self.deadline.map(|deadline| deadline.leaves_at);
        request.timeline.received = self.received;
        let parameters = self.parameters.iter();
        request.parameters.extend(
            parameters.map(|(name, value)| (name.clone(), Parameter::String(value.clone()))),
        );
        Activities::of(self.protocol).received(self.traced.as_ref(), read, request);
        request.timeline.request_start = self.policy.service().now();
    }

    /// Runs an inference with one response, whose message has just been read.
    ///
    /// # Errors
    /// As [`pharos::service::Service::infer`]. The caller reports it with [`Call::has_failed`].
    pub async fn infer(
        &mut self,
        mut request: Box<InferRequest>,
        endpoint: Endpoint,
    ) -> Result<InferResponse, InferError> {
        let read = self.policy.service().now();
        self.describe_client_in(&mut request, read);
        let response = self.policy.service().infer(request, endpoint).await;
        self.has_responded();
        if let Ok(response) = &response {
            self.set_times(&response.timeline);
        }
        response
    }

    /// Stamps the trace: the last response of the model, or an error, was received.
    pub fn has_responded(&self) {
        if let Some(traced) = &self.traced {
            traced.last_response(clock::now());
        }
    }

    /// Stamps the trace: the request failed, possibly before it reached a model.
    pub fn has_failed(&self, error: &InferError) {
        Activities::of(self.protocol).refused(self.traced.as_ref(), self.received, error);
    }

    /// Ends the trace without the sending of a response.
    pub fn end_trace(&mut self) {
        self.traced = None;
    }

    /// Takes the times of a request that succeeded, if its response carries times.
    pub fn set_times(&mut self, timeline: &Timeline) {
        self.times = self.timing.as_ref().and_then(|timing| timing.value(timeline));
    }

    /// Returns what a trailer carries; `None` if the response carries no times.
    pub fn timing_of_trailer(&self) -> Option<AnswerTiming> {
        self.timing.clone().filter(AnswerTiming::has_times)
    }

    /// The response then carries neither times nor the client's `traceparent`.
    pub fn forget_timing(&mut self) {
        self.timing = None;
    }

    /// Notes the reason for which the request fails; the first one counts.
    pub fn note_reason(&mut self, reason: Reason) {
        self.reason.get_or_insert(reason);
    }

    /// Ends the request with the response of its handler, and the reason if it failed. Adds to the
    /// response what the client asked for.
    pub fn finish(mut self, mut response: Response, reason: Option<Reason>) -> Response {
        let sending = self.begin_headers(response.headers_mut());
        self.count_and_log(response.status().as_u16(), reason);
        if sending.is_none() {
            return response;
        }
        let failed = |_: &axum::Error| BodyEnd::Complete;
        response.map(|inner| Body::new(CallBody { inner, call: None, _sending: sending, failed }))
    }

    /// Ends a request whose path, method or resource does not exist.
    pub fn finish_unknown(mut self, response: Response) -> Response {
        self.route = Route::Unknown;
        self.finish(response, Some(Reason::Unsupported))
    }

    /// Like [`Call::finish`], but a streamed response ends the request when its body has been sent.
    /// If the body fails, its error is the reason. `method` is the method of the request.
    pub fn finish_with_body(
        mut self,
        mut response: Response,
        reason: Option<Reason>,
        method: &Method,
    ) -> Response {
        if !is_streamed(&response, method) {
            return self.finish(response, reason);
        }
        let sending = self.begin_headers(response.headers_mut());
        self.status = response.status().as_u16();
        self.reason = reason;
        let call = Some(SharedCall::new(self));
        let failed = |error: &axum::Error| BodyEnd::Failed(body::reason_of(error));
        response.map(|inner| Body::new(CallBody { inner, call, _sending: sending, failed }))
    }

    /// Begins to send a streamed response over HTTP with this head. The body that follows owns this
    /// call, and [ends](Call::end_stream) it with the status of the head.
    pub fn begin_stream(&mut self, head: &mut Response) -> Option<Sending> {
        let sending = self.begin_headers(head.headers_mut());
        self.status = head.status().as_u16();
        if let Some(line) = self.line.take_if(|line| !line.format.waits_for_body) {
            line.answered(self.status);
        }
        sending
    }

    /// Ends a streamed response over HTTP: its last part is about to be sent.
    pub fn end_stream(&mut self) {
        self.count_and_log(self.status, self.reason);
    }

    /// Adds to the headers, or metadata, of a response what the client asked for: the times, a load
    /// report over HTTP, and the trace. Returns a guard that stamps the end of sending if the
    /// request is traced.
    fn begin_headers(&mut self, headers: &mut HeaderMap) -> Option<Sending> {
        if let Some(timing) = self.timing.take() {
            timing.add_to(headers, self.times.take());
        }
        if let Some(report) = self.report.take_if(|report| report.is_in_head()) {
            report.add_to(headers, self.policy.service());
        }
        let traced = self.traced.clone()?;
        let parent = traced.traceparent().map(|parent| HeaderValue::from_str(&parent.to_string()));
        if let Some(Ok(value)) = parent {
            headers.insert(TRACEPARENT, value);
        }
        Some(Sending::begin(self.protocol, traced))
    }

    /// Counts and logs the request with this HTTP status or gRPC code, unless that has been done.
    pub fn count_and_log(&mut self, code: u16, reason: Option<Reason>) {
        self.count(code, reason);
        if let Some(line) = self.line.take() {
            line.answered(code);
        }
    }

    fn count(&mut self, code: u16, reason: Option<Reason>) {
        if !mem::replace(&mut self.is_counted, true) {
            self.policy.service().record_answered(self.protocol, self.route, code, reason);
        }
    }

    /// Ends a call over gRPC with this code, and the reason that was noted for it, or the usual
    /// reason of the code.
    pub fn count_and_log_code(&mut self, code: u16) {
        self.count_and_log(code, self.reason_of(code));
    }

    fn reason_of(&self, code: u16) -> Option<Reason> {
        let code = Code::from_i32(code.into());
        (code != Code::Ok).then(|| self.reason.unwrap_or_else(|| self.policy.reason_of(code)))
    }

    /// Ends the call at the end of its body.
    fn end_body(&mut self, end: BodyEnd) {
        match (self.protocol, end) {
            (Protocol::Http, BodyEnd::Failed(reason)) => {
                self.count_and_log(self.status, self.reason.or(Some(reason)))
            }
            (Protocol::Http, _) => self.end_stream(),
            (Protocol::Grpc, BodyEnd::Code(code)) => self.count_and_log_code(code),
            // Without trailers, clients see UNKNOWN.
            (Protocol::Grpc, BodyEnd::Complete | BodyEnd::Failed(_)) => {
                self.count_and_log_code(Code::Unknown as u16)
            }
        }
    }

    /// Adds the load report that the client asks for to the trailers of a response.
    fn report_load(&mut self, trailers: &mut HeaderMap) {
        if let Some(report) = self.report.take() {
            report.add_to(trailers, self.policy.service());
        }
    }
}

impl Drop for Call {
    fn drop(&mut self) {
        if self.is_counted && self.line.is_none() {
            return;
        }
        let at = clock::now();
        let leaves_at = self.deadline.map(|deadline| deadline.leaves_at);
        let (status, reason) = deadline::abandoned_status(self.protocol, leaves_at, at);
        self.count(status, Some(reason));
        if let Some(line) = self.line.take() {
            line.write(LogEnd { status, is_abandoned: true, at });
        }
    }
}

/// A call that several parts hold: the layer and the handler of gRPC, between which tonic reads the
/// message, or a streamed body. The layer hands the call over in the extensions of the request.
#[derive(Clone)]
pub struct SharedCall(
    // Held to read or write fields only.
    Arc<Mutex<Call>>,
);

impl SharedCall {
    /// Returns a call to share.
    pub fn new(call: Call) -> Self {
        Self(Arc::new(Mutex::new(call)))
    }

    /// Takes the call from its request.
    ///
    /// # Errors
    /// The request did not pass the layer.
    pub fn of<T>(request: &mut tonic::Request<T>) -> Result<Self, Status> {
        request
            .extensions_mut()
            .remove()
            .ok_or_else(|| Status::internal("the call was not admitted"))
    }

    /// Locks the call.
    pub fn lock(&self) -> MutexGuard<'_, Call> {
        self.0.lock()
    }

    /// Notes the reason of the status with which a stream of responses fails: its trailers have
    /// only the code.
    pub fn note_failure(&self, status: &Status) {
        if let Some(reason) = reason_of(status) {
            self.lock().note_reason(reason);
        }
    }

    /// Ends the call with this response, or at the end of its body. A failed stream of responses
    /// has its status in the trailers.
    pub fn finish(
        self,
        mut response: http::Response<tonic::body::Body>,
    ) -> http::Response<tonic::body::Body> {
        let mut call = self.lock();
        let sending = call.begin_headers(response.headers_mut());
        if let Some(code) = grpc_status_in_head(&response) {
            if let Some(reason) = response.extensions().get::<Status>().and_then(reason_of) {
                call.note_reason(reason);
            }
            call.count_and_log_code(code);
            if response.headers().contains_key("grpc-status") {
                call.report_load(response.headers_mut());
            }
            drop(call);
            return response;
        }
        if !call.policy.counts_calls_at_end() {
            call.count(0, None);
        }
        let is_over =
            call.is_counted && call.line.is_none() && call.report.is_none() && sending.is_none();
        drop(call);
        if is_over {
            return response;
        }
        let ended = |status: &Status| BodyEnd::Code(status.code() as u16);
        let body = |inner| CallBody { inner, call: Some(self), _sending: sending, failed: ended };
        response.map(|inner| tonic::body::Body::new(body(inner)))
    }
}

/// The reason of a failure, as the source of its status: a status of gRPC has only a code.
#[derive(Debug)]
struct Cause(Reason);

impl std::fmt::Display for Cause {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.0.as_str())
    }
}

impl std::error::Error for Cause {}

/// Returns a status of gRPC with the reason of the failure.
pub fn status_for(code: Code, text: impl Into<String>, reason: Reason) -> Status {
    let mut status = Status::new(code, text);
    status.set_source(Arc::new(Cause(reason)));
    status
}

/// Returns the reason of a status that [`status_for`] made.
fn reason_of(status: &Status) -> Option<Reason> {
    use std::error::Error as _;
    status.source()?.downcast_ref::<Cause>().map(|cause| cause.0)
}

#[cfg(test)]
mod tests;
