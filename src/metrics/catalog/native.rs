//! The key `native` of a histogram: whether and how it also has native (exponential) buckets.

use serde::de::{self, MapAccess};

use super::node::{Key, Node, Seed};

/// How a histogram counts in native buckets.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct NativeSpec {
    /// The highest schema: each power of two is divided into 2^schema buckets. From
    /// [`NativeSpec::LOWEST_SCHEMA`] to [`NativeSpec::HIGHEST_SCHEMA`].
    pub schema: i32,
    /// The most buckets of a reading. A reading with more lowers the schema.
    pub max_buckets: usize,
    /// The largest absolute value that counts as zero.
    pub zero_threshold: f64,
}

impl NativeSpec {
    /// The lowest schema of Prometheus: a bucket spans 16 powers of two.
    pub const LOWEST_SCHEMA: i32 = -4;
    /// The highest schema of Prometheus: a bucket's bound is 1.0027 times the previous one.
    pub const HIGHEST_SCHEMA: i32 = 8;
    /// The smallest power of two whose buckets are distinguished; also the default threshold of
    /// zero.
    pub const LOWEST_EXPONENT: i32 = -64;
    /// The largest power of two that is a bound of a bucket. Larger observations count as infinite.
    pub const HIGHEST_EXPONENT: i32 = 64;
    /// The least limit of buckets. With the lowest schema there are never more.
    const FEWEST_BUCKETS: usize = 20;
    const MOST_BUCKETS: usize = 1000;

    /// Returns the lowest schema whose bounds grow by at most `factor`, which must be above 1.
    fn schema_of(factor: f64) -> i32 {
        let floor = factor.log2().log2().floor();
        (-floor).clamp(f64::from(Self::LOWEST_SCHEMA), f64::from(Self::HIGHEST_SCHEMA)) as i32
    }

    fn least_threshold() -> f64 {
        f64::from(Self::LOWEST_EXPONENT).exp2()
    }
}

impl Default for NativeSpec {
    /// Bounds that grow by 1.09 (the schema of factor 1.1), and 160 buckets at most: the defaults
    /// that Prometheus' clients recommend.
    fn default() -> Self {
        Self { schema: 3, max_buckets: 160, zero_threshold: Self::least_threshold() }
    }
}

/// The value of `native`: true, false, or a mapping.
pub(super) struct Native;

impl<'de> Node<'de> for Native {
    type Out = Option<NativeSpec>;
    fn expected(&self) -> &'static str {
        "true, false, or a mapping with schema or factor, max_buckets and zero_threshold"
    }
    fn text<E: de::Error>(self, text: &str) -> Result<Option<NativeSpec>, E> {
        match text {
            "true" => Ok(Some(NativeSpec::default())),
            "false" => Ok(None),
            _ => Err(E::custom(format!("`native` is `{text}`; allowed are {}", self.expected()))),
        }
    }
    fn mapping<A: MapAccess<'de>>(self, mut map: A) -> Result<Option<NativeSpec>, A::Error> {
        let mut spec = NativeSpec::default();
        let mut seen = Vec::new();
        let allowed = &["schema", "factor", "max_buckets", "zero_threshold"];
        while let Some(key) = map.next_key_seed(Seed(Key { allowed, seen: &mut seen }))? {
            match key {
                "schema" => spec.schema = map.next_value_seed(Seed(Schema))?,
                "factor" => spec.schema = NativeSpec::schema_of(map.next_value_seed(Seed(Factor))?),
                "max_buckets" => spec.max_buckets = map.next_value_seed(Seed(MaxBuckets))?,
                _ => spec.zero_threshold = map.next_value_seed(Seed(ZeroThreshold))?,
            }
        }
        if seen.contains(&"schema") && seen.contains(&"factor") {
            return Err(de::Error::custom(
                "`native` has both `schema` and `factor`; allowed is one of them",
            ));
        }
        Ok(Some(spec))
    }
}

struct Schema;

impl Node<'_> for Schema {
    type Out = i32;
    fn expected(&self) -> &'static str {
        "a whole number from -4 to 8"
    }
    fn text<E: de::Error>(self, text: &str) -> Result<i32, E> {
        let allowed = NativeSpec::LOWEST_SCHEMA..=NativeSpec::HIGHEST_SCHEMA;
        let schema = text.parse().ok().filter(|schema| allowed.contains(schema));
        schema.ok_or_else(|| {
            E::custom(format!("`schema` is `{text}`; allowed is {}", self.expected()))
        })
    }
}

struct Factor;

impl Node<'_> for Factor {
    type Out = f64;
    fn expected(&self) -> &'static str {
        "a number above 1, by which the bounds of buckets grow at most"
    }
    fn text<E: de::Error>(self, text: &str) -> Result<f64, E> {
        let factor = text.parse::<f64>().ok().filter(|factor| factor.is_finite() && *factor > 1.0);
        factor.ok_or_else(|| {
            E::custom(format!("`factor` is `{text}`; allowed is {}", self.expected()))
        })
    }
}

