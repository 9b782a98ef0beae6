//! The flags of the rate limiter.

use clap::Args;
use pharos::scheduler::rate_limiter::Limit;

const RATE_LIMITER: &str = "Rate limiter";

/// How instances share resources.
#[derive(Clone, Debug, Args)]
pub struct RateLimiter {
    /// Let an instance execute only while it holds the resources of its group's rate_limiter: off or execution_count
    #[arg(id = "rate-limit", long = "rate-limit", value_name = "MODE", default_value = "off", env = "PHAROS_RATE_LIMIT", value_parser = mode, help_heading = RATE_LIMITER)]
    pub mode: RateLimit,
    /// How much there is of a resource: NAME:COUNT on each device (and of a global one), or NAME:COUNT:DEVICE; may be given
    /// several times, or several separated by ';' [default: the most that a single instance needs]
    #[arg(id = "rate-limit-resource", long = "rate-limit-resource", value_name = "NAME:COUNT[:DEVICE]", env = "PHAROS_RATE_LIMIT_RESOURCE", value_parser = resource, value_delimiter = ';', help_heading = RATE_LIMITER)]
    pub resources: Vec<Limit>,
}

impl RateLimiter {
    /// The explicit limits; `None` when there is no rate limiter.
    pub fn limits(&self) -> Option<Vec<Limit>> {
        (self.mode == RateLimit::ExecutionCount).then(|| self.resources.clone())
    }
}

/// Whether instances wait for resources.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RateLimit {
    /// An idle instance executes.
    Off,
    /// Instances wait for resources, and who has executed less is served first.
    ExecutionCount,
}

fn mode(text: &str) -> Result<RateLimit, String> {
    match text.to_ascii_lowercase().as_str() {
        "off" => Ok(RateLimit::Off),
        "execution_count" => Ok(RateLimit::ExecutionCount),
        _ => Err("invalid argument for --rate-limit; allowed are off and execution_count".to_owned()),
    }
}

/// Triton's form and text. It takes any integers and an empty name; here what can mean nothing is refused.
fn resource(text: &str) -> Result<Limit, String> {
    let form = || {
        format!(
            "--rate-limit-resource option format is '<resource_name>:<count>:<device>' or '<resource_name>:<count>'. Got \
             {text}"
        )
    };
    let number = |part: &str| {
        let wrong = |_| format!("{}; count and device are whole numbers from 0 to {}", form(), u32::MAX);
        part.parse::<u32>().map_err(wrong)
    };
    let parts: Vec<&str> = text.split(':').collect();
    match parts.as_slice() {
        ["", ..] => Err(form()),
        [name, count] => Ok(Limit { name: (*name).to_owned(), count: number(count)?, device: None }),
        [name, count, device] => {
            Ok(Limit { name: (*name).to_owned(), count: number(count)?, device: Some(number(device)?) })
        }
        _ => Err(form()),
    }
}
