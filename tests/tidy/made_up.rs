//! The checker on small made-up trees: each rule must be able to fail, and must not fail on what is allowed.

use crate::checks::all;
use crate::source::{functions, lines_without_tests, mask, paths};
use crate::tree::File;

/// Violations of a tree of one file.
fn one(path: &str, text: &str) -> Vec<String> {
    all(&[File { path: path.to_owned(), text: text.to_owned() }])
}

/// The file has exactly one violation, at this line, and its text has this fragment.
#[track_caller]
fn fails(path: &str, text: &str, line: usize, fragment: &str) {
    let found = one(path, text);
    assert_eq!(found.len(), 1, "{path}: {text}\n{found:#?}");
    assert!(found[0].starts_with(&format!("{path}:{line}: ")) && found[0].contains(fragment), "{found:#?}");
}

/// The file has none.
#[track_caller]
fn passes(path: &str, text: &str) {
    assert_eq!(one(path, text), Vec::<String>::new(), "{path}: {text}");
}

#[test]
fn floors_point_down() {
    passes("frontend/src/http/infer.rs", "//! x\nuse crate::engine::Engine;\nuse super::codec;");
    passes("frontend/src/main.rs", "//! x\nuse crate::http;");
    fails("frontend/src/engine.rs", "//! x\nuse crate::http::serve;", 2, "`engine` uses `http`, which stands above it");
    fails("frontend/src/http/mod.rs", "//! x\nuse crate::grpc::serve;", 2, "which stands beside it");
    fails("frontend/src/http/a/b.rs", "//! x\nfn f() { super::super::super::grpc::f() }", 2, "`http` uses `grpc`");
    fails(
        "frontend/src/wire/mod.rs",
        "//! x\nuse crate::{\n    clock,\n    scheduler::Driver,\n};",
        4,
        "`wire` uses `scheduler`",
    );
    fails("frontend/src/scheduler.rs", "//! x\nfn f() {\n    crate::engine::f()\n}", 3, "`scheduler` uses `engine`");
    fails("frontend/src/novelty.rs", "//! x", 1, "`novelty` has no floor");
    passes("src/infer.rs", "//! x\nuse crate::tensor::Tensor;");
    fails("src/tensor.rs", "//! x\nuse crate::model::ModelConfig;", 2, "`tensor` uses `model`");
    fails("src/wire/codec.rs", "//! x\nuse crate::scheduler::Ticket;", 2, "beside");
    passes("worker/src/instance.rs", "//! x\nuse crate::backend::Registry;");
    fails("worker/src/state.rs", "//! x\nuse crate::instance::Instance;", 2, "above");
}

#[test]
fn tests_may_use_what_they_like() {
    passes(
        "src/tensor.rs",
        "//! x\n#[cfg(test)]\n#[allow(clippy::unwrap_used)]\nmod tests {\n    use crate::model::ModelConfig;\n}",
    );
    passes("src/scheduler/tests/mod.rs", "//! x\nuse crate::tensor::Tensor;");
}

#[test]
fn bans() {
    for (path, text) in [
        ("src/scheduler/queue.rs", "use crate::tensor::Tensor;"),
        ("src/supervisor.rs", "use crate::{id::InstanceId, infer};"),
        ("src/metrics/cache.rs", "use crate::model::ModelConfig;"),
        ("src/model/mod.rs", "use std::{fmt, net::TcpStream};"),
        ("src/model/mod.rs", "fn now() { std::time::Instant::now(); }"),
        ("src/model/mod.rs", "use tokio;"),
        ("worker/src/wire.rs", "use tokio::net::UnixStream as Socket;"),
        ("worker/src/wire.rs", "use pharos_frontend::wire;"),
        ("frontend/src/wire/mod.rs", "use pharos_worker::wire;"),
        ("frontend/src/engine.rs", "fn f(value: serde_json::Value) {}"),
        ("frontend/src/engine.rs", "use prost::Message;"),
        ("src/repository.rs", "use prost_reflect::DynamicMessage;"),
        ("src/repository.rs", "use crate::model::proto::ModelConfig;"),
        ("frontend/src/grpc/codec.rs", "use pharos::scheduler::Ticket;"),
    ] {
        fails(path, &format!("//! x\n\n{text}"), 3, "has no place here");
    }
    for (path, text) in [
        ("src/model/mod.rs", "use std::time::Duration;\nuse std::sync::Mutex;"),
        ("src/model/proto.rs", "use prost::Message;"),
        ("frontend/src/grpc/codec.rs", "use tonic::Status;\nuse prost::Message;"),
        ("frontend/src/http/codec.rs", "use serde_json::value::RawValue;"),
        ("src/model/mod.rs", "// std::net::TcpStream\nconst A: &str = \"tokio::net\";"),
    ] {
        passes(path, &format!("//! x\n{text}"));
    }
}

