//! Implements `max_inflight_requests`: the limit of concurrent requests of each step of an
//! ensemble, over all its clients. Requests over the limit wait, and so does the decoupled step
//! whose responses they process.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use pharos::id::ModelVersion;
use pharos_os::clock;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

/// The time limit of waiting for a permit, as in Triton. A model that is in a plan twice can hold
/// its only instance with responses that wait for that instance; the limit must not block it
/// forever.
pub(super) const STUCK: Duration = Duration::from_secs(300);

/// The permit to run a step; released with the last clone. `None` without a limit.
pub(super) type StepPermit = Option<Arc<OwnedSemaphorePermit>>;

/// The permits of an ensemble's steps.
#[derive(Debug)]
pub(super) struct Slots {
    steps: Vec<Arc<Semaphore>>,
    limit: u32,
}

impl Slots {
    /// Creates permits for `steps` steps; `None` for a limit of 0, which means no limit.
    pub(super) fn new(steps: usize, limit: u32) -> Option<Self> {
        let places =
            usize::try_from(limit).unwrap_or(Semaphore::MAX_PERMITS).min(Semaphore::MAX_PERMITS);
        let steps = (0..steps).map(|_| Arc::new(Semaphore::new(places))).collect();
        (limit > 0).then_some(Self { steps, limit })
    }

    /// Queues for a permit of the step with this number; `waiting` counts the queued requests.
    /// `before` is the permit of the step whose response this request processes. It is held until
    /// this request has its own permit, which throttles that step.
    pub(super) fn queue(
        &self,
        step: usize,
        waiting: &Arc<AtomicUsize>,
        before: StepPermit,
    ) -> Option<Queued> {
        let semaphore = self.steps.get(step)?.clone();
        waiting.fetch_add(1, Ordering::Relaxed);
        Some(Queued {
            semaphore,
            limit: self.limit,
            step,
            waiting: waiting.clone(),
            _before: before,
        })
    }

    /// Returns the number of taken permits of each step.
    pub(super) fn taken(&self) -> impl Iterator<Item = usize> {
        let limit = usize::try_from(self.limit).unwrap_or(Semaphore::MAX_PERMITS);
        self.steps.iter().map(move |step| limit.saturating_sub(step.available_permits()))
    }
}

/// A request that waits for a permit.
pub(super) struct Queued {
    semaphore: Arc<Semaphore>,
    limit: u32,
    step: usize,
    waiting: Arc<AtomicUsize>,
    _before: StepPermit,
}

impl Queued {
    /// Waits for the permit; returns `None` after `time_limit`.
    pub(super) async fn acquire(self, ensemble: &ModelVersion, time_limit: Duration) -> StepPermit {
        match clock::timeout(time_limit, self.semaphore.clone().acquire_owned()).await {
            Some(permit) => permit.ok().map(Arc::new),
            None => {
                let Self { limit, step, .. } = self;
                let seconds = time_limit.as_secs();
                tracing::warn!(%ensemble, "step {step} has run {limit} requests for {seconds} s; admitting one over the limit");
                None
            }
        }
    }
}

impl Drop for Queued {
    fn drop(&mut self) {
        self.waiting.fetch_sub(1, Ordering::Relaxed);
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use futures_util::FutureExt as _;

    use super::*;

    #[tokio::test]
    async fn permits_are_granted_in_the_order_of_the_requests() {
        let slots = Slots::new(1, 1).unwrap();
        let waiting = Arc::new(AtomicUsize::new(0));
        let ensemble = ModelVersion::new("e", 1);
        let mut held = slots.queue(0, &waiting, None).unwrap().acquire(&ensemble, STUCK).await;
        let queue = |_| Box::pin(slots.queue(0, &waiting, None).unwrap().acquire(&ensemble, STUCK));
        let mut requests: Vec<_> = (0..3).map(queue).collect();
        // Each waits from the first poll on.
        assert!(requests.iter_mut().all(|request| request.as_mut().now_or_never().is_none()));
        while !requests.is_empty() {
            drop(held.take());
            assert!(
                requests
                    .iter_mut()
                    .skip(1)
                    .all(|request| request.as_mut().now_or_never().is_none())
            );
            held = requests.remove(0).now_or_never().unwrap();
            assert!(held.is_some());
        }
    }

    #[tokio::test]
    async fn waiting_for_a_permit_is_limited() {
        let slots = Slots::new(2, 1).unwrap();
        let waiting = Arc::new(AtomicUsize::new(0));
        let ensemble = ModelVersion::new("e", 1);
        let time_limit = Duration::from_millis(20);
        let first = slots.queue(1, &waiting, None).unwrap().acquire(&ensemble, STUCK).await;
        assert_eq!(
            (waiting.load(Ordering::Relaxed), slots.taken().collect::<Vec<_>>()),
            (0, vec![0, 1])
        );
        let second = slots.queue(1, &waiting, first.clone()).unwrap();
        assert_eq!(waiting.load(Ordering::Relaxed), 1);
        drop(first);
        // The waiting request itself holds the only permit, so the permit is never released.
        assert!(second.acquire(&ensemble, time_limit).await.is_none());
        assert_eq!(waiting.load(Ordering::Relaxed), 0);
        assert_eq!(slots.taken().collect::<Vec<_>>(), [0, 0]);
        assert!(Slots::new(2, 0).is_none());
    }
}
