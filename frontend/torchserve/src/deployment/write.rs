//! Writes the engine's configuration of a deployment into the private repository.

use std::fmt::Write as _;
use std::fs;
use std::io;
use std::os::unix::fs::symlink;
use std::path::Path;

use pharos::model::CodeOrigin;

use super::{Deployment, Device};
use crate::model_policy::{BY_REQUEST, ORIGIN};

pub(super) fn write(deployment: &Deployment, repository: &Path) -> io::Result<()> {
    let directory = repository.join(&deployment.name);
    fs::create_dir_all(&directory)?;
    let version = directory.join("1");
    let files = deployment.archive.directory.path().canonicalize()?;
    if fs::read_link(&version).ok().as_deref() != Some(&files) {
        match fs::remove_file(&version) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
            _ => symlink(&files, &version)?,
        }
    }
    // Rename, so that a concurrent load reads either the old text or the new one.
    let part = directory.join("config.pbtxt.part");
    fs::write(&part, text(deployment))?;
    fs::rename(&part, directory.join("config.pbtxt"))
}

/// Returns the text of `config.pbtxt`.
fn text(deployment: &Deployment) -> String {
    let mut text = String::new();
    let mut line = |line: String| {
        text.push_str(&line);
        text.push('\n');
    };
    line(format!("name: {}", quoted(&deployment.name)));
    line("backend: \"torchserve\"".to_owned());
    line(format!("max_batch_size: {}", max_batch_size(deployment)));
    line("input { name: \"data\" data_type: TYPE_STRING dims: 1 }".to_owned());
    line("output { name: \"prediction\" data_type: TYPE_STRING dims: 1 }".to_owned());
    line(scheduling(deployment));
    instances(deployment).into_iter().for_each(&mut line);
    if deployment.streaming || deployment.continuous {
        line("model_transaction_policy { decoupled: true }".to_owned());
    }
    for (key, value) in parameters(deployment) {
        line(format!(
            "parameters {{ key: \"torchserve_{key}\" value {{ string_value: {} }} }}",
            quoted(&value)
        ));
    }
    if deployment.archive.origin == CodeOrigin::Request {
        line(format!(
            "parameters {{ key: \"{ORIGIN}\" value {{ string_value: \"{BY_REQUEST}\" }} }}"
        ));
    }
    text
}

/// Returns the largest batch that a handler gets. As in TorchServe, this is twice the batch size
/// for continuous batching of sequences, so that a running stream leaves room for the next request
/// of its sequence.
fn max_batch_size(deployment: &Deployment) -> u32 {
    match deployment.overlaps() {
        true => deployment.batch_size.saturating_mul(2),
        false => deployment.batch_size,
    }
}

fn scheduling(deployment: &Deployment) -> String {
    let delay = u64::from(deployment.max_batch_delay) * 1000;
    let queue = deployment.queue;
    match deployment.sequence {
        // Each request is a sequence that the runner executes repeatedly.
        None if deployment.continuous => format!(
            "sequence_batching {{ iterative_sequence: true oldest {{ max_candidate_sequences: {} \
             }} }}",
            deployment.batch_size
        ),
        None => {
            // A batch of one request does not wait for others.
            let wait = if deployment.batch_size > 1 { delay } else { 0 };
            let timeout = u64::from(deployment.client_timeout) * 1000;
            let limit = match timeout {
                0 => String::new(),
                _ => format!(
                    " timeout_action: REJECT default_timeout_microseconds: {timeout} \
                     allow_timeout_override: true"
                ),
            };
            format!(
                "dynamic_batching {{ max_queue_delay_microseconds: {wait} default_queue_policy {{ \
                 max_queue_size: {queue}{limit} }} }}"
            )
        }
        Some(sequence) => {
            let idle = match sequence.max_idle {
                // No limit: use a year.
                0 => 365 * 24 * 3_600_000_000,
                milliseconds => u64::from(milliseconds) * 1000,
            };
            // As in TorchServe, a sequence needs no START request, and is refused if no slot is
            // free.
            let parameter = |key: &str, value: &str| {
                format!("\nparameters {{ key: \"{key}\" value {{ string_value: \"{value}\" }} }}")
            };
            // A request joins a running batch, so the first one need not wait for others.
            let (kind, delay, overlap) = match deployment.continuous {
                true => {
                    ("iterative_sequence: true ", 0, parameter("overlapping_sequences", "true"))
                }
                false => ("", delay, String::new()),
            };
            format!(
                "sequence_batching {{ {kind}max_sequence_idle_microseconds: {idle} oldest {{ \
                 max_candidate_sequences: {} max_queue_delay_microseconds: {delay} }} \
                 }}{overlap}{}{}{}",
                sequence.most.max(deployment.batch_size),
                parameter("implicit_sequence_start", "true"),
                parameter("max_queued_sequences", "none"),
                parameter("max_queue_size_per_sequence", &sequence.queue.to_string()),
            )
        }
    }
}

/// Returns one instance group for each device; workers are distributed over the devices in turn.
fn instances(deployment: &Deployment) -> Vec<String> {
    let workers = deployment.min_workers.max(1);
    match &deployment.device {
        Device::Cpu => vec![format!("instance_group {{ count: {workers} kind: KIND_CPU }}")],
        Device::Gpu(ids) => {
            let devices = u32::try_from(ids.len()).unwrap_or(1).max(1);
            let mut groups = Vec::new();
            for (id, place) in ids.iter().zip(0..) {
                let count = workers / devices + u32::from(place < workers % devices);
                if count > 0 {
                    groups.push(format!(
                        "instance_group {{ count: {count} kind: KIND_GPU gpus: {id} }}"
                    ));
                }
            }
            groups
        }
    }
}

fn parameters(deployment: &Deployment) -> Vec<(&'static str, String)> {
    let mut all = vec![
        ("handler", deployment.handler.clone()),
        ("model_name", deployment.model_name.clone()),
        ("model_version", deployment.archive.version.clone()),
        ("batch_size", deployment.batch_size.to_string()),
        ("envelope", deployment.envelope.clone().unwrap_or_default()),
        ("limit_max_image_pixels", deployment.limit_max_image_pixels.to_string()),
        ("decode_input_request", deployment.decode_input_request.to_string()),
        ("model_yaml", deployment.archive.yaml.whole.to_string()),
        ("response_timeout", deployment.response_timeout.to_string()),
        ("startup_timeout", deployment.startup_timeout.to_string()),
        ("max_retry_timeout", deployment.max_retry_timeout.to_string()),
    ];
    if let Some(packages) = &deployment.archive.packages {
        let path = packages.path();
        let whole = path.canonicalize().unwrap_or_else(|_| path.to_owned());
        all.push(("packages", whole.to_string_lossy().into_owned()));
    }
    all
}

/// Quotes a string for the protobuf text format.
fn quoted(text: &str) -> String {
    let mut quoted = String::from("\"");
    for c in text.chars() {
        match c {
            '"' | '\\' => quoted.extend(['\\', c]),
            '\n' => quoted.push_str("\\n"),
            '\r' => quoted.push_str("\\r"),
            '\t' => quoted.push_str("\\t"),
            c if (c as u32) < 0x20 || c as u32 == 0x7f => {
                let _ = write!(quoted, "\\{:03o}", c as u32);
            }
            c => quoted.push(c),
        }
    }
    quoted.push('"');
    quoted
}
