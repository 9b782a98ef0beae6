//! Native (exponential) histograms as Prometheus specifies them:
//! <https://prometheus.io/docs/specs/native_histograms/>.
//!
//! The bucket `index` of schema s holds the values above 2^((index - 1) / 2^s), up to 2^(index /
//! 2^s) inclusive.
//!
//! Observations are counted without a lock, at the configured schema, in pages: one for each octave
//! (the values between two powers of two), created by its first observation. A reading merges
//! neighbouring buckets, which lowers the schema, until the limit of buckets holds. Counts only
//! grow, so later readings never have a higher schema.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};

use super::atomic::Count;
use super::catalog::NativeSpec;
use super::reading;

/// The octaves that are distinguished.
const OCTAVES: usize = (NativeSpec::HIGHEST_EXPONENT - NativeSpec::LOWEST_EXPONENT) as usize;
/// The most counts in the pages of one sign: all octaves up to schema 6, half of them with schema
/// 7, a quarter with schema 8.
const MAX_COUNTS: usize = 8192;
/// The exponent of infinity at schema 0: the bucket after the largest f64.
const INFINITE: i32 = 1025;

/// The counts of one series. A clone has the counts of its moment.
#[derive(Clone, Debug)]
pub(super) struct Native {
    spec: NativeSpec,
    /// The lower bounds of the buckets between 0.5 and 1; one bucket if the schema is 0 or lower.
    bounds: Arc<[f64]>,
    zero: Count,
    positive: OnceLock<Side>,
    negative: OnceLock<Side>,
}

/// The counts of one sign.
#[derive(Debug)]
struct Side {
    octaves: Box<[Octave]>,
    /// The number of pages, and the most of them.
    pages: AtomicUsize,
    max_pages: usize,
    /// Above the highest octave.
    infinite: Count,
}

#[derive(Clone, Debug, Default)]
struct Octave {
    page: OnceLock<Box<[Count]>>,
    /// Observations that are not in a page.
    whole: Count,
}

impl Clone for Side {
    fn clone(&self) -> Self {
        Self {
            octaves: self.octaves.clone(),
            pages: AtomicUsize::new(self.pages.load(Ordering::Relaxed)),
            max_pages: self.max_pages,
            infinite: self.infinite.clone(),
        }
    }
}

impl Native {
    pub(super) fn new(spec: NativeSpec) -> Self {
        let parts = 1_u32 << spec.schema.max(0);
        let bounds =
            (0..parts).map(|part| (f64::from(part) / f64::from(parts)).exp2() / 2.0).collect();
        Self {
            spec,
            bounds,
            zero: Count::default(),
            positive: OnceLock::new(),
            negative: OnceLock::new(),
        }
    }

    /// Records an observation, which must not be NaN, `times` times.
    pub(super) fn observe(&self, value: f64, times: u64) {
        let magnitude = value.abs();
        if magnitude <= self.spec.zero_threshold {
            return self.zero.add(times);
        }
        let side = if value < 0.0 { &self.negative } else { &self.positive };
        let side = side.get_or_init(|| Side::new(self.spec.schema));
        let (octave, part) = self.place(magnitude);
        side.add(octave, part, self.bounds.len(), times);
    }

    /// Returns the position of a value's octave, which is [`OCTAVES`] or more if it is above all,
    /// and the bucket in it.
    fn place(&self, magnitude: f64) -> (usize, usize) {
        let bits = magnitude.to_bits();
        // The value is fraction * 2^exponent, where the fraction is at least 0.5 and below 1. It is
        // no subnormal number.
        let exponent = (bits >> 52) as i32 - 1022;
        let fraction = f64::from_bits(bits & ((1 << 52) - 1) | 1022 << 52);
        let above = self.bounds.partition_point(|&bound| bound < fraction);
        // A power of two is the upper bound of an octave.
        let (exponent, part) =
            if above == 0 { (exponent - 1, self.bounds.len() - 1) } else { (exponent, above - 1) };
        (usize::try_from(exponent - NativeSpec::LOWEST_EXPONENT - 1).unwrap_or(0), part)
    }

    /// Returns the counts with at most the configured number of buckets.
    pub(super) fn read(&self) -> reading::Native {
        let highest = self.spec.schema.max(0);
        let [positive, negative] = [&self.positive, &self.negative].map(OnceLock::get);
        // Observations beside the pages are known to the octave only.
        let whole = [positive, negative].into_iter().flatten().any(Side::has_whole);
        let schema = if whole { 0 } else { highest };
        let buckets = |side: Option<&Side>| {
            side.map_or_else(Vec::new, |side| side.read(self.bounds.len(), schema))
        };
        let mut reading = reading::Native {
            schema,
            zero_threshold: self.spec.zero_threshold,
            zero_count: self.zero.get(),
            positive: buckets(positive),
            negative: buckets(negative),
        };
        while reading.schema > self.spec.schema
            || (reading.positive.len() + reading.negative.len() > self.spec.max_buckets
                && reading.schema > NativeSpec::LOWEST_SCHEMA)
        {
            reading.lower();
        }
        reading
    }
}

