//! Scans one call that is a JSON object, character by character.

use super::{ToolDelta, push_arguments};

/// The deepest nesting of arguments.
const MAX_DEPTH: u32 = 100;

/// What a character means for a call.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Scan {
    /// The object goes on.
    More,
    /// The character ends the object, which is a call.
    Done,
    /// The call was complete before this character, which does not belong to it.
    DoneBefore,
    /// The character ends the object, which has a name and no arguments.
    NoArguments,
    /// The text is no call. Nothing of it has been written.
    NoCall,
    /// The arguments, which have been written up to this character, are not well-formed.
    Broken,
}

/// Scans an object with the members `name` and `arguments` or `parameters`. Other members are
/// skipped. The call begins once the name and the beginning of the arguments are known.
#[derive(Debug, Clone, Default)]
pub(super) struct ObjectScanner {
    place: Place,
    /// The text of the string or scalar in progress.
    token: String,
    key: Key,
    name: Option<String>,
    nest: Nest,
    /// Arguments that came before the name.
    early: String,
    has_arguments: bool,
    /// Whether the arguments are all there is, without an object around them.
    only_arguments: bool,
    call: Option<u32>,
}

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
enum Place {
    #[default]
    Open,
    KeyOrEnd,
    Key,
    InKey,
    Colon,
    Value,
    InContainer,
    InString,
    InScalar,
    CommaOrEnd,
}

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
enum Key {
    Name,
    Arguments,
    #[default]
    Other,
}

impl ObjectScanner {
    /// Returns the number of the call once it has begun.
    pub(super) fn call(&self) -> Option<u32> {
        self.call
    }

    /// Prepares for the arguments of a call whose name is known.
    pub(super) fn begin_arguments(&mut self, name: &str) {
        *self = Self {
            place: Place::Value,
            key: Key::Arguments,
            name: Some(name.to_owned()),
            only_arguments: true,
            ..Self::default()
        };
    }

    /// Begins a call without arguments, after [`Scan::NoArguments`].
    pub(super) fn begin_without_arguments(&mut self, next: &mut u32, out: &mut Vec<ToolDelta>) {
        self.early.push_str("{}");
        self.begin(next, out);
    }

    pub(super) fn step(
        &mut self,
        character: char,
        next: &mut u32,
        out: &mut Vec<ToolDelta>,
    ) -> Scan {
        match self.place {
            Place::InKey | Place::InString => return self.in_string(character, next, out),
            Place::InContainer => return self.in_container(character, out),
            Place::InScalar => {
                if !(character.is_whitespace() || ",}]".contains(character)) {
                    self.token.push(character);
                    return Scan::More;
                }
                if self.end_scalar() == Scan::NoCall {
                    return self.malformed();
                }
            }
            _ => {}
        }
        if character.is_whitespace() {
            return Scan::More;
        }
        match (self.place, character) {
            (Place::Open, '{') => self.place = Place::KeyOrEnd,
            (Place::KeyOrEnd | Place::Key, '"') => {
                self.token.clear();
                self.nest = Nest::string();
                self.place = Place::InKey;
            }
            (Place::Colon, ':') => self.place = Place::Value,
            (Place::Value, _) => return self.begin_value(character, next, out),
            (Place::CommaOrEnd, ',') => self.place = Place::Key,
            (Place::KeyOrEnd | Place::CommaOrEnd, '}') => return self.end_object(),
            _ => return self.malformed(),
        }
        Scan::More
    }

    fn begin_value(&mut self, character: char, next: &mut u32, out: &mut Vec<ToolDelta>) -> Scan {
        self.token.clear();
        match (character, self.key) {
            ('"', _) => {
                self.nest = Nest::string();
                self.place = Place::InString;
            }
            (_, Key::Name) => return self.malformed(),
            ('{' | '[', key) => {
                self.nest = Nest::default();
                self.place = Place::InContainer;
                if key == Key::Arguments {
                    self.has_arguments = true;
                    if self.name.is_some() {
                        self.begin(next, out);
                    }
                }
                return self.in_container(character, out);
            }
            (',' | '}' | ']' | ':', _) => return self.malformed(),
            _ => {
                self.token.push(character);
                self.place = Place::InScalar;
            }
        }
        Scan::More
    }

