//! Parses the metric lines that a worker of TorchServe prints on its standard output.
//!
//! ```text
//! line  = ["INFO > "] "[METRICS]" name "." unit ":" value [ "|#" dims ] [ "|#type:" type ] [ "|#hostname:" host ["," epoch ["," ids]] ]
//! dims  = [ dim *("," dim) ]        dim = dimension ":" value        ids = id *("," id)
//! ```
//!
//! The grammar accepts everything that TorchServe's own regular expression accepts, before and
//! since version 0.8, which added the type; lines of its C++ workers and of `emit_metrics` still
//! have none. It also accepts what TorchServe silently dropped: numbers such as `1e+16` and `inf`,
//! names with `-` or `.` (both become `_`), units with `/`, empty dimension values, and dimension
//! values with `:` (the first colon ends the name) or with `,`. A comma starts a new dimension if a
//! word and a colon follow it (`a:x,b:y`); otherwise it belongs to the value (`path:/a,/b` is one
//! value). A value that contains `,word:` cannot be distinguished from two dimensions.
//!
//! The value `nan` is a number like any other here: a gauge takes it.
//!
//! No I/O: bytes in, borrowed pieces out.

use super::catalog::Kind;
use super::text_lines::Malformed;

/// The prefix of a metric line.
pub const MARKER: &str = "[METRICS]";
/// The prefix that the C++ workers' logger writes before the marker.
const LOGGER: &str = "INFO > ";
/// The number of dimensions of one line, at most.
const MAX_DIMENSIONS: usize = 64;

/// One parsed line. The pieces are as written, without surrounding blanks.
#[derive(Clone, Debug, PartialEq)]
pub struct Line<'a> {
    /// The metric's name; letters, digits, `_`, `-` and `.` only.
    pub name: &'a str,
    /// The unit as the worker writes it. Ignored for declared metrics, whose definition has the
    /// unit.
    pub unit: &'a str,
    /// The sample: a counter's increment, a gauge's value, an observation.
    pub value: f64,
    /// Dimensions in the order of the line.
    pub dimensions: Vec<(&'a str, &'a str)>,
    /// The type as written (`COUNTER`), if the line has one; see [`kind_of`].
    pub kind: Option<&'a str>,
    /// The host name that the worker gives.
    pub hostname: Option<&'a str>,
    /// The ids of the requests that the sample belongs to, joined by commas; may be empty.
    pub request_ids: &'a str,
}

/// Returns the text after the marker if `line` is a metric line.
pub fn strip(line: &[u8]) -> Option<&[u8]> {
    line.strip_prefix(LOGGER.as_bytes()).unwrap_or(line).strip_prefix(MARKER.as_bytes())
}

/// Parses the text after the marker.
///
/// # Errors
/// Returns the first fault of the line.
pub fn parse(body: &[u8]) -> Result<Line<'_>, Malformed> {
    let text = str::from_utf8(body).map_err(|_| Malformed("the line is not UTF-8"))?;
    let mut sections = text.split("|#");
    let (name, unit, value) = head(sections.next().unwrap_or(""))?;
    let mut line = Line {
        name,
        unit,
        value,
        dimensions: Vec::new(),
        kind: None,
        hostname: None,
        request_ids: "",
    };
    for (at, section) in sections.enumerate() {
        if let Some(kind) = section.strip_prefix("type:") {
            line.kind = Some(kind.trim());
        } else if let Some(origin) = section.strip_prefix("hostname:") {
            (line.hostname, line.request_ids) = self::origin(origin);
        } else if at == 0 {
            line.dimensions = dimensions(section)?;
        } else {
            return Err(Malformed("only `|#type:` and `|#hostname:` may follow the dimensions"));
        }
    }
    Ok(line)
}

/// Parses `name.unit:value`: the value follows the first colon, the unit the last dot before it.
fn head(text: &str) -> Result<(&str, &str, f64), Malformed> {
    let missing = Malformed("a metric line begins with Name.Unit:value");
    let (metric, value) = text.split_once(':').ok_or(missing)?;
    let (name, unit) = metric.rsplit_once('.').ok_or(missing)?;
    let name = name.trim();
    let unit = unit.trim();
    if name.is_empty() || unit.is_empty() {
        return Err(missing);
    }
    if name.contains(char::is_whitespace) {
        return Err(Malformed(
            "the metric's name contains spaces, which Prometheus does not allow",
        ));
    }
    if !name.chars().all(|c| c.is_ascii_alphanumeric() || "_-.".contains(c)) {
        return Err(Malformed(
            "the metric's name may only contain letters, digits, `_`, `-` and `.`",
        ));
    }
    Ok((name, unit, number(value)?))
}

/// Parses a number as Python or C++ prints it.
fn number(text: &str) -> Result<f64, Malformed> {
    let text = text.trim().trim_end_matches('|');
    text.parse()
        .map_err(|_| Malformed("the value is not a number such as 1, 0.5, 1e-05, inf or nan"))
}

