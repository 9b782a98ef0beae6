//! The JSON parts of requests with binary tensors that a thread has parsed before.
//!
//! A client that sends tensors as binary data repeats the JSON part: only the id and the tensors
//! differ. The parsed form of a few such texts is kept for each thread, and a request with the same
//! text takes a copy of it.

use std::cell::RefCell;

use pharos::data::Data;
use pharos::error::InferError;
use pharos::infer::{CorrelationId, InferInput, InferRequest, RequestedOutput};

use super::Blobs;

/// The number of texts that a thread keeps.
const TEXTS: usize = 16;

/// The length of the longest text that is kept, which bounds the memory.
const LONGEST: usize = 1024;

/// Of the texts that are not found, one of this many is kept, so that texts that never come again
/// cost little.
const KEPT_OF: u64 = 4;

/// 2^64 divided by the golden ratio: the multiples of a counter are spread evenly, also those of
/// every second or third count.
const SPREAD: u64 = 0x9E37_79B9_7F4A_7C15;

/// How the text of a request with an id begins.
const ID: &[u8] = br#"{"id":""#;

thread_local! {
    static KNOWN: RefCell<Known> = const { RefCell::new(Known { texts: Vec::new(), missed: 0, oldest: 0 }) };
}

struct Known {
    texts: Vec<Parsed>,
    /// The number of texts that were not found.
    missed: u64,
    /// The position of the text that is replaced next.
    oldest: usize,
}

/// What the text of a request says.
struct Parsed {
    text: Box<[u8]>,
    /// Whether an id was separated: what follows it is no JSON, and must not be taken for a whole
    /// text.
    is_rest: bool,
    /// The id, if it is a part of this text.
    id: String,
    inputs: Vec<Input>,
    outputs: Vec<RequestedOutput>,
    binary_data_output: bool,
}

/// An input without its binary data.
struct Input {
    input: InferInput,
    /// The length of its binary data; `None` if its data is in shared memory.
    binary: Option<u64>,
}

/// The text of a request, in two parts.
#[derive(Clone, Copy, PartialEq, Debug)]
pub(super) struct Text<'a> {
    id: Option<&'a str>,
    rest: &'a [u8],
}

impl<'a> Text<'a> {
    /// Separates the id from `json` if it is the first member and has no unusual characters. The
    /// first of two members with one name counts, so the rest cannot have another id.
    pub(super) fn of(json: &'a [u8]) -> Self {
        Self::with_id(json).unwrap_or(Self { id: None, rest: json })
    }

    fn with_id(json: &'a [u8]) -> Option<Self> {
        let after = json.strip_prefix(ID)?;
        let end = after
            .iter()
            .position(|byte| !matches!(byte, b' '..=b'~') || matches!(byte, b'"' | b'\\'))?;
        let (id, rest) = after.split_at_checked(end)?;
        Some(Self { id: Some(std::str::from_utf8(id).ok()?), rest: rest.strip_prefix(b"\",")? })
    }

    /// Fills `request` and takes `binary` if the text is known. Returns the request's
    /// `binary_data_output`, or `None` for a text that is not known.
    ///
    /// # Errors
    /// `binary` does not have the bytes of all inputs, or has more.
    pub(super) fn fill(
        self,
        binary: &mut Data,
        request: &mut InferRequest,
    ) -> Option<Result<bool, InferError>> {
        if self.rest.len() > LONGEST {
            return None;
        }
        KNOWN.with_borrow(|known| {
            let is_same = |parsed: &&Parsed| {
                *parsed.text == *self.rest && parsed.is_rest == self.id.is_some()
            };
            let parsed = known.texts.iter().find(is_same)?;
            request.id = self.id.unwrap_or(&parsed.id).to_owned();
            Some(parsed.fill(std::mem::take(binary), request))
        })
    }

