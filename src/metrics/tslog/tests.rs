//! Compares lines with those that a real TorchServe 0.12 wrote, and with common regular expressions
//! for reading them.

use super::*;
use crate::catalog::Catalog;
use proptest::prelude::*;
use regex::Regex;

/// The expression that matched every line of a real TorchServe, in files and on the console.
const SAFE: &str = r"^(?P<ts>\d{4}-\d{2}-\d{2}T\d{2}:\d{2}:\d{2},\d{3}) (?:\[(?P<lvl>[A-Z ]{5})\] (?P<thread>\S+) (?P<logger>TS_METRICS|MODEL_METRICS) )?- (?P<name>[\w ]+)\.(?P<unit>[^:|]*):(?P<value>-?[0-9.]+(?:E-?\d+)?|NaN|-?Infinity)\|#(?P<dims>[^|]*)\|#hostname:(?P<host>[^,]+)(?:,requestID:(?P<rid>.*))?,timestamp:(?P<epoch>\d+)$";

fn spec(section: &str, name: &str, unit: &str, dimensions: &[&str]) -> MetricSpec {
    let dimensions = dimensions.join(", ");
    let text = format!(
        "{section}:\n  gauge:\n    - {{name: {name}, unit: '{unit}', dimensions: \
         [{dimensions}]}}\n"
    );
    let catalog = Catalog::parse(&text, "m.yaml").unwrap();
    catalog.find(name).unwrap().1.clone()
}

fn line(spec: &MetricSpec, values: &[&str], layout: Layout, value: f64, ids: &str) -> String {
    let dimensions = spec.dimensions.iter().map(String::as_str).zip(values.iter().copied());
    let mut out = String::new();
    Text::new(spec, dimensions, "vm").write(
        &mut out,
        layout,
        &Stamp::new(1_795_189_837_608, 0),
        value,
        ids,
    );
    out
}

#[test]
fn lines_equal_those_of_torchserve() {
    let level = spec("ts_metrics", "Loaded", "Milliseconds", &["WorkerName", "Level", "Hostname"]);
    assert_eq!(
        line(&level, &["W-29001-noop_1.11", "Host", "h.example"], Layout::File, 17868.0, ""),
        "2026-11-20T15:50:37,608 - \
         Loaded.Milliseconds:17868.0|#WorkerName:W-29001-noop_1.11,Level:Host|#hostname:h.example,\
         timestamp:1795189837\n"
    );
    let batch = spec("model_metrics", "Predicted", "ms", &["ModelName", "Level"]);
    let expected = "Predicted.ms:1.26|#ModelName:mhb,Level:Model|#hostname:vm,requestID:\
                    81549a64-c948,4cad23f6-9f6d,timestamp:1795189837\n";
    let ids = "81549a64-c948,4cad23f6-9f6d";
    assert_eq!(
        line(&batch, &["mhb", "Model"], Layout::Console, 1.26, ids),
        format!("2026-11-20T15:50:37,608 [INFO ] tslog MODEL_METRICS - {expected}")
    );
    assert_eq!(
        line(&batch, &["mhb", "Model"], Layout::File, 1.26, ids),
        format!("2026-11-20T15:50:37,608 - {expected}")
    );
    let plain = spec("model_metrics", "InfReq", "Count", &[]);
    assert_eq!(
        line(&plain, &[], Layout::File, 1.0, ""),
        "2026-11-20T15:50:37,608 - \
         InfReq.Count:1.0|#|#hostname:vm,requestID:null,timestamp:1795189837\n"
    );
}

#[test]
fn missing_ids_are_null() {
    for (ids, expected) in
        [("", "null"), (",,", "null"), ("a,,b", "a,null,b"), ("a%2Cb", "a%2Cb"), ("a|b", "a%7Cb")]
    {
        let mut out = String::new();
        push_request_ids(&mut out, ids);
        assert_eq!(out, expected);
    }
    let mut list = String::new();
    ["a,b", "", "c%d\n"].iter().enumerate().for_each(|(at, id)| push_request_id(&mut list, at, id));
    assert_eq!(list, "a%2Cb,,c%25d%0A");
}

#[test]
fn times_are_local_and_have_no_zone() {
    for (ms, offset, expected) in [
        (0, 0, "1970-01-01T00:00:00,000"),
        (0, -3600, "1969-12-31T23:00:00,000"),
        (951_782_400_007, 0, "2000-02-29T00:00:00,007"),
        (1_795_189_837_608, 5 * 3600 + 1800, "2026-11-20T21:20:37,608"),
        (4_107_542_399_999, 1, "2100-03-01T00:00:00,999"),
    ] {
        assert_eq!(Stamp::new(ms, offset).local, expected);
    }
    assert_eq!(Stamp::new(951_782_400_007, 0).date(), "2000-02-29");
}

#[test]
fn units_are_unescaped_except_for_line_breaking_characters() {
    // A definition refuses some of these units, so they are set afterwards.
    let of = |unit: &str| {
        let spec = MetricSpec { unit: unit.to_owned(), ..spec("ts_metrics", "n:s", "ms", &[]) };
        line(&spec, &[], Layout::File, 1.0, "")
    };
    assert!(of("%").contains(" - n_s.%:1.0|#|"));
    assert!(of("tokens/s, all").contains(".tokens/s, all:1.0|"));
    assert!(of("a:b|c").contains(".a%3Ab%7Cc:1.0|"));
}