/// Parses dimensions; the head of the module defines the meaning of a comma.
fn dimensions(section: &str) -> Result<Vec<(&str, &str)>, Malformed> {
    // Some emitters write `|#|` for no dimensions.
    let section = section.trim().trim_end_matches('|');
    let mut found: Vec<(&str, &str)> = Vec::new();
    let mut rest = section;
    while !rest.is_empty() {
        let Some((name, after)) = rest.split_once(':').filter(|(name, _)| is_word(name.trim()))
        else {
            return Err(Malformed("dimensions must have the form name:value,name:value"));
        };
        let end = value_end(after);
        if found.len() == MAX_DIMENSIONS {
            return Err(Malformed("the line has more than 64 dimensions"));
        }
        found.push((name.trim(), after.get(..end).unwrap_or(after).trim()));
        rest = after.get(end + 1..).unwrap_or("");
    }
    Ok(found)
}

/// Returns where a dimension's value ends: at the first comma that is followed by a word and a
/// colon or by the end.
fn value_end(text: &str) -> usize {
    let begins_dimension = |at: usize| {
        let rest = text.get(at + 1..).unwrap_or("");
        // Looks only up to the next comma, so that a line of commas takes linear time.
        let piece = rest.split(',').next().unwrap_or("");
        rest.is_empty() || piece.split_once(':').is_some_and(|(name, _)| is_word(name.trim()))
    };
    text.match_indices(',').find(|&(at, _)| begins_dimension(at)).map_or(text.len(), |(at, _)| at)
}

/// Returns whether a dimension may have this name: a label's name, also with `-` and `.`, which
/// become `_`.
fn is_word(name: &str) -> bool {
    let mut characters = name.chars();
    characters.next().is_some_and(|c| c.is_ascii_alphabetic() || c == '_')
        && characters.all(|c| c.is_ascii_alphanumeric() || "_-.".contains(c))
}

/// Parses `host[,epoch[,ids]]`. Also accepts the form of TorchServe's log
/// (`host[,requestID:ids],timestamp:epoch`).
fn origin(section: &str) -> (Option<&str>, &str) {
    let section = section.trim();
    let (host, rest) = section.split_once(',').unwrap_or((section, ""));
    let ids = match rest.strip_prefix("requestID:") {
        Some(ids) => ids.rsplit_once(",timestamp:").map_or(ids, |(ids, _)| ids),
        None => rest.split_once(',').map_or("", |(_, ids)| ids),
    };
    let host = host.trim();
    ((!host.is_empty()).then_some(host), if ids == "null" { "" } else { ids.trim() })
}

/// Returns the type of an undeclared metric: the type of the line. Lines without a type (C++
/// workers, `emit_metrics`) are counters if their unit is `Count`, and gauges otherwise.
///
/// # Errors
/// The type is not one of TorchServe's.
pub fn kind_of(line: &Line<'_>) -> Result<Kind, Malformed> {
    match line.kind.map(str::to_ascii_lowercase).as_deref() {
        Some("counter") => Ok(Kind::Counter),
        Some("gauge") => Ok(Kind::Gauge),
        Some("histogram") => Ok(Kind::Histogram),
        Some(_) => Err(Malformed("unknown type; allowed are COUNTER, GAUGE and HISTOGRAM")),
        None if line.unit.eq_ignore_ascii_case("count") => Ok(Kind::Counter),
        None => Ok(Kind::Gauge),
    }
}

