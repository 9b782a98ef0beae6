//! Single lines, datagrams, and the faults of the parser.

use super::*;
use proptest::prelude::*;

type Outcome = Result<(String, Vec<(String, String)>, Update), &'static str>;

fn all(datagram: &[u8]) -> Vec<Outcome> {
    let mut found = Vec::new();
    parse(datagram, |_, outcome| match outcome {
        Ok(line) => {
            let name = line.name;
            let labels = line.labels;
            found.extend(line.updates.into_iter().map(|update| {
                update.map(|update| (name.clone(), labels.clone(), update)).map_err(|fault| fault.0)
            }));
        }
        Err(fault) => found.push(Err(fault.0)),
    });
    found
}

fn check(line: &str, name: &str, labels: &[(&str, &str)], updates: &[Update]) {
    let labels: Vec<(String, String)> =
        labels.iter().map(|&(k, v)| (k.to_owned(), v.to_owned())).collect();
    let expected: Vec<Outcome> =
        updates.iter().map(|&u| Ok((name.to_owned(), labels.clone(), u))).collect();
    assert_eq!(all(line.as_bytes()), expected, "{line}");
}

fn observe(value: f64, times: u32, milliseconds: bool) -> Update {
    Update::Observe { value, times, milliseconds }
}

#[test]
fn parses_every_type() {
    use Update::{Change, Increment, Set};
    check("gorets:1|c", "gorets", &[], &[Increment(1.0)]);
    check("gorets:1|c|@0.1", "gorets", &[], &[Increment(10.0)]);
    check("events:3|m", "events", &[], &[Increment(3.0)]);
    check("gauge:333|g", "gauge", &[], &[Set(333.0)]);
    check("gauge:+4|g", "gauge", &[], &[Change(4.0)]);
    check("gauge:-4.5|g", "gauge", &[], &[Change(-4.5)]);
    check("glork:320|ms|@0.1", "glork", &[], &[observe(320.0, 10, true)]);
    check("size:320|h", "size", &[], &[observe(320.0, 1, false)]);
    check("size:1e3|d|@0.3", "size", &[], &[observe(1000.0, 3, false)]);
    check("gauge:5|g|@0.1", "gauge", &[], &[Set(5.0)]);
}

#[test]
fn tags_become_labels_among_any_other_fields() {
    let labels = &[("env", "prod"), ("url", "http://h:80/x")];
    let one = &[Update::Increment(2.0)];
    check("n:1|c|@0.5|#url:http://h:80/x,env:prod", "n", labels, one);
    // Cases that statsd-parser would lose: a rate after the tags, tags after an unknown field, tags
    // after an empty one.
    check("n:1|c|#url:http://h:80/x,env:prod|@0.5", "n", labels, one);
    check("n:1|c|@0.5|c:container|#url:http://h:80/x,env:prod|T1656581400", "n", labels, one);
    check("n:1|c|@0.5|#url:http://h:80/x,,env:prod,", "n", labels, one);
    check("n:1|c|@0.5|#a:1,flag,a:2", "n", &[("a", "2"), ("flag", "")], one);
    check("n:1|c|@0.5|#", "n", &[], one);
    check("n:1|c|@0.5|", "n", &[], one);
    check("n:1|c|#a-b:1,2x:3", "n", &[("_2x", "3"), ("a_b", "1")], &[Update::Increment(1.0)]);
}

#[test]
fn several_values_in_one_line() {
    check("n:1:2:-3|c|#a:b", "n", &[("a", "b")], &[1.0, 2.0, -3.0].map(Update::Increment));
    check("n:1:+2|g", "n", &[], &[Update::Set(1.0), Update::Change(2.0)]);
    check(
        "n:1|c:2|c|@0.5:3|g",
        "n",
        &[],
        &[Update::Increment(1.0), Update::Increment(4.0), Update::Set(3.0)],
    );
    check("n:1|c|c:container:1", "n", &[], &[Update::Increment(1.0)]);
}

