//! Parses StatsD datagrams, with the tags of DogStatsD, into samples.
//!
//! ```text
//! datagram = line *(LF line)
//! line     = name ":" values "|" type ["|@" rate] ["|#" tag *("," tag)]      values = value *(":" value)
//!          | name ":" value "|" type ["|@" rate] *(":" value "|" type ["|@" rate])
//! tag      = key [":" value]
//! ```
//!
//! | type | what it becomes |
//! |---|---|
//! | `c`, `m` | an increment by value / rate |
//! | `g` | the gauge's new value; with a sign, a change of it |
//! | `ms`, `h`, `d` | observations, as many as 1 / rate (rounded) |
//! | `s` | a member of a set; see [`Sets`] |
//!
//! A line with several values is equal to as many lines with one value each: a value that is not
//! valid affects no other.
//!
//! `statsd-parser` (0.3) parses a single line in its simplest form. This module handles beforehand
//! what the parser gets wrong: it takes names that begin with `_sc` for service checks and panics
//! on some of them, drops tags after an unknown field and a rate after tags, ends the tags at the
//! first empty one, does not distinguish `+1` from `1`, supports neither `d` nor `s` nor several
//! values or lines, and accepts `nan`, `inf` and any rate.
//!
//! No I/O: bytes in, samples out. Events and service checks are refused, since they have no value.

use std::borrow::Cow;
use std::collections::{BTreeMap, HashMap, HashSet};
use std::hash::{DefaultHasher, Hash, Hasher};

use statsd_parser::Metric;

use super::text_lines::{Malformed, prometheus_name};

/// The largest datagram, in bytes: the limit of UDP.
pub const MAX_DATAGRAM: usize = 64 << 10;
/// The number of observations that one value may represent; a timer's rate must be at least the
/// inverse.
pub const MAX_TIMES: u32 = 1000;
/// The number of tags of one line, at most.
pub const MAX_TAGS: usize = 64;
/// The longest name of a metric, in bytes.
pub const MAX_NAME: usize = 256;
/// The number of members that all sets together may have in one interval.
pub const MAX_MEMBERS: usize = 1 << 18;

/// The updates of one line to one series.
#[derive(Clone, Debug, PartialEq)]
pub struct Line {
    /// The metric's name, valid for Prometheus.
    pub name: String,
    /// Its labels by name, valid for Prometheus, sorted. The last of equal tags wins.
    pub labels: Vec<(String, String)>,
    /// The updates in order, at least one, and the faults of values without one. All are for
    /// metrics of the same type.
    pub updates: Vec<Result<Update, Malformed>>,
}

/// An update of a metric.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Update {
    /// Adds to a counter.
    Increment(f64),
    /// Sets a gauge.
    Set(f64),
    /// Changes a gauge by this amount.
    Change(f64),
    /// Observes a value, 1 to [`MAX_TIMES`] times.
    Observe {
        /// The observed value.
        value: f64,
        /// The number of observations.
        times: u32,
        /// Whether the line declares a duration in milliseconds.
        milliseconds: bool,
    },
    /// Adds a member (its hash) to a set.
    Member(u64),
}

/// Calls `each` with the text of every line of a datagram, in order, and its content or error. (For
/// a chain of several pieces, once for each piece.) The time is at most proportional to the
/// datagram's length.
pub fn parse<'a>(datagram: &'a [u8], mut each: impl FnMut(&'a [u8], Result<Line, Malformed>)) {
    for line in datagram.split(|&byte| byte == b'\n') {
        let line = line.trim_ascii();
        if line.is_empty() {
            continue;
        }
        let text = str::from_utf8(line).map_err(|_| Malformed("the line is not UTF-8"));
        if let Err(fault) =
            text.and_then(|text| parse_line(text, &mut |outcome| each(line, outcome)))
        {
            each(line, Err(fault));
        }
    }
}

