//! Compares the tables with the fields that other servers and their clients define, and writes the book's page of
//! fields.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use serde::Deserialize;
use serde_json::{Value, json};

use super::{EVERYWHERE, Field, FieldTable, Kind, Limits, OBJECTS, Treatment};
use crate::wire::openapi::operation::{OPERATIONS, Operation};

/// `tests/fields/make_fields.py` writes this file.
const FIELDS: &str = include_str!("../../../../../tests/fields/fields.json");

const PAGE: &str = concat!(
    env!("CARGO_MANIFEST_DIR"),
    "/../../docs/src/reference/fields.md"
);

const HEAD: &str = "<!-- Written by `UPDATE_DOCS=1 cargo test -p corella-server list_of_fields`. -->

# Fields

Every field of a request that Corella knows by name, and those of the objects within. The [API](api.md) shows how they
are used. A field without effect is accepted because it cannot change the answer. One that would change it is refused
by name, unless it is `null` or asks for what is done anyway. Absent fields have the default, if one is named.
";

fn bodies() -> impl Iterator<Item = &'static FieldTable> {
    OPERATIONS
        .iter()
        .map(|operation| operation.endpoint.table())
}

fn tables() -> impl Iterator<Item = &'static FieldTable> {
    bodies().chain(OBJECTS)
}

/// A server whose limits are the defaults.
fn limits() -> Limits {
    Limits {
        model_names: Vec::new(),
        max_model_len: MANY,
        max_token_id: MANY as usize,
        max_logprobs: 20,
        max_num_choices: 256,
        vector_len: MANY as usize,
        prompt_names: Vec::new(),
        is_encoder: true,
    }
}

/// Stands for a limit that differs between models.
const MANY: u32 = 987_654_321;

#[derive(Deserialize)]
struct Fields {
    versions: BTreeMap<String, String>,
    /// The names of each table, by the server that defines them.
    tables: BTreeMap<String, BTreeMap<String, BTreeSet<String>>>,
}

fn fields() -> Fields {
    serde_json::from_str(FIELDS).expect("the file has this form")
}

#[test]
fn every_field_of_others_is_in_a_table() {
    let mut missing = Vec::new();
    for (name, sources) in fields().tables {
        let table = tables()
            .find(|table| table.name == name)
            .unwrap_or_else(|| panic!("{name} is compared with no table"));
        for (source, names) in sources {
            let unknown = names.iter().filter(|field| !is_known(table, field));
            missing.extend(unknown.map(|field| format!("{name}: {field} ({source})")));
        }
    }
    assert!(missing.is_empty(), "{}", missing.join("\n"));
}

/// A field of another endpoint is known, and refused with its place.
fn is_known(table: &FieldTable, field: &str) -> bool {
    let of = |operation: &&Operation| std::ptr::eq(operation.endpoint.table(), table);
    let operation = OPERATIONS.iter().find(of);
    let is_misplaced = operation.is_some_and(|operation| {
        let others = operation.endpoint.others_with(field);
        !others.is_empty()
    });
    table.find(field).is_some() || table.passes_over(field) || is_misplaced
}

/// A second row of the same name in a group would never count.
#[test]
fn a_group_has_a_name_once() {
    let groups = tables()
        .flat_map(|table| table.groups.iter().copied())
        .chain([EVERYWHERE[0], EVERYWHERE[1]]);
    for group in groups {
        let names: BTreeSet<_> = group.iter().map(|field| field.name).collect();
        assert_eq!(names.len(), group.len(), "{names:?}");
    }
    let is_refused = |field: &&Field| EVERYWHERE[1].iter().any(|other| other.name == field.name);
    assert!(!EVERYWHERE[0].iter().any(|field| is_refused(&field)));
}

#[test]
fn the_list_of_fields_is_current() {
    let rendered = render();
    if std::env::var_os("UPDATE_DOCS").is_some() {
        std::fs::write(PAGE, rendered).expect("the book's folder is writable");
        return;
    }
    let committed = std::fs::read_to_string(Path::new(PAGE)).unwrap_or_default();
    assert!(
        rendered == committed,
        "docs/src/reference/fields.md is stale; update it with `UPDATE_DOCS=1 cargo test -p \
         corella-server list_of_fields`"
    );
}

fn render() -> String {
    let versions: Vec<_> = fields().versions.into_values().collect();
    let mut page = format!(
        "{HEAD}\nThe names were compared with those of {}.\n",
        versions.join(", ")
    );
    for table in tables() {
        page += &format!("\n## {}\n", heading(table));
        if let Kind::BodyOf(others) = table.kind {
            let others: Vec<_> = others.iter().map(|other| heading(other)).collect();
            let others = others.join(" and ");
            page += &format!("\nFields that only {others} reads are accepted and passed over.\n");
        }
        let own = |field: &&Field| {
            let mut rows = table.groups.iter().copied().flatten();
            rows.any(|row| std::ptr::eq(row, *field))
        };
        section(&mut page, table.fields().filter(own));
    }
    page += "\n## Every endpoint\n\nA field that is in no list of its endpoint:\n";
    section(&mut page, EVERYWHERE.into_iter().flatten());
    page
}

/// The path of a body, or the name of an object's schema.
fn heading(table: &FieldTable) -> String {
    let of = |operation: &&Operation| std::ptr::eq(operation.endpoint.table(), table);
    match OPERATIONS.iter().find(of) {
        Some(operation) => format!("`{}`", operation.endpoint.path()),
        None => table.name.to_owned(),
    }
}

