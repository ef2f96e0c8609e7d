//! Compares the tables with the fields that other servers and their clients define, and writes the book's list of
//! fields.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write;
use std::path::Path;

use serde::Deserialize;
use serde_json::{Value, json};

use super::{
    BODY, CALL, CALLED_FUNCTION, CONTENT_PART, FUNCTION, MESSAGE, STREAM_OPTIONS, TOKENIZE, TOOL,
};
use super::{
    Endpoint, FieldTable, Treatment, batch, llama_server, messages, ollama, pooling, responses,
};

/// Made by `tests/fields/make_fields.py`.
const FIELDS: &str = include_str!("../../../../../tests/fields/fields.json");

const PAGE: &str = concat!(
    env!("CARGO_MANIFEST_DIR"),
    "/../../docs/src/reference/fields.md"
);

const HEAD: &str = "\
<!-- Written by `UPDATE_DOCS=1 cargo test -p corella-server list_of_fields`. -->

# Fields

Every field of a request that Corella knows by name, and those of the objects within. The [API](api.md) says what fields
do that are read. A field without effect is accepted because it cannot change the answer. One that would change it
is refused by name, unless it is `null` or asks for what is done anyway.
";

/// The tables, by their names in the file, with their headings in the book and the endpoint of their body.
const TABLES: [(&str, &str, &FieldTable, Option<Endpoint>); 50] = [
    (
        "chat",
        "`/v1/chat/completions`",
        &BODY,
        Some(Endpoint::Chat),
    ),
    (
        "completions",
        "`/v1/completions`",
        &BODY,
        Some(Endpoint::Completions),
    ),
    ("stream options", "`stream_options`", &STREAM_OPTIONS, None),
    ("chat message", "Message of a chat", &MESSAGE, None),
    (
        "chat content part",
        "Part of its content",
        &CONTENT_PART,
        None,
    ),
    ("chat tool call", "Call in a message", &CALL, None),
    (
        "chat called function",
        "Function of a call",
        &CALLED_FUNCTION,
        None,
    ),
    ("chat tool", "Tool of a chat", &TOOL, None),
    ("chat function", "Function of a tool", &FUNCTION, None),
    (
        "tokenize",
        "`/tokenize`",
        &TOKENIZE,
        Some(Endpoint::Tokenize),
    ),
    (
        "detokenize",
        "`/detokenize`",
        &BODY,
        Some(Endpoint::Detokenize),
    ),
    (
        "responses",
        "`/v1/responses`",
        &responses::BODY,
        Some(Endpoint::Responses),
    ),
    ("response text", "`text`", &responses::TEXT, None),
    (
        "response reasoning",
        "`reasoning`",
        &responses::REASONING,
        None,
    ),
    (
        "response message",
        "Item `message`",
        &responses::MESSAGE,
        None,
    ),
    (
        "response content",
        "Part of a message",
        &responses::CONTENT,
        None,
    ),
    (
        "response call",
        "Item `function_call`",
        &responses::CALL,
        None,
    ),
    (
        "response call output",
        "Item `function_call_output`",
        &responses::CALL_OUTPUT,
        None,
    ),
    (
        "response thought",
        "Item `reasoning`",
        &responses::THOUGHT,
        None,
    ),
    (
        "response tool",
        "Tool of a response",
        &responses::TOOL,
        None,
    ),
    (
        "messages",
        "`/v1/messages`",
        &messages::BODY,
        Some(Endpoint::Messages),
    ),
    ("messages message", "Message", &messages::MESSAGE, None),
    ("messages text", "Block `text`", &messages::BLOCK, None),
    (
        "messages thinking",
        "Block `thinking`",
        &messages::THINKING_BLOCK,
        None,
    ),
    (
        "messages tool use",
        "Block `tool_use`",
        &messages::TOOL_USE,
        None,
    ),
    (
        "messages tool result",
        "Block `tool_result`",
        &messages::TOOL_RESULT,
        None,
    ),
    ("messages tool", "Tool of a message", &messages::TOOL, None),
    (
        "messages tool choice",
        "`tool_choice`",
        &messages::TOOL_CHOICE,
        None,
    ),
    (
        "messages thinking config",
        "`thinking`",
        &messages::THINKING,
        None,
    ),
    (
        "messages output config",
        "`output_config`",
        &messages::OUTPUT_CONFIG,
        None,
    ),
    (
        "embeddings",
        "`/v1/embeddings`",
        &pooling::EMBEDDINGS,
        Some(Endpoint::Embeddings),
    ),
    ("score", "`/score`", &pooling::SCORE, Some(Endpoint::Score)),
    (
        "rerank",
        "`/rerank`",
        &pooling::RERANK,
        Some(Endpoint::Rerank),
    ),
    (
        "classify",
        "`/classify`",
        &pooling::CLASSIFY,
        Some(Endpoint::Classify),
    ),
    (
        "pooling",
        "`/pooling`",
        &pooling::POOLING,
        Some(Endpoint::Pooling),
    ),
    (
        "apply template",
        "`/apply-template`",
        &BODY,
        Some(Endpoint::ApplyTemplate),
    ),
    (
        "llama completion",
        "`/completion`",
        &llama_server::COMPLETION,
        Some(Endpoint::LlamaCompletion),
    ),
    (
        "infill",
        "`/infill`",
        &llama_server::INFILL,
        Some(Endpoint::Infill),
    ),
    (
        "llama embedding",
        "`/embedding`",
        &llama_server::EMBEDDING,
        Some(Endpoint::LlamaEmbedding),
    ),
    (
        "batches",
        "`/v1/batches`",
        &batch::BODY,
        Some(Endpoint::Batches),
    ),
    (
        "batch expiry",
        "`output_expires_after`",
        &batch::EXPIRY,
        None,
    ),
    (
        "ollama chat",
        "`/api/chat`",
        &ollama::CHAT,
        Some(Endpoint::OllamaChat),
    ),
    (
        "ollama generate",
        "`/api/generate`",
        &ollama::GENERATE,
        Some(Endpoint::OllamaGenerate),
    ),
    (
        "ollama embed",
        "`/api/embed`",
        &ollama::EMBED,
        Some(Endpoint::OllamaEmbed),
    ),
    (
        "ollama embeddings",
        "`/api/embeddings`",
        &ollama::EMBEDDINGS,
        Some(Endpoint::OllamaEmbeddings),
    ),
    (
        "ollama show",
        "`/api/show`",
        &ollama::SHOW,
        Some(Endpoint::OllamaShow),
    ),
    (
        "ollama pull",
        "`/api/pull`",
        &ollama::PULL,
        Some(Endpoint::OllamaPull),
    ),
    ("ollama options", "`options`", &ollama::OPTIONS, None),
    (
        "ollama message",
        "Message of Ollama",
        &ollama::MESSAGE,
        None,
    ),
    (
        "ollama tool call",
        "Call in a message of Ollama",
        &ollama::CALL,
        None,
    ),
];

