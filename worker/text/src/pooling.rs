//! The vector of a text from the vectors of its tokens.
//!
//! Source of the definitions: `Pooling` of sentence-transformers 5.1.

use pharos::model::text_files::TextPooling;

/// The vectors of a text's tokens: `values` has `width` numbers for each of them.
#[derive(Clone, Copy, Debug)]
pub(crate) struct TokenVectors<'a> {
    pub(crate) values: &'a [f32],
    pub(crate) width: usize,
}

impl TokenVectors<'_> {
    /// Adds the vector of the text to `into`.
    pub(crate) fn pool(self, pooling: TextPooling, into: &mut Vec<f32>) {
        let vectors = self.values.chunks_exact(self.width);
        let count = vectors.len() as f32;
        match pooling {
            TextPooling::Cls => into.extend(vectors.take(1).flatten()),
            TextPooling::LastToken => into.extend(vectors.rev().take(1).flatten()),
            TextPooling::Max => {
                let mut most = vec![f32::NEG_INFINITY; self.width];
                for vector in vectors {
                    most.iter_mut().zip(vector).for_each(|(most, value)| *most = most.max(*value));
                }
                into.extend(most);
            }
            TextPooling::Mean => {
                into.extend(sum(vectors, self.width, |_| 1.0).map(|sum| sum / count))
            }
            TextPooling::MeanSqrtLength => {
                into.extend(sum(vectors, self.width, |_| 1.0).map(|sum| sum / count.sqrt()));
            }
            TextPooling::WeightedMean => {
                let weights = count * (count + 1.0) / 2.0;
                let weight = |position: usize| (position + 1) as f32;
                into.extend(sum(vectors, self.width, weight).map(|sum| sum / weights));
            }
        }
    }
}

/// Returns the weighted sum of vectors.
fn sum<'a>(
    vectors: impl Iterator<Item = &'a [f32]>,
    width: usize,
    weight: impl Fn(usize) -> f32,
) -> impl Iterator<Item = f32> {
    let mut sums = vec![0.0_f32; width];
    for (position, vector) in vectors.enumerate() {
        let weight = weight(position);
        sums.iter_mut().zip(vector).for_each(|(sum, value)| *sum += weight * value);
    }
    sums.into_iter()
}

/// Gives a vector the length 1. A vector without a direction stays.
pub(crate) fn normalize(vector: &mut [f32]) {
    let length = vector.iter().map(|value| f64::from(*value).powi(2)).sum::<f64>().sqrt();
    if length > 0.0 {
        vector.iter_mut().for_each(|value| *value = (f64::from(*value) / length) as f32);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pooled(pooling: TextPooling) -> Vec<f32> {
        let mut found = Vec::new();
        TokenVectors { values: &[1.0, -2.0, 3.0, 4.0, 5.0, 6.0], width: 2 }
            .pool(pooling, &mut found);
        found
    }

    #[test]
    fn every_way() {
        assert_eq!(pooled(TextPooling::Cls), [1.0, -2.0]);
        assert_eq!(pooled(TextPooling::LastToken), [5.0, 6.0]);
        assert_eq!(pooled(TextPooling::Max), [5.0, 6.0]);
        assert_eq!(pooled(TextPooling::Mean), [3.0, 8.0 / 3.0]);
        assert_eq!(pooled(TextPooling::MeanSqrtLength), [9.0 / 3f32.sqrt(), 8.0 / 3f32.sqrt()]);
        assert_eq!(pooled(TextPooling::WeightedMean), [22.0 / 6.0, 24.0 / 6.0]);
    }

    #[test]
    fn a_vector_without_a_direction_stays() {
        let mut vectors = [[3.0, 4.0], [0.0, 0.0]];
        vectors.iter_mut().for_each(|vector| normalize(vector));
        assert_eq!(vectors, [[0.6, 0.8], [0.0, 0.0]]);
    }
}
