//! Single flight: of concurrent equal requests one leads, and the others wait for its response.
//!
//! No request waits forever: a leader stores its response, or is dropped (its request failed, was
//! cancelled or lost), and then all others join again. The first of them that runs leads. A request
//! may not run for a long time: the steps of a decoupled ensemble run only while its client reads.
//! So no request gets the lead while it waits, and none keeps it while it looks the key up.

use std::collections::HashMap;
use std::sync::Arc;

use parking_lot::{Mutex, MutexGuard};
use pharos::cache::{Entry, Key};
use tokio::sync::oneshot;

/// The requests for one key.
#[derive(Default)]
struct Flight {
    /// Whether one of them leads.
    is_led: bool,
    /// The others, which wait or look the key up.
    others: Vec<oneshot::Sender<Arc<Entry>>>,
}

/// The keys that are being looked up or executed.
#[derive(Default, Clone)]
pub(super) struct Flights(Arc<Mutex<HashMap<Key, Flight>>>);

/// The result of joining a flight.
pub(super) enum FlightOutcome {
    /// The stored response, or the leader's.
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

/// A request without the lead.
struct Joined {
    flights: Flights,
    key: Key,
    /// Whether another one led when it joined.
    follows: bool,
    landing: oneshot::Receiver<Arc<Entry>>,
}

impl Flights {
    /// Waits for the leader. Without one, looks the key up and takes the lead if there is no
    /// response.
    pub(super) async fn join(
        &self,
        key: Key,
        look_up: impl Future<Output = Option<Arc<Entry>>>,
    ) -> FlightOutcome {
        let mut look_up = Some(look_up);
        loop {
            let joined = self.enter(key);
            if !joined.follows
                && let Some(look_up) = look_up.take()
                && let Some(entry) = look_up.await
            {
                return FlightOutcome::Entry(entry);
            }
            if let Some(outcome) = joined.landed_or_lead().await {
                return outcome;
            }
        }
    }

    fn enter(&self, key: Key) -> Joined {
        let (sender, landing) = oneshot::channel();
        let mut flights = self.lock();
        let flight = flights.entry(key).or_default();
        flight.others.push(sender);
        Joined { flights: self.clone(), key, follows: flight.is_led, landing }
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<Key, Flight>> {
        self.0.lock()
    }
}

impl Joined {
    /// Returns the response of a leader, or takes the lead. Returns `None` if the leader has ended
    /// without a response.
    async fn landed_or_lead(mut self) -> Option<FlightOutcome> {
        {
            let mut flights = self.flights.lock();
            // A leader may have come and gone during the look-up.
            if let Ok(entry) = self.landing.try_recv() {
                return Some(FlightOutcome::Entry(entry));
            }
            let flight = flights.entry(self.key).or_default();
            if !flight.is_led {
                flight.is_led = true;
                return Some(FlightOutcome::Lead(FlightLeader {
                    flights: self.flights.clone(),
                    key: Some(self.key),
                }));
            }
        }
        (&mut self.landing).await.ok().map(FlightOutcome::Entry)
    }
}

impl Drop for Joined {
    fn drop(&mut self) {
        self.landing.close();
        let mut flights = self.flights.lock();
        let Some(flight) = flights.get_mut(&self.key).filter(|flight| !flight.is_led) else {
            return;
        };
        flight.others.retain(|other| !other.is_closed());
        if flight.others.is_empty() {
            flights.remove(&self.key);
        }
    }
}

impl FlightLeader {
    /// Returns whether other requests could use the response now.
    pub(super) fn has_followers(&self) -> bool {
        let Some(key) = &self.key else { return false };
        self.flights.lock().get_mut(key).is_some_and(|flight| {
            flight.others.retain(|other| !other.is_closed());
            !flight.others.is_empty()
        })
    }

    /// Passes the response to the other requests.
    pub(super) fn finish(mut self, entry: &Arc<Entry>) {
        for other in self.end() {
            // A send fails if the other request was cancelled.
            let _ = other.send(entry.clone());
        }
    }

    /// Ends the flight. Returns the other requests, which join again when dropped.
    fn end(&mut self) -> Vec<oneshot::Sender<Arc<Entry>>> {
        let Some(key) = self.key.take() else { return Vec::new() };
        let flight = self.flights.lock().remove(&key);
        flight.map(|flight| flight.others).unwrap_or_default()
    }
}

impl Drop for FlightLeader {
    fn drop(&mut self) {
        drop(self.end());
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, clippy::panic, clippy::indexing_slicing)]
mod tests {
    use std::pin::Pin;
    use std::task::{Context, Poll, Waker};

    use pharos::cache::Identifier;
    use pharos::id::ModelVersion;
    use pharos::infer::{InferRequest, InferResponse};
    use pharos::model::{Completion, Draft};

    use super::*;

