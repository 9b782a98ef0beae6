//! One choice of a response while a model writes it: stop strings, reasoning and tool calls.

use crate::contract::ChoiceStep;
use crate::options::RequestOptions;
use crate::reasoning::{ReasoningDelta, ReasoningParser};
use crate::response::logprobs::Position;
use crate::response::{FinishReason, StopReason};
use crate::sampling::Sampling;
use crate::stop::{Stop, StopScanner};
use crate::tools::{ToolDelta, ToolParser};

/// How text becomes tool calls.
#[derive(Clone, Debug, Default)]
pub(crate) enum ToolMode {
    /// Text is text.
    #[default]
    Text,
    /// A parser finds calls.
    Parse(Box<ToolParser>),
    /// The whole text is the arguments of one call of this function.
    Call(String),
}

/// What the output of a model is parsed with.
#[derive(Clone, Debug, Default)]
pub(crate) struct Parsers {
    pub(crate) stop: Vec<String>,
    /// Whether the text includes the stop string that ends it.
    pub(crate) include_stop: bool,
    pub(crate) reasoning: Option<ReasoningParser>,
    pub(crate) tools: ToolMode,
    /// Whether only the first call counts.
    pub(crate) one_call: bool,
    /// The field of the client with the structure of the output, for errors.
    pub(crate) structure_field: Option<&'static str>,
    /// Whether the client wants log probabilities.
    pub(crate) logprobs: bool,
    /// Whether the client wants token ids.
    pub(crate) token_ids: bool,
}

/// A choice that a model writes.
#[derive(Debug)]
pub(crate) struct Choice {
    parsers: Parsers,
    scanner: Option<StopScanner>,
    calls: u32,
    is_finished: bool,
}

/// What a response of the model adds to a choice, for the client.
#[derive(Debug, Default)]
pub(crate) struct Delta {
    pub(crate) content: String,
    /// Text after the first call of the choice.
    pub(crate) content_after_calls: String,
    pub(crate) reasoning: String,
    /// Beginnings and arguments of calls.
    pub(crate) tools: Vec<ToolDelta>,
    pub(crate) logprobs: Vec<Position>,
    pub(crate) token_ids: Vec<u32>,
    pub(crate) finish: Option<Finish>,
}

/// Why a choice ended.
#[derive(Clone, Debug)]
pub(crate) struct Finish {
    pub(crate) reason: FinishReason,
    pub(crate) stop_reason: Option<StopReason>,
}

impl Default for Finish {
    /// The end of a choice that its model did not end.
    fn default() -> Self {
        Self { reason: FinishReason::Error, stop_reason: None }
    }
}

impl Delta {
    /// Adds what a later response has added.
    pub(crate) fn append(&mut self, next: Self) {
        self.content.push_str(&next.content);
        self.content_after_calls.push_str(&next.content_after_calls);
        self.reasoning.push_str(&next.reasoning);
        self.tools.extend(next.tools);
        self.logprobs.extend(next.logprobs);
        self.token_ids.extend(next.token_ids);
        self.finish = next.finish.or(self.finish.take());
    }

    /// Returns whether the client learns something from it.
    pub(crate) fn is_empty(&self) -> bool {
        self.content.is_empty()
            && self.content_after_calls.is_empty()
            && self.reasoning.is_empty()
            && self.tools.is_empty()
            && self.logprobs.is_empty()
            && self.token_ids.is_empty()
            && self.finish.is_none()
    }
}

impl Parsers {
    /// Returns the parsers that every form of request has.
    pub(crate) fn of(sampling: &Sampling, options: &RequestOptions) -> Self {
        Self {
            stop: sampling.stop.clone(),
            include_stop: sampling.include_stop_str_in_output.unwrap_or(false),
            structure_field: sampling.structured.as_ref().map(|structured| structured.field),
            logprobs: sampling.logprobs.is_some(),
            token_ids: options.return_token_ids,
            ..Self::default()
        }
    }
}

