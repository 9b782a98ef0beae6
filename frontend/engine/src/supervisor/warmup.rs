//! Warm-ups: the requests that an instance executes between the loading of its model and its first request, after every start.

use std::sync::Arc;

use pharos::error::InferError;
use pharos::supervisor::{LossReason, Supervisor};
use pharos::wire::Done;

use super::Instance;
use super::running::{Running, WarmUpBatch, Warming, failure};
use crate::wire::ToSend;
use crate::worker_session::WARM_UP;
use pharos_os::{blocking, clock};

/// A warm-up of the model's configuration. Its requests are made for its runs and dropped after them: they may take gigabytes, and
/// an instance has those of one warm-up at a time.
pub(crate) struct WarmUp {
    pub(crate) name: String,
    /// The number of runs.
    pub(crate) count: u32,
    /// Makes the requests. Blocks.
    pub(crate) make: Box<dyn Fn() -> Result<WarmUpBatch, String> + Send + Sync>,
}

/// Records an error among the responses of a warm-up.
pub(super) fn warm_up_failed(running: &mut Option<Running>, error: InferError) {
    if let Some(warming) = running.as_mut().and_then(|running| running.warming.as_mut()) {
        warming.failed.get_or_insert(error);
    }
}

impl Instance {
    /// Returns why the instance cannot be loaded; for a Python process that ended, prefixed with Triton's text.
    pub(super) fn why_ended(&self, reason: &LossReason) -> String {
        match reason {
            LossReason::Exited(how) if self.plan.launch.interpreter.is_some() => {
                format!("Stub process '{}' is not healthy. The worker process ended: {how}", self.name())
            }
            _ => reason.to_string(),
        }
    }

    /// Sends the warm-up run after `over` completed ones; after the last run, the instance is ready. `last` is the warm-up of the last
    /// run, by its index, and its requests.
    pub(super) async fn warm_up(
        &self,
        over: u32,
        last: Option<(usize, Arc<WarmUpBatch>)>,
        machine: &mut Supervisor,
        running: &mut Option<Running>,
    ) {
        let all = self.plan.warmups.iter().enumerate();
        let mut runs = all.flat_map(|(index, warm_up)| std::iter::repeat_n((index, warm_up), warm_up.count as usize));
        let next = runs.nth(over as usize);
        let (Some(running), Some((index, warm_up))) = (running.as_mut(), next) else {
            return machine.ready(clock::now());
        };
        let batch = match last {
            Some((last, batch)) if last == index => batch,
            other => {
                // Before the next ones are made.
                drop(other);
                let plan = self.plan.clone();
                let make =
                    move || plan.warmups.get(index).map_or_else(|| Err(String::new()), |warm_up| (warm_up.make)());
                let made = self.unless_stopped(blocking::run(make)).await;
                match made.map(|made| made.unwrap_or_else(|error| Err(error.to_string()))) {
                    Some(Ok(batch)) => Arc::new(batch),
                    Some(Err(error)) => return machine.load_failed(failure(&warm_up.name, error), clock::now()),
                    None => return machine.stop(clock::now()),
                }
            }
        };
        let since = clock::now();
        let parts = batch.parts(since);
        let number = WARM_UP + u64::from(over);
        let controls = &batch.controls;
        let to_send = ToSend { batch: number, flags: 0, parts: &parts, steps: &[], controls, resumed: Vec::new() };
        match running.link.execute(&self.driver.config, &to_send) {
            Ok(()) => {
                let name = warm_up.name.clone();
                running.warming = Some(Warming { over, name, index, batch, parts, since, failed: None });
            }
            Err(error) => machine.load_failed(failure(&warm_up.name, error), since),
        }
    }

    pub(super) async fn warmed_up(&self, done: &Done, machine: &mut Supervisor, running: &mut Option<Running>) {
        let Some(link) = running.as_ref().map(|running| running.link.clone()) else { return };
        link.inputs_read(done);
        let Some(warming) = running.as_mut().and_then(|running| running.warming.take()) else { return };
        let recorded = self.driver.warmed_up(&warming.parts, &link, done, warming.since);
        link.inputs_lent(done);
        let Warming { over, name, index, batch, parts, failed, .. } = warming;
        drop(parts);
        match recorded.and(failed.map_or(Ok(()), Err)) {
            Ok(()) => self.warm_up(over + 1, Some((index, batch)), machine, running).await,
            Err(error) => machine.load_failed(failure(&name, error), clock::now()),
        }
    }
}
