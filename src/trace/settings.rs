//! Trace settings of the server and of single models, and the sampling of requests.
//!
//! Settings that a model does not specify follow the server's, including later changes; settings
//! that the server does not specify have the values from its start. A change creates new settings
//! with a new counter; traces in progress keep the settings that sampled them. These are Triton's
//! rules, except that a change is applied completely or not at all.

use std::collections::BTreeMap;
use std::ops::RangeInclusive;

use crate::error::InferError;
use crate::request_trace::{Levels, Sample};

named_enum! {
    /// The destination of traces; fixed at the start of the server.
    #[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
    pub enum Mode {
        /// Files.
        #[default]
        Triton => "triton",
        /// An OpenTelemetry collector.
        OpenTelemetry => "opentelemetry",
    }
    /// Returns the name in options and in the protocol.
    pub fn name;
}

impl Mode {
    /// Returns the mode of this name.
    pub fn from_name(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|mode| mode.name() == name)
    }
}

/// The values of all settings.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Values {
    /// The data to collect.
    pub levels: Levels,
    /// One of this many requests is sampled. With 0, only requests whose caller is traced are
    /// sampled.
    pub rate: u32,
    /// The number of requests that may still be sampled; -1 for any number.
    pub count: i32,
    /// The number of traces in one file; 0 for all in one file.
    pub log_frequency: u32,
}

impl Default for Values {
    fn default() -> Self {
        Self { levels: Levels::default(), rate: 1000, count: -1, log_frequency: 0 }
    }
}

/// A change of one setting.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Change<T> {
    /// Keeps the present value.
    #[default]
    Keep,
    /// Removes the specified value.
    Clear,
    /// Specifies a value.
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
    /// See [`Values::levels`].
    pub levels: Change<Levels>,
    /// See [`Values::rate`].
    pub rate: Change<u32>,
    /// See [`Values::count`].
    pub count: Change<i32>,
    /// See [`Values::log_frequency`].
    pub log_frequency: Change<u32>,
}

/// The specified values; the others have fallback values.
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

/// Effective settings.
#[derive(Clone, Copy, Debug)]
struct ActiveSettings {
    specified: Specified,
    /// `count` decreases with every sampled request.
    values: Values,
    generation: u64,
    /// Requests since the last sampled one.
    seen: u32,
}

impl ActiveSettings {
    /// Returns the specified values; for the count, what is left of it.
    fn specified(&self) -> Specified {
        Specified { count: self.specified.count.map(|_| self.values.count), ..self.specified }
    }
}

/// The settings of a server.
#[derive(Clone, Debug)]
pub struct Settings {
    mode: Mode,
    /// Whether traces have a destination.
    has_destination: bool,
    defaults: Values,
    global: ActiveSettings,
    models: BTreeMap<String, ActiveSettings>,
    generations: u64,
}

impl Settings {
    /// Creates the settings at the start. Traces have a destination unless the trace file has an
    /// empty name.
    pub fn new(mode: Mode, defaults: Values, has_destination: bool) -> Self {
        let global = ActiveSettings {
            specified: Specified::default(),
            values: defaults,
            generation: 1,
            seen: 0,
        };
        Self { mode, has_destination, defaults, global, models: BTreeMap::new(), generations: 1 }
    }

    /// Returns the destination of traces.
    pub fn mode(&self) -> Mode {
        self.mode
    }

    /// Returns the effective values of a model, or the server's for an empty name and for models
    /// without settings.
    pub fn of(&self, model: &str) -> Values {
        self.models.get(model).unwrap_or(&self.global).values
    }

    /// Returns whether any request may be sampled.
    pub fn any_active(&self) -> bool {
        let mut all = std::iter::once(&self.global).chain(self.models.values());
        all.any(|live| self.fault(&live.values).is_none())
    }

    /// Returns why these values sample no request; `None` if they do.
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

