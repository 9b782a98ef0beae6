//! What is traced: the settings of the server and of single models, and which requests they sample.
//!
//! The server's settings fall back to what the server was started with, a model's to the server's: what a model does not
//! specify itself follows the server's settings, whenever they change. A change makes new settings with a counter of their
//! own; traces that run belong to those that sampled them. (Triton's rules; where its own break off half done, a change here
//! is refused as a whole.)

use std::collections::BTreeMap;
use std::ops::RangeInclusive;

use crate::error::InferError;
use crate::request_trace::{Levels, Sample};

/// Where traces go; fixed for the life of the server.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Mode {
    /// Into files.
    #[default]
    Triton,
    /// To an OpenTelemetry collector.
    OpenTelemetry,
}

impl Mode {
    /// Its name in options and in the protocol.
    pub fn name(self) -> &'static str {
        match self {
            Self::Triton => "triton",
            Self::OpenTelemetry => "opentelemetry",
        }
    }

    /// The mode of this name.
    pub fn from_name(name: &str) -> Option<Self> {
        [Self::Triton, Self::OpenTelemetry].into_iter().find(|mode| mode.name() == name)
    }
}

/// The values of all settings.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Values {
    /// What is collected.
    pub levels: Levels,
    /// One of so many requests is sampled; 0 for only those whose caller is traced.
    pub rate: u32,
    /// Requests that are still sampled; -1 for any number.
    pub count: i32,
    /// Traces in one file; 0 for all in one.
    pub log_frequency: u32,
}

impl Default for Values {
    fn default() -> Self {
        Self { levels: Levels::default(), rate: 1000, count: -1, log_frequency: 0 }
    }
}

/// What a change does to one setting.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Change<T> {
    /// Nothing.
    #[default]
    Keep,
    /// It is not specified any more.
    Clear,
    /// It has this value.
    Set(T),
}

impl<T: Copy> Change<T> {
    fn apply(self, specified: Option<T>) -> Option<T> {
        match self {
            Self::Keep => specified,
            Self::Clear => None,
            Self::Set(value) => Some(value),
        }
    }
}

/// A change of settings.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Update {
    /// See [`Values`], here and below.
    pub levels: Change<Levels>,
    /// The rate.
    pub rate: Change<u32>,
    /// The count.
    pub count: Change<i32>,
    /// The frequency.
    pub log_frequency: Change<u32>,
}

/// What is specified.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Specified {
    levels: Option<Levels>,
    rate: Option<u32>,
    count: Option<i32>,
    log_frequency: Option<u32>,
}

impl Specified {
    fn changed(self, update: &Update) -> Self {
        Self {
            levels: update.levels.apply(self.levels),
            rate: update.rate.apply(self.rate),
            count: update.count.apply(self.count),
            log_frequency: update.log_frequency.apply(self.log_frequency),
        }
    }

    fn over(self, fallback: &Values) -> Values {
        Values {
            levels: self.levels.unwrap_or(fallback.levels),
            rate: self.rate.unwrap_or(fallback.rate),
            count: self.count.unwrap_or(fallback.count),
            log_frequency: self.log_frequency.unwrap_or(fallback.log_frequency),
        }
    }
}

/// Settings at work.
#[derive(Clone, Copy, Debug)]
struct ActiveSettings {
    specified: Specified,
    /// `count` goes down.
    values: Values,
    generation: u64,
    /// Requests since they hold.
    seen: u32,
}

impl ActiveSettings {
    /// What is specified now: of a count, what is left of it.
    fn specified(&self) -> Specified {
        Specified { count: self.specified.count.map(|_| self.values.count), ..self.specified }
    }
}

/// The settings of a server.
#[derive(Clone, Debug)]
pub struct Settings {
    mode: Mode,
    /// Traces have somewhere to go.
    has_destination: bool,
    defaults: Values,
    global: ActiveSettings,
    models: BTreeMap<String, ActiveSettings>,
    generations: u64,
}

impl Settings {
    /// What the server is started with. Traces have a destination unless their file has no name.
    pub fn new(mode: Mode, defaults: Values, has_destination: bool) -> Self {
        let global = ActiveSettings { specified: Specified::default(), values: defaults, generation: 1, seen: 0 };
        Self { mode, has_destination, defaults, global, models: BTreeMap::new(), generations: 1 }
    }

    /// Where traces go.
    pub fn mode(&self) -> Mode {
        self.mode
    }

