//! Tests of responses against recorded answers of vLLM.

use serde_json::json;

use super::logprobs::{Candidate, TokenForm, parse_vllm};
use super::*;

fn golden(text: &str) -> Value {
    serde_json::from_str(text).unwrap()
}

/// Describes names, their order, and the types of values.
fn shape(value: &Value) -> String {
    match value {
        Value::Null => "null".to_owned(),
        Value::Bool(_) => "bool".to_owned(),
        Value::Number(number) if number.is_f64() => "float".to_owned(),
        Value::Number(_) => "integer".to_owned(),
        Value::String(_) => "text".to_owned(),
        Value::Array(values) => {
            let shapes: Vec<String> = values.iter().map(shape).collect();
            format!("[{}]", shapes.join(","))
        }
        Value::Object(members) => {
            let shapes: Vec<String> =
                members.iter().map(|(name, value)| format!("{name}:{}", shape(value))).collect();
            format!("{{{}}}", shapes.join(","))
        }
    }
}

fn written(response: &impl Serialize) -> Value {
    serde_json::from_slice(&to_json(response)).unwrap()
}

fn head(id: &str) -> Head {
    Head {
        id: id.to_owned(),
        created: 1_795_884_969,
        model: "tiny".to_owned(),
        system_fingerprint: Some("f".to_owned()),
    }
}

fn text_choice(index: u32, text: &str, finish_reason: FinishReason) -> CompletionChoice {
    CompletionChoice {
        index,
        text: text.to_owned(),
        logprobs: None,
        finish_reason,
        stop_reason: None,
        token_ids: None,
        prompt_logprobs: None,
        prompt_token_ids: None,
    }
}

fn chat() -> ChatCompletion {
    ChatCompletion {
        head: head("chatcmpl-b0de7ecd7cab3cae"),
        choices: vec![ChatChoice {
            index: 0,
            message: ChatMessage { content: Some("yes".to_owned()), ..ChatMessage::default() },
            logprobs: None,
            finish_reason: FinishReason::Stop,
            stop_reason: None,
            token_ids: None,
        }],
        usage: Some(Usage { prompt_tokens: 4, completion_tokens: 4, ..Usage::default() }),
        extensions: Extensions::default(),
    }
}

#[test]
fn a_chat_is_written_as_vllm_writes_it() {
    let mut expected = golden(include_str!("../../testdata/chat_completion.json"));
    let written = written(&chat());
    assert_eq!(shape(&written), shape(&expected));
    expected["system_fingerprint"] = json!("f");
    assert_eq!(written, expected);
}

#[test]
fn completions_are_written_as_vllm_writes_them() {
    let two = Completion {
        head: head("cmpl-adfaa7f729b2c10e"),
        choices: vec![
            text_choice(0, "", FinishReason::Length),
            text_choice(1, "", FinishReason::Length),
        ],
        usage: Some(Usage { prompt_tokens: 1, completion_tokens: 4, ..Usage::default() }),
        extensions: Extensions::default(),
    };
    let mut expected = golden(include_str!("../../testdata/completion_two_choices.json"));
    assert_eq!(shape(&written(&two)), shape(&expected));
    // The text of a random model is noise.
    for index in 0..2 {
        expected["choices"][index]["text"] = json!("");
    }
    expected["system_fingerprint"] = json!("f");
    assert_eq!(written(&two), expected);

    let stopped = Completion {
        choices: vec![CompletionChoice {
            stop_reason: Some(StopReason::Text(" f".to_owned())),
            ..text_choice(0, "", FinishReason::Stop)
        }],
        ..two
    };
    let expected = golden(include_str!("../../testdata/completion_stopped.json"));
    assert_eq!(shape(&written(&stopped)), shape(&expected));
    assert_eq!(written(&stopped)["choices"], expected["choices"]);
}

#[test]
fn an_echoed_prompt_is_scored_as_in_vllm() {
    let expected = golden(include_str!("../../testdata/completion_echo.json"));
    let prompt_logprobs = &expected["choices"][0]["prompt_logprobs"];
    let positions = parse_vllm(&prompt_logprobs.to_string()).unwrap();
    let mut logprobs = CompletionLogprobs::beginning_at(0);
    logprobs.push_first_of_prompt("he");
    logprobs.push(&positions[1], 0, TokenForm::Text);
    let choice = CompletionChoice {
        logprobs: Some(logprobs),
        prompt_logprobs: Some(prompt_logprobs.clone()),
        ..text_choice(0, "hello", FinishReason::Length)
    };
    assert_eq!(shape(&written(&choice)), shape(&expected["choices"][0]));
    assert_eq!(written(&choice), expected["choices"][0]);
}

