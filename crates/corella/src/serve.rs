//! `corella serve`: loads the model, announces it, and serves until told to stop.

// The command, and the modules that it shares with programs in other languages.
pub(crate) mod adapter_loader;
pub(crate) mod cluster;
pub(crate) mod local_server;
pub(crate) mod model_loader;
pub(crate) mod reload;
pub(crate) mod server_socket;
pub(crate) mod several_models;

use std::io;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use corella_cluster::kv_store::{KvStore, KvStoreConfig, StoreReader};
use corella_cluster::node::NodePort;
use corella_core::SchedulerConfig;
use corella_engine::{Generate, Tracer};
use corella_server::batch::{Batches, FilesConfig};
use corella_server::{
    AdapterLoader, ApiKey, Backend, DrainReport, KvEvents, KvEventsConfig, Listener,
    MAX_GRPC_CONNECTIONS, ModelId, ModelMemory, ModelSet, OutputMetrics, ServerConfig, ServerParts,
    ServerState, ServerTls, Shutdown, TextModel, shutdown_signal,
};
use prometheus_client::collector::Collector;
use tokio::runtime::Runtime;

use crate::arguments::args::KvStoreAddress;
use crate::arguments::config::{ModelOptions, Serve};
use crate::arguments::log_format::announce;
use crate::client::otlp::OtlpExporter;
use crate::model::model_file::open;
use crate::process::malloc_arena;
use crate::process::open_files;
use crate::process::supervisor;
use crate::serve::adapter_loader::FolderLoader;
use crate::serve::cluster::Cluster;
use crate::serve::model_loader::{LoadedEngine, SourceLoader};
use crate::serve::reload::Reload;
use crate::serve::server_socket::ServerSocket;
use crate::{Error, Llm, ModelSource};

pub fn run(config: Serve) -> Result<(), Error> {
    malloc_arena::limit_number();
    let runtime =
        Runtime::new().map_err(|error| Error::Io("starting the server".to_owned(), error))?;
    let done = runtime.block_on(serve(config));
    // Blocking threads may still be preparing requests whose clients have left.
    runtime.shutdown_timeout(Duration::from_secs(1));
    done
}

