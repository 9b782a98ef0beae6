//! The ring: round trips, two threads, and a malicious producer.

use std::sync::atomic::AtomicBool;

use pharos_base::timeline::Instant;
use proptest::prelude::*;

use super::*;
use crate::catalog::Kind;

/// A series of the metric with this number for a name.
fn series(number: u32, values: &[String]) -> Definition {
    let labels =
        values.iter().enumerate().map(|(at, value)| (format!("l{at}"), value.clone())).collect();
    Definition {
        name: number.to_string(),
        kind: Some(Kind::Histogram),
        unit: "ms".to_owned(),
        labels,
    }
}

/// The number of words of the record that defines `series(0, &[])`.
const SERIES_WORDS: u64 = 4;

/// An event as owned data.
#[derive(Clone, Debug, PartialEq)]
enum Read {
    Metric(Described),
    Series(u32, Vec<String>),
    Sample(u32, f64, u64, String),
}

fn drain(reader: &mut Reader) -> Result<Vec<Read>, Corrupt> {
    let mut read = Vec::new();
    let count = reader.drain(|event| {
        read.push(match event {
            Event::Series(series) => {
                assert_eq!((series.kind, series.unit.as_str()), (Some(Kind::Histogram), "ms"));
                assert!(
                    series
                        .labels
                        .iter()
                        .enumerate()
                        .all(|(at, (name, _))| *name == format!("l{at}"))
                );
                Read::Series(
                    series.name.parse().unwrap(),
                    series.labels.into_iter().map(|(_, value)| value).collect(),
                )
            }
            Event::Metric(metric) => Read::Metric(metric),
            Event::Sample(s) => Read::Sample(s.series, s.value, s.clock.0, s.request_id.to_owned()),
        });
    })?;
    assert_eq!(count, read.len());
    Ok(read)
}

fn ring() -> (OwnedFd, Writer, Reader) {
    let (fd, reader) = create(0).unwrap();
    let writer = Writer::open(&fd).unwrap();
    (fd, writer, reader)
}

fn sample(series: u32, value: f64, request_id: &str) -> Sample<'_> {
    Sample { series, value, clock: Instant(5), request_id }
}

fn map(fd: &OwnedFd) -> SharedMemory {
    let len = rustix::fs::fstat(fd).unwrap().st_size;
    SharedMemory::map(fd, usize::try_from(len).unwrap()).unwrap()
}

#[test]
fn records_arrive_as_written() {
    let (_fd, mut writer, mut reader) = ring();
    assert!(reader.is_empty());
    let labels = ["ab".to_owned(), String::new(), "größer,\n".to_owned()];
    assert_eq!(writer.intern(&series(3, &labels)), Ok(0));
    assert_eq!(writer.intern(&series(3, &labels[..1])), Ok(1));
    assert_eq!(writer.intern(&series(3, &labels)), Ok(0));
    for id in ["", "1234567", "12345678", "123456789"] {
        writer.sample(&sample(1, -0.5, id)).unwrap();
    }
    assert!(!reader.is_empty());
    let expected = [
        Read::Series(3, labels.to_vec()),
        Read::Series(3, vec!["ab".to_owned()]),
        Read::Sample(1, -0.5, 5, String::new()),
        Read::Sample(1, -0.5, 5, "1234567".to_owned()),
        Read::Sample(1, -0.5, 5, "12345678".to_owned()),
        Read::Sample(1, -0.5, 5, "123456789".to_owned()),
    ];
    assert_eq!(drain(&mut reader).unwrap(), expected);
    assert_eq!(drain(&mut reader).unwrap(), []);
}

#[test]
fn committed_records_of_a_dead_producer_are_read() {
    let (fd, mut writer, mut reader) = ring();
    writer.intern(&series(0, &[])).unwrap();
    writer.sample(&sample(0, 1.0, "")).unwrap();
    drop((fd, writer));
    assert_eq!(drain(&mut reader).unwrap().len(), 2);
}

