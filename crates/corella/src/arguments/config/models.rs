//! The configuration of the models that a server loads and unloads.

use std::time::Duration;

use corella_cluster::Role;
use corella_hub::short_names;
use corella_model::host_bytes;
use corella_server::{KeepAlive, ModelSetting};

use crate::arguments::args::{FormatChoice, ServeArgs, SpeculateArg, source_of};
use crate::model::model_file::name_of;
use crate::{Device, Error, LlmOptions, ModelSource};

pub struct Models {
    pub sources: Vec<ModelSource>,
    pub settings: Vec<ModelSetting>,
    /// The memory of all loaded models together.
    pub memory_bytes: u64,
    pub load_timeout: Duration,
}

/// How long an idle model stays loaded beside others.
const KEEP_ALIVE: Duration = Duration::from_secs(300);

/// Returns the models of the command line, and sets the options that they share. Returns `None` for one model that
/// cannot be unloaded.
pub fn models(args: &ServeArgs, options: &mut LlmOptions) -> Result<Option<Models>, Error> {
    let given = &args.models;
    let is_one = given.more_sources.is_empty();
    let fixed = option_that_holds_a_model(args);
    if is_one && given.keep_alive.is_none() {
        if given.model_memory.is_some() {
            return Err(Error::Config(
                "--model-memory is for a server that unloads models: name several, or add --keep-alive".to_owned(),
            ));
        }
        if fixed.is_some() {
            return Ok(None);
        }
    }
    if let Some(option) = fixed {
        return Err(Error::Config(format!(
            "{option} is for a server whose model stays loaded so far: leave it out, or serve one model without \
             --keep-alive"
        )));
    }
    let first = args.model.model.clone();
    let first = first.or_else(|| args.model.model_option.clone());
    let first = source_of(first, args.model.name.clone());
    let sources: Vec<_> = std::iter::once(first)
        .chain(given.more_sources.iter().cloned())
        .collect();
    let default_memory = match is_one {
        true => u64::MAX,
        false => {
            check_options(args)?;
            if options.device == Device::Auto {
                options.device = Device::Cpu;
            }
            host_bytes() / 5 * 4
        }
    };
    let memory_bytes = given.model_memory.unwrap_or(default_memory);
    // Without a limit, a single model is planned as if it stayed loaded.
    options.shared_memory_bytes = Some(memory_bytes).filter(|_| memory_bytes < u64::MAX);
    Ok(Some(Models {
        settings: settings(args, &sources),
        sources,
        memory_bytes,
        load_timeout: Duration::from_secs(given.model_load_timeout.into()),
    }))
}

fn settings(args: &ServeArgs, sources: &[ModelSource]) -> Vec<ModelSetting> {
    let keep_alive = match sources.len() {
        1 => KeepAlive::Forever,
        _ => KeepAlive::For(KEEP_ALIVE),
    };
    let served = &args.request.served_model_name;
    let settings = sources.iter().map(|source| {
        let name = name_of(source);
        ModelSetting {
            other_names: short_names(&name),
            names: match served.is_empty() {
                true => vec![name],
                false => served.clone(),
            },
            is_pinned: false,
            keep_alive: args.models.keep_alive.unwrap_or(keep_alive),
            takes_keep_alive: sources.len() > 1 || args.models.keep_alive.is_some(),
        }
    });
    settings.collect()
}

/// Returns an option with which a model cannot be unloaded yet.
fn option_that_holds_a_model(args: &ServeArgs) -> Option<&'static str> {
    let (cluster, adapter) = (&args.cluster, &args.adapter);
    let options = [
        (cluster.role != Role::Unified, "--role"),
        (cluster.registry.is_some(), "--registry"),
        (cluster.cluster_listen.is_some(), "--cluster-listen"),
        (args.server.kv_events_config.is_some(), "--kv-events-config"),
        (adapter.enable_lora, "--enable-lora"),
        (!adapter.lora_modules.is_empty(), "--lora-modules"),
    ];
    options
        .into_iter()
        .find_map(|(is_given, name)| is_given.then_some(name))
}