#[test]
fn a_bad_value_does_not_affect_others_in_its_line() {
    let faults = |line: &str| -> Vec<Option<&str>> {
        all(line.as_bytes()).into_iter().map(Result::err).collect()
    };
    let number = Some("the value is not a number");
    let finite = Some("the value is not a finite number");
    for kind in ["c", "g", "ms", "h", "d", "m"] {
        assert_eq!(
            faults(&format!("n:1:x:3::inf|{kind}|#a:b")),
            [None, number, None, number, finite],
            "{kind}"
        );
        assert_eq!(faults(&format!("n:x:2|{kind}")), [number, None], "{kind}");
    }
    let kind = Some("unknown type; allowed are c, g, ms, h, d, m and s");
    assert_eq!(faults("n:1|c:2|x:3|g:y|c"), [None, kind, None, number]);
    // The rate and the tags apply to all values.
    assert_eq!(
        faults("n:1:2|ms|@0.0001"),
        [Some("the rate of a timer, histogram or distribution must be at least 0.001")]
    );
    assert_eq!(faults("n:1:2|c|@x"), [Some("the rate is not a number")]);
}

#[test]
fn names_are_made_valid_and_may_begin_like_a_service_check() {
    check("web.req-s:1|c", "web_req_s", &[], &[Update::Increment(1.0)]);
    check("_score:1|c|#a:b", "_score", &[("a", "b")], &[Update::Increment(1.0)]);
    check("größe:1|c", "gr__e", &[], &[Update::Increment(1.0)]);
}

#[test]
fn a_bad_line_does_not_affect_others() {
    let found = all(b"a:1|c\r\n\nb\nc:2|g\n\xff:1|c\n");
    let shown: Vec<_> =
        found.iter().map(|outcome| outcome.as_ref().map(|(name, ..)| name.as_str())).collect();
    let form = "expected name:value|type, optionally followed by |@rate and |#tags";
    assert_eq!(shown, [Ok("a"), Err(&form), Ok("c"), Err(&"the line is not UTF-8")]);
    assert!(all(b"").is_empty() && all(b"\n\n").is_empty());
}

#[test]
fn errors_name_the_fault() {
    for (line, expected) in [
        ("n", "expected name:value|type"),
        (":1|c", "expected name:value|type"),
        ("n|c|#a:b", "expected name:value|type"),
        ("n:1", "no |type"),
        ("n:1|x", "allowed are c, g, ms"),
        ("n:|c", "not a number"),
        ("n:x|g", "not a number"),
        ("n:nan|g", "not a finite"),
        ("n:inf|c", "not a finite"),
        ("n:1|c|@x", "rate is not a number"),
        ("n:1|c|@0", "above 0"),
        ("n:1|c|@nan", "above 0"),
        ("n:1|c|@-1", "above 0"),
        ("n:1|c|@2", "above 0"),
        ("n:1|ms|@0.0001", "at least 0.001"),
        ("_e{5,4}:title|text", "event"),
        ("_sc|name|0|h", "service check"),
    ] {
        let found = all(line.as_bytes());
        assert!(
            matches!(found.as_slice(), [Err(fault)] if fault.contains(expected)),
            "{line}: {found:?}"
        );
    }
}

#[test]
fn lengths_and_counts_are_limited() {
    let tags = |n: usize| {
        format!("n:1|c|#{}", (0..n).map(|n| format!("t{n}:v")).collect::<Vec<_>>().join(","))
    };
    assert!(
        all(tags(MAX_TAGS).as_bytes())[0]
            .as_ref()
            .is_ok_and(|(_, labels, _)| labels.len() == MAX_TAGS)
    );
    assert!(all(tags(MAX_TAGS + 2).as_bytes())[0].is_err());
    assert!(all(format!("{}:1|c", "n".repeat(MAX_NAME)).as_bytes())[0].is_ok());
    assert!(all(format!("{}:1|c", "n".repeat(MAX_NAME + 1)).as_bytes())[0].is_err());
    // A datagram full of values with the maximum number of tags: quadratic work in a naive
    // implementation.
    let long = format!("n:{}1|c|#{}", "1:".repeat(30_000), "t:v,".repeat(MAX_TAGS));
    assert_eq!(all(long.as_bytes()).len(), 30_001);
}

