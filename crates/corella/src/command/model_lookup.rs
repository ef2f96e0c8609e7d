//! Finds the model that a command names. An existing path is used as it is; otherwise a well-formed name is a model of
//! the hub, cached or fetched.

use std::path::{Path, PathBuf};

use corella_hub::{Fetched, Hub, HubError, ModelName, OllamaModel};

use crate::arguments::args::{
    BenchCommand, Command, InspectArgs, ListedModel, LlmArgs, ModelArgs, ModelsArgs, ServeArgs,
    SpeculateArg, SpeculationArgs,
};
use crate::arguments::config;
use crate::built_in;
use crate::input::nearest_name::nearest_name;
use crate::model::model_file::open;
use crate::terminal::fetch_display::FetchDisplay;
use crate::{Error, ModelSource};

/// Replaces names by paths in the arguments of a command.
pub fn resolve(command: &mut Command) -> Result<(), Error> {
    match command {
        Command::Serve(args) => {
            let given = args
                .model
                .model
                .as_ref()
                .or(args.model.model_option.as_ref());
            if given.is_some_and(|given| is_built_in(given)) && args.models.has_other_places() {
                args.models.more_sources.push(ModelSource::BuiltIn);
            }
            resolve_without_system(&mut args.model, &mut args.engine.speculation)?;
            resolve_more(&mut args.models, args.model.offline)?;
            args.models.listed.iter_mut().try_for_each(resolve_listed)
        }
        Command::Generate(args) => {
            resolve_with_system(&mut args.model, &mut args.own.speculation, &mut args.system)
        }
        // The remote server knows the name.
        Command::Chat(args) if args.url.is_some() => Ok(()),
        Command::Chat(args) => {
            resolve_with_system(&mut args.model, &mut args.own.speculation, &mut args.system)
        }
        Command::Run(args) => {
            resolve_with_system(&mut args.model, &mut args.own.speculation, &mut args.system)
        }
        Command::Batch(args) => resolve_llm(&mut args.llm),
        Command::Bench(command) => match command.as_mut() {
            BenchCommand::Offline(args) => {
                resolve_with_draft(&mut args.model, &mut args.engine.speculation).map(drop)
            }
            BenchCommand::Perplexity(args) => resolve_model(&mut args.model).map(drop),
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
            if is_built_in(&args.model) {
                return Err(Error::Config(format!(
                    "{} is a part of the program, without a folder to quantise: --dtype int8 or int4 quantises it as it \
                     is loaded",
                    built_in::NAME
                )));
            }
            if let Some(found) = resolve_path(&args.model, args.offline)? {
                args.model = found.path;
            }
            Ok(())
        }
        Command::Pull(_)
        | Command::List
        | Command::Rm(_)
        | Command::Ps(_)
        | Command::Stop(_)
        | Command::Completions(_)
        | Command::Man(_) => Ok(()),
    }
}

/// Replaces names by paths in the options of a model loaded by keyword.
pub fn resolve_llm(args: &mut LlmArgs) -> Result<(), Error> {
    resolve_without_system(&mut args.model, &mut args.engine.speculation)
}

/// Finds the further models of a server.
fn resolve_more(args: &mut ModelsArgs, is_offline: bool) -> Result<(), Error> {
    for given in &args.more_models {
        let source = match is_built_in(given) {
            true => ModelSource::BuiltIn,
            false => match resolve_path(given, is_offline)? {
                None => ModelSource::Path(given.clone()),
                Some(Found { path, name, system }) => {
                    if system.is_some() {
                        warn_of_system(&name);
                    }
                    ModelSource::Named { path, name }
                }
            },
        };
        args.more_sources.push(source);
    }
    Ok(())
}

/// Finds a model of the models file, which has its name from there.
fn resolve_listed(listed: &mut ListedModel) -> Result<(), Error> {
    let ServeArgs { model, engine, .. } = &mut *listed.args;
    let found = resolve_without_system(model, &mut engine.speculation);
    found
        .and_then(|()| match &model.model {
            Some(path) if !path.exists() => open(&ModelSource::Path(path.clone())).map(drop),
            _ => Ok(()),
        })
        .map_err(|error| Error::Config(format!("{}: {error}", listed.model_place)))?;
    model.name = model.model.as_ref().map(|_| listed.name.clone());
    Ok(())
}

/// Replaces names by paths for commands whose requests have their own system messages.
fn resolve_without_system(
    model: &mut ModelArgs,
    speculation: &mut SpeculationArgs,
) -> Result<(), Error> {
    if resolve_with_draft(model, speculation)?.is_some() {
        warn_of_system(model.name.as_deref().unwrap_or_default());
    }
    Ok(())
}

fn warn_of_system(name: &str) {
    tracing::warn!(
        "the SYSTEM of {name}'s Modelfile is left out: it goes with each request, as a system message"
    );
}

/// Replaces names by paths. If `system` is `None`, it becomes the model's own system message.
fn resolve_with_system(
    model: &mut ModelArgs,
    speculation: &mut SpeculationArgs,
    system: &mut Option<String>,
) -> Result<(), Error> {
    let own = resolve_with_draft(model, speculation)?;
    *system = system.take().or(own);
    Ok(())
}

