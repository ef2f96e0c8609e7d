//! The program's documentation for shells and `man`.

use std::fs;
use std::io::{self, Write};
use std::path::Path;

use clap::{Command, CommandFactory};

use crate::Error;
use crate::arguments::args::{Cli, CompletionsArgs, ManArgs};

/// Prints a shell's completion script for commands and options.
pub fn completions(args: &CompletionsArgs) {
    let mut script = Vec::new();
    clap_complete::generate(args.shell, &mut Cli::command(), "corella", &mut script);
    print(&script);
}

/// Prints the page of a command, or writes the pages of all commands.
pub fn man(args: &ManArgs) -> Result<(), Error> {
    let mut program = Cli::command();
    program.build();
    if let Some(folder) = &args.output {
        fs::create_dir_all(folder)
            .and_then(|()| write_pages(&program, "corella", folder))
            .map_err(|error| Error::Io(format!("cannot write {}", folder.display()), error))?;
        return Ok(());
    }
    let mut command = &program;
    let mut name = "corella".to_owned();
    for word in &args.command {
        command = command.find_subcommand(word).ok_or_else(|| {
            let known = command.get_subcommands().map(Command::get_name);
            let known: Vec<_> = known.collect();
            Error::Config(match known.is_empty() {
                true => format!("{name} has no commands of its own, such as {word}"),
                false => format!(
                    "{name} has no command {word}; there are {}",
                    known.join(", ")
                ),
            })
        })?;
        name = format!("{name}-{word}");
    }
    let page = page(command, &name);
    print(&page.map_err(|error| Error::Io("making the page".to_owned(), error))?);
    Ok(())
}

fn write_pages(command: &Command, name: &str, folder: &Path) -> io::Result<()> {
    fs::write(folder.join(format!("{name}.1")), page(command, name)?)?;
    for subcommand in command.get_subcommands() {
        if subcommand.get_name() != "help" {
            write_pages(
                subcommand,
                &format!("{name}-{}", subcommand.get_name()),
                folder,
            )?;
        }
    }
    Ok(())
}

fn page(command: &Command, name: &str) -> io::Result<Vec<u8>> {
    let mut page = Vec::new();
    let title = name.to_uppercase();
    let man = clap_mangen::Man::new(command.clone()).title(title);
    man.render(&mut page)?;
    Ok(page)
}

fn print(bytes: &[u8]) {
    // A closed pipe is no error: its reader has read enough.
    let _ = io::stdout().write_all(bytes);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_option_is_in_the_page_of_its_command() {
        let mut program = Cli::command();
        program.build();
        let serve = program.find_subcommand("serve").unwrap();
        let page = String::from_utf8(page(serve, "corella-serve").unwrap()).unwrap();
        for option in serve.get_arguments().filter(|option| !option.is_hide_set()) {
            if let Some(long) = option.get_long() {
                let escaped = long.replace('-', "\\-");
                assert!(page.contains(&format!("\\-\\-{escaped}")), "{long}");
            }
        }
        assert!(page.contains(".TH CORELLA-SERVE 1") || page.contains(".TH CORELLA\\-SERVE 1"));
    }

    #[test]
    fn every_shell_completes_every_command() {
        use clap::ValueEnum;
        for shell in clap_complete::Shell::value_variants() {
            let mut script = Vec::new();
            clap_complete::generate(*shell, &mut Cli::command(), "corella", &mut script);
            let script = String::from_utf8(script).unwrap();
            for command in Cli::command().get_subcommands() {
                assert!(
                    script.contains(command.get_name()),
                    "{shell} {}",
                    command.get_name()
                );
            }
            assert!(script.contains("max-num-seqs"), "{shell}");
        }
    }
}
