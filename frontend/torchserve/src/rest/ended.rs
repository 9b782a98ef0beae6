//! Sequences that a handler ends: it names them in a header of an answer. They are closed before the client has the answer.

use std::sync::Arc;

use http::HeaderMap;
use pharos::id::CorrelationId;
use pharos::service::Management;

use super::Shared;
use crate::registry::Version;

/// Closes the sequences that the answers of one request name.
pub(crate) struct EndedSequences<S: Management> {
    shared: Arc<Shared<S>>,
    version: Arc<Version>,
}

impl<S: Management> EndedSequences<S> {
    /// Those of a model whose requests overlap; TorchServe looks at the header of no other model.
    pub(crate) fn of(shared: &Arc<Shared<S>>, version: &Arc<Version>) -> Option<Self> {
        let overlaps = version.deployment().overlaps();
        overlaps.then(|| Self { shared: shared.clone(), version: version.clone() })
    }

    /// Closes the sequences of an answer with these headers: ids with semicolons between them.
    pub(crate) fn close(&self, headers: &HeaderMap) {
        let [_, _, end] = &self.shared.settings.sequence_headers;
        let named = headers.get(end.as_str()).and_then(|value| value.to_str().ok());
        for id in named.into_iter().flat_map(|ids| ids.split(';')).map(str::trim).filter(|id| !id.is_empty()) {
            self.shared.service.end_sequence(&self.version.called, &CorrelationId::String(id.to_owned()));
        }
    }
}
