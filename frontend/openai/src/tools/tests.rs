//! Tests of the parsers of tool calls.

use super::*;

/// Parses text in pieces and writes what came out in a short form: text as it is, calls as
/// `«name|arguments»`.
fn parse(format: &str, pieces: &[String]) -> String {
    let mut parser = ToolParser::named(format).unwrap();
    let mut text = String::new();
    let mut next = 0;
    let mut open = None;
    for piece in 0..=pieces.len() {
        let mut deltas = Vec::new();
        match pieces.get(piece) {
            Some(piece) => parser.push(piece, &mut deltas).unwrap(),
            None => parser.finish(&mut deltas),
        }
        for delta in deltas {
            match delta {
                ToolDelta::Text(more) => {
                    assert!(!more.is_empty());
                    assert_eq!(open, None, "text within a call");
                    text.push_str(&more);
                }
                ToolDelta::Begin { index, name } => {
                    assert_eq!((open, index), (None, next));
                    open = Some(index);
                    next += 1;
                    text.push_str(&format!("«{name}|"));
                }
                ToolDelta::Arguments { index, text: more } => {
                    assert!(!more.is_empty());
                    assert_eq!(open, Some(index));
                    text.push_str(&more);
                }
                ToolDelta::End { index } => {
                    assert_eq!(open.take(), Some(index));
                    text.push('»');
                }
            }
        }
    }
    assert_eq!(open, None);
    assert_eq!(parser.calls(), next);
    text
}

/// Checks the result for the whole text, for single characters, and for every split into two.
fn check(format: &str, text: &str, expected: &str) {
    let whole = parse(format, &[text.to_owned()]);
    assert_eq!(whole, expected, "{format}: {text:?}");
    let single: Vec<String> = text.chars().map(String::from).collect();
    assert_eq!(parse(format, &single), expected, "{format}: {text:?} by characters");
    for (offset, _) in text.char_indices() {
        let pieces = [text[..offset].to_owned(), text[offset..].to_owned()];
        assert_eq!(parse(format, &pieces), expected, "{format}: {text:?} at {offset}");
    }
}

#[test]
fn hermes() {
    check(
        "hermes",
        "<tool_call>\n{\"name\": \"f\", \"arguments\": {\"a\": [1, \"}\"]}}\n</tool_call>",
        "«f|{\"a\": [1, \"}\"]}»",
    );
    check(
        "hermes",
        "Sure.\n<tool_call>{\"name\":\"f\",\"arguments\":{}}</tool_call>\n\
         <tool_call>{\"name\":\"g\",\"arguments\":{\"é\":1}}</tool_call>\n Done",
        "Sure.\n«f|{}»«g|{\"é\":1}»\n Done",
    );
    // The arguments come first, or are absent, or are JSON within JSON.
    check(
        "hermes",
        "<tool_call>{\"arguments\":{\"a\":1},\"id\":[{}],\"name\":\"f\"}</tool_call>",
        "«f|{\"a\":1}»",
    );
    check("hermes", "<tool_call>{\"name\":\"f\"}</tool_call>", "«f|{}»");
    check("hermes", "<tool_call>{\"name\":\"f\",\"arguments\":null}</tool_call>", "«f|{}»");
    check(
        "hermes",
        "<tool_call>{\"name\":\"f\",\"arguments\":\"{\\\"a\\\": 1}\"}</tool_call>",
        "«f|{\"a\": 1}»",
    );
    // Superfluous and missing parts.
    check("hermes", "<tool_call>{\"name\":\"f\",\"arguments\":{}}}</tool_call>x", "«f|{}»x");
    check(
        "hermes",
        "<tool_call>{\"name\":\"f\",\"arguments\":{}}<tool_call>{\"name\":\"g\"}",
        "«f|{}»«g|{}»",
    );
    check(
        "hermes",
        "<tool_call>{\"name\":\"f\",\"arguments\":{\"a\":1</tool_call>x",
        "«f|{\"a\":1»x",
    );
    check("hermes", "<tool_call>{\"name\":\"f\",\"arguments\":{\"a\":1", "«f|{\"a\":1»");
}

