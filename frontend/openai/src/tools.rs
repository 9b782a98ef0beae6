//! Finds tool calls in text that arrives in pieces.
//!
//! Each character is looked at once, plus once for each time that it was held back as the possible
//! beginning of a marker. Text that only looks like a call comes out as text. The arguments of a
//! call are forwarded as the model writes them; clients check them, as OpenAI's documentation asks.

mod object;
mod python;

use object::{ObjectScanner, Scan};

use crate::marker::{Marker, Step};

/// The most bytes of one call, with its markers. Triton's OpenAI frontend has the same limit.
pub const MAX_CALL_BYTES: usize = 128 * 1_024;

/// A piece of the output of a model.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ToolDelta {
    /// Text outside of calls.
    Text(String),
    /// A call begins.
    Begin {
        /// The number of the call in this output, from 0.
        index: u32,
        /// The name of the function.
        name: String,
    },
    /// More of the arguments, which are JSON text.
    Arguments {
        /// The number of the call.
        index: u32,
        /// The text to append.
        text: String,
    },
    /// The call is complete, or the output ended within it.
    End {
        /// The number of the call.
        index: u32,
    },
}

/// The error of a call with more than [`MAX_CALL_BYTES`]. The parser must not be used any more; the
/// answer ends with the finish reason `length`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("a tool call has more than {MAX_CALL_BYTES} bytes")]
pub struct ToolCallTooLong;

/// How a family of models writes calls.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Format {
    /// `<tool_call>{"name","arguments"}</tool_call>`: Hermes, Qwen 2.5 and 3.
    Hermes,
    /// `{"name","parameters"}`, several with `;` between them, after an optional `<|python_tag|>`:
    /// Llama 3.1 and later.
    Llama3Json,
    /// `[TOOL_CALLS][{"name","arguments"},...]`, or `[TOOL_CALLS]name{...}`, or
    /// `[TOOL_CALLS]name[ARGS]{...}`: Mistral.
    Mistral,
    /// `[name(key=value),...]` with Python's literals: Llama 3.2 and 4.
    Pythonic,
    /// `[{"name","parameters"},...]`, the form of forced calls.
    Json,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    /// Text in which a marker may begin a call.
    Text,
    /// Formats without a marker: whitespace so far; the next character decides.
    Start,
    /// Text in which no call can follow.
    Rest,
    /// Before an object that must be a call.
    BeforeCall { in_list: bool },
    /// Within the object of a call.
    Call { in_list: bool },
    /// After the object of a call.
    AfterCall { in_list: bool },
    /// Hermes: after a call, before its closing marker.
    Closing,
    /// Within arguments that are not well-formed. They are forwarded all the same.
    Broken,
    /// Mistral: after the marker.
    MistralHead,
    /// Mistral: within the name.
    MistralName,
    /// Mistral: within `[ARGS]` or `[CALL_ID]`.
    MistralTag,
    /// Mistral: within the id of a call.
    MistralId,
    /// Pythonic: before the name of a function.
    BeforePython,
    /// Pythonic: within a call.
    Python,
    /// Pythonic: after a call.
    AfterPython,
    /// Pythonic: after the list.
    AfterList,
}

/// Finds tool calls in the output of a model.
#[derive(Debug, Clone)]
pub struct ToolParser {
    format: Format,
    state: State,
    open: Marker,
    close: Marker,
    object: ObjectScanner,
    python: python::CallEnd,
    /// Text that is text or a call, not yet decided.
    undecided: String,
    /// Where the call begins in `undecided` (pythonic).
    call_begin: usize,
    /// Mistral: the name, then the tag.
    token: String,
    name: String,
    /// Whether only whitespace followed the last call. Such whitespace is dropped before the next
    /// call and at the end.
    after_call: bool,
    call_bytes: usize,
    next_index: u32,
}

