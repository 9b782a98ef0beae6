//! The log of the server: lines on standard error.

use tracing::Level;
use tracing_subscriber::filter::filter_fn;
use tracing_subscriber::layer::{Layer, SubscriberExt};
use tracing_subscriber::util::SubscriberInitExt;

use crate::cli::Log;

/// Starts logging as the options say. A second call in one process changes nothing.
pub(crate) fn start(options: &Log) {
    let Log { verbose, info, warning, error } = *options;
    let wanted = filter_fn(move |metadata| match *metadata.level() {
        Level::ERROR => error,
        Level::WARN => warning,
        Level::INFO => info,
        Level::DEBUG => verbose >= 1 && is_ours(metadata.target()),
        Level::TRACE => verbose >= 2 && is_ours(metadata.target()),
    });
    let lines = tracing_subscriber::fmt::layer()
        .with_writer(std::io::stderr)
        .with_ansi(false)
        .with_target(false)
        .with_filter(wanted);
    // Fails only when a subscriber exists already, which then stays.
    let _ = tracing_subscriber::registry().with(lines).try_init();
}

/// What libraries say in detail is of no use to those who run a server.
fn is_ours(target: &str) -> bool {
    target.starts_with("pharos") || target == "worker"
}