#[test]
fn hermes_text_that_is_no_call() {
    for text in [
        "",
        "a < b <tool <<tool_call",
        "<tool_call>",
        "<tool_call>none</tool_call>",
        "<tool_call>{\"name\": 5}</tool_call>",
        "<tool_call>{\"arguments\": {}}</tool_call>",
        "<tool_call>{\"name\": \"f\", \"argu",
        "<tool_call>{\"name\": \"\\x\"}</tool_call>",
        "<tool_call>{\"name\": \"f\", \"arguments\": 5}</tool_call>",
        "</tool_call> x",
    ] {
        check("hermes", text, text);
    }
    check("hermes", "<tool_call><tool_call>{\"name\":\"f\"}</tool_call>", "<tool_call>«f|{}»");
}

#[test]
fn llama3() {
    check("llama3_json", "{\"name\": \"f\", \"parameters\": {\"a\": 1}}", "«f|{\"a\": 1}»");
    check(
        "llama3_json",
        "\n<|python_tag|>{\"name\":\"f\",\"parameters\":{}}; {\"name\":\"g\",\"arguments\":{}}\n",
        "«f|{}»«g|{}»",
    );
    check("llama3_json", "{\"name\":\"f\",\"parameters\":{}}; x", "«f|{}»; x");
    check("llama3_json", "{\"name\":\"f\",\"parameters\":{}} x {", "«f|{}» x {");
    for text in [
        " The answer is {\"name\": \"f\"}",
        "{\"name\": \"John\", \"age\": 3}",
        "{\"answer\": [1, 2]} and more",
        "{",
        "[1, 2]",
        "[]",
        "<|python_tag|>print(1)",
        "<|python",
        "<<|python_tag|>",
        "  ",
    ] {
        check("llama3_json", text, text);
    }
}

#[test]
fn mistral() {
    check(
        "mistral",
        "[TOOL_CALLS] [{\"name\": \"f\", \"arguments\": {\"a\": 1}, \"id\": \"123456789\"}, \
         {\"name\": \"g\", \"arguments\": {}}]",
        "«f|{\"a\": 1}»«g|{}»",
    );
    check(
        "mistral",
        "Hi [x] [TOOL_CALLS]f{\"a\": {}}[TOOL_CALLS]g{}",
        "Hi [x] «f|{\"a\": {}}»«g|{}»",
    );
    check("mistral", "[TOOL_CALLS]f[ARGS]{\"a\":1}\n", "«f|{\"a\":1}»");
    check("mistral", "[TOOL_CALLS]f[CALL_ID]abc123[ARGS] {\"a\":1} x", "«f|{\"a\":1}» x");
    check("mistral", "[TOOL_CALLS]{\"name\":\"f\",\"arguments\":{}}", "«f|{}»");
    check("mistral", "[TOOL_CALLS][{\"name\":\"f\",\"arguments\":{\"a\":", "«f|{\"a\":»");
    check("mistral", "[TOOL_CALLS][{\"name\":\"f\",\"arguments\":{}},", "«f|{}»");
    for text in [
        "[TOOL_CALLS]",
        "[TOOL_CALLS] ]",
        "[TOOL_CALLS][]",
        "[TOOL_CALLS]f[X]{}",
        "[TOOL_CALLS]f[ARGS]5 ",
        "[TOOL_CALLS]f g{}",
        "[TOOL_CALLS][{\"x\": 1}]",
        "[TOOL_CALL] [TOOL",
    ] {
        check("mistral", text, text);
    }
    assert!(ToolParser::named("mistral").unwrap().needs_special_tokens());
    assert!(!ToolParser::named("hermes").unwrap().needs_special_tokens());
}

#[test]
fn json() {
    check(
        "json",
        " [{\"name\": \"f\", \"parameters\": {\"a\": 1}}, {\"name\": \"g\", \"parameters\": {}}] ",
        "«f|{\"a\": 1}»«g|{}»",
    );
    check("json", "{\"name\":\"f\",\"parameters\":[1]}", "«f|[1]»");
    check("json", "[{\"name\":\"f\",\"parameters\":{\"a\":\"x", "«f|{\"a\":\"x»");
    check("json", "text", "text");
    check("json", "<|python_tag|>x", "<|python_tag|>x");
}

