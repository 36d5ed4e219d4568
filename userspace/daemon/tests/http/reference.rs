//! Generation of docs/reference/http.md from the OpenAPI document.

use std::{collections::BTreeSet, fmt::Write as _, path::Path};

use numaward_daemon::allocations;
use numaward_http::open_api;
use numaward_tests_support::assert_golden;
use serde_json::Value;

const SCHEMAS: &str = "#/components/schemas/";

fn text(value: &Value) -> &str {
    value.as_str().unwrap_or_default()
}

/// Returns a text as one line, escaped for a table.
fn line(value: &Value) -> String {
    text(value).split_whitespace().collect::<Vec<_>>().join(" ").replace('|', "\\|")
}

fn link(schema: &str) -> String {
    let name = schema.strip_prefix(SCHEMAS).unwrap_or(schema);
    format!("[{name}](#{})", name.to_lowercase())
}

/// Describes a type.
fn kind(schema: &Value) -> String {
    if let Some(reference) = schema["$ref"].as_str() {
        return link(reference);
    }
    for several in ["oneOf", "anyOf", "allOf"] {
        if let Some(parts) = schema[several].as_array() {
            let parts: Vec<String> =
                parts.iter().filter(|part| part["type"] != "null").map(kind).collect::<Vec<_>>();
            return parts.join(" or ");
        }
    }
    if let Some(values) = schema["enum"].as_array() {
        return values.iter().map(|value| format!("`{}`", text(value))).collect::<Vec<_>>().join(", ");
    }
    let names: Vec<&str> = match &schema["type"] {
        Value::Array(types) => types.iter().map(text).filter(|name| *name != "null").collect(),
        name => vec![text(name)],
    };
    match names.as_slice() {
        ["array"] => format!("list of {}", kind(&schema["items"])),
        ["object"] if schema["additionalProperties"].is_object() => {
            format!("map to {}", kind(&schema["additionalProperties"]))
        }
        // A variant of a choice is an object with one field.
        ["object"] if schema["properties"].as_object().is_some_and(|fields| fields.len() == 1) => {
            let fields = schema["properties"].as_object().into_iter().flatten();
            let fields = fields.map(|(name, field)| format!("`{{{name}: {}}}`", text(&field["type"])));
            fields.collect::<Vec<_>>().join(", ")
        }
        names => names.join(" or "),
    }
}

fn operation(page: &mut String, path: &str, method: &str, described: &Value) {
    let _ = write!(page, "\n### {} {path}\n\n{}\n", method.to_uppercase(), line(&described["summary"]));
    if let Some(more) = described["description"].as_str() {
        let _ = write!(page, "\n{}\n", line(&Value::from(more)));
    }
    if let Some(parameters) = described["parameters"].as_array() {
        page.push_str("\n| parameter | in | type | meaning |\n|---|---|---|---|\n");
        for parameter in parameters {
            let required = if parameter["required"] == true { "; required" } else { "" };
            let _ = writeln!(
                page,
                "| `{}` | {} | {} | {}{required} |",
                text(&parameter["name"]),
                text(&parameter["in"]),
                kind(&parameter["schema"]),
                line(&parameter["description"]),
            );
        }
    }
    let content = described["requestBody"]["content"].as_object();
    for (media, body) in content.into_iter().flatten() {
        let _ = write!(page, "\nBody: {} (`{media}`)\n", kind(&body["schema"]));
    }
    page.push_str("\n| status | meaning | body |\n|---|---|---|\n");
    for (status, response) in described["responses"].as_object().into_iter().flatten() {
        let bodies: Vec<String> = response["content"]
            .as_object()
            .into_iter()
            .flatten()
            .map(|(media, body)| match body["schema"]["$ref"].as_str() {
                Some(reference) => link(reference),
                None => format!("`{media}`"),
            })
            .collect();
        let status = if status == "default" { "other" } else { status };
        let _ = writeln!(page, "| {status} | {} | {} |", line(&response["description"]), bodies.join(", "));
    }
}

fn schema(page: &mut String, name: &str, described: &Value) {
    let _ = write!(page, "\n### {name}\n\n{}\n", line(&described["description"]));
    if let Some(values) = described["enum"].as_array() {
        let values: Vec<String> = values.iter().map(|value| format!("`{}`", text(value))).collect();
        let _ = write!(page, "\nOne of {}.\n", values.join(", "));
    }
    if let Some(choices) = described["oneOf"].as_array() {
        page.push_str("\n| one of | meaning |\n|---|---|\n");
        for choice in choices {
            let _ = writeln!(page, "| {} | {} |", kind(choice), line(&choice["description"]));
        }
    }
    let required: BTreeSet<&str> = described["required"].as_array().into_iter().flatten().map(text).collect();
    let Some(fields) = described["properties"].as_object() else { return };
    page.push_str("\n| field | type | | meaning |\n|---|---|---|---|\n");
    for (field, described) in fields {
        let may = if required.contains(field.as_str()) { "" } else { "may be absent" };
        let _ = writeln!(
            page,
            "| `{field}` | {} | {may} | {} |",
            kind(described),
            line(&described["description"])
        );
    }
}

fn page(document: &Value) -> String {
    let mut page = format!(
        "# HTTP\n\n<!-- Generated from the OpenAPI document by `cargo xtask generate` -->\n\n\
         {}\n\nThe daemon serves this description itself, for programs, at `/openapi.json`. Sizes are in bytes, sets of CPUs \
         and nodes are lists in the kernel's format (`0-3,8`).\n",
        line(&document["info"]["description"])
    );
    let operations = || {
        let paths = document["paths"].as_object().into_iter().flatten();
        paths.flat_map(|(path, methods)| {
            methods
                .as_object()
                .into_iter()
                .flatten()
                .map(move |(method, described)| (path, method, described))
        })
    };
    for (tag, title) in [
        ("api", "Observations and guarantees"),
        ("control", "Changes"),
        ("metrics", "Metrics"),
        ("health", "Health"),
    ] {
        let _ = write!(page, "\n## {title}\n");
        for (path, method, described) in operations().filter(|(_, _, described)| described["tags"][0] == tag)
        {
            operation(&mut page, path, method, described);
        }
    }
    page.push_str("\n## Schemas\n");
    for (name, described) in document["components"]["schemas"].as_object().into_iter().flatten() {
        schema(&mut page, name, described);
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
                page.contains(&format!("### {} {path}\n", method.to_uppercase())),
                "{method} {path} has no tag"
            );
        }
    }
    let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/reference/http.md");
    assert_golden(&file, &page);
}
