//! Deferred requests: their backend answers them after their batch is over, while the instance executes other batches.

use std::collections::HashMap;
use std::sync::Arc;

use pharos::error::InferError;
use pharos::id::RequestId;
use pharos::timeline::Timeline;
use pharos::wire::{Done, Response, ToWorker};

use super::cached::record_miss;
use super::reschedule::stand_in;
use super::{Answer, Driver, InFlight, Request, State, request_trace};
use crate::wire::{Part, SharedLink};
use pharos_os::clock;

/// The deferred requests of one instance, by batch and position in it.
pub(super) type Deferred = HashMap<(u64, u32), (RequestId, Request)>;

impl InFlight {
    /// Moves the requests that are answered later out of the batch and replaces them by padding.
    pub(super) fn keep_deferred(&mut self, done: &mut Done, deferred: &mut Deferred) {
        for position in std::mem::take(&mut done.open) {
            let place = self.requests.get_mut(position as usize);
            let Some(place) = place.filter(|(_, request)| !request.part.padding && !request.reply.has_ended()) else {
                continue;
            };
            let stand_in = Request::padding(stand_in(&place.1.part));
            deferred.insert((done.batch, position), std::mem::replace(place, stand_in));
        }
    }
}

impl State {
    /// Returns the frame that cancels a deferred request, with the link of its instance.
    pub(super) fn cancellation_frame(&self, id: RequestId) -> Option<(SharedLink, ToWorker)> {
        self.members.values().find_map(|member| {
            let (&(batch, position), _) = member.deferred.iter().find(|(_, (request, _))| *request == id)?;
            Some((member.link.clone(), ToWorker::CancelRequest(batch, position)))
        })
    }
}

impl Driver {
    /// Returns a request that an instance of this model executes, by its batch and position.
    pub(crate) fn part_at(&self, (batch, position): (u64, u32)) -> Option<Arc<Part>> {
        let state = self.lock();
        let part = |member: &super::Member| {
            if let Some((_, request)) = member.deferred.get(&(batch, position)) {
                return Some(request.part.clone());
            }
            let flying = member.in_flight.iter().find(|flying| flying.batch == batch)?;
            flying.requests.get(position as usize).map(|(_, request)| request.part.clone())
        };
        state.members.values().find_map(part)
    }

    /// Answers a request of an ordinary model after its batch.
    pub(super) fn answer_deferred(&self, (id, mut request): (RequestId, Request), link: &SharedLink, frame: Response) {
        let part = request.part.clone();
        let mut answer = self.answer_of(&part, link, &frame.outputs);
        if let Some(error) = frame.error {
            answer = Err(error.into());
        }
        let mut timeline: Timeline = part.request.timeline;
        timeline.compute = frame.stamps;
        timeline.request_end = clock::now();
        if let Ok(response) = &mut answer {
            response.timeline = timeline;
            response.parameters = frame.parameters;
        }
        request_trace::answered(&part.request, &answer, Some(&timeline));
        let missed = self.store(&mut request, &answer);
        {
            let _transaction = self.series.begin();
            if let (Some(times), Ok(response)) = (missed, &mut answer) {
                record_miss(&self.series, times, response);
                timeline = response.timeline;
            }
            self.record_one(&part, &answer, (&timeline, request.reply.is_closed()));
        }
        self.turn(clock::now(), |state| self.finish(state, id, request, answer));
        link.send_released_if_many();
    }

    /// Returns the response of a frame to one request.
    pub(super) fn answer_of(
        &self,
        part: &Arc<Part>,
        link: &SharedLink,
        blocks: &[pharos::wire::OutputBlock],
    ) -> Answer {
        let parts = std::slice::from_ref(part);
        self.scattered(parts, link, blocks)
            .and_then(|mut one| one.pop().ok_or_else(|| InferError::internal("no response")))
    }
}