#[test]
fn pythonic() {
    check("pythonic", "[f()]", "«f|{}»");
    check(
        "pythonic",
        "[get_weather(city='Paris', metric=\"celsius\"), ns.g(a=[1, -2.5, None], b={'x': True}, c=(1,),)]",
        "«get_weather|{\"city\": \"Paris\", \"metric\": \"celsius\"}»\
         «ns.g|{\"a\": [1, -2.5, null], \"b\": {\"x\": true}, \"c\": [1]}»",
    );
    check(
        "pythonic",
        r#" [f(a='it\'s \x41\u00e9\n\101\q "', b="') ]", c=1_000, d=.5, e=+5, g=12345678901234567890123)] "#,
        r#"«f|{"a": "it's Aé\nA\\q \"", "b": "') ]", "c": 1000, "d": 0.5, "e": 5.0, "g": 12345678901234567890123}»"#,
    );
    check("pythonic", "[f(), ", "«f|{}»");
    check("pythonic", "[f(a=1)] x", "«f|{\"a\": 1}» x");
    check("pythonic", "[f(), g(1)]", "«f|{}», g(1)]");
    for text in [
        "f()",
        "[",
        "[]",
        "[1, 2]",
        "[link](http://x)",
        "[f(1)]",
        "[f(a)]",
        "[f(a=)]",
        "[f(a=b)]",
        "[f(a=1]",
        "[f(a=inf)]",
        "[f(a=1e999)]",
        "[f(a={1: 2})]",
        "[f(a='x)]",
        "[f(a=1",
        "[f(a=1)(b=2)",
        "[f(a='\\ud800')]",
        "",
    ] {
        let expected = text.replace("[f(a=1)(b=2)", "«f|{\"a\": 1}»(b=2)");
        check("pythonic", text, &expected);
    }
    let deep = format!("[f(a={}{})]", "[".repeat(70), "]".repeat(70));
    check("pythonic", &deep, &deep);
}

#[test]
fn calls_have_a_limit() {
    let long = "x".repeat(MAX_CALL_BYTES);
    for (format, begin) in [
        ("hermes", "<tool_call>{\"name\":\"f\",\"arguments\":{\"a\":\""),
        ("hermes", "<tool_call>{\"na"),
        ("hermes", "<tool_call>{\"name\":\"f\",\"arguments\":{]"),
        ("mistral", "[TOOL_CALLS]f{\"a\":\""),
        ("mistral", "[TOOL_CALLS]f"),
        ("llama3_json", "{\"name\":\"f\",\"parameters\":{\"a\":\""),
    ] {
        let mut parser = ToolParser::named(format).unwrap();
        let mut deltas = Vec::new();
        parser.push(begin, &mut deltas).unwrap();
        assert_eq!(parser.push(&long, &mut deltas), Err(ToolCallTooLong), "{begin}");
    }
    // Without a marker, a long object or list that has no name is text.
    for (format, begin) in [("llama3_json", "{\"x\":\""), ("pythonic", "[f(a='")] {
        check_long(format, &format!("{begin}{long}"));
    }
    // The limit is for one call, not for all of them.
    let call = format!(
        "<tool_call>{{\"name\":\"f\",\"arguments\":{{\"a\":\"{}\"}}}}</tool_call>",
        &long[..100_000]
    );
    let text = parse("hermes", &[call.repeat(4)]);
    assert_eq!(text.matches('«').count(), 4);
}

fn check_long(format: &str, text: &str) {
    assert_eq!(parse(format, &[text.to_owned()]), text);
}

#[test]
fn random_texts_and_splits() {
    const PARTS: [&str; 26] = [
        "<tool_call>",
        "</tool_call>",
        "[TOOL_CALLS]",
        "<|python_tag|>",
        "[ARGS]",
        "[CALL_ID]",
        "{\"name\": \"f\", \"arguments\": {\"a\": \"b\"}}",
        "{\"name\":\"g\"",
        ",\"parameters\":",
        "{",
        "}",
        "[",
        "]",
        "\"",
        "\\",
        ",",
        ";",
        " ",
        "\n",
        "f(a=1)",
        "g(",
        ")",
        "'",
        "é",
        "<",
        "name",
    ];
    let mut random = 1_u64;
    let mut below = |limit: usize| {
        random =
            random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (random >> 33) as usize % limit
    };
    for _ in 0..3_000 {
        let text: String = (0..below(12)).map(|_| PARTS[below(PARTS.len())]).collect();
        let mut pieces: Vec<String> = vec![String::new()];
        for character in text.chars() {
            if below(3) == 0 {
                pieces.push(String::new());
            }
            pieces.last_mut().unwrap().push(character);
        }
        for format in ["hermes", "llama3_json", "mistral", "pythonic", "json"] {
            let whole = parse(format, std::slice::from_ref(&text));
            assert_eq!(parse(format, &pieces), whole, "{format}: {text:?}");
        }
    }
}

#[test]
fn unknown_names() {
    assert!(ToolParser::named("").is_none());
    assert!(ToolParser::named("Hermes").is_none());
}