    fn key(version: u64) -> Key {
        let completion =
            Completion { directory: "m", backends: &["builtin"], ..Completion::default() };
        let text = "backend: 'builtin' input { name: 'A' data_type: TYPE_INT8 dims: [1] } output \
                    { name: 'B' data_type: TYPE_INT8 dims: [1] }";
        let config = Draft::from_text(text, "config.pbtxt").unwrap().complete(&completion).unwrap();
        Identifier::new(&ModelVersion::new("m", version), &config)
            .finish()
            .key(&InferRequest::default())
    }

    fn entry() -> Arc<Entry> {
        Arc::new(Entry::copy_of(&InferResponse::default()))
    }

    async fn none() -> Option<Arc<Entry>> {
        None
    }

    async fn lead(flights: &Flights, key: Key) -> FlightLeader {
        match flights.join(key, none()).await {
            FlightOutcome::Lead(lead) => lead,
            FlightOutcome::Entry(_) => panic!("nothing is stored"),
        }
    }

    type Joining<'a> = Pin<Box<dyn Future<Output = FlightOutcome> + 'a>>;

    fn join(flights: &Flights, key: Key) -> Joining<'_> {
        Box::pin(flights.join(key, none()))
    }

    fn poll(joining: &mut Joining<'_>) -> Poll<FlightOutcome> {
        joining.as_mut().poll(&mut Context::from_waker(Waker::noop()))
    }

    /// Requests that join in order and wait.
    fn followers(flights: &Flights, key: Key, count: usize) -> Vec<Joining<'_>> {
        let mut all: Vec<_> = (0..count).map(|_| join(flights, key)).collect();
        assert!(all.iter_mut().all(|one| poll(one).is_pending()));
        all
    }

    #[tokio::test]
    async fn all_followers_get_the_leaders_response() {
        let flights = Flights::default();
        let first = lead(&flights, key(1)).await;
        let other = lead(&flights, key(2)).await;
        assert!(!first.has_followers());
        let waiting = followers(&flights, key(1), 50);
        assert!(first.has_followers() && !other.has_followers());
        let entry = entry();
        first.finish(&entry);
        for waiting in waiting {
            assert!(
                matches!(waiting.await, FlightOutcome::Entry(found) if Arc::ptr_eq(&found, &entry))
            );
        }
        drop(other);
        assert!(flights.lock().is_empty());
    }

    #[tokio::test]
    async fn another_request_leads_when_the_leader_fails() {
        let flights = Flights::default();
        let first = lead(&flights, key(1)).await;
        let mut waiting = followers(&flights, key(1), 4).into_iter();
        drop(waiting.next());
        drop(first);
        let FlightOutcome::Lead(second) = waiting.next().unwrap().await else {
            panic!("nothing is stored")
        };
        let mut rest: Vec<_> = waiting.collect();
        assert!(rest.iter_mut().all(|one| poll(one).is_pending()), "only one leads");
        drop(second);
        let FlightOutcome::Lead(third) = rest.remove(0).await else { panic!("nothing is stored") };
        assert!(poll(&mut rest[0]).is_pending());
        third.finish(&entry());
        assert!(matches!(rest.remove(0).await, FlightOutcome::Entry(_)));
        assert!(flights.lock().is_empty());
    }

    #[tokio::test]
    async fn a_follower_that_does_not_run_does_not_lead() {
        let flights = Flights::default();
        let first = lead(&flights, key(1)).await;
        let mut waiting = followers(&flights, key(1), 2);
        drop(first);
        // The first follower is not polled. A new request and the other follower continue without
        // it.
        let FlightOutcome::Lead(second) = join(&flights, key(1)).await else {
            panic!("nothing is stored")
        };
        drop(second);
        let FlightOutcome::Lead(third) = waiting.remove(1).await else {
            panic!("nothing is stored")
        };
        third.finish(&entry());
        drop(waiting);
        assert!(flights.lock().is_empty());
    }

    #[tokio::test]
    async fn a_request_does_not_lead_while_it_looks_up() {
        let flights = Flights::default();
        let (reply, stored) = oneshot::channel::<Option<Arc<Entry>>>();
        let mut slow: Joining<'_> = Box::pin(flights.join(key(1), async { stored.await.unwrap() }));
        assert!(poll(&mut slow).is_pending());
        let FlightOutcome::Lead(leader) = join(&flights, key(1)).await else {
            panic!("nothing is stored")
        };
        assert!(leader.has_followers(), "the response may come after the look-up");
        leader.finish(&entry());
        reply.send(None).unwrap();
        assert!(matches!(slow.await, FlightOutcome::Entry(_)), "it is not executed again");
        assert!(flights.lock().is_empty());

        // The leader fails during the look-up, and a request is cancelled during its look-up.
        let mut slow: Joining<'_> = Box::pin(flights.join(key(1), std::future::pending()));
        assert!(poll(&mut slow).is_pending());
        drop(lead(&flights, key(1)).await);
        drop(slow);
        assert!(flights.lock().is_empty());
    }
}
