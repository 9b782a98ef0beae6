//! Lists and describes models, with TorchServe's keys in their order.

use jiff::Timestamp;
use pharos::metrics::labels::InstanceState;
use pharos::service::{GpuUsage, WorkerStatus};
use serde::Serialize;
use serde_json::Value;

use super::{Registry, Version};
use crate::{Deployment, Device, ModelParameters};

/// An entry of the list of models.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Listed {
    /// The model's name.
    pub model_name: String,
    /// The archive of the default version.
    pub model_url: String,
}

/// A page of the list of models.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Listing {
    /// The start of the next page.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub next_page_token: Option<String>,
    /// The models of this page.
    pub models: Vec<Listed>,
}

/// The description of a version.
#[derive(Clone, Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct ModelDescription {
    model_name: String,
    model_version: String,
    model_url: String,
    runtime: String,
    #[serde(flatten)]
    model: ModelParameters,
    max_retry_timeout_in_sec: u32,
    client_timeout_in_mills: u32,
    parallel_type: String,
    parallel_level: u32,
    device_type: &'static str,
    #[serde(skip_serializing_if = "Option::is_none")]
    device_ids: Option<Vec<u32>>,
    continuous_batching: bool,
    use_job_ticket: bool,
    use_venv: bool,
    stateful: bool,
    #[serde(rename = "sequenceMaxIdleMSec")]
    sequence_max_idle: u32,
    #[serde(rename = "sequenceTimeoutMSec")]
    sequence_timeout: u32,
    max_num_sequence: u32,
    max_sequence_job_queue_size: u32,
    loaded_at_startup: bool,
    workers: Vec<Worker>,
    job_queue_status: JobQueueStatus,
    /// The handler's description of itself.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub customized_metadata: Option<Value>,
}

#[derive(Clone, Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct Worker {
    id: String,
    start_time: String,
    status: &'static str,
    memory_usage: u64,
    /// -1 while there is no process.
    pid: i64,
    gpu: bool,
    gpu_usage: String,
}

#[derive(Clone, Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct JobQueueStatus {
    remaining_capacity: u64,
    pending_requests: u64,
}

impl Registry {
    /// Lists models by name: at most `limit`, starting at `page`.
    pub fn list(&self, limit: i64, page: i64) -> Listing {
        let most = usize::try_from(limit).ok().filter(|limit| *limit <= 100).unwrap_or(100);
        let first = usize::try_from(page).unwrap_or(0);
        let models = self.read();
        let end = first.saturating_add(most);
        let listed = models.iter().skip(first).take(most).map(|(name, model)| Listed {
            model_name: name.clone(),
            model_url: model
                .versions
                .get(&model.default)
                .map_or_else(String::new, |version| version.deployment().archive.url.clone()),
        });
        // As in TorchServe, also present if the list ends exactly here.
        let next_page_token = (end <= models.len()).then(|| end.to_string());
        Listing { next_page_token, models: listed.collect() }
    }

    /// Describes a version.
    pub fn describe(&self, version: &Version) -> ModelDescription {
        let deployment = version.deployment();
        let yaml = &deployment.archive.yaml;
        let waiting = self.service.waiting(&version.engine_name) + version.waiting();
        let sequence = deployment.sequence;
        ModelDescription {
            model_name: version.name.clone(),
            model_version: version.text.clone(),
            model_url: deployment.archive.url.clone(),
            runtime: deployment.runtime.clone(),
            model: deployment.parameters(),
            max_retry_timeout_in_sec: deployment.max_retry_timeout,
            client_timeout_in_mills: deployment.client_timeout,
            parallel_type: yaml.parallel_type.clone().unwrap_or_default(),
            parallel_level: yaml.parallel_level.unwrap_or(0),
            device_type: if deployment.device == Device::Cpu { "cpu" } else { "gpu" },
            device_ids: yaml.device_ids.clone(),
            continuous_batching: yaml.continuous_batching.unwrap_or(false),
            use_job_ticket: deployment.use_job_ticket,
            use_venv: yaml.use_venv.unwrap_or(false),
            stateful: sequence.is_some(),
            sequence_max_idle: sequence.map_or(0, |sequence| sequence.max_idle),
            sequence_timeout: sequence.map_or(0, |sequence| sequence.timeout),
            max_num_sequence: sequence.map_or(0, |sequence| sequence.most),
            max_sequence_job_queue_size: sequence.map_or(0, |sequence| sequence.queue),
            loaded_at_startup: deployment.at_start,
            workers: self.shown_workers(version, &deployment),
            job_queue_status: JobQueueStatus {
                remaining_capacity: u64::from(deployment.queue).saturating_sub(waiting),
                pending_requests: waiting,
            },
            customized_metadata: None,
        }
    }

