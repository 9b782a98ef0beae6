//! The service level objectives (SLOs) of a `metrics.yaml`: the share of the requests to some
//! models that must be good.

use pharos_base::id::ModelName;
use serde::de::{self, MapAccess, SeqAccess};

use super::names::shortened;
use super::node::{Key, Node, Seed};

/// The most objectives of one file. Each request is counted once for every objective of its model.
const MAX_SLOS: usize = 100;
/// The longest name of an objective, and the longest pattern of model names, in bytes.
const MAX_NAME: usize = 63;
const MAX_PATTERN: usize = 256;
/// The shortest window in seconds, which the longest alert window of the rules must fit in, and the
/// longest.
const MIN_WINDOW: u64 = 3 * 86_400;
const MAX_WINDOW: u64 = 90 * 86_400;

named_enum! {
    /// The service level indicator that an objective limits (label `sli`).
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub enum Sli {
        /// The share of requests that succeed within a time.
        Latency => "latency",
        /// The share of requests that succeed.
        Availability => "availability",
        /// The share of streams of a language model whose first token arrives within a time.
        FirstToken => "time_to_first_token",
        /// The share of tokens of these streams that follow the previous one within a time.
        TokenInterval => "inter_token_latency",
    }
    /// Returns the label's value.
    pub fn as_str;
}

/// A required share of good requests, greater than 0 and less than 1, with at most 9 decimals.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Share(f64);

impl Share {
    /// Parses a percentage (`99.9%`) or a fraction (`0.999`).
    fn parse(text: &str) -> Option<Self> {
        let number = |text: &str| text.trim().parse::<f64>().ok();
        let share = match text.trim().strip_suffix('%') {
            Some(percent) => number(percent)? / 100.0,
            None => number(text)?,
        };
        let share = nine_decimals(share);
        (share > 0.0 && share < 1.0).then_some(Self(share))
    }

    /// Returns the share of good requests.
    pub fn ratio(self) -> f64 {
        self.0
    }

    /// Returns the error budget: the share of requests that may be bad.
    pub fn budget(self) -> f64 {
        nine_decimals(1.0 - self.0)
    }
}

fn nine_decimals(number: f64) -> f64 {
    (number * 1e9).round() / 1e9
}

/// One service level objective. It has at least one indicator.
#[derive(Clone, Debug, PartialEq)]
pub struct Slo {
    /// Its name, unique in the file: letters, digits, `_`, `-` and `.`.
    pub name: String,
    /// The pattern of the names of its models; `*` stands for any text, `?` for one character.
    pub model: String,
    /// The threshold in nanoseconds, and the share of requests that must succeed within it.
    pub latency: Option<(u64, Share)>,
    /// The share of requests that must succeed.
    pub availability: Option<Share>,
    /// The threshold in nanoseconds, and the share of streams of a language model whose first token
    /// must arrive within it.
    pub first_token: Option<(u64, Share)>,
    /// The threshold in nanoseconds, and the share of tokens that must follow the previous one
    /// within it.
    pub token_interval: Option<(u64, Share)>,
    /// The window of the error budget in seconds.
    pub window_s: u64,
}

impl Slo {
    /// Returns whether it covers a model. The pattern may match the name with or without its
    /// namespace.
    pub fn covers(&self, model: &ModelName) -> bool {
        [model.full(), model.bare()].into_iter().any(|name| matches(&self.model, name))
    }

    /// Returns its indicators, each with the time in which a request must succeed (`None`: any
    /// time) and the share.
    pub fn indicators(&self) -> impl Iterator<Item = (Sli, Option<u64>, Share)> + '_ {
        let timed = |sli, limit: Option<(u64, Share)>| {
            limit.into_iter().map(move |(ns, share)| (sli, Some(ns), share))
        };
        timed(Sli::Latency, self.latency)
            .chain(self.availability.map(|share| (Sli::Availability, None, share)))
            .chain(timed(Sli::FirstToken, self.first_token))
            .chain(timed(Sli::TokenInterval, self.token_interval))
    }
}

/// Returns whether a text matches a pattern with `*` and `?`. Takes at most the product of both
/// lengths in steps.
fn matches(pattern: &str, text: &str) -> bool {
    let pattern: Vec<char> = pattern.chars().collect();
    let text: Vec<char> = text.chars().collect();
    let mut at = 0;
    let mut from = 0;
    let mut retry = None;
    while let Some(c) = text.get(from) {
        match pattern.get(at) {
            Some('*') => {
                retry = Some((at, from));
                at += 1;
            }
            Some(p) if *p == '?' || p == c => (at, from) = (at + 1, from + 1),
            _ => match retry {
                // The last `*` takes one more character.
                Some((star, taken)) => {
                    retry = Some((star, taken + 1));
                    at = star + 1;
                    from = taken + 1;
                }
                None => return false,
            },
        }
    }
    pattern.iter().skip(at).all(|p| *p == '*')
}