/// A table without a section of its own in the book.
const INNER: (&str, &FieldTable) = ("ollama called function", &ollama::CALLED_FUNCTION);

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
    let tables: BTreeMap<_, _> = TABLES
        .iter()
        .map(|(name, _, table, _)| (*name, *table))
        .chain([INNER])
        .collect();
    let mut missing = Vec::new();
    for (name, sources) in fields().tables {
        let table = tables
            .get(&*name)
            .unwrap_or_else(|| panic!("{name} is compared with no table"));
        for (source, names) in sources {
            let unknown = names.iter().filter(|name| table.find(name).is_none());
            missing.extend(unknown.map(|field| format!("{name}: {field} ({source})")));
        }
    }
    assert!(missing.is_empty(), "{}", missing.join("\n"));
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
        "docs/src/reference/fields.md is stale; update it with `UPDATE_DOCS=1 cargo test -p corella-server \
         list_of_fields`"
    );
}

fn render() -> String {
    let fields = fields();
    let versions: Vec<_> = fields.versions.values().cloned().collect();
    let mut page = format!(
        "{HEAD}\nThe lists were compared with {}.\n",
        versions.join(", ")
    );
    for (_, heading, table, endpoint) in TABLES {
        section(&mut page, heading, table, endpoint);
    }
    page
}

