//! Commands that need no server.

mod metrics;
mod trace;

pub(crate) use metrics::run as metrics;
pub(crate) use trace::run as trace;
