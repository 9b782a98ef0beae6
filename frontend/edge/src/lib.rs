//! The life of a request at an edge, of every protocol: access, deadline, tenant, trace, load report, log line and count.

pub mod access;
pub mod answering;
pub mod deadline;
pub mod http_service;
pub mod load_report;
pub mod observed_body;
pub mod renderings;
pub mod request_log;
pub mod request_trace;
pub mod response_timing;
pub mod routing;
pub mod tenants;