#[test]
fn a_full_ring_waits_then_drops_and_counts() {
    let (_fd, mut writer, mut reader) = ring();
    writer.intern(&series(0, &[])).unwrap();
    let mut written = 0;
    while writer.sample(&sample(0, 1.0, "")).is_ok() {
        written += 1;
    }
    // 3 words for each sample.
    assert_eq!(written, (2 * MAX_RECORD_WORDS - SERIES_WORDS as usize) / 3);
    assert_eq!(writer.sample(&sample(0, 1.0, "")), Err(PushError::Full));
    assert_eq!(writer.intern(&series(1, &["x".repeat(100)])), Err(PushError::Full));
    let mut waits = 0;
    let dropped = writer.sample_or_drop(&sample(0, 1.0, ""), || {
        waits += 1;
        waits < 3
    });
    assert_eq!((dropped, waits, reader.dropped()), (Err(PushError::Full), 3, 1));
    let mut read = 0;
    let written_now = writer.sample_or_drop(&sample(0, 1.0, ""), || {
        read += drain(&mut reader).unwrap().len();
        true
    });
    assert_eq!((written_now, read, reader.dropped()), (Ok(()), written + 1, 1));
    assert_eq!(drain(&mut reader).unwrap().len(), 1);
}

#[test]
fn the_reader_is_woken_once_for_each_half_of_the_ring() {
    let (_fd, mut writer, mut reader) = ring();
    writer.intern(&series(0, &[])).unwrap();
    let mut calls = 0;
    let mut most = 0;
    for _ in 0..30 * MAX_RECORD_WORDS / 3 {
        writer.sample(&sample(0, 1.0, "")).unwrap();
        most = most.max(reader.waiting_bytes());
        if writer.needs_wakeup() {
            assert!(!writer.needs_wakeup(), "woken twice");
            assert!(reader.waiting_bytes() > 8 * MAX_RECORD_WORDS as u64);
            calls += 1;
            drain(&mut reader).unwrap();
        }
    }
    assert!((28..=30).contains(&calls), "{calls} calls for 30 halves");
    assert!(
        most < 8 * 2 * MAX_RECORD_WORDS as u64,
        "a reader that drains when it is woken keeps the ring from filling"
    );
}

#[test]
fn refuses_records_that_exceed_the_layout() {
    let (fd, mut writer, _) = ring();
    assert_eq!(
        writer.intern(&series(0, &["x".repeat(8 * MAX_RECORD_WORDS)])),
        Err(PushError::TooLong)
    );
    assert_eq!(writer.sample(&sample(0, 1.0, "")), Err(PushError::UnknownSeries));
    writer.intern(&series(0, &[])).unwrap();
    assert_eq!(
        writer.sample(&sample(0, 1.0, &"x".repeat(8 * MAX_RECORD_WORDS))),
        Err(PushError::TooLong)
    );
    map(&fd).words()[0].store(0, Ordering::Relaxed);
    assert!(Writer::open(&fd).is_err());
}

#[test]
fn refuses_a_header_with_a_wrong_capacity() {
    for capacity in [0, 1, 3000, 1 << 20, u64::MAX, 1 << 63] {
        let (fd, _, _) = ring();
        map(&fd).words()[CAPACITY].store(capacity, Ordering::Relaxed);
        assert!(Reader::open(map(&fd)).is_err(), "{capacity}");
    }
    let tiny = shm::create("tiny", 16).unwrap();
    assert!(Reader::open(map(&tiny)).is_err());
}

/// Writes `words` as the first record after one series, commits `head` words, and returns the
/// reader's result.
fn hostile(words: &[u64], head: u64) -> Result<Vec<Read>, Corrupt> {
    let (fd, mut writer, mut reader) = ring();
    writer.intern(&series(0, &[])).unwrap();
    assert_eq!(drain(&mut reader).unwrap().len(), 1);
    let memory = map(&fd);
    for (at, &word) in words.iter().enumerate() {
        memory.words()[DATA + SERIES_WORDS as usize + at].store(word, Ordering::Relaxed);
    }
    memory.words()[HEAD].store(SERIES_WORDS.wrapping_add(head), Ordering::Release);
    let result = drain(&mut reader);
    if result.is_err() {
        assert_eq!(drain(&mut reader), result, "an error is permanent");
    }
    result
}

