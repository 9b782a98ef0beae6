//! Tests of the checker on small trees: each rule must be able to fail, and must accept what is allowed.

use crate::checks::all;
use crate::cycles::judge;
use crate::known::Cycle;
use crate::source::{lines_without_tests, mask, paths};
use crate::tree::File;
use crate::vocabulary::{names, torchserve};

/// Returns the violations of a tree of one file.
fn one(path: &str, text: &str) -> Vec<String> {
    all(&[File { path: path.to_owned(), text: text.to_owned() }])
}

/// Asserts that the file has exactly one violation, at this line and with this fragment.
#[track_caller]
fn fails(path: &str, text: &str, line: usize, fragment: &str) {
    let found = one(path, text);
    assert_eq!(found.len(), 1, "{path}: {text}\n{found:#?}");
    assert!(found[0].starts_with(&format!("{path}:{line}: ")) && found[0].contains(fragment), "{found:#?}");
}

/// Asserts that the file has no violations.
#[track_caller]
fn passes(path: &str, text: &str) {
    assert_eq!(one(path, text), Vec::<String>::new(), "{path}: {text}");
}

#[test]
fn refuses_imports_of_higher_floors() {
    passes("frontend/engine/src/serving.rs", "//! x\nuse crate::wire::Frames;\nuse super::ensemble;");
    passes("frontend/engine/src/lib.rs", "//! x\nuse crate::engine;");
    let path = "frontend/engine/src/serving.rs";
    fails(path, "//! x\nuse crate::loader::load;", 2, "`serving` uses `loader`, which is above it");
    fails("frontend/engine/src/ensemble.rs", "//! x\nuse crate::supervisor::Pool;", 2, "which is beside it");
    let path = "frontend/engine/src/wire/a/b.rs";
    fails(path, "//! x\nfn f() { super::super::super::calls::f() }", 2, "`wire` uses `calls`");
    fails(
        "frontend/engine/src/wire/mod.rs",
        "//! x\nuse crate::{\n    memory,\n    scheduler::Driver,\n};",
        4,
        "`wire` uses `scheduler`",
    );
    let path = "frontend/engine/src/scheduler.rs";
    fails(path, "//! x\nfn f() {\n    crate::engine::f()\n}", 3, "`scheduler` uses `engine`");
    fails("frontend/engine/src/novelty.rs", "//! x", 1, "`novelty` has no floor");
    passes("src/infer.rs", "//! x\nuse crate::tensor::Tensor;");
    fails("src/tensor.rs", "//! x\nuse crate::model::ModelConfig;", 2, "`tensor` uses `model`");
    fails("src/wire/codec.rs", "//! x\nuse crate::scheduler::Ticket;", 2, "beside");
    passes("worker/src/instance.rs", "//! x\nuse crate::backend::Registry;");
    fails("worker/src/state.rs", "//! x\nuse crate::instance::Instance;", 2, "above");
}

#[test]
fn tests_are_exempt_from_floors() {
    passes(
        "src/tensor.rs",
        "//! x\n#[cfg(test)]\n#[allow(clippy::unwrap_used)]\nmod tests {\n    use crate::model::ModelConfig;\n}",
    );
    passes("src/scheduler/tests/mod.rs", "//! x\nuse crate::tensor::Tensor;");
}

#[test]
fn refuses_code_that_unit_tests_do_not_compile() {
    let path = "frontend/http/src/lib.rs";
    fails(path, "//! x\n#[cfg(not(test))]\nuse a::b;", 2, "unit tests compile all code");
    fails(path, "//! x\n\n#[cfg_attr(test, allow(dead_code))]\nmod a;", 3, "unit tests compile all code");
    passes(path, "//! x\n// The driver cannot be loaded there.\n#[cfg(not(test))]\nuse a::b;");
}

