//! OpenTelemetry's environment variables, and the collector that metrics are pushed to.
//!
//! Source: the OpenTelemetry specification, "OpenTelemetry Protocol Exporter", "Metrics Exporter -
//! OTLP" and "Environment Variable Specification" (opentelemetry.io/docs/specs/otel). As it
//! requires, empty variables count as not set.

use std::time::Duration;

use http::Uri;
use pharos::metrics::otlp::{Aggregation, Temporality};
use pharos::otlp::{SERVICE_NAME, Signal};
use pharos_os::client::ClientTls;
use pharos_telemetry::metrics::push::Settings;
use pharos_telemetry::otlp::{Endpoint, TIMEOUT};

/// The default time between exports of metrics, and the default time limit of an export.
const INTERVAL: Duration = Duration::from_secs(60);
const EXPORT_TIMEOUT: Duration = Duration::from_secs(30);

const ATTRIBUTES: &str = "OTEL_RESOURCE_ATTRIBUTES";

/// A value with its source: a variable, or `None` for an option.
struct Given {
    value: String,
    variable: Option<String>,
}

impl Given {
    /// Adds the variable to the reason why the value is invalid.
    fn wrong(&self, reason: String) -> String {
        match &self.variable {
            Some(variable) => format!("{reason} (from {variable})"),
            None => reason,
        }
    }
}

/// The variables of one signal.
pub(super) struct Variables<V> {
    signal: Signal,
    variable: V,
}

impl<V: Fn(&str) -> Option<String>> Variables<V> {
    pub(super) fn new(signal: Signal, variable: V) -> Self {
        Self { signal, variable }
    }

    /// Returns a variable unless it is empty.
    pub(super) fn get(&self, name: &str) -> Option<String> {
        (self.variable)(name).filter(|value| !value.trim().is_empty())
    }

    /// Returns the name of this signal's own variable.
    fn own(&self, name: &str) -> String {
        format!("OTEL_EXPORTER_OTLP_{}_{name}", self.signal.as_str().to_ascii_uppercase())
    }

    /// Returns the variable of this signal, else the variable of all signals.
    fn of_signal(&self, name: &str) -> Option<Given> {
        let names = [self.own(name), format!("OTEL_EXPORTER_OTLP_{name}")];
        let found = names.into_iter().find_map(|name| Some((self.get(&name)?, name)));
        found.map(|(value, variable)| Given { value, variable: Some(variable) })
    }

    /// Returns the URL that variables set: the URL of the signal as it is, or the URL of all
    /// signals with the signal's path.
    fn url(&self, grpc: bool) -> Option<Given> {
        let own = self.own("ENDPOINT");
        if let Some(value) = self.get(&own) {
            return Some(Given { value, variable: Some(own) });
        }
        let general = "OTEL_EXPORTER_OTLP_ENDPOINT";
        let base = self.get(general)?;
        let path = if grpc { "" } else { self.signal.path() };
        let value = format!("{}{path}", base.trim_end_matches('/'));
        Some(Given { value, variable: Some(general.to_owned()) })
    }

    /// Returns the collector of options, else of variables, else the default one.
    ///
    /// # Errors
    /// A value is not allowed.
    pub(super) fn endpoint(
        &self,
        url: Option<String>,
        protocol: Option<String>,
    ) -> Result<Endpoint, String> {
        let option = |value| Given { value, variable: None };
        let grpc = match protocol.map(option).or_else(|| self.of_signal("PROTOCOL")) {
            Some(given) => match given.value.as_str() {
                "grpc" => true,
                "http/protobuf" => false,
                other => {
                    return Err(given
                        .wrong(format!("protocol is '{other}'; allowed are http/protobuf, grpc")));
                }
            },
            None => false,
        };
        let port = if grpc { 4317 } else { 4318 };
        let given = url.map(option).or_else(|| self.url(grpc)).unwrap_or_else(|| {
            let path = if grpc { "" } else { self.signal.path() };
            option(format!("http://localhost:{port}{path}"))
        });
        let complete = with_scheme(&given.value);
        let target = target(&complete, port).map_err(|reason| given.wrong(reason))?;
        let headers = match self.of_signal("HEADERS") {
            Some(given) => pairs(given.variable.as_deref().unwrap_or_default(), &given.value)?,
            None => Vec::new(),
        };
        Ok(Endpoint {
            url: complete,
            target,
            grpc,
            headers,
            gzip: self.gzip()?,
            timeout: milliseconds(self.of_signal("TIMEOUT"), TIMEOUT)?,
            tls: self.tls()?,
        })
    }

