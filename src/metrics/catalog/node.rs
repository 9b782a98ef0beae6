//! The places of a YAML file as small visitors, each of which checks its value.

use std::fmt;

use serde::de::{self, DeserializeSeed, Deserializer, MapAccess, SeqAccess, Visitor};

/// One place in the file and the values allowed there. Methods that an implementation does not
/// override return an error.
pub(super) trait Node<'de>: Sized {
    type Out;

    /// Describes the expected value, for messages.
    fn expected(&self) -> &'static str;

    fn text<E: de::Error>(self, text: &str) -> Result<Self::Out, E> {
        Err(E::custom(format!("found `{text}` where {} is expected", self.expected())))
    }

    fn empty<E: de::Error>(self) -> Result<Self::Out, E> {
        Err(E::custom(format!("found nothing where {} is expected", self.expected())))
    }

    fn list<A: SeqAccess<'de>>(self, _: A) -> Result<Self::Out, A::Error> {
        Err(de::Error::custom(format!("found a list where {} is expected", self.expected())))
    }

    fn mapping<A: MapAccess<'de>>(self, _: A) -> Result<Self::Out, A::Error> {
        Err(de::Error::custom(format!("found a mapping where {} is expected", self.expected())))
    }
}

/// Makes a [`Node`] readable by serde.
pub(super) struct Seed<N>(pub(super) N);

impl<'de, N: Node<'de>> DeserializeSeed<'de> for Seed<N> {
    type Value = N::Out;
    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<N::Out, D::Error> {
        deserializer.deserialize_any(self)
    }
}

impl<'de, N: Node<'de>> Visitor<'de> for Seed<N> {
    type Value = N::Out;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.0.expected())
    }
    fn visit_str<E: de::Error>(self, value: &str) -> Result<N::Out, E> {
        self.0.text(value)
    }
    fn visit_bool<E: de::Error>(self, value: bool) -> Result<N::Out, E> {
        self.0.text(&value.to_string())
    }
    fn visit_i64<E: de::Error>(self, value: i64) -> Result<N::Out, E> {
        self.0.text(&value.to_string())
    }
    fn visit_u64<E: de::Error>(self, value: u64) -> Result<N::Out, E> {
        self.0.text(&value.to_string())
    }
    // Whole numbers of more than 64 bits.
    fn visit_i128<E: de::Error>(self, value: i128) -> Result<N::Out, E> {
        self.0.text(&value.to_string())
    }
    fn visit_u128<E: de::Error>(self, value: u128) -> Result<N::Out, E> {
        self.0.text(&value.to_string())
    }
    fn visit_f64<E: de::Error>(self, value: f64) -> Result<N::Out, E> {
        self.0.text(&value.to_string())
    }
    fn visit_unit<E: de::Error>(self) -> Result<N::Out, E> {
        self.0.empty()
    }
    fn visit_none<E: de::Error>(self) -> Result<N::Out, E> {
        self.0.empty()
    }
    fn visit_seq<A: SeqAccess<'de>>(self, list: A) -> Result<N::Out, A::Error> {
        self.0.list(list)
    }
    fn visit_map<A: MapAccess<'de>>(self, mapping: A) -> Result<N::Out, A::Error> {
        self.0.mapping(mapping)
    }
}

/// A key of a mapping: one of `allowed`, each at most once.
pub(super) struct Key<'a> {
    pub(super) allowed: &'static [&'static str],
    pub(super) seen: &'a mut Vec<&'static str>,
}

impl Node<'_> for Key<'_> {
    type Out = &'static str;
    fn expected(&self) -> &'static str {
        "a key"
    }
    fn text<E: de::Error>(self, text: &str) -> Result<&'static str, E> {
        let Some(key) = self.allowed.iter().copied().find(|&key| key == text) else {
            return Err(E::custom(format!(
                "unknown key `{text}`; allowed are {}",
                quoted(self.allowed)
            )));
        };
        if self.seen.contains(&key) {
            return Err(E::custom(format!("key `{key}` is given twice")));
        }
        self.seen.push(key);
        Ok(key)
    }
}

fn quoted(names: &[&str]) -> String {
    let names: Vec<String> = names.iter().map(|name| format!("`{name}`")).collect();
    names.join(", ")
}
