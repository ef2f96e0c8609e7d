//! A server with several models, which are loaded by requests.

use std::sync::Arc;

use corella_engine::Tracer;
use corella_server::{
    ModelId, ModelLoader, ModelSet, ModelSetConfig, ServerConfig, ServerParts, shutdown_signal,
};

use crate::arguments::config::{ModelOptions, Models, Serve};
use crate::arguments::log_format::announce;
use crate::client::otlp::OtlpExporter;
use crate::error::display_bytes::display_bytes;
use crate::model::model_file::open;
use crate::process::supervisor;
use crate::serve::model_loader::SourceLoader;
use crate::serve::reload::Reload;
use crate::serve::server_socket::ServerSocket;
use crate::serve::{
    SIGNALS, collectors_of, load_tls, make_room_for, open_batches, ready_line, serve_models,
};
use crate::{Error, ModelSource};

pub async fn serve(config: Serve, mut models: Models) -> Result<(), Error> {
    let io_error = |what: String| move |error| Error::Io(what, error);
    for model in &models.listed {
        if matches!(&model.source, ModelSource::Path(path) if !path.exists()) {
            open(&model.source)?;
        }
    }
    let socket = ServerSocket::open(config.address).await?;
    let api_keys = config.keys.read()?;
    let tls = config.tls.as_ref().map(load_tls).transpose()?;
    let exporter = config.otlp.map(OtlpExporter::start).transpose()?;
    let shutdown = shutdown_signal().map_err(io_error(SIGNALS.to_owned()))?;
    let server_config = ServerConfig {
        tracer: exporter.clone().map(Tracer::new),
        api_keys,
        tls: tls.clone(),
        ..config.server
    };
    make_room_for(server_config.max_num_connections);
    let batches = config.files.map(open_batches).transpose()?;
    let ready_line = ready_line(&socket.address(tls.is_some()), &server_config.root_path);
    let collectors = collectors_of(exporter.as_ref());
    let parts = ServerParts::new(server_config, batches, None, collectors);
    let say = |line: &str| announce(config.log_format, line);
    say(&summary(&models));
    let loader = SourceLoader {
        parts: parts.clone(),
        models: models.listed.clone(),
        shared: ModelOptions {
            options: config.options,
            limits: config.limits,
            request: config.request,
            adapters: Vec::new(),
        },
        hub: models.hub.take(),
        log_format: config.log_format,
    };
    check_pinned(&models, &loader)?;
    let models = model_set(models, loader)?;
    let reload = Reload {
        keys: config.keys,
        tls,
    };
    reload.start(&parts).map_err(io_error(SIGNALS.to_owned()))?;
    say(&ready_line);
    supervisor::notify("READY=1");
    models.load_pinned();
    serve_models(models, (socket, None), shutdown, None, exporter).await
}

/// The models of a server, of which none is loaded.
pub fn model_set(models: Models, loader: SourceLoader) -> Result<ModelSet, Error> {
    let parts = loader.parts.clone();
    let config = ModelSetConfig {
        models: models
            .listed
            .into_iter()
            .map(|model| model.setting)
            .collect(),
        has_several: models.has_several,
        max_memory_bytes: models.memory_bytes,
        load_timeout: models.load_timeout,
        loader: Some(Arc::new(loader)),
    };
    ModelSet::new(parts, config).map_err(Error::Config)
}

/// Refuses pinned models that do not fit into memory together.
fn check_pinned(models: &Models, loader: &SourceLoader) -> Result<(), Error> {
    let mut needed_bytes = 0u64;
    let mut figures = Vec::new();
    for (index, model) in models.listed.iter().enumerate() {
        let name = model.setting.names.first().map_or("", String::as_str);
        if !model.setting.is_pinned {
            continue;
        }
        let plan = loader.plan(ModelId(index), name);
        let plan =
            plan.map_err(|error| Error::Config(format!("{name}, which is pinned: {error}")))?;
        needed_bytes = needed_bytes.saturating_add(plan.total());
        figures.push(format!("{name} {plan}"));
    }
    match needed_bytes <= models.memory_bytes {
        true => Ok(()),
        false => Err(Error::Config(format!(
            "the pinned models need {} together, and --model-memory is {}: {}",
            display_bytes(needed_bytes),
            display_bytes(models.memory_bytes),
            figures.join(", ")
        ))),
    }
}

fn summary(models: &Models) -> String {
    let settings = models.listed.iter().map(|model| &model.setting);
    let names = settings.filter_map(|setting| setting.names.first());
    let names: Vec<_> = names.map(String::as_str).collect();
    let further = match models.hub {
        None => "",
        Some(_) => ", and those of the hub's cache",
    };
    let num = match names.len() {
        1 => "1 model has".to_owned(),
        num => format!("{num} models share"),
    };
    format!(
        "{num} {}, loaded by requests: {}{further}",
        display_bytes(models.memory_bytes),
        names.join(", ")
    )
}