fn section(page: &mut String, heading: &str, table: &FieldTable, endpoint: Option<Endpoint>) {
    let mut read = Vec::new();
    let mut without_effect: Vec<(&str, Vec<String>)> = Vec::new();
    let mut refused: Vec<(String, Vec<String>)> = Vec::new();
    for name in table.names() {
        let shown = format!("`{name}`");
        match table.find(name) {
            Some(Treatment::ReadAt(endpoints))
                if !endpoint.is_some_and(|at| is_read_at(at, endpoints)) =>
            {
                let paths: Vec<_> = endpoints
                    .iter()
                    .map(|at| format!("`{}`", at.path()))
                    .collect();
                let why = format!("belongs to {}", paths.join(" and "));
                add(&mut refused, why, shown);
            }
            Some(Treatment::NoEffect(reason)) => add(&mut without_effect, reason, shown),
            Some(Treatment::Refused(field)) => {
                let neutral: Vec<_> = NEUTRAL
                    .iter()
                    .filter_map(|text| {
                        let value: Value = serde_json::from_str(text).expect("JSON");
                        (field.is_neutral)(&value).then(|| format!("`{text}`"))
                    })
                    .collect();
                let accepted = match neutral.is_empty() {
                    true => String::new(),
                    false => format!("; accepted as {}", neutral.join(", ")),
                };
                add(&mut refused, format!("{}{accepted}", field.advice), shown);
            }
            _ => read.push(shown),
        }
    }
    let mut line = |line: std::fmt::Arguments<'_>| {
        writeln!(page, "{line}").expect("a string takes all text");
    };
    line(format_args!("\n## {heading}\n\nRead: {}.", read.join(", ")));
    for (title, groups) in [
        ("Without effect", owned(without_effect)),
        ("Refused", refused),
    ] {
        if !groups.is_empty() {
            line(format_args!("\n{title}:\n"));
        }
        for (why, names) in groups {
            line(format_args!("* {}: {why}", names.join(", ")));
        }
    }
}

/// A chat's body can also be sent to `/tokenize` and `/apply-template`.
fn is_read_at(endpoint: Endpoint, endpoints: &[Endpoint]) -> bool {
    endpoints.contains(&endpoint) || endpoint.takes_a_chat() && endpoints.contains(&Endpoint::Chat)
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

/// Adds a name to the others with the same reason.
fn add<R: PartialEq>(groups: &mut Vec<(R, Vec<String>)>, reason: R, name: String) {
    match groups.iter_mut().find(|(known, _)| *known == reason) {
        Some((_, names)) => names.push(name),
        None => groups.push((reason, vec![name])),
    }
}

fn owned(groups: Vec<(&str, Vec<String>)>) -> Vec<(String, Vec<String>)> {
    groups
        .into_iter()
        .map(|(reason, names)| (reason.to_owned(), names))
        .collect()
}

/// The tables and the test agree on the neutral values.
#[test]
fn a_neutral_value_is_one_of_those_in_the_list() {
    let neutral = |field: &super::Refused, value: Value| (field.is_neutral)(&value);
    for (name, _, table, _) in TABLES {
        for field in table.refused {
            let others = [
                json!("no such value"),
                json!(12345),
                json!({"a": 1}),
                json!([1]),
            ];
            for value in others {
                assert!(
                    !neutral(field, value.clone()),
                    "{name}: {} = {value}",
                    field.name
                );
            }
        }
    }
}
