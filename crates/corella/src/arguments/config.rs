//! Converts the command line to configuration. No other module reads arguments or the environment.

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use corella_cluster::Role;
use corella_cluster::node::NodeConfig;
use corella_cpu::num_cores;
use corella_quantize::QuantizeFormat;
use corella_server::batch::FilesConfig;
use corella_server::{KvEventsConfig, ServeConfig, ServerConfig};

use crate::arguments::api_key_file::KeySource;
use crate::arguments::args::{
    GenerateArgs, GroupLen, InspectArgs, KvStoreAddress, LogFormatArg, MethodArg, QuantizeArgs,
    QuantizeFormatArg, RequestArgs, ServeArgs, ServerArgs, check_threads, isa, kv_format,
    source_of, weight_format,
};
use crate::client::otlp::OtlpConfig;
use crate::foreign::foreign_variable;
use crate::input::option_file;
use crate::{
    CalibrationText, Error, GenerateParams, KvSpill, LlmOptions, ModelSource, QuantizeOptions,
};

mod admission;
mod batch;
mod bench;
mod chat;
mod hub;
mod listen;
mod llm;
mod models;
mod models_dir;
mod otlp;
mod prompt;

pub use admission::{BenchAdmission, bench_admission};
pub use batch::{Batch, batch};
pub use bench::{
    BenchOffline, BenchPerplexity, bench_kernels, bench_offline, bench_perplexity, bench_serve,
};
pub use chat::{Chat, ChatWith, chat};
pub use hub::{hub, ollama_store, pull};
pub use listen::{ListenAddress, grpc_address};
pub use llm::{LlmConfig, llm};
pub use models::{HubModels, ModelOptions, Models, ServedModel, models};
pub use otlp::otlp;
pub use prompt::Prompt;

pub struct Serve {
    pub source: ModelSource,
    /// The models that the server loads and unloads; `None` for one that stays loaded.
    pub models: Option<Models>,
    pub options: LlmOptions,
    pub address: ListenAddress,
    /// The address of the gRPC port, if configured.
    pub grpc_address: Option<SocketAddr>,
    pub keys: KeySource,
    /// Certificate and key.
    pub tls: Option<(PathBuf, PathBuf)>,
    /// The server's limits, without keys and certificates.
    pub server: ServerConfig,
    /// The limits of the model's requests, without the facts about the model.
    pub limits: ServeConfig,
    pub log_format: LogFormatArg,
    /// Whether the start shows the limits in force.
    pub is_verbose: bool,
    /// The destination of traces, if configured.
    pub otlp: Option<OtlpConfig>,
    pub kv_events: Option<KvEventsConfig>,
    pub request: RequestArgs,
    /// Names and folders of the adapters at the start.
    pub adapters: Vec<(String, String)>,
    /// The folder of files, if configured.
    pub files: Option<FilesConfig>,
    /// The server of another program that keeps KV pages.
    pub kv_store: Option<KvStoreAddress>,
    pub cluster: NodeConfig,
}

pub struct Generate {
    pub source: ModelSource,
    pub options: LlmOptions,
    pub prompt: Prompt,
    pub params: GenerateParams,
    /// Whether to measure the machine's limits, and to print speeds beside them.
    pub compare_with_limits: bool,
    pub shows_speed: bool,
}