/// Refuses options that mean one model, or that do not work with several yet.
fn check_options(args: &ServeArgs) -> Result<(), Error> {
    let ServeArgs {
        model,
        request,
        engine,
        ..
    } = args;
    let refused = [
        (!request.served_model_name.is_empty(), "--served-model-name"),
        (
            request.tool_call_parser != FormatChoice::Template,
            "--tool-call-parser",
        ),
        (
            request.reasoning_parser != FormatChoice::Template,
            "--reasoning-parser",
        ),
        (model.revision.is_some(), "--revision"),
        (model.chat_template.is_some(), "--chat-template"),
        (!engine.cache.pin_prefix.is_empty(), "--pin-prefix"),
        (!engine.cache.disk.kv_disk.is_empty(), "--kv-disk"),
        (args.kv_store.kv_store.is_some(), "--kv-store"),
        (
            engine.speculation.speculate == SpeculateArg::Draft,
            "--speculate draft",
        ),
        (engine.device.device == Device::Cuda, "--device cuda"),
    ];
    match refused.into_iter().find(|(is_given, _)| *is_given) {
        None => Ok(()),
        Some((_, option)) => Err(Error::Config(format!(
            "{option} is for a server with one model so far: leave it out, or serve one model"
        ))),
    }
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;
    use crate::arguments::args::{Cli, Command};

    /// Returns the models of `corella serve` with these words, and the options of the engine.
    fn read(words: &str) -> Result<(Option<Models>, LlmOptions), String> {
        let words = ["corella", "serve"].into_iter().chain(words.split(' '));
        let cli = Cli::try_parse_from(words).map_err(|error| error.to_string())?;
        let Command::Serve(mut args) = cli.command else {
            panic!("the command is another");
        };
        let more = args.models.more_models.iter().cloned();
        args.models.more_sources = more.map(ModelSource::Path).collect();
        let mut options = LlmOptions {
            device: args.engine.device.device,
            ..LlmOptions::default()
        };
        let models = models(&args, &mut options).map_err(|error| error.to_string())?;
        Ok((models, options))
    }

    #[test]
    fn several_models_share_memory() {
        let (models, options) = read("m/a m/b.gguf --model-memory 4G --keep-alive 0").unwrap();
        let models = models.expect("they are unloaded");
        let names: Vec<_> = models.settings.iter().map(|model| &*model.names).collect();
        assert_eq!(names, [["a"], ["b"]]);
        assert_eq!(models.sources.len(), 2);
        assert_eq!(
            models.settings[1].keep_alive,
            KeepAlive::For(Duration::ZERO)
        );
        assert_eq!(models.memory_bytes, 4 << 30);
        assert_eq!(options.shared_memory_bytes, Some(4 << 30));
        assert_eq!(options.device, Device::Cpu);
        let (models, options) = read("m/a m/b").unwrap();
        let models = models.expect("they are unloaded");
        assert_eq!(models.settings[0].keep_alive, KeepAlive::For(KEEP_ALIVE));
        assert!(models.settings[0].takes_keep_alive);
        assert!(models.memory_bytes <= host_bytes() / 5 * 4);
        assert_eq!(options.shared_memory_bytes, Some(models.memory_bytes));
    }

    #[test]
    fn one_model_has_the_memory_to_itself() {
        for words in [
            "m/a",
            "m/a --keep-alive 10m",
            "m/a --served-model-name x --kv-disk d",
        ] {
            let (models, options) = read(words).unwrap();
            let models = models.expect("it can be unloaded");
            let keep_alive = match words.contains("10m") {
                true => KeepAlive::For(Duration::from_secs(600)),
                false => KeepAlive::Forever,
            };
            assert_eq!(models.settings[0].keep_alive, keep_alive, "{words}");
            // Without the option, a request cannot unload the model.
            let takes = models.settings[0].takes_keep_alive;
            assert_eq!(takes, words.contains("10m"), "{words}");
            assert_eq!(options.shared_memory_bytes, None, "{words}");
            assert_eq!(options.device, Device::Auto, "{words}");
        }
        let (models, _) = read("m/a --enable-lora").unwrap();
        assert!(models.is_none());
        let told = read("m/a --model-memory 4G")
            .err()
            .expect("nothing is unloaded");
        assert!(told.starts_with("--model-memory"), "{told}");
    }

    #[test]
    fn options_of_one_model_are_refused_by_name() {
        for option in [
            "--role decode",
            "--registry static:127.0.0.1:1",
            "--cluster-listen 127.0.0.1:0",
            "--kv-events-config {}",
            "--enable-lora",
            "--lora-modules x=y",
            "--served-model-name x",
            "--tool-call-parser hermes",
            "--reasoning-parser think",
            "--revision main",
            "--chat-template t",
            "--pin-prefix p",
            "--kv-disk d",
            "--device cuda",
        ] {
            let told = read(&format!("m/a m/b {option}")).err();
            let told = told.unwrap_or_else(|| panic!("{option} is taken"));
            let name = option.split(' ').next().unwrap_or_default();
            assert!(told.starts_with(name), "{option}: {told}");
        }
        let told = read("m/a --keep-alive 5m --role decode").err();
        assert!(told.expect("it is refused").starts_with("--role"));
    }
}
