//! Tests of the edge through its routes, over a service that answers with the words of the prompt.

use axum::body::Body;
use axum::response::Response;
use http::{Request, StatusCode};
use http_body_util::BodyExt;
use pharos::error::Reason;
use pharos::infer::Parameter;
use pharos::service::{Protocol, Route};
use pharos_edge::Incoming;
use pharos_edge::access::{Access, Forward};
use pharos_edge::http_settings::HttpSettings;
use pharos_edge::routing::{Builder, Fallbacks, Routes};
use pharos_service_double::EchoService;
use regex::bytes::Regex;
use serde_json::{Value, json};

use crate::answer::{no_access, not_found, wrong_method};
use crate::renderer::tests::models;

fn routes(service: &EchoService) -> Routes<()> {
    let pattern = Regex::new("^x-request-id$").unwrap();
    let settings = HttpSettings {
        forward: Forward::new(Some(pattern), &Access::default()),
        ..HttpSettings::default()
    };
    let policy = settings.policy(service.shared());
    let router = crate::add_to(Builder::default(), service.shared(), settings.into(), models());
    let fallbacks = Fallbacks { not_found, wrong_method, refused: no_access };
    router.build((), policy, fallbacks)
}

async fn ask(service: &EchoService, path: &str, body: &Value) -> (StatusCode, String) {
    let (status, text, _) = respond(service, path, body).await;
    (status, text)
}

async fn respond(
    service: &EchoService,
    path: &str,
    body: &Value,
) -> (StatusCode, String, http::HeaderMap) {
    let request = Request::builder().method("POST").uri(path).header("x-request-id", "r-1");
    let request = request.body(Body::from(body.to_string())).unwrap();
    let response: Response = routes(service).answer(Incoming { request, line: None }).await;
    let (parts, body) = response.into_parts();
    let bytes = body.collect().await.unwrap().to_bytes();
    (parts.status, String::from_utf8(bytes.to_vec()).unwrap(), parts.headers)
}

fn chat(text: &str, more: Value) -> Value {
    let mut body = json!({"model": "text", "messages": [{"role": "user", "content": text}]});
    body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    body
}

/// Returns the data of events as JSON, and checks that the stream ends as it must.
fn events(text: &str) -> Vec<Value> {
    let mut parts: Vec<&str> = text.split("\n\n").collect();
    assert_eq!(parts.pop(), Some(""), "{text}");
    assert_eq!(parts.pop(), Some("data: [DONE]"), "{text}");
    let data = parts.iter().map(|event| event.strip_prefix("data: ").unwrap());
    data.map(|json| serde_json::from_str(json).unwrap()).collect()
}

#[tokio::test]
async fn a_chat_has_the_text_of_all_responses() {
    let service = EchoService::default();
    let (status, text, headers) =
        respond(&service, "/v1/chat/completions", &chat("one two three", json!({}))).await;
    assert_eq!(status, StatusCode::OK, "{text}");
    assert_eq!(headers["x-request-id"], "r-1");
    let answer: Value = serde_json::from_str(&text).unwrap();
    assert_eq!(answer["id"], "chatcmpl-r-1");
    assert_eq!(answer["model"], "text");
    let choice = &answer["choices"][0];
    assert_eq!(choice["message"]["content"], "one two three ");
    assert_eq!(choice["finish_reason"], "stop");
    let usage = json!({"prompt_tokens": 3, "completion_tokens": 3, "total_tokens": 6});
    for (name, expected) in usage.as_object().unwrap() {
        assert_eq!(&answer["usage"][name], expected, "{name}");
    }
    let expected = (Protocol::Http, Route::ChatCompletion, 200, None);
    assert_eq!(service.records(), [expected]);
    let requests = service.requests();
    let [request] = requests.as_slice() else { panic!("one request") };
    assert_eq!(request.id, "chatcmpl-r-1");
    let names: Vec<&str> = request.inputs.iter().map(|input| input.name.as_str()).collect();
    assert_eq!(
        names,
        [
            "text_input",
            "stream",
            "exclude_input_in_output",
            "sampling_parameters",
            "return_finish_reason",
            "return_num_input_tokens",
            "return_num_output_tokens"
        ]
    );
}

#[tokio::test]
async fn a_stream_has_a_chunk_for_each_token() {
    let service = EchoService::default();
    let options =
        json!({"stream": true, "stream_options": {"include_usage": true}, "max_tokens": 2});
    let path = "/openai/v1/chat/completions";
    let (status, text, headers) = respond(&service, path, &chat("a b c", options)).await;
    assert_eq!(status, StatusCode::OK, "{text}");
    assert_eq!(headers["content-type"], "text/event-stream; charset=utf-8");
    let chunks = events(&text);
    let deltas: Vec<&Value> = chunks.iter().map(|chunk| &chunk["choices"][0]["delta"]).collect();
    assert_eq!(*deltas[0], json!({"role": "assistant", "content": ""}));
    assert_eq!(*deltas[1], json!({"content": "a "}));
    assert_eq!(*deltas[2], json!({"content": "b "}));
    assert_eq!(chunks[2]["choices"][0]["finish_reason"], "length");
    assert_eq!(chunks[3]["choices"], json!([]));
    assert_eq!(chunks[3]["usage"]["completion_tokens"], 2);
    assert!(chunks.iter().all(|chunk| chunk["id"] == "chatcmpl-r-1"));
    assert_eq!(service.records(), [(Protocol::Http, Route::ChatCompletion, 200, None)]);
}