/// Returns the number that a text with one of these units has, in the base unit.
fn quantity(text: &str, units: &[(&str, f64)]) -> Option<f64> {
    let text = text.trim();
    let digits = text.find(|c: char| !c.is_ascii_digit() && c != '.')?;
    let (number, unit) = text.split_at(digits);
    let (_, factor) = units.iter().find(|(name, _)| *name == unit.trim())?;
    number.parse::<f64>().ok().map(|number| number * factor)
}

/// The list `slos`.
pub(super) struct Slos;

impl<'de> Node<'de> for Slos {
    type Out = Vec<Slo>;
    fn expected(&self) -> &'static str {
        "a list of objectives"
    }
    fn empty<E: de::Error>(self) -> Result<Vec<Slo>, E> {
        Ok(Vec::new())
    }
    fn list<A: SeqAccess<'de>>(self, mut list: A) -> Result<Vec<Slo>, A::Error> {
        let mut slos: Vec<Slo> = Vec::new();
        while let Some(slo) = list.next_element_seed(Seed(OneSlo))? {
            if slos.iter().any(|other| other.name == slo.name) {
                return Err(de::Error::custom(format!(
                    "objective `{}` is defined twice",
                    slo.name
                )));
            }
            if slos.len() >= MAX_SLOS {
                return Err(de::Error::custom(format!(
                    "there are more than {MAX_SLOS} objectives"
                )));
            }
            slos.push(slo);
        }
        Ok(slos)
    }
}

struct OneSlo;

impl<'de> Node<'de> for OneSlo {
    type Out = Slo;
    fn expected(&self) -> &'static str {
        "an objective, a mapping with name, model, indicators and window,"
    }
    fn mapping<A: MapAccess<'de>>(self, mut map: A) -> Result<Slo, A::Error> {
        let mut seen = Vec::new();
        let mut name = None;
        let mut model = "*".to_owned();
        let mut window_s = 30 * 86_400;
        let mut latency = None;
        let mut availability = None;
        let mut first_token = None;
        let mut token_interval = None;
        let allowed = &[
            "name",
            "model",
            "latency",
            "availability",
            "time_to_first_token",
            "inter_token_latency",
            "window",
        ];
        while let Some(key) = map.next_key_seed(Seed(Key { allowed, seen: &mut seen }))? {
            match key {
                "name" => name = Some(map.next_value_seed(Seed(Name))?),
                "model" => model = map.next_value_seed(Seed(Pattern))?,
                "latency" => latency = Some(map.next_value_seed(Seed(Latency("latency")))?),
                "availability" => availability = Some(map.next_value_seed(Seed(ShareText))?),
                "time_to_first_token" => {
                    first_token = Some(map.next_value_seed(Seed(Latency("time_to_first_token")))?)
                }
                "inter_token_latency" => {
                    let limit = map.next_value_seed(Seed(Latency("inter_token_latency")))?;
                    token_interval = Some(limit);
                }
                _ => window_s = map.next_value_seed(Seed(Window))?,
            }
        }
        let name = name.ok_or_else(|| de::Error::custom("an objective has no name"))?;
        let slo = Slo { name, model, latency, availability, first_token, token_interval, window_s };
        if slo.indicators().next().is_none() {
            let name = slo.name;
            let reason = format!(
                "objective `{name}` has none of `latency`, `availability`, `time_to_first_token` \
                 and `inter_token_latency`"
            );
            return Err(de::Error::custom(reason));
        }
        Ok(slo)
    }
}

struct Name;

impl Node<'_> for Name {
    type Out = String;
    fn expected(&self) -> &'static str {
        "an objective's name"
    }
    fn text<E: de::Error>(self, text: &str) -> Result<String, E> {
        let allowed = |c: char| c.is_ascii_alphanumeric() || matches!(c, '_' | '-' | '.');
        if (1..=MAX_NAME).contains(&text.len()) && text.chars().all(allowed) {
            return Ok(text.to_owned());
        }
        let allowed = format!("allowed are up to {MAX_NAME} letters, digits, `_`, `-` and `.`");
        Err(E::custom(format!(
            "`{}` is not a valid name of an objective; {allowed}",
            shortened(text)
        )))
    }
}

struct Pattern;