    /// Changes the settings of a model, or (empty name) the settings of the server and of the
    /// models that follow them.
    ///
    /// # Errors
    /// INVALID_ARG if tracing would be on but could not sample anything; nothing is changed.
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
        self.global = global;
        self.models = models;
        Ok(())
    }

    fn live(
        &mut self,
        specified: Specified,
        values: Values,
        follower: &str,
    ) -> Result<ActiveSettings, InferError> {
        if let Some(fault) = self.fault(&values).filter(|_| !values.levels.is_off()) {
            let whose = match follower {
                "" => String::new(),
                model => format!(" (of model '{model}', whose settings follow these)"),
            };
            return Err(InferError::invalid(format!(
                "Attempting to set invalid trace setting :{fault}{whose}"
            )));
        }
        self.generations += 1;
        Ok(ActiveSettings { specified, values, generation: self.generations, seen: 0 })
    }

    /// Counts a request for a model. Returns a sample if the request is to be traced. With a
    /// collector, a request of a traced caller is always traced.
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
            // Spans consist of stamps. Collecting tensors would copy them without use.
            levels = Levels { timestamps: true, tensors: false };
        }
        (due || forced).then_some(Sample {
            generation: live.generation,
            levels,
            log_frequency,
            limited,
        })
    }
}

/// Combines the levels with these names.
///
/// # Errors
/// INVALID_ARG for an unknown name, and for OFF together with others.
pub fn levels<'a>(names: impl Iterator<Item = &'a str>) -> Result<Levels, InferError> {
    let mut levels = Levels::default();
    let mut off = false;
    let mut count = 0;
    for name in names {
        count += 1;
        match name {
            "OFF" => off = true,
            // MIN and MAX are Triton's former names.
            "TIMESTAMPS" | "MIN" | "MAX" => levels.timestamps = true,
            "TENSORS" => levels.tensors = true,
            _ => {
                let name: String = name.chars().take(100).collect();
                let text = format!(
                    "Unable to parse 'trace_level', got: {name}; allowed are OFF, TIMESTAMPS, \
                     TENSORS"
                );
                return Err(InferError::invalid(text));
            }
        }
    }
    if off && count > 1 {
        return Err(InferError::invalid("Expect only one trace level 'OFF' is specified"));
    }
    Ok(levels)
}

/// Returns the names of levels as shown to clients.
pub fn level_names(levels: Levels) -> Vec<&'static str> {
    let names =
        [(levels.is_off(), "OFF"), (levels.timestamps, "TIMESTAMPS"), (levels.tensors, "TENSORS")];
    names.into_iter().filter(|(on, _)| *on).map(|(_, name)| name).collect()
}

/// Parses the value of `trace_rate` or `log_frequency`.
///
/// # Errors
/// INVALID_ARG with Triton's text.
pub fn unsigned(name: &str, text: &str) -> Result<u32, InferError> {
    text.parse().map_err(|_| {
        let digits = text.strip_prefix('-').unwrap_or(text);
        out_of_range(name, text, 0..=u32::MAX.into(), digits)
    })
}

/// Parses the value of `trace_count`.
///
/// # Errors
/// INVALID_ARG with Triton's text.
pub fn count(text: &str) -> Result<i32, InferError> {
    let name = "trace_count";
    let digits = text.strip_prefix('-').unwrap_or(text);
    let count: i32 =
        text.parse().map_err(|_| out_of_range(name, text, -1..=i32::MAX.into(), digits))?;
    if count < -1 {
        return Err(InferError::invalid(format!(
            "Unable to parse '{name}'. Expecting value >= -1, got: {count}"
        )));
    }
    Ok(count)
}

