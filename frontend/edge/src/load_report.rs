//! Load reports (ORCA) in responses to inference requests that ask for one, over HTTP and gRPC.
//!
//! A request that does not ask costs one look-up of a header.

use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};

use bytes::Bytes;
use http::header::{HeaderName, HeaderValue};
use http::{HeaderMap, Response, Uri};
use http_body::{Frame, SizeHint};
use percent_encoding::percent_decode_str;
use pharos::load_report::{Format, LoadReport, REQUEST_HEADER, RESPONSE_HEADER, TRAILER};
use pharos::service::Route;

const REQUEST: HeaderName = HeaderName::from_static(REQUEST_HEADER);
const RESPONSE: HeaderName = HeaderName::from_static(RESPONSE_HEADER);
const IN_TRAILERS: HeaderName = HeaderName::from_static(TRAILER);

/// Returns the format of the load report that an inference request asks for; `None` without the header or with an unknown format.
pub fn requested(route: Route, headers: &HeaderMap) -> Option<Format> {
    if !route.is_inference() {
        return None;
    }
    Format::from_header(headers.get(REQUEST)?.as_bytes())
}

/// A load report that an HTTP request asks for.
#[derive(Clone, Debug)]
pub struct Requested {
    format: Format,
    /// Names the model.
    uri: Uri,
}

impl Requested {
    /// Returns the load report that a request to this URI asks for.
    pub fn of(route: Route, headers: &HeaderMap, uri: &Uri) -> Option<Self> {
        let format = requested(route, headers)?;
        Some(Self { format, uri: uri.clone() })
    }

    /// Adds the report to a response. `report` returns that of a model and version.
    pub fn add_to<B>(self, response: &mut Response<B>, report: impl FnOnce(&str, &str) -> Option<Arc<LoadReport>>) {
        let path = percent_decode_str(self.uri.path()).decode_utf8_lossy();
        let (model, version) = model_of(&path);
        let value = report(model, version).map(|report| report.header(self.format));
        if let Some(value) = value.and_then(|value| HeaderValue::from_maybe_shared(value).ok()) {
            response.headers_mut().insert(RESPONSE, value);
        }
    }
}

/// The number of the first segments of a path that can name the model and version.
const SEGMENTS: usize = 5;

/// Returns the model and version that the decoded path of an inference request names; empty where it names none.
fn model_of(path: &str) -> (&str, &str) {
    let mut segments = [""; SEGMENTS];
    for (segment, found) in segments.iter_mut().zip(path.split('/').skip(1)) {
        *segment = found;
    }
    let (model, version) = match segments {
        [_, "models", model, "versions", version] => (model, version),
        [_, "models", model, ..] | ["models", model, "invoke", ..] => (model, ""),
        ["predictions" | "explanations", model, version, ..] => (model, version),
        [model, "predict", ..] => (model, ""),
        [model, version, "predict", ..] => (model, version),
        _ => ("", ""),
    };
    let without_verb = |name: &str| name.find(':').unwrap_or(name.len());
    (model.get(..without_verb(model)).unwrap_or_default(), version.get(..without_verb(version)).unwrap_or_default())
}

/// Adds a load report to the trailers of a gRPC response, or to its headers if these are its trailers. `report` is called when the
/// response ends.
pub fn in_trailers<B, R: FnOnce() -> Arc<LoadReport>>(
    mut response: Response<B>,
    report: R,
) -> Response<WithReport<B, R>> {
    let mut report = Some(report);
    if response.headers().contains_key("grpc-status")
        && let Some(report) = report.take()
    {
        insert(response.headers_mut(), report);
    }
    response.map(|inner| WithReport { inner, report })
}

fn insert(trailers: &mut HeaderMap, report: impl FnOnce() -> Arc<LoadReport>) {
    if let Ok(value) = HeaderValue::from_maybe_shared(report().trailer()) {
        trailers.insert(IN_TRAILERS, value);
    }
}

/// A body that adds a load report to its trailers.
#[derive(Debug)]
pub struct WithReport<B, R> {
    inner: B,
    report: Option<R>,
}