impl Node<'_> for Pattern {
    type Out = String;
    fn expected(&self) -> &'static str {
        "a model's name or a pattern"
    }
    fn text<E: de::Error>(self, text: &str) -> Result<String, E> {
        if (1..=MAX_PATTERN).contains(&text.len()) && !text.chars().any(char::is_control) {
            return Ok(text.to_owned());
        }
        let allowed = format!("allowed are 1 to {MAX_PATTERN} bytes without control characters");
        Err(E::custom(format!(
            "`{}` is not a valid pattern of model names; {allowed}",
            shortened(text)
        )))
    }
}

/// A time and a share, by the key that has them.
struct Latency(&'static str);

impl<'de> Node<'de> for Latency {
    type Out = (u64, Share);
    fn expected(&self) -> &'static str {
        "a mapping with threshold and share"
    }
    fn mapping<A: MapAccess<'de>>(self, mut map: A) -> Result<(u64, Share), A::Error> {
        let mut seen = Vec::new();
        let mut threshold = None;
        let mut share = None;
        let allowed = &["threshold", "share"];
        while let Some(key) = map.next_key_seed(Seed(Key { allowed, seen: &mut seen }))? {
            match key {
                "threshold" => threshold = Some(map.next_value_seed(Seed(Threshold))?),
                _ => share = Some(map.next_value_seed(Seed(ShareText))?),
            }
        }
        threshold.zip(share).ok_or_else(|| {
            de::Error::custom(format!("`{}` needs both `threshold` and `share`", self.0))
        })
    }
}

struct Threshold;

impl Node<'_> for Threshold {
    type Out = u64;
    fn expected(&self) -> &'static str {
        "a duration, such as `200ms`,"
    }
    fn text<E: de::Error>(self, text: &str) -> Result<u64, E> {
        let units = [("us", 1e3), ("ms", 1e6), ("s", 1e9), ("m", 6e10)];
        let ns = quantity(text, &units).filter(|ns| (1e3..=3.6e12).contains(ns));
        let allowed = "allowed are 1us to 60m, in the units us, ms, s and m";
        let ns = ns.ok_or_else(|| {
            E::custom(format!("`{}` is not a valid threshold; {allowed}", shortened(text)))
        })?;
        Ok(ns.round() as u64)
    }
}

struct ShareText;

impl Node<'_> for ShareText {
    type Out = Share;
    fn expected(&self) -> &'static str {
        "a share, such as `99.9%`,"
    }
    fn text<E: de::Error>(self, text: &str) -> Result<Share, E> {
        let allowed = "allowed are percentages between 0% and 100%, such as `99.9%`, and \
                       fractions, such as `0.999`";
        Share::parse(text).ok_or_else(|| {
            E::custom(format!("`{}` is not a valid share; {allowed}", shortened(text)))
        })
    }
}

struct Window;