    fn gzip(&self) -> Result<bool, String> {
        let Some(given) = self.of_signal("COMPRESSION") else { return Ok(false) };
        match given.value.as_str() {
            "gzip" => Ok(true),
            "none" => Ok(false),
            other => Err(given.wrong(format!("compression is '{other}'; allowed are gzip, none"))),
        }
    }

    fn tls(&self) -> Result<ClientTls, String> {
        let file = |name| self.of_signal(name).map(|given| given.value.into());
        let identity = match (file("CLIENT_CERTIFICATE"), file("CLIENT_KEY")) {
            (Some(certificate), Some(key)) => Some((certificate, key)),
            (None, None) => None,
            _ => {
                let both =
                    "OTEL_EXPORTER_OTLP_CLIENT_CERTIFICATE and OTEL_EXPORTER_OTLP_CLIENT_KEY";
                return Err(format!("one of {both} is not set: a client certificate needs both"));
            }
        };
        Ok(ClientTls { authorities: file("CERTIFICATE"), identity })
    }

    fn time(&self, name: &str, usual: Duration) -> Result<Duration, String> {
        let given = self.get(name).map(|value| Given { value, variable: Some(name.to_owned()) });
        milliseconds(given, usual)
    }

    /// Returns the value that this signal's variable names, in upper or lower case, or the default.
    /// Unknown names are ignored with a warning, as the specification requires.
    fn preference<T: Copy + Default>(
        &self,
        name: &str,
        all: &[T],
        name_of: fn(T) -> &'static str,
        warnings: &mut Vec<String>,
    ) -> T {
        let variable = self.own(name);
        let Some(value) = self.get(&variable) else { return T::default() };
        let known = all.iter().find(|known| value.trim().eq_ignore_ascii_case(name_of(**known)));
        known.copied().unwrap_or_else(|| {
            let allowed: Vec<&str> = all.iter().map(|known| name_of(*known)).collect();
            warnings.push(format!(
                "{variable} \"{value}\" is ignored: allowed are {}",
                allowed.join(", ")
            ));
            T::default()
        })
    }

    /// Returns the attributes of this server. Options take precedence over variables, and variables
    /// over the default of `service.name`.
    ///
    /// # Errors
    /// A text is not of the form KEY=VALUE.
    pub(super) fn resource(&self, options: &[&str]) -> Result<Vec<(String, String)>, String> {
        let mut all = vec![("service.name".to_owned(), SERVICE_NAME.to_owned())];
        let mut put = |key: String, value: String| {
            all.retain(|(known, _)| *known != key);
            all.push((key, value));
        };
        let variables = self.get(ATTRIBUTES).unwrap_or_default();
        pairs(ATTRIBUTES, &variables)?.into_iter().for_each(|(key, value)| put(key, value));
        if let Some(name) = self.get("OTEL_SERVICE_NAME") {
            put("service.name".to_owned(), name);
        }
        for text in options {
            let pair = text.split_once('=').filter(|(key, _)| !key.is_empty());
            let (key, value) =
                pair.ok_or_else(|| format!("resource is '{text}'; allowed are KEY=VALUE"))?;
            put(key.to_owned(), value.to_owned());
        }
        Ok(all)
    }
}

/// Returns a time in milliseconds; 0 selects the usual one.
fn milliseconds(given: Option<Given>, usual: Duration) -> Result<Duration, String> {
    let Some(given) = given else { return Ok(usual) };
    match given.value.trim().parse::<u32>() {
        Ok(0) => Ok(usual),
        Ok(time) => Ok(Duration::from_millis(time.into())),
        Err(_) => {
            Err(given.wrong(format!("'{}' is not a time in whole milliseconds", given.value)))
        }
    }
}

/// The push of metrics as options and variables define it.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Push {
    /// `None` without a collector.
    pub(super) settings: Option<Settings>,
    /// Messages about variables that are ignored.
    pub(super) warnings: Vec<String>,
}

