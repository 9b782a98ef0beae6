//! The life of a request at an edge: a [`Call`], the same for every protocol and every port.
//!
//! [`Call::admit`] checks access to a route. The call then owns what is known of the request: its
//! route, peer, deadline, tenant, trace, the times and the load report of its response, its log
//! line and its count. [`Call::finish`] ends it; a call that is dropped counts as abandoned. A
//! [`Policy`] says what differs between ports. The package knows no form of messages.

pub mod access;
mod call;
pub mod cors;
pub mod deadline;
mod error_answer;
pub mod headers;
pub mod http_service;
pub mod http_settings;
pub mod load_report;
mod policy;
pub mod query;
pub mod renderings;
pub mod request_log;
mod request_trace;
pub mod response_timing;
pub mod routing;

pub use self::access::Refusal;
pub use self::call::{Call, Incoming, SharedCall, address, status_for};
pub use self::error_answer::{answer_error, answer_refusal, retry_after, status_of};
pub use self::policy::{OpenPolicy, Policy, ServerPolicy};
pub use self::request_trace::Sending;
