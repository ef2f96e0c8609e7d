//! Converts the command line to configuration. No other module reads arguments or the environment.

use std::net::{SocketAddr, ToSocketAddrs};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use corella_cluster::blocks::FetchConfig;
use corella_cluster::node::NodeConfig;
use corella_cluster::{Role, TlsFiles};
use corella_cpu::num_cores;
use corella_quantize::QuantizeFormat;
use corella_server::batch::FilesConfig;
use corella_server::{AllowedOrigins, KvEventsConfig};

use crate::arguments::api_key_file::KeySource;
use crate::arguments::args::{
    BlockFetchArg, ClusterArgs, FallbackArg, FilesArgs, GenerateArgs, GroupLen, InspectArgs,
    LogFormatArg, MethodArg, NextTurnArg, QuantizeArgs, QuantizeFormatArg, RoleArg, ServeArgs,
    ServerArgs,
};
use crate::client::otlp::OtlpConfig;
use crate::foreign::foreign_variable;
use crate::input::option_file;
use crate::{
    CalibrationText, Error, GenerateParams, KvDiskOptions, KvSpill, LlmOptions, ModelSource,
    QuantizeOptions,
};

mod adapter;
mod admission;
mod batch;
mod bench;
mod chat;
mod engine;
mod hub;
mod listen;
mod llm;
mod model;
mod otlp;
mod prompt;
mod request;
mod scheduler;

pub use adapter::{AdapterOptions, adapter};
pub use admission::{BenchAdmission, bench_admission};
pub use batch::{Batch, batch};
pub use bench::{
    BenchOffline, BenchPerplexity, bench_kernels, bench_offline, bench_perplexity, bench_serve,
};
pub use chat::{Chat, ChatWith, chat};
pub use hub::{hub, ollama_store, pull};
pub use listen::ListenAddress;
pub use llm::llm;
pub use otlp::otlp;
pub use prompt::Prompt;
pub use request::{RequestOptions, request};

use engine::{
    check_sampling, check_threads, isa, kv_format, options_of_own, set_cache, set_device,
    set_speculation, weight_format,
};
use listen::{listen_address, root_path};
use model::{own_folder, set_model, source, source_of};
use scheduler::{options_of, set_scheduler};

