//! Adapts the parser to the program's name and to environment variables of other systems.

use std::ffi::{OsStr, OsString};
use std::path::Path;

use clap::builder::Resettable;
use clap::{Arg, Command};

use super::{cloud, definition, refusal};

/// The program name that selects Triton's defaults.
const TRITONSERVER: &str = "tritonserver";

/// The command that takes repositories as arguments: `pharos serve PLACE... [OPTIONS]`.
const SERVE: &str = "serve";

/// Triton's defaults that differ from ours, by flag.
const TRITONS_DEFAULTS: [(&str, &str); 2] =
    [("metrics-port", "8002"), ("grpc-keepalive-time", "7200000")];

/// Environment variables of other systems, each with its equivalent flag; used if the flag's
/// `PHAROS_` variable is not set.
const VARIABLES: [(&str, &str); 2] =
    [("AIP_STORAGE_URI", "model-repository"), ("AIP_HTTP_PORT", "vertex-ai-port")];

/// The beginning of the names of this server's environment variables.
const OWN: &str = "PHAROS_";

/// Variables that other programs of this project read, such as workers, tests, Compose files and
/// configurations of other programs.
const OTHERS: [&str; 39] = [
    "PHAROS_AIPERF_PYTHON",
    "PHAROS_AZURITE",
    "PHAROS_BACKEND_LIBRARY",
    "PHAROS_BIN",
    "PHAROS_CHROMIUM",
    "PHAROS_CPUS",
    "PHAROS_DASHBOARDS",
    "PHAROS_ENVOY",
    "PHAROS_FAKE_CUDA",
    "PHAROS_GRAFANA",
    "PHAROS_GRAFANA_HOME",
    "PHAROS_IMAGE",
    "PHAROS_KSERVE_PYTHON",
    "PHAROS_LOGS",
    "PHAROS_MEMORY",
    "PHAROS_MINILM",
    "PHAROS_PACKAGES",
    "PHAROS_PEERS",
    "PHAROS_PROMETHEUS",
    "PHAROS_PYTHON_BACKEND",
    "PHAROS_RELOADS",
    "PHAROS_SCHEMAS",
    "PHAROS_SEED",
    "PHAROS_SIMULATE_FIRST_SEED",
    "PHAROS_SIMULATE_SECONDS",
    "PHAROS_SOAK_RATE",
    "PHAROS_SOAK_S",
    "PHAROS_STANDIN",
    "PHAROS_TEST_FOREIGN_FAULT",
    "PHAROS_TEST_PROCESSES",
    "PHAROS_TEST_PTXAS",
    "PHAROS_TEST_SHORTAGE_OF_DESCRIPTORS",
    "PHAROS_TIDY_ROOT",
    "PHAROS_TORCH",
    "PHAROS_TORCHSERVE",
    "PHAROS_TORCHSERVE_BACKGROUND",
    "PHAROS_TORCHSERVE_HOME",
    "PHAROS_TRANSFORMERS",
    "PHAROS_VLLM_PYTHON",
];

/// The input of the parser.
pub(super) struct Start {
    pub(super) command: Command,
    pub(super) args: Vec<OsString>,
    /// A message for each environment variable that is ignored.
    pub(super) ignored: Vec<String>,
}

impl Start {
    /// `args` begin with the program's name; `variable` looks up an environment variable.
    pub(super) fn new(
        command: Command,
        mut args: Vec<OsString>,
        variable: impl Fn(&str) -> Option<OsString>,
    ) -> Self {
        let is_tritonserver = is_tritonserver(&mut args);
        expand_serve(&mut args);
        let mut command = definition::with_torchserves_variables(command, |name| {
            name.to_str().and_then(&variable).is_some()
        });
        for (name, flag) in VARIABLES {
            let value = variable(name).filter(|value| !value.is_empty());
            if value.is_some() && variable(&variable_of(flag)).is_none() {
                command = command.mut_arg(flag, |arg| arg.env(name));
            }
        }
        command = cloud::with_vertex_ai_defaults(command, &variable);
        if is_tritonserver {
            command = TRITONS_DEFAULTS.iter().fold(command, |command, (flag, value)| {
                command.mut_arg(*flag, |arg| arg.default_value(*value))
            });
            // Triton uses getopt_long, which accepts unambiguous prefixes of flags.
            command = command.name(TRITONSERVER).bin_name(TRITONSERVER).infer_long_args(true);
        }
        command = with_usage(command);
        let (command, ignored) = without_service_links(command, variable);
        Self { command, args, ignored }
    }
}

/// Returns the name of the environment variable of a flag.
fn variable_of(flag: &str) -> String {
    format!("{OWN}{}", flag.to_uppercase().replace('-', "_"))
}

/// Lists the forms of the command line, with the order of their parts.
fn with_usage(command: Command) -> Command {
    let name = command.get_name();
    let forms = [
        format!("{name} [OPTIONS] --model-repository <PLACE>"),
        format!("{name} {SERVE} <PLACE>... [OPTIONS]"),
        format!("{name} <COMMAND>"),
    ];
    command.override_usage(forms.join("\n       "))
}

