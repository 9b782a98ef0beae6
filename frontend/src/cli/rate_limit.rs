//! The flags of the rate limiter.

use clap::Args;
use pharos::scheduler::rate_limiter::Limit;

const RATE_LIMITER: &str = "Rate limiter";

/// The rate limiter.
#[derive(Clone, Debug, Args)]
pub struct RateLimiter {
    /// Rate limiter: off, or execution_count (an instance executes only while it holds the
    /// resources of its rate_limiter)
    #[arg(
        id = "rate-limit", long = "rate-limit", value_name = "MODE", default_value = "off",
        env = "PHAROS_RATE_LIMIT", value_parser = mode, help_heading = RATE_LIMITER
    )]
    pub mode: RateLimit,
    /// Available amount of a resource: NAME:COUNT for each device and for a global resource, or
    /// NAME:COUNT:DEVICE. May be repeated, or given as a list separated by ';' [default: the
    /// largest amount that a single instance requires]
    #[arg(
        id = "rate-limit-resource", long = "rate-limit-resource",
        value_name = "NAME:COUNT[:DEVICE]", env = "PHAROS_RATE_LIMIT_RESOURCE",
        value_parser = resource, value_delimiter = ';', help_heading = RATE_LIMITER
    )]
    pub resources: Vec<Limit>,
}

impl RateLimiter {
    /// Returns the explicit limits; `None` if the rate limiter is off.
    pub fn limits(&self) -> Option<Vec<Limit>> {
        (self.mode == RateLimit::ExecutionCount).then(|| self.resources.clone())
    }
}

/// The mode of the rate limiter.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RateLimit {
    /// Idle instances execute at once.
    Off,
    /// Instances wait for resources; those with fewer executions take precedence.
    ExecutionCount,
}

fn mode(text: &str) -> Result<RateLimit, String> {
    match text.to_ascii_lowercase().as_str() {
        "off" => Ok(RateLimit::Off),
        "execution_count" => Ok(RateLimit::ExecutionCount),
        _ => {
            Err("invalid argument for --rate-limit; allowed are off and execution_count".to_owned())
        }
    }
}

/// Parses a resource in Triton's form, with Triton's error text. Unlike Triton, refuses negative
/// numbers and empty names.
fn resource(text: &str) -> Result<Limit, String> {
    let form = || {
        format!(
            "--rate-limit-resource option format is '<resource_name>:<count>:<device>' or \
             '<resource_name>:<count>'. Got {text}"
        )
    };
    let number = |part: &str| {
        part.parse::<u32>().map_err(|_| {
            format!("{}; count and device are whole numbers from 0 to {}", form(), u32::MAX)
        })
    };
    let parts: Vec<&str> = text.split(':').collect();
    match parts.as_slice() {
        ["", ..] => Err(form()),
        [name, count] => {
            Ok(Limit { name: (*name).to_owned(), count: number(count)?, device: None })
        }
        [name, count, device] => Ok(Limit {
            name: (*name).to_owned(),
            count: number(count)?,
            device: Some(number(device)?),
        }),
        _ => Err(form()),
    }
}