pub fn serve(args: ServeArgs) -> Result<Serve, Error> {
    let mut options = args.engine.options(&args.model)?;
    let models = models(&args, &mut options)?;
    // A node's role may change while it serves, so every node of a cluster may spill. Spill memory is only taken when a
    // request spills.
    let may_decode_for_others = args.cluster.role == Role::Decode
        || args.cluster.registry.is_some()
        || args.cluster.cluster_listen.is_some();
    options.exchanges_kv = may_decode_for_others;
    options.has_kv_store = args.kv_store.kv_store.is_some();
    if may_decode_for_others && args.engine.cache.kv_spill_memory.is_none() {
        options.kv_spill = KvSpill::QuarterOfCache;
    }
    let has_other_nodes = may_decode_for_others || args.cluster.role != Role::Unified;
    if args.server.exit_when_idle.is_some() && has_other_nodes {
        return Err(Error::Config(
            "--exit-when-idle does not work beside other nodes yet: leave it out, or leave out --role, --registry and \
             --cluster-listen"
                .to_owned(),
        ));
    }
    options.scheduler.hold_lease_us = u64::from(args.cluster.kv_hold_lease) * 1_000_000;
    let server = args.server;
    let mut server_config = server.config()?;
    server_config.allow_unknown_fields = args.request.allow_unknown_fields;
    let mut limits = ServeConfig::new("", 0, 0, 0);
    let adapters = args.adapter.set(&mut options, &mut limits)?;
    let address = ListenAddress::of(&server)?;
    server_config.has_inherited_socket = matches!(address, ListenAddress::Inherited(_));
    warn_of_foreign_variables(&server, &address)?;
    options.step_deadline = server.step_deadline();
    Ok(Serve {
        source: args.model.source(),
        models,
        options,
        address,
        grpc_address: grpc_address(&server)?,
        keys: KeySource {
            single: server.api_key,
            file: server.api_keys,
        },
        tls: server.tls_cert.zip(server.tls_key),
        server: server_config,
        limits,
        log_format: server.log_format,
        is_verbose: server.verbose,
        otlp: otlp(server.otlp_endpoint)?,
        kv_events: kv_events(server.kv_events_config.as_deref())?,
        request: args.request,
        adapters,
        files: args.files.config(args.engine.scheduler.max_num_seqs),
        kv_store: args.kv_store.kv_store,
        cluster: args.cluster.node_config()?,
    })
}

fn kv_events(json: Option<&str>) -> Result<Option<KvEventsConfig>, Error> {
    let config = json.map(KvEventsConfig::parse).transpose();
    let config = config.map_err(|error| Error::Config(format!("--kv-events-config: {error}")))?;
    Ok(config.flatten())
}

fn warn_of_foreign_variables(server: &ServerArgs, address: &ListenAddress) -> Result<(), Error> {
    let start = foreign_variable::Start {
        has_key: server.api_key.is_some() || server.api_keys.is_some(),
        host: address.ip(),
    };
    let is_set = |name: &str| std::env::var_os(name).is_some_and(|value| !value.is_empty());
    for warning in foreign_variable::check(is_set, &start)? {
        tracing::warn!("{warning}");
    }
    Ok(())
}

pub fn generate(args: GenerateArgs) -> Result<Generate, Error> {
    let mut options = args.own.options(&args.model)?;
    options.profile = args.profile.then(Arc::default);
    let prompt = match (args.prompt_tokens, args.prompt) {
        (Some(num_tokens), _) => Prompt::MadeUp { num_tokens },
        (None, text) => {
            let message = prompt::text(text, args.with_input)?;
            let system = args.system;
            match args.raw {
                true => Prompt::Raw(message),
                false => Prompt::Chat { system, message },
            }
        }
    };
    let sampling = args.own.sampling;
    sampling.check()?;
    Ok(Generate {
        source: args.model.source(),
        options,
        prompt,
        params: GenerateParams {
            max_tokens: args.max_tokens,
            temperature: sampling.temperature,
            top_k: sampling.top_k,
            top_p: sampling.top_p,
            min_p: sampling.min_p,
            seed: sampling.seed.unwrap_or_else(arbitrary_seed),
            stop: Vec::new(),
            ignore_eos: args.ignore_eos,
        },
        compare_with_limits: !args.no_limits,
        shows_speed: !args.no_speed,
    })
}

pub struct Inspect {
    /// The folders to inspect in place of a model.
    pub kv_disk: Vec<PathBuf>,
    pub source: ModelSource,
    pub options: LlmOptions,
    pub prints_json: bool,
}

