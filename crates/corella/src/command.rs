//! The `corella` command, from its typed words to the end of the process.

pub(crate) mod batch;
pub(crate) mod bench;
pub(crate) mod chat;
pub(crate) mod generate;
pub(crate) mod hub_command;
pub(crate) mod inspect_command;
pub(crate) mod keyword_options;
pub(crate) mod limit_share;
pub(crate) mod loaded_models;
pub(crate) mod manual;
pub(crate) mod model_lookup;
pub(crate) mod profile_table;
pub(crate) mod quantize_command;

use std::error::Error;
use std::ffi::OsString;
use std::io::{self, IsTerminal};

use clap::{CommandFactory, Parser};
use corella_cluster::transport::exit;

use crate::arguments::args::{BenchCommand, Cli, Command, LogFormatArg};
use crate::arguments::config_file::models_file;
use crate::arguments::{config, config_file, log_format};
use crate::foreign::foreign_flag;
use crate::foreign::foreign_flag::Translation;
use crate::serve;
use crate::terminal::log_queue;

/// The command line, for its documentation.
pub fn command_line() -> clap::Command {
    Cli::command()
}

/// Runs the command in `words`, with the program's name first, and ends the process.
pub fn run_command(words: Vec<OsString>) -> ! {
    let mut program = Cli::command();
    program.build();
    let Translation {
        words,
        mut warnings,
        notes,
    } = match foreign_flag::translate(&program, words) {
        Ok(translation) => translation,
        Err(reasons) => refuse(&reasons.join("\nerror: ")),
    };
    let arguments = match config_file::expand(&Cli::command(), words, std::env::vars_os()) {
        Ok(arguments) => arguments,
        Err(reason) => refuse(&reason),
    };
    warnings.extend(arguments.warnings.iter().cloned());
    let mut cli = match Cli::try_parse_from(&arguments.words) {
        Ok(cli) => cli,
        Err(error) => match arguments.explain(&error) {
            Some(reason) => refuse(&reason),
            None => error.exit(),
        },
    };
    if let Command::Serve(args) = &mut cli.command
        && let Some(path) = &args.models.models_file
    {
        let listed = models_file::read(&Cli::command(), &arguments.words, path, &mut warnings);
        args.models.listed = listed.unwrap_or_else(|reason| refuse(&reason));
    }
    log_format::start(match &cli.command {
        Command::Serve(args) => args.server.log_format,
        _ => LogFormatArg::Text,
    });
    for note in notes {
        tracing::info!("{note}");
    }
    for warning in warnings {
        tracing::warn!("{warning}");
    }
    match run(cli.command) {
        Ok(status) => end(status),
        Err(error) => refuse(&arguments.locate(one_line(&*error))),
    }
}

fn refuse(reason: &str) -> ! {
    log_queue::print_line(&format!("error: {reason}"));
    end(2)
}

fn end(status: i32) -> ! {
    log_queue::flush();
    exit(status)
}

/// Returns the exit status.
fn run(mut command: Command) -> Result<i32, Box<dyn Error>> {
    model_lookup::resolve(&mut command)?;
    carry_out(command)
}

fn carry_out(command: Command) -> Result<i32, Box<dyn Error>> {
    match command {
        Command::Run(args) => return carry_out(args.into_command(io::stdin().is_terminal())),
        Command::Serve(args) => serve::run(config::serve(*args)?)?,
        Command::Generate(args) => generate::run(config::generate(*args)?)?,
        Command::Chat(args) => chat::run(config::chat(*args)?)?,
        Command::Batch(args) => return Ok(batch::run(config::batch(*args)?)?),
        Command::Inspect(args) => inspect_command::run(config::inspect(args)?)?,
        Command::Quantize(args) => quantize_command::run(config::quantize(args)?)?,
        Command::Pull(args) => hub_command::pull(config::pull(&args), &args.models)?,
        Command::List => hub_command::list(config::hub(true), &config::ollama_store())?,
        Command::Rm(args) => {
            hub_command::remove(config::hub(true), &config::ollama_store(), &args.models)?
        }
        Command::Ps(args) => loaded_models::ps(&args)?,
        Command::Stop(args) => loaded_models::stop(&args)?,
        Command::Completions(args) => manual::completions(&args),
        Command::Man(args) => manual::man(&args)?,
        Command::Bench(command) => run_benchmark(*command)?,
    }
    Ok(0)
}

fn run_benchmark(command: BenchCommand) -> Result<(), Box<dyn Error>> {
    match command {
        BenchCommand::Serve(args) => bench::serve(config::bench_serve(args)?),
        BenchCommand::Offline(args) => bench::offline(config::bench_offline(*args)?),
        BenchCommand::Compare(args) => bench::compare(args),
        BenchCommand::Kernels(args) => bench::kernels(config::bench_kernels(&args)?),
        BenchCommand::Perplexity(args) => bench::perplexity(config::bench_perplexity(args)?),
        BenchCommand::Scheduler(args) => bench::scheduler(args),
        BenchCommand::Transfer(args) => bench::transfer(args),
        BenchCommand::Cache(args) => bench::cache(args),
        BenchCommand::Admission(args) => bench::admission(config::bench_admission(args)?),
    }
}

fn one_line(error: &dyn Error) -> String {
    let text = error.to_string();
    text.split('\n')
        .map(str::trim)
        .collect::<Vec<_>>()
        .join(" ")
}