impl ToolParser {
    /// Creates the parser with a name of vLLM's `--tool-call-parser`: `hermes`, `llama3_json`,
    /// `mistral` or `pythonic`; or `json` for the output of
    /// [`forced_call_schema`](crate::ChatRequest::forced_call_schema). `None` for others.
    pub fn named(name: &str) -> Option<Self> {
        let format = match name {
            "hermes" => Format::Hermes,
            "llama3_json" => Format::Llama3Json,
            "mistral" => Format::Mistral,
            "pythonic" => Format::Pythonic,
            "json" => Format::Json,
            _ => return None,
        };
        let open = match format {
            Format::Hermes => "<tool_call>",
            Format::Mistral => "[TOOL_CALLS]",
            Format::Llama3Json | Format::Pythonic | Format::Json => "<|python_tag|>",
        };
        Some(Self {
            format,
            state: match format {
                Format::Hermes | Format::Mistral => State::Text,
                Format::Llama3Json | Format::Pythonic | Format::Json => State::Start,
            },
            open: Marker::new(open),
            close: Marker::new("</tool_call>"),
            object: ObjectScanner::default(),
            python: python::CallEnd::default(),
            undecided: String::new(),
            call_begin: 0,
            token: String::new(),
            name: String::new(),
            after_call: false,
            call_bytes: 0,
            next_index: 0,
        })
    }

    /// Whether the marker of this format is a special token, so that the engine must not skip
    /// special tokens (`skip_special_tokens` false).
    pub fn needs_special_tokens(&self) -> bool {
        self.format == Format::Mistral
    }

    /// Returns the number of calls so far.
    pub fn calls(&self) -> u32 {
        self.next_index
    }

    /// Takes the next text and appends what it leads to. Consecutive pieces of text or of the
    /// arguments of one call are one element of `out`.
    ///
    /// # Errors
    ///
    /// A call has more than [`MAX_CALL_BYTES`].
    pub fn push(&mut self, text: &str, out: &mut Vec<ToolDelta>) -> Result<(), ToolCallTooLong> {
        for character in text.chars() {
            self.step(character, out);
            if self.call_bytes > MAX_CALL_BYTES {
                self.too_long(out)?;
            }
        }
        Ok(())
    }

    /// Ends the text and appends what was held back.
    pub fn finish(&mut self, out: &mut Vec<ToolDelta>) {
        match self.state {
            State::Text => {
                let held = self.open.release();
                if !(self.after_call && held.is_empty()) {
                    self.flush(out);
                }
                push_text(held, out);
            }
            State::Start => {
                self.flush(out);
                push_text(self.open.release(), out);
            }
            State::Call { .. } | State::Broken if self.object.call().is_some() => {
                let held = self.close.release();
                if let Some(index) = self.object.call() {
                    push_arguments(index, held, out);
                    out.push(ToolDelta::End { index });
                }
            }
            State::BeforeCall { .. } | State::BeforePython if self.next_index > 0 => {}
            State::AfterCall { .. } | State::Closing | State::AfterPython | State::AfterList => {}
            _ => self.flush(out),
        }
        self.undecided.clear();
        self.state = State::Rest;
    }

    fn step(&mut self, character: char, out: &mut Vec<ToolDelta>) {
        match self.state {
            State::Text => self.text(character, out),
            State::Start => self.start(character, out),
            State::Rest => push_character(character, out),
            State::BeforeCall { in_list } => self.before_call(character, in_list, out),
            State::Call { in_list } => self.call(character, in_list, out),
            State::AfterCall { in_list } => self.after_object(character, in_list, out),
            State::Closing => self.closing(character, out),
            State::Broken => self.broken(character, out),
            State::MistralHead | State::MistralName | State::MistralTag | State::MistralId => {
                self.mistral(character, out)
            }
            State::BeforePython | State::Python | State::AfterPython | State::AfterList => {
                self.pythonic(character, out)
            }
        }
    }