#[test]
fn invalid_records_are_reported_as_corrupt() {
    let first = |kind: u64, padding: u64, words: u64, number: u64| {
        kind | padding << 8 | words << 16 | number << 32
    };
    let ok = [first(2, 0, 3, 0), 1f64.to_bits(), 9];
    assert_eq!(hostile(&ok, 3).unwrap(), [Read::Sample(0, 1.0, 9, String::new())]);
    let cases: &[(&[u64], u64, &str)] = &[
        (&ok, 2 * MAX_RECORD_WORDS as u64 + 1, "2049 words are waiting in a ring of 2048"),
        (&ok, u64::MAX, "18446744073709551615 words are waiting"),
        (&ok, 2, "a record of 3 words where 2 are committed"),
        (&[first(2, 0, 0, 0)], 3, "a record of 0 words"),
        (&[first(2, 0, 1025, 0)], 1100, "a record of 1025 words where 1100"),
        (&[first(2, 0, 2, 0), 0], 2, "a record of kind 2 with 2 words"),
        (&[first(1, 0, 1, 1)], 1, "a record of kind 1 with 1 words"),
        (&[first(4, 0, 3, 0), 0, 0], 3, "a record of kind 4 with 3 words"),
        (&[first(3, 0, 2, 0), 0], 2, "a record of kind 3 with 2 words"),
        (&[first(3, 0, 3, 0), 0, 0], 3, "a metric without name and description"),
        (&[first(3, 0, 3, 0), 4, 0], 3, "a metric of an unknown type"),
        (&[first(3, 0, 4, 0), 0, 2, 0], 4, "buckets that exceed their record"),
        (&[first(3, 0, 4, 0), 0, u64::MAX, 0], 4, "buckets that exceed their record"),
        (&[first(2, 0, 3, 1), 0, 0], 3, "a sample of series 1, but 1 are defined"),
        (&[first(2, 1, 3, 0), 0, 0], 3, "1 bytes of padding in 0 words"),
        (&[first(2, 8, 4, 0), 0, 0, 0], 4, "8 bytes of padding in 1 words"),
        (&[first(2, 0, 4, 0), 0, 0, u64::MAX], 4, "a request id that is not UTF-8"),
        (&[first(1, 0, 2, 0), 0], 2, "a definition of series 0 after 1 series"),
        (&[first(1, 0, 2, 2), 0], 2, "a definition of series 2 after 1 series"),
        (&[first(1, 0, 2, 1), 4], 2, "a metric of an unknown type"),
        (&[first(1, 0, 2, 1), 1 << 32], 2, "a metric of an unknown type"),
        (&[first(1, 4, 4, 1), 0, 0, 0], 4, "a label without a value"),
        (&[first(1, 4, 3, 1), 0, 0], 3, "a series without name and unit"),
        (&[first(1, 0, 3, 1), 0, 5], 3, "a text that exceeds its record"),
        (&[first(1, 6, 3, 1), 0, 0], 3, "a text that exceeds its record"),
        (&[first(1, 0, 3, 1), 0, 0xff00_0000_0000_0004], 3, "a text of a series that is not UTF-8"),
    ];
    for (words, head, expected) in cases {
        let message = hostile(words, *head).unwrap_err().to_string();
        assert!(message.contains(expected), "{message}, not {expected}");
    }
}

#[test]
fn two_threads_lose_nothing() {
    const SAMPLES: u64 = 300_000;
    let (fd, mut reader) = create(0).unwrap();
    let producer = std::thread::spawn(move || {
        let mut writer = Writer::open(&fd).unwrap();
        drop(fd);
        writer.intern(&series(0, &[])).unwrap();
        for at in 0..SAMPLES {
            let id = "r".repeat((at % 40) as usize);
            let sample =
                Sample { series: 0, value: at as f64, clock: Instant(at), request_id: &id };
            let written = writer.sample_or_drop(&sample, || {
                std::thread::yield_now();
                true
            });
            assert_eq!(written, Ok(()));
        }
    });
    let mut next = 0;
    while next < SAMPLES {
        reader
            .drain(|event| {
                if let Event::Sample(sample) = event {
                    assert_eq!((sample.value, sample.clock), (next as f64, Instant(next)));
                    assert_eq!(sample.request_id.len() as u64, next % 40);
                    next += 1;
                }
            })
            .unwrap();
        std::thread::yield_now();
    }
    producer.join().unwrap();
    assert_eq!(reader.dropped(), 0);
}