    /// The values that hold for a model, or (empty) for models without settings of their own.
    pub fn of(&self, model: &str) -> Values {
        self.models.get(model).unwrap_or(&self.global).values
    }

    /// Whether any request may be sampled.
    pub fn any_active(&self) -> bool {
        let mut all = std::iter::once(&self.global).chain(self.models.values());
        all.any(|live| self.fault(&live.values).is_none())
    }

    /// Why these values sample nothing; `None` if they do.
    pub fn fault(&self, values: &Values) -> Option<&'static str> {
        if values.levels.is_off() {
            return Some("tracing is disabled");
        }
        if values.rate == 0 && self.mode == Mode::Triton {
            return Some("sample rate must be non-zero");
        }
        if !self.has_destination {
            return Some("trace file name is not given");
        }
        (values.count == 0).then_some("trace count must be non-zero")
    }

    /// Changes the settings of a model, or (empty) those of the server and with them what models leave to it.
    ///
    /// # Errors
    /// INVALID_ARG if something would be traced and could not be; then nothing has changed.
    pub fn update(&mut self, model: &str, update: &Update) -> Result<(), InferError> {
        if *update == Update::default() {
            return Ok(());
        }
        if model.is_empty() {
            return self.update_all(update);
        }
        let before = self.models.get(model).map(ActiveSettings::specified).unwrap_or_default();
        let specified = before.changed(update);
        if specified == Specified::default() {
            self.models.remove(model);
            return Ok(());
        }
        let live = self.live(specified, specified.over(&self.global.values), "")?;
        self.models.insert(model.to_owned(), live);
        Ok(())
    }

    fn update_all(&mut self, update: &Update) -> Result<(), InferError> {
        let specified = self.global.specified().changed(update);
        let global = self.live(specified, specified.over(&self.defaults), "")?;
        let mut models = self.models.clone();
        for (name, model) in &mut models {
            let specified = model.specified();
            let whole = specified.levels.is_some()
                && specified.rate.is_some()
                && specified.count.is_some()
                && specified.log_frequency.is_some();
            if !whole {
                *model = self.live(specified, specified.over(&global.values), name)?;
            }
        }
        (self.global, self.models) = (global, models);
        Ok(())
    }

    fn live(&mut self, specified: Specified, values: Values, follower: &str) -> Result<ActiveSettings, InferError> {
        if let Some(fault) = self.fault(&values).filter(|_| !values.levels.is_off()) {
            let whose = match follower {
                "" => String::new(),
                model => format!(" (of model '{model}', whose settings follow these)"),
            };
            return Err(InferError::invalid(format!("Attempting to set invalid trace setting :{fault}{whose}")));
        }
        self.generations += 1;
        Ok(ActiveSettings { specified, values, generation: self.generations, seen: 0 })
    }

    /// A request for a model has come: whether it is traced. One whose caller is traced is, whatever the rate, if traces go
    /// to a collector.
    pub fn sample(&mut self, model: &str, caller_is_traced: bool) -> Option<Sample> {
        let own = self.models.get(model).unwrap_or(&self.global);
        if self.fault(&own.values).is_some() {
            return None;
        }
        let forced = caller_is_traced && self.mode == Mode::OpenTelemetry;
        let live = self.models.get_mut(model).unwrap_or(&mut self.global);
        let due = live.values.rate != 0 && {
            live.seen = (live.seen + 1) % live.values.rate;
            live.seen == 0
        };
        let limited = live.values.count > 0;
        if due && limited {
            live.values.count -= 1;
        }
        let Values { mut levels, log_frequency, .. } = live.values;
        if self.mode == Mode::OpenTelemetry {
            // Spans are made of stamps, and have no place for contents: those would be copied and wait for nothing.
            levels = Levels { timestamps: true, tensors: false };
        }
        (due || forced).then_some(Sample { generation: live.generation, levels, log_frequency, limited })
    }
}

