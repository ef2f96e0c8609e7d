//! The configuration of the models that a server loads and unloads.

use std::sync::Arc;
use std::time::Duration;

use corella_cluster::Role;
use corella_cpu::StepTurns;
use corella_hub::{HubConfig, short_names};
use corella_model::host_bytes;
use corella_server::{KeepAlive, ModelSetting, ServeConfig};

use super::hub::hub;
use super::models_dir::models_in;
use crate::arguments::args::{
    FormatChoice, ListedModel, RequestArgs, ServeArgs, SpeculateArg, source_of,
};
use crate::memory::kv_disk_limit;
use crate::model::model_file::name_of;
use crate::{Device, Error, LlmOptions, ModelSource};

pub struct Models {
    pub listed: Vec<ServedModel>,
    /// Whether the models are loaded by requests, even if there is only one.
    pub has_several: bool,
    /// The models that requests may name although they are not listed.
    pub hub: Option<HubModels>,
    /// The memory of all loaded models together.
    pub memory_bytes: u64,
    pub load_timeout: Duration,
}

#[derive(Clone)]
pub struct ServedModel {
    pub source: ModelSource,
    pub setting: ModelSetting,
    /// The options of the model's table. Default: those of the command line.
    pub own: Option<Arc<ModelOptions>>,
}

/// The options with which a model is loaded, and its requests are read.
pub struct ModelOptions {
    pub options: LlmOptions,
    /// The limits of requests, without the facts about a model.
    pub limits: ServeConfig,
    pub request: RequestArgs,
    /// Names and folders of the adapters that are loaded with the model.
    pub adapters: Vec<(String, String)>,
}

/// The models of the hub's cache.
pub struct HubModels {
    pub config: HubConfig,
    pub keep_alive: KeepAlive,
}

/// How long an idle model stays loaded beside others.
const KEEP_ALIVE: Duration = Duration::from_secs(300);

/// Returns the models of the command line, and sets the options that they share. Returns `None` for one model that
/// cannot be unloaded.
pub fn models(args: &ServeArgs, options: &mut LlmOptions) -> Result<Option<Models>, Error> {
    let given = &args.models;
    let has_several = given.has_several();
    let fixed = option_that_holds_a_model(args);
    if !has_several && given.keep_alive.is_none() {
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
        return Err(holds_its_model(option));
    }
    if has_several {
        check_options(args)?;
    }
    if given.allow_hub_models && options.kv_disk.is_some() {
        return Err(Error::Config(
            "--kv-disk is divided among the listed models so far: leave out --allow-hub-models, or it".to_owned(),
        ));
    }
    let default_memory = match has_several {
        true => host_bytes() / 5 * 4,
        false => u64::MAX,
    };
    let memory_bytes = given.model_memory.unwrap_or(default_memory);
    // Without a limit, a single model is planned as if it stayed loaded.
    options.shared_memory_bytes = Some(memory_bytes).filter(|_| memory_bytes < u64::MAX);
    if has_several {
        stay_off_gpus(options);
    }
    let mut listed = listed_models(args, options)?;
    if has_several {
        options.step_turns = Some(StepTurns::new());
        share_disks(&listed, options)?;
    }
    let own = listed.iter_mut().filter_map(|model| model.own.as_mut());
    for own in own.filter_map(Arc::get_mut) {
        own.options.step_turns.clone_from(&options.step_turns);
        own.options.kv_disk.clone_from(&options.kv_disk);
    }
    check_own_disks(&listed, &given.listed)?;
    Ok(Some(Models {
        listed,
        has_several,
        hub: given.allow_hub_models.then(|| HubModels {
            config: hub(true),
            keep_alive: keep_alive(args),
        }),
        memory_bytes,
        load_timeout: Duration::from_secs(given.model_load_timeout.into()),
    }))
}

fn stay_off_gpus(options: &mut LlmOptions) {
    if options.device == Device::Auto {
        options.device = Device::Cpu;
    }
}

