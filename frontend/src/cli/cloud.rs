//! The flags of the Amazon SageMaker and Google Vertex AI endpoints, with Triton's names and
//! defaults.

use std::ffi::OsString;
use std::net::IpAddr;
use std::ops::RangeInclusive;

use clap::{ArgAction, Args, Command};

use super::{Options, boolean, port, whole};

const SAGEMAKER: &str = "SageMaker";
const VERTEX_AI: &str = "Vertex AI";

/// The endpoints of Amazon SageMaker.
#[derive(Clone, Debug, Args)]
pub struct SageMaker {
    /// Enable the SageMaker endpoints
    #[arg(
        id = "allow-sagemaker", long = "allow-sagemaker", value_name = "BOOL",
        default_value = "false", default_missing_value = "true", num_args = 0..=1,
        action = ArgAction::Set, env = "PHAROS_ALLOW_SAGEMAKER", value_parser = boolean,
        help_heading = SAGEMAKER
    )]
    pub allow: bool,
    /// Port of the SageMaker endpoints
    #[arg(
        id = "sagemaker-port", long = "sagemaker-port", value_name = "PORT", default_value = "8080",
        env = "PHAROS_SAGEMAKER_PORT", value_parser = port, help_heading = SAGEMAKER
    )]
    pub port: u16,
    /// Port range that the other listeners must use if the SageMaker endpoints are enabled
    #[arg(
        id = "sagemaker-safe-port-range", long = "sagemaker-safe-port-range",
        value_name = "FIRST-LAST", env = "PHAROS_SAGEMAKER_SAFE_PORT_RANGE",
        value_parser = port_range, help_heading = SAGEMAKER
    )]
    pub safe_port_range: Option<RangeInclusive<u16>>,
    /// Accepted, no effect: all listeners share the threads of --http-thread-count
    #[arg(
        id = "sagemaker-thread-count", long = "sagemaker-thread-count", value_name = "N",
        env = "PHAROS_SAGEMAKER_THREAD_COUNT", value_parser = whole(0..=u32::MAX),
        help_heading = SAGEMAKER
    )]
    threads: Option<u32>,
}

/// The endpoints of Google Vertex AI.
#[derive(Clone, Debug, Args)]
pub struct VertexAi {
    /// Enable the Vertex AI endpoints [default: true if AIP_MODE is PREDICTION, which also
    /// disables HTTP and gRPC by default]
    #[arg(
        id = "allow-vertex-ai", long = "allow-vertex-ai", value_name = "BOOL",
        default_value = "false", default_missing_value = "true", num_args = 0..=1,
        action = ArgAction::Set, env = "PHAROS_ALLOW_VERTEX_AI", value_parser = boolean,
        hide_default_value = true, help_heading = VERTEX_AI
    )]
    pub allow: bool,
    /// Port of the Vertex AI endpoints [default: AIP_HTTP_PORT, else 8080]
    #[arg(
        id = "vertex-ai-port", long = "vertex-ai-port", value_name = "PORT", default_value = "8080",
        env = "PHAROS_VERTEX_AI_PORT", value_parser = port, hide_default_value = true,
        help_heading = VERTEX_AI
    )]
    pub port: u16,
    /// Model for Vertex AI requests without a model name [default: the only model, if there is
    /// exactly one]
    #[arg(
        id = "vertex-ai-default-model", long = "vertex-ai-default-model", value_name = "NAME",
        env = "PHAROS_VERTEX_AI_DEFAULT_MODEL", help_heading = VERTEX_AI
    )]
    pub default_model: Option<String>,
    /// Accepted, no effect: all listeners share the threads of --http-thread-count
    #[arg(
        id = "vertex-ai-thread-count", long = "vertex-ai-thread-count", value_name = "N",
        env = "PHAROS_VERTEX_AI_THREAD_COUNT", value_parser = whole(0..=u32::MAX),
        help_heading = VERTEX_AI
    )]
    threads: Option<u32>,
}

/// Applies the defaults of a Vertex AI container, in which `AIP_MODE` is `PREDICTION`.
pub(super) fn with_vertex_ai_defaults(
    parser: Command,
    variable: impl Fn(&str) -> Option<OsString>,
) -> Command {
    if variable("AIP_MODE").is_none_or(|mode| mode != "PREDICTION") {
        return parser;
    }
    let defaults = [("allow-vertex-ai", "true"), ("allow-http", "false"), ("allow-grpc", "false")];
    defaults.iter().fold(parser, |parser, (flag, value)| {
        parser.mut_arg(*flag, |arg| arg.default_value(*value))
    })
}

/// Returns the given flags that have no effect, each with the reason.
pub(super) fn without_effect(options: &Options) -> Vec<String> {
    let platforms =
        [("sagemaker", options.sagemaker.threads), ("vertex-ai", options.vertex_ai.threads)];
    let given = platforms.iter().filter(|(_, threads)| threads.is_some());
    let why = "has no effect: all listeners share the threads of --http-thread-count";
    given.map(|(platform, _)| format!("--{platform}-thread-count {why}")).collect()
}

/// Checks that all ports are within the range that SageMaker allows. The error text is Triton's.
pub(super) fn check(options: &Options) -> Result<(), String> {
    let Some(range) =
        options.sagemaker.safe_port_range.as_ref().filter(|_| options.sagemaker.allow)
    else {
        return Ok(());
    };
    let metrics = options.metrics_address();
    let any = IpAddr::from([0, 0, 0, 0]);
    let listeners = [
        ("HTTP", "--http-port", options.http.allow, options.http.address, options.http.port),
        ("GRPC", "--grpc-port", options.grpc.allow, options.grpc.address, options.grpc.port),
        ("metrics", "--metrics-port", options.metrics.allow, metrics, options.metrics.port),
        ("Vertex AI", "--vertex-ai-port", options.vertex_ai.allow, any, options.vertex_ai.port),
        (
            "OpenAI",
            "--openai-port",
            options.openai.port.is_some(),
            options.http.address,
            options.openai.port.unwrap_or_default(),
        ),
    ];
    for (name, flag, allow, address, port) in listeners {
        if allow && address.is_unspecified() && !range.contains(&port) {
            return Err(format!(
                "The server cannot listen to {name} requests at port {port}, allowed port range \
                 is [{}, {}] ({flag}, --sagemaker-safe-port-range)",
                range.start(),
                range.end()
            ));
        }
    }
    Ok(())
}

fn port_range(text: &str) -> Result<RangeInclusive<u16>, String> {
    let form = "expected FIRST-LAST with two ports from 0 to 65535, for example 9000-9100";
    let (first, last) = text.split_once('-').ok_or(form)?;
    let ports = first.parse::<u16>().ok().zip(last.parse::<u16>().ok());
    let (first, last) = ports.filter(|(first, last)| first <= last).ok_or(form)?;
    Ok(first..=last)
}
