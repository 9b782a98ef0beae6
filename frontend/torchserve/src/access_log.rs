//! The lines of the access log, in TorchServe's format: `/PEER "REQUEST" STATUS MILLISECONDS`.
//!
//! The format has a number as status and no place for a word. A request whose client disconnects
//! before the end of the response therefore has the status that it counts with: 499 over REST; over
//! gRPC 1 (CANCELLED), or 4 (DEADLINE_EXCEEDED) at its deadline.

use pharos_edge::request_log::{LogEnd, LogFormat, LogLine, write_line};

/// The format.
pub(crate) const ACCESS_LOG: LogFormat = LogFormat {
    request: |method, uri, version| format!("{method} {uri} {version:?}"),
    write: write_access,
    waits_for_body: true,
};

fn write_access(line: &LogLine, end: LogEnd) {
    let LogLine { peer, request, received, .. } = line;
    let peer = peer.map_or_else(|| "0.0.0.0".to_owned(), |peer| peer.to_string());
    let status = end.status;
    let ms = (end.at - *received).as_millis();
    write_line(&format!("/{peer} \"{request}\" {status} {ms}"));
}