#[test]
fn sizes() {
    let function = |lines: usize| format!("//! x\nfn long() {{\n{}}}\n", "    f();\n".repeat(lines));
    passes("src/id.rs", &function(58));
    fails("src/id.rs", &function(59), 2, "`long` 61");
    passes("src/metrics/cache_tests.rs", &function(59));
    passes("src/id.rs", &format!("//! x\n#[cfg(test)]\nmod tests {{\n{}}}", &function(59)[6..]));
    let file = |lines: usize| format!("//! x\n{}", "const A: u8 = 1;\n".repeat(lines));
    passes("src/id.rs", &file(499));
    fails("src/id.rs", &file(500), 500, "this one 501");
    passes("src/id.rs", &format!("{}#[cfg(test)]\nmod tests {{\n{}}}", file(499), "//\n".repeat(100)));
}

#[test]
fn forms() {
    fails("src/id.rs", "use std::fmt;", 1, "begins with `//!`");
    fails("src/id.rs", "//! x\nfn f() {\n    todo!()\n}", 3, "`todo!`");
    fails("src/id.rs", "//! x\nfn f() { dbg!(1); }", 2, "`dbg!`");
    fails("src/id.rs", "//! x\nfn f() { unsafe { g() } }", 2, "`unsafe` only in the listed files");
    passes("src/id.rs", "//! x\n#[allow(unsafe_code)]\nmod a;\n// unsafe, todo!()\nconst T: &str = \"dbg!\";");
    passes("src/shm.rs", "//! x\n// SAFETY: it is.\nunsafe fn f() {}");
    fails("src/shm.rs", "//! x\nunsafe fn f() {}", 1, "states its contract");
    fails("src/shm.rs", "//! x\nfn f() {}", 1, "but has none");
}

#[test]
fn names_and_places() {
    fails("frontend/src/engine.rs", "//! x\nconst A: &str = \"nv_inference_count\";", 2, "named once");
    passes("frontend/src/engine.rs", "//! x\n// \"nv_inference_count\"");
    passes("src/metrics/builtin.rs", "//! x\nconst A: &str = \"nv_inference_count\";");
    let stranger = one("notes/a.md", "a");
    assert!(stranger.len() == 1 && stranger[0].starts_with("notes:1: the top level holds only"), "{stranger:#?}");
    fails("src/a.proto", "syntax", 1, "proto/");
    passes("proto/a.proto", "syntax");
    fails("worker/Cargo.toml", "[dependencies]\nbytes = \"1\"\ntokio.workspace = true", 3, "`tokio`");
    passes("Cargo.toml", "[workspace.dependencies]\ntokio = \"1\"\n[dependencies]\nbytes = \"1\"");
    fails("Cargo.toml", "[dev-dependencies]\ntonic = \"1\"", 2, "`tonic`");
    let private = concat!("/ho", "me/me/models");
    fails("README.md", &format!("a\nrun {private}"), 2, "one machine only");
    passes("README.md", &format!("https://example.org{private} and $(ROOT){private}"));
}