/// Returns a message for each variable of this server's form that sets no flag. Variables that
/// Kubernetes sets for Services named `pharos` or `pharos-...` are no mistakes. The messages have
/// no values, which may be secret.
pub(super) fn unknown(
    command: &Command,
    variables: impl Iterator<Item = (OsString, OsString)>,
) -> Vec<String> {
    let variables_of_flags: Vec<String> =
        command.get_arguments().filter_map(Arg::get_long).map(variable_of).collect();
    let known: Vec<&str> =
        variables_of_flags.iter().filter_map(|name| name.strip_prefix(OWN)).collect();
    let mut found: Vec<String> = variables
        .filter_map(|(name, value)| Some((name.into_string().ok()?, value)))
        .filter(|(name, value)| {
            !OTHERS.contains(&name.as_str()) && !is_service_variable(name, value)
        })
        .filter_map(|(name, _)| {
            let given = name.strip_prefix(OWN).filter(|given| !known.contains(given))?;
            let remedy = match refusal::nearest(given, &known) {
                Some(meant) => format!("did you mean {OWN}{meant}?"),
                None => "--help lists the variables".to_owned(),
            };
            Some(format!("{name} sets no flag of the server; {remedy}"))
        })
        .collect();
    found.sort();
    found
}

/// Returns whether Kubernetes or Docker sets a variable for a Service: `NAME_SERVICE_HOST`,
/// `NAME_SERVICE_PORT[_PART]`, `NAME_PORT` and `NAME_PORT_80_TCP[_PART]`.
fn is_service_variable(name: &str, value: &OsStr) -> bool {
    let has_number = |rest: &str| rest.starts_with(|first: char| first.is_ascii_digit());
    name.ends_with("_SERVICE_HOST")
        || name.ends_with("_SERVICE_PORT")
        || name.contains("_SERVICE_PORT_")
        || name.split_once("_PORT_").is_some_and(|(_, rest)| has_number(rest))
        || name.ends_with("_PORT") && value.to_str().is_some_and(is_service_address)
}

fn is_service_address(value: &str) -> bool {
    ["tcp://", "udp://", "sctp://"].iter().any(|scheme| value.starts_with(scheme))
}

/// Replaces `serve PLACE...` by `--model-repository=PLACE...`, up to the first flag.
fn expand_serve(args: &mut Vec<OsString>) {
    if args.get(1).is_none_or(|first| first != SERVE) {
        return;
    }
    args.remove(1);
    for place in args.iter_mut().skip(1).take_while(|arg| !arg.as_encoded_bytes().starts_with(b"-"))
    {
        let mut flag = OsString::from("--model-repository=");
        flag.push(&*place);
        *place = flag;
    }
}

/// Returns whether the program's name or its first argument is `tritonserver`. Removes that
/// argument.
fn is_tritonserver(args: &mut Vec<OsString>) -> bool {
    let program = args.first().and_then(|program| Path::new(program).file_name());
    let is_called_so = program == Some(OsStr::new(TRITONSERVER));
    let first = args.get(1).is_some_and(|first| first == TRITONSERVER);
    if first {
        args.remove(1);
    }
    first || is_called_so
}