#[test]
fn a_reader_survives_random_writes_to_the_ring() {
    let mut failures = 0;
    for round in 0..50u64 {
        let (fd, mut writer, mut reader) = ring();
        let memory = map(&fd);
        writer.intern(&series(0, &[])).unwrap();
        let writing = AtomicBool::new(false);
        let stop = AtomicBool::new(false);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                let mut state = round.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
                while !stop.load(Ordering::Relaxed) {
                    state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
                    let at = HEAD + (state >> 33) as usize % 600;
                    // Small values make lengths and kinds that pass the first checks.
                    memory.words()[at].store(state & 0x1_0007_0703, Ordering::Relaxed);
                    writing.store(true, Ordering::Relaxed);
                }
            });
            while !writing.load(Ordering::Relaxed) {
                std::thread::yield_now();
            }
            for at in 0..2000 {
                let _ = writer.sample(&sample(0, f64::from(at), "request"));
                if reader.drain(|_| ()).is_err() {
                    failures += 1;
                    break;
                }
            }
            stop.store(true, Ordering::Relaxed);
        });
    }
    assert!(failures > 0, "no random write was detected");
}

#[derive(Clone, Debug)]
enum Step {
    Sample(usize, f64, String),
    Drain,
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        8 => (0..4usize, -1e9..1e9f64, "[a-zé-]{0,60}").prop_map(|(series, value, id)| Step::Sample(series, value, id)),
        1 => Just(Step::Drain),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn any_sequence_of_writes_and_drains_keeps_order_and_content(steps in prop::collection::vec(step(), 0..2000)) {
        let (_fd, mut writer, mut reader) = ring();
        let mut expected = Vec::new();
        for number in 0..4 {
            let labels = vec!["x".repeat(number as usize)];
            prop_assert_eq!(writer.intern(&series(number, &labels)), Ok(number));
            expected.push(Read::Series(number, labels));
        }
        for step in steps {
            match step {
                Step::Sample(series, value, id) => match writer.sample(&sample(series as u32, value, &id)) {
                    Ok(()) => expected.push(Read::Sample(series as u32, value, 5, id)),
                    Err(error) => prop_assert_eq!(error, PushError::Full),
                },
                Step::Drain => prop_assert_eq!(drain(&mut reader).unwrap(), std::mem::take(&mut expected)),
            }
        }
        prop_assert_eq!(drain(&mut reader).unwrap(), expected);
    }

    #[test]
    fn no_content_of_the_ring_causes_a_panic(words in prop::collection::vec(prop_oneof![any::<u64>(), 0..0x0008_0703u64], 1..64), head in 0..80u64) {
        let _ = hostile(&words, head);
    }
}

/// Prints the cost of a push; run with `--nocapture`.
#[test]
fn cost_of_a_push() {
    let (fd, mut reader) = create(1 << 22).unwrap();
    let mut writer = Writer::open(&fd).unwrap();
    writer.intern(&series(0, &[])).unwrap();
    for id in ["", "75993b11-281a-4550-88b6-aa1a5cba0d8f"] {
        let mut pushed = 0u32;
        let mut read = 0;
        let mut push_time = std::time::Duration::ZERO;
        let mut read_time = std::time::Duration::ZERO;
        for _ in 0..20 {
            #[allow(clippy::disallowed_methods)]
            let start = std::time::Instant::now();
            for _ in 0..50_000 {
                writer.sample(&sample(0, 1.0, id)).unwrap();
            }
            push_time += start.elapsed();
            pushed += 50_000;
            #[allow(clippy::disallowed_methods)]
            let start = std::time::Instant::now();
            read += reader.drain(|_| ()).unwrap();
            read_time += start.elapsed();
        }
        println!(
            "request id of {} bytes: push {:?}, read {:?}",
            id.len(),
            push_time / pushed,
            read_time / read as u32
        );
    }
}

#[test]
fn a_described_metric_arrives_unchanged() {
    let (_fd, mut writer, mut reader) = ring();
    let metric = Described {
        name: "seconds".to_owned(),
        kind: Kind::Histogram,
        description: "how long; \u{e4}".to_owned(),
        buckets: vec![0.1, 2.5],
        dimensions: vec!["shop".to_owned(), String::new()],
    };
    writer.describe(&metric).unwrap();
    let bare = Described {
        buckets: Vec::new(),
        dimensions: Vec::new(),
        kind: Kind::Gauge,
        ..metric.clone()
    };
    writer.describe(&bare).unwrap();
    assert_eq!(drain(&mut reader), Ok(vec![Read::Metric(metric.clone()), Read::Metric(bare)]));
    let long = Described { buckets: vec![0.0; MAX_RECORD_WORDS], ..metric };
    assert_eq!(writer.describe(&long), Err(PushError::TooLong));
}