/// Returns the full name of a unit that a worker may abbreviate. Used for undeclared metrics.
pub fn unit_name(unit: &str) -> &str {
    match unit {
        "ms" => "Milliseconds",
        "s" => "Seconds",
        "percent" => "Percent",
        "count" => "Count",
        "MB" => "Megabytes",
        "GB" => "Gigabytes",
        "kB" => "Kilobytes",
        "B" => "Bytes",
        other => other,
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn line(text: &str) -> Line<'_> {
        parse(text.as_bytes()).unwrap_or_else(|error| unreachable!("{text}: {error}"))
    }

    #[test]
    fn parses_lines_with_and_without_a_type() {
        let now = line(
            "HandlerTime.Milliseconds:71.77|#ModelName:mnist,Level:Model|#type:GAUGE|#hostname:\
             test-host,1699061430,6d17-7,8e-1",
        );
        let expected = Line {
            name: "HandlerTime",
            unit: "Milliseconds",
            value: 71.77,
            dimensions: vec![("ModelName", "mnist"), ("Level", "Model")],
            kind: Some("GAUGE"),
            hostname: Some("test-host"),
            request_ids: "6d17-7,8e-1",
        };
        assert_eq!(now, expected);
        let early = line(
            "HandlerTime.Milliseconds:71.77|#ModelName:mnist,Level:Model|#hostname:test-host,\
             1699061430,6d17-7,8e-1",
        );
        assert_eq!(early, Line { kind: None, ..expected.clone() });
        let logged = line(
            "HandlerTime.Milliseconds:71.77|#ModelName:mnist,Level:Model|#hostname:test-host,\
             requestID:6d17-7,8e-1,timestamp:1",
        );
        assert_eq!(logged, early);
        let short = line("SizeMetric.Gigabytes:25|#ModelName:test_add_size_pass,Level:Error");
        assert_eq!((short.hostname, short.request_ids, short.dimensions.len()), (None, "", 2));
        for text in [
            "LoopCountError.unit:5|#|",
            "LoopCountError.unit:5|#",
            "LoopCountError.unit:5",
            "  LoopCountError.unit:5 ",
        ] {
            let bare = line(text);
            assert_eq!(
                (bare.name, bare.unit, bare.value, bare.dimensions),
                ("LoopCountError", "unit", 5.0, vec![])
            );
        }
        let host = line("InfReq.Count:1.0|#|#hostname:vm,requestID:null,timestamp:1795189800");
        assert_eq!((host.hostname, host.request_ids), (Some("vm"), ""));
    }

    #[test]
    fn keeps_what_torchserve_dropped() {
        assert_eq!(line("a.Count:1e+16|#").value, 1e16);
        assert_eq!(line("a.Count:inf|#").value, f64::INFINITY);
        assert_eq!(line("a.Count:-2.5e-3|#").value, -0.0025);
        assert!(line("a.ms:nan|#").value.is_nan() && line("a.ms:-nan|#").value.is_nan());
        let rate = line("bad-name.tokens/s:3|#");
        assert_eq!((rate.name, rate.unit), ("bad-name", "tokens/s"));
        assert_eq!(line("a.b.ms:3|#").name, "a.b");
        let dims = |text: &'static str| line(text).dimensions;
        assert_eq!(
            dims("a.ms:1|#url:http://h:80/x,Level:Model"),
            [("url", "http://h:80/x"), ("Level", "Model")]
        );
        assert_eq!(dims("a.ms:1|#ip:fe80::1"), [("ip", "fe80::1")]);
        assert_eq!(dims("a.ms:1|#path:/a,/b,Level:Model"), [("path", "/a,/b"), ("Level", "Model")]);
        assert_eq!(
            dims("a.ms:1|#empty:,Level:Model,last:"),
            [("empty", ""), ("Level", "Model"), ("last", "")]
        );
        assert_eq!(
            dims("a.ms:1|#dash-label:x, spaced : y ,"),
            [("dash-label", "x"), ("spaced", "y")]
        );
    }

    #[test]
    fn errors_name_the_fault() {
        let check = |text: &str, expected: &str| {
            let error = parse(text.as_bytes()).unwrap_err().to_string();
            assert!(error.contains(expected), "{text}: {error}");
        };
        check("Failed to update metric with name:X", "Name.Unit:value");
        check("", "Name.Unit:value");
        check(".ms:1|#", "Name.Unit:value");
        check("a.:1|#", "Name.Unit:value");
        check("Two Words.ms:1|#", "contains spaces");
        check("a\"b.ms:1|#", "letters, digits");
        check("a.ms:None|#", "not a number");
        check("a.ms:1,000.5|#", "not a number");
        check("a.ms:1|#word", "name:value,name:value");
        check("a.ms:1|#2:x", "name:value,name:value");
        check("a.ms:1|#a:b|#c:d", "only `|#type:`");
        check(&format!("a.ms:1|#{}", "d:v,".repeat(65)), "64 dimensions");
        assert!(parse(b"a.ms:1|#a:\xff").is_err());
    }

    #[test]
    fn only_marked_lines_are_metric_lines() {
        assert_eq!(strip(b"[METRICS]a.ms:1"), Some(&b"a.ms:1"[..]));
        assert_eq!(strip(b"INFO > [METRICS]a.ms:1"), Some(&b"a.ms:1"[..]));
        assert_eq!(strip(b"say [METRICS]a.ms:1"), None);
        assert_eq!(strip(b"[METRIC]a.ms:1"), None);
    }

    #[test]
    fn the_type_of_an_undeclared_metric() {
        let kind = |text: &str| kind_of(&line(text));
        assert_eq!(kind("a.ms:1|#|#type:HISTOGRAM"), Ok(Kind::Histogram));
        assert_eq!(kind("a.ms:1|#|#type:counter"), Ok(Kind::Counter));
        assert_eq!((kind("a.Count:1|#"), kind("a.ms:1|#")), (Ok(Kind::Counter), Ok(Kind::Gauge)));
        assert!(kind("a.ms:1|#|#type:METER").is_err());
    }

    proptest! {
        #[test]
        fn no_line_panics(text in "[ -~|#:,.]{0,60}") {
            if let Ok(line) = parse(text.as_bytes()) {
                prop_assert!(line.dimensions.iter().all(|(name, _)| is_word(name)));
                let _ = kind_of(&line);
            }
        }

        #[test]
        fn written_lines_are_parsed(value in any::<f64>(), first in "[a-z/:]{0,8}(,[/0-9 ]{1,3})?", second in "[A-Z:.]{0,8}") {
            prop_assume!(!value.is_nan());
            let text = format!("n.u:{value:e}|#a:{first},b:{second}|#type:GAUGE|#hostname:h,1,r");
            let line = parse(text.as_bytes()).unwrap();
            prop_assert_eq!(line.value, value);
            prop_assert_eq!(line.dimensions, vec![("a", first.trim()), ("b", second.as_str())]);
        }
    }
}