#[test]
fn refuses_banned_paths() {
    for (path, text) in [
        ("src/scheduler/queue.rs", "use crate::tensor::Tensor;"),
        ("src/supervisor.rs", "use crate::{id::InstanceId, infer};"),
        ("src/metrics/exposition.rs", "use super::builtin::Builtin;"),
        ("src/model/mod.rs", "use std::{fmt, net::TcpStream};"),
        ("src/model/mod.rs", "fn now() { std::time::Instant::now(); }"),
        ("src/model/mod.rs", "use tokio;"),
        ("worker/src/watch.rs", "use tokio::net::UnixStream as Socket;"),
        ("frontend/engine/src/engine.rs", "fn f(value: serde_json::Value) {}"),
        ("frontend/engine/src/engine.rs", "use prost::Message;"),
        ("src/repository.rs", "use prost_reflect::DynamicMessage;"),
        ("src/repository.rs", "use crate::model::proto::ModelConfig;"),
        ("frontend/grpc/src/codec.rs", "use pharos::scheduler::Ticket;"),
    ] {
        fails(path, &format!("//! x\n\n{text}"), 3, "is not allowed here");
    }
    for (path, text) in [
        ("src/model/mod.rs", "use std::time::Duration;\nuse std::sync::Mutex;"),
        ("src/model/proto.rs", "use prost::Message;"),
        ("frontend/grpc/src/codec.rs", "use tonic::Status;\nuse prost::Message;"),
        ("frontend/http/src/codec.rs", "use serde_json::value::RawValue;"),
        ("src/model/mod.rs", "// std::net::TcpStream\nconst A: &str = \"tokio::net\";"),
    ] {
        passes(path, &format!("//! x\n{text}"));
    }
}

#[test]
fn checks_heads_macros_and_unsafe() {
    fails("src/base/id.rs", "use std::fmt;", 1, "begins with `//!`");
    fails("src/base/id.rs", "//! x\nfn f() { unsafe { g() } }", 2, "`unsafe` only in the listed files");
    passes("src/base/id.rs", "//! x\n#[allow(unsafe_code)]\nmod a;\n// unsafe");
    passes("src/base/shm.rs", "//! x\n// SAFETY: it is.\nunsafe fn f() {}");
    fails("src/base/shm.rs", "//! x\nunsafe fn f() {}", 1, "states its contract");
    fails("src/base/shm.rs", "//! x\nfn f() {}", 1, "but has no unsafe code");
}

#[test]
fn refuses_dependencies_on_higher_packages() {
    let manifest = |table: &str| format!("[package]\n[{table}\n");
    fails("worker/Cargo.toml", &manifest("dependencies]\nbytes = \"1\"\ntokio.workspace = true"), 4, "`tokio`");
    passes("Cargo.toml", &manifest("workspace.dependencies]\ntokio = \"1\"\n[dependencies]\nbytes = \"1\""));
    fails("Cargo.toml", &manifest("dev-dependencies]\ntonic = \"1\""), 3, "`tonic`");
    let http = "frontend/http/Cargo.toml";
    passes(http, &manifest("dependencies]\npharos-listener.workspace = true"));
    passes(http, &manifest("dev-dependencies]\npharos-service-double.workspace = true"));
    fails(http, &manifest("dependencies]\npharos-engine.workspace = true"), 3, "`pharos-engine`");
    fails(http, &manifest("dependencies]\npharos-grpc.workspace = true"), 3, "`pharos-grpc`");
    fails("frontend/engine/Cargo.toml", &manifest("dependencies]\npharos-http.workspace = true"), 3, "`pharos-http`");
    fails("frontend/novelty/Cargo.toml", &manifest("dependencies]\npharos.workspace = true"), 3, "`pharos`");
    passes("examples/backend/Cargo.toml", &manifest("dependencies]\npharos-backend.workspace = true"));
}