impl Choice {
    pub(crate) fn new(parsers: Parsers) -> Self {
        let scanner = (!parsers.stop.is_empty())
            .then(|| StopScanner::new(&parsers.stop, parsers.include_stop));
        Self { parsers, scanner, calls: 0, is_finished: false }
    }

    pub(crate) fn is_finished(&self) -> bool {
        self.is_finished
    }

    /// Takes what a response of the model adds.
    pub(crate) fn push(&mut self, step: ChoiceStep) -> Delta {
        if self.is_finished {
            return Delta::default();
        }
        let ChoiceStep { text, finish_reason, stop_reason, logprobs, token_ids } = step;
        let mut delta = Delta::default();
        if self.parsers.logprobs {
            delta.logprobs = logprobs;
        }
        if self.parsers.token_ids {
            delta.token_ids = token_ids;
        }
        match self.scanner.as_mut().map(|scanner| scanner.push(&text)) {
            None => self.take_text(&text, &mut delta),
            Some(Stop::Text(text)) => self.take_text(&text, &mut delta),
            Some(Stop::Stopped { text, which }) => {
                self.take_text(&text, &mut delta);
                let stop = self.parsers.stop.get(which).cloned().map(StopReason::Text);
                self.finish(FinishReason::Stop, stop, &mut delta);
            }
        }
        if let Some(reason) = finish_reason {
            self.finish(reason, stop_reason, &mut delta);
        }
        delta
    }

    /// Ends a choice whose model gave no reason.
    pub(crate) fn end(&mut self, reason: FinishReason) -> Delta {
        let mut delta = Delta::default();
        self.finish(reason, None, &mut delta);
        delta
    }

    fn finish(&mut self, reason: FinishReason, stop_reason: Option<StopReason>, delta: &mut Delta) {
        if self.is_finished {
            return;
        }
        if let Some(scanner) = &mut self.scanner {
            let held = scanner.finish();
            self.take_text(&held, delta);
        }
        if let Some(parser) = &mut self.parsers.reasoning {
            let mut found = Vec::new();
            parser.finish(&mut found);
            self.take_reasoning(found, delta);
        }
        let mut found = Vec::new();
        if let ToolMode::Parse(parser) = &mut self.parsers.tools {
            parser.finish(&mut found);
        }
        self.take_tools(found, delta);
        // A client that named the function knows about the call.
        let reason = match (&self.parsers.tools, reason) {
            (ToolMode::Parse(_), FinishReason::Stop) if self.calls > 0 => FinishReason::ToolCalls,
            _ => reason,
        };
        self.is_finished = true;
        delta.finish.get_or_insert(Finish { reason, stop_reason });
    }

    fn take_text(&mut self, text: &str, delta: &mut Delta) {
        if text.is_empty() {
            return;
        }
        match &mut self.parsers.reasoning {
            None => self.take_content(text, delta),
            Some(parser) => {
                let mut found = Vec::new();
                parser.push(text, &mut found);
                self.take_reasoning(found, delta);
            }
        }
    }

    fn take_reasoning(&mut self, found: Vec<ReasoningDelta>, delta: &mut Delta) {
        for piece in found {
            match piece {
                ReasoningDelta::Reasoning(text) => delta.reasoning.push_str(&text),
                ReasoningDelta::Content(text) => self.take_content(&text, delta),
            }
        }
    }

    fn take_content(&mut self, text: &str, delta: &mut Delta) {
        match &mut self.parsers.tools {
            ToolMode::Text => delta.content.push_str(text),
            ToolMode::Call(name) => {
                let mut found = Vec::new();
                if self.calls == 0 {
                    found.push(ToolDelta::Begin { index: 0, name: name.clone() });
                }
                found.push(ToolDelta::Arguments { index: 0, text: text.to_owned() });
                self.take_tools(found, delta);
            }
            ToolMode::Parse(parser) => {
                let mut found = Vec::new();
                let parsed = parser.push(text, &mut found);
                self.take_tools(found, delta);
                if parsed.is_err() {
                    self.is_finished = true;
                    delta.finish = Some(Finish { reason: FinishReason::Length, stop_reason: None });
                }
            }
        }
    }