#[test]
fn tool_calls_reasoning_and_details() {
    let mut chat = chat();
    chat.choices[0].message = ChatMessage {
        content: None,
        reasoning: Some("r".to_owned()),
        tool_calls: vec![ToolCall {
            id: "call_1".to_owned(),
            name: "f".to_owned(),
            arguments: "{\"a\":1}".to_owned(),
        }],
    };
    chat.choices[0].stop_reason = Some(StopReason::Token(7));
    chat.usage = chat.usage.map(|usage| Usage {
        cached_tokens: Some(3),
        reasoning_tokens: Some(2),
        ..usage
    });
    let chat = written(&chat);
    assert_eq!(
        chat["choices"][0]["message"]["tool_calls"].to_string(),
        r#"[{"id":"call_1","type":"function","function":{"name":"f","arguments":"{\"a\":1}"}}]"#
    );
    assert_eq!(chat["choices"][0]["message"]["content"], Value::Null);
    assert_eq!(chat["choices"][0]["stop_reason"], 7);
    assert_eq!(
        chat["usage"].to_string(),
        r#"{"prompt_tokens":4,"total_tokens":8,"completion_tokens":4,"prompt_tokens_details":{"cached_tokens":3},"completion_tokens_details":{"reasoning_tokens":2}}"#
    );
}

#[test]
fn chunks_of_chats() {
    let head = Head { system_fingerprint: None, ..head("c") };
    let check = |choices: &[ChatChunkChoice<'_>], usage: Option<Usage>, rest: &str| {
        let mut stream = Vec::new();
        write_event(&ChatChunk { head: &head, choices, usage }, &mut stream);
        assert_eq!(
            String::from_utf8(stream).unwrap(),
            format!(
                "data: {{\"id\":\"c\",\"object\":\"chat.completion.chunk\",\"created\":1795884969,\
                 \"model\":\"tiny\",{rest}}}\n\n"
            )
        );
    };
    let choice = |delta| ChatChunkChoice {
        index: 0,
        delta,
        logprobs: None,
        finish_reason: None,
        stop_reason: None,
        token_ids: None,
    };
    check(
        &[choice(Delta::first())],
        None,
        r#""choices":[{"index":0,"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}]"#,
    );
    let begin = [ToolCallDelta::Begin { index: 0, id: "i", name: "f" }];
    let delta = Delta { tool_calls: &begin, ..Delta::default() };
    check(
        &[choice(delta)],
        None,
        r#""choices":[{"index":0,"delta":{"tool_calls":[{"index":0,"id":"i","type":"function","function":{"name":"f","arguments":""}}]},"logprobs":null,"finish_reason":null}]"#,
    );
    let more = [ToolCallDelta::Arguments { index: 0, text: "{\"a" }];
    let delta = Delta { tool_calls: &more, reasoning: Some("r"), ..Delta::default() };
    check(
        &[choice(delta)],
        None,
        r#""choices":[{"index":0,"delta":{"reasoning":"r","tool_calls":[{"index":0,"function":{"arguments":"{\"a"}}]},"logprobs":null,"finish_reason":null}]"#,
    );
    let stop = StopReason::Text("x".to_owned());
    let last = ChatChunkChoice {
        finish_reason: Some(FinishReason::ToolCalls),
        stop_reason: Some(&stop),
        token_ids: Some(&[1, 2]),
        ..choice(Delta { content: Some("a\n"), ..Delta::default() })
    };
    check(
        &[last],
        None,
        r#""choices":[{"index":0,"delta":{"content":"a\n"},"logprobs":null,"finish_reason":"tool_calls","stop_reason":"x","token_ids":[1,2]}]"#,
    );
    check(
        &[],
        Some(Usage { prompt_tokens: 1, completion_tokens: 2, ..Usage::default() }),
        r#""choices":[],"usage":{"prompt_tokens":1,"total_tokens":3,"completion_tokens":2,"prompt_tokens_details":null,"completion_tokens_details":null}"#,
    );
}