// Long: the steps of a start and of an end, whose order matters.
async fn serve(mut config: Serve) -> Result<(), Error> {
    if let Some(models) = (config.models).take_if(|models| models.has_several) {
        return several_models::serve(config, models).await;
    }
    let io_error = |what: String| move |error| Error::Io(what, error);
    // A missing model is reported even if the port is in use, too.
    if matches!(&config.source, ModelSource::Path(path) if !path.exists()) {
        open(&config.source)?;
    }
    // The port is bound before the model is loaded, so that a port in use is noticed at once.
    let socket = ServerSocket::open(config.address).await?;
    let grpc = match config.grpc_address {
        Some(address) => Some(server_socket::open_grpc(address).await?),
        None => None,
    };
    let mut cluster_config = config.cluster.clone();
    let binds = cluster_config.listens;
    let cluster_listener = binds.then(|| NodePort::bind(&cluster_config)).transpose()?;
    let api_keys = config.keys.read()?;
    check_grpc_key(config.server.grpc_key.as_deref(), &api_keys)?;
    let server_tls = config.tls.as_ref().map(load_tls).transpose()?;
    let tls = cluster_config.load_tls()?;
    cluster_config.load_paths()?;
    let loading = socket
        .start_loading(server_tls.clone())
        .map_err(io_error("answering while the model is loaded".to_owned()))?;
    let mut llm = Llm::load(&config.source, &config.options)?;
    let shutdown = shutdown_signal().map_err(io_error(SIGNALS.to_owned()))?;
    let has_key = !api_keys.is_empty();
    let reply_format = config.request.reply_format(llm.chat_template.as_ref());
    let exporter = config.otlp.map(OtlpExporter::start).transpose()?;
    let tracer = exporter.clone().map(Tracer::new);
    cluster_config.tracer.clone_from(&tracer);
    let server_config = ServerConfig {
        tracer,
        api_keys,
        tls: server_tls.clone(),
        ..config.server
    };
    let serve_config = { config.request.clone() }.serve_config(&llm, config.limits.clone());
    let num_grpc_connections = grpc.as_ref().map_or(0, |_| MAX_GRPC_CONNECTIONS);
    make_room_for(server_config.max_num_connections + num_grpc_connections);
    let say = |line: &str| announce(config.log_format, line);
    say(&llm.summary());
    if let Some(line) = llm.end_summary() {
        say(&line);
    }
    if config.is_verbose {
        say(&limits_line(
            &config.options.scheduler,
            &server_config,
            serve_config.max_num_choices,
        ));
    }
    let outputs = OutputMetrics::default();
    let cluster = cluster::start(
        cluster_config,
        tls,
        cluster_listener,
        &llm,
        Arc::new(outputs.clone()),
        server_config.drain_timeout,
    )?;
    if let Some(line) = cluster.summary() {
        say(&line);
    }
    let kv_store = match config.kv_store {
        Some(address) => Some(start_kv_store(address, &llm).await?),
        None => None,
    };
    let kv_events = match &config.kv_events {
        Some(config) => Some(start_kv_events(config, &llm, &say).await?),
        None => None,
    };
    let grpc = grpc.map(|(listener, address)| {
        say(&format!("gRPC on {address}"));
        listener
    });
    if config.is_verbose {
        let url = socket.curl(server_tls.is_some()) + &server_config.root_path;
        say(&try_line(&llm, &url, has_key));
    }
    let ready_line = ready_line(
        &socket.address(server_tls.is_some()),
        &server_config.root_path,
    );

    let memory = memory_of(&llm);
    let weight_keepers = std::mem::take(&mut llm.weight_keepers);
    let batches = config.files.map(open_batches).transpose()?;
    let name = serve_config.served_model_names.first();
    let name = name.map(String::as_str);
    let collectors = collectors_of(exporter.as_ref());
    let parts = ServerParts::new(server_config, batches, name, collectors);
    let mut backend = backend(&llm, &cluster, outputs, kv_store);
    // A model that may be unloaded takes its keepers along, and its server has no other nodes. Other keepers end before
    // this function does.
    let _weight_keepers = match config.models {
        None => weight_keepers,
        Some(_) => {
            backend.collectors.clear();
            let generator = LoadedEngine::new(backend.generator, weight_keepers);
            backend.generator = Arc::new(generator);
            Vec::new()
        }
    };
    let collectors = &mut backend.collectors;
    collectors.extend(kv_events.as_ref().map(KvEvents::collector));
    let text = TextModel {
        tokenizer: llm.tokenizer,
        reply_format,
        chat_template: llm.chat_template,
    };
    let state = ServerState::with_backend(parts.clone(), serve_config, text, llm.engine, backend);
    for (name, path) in &config.adapters {
        state
            .load_adapter(name, path)
            .map_err(|error| Error::Config(format!("--lora-modules {name}={path}: {error}")))?;
        say(&format!("adapter {name} from {path}"));
    }
    let reload = Reload {
        keys: config.keys,
        tls: server_tls,
    };
    reload.start(&parts).map_err(io_error(SIGNALS.to_owned()))?;
    if let Some(loading) = loading {
        loading.end().await;
    }
    say(&ready_line);
    supervisor::notify("READY=1");
    let (models, cluster) = match config.models {
        None => (ModelSet::of(state), Some(cluster)),
        Some(models) => {
            let loader = SourceLoader {
                parts: parts.clone(),
                models: models.listed.clone(),
                shared: ModelOptions {
                    options: config.options,
                    limits: config.limits,
                    request: config.request,
                    adapters: Vec::new(),
                },
                hub: None,
                log_format: config.log_format,
            };
            let set = several_models::model_set(models, loader)?;
            set.put_loaded(ModelId(0), memory, state);
            // There are no other nodes. The engine ends with its model, so nothing else may hold it.
            drop(cluster);
            (set, None)
        }
    };
    let sockets = (socket, grpc);
    serve_models(models, sockets, shutdown, cluster.as_ref(), exporter).await
}