    /// Keeps what the text says, after it was parsed into `request`, for the next requests.
    pub(super) fn keep(self, request: &InferRequest, binary_data_output: bool) {
        if self.rest.len() > LONGEST || has_more(request) {
            return;
        }
        KNOWN.with_borrow_mut(|known| {
            let spread = known.missed.wrapping_mul(SPREAD);
            known.missed = known.missed.wrapping_add(1);
            if spread > u64::MAX / KEPT_OF {
                return;
            }
            let parsed = Parsed {
                text: self.rest.into(),
                is_rest: self.id.is_some(),
                id: if self.id.is_some() { String::new() } else { request.id.clone() },
                inputs: request.inputs.iter().map(Input::of).collect(),
                outputs: request.outputs.clone(),
                binary_data_output,
            };
            match known.texts.get_mut(known.oldest) {
                Some(oldest) => *oldest = parsed,
                None => known.texts.push(parsed),
            }
            known.oldest = (known.oldest + 1) % TEXTS;
        });
    }
}

/// Returns whether a request says more than [`Parsed`] holds: parameters, mostly of sequences,
/// which seldom repeat.
fn has_more(request: &InferRequest) -> bool {
    let numbers = (request.priority, request.timeout_us) != (0, 0);
    // An empty id is an id that responses show.
    let sequence = request.correlation_id != CorrelationId::default()
        || request.sequence_start
        || request.sequence_end;
    !request.parameters.is_empty() || numbers || sequence
}

impl Parsed {
    fn fill(&self, binary: Data, request: &mut InferRequest) -> Result<bool, InferError> {
        let mut binary = Blobs { rest: binary, model: &request.model_name };
        let inputs =
            self.inputs.iter().map(|input| input.with(&mut binary)).collect::<Result<_, _>>()?;
        binary.end()?;
        request.inputs = inputs;
        request.outputs.clone_from(&self.outputs);
        Ok(self.binary_data_output)
    }
}

impl Input {
    fn of(input: &InferInput) -> Self {
        let mut input = input.clone();
        let binary = match input.tensor.data.region() {
            Some(_) => None,
            None => Some(std::mem::take(&mut input.tensor.data).len() as u64),
        };
        Self { input, binary }
    }

