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
    let settings = std::sync::Arc::new(settings);
    let models = models();
    let router =
        crate::add_to(Builder::default(), service.shared(), settings.clone(), models.clone());
    let router = crate::add_management_to(router, service.shared(), settings, models);
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
    send(service, "POST", path, body).await
}

async fn send(
    service: &EchoService,
    method: &str,
    path: &str,
    body: &Value,
) -> (StatusCode, String, http::HeaderMap) {
    send_to(&routes(service), method, path, body).await
}

async fn send_to(
    routes: &Routes<()>,
    method: &str,
    path: &str,
    body: &Value,
) -> (StatusCode, String, http::HeaderMap) {
    let request = Request::builder().method(method).uri(path).header("x-request-id", "r-1");
    let request = request.body(Body::from(body.to_string())).unwrap();
    let response: Response = routes.answer(Incoming { request, line: None }).await;
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

fn responses(input: Value, more: Value) -> Value {
    let mut body = json!({"model": "text", "input": input});
    body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    body
}

/// Returns the events of a stream of a response, and checks their form and numbers.
fn response_events(text: &str) -> Vec<Value> {
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

/// Returns a response without its times and the random part of its ids.
fn without_ids(mut response: Value) -> Value {
    for name in ["created_at", "completed_at"] {
        response.as_object_mut().unwrap().remove(name);
    }
    for item in response["output"].as_array_mut().unwrap() {
        for name in ["id", "call_id"] {
            if let Some(Value::String(id)) = item.get_mut(name) {
                id.truncate(id.find('_').unwrap());
            }
        }
    }
    response
}

#[tokio::test]
async fn a_response_has_an_item_with_the_text() {
    let service = EchoService::default();
    let body = responses(json!("one two"), json!({"metadata": {"a": "b"}, "store": true}));
    let (status, text, headers) = respond(&service, "/v1/responses", &body).await;
    assert_eq!(status, StatusCode::OK, "{text}");
    assert_eq!(headers["x-request-id"], "r-1");
    let answer: Value = serde_json::from_str(&text).unwrap();
    assert!(answer["completed_at"].as_i64() >= answer["created_at"].as_i64());
    assert_eq!(
        without_ids(answer),
        json!({
            "id": "resp_r-1", "object": "response", "status": "completed", "background": false,
            "error": null, "incomplete_details": null, "instructions": null,
            "max_output_tokens": null, "max_tool_calls": null, "model": "text",
            "output": [{"type": "message", "id": "msg", "status": "completed",
                "role": "assistant", "content": [{"type": "output_text", "text": "one two ",
                "annotations": [], "logprobs": []}]}],
            "parallel_tool_calls": true, "previous_response_id": null, "prompt_cache_key": null,
            "reasoning": {"effort": null, "summary": null}, "safety_identifier": null,
            "service_tier": "default", "store": false, "temperature": null,
            "text": {"format": {"type": "text"}}, "tool_choice": "auto", "tools": [],
            "top_logprobs": 0, "top_p": null, "truncation": "disabled",
            "usage": {"input_tokens": 2,
                "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
                "output_tokens": 2, "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": 4},
            "user": null, "metadata": {"a": "b"},
        })
    );
    assert_eq!(service.records(), [(Protocol::Http, Route::Response, 200, None)]);
    assert_eq!(service.requests()[0].id, "resp_r-1");
}

#[tokio::test]
async fn a_stream_of_a_response_ends_with_the_whole_response() {
    let service = EchoService::default();
    for more in [json!({}), json!({"max_output_tokens": 2}), json!({"instructions": "x y"})] {
        let (_, whole) = ask(&service, "/v1/responses", &responses(json!("a b c"), more)).await;
        let whole: Value = serde_json::from_str(&whole).unwrap();
        let mut body = responses(json!("a b c"), json!({"stream": true}));
        for name in ["max_output_tokens", "instructions"] {
            body[name] = whole[name].clone();
        }
        let (status, text, headers) = respond(&service, "/openai/v1/responses", &body).await;
        assert_eq!(status, StatusCode::OK, "{text}");
        assert_eq!(headers["content-type"], "text/event-stream; charset=utf-8");
        let events = response_events(&text);
        let kinds: Vec<&str> = events.iter().map(|event| event["type"].as_str().unwrap()).collect();
        let begin = [
            "response.created",
            "response.in_progress",
            "response.output_item.added",
            "response.content_part.added",
            "response.output_text.delta",
        ];
        assert_eq!(kinds[..5], begin);
        let is_incomplete = whole["status"] == "incomplete";
        let last = if is_incomplete { "response.incomplete" } else { "response.completed" };
        let end = [
            "response.output_text.delta",
            "response.output_text.done",
            "response.content_part.done",
            "response.output_item.done",
            last,
        ];
        assert_eq!(kinds[kinds.len() - 5..], end);
        assert_eq!(events[0]["response"]["status"], "in_progress");
        assert_eq!(events[0]["response"]["output"], json!([]));
        let streamed = events.last().unwrap()["response"].clone();
        assert_eq!(streamed["id"], events[0]["response"]["id"]);
        assert_eq!(is_incomplete, whole["incomplete_details"]["reason"] == "max_output_tokens");
        assert_eq!(is_incomplete, streamed["completed_at"].is_null());
        assert_eq!(without_ids(streamed), without_ids(whole));
    }
}

#[tokio::test]
async fn a_response_fails_by_its_status_or_by_its_last_event() {
    let service = EchoService::default();
    let path = "/v1/responses";
    let stream = json!({"stream": true});
    let (status, text) = ask(&service, path, &responses(json!("fail"), stream.clone())).await;
    assert_eq!(status, StatusCode::INTERNAL_SERVER_ERROR);
    let error: Value = serde_json::from_str(&text).unwrap();
    assert_eq!(error["error"]["message"], "asked to fail");
    let (status, text) = ask(&service, path, &responses(json!("a fail b"), stream)).await;
    assert_eq!(status, StatusCode::OK);
    let events = response_events(&text);
    let last = events.last().unwrap();
    assert_eq!(last["type"], "response.failed");
    let response = &last["response"];
    assert_eq!(response["status"], "failed");
    assert_eq!(response["error"], json!({"code": "server_error", "message": "asked to fail"}));
    assert_eq!(response["output"][0]["status"], "incomplete");
    assert_eq!(response["output"][0]["content"][0]["text"], "a ");
    let failed = |status| (Protocol::Http, Route::Response, status, Some(Reason::Internal));
    assert_eq!(service.records(), [failed(500), failed(200)]);
}

#[tokio::test]
async fn calls_of_a_response_are_items() {
    let service = EchoService::default();
    let tools = json!([{"type": "function", "name": "f", "parameters": {}}]);
    let choice = json!({"type": "function", "name": "f"});
    let more = json!({"tools": tools, "tool_choice": choice});
    let (_, text) = ask(&service, "/v1/responses", &responses(json!("{}"), more)).await;
    let answer: Value = serde_json::from_str(&text).unwrap();
    let call = &answer["output"][0];
    assert_eq!((&call["type"], &call["name"]), (&json!("function_call"), &json!("f")));
    assert_eq!(call["arguments"], "{} ");
    assert!(call["call_id"].as_str().unwrap().starts_with("call_"));
    assert_eq!(answer["output"].as_array().unwrap().len(), 1);
    assert_eq!(answer["tool_choice"], choice);
}

#[tokio::test]
async fn errors_of_a_response_have_its_names() {
    let service = EchoService::default();
    let path = "/v1/responses";
    for (body, status, param) in [
        (json!({"model": "text"}), 400, "input"),
        (json!({"input": "a"}), 400, "model"),
        (responses(json!("a"), json!({"model": "none"})), 404, "model"),
        (responses(json!("a"), json!({"chat_template": "x"})), 400, "chat_template"),
        (responses(json!("a"), json!({"top_logprobs": 2})), 400, "top_logprobs"),
        (
            responses(json!("a"), json!({"previous_response_id": "resp_1"})),
            400,
            "previous_response_id",
        ),
    ] {
        let (got, text) = ask(&service, path, &body).await;
        let error: Value = serde_json::from_str(&text).unwrap();
        assert_eq!((got.as_u16(), &error["error"]["param"]), (status, &json!(param)), "{text}");
    }
    let (_, text) = ask(&service, path, &responses(json!("a"), json!({"top_logprobs": 2}))).await;
    assert!(text.contains("\"message\":\"top_logprobs is not available"), "{text}");
    assert!(service.requests().is_empty());
}

#[tokio::test]
async fn no_response_is_stored() {
    let service = EchoService::default();
    for (method, path) in [
        ("GET", "/v1/responses/resp_1"),
        ("DELETE", "/openai/v1/responses/resp_1"),
        ("POST", "/v1/responses/resp_1/cancel"),
        ("GET", "/v1/responses/resp_1/input_items?limit=1"),
    ] {
        let (status, text, _) = send(&service, method, path, &json!({})).await;
        assert_eq!(status, StatusCode::NOT_FOUND, "{method} {path}");
        let error: Value = serde_json::from_str(&text).unwrap();
        let message = error["error"]["message"].as_str().unwrap();
        assert!(message.starts_with("the response 'resp_1' is not stored"), "{message}");
    }
    let record = (Protocol::Http, Route::StoredResponse, 404, Some(Reason::Unsupported));
    assert_eq!(service.records(), [record; 4]);
    assert_eq!(send(&service, "POST", "/v1/responses/resp_1", &json!({})).await.0, 405);
}

/// Loads or unloads an adapter. Returns the status and the text, or the message of the error.
async fn change_adapter(routes: &Routes<()>, operation: &str, body: Value) -> (u16, String) {
    let path = format!("/v1/{operation}_lora_adapter");
    let (status, text, _) = send_to(routes, "POST", &path, &body).await;
    let message = match serde_json::from_str::<Value>(&text) {
        Ok(error) => error["error"]["message"].as_str().unwrap().to_owned(),
        Err(_) => text,
    };
    (status.as_u16(), message)
}

#[tokio::test]
async fn an_adapter_is_a_model_from_its_load_to_its_unload() {
    let service = EchoService::default();
    let routes = routes(&service);
    let body = json!({"lora_name": "french", "lora_path": "f.gguf", "model": "text"});
    let loaded = (200, "Success: LoRA adapter 'french' added successfully.".to_owned());
    assert_eq!(change_adapter(&routes, "load", body.clone()).await, loaded);
    assert_eq!(service.records(), [(Protocol::Http, Route::RepositoryLoad, 200, None)]);
    let mut chat = chat("one", json!({}));
    chat["model"] = "french".into();
    let ask = || async {
        let (status, text, _) = send_to(&routes, "POST", "/v1/chat/completions", &chat).await;
        (status.as_u16(), serde_json::from_str::<Value>(&text).unwrap())
    };
    let (status, answer) = ask().await;
    assert_eq!((status, &answer["model"]), (200, &json!("french")));
    let adapter = |request: &pharos::infer::InferRequest| {
        let found = request.parameters.iter().find(|(name, _)| name == "triton_adapter");
        let Some((_, Parameter::String(text))) = found else { panic!("no adapter") };
        serde_json::from_str::<Value>(text).unwrap()
    };
    let requests = service.requests();
    let expected = json!({"name": "french", "path": "f.gguf", "load": 1});
    assert_eq!(requests.iter().map(adapter).collect::<Vec<_>>(), [expected.clone(), expected]);

    let (status, why) = change_adapter(&routes, "load", body.clone()).await;
    assert!(status == 400 && why.contains("already been loaded"), "{why}");
    let mut other = json!({"lora_name": "french", "lora_path": "g.gguf", "model": "text"});
    other["load_inplace"] = true.into();
    assert_eq!(change_adapter(&routes, "load", other).await, loaded);
    assert_eq!(ask().await.0, 200);
    let last = adapter(service.requests().last().unwrap());
    assert_eq!(last, json!({"name": "french", "path": "g.gguf", "load": 2}));

    let name = json!({"lora_name": "french"});
    let (status, text) = change_adapter(&routes, "unload", name.clone()).await;
    assert_eq!(
        (status, text.as_str()),
        (200, "Success: LoRA adapter 'french' removed successfully.")
    );
    assert_eq!(ask().await.0, 404);
    let (status, why) = change_adapter(&routes, "unload", name).await;
    assert!(status == 404 && why.contains("'french' cannot be found"), "{why}");
}

#[tokio::test]
async fn an_adapter_that_the_model_refuses_has_no_name() {
    let service = EchoService::default();
    let routes = routes(&service);
    for (body, expected, part) in [
        (json!({"lora_name": "a", "lora_path": "b"}), 400, "no model here can load adapters"),
        (json!({"lora_name": "a", "lora_path": "wrong", "model": "text"}), 400, "cannot be loaded"),
        (
            json!({"lora_name": "text", "lora_path": "b", "model": "text"}),
            400,
            "'text' has the name of a model",
        ),
        (json!({"lora_name": "a", "lora_path": "b", "model": "echo"}), 400, "'echo' does not load"),
        (json!({"lora_name": "a", "lora_path": "b", "model": "none"}), 404, "'none'"),
    ] {
        let (status, why) = change_adapter(&routes, "load", body.clone()).await;
        assert!(status == expected && why.contains(part), "{body}: {status} {why}");
    }
    let (status, ..) =
        send_to(&routes, "POST", "/v1/completions", &json!({"model": "a", "prompt": "x"})).await;
    assert_eq!(status, StatusCode::NOT_FOUND);
}

#[tokio::test]
async fn adapters_are_loaded_only_where_models_are() {
    let service = EchoService::default();
    service.disable_model_control();
    let routes = routes(&service);
    for operation in ["load", "unload"] {
        let body = json!({"lora_name": "a", "lora_path": "b"});
        let (status, why) = change_adapter(&routes, operation, body).await;
        assert!(status == 503 && why.contains("not allowed"), "{status} {why}");
    }
    assert!(service.requests().is_empty());
}

#[tokio::test]
async fn a_model_sleeps_and_wakes_up() {
    let service = EchoService::default();
    for (method, path, route, expected, operation, options) in [
        (
            "POST",
            "/sleep?level=2&model=text",
            Route::RepositoryUnload,
            json!({"status": "sleeping", "level": 2}),
            "sleep",
            json!({"level": 2, "mode": "abort"}),
        ),
        (
            "GET",
            "/v1/is_sleeping?model=text",
            Route::RepositoryIndex,
            json!({"is_sleeping": true}),
            "is_sleeping",
            json!({}),
        ),
        (
            "POST",
            "/openai/v1/wake_up?tags=weights&tags=kv_cache&model=text",
            Route::RepositoryLoad,
            json!({"status": "awake", "tags": ["weights", "kv_cache"]}),
            "wake_up",
            json!({"tags": ["weights", "kv_cache"]}),
        ),
    ] {
        let (status, text, _) = send(&service, method, path, &json!({})).await;
        assert_eq!(status, StatusCode::OK, "{text}");
        assert_eq!(serde_json::from_str::<Value>(&text).unwrap(), expected);
        let record = (Protocol::Http, route, 200, None);
        assert_eq!(service.records().last(), Some(&record));
        let request = service.requests().pop().unwrap();
        let found = String::from_utf8_lossy(&request.inputs[0].tensor.data.as_slice()).into_owned();
        assert!(found.ends_with(operation), "{found}");
        let found = request.parameters.iter().find(|(name, _)| name == "triton_sleep");
        let Some((_, Parameter::String(text))) = found else { panic!("no options") };
        assert_eq!(serde_json::from_str::<Value>(text).unwrap(), options);
    }
}

#[tokio::test]
async fn only_models_with_a_sleep_mode_sleep() {
    let service = EchoService::default();
    for (path, body, expected, part) in [
        ("/sleep", json!({}), 400, "no model here can sleep"),
        ("/sleep?model=echo", json!({}), 400, "the model 'echo' cannot sleep"),
        ("/wake_up?model=none", json!({}), 404, "'none'"),
        ("/sleep?model=text&level=3", json!({}), 400, "invalid level 3: expected 1 or 2"),
        ("/sleep?model=text", json!({"level": 2}), 400, "are in its query"),
    ] {
        let (status, text) = ask(&service, path, &body).await;
        assert!(status.as_u16() == expected && text.contains(part), "{path}: {status} {text}");
    }
    assert_eq!(ask(&service, "/is_sleeping", &json!({})).await.0, 405);
    service.disable_model_control();
    for (method, path) in [("POST", "/sleep"), ("POST", "/v1/wake_up"), ("GET", "/is_sleeping")] {
        let (status, text, _) = send(&service, method, path, &json!({})).await;
        assert!(status == 503 && text.contains("not allowed"), "{path}: {status} {text}");
    }
    assert!(service.requests().is_empty());
}
