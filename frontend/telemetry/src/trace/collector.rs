//! Sends spans to an OpenTelemetry collector: one thread, which exports the waiting spans when
//! there are enough or after a delay (OpenTelemetry's batch span processor).
//!
//! If the collector does not answer, exports are retried with growing pauses while spans wait;
//! spans beyond the queue's limit are dropped and counted. One log line reports the loss of the
//! collector, another its return.

use std::collections::VecDeque;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{self, Receiver};
use std::thread;
use std::time::Duration;

use parking_lot::{Mutex, MutexGuard};
use pharos::metrics::log_throttle::Throttle;
use pharos::otlp::{Rejected, Signal, SplitMix, resource_attributes};
use pharos::request_trace::{Finished, PartIds, Sink};
use pharos::trace::otlp;
use pharos_os::clock;
use tokio::sync::Notify;

use super::{Counts, Destination, add};
use crate::otlp::{Failure, Pauses, Sender, seed};
use crate::trace::Collector;

/// The number of attempts for one export, which is dropped afterwards.
const TRIES: usize = 8;
/// The maximum size of waiting traces in bytes. An option limits the number of their spans.
const WAITING_BYTES: usize = 64 << 20;
/// The maximum size in bytes of the traces in one export, which is slightly longer: gRPC servers
/// accept messages up to 4 MiB.
const EXPORT_BYTES: usize = 1 << 20;

#[derive(Default)]
struct Waiting {
    traces: VecDeque<Finished>,
    spans: usize,
    bytes: usize,
    /// Spans dropped since the last report.
    dropped: usize,
}

/// The state that requests and the thread share.
struct Queue {
    // Locked to add or take traces.
    waiting: Mutex<Waiting>,
    wake: Notify,
    stopping: AtomicBool,
}

impl Queue {
    fn lock(&self) -> MutexGuard<'_, Waiting> {
        self.waiting.lock()
    }

    fn stopping(&self) -> bool {
        self.stopping.load(Ordering::Acquire)
    }
}

/// The thread's queue.
pub(super) struct Exporter {
    queue: Arc<Queue>,
    collector: Collector,
    ended: Mutex<Receiver<()>>,
    ids: PartIds,
    counts: Counts,
}

impl Exporter {
    /// Starts the thread. The collector may be unreachable.
    ///
    /// # Errors
    /// The collector's certificates or headers are not usable, or the thread cannot be started.
    pub(super) fn start(collector: Collector, counts: Counts) -> io::Result<Arc<Self>> {
        let sender = Sender::new(&collector.endpoint, Signal::Traces).map_err(io::Error::other)?;
        let waiting = Mutex::default();
        let queue =
            Arc::new(Queue { waiting, wake: Notify::new(), stopping: AtomicBool::new(false) });
        let (ending, ended) = mpsc::channel();
        let mut work = CollectorThread {
            queue: queue.clone(),
            sender,
            resource: resource_attributes(&collector.resource),
            collector: collector.clone(),
            counts: counts.clone(),
            random: SplitMix(seed()),
            lost: None,
            throttle: Throttle::default(),
        };
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        thread::Builder::new().name("trace-export".into()).spawn(move || {
            runtime.block_on(work.run());
            let _ = ending.send(());
        })?;
        Ok(Arc::new(Self {
            queue,
            collector,
            ended: Mutex::new(ended),
            ids: PartIds::default(),
            counts,
        }))
    }
}

impl Sink for Exporter {
    fn finished(&self, trace: Finished) {
        let spans = otlp::count(&trace);
        let bytes = trace.bytes();
        let mut waiting = self.queue.lock();
        let fits = waiting.spans + spans <= self.collector.max_queue_size as usize
            && waiting.bytes + bytes <= WAITING_BYTES;
        // A request with very many steps can have more spans than the queue accepts.
        if !fits && !waiting.traces.is_empty() {
            waiting.dropped += spans;
            drop(waiting);
            add(self.counts.dropped.as_ref(), 1);
            add(self.counts.spans_dropped.as_ref(), spans);
            return;
        }
        waiting.spans += spans;
        waiting.bytes += bytes;
        waiting.traces.push_back(trace);
        // A queue that is smaller than a batch never has one.
        let batch =
            self.collector.max_export_batch_size.min(self.collector.max_queue_size) as usize;
        let enough = waiting.spans >= batch || waiting.bytes >= EXPORT_BYTES;
        drop(waiting);
        if enough {
            self.queue.wake.notify_one();
        }
    }

    fn next_id(&self) -> u64 {
        self.ids.next()
    }
}

impl Destination for Exporter {
    fn stop(&self, limit: Duration) {
        self.queue.stopping.store(true, Ordering::Release);
        self.queue.wake.notify_one();
        let ended = self.ended.lock();
        if ended.recv_timeout(limit).is_err() {
            tracing::error!(
                "the last traces could not be sent to {} in time",
                self.collector.endpoint.url
            );
        }
    }
}

