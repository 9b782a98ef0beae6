//! Commands that need no server.

mod health;
mod metrics;
mod trace;

pub(crate) use health::run as health;
pub(crate) use metrics::run as metrics;
pub(crate) use trace::run as trace;