    /// Returns the workers of a version or, while the engine has none, the configured workers.
    fn shown_workers(&self, version: &Version, deployment: &Deployment) -> Vec<Worker> {
        let first = u32::from(self.settings.initial_worker_port);
        let mut workers = Vec::new();
        for status in self.service.workers(&version.engine_name) {
            let usage =
                status.gpu.map(|number| gpu_usage(number, self.service.gpu_usage(number).as_ref()));
            workers.push(worker(&status, first, usage, version.asked_ms()));
        }
        if workers.is_empty() {
            let on_gpu = deployment.device != Device::Cpu;
            for place in 0..deployment.min_workers {
                workers.push(starting_worker(first + place, version.asked_ms(), on_gpu));
            }
        }
        workers
    }
}

/// Returns the entry of a worker that is loading its model or waiting for a restart.
fn starting_worker(id: u32, asked_ms: u64, on_gpu: bool) -> Worker {
    let asked =
        Timestamp::from_millisecond(i64::try_from(asked_ms).unwrap_or(0)).unwrap_or_default();
    Worker {
        id: id.to_string(),
        start_time: format!("{asked:.3}"),
        status: "UNLOADING",
        memory_usage: 0,
        pid: -1,
        gpu: on_gpu,
        gpu_usage: if on_gpu { "failed to obtained gpu usage" } else { "N/A" }.to_owned(),
    }
}

/// Returns the entry of a worker. A worker that waits for a restart has the time at which the model
/// was requested.
fn worker(shown: &WorkerStatus, first: u32, gpu_usage: Option<String>, asked_ms: u64) -> Worker {
    let started_ms = match shown.started {
        Some(seconds) => (seconds * 1000.0) as i64,
        None => i64::try_from(asked_ms).unwrap_or(0),
    };
    let started = Timestamp::from_millisecond(started_ms).unwrap_or_default();
    Worker {
        id: (first + shown.number).to_string(),
        // Always with milliseconds; the default format omits them if they are 0.
        start_time: format!("{started:.3}"),
        status: if shown.state == Some(InstanceState::Ready) { "READY" } else { "UNLOADING" },
        memory_usage: shown.resident_bytes,
        pid: shown.pid.map_or(-1, i64::from),
        gpu: gpu_usage.is_some(),
        gpu_usage: gpu_usage.unwrap_or_else(|| "N/A".to_owned()),
    }
}

/// Formats GPU usage like TorchServe: the output of
/// `nvidia-smi -i NUMBER --format=csv --query-gpu=utilization.gpu,utilization.memory,memory.used`
/// in one line, with nvidia-smi's text for unavailable values.
fn gpu_usage(number: u32, reading: Option<&GpuUsage>) -> String {
    let Some(reading) = reading else { return "failed to obtained gpu usage".to_owned() };
    let told = |text: Option<String>| text.unwrap_or_else(|| "[N/A]".to_owned());
    let percent = |share: Option<f64>| told(share.map(|share| format!("{:.0} %", share * 100.0)));
    let used = reading.memory_used.map(|used| format!("{} MiB", used >> 20));
    format!(
        "gpuId::{number} utilization.gpu [%]::{} utilization.memory [%]::{} memory.used [MiB]::{}",
        percent(reading.utilization),
        percent(reading.bandwidth),
        told(used)
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_worker_that_waits_for_a_restart_has_the_time_of_its_request() {
        let lost = WorkerStatus {
            number: 2,
            state: None,
            pid: None,
            resident_bytes: 0,
            started: None,
            gpu: None,
        };
        let shown = worker(&lost, 9000, None, 1_700_000_000_000);
        assert_eq!(
            (shown.id.as_str(), shown.start_time.as_str()),
            ("9002", "2023-11-14T22:13:20.000Z")
        );
        let shown = worker(
            &WorkerStatus { started: Some(1_700_000_001.5), ..lost },
            9000,
            None,
            1_700_000_000_000,
        );
        assert_eq!(shown.start_time, "2023-11-14T22:13:21.500Z");
    }

    #[test]
    fn formats_gpu_usage_like_nvidia_smi() {
        let check = |reading: Option<&GpuUsage>, expected: &str| {
            assert_eq!(gpu_usage(1, reading), expected)
        };
        check(None, "failed to obtained gpu usage");
        let mut reading =
            GpuUsage { utilization: Some(0.37), bandwidth: Some(0.0), ..GpuUsage::default() };
        check(
            Some(&reading),
            "gpuId::1 utilization.gpu [%]::37 % utilization.memory [%]::0 % memory.used \
             [MiB]::[N/A]",
        );
        reading.utilization = None;
        reading.bandwidth = Some(0.29);
        check(
            Some(&reading),
            "gpuId::1 utilization.gpu [%]::[N/A] utilization.memory [%]::29 % memory.used \
             [MiB]::[N/A]",
        );
    }
}
