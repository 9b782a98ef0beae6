//! Requests that the response cache may answer. The lookup precedes the queue and the scheduler. If a model keeps the order of
//! its answers, a request gets its place in the order before the lookup.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use pharos::cache::Entry;
use pharos::error::{InferError, Reason};
use pharos::id::RequestId;
use pharos::infer::{InferRequest, InferResponse};
use pharos::metrics::record::{self, Failed, MissTimes};
use pharos::metrics::series::ModelSeries;
use pharos::model::{Checked, ModelConfig};
use pharos::timeline::{CacheLookup, ComputeStamps};
use tokio::sync::oneshot;

use super::{Answer, Driver, OneReply, Reply, Request, lost, request_trace};
use crate::cache::{Found, LookUpTimes, ModelCache};
use crate::wire::Part;
use pharos_os::clock;

/// Builds and records the response to a request from a cache entry.
pub(crate) fn answer_found(
    (config, series): (&ModelConfig, &ModelSeries),
    request: &InferRequest,
    entry: &Entry,
    LookUpTimes { started, ended }: LookUpTimes,
) -> InferResponse {
    let mut response = entry.to_response(config, series.model().version, request);
    let timeline = &mut response.timeline;
    timeline.compute = ComputeStamps { start: started, input_end: started, output_start: started, end: started };
    timeline.request_end = clock::now();
    timeline.cache = Some(CacheLookup::Hit);
    {
        let _transaction = series.begin();
        record::cache_hit(series, timeline, ended.ns_since(started));
        record::tenant_served(series, request.tenant, timeline);
        if let Some(trace) = request.trace {
            record::inference_traced(series, timeline, trace, clock::wall_ms());
        }
    }
    request_trace::found(request, &response.outputs, timeline.request_end);
    response
}

/// Records the look-up and the insertion of a response that the cache did not have.
pub(crate) fn record_miss(series: &ModelSeries, times: MissTimes, response: &mut InferResponse) {
    response.timeline.insertion_ns = times.insertion_ns;
    response.timeline.cache = Some(CacheLookup::Miss);
    record::cache_miss(series, times);
}

impl Driver {
    /// Looks up a request. Dropping the future cancels the request.
    pub(super) async fn look_up(
        &self,
        cache: &ModelCache,
        id: RequestId,
        request: &InferRequest,
        checked: &Checked,
    ) -> Found {
        if self.ordered {
            self.turn(request.timeline.queue_start, |state| {
                if let Some(order) = &mut state.order {
                    order.expect(id);
                }
            });
        }
        let mut guard = LookUpGuard { driver: self, id: Some(id), request };
        let found = cache.look_up(&self.config, request, checked.batch_size).await;
        guard.id = None;
        found
    }

    /// Answers a request with a cache entry.
    pub(super) async fn answer_hit(&self, id: RequestId, part: Part, entry: Arc<Entry>, times: LookUpTimes) -> Answer {
        let response = answer_found((&self.config, &self.series), &part.request, &entry, times);
        if !self.ordered {
            return Ok(response);
        }
        let (reply, answer) = oneshot::channel();
        let request =
            Request { part: Arc::new(part), reply: Reply::One(OneReply::new(reply, true)), retried: false, miss: None };
        self.turn(clock::now(), |state| self.finish(state, id, request, Ok(response)));
        answer.await.unwrap_or_else(|_| lost())
    }

    /// Stores the responses of a batch to requests that were not found, before they are sent. Returns the times that the cache took
    /// for each request; empty if the model uses no cache.
    pub(super) fn store_all(
        &self,
        requests: &mut [(RequestId, Request)],
        answers: &[Answer],
    ) -> Vec<Option<MissTimes>> {
        if self.cache.is_none() {
            return Vec::new();
        }
        requests.iter_mut().zip(answers).map(|((_, request), answer)| self.store(request, answer)).collect()
    }

    /// Stores the response to a request that was not found, before it is sent. Errors are not stored; the next request that waits
    /// for the same response is executed.
    pub(super) fn store(&self, request: &mut Request, answer: &Answer) -> Option<MissTimes> {
        let cache = self.cache.as_ref()?;
        let miss = request.miss.take()?;
        let response = answer.as_ref().ok()?;
        Some(if self.may_cache() { cache.store(miss, response) } else { miss.pass_on(response) })
    }

    /// Returns whether responses may be found and stored in a response cache: all instances execute the loaded files.
    pub(crate) fn may_cache(&self) -> bool {
        !self.caching_stopped.load(Ordering::Acquire)
    }

    /// Ends the use of response caches, also by ensembles, because an instance is about to execute other files than those that were
    /// loaded.
    pub(crate) fn stop_caching(&self) {
        if !self.caching_stopped.swap(true, Ordering::AcqRel) {
            tracing::warn!(
                model = %self.model,
                "a worker has started with files that have changed since the load of the model began: responses of the model and of \
                 its ensembles are not cached until it is loaded again"
            );
        }
    }
}

/// Cancels a request whose client disconnects during the lookup.
struct LookUpGuard<'a> {
    driver: &'a Driver,
    id: Option<RequestId>,
    request: &'a InferRequest,
}

impl Drop for LookUpGuard<'_> {
    fn drop(&mut self) {
        let Some(id) = self.id.take() else { return };
        let now = clock::now();
        let ns = now.ns_since(self.request.timeline.request_start);
        {
            let _transaction = self.driver.series.begin();
            record::inference_failed(&self.driver.series, Failed::abandoned(self.request.deadline, now), ns);
            record::tenant_failed(&self.driver.series, self.request.tenant, Reason::Cancelled);
        }
        request_trace::failed(self.request.traced.as_ref(), &InferError::cancelled(), now);
        if self.driver.ordered {
            self.driver.turn(now, |state| {
                if let Some(order) = &mut state.order {
                    order.remove(id);
                }
            });
        }
    }
}
