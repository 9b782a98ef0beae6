//! Adapts the parser to the program's name and to environment variables of other systems.

use std::ffi::{OsStr, OsString};
use std::path::Path;

use clap::Command;
use clap::builder::Resettable;

use super::{cloud, definition};

/// The program name that selects Triton's defaults.
const TRITONSERVER: &str = "tritonserver";

/// The command that takes repositories as arguments: `pharos serve PLACE... [OPTIONS]`.
const SERVE: &str = "serve";

/// Triton's defaults that differ from ours, by flag.
const TRITONS_DEFAULTS: [(&str, &str); 2] = [("metrics-port", "8002"), ("grpc-keepalive-time", "7200000")];

/// Environment variables of other systems, each with its equivalent flag; used if the flag's `PHAROS_` variable is not set.
const VARIABLES: [(&str, &str); 2] = [("AIP_STORAGE_URI", "model-repository"), ("AIP_HTTP_PORT", "vertex-ai-port")];

/// The input of the parser.
pub(super) struct Start {
    pub(super) command: Command,
    pub(super) args: Vec<OsString>,
    /// A message for each environment variable that is ignored.
    pub(super) ignored: Vec<String>,
}

impl Start {
    /// `args` begin with the program's name; `variable` looks up an environment variable.
    pub(super) fn new(command: Command, mut args: Vec<OsString>, variable: impl Fn(&str) -> Option<OsString>) -> Self {
        expand_serve(&mut args);
        let is_set = |name: &OsStr| name.to_str().and_then(&variable).is_some();
        let mut command = definition::with_torchserves_variables(command, is_set);
        for (name, flag) in VARIABLES {
            let value = variable(name).filter(|value| !value.is_empty());
            let own = format!("PHAROS_{}", flag.to_uppercase().replace('-', "_"));
            if value.is_some() && variable(&own).is_none() {
                command = command.mut_arg(flag, |arg| arg.env(name));
            }
        }
        command = cloud::with_vertex_ai_defaults(command, &variable);
        if is_tritonserver(&mut args) {
            command = TRITONS_DEFAULTS
                .iter()
                .fold(command, |command, (flag, value)| command.mut_arg(*flag, |arg| arg.default_value(*value)));
            // Triton uses getopt_long, which accepts unambiguous prefixes of flags.
            command = command.name(TRITONSERVER).bin_name(TRITONSERVER).infer_long_args(true);
        }
        let (command, ignored) = without_service_links(command, variable);
        Self { command, args, ignored }
    }
}

/// Replaces `serve PLACE...` by `--model-repository=PLACE...`, up to the first flag.
fn expand_serve(args: &mut Vec<OsString>) {
    if args.get(1).is_none_or(|first| first != SERVE) {
        return;
    }
    args.remove(1);
    for place in args.iter_mut().skip(1).take_while(|arg| !arg.as_encoded_bytes().starts_with(b"-")) {
        let mut flag = OsString::from("--model-repository=");
        flag.push(&*place);
        *place = flag;
    }
}

/// Returns whether the program's name or its first argument is `tritonserver`. Removes that argument.
fn is_tritonserver(args: &mut Vec<OsString>) -> bool {
    let program = args.first().and_then(|program| Path::new(program).file_name());
    let is_called_so = program == Some(OsStr::new(TRITONSERVER));
    let first = args.get(1).is_some_and(|first| first == TRITONSERVER);
    if first {
        args.remove(1);
    }
    first || is_called_so
}

/// Ignores variables that Kubernetes sets for Services: `NAME_PORT=tcp://ADDRESS:PORT` for each Service in the namespace of
/// a pod, which for a Service named `pharos-http` is the variable of `--http-port`.
fn without_service_links(mut command: Command, variable: impl Fn(&str) -> Option<OsString>) -> (Command, Vec<String>) {
    let mut ignored = Vec::new();
    let ports: Vec<(String, String)> = command
        .get_arguments()
        .filter(|arg| arg.get_id().as_str().ends_with("-port"))
        .filter_map(|arg| Some((arg.get_id().to_string(), arg.get_env()?.to_str()?.to_owned())))
        .collect();
    for (flag, name) in ports {
        let Some(value) = variable(&name).and_then(|value| value.into_string().ok()) else { continue };
        if ["tcp://", "udp://", "sctp://"].iter().any(|scheme| value.starts_with(scheme)) {
            let service = name.strip_suffix("_PORT").unwrap_or(&name).to_lowercase().replace('_', "-");
            ignored.push(format!(
                "{name}=\"{value}\" is ignored: it is the address that Kubernetes sets for a Service named {service}, not \
                 a value for --{flag}; set enableServiceLinks: false in the pod's specification to omit these variables"
            ));
            command = command.mut_arg(flag, |arg| arg.env(Resettable::<clap::builder::OsStr>::Reset));
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
            assert_eq!(Start::new(Options::command(), args, |_| None).args[1..], *expected, "{given:?}");
        };
        check(&["serve", "a.onnx"], &["--model-repository=a.onnx"]);
        check(&["serve", "a", "b", "--id", "c"], &["--model-repository=a", "--model-repository=b", "--id", "c"]);
        check(&["serve", "--id", "c"], &["--id", "c"]);
        check(&["serve"], &[]);
        check(&["--id", "serve"], &["--id", "serve"]);
        check(&["metrics", "serve"], &["metrics", "serve"]);
    }

    #[test]
    fn ignores_kubernetes_service_addresses() {
        let variable = |name: &str| match name {
            "PHAROS_HTTP_PORT" => Some("tcp://10.0.0.1:8000".into()),
            "PHAROS_GRPC_PORT" => Some("9001".into()),
            _ => None,
        };
        let Start { command, ignored, .. } = Start::new(Options::command(), vec!["pharos".into()], variable);
        let env = |id: &str| {
            let arg = command.get_arguments().find(|arg| arg.get_id() == id);
            arg.and_then(|arg| arg.get_env()).map(|env| env.to_string_lossy().into_owned())
        };
        assert_eq!((env("http-port"), env("grpc-port")), (None, Some("PHAROS_GRPC_PORT".to_owned())));
        assert_eq!(ignored.len(), 1, "{ignored:?}");
        let text = "PHAROS_HTTP_PORT=\"tcp://10.0.0.1:8000\" is ignored: it is the address that Kubernetes sets for a \
                    Service named pharos-http, not a value for --http-port";
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
        let arg = |id: &str| command.get_arguments().find(|arg| arg.get_id() == id).cloned().unwrap_or_default();
        let default =
            |id: &str| arg(id).get_default_values().first().and_then(|value| value.to_str()).map(str::to_owned);
        for (flag, value) in [("allow-vertex-ai", "true"), ("allow-http", "false"), ("allow-grpc", "false")] {
            assert_eq!(default(flag).as_deref(), Some(value), "{flag}");
        }
        for (flag, variable) in VARIABLES.map(|(variable, flag)| (flag, variable)) {
            assert_eq!(arg(flag).get_env(), Some(OsStr::new(variable)), "{flag}");
        }
    }
}