/// Divides the files of `--kv-disk` among the models.
fn share_disks(models: &[ServedModel], options: &mut LlmOptions) -> Result<(), Error> {
    let Some(disk) = &mut options.kv_disk else {
        return Ok(());
    };
    for folder in &mut disk.folders {
        folder.max_file_bytes = folder.max_bytes / models.len() as u64;
    }
    let is_on_host = options.device != Device::Cuda;
    kv_disk_limit::check(&options.scheduler, options, is_on_host, false)?;
    let mut places = Vec::new();
    for ServedModel { source, .. } in models {
        let (ModelSource::Path(path) | ModelSource::Named { path, .. }) = source else {
            continue;
        };
        let place = kv_disk_limit::place(path);
        if places.contains(&place) {
            return Err(Error::Config(format!(
                "--kv-disk has one file for each model, and {} is there under two names: name it once",
                place.display()
            )));
        }
        places.push(place);
    }
    Ok(())
}

/// Refuses `--kv-disk` beside an option in a model's table that leaves it nothing to keep.
fn check_own_disks(models: &[ServedModel], tables: &[ListedModel]) -> Result<(), Error> {
    let own = models.iter().filter_map(|model| model.own.as_deref());
    for (ModelOptions { options, .. }, table) in own.zip(tables) {
        kv_disk_limit::check(&options.scheduler, options, true, false)
            .map_err(|error| Error::Config(format!("{}: {error}", table.place)))?;
    }
    Ok(())
}

fn listed_models(args: &ServeArgs, shared: &LlmOptions) -> Result<Vec<ServedModel>, Error> {
    let given = &args.models;
    let first = args.model.model.clone();
    let first = first.or_else(|| args.model.model_option.clone());
    // The built-in model is served if nothing else is named.
    let has_first = first.is_some() || !given.has_other_places();
    let first = has_first.then(|| source_of(first, args.model.name.clone()));
    let sources = first.into_iter().chain(given.more_sources.iter().cloned());
    let mut models: Vec<_> = sources
        .map(|source| ServedModel {
            setting: setting(args, name_of(&source)),
            source,
            own: None,
        })
        .collect();
    let disk = &args.engine.cache.disk;
    for listed in &given.listed {
        let own_disk = &listed.args.engine.cache.disk;
        let names = &listed.args.request.served_model_name;
        let model = match names.iter().find(|name| is_taken(&models, name)) {
            Some(name) => Err(two_are_named(name)),
            None if own_disk.kv_disk != disk.kv_disk => Err(for_all_models("--kv-disk")),
            None if own_disk.kv_disk_salted != disk.kv_disk_salted => {
                Err(for_all_models("--kv-disk-salted"))
            }
            None => listed_model(listed, shared, |name| {
                names.contains(name) || is_taken(&models, name)
            }),
        };
        let model = model.map_err(|error| Error::Config(format!("{}: {error}", listed.place)));
        models.push(model?);
    }
    if let Some(folder) = &given.models_dir {
        let found = models_in(folder, |name| is_taken(&models, name))?;
        models.extend(found.into_iter().map(|(name, source)| ServedModel {
            source,
            setting: setting(args, name),
            own: None,
        }));
        if models.is_empty() {
            return Err(Error::Config(format!(
                "--models-dir {} has no model: neither a folder with a config.json nor a GGUF file that can be opened",
                folder.display()
            )));
        }
    }
    Ok(models)
}

fn is_taken(models: &[ServedModel], name: &str) -> bool {
    let settings = models.iter().map(|model| &model.setting);
    let mut names = settings.flat_map(|setting| setting.names.iter().chain(&setting.adapters));
    names.any(|taken| taken == name)
}

fn two_are_named(name: &str) -> Error {
    Error::Config(format!("two models are named `{name}`"))
}