pub fn inspect(args: InspectArgs) -> Result<Inspect, Error> {
    let mut options = LlmOptions {
        weight_format: weight_format(args.dtype),
        kv_format: kv_format(args.kv_cache_dtype)?,
        kv_cache_bytes: args.kv_cache_memory,
        max_model_len: args.max_model_len.and_then(|len| len.0),
        isa: args.isa.map(isa),
        ..LlmOptions::default()
    };
    options.scheduler.max_num_seqs = args.max_num_seqs;
    options.scheduler.page_size = args.page.block_size;
    options.scheduler.validate()?;
    Ok(Inspect {
        kv_disk: args.kv_disk.into_iter().map(|disk| disk.path).collect(),
        source: source_of(args.model, args.name),
        options,
        prints_json: args.json,
    })
}

/// Limits the file of a text for perplexity or calibration.
const MAX_DOCUMENT_BYTES: u64 = 4 << 30;

/// Returns the documents of a file: the `text` of each line of a `.jsonl` file, else the whole file.
fn documents(path: &Path) -> Result<Vec<String>, Error> {
    let shown = path.display();
    let text = option_file::read_text_within(path, MAX_DOCUMENT_BYTES)
        .map_err(|error| Error::Io(format!("cannot read {shown}"), error))?;
    if path.extension().is_none_or(|end| end != "jsonl") {
        return Ok(vec![text]);
    }
    let lines = text.lines().enumerate();
    let lines = lines.filter(|(_, line)| !line.trim().is_empty());
    lines
        .map(|(index, line)| {
            let object: Option<serde_json::Value> = serde_json::from_str(line).ok();
            let text = object.as_ref().and_then(|object| object["text"].as_str());
            text.map(str::to_owned).ok_or_else(|| {
                let line = index + 1;
                Error::Config(format!(
                    "{shown}, line {line}: is not an object with a `text`"
                ))
            })
        })
        .collect()
}

pub struct Quantize {
    pub source: ModelSource,
    pub out: PathBuf,
    pub options: QuantizeOptions,
}

pub fn quantize(args: QuantizeArgs) -> Result<Quantize, Error> {
    let refuse = |reason: &str| Err(Error::Config(reason.to_owned()));
    let format = match args.format {
        QuantizeFormatArg::Int8 => {
            if args.asymmetric {
                return refuse("--asymmetric needs --format int4");
            }
            QuantizeFormat::Int8 {
                group_len: args.group_size.and_then(|GroupLen(len)| len),
            }
        }
        QuantizeFormatArg::Int4 => QuantizeFormat::Int4 {
            group_len: args.group_size.map_or(Some(128), |GroupLen(len)| len),
            symmetric: !args.asymmetric,
        },
    };
    let calibration = match (args.method, args.calibration) {
        (MethodArg::Nearest, None) => None,
        (MethodArg::Gptq, None) => return refuse("--method gptq needs --calibration FILE"),
        (MethodArg::Nearest, Some(_)) => return refuse("--calibration needs --method gptq"),
        (MethodArg::Gptq, Some(path)) => {
            if args.context == 0 || args.calibration_tokens == 0 {
                return refuse("--context and --calibration-tokens must be at least 1");
            }
            Some(CalibrationText {
                documents: documents(&path)?,
                context: args.context as usize,
                max_tokens: args.calibration_tokens,
            })
        }
    };
    check_threads(args.threads)?;
    Ok(Quantize {
        source: ModelSource::Path(args.model),
        out: args.out,
        options: QuantizeOptions {
            format,
            // `--keep ""` keeps no matrix.
            keep: args
                .keep
                .into_iter()
                .filter(|name| !name.is_empty())
                .collect(),
            calibration,
            num_threads: args.threads.unwrap_or_else(num_cores),
            isa: args.isa.map(isa),
        },
    })
}

fn arbitrary_seed() -> u64 {
    let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
    now.map_or(0, |now| now.as_nanos() as u64)
}