struct MaxBuckets;

impl Node<'_> for MaxBuckets {
    type Out = usize;
    fn expected(&self) -> &'static str {
        "a whole number from 20 to 1000"
    }
    fn text<E: de::Error>(self, text: &str) -> Result<usize, E> {
        let allowed = NativeSpec::FEWEST_BUCKETS..=NativeSpec::MOST_BUCKETS;
        let limit = text.parse().ok().filter(|limit| allowed.contains(limit));
        limit.ok_or_else(|| {
            E::custom(format!("`max_buckets` is `{text}`; allowed is {}", self.expected()))
        })
    }
}

struct ZeroThreshold;

impl Node<'_> for ZeroThreshold {
    type Out = f64;
    fn expected(&self) -> &'static str {
        "a number from 2^-64 (5.421010862427522e-20) to 1e18"
    }
    fn text<E: de::Error>(self, text: &str) -> Result<f64, E> {
        let allowed = NativeSpec::least_threshold()..=1e18;
        let threshold = text.parse().ok().filter(|threshold| allowed.contains(threshold));
        threshold.ok_or_else(|| {
            E::custom(format!("`zero_threshold` is `{text}`; allowed is {}", self.expected()))
        })
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use crate::catalog::{Catalog, CatalogError};

    fn parse(native: &str) -> Result<Option<NativeSpec>, CatalogError> {
        let text =
            format!("model_metrics:\n  histogram:\n    - {{name: a, unit: s, native: {native}}}\n");
        Catalog::parse(&text, "m.yaml").map(|catalog| catalog.find("a").unwrap().1.native)
    }

    #[test]
    fn native_buckets_are_chosen_for_each_histogram() {
        let default = NativeSpec::default();
        assert_eq!(parse("false").unwrap(), None);
        assert_eq!(parse("true").unwrap(), Some(default));
        assert_eq!(parse("{}").unwrap(), Some(default));
        let expected = NativeSpec { schema: -2, max_buckets: 20, zero_threshold: 0.001 };
        assert_eq!(
            parse("{schema: -2, max_buckets: 20, zero_threshold: 1e-3}").unwrap(),
            Some(expected)
        );
        let least = parse("{zero_threshold: 5.421010862427522e-20}").unwrap();
        assert_eq!(least, Some(default), "the default can be written");
    }

    /// The bounds of schema s grow by 2^(2^-s).
    #[test]
    fn a_factor_chooses_the_coarsest_schema_within_it() {
        for (factor, schema) in [
            ("1.0001", 8),
            ("1.0027", 8),
            ("1.01", 7),
            ("1.05", 4),
            ("1.1", 3),
            ("1.4", 2),
            ("1.5", 1),
            ("2", 0),
            ("3.9", 0),
            ("4", -1),
            ("16", -2),
            ("65536", -4),
            ("1e300", -4),
        ] {
            let spec = parse(&format!("{{factor: {factor}}}")).unwrap().unwrap();
            assert_eq!(spec.schema, schema, "{factor}");
        }
    }

    #[test]
    fn errors_name_key_value_and_what_is_allowed() {
        for (native, expected) in [
            (
                "yes",
                "`native` is `yes`; allowed are true, false, or a mapping with schema or factor",
            ),
            ("[1]", "found a list where true, false, or a mapping"),
            ("{schema: 9}", "`schema` is `9`; allowed is a whole number from -4 to 8"),
            ("{schema: 1.5}", "`schema` is `1.5`; allowed is a whole number from -4 to 8"),
            ("{factor: 1}", "`factor` is `1`; allowed is a number above 1"),
            ("{factor: .inf}", "`factor` is `inf`; allowed is a number above 1"),
            (
                "{max_buckets: 19}",
                "`max_buckets` is `19`; allowed is a whole number from 20 to 1000",
            ),
            ("{zero_threshold: 0}", "`zero_threshold` is `0`; allowed is a number from 2^-64"),
            ("{zero_threshold: .nan}", "`zero_threshold` is `NaN`; allowed is a number from 2^-64"),
            (
                "{schema: 3, factor: 1.1}",
                "`native` has both `schema` and `factor`; allowed is one of them",
            ),
            (
                "{buckets: 3}",
                "unknown key `buckets`; allowed are `schema`, `factor`, `max_buckets`, \
                 `zero_threshold`",
            ),
        ] {
            let message = parse(native).unwrap_err().message;
            assert!(message.contains(expected), "{native}: {message}");
        }
        let text = "model_metrics:\n  gauge:\n    - {name: a, unit: s, native: true}\n";
        let message = Catalog::parse(text, "m.yaml").unwrap_err().message;
        assert!(
            message.contains("metric `a` is a gauge: only a histogram has native buckets"),
            "{message}"
        );
    }
}