#[test]
fn chunks_of_completions() {
    let choice = CompletionChunkChoice {
        index: 3,
        text: "a",
        logprobs: None,
        finish_reason: None,
        stop_reason: None,
        token_ids: None,
    };
    let head = head("c");
    let chunk = CompletionChunk { head: &head, choices: &[choice], usage: None };
    assert_eq!(
        written(&chunk).to_string(),
        r#"{"id":"c","object":"text_completion","created":1795884969,"model":"tiny","system_fingerprint":"f","choices":[{"index":3,"text":"a","logprobs":null,"finish_reason":null,"stop_reason":null}],"usage":null}"#
    );
}

fn candidate(token_id: u32, logprob: f64, rank: u32, token: &str) -> Candidate {
    Candidate { token_id, logprob, rank: Some(rank), token: token.to_owned() }
}

#[test]
fn logprobs_of_chats() {
    let position = [
        candidate(9, f64::NEG_INFINITY, 50, "é"),
        candidate(2, -0.5, 2, "b"),
        candidate(1, -0.25, 1, "a"),
    ];
    let mut logprobs = ChatLogprobs::default();
    logprobs.push(&position, 2, TokenForm::Text);
    logprobs.push(&position, 0, TokenForm::Id);
    logprobs.push(&[], 2, TokenForm::Text);
    assert_eq!(
        written(&logprobs).to_string(),
        r#"{"content":[{"token":"é","logprob":-9999.0,"bytes":[195,169],"top_logprobs":[{"token":"a","logprob":-0.25,"bytes":[97]},{"token":"b","logprob":-0.5,"bytes":[98]}]},{"token":"token_id:9","logprob":-9999.0,"bytes":[195,169],"top_logprobs":[]}]}"#
    );
}

#[test]
fn logprobs_of_completions() {
    let position =
        [candidate(9, -3.0, 50, "é"), candidate(1, -0.25, 1, "a"), candidate(2, -0.5, 2, "a")];
    let mut logprobs = CompletionLogprobs::beginning_at(5);
    logprobs.push(&position, 2, TokenForm::Text);
    logprobs.push(&position, 1, TokenForm::Text);
    assert_eq!(logprobs.next_offset(), 7);
    assert_eq!(
        written(&logprobs).to_string(),
        r#"{"text_offset":[5,6],"token_logprobs":[-3.0,-3.0],"tokens":["é","é"],"top_logprobs":[{"é":-3.0,"a":-0.25},{"é":-3.0,"a":-0.25}]}"#
    );
}

#[test]
fn logprobs_of_the_engine() {
    let positions = parse_vllm(
        r#"[null, {"5": {"logprob": -Infinity, "rank": 3, "decoded_token": "NaN\" -Infinity"},
            "4": {"logprob": -1, "rank": null, "decoded_token": null}}]"#,
    )
    .unwrap();
    assert!(positions[0].is_empty());
    assert_eq!(positions[1][0], candidate(5, -9999.0, 3, "NaN\" -Infinity"));
    assert_eq!(positions[1][1].rank, None);
    assert_eq!(parse_vllm("null").unwrap(), Vec::<Vec<Candidate>>::new());
    for text in ["", "{", "[{\"x\": {\"logprob\": 1}}]", "[{\"1\": {}}]", "[1]"] {
        assert!(parse_vllm(text).is_err(), "{text}");
    }
}

#[test]
fn finish_reasons() {
    for name in [
        "stop",
        "length",
        "tool_calls",
        "content_filter",
        "function_call",
        "abort",
        "error",
        "repetition",
    ] {
        let reason = FinishReason::named(name).unwrap();
        assert_eq!(written(&reason), json!(name));
    }
    assert_eq!(FinishReason::named("None"), None);
}

#[test]
fn lists_of_models() {
    let model = Model {
        id: "a/b".to_owned(),
        created: 5,
        owned_by: "pharos".to_owned(),
        root: None,
        parent: None,
        max_model_len: Some(512),
        ready: None,
    };
    let list = ModelList { data: vec![model.clone()], kserve_models: None };
    assert_eq!(
        written(&list).to_string(),
        r#"{"object":"list","data":[{"id":"a/b","object":"model","created":5,"owned_by":"pharos","root":"a/b","parent":null,"max_model_len":512,"permission":[]}]}"#
    );
    let both = ModelList { data: Vec::new(), kserve_models: Some(vec!["x".to_owned()]) };
    assert_eq!(written(&both).to_string(), r#"{"object":"list","data":[],"models":["x"]}"#);
    let model = Model { ready: Some(true), ..model };
    assert_eq!(written(&model)["name"], "a/b");
    assert_eq!(written(&model)["ready"], true);
}
