//! The output of a response while the model writes it: its items, and the events about them.
//!
//! Whole responses and streams have the same items, because both are made here.

use serde::Serialize;

use super::object::{Item, Part, ResponseObject, Status};
use crate::choice::{Delta, Finish};
use crate::response::logprobs::{LogprobsForm, Position, TokenLogprob};
use crate::tools::ToolDelta;

/// The number of the only part of an item.
const ONLY_PART: u32 = 0;

/// Events (server-sent events) that wait to be sent.
#[derive(Debug, Default)]
struct Events {
    buffer: Vec<u8>,
    next: u64,
    /// Whether the client wants a stream.
    is_streamed: bool,
}

#[derive(Serialize)]
struct Event<'a> {
    r#type: &'static str,
    sequence_number: u64,
    #[serde(flatten)]
    body: Body<'a>,
}

#[derive(Serialize)]
#[serde(untagged)]
enum Body<'a> {
    Response {
        response: &'a ResponseObject<'a>,
    },
    Item {
        output_index: usize,
        item: &'a Item,
    },
    Part {
        item_id: &'a str,
        output_index: usize,
        content_index: u32,
        part: &'a Part,
    },
    TextDelta {
        item_id: &'a str,
        output_index: usize,
        content_index: u32,
        delta: &'a str,
        logprobs: &'a [TokenLogprob],
    },
    TextDone {
        item_id: &'a str,
        output_index: usize,
        content_index: u32,
        text: &'a str,
        logprobs: &'a [TokenLogprob],
    },
    ReasoningDelta {
        item_id: &'a str,
        output_index: usize,
        content_index: u32,
        delta: &'a str,
    },
    ReasoningDone {
        item_id: &'a str,
        output_index: usize,
        content_index: u32,
        text: &'a str,
    },
    ArgumentsDelta {
        item_id: &'a str,
        output_index: usize,
        delta: &'a str,
    },
    ArgumentsDone {
        item_id: &'a str,
        output_index: usize,
        name: &'a str,
        arguments: &'a str,
    },
}

impl Events {
    fn add(&mut self, kind: &'static str, body: Body<'_>) {
        if !self.is_streamed {
            return;
        }
        let event = Event { r#type: kind, sequence_number: self.next, body };
        self.next += 1;
        self.buffer.extend_from_slice(b"event: ");
        self.buffer.extend_from_slice(kind.as_bytes());
        self.buffer.extend_from_slice(b"\ndata: ");
        // The types have no maps with keys other than texts and write to memory: this cannot fail.
        let _ = serde_json::to_writer(&mut self.buffer, &event);
        self.buffer.extend_from_slice(b"\n\n");
    }
}

/// What the progress of a request includes.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Includes {
    pub(crate) logprobs: Option<LogprobsForm>,
    pub(crate) reasoning: bool,
    /// Whether the client wants events.
    pub(crate) events: bool,
}

/// The output of a response.
#[derive(Debug)]
pub(crate) struct Progress {
    includes: Includes,
    /// Makes ids of items, from their prefix.
    new_id: fn(&str) -> String,
    items: Vec<Item>,
    /// Whether the model writes the last item.
    is_open: bool,
    /// Whitespace that is no message if a call follows it.
    held: String,
    /// Log probabilities of tokens whose text is held back.
    positions: Vec<Position>,
    /// Text after a call, which follows all calls.
    after_calls: String,
    finish: Option<Finish>,
    events: Events,
}

impl Progress {
    /// Returns an output without items.
    pub(crate) fn new(includes: Includes, new_id: fn(&str) -> String) -> Self {
        Self {
            includes,
            new_id,
            items: Vec::new(),
            is_open: false,
            held: String::new(),
            positions: Vec::new(),
            after_calls: String::new(),
            finish: None,
            events: Events { is_streamed: includes.events, ..Events::default() },
        }
    }

    pub(crate) fn items(&self) -> &[Item] {
        &self.items
    }

    /// Returns why the model ended the output.
    pub(crate) fn finish(&self) -> Finish {
        self.finish.clone().unwrap_or_default()
    }

    /// Adds an event about the whole response, which `response_of` returns for its items.
    pub(crate) fn add_event<'a>(
        &'a mut self,
        kind: &'static str,
        response_of: impl FnOnce(&'a [Item]) -> ResponseObject<'a>,
    ) {
        let response = response_of(&self.items);
        self.events.add(kind, Body::Response { response: &response });
    }

    /// Moves the events to the body of the response.
    pub(crate) fn take_events(&mut self, out: &mut Vec<u8>) {
        out.append(&mut self.events.buffer);
    }

    /// Returns the same as of its beginning, without events.
    pub(crate) fn restarted(&self) -> Self {
        Self::new(Includes { events: false, ..self.includes }, self.new_id)
    }