    /// Searches the opening marker.
    fn text(&mut self, character: char, out: &mut Vec<ToolDelta>) {
        if self.after_call && character.is_whitespace() && self.open.held().is_empty() {
            self.undecided.push(character);
            return;
        }
        match self.open.step(character) {
            Step::Complete => {
                self.undecided.clear();
                self.undecided.push_str(self.open.text());
                self.begin_call();
                self.state = match self.format {
                    Format::Mistral => State::MistralHead,
                    _ => State::Call { in_list: false },
                };
            }
            Step::Held { released: "" } => {}
            Step::Held { released } => {
                self.flush(out);
                push_text(released, out);
            }
            Step::Rejected { released } => {
                self.flush(out);
                push_text(released, out);
                push_character(character, out);
            }
        }
    }

    /// Decides whether the output of a format without a necessary marker is a call.
    fn start(&mut self, character: char, out: &mut Vec<ToolDelta>) {
        if self.open.held().is_empty() && character.is_whitespace() {
            self.undecided.push(character);
            return;
        }
        if self.open.held().is_empty() {
            match (self.format, character) {
                (Format::Pythonic, '[') => {
                    self.undecided.push(character);
                    self.begin_call();
                    self.state = State::BeforePython;
                    return;
                }
                (Format::Llama3Json | Format::Json, '[') => {
                    self.undecided.push(character);
                    self.begin_call();
                    self.state = State::BeforeCall { in_list: true };
                    return;
                }
                (Format::Llama3Json | Format::Json, '{') => {
                    self.begin_call();
                    self.state = State::Call { in_list: false };
                    self.call(character, false, out);
                    return;
                }
                _ => {}
            }
        }
        match self.open.step(character) {
            Step::Complete if self.format == Format::Llama3Json => {
                self.undecided.push_str(self.open.text());
                self.begin_call();
                self.state = State::BeforeCall { in_list: false };
            }
            Step::Held { released: "" } if self.format == Format::Llama3Json => {}
            Step::Complete => self.reject(character, out),
            Step::Held { released } | Step::Rejected { released } => {
                self.undecided.push_str(released);
                self.open.release();
                self.reject(character, out);
            }
        }
    }

    fn before_call(&mut self, character: char, in_list: bool, out: &mut Vec<ToolDelta>) {
        match character {
            '{' => {
                self.begin_call();
                self.state = State::Call { in_list };
                self.call(character, in_list, out);
            }
            ']' if in_list && self.next_index > 0 => self.end_list(),
            character if character.is_whitespace() => {
                self.call_bytes += character.len_utf8();
                self.undecided.push(character);
            }
            _ => self.reject(character, out),
        }
    }

    fn call(&mut self, character: char, in_list: bool, out: &mut Vec<ToolDelta>) {
        self.call_bytes += character.len_utf8();
        let scan = self.object.step(character, &mut self.next_index, out);
        if self.object.call().is_some() {
            self.undecided.clear();
        } else {
            self.undecided.push(character);
        }
        match scan {
            Scan::More => {}
            Scan::Broken => {
                self.state = State::Broken;
                self.broken(character, out);
            }
            Scan::Done => self.end_call(in_list, out),
            Scan::DoneBefore => {
                self.end_call(in_list, out);
                self.step(character, out);
            }
            Scan::NoCall => {
                // The character has just been added; it may begin a marker or a list's end.
                self.undecided.pop();
                self.reject(character, out);
            }
            Scan::NoArguments if self.has_marker() => {
                self.object.begin_without_arguments(&mut self.next_index, out);
                self.end_call(in_list, out);
            }
            Scan::NoArguments => {
                self.undecided.pop();
                self.reject(character, out);
            }
        }
    }

    /// Ends a call after its object.
    fn end_call(&mut self, in_list: bool, out: &mut Vec<ToolDelta>) {
        if let Some(index) = self.object.call() {
            out.push(ToolDelta::End { index });
        }
        self.undecided.clear();
        self.after_call = true;
        self.call_bytes = 0;
        self.state = match self.format {
            Format::Hermes => State::Closing,
            Format::Mistral if !in_list => State::Text,
            _ => State::AfterCall { in_list },
        };
    }