/// A model of the models file. What all models have in common is in `shared`.
fn listed_model(
    listed: &ListedModel,
    shared: &LlmOptions,
    is_taken: impl Fn(&String) -> bool,
) -> Result<ServedModel, Error> {
    let args = &listed.args;
    check_common_options(args)?;
    let mut options = args.engine.options(&args.model)?;
    options.shared_memory_bytes = shared.shared_memory_bytes;
    stay_off_gpus(&mut options);
    options.step_deadline = args.server.step_deadline();
    let mut limits = ServeConfig::new("", 0, 0, 0);
    let adapters = args.adapter.set(&mut options, &mut limits)?;
    // Only the adapters of the table are loaded again with the model.
    limits.max_num_adapters = adapters.len();
    limits.has_fixed_adapters = true;
    let mut names: Vec<String> = Vec::new();
    for (name, _) in &adapters {
        if is_taken(name) || names.contains(name) {
            return Err(two_are_named(name));
        }
        names.push(name.clone());
    }
    Ok(ServedModel {
        source: source_of(args.model.model.clone(), args.model.name.clone()),
        setting: ModelSetting {
            is_pinned: listed.is_pinned,
            takes_keep_alive: !listed.is_pinned,
            adapters: names,
            ..setting(args, listed.name.clone())
        },
        own: Some(Arc::new(ModelOptions {
            options,
            limits,
            request: args.request.clone(),
            adapters,
        })),
    })
}

fn setting(args: &ServeArgs, name: String) -> ModelSetting {
    let served = &args.request.served_model_name;
    ModelSetting {
        other_names: short_names(&name),
        adapters: Vec::new(),
        names: match served.is_empty() {
            true => vec![name],
            false => served.clone(),
        },
        is_pinned: false,
        keep_alive: keep_alive(args),
        takes_keep_alive: args.models.has_several() || args.models.keep_alive.is_some(),
    }
}

fn keep_alive(args: &ServeArgs) -> KeepAlive {
    args.models
        .keep_alive
        .unwrap_or(match args.models.has_several() {
            true => KeepAlive::For(KEEP_ALIVE),
            false => KeepAlive::Forever,
        })
}

fn for_all_models(option: &str) -> Error {
    Error::Config(format!(
        "{option} is for all models together: give it on the command line"
    ))
}

fn holds_its_model(option: &str) -> Error {
    Error::Config(format!(
        "{option} is for a server whose model stays loaded so far: leave it out, or serve one model without \
         --keep-alive"
    ))
}

/// Returns an option with which a model cannot be unloaded yet.
fn option_that_holds_a_model(args: &ServeArgs) -> Option<&'static str> {
    let (cluster, adapter) = (&args.cluster, &args.adapter);
    let options = [
        (cluster.role != Role::Unified, "--role"),
        (cluster.registry.is_some(), "--registry"),
        (cluster.cluster_listen.is_some(), "--cluster-listen"),
        (args.server.kv_events_config.is_some(), "--kv-events-config"),
        (args.server.grpc_port.is_some(), "--grpc-port"),
        (adapter.enable_lora, "--enable-lora"),
        (!adapter.lora_modules.is_empty(), "--lora-modules"),
        (args.kv_store.kv_store.is_some(), "--kv-store"),
    ];
    options
        .into_iter()
        .find_map(|(is_given, name)| is_given.then_some(name))
}

/// Refuses options that mean one model, and those that do not work with several yet.
fn check_options(args: &ServeArgs) -> Result<(), Error> {
    let ServeArgs {
        model,
        request,
        engine,
        ..
    } = args;
    refuse_options(&[
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
    ])?;
    check_common_options(args)
}

/// A turn of another model that hangs delays a step by 10 seconds, and both count as one step.
const LEAST_STEP_DEADLINE: Duration = Duration::from_secs(30);

