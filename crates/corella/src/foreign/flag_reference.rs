//! The book's page about flags, verbs, variables and endpoints of other servers, rendered from the tables.

use std::collections::BTreeMap;
use std::fmt::Write;
use std::path::Path;

use crate::foreign::endpoint_table::{Service, endpoints, servers_of};
use crate::foreign::flag_table::{
    self, BENCHMARK, ENGINES, Engine, Flag, NoOp, Treatment, Variable, Verb,
};

const PAGE: &str = concat!(
    env!("CARGO_MANIFEST_DIR"),
    "/../../docs/src/reference/other-servers.md"
);

const HEAD: &str = "\
<!-- Written by `UPDATE_DOCS=1 cargo test -p corella --lib flag_reference` from crates/corella/flags. -->

# Flags and endpoints of other servers

`corella serve` takes the flags of `vllm serve` and of `llama-server` as far as they mean something here:

```console
$ corella serve -hf OWNER/MODEL:Q4_K_M -c 8k -np 8 -fa on --jinja --port 8080
INFO -hf is --model
INFO -c is --max-model-len
INFO -np is --max-num-seqs
WARN -fa has no effect: attention has one implementation
WARN --jinja has no effect: chat templates are always used
```

A flag that would change what clients get, or what the machine does, is refused with the reason, and all that are
refused are told at once. `_` in a long flag is the same as `-`, and `--no-` in front of a flag that is refused has no
effect. A value that asks for what is done anyway is taken without a word. Other commands take these flags too, where
they have the option. [Configuration files](../configuration-file.md) take them as keys. `corella bench serve` takes those
of [`vllm bench serve`](#vllm-bench-serve). Of a flag that is given twice, the last value counts, unless it collects
values.

[Endpoints](#endpoints) of these servers are answered at the same paths.
";

#[test]
fn the_page_in_the_book_is_current() {
    let rendered = render();
    if std::env::var_os("UPDATE_DOCS").is_some() {
        std::fs::write(PAGE, rendered).expect("the book's folder is writable");
        return;
    }
    let committed = std::fs::read_to_string(Path::new(PAGE)).unwrap_or_default();
    assert!(
        rendered == committed,
        "docs/src/reference/other-servers.md is stale; update it with `UPDATE_DOCS=1 cargo test -p corella \
         --lib flag_reference`"
    );
}

fn render() -> String {
    let mut text = HEAD.to_owned();
    let titles = [
        "vllm serve",
        "llama-server",
        "SGLang and text-generation-inference",
    ];
    for (engine, title) in ENGINES.iter().zip(titles) {
        engine_section(&mut text, engine, title);
    }
    engine_section(&mut text, &BENCHMARK, "vllm bench serve");
    vllm_variable_section(&mut text);
    ollama_section(&mut text);
    endpoint_section(&mut text);
    text
}

fn engine_section(text: &mut String, engine: &Engine, title: &str) {
    let _ = writeln!(text, "\n## {title}\n");
    if let Some(server) = engine.published() {
        let version = &server.version;
        let _ = writeln!(text, "Version: {version}, and flags of earlier versions.\n");
    }
    let flags = engine.flags();
    let of =
        |wanted: fn(&Treatment) -> bool| flags.iter().filter(move |flag| wanted(&flag.treatment));
    let same: Vec<_> = of(|one| matches!(one, Treatment::Same { .. })).collect();
    if !same.is_empty() {
        let names: Vec<_> = same.iter().map(|flag| names(flag)).collect();
        let _ = writeln!(text, "**The same**: {}.\n", names.join(", "));
    }
    let _ = writeln!(text, "| another name | in Corella | |\n|---|---|---|");
    for flag in of(|one| matches!(one, Treatment::OtherName(_))) {
        let Treatment::OtherName(other) = &flag.treatment else {
            continue;
        };
        let mut notes = Vec::new();
        let values: Vec<_> = other
            .values
            .iter()
            .map(|(theirs, own)| format!("{theirs} is {own}"))
            .collect();
        notes.extend(other.form.map(|form| form.note().to_owned()));
        if !values.is_empty() {
            notes.push(format!("{}; others are refused", values.join(", ")));
        } else if !other.is_taken {
            notes.push("written differently, so that the flag is refused".to_owned());
        }
        notes.extend(
            other
                .elsewhere
                .as_ref()
                .map(|elsewhere| format!("for `serve`: {elsewhere}")),
        );
        let _ = writeln!(
            text,
            "| {} | `{}` | {} |",
            names(flag),
            other.option,
            cell(&notes.join("; "))
        );
    }
    let mut rows = Vec::new();
    for flag in of(|one| matches!(one, Treatment::NoOp(_))) {
        if let Treatment::NoOp(no_op) = &flag.treatment
            && no_op.why != flag_table::OFF
        {
            rows.push((flag, reason(no_op)));
        }
    }
    grouped(text, "no effect", "why", &rows);
    let refused = of(|one| matches!(one, Treatment::Refused(_)));
    let rows: Vec<_> = refused
        .map(|flag| match &flag.treatment {
            Treatment::Refused(why) => (flag, why.clone()),
            _ => (flag, String::new()),
        })
        .collect();
    grouped(text, "refused", "why", &rows);
}

fn reason(no_op: &NoOp) -> String {
    if let Some(member) = &no_op.unless {
        return format!("{}. With `{member}`: {}", no_op.why, no_op.otherwise);
    }
    let limit = match (&no_op.values, no_op.most) {
        (Some(values), _) => format!("only {}", values.join(", ")),
        (None, Some(most)) => format!("at most {most}"),
        (None, None) => return no_op.why.clone(),
    };
    match no_op.otherwise == no_op.why {
        true => format!("{limit}: {}", no_op.why),
        false => format!("{limit}: {}. Otherwise: {}", no_op.why, no_op.otherwise),
    }
}

/// Renders a table with a row for each reason, in the order of the first flags.
fn grouped(text: &mut String, kind: &str, heading: &str, rows: &[(&Flag, String)]) {
    if rows.is_empty() {
        return;
    }
    let mut groups: Vec<(&str, Vec<String>)> = Vec::new();
    for (flag, why) in rows {
        match groups.iter_mut().find(|(known, _)| known == why) {
            Some((_, flags)) => flags.push(names(flag)),
            None => groups.push((why, vec![names(flag)])),
        }
    }
    let _ = writeln!(text, "\n| {kind} | {heading} |\n|---|---|");
    for (why, flags) in groups {
        let _ = writeln!(text, "| {} | {} |", flags.join(", "), cell(why));
    }
}

fn ollama_section(text: &mut String) {
    let version = &flag_table::published()["ollama"].version;
    let _ = writeln!(
        text,
        "\n## Ollama\n\nVersion: {version}. [Its API](../ollama.md) has a page of its own.\n\n| verb | |\n|---|---|"
    );
    for (name, verb) in flag_table::verbs() {
        let meaning = match verb {
            Verb::Same(meaning) => meaning,
            Verb::Command { command, why } if why.is_empty() => format!("`corella {command}`"),
            Verb::Command { command, why } => format!("`corella {command}`: {why}"),
            Verb::Refused(why) => format!("refused: {why}"),
        };
        let _ = writeln!(text, "| `{name}` | {} |", cell(&meaning));
    }
    let _ = writeln!(
        text,
        "\n`OLLAMA_MODELS` is read. Its other variables are not, because both programs may run on one machine.\n\n| variable | in Corella |\n|---|---|"
    );
    variable_rows(text, flag_table::ollama_variables());
}

fn vllm_variable_section(text: &mut String) {
    let _ = writeln!(
        text,
        "\n## Variables of vLLM\n\nThey are not read. `corella serve` warns where one of them has a counterpart, and \
         refuses to start where `VLLM_API_KEY` is set, other machines can reach the server, and no key of its own is \
         set. Variables of vLLM that are not in this table have no counterpart.\n\n| variable | in Corella |\n|---|---|"
    );
    variable_rows(text, flag_table::vllm_variables());
}

fn variable_rows(text: &mut String, variables: BTreeMap<String, Variable>) {
    for (name, Variable { option, why }) in variables {
        let option = option.map(|option| {
            let variable = option
                .trim_start_matches('-')
                .replace('-', "_")
                .to_uppercase();
            format!("`{option}`, `CORELLA_{variable}`")
        });
        let parts: Vec<_> = option
            .into_iter()
            .chain((!why.is_empty()).then_some(why))
            .collect();
        let _ = writeln!(text, "| `{name}` | {} |", cell(&parts.join("; ")));
    }
}

fn endpoint_section(text: &mut String) {
    let rows = endpoints();
    let _ = writeln!(
        text,
        "\n## Endpoints\n\nThose of the versions above. A path that is not answered gets 404, and the nearest one \
         that is.\n\n| the same | of | |\n|---|---|---|"
    );
    for (endpoint, service) in &rows {
        if let Service::Same { note } = service {
            let servers = servers_of(endpoint).join(", ");
            let _ = writeln!(text, "| `{endpoint}` | {servers} | {} |", cell(note));
        }
    }
    let _ = writeln!(text, "\n| another | of | in Corella |\n|---|---|---|");
    for (name, service) in &rows {
        if let Service::Other { endpoint, why } = service {
            let servers = servers_of(name).join(", ");
            let meaning = match why.is_empty() {
                true => format!("`{endpoint}`"),
                false => format!("`{endpoint}`: {}", cell(why)),
            };
            let _ = writeln!(text, "| `{name}` | {servers} | {meaning} |");
        }
    }
    let mut groups: Vec<(&str, Vec<String>)> = Vec::new();
    for (endpoint, service) in &rows {
        if let Service::Refused { why } = service {
            let name = format!("`{endpoint}`");
            match groups.last_mut() {
                Some((known, names)) if *known == why => names.push(name),
                _ => groups.push((why, vec![name])),
            }
        }
    }
    let _ = writeln!(text, "\n| not there | why |\n|---|---|");
    for (why, names) in groups {
        let _ = writeln!(text, "| {} | {} |", names.join(", "), cell(why));
    }
}

fn names(flag: &Flag) -> String {
    let names: Vec<_> = flag.names.iter().map(|name| format!("`{name}`")).collect();
    names.join(" ")
}

/// Escapes bars in a table's cell. Options and JSON are set as code.
fn cell(text: &str) -> String {
    text.replace('|', "\\|").replace('<', "&lt;")
}