/// Returns the settings of the push of metrics. The push is on if the flag or an endpoint is set,
/// or if OTEL_METRICS_EXPORTER contains `otlp`; that variable and OTEL_SDK_DISABLED can switch it
/// off.
///
/// # Errors
/// A value is not allowed, and the flag is given. Without the flag, variables that are meant for
/// other programs do not end this one: they are ignored with a warning.
pub(super) fn push(
    flag: Option<&str>,
    variable: impl Fn(&str) -> Option<String>,
) -> Result<Push, String> {
    let variables = Variables::new(Signal::Metrics, variable);
    let exporters = variables.get("OTEL_METRICS_EXPORTER");
    let chosen = exporters
        .as_ref()
        .map(|list| list.split(',').any(|name| name.trim().eq_ignore_ascii_case("otlp")));
    let disabled = variables
        .get("OTEL_SDK_DISABLED")
        .is_some_and(|value| value.trim().eq_ignore_ascii_case("true"));
    let off = match (disabled, chosen) {
        (true, _) => Some("OTEL_SDK_DISABLED is true"),
        (false, Some(false)) => Some("OTEL_METRICS_EXPORTER does not contain otlp"),
        _ => None,
    };
    if let Some(reason) = off {
        let unused = flag.map(|_| format!("--otlp-metrics-endpoint has no effect: {reason}"));
        return Ok(Push { settings: None, warnings: unused.into_iter().collect() });
    }
    if flag.is_none() && variables.url(false).is_none() && chosen.is_none() {
        return Ok(Push::default());
    }
    let mut warnings = Vec::new();
    match settings(&variables, flag, &mut warnings) {
        Ok(settings) => Ok(Push { settings: Some(settings), warnings }),
        Err(reason) if flag.is_some() => Err(reason),
        Err(reason) => {
            Ok(Push { settings: None, warnings: vec![format!("metrics are not pushed: {reason}")] })
        }
    }
}

fn settings<V: Fn(&str) -> Option<String>>(
    variables: &Variables<V>,
    flag: Option<&str>,
    warnings: &mut Vec<String>,
) -> Result<Settings, String> {
    let mut endpoint = variables.endpoint(flag.map(str::to_owned), None)?;
    // A collector's base URL is not the address of its metrics.
    if flag.is_some() && !endpoint.grpc && endpoint.target.path() == "/" {
        let url = format!("{}{}", endpoint.url.trim_end_matches('/'), Signal::Metrics.path());
        endpoint = variables.endpoint(Some(url), None)?;
    }
    Ok(Settings {
        endpoint,
        interval: variables.time("OTEL_METRIC_EXPORT_INTERVAL", INTERVAL)?,
        limit: variables.time("OTEL_METRIC_EXPORT_TIMEOUT", EXPORT_TIMEOUT)?,
        temporality: variables.preference(
            "TEMPORALITY_PREFERENCE",
            &Temporality::ALL,
            Temporality::as_str,
            warnings,
        ),
        aggregation: variables.preference(
            "DEFAULT_HISTOGRAM_AGGREGATION",
            &Aggregation::ALL,
            Aggregation::as_str,
            warnings,
        ),
        resource: variables.resource(&[])?,
    })
}

/// Parses `KEY=VALUE,KEY=VALUE` with percent-encoded values, the format of OpenTelemetry's
/// variables.
fn pairs(name: &str, text: &str) -> Result<Vec<(String, String)>, String> {
    let mut pairs = Vec::new();
    for part in text.split(',').map(str::trim).filter(|part| !part.is_empty()) {
        // Headers can be secrets, so errors do not contain values.
        let (key, value) = part
            .split_once('=')
            .ok_or_else(|| format!("{name} is not of the form KEY=VALUE,..."))?;
        let decoded = percent_encoding::percent_decode_str(value.trim()).decode_utf8_lossy();
        pairs.push((key.trim().to_owned(), decoded.into_owned()));
    }
    Ok(pairs)
}

/// Adds `http://` to a URL without a scheme, for example `localhost:4318/v1/traces`.
fn with_scheme(url: &str) -> String {
    if url.contains("://") { url.to_owned() } else { format!("http://{url}") }
}