/// Refuses options that do not work with several models yet, even if a table has them.
fn check_common_options(args: &ServeArgs) -> Result<(), Error> {
    let engine = &args.engine;
    refuse_options(&[
        (
            engine.cache.disk.kv_host_memory.is_some(),
            "--kv-host-memory",
        ),
        (
            engine.speculation.speculate == SpeculateArg::Draft,
            "--speculate draft",
        ),
        (engine.device.device == Device::Cuda, "--device cuda"),
    ])?;
    if args.server.step_deadline() < LEAST_STEP_DEADLINE {
        return Err(Error::Config(format!(
            "--step-deadline must be at least {} with several models, because a step waits for steps of other models",
            LEAST_STEP_DEADLINE.as_secs()
        )));
    }
    Ok(())
}

fn refuse_options(refused: &[(bool, &str)]) -> Result<(), Error> {
    match refused.iter().find(|(is_given, _)| *is_given) {
        None => Ok(()),
        Some((_, option)) => Err(Error::Config(format!(
            "{option} is for a server with one model so far: leave it out, or serve one model"
        ))),
    }
}

#[cfg(test)]
mod tests {
    use std::ffi::OsString;

    use clap::{CommandFactory, Parser};

    use super::*;
    use crate::arguments::args::{Cli, Command};
    use crate::arguments::config_file::models_file;

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
            kv_disk: args.engine.cache.disk.options(),
            ..LlmOptions::default()
        };
        let models = models(&args, &mut options).map_err(|error| error.to_string())?;
        Ok((models, options))
    }

    #[test]
    fn several_models_share_memory() {
        let (models, options) = read("m/a m/b.gguf --model-memory 4G --keep-alive 0").unwrap();
        let models = models.expect("they are unloaded");
        let listed = models.listed.iter();
        let names: Vec<_> = listed.map(|model| &*model.setting.names).collect();
        assert_eq!(names, [["a"], ["b"]]);
        assert!(models.has_several);
        assert_eq!(
            models.listed[1].setting.keep_alive,
            KeepAlive::For(Duration::ZERO)
        );
        assert_eq!(models.memory_bytes, 4 << 30);
        assert_eq!(options.shared_memory_bytes, Some(4 << 30));
        assert_eq!(options.device, Device::Cpu);
        let (models, options) = read("m/a m/b").unwrap();
        let models = models.expect("they are unloaded");
        assert_eq!(
            models.listed[0].setting.keep_alive,
            KeepAlive::For(KEEP_ALIVE)
        );
        assert!(models.listed[0].setting.takes_keep_alive);
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
            assert_eq!(models.listed[0].setting.keep_alive, keep_alive, "{words}");
            // Without the option, a request cannot unload the model.
            let takes = models.listed[0].setting.takes_keep_alive;
            assert_eq!(takes, words.contains("10m"), "{words}");
            assert_eq!(options.shared_memory_bytes, None, "{words}");
            assert_eq!(options.device, Device::Auto, "{words}");
        }
        for option in ["--enable-lora", "--kv-store lmcache:1"] {
            let (models, _) = read(&format!("m/a {option}")).unwrap();
            assert!(models.is_none(), "{option}");
        }
        let told = read("m/a --model-memory 4G")
            .err()
            .expect("nothing is unloaded");
        assert!(told.starts_with("--model-memory"), "{told}");
    }

    /// Returns the models of the command line with a models file that has this text.
    fn read_file(name: &str, text: &str, words: &str) -> Result<Vec<ServedModel>, String> {
        let name = format!("corella-served-{}-{name}.toml", std::process::id());
        let path = std::env::temp_dir().join(name);
        std::fs::write(&path, text).unwrap();
        let words = format!("corella serve --models FILE {words}");
        let words: Vec<_> = words.split_whitespace().map(OsString::from).collect();
        let Command::Serve(mut args) = Cli::try_parse_from(&words).unwrap().command else {
            panic!("the command is another");
        };
        let listed = models_file::read(&Cli::command(), &words, &path, &mut Vec::new());
        std::fs::remove_file(&path).unwrap();
        args.models.listed = listed?;
        let mut options = LlmOptions {
            kv_disk: args.engine.cache.disk.options(),
            ..LlmOptions::default()
        };
        let models = models(&args, &mut options);
        let models = models.map_err(|error| error.to_string())?;
        Ok(models.expect("they are unloaded").listed)
    }

    #[test]
    fn models_of_a_file_have_their_own_options() {
        let text = "
            [models.fox]
            model = \"m/a\"
            pinned = true
            chat-template = \"{{ x }}\"
            [models.owl]
            model = \"m/b\"
            keep-alive = \"1h\"
            dtype = \"int8\"
        ";
        let models = read_file("own", text, "--keep-alive 5m --step-deadline 0").unwrap();
        let [fox, owl] = &*models else {
            panic!("the built-in model is none of them");
        };
        assert_eq!(
            (&fox.setting.names, &owl.setting.names),
            (&vec!["fox".to_owned()], &vec!["owl".to_owned()])
        );
        assert_eq!(
            (fox.setting.is_pinned, owl.setting.is_pinned),
            (true, false)
        );
        let keep_alive = [fox, owl].map(|model| model.setting.keep_alive);
        assert_eq!(
            keep_alive,
            [300, 3600].map(|seconds| KeepAlive::For(Duration::from_secs(seconds)))
        );
        let own = [fox, owl].map(|model| model.own.as_deref().expect("a table").options.clone());
        assert_eq!(own[0].chat_template.as_deref(), Some("{{ x }}"));
        assert_eq!(own[0].weight_format, None);
        assert!(own[1].weight_format.is_some());
        for options in &own {
            assert_eq!(options.device, Device::Cpu);
            assert_eq!(options.step_deadline, Duration::MAX);
            assert!(options.shared_memory_bytes.is_some());
        }
        let models = read_file("beside", text, "m/first").unwrap();
        assert_eq!(models[0].setting.names, ["first"]);
        assert_eq!(models.len(), 3);
        let [first, fox, owl] = [0, 1, 2].map(|index| &models[index].setting);
        assert_eq!(
            [first, fox].map(|setting| setting.keep_alive),
            [KeepAlive::For(KEEP_ALIVE); 2]
        );
        // A request cannot unload a pinned model.
        let takes = [first, fox, owl].map(|setting| setting.takes_keep_alive);
        assert_eq!(takes, [true, false, true]);
    }

    #[test]
    fn a_table_has_adapters_and_each_name_once() {
        let table = |name: &str, adapters: &str| {
            format!("[models.{name}]\nmodel = \"m/{name}\"\nlora-modules = [{adapters}]\n")
        };
        let fox = table("fox", "\"sql=a/sql\", \"law=a/law\"");
        let models = read_file("adapted", &fox, "").unwrap();
        assert_eq!(models[0].setting.adapters, ["sql", "law"]);
        let own = models[0].own.as_deref().expect("a table");
        assert_eq!(own.adapters[1], ("law".to_owned(), "a/law".to_owned()));
        assert_eq!(
            (own.limits.max_num_adapters, own.options.max_adapter_rank),
            (2, Some(64))
        );
        for (name, twice) in [
            ("sql", table("owl", "\"sql=a/other\"")),
            ("fox", table("owl", "\"fox=a/other\"")),
            ("owl", table("owl", "\"owl=a/other\"")),
            ("law", table("law", "")),
            ("new", table("owl", "\"new=a/one\", \"new=a/two\"")),
        ] {
            let error = read_file("twice", &format!("{fox}{twice}"), "").err();
            let error = error.expect("a name stands for one model or adapter");
            assert!(
                error.contains(&format!("two models are named `{name}`")),
                "{error}"
            );
        }
    }

    #[test]
    fn a_step_may_wait_for_the_steps_of_other_models() {
        let text = "[models.fox]\nmodel = \"m/a\"";
        assert!(read_file("patient", text, "--step-deadline 30").is_ok());
        let hasty = read_file("hasty", text, "--step-deadline 29");
        let refused = hasty
            .err()
            .expect("a wait of 10 seconds and a step need more");
        assert!(
            refused.contains("--step-deadline must be at least 30"),
            "{refused}"
        );
    }

    #[test]
    fn models_of_a_file_alone_are_unloaded_when_they_are_idle() {
        let text = "[models.fox]\nmodel = \"m/a\"";
        let models = read_file("alone", text, "").unwrap();
        let [ServedModel { setting, .. }] = &*models else {
            panic!("there is one model");
        };
        assert_eq!(setting.keep_alive, KeepAlive::For(KEEP_ALIVE));
        assert!(setting.takes_keep_alive);
    }

    #[test]
    fn a_model_of_a_file_that_cannot_be_served_is_told_with_its_line() {
        let fox = "[models.fox]\nmodel = \"m/a\"";
        for (text, words, told) in [
            (
                fox.to_owned(),
                "m/fox",
                "line 1: two models are named `fox`",
            ),
            (
                format!("{fox}\n[models.owl]\nmodel = \"m/b\"\nserved-model-name = \"fox\""),
                "",
                "line 3: two models are named `fox`",
            ),
            (
                format!("{fox}\nkv-disk = \"d\""),
                "",
                "line 1: --kv-disk is for",
            ),
            (
                format!("{fox}\ndevice = \"cuda\""),
                "",
                "line 1: --device cuda is for",
            ),
            (
                format!("{fox}\nkv-disk-salted = true"),
                "--kv-disk /nowhere",
                "line 1: --kv-disk-salted is for",
            ),
            (
                format!("{fox}\nno-enable-prefix-caching = true"),
                "--kv-disk /nowhere",
                "line 1: --kv-disk: it keeps pages of the prefix cache",
            ),
        ] {
            let found = read_file("refused", &text, words).err();
            let found = found.unwrap_or_else(|| panic!("it is taken: {text}"));
            assert!(found.contains(told), "{text}: {found}");
        }
    }

    #[test]
    fn the_files_of_a_disk_are_divided_among_the_models() {
        let disk = |words: &str| {
            let (_, options) = read(words)?;
            let folders = options.kv_disk.expect("it has a disk").folders;
            let sizes = folders.iter().map(|it| (it.max_bytes, it.max_file_bytes));
            Ok::<_, String>(sizes.collect::<Vec<_>>())
        };
        let sizes = disk("m/a m/b m/c --kv-disk d,3G --kv-disk e,300M").unwrap();
        assert_eq!(sizes, [(3 << 30, 1 << 30), (300 << 20, 100 << 20)]);
        assert_eq!(disk("m/a --kv-disk d,3G").unwrap(), [(3 << 30, 3 << 30)]);
        let told = disk("m/a m/b/../a m/c --kv-disk d").unwrap_err();
        assert!(told.contains("under two names"), "{told}");
        let told = disk("m/a m/b --kv-disk d --kv-disk ./d").unwrap_err();
        assert!(told.contains("twice"), "{told}");
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
            "--kv-store lmcache:1",
            "--served-model-name x",
            "--tool-call-parser hermes",
            "--reasoning-parser think",
            "--revision main",
            "--chat-template t",
            "--pin-prefix p",
            "--device cuda",
        ] {
            let told = read(&format!("m/a m/b {option}")).err();
            let told = told.unwrap_or_else(|| panic!("{option} is taken"));
            let name = option.split(' ').next().unwrap_or_default();
            assert!(told.starts_with(name), "{option}: {told}");
        }
        for option in ["--role decode", "--kv-store lmcache:1"] {
            let told = read(&format!("m/a --keep-alive 5m {option}")).err();
            let told = told.unwrap_or_else(|| panic!("{option} is taken"));
            let name = option.split(' ').next().unwrap_or_default();
            assert!(told.starts_with(name), "{told}");
        }
    }
}
