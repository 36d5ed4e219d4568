//! Generation of docs/reference/http.md from the OpenAPI document.

use std::{fmt::Write as _, path::Path};

use numaward_daemon::allocations;
use numaward_http::open_api;
use numaward_tests_support::assert_golden;
use serde_json::Value;

/// Returns a text as one line, escaped for a table.
fn line(value: &Value) -> String {
    let text = value.as_str().unwrap_or_default();
    text.split_whitespace().collect::<Vec<_>>().join(" ").replace('|', "\\|")
}

fn page(document: &Value) -> String {
    let mut page = format!(
        "# HTTP\n\n<!-- Generated from the OpenAPI document by `cargo xtask generate` -->\n\n\
         {}\n\nThe daemon serves parameters, status codes and fields as an OpenAPI document, which any OpenAPI viewer shows:\n\n\
         ```\ncurl -s http://127.0.0.1:9560/openapi.json\n```\n\n\
         `userspace/daemon/openapi.json` in the sources is the same document. Sizes are in bytes, sets of CPUs and nodes are lists \
         in the kernel's format (`0-3,8`). Slashes in the name of a workload are percent-encoded (`%2F`). [Stability](../stability.md) \
         says what may change.\n",
        line(&document["info"]["description"])
    );
    for (tag, title) in [
        ("api", "Observations and guarantees"),
        ("control", "Changes"),
        ("metrics", "Metrics"),
        ("health", "Health"),
    ] {
        let _ = write!(page, "\n## {title}\n\n| request | does |\n|---|---|\n");
        for (path, methods) in document["paths"].as_object().into_iter().flatten() {
            for (method, described) in methods.as_object().into_iter().flatten() {
                if described["tags"][0] == tag {
                    let summary = line(&described["summary"]);
                    let _ = writeln!(page, "| `{} {path}` | {summary} |", method.to_uppercase());
                }
            }
        }
    }
    page
}

/// `cargo xtask generate` writes it.
#[test]
fn routes_reference_is_current() {
    let document = open_api(allocations::open_api());
    let page = page(&document);
    for (path, methods) in document["paths"].as_object().unwrap() {
        for method in methods.as_object().unwrap().keys() {
            assert!(
                page.contains(&format!("| `{} {path}` |", method.to_uppercase())),
                "{method} {path} has no tag"
            );
        }
    }
    let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/reference/http.md");
    assert_golden(&file, &page);
}