impl Side {
    fn new(schema: i32) -> Self {
        // Up to schema 0, an octave is one bucket.
        let max_pages = if schema > 0 { MAX_COUNTS >> schema } else { 0 };
        let octaves = std::iter::repeat_with(Octave::default).take(OCTAVES).collect();
        Self { octaves, pages: AtomicUsize::new(0), max_pages, infinite: Count::default() }
    }

    fn add(&self, octave: usize, part: usize, parts: usize, times: u64) {
        let Some(octave) = self.octaves.get(octave) else { return self.infinite.add(times) };
        let count = self.page(octave, parts).and_then(|page| page.get(part));
        count.unwrap_or(&octave.whole).add(times);
    }

    /// Returns the page of an octave; `None` if there are too many.
    fn page<'a>(&self, octave: &'a Octave, parts: usize) -> Option<&'a [Count]> {
        if let Some(page) = octave.page.get() {
            return Some(page);
        }
        if self.pages.load(Ordering::Relaxed) >= self.max_pages {
            return None;
        }
        Some(octave.page.get_or_init(|| {
            self.pages.fetch_add(1, Ordering::Relaxed);
            std::iter::repeat_with(Count::default).take(parts).collect()
        }))
    }

    /// Returns whether observations are counted beside the pages.
    fn has_whole(&self) -> bool {
        self.max_pages > 0 && self.octaves.iter().any(|octave| octave.whole.get() > 0)
    }

    /// Returns the buckets that are not empty at a schema: 0, or the schema of the pages, which
    /// have `parts` buckets.
    fn read(&self, parts: usize, schema: i32) -> Vec<(i32, u64)> {
        let mut buckets = Vec::new();
        for (exponent, octave) in (NativeSpec::LOWEST_EXPONENT + 1..).zip(&self.octaves) {
            let page: &[Count] = octave.page.get().map_or(&[], |page| page);
            if schema == 0 {
                let count = page.iter().map(Count::get).sum::<u64>() + octave.whole.get();
                buckets.push((exponent, count));
            } else {
                let first = (exponent - 1) * parts as i32 + 1;
                buckets.extend((first..).zip(page.iter().map(Count::get)));
            }
        }
        buckets.push((((INFINITE - 1) << schema) + 1, self.infinite.get()));
        buckets.retain(|(_, count)| *count > 0);
        buckets
    }
}