/// Serves until the server has drained, and then ends the engines and the export of spans.
async fn serve_models(
    models: ModelSet,
    (mut socket, grpc): (ServerSocket, Option<Listener>),
    shutdown: Shutdown,
    cluster: Option<&Cluster>,
    exporter: Option<OtlpExporter>,
) -> Result<(), Error> {
    let served = corella_server::serve(socket.take_listener(), grpc, models.clone(), shutdown);
    let report = until_drained(served, models.parts(), cluster).await;
    if let Some(exporter) = exporter {
        // The exporter waits for the collector, on a thread of its own.
        let _ = tokio::task::spawn_blocking(move || exporter.finish()).await;
    }
    let report =
        report.map_err(|error| Error::Io(format!("serving on {}", socket.shown()), error))?;
    if report.num_cut_off > 0 {
        tracing::warn!(num_requests = report.num_cut_off, "cut off while running");
    }
    models.close();
    Ok(())
}

/// Serves until the server has drained, and then leaves the cluster.
async fn until_drained(
    served: impl Future<Output = io::Result<DrainReport>>,
    parts: &ServerParts,
    cluster: Option<&Cluster>,
) -> io::Result<DrainReport> {
    // As soon as the server drains, other nodes stop sending requests. The supervisor is told here because this future
    // is awaited: an idle server ends at once, and a separate task might never run.
    let leaving = async {
        parts.draining().await;
        supervisor::notify("STOPPING=1");
        if let Some(cluster) = cluster {
            cluster.0.leave();
        }
    };
    let (mut served, mut leaving) = (std::pin::pin!(served), std::pin::pin!(leaving));
    let report = tokio::select! {
        report = &mut served => {
            // A server that ends without a drain, because its engine is lost, has no sessions to finish.
            if report.is_ok() {
                leaving.await;
            }
            report
        }
        () = &mut leaving => served.await,
    };
    if let (Ok(_), Some(cluster)) = (&report, cluster) {
        cluster.0.finish().await;
    }
    report
}

fn check_grpc_key(name: Option<&str>, keys: &[ApiKey]) -> Result<(), Error> {
    match name.filter(|name| keys.iter().all(|key| key.name != *name)) {
        Some(name) => Err(Error::Config(format!(
            "--grpc-api-key {name}: --api-keys has no key of this name"
        ))),
        None => Ok(()),
    }
}

fn load_tls((cert, key): &(PathBuf, PathBuf)) -> Result<ServerTls, Error> {
    ServerTls::load(cert, key).map_err(|error| Error::Config(error.to_string()))
}

async fn start_kv_events(
    config: &KvEventsConfig,
    llm: &Llm,
    say: &impl Fn(&str),
) -> Result<KvEvents, Error> {
    // The salt gives different models different block hashes, because one router may index the blocks of several
    // models.
    let salt = llm.identity.model.0 as u64;
    let started = KvEvents::start(config, &llm.engine, salt).await;
    let started = started.map_err(|error| Error::Config(format!("--kv-events-config: {error}")))?;
    say(&KvEvents::summary(config));
    Ok(started)
}

async fn start_kv_store(address: KvStoreAddress, llm: &Llm) -> Result<Arc<KvStore>, Error> {
    let identity = llm.identity.digest(llm.hardware.arithmetic());
    let config = KvStoreConfig::new(address.port, address.status_port, identity);
    let started = KvStore::start(&llm.engine, config).await;
    started.map_err(|error| Error::Config(format!("--kv-store: {error}")))
}

/// Returns the collectors of metrics that belong to no model.
fn collectors_of(exporter: Option<&OtlpExporter>) -> Vec<Box<dyn Collector>> {
    let exporter = exporter.cloned();
    exporter
        .map(|exporter| Box::new(exporter) as _)
        .into_iter()
        .collect()
}

fn open_batches(files: FilesConfig) -> Result<Arc<Batches>, Error> {
    let dir = files.dir.display().to_string();
    Batches::open(files).map_err(|error| Error::Io(format!("opening --files-dir {dir}"), error))
}

