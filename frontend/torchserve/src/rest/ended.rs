//! Closes the sequences that a handler ends by naming them in a response header, before the client
//! gets the response.

use std::sync::Arc;

use http::HeaderMap;
use pharos::id::CorrelationId;

use super::Shared;
use crate::registry::Version;

/// Closes the sequences that the responses to one request name.
pub(crate) struct EndedSequences {
    shared: Arc<Shared>,
    version: Arc<Version>,
}

impl EndedSequences {
    /// Returns `None` unless the model's requests may overlap; TorchServe ignores the header of
    /// other models.
    pub(crate) fn of(shared: &Arc<Shared>, version: &Arc<Version>) -> Option<Self> {
        let overlaps = version.deployment().overlaps();
        overlaps.then(|| Self { shared: shared.clone(), version: version.clone() })
    }

    /// Closes the sequences named in the headers of a response: ids separated by semicolons.
    pub(crate) fn close(&self, headers: &HeaderMap) {
        let [_, _, end] = &self.shared.settings.sequence_headers;
        let named = headers.get(end.as_str()).and_then(|value| value.to_str().ok());
        for id in named
            .into_iter()
            .flat_map(|ids| ids.split(';'))
            .map(str::trim)
            .filter(|id| !id.is_empty())
        {
            self.shared
                .service
                .end_sequence(&self.version.engine_name, &CorrelationId::String(id.to_owned()));
        }
    }
}
