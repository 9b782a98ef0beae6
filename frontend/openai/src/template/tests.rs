//! Tests of chat templates.

use serde_json::{Value as Json, json};

use super::*;
use crate::chat::ChatRequest;
use crate::error::ApiError;

const NOW: CivilTime = CivilTime { year: 2026, month: 7, day: 4, hour: 12, minute: 0, second: 0 };

fn template(source: &str) -> ChatTemplate {
    let tokens = [("bos_token", "<s>"), ("eos_token", "</s>")];
    let tokens = tokens.map(|(name, token)| (name.to_owned(), token.to_owned()));
    ChatTemplate::new(TemplateSource::Single(source.to_owned()), tokens.into(), None).unwrap()
}

/// Renders a prompt as the frontend and the process of a template do together.
fn render(template: &ChatTemplate, request: &ChatRequest) -> Result<String, ApiError> {
    let expectations = template.expectations();
    let input = expectations.input(request, NOW)?;
    expectations.prompt(request, template.render(&input).map_err(refused)?)
}

fn request(body: &Json) -> ChatRequest {
    ChatRequest::parse(body.to_string().as_bytes()).unwrap()
}

fn check(source: &str, body: Json, expected: &str) {
    assert_eq!(render(&template(source), &request(&body)).unwrap(), expected);
}

fn error(source: &str, body: Json) -> ApiError {
    render(&template(source), &request(&body)).unwrap_err()
}

fn hi() -> Json {
    json!({"messages": [{"role": "user", "content": "hi"}]})
}

/// A conversation with a tool: a call and its result.
fn weather() -> Json {
    json!({
        "messages": [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "Weather in Zürich?"},
            {"role": "assistant", "content": null, "tool_calls": [
                {"id": "123456789", "type": "function",
                 "function": {"name": "weather", "arguments": "{\"city\": \"Zürich\"}"}},
            ]},
            {"role": "tool", "tool_call_id": "123456789", "content": "<7 °C>"},
        ],
        "tools": [{"type": "function", "function": {
            "name": "weather",
            "description": "The weather's <state> & more",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
        }}],
    })
}

const TOOL_JSON: &str = r#"{"type": "function", "function": {"name": "weather", "description": "The weather's <state> & more", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}}}"#;

#[test]
fn chatml() {
    let body = json!({"messages": [
        {"role": "system", "content": "s"},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"role": "assistant"},
    ]});
    check(
        CHATML,
        body,
        "<|im_start|>system\ns<|im_end|>\n<|im_start|>user\na\nb<|im_end|>\n\
         <|im_start|>assistant\n<|im_end|>\n<|im_start|>assistant\n",
    );
    assert_eq!(template(CHATML).expectations().content_form(), ContentForm::Text);
    let mut body = hi();
    body["add_generation_prompt"] = json!(false);
    check(CHATML, body, "<|im_start|>user\nhi<|im_end|>\n");
}