#[test]
fn json_lines_have_torchserves_keys() {
    let spec = spec("model_metrics", "Size", "kB", &["Phase", "Hostname"]);
    let of = |value, ids| -> serde_json::Value {
        let line = line(&spec, &["a\"b,\n\u{2028}", "h"], Layout::Json, value, ids);
        assert_eq!(line.lines().count(), 1);
        assert!(!line.contains('\u{2028}'));
        serde_json::from_str(&line).unwrap()
    };
    let expected = serde_json::json!({
        "MetricName": "Size", "Value": 5.0, "Unit": "kB", "Type": "GAUGE",
        "Dimensions": [{"Name": "Phase", "Value": "a\"b,\n\u{2028}"}], "DimensionNames": ["Phase"],
        "DimensionValues": ["a\"b,\n\u{2028}"], "HostName": "h", "Logger": "MODEL_METRICS",
        "Timestamp": 1_795_189_837, "RequestId": "r\"1,r2",
    });
    assert_eq!(of(5.0, "r\"1,r2"), expected);
    assert_eq!(of(12_345_678.9, "")["Value"], 12_345_678.9);
    assert_eq!(of(1.0, ",")["RequestId"], serde_json::Value::Null);
    assert_eq!(of(f64::NAN, "")["Value"], "NaN");
}

/// Undoes the encoding.
fn decode(text: &str) -> String {
    let mut bytes = Vec::new();
    let mut rest = text.bytes();
    while let Some(byte) = rest.next() {
        let mut digit = || char::from(rest.next().unwrap()).to_digit(16).unwrap() as u8;
        bytes.push(if byte == b'%' { digit() * 16 + digit() } else { byte });
    }
    String::from_utf8(bytes).unwrap()
}

/// Texts that try to forge lines.
fn hostile() -> impl Strategy<Value = String> {
    prop_oneof![
        "\\PC{0,20}",
        ".{0,20}",
        "[:,|#%=\\n\\r\\x00-\\x1f\\x7f\u{85}\u{2028}\u{2029} a]{0,20}",
        Just(
            "x|#hostname:evil,timestamp:1\n2026-11-20T15:50:37,608 - \
             Fake.ms:1.0|#|#hostname:h,timestamp:1"
                .to_owned()
        ),
    ]
}

proptest! {
    #[test]
    fn no_value_breaks_a_line(
        first in hostile(), second in hostile(), host in hostile(), ids in prop::collection::vec(hostile(), 0..4),
        value: f64, model: bool, console: bool,
    ) {
        let section = if model { "model_metrics" } else { "ts_metrics" };
        let spec = spec(section, "Name", "Unit", &["First", "Second", "Hostname"]);
        let mut list = String::new();
        ids.iter().enumerate().for_each(|(at, id)| push_request_id(&mut list, at, id));
        let layout = if console { Layout::Console } else { Layout::File };
        let line = line(&spec, &[&first, &second, &host], layout, value, &list);
        let body = line.strip_suffix('\n').unwrap();
        prop_assert!(!body.contains(is_break));
        let fields = Regex::new(SAFE).unwrap().captures(body).unwrap();
        let host = if host.is_empty() { UNKNOWN_HOST } else { &host };
        prop_assert_eq!(decode(&fields["host"]), host);
        let dims: Vec<_> = fields["dims"].split(',').map(|dim| dim.split_once(':').unwrap()).collect();
        prop_assert_eq!(dims.len(), 2);
        prop_assert_eq!((dims[0].0, decode(dims[0].1)), ("First", first.clone()));
        prop_assert_eq!((dims[1].0, decode(dims[1].1)), ("Second", second.clone()));
        prop_assert_eq!(&fields["epoch"], "1795189837");
        prop_assert_eq!(fields.name("logger").is_some(), console);
        let null = || "null".to_owned();
        let expected: Vec<_> = ids.iter().map(|id| if id.is_empty() { null() } else { id.clone() }).collect();
        let expected = if ids.iter().all(String::is_empty) { vec![null()] } else { expected };
        let given: Option<Vec<_>> = fields.name("rid").map(|ids| ids.as_str().split(',').map(decode).collect());
        prop_assert_eq!(given, model.then_some(expected));
        // Common rules of log shippers: split at bars, and take the number after the third colon.
        prop_assert_eq!(body.split('|').count(), 3);
        let number: f64 = body.split('|').next().unwrap().split(':').nth(3).unwrap().parse().unwrap();
        prop_assert!(number.to_bits() == value.to_bits() || (number.is_nan() && value.is_nan()));
        prop_assert!(body.rsplit(',').next().unwrap().starts_with("timestamp:"));
    }

    #[test]
    fn a_workers_list_of_ids_breaks_no_line(list in hostile()) {
        let spec = spec("model_metrics", "Name", "Unit", &[]);
        let line = line(&spec, &[], Layout::File, 1.0, &list);
        let body = line.strip_suffix('\n').unwrap();
        prop_assert!(!body.contains(is_break));
        prop_assert_eq!(body.split('|').count(), 3);
        prop_assert!(Regex::new(SAFE).unwrap().is_match(body));
    }
}
