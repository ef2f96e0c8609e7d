//! The book's command-line reference, rendered from the arguments themselves.

use std::collections::HashMap;
use std::fmt::Write;
use std::path::Path;

use clap::{Arg, Command};

const PAGE: &str = concat!(
    env!("CARGO_MANIFEST_DIR"),
    "/../../docs/src/reference/command-line.md"
);

const HEAD: &str = "\
<!-- Written by `UPDATE_DOCS=1 cargo test -p corella --bin corella command_line_reference`. -->

# Command line

Every command takes `-h` for a short help, `--help` for the long one and `-V` or `--version` for the version.
Options of `serve`, `chat`, `run`, `batch` and `generate` are also read from [variables](../configuration-file.md#environment-variables)
such as `CORELLA_PORT`. Flags of other servers have [a page of their own](other-servers.md).
";

#[test]
fn the_page_in_the_book_is_current() {
    let rendered = render();
    if std::env::var_os("UPDATE_DOCS").is_some() {
        std::fs::write(PAGE, rendered).expect("the book's folder is writable");
        return;
    }
    let committed = std::fs::read_to_string(Path::new(PAGE)).unwrap_or_default();
    let difference = rendered
        .lines()
        .zip(committed.lines())
        .enumerate()
        .find(|(_, (rendered, committed))| rendered != committed);
    assert!(
        rendered == committed,
        "docs/src/reference/command-line.md is stale (first different line: {difference:?}); update it \
         with `UPDATE_DOCS=1 cargo test -p corella --bin corella command_line_reference`"
    );
}

fn render() -> String {
    let mut cli = corella::command_line();
    cli.build();
    let mut page = Page {
        text: HEAD.to_owned(),
        first: HashMap::new(),
    };
    for command in cli.get_subcommands() {
        page.command(command, "corella");
    }
    page.text
}

struct Page {
    text: String,
    /// Maps the rendered text of an option to the first command that has it.
    first: HashMap<String, String>,
}

/// An option's name and its rendered text.
type Item = (String, String);

impl Page {
    fn command(&mut self, command: &Command, parent: &str) {
        if command.get_name() == "help" {
            return;
        }
        let name = format!("{parent} {}", command.get_name());
        let about = command.get_about().map(ToString::to_string);
        let about = about.unwrap_or_default();
        self.line(format_args!("\n## {name}\n\n{about}."));
        if command.has_subcommands() {
            for subcommand in command.get_subcommands() {
                self.command(subcommand, &name);
            }
            return;
        }
        let usage = command.clone().render_usage().to_string();
        let usage = usage.trim_start_matches("Usage: ");
        self.line(format_args!("\n```text\n{usage}\n```"));
        for (heading, items) in groups(command) {
            self.line(format_args!("\n**{heading}**\n"));
            self.group(&name, items);
        }
    }

    /// Describes each option at the first command that has it. Other commands link to that command.
    fn group(&mut self, command: &str, items: Vec<Item>) {
        let mut known: Vec<(String, Vec<String>)> = Vec::new();
        for (name, text) in items {
            let Some(first) = self.first.get(&text).cloned() else {
                self.text += &text;
                self.first.insert(text, command.to_owned());
                continue;
            };
            match known.iter_mut().find(|(command, _)| *command == first) {
                Some((_, names)) => names.push(name),
                None => known.push((first, vec![name])),
            }
        }
        for (first, names) in known {
            let anchor = first.replace(' ', "-");
            let names = names.join(", ");
            self.line(format_args!("* {names}: as for [`{first}`](#{anchor})."));
        }
    }

    fn line(&mut self, line: std::fmt::Arguments<'_>) {
        writeln!(self.text, "{line}").expect("a string takes all text");
    }
}

/// Returns the headings of a command, in the order of their first options, each with its rendered
/// options.
fn groups(command: &Command) -> Vec<(String, Vec<Item>)> {
    let mut groups: Vec<(String, Vec<Item>)> = Vec::new();
    let options = command.get_arguments().filter(|option| {
        !option.is_hide_set() && !matches!(option.get_id().as_str(), "help" | "version")
    });
    for option in options {
        let heading = match option.get_help_heading() {
            _ if option.is_positional() => "Arguments",
            Some(heading) => heading,
            None => "Options",
        };
        let item = item(option);
        match groups.iter_mut().find(|(known, _)| known == heading) {
            Some((_, items)) => items.push(item),
            None => groups.push((heading.to_owned(), vec![item])),
        }
    }
    groups.sort_by_key(|(heading, _)| heading != "Arguments");
    groups
}

fn item(option: &Arg) -> Item {
    let mut names: Vec<String> = Vec::new();
    names.extend(option.get_short().map(|short| format!("`-{short}`")));
    let value = match option.get_action().takes_values() {
        true => { option.get_value_names().unwrap_or_default() }
            .iter()
            .map(|name| format!(" <{name}>"))
            .collect(),
        false => String::new(),
    };
    match option.get_long() {
        Some(long) => names.push(format!("`--{long}{value}`")),
        None => names.push(format!("`{}`", value.trim())),
    }
    let name = match option.get_long() {
        Some(long) => format!("`--{long}`"),
        None => names[0].clone(),
    };
    let aliases = option.get_visible_aliases().unwrap_or_default();
    names.extend(aliases.iter().map(|alias| format!("`--{alias}`")));
    let help = option.get_long_help().or(option.get_help());
    let help = help.map(ToString::to_string).unwrap_or_default();
    let help = escape(&help.replace('\n', " "));
    let mut text = format!("* {}: {}.", names.join(", "), help.trim_end_matches('.'));
    let defaults = option.get_default_values();
    if !defaults.is_empty() && option.get_action().takes_values() {
        let defaults: Vec<_> = defaults
            .iter()
            .map(|value| value.to_string_lossy())
            .collect();
        let _ = write!(text, " Default: `{}`.", defaults.join(","));
    }
    if let Some(variable) = option.get_env() {
        let _ = write!(text, " Also read from `{}`.", variable.to_string_lossy());
    }
    text.push('\n');
    let is_switch = !option.get_action().takes_values();
    for value in option.get_possible_values() {
        if is_switch || value.is_hide_set() {
            continue;
        }
        let _ = match value.get_help() {
            Some(help) => writeln!(
                text,
                "  * `{}`: {}.",
                value.get_name(),
                escape(&help.to_string())
            ),
            None => writeln!(text, "  * `{}`", value.get_name()),
        };
    }
    (name, text)
}

/// Escapes the characters that Markdown would take for markup.
fn escape(text: &str) -> String {
    text.replace('*', "\\*").replace('<', "&lt;")
}
