//! Messages between a frontend and its fork servers: `python3 -m pharos_worker --fork-server
//! MODULES SPACE` or `pharos-worker --fork-server MODULES SPACE`, with a connected Unix
//! `SOCK_SEQPACKET` socket as the descriptor [`super::descriptors::SOCKET`]. Each message is one
//! packet of JSON.
//!
//! A fork server loads MODULES (names with commas in between), reports [`Report::Ready`], and then
//! starts a copy of itself for each request. The copy replaces its command line from
//! `--fork-server` on by the requested arguments; SPACE makes room for them. The fork server ends
//! when the socket is closed.

use std::io;

use serde::{Deserialize, Serialize};

/// The first argument of a fork server.
pub const FORK_SERVER: &str = "--fork-server";

/// The length in bytes of SPACE.
pub const SPACE: usize = 128;

/// The largest message in bytes.
pub const LARGEST: usize = 64 << 10;

/// The largest number of files of a request.
pub const MOST_FILES: usize = 16;

/// The module that makes a fork server load ONNX Runtime.
pub const ONNX_RUNTIME: &str = "onnxruntime";

/// Asks for a process. The packet carries its open files, in the order of `descriptors`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ForkRequest {
    /// The arguments of the process, after the arguments of the fork server.
    pub arguments: Vec<String>,
    /// The numbers that the files of the packet get in the process.
    pub descriptors: Vec<i32>,
    /// The processors to which the process is bound; empty for the processors of the fork server.
    pub processors: Vec<usize>,
    /// The names and values of its environment variables that differ from the fork server's.
    pub variables: Vec<(String, String)>,
}

impl ForkRequest {
    /// Returns the text of the message.
    ///
    /// # Errors
    /// It is longer than [`LARGEST`].
    pub fn encode(&self) -> io::Result<Vec<u8>> {
        let text = serde_json::to_vec(self)?;
        if text.len() > LARGEST {
            return Err(io::Error::other(format!(
                "a request of {} bytes exceeds {LARGEST} bytes",
                text.len()
            )));
        }
        Ok(text)
    }

    /// Parses a message.
    ///
    /// # Errors
    /// It is not a request.
    pub fn decode(text: &[u8]) -> io::Result<Self> {
        Ok(serde_json::from_slice(text)?)
    }
}

/// What a fork server reports.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Report {
    /// It has loaded its modules and accepts requests.
    Ready,
    /// The id of the process for the oldest unanswered request. The packet carries a descriptor of
    /// the process (pidfd).
    Forked(u32),
    /// Loaded files have changed since. It did not start a process, and will start no more.
    Stale,
    /// Why it cannot start a process.
    Failed(String),
    /// A process has ended.
    Ended {
        /// The id of the process.
        process: u32,
        /// Its status, as `waitpid` returns it.
        status: i32,
    },
}

impl Report {
    /// Returns the text of the message.
    ///
    /// # Errors
    /// It cannot be written as JSON.
    pub fn encode(&self) -> io::Result<Vec<u8>> {
        Ok(serde_json::to_vec(self)?)
    }

    /// Parses a message.
    ///
    /// # Errors
    /// It is not a report.
    pub fn decode(text: &[u8]) -> io::Result<Self> {
        Ok(serde_json::from_slice(text)?)
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn messages_have_the_forms_that_the_python_package_reads_and_writes() {
        let request = ForkRequest {
            arguments: vec!["m_0".to_owned()],
            descriptors: vec![3, 1],
            processors: Vec::new(),
            variables: vec![("A".to_owned(), "1".to_owned())],
        };
        let text =
            r#"{"arguments":["m_0"],"descriptors":[3,1],"processors":[],"variables":[["A","1"]]}"#;
        assert_eq!(request.encode().unwrap(), text.as_bytes());
        assert_eq!(ForkRequest::decode(text.as_bytes()).unwrap(), request);
        assert!(ForkRequest { arguments: vec!["m".repeat(LARGEST)], ..request }.encode().is_err());
        for (text, report) in [
            (r#""ready""#, Report::Ready),
            (r#"{"forked": 7}"#, Report::Forked(7)),
            (r#""stale""#, Report::Stale),
            (r#"{"failed": "why"}"#, Report::Failed("why".to_owned())),
            (r#"{"ended": {"process": 7, "status": 9}}"#, Report::Ended { process: 7, status: 9 }),
        ] {
            assert_eq!(Report::decode(text.as_bytes()).unwrap(), report);
            assert_eq!(report.encode().unwrap(), text.replace(' ', "").as_bytes());
        }
        assert!(Report::decode(b"{}").is_err());
    }
}