/// Replaces the names of the model and of its draft model by paths. Returns the model's own system message, if any.
fn resolve_with_draft(
    model: &mut ModelArgs,
    speculation: &mut SpeculationArgs,
) -> Result<Option<String>, Error> {
    resolve_draft(speculation, model.offline)?;
    resolve_model(model)
}

fn resolve_model(args: &mut ModelArgs) -> Result<Option<String>, Error> {
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
        if let Some(found) = resolve_path(&named, args.offline)? {
            *given = found.path;
            args.name = Some(found.name);
            return Ok(found.system);
        }
    }
    Ok(None)
}

/// Removes the name of the built-in model, which commands load when no model is named.
fn forget_built_in(given: &mut Option<PathBuf>) {
    given.take_if(|path| is_built_in(path));
}

/// Whether `given` names the built-in model. As in Ollama's names, the tag may be `latest`.
fn is_built_in(given: &Path) -> bool {
    let name = given.to_str().unwrap_or_default();
    name.strip_suffix(":latest").unwrap_or(name) == built_in::NAME && !given.exists()
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
        && let Some(found) = resolve_path(given, args.offline)?
    {
        *given = found.path;
        args.name = Some(found.name);
    }
    Ok(())
}

fn resolve_draft(args: &mut SpeculationArgs, is_offline: bool) -> Result<(), Error> {
    // Without `--speculate draft`, `--draft-model` is refused later, so the draft model must not be fetched here.
    if args.speculate == SpeculateArg::Draft
        && let Some(given) = &mut args.draft_model
    {
        if is_built_in(given) {
            return Err(Error::Config(format!(
                "--draft-model {} is a part of the program, without files to load beside a model: name a folder, a GGUF \
                 file or a model of the hub",
                given.display()
            )));
        }
        if let Some(found) = resolve_path(given, is_offline)? {
            *given = found.path;
        }
    }
    Ok(())
}

/// A model of the hub or of Ollama.
#[derive(Debug)]
struct Found {
    path: PathBuf,
    /// The name without a revision.
    name: String,
    /// The model's own system message, which only Ollama's may have.
    system: Option<String>,
}

/// Returns the model that a text names; `None` if the text is not a name.
fn resolve_path(given: &Path, is_offline: bool) -> Result<Option<Found>, Error> {
    if given.exists() {
        return Ok(None);
    }
    let hub = Hub::new(config::hub(is_offline));
    let text = given.to_str();
    let name = text.map(ModelName::parse);
    let is_cached = matches!(&name, Some(Ok(name)) if matches!(hub.find(name), Ok(Some(_))));
    let of_ollama = text.filter(|_| !is_cached);
    let ollama = config::ollama_store();
    if let Some(found) = of_ollama.and_then(|text| ollama.find(text)) {
        let OllamaModel {
            name, path, system, ..
        } = found;
        let name = name.strip_suffix(":latest").unwrap_or(&name).to_owned();
        return Ok(Some(Found { path, name, system }));
    }
    let refusal = of_ollama.and_then(|text| ollama.refusal(text));
    let name = match (name, &refusal) {
        (Some(Ok(name)), _) => name,
        (Some(Err(_)), Some(reason)) => return Err(Error::Config(reason.clone())),
        (Some(Err(HubError::Tag(reason))), None) => return Err(Error::Config(reason)),
        (Some(Err(_)), None) | (None, _) => return unknown_name(given).map_or(Ok(None), Err),
    };
    let display = FetchDisplay::new();
    let found = hub.resolve(&name, &|event| display.handle(event));
    drop(display);
    match found {
        Ok(Fetched { path, .. }) => {
            let name = ModelName {
                revision: None,
                ..name
            };
            Ok(Some(Found {
                path,
                name: name.to_string(),
                system: None,
            }))
        }
        Err(error) => {
            let told = not_found(given, &name, &error);
            Err(Error::Config(match refusal {
                Some(reason) => format!("{told}; {reason}"),
                None => told,
            }))
        }
    }
}

/// Families of Ollama's library whose models read images.
const SEEING: [&str; 6] = [
    "bakllava",
    "llama3.2-vision",
    "llava",
    "llava-llama3",
    "minicpm-v",
    "moondream",
];

/// Refuses a single word, which may be meant as a path or as a name of another library.
fn unknown_name(given: &Path) -> Option<Error> {
    let word = given.to_str()?;
    let is_word = |c: char| c.is_ascii_alphanumeric() || "-_.:".contains(c);
    if !word.chars().all(is_word) || word.ends_with(".gguf") {
        return None;
    }
    let family = word.split(':').next().unwrap_or_default();
    if SEEING.contains(&family) {
        return Some(Error::Config(format!(
            "{word} is a model that sees images, and Corella serves text only: name a model of text, such as llama3.2"
        )));
    }
    let known = [built_in::NAME]
        .into_iter()
        .chain(corella_hub::library_names());
    let near = nearest_name(word, known);
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
            (Some("corella-nano:latest"), None),
            (Some("corella-nano:4m"), Some("corella-nano:4m")),
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
        for (typed, words) in [
            ("corella-nanoo", "did you mean corella-nano?"),
            ("Corella-Nano", "did you mean corella-nano?"),
            ("llava:7b", "serves text only"),
        ] {
            let told = resolve_path(Path::new(typed), true).map_err(|error| error.to_string());
            let told = told.expect_err("there is no such name");
            assert!(told.contains(words), "{told}");
        }
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