    fn after_object(&mut self, character: char, in_list: bool, out: &mut Vec<ToolDelta>) {
        match character {
            ']' if in_list => self.end_list(),
            '{' if !in_list => self.before_call(character, in_list, out),
            ',' if in_list => self.state = State::BeforeCall { in_list },
            ',' | ';' if !in_list => {
                self.undecided.push(character);
                self.state = State::BeforeCall { in_list };
            }
            character if character.is_whitespace() => self.undecided.push(character),
            _ => self.reject(character, out),
        }
    }

    /// Ends a list of calls.
    fn end_list(&mut self) {
        self.undecided.clear();
        self.call_bytes = 0;
        self.after_call = true;
        self.state = match self.format {
            Format::Mistral => State::Text,
            _ => State::AfterList,
        };
    }

    /// Skips what follows a call up to its closing marker: whitespace, and superfluous braces,
    /// which models write at times.
    fn closing(&mut self, character: char, out: &mut Vec<ToolDelta>) {
        let is_skipped = character.is_whitespace() || character == '}';
        if is_skipped && self.close.held().is_empty() {
            return;
        }
        match self.close.step(character) {
            Step::Complete => self.state = State::Text,
            Step::Held { released: "" } => {}
            Step::Held { released } | Step::Rejected { released } => {
                // Text, or the marker of the next call.
                self.close.release();
                self.state = State::Text;
                for character in released.chars() {
                    self.text(character, out);
                }
                self.text(character, out);
            }
        }
    }

    fn broken(&mut self, character: char, out: &mut Vec<ToolDelta>) {
        self.call_bytes += character.len_utf8();
        let Some(index) = self.object.call() else { return };
        if self.format != Format::Hermes {
            push_arguments(index, character.encode_utf8(&mut [0; 4]), out);
            return;
        }
        match self.close.step(character) {
            Step::Complete => {
                out.push(ToolDelta::End { index });
                self.after_call = true;
                self.call_bytes = 0;
                self.state = State::Text;
            }
            Step::Held { released } => push_arguments(index, released, out),
            Step::Rejected { released } => {
                push_arguments(index, released, out);
                push_arguments(index, character.encode_utf8(&mut [0; 4]), out);
            }
        }
    }

    fn mistral(&mut self, character: char, out: &mut Vec<ToolDelta>) {
        self.call_bytes += character.len_utf8();
        let is_name = character.is_alphanumeric() || "_-.".contains(character);
        match (self.state, character) {
            (State::MistralHead, '[') => {
                self.undecided.push(character);
                self.state = State::BeforeCall { in_list: true };
            }
            (State::MistralHead, '{') => self.before_call(character, false, out),
            (State::MistralHead, _) if is_name => {
                self.undecided.push(character);
                self.name.clear();
                self.name.push(character);
                self.state = State::MistralName;
            }
            (State::MistralHead, _) if character.is_whitespace() => self.undecided.push(character),
            (State::MistralName, '{') => {
                self.object.begin_arguments(&self.name);
                self.state = State::Call { in_list: false };
                self.call(character, false, out);
            }
            (State::MistralName | State::MistralId, '[') => {
                self.undecided.push(character);
                self.token.clear();
                self.state = State::MistralTag;
            }
            (State::MistralName, _) if is_name => {
                self.undecided.push(character);
                self.name.push(character);
            }
            (State::MistralTag, ']') => {
                self.undecided.push(character);
                match self.token.as_str() {
                    "ARGS" => {
                        self.object.begin_arguments(&self.name);
                        self.state = State::Call { in_list: false };
                    }
                    "CALL_ID" => self.state = State::MistralId,
                    _ => self.state = State::Text,
                }
                if self.state == State::Text {
                    self.flush(out);
                }
            }
            (State::MistralTag, _) if is_name => {
                self.undecided.push(character);
                self.token.push(character);
            }
            (State::MistralId, _) if is_name => self.undecided.push(character),
            _ => self.reject(character, out),
        }
    }