#[test]
fn in_the_style_of_llama_3() {
    const LLAMA: &str = r#"{{- bos_token }}
{%- if not date_string is defined %}
    {%- if strftime_now is defined %}
        {%- set date_string = strftime_now("%d %b %Y") %}
    {%- else %}
        {%- set date_string = "26 Jul 2024" %}
    {%- endif %}
{%- endif %}
{%- if not tools is defined %}
    {%- set tools = none %}
{%- endif %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content']|trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system_message = "" %}
{%- endif %}
{{- "<|start|>system<|end|>\n\n" }}
{{- "Today Date: " + date_string + "\n\n" }}
{{- system_message }}
{{- "<|eot|>" }}
{%- if tools is not none %}
    {%- for t in tools %}
        {{- t | tojson(indent=4) }}
        {{- "\n\n" }}
    {%- endfor %}
{%- endif %}
{%- for message in messages %}
    {%- if not (message.role == 'ipython' or message.role == 'tool' or 'tool_calls' in message) %}
        {{- '<|start|>' + message['role'] + '<|end|>\n\n'+ message['content'] | trim + '<|eot|>' }}
    {%- elif 'tool_calls' in message %}
        {%- if not message.tool_calls|length == 1 %}
            {{- raise_exception("This model only supports single tool-calls at once!") }}
        {%- endif %}
        {%- set tool_call = message.tool_calls[0].function %}
        {{- '<|start|>assistant<|end|>\n\n' -}}
        {{- '{"name": "' + tool_call.name + '", ' }}
        {{- '"parameters": ' }}
        {{- tool_call.arguments | tojson }}
        {{- "}" }}
        {{- "<|eot|>" }}
    {%- elif message.role == "tool" or message.role == "ipython" %}
        {{- "<|start|>ipython<|end|>\n\n" }}
        {%- if message.content is mapping or message.content is iterable and message.content is not string %}
            {{- message.content | tojson }}
        {%- else %}
            {{- message.content }}
        {%- endif %}
        {{- "<|eot|>" }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start|>assistant<|end|>\n\n' }}
{%- endif %}
"#;
    check(
        LLAMA,
        weather(),
        "<s><|start|>system<|end|>\n\nToday Date: 04 Jul 2026\n\nBe brief.<|eot|>{\n    \"type\": \"function\",\n    \"function\": {\n        \"name\": \"weather\",\n        \"description\": \"The weather's <state> & more\",\n        \"parameters\": {\n            \"type\": \"object\",\n            \"properties\": {\n                \"city\": {\n                    \"type\": \"string\"\n                }\n            }\n        }\n    }\n}\n\n<|start|>user<|end|>\n\nWeather in Zürich?<|eot|><|start|>assistant<|end|>\n\n{\"name\": \"weather\", \"parameters\": {\"city\": \"Zürich\"}}<|eot|><|start|>ipython<|end|>\n\n<7 °C><|eot|><|start|>assistant<|end|>\n\n",
    );
    let mut body = hi();
    body["chat_template_kwargs"] = json!({"date_string": "today", "messages": []});
    check(
        LLAMA,
        body,
        "<s><|start|>system<|end|>\n\nToday Date: today\n\n<|eot|><|start|>user<|end|>\n\nhi<|eot|><|start|>assistant<|end|>\n\n",
    );
    let mut body = weather();
    let call = body["messages"][2]["tool_calls"][0].clone();
    body["messages"][2]["tool_calls"] = json!([call.clone(), call]);
    let error = error(LLAMA, body);
    assert_eq!(error.status, 400);
    assert_eq!(error.message, "This model only supports single tool-calls at once!");
}

#[test]
fn in_the_style_of_qwen() {
    const QWEN: &str = r#"{%- if tools %}
    {{- '<|im_start|>system\n' }}
    {%- if messages[0]['role'] == 'system' %}
        {{- messages[0]['content'] }}
    {%- else %}
        {{- 'You are helpful.' }}
    {%- endif %}
    {{- "\n\n# Tools\n<tools>" }}
    {%- for tool in tools %}
        {{- "\n" }}
        {{- tool | tojson }}
    {%- endfor %}
    {{- "\n</tools><|im_end|>\n" }}
{%- else %}
    {%- if messages[0]['role'] == 'system' %}
        {{- '<|im_start|>system\n' + messages[0]['content'] + '<|im_end|>\n' }}
    {%- endif %}
{%- endif %}
{%- set ns = namespace(multi_step_tool=true, last_query_index=messages|length - 1) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- if ns.multi_step_tool and message.role == "user" and not(message.content.startswith('<tool_response>') and message.content.endswith('</tool_response>')) %}
        {%- set ns.multi_step_tool = false %}
        {%- set ns.last_query_index = index %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if (message.role == "user") or (message.role == "system" and not loop.first) or (message.role == "assistant" and not message.tool_calls) %}
        {%- set content = message.content %}
        {%- if '</think>' in content %}
            {%- set content = content.split('</think>')[-1].lstrip('\n') %}
        {%- endif %}
        {{- '<|im_start|>' + message.role + '\n' + content + '<|im_end|>' + '\n' }}
    {%- elif message.role == "assistant" %}
        {{- '<|im_start|>' + message.role }}
        {%- if message.content %}
            {{- '\n' + message.content }}
        {%- endif %}
        {%- for tool_call in message.tool_calls %}
            {%- if tool_call.function is defined %}
                {%- set tool_call = tool_call.function %}
            {%- endif %}
            {{- '\n<tool_call>\n{"name": "' }}
            {{- tool_call.name }}
            {{- '", "arguments": ' }}
            {{- tool_call.arguments | tojson }}
            {{- '}\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\n' }}
    {%- elif message.role == "tool" %}
        {%- if (loop.index0 == 0) or (messages[loop.index0 - 1].role != "tool") %}
            {{- '<|im_start|>user' }}
        {%- endif %}
        {{- '\n<tool_response>\n' }}
        {{- message.content }}
        {{- '\n</tool_response>' }}
        {%- if loop.last or (messages[loop.index0 + 1].role != "tool") %}
            {{- '<|im_end|>\n' }}
        {%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\n\n</think>\n\n' }}
    {%- endif %}
{%- endif %}"#;
    check(
        QWEN,
        weather(),
        &format!(
            "<|im_start|>system\nBe brief.\n\n# Tools\n<tools>\n{TOOL_JSON}\n</tools><|im_end|>\n\
             <|im_start|>user\nWeather in Zürich?<|im_end|>\n<|im_start|>assistant\n<tool_call>\n\
             {{\"name\": \"weather\", \"arguments\": {{\"city\": \"Zürich\"}}}}\n</tool_call><|im_end|>\n\
             <|im_start|>user\n<tool_response>\n<7 °C>\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
        ),
    );
    let mut body = hi();
    let answer = json!({"role": "assistant", "content": "<think>x</think>\n\ny"});
    body["messages"].as_array_mut().unwrap().push(answer);
    body["chat_template_kwargs"] = json!({"enable_thinking": false});
    check(
        QWEN,
        body,
        "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\ny<|im_end|>\n\
         <|im_start|>assistant\n<think>\n\n</think>\n\n",
    );
}

#[test]
fn in_the_style_of_mistral() {
    const MISTRAL: &str = r#"{%- if messages[0]["role"] == "system" %}
    {%- set system_message = messages[0]["content"] %}
    {%- set loop_messages = messages[1:] %}
{%- else %}
    {%- set loop_messages = messages %}
{%- endif %}
{%- set user_messages = loop_messages | selectattr("role", "equalto", "user") | list %}
{%- set ns = namespace(index=0) %}
{%- for message in loop_messages %}
    {%- if not (message.role == "tool" or (message.tool_calls is defined and message.tool_calls is not none)) %}
        {%- if (message["role"] == "user") != (ns.index % 2 == 0) %}
            {{- raise_exception("roles must alternate user/assistant/user/assistant/...") }}
        {%- endif %}
        {%- set ns.index = ns.index + 1 %}
    {%- endif %}
{%- endfor %}
{{- bos_token }}
{%- for message in loop_messages %}
    {%- if message["role"] == "user" %}
        {%- if tools is not none and (message == user_messages[-1]) %}
            {{- "[AVAILABLE_TOOLS][" }}
            {%- for tool in tools %}
                {%- set tool = tool.function %}
                {{- '{"type": "function", "function": {' }}
                {%- for key, val in tool.items() if key != "return" %}
                    {%- if val is string %}
                        {{- '"' + key + '": "' + val + '"' }}
                    {%- else %}
                        {{- '"' + key + '": ' + val|tojson }}
                    {%- endif %}
                    {%- if not loop.last %}
                        {{- ", " }}
                    {%- endif %}
                {%- endfor %}
                {{- "}}" }}
                {%- if not loop.last %}{{- ", " }}{%- else %}{{- "]" }}{%- endif %}
            {%- endfor %}
            {{- "[/AVAILABLE_TOOLS]" }}
        {%- endif %}
        {%- if loop.last and system_message is defined %}
            {{- "[INST]" + system_message + "\n\n" + message["content"] + "[/INST]" }}
        {%- else %}
            {{- "[INST]" + message["content"] + "[/INST]" }}
        {%- endif %}
    {%- elif message.tool_calls is defined and message.tool_calls is not none %}
        {{- "[TOOL_CALLS][" }}
        {%- for tool_call in message.tool_calls %}
            {%- set out = tool_call.function|tojson %}
            {{- out[:-1] }}
            {%- if not tool_call.id is defined or tool_call.id|length != 9 %}
                {{- raise_exception("Tool call IDs should be alphanumeric strings with length 9!") }}
            {%- endif %}
            {{- ', "id": "' + tool_call.id + '"}' }}
            {%- if not loop.last %}{{- ", " }}{%- else %}{{- "]" + eos_token }}{%- endif %}
        {%- endfor %}
    {%- elif message["role"] == "assistant" %}
        {{- message["content"] + eos_token}}
    {%- elif message["role"] == "tool" %}
        {%- if message.content is defined and message.content.content is defined %}
            {%- set content = message.content.content %}
        {%- else %}
            {%- set content = message.content %}
        {%- endif %}
        {{- '[TOOL_RESULTS]{"content": ' + content|string + ", " }}
        {{- '"call_id": "' + message.tool_call_id + '"}[/TOOL_RESULTS]' }}
    {%- else %}
        {{- raise_exception("Only user and assistant roles are supported!") }}
    {%- endif %}
{%- endfor %}"#;
    check(
        MISTRAL,
        weather(),
        "<s>[AVAILABLE_TOOLS][{\"type\": \"function\", \"function\": {\"name\": \"weather\", \"description\": \"The weather's <state> & more\", \"parameters\": {\"type\": \"object\", \"properties\": {\"city\": {\"type\": \"string\"}}}}}][/AVAILABLE_TOOLS][INST]Weather in Zürich?[/INST][TOOL_CALLS][{\"name\": \"weather\", \"arguments\": {\"city\": \"Zürich\"}, \"id\": \"123456789\"}]</s>[TOOL_RESULTS]{\"content\": <7 °C>, \"call_id\": \"123456789\"}[/TOOL_RESULTS]",
    );
    let body =
        json!({"messages": [{"role": "user", "content": "a"}, {"role": "user", "content": "b"}]});
    assert!(error(MISTRAL, body).message.starts_with("roles must alternate"));
}

#[test]
fn in_the_style_of_gemma() {
    const GEMMA: &str = r#"{{ bos_token }}{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}{% for message in messages %}{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('Conversation roles must alternate') }}{% endif %}{% if (message['role'] == 'assistant') %}{% set role = 'model' %}{% else %}{% set role = message['role'] %}{% endif %}{{ '<start_of_turn>' + role + '
' + message['content'] | trim + '<end_of_turn>
' }}{% endfor %}{% if add_generation_prompt %}{{'<start_of_turn>model
'}}{% endif %}"#;
    check(GEMMA, hi(), "<s><start_of_turn>user\nhi<end_of_turn>\n<start_of_turn>model\n");
    let error = error(GEMMA, weather());
    assert_eq!(error.message, "System role not supported");
    assert_eq!(error.param.as_deref(), Some("messages"));
}

#[test]
fn forms_of_contents() {
    const PARTS: &str = "{% for message in messages %}{% for part in message.content %}{% if part.type == 'image' %}<image>{% else %}{{ part.text }}{% endif %}{% endfor %}{% endfor %}";
    const BOTH: &str = "{% for message in messages %}{% if message.content is string %}S{{ message.content }}{% else %}{% for part in message.content %}[{{ part['type'] }}:{{ part['text'] }}]{% endfor %}{% endif %}{% endfor %}";
    const PRINTED: &str = "{% for message in messages %}{{ message.content }}{% endfor %}";
    assert_eq!(template(PARTS).expectations().content_form(), ContentForm::Parts);
    assert_eq!(template(BOTH).expectations().content_form(), ContentForm::Both);
    assert_eq!(template(PRINTED).expectations().content_form(), ContentForm::Text);
    let image = json!({"type": "image_url", "image_url": {"url": "data:image/png;base64,aGk="}});
    let body = json!({"messages": [
        {"role": "user", "content": "a"},
        {"role": "user", "content": [{"type": "text", "text": "b"}, image, "c"]},
        {"role": "assistant", "content": null},
    ]});
    check(PARTS, body.clone(), "ab<image>c");
    check(BOTH, body.clone(), "Sa[text:b][image:][text:c]S");
    let error = error(PRINTED, body);
    assert_eq!(error.param.as_deref(), Some("messages[1].content"));
    let body = json!({"messages": [{"role": "user", "content": ["a", "b"]}]});
    check(PRINTED, body, "a\nb");
}

#[test]
fn content_of_messages_with_tool_calls() {
    const CALLS: &str =
        "{% for call in message.tool_calls %}({{ call.function.name }}){% endfor %}";
    let body = json!({"messages": [
        {"role": "user", "content": "x"},
        {"role": "assistant", "tool_calls": [{"function": {"name": "f"}}]},
    ]});
    let source =
        format!("{{% for message in messages %}}{{{{ message.content }}}}{CALLS}{{% endfor %}}");
    check(&source, body.clone(), "x(f)");
    let source = format!(
        "{{% for message in messages %}}{{% if message.content == None %}}{CALLS}{{% else %}}{{{{ message.content }}}}{{% endif %}}{{% endfor %}}"
    );
    check(&source, body, "x(f)");
}

#[test]
fn json_as_python_writes_it() {
    let filtered = |filter: &str| {
        let mut body = hi();
        body["chat_template_kwargs"] = json!({"v": {
            "z": [1, -2.5, 1.0, 1e300, 0.00001, 12345678901234567890_u64, true, null],
            "a": "<'&\"\\\n\u{1}é😀",
            "e": {},
            "l": [],
        }});
        render(&template(&format!("{{{{ v|tojson{filter} }}}}")), &request(&body)).unwrap()
    };
    const LIST: &str = "[1, -2.5, 1.0, 1e+300, 1e-05, 12345678901234567890, true, null]";
    let text = r#""<'&\"\\\n\u0001é😀""#;
    assert_eq!(filtered(""), format!("{{\"z\": {LIST}, \"a\": {text}, \"e\": {{}}, \"l\": []}}"));
    assert!(filtered("(ensure_ascii=true)").contains(r#"\u0001\u00e9\ud83d\ude00""#));
    assert!(filtered("(sort_keys=True)").starts_with("{\"a\": "));
    assert!(filtered("(separators=(',', ':'))").starts_with("{\"z\":[1,-2.5,"));
    assert!(filtered("(indent=2)").starts_with("{\n  \"z\": [\n    1,\n    -2.5,\n"));
    assert!(filtered("(indent=2)").ends_with(",\n  \"e\": {},\n  \"l\": []\n}"));
    assert!(filtered("(indent=none)").starts_with("{\"z\": [1, "));
    let body = hi();
    assert!(error("{{ x|tojson }}", body.clone()).message.contains("undefined"));
    check("{{ tools|tojson }}{{ {1: 2}|tojson }}", body, "null{\"1\": 2}");
}

#[test]
fn python_in_templates() {
    check(
        "{{ 'a b'.split(' ')[-1] }}{{ ' x '.strip() }}{{ 'xay'.removeprefix('x').removesuffix('y') }}\
         {{ 'a/b/c'.rsplit('/', 1)[0] }}{{ 'a=b'.partition('=')[2] }}{{ {'k': 1}.get('k') }}\
         {{ none }}{{ true }}{{ 'A'.lower() }}",
        hi(),
        "bxaa/bb1NoneTruea",
    );
    check(
        "{% for i in range(9) %}{% if i == 1 %}{% continue %}{% endif %}{% if i == 3 %}{% break %}{% endif %}{{ i }}{% endfor %}",
        hi(),
        "02",
    );
    check("{{ raise }}x\n", hi(), "x");
}

#[test]
fn generation_blocks_change_nothing() {
    check(
        "a\n{% generation %}\nb\n  {%- endgeneration %}\nc{% raw %}{%{% endraw %}",
        hi(),
        "a\nbc{%",
    );
    check("a {%- generation -%} b {%- endgeneration -%} c", hi(), "abc");
    assert_eq!(without_generation_blocks("{%"), "{%");
    assert_eq!(without_generation_blocks("{%é{%-%}{%%}"), "{%é{%-%}{%%}");
    assert_eq!(without_generation_blocks("{% generations %}"), "{% generations %}");
    let long = "{%é".repeat(1000);
    assert_eq!(without_generation_blocks(&long), long);
}

#[test]
fn a_final_message_is_continued() {
    let mut body = json!({
        "messages": [{"role": "user", "content": "x y"}, {"role": "assistant", "content": "x y "}],
        "continue_final_message": true,
    });
    check(CHATML, body.clone(), "<|im_start|>user\nx y<|im_end|>\n<|im_start|>assistant\nx y ");
    const TRIMMED: &str = "{% for m in messages %}[{{ m.content | trim }}]{% endfor %}";
    check(TRIMMED, body.clone(), "[x y][x y");
    body["messages"][1]["content"] = json!([{"type": "text", "text": "z"}]);
    check(TRIMMED, body.clone(), "[x y][z");
    body["messages"][1]["content"] = json!(" ");
    let error = error(TRIMMED, body);
    assert_eq!(error.param.as_deref(), Some("continue_final_message"));
}

#[test]
fn named_templates() {
    let named = |names: &[&str]| {
        let named = names.iter().map(|name| ((*name).to_owned(), format!("{name}!")));
        ChatTemplate::new(TemplateSource::Named(named.collect()), BTreeMap::new(), None)
    };
    let both = named(&["default", "tool_use", "rag"]).unwrap();
    assert_eq!(render(&both, &request(&hi())).unwrap(), "default!");
    assert_eq!(render(&both, &request(&weather())).unwrap(), "tool_use!");
    let single = named(&["x"]).unwrap();
    assert_eq!(render(&single, &request(&weather())).unwrap(), "x!");
    let only_tools = named(&["tool_use", "rag"]).unwrap();
    assert_eq!(render(&only_tools, &request(&hi())).unwrap(), "tool_use!");
    assert!(named(&[]).is_err());
    assert!(named(&["a", "b"]).is_err());
    let broken = TemplateSource::Single("{% if %}".to_owned());
    assert!(
        ChatTemplate::new(broken, BTreeMap::new(), None)
            .unwrap_err()
            .contains("invalid chat template")
    );
}

/// Renders with little fuel, so that tests are fast.
fn limited_error(source: &str) -> ApiError {
    let mut template = template(source);
    template.environment.set_fuel(Some(100_000));
    render(&template, &request(&hi())).unwrap_err()
}

#[test]
fn limits_of_work() {
    let loops = "{% for a in range(10000) %}{% for b in range(10000) %}{% endfor %}{% endfor %}";
    let doubled = "{% set ns = namespace(x='x') %}{% for i in range(99) %}\
                   {% set ns.x = ns.x ~ ns.x %}{% endfor %}";
    for source in [loops, doubled] {
        let error = limited_error(source);
        assert_eq!(error.status, 400);
        assert!(error.message.contains("10000000 steps"), "{}", error.message);
    }
    let recursive = "{% macro m(x) %}{{ m(x) }}{% endmacro %}{{ m(1) }}";
    assert_eq!(limited_error(recursive).status, 400);
    assert_eq!(template(loops).environment.fuel(), Some(MAX_FUEL));
}

#[test]
fn limits_of_the_output() {
    let long = "{% for i in range(18) %}{{ messages[0].content }}{% endfor %}";
    let body = json!({"messages": [{"role": "user", "content": "x".repeat(1 << 20)}]});
    let long = render(&template(long), &request(&body)).unwrap_err();
    assert!(long.message.contains("16777216 bytes"), "{}", long.message);
}

#[test]
fn templates_are_shared_between_threads() {
    fn check<T: Send + Sync + 'static>() {}
    check::<ChatTemplate>();
}
