//! The types of options in the Python package, rendered from the options themselves.

use clap::{Arg, ArgAction};

const FILE: &str = concat!(
    env!("CARGO_MANIFEST_DIR"),
    "/../corella-python/python/corella/own_options.py"
);

const HEAD: &str = "\
# Written by `UPDATE_DOCS=1 cargo test -p corella --test suite python_options`.
\"\"\"Types of the command line's options.\"\"\"

from __future__ import annotations

from collections.abc import Mapping, Sequence
from os import PathLike
from typing import Literal, TypedDict


class OwnOptions(TypedDict, total=False):
    \"\"\"Options of the command line (`corella batch --help` describes them), with `_` for `-`.\"\"\"

";

#[test]
fn the_types_are_current() {
    let rendered = render();
    if std::env::var_os("UPDATE_DOCS").is_some() {
        std::fs::write(FILE, rendered).expect("the package's folder is writable");
        return;
    }
    let committed = std::fs::read_to_string(FILE).unwrap_or_default();
    assert_eq!(committed, rendered, "run the test with UPDATE_DOCS=1");
}

fn render() -> String {
    let mut program = corella::command_line();
    program.build();
    let batch = program.find_subcommand("batch");
    let options = batch.expect("it is a command").get_arguments();
    let keywords = corella::keywords();
    let mut text = HEAD.to_owned();
    for option in options {
        let name = option.get_long().unwrap_or_default().replace('-', "_");
        let is_keyword = keywords.iter().any(|(keyword, _)| *keyword == name);
        // The package has an argument `model`, and `enable_prefix_caching=False` instead of the second.
        if is_keyword && !["model", "no_enable_prefix_caching"].contains(&&*name) {
            text += &row(&name, option);
        }
    }
    text
}

/// Returns the row of an option, in lines as `ruff format` makes them.
fn row(name: &str, option: &Arg) -> String {
    let possible = option.get_possible_values();
    let values: Vec<String> = { possible.iter() }
        .filter(|value| !value.is_hide_set())
        .flat_map(|value| value.get_name_and_aliases())
        .map(|value| format!("\"{value}\""))
        .collect();
    if !option.get_action().takes_values() {
        return format!("    {name}: bool | None\n");
    }
    if !values.is_empty() {
        let values = values.join(", ") + ", None";
        return match format!("    {name}: Literal[{values}]\n") {
            long if long.trim_end().len() > 120 => {
                format!("    {name}: Literal[\n        {values}\n    ]\n")
            }
            short => short,
        };
    }
    let of_value = option.get_value_names().unwrap_or_default();
    let kinds = of_value[0].split('|').map(type_of);
    let mut kinds: Vec<String> = kinds.collect();
    if matches!(option.get_action(), ArgAction::Append) {
        kinds.push(format!("Sequence[{}]", kinds[0]));
    }
    format!("    {name}: {} | None\n", kinds.join(" | "))
}

/// Returns the type of a value with this name in the help.
fn type_of(value_name: &str) -> String {
    let known = match value_name {
        "N" | "SEED" => "int",
        "SIZE" | "TOKENS" => "int | str",
        "SHARE" | "US" => "float",
        "JSON" => "Mapping[str, object] | str",
        "DIR[,SIZE]" | "FILE" | "FOLDER" | "MODEL" => "str | PathLike[str]",
        "NAME" | "REVISION" | "TEXT" => "str",
        word => {
            assert!(
                word.chars().all(|c| c.is_ascii_lowercase()),
                "{word} has no type: add it here"
            );
            return format!("Literal[\"{word}\"]");
        }
    };
    known.to_owned()
}
