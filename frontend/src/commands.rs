//! Commands that need no server.

mod health;
mod metrics;
mod slo;
mod top;
mod trace;

pub(crate) use health::run as health;
pub(crate) use metrics::run as metrics;
pub(crate) use slo::run as slo;
pub(crate) use top::run as top;
pub(crate) use trace::run as trace;