fn section(page: &mut String, fields: impl Iterator<Item = &'static Field>) {
    let mut read = String::new();
    let mut without_effect = Groups::default();
    let mut refused = Groups::default();
    for field in fields {
        match field.treatment {
            Treatment::Read(_) => read += &row(field),
            Treatment::NoEffect => without_effect.add(field.about.to_owned(), field),
            Treatment::Refused(is_neutral) => {
                let neutral: Vec<_> = NEUTRAL
                    .iter()
                    .filter(|text| is_neutral(&serde_json::from_str(text).expect("JSON")))
                    .map(|text| format!("`{text}`"))
                    .collect();
                let accepted = match neutral.is_empty() {
                    true => String::new(),
                    false => format!("; accepted as {}", neutral.join(", ")),
                };
                refused.add(format!("{}{accepted}", field.about), field);
            }
        }
    }
    if !read.is_empty() {
        *page += &format!("\n| field | value | default | |\n|---|---|---|---|\n{read}");
    }
    without_effect.write("Without effect", page);
    refused.write("Refused", page);
}

/// Fields with the same reason.
#[derive(Default)]
struct Groups(Vec<(String, Vec<&'static str>)>);

impl Groups {
    fn add(&mut self, reason: String, field: &Field) {
        match self.0.iter_mut().find(|(known, _)| *known == reason) {
            Some((_, names)) => names.push(field.name),
            None => self.0.push((reason, vec![field.name])),
        }
    }

    fn write(&self, title: &str, page: &mut String) {
        if !self.0.is_empty() {
            *page += &format!("\n{title}:\n\n");
        }
        for (reason, names) in &self.0 {
            *page += &format!("* `{}`: {reason}\n", names.join("`, `"));
        }
    }
}

fn row(field: &Field) -> String {
    let schema = field.schema(&limits());
    let default = match &schema["default"] {
        _ if field.is_required => "required".to_owned(),
        Value::Null => String::new(),
        default => format!("`{default}`"),
    };
    let Field { name, about, .. } = field;
    format!("| `{name}` | {} | {default} | {about} |\n", words(&schema))
}

/// Describes the values of a schema.
fn words(schema: &Value) -> String {
    if let Some(place) = schema["$ref"].as_str() {
        let name = place.rsplit('/').next().unwrap_or_default();
        return format!("[{name}](#{})", name.to_lowercase());
    }
    if let Some(value) = schema.get("const") {
        return format!("`{value}`");
    }
    let list = |keyword: &str| schema[keyword].as_array().into_iter().flatten();
    let mut words: Vec<String> = match &schema["type"] {
        Value::String(kind) => vec![typed(kind, schema)],
        Value::Array(kinds) => kinds
            .iter()
            .filter_map(|kind| kind.as_str())
            .filter(|kind| *kind != "null")
            .map(|kind| typed(kind, schema))
            .collect(),
        _ => Vec::new(),
    };
    let values = list("enum").filter(|value| !value.is_null());
    words.extend(values.map(|value| format!("`{value}`")));
    if words.is_empty() && schema["enum"].is_array() {
        // The names are those of one server.
        words.push("string".to_owned());
    }
    let choices = list("anyOf").filter(|choice| choice["type"] != "null");
    words.extend(choices.map(self::words));
    words.dedup();
    words.join(" or ")
}

fn typed(kind: &str, schema: &Value) -> String {
    let number = |keyword: &str| schema[keyword].as_f64();
    let size = |keyword: &str| schema[keyword].as_u64().filter(|size| *size < MANY.into());
    match kind {
        "integer" if schema["maximum"] == MANY && schema["minimum"] == 0 => "token id".to_owned(),
        "integer" | "number" => {
            let most = number("maximum").filter(|most| *most < 987_654_321.0);
            let least = number("minimum").filter(|least| *least > -987_654_321.0);
            let above = number("exclusiveMinimum").map(|above| format!(" above {above}"));
            let least = least.map(|least| format!(" from {least}")).or(above);
            let most = most.map(|most| format!(" to {most}"));
            [
                kind,
                &*least.unwrap_or_default(),
                &*most.unwrap_or_default(),
            ]
            .concat()
        }
        "string" => match size("maxLength") {
            Some(size) => format!("string of 1 to {size} bytes"),
            None => "string".to_owned(),
        },
        "array" if schema["items"].is_object() => {
            let most = size("maxItems").map(|most| format!("up to {most} of "));
            let most = most.unwrap_or_default();
            let items = words(&schema["items"]);
            match items.contains(" or ") {
                true => format!("array of {most}({items})"),
                false => format!("array of {most}{items}"),
            }
        }
        kind => kind.to_owned(),
    }
}

/// Values that ask for the default behaviour.
const NEUTRAL: [&str; 22] = [
    "false",
    "true",
    "0",
    "1",
    "-1",
    "[]",
    "{}",
    "\"\"",
    "\"none\"",
    "\"auto\"",
    "\"medium\"",
    "\"standard\"",
    "\"disabled\"",
    "\"summarized\"",
    "\"deepseek\"",
    "\"float\"",
    "\"embed\"",
    "\"float32\"",
    "\"native\"",
    "\"little\"",
    "\"do_not_pad\"",
    "[\"text\"]",
];

/// The tables and the page agree on the neutral values.
#[test]
fn a_neutral_value_is_one_of_those_in_the_list() {
    let others = [
        json!("no such value"),
        json!(12345),
        json!({"a": 1}),
        json!([1]),
    ];
    for table in tables() {
        for field in table.fields() {
            let Treatment::Refused(is_neutral) = field.treatment else {
                continue;
            };
            for value in &others {
                assert!(
                    !is_neutral(value),
                    "{}: {} = {value}",
                    table.name,
                    field.name
                );
            }
        }
    }
}
