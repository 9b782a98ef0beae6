//! The producer's end of the ring: waits for room, calls the frontend, counts what is lost.

use std::io;
use std::ops::Range;
use std::os::fd::OwnedFd;
use std::thread::{self, ThreadId};
use std::time::Duration;

use pharos::metrics::channel::{Definition, Described, PushError, Sample, Writer};
use pharos::metrics::emitter::Throttle;
use pharos::metrics::tslog::push_request_id;
use pharos::timeline::Instant;
use pharos::wire::BatchRequest;

use super::MetricError;
use crate::clock;

/// How long a full ring is waited for before a sample is dropped. The frontend reads it within a fraction of that unless
/// the machine is overloaded or it has stopped altogether.
const PATIENCE_NS: u64 = 1_000_000_000;
/// How long to sleep between two looks at a full ring.
const PAUSE: Duration = Duration::from_micros(200);
/// The most bytes of request ids that go with a sample: a record of the ring has little more. A batch with more is recorded
/// with those of its first requests.
const MAX_IDS: usize = 7 << 10;

/// For which requests a sample is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Requests<'a> {
    /// All requests of the batch that this thread executes, their ids joined by commas; none on any other thread.
    Batch,
    /// The request at this position of the batch that is being executed.
    One(usize),
    /// This id.
    Id(&'a str),
    /// These ids, with commas between them.
    Ids(&'a str),
    /// No request.
    None,
}

/// Where samples go.
pub(super) struct Sink {
    writer: Writer,
    bell: OwnedFd,
    /// The ring stayed full and has had no room since: no caller waits for it again until it has.
    stuck: bool,
    batch: BatchIds,
    /// An id that a caller has given, in its encoded form.
    given: String,
    lost: Lost,
}

/// The ids of the batch that is being executed.
#[derive(Default)]
struct BatchIds {
    /// All of them in the form of the metric logs: encoded, and with commas between.
    joined: String,
    /// How much of that goes with a sample for the whole batch.
    first: usize,
    /// Where in `joined` each request's id lies.
    places: Vec<Range<usize>>,
    /// The thread that executes it.
    thread: Option<ThreadId>,
}

/// Samples dropped since it was last said.
#[derive(Default)]
struct Lost {
    count: u64,
    throttle: Throttle,
}

impl Sink {
    /// Opens the ring.
    ///
    /// # Errors
    /// It is no ring.
    pub(super) fn open(ring: &OwnedFd, bell: OwnedFd) -> io::Result<Self> {
        let writer = Writer::open(ring)?;
        Ok(Self { writer, bell, stuck: false, batch: BatchIds::default(), given: String::new(), lost: Lost::default() })
    }

    /// The number of a series, told to the frontend when it is new.
    ///
    /// # Errors
    /// When it cannot be told.
    pub(super) fn intern(&mut self, series: &Definition) -> Result<u32, PushError> {
        let mut room = Room::new(self.stuck, &self.bell);
        let number = loop {
            match self.writer.intern(series) {
                Err(PushError::Full) if room.wait() => {}
                result => break result,
            }
        };
        self.stuck = number == Err(PushError::Full);
        self.call_reader();
        number
    }

    /// Tells the frontend of a metric that the model describes.
    ///
    /// # Errors
    /// When it cannot be told.
    pub(super) fn describe(&mut self, metric: &Described) -> Result<(), PushError> {
        let mut room = Room::new(self.stuck, &self.bell);
        loop {
            match self.writer.describe(metric) {
                Err(PushError::Full) if room.wait() => {}
                result => return result,
            }
        }
    }

    /// Commits a sample.
    #[inline]
    pub(super) fn sample(&mut self, (series, value): (u32, f64), clock: Instant, requests: Requests<'_>) {
        let request_id = match requests {
            Requests::Batch => self.batch.of_this_thread(),
            Requests::One(at) => self.batch.one(at),
            Requests::Id(id) => {
                self.given.clear();
                push_request_id(&mut self.given, 0, id);
                truncated(&self.given)
            }
            Requests::Ids(ids) => {
                self.given.clear();
                for (position, id) in ids.split(',').enumerate() {
                    let before = self.given.len();
                    push_request_id(&mut self.given, position, id);
                    if self.given.len() > MAX_IDS {
                        self.given.truncate(before);
                        break;
                    }
                }
                &self.given
            }
            Requests::None => "",
        };
        let mut room = Room::new(self.stuck, &self.bell);
        let pushed = self.writer.sample_or_drop(&Sample { series, value, clock, request_id }, || room.wait());
        match pushed {
            Ok(()) => {
                self.stuck = false;
                self.call_reader();
            }
            Err(error) => {
                self.stuck |= error == PushError::Full;
                self.lost.note(&error);
            }
        }
    }

    /// Counts a sample that could not be made, where the frontend sees it, and says why.
    pub(super) fn drop_sample(&mut self, why: &MetricError) {
        self.writer.count_dropped();
        self.lost.note(why);
    }

    pub(super) fn batch_begins(&mut self, requests: &[BatchRequest]) {
        let BatchIds { joined, first, places, thread } = &mut self.batch;
        joined.clear();
        places.clear();
        *first = 0;
        for (position, request) in requests.iter().enumerate() {
            let begin = joined.len() + usize::from(position > 0);
            push_request_id(joined, position, &request.id);
            places.push(begin..joined.len());
            if joined.len() <= MAX_IDS {
                *first = joined.len();
            }
        }
        *thread = Some(thread::current().id());
    }

    pub(super) fn batch_ended(&mut self) {
        self.batch.thread = None;
        self.batch.first = 0;
        self.batch.places.clear();
    }

    fn call_reader(&mut self) {
        if self.writer.wants_reader() {
            ring(&self.bell);
        }
    }
}

impl BatchIds {
    fn of_this_thread(&self) -> &str {
        // The ids first: mostly there are none, or no batch.
        match self.thread {
            Some(thread) if self.first > 0 && thread == thread::current().id() => {
                self.joined.get(..self.first).unwrap_or_default()
            }
            _ => "",
        }
    }

    fn one(&self, at: usize) -> &str {
        let id = self.places.get(at).and_then(|place| self.joined.get(place.clone()));
        truncated(id.unwrap_or_default())
    }
}

/// At most [`MAX_IDS`] bytes of a text.
fn truncated(text: &str) -> &str {
    if text.len() <= MAX_IDS { text } else { &text[..text.floor_char_boundary(MAX_IDS)] }
}

/// Makes the frontend read the ring.
fn ring(bell: &OwnedFd) {
    // A pipe that is full has been rung often enough.
    let _ = rustix::io::write(bell, &[1]);
}

/// Waits for room in the ring, with bounds.
struct Room<'a> {
    bell: &'a OwnedFd,
    /// No caller waits.
    stuck: bool,
    since: Option<Instant>,
}

impl<'a> Room<'a> {
    fn new(stuck: bool, bell: &'a OwnedFd) -> Self {
        Self { bell, stuck, since: None }
    }

    /// Waits a little; `false` when it has been long enough.
    #[cold]
    fn wait(&mut self) -> bool {
        if self.stuck {
            return false;
        }
        let now = clock::now();
        let since = *self.since.get_or_insert_with(|| {
            ring(self.bell);
            now
        });
        thread::sleep(PAUSE);
        now.ns_since(since) < PATIENCE_NS
    }
}

impl Lost {
    /// Prints at most once a second how many there were.
    #[cold]
    fn note(&mut self, why: &dyn std::fmt::Display) {
        self.count += 1;
        if self.throttle.pass(clock::now()).is_some() {
            eprintln!("{} metric samples were dropped: {why}", self.count);
            self.count = 0;
        }
    }
}
