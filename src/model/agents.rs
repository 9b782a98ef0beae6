//! Repository agents (`model_repository_agents`). The only supported agent is `checksum`, with
//! Triton's parameters: the key `MD5:FILE` names a file in the model's directory, the value is its
//! sum in hexadecimal digits. Anything else is refused.

use super::{ConfigError, proto};

/// The checksum that a file must have.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Checksum {
    /// The file's path, relative to the model's directory and inside it.
    pub file: String,
    /// Its MD5 sum: 32 hexadecimal digits in lower case.
    pub md5: String,
}

/// Returns the checksums that a configuration requires, sorted by file name.
pub(super) fn of(config: &proto::ModelConfig) -> Result<Vec<Checksum>, ConfigError> {
    let mut all = Vec::new();
    for agent in config.model_repository_agents.iter().flat_map(|agents| &agents.agents) {
        if agent.name != "checksum" {
            return Err(ConfigError::new(format!(
                "repository agent '{}' is not known; allowed is checksum",
                agent.name
            )));
        }
        for (key, sum) in &agent.parameters {
            all.push(
                checksum(key, sum)
                    .map_err(|why| ConfigError::new(format!("repository agent checksum: {why}")))?,
            );
        }
    }
    all.sort_unstable_by(|one, other| one.file.cmp(&other.file));
    Ok(all)
}

fn checksum(key: &str, sum: &str) -> Result<Checksum, String> {
    let file = match key.split_once(':') {
        Some(("MD5", file)) => file,
        _ => {
            return Err(format!(
                "parameter '{key}' is not supported; allowed are MD5:FILE with a file's MD5 sum"
            ));
        }
    };
    let leaves = file.is_empty()
        || file.starts_with('/')
        || file.contains('\0')
        || file.split('/').any(|part| part == "..");
    if leaves {
        return Err(format!("'{}' must name a file in the model's directory", key.escape_debug()));
    }
    let md5 = sum.trim().to_ascii_lowercase();
    if md5.len() != 32 || !md5.bytes().all(|byte| byte.is_ascii_hexdigit()) {
        return Err(format!(
            "'{sum}' is not an MD5 sum for '{file}': expected 32 hexadecimal digits"
        ));
    }
    Ok(Checksum { file: file.to_owned(), md5 })
}
