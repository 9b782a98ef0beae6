//! The choice of a format by the `Accept` header of a scrape.

use super::Format;

/// The format of a scrape's answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Encoding {
    /// A text format.
    Text(Format),
    /// Prometheus' protobuf format: `io.prometheus.client.MetricFamily` messages, each after its
    /// length.
    Protobuf,
}

/// The media types of the formats.
const PROTOBUF: &str = "application/vnd.google.protobuf";
const OPEN_METRICS: &str = "application/openmetrics-text";
const TEXT: &str = "text/plain";
/// The parameters of the protobuf format. Prometheus also knows other messages and encodings.
const PROTOBUF_PARAMETERS: [(&str, &str); 2] =
    [("proto", "io.prometheus.client.MetricFamily"), ("encoding", "delimited")];

impl Encoding {
    /// Chooses the format that an `Accept` header lists with the highest weight: text unless
    /// another one is listed with at least the weight of `text/plain`. Of equal weights, protobuf
    /// precedes OpenMetrics.
    pub fn negotiate(accept: Option<&str>) -> Self {
        let weight = |media: &str, parameters: &[(&str, &str)]| {
            let ranges = accept
                .unwrap_or("")
                .split(',')
                .filter_map(|range| weight(range, media, parameters));
            ranges.fold(0.0, f64::max)
        };
        let text = weight(TEXT, &[]);
        let open_metrics = weight(OPEN_METRICS, &[]);
        let protobuf = weight(PROTOBUF, &PROTOBUF_PARAMETERS);
        if protobuf > 0.0 && protobuf >= text && protobuf >= open_metrics {
            Self::Protobuf
        } else if open_metrics > 0.0 && open_metrics >= text {
            Self::Text(Format::OpenMetrics)
        } else {
            Self::Text(Format::Text)
        }
    }

    /// Returns the `Content-Type` of the format.
    pub fn content_type(self) -> &'static str {
        match self {
            Self::Text(format) => format.content_type(),
            Self::Protobuf => {
                "application/vnd.google.protobuf; proto=io.prometheus.client.MetricFamily; \
                 encoding=delimited"
            }
        }
    }
}

/// Returns the weight of a media range if it names this type with these parameters.
fn weight(range: &str, media: &str, parameters: &[(&str, &str)]) -> Option<f64> {
    let mut parts = range.split(';').map(str::trim);
    parts.next().filter(|name| name.eq_ignore_ascii_case(media))?;
    let given: Vec<(&str, &str)> = parts.filter_map(|part| part.split_once('=')).collect();
    let value = |name: &str| {
        let found = given.iter().find(|(given, _)| given.trim().eq_ignore_ascii_case(name));
        found.map(|(_, value)| value.trim().trim_matches('"'))
    };
    if !parameters.iter().all(|(name, expected)| value(name) == Some(*expected)) {
        return None;
    }
    Some(value("q").map_or(1.0, |q| q.parse().unwrap_or(0.0)))
}

#[cfg(test)]
mod tests {
    use super::*;

    const TEXT: Encoding = Encoding::Text(Format::Text);
    const OPEN_METRICS: Encoding = Encoding::Text(Format::OpenMetrics);

    fn check(accept: Option<&str>, expected: Encoding) {
        assert_eq!(Encoding::negotiate(accept), expected, "{accept:?}");
    }

    #[test]
    fn text_formats_are_negotiated() {
        check(None, TEXT);
        check(Some("*/*"), TEXT);
        check(Some("text/plain"), TEXT);
        check(Some("application/openmetrics-text"), OPEN_METRICS);
        check(
            Some(
                "application/openmetrics-text; \
                 version=1.0.0;q=0.5,text/plain;version=0.0.4;q=0.3,*/*;q=0.1",
            ),
            OPEN_METRICS,
        );
        check(Some("application/openmetrics-text;q=0.2, text/plain;q=0.3"), TEXT);
        check(Some("Application/OpenMetrics-Text;q=0"), TEXT);
        check(Some(",;q=,\u{fffd};;="), TEXT);
    }

    /// The headers of Prometheus 2.42, 2.53 and 3.0, each with native histograms.
    #[test]
    fn protobuf_is_chosen_for_scrapers_that_prefer_it() {
        for accept in [
            "application/vnd.google.protobuf;proto=io.prometheus.client.MetricFamily;\
             encoding=delimited,application/openmetrics-text;version=1.0.0;q=0.8,application/\
             openmetrics-text;version=0.0.1;q=0.75,text/plain;version=0.0.4;q=0.5,*/*;q=0.1",
            "application/vnd.google.protobuf;proto=io.prometheus.client.MetricFamily;\
             encoding=delimited;q=0.5,application/openmetrics-text;version=1.0.0;q=0.4,\
             application/openmetrics-text;version=0.0.1;q=0.3,text/plain;version=0.0.4;q=0.2,*/*;\
             q=0.1",
            "application/vnd.google.protobuf;proto=io.prometheus.client.MetricFamily;\
             encoding=delimited;escaping=allow-utf-8;q=0.6,application/openmetrics-text;version=1.\
             0.0;escaping=allow-utf-8;q=0.5,text/plain;version=1.0.0;q=0.3,*/*;q=0.1",
            "Application/Vnd.Google.Protobuf; Encoding=delimited; \
             proto=\"io.prometheus.client.MetricFamily\"",
            "text/plain;q=0.5, \
             application/vnd.google.protobuf;proto=io.prometheus.client.MetricFamily;\
             encoding=delimited;q=0.5",
        ] {
            check(Some(accept), Encoding::Protobuf);
        }
    }

    #[test]
    fn protobuf_is_not_chosen_for_other_weights_messages_and_encodings() {
        let protobuf = "application/vnd.google.protobuf;proto=io.prometheus.client.MetricFamily;\
                        encoding=delimited";
        check(Some(&format!("{protobuf};q=0.4,application/openmetrics-text;q=0.5")), OPEN_METRICS);
        check(Some(&format!("{protobuf};q=0.4,text/plain;q=0.5")), TEXT);
        check(Some(&format!("{protobuf};q=0")), TEXT);
        check(Some(&format!("{protobuf};q=x")), TEXT);
        check(Some("application/vnd.google.protobuf"), TEXT);
        check(Some(&protobuf.replace("delimited", "compact-text")), TEXT);
        check(Some(&protobuf.replace("MetricFamily", "Other")), TEXT);
    }
}