    fn with(&self, binary: &mut Blobs<'_>) -> Result<InferInput, InferError> {
        let mut input = self.input.clone();
        if let Some(size) = self.binary {
            input.tensor.data = binary.take(&input.name, size)?;
        }
        Ok(input)
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    const REST: &str = r#""inputs":[{"name":"X","shape":[1,2],"datatype":"INT8","parameters":{"binary_data_size":2}},
        {"name":"Z","shape":[4],"datatype":"INT8",
         "parameters":{"shared_memory_region":"r","shared_memory_offset":1,"shared_memory_byte_size":4}}],
        "outputs":[{"name":"Y","parameters":{"binary_data":true,"classification":3}}],
        "parameters":{"binary_data_output":true}}"#;

    /// Parses a request, and returns it with its `binary_data_output` and whether its text was
    /// known.
    fn parse(json: &str, binary: &[u8]) -> (Result<(InferRequest, bool), String>, bool) {
        let before = KNOWN.with_borrow(|known| known.missed);
        let mut request = InferRequest { model_name: "m".into(), ..InferRequest::default() };
        let parsed =
            super::super::parse(json.as_bytes(), Data::from(binary.to_vec()), &mut request);
        let known = KNOWN.with_borrow(|known| known.missed) == before;
        (parsed.map(|binary| (request, binary)).map_err(|error| error.message), known)
    }

    fn is_equal(one: &InferRequest, other: &InferRequest) -> bool {
        let of = |request: &InferRequest| {
            (request.inputs.clone(), request.outputs.clone(), request.id.clone())
        };
        of(one) == of(other)
            && (&one.parameters, &one.model_name) == (&other.parameters, &other.model_name)
    }

    #[test]
    fn a_known_text_gives_what_it_gave_when_it_was_parsed() {
        for id in
            ["\"id\":\"a\",", "", "\"id\":\"\",", "\"member\":1,\"id\":\"b\",", "\"id\":\"\\\\\","]
        {
            let json = format!("{{{id}{REST}");
            let (first, known) = parse(&json, &[1, 2]);
            let (first, binary) = first.unwrap();
            assert!(!known || id == "\"id\":\"\",", "the rest is the same as with another id");
            (0..2 * KEPT_OF).for_each(|_| drop(parse(&json, &[1, 2])));
            let (again, known) = parse(&json, &[1, 2]);
            let (again, binary_again) = again.unwrap();
            assert!(known && is_equal(&first, &again) && binary && binary_again, "{again:?}");
            assert_eq!(again.inputs.first().unwrap().tensor.data, [1, 2][..]);
        }
        let (request, known) = parse(&format!("{{\"id\":\"another one\",{REST}"), &[3, 4]);
        let (request, _) = request.unwrap();
        assert_eq!((request.id.as_str(), known), ("another one", true));
        assert_eq!(request.inputs.first().unwrap().tensor.data, [3, 4][..]);
    }

    #[test]
    fn the_binary_data_of_a_known_text_is_checked() {
        let json = format!("{{{REST}");
        parse(&json, &[1, 2]).0.unwrap();
        for (binary, error) in [
            (&[1][..], "unexpected size for input 'X', expecting 1 additional bytes for model 'm'"),
            (&[1, 2, 3], "unexpected additional input data for model 'm'"),
        ] {
            let (parsed, known) = parse(&json, binary);
            assert_eq!((parsed.err().as_deref(), known), (Some(error), true));
        }
    }

    #[test]
    fn other_texts_are_not_kept() {
        let data = r#"{"inputs":[{"name":"X","shape":[1],"datatype":"INT8","data":[1]}]}"#;
        let sequence = format!(
            "{{{}",
            REST.replace("\"binary_data_output\"", "\"sequence_id\":1,\"binary_data_output\"")
        );
        let empty = format!(
            "{{{}",
            REST.replace("\"binary_data_output\"", "\"sequence_id\":\"\",\"binary_data_output\"")
        );
        let free = format!(
            "{{{}",
            REST.replace("\"binary_data_output\"", "\"a\":1,\"binary_data_output\"")
        );
        let long = format!("{{{REST}{}", " ".repeat(LONGEST));
        for json in [data, &sequence, &empty, &free, &long] {
            let binary = if json == data { &[][..] } else { &[1, 2] };
            (0..2 * KEPT_OF).for_each(|_| drop(parse(json, binary).0.unwrap()));
            assert_eq!(KNOWN.with_borrow(|known| known.texts.len()), 0, "{json}");
        }
    }

    #[test]
    fn a_thread_keeps_a_bounded_number_of_texts() {
        for number in 0..KEPT_OF as usize * TEXTS * 2 {
            parse(&format!("{{\"member\":{number},{REST}"), &[1, 2]).0.unwrap();
        }
        assert_eq!(KNOWN.with_borrow(|known| known.texts.len()), TEXTS);
    }

    #[test]
    fn a_text_that_comes_every_second_time_is_kept() {
        let mut found = 0;
        for number in 0..1000 {
            parse(&format!("{{\"member\":{number},{REST}"), &[1, 2]).0.unwrap();
            found += u32::from(parse(&format!("{{{REST}"), &[1, 2]).1);
        }
        assert!(found > 900, "{found} of 1000 were found");
    }

    #[test]
    fn what_follows_an_id_is_no_text() {
        let whole = format!("{{{REST}");
        let with_id = format!("{{\"id\":\"a\",{REST}");
        for json in [&whole, &with_id] {
            (0..2 * KEPT_OF).for_each(|_| drop(parse(json, &[1, 2])));
            assert!(parse(json, &[1, 2]).1);
        }
        for json in [REST.to_owned(), format!("{{\"id\":\"a\",{whole}")] {
            assert!(parse(&json, &[1, 2]).0.is_err(), "{json}");
        }
    }

    #[test]
    fn only_an_id_of_usual_characters_at_the_beginning_is_separated() {
        let text = |json| Text::of(json);
        assert_eq!(text(br#"{"id":"a b","x":1}"#), Text { id: Some("a b"), rest: br#""x":1}"# });
        for json in [
            r#"{"id":"a\u0062","x":1}"#,
            "{\"id\":\"a\nb\",\"x\":1}",
            r#"{"id":"é","x":1}"#,
            r#"{"id":"a"}"#,
        ] {
            assert_eq!(text(json.as_bytes()), Text { id: None, rest: json.as_bytes() }, "{json}");
        }
        for json in [r#"{"x":1,"id":"a"}"#, r#"{"id":1,"x":1}"#, r#"{"id":"a"#, ""] {
            assert_eq!(text(json.as_bytes()).id, None, "{json}");
        }
    }
}