    /// Takes what a response of the model adds.
    pub(crate) fn take(&mut self, delta: Delta) {
        if self.includes.reasoning && !delta.reasoning.is_empty() {
            self.add_reasoning(&delta.reasoning);
        }
        self.positions.extend(delta.logprobs);
        self.add_text(&delta.content);
        for piece in delta.tools {
            match piece {
                ToolDelta::Begin { name, .. } => self.begin_call(name),
                ToolDelta::Arguments { text, .. } => self.add_arguments(&text),
                ToolDelta::Text(_) | ToolDelta::End { .. } => {}
            }
        }
        self.after_calls.push_str(&delta.content_after_calls);
        self.finish = delta.finish.or(self.finish.take());
    }

    /// Ends the last item with this state. `has_failed` is whether the response has no more text
    /// for that reason.
    pub(crate) fn end(&mut self, status: Status, has_failed: bool) {
        let text = if self.after_calls.is_empty() {
            std::mem::take(&mut self.held)
        } else {
            std::mem::take(&mut self.after_calls)
        };
        if !text.is_empty() || (self.items.is_empty() && !has_failed) {
            self.begin_message(&text);
        }
        self.close(status);
    }

    fn add_reasoning(&mut self, delta: &str) {
        if !self.is_open || !matches!(self.items.last(), Some(Item::Reasoning { .. })) {
            let id = (self.new_id)("rs_");
            let status = Status::InProgress;
            let encrypted_content = ();
            self.open(Item::Reasoning {
                id,
                status,
                summary: [],
                content: Vec::new(),
                encrypted_content,
            });
            self.open_part(Part::ReasoningText { text: String::new() });
        }
        let output_index = self.items.len().saturating_sub(1);
        let Some(Item::Reasoning { id: item_id, content, .. }) = self.items.last_mut() else {
            return;
        };
        if let Some(Part::ReasoningText { text }) = content.first_mut() {
            text.push_str(delta);
        }
        let content_index = ONLY_PART;
        let body = Body::ReasoningDelta { item_id, output_index, content_index, delta };
        self.events.add("response.reasoning_text.delta", body);
    }

    fn add_text(&mut self, text: &str) {
        if text.is_empty() {
            return;
        }
        if self.is_open && matches!(self.items.last(), Some(Item::Message { .. })) {
            self.append_text(text);
            return;
        }
        self.held.push_str(text);
        if !self.held.trim().is_empty() {
            let text = std::mem::take(&mut self.held);
            self.begin_message(&text);
        }
    }

    fn begin_message(&mut self, text: &str) {
        let id = (self.new_id)("msg_");
        let status = Status::InProgress;
        self.open(Item::Message { id, status, role: "assistant", content: Vec::new() });
        self.open_part(Part::OutputText {
            text: String::new(),
            annotations: [],
            logprobs: Vec::new(),
        });
        if !text.is_empty() {
            self.append_text(text);
        }
    }

    fn append_text(&mut self, delta: &str) {
        let new = self.take_logprobs();
        let output_index = self.items.len().saturating_sub(1);
        let Some(Item::Message { id: item_id, content, .. }) = self.items.last_mut() else {
            return;
        };
        let content_index = ONLY_PART;
        let logprobs = new.as_slice();
        let body = Body::TextDelta { item_id, output_index, content_index, delta, logprobs };
        self.events.add("response.output_text.delta", body);
        if let Some(Part::OutputText { text, logprobs, .. }) = content.first_mut() {
            text.push_str(delta);
            logprobs.extend(new);
        }
    }

    /// Returns the log probabilities of the text that is about to be added.
    fn take_logprobs(&mut self) -> Vec<TokenLogprob> {
        let positions = std::mem::take(&mut self.positions);
        self.includes.logprobs.map_or_else(Vec::new, |form| form.chat(&positions).content)
    }

    fn begin_call(&mut self, name: String) {
        // Whitespace before a call is no message.
        self.held.clear();
        let id = (self.new_id)("fc_");
        let call_id = (self.new_id)("call_");
        let status = Status::InProgress;
        let arguments = String::new();
        self.open(Item::FunctionCall { id, status, call_id, name, arguments });
    }

    fn add_arguments(&mut self, delta: &str) {
        let output_index = self.items.len().saturating_sub(1);
        let Some(Item::FunctionCall { id: item_id, arguments, .. }) = self.items.last_mut() else {
            return;
        };
        if delta.is_empty() {
            return;
        }
        arguments.push_str(delta);
        let body = Body::ArgumentsDelta { item_id, output_index, delta };
        self.events.add("response.function_call_arguments.delta", body);
    }

