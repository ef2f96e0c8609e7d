//! A server with several models, which are loaded by requests.

use std::sync::Arc;

use corella_engine::Tracer;
use corella_server::{ModelSet, ModelSetConfig, ServerConfig, ServerParts, shutdown_signal};

use crate::arguments::config::{Models, Serve};
use crate::arguments::log_format::announce;
use crate::client::otlp::OtlpExporter;
use crate::error::display_bytes::display_bytes;
use crate::model::model_file::open;
use crate::process::supervisor;
use crate::serve::model_loader::SourceLoader;
use crate::serve::reload::Reload;
use crate::serve::server_socket::ServerSocket;
use crate::serve::{SIGNALS, load_tls, make_room_for, open_batches, ready_line, until_drained};
use crate::{Error, ModelSource};

pub async fn serve(config: Serve, models: Models) -> Result<(), Error> {
    let io_error = |what: String| move |error| Error::Io(what, error);
    for source in &models.sources {
        if matches!(source, ModelSource::Path(path) if !path.exists()) {
            open(source)?;
        }
    }
    let mut socket = ServerSocket::open(config.address).await?;
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
    let parts = ServerParts::new(server_config, batches, None);
    let say = |line: &str| announce(config.log_format, line);
    say(&summary(&models));
    let loader = SourceLoader {
        parts: parts.clone(),
        sources: models.sources.clone(),
        options: config.options,
        limits: config.limits,
        request: config.request,
        log_format: config.log_format,
    };
    let models = model_set(models, loader)?;
    let reload = Reload {
        keys: config.keys,
        tls,
    };
    reload.start(&parts).map_err(io_error(SIGNALS.to_owned()))?;
    say(&ready_line);
    supervisor::notify("READY=1");
    let served = corella_server::serve(socket.take_listener(), models.clone(), shutdown);
    let report = until_drained(served, &parts, None).await;
    if let Some(exporter) = exporter {
        // The exporter waits for the collector, on a thread of its own.
        let _ = tokio::task::spawn_blocking(move || exporter.finish()).await;
    }
    let report = report.map_err(io_error(format!("serving on {}", socket.shown())))?;
    if report.num_cut_off > 0 {
        tracing::warn!(num_requests = report.num_cut_off, "cut off while running");
    }
    models.close();
    Ok(())
}

/// The models of a server, of which none is loaded.
pub fn model_set(models: Models, loader: SourceLoader) -> Result<ModelSet, Error> {
    let parts = loader.parts.clone();
    let config = ModelSetConfig {
        models: models.settings,
        max_memory_bytes: models.memory_bytes,
        load_timeout: models.load_timeout,
        loader: Some(Arc::new(loader)),
    };
    ModelSet::new(parts, config).map_err(Error::Config)
}

fn summary(models: &Models) -> String {
    let names = models
        .settings
        .iter()
        .filter_map(|model| model.names.first());
    let names: Vec<_> = names.map(String::as_str).collect();
    format!(
        "{} models share {}, and are loaded by requests: {}",
        names.len(),
        display_bytes(models.memory_bytes),
        names.join(", ")
    )
}
