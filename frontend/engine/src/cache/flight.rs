//! Single flight: of concurrent equal requests one leads, and the others wait for its response.
//!
//! No follower waits forever: a leader stores its response, or is dropped (its request failed, was cancelled or lost), and then
//! the follower that has waited longest leads.

use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use pharos::cache::{Entry, Key};
use tokio::sync::oneshot;

/// Waiting requests by key. An entry exists while a leader exists.
type Waiting = HashMap<Key, VecDeque<oneshot::Sender<FlightOutcome>>>;

/// The keys that are being looked up or executed.
#[derive(Default, Clone)]
pub(super) struct Flights(Arc<Mutex<Waiting>>);

/// The result of joining a flight.
pub(super) enum FlightOutcome {
    /// With the leader's response.
    Entry(Arc<Entry>),
    /// The lead: no other request is being executed for this key.
    Lead(FlightLeader),
}

/// The leading request of a flight, whose response the others wait for.
pub(super) struct FlightLeader {
    flights: Flights,
    /// `None` once the flight is over.
    key: Option<Key>,
}

impl Flights {
    /// Takes the lead, or waits for the leader.
    pub(super) async fn join(&self, key: Key) -> FlightOutcome {
        let landing = {
            let mut waiting = self.lock();
            match waiting.get_mut(&key) {
                None => {
                    waiting.insert(key, VecDeque::new());
                    return FlightOutcome::Lead(FlightLeader { flights: self.clone(), key: Some(key) });
                }
                Some(others) => {
                    let (sender, landing) = oneshot::channel();
                    others.push_back(sender);
                    landing
                }
            }
        };
        // A sender is never dropped unused. If it were, this request would continue without a flight.
        landing.await.unwrap_or_else(|_| FlightOutcome::Lead(FlightLeader { flights: self.clone(), key: None }))
    }

    fn lock(&self) -> MutexGuard<'_, Waiting> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl FlightLeader {
    /// Returns whether other requests wait now.
    pub(super) fn has_followers(&self) -> bool {
        let Some(key) = &self.key else { return false };
        self.flights.lock().get_mut(key).is_some_and(|others| {
            others.retain(|other| !other.is_closed());
            !others.is_empty()
        })
    }

    /// Passes the response to the waiting requests.
    pub(super) fn finish(mut self, entry: &Arc<Entry>) {
        let Some(key) = self.key.take() else { return };
        let others = self.flights.lock().remove(&key);
        for other in others.into_iter().flatten() {
            // A send fails if the waiting request was cancelled.
            let _ = other.send(FlightOutcome::Entry(entry.clone()));
        }
    }
}

impl Drop for FlightLeader {
    fn drop(&mut self) {
        let Some(key) = self.key.take() else { return };
        loop {
            let next = {
                let mut waiting = self.flights.lock();
                let next = waiting.get_mut(&key).and_then(VecDeque::pop_front);
                if next.is_none() {
                    waiting.remove(&key);
                }
                next
            };
            let Some(next) = next else { return };
            let lead = Self { flights: self.flights.clone(), key: Some(key) };
            match next.send(FlightOutcome::Lead(lead)) {
                Ok(()) => return,
                // The receiver was dropped; its lead must not search for the next one too.
                Err(FlightOutcome::Lead(mut lead)) => lead.key = None,
                Err(FlightOutcome::Entry(_)) => {}
            }
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, clippy::panic)]
mod tests {
    use pharos::cache::Identifier;
    use pharos::id::ModelVersion;
    use pharos::infer::{InferRequest, InferResponse};
    use pharos::model::{Completion, Draft};

    use super::*;

    fn key(version: u64) -> Key {
        let completion = Completion { directory: "m", backends: &["builtin"], ..Completion::default() };
        let text = "backend: 'builtin' input { name: 'A' data_type: TYPE_INT8 dims: [1] } output { name: 'B' data_type: TYPE_INT8 dims: [1] }";
        let config = Draft::from_text(text, "config.pbtxt").unwrap().complete(&completion).unwrap();
        Identifier::new(&ModelVersion::new("m", version), &config).finish().key(&InferRequest::default())
    }

    fn entry() -> Arc<Entry> {
        Arc::new(Entry::copy_of(&InferResponse::default()))
    }

    async fn lead(flights: &Flights, key: Key) -> FlightLeader {
        match flights.join(key).await {
            FlightOutcome::Lead(lead) => lead,
            FlightOutcome::Entry(_) => panic!("nothing is stored"),
        }
    }

    /// Spawns tasks that join in order, and waits until each is queued.
    async fn followers(flights: &Flights, key: Key, count: usize) -> Vec<tokio::task::JoinHandle<FlightOutcome>> {
        let mut tasks = Vec::new();
        for n in 1..=count {
            let joining = flights.clone();
            tasks.push(tokio::spawn(async move { joining.join(key).await }));
            while flights.lock().get(&key).map(VecDeque::len) != Some(n) {
                tokio::task::yield_now().await;
            }
        }
        tasks
    }

    #[tokio::test]
    async fn all_followers_get_the_leaders_response() {
        let flights = Flights::default();
        let (first, other) = (lead(&flights, key(1)).await, lead(&flights, key(2)).await);
        assert!(!first.has_followers());
        let waiting = followers(&flights, key(1), 50).await;
        assert!(first.has_followers() && !other.has_followers());
        let entry = entry();
        first.finish(&entry);
        for waiting in waiting {
            assert!(matches!(waiting.await.unwrap(), FlightOutcome::Entry(found) if Arc::ptr_eq(&found, &entry)));
        }
        drop(other);
        assert!(flights.lock().is_empty());
    }

    #[tokio::test]
    async fn the_next_follower_leads_when_the_leader_fails() {
        let flights = Flights::default();
        let first = lead(&flights, key(1)).await;
        let mut waiting = followers(&flights, key(1), 4).await.into_iter();
        // The first in the queue is cancelled before the lead is passed on; the second is dropped after receiving it.
        let gone = waiting.next().unwrap();
        gone.abort();
        assert!(gone.await.is_err());
        drop(first);
        let FlightOutcome::Lead(second) = waiting.next().unwrap().await.unwrap() else { panic!("nothing is stored") };
        drop(second);
        let FlightOutcome::Lead(third) = waiting.next().unwrap().await.unwrap() else { panic!("nothing is stored") };
        third.finish(&entry());
        assert!(matches!(waiting.next().unwrap().await.unwrap(), FlightOutcome::Entry(_)));
        assert!(flights.lock().is_empty());
    }

    #[tokio::test]
    async fn a_lead_sent_to_a_dropped_follower_passes_on() {
        let flights = Flights::default();
        let first = lead(&flights, key(1)).await;
        let mut waiting: Vec<_> = Vec::new();
        for _ in 0..2 {
            let mut join = Box::pin({
                let flights = flights.clone();
                async move { flights.join(key(1)).await }
            });
            tokio::select! { biased; _ = &mut join => panic!("it waits"), () = tokio::task::yield_now() => {} }
            waiting.push(join);
        }
        drop(first);
        // The lead was sent to the first follower, which is dropped before it receives it.
        drop(waiting.remove(0));
        assert!(matches!(waiting.remove(0).await, FlightOutcome::Lead(_)));
        assert!(flights.lock().is_empty());
    }
}
