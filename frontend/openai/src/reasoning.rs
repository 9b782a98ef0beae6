//! Separates reasoning (`<think>...</think>`) from the answer in text that arrives in pieces.

use crate::marker::{Marker, Step};

const OPEN: &str = "<think>";
const CLOSE: &str = "</think>";

/// A piece of the output of a model.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ReasoningDelta {
    /// Reasoning, without its tags.
    Reasoning(String),
    /// The answer.
    Content(String),
}

/// Separates reasoning from the answer. The text between and after the tags stays exactly as the
/// model wrote it, with its line breaks.
#[derive(Debug, Clone)]
pub struct ReasoningParser {
    /// Whether text that does not begin with `<think>` is reasoning.
    begins_in_reasoning: bool,
    state: State,
    open: Marker,
    close: Marker,
    /// Whitespace before the first other character.
    leading: String,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    Start,
    Reasoning,
    Content,
}

impl ReasoningParser {
    /// Creates the parser with a name; `None` if there is no such parser.
    ///
    /// - `deepseek_r1`: the output begins with reasoning, with or without `<think>`, because the
    ///   chat template usually ends with it. Without `</think>`, everything is reasoning.
    /// - `qwen3`: the output has reasoning only if it begins with `<think>`.
    pub fn named(name: &str) -> Option<Self> {
        let begins_in_reasoning = match name {
            "deepseek_r1" => true,
            "qwen3" => false,
            _ => return None,
        };
        Some(Self {
            begins_in_reasoning,
            state: State::Start,
            open: Marker::new(OPEN),
            close: Marker::new(CLOSE),
            leading: String::new(),
        })
    }

    /// Adapts the parser to the end of the rendered prompt: `<think>` there means that the output
    /// begins with reasoning, `</think>` that it has none.
    pub fn after_prompt(mut self, prompt: &str) -> Self {
        let prompt = prompt.trim_end();
        if prompt.ends_with(OPEN) {
            self.begins_in_reasoning = true;
        } else if prompt.ends_with(CLOSE) {
            self.state = State::Content;
        }
        self
    }

    /// Whether the answer has begun.
    pub fn is_in_content(&self) -> bool {
        self.state == State::Content
    }

    /// Takes the next text.
    pub fn push(&mut self, text: &str, out: &mut Vec<ReasoningDelta>) {
        for (offset, character) in text.char_indices() {
            match self.state {
                State::Start => self.start(character, out),
                State::Reasoning => match self.close.step(character) {
                    Step::Complete => self.state = State::Content,
                    Step::Held { released } => reasoning(released, out),
                    Step::Rejected { released } => {
                        reasoning(released, out);
                        reasoning(character.encode_utf8(&mut [0; 4]), out);
                    }
                },
                State::Content => {
                    content(&text[offset..], out);
                    return;
                }
            }
        }
    }

    /// Ends the text and writes what was held back.
    pub fn finish(&mut self, out: &mut Vec<ReasoningDelta>) {
        match self.state {
            State::Start => {
                let leading = std::mem::take(&mut self.leading);
                let held = self.open.release();
                self.decide(&leading, out);
                self.decide(held, out);
            }
            State::Reasoning => reasoning(self.close.release(), out),
            State::Content => {}
        }
    }

    fn start(&mut self, character: char, out: &mut Vec<ReasoningDelta>) {
        if character.is_whitespace() && self.open.held().is_empty() {
            self.leading.push(character);
            return;
        }
        match self.open.step(character) {
            Step::Complete => {
                self.leading.clear();
                self.state = State::Reasoning;
            }
            Step::Held { released: "" } => {}
            Step::Held { released } | Step::Rejected { released } => {
                // The first characters are no tag. They may still begin the closing tag.
                self.open.release();
                self.state =
                    if self.begins_in_reasoning { State::Reasoning } else { State::Content };
                let mut text = std::mem::take(&mut self.leading);
                text.push_str(released);
                text.push(character);
                self.push(&text, out);
            }
        }
    }

    fn decide(&self, text: &str, out: &mut Vec<ReasoningDelta>) {
        if self.begins_in_reasoning { reasoning(text, out) } else { content(text, out) }
    }
}

fn reasoning(text: &str, out: &mut Vec<ReasoningDelta>) {
    match out.last_mut() {
        _ if text.is_empty() => {}
        Some(ReasoningDelta::Reasoning(last)) => last.push_str(text),
        _ => out.push(ReasoningDelta::Reasoning(text.to_owned())),
    }
}

fn content(text: &str, out: &mut Vec<ReasoningDelta>) {
    match out.last_mut() {
        _ if text.is_empty() => {}
        Some(ReasoningDelta::Content(last)) => last.push_str(text),
        _ => out.push(ReasoningDelta::Content(text.to_owned())),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn split(name: &str, prompt: &str, text: &str, size: usize) -> (String, String) {
        let mut parser = ReasoningParser::named(name).unwrap().after_prompt(prompt);
        let mut deltas = Vec::new();
        let characters: Vec<char> = text.chars().collect();
        for piece in characters.chunks(size) {
            parser.push(&piece.iter().collect::<String>(), &mut deltas);
        }
        parser.finish(&mut deltas);
        let mut parts = (String::new(), String::new());
        for delta in deltas {
            match delta {
                ReasoningDelta::Reasoning(text) => {
                    assert!(parts.1.is_empty());
                    parts.0.push_str(&text);
                }
                ReasoningDelta::Content(text) => parts.1.push_str(&text),
            }
        }
        parts
    }

    fn check(name: &str, prompt: &str, text: &str, reasoning: &str, content: &str) {
        for size in 1..=text.chars().count().max(1) {
            let expected = (reasoning.to_owned(), content.to_owned());
            assert_eq!(split(name, prompt, text, size), expected, "{text:?} by {size}");
        }
    }

    #[test]
    fn deepseek() {
        check("deepseek_r1", "", "<think>a</think>b", "a", "b");
        check("deepseek_r1", "", "a\n</think>\n\nb", "a\n", "\n\nb");
        check(
            "deepseek_r1",
            "",
            "a <b </thin</think>b<think>c</think>",
            "a <b </thin",
            "b<think>c</think>",
        );
        check("deepseek_r1", "", "only reasoning </thi", "only reasoning </thi", "");
        check("deepseek_r1", "", " \n<think>a", "a", "");
        check("deepseek_r1", "", "</think>b", "", "b");
        check("deepseek_r1", "", "<thi", "<thi", "");
        check("deepseek_r1", "", "  ", "  ", "");
        check("deepseek_r1", "x</think>\n\n", "b", "", "b");
    }

    #[test]
    fn qwen() {
        check("qwen3", "", "<think>\na\n</think>\n\nb", "\na\n", "\n\nb");
        check("qwen3", "", "b</think>c", "", "b</think>c");
        check("qwen3", "", " b", "", " b");
        check("qwen3", "", "<<think>b", "", "<<think>b");
        check("qwen3", "", "<think", "", "<think");
        check("qwen3", "<|im_start|>assistant\n<think>\n", "a</think>b", "a", "b");
        check("qwen3", "<think>\n\n</think>\n\n", "<think>b", "", "<think>b");
    }

    #[test]
    fn unknown_names() {
        assert!(ReasoningParser::named("gpt").is_none());
    }
}
