//! What an increment of a counter costs a model in Python: the model counts and looks at the clock itself.

use crate::client::Protocol;
use crate::http_client::post;
use crate::models::COUNTER;
use crate::server::{Kind, Server};

/// Increments in a request: long enough to be measured, short enough for any server's patience.
const INCREMENTS: u32 = 200_000;

/// Nanoseconds for an increment in each server that has models in Python, once for each round.
///
/// # Errors
/// No answer, or none that is a number.
pub(crate) fn increments(servers: &[Server], rounds: u32) -> Result<Vec<(Kind, Vec<f64>)>, String> {
    let measured = servers.iter().filter(|server| matches!(server.kind, Kind::Pharos | Kind::Triton));
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
    let (status, body) = post(server.address(Protocol::Http), &format!("/v2/models/{COUNTER}/infer"), &body)?;
    let last = body.last_chunk::<8>().filter(|_| status == 200);
    last.map(|bytes| f64::from_le_bytes(*bytes))
        .ok_or_else(|| format!("{}: status {status}: {}", server.kind.name(), String::from_utf8_lossy(&body)))
}