#[test]
fn masking() {
    #[track_caller]
    fn check(text: &str, expected: &str) {
        assert_eq!(mask(text, false), expected);
    }
    check("a // b\nc", "a     \nc");
    check("a /* b /* c */ d */ e", "a                   e");
    check(r#"f("a\"b", 'c', '\'', 'x: &'a T)"#, r#"f(      ,    ,     , 'x: &'a T)"#);
    check("r#\"a\"b\"# c bar\"x\"", "         c bar   ");
    check("'é' x", "     x");
    assert_eq!(mask("\"a\" // b", true), "\"a\"     ");
}

#[test]
fn paths_are_taken_apart() {
    let named = paths("use a::{self, b::{c, d as e}, f::*};\nlet x = g::h::<i::j>(k);\nuse l;");
    let named: Vec<_> = named.iter().map(|(line, path)| format!("{line} {path}")).collect();
    assert_eq!(named, ["1 a::self", "1 a::b::c", "1 a::b::d", "1 a::f", "2 g::h", "2 i::j", "3 l"]);
}

#[test]
fn functions_and_tests_are_found() {
    let code = "trait T { fn a(&self) -> [u8; 2]; fn b() { } }\nfn c(f: fn(u8)) {\n  let g = [0; 3];\n}";
    let found: Vec<_> = functions(code).into_iter().map(|found| (found.name, found.line, found.lines)).collect();
    assert_eq!(found, [("b".to_owned(), 1, 1), ("c".to_owned(), 2, 3)]);
    assert_eq!(lines_without_tests("a\n#[cfg(test)]\nmod sim;\nb\n#[cfg(test)]\n#[x]\nmod tests {\n}\n"), 4);
}

/// A definition of four metrics, an enum, and one more file.
fn with_metrics(path: &str, text: &str) -> Vec<String> {
    let definition = "ts_metrics:\n  counter:\n    - name: nv_a\n    - name: Requests2XX\n  histogram:\n    - name: nv_h\n\
                      model_metrics:\n  gauge:\n    - name: HandlerTime\n";
    let rows = "//! x\n    A = \"nv_a\" Counter [\"model\"] Cells;\n    B = \"Requests2XX\" Counter [] Cells;\n    \
                C = \"nv_h\" Histogram [] Cells;\n";
    let file = |path: &str, text: &str| File { path: path.to_owned(), text: text.to_owned() };
    all(&[file("metrics.yaml", definition), file("src/metrics/builtin.rs", rows), file(path, text)])
}

#[test]
fn dashboards_and_rules_name_declared_metrics() {
    let json = |expression: &str| format!("{{\n\"expr\": \"{expression}\"}}");
    for expression in [
        "sum by (model) (rate(nv_a{model=~\\\"$nv_model\\\", x!='ts_y'}[$__rate_interval])) > 0",
        "histogram_quantile(0.9, sum by (le) (rate(nv_h_bucket[5m]))) + nv_h_sum / nv_h_count",
        "label_values(Requests2XX, Hostname)",
        "HandlerTime{Level='Model'} and up{job='x'}",
        "avg_over_time(scrape_duration_seconds[5m])",
    ] {
        assert_eq!(with_metrics("grafana/a.json", &json(expression)), Vec::<String>::new(), "{expression}");
    }
    for (expression, name) in [
        ("rate(nv_b[5m])", "nv_b"),
        ("nv_h", "nv_h"),
        ("nv_a_bucket", "nv_a_bucket"),
        ("sum(ts_x)", "ts_x"),
        ("Requests3XX{a='b'}", "Requests3XX"),
        ("label_values(Requests9XX, Hostname)", "Requests9XX"),
        ("pharos:missing", "pharos:missing"),
    ] {
        let found = with_metrics("grafana/a.json", &json(expression));
        assert_eq!(found.len(), 1, "{expression}: {found:#?}");
        assert!(found[0].starts_with(&format!("grafana/a.json:2: no metric is called `{name}`")), "{found:#?}");
    }
    let rules = "groups:\n  - rules:\n      - record: pharos:a\n        expr: rate(nv_a[5m])\n      - alert: X\n        expr: |\n          \
                 pharos:a > 0\n            and nv_c > 1\n        for: 5m\n      - expr: \"nv_a{a=\\\"nv_x\\\"} > 0\"\n        \
                 nv_y: 1\n";
    let found = with_metrics("grafana/rules.yaml", rules);
    assert_eq!(found.len(), 1, "{found:#?}");
    assert!(found[0].starts_with("grafana/rules.yaml:6: no metric is called `nv_c`"), "{found:#?}");
}

#[test]
fn the_enum_and_the_definition_hold_together() {
    let file = |path: &str, text: &str| File { path: path.to_owned(), text: text.to_owned() };
    let definition = "ts_metrics:\n  counter:\n    - name: nv_a\n    - name: nv_b\n";
    let rows = "//! x\n    A = \"nv_a\" Gauge [] Cells;\n    C = \"nv_c\" Counter [] Cells;\n";
    let found = all(&[file("metrics.yaml", definition), file("src/metrics/builtin.rs", rows)]);
    assert_eq!(found.len(), 3, "{found:#?}");
    assert!(found[0].starts_with("metrics.yaml:3: `nv_a` is a gauge"), "{found:#?}");
    assert!(found[1].starts_with("src/metrics/builtin.rs:3: `nv_c` is not in metrics.yaml"), "{found:#?}");
    assert!(found[2].starts_with("metrics.yaml:4: no code records `nv_b`"), "{found:#?}");
}

#[test]
fn documents_keep_no_remains_of_merges() {
    let check = |text: &str, expected: &[&str]| {
        let found = all(&[File { path: "README.md".to_owned(), text: text.to_owned() }]);
        assert_eq!(found.len(), expected.len(), "{text}: {found:#?}");
        for (found, expected) in found.iter().zip(expected) {
            assert!(found.starts_with(&format!("README.md:{expected}: ")), "{found} is not {expected}");
        }
    };
    let table = "# T\n\n| a | b |\n|---|:-:|\n| x | 1 |\n| `y` or z | 2 |\n| | 3 |\n| | 4 |\n";
    check(table, &[]);
    check("a\n\n**b** c\n\n```text\n**d**\n| e |\n# f\n```\n\n- **g** h\n- **i**\n", &[]);
    check(&format!("{table}| x | 5 |\n"), &["9: the table has two rows for `x`"]);
    check("a\n| x | 1 |\nb\n", &["2: a table's row without a head"]);
    check("| x | 1 |\n| y | 2 |\n", &["1: a table's row without a head"]);
    let glued = "a heading, or a paragraph with a bold beginning, follows an empty line";
    check("a\n**b** c\n# d\n", &[&format!("2: {glued}"), &format!("3: {glued}")]);
    check("```\nb\n```\n## c\n", &[&format!("4: {glued}")]);
    let tree = "```\nsrc/   x\n  a/   y\n       a/ goes on\n  b    z\nfrontend/\n  a/   v\n";
    check(&format!("{tree}```\n"), &[]);
    check(&format!("{tree}  a/   w\n```\n"), &["8: `a/` is explained twice"]);
    check("```\n  x 1\n  x 2\n```\n", &[]);
}