    fn pythonic(&mut self, character: char, out: &mut Vec<ToolDelta>) {
        self.call_bytes += character.len_utf8();
        match (self.state, character) {
            (State::BeforePython, _) if character.is_alphabetic() || character == '_' => {
                self.call_begin = self.undecided.len();
                self.python = python::CallEnd::default();
                self.state = State::Python;
                self.pythonic_call(character, out);
            }
            (State::Python, _) => self.pythonic_call(character, out),
            (State::AfterPython, ',') => {
                self.undecided.push(character);
                self.state = State::BeforePython;
            }
            (State::BeforePython | State::AfterPython, ']') if self.next_index > 0 => {
                self.end_list();
            }
            (_, character) if character.is_whitespace() => self.undecided.push(character),
            _ => self.reject(character, out),
        }
    }

    /// Collects a call and parses it at its end: only then is it known to be one.
    fn pythonic_call(&mut self, character: char, out: &mut Vec<ToolDelta>) {
        self.undecided.push(character);
        match self.python.step(character) {
            python::Scan::More => {}
            python::Scan::NoCall => {
                self.undecided.pop();
                self.reject(character, out);
            }
            python::Scan::End => match python::parse_call(&self.undecided[self.call_begin..]) {
                Some(call) => {
                    let index = self.next_index;
                    self.next_index += 1;
                    out.push(ToolDelta::Begin { index, name: call.name });
                    push_arguments(index, &call.arguments, out);
                    out.push(ToolDelta::End { index });
                    self.undecided.clear();
                    self.call_bytes = 0;
                    self.state = State::AfterPython;
                }
                None => {
                    self.undecided.pop();
                    self.reject(character, out);
                }
            },
        }
    }

    /// Prepares for a call that may begin here.
    fn begin_call(&mut self) {
        self.object = ObjectScanner::default();
        self.call_bytes = self.undecided.len();
    }

    /// Writes the undecided text as text and goes on with the character that decided it.
    fn reject(&mut self, character: char, out: &mut Vec<ToolDelta>) {
        self.flush(out);
        self.state = match self.format {
            Format::Hermes | Format::Mistral => State::Text,
            Format::Llama3Json | Format::Pythonic | Format::Json => State::Rest,
        };
        self.step(character, out);
    }

    fn flush(&mut self, out: &mut Vec<ToolDelta>) {
        push_text(&self.undecided, out);
        self.undecided.clear();
        self.call_bytes = 0;
        self.after_call = false;
    }

    /// Ends an overlong call. Without a marker it was perhaps never meant as one, and is text.
    fn too_long(&mut self, out: &mut Vec<ToolDelta>) -> Result<(), ToolCallTooLong> {
        if self.has_marker() || self.object.call().is_some() {
            return Err(ToolCallTooLong);
        }
        self.flush(out);
        self.state = State::Rest;
        Ok(())
    }

    fn has_marker(&self) -> bool {
        matches!(self.format, Format::Hermes | Format::Mistral)
    }
}

fn push_character(character: char, out: &mut Vec<ToolDelta>) {
    push_text(character.encode_utf8(&mut [0; 4]), out);
}

fn push_text(text: &str, out: &mut Vec<ToolDelta>) {
    match out.last_mut() {
        _ if text.is_empty() => {}
        Some(ToolDelta::Text(last)) => last.push_str(text),
        _ => out.push(ToolDelta::Text(text.to_owned())),
    }
}

fn push_arguments(call: u32, more: &str, out: &mut Vec<ToolDelta>) {
    match out.last_mut() {
        _ if more.is_empty() => {}
        Some(ToolDelta::Arguments { index, text }) if *index == call => text.push_str(more),
        _ => out.push(ToolDelta::Arguments { index: call, text: more.to_owned() }),
    }
}

#[cfg(test)]
mod tests;
