//! Downloads an archive over HTTP.

use std::fs::File;
use std::io::Write;
use std::time::Duration;

use bytes::Bytes;
use http::header::LOCATION;
use http::{Request, Uri};
use http_body_util::{BodyExt, Empty};
use tokio::runtime::{Builder, Handle};
use tokio::sync::watch;
use tokio::time::timeout;
use url::Url;

use crate::ErrorResponse;
use pharos_os::{blocking, client};

/// The longest wait for response headers or for the next bytes of the body.
const READ_TIMEOUT: Duration = Duration::from_secs(60);
/// The most redirects that are followed.
const REDIRECTS: usize = 5;
/// The largest size of an archive, in bytes.
const MAX_BYTES: u64 = 64 << 30;

/// Downloads `url` into `file`, until `exiting` becomes true. Each redirect target must be
/// `allowed`. Blocks.
///
/// # Errors
/// The download failed; the text names the URL. Or the server exits.
pub(super) fn fetch(
    url: &str,
    file: &mut File,
    exiting: &watch::Receiver<bool>,
    allowed: impl Fn(&str) -> Result<(), ErrorResponse>,
) -> Result<(), ErrorResponse> {
    let fetching = blocking::until_exit(exiting.clone(), download(url, file, allowed));
    let fetched = match Handle::try_current() {
        Ok(runtime) => runtime.block_on(fetching),
        Err(_) => match Builder::new_current_thread().enable_all().build() {
            Ok(runtime) => runtime.block_on(fetching),
            Err(error) => Some(Err(failed(url, &error.to_string()))),
        },
    };
    fetched.unwrap_or_else(|| Err(ErrorResponse::exiting()))
}

fn failed(url: &str, why: &str) -> ErrorResponse {
    ErrorResponse::download(format!("Failed to download archive from: {url}: {why}"))
}

async fn download(
    url: &str,
    file: &mut File,
    allowed: impl Fn(&str) -> Result<(), ErrorResponse>,
) -> Result<(), ErrorResponse> {
    let client = client::new().map_err(|why| failed(url, &why))?;
    let mut place: Uri =
        url.parse().map_err(|error| failed(url, &format!("invalid URL: {error}")))?;
    for _ in 0..=REDIRECTS {
        let request = Request::get(place.clone())
            .body(Empty::<Bytes>::new())
            .map_err(|error| failed(url, &error.to_string()))?;
        let answer = timeout(READ_TIMEOUT, client.request(request))
            .await
            .map_err(|_| failed(url, "timed out waiting for a response"))?
            .map_err(|error| failed(url, &client::deepest(&error)))?;
        if answer.status().is_redirection() {
            let next = answer.headers().get(LOCATION).and_then(|next| next.to_str().ok());
            place = next
                .and_then(|next| resolve_redirect(&place, next))
                .ok_or_else(|| failed(url, "redirect without a usable Location header"))?;
            allowed(&place.to_string())?;
            continue;
        }
        if !answer.status().is_success() {
            return Err(failed(url, &format!("HTTP status {}", answer.status())));
        }
        return write(answer.into_body(), file).await.map_err(|why| failed(url, &why));
    }
    Err(failed(url, &format!("more than {REDIRECTS} redirects")))
}

/// Resolves the `Location` header `next` against `place` (RFC 3986, 5.2); `None` for schemes other
/// than HTTP and HTTPS.
fn resolve_redirect(place: &Uri, next: &str) -> Option<Uri> {
    let resolved = Url::parse(&place.to_string()).ok()?.join(next).ok()?;
    match resolved.scheme() {
        "http" | "https" => resolved.as_str().parse().ok(),
        _ => None,
    }
}

async fn write(mut body: hyper::body::Incoming, file: &mut File) -> Result<(), String> {
    let unwritable = |error: std::io::Error| format!("cannot write the archive: {error}");
    let mut left = MAX_BYTES;
    loop {
        let frame = timeout(READ_TIMEOUT, body.frame())
            .await
            .map_err(|_| "timed out waiting for more data".to_owned())?;
        let Some(frame) = frame else { return file.flush().map_err(unwritable) };
        let received = frame.map_err(|error| client::deepest(&error))?;
        let Some(data) = received.data_ref() else { continue };
        left = left
            .checked_sub(data.len() as u64)
            .ok_or_else(|| format!("the archive is larger than {MAX_BYTES} bytes"))?;
        file.write_all(data).map_err(unwritable)?;
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn redirects_are_resolved_as_references() {
        let place = "http://host:81/store/a.mar?key=1".parse().unwrap();
        for (next, expected) in [
            ("https://other/b.mar", Some("https://other/b.mar")),
            ("HTTP://other/b.mar#part", Some("http://other/b.mar")),
            ("//other:82/b.mar", Some("http://other:82/b.mar")),
            ("//other", Some("http://other/")),
            (r"\\other\b.mar", Some("http://other/b.mar")),
            ("/b.mar?key=2", Some("http://host:81/b.mar?key=2")),
            ("b.mar", Some("http://host:81/store/b.mar")),
            ("../b.mar", Some("http://host:81/b.mar")),
            ("?key=2", Some("http://host:81/store/a.mar?key=2")),
            ("b.mar?from=http://other/", Some("http://host:81/store/b.mar?from=http://other/")),
            ("file:///etc/passwd", None),
            ("ftp://other/b.mar", None),
            ("//", None),
        ] {
            let resolved = resolve_redirect(&place, next).map(|place| place.to_string());
            assert_eq!(resolved.as_deref(), expected, "{next}");
        }
    }
}
