//! What the backend counts.

use pharos::metrics::catalog::{
    Kind, TEXT_BATCH_TOKENS, TEXT_PADDING, TEXT_TOKENISATION, TEXT_TOKENS, TEXT_TRUNCATED,
};
use pharos_backend::{Context, Series};

/// The series of an instance; `None` for a metric that `metrics.yaml` does not have.
pub(crate) struct TextMetrics {
    tokens: Option<Series>,
    padding: Option<Series>,
    truncated: Option<Series>,
    batch_tokens: Option<Series>,
    tokenisation: Option<Series>,
}

impl TextMetrics {
    pub(crate) fn new(context: &Context<'_>) -> Self {
        let series =
            |name: &str, kind: Kind| context.metrics.get_metric(name, kind).ok()?.series(&[]).ok();
        Self {
            tokens: series(TEXT_TOKENS, Kind::Counter),
            padding: series(TEXT_PADDING, Kind::Counter),
            truncated: series(TEXT_TRUNCATED, Kind::Counter),
            batch_tokens: series(TEXT_BATCH_TOKENS, Kind::Histogram),
            tokenisation: series(TEXT_TOKENISATION, Kind::Histogram),
        }
    }

    /// Counts a run of the graph with this number of tokens, and of tokens that only pad.
    pub(crate) fn ran(&self, tokens: usize, padding: usize) {
        add(self.tokens.as_ref(), tokens as f64);
        if padding > 0 {
            add(self.padding.as_ref(), padding as f64);
        }
        add(self.batch_tokens.as_ref(), (tokens + padding) as f64);
    }

    /// Counts the texts of a batch that were cut off, and the time to tokenise all of its texts.
    pub(crate) fn tokenised(&self, truncated: usize, seconds: f64) {
        if truncated > 0 {
            add(self.truncated.as_ref(), truncated as f64);
        }
        add(self.tokenisation.as_ref(), seconds);
    }
}

fn add(series: Option<&Series>, value: f64) {
    if let Some(series) = series {
        series.add_or_update(value);
    }
}