    fn take_tools(&mut self, found: Vec<ToolDelta>, delta: &mut Delta) {
        for piece in found {
            match piece {
                ToolDelta::Text(text) if self.calls > 0 => {
                    delta.content_after_calls.push_str(&text)
                }
                ToolDelta::Text(text) => delta.content.push_str(&text),
                ToolDelta::End { .. } => {}
                ToolDelta::Begin { index, .. } | ToolDelta::Arguments { index, .. }
                    if self.parsers.one_call && index > 0 => {}
                ToolDelta::Begin { index, name } => {
                    self.calls = index + 1;
                    delta.tools.push(ToolDelta::Begin { index, name });
                }
                arguments => delta.tools.push(arguments),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn step(text: &str, finish_reason: Option<FinishReason>) -> ChoiceStep {
        ChoiceStep { text: text.to_owned(), finish_reason, ..ChoiceStep::default() }
    }

    #[test]
    fn a_stop_string_ends_a_choice() {
        let parsers = Parsers { stop: vec!["END".to_owned()], ..Parsers::default() };
        let mut choice = Choice::new(parsers);
        assert_eq!(choice.push(step("ab E", None)).content, "ab ");
        let delta = choice.push(step("ND more", Some(FinishReason::Length)));
        let finish = delta.finish.unwrap();
        assert_eq!((delta.content.as_str(), finish.reason), ("", FinishReason::Stop));
        assert_eq!(finish.stop_reason, Some(StopReason::Text("END".to_owned())));
        assert!(choice.is_finished());
        assert!(choice.push(step("more", None)).is_empty());
    }

    #[test]
    fn text_that_was_held_back_comes_with_the_end() {
        let parsers = Parsers { stop: vec!["END".to_owned()], ..Parsers::default() };
        let mut choice = Choice::new(parsers);
        assert_eq!(choice.push(step("EN", None)).content, "");
        let delta = choice.end(FinishReason::Length);
        assert_eq!(delta.content, "EN");
        assert_eq!(delta.finish.unwrap().reason, FinishReason::Length);
    }

    #[test]
    fn reasoning_and_calls_are_parsed_in_this_order() {
        let parsers = Parsers {
            reasoning: ReasoningParser::named("qwen3"),
            tools: ToolMode::Parse(ToolParser::named("hermes").unwrap().into()),
            one_call: true,
            ..Parsers::default()
        };
        let mut choice = Choice::new(parsers);
        let text = "<think>hm</think>ok<tool_call>{\"name\":\"f\",\"arguments\":{}}</tool_call>\
                    <tool_call>{\"name\":\"g\",\"arguments\":{}}</tool_call>";
        let delta = choice.push(step(text, Some(FinishReason::Stop)));
        assert_eq!((delta.reasoning.as_str(), delta.content.as_str()), ("hm", "ok"));
        let names: Vec<&str> = delta
            .tools
            .iter()
            .filter_map(|piece| match piece {
                ToolDelta::Begin { name, .. } => Some(name.as_str()),
                _ => None,
            })
            .collect();
        assert_eq!(names, ["f"]);
        assert_eq!(delta.finish.unwrap().reason, FinishReason::ToolCalls);
    }

    #[test]
    fn a_forced_call_gets_the_whole_text_as_its_arguments() {
        let parsers = Parsers { tools: ToolMode::Call("f".to_owned()), ..Parsers::default() };
        let mut choice = Choice::new(parsers);
        let delta = choice.push(step("{}", Some(FinishReason::Stop)));
        assert_eq!(
            delta.tools,
            [
                ToolDelta::Begin { index: 0, name: "f".to_owned() },
                ToolDelta::Arguments { index: 0, text: "{}".to_owned() }
            ]
        );
        assert_eq!(delta.finish.unwrap().reason, FinishReason::Stop);
    }
}
