//! Tests of the checker on small trees: each rule must be able to fail, and must accept what is
//! allowed.

use crate::code::{mask, named_paths};
use crate::{File, violations};

fn tree(files: &[(&str, &str)]) -> Vec<File> {
    files
        .iter()
        .map(|(path, text)| File { path: (*path).to_owned(), text: (*text).to_owned() })
        .collect()
}

/// Asserts that a tree has the expected violations, each as the begin of its text.
#[track_caller]
fn check_tree(files: &[(&str, &str)], expected: &[&str]) {
    let found = violations(&tree(files));
    let agrees = found.iter().zip(expected).all(|(found, expected)| found.starts_with(expected));
    assert!(
        found.len() == expected.len() && agrees,
        "{files:?}: found {found:#?}, expected {expected:#?}"
    );
}

/// Asserts that a file whose second line is `text` has one violation there.
#[track_caller]
fn refuses(path: &str, text: &str, rule: &str) {
    check_tree(&[(path, &format!("//! x\n{text}"))], &[&format!("{path}:2: {rule}")]);
}

#[track_caller]
fn accepts(path: &str, text: &str) {
    check_tree(&[(path, &format!("//! x\n{text}"))], &[]);
}

#[test]
fn modules_use_lower_floors() {
    accepts("frontend/engine/src/serving.rs", "use crate::wire::Frames;\nuse super::ensemble;");
    accepts("frontend/engine/src/lib.rs", "use crate::engine;");
    accepts("src/infer.rs", "use crate::tensor::Tensor;");
    let above = "`serving` uses `loader`, which is above it";
    refuses("frontend/engine/src/serving.rs", "use crate::loader::load;", above);
    refuses(
        "frontend/engine/src/serving.rs",
        "use crate::{\n    memory,\n    loader::{a, b},\n};",
        above,
    );
    refuses(
        "frontend/engine/src/wire/a/b.rs",
        "fn f() { super::super::super::calls::f() }",
        "`wire` uses `calls`",
    );
    refuses(
        "src/wire/codec.rs",
        "use crate::scheduler::Ticket;",
        "`wire` uses `scheduler`, which is beside it",
    );
    refuses(
        "src/tensor.rs",
        "use crate::model::ModelConfig;",
        "`tensor` uses `model`, which is above it",
    );
    check_tree(
        &[("frontend/engine/src/novelty.rs", "//! x")],
        &["frontend/engine/src/novelty.rs:1: the module `novelty`"],
    );
    // Tests are exempt.
    accepts("src/tensor.rs", "#[cfg(test)]\n#[x]\nmod tests {\n    use crate::model::A;\n}");
    accepts("src/scheduler/tests/mod.rs", "use crate::tensor::Tensor;");
}

#[test]
fn code_has_no_banned_paths() {
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
    ] {
        let found = violations(&tree(&[(path, &format!("//! x\n{text}"))]));
        assert!(
            found.len() == 1 && found[0].contains("is not allowed here"),
            "{path}: {text}: {found:#?}"
        );
    }
    accepts(
        "src/model/mod.rs",
        "use std::time::Duration;\n// std::net::TcpStream\nconst A: &str = \"tokio::net\";",
    );
    accepts("frontend/grpc/src/codec.rs", "use tonic::Status;\nuse prost::Message;");
}

#[test]
fn packages_depend_on_lower_packages() {
    let check = |path: &str, name: &str, dependencies: &str, expected: &[&str]| {
        let text = format!(
            "[package]\nname = \"{name}\"\n[lints]\nworkspace = \
             true\n[dependencies]\n{dependencies}\n"
        );
        check_tree(&[(path, &text)], expected);
    };
    let path = "frontend/http/Cargo.toml";
    let tests = "pharos-os.workspace = true\nbytes = \
                 \"1\"\n[dev-dependencies]\npharos-engine.workspace = true";
    check(path, "pharos-http", tests, &[]);
    for other in ["pharos-grpc", "pharos-engine", "pharos-frontend", "pharos-backend"] {
        let expected = format!("{path}:6: `pharos-http` may not depend on `{other}`");
        check(path, "pharos-http", &format!("{other}.workspace = true"), &[&expected]);
    }
    check(
        "frontend/a/Cargo.toml",
        "pharos-a",
        "",
        &["frontend/a/Cargo.toml:1: the package `pharos-a` has no floor"],
    );
    check("examples/backend/Cargo.toml", "x", "pharos-backend.workspace = true", &[]);
    let text = "[package]\nname = \"pharos-worker\"\n";
    check_tree(
        &[("worker/Cargo.toml", text)],
        &["worker/Cargo.toml:1: a package has the lints of the workspace"],
    );
}