/// Returns the URL with its port: 443 for `https` if none is given, else `usual_port`.
fn target(url: &str, usual_port: u16) -> Result<Uri, String> {
    let wrong = || {
        format!(
            "url is '{url}'; allowed are http://HOST[:PORT][/PATH] and https://HOST[:PORT][/PATH]"
        )
    };
    let uri: Uri = url.parse().map_err(|_| wrong())?;
    let scheme =
        uri.scheme_str().filter(|scheme| matches!(*scheme, "http" | "https")).ok_or_else(wrong)?;
    let host = uri.host().filter(|host| !host.is_empty()).ok_or_else(wrong)?;
    let authority = uri.authority().map(http::uri::Authority::as_str).unwrap_or_default();
    if authority.contains('@') {
        return Err("url contains credentials; send them in OTEL_EXPORTER_OTLP_HEADERS".to_owned());
    }
    let path = uri.path_and_query().map_or("/", http::uri::PathAndQuery::as_str);
    // `uri.port()` ignores an invalid port, and the default port would be used without an error.
    let port = match authority.rsplit_once(':') {
        Some((_, port)) if !port.ends_with(']') => {
            port.parse().ok().filter(|port| *port > 0).ok_or_else(wrong)?
        }
        _ if scheme == "https" => 443,
        _ => usual_port,
    };
    format!("{scheme}://{host}:{port}{path}").parse().map_err(|_| wrong())
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    fn read(flag: Option<&str>, variables: &[(&str, &str)]) -> Result<Push, String> {
        push(flag, |name| {
            variables.iter().find(|(known, _)| *known == name).map(|(_, value)| (*value).to_owned())
        })
    }

    fn settings_of(flag: Option<&str>, variables: &[(&str, &str)]) -> Settings {
        read(flag, variables).unwrap().settings.unwrap()
    }

    const ENDPOINT: (&str, &str) = ("OTEL_EXPORTER_OTLP_ENDPOINT", "http://c:1/base/");

    #[test]
    fn an_endpoint_or_the_exporter_switches_the_push_on() {
        let target =
            |flag, variables: &[_]| settings_of(flag, variables).endpoint.target.to_string();
        assert_eq!(read(None, &[]), Ok(Push::default()));
        assert_eq!(read(None, &[("OTEL_EXPORTER_OTLP_ENDPOINT", " ")]), Ok(Push::default()));
        assert_eq!(target(None, &[ENDPOINT]), "http://c:1/base/v1/metrics");
        assert_eq!(
            target(None, &[ENDPOINT, ("OTEL_EXPORTER_OTLP_METRICS_ENDPOINT", "http://m:2")]),
            "http://m:2/"
        );
        assert_eq!(
            target(None, &[("OTEL_METRICS_EXPORTER", "otlp")]),
            "http://localhost:4318/v1/metrics"
        );
        assert_eq!(target(Some("collector"), &[ENDPOINT]), "http://collector:4318/v1/metrics");
        assert_eq!(target(Some("https://collector/otlp"), &[]), "https://collector:443/otlp");
        assert_eq!(target(Some("http://[::1]:9/x"), &[]), "http://[::1]:9/x");
        let grpc = ("OTEL_EXPORTER_OTLP_PROTOCOL", "grpc");
        assert_eq!(target(Some("c"), &[grpc]), "http://c:4317/");
        assert_eq!(target(None, &[ENDPOINT, grpc]), "http://c:1/base");
    }

    #[test]
    fn variables_switch_the_push_off() {
        for off in [
            ("OTEL_SDK_DISABLED", "True"),
            ("OTEL_METRICS_EXPORTER", "none"),
            ("OTEL_METRICS_EXPORTER", "prometheus"),
        ] {
            assert_eq!(read(None, &[ENDPOINT, off]), Ok(Push::default()), "{off:?}");
            let Push { settings, warnings } = read(Some("http://c"), &[off]).unwrap();
            assert!(settings.is_none() && warnings[0].contains(off.0), "{warnings:?}");
        }
        assert!(read(None, &[ENDPOINT, ("OTEL_SDK_DISABLED", "1")]).unwrap().settings.is_some());
    }

    #[test]
    fn own_variables_precede_those_of_all_signals() {
        let settings = settings_of(
            None,
            &[
                ENDPOINT,
                ("OTEL_EXPORTER_OTLP_HEADERS", "k=v%20w, l=m"),
                ("OTEL_EXPORTER_OTLP_COMPRESSION", "none"),
                ("OTEL_EXPORTER_OTLP_METRICS_COMPRESSION", "gzip"),
                ("OTEL_EXPORTER_OTLP_TIMEOUT", "1500"),
                ("OTEL_EXPORTER_OTLP_CERTIFICATE", "ca.pem"),
                ("OTEL_EXPORTER_OTLP_METRICS_CLIENT_KEY", "key.pem"),
                ("OTEL_EXPORTER_OTLP_CLIENT_CERTIFICATE", "client.pem"),
                ("OTEL_METRIC_EXPORT_INTERVAL", "250"),
                ("OTEL_METRIC_EXPORT_TIMEOUT", "0"),
                ("OTEL_EXPORTER_OTLP_METRICS_TEMPORALITY_PREFERENCE", "LowMemory"),
                (
                    "OTEL_EXPORTER_OTLP_METRICS_DEFAULT_HISTOGRAM_AGGREGATION",
                    "BASE2_exponential_bucket_histogram",
                ),
                ("OTEL_RESOURCE_ATTRIBUTES", "service.name=x,zone=y"),
                ("OTEL_SERVICE_NAME", "named"),
            ],
        );
        let pair = |key: &str, value: &str| (key.to_owned(), value.to_owned());
        assert_eq!(settings.endpoint.headers, [pair("k", "v w"), pair("l", "m")]);
        assert!(settings.endpoint.gzip && !settings.endpoint.grpc);
        assert_eq!(settings.endpoint.timeout, Duration::from_millis(1500));
        let identity = Some(("client.pem".into(), "key.pem".into()));
        assert_eq!(
            settings.endpoint.tls,
            ClientTls { authorities: Some("ca.pem".into()), identity }
        );
        assert_eq!(
            (settings.interval, settings.limit),
            (Duration::from_millis(250), Duration::from_secs(30))
        );
        assert_eq!(
            (settings.temporality, settings.aggregation),
            (Temporality::LowMemory, Aggregation::Exponential)
        );
        assert_eq!(settings.resource, [pair("zone", "y"), pair("service.name", "named")]);
    }

    #[test]
    fn invalid_values_are_errors_with_the_flag_and_warnings_without() {
        for (name, value, expected) in [
            (
                "OTEL_EXPORTER_OTLP_PROTOCOL",
                "http/json",
                "protocol is 'http/json'; allowed are http/protobuf, grpc",
            ),
            ("OTEL_EXPORTER_OTLP_METRICS_COMPRESSION", "zstd", "compression is 'zstd'"),
            ("OTEL_METRIC_EXPORT_INTERVAL", "1m", "'1m' is not a time in whole milliseconds"),
            ("OTEL_EXPORTER_OTLP_HEADERS", "secret", "is not of the form KEY=VALUE"),
            ("OTEL_EXPORTER_OTLP_CLIENT_KEY", "k", "a client certificate needs both"),
        ] {
            let wrong = read(Some("http://c"), &[(name, value)]).unwrap_err();
            assert!(wrong.contains(expected) && wrong.contains(name), "{wrong}");
            assert!(!wrong.contains("secret"));
            let Push { settings, warnings } = read(None, &[ENDPOINT, (name, value)]).unwrap();
            assert!(
                settings.is_none() && warnings == [format!("metrics are not pushed: {wrong}")],
                "{warnings:?}"
            );
        }
        for (flag, expected) in
            [("ftp://c", "allowed are http://HOST"), ("http://a:b@c", "OTEL_EXPORTER_OTLP_HEADERS")]
        {
            assert!(read(Some(flag), &[]).unwrap_err().contains(expected), "{flag}");
        }
    }

    #[test]
    fn unknown_preferences_are_ignored() {
        let temporality = ("OTEL_EXPORTER_OTLP_METRICS_TEMPORALITY_PREFERENCE", "weekly");
        let aggregation = ("OTEL_EXPORTER_OTLP_METRICS_DEFAULT_HISTOGRAM_AGGREGATION", "sum");
        let Push { settings, warnings } =
            read(None, &[ENDPOINT, temporality, aggregation]).unwrap();
        let settings = settings.unwrap();
        assert_eq!(
            (settings.temporality, settings.aggregation),
            (Temporality::Cumulative, Aggregation::Explicit)
        );
        assert!(
            warnings[0]
                .ends_with("\"weekly\" is ignored: allowed are cumulative, delta, lowmemory"),
            "{warnings:?}"
        );
        let allowed = "allowed are explicit_bucket_histogram, base2_exponential_bucket_histogram";
        assert!(warnings[1].ends_with(&format!("\"sum\" is ignored: {allowed}")), "{warnings:?}");
    }
}