/// Why this module does not pass lines to the parser unchanged. If one of these assertions fails,
/// the parser has improved.
#[test]
fn faults_of_the_parser() {
    let parse = |line: &'static str| statsd_parser::parse(line);
    let tags = |line| parse(line).unwrap().tags.map_or(0, |tags| tags.len());
    assert!(std::panic::catch_unwind(|| parse("_sc|n|0|h")).is_err());
    assert!(matches!(parse("_score:1|c").unwrap().metric, Metric::ServiceCheck(_)));
    assert_eq!((tags("n:1|c|c:container|#a:b"), tags("n:1|c|#a:b,,c:d")), (0, 1));
    assert_eq!(parse("n:1|c|#a:b|@0.5").unwrap(), parse("n:1|c|#a:b").unwrap());
    assert_eq!(parse("n:+1|g").unwrap(), parse("n:1|g").unwrap());
    for lost in ["n:1|d", "n:1|s", "n:1:2|c", "n:1|c\nm:1|c"] {
        assert!(parse(lost).is_err(), "{lost}");
    }
    for taken in ["n:nan|c", "n:inf|c", "n:1|c|@0", "n:1|c|@-2"] {
        assert!(parse(taken).is_ok(), "{taken}");
    }
}

#[test]
fn a_set_counts_distinct_members_and_falls_to_zero_once() {
    let mut sets = Sets::default();
    let feed = |sets: &mut Sets, text: &str| {
        for outcome in all(text.as_bytes()) {
            let Ok((name, labels, Update::Member(member))) = outcome else {
                unreachable!("{outcome:?}")
            };
            sets.insert((name, labels), member).unwrap();
        }
    };
    let key: SetKey = ("users".to_owned(), vec![("a".to_owned(), "b".to_owned())]);
    feed(&mut sets, "users:ann|s|#a:b\nusers:bob:1|s|#a:b|@0.5\nusers:ann|s|#a:b");
    assert_eq!(sets.flush(), [(key.clone(), 2)]);
    feed(&mut sets, "users:ann|s|#a:b");
    assert_eq!(sets.flush(), [(key.clone(), 1)]);
    assert!(!sets.is_empty());
    assert_eq!(sets.flush(), [(key, 0)]);
    assert!(sets.is_empty() && sets.flush().is_empty());
}

#[test]
fn sets_are_bounded() {
    let mut sets = Sets::default();
    let key = |n: usize| (format!("s{n}"), Vec::new());
    for member in 0..MAX_MEMBERS as u64 {
        sets.insert(key(0), member).unwrap();
    }
    assert!(sets.insert(key(0), u64::MAX).is_err());
    assert!(sets.insert(key(1), 0).is_err());
    assert!(sets.insert(key(0), 7).is_ok());
    assert_eq!(sets.flush(), [(key(0), MAX_MEMBERS)]);
    assert!(sets.insert(key(1), 0).is_ok());
}

proptest! {
    #[test]
    fn no_datagram_panics(bytes in "(_sc|[a-z:|#@,+.0-9\n-]){0,60}") {
        for outcome in all(bytes.as_bytes()) {
            let Ok((name, labels, update)) = outcome else { continue };
            prop_assert_eq!(prometheus_name(&name), name.as_str());
            prop_assert!(labels.iter().all(|(name, _)| prometheus_name(name) == name.as_str()));
            prop_assert!(labels.windows(2).all(|pair| pair[0].0 < pair[1].0));
            match update {
                Update::Increment(value) | Update::Set(value) | Update::Change(value) => prop_assert!(!value.is_nan()),
                Update::Observe { value, times, .. } => prop_assert!(value.is_finite() && (1..=MAX_TIMES).contains(&times)),
                Update::Member(_) => {}
            }
        }
    }

    #[test]
    fn lines_of_clients_are_parsed(value in -1e12..1e12_f64, tags in proptest::collection::btree_map("[a-z_]{1,5}", "[a-z:/.]{0,6}", 0..4)) {
        let written: Vec<String> = tags.iter().map(|(k, v)| format!("{k}:{v}")).collect();
        let line = format!("n:{value}|h|#{}", written.join(","));
        let expected = tags.into_iter().collect::<Vec<_>>();
        prop_assert_eq!(all(line.as_bytes()), vec![Ok(("n".to_owned(), expected, observe(value, 1, false)))]);
    }
}