#[test]
fn siblings_do_not_use_each_other() {
    let parent = ("src/model/mod.rs", "//!\nmod a;\nmod b;\npub use b::Again;\nuse b::below as d;");
    let below = ("src/model/b/below.rs", "//!\nuse super::super::a::Y;");
    for (one, other) in [
        ("use super::b::X;", "use crate::model::a::Y;"),
        ("use super::{c, b::{self, X}};", "fn f() { super::a::g() }"),
        ("use crate::{\n    model::{\n        b::X,\n    },\n};", "fn f(y: crate::model::a::Y) {}"),
        // Through an import of the parent, and from below.
        ("use super::Again;", ""),
    ] {
        let one = format!("//!\n{one}");
        let other = format!("//!\n{other}");
        let files = [parent, ("src/model/a.rs", &one), ("src/model/b.rs", &other), below];
        let found = violations(&tree(&files));
        assert_eq!(found.len(), 2, "{one} {other}: {found:#?}");
        assert!(
            found[0].starts_with("src/model/a.rs:2: `model::a` and `model::b` use each other"),
            "{found:#?}"
        );
        assert!(found[1].starts_with("src/model/b"), "{found:#?}");
    }
    let chain = [
        ("tests/x/src/a.rs", "//!\nuse crate::b::X;"),
        ("tests/x/src/b.rs", "//!\nuse crate::c::{Y, Z};"),
        ("tests/x/src/c.rs", "//!\nfn f() { crate::a::g() }"),
    ];
    assert_eq!(violations(&tree(&chain)).len(), 3);
    check_tree(&chain[..2], &[]);
    let accepted =
        |b: &str, more: (&str, &str)| check_tree(&[chain[0], ("tests/x/src/b.rs", b), more], &[]);
    let none = ("README.md", "");
    accepted("//!\n// crate::a\nconst A: &str = \"crate::a::f\";", none);
    accepted("//!\n#[cfg(test)]\nmod tests {\n    use crate::a::X;\n}", none);
    accepted(
        "//!\n#[cfg(test)]\n#[allow(x)]\nmod sim;\nmod c;",
        ("tests/x/src/b/sim.rs", "//!\nuse crate::a::X;"),
    );
    // A parent and its child; another crate.
    accepted("//!\nmod c;\nfn f() { c::g() }", ("tests/x/src/b/c.rs", "//!\nuse super::f;"));
    accepted("//!", ("tests/y/src/b.rs", "//!\nuse crate::a::X;"));
}

