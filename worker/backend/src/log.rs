//! Lines of the log of the server that a library of a backend writes.

use std::io::Write;

/// Writes the lines of a text to the server's log. `level` is `V`, `I`, `W` or `E`. Each line goes to
/// standard error, after the character RS and the letter of its level, which the server removes.
pub fn log(level: char, text: &str) {
    let lines: String = text.lines().map(|line| format!("\u{1e}{level}{line}\n")).collect();
    // An error means that the stream is closed, so it cannot be reported.
    let _ = std::io::stderr().lock().write_all(lines.as_bytes());
}
