//! Finds the model that a command names. An existing path is used as it is; otherwise a well-formed name is a model of
//! the hub, cached or fetched.

use std::path::{Path, PathBuf};

use corella_hub::{Fetched, Hub, HubError, ModelName};

use crate::Error;
use crate::arguments::args::{
    BenchCommand, Command, InspectArgs, LlmArgs, ModelArgs, SpeculateArg, SpeculationArgs,
};
use crate::arguments::config;
use crate::built_in;
use crate::input::nearest_name::nearest_name;
use crate::terminal::fetch_display::FetchDisplay;

/// Replaces names by paths in the arguments of a command.
pub fn resolve(command: &mut Command) -> Result<(), Error> {
    match command {
        Command::Serve(args) => resolve_with_draft(&mut args.model, &mut args.speculation),
        Command::Generate(args) => resolve_with_draft(&mut args.model, &mut args.own.speculation),
        // The remote server knows the name.
        Command::Chat(args) if args.url.is_some() => Ok(()),
        Command::Chat(args) => resolve_with_draft(&mut args.model, &mut args.own.speculation),
        Command::Run(args) => resolve_with_draft(&mut args.model, &mut args.own.speculation),
        Command::Batch(args) => resolve_with_draft(&mut args.model, &mut args.speculation),
        Command::Bench(command) => match command.as_mut() {
            BenchCommand::Offline(args) => {
                resolve_with_draft(&mut args.model, &mut args.speculation)
            }
            BenchCommand::Perplexity(args) => resolve_model(&mut args.model),
            BenchCommand::Serve(_)
            | BenchCommand::Compare(_)
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

/// Replaces names by paths in the options of a model loaded by keyword.
pub fn resolve_llm(args: &mut LlmArgs) -> Result<(), Error> {
    resolve_with_draft(&mut args.model, &mut args.speculation)
}

fn resolve_with_draft(
    model: &mut ModelArgs,
    speculation: &mut SpeculationArgs,
) -> Result<(), Error> {
    resolve_draft(speculation, model.offline)?;
    resolve_model(model)
}

fn resolve_model(args: &mut ModelArgs) -> Result<(), Error> {
    forget_built_in(&mut args.model);
    forget_built_in(&mut args.model_option);
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

/// The built-in model needs no name, and its name also means it.
fn forget_built_in(given: &mut Option<PathBuf>) {
    let is_built_in = |path: &PathBuf| path.as_os_str() == built_in::NAME && !path.exists();
    given.take_if(|path| is_built_in(path));
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
    forget_built_in(&mut args.model);
    if let Some(given) = &mut args.model
        && let Some((path, name)) = resolve_path(given, args.offline)?
    {
        *given = path;
        args.name = Some(name);
    }
    Ok(())
}

fn resolve_draft(args: &mut SpeculationArgs, is_offline: bool) -> Result<(), Error> {
    // Otherwise it is refused, and must not be fetched before.
    if args.speculate == SpeculateArg::Draft
        && let Some(given) = &mut args.draft_model
        && let Some((path, _)) = resolve_path(given, is_offline)?
    {
        *given = path;
    }
    Ok(())
}

/// Returns the path of a model of the hub, and its name without a revision; `None` if the text is not a name.
fn resolve_path(given: &Path, is_offline: bool) -> Result<Option<(PathBuf, String)>, Error> {
    if given.exists() {
        return Ok(None);
    }
    let name = match given.to_str().map(ModelName::parse) {
        Some(Ok(name)) => name,
        Some(Err(HubError::Tag(reason))) => return Err(Error::Config(reason)),
        Some(Err(_)) | None => return unknown_name(given).map_or(Ok(None), Err),
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
        Err(error) => Err(Error::Config(not_found(given, &name, &error))),
    }
}

/// Refuses a single word, which may be meant as a path or as a name of another library.
fn unknown_name(given: &Path) -> Option<Error> {
    let word = given.to_str()?;
    let is_word = |c: char| c.is_ascii_alphanumeric() || "-_.:".contains(c);
    if !word.chars().all(is_word) || word.ends_with(".gguf") {
        return None;
    }
    let near = nearest_name(word, corella_hub::library_names());
    let near = near.map_or_else(String::new, |near| format!("; did you mean {near}?"));
    Some(Error::Config(format!(
        "{word} is no folder or file, and no name that Corella knows: name a model of the hub with its owner, as \
         OWNER/MODEL{near}"
    )))
}

/// Explains why a name led to no model. Only a reached hub can say that the model is unknown.
fn not_found(given: &Path, name: &ModelName, error: &HubError) -> String {
    let mut given = given.display().to_string();
    let name = name.to_string();
    if name != given {
        given += &format!(", which is {name} on the hub,");
    }
    match error {
        HubError::Unreachable(reason) => format!(
            "{given} is not a local file or folder, and the hub cannot be reached to fetch it: {reason}; \
             check the network, or set HF_ENDPOINT to a mirror"
        ),
        _ => format!(
            "{given} is not a local file or folder, and not found as a model of the hub: {error}"
        ),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_built_in_model_has_a_name() {
        for (given, left) in [
            (Some("corella-nano"), None),
            (Some("other"), Some("other")),
            (None, None),
        ] {
            let mut path = given.map(PathBuf::from);
            forget_built_in(&mut path);
            assert_eq!(path, left.map(PathBuf::from));
        }
    }

    #[test]
    fn a_known_name_with_an_unknown_tag_is_no_path() {
        let told = resolve_path(Path::new("qwen3:9b"), true).map_err(|error| error.to_string());
        let told = told.expect_err("there is no such tag");
        assert!(told.contains("qwen3 has the tags 8b, 0.6b"), "{told}");
        let told = resolve_path(Path::new("lama3.2"), true).map_err(|error| error.to_string());
        let told = told.expect_err("there is no such name");
        assert!(
            told.contains("OWNER/MODEL; did you mean llama3.2?"),
            "{told}"
        );
        for path in ["./no-path", "no/such/path", "no.gguf", "no path"] {
            assert!(
                matches!(resolve_path(Path::new(path), true), Ok(None)),
                "{path}"
            );
        }
    }

    #[test]
    fn a_hub_that_was_not_reached_says_nothing_of_a_model() {
        let name = ModelName::parse("qwen3:0.6b").unwrap();
        let unreachable = HubError::Unreachable("https://hub: no route".to_owned());
        let told = not_found(Path::new("qwen3:0.6b"), &name, &unreachable);
        assert!(
            told.contains("cannot be reached")
                && told.contains("unsloth/Qwen3-0.6B-GGUF on the hub"),
            "{told}"
        );
        assert!(!told.contains("not found"), "{told}");
        let refused = HubError::Refused("no such model".to_owned());
        let told = not_found(Path::new("unsloth/Qwen3-0.6B-GGUF"), &name, &refused);
        assert!(
            told.ends_with("as a model of the hub: no such model"),
            "{told}"
        );
    }
}
