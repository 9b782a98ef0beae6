//! Load reports (ORCA) in responses to inference requests that ask for one, over HTTP and gRPC.
//!
//! A request that does not ask costs one look-up of a header.

use std::sync::Arc;

use http::header::{HeaderName, HeaderValue};
use http::{HeaderMap, Uri};
use percent_encoding::percent_decode_str;
use pharos::load_report::{Format, LoadReport, REQUEST_HEADER, RESPONSE_HEADER, TRAILER};
use pharos::service::{Route, Service};

const REQUEST: HeaderName = HeaderName::from_static(REQUEST_HEADER);
const RESPONSE: HeaderName = HeaderName::from_static(RESPONSE_HEADER);
const IN_TRAILERS: HeaderName = HeaderName::from_static(TRAILER);

/// Returns the format of the load report that an inference request asks for; `None` without the
/// header or with an unknown format.
fn requested(route: Route, headers: &HeaderMap) -> Option<Format> {
    if !route.is_inference() {
        return None;
    }
    Format::from_header(headers.get(REQUEST)?.as_bytes())
}

/// A load report that an HTTP request asks for.
#[derive(Clone, Debug)]
pub struct Requested {
    format: Format,
    /// Names the model, unless `model` does.
    uri: Uri,
    /// The model and version, for requests whose path does not name them.
    model: Option<(String, String)>,
}

impl Requested {
    /// Returns the load report that a request to this URI asks for.
    pub fn of(route: Route, headers: &HeaderMap, uri: &Uri) -> Option<Self> {
        let format = requested(route, headers)?;
        Some(Self { format, uri: uri.clone(), model: None })
    }

    /// Adds the report to the headers of a response. `report` returns the load report of a model
    /// and version.
    pub fn add_to(
        &self,
        headers: &mut HeaderMap,
        report: impl FnOnce(&str, &str) -> Arc<LoadReport>,
    ) {
        let path = percent_decode_str(self.uri.path()).decode_utf8_lossy();
        let (model, version) = match &self.model {
            Some((model, version)) => (model.as_str(), version.as_str()),
            None => model_of(&path),
        };
        if let Ok(value) =
            HeaderValue::from_maybe_shared(report(model, version).header(self.format))
        {
            headers.insert(RESPONSE, value);
        }
    }
}

/// The number of the first segments of a path that can name the model and version.
const SEGMENTS: usize = 5;

/// Returns the model and version that the decoded path of an inference request names; empty where
/// it names none.
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
    (
        model.get(..without_verb(model)).unwrap_or_default(),
        version.get(..without_verb(version)).unwrap_or_default(),
    )
}

/// Where a client asks for a load report.
#[derive(Clone, Debug)]
pub(crate) enum Report {
    /// In the headers of a response over HTTP.
    Header(Requested),
    /// In the trailers of a response over gRPC.
    Trailer {
        /// The model and version of the first request; `None` for the report of the server.
        model: Option<(String, String)>,
    },
}

impl Report {
    /// Returns the load report that a call over gRPC asks for.
    pub(crate) fn in_trailers(route: Route, headers: &HeaderMap) -> Option<Self> {
        requested(route, headers).map(|_| Self::Trailer { model: None })
    }

    /// Names the model of a report, unless it has a name.
    pub(crate) fn name_model(&mut self, model: &str, version: &str) {
        let (Self::Header(Requested { model: named, .. }) | Self::Trailer { model: named }) = self;
        named.get_or_insert_with(|| (model.to_owned(), version.to_owned()));
    }

    /// Returns whether the report is part of the head of a response.
    pub(crate) fn is_in_head(&self) -> bool {
        matches!(self, Self::Header(_))
    }

    /// Adds the report to the headers, or trailers, of a response.
    pub(crate) fn add_to(&self, headers: &mut HeaderMap, service: &dyn Service) {
        match self {
            Self::Header(requested) => {
                requested.add_to(headers, |model, version| service.load_report(model, version))
            }
            Self::Trailer { model } => {
                let (model, version) =
                    model.as_ref().map_or(("", ""), |(model, version)| (model, version));
                if let Ok(value) =
                    HeaderValue::from_maybe_shared(service.load_report(model, version).trailer())
                {
                    headers.insert(IN_TRAILERS, value);
                }
            }
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
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
        let mut headers = HeaderMap::new();
        requested.add_to(&mut headers, |model, version| {
            assert_eq!((model, version), ("m", "1"));
            report()
        });
        let value = headers.get(RESPONSE).unwrap().to_str().unwrap();
        assert!(value.starts_with("JSON {") && value.contains("\"rps_fractional\":1,"), "{value}");
    }
}