    /// Begins an item; the one before it is complete.
    fn open(&mut self, item: Item) {
        self.close(Status::Completed);
        let output_index = self.items.len();
        self.events.add("response.output_item.added", Body::Item { output_index, item: &item });
        self.items.push(item);
        self.is_open = true;
    }

    fn open_part(&mut self, new: Part) {
        let output_index = self.items.len().saturating_sub(1);
        let Some(
            Item::Message { id: item_id, content, .. }
            | Item::Reasoning { id: item_id, content, .. },
        ) = self.items.last_mut()
        else {
            return;
        };
        let content_index = ONLY_PART;
        let body = Body::Part { item_id, output_index, content_index, part: &new };
        self.events.add("response.content_part.added", body);
        content.push(new);
    }

    /// Ends the item that the model writes, if there is one.
    fn close(&mut self, status: Status) {
        if !std::mem::replace(&mut self.is_open, false) {
            return;
        }
        if matches!(self.items.last(), Some(Item::Message { .. })) {
            let rest = self.take_logprobs();
            if let Some(Item::Message { content, .. }) = self.items.last_mut()
                && let Some(Part::OutputText { logprobs, .. }) = content.first_mut()
            {
                logprobs.extend(rest);
            }
        }
        let output_index = self.items.len().saturating_sub(1);
        let Some(item) = self.items.last_mut() else { return };
        item.set_status(status);
        let item: &Item = item;
        let item_id = item.id();
        let content_index = ONLY_PART;
        match item {
            Item::FunctionCall { name, arguments, .. } => {
                let body = Body::ArgumentsDone { item_id, output_index, name, arguments };
                self.events.add("response.function_call_arguments.done", body);
            }
            Item::Message { content, .. } | Item::Reasoning { content, .. } => {
                for part in content {
                    match part {
                        Part::OutputText { text, logprobs, .. } => self.events.add(
                            "response.output_text.done",
                            Body::TextDone { item_id, output_index, content_index, text, logprobs },
                        ),
                        Part::ReasoningText { text } => self.events.add(
                            "response.reasoning_text.done",
                            Body::ReasoningDone { item_id, output_index, content_index, text },
                        ),
                    }
                    let body = Body::Part { item_id, output_index, content_index, part };
                    self.events.add("response.content_part.done", body);
                }
            }
        }
        self.events.add("response.output_item.done", Body::Item { output_index, item });
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;
    use crate::response::FinishReason;
    use crate::response::logprobs::{Candidate, TokenForm};

    fn progress(events: bool) -> Progress {
        let logprobs = Some(LogprobsForm { top: 0, tokens: TokenForm::Text });
        let includes = Includes { logprobs, reasoning: true, events };
        Progress::new(includes, |prefix| format!("{prefix}1"))
    }

    fn begin(name: &str) -> ToolDelta {
        ToolDelta::Begin { index: 0, name: name.to_owned() }
    }

    fn arguments(text: &str) -> ToolDelta {
        ToolDelta::Arguments { index: 0, text: text.to_owned() }
    }

    /// Returns what a token adds; its text is its log probability's token.
    fn text(text: &str) -> Delta {
        let token = Candidate { token_id: 1, logprob: -0.5, rank: Some(1), token: text.to_owned() };
        Delta { content: text.to_owned(), logprobs: vec![vec![token]], ..Delta::default() }
    }

    fn reasoning(text: &str) -> Delta {
        Delta { reasoning: text.to_owned(), ..Delta::default() }
    }

    fn tools(tools: Vec<ToolDelta>) -> Delta {
        Delta { tools, ..Delta::default() }
    }

    fn after_calls(text: &str) -> Delta {
        Delta { content_after_calls: text.to_owned(), ..Delta::default() }
    }

    fn items(progress: &Progress) -> Value {
        json!(progress.items())
    }

    fn events(progress: &mut Progress) -> Vec<Value> {
        let mut bytes = Vec::new();
        progress.take_events(&mut bytes);
        let text = String::from_utf8(bytes).unwrap();
        let mut events = Vec::new();
        for event in text.split_terminator("\n\n") {
            let (kind, data) = event.split_once('\n').unwrap();
            let data: Value = serde_json::from_str(data.strip_prefix("data: ").unwrap()).unwrap();
            assert_eq!(kind.strip_prefix("event: "), data["type"].as_str());
            assert_eq!(data["sequence_number"], events.len());
            events.push(data);
        }
        events
    }

    /// Returns the streamed items after these deltas, whose whole form must be the same.
    fn both(deltas: impl Fn() -> Vec<Delta>, status: Status) -> (Value, Vec<Value>) {
        let mut streamed = progress(true);
        deltas().into_iter().for_each(|delta| streamed.take(delta));
        streamed.end(status, false);
        let mut whole = streamed.restarted();
        let mut merged = Delta::default();
        deltas().into_iter().for_each(|delta| merged.append(delta));
        whole.take(merged);
        whole.end(status, false);
        assert_eq!(items(&whole), items(&streamed));
        assert!(events(&mut whole).is_empty());
        (items(&streamed), events(&mut streamed))
    }

    fn kinds(events: &[Value]) -> Vec<&str> {
        let kinds = events.iter().filter_map(|event| event["type"].as_str());
        kinds.filter_map(|kind| kind.strip_prefix("response.")).collect()
    }

    #[test]
    fn reasoning_text_and_calls_are_items_in_this_order() {
        let deltas = || {
            vec![
                reasoning("h"),
                reasoning("m"),
                text("\n"),
                text("ok"),
                text("!"),
                tools(vec![begin("f"), arguments("{"), arguments(""), arguments("}"), begin("g")]),
            ]
        };
        let (items, events) = both(deltas, Status::Completed);
        assert_eq!(items[0]["content"], json!([{"type": "reasoning_text", "text": "hm"}]));
        assert_eq!(items[1]["content"][0]["text"], "\nok!");
        assert_eq!(items[1]["content"][0]["logprobs"].as_array().unwrap().len(), 3);
        assert_eq!(
            items[2],
            json!({"type": "function_call", "id": "fc_1", "status": "completed",
                "call_id": "call_1", "name": "f", "arguments": "{}"})
        );
        assert_eq!(items[3]["name"], "g");
        assert_eq!(
            kinds(&events),
            [
                "output_item.added",
                "content_part.added",
                "reasoning_text.delta",
                "reasoning_text.delta",
                "reasoning_text.done",
                "content_part.done",
                "output_item.done",
                "output_item.added",
                "content_part.added",
                "output_text.delta",
                "output_text.delta",
                "output_text.done",
                "content_part.done",
                "output_item.done",
                "output_item.added",
                "function_call_arguments.delta",
                "function_call_arguments.delta",
                "function_call_arguments.done",
                "output_item.done",
                "output_item.added",
                "function_call_arguments.done",
                "output_item.done",
            ]
        );
        assert_eq!(events[0]["item"]["status"], "in_progress");
        assert_eq!(events[0]["item"]["content"], json!([]));
        assert_eq!(events[9]["logprobs"].as_array().unwrap().len(), 2);
        assert_eq!(events[11]["text"], "\nok!");
        assert_eq!(events[13]["item"], items[1]);
        assert_eq!(events[17]["arguments"], "{}");
        let indexes: Vec<&Value> = events.iter().map(|event| &event["output_index"]).collect();
        assert!(indexes.is_sorted_by_key(|index| index.as_u64()));
    }

    #[test]
    fn whitespace_before_a_call_is_no_message() {
        let deltas = || vec![text("\n"), text(" "), tools(vec![begin("f")])];
        let (items, _) = both(deltas, Status::Completed);
        assert_eq!(items.as_array().unwrap().len(), 1);
        let (items, _) = both(|| vec![text("\n")], Status::Completed);
        assert_eq!(items[0]["content"][0]["text"], "\n");
    }

    #[test]
    fn text_after_calls_is_a_message_after_them() {
        let deltas = || {
            vec![
                text("a"),
                tools(vec![begin("f")]),
                after_calls("b"),
                tools(vec![begin("g")]),
                after_calls("c"),
            ]
        };
        let (items, _) = both(deltas, Status::Incomplete);
        assert_eq!((&items[1]["name"], &items[2]["name"]), (&json!("f"), &json!("g")));
        assert_eq!(items[2]["status"], "completed");
        assert_eq!(items[3]["content"][0]["text"], "bc");
        assert_eq!(items[3]["status"], "incomplete");
    }

    #[test]
    fn an_output_without_text_has_an_empty_message_unless_it_failed() {
        let (items, events) = both(Vec::new, Status::Incomplete);
        assert_eq!(items[0]["content"][0]["text"], "");
        assert_eq!(items[0]["status"], "incomplete");
        assert_eq!(events.len(), 5);
        let mut failed = progress(true);
        failed.end(Status::Incomplete, true);
        assert!(failed.items().is_empty());
        let (items, _) = both(|| vec![reasoning("hm")], Status::Completed);
        assert_eq!(items.as_array().unwrap().len(), 1);
    }

    #[test]
    fn the_last_reason_counts() {
        let mut progress = progress(false);
        assert_eq!(progress.finish().reason, FinishReason::Error);
        let finish = Some(Finish { reason: FinishReason::Length, stop_reason: None });
        progress.take(Delta { finish, ..Delta::default() });
        progress.take(Delta::default());
        assert_eq!(progress.finish().reason, FinishReason::Length);
    }
}
