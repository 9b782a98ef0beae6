//! Which texts are computed together.
//!
//! A graph computes texts of one length: shorter ones are padded. Texts of similar lengths together
//! have little padding, and each run of a graph has a cost.

use std::ops::Range;

/// The cost of a run of the graph, in tokens.
const RUN: usize = 24;

/// Returns ranges of `lengths`, which ascend, such that the sum of the costs of all ranges is the
/// least: of a range, the number of its texts times its greatest length, and the cost of a run. A
/// range has at most `most` tokens with its padding, unless it has one text.
pub(crate) fn split(lengths: &[usize], most: usize) -> Vec<Range<usize>> {
    // The least cost of the first texts, and where their last range begins.
    let mut best: Vec<(usize, usize)> = vec![(0, 0)];
    for (last, length) in lengths.iter().enumerate() {
        let length = (*length).max(1);
        let mut found = (usize::MAX, last);
        for first in (0..=last).rev() {
            let tokens = (last - first + 1).saturating_mul(length);
            if tokens > most && first < last {
                break;
            }
            let before = best.get(first).map_or(0, |(cost, _)| *cost);
            let cost = before.saturating_add(tokens).saturating_add(RUN);
            if cost < found.0 {
                found = (cost, first);
            }
        }
        best.push(found);
    }
    let mut ranges = Vec::new();
    let mut end = lengths.len();
    while end > 0 {
        let first = best.get(end).map_or(0, |(_, first)| *first).min(end - 1);
        ranges.push(first..end);
        end = first;
    }
    ranges.reverse();
    ranges
}

#[cfg(test)]
mod tests {
    use super::*;

    fn padded(lengths: &[usize], ranges: &[Range<usize>]) -> usize {
        let of = |range: &Range<usize>| lengths[range.clone()].last().unwrap() * range.len();
        ranges.iter().map(of).sum()
    }

    #[test]
    fn each_text_is_in_one_range() {
        assert!(split(&[], 100).is_empty());
        for lengths in [vec![7], vec![1; 64], (1..200).collect::<Vec<_>>(), vec![0, 0, 5, 1000]] {
            for most in [1, 64, 512, 1 << 20] {
                let ranges = split(&lengths, most);
                let places: Vec<usize> = ranges.iter().cloned().flatten().collect();
                assert_eq!(places, (0..lengths.len()).collect::<Vec<_>>());
                let fits = |range: &Range<usize>| {
                    range.len() == 1 || lengths[range.end - 1].max(1) * range.len() <= most
                };
                assert!(ranges.iter().all(fits), "{most}: {ranges:?}");
            }
        }
    }

    #[test]
    fn texts_of_similar_lengths_are_together() {
        let ends = |lengths: &[usize]| -> Vec<usize> {
            split(lengths, 4096).into_iter().map(|range| range.end).collect()
        };
        assert_eq!(ends(&[8; 32]), [32]);
        assert_eq!(ends(&[8, 8, 8, 8, 500, 500]), [4, 6]);
        // A few more tokens cost less than another run.
        assert_eq!(ends(&[8, 9, 10, 11]), [4]);
    }

    #[test]
    fn padding_is_under_a_tenth() {
        let lengths: Vec<usize> = (0..64).map(|number| 12 + number * 10).collect();
        let ranges = split(&lengths, 8192);
        let sum: usize = lengths.iter().sum();
        assert!(padded(&lengths, &ranges) * 10 < sum * 11, "{ranges:?}");
    }
}
