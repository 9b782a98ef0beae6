//! The flags of OpenAI's API.

use clap::Args;
use pharos_edge::cors::Origins;

use super::values::{boolean, port};

const OPENAI: &str = "OpenAI's API";

/// OpenAI's API. The HTTP listener has it too.
#[derive(Clone, Debug, Args)]
pub struct OpenAi {
    /// Port of another listener with OpenAI's API, the health of the server and its metrics alone;
    /// its address and TLS are those of the HTTP listener
    #[arg(
        id = "openai-port", long = "openai-port", value_name = "PORT", env = "PHAROS_OPENAI_PORT",
        value_parser = port, help_heading = OPENAI
    )]
    pub port: Option<u16>,
    /// Origins whose pages may read answers over HTTP (CORS), separated by commas; * for all
    #[arg(
        id = "allowed-origins", long = "allowed-origins", value_name = "ORIGINS",
        env = "PHAROS_ALLOWED_ORIGINS", value_delimiter = ',', help_heading = OPENAI
    )]
    origins: Vec<String>,
    /// Serve /metrics on the HTTP port too, for routers that scrape the port of the API
    #[arg(
        id = "http-metrics", long = "http-metrics", value_name = "BOOL", default_value = "false",
        default_missing_value = "true", num_args = 0..=1, action = clap::ArgAction::Set,
        env = "PHAROS_HTTP_METRICS", value_parser = boolean, help_heading = OPENAI
    )]
    pub http_metrics: bool,
}

impl OpenAi {
    /// Returns the origins whose pages may read answers.
    ///
    /// # Errors
    /// A value is not an origin.
    pub fn origins(&self) -> Result<Origins, String> {
        Origins::parse(&self.origins).map_err(|why| format!("--allowed-origins: {why}"))
    }
}