fn backend(
    llm: &Llm,
    cluster: &Cluster,
    outputs: OutputMetrics,
    kv_store: Option<Arc<KvStore>>,
) -> Backend {
    let loader = || Arc::new(FolderLoader::new(llm)) as Arc<dyn AdapterLoader>;
    let mut collectors = vec![cluster.0.collector()];
    collectors.extend(kv_store.as_ref().map(KvStore::collector));
    let local: Arc<dyn Generate> = Arc::new(cluster.0.clone());
    Backend {
        generator: match kv_store {
            Some(store) => Arc::new(StoreReader::new(store, local)),
            None => local,
        },
        kv_transfer: cluster.kv_transfer(),
        roles: Some(Arc::new(cluster.clone())),
        adapters: llm.engine.adapters().map(|_| loader()),
        outputs,
        collectors,
    }
}

/// The memory of a model that is loaded.
fn memory_of(llm: &Llm) -> ModelMemory {
    let draft = llm.draft_hardware.as_ref();
    let weight_bytes = llm.hardware.executor.weight_bytes;
    ModelMemory {
        weights: (weight_bytes + draft.map_or(0, |draft| draft.weight_bytes)) as u64,
        kv_pool: llm.hardware.kv_bytes + draft.map_or(0, |draft| draft.kv_bytes),
        working: 0,
    }
}

const SIGNALS: &str = "installing signal handlers";

/// Raises the limit of open files, because every connection counts as an open file.
fn make_room_for(max_num_connections: usize) {
    match open_files::raise_limit() {
        Ok(limit) => {
            if let Some(shortage) = open_files::shortage(limit, max_num_connections) {
                tracing::warn!("{shortage}");
            }
        }
        Err(error) => tracing::warn!("cannot raise the limit of open files: {error}"),
    }
}

/// Describes the limits in force, the starting point for tuning a server.
fn limits_line(scheduler: &SchedulerConfig, config: &ServerConfig, max_num_choices: u32) -> String {
    format!(
        "limits: running requests {}, waiting requests {}, waiting prompt tokens {}, tokens per step {}, \
         steps in flight {}, connections {}, request body {} MiB, choices per request {max_num_choices}",
        scheduler.max_num_seqs,
        scheduler.max_queued_requests,
        scheduler.max_queued_tokens,
        scheduler.max_num_batched_tokens,
        scheduler.max_inflight_steps,
        config.max_num_connections,
        config.max_body_bytes >> 20,
    )
}

/// The last line of the start: where the page and the API are.
fn ready_line(address: &str, root_path: &str) -> String {
    match address.starts_with("http") {
        true => format!("ready: page {address}{root_path}/, API {address}{root_path}/v1"),
        false => format!("ready: API {root_path}/v1 on {address}"),
    }
}

/// A request that this model answers. `url` addresses the server in a curl command, without a path of the API.
fn try_line(llm: &Llm, url: &str, has_key: bool) -> String {
    let key = match has_key {
        true => " -H \"authorization: Bearer $CORELLA_API_KEY\"",
        false => "",
    };
    let (path, body) = match (&llm.chat_template, &llm.sentence.classes) {
        _ if llm.config.has_head && llm.chat_template.is_none() => (
            "v1/completions",
            r#"{"prompt": "Once upon a time", "max_tokens": 50}"#,
        ),
        (Some(_), _) if llm.config.has_head => (
            "v1/chat/completions",
            r#"{"messages": [{"role": "user", "content": "Hello!"}]}"#,
        ),
        (_, Some(head)) if head.labels.len() == 1 => (
            "rerank",
            r#"{"query": "a fox", "documents": ["a cub", "a lantern"]}"#,
        ),
        (_, Some(_)) => ("classify", r#"{"input": "a fox"}"#),
        _ => ("v1/embeddings", r#"{"input": "a fox"}"#),
    };
    format!("try: curl {url}/{path}{key} -H 'content-type: application/json' -d '{body}'")
}
