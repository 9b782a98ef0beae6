//! The GPU of an instance: chosen for each of its processes, and released when the process or the GPU is lost.

use std::io;

use pharos::supervisor::{LossReason, Supervisor};
use pharos::wire::Loaded;

use super::Instance;
use super::running::{DeviceShare, Running};
use crate::process::ProcessPlacement;
use crate::scheduler::placement::OnGpu;
use pharos_os::clock;
use pharos_telemetry::system::DeviceRequest;

/// Below this amount of pinned memory, in bytes, a log line warns. 16 MiB are a batch of 27 images of 224 x 224 in FP32.
const LOW_PINNED: u64 = 16 << 20;

/// Why no process was started.
enum NotStarted {
    /// The GPU cannot be used, or no model may be loaded onto it.
    Device(String),
    Process(io::Error),
}

impl Instance {
    /// Returns the placement of the process: the processors of the host policy, else those near its GPU, with one thread each.
    pub(super) fn process_placement<'a>(
        &'a self,
        name: &'a str,
        device_share: Option<&'a DeviceShare>,
    ) -> ProcessPlacement<'a> {
        let processors = match self.plan.policies.processors(&self.health.placement().policy) {
            [] => device_share.map_or(&[][..], |device_share| device_share.chosen.cpus.as_slice()),
            of_policy => of_policy,
        };
        let threads = match u32::try_from(processors.len()) {
            Ok(0) | Err(_) => self.plan.threads,
            Ok(few) => self.plan.threads.min(few),
        };
        ProcessPlacement {
            instance: name,
            threads,
            gpu: device_share.map(|device_share| &device_share.chosen),
            processors,
            start_timeout: self.plan.settings.start_timeout,
        }
    }

    /// Starts a process, unless the instance is stopped meanwhile.
    pub(super) async fn begin(&mut self, machine: &mut Supervisor, running: &mut Option<Running>) {
        match self.unless_stopped(self.start()).await {
            Some(Ok(started)) => self.begun(started, machine, running),
            Some(Err(NotStarted::Device(reason))) => {
                // The reason alone is enough: no process has ended.
                machine.load_failed(reason, clock::now());
                machine.exited("it was not started", clock::now());
            }
            Some(Err(NotStarted::Process(error))) => machine.not_started(error.to_string(), clock::now()),
            None => {
                machine.stop(clock::now());
                machine.not_started(LossReason::Stopped.to_string(), clock::now());
            }
        }
    }

    /// Starts a process, on a GPU if the instance needs one and it can be used now. If the future is dropped, the process ends.
    async fn start(&self) -> Result<Running, NotStarted> {
        let placement = self.health.placement();
        let device_share = match &placement.device {
            None => None,
            Some(device) => Some(self.take(device).await.map_err(NotStarted::Device)?),
        };
        self.spawn(device_share).await.map_err(NotStarted::Process)
    }

    /// # Errors
    /// The GPU cannot be used, or no model may be loaded onto it.
    async fn take(&self, device: &OnGpu) -> Result<DeviceShare, String> {
        // An instance that was ready before is only restarted.
        let loading = self.outcome.is_some();
        let wanted = DeviceRequest { number: device.number, turn: device.turn, loading };
        let chosen = self.plan.devices.choose(wanted).await.map_err(|reason| self.about(device, &reason))?;
        tracing::info!(instance = %self.name(), "instance placed on GPU {} ({})", chosen.number, chosen.uuid);
        let share = self.plan.pinned.share();
        if share.each() < LOW_PINNED {
            let mib = share.each() >> 20;
            tracing::info!(instance = %self.name(), "only {mib} MiB of pinned memory are left for each direction; \
                larger tensors are copied more slowly (see --pinned-memory-pool-byte-size)");
        }
        Ok(DeviceShare { chosen, share })
    }

    /// Returns the unregistered part of the instance's share of pinned memory after its model was loaded.
    pub(super) fn registered(running: &mut Running, loaded: &Loaded) {
        let Some(device_share) = &mut running.device_share else { return };
        if device_share.share.each() > 0 && loaded.pinned == 0 {
            tracing::debug!(gpu = device_share.chosen.number, "no memory is pinned");
            running.link.arenas.inputs.keep(0);
        }
        device_share.share.registered(loaded.pinned);
    }

    /// Reports a lost GPU to the supervisor of the process.
    pub(super) fn look_at_device(&self, machine: &mut Supervisor, running: &Option<Running>) {
        if running.is_some()
            && let Some(device) = &self.health.placement().device
            && let Some(reason) = self.plan.devices.lost(device.number)
        {
            machine.device_lost(self.about(device, &reason), clock::now());
        }
    }

    fn about(&self, device: &OnGpu, reason: &str) -> String {
        format!("instance group {} of model {}: {reason}", device.group, self.driver.model.name)
    }
}
