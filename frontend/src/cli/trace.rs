//! The flags of tracing: Triton's forms, its deprecated flags, and OpenTelemetry's environment
//! variables.

use std::path::PathBuf;

use clap::{Args, Subcommand};
use pharos::otlp::Signal;
use pharos::request_trace::Levels;
use pharos::trace::settings::{Mode, Values, count, levels, unsigned};

use pharos_telemetry::trace::{Collector, Tracing};

use super::TRACE;
use super::otlp::Variables;

/// The options of tracing.
#[derive(Clone, Debug, Args)]
pub struct TraceOptions {
    /// Trace setting; may be repeated, or given as a list separated by ';'. General:
    /// mode=triton|opentelemetry, level=OFF|TIMESTAMPS|TENSORS (may be repeated), rate=N (trace
    /// one of N requests; 0: only requests whose caller is traced), count=N (-1: no limit). Trace
    /// files: triton,file=FILE; triton,log-frequency=N (traces per file; 0: all in one).
    /// Collector: opentelemetry,url=URL; opentelemetry,protocol=http/protobuf|grpc;
    /// opentelemetry,resource=KEY=VALUE (may be repeated);
    /// opentelemetry,bsp_max_queue_size|bsp_schedule_delay|bsp_max_export_batch_size=N
    #[arg(
        id = "trace-config", long = "trace-config", value_name = "SETTING",
        env = "PHAROS_TRACE_CONFIG", value_parser = config, value_delimiter = ';',
        help_heading = TRACE
    )]
    pub configs: Vec<TraceConfig>,
    /// Deprecated: use --trace-config triton,file=FILE
    #[arg(
        id = "trace-file", long = "trace-file", value_name = "FILE", env = "PHAROS_TRACE_FILE",
        help_heading = TRACE
    )]
    pub file: Option<PathBuf>,
    /// Deprecated: use --trace-config level=LEVEL; may be repeated
    #[arg(
        id = "trace-level", long = "trace-level", value_name = "LEVEL", env = "PHAROS_TRACE_LEVEL",
        value_delimiter = ',', help_heading = TRACE
    )]
    pub level: Vec<String>,
    /// Deprecated: use --trace-config rate=N
    #[arg(
        id = "trace-rate", long = "trace-rate", value_name = "N", env = "PHAROS_TRACE_RATE",
        help_heading = TRACE
    )]
    pub rate: Option<String>,
    /// Deprecated: use --trace-config count=N
    #[arg(
        id = "trace-count", long = "trace-count", value_name = "N", allow_negative_numbers = true,
        env = "PHAROS_TRACE_COUNT", help_heading = TRACE
    )]
    pub count: Option<String>,
    /// Deprecated: use --trace-config triton,log-frequency=N
    #[arg(
        id = "trace-log-frequency", long = "trace-log-frequency", value_name = "N",
        env = "PHAROS_TRACE_LOG_FREQUENCY", help_heading = TRACE
    )]
    pub log_frequency: Option<String>,
}

/// One `--trace-config`: the setting, its value, and the mode if the setting belongs to one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TraceConfig {
    mode: Option<Mode>,
    key: String,
    value: String,
}

impl TraceConfig {
    /// Returns the setting without its value.
    fn name(&self) -> String {
        self.mode.map_or_else(|| self.key.clone(), |mode| format!("{},{}", mode.name(), self.key))
    }
}

/// Parses one `--trace-config`. The text before the first comma is a mode, unless it contains a
/// `=`.
fn config(text: &str) -> Result<TraceConfig, String> {
    let form = "the form is MODE,SETTING=VALUE or SETTING=VALUE, with MODE triton or opentelemetry";
    let (mode, setting) = match text.split_once(',').filter(|(before, _)| !before.contains('=')) {
        None => (None, text),
        Some((name, setting)) => {
            let mode = Mode::from_name(&name.to_ascii_lowercase())
                .ok_or_else(|| format!("there is no trace mode '{name}'; {form}"))?;
            (Some(mode), setting)
        }
    };
    let (key, value) = setting
        .split_once('=')
        .ok_or_else(|| format!("'{setting}' is not of the form SETTING=VALUE; {form}"))?;
    let known: &[&str] = match mode {
        None => &["mode", "level", "rate", "count"],
        Some(Mode::Triton) => &["file", "log-frequency"],
        Some(Mode::OpenTelemetry) => &[
            "url",
            "protocol",
            "resource",
            "bsp_max_queue_size",
            "bsp_schedule_delay",
            "bsp_max_export_batch_size",
        ],
    };
    if !known.contains(&key) {
        let of = mode.map_or_else(
            || "traces in general".to_owned(),
            |mode| format!("the trace mode {}", mode.name()),
        );
        return Err(format!(
            "unknown setting '{key}' of {of}; allowed are {}; {form}",
            known.join(", ")
        ));
    }
    Ok(TraceConfig { mode, key: key.to_owned(), value: value.to_owned() })
}

