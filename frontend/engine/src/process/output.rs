//! Forwards the output of processes: metric lines into the metrics, other lines into the log.

use std::io;
use std::sync::Arc;

use pharos::metrics::cache::Cache;
use pharos::metrics::series::ModelSeries;
use pharos::metrics::{intake, worker_lines};
use tokio::io::{AsyncBufRead, AsyncBufReadExt, AsyncRead, AsyncReadExt, BufReader};
use tokio::task::JoinHandle;
use tracing::Level;

use pharos_telemetry::metrics::RefusedLinesLog;

/// The longest log line of a worker; a longer line is split.
const MAX_LINE: u64 = 8 << 10;

/// The destination of a worker's output.
pub(crate) struct Printed {
    /// The name of the worker in the log.
    pub(crate) name: String,
    /// The metrics cache and the model's series, for metric lines.
    pub(crate) cache: Arc<Cache>,
    pub(crate) series: Arc<ModelSeries>,
}

/// Forwards standard output until it ends: metric lines into the metrics as soon as they are read,
/// other lines to the log.
pub(super) fn forward_output(stream: impl AsyncRead + Unpin + Send + 'static, printed: Printed) {
    tokio::spawn(async move {
        let instance = &printed.name;
        let mut refused = RefusedLinesLog::new(format!("the output of {instance}"));
        let mut reader = BufReader::new(stream);
        let mut line = Vec::new();
        while let Ok(true) = next_line(&mut reader, &mut line).await {
            match worker_lines::strip(&line) {
                Some(body) => {
                    if let Err(refusal) = intake::stdout_line(&printed.cache, &printed.series, body)
                    {
                        refused.report(line.trim_ascii_end(), &refusal);
                    }
                }
                None => {
                    let text = String::from_utf8_lossy(&line);
                    tracing::info!(target: "worker", %instance, "{}", text.trim_end());
                }
            }
        }
    });
}

/// Forwards standard error to the log until it ends. Unmarked lines are warnings.
pub(super) fn forward_errors(stream: impl AsyncRead + Unpin + Send + 'static, instance: &str) {
    let instance = instance.to_owned();
    let stderr = "stderr";
    each_line(stream, move |level, text| match level {
        Some(Level::ERROR) => {
            tracing::error!(target: "worker", %instance, stream = stderr, "{text}")
        }
        Some(Level::INFO) => tracing::info!(target: "worker", %instance, stream = stderr, "{text}"),
        Some(Level::DEBUG) => {
            tracing::debug!(target: "worker", %instance, stream = stderr, "{text}")
        }
        _ => tracing::warn!(target: "worker", %instance, stream = stderr, "{text}"),
    });
}

/// Visits each line of a stream until it ends: its level, if it is marked, and its text without the
/// mark. A line of more than 8 KiB is split.
pub(super) fn each_line(
    stream: impl AsyncRead + Unpin + Send + 'static,
    mut visit: impl FnMut(Option<Level>, &str) + Send + 'static,
) -> JoinHandle<()> {
    tokio::spawn(async move {
        let mut reader = BufReader::new(stream);
        let mut line = Vec::new();
        while let Ok(true) = read_line(&mut reader, &mut line).await {
            let text = String::from_utf8_lossy(&line);
            let (level, text) = leveled(text.trim_end());
            visit(level, text);
        }
    })
}

/// Returns the level of a line, if it is marked, and the line without its mark. The mark is the
/// character RS and a letter, which `pb_utils.Logger` writes.
fn leveled(line: &str) -> (Option<Level>, &str) {
    let marked = line.strip_prefix('\u{1e}').unwrap_or_default();
    let levels = [('I', Level::INFO), ('W', Level::WARN), ('E', Level::ERROR), ('V', Level::DEBUG)];
    let known = levels
        .into_iter()
        .find_map(|(letter, level)| Some((Some(level), marked.strip_prefix(letter)?)));
    known.unwrap_or((None, line))
}

/// Reads a line of at most [`MAX_LINE`] bytes; returns `false` at the end of the stream.
async fn read_line(
    reader: &mut (impl AsyncBufRead + Unpin),
    line: &mut Vec<u8>,
) -> io::Result<bool> {
    line.clear();
    Ok(reader.take(MAX_LINE).read_until(b'\n', line).await? > 0)
}

/// Like [`read_line`], but allows metric lines of up to [`intake::MAX_LINE`] bytes; drops the rest
/// of a longer line.
async fn next_line(
    reader: &mut (impl AsyncBufRead + Unpin),
    line: &mut Vec<u8>,
) -> io::Result<bool> {
    if !read_line(reader, line).await? {
        return Ok(false);
    }
    if !line.ends_with(b"\n") && worker_lines::strip(line).is_some() {
        let more = intake::MAX_LINE.saturating_sub(line.len()) as u64;
        reader.take(more).read_until(b'\n', line).await?;
        let mut rest = Vec::new();
        while line.len() >= intake::MAX_LINE && !line.ends_with(b"\n") && !rest.ends_with(b"\n") {
            if !read_line(reader, &mut rest).await? {
                break;
            }
        }
    }
    Ok(true)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn a_line_may_contain_its_level() {
        let marked = |text: &str| {
            let (level, text) = leveled(text);
            format!("{} {text}", level.map_or("-", |level| level.as_str()))
        };
        for (line, expected) in [
            ("plain", "- plain"),
            ("\u{1e}Im.py:3] a", "INFO m.py:3] a"),
            ("\u{1e}Wa", "WARN a"),
            ("\u{1e}E", "ERROR "),
            ("\u{1e}Vx", "DEBUG x"),
            ("\u{1e}Qx", "- \u{1e}Qx"),
            ("\u{1e}", "- \u{1e}"),
        ] {
            assert_eq!(marked(line), expected);
        }
    }

    #[tokio::test]
    async fn metric_lines_may_be_longer_than_others() {
        let ids = |bytes: usize| format!("[METRICS]a.ms:1|#|#hostname:h,1,{}\n", "i".repeat(bytes));
        let fits = ids(60 << 10);
        let long = ids(70 << 10);
        let plain = "x".repeat(10 << 10) + "\n";
        let text = [plain.as_str(), &fits, &long, "after\n", "[METRICS]cut"].concat();
        let mut reader = BufReader::new(text.as_bytes());
        let mut line = Vec::new();
        let mut lines = Vec::new();
        while next_line(&mut reader, &mut line).await.unwrap() {
            lines.push(String::from_utf8(line.clone()).unwrap());
        }
        let lengths: Vec<usize> = lines.iter().map(String::len).collect();
        assert_eq!(lengths, [8 << 10, (2 << 10) + 1, fits.len(), intake::MAX_LINE, 6, 12]);
        let cut: Vec<bool> = lines.iter().map(|line| line.ends_with('\n')).collect();
        assert_eq!(cut, [false, true, true, false, true, false]);
    }
}
