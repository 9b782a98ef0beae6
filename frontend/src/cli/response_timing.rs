//! The flags of the times in answers.

use clap::Args;
use pharos_edge::response_timing::{Mode, ResponseTiming};

use super::{GENERAL, whole};

/// The times of requests in their answers.
#[derive(Clone, Debug, Args)]
pub struct ResponseTimes {
    /// Send the times of a successful inference request with its answer (the header Server-Timing, or metadata over gRPC):
    /// always, on-request (to clients that send request-timing: true), or off
    #[arg(id = "response-timing", long = "response-timing", value_name = "WHEN", default_value = "on-request", env = "PHAROS_RESPONSE_TIMING", value_parser = mode, help_heading = GENERAL)]
    mode: Mode,
    /// With --response-timing=always, send times with one of N answers, and to all clients that request them
    #[arg(id = "response-timing-rate", long = "response-timing-rate", value_name = "N", default_value_t = 1, env = "PHAROS_RESPONSE_TIMING_RATE", value_parser = whole(1..=u32::MAX), help_heading = GENERAL)]
    rate: u32,
}

impl ResponseTimes {
    /// Returns the setting, which all listeners share.
    pub fn setting(&self) -> ResponseTiming {
        ResponseTiming::new(self.mode, self.rate)
    }
}

fn mode(text: &str) -> Result<Mode, String> {
    match text.to_ascii_lowercase().as_str() {
        "always" => Ok(Mode::Always),
        "on-request" => Ok(Mode::OnRequest),
        "off" => Ok(Mode::Off),
        _ => Err("allowed are always, on-request and off".to_owned()),
    }
}
