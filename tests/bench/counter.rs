//! Measures the cost of a counter increment in a Python model: the model counts and reads the clock
//! itself.

use crate::client::Protocol;
use crate::http_client::post;
use crate::models::COUNTER;
use crate::server::{Kind, Server};

/// Increments per request: enough to be measurable, few enough for every server's timeout.
const INCREMENTS: u32 = 200_000;

/// Returns the nanoseconds per increment of each server with Python models, one value per round.
///
/// # Errors
/// A request fails, or its response is not a number.
pub(crate) fn increments(servers: &[Server], rounds: u32) -> Result<Vec<(Kind, Vec<f64>)>, String> {
    let measured =
        servers.iter().filter(|server| matches!(server.kind, Kind::Pharos | Kind::Triton));
    let mut found: Vec<_> = measured.map(|server| (server, Vec::new())).collect();
    for _ in 0..rounds {
        for (server, nanoseconds) in &mut found {
            nanoseconds.push(increment(server)?);
        }
    }
    Ok(found.into_iter().map(|(server, nanoseconds)| (server.kind, nanoseconds)).collect())
}

fn increment(server: &Server) -> Result<f64, String> {
    let body = format!(
        r#"{{"inputs":[{{"name":"COUNT","datatype":"INT64","shape":[1],"data":[{INCREMENTS}]}}],"outputs":[{{"name":"NS","parameters":{{"binary_data":true}}}}]}}"#
    );
    let (status, body) =
        post(server.address(Protocol::Http), &format!("/v2/models/{COUNTER}/infer"), &body)?;
    let last = body.last_chunk::<8>().filter(|_| status == 200);
    last.map(|bytes| f64::from_le_bytes(*bytes)).ok_or_else(|| {
        format!("{}: status {status}: {}", server.kind.name(), String::from_utf8_lossy(&body))
    })
}