/// The state of the thread.
struct CollectorThread {
    queue: Arc<Queue>,
    sender: Sender,
    collector: Collector,
    resource: Vec<(String, String)>,
    counts: Counts,
    random: SplitMix,
    /// Spans dropped since the collector stopped answering; `None` while it answers.
    lost: Option<usize>,
    /// Limits the log line about a slow collector.
    throttle: Throttle,
}

impl CollectorThread {
    async fn run(&mut self) {
        let delay = Duration::from_millis(self.collector.schedule_delay_ms.into());
        loop {
            let _ = tokio::time::timeout(delay, self.queue.wake.notified()).await;
            // Read before the last batch is taken, so that traces that finished before the stop are
            // exported.
            let stopping = self.queue.stopping();
            while let Some(batch) = self.take() {
                self.export(&batch).await;
            }
            if stopping {
                return;
            }
        }
    }

    /// Takes the traces of one export: as many as fit its limits of spans and bytes, at least one.
    fn take(&self) -> Option<Vec<Finished>> {
        let mut waiting = self.queue.lock();
        let mut batch = Vec::new();
        let mut spans = 0;
        let mut bytes = 0;
        while let Some(trace) = waiting.traces.front() {
            let more_spans = spans + otlp::count(trace);
            let more_bytes = bytes + trace.bytes();
            let fits = more_spans <= self.collector.max_export_batch_size as usize
                && more_bytes <= EXPORT_BYTES;
            if !batch.is_empty() && !fits {
                break;
            }
            spans = more_spans;
            bytes = more_bytes;
            batch.extend(waiting.traces.pop_front());
        }
        waiting.spans -= spans;
        waiting.bytes -= bytes;
        (!batch.is_empty()).then_some(batch)
    }

    /// Sends a batch, with retries.
    async fn export(&mut self, batch: &[Finished]) {
        let spans: usize = batch.iter().map(otlp::count).sum();
        let offset = clock::wall_ns().saturating_sub(clock::now().0);
        let message = otlp::request(batch, &self.resource, offset, &mut self.random);
        let mut pauses = Pauses::default();
        for attempt in 1..=TRIES {
            match self.sender.send(&message, Duration::MAX).await {
                Ok(rejected) => return self.sent(batch.len(), spans, rejected),
                Err(failure) => {
                    self.failed(&failure);
                    if !failure.retryable
                        || attempt == TRIES
                        || !self.pause(pauses.after(&failure)).await
                    {
                        break;
                    }
                }
            }
        }
        add(self.counts.exports_failed.as_ref(), 1);
        add(self.counts.dropped.as_ref(), batch.len());
        add(self.counts.spans_dropped.as_ref(), spans);
        self.lost = self.lost.map(|dropped| dropped + spans);
    }

    /// Waits before the next attempt. Returns false if the server ends: then each batch has one
    /// attempt.
    async fn pause(&self, pause: Duration) -> bool {
        let end = clock::now() + pause;
        while !self.queue.stopping() {
            let left = end - clock::now();
            if left.is_zero() {
                return true;
            }
            let _ = tokio::time::timeout(left, self.queue.wake.notified()).await;
        }
        false
    }

    fn sent(&mut self, traces: usize, spans: usize, rejected: Option<Rejected>) {
        let url = &self.collector.endpoint.url;
        let (refused, why) =
            rejected.map(|rejected| (rejected.count, rejected.reason)).unwrap_or_default();
        let refused = usize::try_from(refused).unwrap_or(spans).min(spans);
        add(self.counts.exports.as_ref(), 1);
        add(self.counts.written.as_ref(), traces);
        add(self.counts.spans_exported.as_ref(), spans - refused);
        add(self.counts.spans_dropped.as_ref(), refused);
        if refused > 0 {
            tracing::warn!(
                "the trace collector at {url} refused {refused} of {spans} spans: {why}"
            );
        }
        let most = self.collector.max_queue_size;
        let dropped = std::mem::take(&mut self.queue.lock().dropped);
        if let Some(failed) = self.lost.take() {
            tracing::info!(
                "the trace collector at {url} answers again; {} spans were lost",
                failed + dropped
            );
        } else if dropped > 0 && self.throttle.admit(clock::now()).is_some() {
            tracing::warn!(
                "{dropped} spans were dropped: the trace collector at {url} is too slow, and at \
                 most {most} spans may wait"
            );
        }
    }

    fn failed(&mut self, failure: &Failure) {
        if self.lost.is_none() {
            self.lost = Some(0);
            let url = &self.collector.endpoint.url;
            let most = self.collector.max_queue_size;
            let text = &failure.text;
            tracing::warn!(
                "the trace collector at {url} does not accept spans: {text}; up to {most} wait, \
                 further ones are dropped"
            );
        }
    }
}