impl reading::Native {
    /// Merges each bucket with its neighbour: the same counts at the next lower schema.
    pub(super) fn lower(&mut self) {
        self.schema -= 1;
        for buckets in [&mut self.positive, &mut self.negative] {
            // The upper bound of the merged bucket: half of the index, rounded up.
            buckets.iter_mut().for_each(|(index, _)| *index = (*index + 1) >> 1);
            buckets.dedup_by(|next, kept| {
                let same = next.0 == kept.0;
                kept.1 += if same { next.1 } else { 0 };
                same
            });
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    fn spec(schema: i32, max_buckets: usize) -> NativeSpec {
        NativeSpec { schema, max_buckets, ..NativeSpec::default() }
    }

    /// Returns the index of the bucket by the definition: the lowest index whose bound is at least
    /// the value.
    fn by_definition(schema: i32, value: f64) -> i32 {
        let near = (value.log2() * f64::from(schema).exp2()).floor() as i32;
        (near - 1..).find(|&index| bound(schema, index) >= value).unwrap()
    }

    /// Returns 2^(index / 2^schema); the whole part of the exponent scales exactly.
    fn bound(schema: i32, index: i32) -> f64 {
        let exponent = f64::from(index) * f64::from(-schema).exp2();
        (exponent - exponent.floor()).exp2() * exponent.floor().exp2()
    }

    fn positive(native: &Native) -> Vec<(i32, u64)> {
        native.read().positive
    }

    #[test]
    fn observations_are_counted_in_the_buckets_of_the_definition() {
        for schema in NativeSpec::LOWEST_SCHEMA..=NativeSpec::HIGHEST_SCHEMA {
            let mut values: Vec<f64> =
                (-63..=63).map(|exponent| f64::from(exponent).exp2()).collect();
            // Bounds, and the values beside them.
            let bounds = (-300..300).map(|index| bound(schema, index));
            values.extend(
                bounds
                    .filter(|bound| (1e-18..1e18).contains(bound))
                    .flat_map(|bound| [bound * (1.0 - 1e-12), bound, bound * (1.0 + 1e-12)]),
            );
            values.extend([1e-18, 0.3, 3.0, 123_456.789, 1e18]);
            for value in values {
                let native = Native::new(spec(schema, 1000));
                native.observe(value, 2);
                assert_eq!(
                    positive(&native),
                    [(by_definition(schema, value), 2)],
                    "schema {schema}, value {value:e}"
                );
            }
        }
    }

    #[test]
    fn bounds_are_inclusive_and_powers_of_two() {
        for (schema, value, index) in [
            (0, 1.0, 0),
            (0, 1.000_001, 1),
            (0, 2.0, 1),
            (0, 0.5, -1),
            (3, 1.0, 0),
            (3, 1.09, 1),
            (3, 2.0, 8),
            (3, 4.0, 16),
            (8, 2.0, 256),
            (-1, 4.0, 1),
            (-1, 4.1, 2),
            (-4, 65536.0, 1),
            (-4, 1.0, 0),
        ] {
            let native = Native::new(spec(schema, 160));
            native.observe(value, 1);
            assert_eq!(positive(&native), [(index, 1)], "schema {schema}, value {value}");
        }
    }

    #[test]
    fn zero_negative_and_infinite_values_have_their_buckets() {
        let native = Native::new(NativeSpec { zero_threshold: 0.01, ..spec(0, 160) });
        for value in [
            0.0,
            -0.0,
            0.01,
            -0.005,
            3.0,
            -3.0,
            -4.0,
            5e-324,
            1e19,
            1e300,
            f64::INFINITY,
            f64::NEG_INFINITY,
        ] {
            native.observe(value, 1);
        }
        let reading = native.read();
        assert_eq!((reading.zero_count, reading.zero_threshold), (5, 0.01));
        // 2^64 is the bound of the last octave; all above it counts as infinite.
        assert_eq!(reading.positive, [(2, 1), (64, 1), (1025, 2)]);
        assert_eq!(reading.negative, [(2, 2), (1025, 1)]);
        assert_eq!(reading.count(), 12);
        for (schema, index) in [(8, 1024 * 256 + 1), (3, 8193), (-1, 513), (-4, 65)] {
            let native = Native::new(spec(schema, 160));
            native.observe(f64::INFINITY, 1);
            assert_eq!(positive(&native), [(index, 1)], "schema {schema}");
        }
    }

    #[test]
    fn too_many_buckets_lower_the_schema_and_keep_every_count() {
        let native = Native::new(spec(5, 40));
        let mut highest = 5;
        for step in 0_i32..2000 {
            let value = f64::from(step * 37 % 2000 + 1) * 1e-4;
            native.observe(value, 1);
            native.observe(-value, 1);
            let reading = native.read();
            assert!(
                reading.positive.len() + reading.negative.len() <= 40 && reading.schema <= highest
            );
            assert_eq!(reading.count(), 2 * (step as u64 + 1));
            highest = reading.schema;
        }
        assert_eq!(highest, 0, "0.0001 to 0.2 are 11 octaves, twice");
        let reading = native.read();
        let mut expected = std::collections::BTreeMap::new();
        for step in 1..=2000 {
            *expected.entry(by_definition(reading.schema, f64::from(step) * 1e-4)).or_insert(0) +=
                1;
        }
        assert_eq!(reading.positive, expected.into_iter().collect::<Vec<_>>());
    }

    #[test]
    fn merging_is_the_same_as_recording_at_the_lower_schema() {
        let values: Vec<f64> = (1..500).map(|n| f64::from(n * n) * 3.7e-5).collect();
        let of = |schema: i32| {
            let native = Native::new(spec(schema, 1000));
            values.iter().for_each(|&value| native.observe(value, 1));
            native.read()
        };
        let mut reading = of(6);
        for schema in (NativeSpec::LOWEST_SCHEMA..6).rev() {
            reading.lower();
            assert_eq!(reading, of(schema), "schema {schema}");
        }
    }

    /// With schema 8, only a quarter of the octaves get pages.
    #[test]
    fn memory_is_bounded_and_counts_stay_exact() {
        let native = Native::new(spec(8, 1000));
        for exponent in -60..60 {
            native.observe(f64::from(exponent).exp2() * 1.5, 3);
        }
        let side = native.positive.get().unwrap();
        assert_eq!(side.octaves.iter().filter(|octave| octave.page.get().is_some()).count(), 32);
        let reading = native.read();
        assert_eq!((reading.schema, reading.count()), (0, 360));
        assert_eq!(reading.positive, (-59..61).map(|index| (index, 3)).collect::<Vec<_>>());
    }

    #[test]
    fn threads_lose_no_observation() {
        let native = Native::new(spec(3, 160));
        std::thread::scope(|scope| {
            for thread in 1..=4 {
                let native = &native;
                scope.spawn(move || {
                    (1..=10_000).for_each(|n| native.observe(f64::from(n * thread), 1))
                });
            }
        });
        assert_eq!(native.read().count(), 40_000);
    }
}