impl Node<'_> for Window {
    type Out = u64;
    fn expected(&self) -> &'static str {
        "a window, such as `30d`,"
    }
    fn text<E: de::Error>(self, text: &str) -> Result<u64, E> {
        let units = [("h", 3600.0), ("d", 86_400.0), ("w", 604_800.0)];
        let seconds = quantity(text, &units).map(|seconds| seconds.round() as u64);
        let seconds = seconds.filter(|seconds| (MIN_WINDOW..=MAX_WINDOW).contains(seconds));
        let allowed = "allowed are 3d to 90d, in the units h, d and w";
        seconds.ok_or_else(|| {
            E::custom(format!("`{}` is not a valid window; {allowed}", shortened(text)))
        })
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::super::Catalog;
    use super::*;

    fn parse(slos: &str) -> Result<Vec<Slo>, String> {
        let catalog = Catalog::parse(&format!("mode: both\nslos:\n{slos}"), "m.yaml");
        catalog.map(|catalog| catalog.slos().to_vec()).map_err(|error| error.to_string())
    }

    #[test]
    fn parses_objectives() {
        let text = "  - name: fast\n    model: resnet*\n    latency: {threshold: 200ms, share: \
                    99%}\n    availability: 99.9%\n    window: 4w\n  - {name: up, availability: \
                    0.95}\n";
        let slos = parse(text).unwrap();
        let fast = &slos[0];
        assert_eq!(
            (fast.name.as_str(), fast.model.as_str(), fast.window_s),
            ("fast", "resnet*", 28 * 86_400)
        );
        assert_eq!(fast.latency, Some((200_000_000, Share(0.99))));
        let shares: Vec<_> = fast
            .indicators()
            .map(|(sli, ns, share)| (sli, ns, share.ratio(), share.budget()))
            .collect();
        let expected = [
            (Sli::Latency, Some(200_000_000), 0.99, 0.01),
            (Sli::Availability, None, 0.999, 0.001),
        ];
        assert_eq!(shares, expected);
        assert_eq!(
            (slos[1].model.as_str(), slos[1].window_s, slos[1].latency),
            ("*", 30 * 86_400, None)
        );
        assert_eq!(parse(""), Ok(Vec::new()));
        let tokens = &parse(
            "  - {name: t, time_to_first_token: {threshold: 1s, share: 90%}, inter_token_latency: \
             {threshold: 50ms, share: 99%}}\n",
        )
        .unwrap()[0];
        let indicators: Vec<_> =
            tokens.indicators().map(|(sli, ns, share)| (sli, ns, share.ratio())).collect();
        let expected = [
            (Sli::FirstToken, Some(1_000_000_000), 0.9),
            (Sli::TokenInterval, Some(50_000_000), 0.99),
        ];
        assert_eq!(indicators, expected);
    }

    #[test]
    fn objectives_bring_their_metrics() {
        let catalog = Catalog::parse("slos: [{name: up, availability: 99%}]", "m.yaml").unwrap();
        let names: Vec<&str> = catalog.iter().map(|(_, spec)| spec.name.as_str()).collect();
        assert_eq!(names.len(), 5, "{names:?}");
        assert!(names.iter().all(|name| name.starts_with("pharos_slo_")), "{names:?}");
        assert!(Catalog::parse("mode: both", "m.yaml").unwrap().is_empty());
    }

    #[test]
    fn errors_name_the_value_and_what_is_allowed() {
        let text = |entry: &str| parse(&format!("  - {{{entry}}}\n")).unwrap_err();
        for (entry, expected) in [
            ("availability: 99%", "an objective has no name"),
            (
                "name: a",
                "objective `a` has none of `latency`, `availability`, `time_to_first_token`",
            ),
            (
                "name: a, time_to_first_token: {share: 99%}",
                "`time_to_first_token` needs both `threshold` and `share`",
            ),
            (
                "name: a, inter_token_latency: {threshold: 0ms, share: 99%}",
                "`0ms` is not a valid threshold",
            ),
            (
                "name: 'a b', availability: 99%",
                "`a b` is not a valid name of an objective; allowed are up to 63",
            ),
            (
                "name: a, availability: 99",
                "m.yaml:3:29: slos[0].availability: `99` is not a valid share",
            ),
            ("name: a, availability: 100%", "`100%` is not a valid share"),
            ("name: a, availability: 99.99999999999%", "is not a valid share"),
            ("name: a, latency: {share: 99%}", "`latency` needs both `threshold` and `share`"),
            (
                "name: a, latency: {threshold: 200, share: 99%}",
                "`200` is not a valid threshold; allowed are 1us to 60m",
            ),
            (
                "name: a, latency: {threshold: 1e3ms, share: 99%}",
                "`1e3ms` is not a valid threshold",
            ),
            (
                "name: a, availability: 99%, window: 1d",
                "`1d` is not a valid window; allowed are 3d to 90d",
            ),
            ("name: a, availability: 99%, model: ''", "`` is not a valid pattern of model names"),
            (
                "name: a, latencies: 1",
                "unknown key `latencies`; allowed are `name`, `model`, `latency`",
            ),
        ] {
            assert!(text(entry).contains(expected), "{entry}: {}", text(entry));
        }
        let twice = parse("  - {name: a, availability: 9%}\n  - {name: a, availability: 9%}\n")
            .unwrap_err();
        assert!(twice.contains("objective `a` is defined twice"), "{twice}");
        let many: String =
            (0..=MAX_SLOS).map(|at| format!("  - {{name: a{at}, availability: 9%}}\n")).collect();
        assert!(parse(&many).unwrap_err().contains("more than 100 objectives"));
    }

    #[test]
    fn patterns_match_names_with_and_without_namespace() {
        for (pattern, name, expected) in [
            ("*", "", true),
            ("a", "a", true),
            ("a", "ab", false),
            ("a*", "ab", true),
            ("*b", "aab", true),
            ("a*b*c", "aXbYbc", true),
            ("a*b*c", "aXbYb", false),
            ("a?c", "abc", true),
            ("a?c", "ac", false),
            ("**", "x", true),
        ] {
            assert_eq!(matches(pattern, name), expected, "{pattern} {name}");
        }
        let slo = |model: &str| {
            parse(&format!("  - {{name: a, model: '{model}', availability: 9%}}\n"))
                .unwrap()
                .remove(0)
        };
        let model = ModelName::in_namespace("/srv/models", "m1");
        assert!(
            slo("m?").covers(&model)
                && slo("/srv/*/m1").covers(&model)
                && !slo("models").covers(&model)
        );
        // Bad patterns must not take exponential time.
        assert!(!matches(&"*a".repeat(100), &"a".repeat(99)));
    }
}