/// Combines all options and environment variables of tracing. `variable` looks up an environment
/// variable.
///
/// # Errors
/// A value is not allowed.
pub(super) fn tracing(
    options: &TraceOptions,
    variable: impl Fn(&str) -> Option<String>,
) -> Result<Tracing, String> {
    let given = Given(&options.configs);
    let file = options.file.as_ref().map(|file| file.to_string_lossy().into_owned());
    let mut pairs = [
        (Some(Mode::Triton), "file", file, "--trace-file"),
        (None, "rate", options.rate.clone(), "--trace-rate"),
        (None, "count", options.count.clone(), "--trace-count"),
        (
            Some(Mode::Triton),
            "log-frequency",
            options.log_frequency.clone(),
            "--trace-log-frequency",
        ),
    ];
    let mut overridden = Vec::new();
    for (mode, key, value, flag) in &mut pairs {
        if let Some(new) = given.last(*mode, key)
            && value.replace(new.to_owned()).is_some()
        {
            overridden.push(*flag);
        }
    }
    let [file, rate, count, frequency] = pairs.map(|(_, _, value, _)| value);
    let new_levels: Vec<&str> = given.all(None, "level").collect();
    if !new_levels.is_empty() && !options.level.is_empty() {
        overridden.push("--trace-level");
    }
    let old_levels: Vec<&str> = options.level.iter().map(String::as_str).collect();
    let mode = given.last(None, "mode").map_or(Ok(Mode::default()), |name| {
        Mode::from_name(&name.to_ascii_lowercase())
            .ok_or_else(|| format!("mode is '{name}'; allowed are triton, opentelemetry"))
    });
    let defaults = Values::default();
    let values = Values {
        levels: levels_of(if new_levels.is_empty() { &old_levels } else { &new_levels })?,
        rate: rate.map_or(Ok(defaults.rate), |text| number("rate", &text))?,
        count: count.map_or(Ok(defaults.count), |text| count_of(&text))?,
        log_frequency: frequency
            .map_or(Ok(defaults.log_frequency), |text| number("log-frequency", &text))?,
    };
    let mode = mode?;
    let collector = if mode == Mode::OpenTelemetry {
        collector(&given, variable)?
    } else {
        Collector::default()
    };
    let of_other_mode =
        options.configs.iter().filter(|config| config.mode.is_some_and(|of| of != mode));
    Ok(Tracing {
        mode,
        values,
        file: file.unwrap_or_default().into(),
        collector,
        overridden,
        of_other_mode: of_other_mode.map(TraceConfig::name).collect(),
    })
}

fn levels_of(names: &[&str]) -> Result<Levels, String> {
    // Triton's command line accepts more words than its protocol.
    let words = names.iter().map(|name| match name.to_ascii_lowercase().as_str() {
        "false" | "off" => "OFF",
        "true" | "on" | "min" | "max" | "timestamps" => "TIMESTAMPS",
        "tensors" => "TENSORS",
        _ => name,
    });
    levels(words).map_err(|error| error.message)
}

fn number(key: &str, text: &str) -> Result<u32, String> {
    unsigned(key, text).map_err(|error| error.message)
}

fn count_of(text: &str) -> Result<i32, String> {
    count(text).map_err(|error| error.message)
}

/// The given `--trace-config` settings, in order.
struct Given<'a>(&'a [TraceConfig]);

impl Given<'_> {
    fn all(&self, mode: Option<Mode>, key: &str) -> impl Iterator<Item = &str> {
        let own = self.0.iter().filter(move |config| config.mode == mode && config.key == key);
        own.map(|config| config.value.as_str())
    }

    fn last(&self, mode: Option<Mode>, key: &str) -> Option<&str> {
        self.all(mode, key).last()
    }
}