/// The levels that a client or an option names, joined.
///
/// # Errors
/// INVALID_ARG for a name that is no level, and for OFF beside others.
pub fn levels<'a>(names: impl Iterator<Item = &'a str>) -> Result<Levels, InferError> {
    let (mut levels, mut off, mut count) = (Levels::default(), false, 0);
    for name in names {
        count += 1;
        match name {
            "OFF" => off = true,
            // MIN and MAX are what Triton called it first.
            "TIMESTAMPS" | "MIN" | "MAX" => levels.timestamps = true,
            "TENSORS" => levels.tensors = true,
            _ => {
                let name: String = name.chars().take(100).collect();
                let text = format!("Unable to parse 'trace_level', got: {name}; allowed are OFF, TIMESTAMPS, TENSORS");
                return Err(InferError::invalid(text));
            }
        }
    }
    if off && count > 1 {
        return Err(InferError::invalid("Expect only one trace level 'OFF' is specified"));
    }
    Ok(levels)
}

/// The names of levels, as clients are shown them.
pub fn level_names(levels: Levels) -> Vec<&'static str> {
    let names = [(levels.is_off(), "OFF"), (levels.timestamps, "TIMESTAMPS"), (levels.tensors, "TENSORS")];
    names.into_iter().filter(|(on, _)| *on).map(|(_, name)| name).collect()
}

/// The value of `trace_rate` or `log_frequency`.
///
/// # Errors
/// INVALID_ARG with Triton's text.
pub fn unsigned(name: &str, text: &str) -> Result<u32, InferError> {
    text.parse().map_err(|_| {
        let digits = text.strip_prefix('-').unwrap_or(text);
        out_of_range(name, text, 0..=u32::MAX.into(), digits)
    })
}

/// The value of `trace_count`.
///
/// # Errors
/// INVALID_ARG with Triton's text.
pub fn count(text: &str) -> Result<i32, InferError> {
    let name = "trace_count";
    let digits = text.strip_prefix('-').unwrap_or(text);
    let count: i32 = text.parse().map_err(|_| out_of_range(name, text, -1..=i32::MAX.into(), digits))?;
    if count < -1 {
        return Err(InferError::invalid(format!("Unable to parse '{name}'. Expecting value >= -1, got: {count}")));
    }
    Ok(count)
}