/// Parses a line. Passes each piece of a chain, or the only one, to `each`.
///
/// # Errors
/// The line has no pieces.
fn parse_line(line: &str, each: &mut impl FnMut(Result<Line, Malformed>)) -> Result<(), Malformed> {
    if line.starts_with("_e{") || line.starts_with("_sc|") {
        return Err(Malformed("events and service checks are not supported"));
    }
    let form = Malformed("expected name:value|type, optionally followed by |@rate and |#tags");
    let (name, rest) = line.split_once(':').ok_or(form)?;
    if name.is_empty() || name.contains('|') {
        return Err(form);
    }
    if name.len() > MAX_NAME {
        return Err(Malformed("the name has more than 256 bytes"));
    }
    let name = prometheus_name(name);
    if !rest.contains("|#") && is_chain(rest) {
        for piece in rest.split(':') {
            each(Fields::of(piece).and_then(|fields| fields.line(&name)));
        }
        return Ok(());
    }
    each(Fields::of(rest).and_then(|fields| fields.line(&name)));
    Ok(())
}

/// Returns whether the text consists of several `value|type`, StatsD's oldest packed form: a colon
/// follows a type or a rate.
fn is_chain(rest: &str) -> bool {
    let mut fields = rest.split('|').skip(1);
    let after_type = fields.next().is_some_and(|kind| kind.contains(':'));
    after_type || fields.any(|field| field.starts_with('@') && field.contains(':'))
}

/// The supported types.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Type {
    Counter,
    Gauge,
    Timer,
    Distribution,
    Set,
}

/// The fields of a line after the name.
struct Fields<'a> {
    values: &'a str,
    kind: Type,
    rate: Option<&'a str>,
    tags: &'a str,
}

/// The parser's result for a line.
struct Parsed {
    labels: Vec<(String, String)>,
    rate: f64,
}

impl<'a> Fields<'a> {
    fn of(text: &'a str) -> Result<Self, Malformed> {
        let mut fields = text.split('|');
        let values = fields.next().unwrap_or("");
        let kind = fields.next();
        let kind = match kind {
            Some("c" | "m") => Type::Counter,
            Some("g") => Type::Gauge,
            Some("ms") => Type::Timer,
            Some("h" | "d") => Type::Distribution,
            Some("s") => Type::Set,
            Some(_) => return Err(Malformed("unknown type; allowed are c, g, ms, h, d, m and s")),
            None => return Err(Malformed("the value has no |type")),
        };
        let mut found = Self { values, kind, rate: None, tags: "" };
        for field in fields {
            // Ignores other fields (a container's id, a time, fields of later versions), which no
            // series has a place for.
            match field.as_bytes().first() {
                Some(b'@') => found.rate = field.get(1..),
                Some(b'#') => found.tags = field.get(1..).unwrap_or(""),
                _ => {}
            }
        }
        if found.tags.bytes().filter(|&byte| byte == b',').count() > MAX_TAGS {
            return Err(Malformed("the line has more than 64 tags"));
        }
        Ok(found)
    }

    fn line(&self, name: &str) -> Result<Line, Malformed> {
        let Parsed { labels, rate } = self.read(name)?;
        let name = name.to_owned();
        if self.kind == Type::Set {
            let mut hasher = DefaultHasher::new();
            self.values.hash(&mut hasher);
            return Ok(Line { name, labels, updates: vec![Ok(Update::Member(hasher.finish()))] });
        }
        let times =
            if matches!(self.kind, Type::Timer | Type::Distribution) { times(rate)? } else { 1 };
        let updates = self.values.split(':').map(|value| self.update(value, rate, times)).collect();
        Ok(Line { name, labels, updates })
    }

    fn update(&self, value: &str, rate: f64, times: u32) -> Result<Update, Malformed> {
        let number: f64 = value.parse().map_err(|_| Malformed("the value is not a number"))?;
        if !number.is_finite() {
            return Err(Malformed("the value is not a finite number"));
        }
        Ok(match self.kind {
            Type::Counter => Update::Increment(number / rate),
            Type::Gauge if value.starts_with(['+', '-']) => Update::Change(number),
            Type::Gauge => Update::Set(number),
            _ => Update::Observe { value: number, times, milliseconds: self.kind == Type::Timer },
        })
    }