#[test]
fn paths_are_found_in_code() {
    assert_eq!(mask("a // b\nc /* d\n */"), "a     \nc     \n   ");
    assert_eq!(
        mask(r#"f("a\"b", 'c', '\'', 'é', x: &'a T)"#),
        "f(      ,    ,     ,    , x: &'a T)"
    );
    assert_eq!(mask("r#\"a\"b\"# c bar\"x\""), "         c bar   ");
    let code = "use a::{self, b::{c, d as e}, f::*};\nlet x = g::h::<i::j>(k);\nuse l;";
    let named = named_paths(code, &[], |_| false);
    let named: Vec<_> =
        named.iter().map(|path| format!("{} {}", path.line, path.segments.join("::"))).collect();
    assert_eq!(named, ["1 a", "1 a::b::c", "1 a::b::d", "1 a::f", "2 g::h", "2 i::j", "3 l"]);
}

#[test]
fn texts_keep_the_rules() {
    let engine = "frontend/engine/src/engine.rs";
    refuses(
        engine,
        "const A: &str = \"nv_inference_count\";",
        "the text `\"nv_inference`: a metric is named once",
    );
    refuses(engine, "// Torch-Serve", "the text `Torch-Serve`: TorchServe has its own places");
    refuses(engine, "#[cfg(not(test))]\nuse a::b;", "the text `cfg(not(test))`");
    accepts(engine, "#[cfg(test)]\nmod tests {\n    // TorchServe\n}");
    accepts("frontend/torchserve/src/lib.rs", "use torchserve;");
    check_tree(
        &[("src/base/id.rs", "use std::fmt;")],
        &["src/base/id.rs:1: a Rust file begins with `//!`"],
    );
    refuses(
        "docs/a.py",
        "# Nobody is there.",
        "the phrase \"nobody\": a negation hidden in a person",
    );
    accepts("docs/a.py", "whoever_id = x is None");
    let private = concat!("/ho", "me/me/models");
    refuses(
        "README.md",
        &format!("run {private}"),
        concat!("`/ho", "me/…` exists on one machine only"),
    );
    accepts("README.md", &format!("https://example.org{private} and $(ROOT){private}"));
}

/// Checks a tree with a definition of metrics, their enum, and a dashboard.
#[track_caller]
fn check_metrics(rows: &str, dashboard: (&str, &str), expected: &[&str]) {
    let definition = "ts_metrics:\n  counter:\n    - name: nv_a\n    - name: Requests2XX\n  \
                      histogram:\n    - name: nv_h\nmodel_metrics:\n  gauge:\n    - name: \
                      HandlerTime\n";
    let rows = format!("//! x\n{rows}");
    check_tree(
        &[("metrics.yaml", definition), ("src/metrics/builtin.rs", &rows), dashboard],
        expected,
    );
}

const ROWS: &str =
    "    A = \"nv_a\" Cells;\n    B = \"Requests2XX\" Cells;\n    C = \"nv_h\" Cells;\n";

#[test]
fn dashboards_and_rules_name_declared_metrics() {
    for expression in [
        "sum by (model) (rate(nv_a{model=~\\\"$nv_model\\\", x!='ts_y'}[$__rate_interval])) > 0",
        "histogram_quantile(0.9, sum by (le) (rate(nv_h_bucket[5m]))) + nv_h_sum / nv_h_count",
        "label_values(Requests2XX, Hostname)",
        "HandlerTime{Level='Model'} and up{job='x'}",
        "avg_over_time(scrape_duration_seconds[5m])",
        "max_over_time(nv_a[1h:5m]) - max_over_time(nv_a[$__range:$__interval]) + \
         max_over_time(nv_a[1h : 5m])",
    ] {
        check_metrics(ROWS, ("grafana/a.json", &format!("{{\n\"expr\": \"{expression}\"}}")), &[]);
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
    ] {
        let expected = format!("grafana/a.json:2: undeclared metric `{name}`");
        check_metrics(
            ROWS,
            ("grafana/a.json", &format!("{{\n\"expr\": \"{expression}\"}}")),
            &[&expected],
        );
    }
    let rules = "groups:\n  - rules:\n      - record: model:a\n        expr: rate(nv_a[5m])\n      - \
         alert: X\n        expr: |\n          model:a > 0\n            and nv_c > 1\n        for: \
         5m\n      - expr: \"nv_a{a=\\\"nv_x\\\"} > 0\"\n";
    check_metrics(
        ROWS,
        ("grafana/rules.yaml", rules),
        &["grafana/rules.yaml:8: undeclared metric `nv_c`"],
    );
    check_metrics(ROWS, ("grafana/a.json", "{\n\"description\": \"nv_h\"}"), &[]);
}

#[test]
fn the_definition_lists_recorded_metrics_only() {
    let rows = "    A = \"nv_a\" Cells;\n    D = \"nv_h\" Cells;\n";
    check_metrics(rows, ("README.md", ""), &["metrics.yaml:4: `Requests2XX` is never recorded"]);
}

#[test]
fn merges_leave_no_damage_in_documents() {
    let check = |text: &str, expected: &[&str]| {
        let expected: Vec<_> =
            expected.iter().map(|expected| format!("README.md:{expected}")).collect();
        check_tree(
            &[("README.md", text)],
            &expected.iter().map(String::as_str).collect::<Vec<_>>(),
        );
    };
    let table = "# T\n\n| a | b |\n|---|:-:|\n| x | 1 |\n| `y` or z | 2 |\n| | 3 |\n| | 4 |\n";
    check(table, &[]);
    check("a\n\n```text\n| e |\n| e |\n```\n", &[]);
    check(&format!("{table}| x | 5 |\n"), &["9: the table has two rows for `x`"]);
    let tree = "```\nsrc/   x\n  a/   y\n       a/ goes on\n  b    z\nfrontend/\n  a/   v\n";
    check(&format!("{tree}```\n"), &[]);
    check(&format!("{tree}  a/   w\n```\n"), &["8: `a/` is explained twice"]);
    check("```\n  x 1\n  x 2\n```\n", &[]);
}

#[test]
fn links_lead_somewhere() {
    let check = |text: &str, expected: &[&str]| {
        let page = "# A page's `title`: 1\n\n## Twice\n\n## Twice\n\n```sh\n# comment\n```\n";
        let readme = ("README.md", "[book](docs/src)\n");
        let summary = ("docs/src/SUMMARY.md", "[a](a.md)\n[b](b/b.md)\n");
        let expected: Vec<_> =
            expected.iter().map(|expected| format!("docs/src/b/b.md:{expected}")).collect();
        let expected: Vec<_> = expected.iter().map(String::as_str).collect();
        check_tree(
            &[readme, summary, ("docs/src/a.md", page), ("docs/src/b/b.md", text)],
            &expected,
        );
    };
    check(
        "[a](../a.md) [`a`](../a.md#a-pages-title-1), [b](../a.md#twice-1) and \
         [c](../../../README.md)\n",
        &[],
    );
    check("# B\n\n[b](#b) [c](https://example.org/x#y) `[d](d.md)`\n\n```\n[e](e.md)\n```\n", &[]);
    check("b\n[a](a.md)\n", &["2: broken link `a.md`: no such file"]);
    check(
        "[b](../../../../README.md)\n",
        &["1: broken link `../../../../README.md`: no such file"],
    );
    check("[a](../a.md#other)\n", &["1: broken link `../a.md#other`: no such heading"]);
    check("[`b`](#b)\n", &["1: broken link `#b`: no such heading"]);
    check("[a](../a.md#comment)\n", &["1: broken link `../a.md#comment`: no such heading"]);
    check("[b](../a.md#twice-2)\n", &["1: broken link `../a.md#twice-2`: no such heading"]);
    let pages = [
        ("docs/src/SUMMARY.md", "[b](b.md)"),
        ("docs/src/a.md", "a"),
        ("docs/src/b.md", "[a](a.md)"),
    ];
    check_tree(&pages, &["docs/src/a.md:1: the table of contents omits this page"]);
}
