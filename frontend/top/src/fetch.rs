//! Scrapes of `/metrics` over HTTP.

use std::time::Duration;

use http::header::{ACCEPT, HeaderValue};
use http::uri::PathAndQuery;
use http::{Request, Uri};
use http_body_util::{BodyExt, Empty, Limited};
use pharos_os::client::{self, ClientTls, HttpsClient, Version, deepest};

/// The default port and path.
const PORT: u16 = 8082;
const PATH: &str = "/metrics";

/// The time limit of one scrape.
const LIMIT: Duration = Duration::from_secs(10);

/// The longest answer in bytes: some 500,000 series.
const LONGEST: usize = 64 << 20;

/// One server's metrics.
pub(crate) struct Source {
    client: HttpsClient,
    target: Uri,
    url: String,
}

impl Source {
    /// Creates a client for a URL, in which scheme, port and path may be missing.
    ///
    /// # Errors
    /// The URL or a certificate cannot be used.
    pub(crate) fn new(url: &str, tls: &ClientTls) -> Result<Self, String> {
        let target = target(url)?;
        let client = client::with(tls, Version::Http1)?;
        Ok(Self { client, url: target.to_string(), target })
    }

    /// Returns the URL of the metrics.
    pub(crate) fn url(&self) -> &str {
        &self.url
    }

    /// Returns the text of one scrape.
    ///
    /// # Errors
    /// The server does not answer in time, or not with metrics.
    pub(crate) async fn scrape(&self) -> Result<String, String> {
        let url = &self.url;
        let scraped = tokio::time::timeout(LIMIT, self.answer()).await;
        let scraped =
            scraped.unwrap_or_else(|_| Err(format!("no answer within {} s", LIMIT.as_secs())));
        scraped.map_err(|reason| format!("cannot read {url}: {reason}"))
    }

    async fn answer(&self) -> Result<String, String> {
        let mut request = Request::new(Empty::new());
        *request.uri_mut() = self.target.clone();
        request.headers_mut().insert(ACCEPT, HeaderValue::from_static("text/plain;version=0.0.4"));
        let response = self.client.request(request).await.map_err(|error| deepest(&error))?;
        let status = response.status();
        if !status.is_success() {
            return Err(format!("the server answered {status}"));
        }
        let body = Limited::new(response.into_body(), LONGEST)
            .collect()
            .await
            .map_err(|error| error.to_string())?;
        Ok(String::from_utf8_lossy(&body.to_bytes()).into_owned())
    }
}

/// Completes a URL.
fn target(url: &str) -> Result<Uri, String> {
    let invalid =
        || format!("'{url}' is not a URL of metrics; allowed are [http[s]://]HOST[:PORT][/PATH]");
    let with_scheme = if url.contains("://") { url.to_owned() } else { format!("http://{url}") };
    let mut parts = with_scheme.parse::<Uri>().map_err(|_| invalid())?.into_parts();
    let authority = parts
        .authority
        .take()
        .filter(|authority| !authority.host().is_empty())
        .ok_or_else(invalid)?;
    let is_http =
        parts.scheme.as_ref().is_some_and(|scheme| matches!(scheme.as_str(), "http" | "https"));
    if !is_http || authority.as_str().contains('@') {
        return Err(invalid());
    }
    // `port_u16` has no error for an invalid port, and the default port would be used instead.
    let complete = match (authority.port_u16(), authority.as_str() == authority.host()) {
        (Some(1..), _) => authority,
        (None, true) => format!("{}:{PORT}", authority.host()).parse().map_err(|_| invalid())?,
        _ => return Err(invalid()),
    };
    parts.authority = Some(complete);
    if parts.path_and_query.as_ref().is_none_or(|path| path.as_str() == "/") {
        parts.path_and_query = Some(PathAndQuery::from_static(PATH));
    }
    Uri::from_parts(parts).map_err(|_| invalid())
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn urls_are_completed() {
        for (url, expected) in [
            ("localhost", "http://localhost:8082/metrics"),
            ("host:9000", "http://host:9000/metrics"),
            ("[::1]", "http://[::1]:8082/metrics"),
            ("https://host", "https://host:8082/metrics"),
            ("http://host:1/a?b=c", "http://host:1/a?b=c"),
        ] {
            assert_eq!(target(url).unwrap().to_string(), expected);
        }
    }

    #[test]
    fn other_urls_are_refused() {
        for url in [
            "",
            "ftp://host",
            "http://",
            "http://user:password@host",
            "a b",
            "host:99999",
            "host:80a",
            "host:",
            "[::1]:x",
            "host:0",
        ] {
            assert!(target(url).unwrap_err().contains("allowed are"), "{url}");
        }
    }
}