    /// Parses the rate and the tags with the parser.
    fn read(&self, name: &str) -> Result<Parsed, Malformed> {
        let mut line = String::with_capacity(name.len() + self.tags.len() + 24);
        // With a name like `_sc`, the parser would take the line for a service check.
        line.push_str(if name.starts_with("_sc") { "_" } else { name });
        // `h` is the only type that has a value, a rate and tags and that the parser treats as
        // plain numbers.
        line.push_str(":1|h");
        if let Some(rate) = self.rate {
            line.push_str("|@");
            line.push_str(rate);
        }
        for (at, tag) in self.tags.split(',').filter(|tag| !tag.is_empty()).enumerate() {
            line.push_str(if at == 0 { "|#" } else { "," });
            line.push_str(tag);
        }
        let message =
            statsd_parser::parse(line).map_err(|_| Malformed("the rate is not a number"))?;
        let Metric::Histogram(number) = message.metric else {
            return Err(Malformed("unknown type; allowed are c, g, ms, h, d, m and s"));
        };
        let rate = number.sample_rate.unwrap_or(1.0);
        if !(rate > 0.0 && rate <= 1.0) {
            return Err(Malformed("the rate is not a number above 0 and at most 1"));
        }
        Ok(Parsed { labels: labels(message.tags), rate })
    }
}

fn labels(tags: Option<BTreeMap<String, String>>) -> Vec<(String, String)> {
    let mut labels: Vec<(String, String)> = Vec::new();
    for (key, value) in tags.into_iter().flatten() {
        let name = match prometheus_name(&key) {
            Cow::Borrowed(_) => key,
            Cow::Owned(name) => name,
        };
        match labels.iter_mut().find(|(other, _)| *other == name) {
            Some((_, old)) => *old = value,
            None => labels.push((name, value)),
        }
    }
    labels.sort_unstable();
    labels
}

/// Returns the number of observations that a sampled one represents.
fn times(rate: f64) -> Result<u32, Malformed> {
    let times = (1.0 / rate).round();
    if times > f64::from(MAX_TIMES) {
        return Err(Malformed(
            "the rate of a timer, histogram or distribution must be at least 0.001",
        ));
    }
    Ok(times as u32)
}

/// The key of a set: the metric's name and its labels.
pub type SetKey = (String, Vec<(String, String)>);

/// The members of sets in the current interval. At its end, a set's gauge becomes the number of
/// members. A set without members becomes 0 once and is then removed.
#[derive(Debug, Default)]
pub struct Sets {
    current: HashMap<SetKey, HashSet<u64>>,
    members: usize,
}

impl Sets {
    /// Adds a member.
    ///
    /// # Errors
    /// All sets together already have [`MAX_MEMBERS`].
    pub fn insert(&mut self, key: SetKey, member: u64) -> Result<(), Malformed> {
        let full = self.members >= MAX_MEMBERS;
        if full && !self.current.get(&key).is_some_and(|set| set.contains(&member)) {
            return Err(Malformed(
                "the sets together have more than 262144 members in this interval",
            ));
        }
        if self.current.entry(key).or_default().insert(member) {
            self.members += 1;
        }
        Ok(())
    }

    /// Ends the interval. Returns every set with its number of members. Sets that had members in
    /// the last interval but not in this one are returned once more, with 0.
    pub fn flush(&mut self) -> Vec<(SetKey, usize)> {
        let counts: Vec<(SetKey, usize)> =
            self.current.iter().map(|(key, set)| (key.clone(), set.len())).collect();
        self.current.retain(|_, set| !set.is_empty());
        self.current.values_mut().for_each(|set| *set = HashSet::new());
        self.members = 0;
        counts
    }

    /// Returns whether a flush would return nothing.
    pub fn is_empty(&self) -> bool {
        self.current.is_empty()
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests;