impl<B, R> http_body::Body for WithReport<B, R>
where
    B: http_body::Body<Data = Bytes> + Unpin,
    R: FnOnce() -> Arc<LoadReport> + Unpin,
{
    type Data = Bytes;
    type Error = B::Error;

    fn poll_frame(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, B::Error>>> {
        let mut frame = ready!(Pin::new(&mut self.inner).poll_frame(cx));
        if let Some(Ok(frame)) = &mut frame
            && let Some(trailers) = frame.trailers_mut()
            && let Some(report) = self.report.take()
        {
            insert(trailers, report);
        }
        Poll::Ready(frame)
    }

    fn is_end_stream(&self) -> bool {
        self.inner.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.inner.size_hint()
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use http_body_util::{BodyExt as _, Full};
    use pharos::load_report::Values;

    use super::*;

    fn report() -> Arc<LoadReport> {
        Arc::new(LoadReport::new(Values { rps_fractional: Some(1.0), ..Values::default() }))
    }

    fn headers(format: &'static str) -> HeaderMap {
        HeaderMap::from_iter([(REQUEST, HeaderValue::from_static(format))])
    }

    #[test]
    fn only_inference_with_a_known_format_gets_a_report() {
        for (route, format, expected) in [
            (Route::Infer, "json", Some(Format::Json)),
            (Route::Predict, "TEXT", Some(Format::Text)),
            (Route::GenerateStream, "Binary", Some(Format::Binary)),
            (Route::Infer, "yaml", None),
            (Route::ModelMetadata, "json", None),
            (Route::Unknown, "json", None),
        ] {
            assert_eq!(requested(route, &headers(format)), expected, "{route:?} {format}");
        }
        assert_eq!(requested(Route::Infer, &HeaderMap::new()), None);
    }

    #[test]
    fn paths_name_models() {
        for (path, model, version) in [
            ("/v2/models/m/infer", "m", ""),
            ("/v2/models/a%20b/versions/3/generate", "a b", "3"),
            ("/v1/models/m:predict", "m", ""),
            ("/v1/models/m%3Apredict", "m", ""),
            ("/v1/models/m/versions/2:predict", "m", "2"),
            ("/predictions/m", "m", ""),
            ("/predictions/m/1.0/more", "m", "1.0"),
            ("/explanations/m", "m", ""),
            ("/models/m/invoke", "m", ""),
            ("/m/predict", "m", ""),
            ("/m/1.0/predict", "m", "1.0"),
            ("/invocations", "", ""),
            ("/", "", ""),
            ("", "", ""),
            ("/%ff", "", ""),
        ] {
            let decoded = percent_decode_str(path).decode_utf8_lossy();
            assert_eq!(model_of(&decoded), (model, version), "{path}");
        }
    }

    #[test]
    fn a_response_gets_the_header_of_its_model() {
        let uri = Uri::from_static("/v2/models/m/versions/1/infer?x=/y");
        let requested = Requested::of(Route::Infer, &headers("json"), &uri).unwrap();
        let mut response = Response::new(());
        requested.add_to(&mut response, |model, version| {
            assert_eq!((model, version), ("m", "1"));
            Some(report())
        });
        let value = response.headers().get(RESPONSE).unwrap().to_str().unwrap();
        assert!(value.starts_with("JSON {") && value.contains("\"rps_fractional\":1,"), "{value}");
    }

    #[tokio::test]
    async fn the_trailer_follows_the_messages_or_the_status_in_the_headers() {
        let body = Full::new(Bytes::from_static(b"data"));
        let status = HeaderMap::from_iter([(HeaderName::from_static("grpc-status"), HeaderValue::from_static("0"))]);
        let body = body.with_trailers(std::future::ready(Some(Ok(status.clone()))));
        let collected = in_trailers(Response::new(body), report).into_body().collect().await.unwrap();
        let trailers = collected.trailers().unwrap();
        assert_eq!(trailers.len(), 2);
        assert_eq!(trailers.get(IN_TRAILERS).unwrap(), "MQAAAAAAAPA/");
        assert_eq!(collected.to_bytes(), "data");
        let mut failed = Response::new(Full::<Bytes>::default());
        *failed.headers_mut() = status;
        assert_eq!(in_trailers(failed, report).headers().get(IN_TRAILERS).unwrap(), "MQAAAAAAAPA/");
    }
}
