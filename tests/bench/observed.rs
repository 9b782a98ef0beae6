//! The server with everything that can observe requests switched on, and the collector that it
//! pushes to.

use std::fs;
use std::io::{self, BufRead, BufReader, Read, Write};
use std::net::{Ipv4Addr, TcpListener, TcpStream};
use std::path::Path;
use std::process::Command;

use crate::models::Scratch;
use crate::workload::TENANT_HEADER;

/// Native buckets for each histogram, tenants, and objectives.
fn definition() -> io::Result<String> {
    let shipped =
        fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join("../metrics.yaml"))?;
    let mut text = String::with_capacity(shipped.len() * 2);
    let mut lines = shipped.lines().peekable();
    while let Some(line) = lines.next() {
        text.push_str(line);
        text.push('\n');
        let has_native = lines.peek().is_some_and(|next| next.trim_start().starts_with("native:"));
        if line.starts_with("      buckets:") && !has_native {
            text.push_str("      native: true\n");
        }
    }
    text.push_str(&format!("tenants: {{header: {TENANT_HEADER}}}\n"));
    text.push_str(
        "slos: [{name: all, latency: {threshold: 1ms, share: 99%}, availability: 99.9%}]\n",
    );
    Ok(text)
}

/// Adds the options: all metrics, times in every answer, and a push each second. Metric lines are
/// not among them: another thread writes them.
pub(crate) fn switch_on(command: &mut Command, scratch: &Scratch) -> io::Result<()> {
    let file = scratch.path("observed-metrics.yaml");
    fs::write(&file, definition()?)?;
    command
        .arg("--metrics-config")
        .arg(file)
        .arg("--metrics-config=histogram_latencies=true;summary_latencies=true");
    command.args(["--metrics-mode=prometheus", "--response-timing=always"]);
    command.arg(format!("--otlp-metrics-endpoint=http://127.0.0.1:{}", collector()?));
    command.env("OTEL_METRIC_EXPORT_INTERVAL", "1000");
    Ok(())
}

/// Starts a collector that accepts every export until this process ends, and returns its port.
fn collector() -> io::Result<u16> {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?;
    let port = listener.local_addr()?.port();
    std::thread::spawn(move || {
        for connection in listener.incoming().flatten() {
            std::thread::spawn(move || accept(connection));
        }
    });
    Ok(port)
}

/// Answers the requests of a connection. An empty body is the message that everything was accepted.
fn accept(mut connection: TcpStream) -> io::Result<()> {
    let mut reader = BufReader::new(connection.try_clone()?);
    loop {
        let mut length = 0;
        loop {
            let mut line = String::new();
            if reader.read_line(&mut line)? == 0 {
                return Ok(());
            }
            if line.trim_end().is_empty() {
                break;
            }
            let (name, value) = line.split_once(':').unwrap_or_default();
            if name.eq_ignore_ascii_case("content-length") {
                length = value.trim().parse().unwrap_or_default();
            }
        }
        io::copy(&mut reader.by_ref().take(length), &mut io::sink())?;
        connection.write_all(
            b"HTTP/1.1 200 OK\r\ncontent-type: application/x-protobuf\r\ncontent-length: 0\r\n\r\n",
        )?;
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn the_definition_has_native_buckets_for_every_histogram() {
        let text = definition().unwrap();
        let count = |part: &str| text.matches(part).count();
        assert_eq!(count("\n      buckets:"), count("\n      native: true"));
        assert!(count("\n      buckets:") > 10 && count("\ntenants:") == 1);
    }

    #[test]
    fn the_collector_accepts_exports_on_one_connection() {
        let mut connection =
            TcpStream::connect((Ipv4Addr::LOCALHOST, collector().unwrap())).unwrap();
        let mut reader = BufReader::new(connection.try_clone().unwrap());
        for _ in 0..2 {
            connection
                .write_all(b"POST /v1/metrics HTTP/1.1\r\nContent-Length: 3\r\n\r\nabc")
                .unwrap();
            let lines: Vec<String> = reader
                .by_ref()
                .lines()
                .map_while(Result::ok)
                .take_while(|line| !line.is_empty())
                .collect();
            assert_eq!(lines[0], "HTTP/1.1 200 OK");
        }
    }
}