/// Returns the settings of the collector: from options, else from OpenTelemetry's variables, else
/// the defaults.
fn collector(
    given: &Given<'_>,
    variable: impl Fn(&str) -> Option<String>,
) -> Result<Collector, String> {
    let option = |key: &str| given.last(Some(Mode::OpenTelemetry), key).map(str::to_owned);
    let variables = Variables::new(Signal::Traces, variable);
    let size = |key: &str, name: &str, usual: u32| {
        let (text, source) = match (option(key), variables.get(name)) {
            (Some(text), _) => (text, String::new()),
            (None, Some(text)) => (text, format!(" (from {name})")),
            (None, None) => return Ok(usual),
        };
        let number = text.trim().parse().ok().filter(|size| *size > 0);
        number.ok_or_else(|| {
            format!("{key} is '{text}'; allowed are whole numbers from 1 to {}{source}", u32::MAX)
        })
    };
    let resources: Vec<&str> = given.all(Some(Mode::OpenTelemetry), "resource").collect();
    Ok(Collector {
        endpoint: variables.endpoint(option("url"), option("protocol"))?,
        resource: variables.resource(&resources)?,
        given_resource: resources.join(","),
        max_queue_size: size("bsp_max_queue_size", "OTEL_BSP_MAX_QUEUE_SIZE", 2048)?,
        schedule_delay_ms: size("bsp_schedule_delay", "OTEL_BSP_SCHEDULE_DELAY", 5000)?,
        max_export_batch_size: size(
            "bsp_max_export_batch_size",
            "OTEL_BSP_MAX_EXPORT_BATCH_SIZE",
            512,
        )?,
    })
}

/// Commands for trace files.
#[derive(Clone, Debug, Subcommand)]
pub enum TraceCommand {
    /// Show percentiles of the time of each stage of traced requests, by model
    Summary {
        /// Trace files of this server or of Triton; a truncated file is read as far as possible
        #[arg(value_name = "FILE", required = true)]
        files: Vec<PathBuf>,
        /// Print JSON instead of a table
        #[arg(long)]
        json: bool,
    },
    /// Convert traces to Chrome trace events, for Perfetto (ui.perfetto.dev)
    Chrome {
        /// Trace files
        #[arg(value_name = "FILE", required = true)]
        files: Vec<PathBuf>,
        /// File to write [default: standard output]
        #[arg(long, short, value_name = "FILE")]
        output: Option<PathBuf>,
    },
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use std::time::Duration;

    use clap::Parser;

    use super::*;

    #[derive(Parser)]
    struct Alone {
        #[command(flatten)]
        trace: TraceOptions,
    }

    fn read_with(args: &[&str], variables: &[(&str, &str)]) -> Result<Tracing, String> {
        let args = std::iter::once("pharos").chain(args.iter().copied());
        let alone = Alone::try_parse_from(args).map_err(|error| error.to_string())?;
        let variable = |name: &str| {
            variables.iter().find(|(known, _)| *known == name).map(|(_, v)| (*v).to_owned())
        };
        tracing(&alone.trace, variable)
    }

    fn read(args: &[&str]) -> Result<Tracing, String> {
        let args: Vec<String> = args.iter().map(|arg| format!("--trace-config={arg}")).collect();
        read_with(&args.iter().map(String::as_str).collect::<Vec<_>>(), &[])
    }

    #[test]
    fn accepts_tritons_forms() {
        let forms =
            ["triton,file=/a,b=c", "level=TIMESTAMPS", "level=TENSORS", "rate=5", "count=-1"];
        let Tracing { mode, values, file, .. } =
            read(&[&forms[..], &["triton,log-frequency=9"]].concat()).unwrap();
        let levels = Levels { timestamps: true, tensors: true };
        assert_eq!((mode, file), (Mode::Triton, PathBuf::from("/a,b=c")));
        assert_eq!(values, Values { levels, rate: 5, count: -1, log_frequency: 9 });
        assert_eq!(read(&[]).unwrap().values, Values::default());
        let old =
            ["--trace-file=f", "--trace-level=TIMESTAMPS", "--trace-rate=3", "--trace-count=-1"];
        let old = read_with(
            &[&old[..], &["--trace-log-frequency=2", "--trace-config=rate=4"]].concat(),
            &[],
        )
        .unwrap();
        assert_eq!(
            (old.values.rate, old.values.log_frequency, old.file),
            (4, 2, PathBuf::from("f"))
        );
        assert_eq!(old.overridden, ["--trace-rate"]);
        let other =
            read(&["triton,file=f", "rate=1", "opentelemetry,url=http://h"]).unwrap().of_other_mode;
        assert_eq!(other, ["opentelemetry,url"]);
    }