#[test]
fn checks_metric_names_and_places_of_files() {
    fails("frontend/engine/src/engine.rs", "//! x\nconst A: &str = \"nv_inference_count\";", 2, "named once");
    passes("frontend/engine/src/engine.rs", "//! x\n// \"nv_inference_count\"");
    passes("src/metrics/builtin.rs", "//! x\nconst A: &str = \"nv_inference_count\";");
    let stranger = one("notes/a.md", "a");
    assert!(stranger.len() == 1 && stranger[0].starts_with("notes:1: the top level holds only"), "{stranger:#?}");
    fails("src/a.proto", "syntax", 1, "proto/");
    passes("proto/a.proto", "syntax");
    let private = concat!("/ho", "me/me/models");
    fails("README.md", &format!("a\nrun {private}"), 2, "one machine only");
    passes("README.md", &format!("https://example.org{private} and $(ROOT){private}"));
}

#[test]
fn masks_comments_and_literals() {
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
fn splits_grouped_paths() {
    let named = paths("use a::{self, b::{c, d as e}, f::*};\nlet x = g::h::<i::j>(k);\nuse l;");
    let named: Vec<_> = named.iter().map(|(line, path)| format!("{line} {path}")).collect();
    assert_eq!(named, ["1 a::self", "1 a::b::c", "1 a::b::d", "1 a::f", "2 g::h", "2 i::j", "3 l"]);
}

#[test]
fn finds_tests() {
    assert_eq!(lines_without_tests("a\n#[cfg(test)]\nmod sim;\nb\n#[cfg(test)]\n#[x]\nmod tests {\n}\n"), 4);
}

/// Checks a tree with a definition of four metrics, an enum, and one more file.
fn with_metrics(path: &str, text: &str) -> Vec<String> {
    let definition = "ts_metrics:\n  counter:\n    - name: nv_a\n    - name: Requests2XX\n  histogram:\n    - name: nv_h\n\
                      model_metrics:\n  gauge:\n    - name: HandlerTime\n";
    let rows = "//! x\n    A = \"nv_a\" Cells;\n    B = \"Requests2XX\" Cells;\n    C = \"nv_h\" Cells;\n";
    let file = |path: &str, text: &str| File { path: path.to_owned(), text: text.to_owned() };
    all(&[file("metrics.yaml", definition), file("src/metrics/builtin.rs", rows), file(path, text)])
}

#[test]
fn refuses_undeclared_metrics_in_dashboards_and_rules() {
    let json = |expression: &str| format!("{{\n\"expr\": \"{expression}\"}}");
    for expression in [
        "sum by (model) (rate(nv_a{model=~\\\"$nv_model\\\", x!='ts_y'}[$__rate_interval])) > 0",
        "histogram_quantile(0.9, sum by (le) (rate(nv_h_bucket[5m]))) + nv_h_sum / nv_h_count",
        "label_values(Requests2XX, Hostname)",
        "HandlerTime{Level='Model'} and up{job='x'}",
        "avg_over_time(scrape_duration_seconds[5m])",
        "max_over_time(nv_a[1h:5m]) - max_over_time(nv_a[$__range:$__interval]) + max_over_time(nv_a[1h : 5m])",
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
        ("sum(model:missing:rate5m) > 0", "model:missing:rate5m"),
        ("fleet:missing", "fleet:missing"),
    ] {
        let found = with_metrics("grafana/a.json", &json(expression));
        assert_eq!(found.len(), 1, "{expression}: {found:#?}");
        assert!(found[0].starts_with(&format!("grafana/a.json:2: undeclared metric `{name}`")), "{found:#?}");
    }
    let rules = "groups:\n  - rules:\n      - record: model:a\n        expr: rate(nv_a[5m])\n      - alert: X\n        expr: |\n          \
                 model:a > 0\n            and nv_c > 1\n        for: 5m\n      - expr: \"nv_a{a=\\\"nv_x\\\"} > 0\"\n        \
                 nv_y: 1\n";
    let found = with_metrics("grafana/rules.yaml", rules);
    assert_eq!(found.len(), 1, "{found:#?}");
    assert!(found[0].starts_with("grafana/rules.yaml:6: undeclared metric `nv_c`"), "{found:#?}");
}

#[test]
fn the_definition_lists_only_recorded_metrics() {
    let file = |path: &str, text: &str| File { path: path.to_owned(), text: text.to_owned() };
    let definition = "ts_metrics:\n  counter:\n    - name: nv_a\n    - name: nv_b\n";
    let rows = "//! x\n    A = \"nv_a\" Cells;\n";
    let found = all(&[file("metrics.yaml", definition), file("src/metrics/builtin.rs", rows)]);
    assert_eq!(found.len(), 1, "{found:#?}");
    assert!(found[0].starts_with("metrics.yaml:4: `nv_b` is never recorded"), "{found:#?}");
}

#[test]
fn finds_damage_of_merges_in_documents() {
    let check = |text: &str, expected: &[&str]| {
        let found = all(&[File { path: "README.md".to_owned(), text: text.to_owned() }]);
        assert_eq!(found.len(), expected.len(), "{text}: {found:#?}");
        for (found, expected) in found.iter().zip(expected) {
            assert!(found.starts_with(&format!("README.md:{expected}: ")), "found {found}, expected {expected}");
        }
    };
    let table = "# T\n\n| a | b |\n|---|:-:|\n| x | 1 |\n| `y` or z | 2 |\n| | 3 |\n| | 4 |\n";
    check(table, &[]);
    check("a\n\n**b** c\n\n```text\n**d**\n| e |\n# f\n```\n\n- **g** h\n- **i**\n", &[]);
    check(&format!("{table}| x | 5 |\n"), &["9: the table has two rows for `x`"]);
    check("a\n| x | 1 |\nb\n", &["2: a table's row without a head"]);
    check("| x | 1 |\n| y | 2 |\n", &["1: a table's row without a head"]);
    let glued = "a heading or a paragraph that begins in bold must follow an empty line";
    check("a\n**b** c\n# d\n", &[&format!("2: {glued}"), &format!("3: {glued}")]);
    check("```\nb\n```\n## c\n", &[&format!("4: {glued}")]);
    let tree = "```\nsrc/   x\n  a/   y\n       a/ goes on\n  b    z\nfrontend/\n  a/   v\n";
    check(&format!("{tree}```\n"), &[]);
    check(&format!("{tree}  a/   w\n```\n"), &["8: `a/` is explained twice"]);
    check("```\n  x 1\n  x 2\n```\n", &[]);
}

#[test]
fn refuses_broken_links() {
    let file = |path: &str, text: &str| File { path: path.to_owned(), text: text.to_owned() };
    let check = |text: &str, expected: &[&str]| {
        let page = "# A page's `title`: 1\n\n## Twice\n\n## Twice\n\n```sh\n# comment\n```\n";
        let summary = "[a](a.md)\n[b](b/b.md)\n";
        let found = all(&[
            file("README.md", "[book](docs/src)\n"),
            file("docs/src/SUMMARY.md", summary),
            file("docs/src/a.md", page),
            file("docs/src/b/b.md", text),
        ]);
        assert_eq!(found.len(), expected.len(), "{text}: {found:#?}");
        for (found, expected) in found.iter().zip(expected) {
            assert!(found.starts_with(&format!("docs/src/b/b.md:{expected}: ")), "found {found}, expected {expected}");
        }
    };
    check("[a](../a.md) [`a`](../a.md#a-pages-title-1), [b](../a.md#twice-1) and [c](../../../README.md)\n", &[]);
    check("# B\n\n[b](#b) [c](https://example.org/x#y) `[d](d.md)`\n\n```\n[e](e.md)\n```\n", &[]);
    check("b\n[a](a.md)\n", &["2: broken link `a.md`: no such file"]);
    check(
        "[a](../a.m) [b](../../../../README.md)\n",
        &["1: broken link `../a.m`: no such file", "1: broken link `../../../../README.md`: no such file"],
    );
    check(
        "[a](../a.md#other) [`b`](#b)\n",
        &["1: broken link `../a.md#other`: no such heading", "1: broken link `#b`: no such heading"],
    );
    check(
        "[a](../a.md#comment) [b](../a.md#twice-2)\n",
        &["1: broken link `../a.md#comment`: no such heading", "1: broken link `../a.md#twice-2`: no such heading"],
    );
}

#[test]
fn refuses_pages_missing_from_the_table_of_contents() {
    let file = |path: &str, text: &str| File { path: path.to_owned(), text: text.to_owned() };
    let (a, b) = (file("docs/src/a.md", "a"), file("docs/src/b/b.md", "[a](../a.md)"));
    let found = all(&[file("docs/src/SUMMARY.md", "[b](b/b.md)"), a, b]);
    assert_eq!(found, ["docs/src/a.md:1: the table of contents omits this page: add the page to docs/src/SUMMARY.md"]);
}

/// Returns a tree of files with a module head.
fn tree(files: &[(&str, &str)]) -> Vec<File> {
    files.iter().map(|(path, text)| File { path: (*path).to_owned(), text: format!("//! x\n{text}") }).collect()
}

#[test]
fn refuses_cycles_of_siblings() {
    const A: &str = "src/model/a.rs";
    const B: &str = "src/model/b.rs";
    for (one, other) in [
        ("use super::b::X;", "use crate::model::a::Y;"),
        ("use super::{c, b::{self, X}};", "fn f() { super::a::g() }"),
        ("use crate::{\n    model::{\n        b::X,\n    },\n};", "fn f(y: crate::model::a::Y) {}"),
        // Through an import of the parent, and from below.
        ("use super::Again;", "use super::a;"),
        ("use super::d::X;", "use super::a::Y;"),
    ] {
        let parent = ("src/model/mod.rs", "mod a;\nmod b;\nmod c;\npub use b::Again;\nuse b::below as d;");
        let below = ("src/model/b/below.rs", "use super::super::a::Y;");
        let files = tree(&[parent, (A, one), (B, other), ("src/model/c.rs", ""), below]);
        let found = judge(&files, &[]).0;
        let is_circle = !one.contains("d::X");
        assert_eq!(found.len(), usize::from(is_circle), "{one} {other}: {found:#?}");
        if is_circle {
            let text = &found[0];
            assert!(text.contains("the sibling modules `a`, `b` use each other"), "{text}");
            assert!(text.contains("a -> b: src/model/a.rs:") && text.contains("b -> a: src/model/b"), "{text}");
        }
    }
}

#[test]
fn accepts_acyclic_modules() {
    let none = |files: &[(&str, &str)]| assert_eq!(judge(&tree(files), &[]).0, Vec::<String>::new());
    // One direction only; a parent and its child; words, not paths.
    none(&[("src/a.rs", "use crate::b::X;"), ("src/b.rs", "// crate::a\nconst A: &str = \"crate::a::f\";")]);
    none(&[("src/a/mod.rs", "mod b;\nfn f() { b::g() }"), ("src/a/b.rs", "use super::f;")]);
    // Another crate, and its module of the same name.
    none(&[("src/a.rs", "use crate::b::X;"), ("frontend/src/b.rs", "use crate::a::X;\nuse pharos::a::Y;")]);
    // Tests, in the file, beside it, and in modules declared for them.
    let tests = "#[cfg(test)]\nmod tests {\n    use crate::a::X;\n}";
    none(&[("src/a.rs", "use crate::b::X;"), ("src/b.rs", tests)]);
    none(&[("src/a.rs", "use crate::b::X;"), ("src/b/tests.rs", "use crate::a::X;"), ("src/b.rs", "")]);
    let declared = "#[cfg(test)]\n#[allow(x)]\nmod sim;\nmod c;";
    none(&[("src/a.rs", "use crate::b::X;"), ("src/b/mod.rs", declared), ("src/b/sim.rs", "use crate::a::X;")]);
}

#[test]
fn finds_cycles_at_every_depth() {
    let found = judge(
        &tree(&[
            ("frontend/src/http/mod.rs", "mod a;\nmod b;"),
            ("frontend/src/http/a.rs", "use crate::grpc::X;"),
            ("frontend/src/grpc.rs", "use crate::engine::{Y, Z};"),
            ("frontend/src/engine.rs", "fn f() { crate::http::a::g() }"),
            ("frontend/src/http/b.rs", ""),
        ]),
        &[],
    )
    .0;
    assert_eq!(found.len(), 1, "{found:#?}");
    assert!(found[0].contains("`engine`, `grpc`, `http`") && found[0].contains("grpc -> engine: "), "{found:#?}");
    assert!(found[0].contains("frontend/src/grpc.rs:2 uses Y, Z"), "{found:#?}");
}

#[test]
fn listed_cycles_must_exist() {
    let files = tree(&[("src/a.rs", "use crate::b::X;"), ("src/b.rs", "use crate::a::X;")]);
    let known = |modules| [Cycle { source: "src/", parent: "", modules, reason: "" }];
    assert_eq!(judge(&files, &known(&["a", "b"])), (Vec::new(), Vec::new()));
    let (found, stale) = judge(&files, &known(&["a", "b", "c"]));
    assert!(found.len() == 1 && stale.len() == 1, "{found:#?} {stale:#?}");
    assert!(stale[0].contains("`a`, `b`, `c` no longer form a cycle in `crate::`"), "{stale:#?}");
    let (found, stale) = judge(&files[..1], &known(&["a", "b"]));
    assert!(found.is_empty() && stale.len() == 1, "{found:#?} {stale:#?}");
}

#[test]
fn refuses_nonstandard_module_names() {
    let files =
        tree(&[("src/cut.rs", ""), ("src/board/mod.rs", ""), ("src/tests/open.rs", ""), ("src/clipboard.rs", "")]);
    let (found, stale) = names(&files, &["src/cut.rs", "src/slow.rs"]);
    assert!(found.len() == 1 && found[0].starts_with("src/board/mod.rs:1: "), "{found:#?}");
    assert!(stale.len() == 1 && stale[0].starts_with("src/slow.rs:1: "), "{stale:#?}");
}

#[test]
fn refuses_torchserve_outside_its_places() {
    let text = "// TorchServe\nuse torchserve;\nconst A: &str = \"torch_serve\";\nconst B: u8 = 1;\n#[cfg(test)]\nmod tests {\n    // TorchServe\n}";
    let path = "frontend/engine/src/engine.rs";
    let here = tree(&[(path, text), ("frontend/torchserve/src/lib.rs", text), ("README.md", text)]);
    let (found, stale) = torchserve(&here, &[]);
    assert!(found.len() == 1 && stale.is_empty(), "{found:#?} {stale:#?}");
    assert!(found[0].starts_with(&format!("{path}:1: 3 lines name TorchServe, at most 0 are allowed")), "{found:#?}");
    assert_eq!(torchserve(&here, &[(path, 3)]), (Vec::new(), Vec::new()));
    assert_eq!(torchserve(&here, &[(path, 2)]).0.len(), 1);
    let (found, stale) = torchserve(&here, &[(path, 4), ("src/gone.rs", 1)]);
    assert!(found.is_empty() && stale.len() == 2, "{found:#?} {stale:#?}");
    assert!(
        stale[0].contains("4 lines that name TorchServe are allowed, 3 exist")
            && stale[1].starts_with("src/gone.rs:1: "),
        "{stale:#?}"
    );
}

#[test]
fn refuses_listed_phrases() {
    fails("docs/a.py", "x = 1\n# Nobody is there.", 2, "the phrase \"nobody\"");
    passes("docs/a.py", "whoever_id = 1");
    passes("docs/a.py", "if x is None:");
}