/// Ignores variables that Kubernetes sets for Services: `NAME_PORT=tcp://ADDRESS:PORT` for each
/// Service in the namespace of a pod, which for a Service named `pharos-http` is the variable of
/// `--http-port`.
fn without_service_links(
    mut command: Command,
    variable: impl Fn(&str) -> Option<OsString>,
) -> (Command, Vec<String>) {
    let mut ignored = Vec::new();
    let ports: Vec<(String, String)> = command
        .get_arguments()
        .filter(|arg| arg.get_id().as_str().ends_with("-port"))
        .filter_map(|arg| Some((arg.get_id().to_string(), arg.get_env()?.to_str()?.to_owned())))
        .collect();
    for (flag, name) in ports {
        let Some(value) = variable(&name).and_then(|value| value.into_string().ok()) else {
            continue;
        };
        if is_service_address(&value) {
            let service =
                name.strip_suffix("_PORT").unwrap_or(&name).to_lowercase().replace('_', "-");
            ignored.push(format!(
                "{name}=\"{value}\" is ignored: it is the address that Kubernetes sets for a \
                 Service named {service}, not a value for --{flag}; set enableServiceLinks: false \
                 in the pod's specification to omit these variables"
            ));
            command =
                command.mut_arg(flag, |arg| arg.env(Resettable::<clap::builder::OsStr>::Reset));
        }
    }
    (command, ignored)
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    use super::super::Options;
    use super::*;

    #[test]
    fn serve_takes_repositories_up_to_the_first_flag() {
        let check = |given: &[&str], expected: &[&str]| {
            let args = ["pharos"].iter().chain(given).map(OsString::from).collect();
            assert_eq!(
                Start::new(Options::command(), args, |_| None).args[1..],
                *expected,
                "{given:?}"
            );
        };
        check(&["serve", "a.onnx"], &["--model-repository=a.onnx"]);
        check(
            &["serve", "a", "b", "--id", "c"],
            &["--model-repository=a", "--model-repository=b", "--id", "c"],
        );
        check(&["serve", "--id", "c"], &["--id", "c"]);
        check(&["serve"], &[]);
        check(&["--id", "serve"], &["--id", "serve"]);
        check(&["metrics", "serve"], &["metrics", "serve"]);
    }

    #[test]
    fn forms_of_the_command_line_have_the_name_of_the_program() {
        for (args, name) in [
            (&["pharos"][..], "pharos"),
            (&["pharos", "tritonserver", "serve", "a"], "tritonserver"),
        ] {
            let start =
                Start::new(Options::command(), args.iter().map(OsString::from).collect(), |_| None);
            let usage = start.command.clone().render_usage().to_string();
            assert!(
                usage.contains(&format!("Usage: {name} [OPTIONS] --model-repository <PLACE>\n")),
                "{usage}"
            );
            assert!(
                usage.contains(&format!("\n       {name} serve <PLACE>... [OPTIONS]\n")),
                "{usage}"
            );
            assert!(args.len() == 1 || start.args[1] == "--model-repository=a", "{:?}", start.args);
        }
    }

    #[test]
    fn unknown_variables_are_named_with_the_nearest_one() {
        let check = |name: &str, value: &str, expected: Option<&str>| {
            let variables = [(name.into(), value.into())].into_iter();
            let texts = unknown(&Options::command(), variables);
            let expected =
                expected.map(|rest| format!("{name} sets no flag of the server; {rest}"));
            assert_eq!(texts, Vec::from_iter(expected));
        };
        check("PHAROS_HTP_PORT", "80", Some("did you mean PHAROS_HTTP_PORT?"));
        check("PHAROS_METRICS_CONFG", "secret", Some("did you mean PHAROS_METRICS_CONFIG?"));
        check("PHAROS_MODEL_REPO", "m", Some("did you mean PHAROS_MODEL_REPOSITORY?"));
        check("PHAROS_IP", "m", Some("--help lists the variables"));
        check("PHAROS_PORT", "8000", Some("--help lists the variables"));
        for name in [
            "PHAROS_HTTP_PORT",
            "PHAROS_LOGS",
            "PHAROS_BACKEND_LIBRARY",
            "HTTP_PORT",
            "PHAROS_SERVICE_HOST",
        ] {
            check(name, "8000", None);
        }
        check("PHAROS_PORT", "tcp://10.0.0.1:8000", None);
        for name in [
            "PHAROS_METRICS_SERVICE_PORT_HTTP",
            "PHAROS_PORT_8000_TCP",
            "PHAROS_PORT_8000_TCP_ADDR",
        ] {
            check(name, "10.0.0.1", None);
        }
    }

    #[test]
    fn ignores_kubernetes_service_addresses() {
        let variable = |name: &str| match name {
            "PHAROS_HTTP_PORT" => Some("tcp://10.0.0.1:8000".into()),
            "PHAROS_GRPC_PORT" => Some("9001".into()),
            _ => None,
        };
        let Start { command, ignored, .. } =
            Start::new(Options::command(), vec!["pharos".into()], variable);
        let env = |id: &str| {
            let arg = command.get_arguments().find(|arg| arg.get_id() == id);
            arg.and_then(|arg| arg.get_env()).map(|env| env.to_string_lossy().into_owned())
        };
        assert_eq!(
            (env("http-port"), env("grpc-port")),
            (None, Some("PHAROS_GRPC_PORT".to_owned()))
        );
        assert_eq!(ignored.len(), 1, "{ignored:?}");
        let text = "PHAROS_HTTP_PORT=\"tcp://10.0.0.1:8000\" is ignored: it is the address that \
                    Kubernetes sets for a Service named pharos-http, not a value for --http-port";
        assert!(ignored[0].starts_with(text), "{ignored:?}");
    }

    #[test]
    fn a_vertex_ai_container_serves_only_vertex_ai_by_default() {
        let variable = |name: &str| match name {
            "AIP_MODE" => Some("PREDICTION".into()),
            "AIP_STORAGE_URI" => Some("gs://bucket/models".into()),
            "AIP_HTTP_PORT" => Some("8085".into()),
            _ => None,
        };
        let Start { command, .. } = Start::new(Options::command(), vec!["pharos".into()], variable);
        let arg = |id: &str| {
            command.get_arguments().find(|arg| arg.get_id() == id).cloned().unwrap_or_default()
        };
        let default = |id: &str| {
            arg(id).get_default_values().first().and_then(|value| value.to_str()).map(str::to_owned)
        };
        for (flag, value) in
            [("allow-vertex-ai", "true"), ("allow-http", "false"), ("allow-grpc", "false")]
        {
            assert_eq!(default(flag).as_deref(), Some(value), "{flag}");
        }
        for (flag, variable) in VARIABLES.map(|(variable, flag)| (flag, variable)) {
            assert_eq!(arg(flag).get_env(), Some(OsStr::new(variable)), "{flag}");
        }
    }
}
