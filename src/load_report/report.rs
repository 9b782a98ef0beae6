//! One load report and its forms on the wire.

use std::fmt::Write;
use std::sync::OnceLock;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use bytes::Bytes;

use super::{Format, Values, message};

/// The prefix of a model's metrics in the text form.
const NAMED: &str = "named_metrics";

/// A load report. Each form is rendered at most once, when it is first used.
#[derive(Debug, Default)]
pub struct LoadReport {
    values: Values,
    headers: [OnceLock<Bytes>; Format::ALL.len()],
    message: OnceLock<Bytes>,
    trailer: OnceLock<Bytes>,
}

impl LoadReport {
    /// Creates a report.
    pub fn new(values: Values) -> Self {
        Self { values, ..Self::default() }
    }

    /// Returns the numbers.
    pub fn values(&self) -> &Values {
        &self.values
    }

    /// Returns the value of the response header in a format: visible ASCII characters and spaces.
    pub fn header(&self, format: Format) -> Bytes {
        let [json, text, binary] = &self.headers;
        let (cell, render): (_, fn(&Self) -> String) = match format {
            Format::Json => (json, Self::json),
            Format::Text => (text, Self::text),
            Format::Binary => {
                (binary, |report| format!("BIN {}", STANDARD.encode(report.message())))
            }
        };
        cell.get_or_init(|| render(self).into()).clone()
    }

    /// Returns the encoded protobuf message.
    pub fn message(&self) -> Bytes {
        self.message.get_or_init(|| message::encode(&self.values).into()).clone()
    }

    /// Returns the value of the gRPC trailer: the message in base64, padded because Envoy requires
    /// it.
    pub fn trailer(&self) -> Bytes {
        self.trailer.get_or_init(|| STANDARD.encode(self.message()).into()).clone()
    }

    /// Calls `each` with the name and value of each known field.
    fn for_each_field(&self, mut each: impl FnMut(&str, f64)) {
        let Values {
            cpu_utilization,
            mem_utilization,
            application_utilization,
            rps_fractional,
            eps,
            ..
        } = &self.values;
        let fields = [
            ("cpu_utilization", *cpu_utilization),
            ("mem_utilization", *mem_utilization),
            ("application_utilization", *application_utilization),
            ("rps_fractional", *rps_fractional),
            ("eps", *eps),
        ];
        fields.into_iter().for_each(|(name, value)| {
            if let Some(value) = value {
                each(name, rounded(value));
            }
        });
    }

    fn json(&self) -> String {
        // Names need no escapes, and a finite number is written without an exponent.
        let mut json = "JSON {".to_owned();
        self.for_each_field(|name, value| {
            let _ = write!(json, "\"{name}\":{value},");
        });
        let named: Vec<String> = self
            .values
            .named_metrics
            .iter()
            .map(|(name, value)| format!("\"{name}\":{}", rounded(*value)))
            .collect();
        let _ = write!(json, "\"{NAMED}\":{{{}}}}}", named.join(","));
        json
    }

    fn text(&self) -> String {
        let mut fields = Vec::new();
        self.for_each_field(|name, value| fields.push(format!("{name}={value}")));
        let named = self.values.named_metrics.iter();
        fields.extend(named.map(|(name, value)| format!("{NAMED}.{name}={}", rounded(*value))));
        format!("TEXT {}", fields.join(","))
    }
}

/// Returns a number with at most six decimals; 0 for one that is not finite, which no form can
/// express.
fn rounded(value: f64) -> f64 {
    if value.is_finite() { (value * 1e6).round() / 1e6 } else { 0.0 }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(values: Values, format: Format, expected: &str) {
        let report = LoadReport::new(values);
        assert_eq!(String::from_utf8_lossy(&report.header(format)), expected);
        assert_eq!(report.header(format).as_ptr(), report.header(format).as_ptr(), "rendered once");
    }

    fn values() -> Values {
        Values {
            cpu_utilization: Some(0.25),
            mem_utilization: None,
            application_utilization: Some(1.0 / 3.0),
            rps_fractional: Some(1200.0),
            eps: Some(f64::NAN),
            named_metrics: vec![("waiting_requests", 2.0), ("utilization", 1e-9)],
        }
    }

    #[test]
    fn renders_every_form() {
        let json = r#"JSON {"cpu_utilization":0.25,"application_utilization":0.333333,"rps_fractional":1200,"eps":0,"#;
        let json =
            format!("{json}{}", r#""named_metrics":{"waiting_requests":2,"utilization":0}}"#);
        check(values(), Format::Json, &json);
        let text =
            "TEXT cpu_utilization=0.25,application_utilization=0.333333,rps_fractional=1200,eps=0,";
        check(
            values(),
            Format::Text,
            &format!("{text}named_metrics.waiting_requests=2,named_metrics.utilization=0"),
        );
        check(Values::default(), Format::Json, r#"JSON {"named_metrics":{}}"#);
        check(Values::default(), Format::Text, "TEXT ");
    }

    #[test]
    fn the_binary_form_is_the_message_in_base64() {
        let report = LoadReport::new(Values { rps_fractional: Some(1.0), ..Values::default() });
        assert_eq!(&*report.message(), [&[(6 << 3) | 1][..], &1f64.to_le_bytes()].concat());
        assert_eq!(&*report.trailer(), b"MQAAAAAAAPA/");
        assert_eq!(&*report.header(Format::Binary), b"BIN MQAAAAAAAPA/");
    }
}