pub struct Serve {
    pub source: ModelSource,
    pub options: LlmOptions,
    pub address: ListenAddress,
    /// Empty, or a path that begins with a slash and does not end with one.
    pub root_path: String,
    pub keys: KeySource,
    /// Certificate and key.
    pub tls: Option<(PathBuf, PathBuf)>,
    pub allowed_origins: AllowedOrigins,
    pub max_connections: u32,
    pub max_body_memory: u64,
    pub max_stored_response_bytes: u64,
    pub drain_timeout: Duration,
    pub log_format: LogFormatArg,
    /// Whether the start shows the limits in force.
    pub is_verbose: bool,
    pub logs_requests: bool,
    /// Sends traces, if configured.
    pub otlp: Option<OtlpConfig>,
    pub kv_events: Option<KvEventsConfig>,
    pub request: RequestOptions,
    pub adapter: AdapterOptions,
    /// The folder of files, if configured.
    pub files: Option<FilesConfig>,
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
    let mut options = options_of(&args.device, &args.speculation);
    set_model(&mut options, &args.model)?;
    set_scheduler(&mut options, &args.scheduler);
    set_speculation(&mut options, &args.speculation)?;
    set_cache(&mut options, &args.cache)?;
    // Roles change while a node serves, and this memory is only taken when needed.
    let may_decode_for_others = args.cluster.role == RoleArg::Decode
        || args.cluster.registry.is_some()
        || args.cluster.cluster_listen.is_some();
    options.exchanges_kv = may_decode_for_others;
    if may_decode_for_others && args.cache.kv_spill_memory.is_none() {
        options.kv_spill = KvSpill::QuarterOfCache;
    }
    options.kv_disk = args.kv_disk.kv_disk.map(|disk| KvDiskOptions {
        folder: disk.folder,
        max_bytes: disk.max_bytes,
    });
    let has_other_nodes = may_decode_for_others || args.cluster.role != RoleArg::Unified;
    if options.kv_disk.is_some() && has_other_nodes {
        return Err(Error::Config(
            "--kv-disk is for a server without other nodes so far: leave it out, or --role, --registry and \
             --cluster-listen"
                .to_owned(),
        ));
    }
    set_device(&mut options, &args.device)?;
    let adapter = adapter(&mut options, args.adapter)?;
    options.scheduler.hold_lease_us = u64::from(args.cluster.kv_hold_lease) * 1_000_000;
    let max_num_seqs = args.scheduler.max_num_seqs as usize;
    let server = args.server;
    let address = match &server.uds {
        Some(path) => ListenAddress::Unix(path.clone()),
        None => ListenAddress::Tcp(listen_address(&server.host, server.port)?),
    };
    warn_of_foreign_variables(&server, &address)?;
    options.step_deadline = match server.step_deadline {
        0 => Duration::MAX,
        seconds => Duration::from_secs(seconds),
    };
    Ok(Serve {
        source: source(args.model),
        options,
        address,
        root_path: root_path(server.root_path.as_deref().unwrap_or_default())?,
        keys: KeySource {
            single: server.api_key,
            file: server.api_keys,
        },
        tls: server.tls_cert.zip(server.tls_key),
        allowed_origins: allowed_origins(&server.cors_allow_origin)?,
        max_connections: server.max_connections,
        max_body_memory: server.max_body_memory,
        max_stored_response_bytes: server.max_stored_response_bytes,
        drain_timeout: Duration::from_secs(server.drain_timeout.into()),
        log_format: server.log_format,
        is_verbose: server.verbose,
        logs_requests: !server.no_log_requests,
        otlp: otlp(server.otlp_endpoint)?,
        kv_events: kv_events(server.kv_events_config.as_deref())?,
        request: request(args.request),
        adapter,
        files: files(args.files, max_num_seqs),
        cluster: cluster(args.cluster)?,
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
        host: match address {
            ListenAddress::Tcp(address) => Some(address.ip()),
            ListenAddress::Unix(_) => None,
        },
    };
    let is_set = |name: &str| std::env::var_os(name).is_some_and(|value| !value.is_empty());
    for warning in foreign_variable::check(is_set, &start)? {
        tracing::warn!("{warning}");
    }
    Ok(())
}

/// The lines of batches leave half of the slots to requests of clients.
fn files(args: FilesArgs, max_num_seqs: usize) -> Option<FilesConfig> {
    let half = (max_num_seqs / 2).max(1);
    Some(FilesConfig {
        dir: args.files_dir?,
        max_file_bytes: args.max_file_bytes,
        max_files_bytes: args.max_files_bytes,
        batch_concurrency: args
            .batch_concurrency
            .map_or(half, |number| number as usize),
    })
}

fn allowed_origins(origins: &[String]) -> Result<AllowedOrigins, Error> {
    AllowedOrigins::parse(origins).map_err(|wrong| {
        Error::Config(format!(
            "--cors-allow-origin {wrong} is not an origin: write SCHEME://HOST or SCHEME://HOST:PORT \
             without a path, or *"
        ))
    })
}

/// The other nodes of a fleet need fewer connections. With a low limit of open files the server accepts fewer.
const MAX_NODE_CONNECTIONS: usize = 1024;
/// Any free port, on this machine only.
const DEFAULT_CLUSTER_LISTEN: &str = "127.0.0.1:0";

fn cluster_listen(args: &ClusterArgs) -> Result<SocketAddr, Error> {
    let listen = args.cluster_listen.as_deref();
    let listen = listen.unwrap_or(DEFAULT_CLUSTER_LISTEN);
    let addresses = listen.to_socket_addrs();
    let Some(address) = addresses.ok().and_then(|mut addresses| addresses.next()) else {
        return Err(Error::Config(format!(
            "--cluster-listen {listen} is no HOST:PORT that this machine can resolve; for \
             example 127.0.0.1:9000"
        )));
    };
    if address.ip().is_unspecified() && args.cluster_advertise.is_none() {
        return Err(Error::Config(format!(
            "--cluster-listen {address} listens on every address: say with --cluster-advertise HOST \
             which of them other nodes reach"
        )));
    }
    Ok(address)
}

fn cluster(args: ClusterArgs) -> Result<NodeConfig, Error> {
    let role = match args.role {
        RoleArg::Unified => Role::Unified,
        RoleArg::Prefill => Role::Prefill,
        RoleArg::Decode => Role::Decode,
    };
    let listen = cluster_listen(&args)?;
    let files = (
        args.cluster_tls_cert,
        args.cluster_tls_key,
        args.cluster_tls_ca,
    );
    let tls = match files {
        (Some(cert), Some(key), Some(ca)) => Some(TlsFiles { cert, key, ca }),
        // The command line requires all of them or none.
        _ => None,
    };
    let row_path = args.transport.0;
    if let Some(path) = row_path.filter(|path| !path.is_private && tls.is_some()) {
        return Err(Error::Config(format!(
            "--transport {} does not encrypt: leave out --cluster-tls-cert, --cluster-tls-key and \
             --cluster-tls-ca, or choose --transport tcp",
            path.option
        )));
    }
    if args.block_fetch == BlockFetchArg::Always && args.next_turn == NextTurnArg::Decode {
        return Err(Error::Config(
            "with --next-turn decode no blocks come back to the prefill node: leave out --block-fetch always, or \
             choose --next-turn prefill"
                .to_owned(),
        ));
    }
    Ok(NodeConfig {
        role,
        listens: role != Role::Unified || args.cluster_listen.is_some(),
        registry: args.registry,
        listen,
        kv_peer_allow: args.kv_peer_allow,
        max_connections: MAX_NODE_CONNECTIONS,
        max_connections_per_address: { args.cluster_max_connections_per_address }
            .map_or(usize::MAX, |number| number as usize),
        advertise: args.cluster_advertise,
        tls,
        tracer: None,
        node_id: args.node_id,
        group: args.group.unwrap_or_default(),
        policy: args.peer_policy.into(),
        min_tokens: args.disaggregate_min_tokens,
        max_prompt_tokens: args.max_prompt_tokens,
        compute_place: args.next_turn.into(),
        falls_back: args.fallback == FallbackArg::Local,
        search_timeout: Duration::from_millis(args.decode_search_timeout.into()),
        load_time: Duration::from_millis(args.kv_load_timeout.into()),
        uses_network: row_path.is_none_or(|path| !path.is_local),
        uses_host: row_path.is_none_or(|path| path.is_local),
        row_paths: { row_path.into_iter() }
            .filter(|path| path.load.is_some())
            .collect(),
        max_bandwidth: args.transfer_max_bandwidth,
        num_threads: args.transfer_threads.into(),
        fetches: match args.block_fetch {
            BlockFetchArg::Auto => Some(FetchConfig::default()),
            BlockFetchArg::Always => Some(FetchConfig {
                is_forced: true,
                ..FetchConfig::default()
            }),
            BlockFetchArg::Off => None,
        },
    })
}

pub fn generate(args: GenerateArgs) -> Result<Generate, Error> {
    let mut options = options_of_own(&args.model, &args.own)?;
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
    check_sampling(&sampling)?;
    Ok(Generate {
        source: source(args.model),
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
        source: source_of(args.model, args.name),
        options,
        prints_json: args.json,
    })
}

/// Texts by which models are measured or quantised.
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