#[tokio::test]
async fn an_error_has_a_status_before_the_first_token_and_is_an_event_after_it() {
    let service = EchoService::default();
    let stream = json!({"stream": true});
    let path = "/v1/chat/completions";
    let (status, text) = ask(&service, path, &chat("fail", stream.clone())).await;
    assert_eq!(status, StatusCode::INTERNAL_SERVER_ERROR);
    let error: Value = serde_json::from_str(&text).unwrap();
    assert_eq!(error["error"]["message"], "asked to fail");
    let (status, text) = ask(&service, path, &chat("a fail b", stream)).await;
    assert_eq!(status, StatusCode::OK);
    let chunks = events(&text);
    assert_eq!(chunks.last().unwrap()["error"]["type"], "server_error");
    let failed = |status| (Protocol::Http, Route::ChatCompletion, status, Some(Reason::Internal));
    assert_eq!(service.records(), [failed(500), failed(200)]);
}

#[tokio::test]
async fn completions_have_a_choice_for_each_prompt() {
    let service = EchoService::default();
    let body = json!({"model": "text", "prompt": ["a b", "c"], "echo": true});
    let (status, text) = ask(&service, "/v1/completions", &body).await;
    assert_eq!(status, StatusCode::OK, "{text}");
    let answer: Value = serde_json::from_str(&text).unwrap();
    assert_eq!(answer["choices"][0]["text"], "a ba b ");
    assert_eq!(answer["choices"][1]["text"], "cc ");
    assert_eq!(answer["usage"]["completion_tokens"], 3);
    let forwarded = ("x-request-id".to_owned(), Parameter::String("r-1".to_owned()));
    let requests = service.requests();
    assert_eq!(requests.len(), 2);
    assert!(requests.iter().all(|request| request.parameters.contains(&forwarded)));
    let body = json!({"model": "text", "prompt": "a b", "stream": true, "stop": "b"});
    let (_, text) = ask(&service, "/v1/completions", &body).await;
    let chunks = events(&text);
    let texts: String = chunks.iter().filter_map(|c| c["choices"][0]["text"].as_str()).collect();
    assert_eq!(texts, "a ");
    let last = &chunks.last().unwrap()["choices"][0];
    assert_eq!((&last["finish_reason"], &last["stop_reason"]), (&json!("stop"), &json!("b")));
}

#[tokio::test]
async fn what_cannot_be_honoured_is_refused() {
    let service = EchoService::default();
    let chat_path = "/v1/chat/completions";
    for (body, status, param) in [
        (json!({"messages": []}), 400, "messages"),
        (json!({"messages": [{"role": "user", "content": "a"}]}), 400, "model"),
        (chat("a", json!({"model": "none"})), 404, "model"),
        (chat("a", json!({"model": "echo"})), 400, "model"),
        (chat("a", json!({"chat_template": "{{ 1 }}"})), 400, "chat_template"),
        (chat("a", json!({"echo": true})), 400, "echo"),
        (chat("a", json!({"logprobs": true})), 400, "logprobs"),
        (chat("a", json!({"priority": 1})), 400, "priority"),
        (chat("a", json!({"return_token_ids": true})), 400, "return_token_ids"),
    ] {
        let (got, text) = ask(&service, chat_path, &body).await;
        let error: Value = serde_json::from_str(&text).unwrap();
        assert_eq!((got.as_u16(), &error["error"]["param"]), (status, &json!(param)), "{text}");
    }
    let tokens = json!({"model": "text", "prompt": [1, 2]});
    let (status, text) = ask(&service, "/v1/completions", &tokens).await;
    assert_eq!(status, StatusCode::BAD_REQUEST, "{text}");
    let many = json!({"model": "text", "prompt": vec!["a"; 100], "n": 2});
    assert_eq!(ask(&service, "/v1/completions", &many).await.0, StatusCode::BAD_REQUEST);
    assert!(service.requests().is_empty());
}

#[tokio::test]
async fn tools_that_the_client_names_are_called() {
    let service = EchoService::default();
    let tools = json!([{"type": "function", "function": {"name": "f", "parameters": {}}}]);
    let choice = json!({"type": "function", "function": {"name": "f"}});
    let body = chat("{}", json!({"tools": tools, "tool_choice": choice}));
    let (_, text) = ask(&service, "/v1/chat/completions", &body).await;
    let answer: Value = serde_json::from_str(&text).unwrap();
    let message = &answer["choices"][0]["message"];
    assert_eq!(message["content"], Value::Null);
    let call = &message["tool_calls"][0];
    assert_eq!(call["function"], json!({"name": "f", "arguments": "{} "}));
    assert!(call["id"].as_str().unwrap().starts_with("call_"));
    let body = chat("{}", json!({"tools": tools}));
    let (status, text) = ask(&service, "/v1/chat/completions", &body).await;
    assert_eq!(status, StatusCode::BAD_REQUEST, "{text}");
}