fn out_of_range(name: &str, text: &str, allowed: RangeInclusive<i64>, digits: &str) -> InferError {
    let least = allowed.start();
    let most = allowed.end();
    // Long enough for a client to recognize its input.
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
    fn samples_at_the_rate_until_the_count_is_used_up() {
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
    fn a_change_resets_the_counter() {
        let mut settings = settings(3, -1);
        assert!(sampled(&mut settings, "m", 2).is_empty());
        let before = settings.global.generation;
        settings.update("", &Update { count: Change::Set(5), ..Update::default() }).unwrap();
        assert_eq!(sampled(&mut settings, "m", 3), [3]);
        assert!(settings.global.generation > before);
    }

    #[test]
    fn only_a_collector_traces_all_requests_of_traced_callers() {
        let values = Values { levels: TIMESTAMPS, rate: 0, count: -1, log_frequency: 0 };
        let mut settings = Settings::new(Mode::OpenTelemetry, values, true);
        assert_eq!(settings.sample("m", false), None);
        assert!(settings.sample("m", true).is_some());
        let mut files = self::settings(1000, -1);
        assert_eq!(files.sample("m", true), None);
    }

    #[test]
    fn tensors_are_not_collected_for_a_collector() {
        let tensors = Levels { timestamps: false, tensors: true };
        let values = Values { levels: tensors, rate: 1, count: -1, log_frequency: 0 };
        for (mode, expected) in [(Mode::Triton, tensors), (Mode::OpenTelemetry, TIMESTAMPS)] {
            let sample = Settings::new(mode, values, true).sample("m", false).unwrap();
            assert_eq!(sample.levels, expected);
        }
    }

    #[test]
    fn unspecified_settings_of_a_model_follow_the_server() {
        let mut settings = settings(7, -1);
        let rate = |rate| Update { rate, ..Update::default() };
        settings.update("one", &rate(Change::Set(3))).unwrap();
        settings
            .update(
                "",
                &Update { count: Change::Set(9), rate: Change::Set(11), ..Update::default() },
            )
            .unwrap();
        let shown =
            |settings: &Settings, model: &str| (settings.of(model).rate, settings.of(model).count);
        assert_eq!((shown(&settings, "one"), shown(&settings, "two")), ((3, 9), (11, 9)));
        settings.update("one", &rate(Change::Clear)).unwrap();
        assert!(settings.models.is_empty());
        settings
            .update("", &Update { count: Change::Clear, rate: Change::Clear, ..Update::default() })
            .unwrap();
        assert_eq!(shown(&settings, "one"), (7, -1));
    }

    #[test]
    fn refuses_a_change_with_invalid_settings_completely() {
        let mut settings = settings(7, -1);
        let zero = Update { rate: Change::Set(0), ..Update::default() };
        let error = settings.update("", &zero).unwrap_err();
        assert_eq!(
            error.message,
            "Attempting to set invalid trace setting :sample rate must be non-zero"
        );
        let off = Update { levels: Change::Set(Levels::default()), ..zero };
        settings
            .update("one", &Update { levels: Change::Set(TIMESTAMPS), ..Update::default() })
            .unwrap();
        let error = settings.update("", &off).unwrap_err();
        assert!(error.message.contains("of model 'one'"), "{}", error.message);
        assert_eq!((settings.of("").rate, settings.of("").levels), (7, TIMESTAMPS));
        settings.update("one", &Update { levels: Change::Clear, ..Update::default() }).unwrap();
        settings.update("", &off).unwrap();
        assert!(!settings.any_active());
        let nowhere =
            Settings::new(Mode::Triton, Values { levels: TIMESTAMPS, ..Values::default() }, false);
        assert!(!nowhere.any_active());
    }

    #[test]
    fn values_are_parsed_or_refused_with_tritons_texts() {
        assert_eq!(
            (unsigned("trace_rate", "4294967295").unwrap(), count("-1").unwrap()),
            (u32::MAX, -1)
        );
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
        assert_eq!(
            count("-2").unwrap_err().message,
            "Unable to parse 'trace_count'. Expecting value >= -1, got: -2"
        );
        assert!(count("2147483648").unwrap_err().message.contains("[ -1, 2147483647 ]"));
        let names = |names: &[&str]| levels(names.iter().copied()).map(level_names);
        assert_eq!(names(&["TENSORS", "TIMESTAMPS"]).unwrap(), ["TIMESTAMPS", "TENSORS"]);
        assert_eq!((names(&["OFF"]).unwrap(), names(&[]).unwrap()), (vec!["OFF"], vec!["OFF"]));
        assert_eq!(
            names(&["OFF", "OFF"]).unwrap_err().message,
            "Expect only one trace level 'OFF' is specified"
        );
        assert!(
            names(&["timestamps"]).unwrap_err().message.contains("got: timestamps; allowed are")
        );
    }
}
