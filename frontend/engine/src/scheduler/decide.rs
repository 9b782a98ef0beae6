//! Performs the part of the scheduler's decisions that runs under the lock, including requests to the rate limiter.

use std::time::Duration;

use pharos::id::{InstanceId, RequestId};
use pharos::metrics::record;
use pharos::scheduler::Action;
use pharos::scheduler::rate_limiter::{Member, RateLimiter};
use pharos::timeline::Instant;
use pharos::wire::{SequenceStep, flags};

use super::effects::Send;
use super::limits::Grant;
use super::placement::Placement;
use super::{Driver, Effects, InFlight, Request, State};
use pharos_os::clock;

/// A batch to send.
pub(super) struct NewBatch {
    /// In batch order.
    pub(super) requests: Vec<(RequestId, Request)>,
    /// One step for each request of a model with sequences; otherwise empty.
    pub(super) steps: Vec<Option<SequenceStep>>,
}

impl Driver {
    /// Performs the part of the scheduler's decisions that runs under the lock.
    pub(super) fn decide(&self, state: &mut State, effects: &mut Effects, now: Instant) {
        loop {
            while let Some(action) = state.scheduler.poll_action(now) {
                match action {
                    Action::Execute { instance, requests, reason } => {
                        record::batch_sent(&self.series, reason);
                        self.start(state, effects, (instance, now), &requests);
                    }
                    Action::ExecuteSteps { instance, slots, reason } => {
                        record::batch_sent(&self.series, reason);
                        self.start_steps(state, effects, (instance, now), &slots);
                    }
                    Action::SequencesEnded { instance, keys } => {
                        let link = state.members.get(&instance).map(|member| member.link.clone());
                        effects.ended.extend(link.map(|link| (link, keys)));
                    }
                    Action::SequenceRestarted { request } => {
                        let known = state.queued.get(&request);
                        effects.restarted.extend(known.map(|known| known.part.request.correlation_id.clone()));
                    }
                    Action::Reject { request, reason } => self.reject(state, request, reason),
                    Action::Acquire { instance } => {
                        self.request_limiter(effects, instance, |limiter, member| limiter.stage(member, now));
                    }
                    Action::Withdraw { instance } => self.request_limiter(effects, instance, RateLimiter::withdraw),
                    Action::Release { instance } => self.request_limiter(effects, instance, RateLimiter::release),
                }
            }
            if !self.take_grant(state, effects, now) {
                return;
            }
        }
    }

    /// Books a batch for an instance; it is sent after the lock is released.
    fn start(
        &self,
        state: &mut State,
        effects: &mut Effects,
        (instance, now): (InstanceId, Instant),
        requests: &[RequestId],
    ) {
        let requests = requests.iter().filter_map(|id| Some((*id, state.queued.remove(id)?))).collect();
        self.book(state, effects, (instance, now), NewBatch { requests, steps: Vec::new() });
    }

    /// Books a batch for an instance, as [`Driver::start`] does.
    pub(super) fn book(
        &self,
        state: &mut State,
        effects: &mut Effects,
        (instance, now): (InstanceId, Instant),
        NewBatch { requests, steps }: NewBatch,
    ) {
        let Some(member) = state.members.get_mut(&instance) else { return };
        let parts = requests.iter().map(|(_, request)| request.part.clone()).collect();
        let batch = state.next_batch;
        state.next_batch += 1;
        if member.in_flight.is_empty() {
            member.executing_since = now;
        }
        let flags = (0..flags::ROWS).find(|row| member.in_flight.iter().all(|flying| flying.flags != *row));
        let flags = flags.unwrap_or(flags::ROWS);
        let placed = |(place, (_, request)): (usize, &(RequestId, Request))| {
            let place = u32::try_from(place).unwrap_or(u32::MAX);
            Some((place, request.reply.placed(&member.link, batch, place)?))
        };
        let flows = requests.iter().enumerate().filter_map(placed).collect();
        let flying = InFlight { batch, flags, given_up: false, requests };
        if member.in_flight.is_empty() {
            record::request_pending(&self.series, -flying.count());
        }
        member.in_flight.push(flying);
        member.update_busy_time(now);
        effects.sends.push(Send { instance, link: member.link.clone(), batch, flags, parts, steps, flows });
    }

    /// Calls the rate limiter for the scheduler.
    fn request_limiter(
        &self,
        effects: &mut Effects,
        instance: InstanceId,
        call: impl FnOnce(&mut RateLimiter, Member),
    ) {
        if let Some(limits) = &self.limits {
            limits.update(instance, call);
            effects.limiter_called = true;
        }
    }

    /// Returns whether the scheduler must decide again, because the limiter granted resources to an instance of this driver.
    /// A grant to an instance of another driver is left in the effects.
    fn take_grant(&self, state: &mut State, effects: &mut Effects, now: Instant) -> bool {
        let Some(registration) = self.limits.as_ref().filter(|_| effects.limiter_called) else { return false };
        match registration.poll(now) {
            Some(grant) if registration.is_own(&grant) => {
                state.scheduler.resources_granted(grant.instance, now);
                true
            }
            foreign => {
                effects.grant = foreign;
                false
            }
        }
    }

    /// Delivers the remaining grant of a turn.
    pub(super) fn deliver(&self, grant: Option<Grant>) {
        if let Some(registration) = &self.limits {
            registration.deliver(grant);
        }
    }

    /// Runs a turn for a grant that another driver's turn caused. Returns the next grant.
    pub(super) fn granted(&self, instance: InstanceId, now: Instant) -> Option<Grant> {
        self.turn_alone(now, |state, effects| {
            let Some(registration) = &self.limits else { return };
            effects.limiter_called = true;
            if registration.holds(instance) {
                state.scheduler.resources_granted(instance, now);
            }
        })
    }

    /// Registers instances with the rate limiter, if it is on.
    ///
    /// # Errors
    /// An instance could never execute.
    pub(crate) fn admit(&self, instances: &[(InstanceId, &Placement)]) -> Result<(), String> {
        self.limits.as_ref().map_or(Ok(()), |registration| registration.add(instances))
    }

    /// Returns the number of instances that wait for resources, and the total waiting time since the last call; `None` without a
    /// rate limiter.
    pub(crate) fn resource_waits(&self) -> Option<(usize, Duration)> {
        self.limits.as_ref().map(|registration| registration.waiting(clock::now()))
    }
}