    #[test]
    fn reads_the_collector_from_options_or_variables() {
        let options = [
            "mode=opentelemetry",
            "opentelemetry,url=http://h:1/x?y",
            "opentelemetry,resource=a=b=c",
        ];
        let more =
            ["opentelemetry,resource=service.name=n", "opentelemetry,bsp_schedule_delay=500"];
        let collector = read(&[&options[..], &more].concat()).unwrap().collector;
        assert_eq!(collector.endpoint.target.to_string(), "http://h:1/x?y");
        let pair = |key: &str, value: &str| (key.to_owned(), value.to_owned());
        assert_eq!(collector.resource, [pair("a", "b=c"), pair("service.name", "n")]);
        assert_eq!(
            (collector.given_resource.as_str(), collector.schedule_delay_ms),
            ("a=b=c,service.name=n", 500)
        );
        let of = |variables: &[(&str, &str)]| {
            read_with(&["--trace-config=mode=opentelemetry"], variables)
        };
        assert_eq!(of(&[]).unwrap().collector, Collector::default());
        let bare =
            read(&["mode=opentelemetry", "opentelemetry,url=h:1/v1/traces"]).unwrap().collector;
        assert_eq!(
            (bare.endpoint.url.as_str(), bare.endpoint.grpc),
            ("http://h:1/v1/traces", false)
        );
        let encrypted = of(&[("OTEL_EXPORTER_OTLP_ENDPOINT", "https://h")]).unwrap().collector;
        assert_eq!(encrypted.endpoint.target.to_string(), "https://h:443/v1/traces");
        let wrong = of(&[("OTEL_EXPORTER_OTLP_ENDPOINT", "ftp://h")]).unwrap_err();
        assert!(wrong.ends_with("(from OTEL_EXPORTER_OTLP_ENDPOINT)"), "{wrong}");
        let wrong = of(&[("OTEL_BSP_SCHEDULE_DELAY", "5s")]).unwrap_err();
        let expected = "bsp_schedule_delay is '5s'; allowed are whole numbers from 1 to \
                        4294967295 (from OTEL_BSP_SCHEDULE_DELAY)";
        assert_eq!(wrong, expected);
        let variables = [
            ("OTEL_EXPORTER_OTLP_ENDPOINT", "http://[::1]:9/base/"),
            ("OTEL_EXPORTER_OTLP_HEADERS", "k=v%20w, l=m"),
            ("OTEL_EXPORTER_OTLP_TRACES_TIMEOUT", "1500"),
            ("OTEL_RESOURCE_ATTRIBUTES", "service.name=x,zone=y"),
            ("OTEL_SERVICE_NAME", "named"),
            ("OTEL_BSP_MAX_QUEUE_SIZE", "7"),
        ];
        let collector = of(&variables).unwrap().collector;
        assert_eq!(collector.endpoint.target.to_string(), "http://[::1]:9/base/v1/traces");
        assert_eq!(collector.endpoint.headers, [pair("k", "v w"), pair("l", "m")]);
        assert_eq!(
            (collector.endpoint.timeout, collector.max_queue_size),
            (Duration::from_millis(1500), 7)
        );
        assert_eq!(collector.resource, [pair("zone", "y"), pair("service.name", "named")]);
        let grpc = of(&[("OTEL_EXPORTER_OTLP_PROTOCOL", "grpc")]).unwrap().collector.endpoint;
        assert_eq!((grpc.grpc, grpc.url.as_str()), (true, "http://localhost:4317"));
    }

    #[test]
    fn errors_list_the_allowed_values() {
        let otel = "mode=opentelemetry";
        for (args, expected) in [
            (&["zipkin,url=x"][..], "no trace mode 'zipkin'"),
            (&["rate"], "'rate' is not of the form SETTING=VALUE"),
            (
                &["speed=3"],
                "unknown setting 'speed' of traces in general; allowed are mode, level, rate, \
                 count",
            ),
            (&["triton,rate=3"], "allowed are file, log-frequency"),
            (&["opentelemetry,uri=x"], "allowed are url, protocol"),
            (&["mode=zipkin"], "mode is 'zipkin'; allowed are triton, opentelemetry"),
            (&["level=ALL"], "got: ALL; allowed are OFF"),
            (&["rate=-1"], "out of range"),
            (&["count=-2"], "Expecting value >= -1"),
            (&[otel, "opentelemetry,url=ftp://h"], "url is 'ftp://h'; allowed are http://HOST"),
            (&[otel, "opentelemetry,url=h:x"], "url is 'http://h:x'"),
            (&[otel, "opentelemetry,url=http://h:65536/"], "url is 'http://h:65536/'"),
            (&[otel, "opentelemetry,url=http://h:0"], "url is 'http://h:0'"),
            (&[otel, "opentelemetry,resource=a"], "resource is 'a'; allowed are KEY=VALUE"),
            (
                &[otel, "opentelemetry,bsp_max_queue_size=0"],
                "bsp_max_queue_size is '0'; allowed are whole numbers from 1 to 4294967295",
            ),
            (&[otel, "opentelemetry,protocol=http/json"], "allowed are http/protobuf, grpc"),
        ] {
            let message = read(args).unwrap_err();
            assert!(message.contains(expected), "{args:?}: no {expected:?} in: {message}");
        }
    }
}