    fn in_container(&mut self, character: char, out: &mut Vec<ToolDelta>) -> Scan {
        let step = self.nest.step(character);
        if step == NestStep::Mismatch {
            let has_begun = self.key == Key::Arguments && self.call.is_some();
            return if has_begun { Scan::Broken } else { self.malformed() };
        }
        if self.key == Key::Arguments {
            let mut buffer = [0; 4];
            let text = character.encode_utf8(&mut buffer);
            match self.call {
                Some(index) => push_arguments(index, text, out),
                None => self.early.push_str(text),
            }
        }
        if step == NestStep::Closed { self.end_value() } else { Scan::More }
    }

    fn in_string(&mut self, character: char, next: &mut u32, out: &mut Vec<ToolDelta>) -> Scan {
        self.nest.step(character);
        if self.nest.in_string {
            self.token.push(character);
            return Scan::More;
        }
        if self.place == Place::InKey {
            self.key = match self.token.as_str() {
                "name" if self.name.is_none() => Key::Name,
                "arguments" | "parameters" if !self.has_arguments => Key::Arguments,
                _ => Key::Other,
            };
            self.place = Place::Colon;
            return Scan::More;
        }
        if self.key == Key::Other {
            return self.end_value();
        }
        // A name, or arguments that are JSON text within JSON.
        let Ok(text) = serde_json::from_str::<String>(&format!("\"{}\"", self.token)) else {
            return self.malformed();
        };
        if self.key == Key::Name {
            if text.is_empty() {
                return self.malformed();
            }
            self.name = Some(text);
            if self.has_arguments {
                self.begin(next, out);
            }
        } else {
            self.early = if text.trim().is_empty() { "{}".to_owned() } else { text };
            self.has_arguments = true;
            if self.name.is_some() {
                self.begin(next, out);
            }
        }
        self.end_value()
    }

    /// Ends a number or a word. As arguments, only `null` is possible, for none.
    fn end_scalar(&mut self) -> Scan {
        self.place = Place::CommaOrEnd;
        if self.key == Key::Arguments && self.token != "null" {
            return Scan::NoCall;
        }
        Scan::More
    }

    fn end_value(&mut self) -> Scan {
        self.place = Place::CommaOrEnd;
        if self.only_arguments { Scan::Done } else { Scan::More }
    }

    fn end_object(&self) -> Scan {
        match (&self.name, self.call) {
            (_, Some(_)) => Scan::Done,
            (Some(_), None) => Scan::NoArguments,
            (None, None) => Scan::NoCall,
        }
    }

    fn malformed(&self) -> Scan {
        if self.call.is_some() { Scan::DoneBefore } else { Scan::NoCall }
    }

    fn begin(&mut self, next: &mut u32, out: &mut Vec<ToolDelta>) {
        let index = *next;
        *next += 1;
        self.call = Some(index);
        out.push(ToolDelta::Begin { index, name: self.name.clone().unwrap_or_default() });
        push_arguments(index, &self.early, out);
        self.early.clear();
    }
}

/// Tracks strings and brackets.
#[derive(Debug, Clone, Copy, Default)]
struct Nest {
    depth: u32,
    /// One bit for each open bracket, the innermost last: whether it is a brace.
    braces: u128,
    in_string: bool,
    escaped: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum NestStep {
    Inside,
    Closed,
    Mismatch,
}

impl Nest {
    fn string() -> Self {
        Self { in_string: true, ..Self::default() }
    }

    fn step(&mut self, character: char) -> NestStep {
        if self.in_string {
            match character {
                _ if self.escaped => self.escaped = false,
                '\\' => self.escaped = true,
                '"' => self.in_string = false,
                _ => {}
            }
            return NestStep::Inside;
        }
        match character {
            '"' => self.in_string = true,
            '{' | '[' if self.depth == MAX_DEPTH => return NestStep::Mismatch,
            '{' | '[' => {
                self.depth += 1;
                self.braces = self.braces << 1 | u128::from(character == '{');
            }
            '}' | ']' => {
                if (self.braces & 1 == 1) != (character == '}') {
                    return NestStep::Mismatch;
                }
                self.braces >>= 1;
                self.depth -= 1;
                if self.depth == 0 {
                    return NestStep::Closed;
                }
            }
            // Not in JSON outside of strings, and the beginning of markers.
            '<' => return NestStep::Mismatch,
            _ => {}
        }
        NestStep::Inside
    }
}