fn out_of_range(name: &str, text: &str, allowed: RangeInclusive<i64>, digits: &str) -> InferError {
    let (least, most) = (allowed.start(), allowed.end());
    // Enough for a client to recognize what it sent.
    let text: String = text.chars().take(100).collect();
    if digits.is_empty() || !digits.bytes().all(|byte| byte.is_ascii_digit()) {
        let allowed = format!("allowed are whole numbers from {least} to {most}");
        return InferError::invalid(format!("Unable to parse '{name}', got: {text}; {allowed}"));
    }
    let range = format!("value is out of range [ {least}, {most} ]");
    InferError::invalid(format!("Unable to parse '{name}', {range}, got: {text}"))
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    const TIMESTAMPS: Levels = Levels { timestamps: true, tensors: false };

    fn settings(rate: u32, count: i32) -> Settings {
        let values = Values { levels: TIMESTAMPS, rate, count, log_frequency: 0 };
        Settings::new(Mode::Triton, values, true)
    }

    fn sampled(settings: &mut Settings, model: &str, requests: usize) -> Vec<usize> {
        (1..=requests).filter(|_| settings.sample(model, true).is_some()).collect()
    }

    #[test]
    fn every_so_manieth_is_sampled_until_the_count_is_used_up() {
        assert_eq!(sampled(&mut settings(3, -1), "m", 10), [3, 6, 9]);
        assert_eq!(sampled(&mut settings(3, 2), "m", 12), [3, 6]);
        assert_eq!(sampled(&mut settings(1, 3), "m", 12), [1, 2, 3]);
        let mut counted = settings(2, 2);
        assert_eq!(sampled(&mut counted, "m", 2), [2]);
        assert_eq!((counted.of("").count, counted.any_active()), (1, true));
        sampled(&mut counted, "m", 2);
        assert_eq!((counted.of("").count, counted.any_active()), (0, false));
    }

    #[test]
    fn a_change_starts_counting_anew() {
        let mut settings = settings(3, -1);
        assert!(sampled(&mut settings, "m", 2).is_empty());
        let before = settings.global.generation;
        settings.update("", &Update { count: Change::Set(5), ..Update::default() }).unwrap();
        assert_eq!(sampled(&mut settings, "m", 3), [3]);
        assert!(settings.global.generation > before);
    }

    #[test]
    fn callers_that_are_traced_are_followed_by_a_collector_only() {
        let values = Values { levels: TIMESTAMPS, rate: 0, count: -1, log_frequency: 0 };
        let mut settings = Settings::new(Mode::OpenTelemetry, values, true);
        assert_eq!(settings.sample("m", false), None);
        assert!(settings.sample("m", true).is_some());
        let mut files = self::settings(1000, -1);
        assert_eq!(files.sample("m", true), None);
    }

    #[test]
    fn a_collector_is_given_no_contents() {
        let tensors = Levels { timestamps: false, tensors: true };
        let values = Values { levels: tensors, rate: 1, count: -1, log_frequency: 0 };
        for (mode, expected) in [(Mode::Triton, tensors), (Mode::OpenTelemetry, TIMESTAMPS)] {
            let sample = Settings::new(mode, values, true).sample("m", false).unwrap();
            assert_eq!(sample.levels, expected);
        }
    }

    #[test]
    fn what_a_model_leaves_open_follows_the_server() {
        let mut settings = settings(7, -1);
        let rate = |rate| Update { rate, ..Update::default() };
        settings.update("one", &rate(Change::Set(3))).unwrap();
        settings.update("", &Update { count: Change::Set(9), rate: Change::Set(11), ..Update::default() }).unwrap();
        let shown = |settings: &Settings, model: &str| (settings.of(model).rate, settings.of(model).count);
        assert_eq!((shown(&settings, "one"), shown(&settings, "two")), ((3, 9), (11, 9)));
        settings.update("one", &rate(Change::Clear)).unwrap();
        assert!(settings.models.is_empty());
        settings.update("", &Update { count: Change::Clear, rate: Change::Clear, ..Update::default() }).unwrap();
        assert_eq!(shown(&settings, "one"), (7, -1));
    }

    #[test]
    fn what_cannot_be_traced_is_refused_as_a_whole() {
        let mut settings = settings(7, -1);
        let zero = Update { rate: Change::Set(0), ..Update::default() };
        let error = settings.update("", &zero).unwrap_err();
        assert_eq!(error.message, "Attempting to set invalid trace setting :sample rate must be non-zero");
        let off = Update { levels: Change::Set(Levels::default()), ..zero };
        settings.update("one", &Update { levels: Change::Set(TIMESTAMPS), ..Update::default() }).unwrap();
        let error = settings.update("", &off).unwrap_err();
        assert!(error.message.contains("of model 'one'"), "{}", error.message);
        assert_eq!((settings.of("").rate, settings.of("").levels), (7, TIMESTAMPS));
        settings.update("one", &Update { levels: Change::Clear, ..Update::default() }).unwrap();
        settings.update("", &off).unwrap();
        assert!(!settings.any_active());
        let nowhere = Settings::new(Mode::Triton, Values { levels: TIMESTAMPS, ..Values::default() }, false);
        assert!(!nowhere.any_active());
    }

    #[test]
    fn values_are_read_or_refused_in_tritons_words() {
        assert_eq!((unsigned("trace_rate", "4294967295").unwrap(), count("-1").unwrap()), (u32::MAX, -1));
        let range = "Unable to parse 'trace_rate', value is out of range [ 0, 4294967295 ], got: ";
        let allowed = "; allowed are whole numbers from 0 to 4294967295";
        for (text, expected) in [
            ("x", format!("Unable to parse 'trace_rate', got: x{allowed}")),
            ("", format!("Unable to parse 'trace_rate', got: {allowed}")),
            ("1.5", format!("Unable to parse 'trace_rate', got: 1.5{allowed}")),
            ("-1", format!("{range}-1")),
            ("10000000000", format!("{range}10000000000")),
        ] {
            assert_eq!(unsigned("trace_rate", text).unwrap_err().message, expected);
        }
        assert_eq!(count("-2").unwrap_err().message, "Unable to parse 'trace_count'. Expecting value >= -1, got: -2");
        assert!(count("2147483648").unwrap_err().message.contains("[ -1, 2147483647 ]"));
        let names = |names: &[&str]| levels(names.iter().copied()).map(level_names);
        assert_eq!(names(&["TENSORS", "TIMESTAMPS"]).unwrap(), ["TIMESTAMPS", "TENSORS"]);
        assert_eq!((names(&["OFF"]).unwrap(), names(&[]).unwrap()), (vec!["OFF"], vec!["OFF"]));
        assert_eq!(names(&["OFF", "OFF"]).unwrap_err().message, "Expect only one trace level 'OFF' is specified");
        assert!(names(&["timestamps"]).unwrap_err().message.contains("got: timestamps; allowed are"));
    }
}
