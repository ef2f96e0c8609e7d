//! Finds the model that a command names: a path that exists is that path, and what else has the form
//! of a name is a model of the hub, from its cache or fetched.

use std::path::{Path, PathBuf};

use corella_hub::{Fetched, Hub, ModelName};

use crate::Error;
use crate::args::{BenchCommand, Command, InspectArgs, LlmArgs, ModelArgs, SpeculationArgs};
use crate::config;
use crate::fetch_display::FetchDisplay;

/// Replaces names by paths in the arguments of a command.
pub fn resolve(command: &mut Command) -> Result<(), Error> {
    match command {
        Command::Serve(args) => {
            resolve_draft(&mut args.speculation, args.model.offline)?;
            resolve_model(&mut args.model)
        }
        Command::Generate(args) => {
            resolve_draft(&mut args.speculation, args.model.offline)?;
            resolve_model(&mut args.model)
        }
        // The server knows the name.
        Command::Chat(args) if args.url.is_some() => Ok(()),
        Command::Chat(args) => {
            resolve_draft(&mut args.speculation, args.model.offline)?;
            resolve_model(&mut args.model)
        }
        Command::Batch(args) => {
            resolve_draft(&mut args.speculation, args.model.offline)?;
            resolve_model(&mut args.model)
        }
        Command::Bench(command) => match command.as_mut() {
            BenchCommand::Offline(args) => {
                resolve_draft(&mut args.speculation, args.model.offline)?;
                resolve_model(&mut args.model)
            }
            BenchCommand::Perplexity(args) => resolve_model(&mut args.model),
            BenchCommand::Serve(_)
            | BenchCommand::Kernels(_)
            | BenchCommand::Scheduler(_)
            | BenchCommand::Transfer(_)
            | BenchCommand::Cache(_)
            | BenchCommand::Admission(_) => Ok(()),
        },
        Command::Inspect(args) => resolve_inspected(args),
        Command::Quantize(args) => {
            if let Some((path, _)) = resolve_path(&args.model, args.offline)? {
                args.model = path;
            }
            Ok(())
        }
        Command::Pull(_)
        | Command::List
        | Command::Rm(_)
        | Command::Completions(_)
        | Command::Man(_) => Ok(()),
    }
}

/// Replaces names by paths in the options of a model that is loaded by keyword.
pub fn resolve_llm(args: &mut LlmArgs) -> Result<(), Error> {
    resolve_draft(&mut args.speculation, args.model.offline)?;
    resolve_model(&mut args.model)
}

fn resolve_model(args: &mut ModelArgs) -> Result<(), Error> {
    let given = args.model.as_mut().or(args.model_option.as_mut());
    if let Some(revision) = &args.revision {
        check_revision(given.as_deref().map(PathBuf::as_path), revision)?;
    }
    if let Some(given) = given {
        let mut named = given.clone();
        if let Some(revision) = &args.revision {
            named.as_mut_os_string().push(format!("@{revision}"));
        }
        if let Some((path, name)) = resolve_path(&named, args.offline)? {
            *given = path;
            args.name = Some(name);
        }
    }
    Ok(())
}

/// Refuses `--revision` for models without revisions, and beside another revision in the name.
fn check_revision(given: Option<&Path>, revision: &str) -> Result<(), Error> {
    let Some(given) = given else {
        return Err(Error::Config(format!(
            "--revision {revision} needs a model of the hub, and no model is named"
        )));
    };
    let name = given.to_str().and_then(|text| ModelName::parse(text).ok());
    let name = name.filter(|_| !given.exists());
    match name {
        None => Err(Error::Config(format!(
            "--revision {revision} needs a model of the hub, and {} is a folder or file",
            given.display()
        ))),
        Some(name) if name.revision.is_some() => Err(Error::Config(format!(
            "--revision {revision} is a second revision beside that in {}",
            given.display()
        ))),
        Some(_) => Ok(()),
    }
}

fn resolve_inspected(args: &mut InspectArgs) -> Result<(), Error> {
    if let Some(given) = &mut args.model
        && let Some((path, name)) = resolve_path(given, args.offline)?
    {
        *given = path;
        args.name = Some(name);
    }
    Ok(())
}

fn resolve_draft(args: &mut SpeculationArgs, is_offline: bool) -> Result<(), Error> {
    if let Some(given) = &mut args.draft_model
        && let Some((path, _)) = resolve_path(given, is_offline)?
    {
        *given = path;
    }
    Ok(())
}

/// The path of a model of the hub, and its name without a revision; `None` for what is no name.
fn resolve_path(given: &Path, is_offline: bool) -> Result<Option<(PathBuf, String)>, Error> {
    if given.exists() {
        return Ok(None);
    }
    let Some(name) = given.to_str().and_then(|text| ModelName::parse(text).ok()) else {
        return Ok(None);
    };
    let display = FetchDisplay::new();
    let hub = Hub::new(config::hub(is_offline));
    let found = hub.resolve(&name, &|event| display.handle(event));
    drop(display);
    match found {
        Ok(Fetched { path, .. }) => {
            let name = ModelName {
                revision: None,
                ..name
            };
            Ok(Some((path, name.to_string())))
        }
        Err(error) => Err(Error::Config(format!(
            "{} is not a local file or folder, and not found as a model of the hub: {error}",
            given.display()
        ))),
    }
}
