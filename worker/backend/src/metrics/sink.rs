//! The producer's end of the ring: waits for room, wakes the frontend, counts dropped samples.

use std::io;
use std::ops::Range;
use std::os::fd::OwnedFd;
use std::thread::{self, ThreadId};
use std::time::Duration;

use pharos::metrics::channel::{Definition, Described, PushError, Sample, Writer};
use pharos::metrics::log_throttle::LostSamples;
use pharos::metrics::tslog::push_request_id;
use pharos::timeline::Instant;
use pharos::wire::BatchRequest;

use super::MetricError;
use crate::clock;

/// How long to wait for room in a full ring before a sample is dropped. The frontend reads within a
/// fraction of that time unless the machine is overloaded or it has stopped.
const MAX_WAIT_NS: u64 = 1_000_000_000;
/// How long to sleep between two checks of a full ring.
const PAUSE: Duration = Duration::from_micros(200);
/// The most bytes of request ids with a sample: a record of the ring has little more room. A larger
/// batch is recorded with the ids of its first requests.
const MAX_IDS: usize = 7 << 10;

/// The requests that a sample belongs to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Requests<'a> {
    /// All requests of the batch that this thread executes, their ids joined by commas; none on any
    /// other thread.
    Batch,
    /// The request at this position of the batch that is being executed.
    One(usize),
    /// The request with this id.
    Id(&'a str),
    /// The requests with these ids, separated by commas.
    Ids(&'a str),
    /// No request.
    None,
}

/// The destination of samples.
pub(super) struct Sink {
    /// The model and its version, for the log.
    model: String,
    writer: Writer,
    pipe: OwnedFd,
    /// The ring has remained full since a caller last waited: no caller waits again until it has
    /// room.
    stuck: bool,
    batch: BatchIds,
    /// An id that a caller has passed, in its encoded form.
    given: String,
    lost: LostSamples,
}

/// The ids of the batch that is being executed.
#[derive(Default)]
struct BatchIds {
    /// All ids in the form of the metric logs: encoded and separated by commas.
    joined: String,
    /// The length of the prefix sent with a sample for the whole batch.
    first: usize,
    /// The range of each request's id in `joined`.
    places: Vec<Range<usize>>,
    /// The thread that executes it.
    thread: Option<ThreadId>,
}

impl Sink {
    /// Opens the ring.
    ///
    /// # Errors
    /// The descriptor is not a ring.
    pub(super) fn open(ring: &OwnedFd, pipe: OwnedFd, model: String) -> io::Result<Self> {
        let writer = Writer::open(ring)?;
        Ok(Self {
            model,
            writer,
            pipe,
            stuck: false,
            batch: BatchIds::default(),
            given: String::new(),
            lost: LostSamples::default(),
        })
    }

    /// Returns the number of a series; sends the series to the frontend if it is new.
    ///
    /// # Errors
    /// The ring has no room for the series.
    pub(super) fn intern(&mut self, series: &Definition) -> Result<u32, PushError> {
        let mut room = Room::new(self.stuck, &self.pipe);
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

    /// Sends the description of a metric that the model describes to the frontend.
    ///
    /// # Errors
    /// The ring has no room for the description.
    pub(super) fn describe(&mut self, metric: &Described) -> Result<(), PushError> {
        let mut room = Room::new(self.stuck, &self.pipe);
        loop {
            match self.writer.describe(metric) {
                Err(PushError::Full) if room.wait() => {}
                result => return result,
            }
        }
    }

    /// Commits a sample.
    #[inline]
    pub(super) fn sample(
        &mut self,
        series: u32,
        value: f64,
        clock: Instant,
        requests: Requests<'_>,
    ) {
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
        let mut room = Room::new(self.stuck, &self.pipe);
        let pushed = self
            .writer
            .sample_or_drop(&Sample { series, value, clock, request_id }, || room.wait());
        match pushed {
            Ok(()) => {
                self.stuck = false;
                self.call_reader();
            }
            Err(error) => {
                self.stuck |= error == PushError::Full;
                note(&mut self.lost, &self.model, &error);
            }
        }
    }

    /// Counts a dropped sample in the ring, where the frontend reads the count, and prints the
    /// reason.
    pub(super) fn drop_sample(&mut self, why: &MetricError) {
        self.writer.count_dropped();
        note(&mut self.lost, &self.model, why);
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
        if self.writer.needs_wakeup() {
            wake(&self.pipe);
        }
    }
}

impl BatchIds {
    fn of_this_thread(&self) -> &str {
        // Check `first` first: mostly there are no ids, or there is no batch.
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

/// Wakes the frontend so that it reads the ring.
fn wake(pipe: &OwnedFd) {
    // A full pipe has already woken the frontend.
    let _ = rustix::io::write(pipe, &[1]);
}

/// Waits for room in the ring, for a limited time.
struct Room<'a> {
    pipe: &'a OwnedFd,
    /// The ring has stayed full since an earlier wait: do not wait again.
    stuck: bool,
    since: Option<Instant>,
}

impl<'a> Room<'a> {
    fn new(stuck: bool, pipe: &'a OwnedFd) -> Self {
        Self { pipe, stuck, since: None }
    }

    /// Waits a little; returns `false` after the maximum time.
    #[cold]
    fn wait(&mut self) -> bool {
        if self.stuck {
            return false;
        }
        let now = clock::now();
        let since = *self.since.get_or_insert_with(|| {
            wake(self.pipe);
            now
        });
        thread::sleep(PAUSE);
        now.ns_since(since) < MAX_WAIT_NS
    }
}

/// Prints the number of dropped samples and why they were dropped, at most once per second.
#[cold]
fn note(lost: &mut LostSamples, model: &str, why: &dyn std::fmt::Display) {
    if let Some((count, reasons)) = lost.add(1, [why], clock::now()) {
        eprintln!("{count} metric samples of model {model} were dropped: {reasons}");
    }
}
