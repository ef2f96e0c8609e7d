//! KV events for routers: publishes the blocks of this server's prefix cache, as vLLM does.
//!
//! The [`hub`] is the one subscriber to the engine's memory and to its disk. It numbers batches of events and keeps the
//! latest in a bounded history, from which every ZMQ subscriber reads at its own pace ([`publisher`]), and again after a
//! gap ([`replay`]). None of this can slow the engine: if the hub is late, fewer events are made, and a late subscriber
//! skips batches.

mod batch;
mod config;
mod hub;
mod publisher;
mod replay;
pub mod zmtp;
mod zmtp_connection;

use std::fmt;
use std::sync::Arc;

use corella_engine::Engine;
use prometheus_client::collector::Collector;
use prometheus_client::encoding::DescriptorEncoder;
use prometheus_client::metrics::counter::ConstCounter;
use prometheus_client::metrics::gauge::ConstGauge;
use tokio::net::TcpListener;

use config::Endpoint;
pub use config::KvEventsConfig;
use hub::Hub;

use crate::wire::metric_series::encode;

/// A running publisher. It lasts as long as the engine and the runtime.
#[derive(Clone, Debug)]
pub struct KvEvents {
    hub: Arc<Hub>,
}

impl KvEvents {
    /// Binds the sockets, on the caller's tokio runtime, and publishes from then on. `salt` seeds the hashes of blocks.
    pub async fn start(
        config: &KvEventsConfig,
        engine: &Engine,
        salt: u64,
    ) -> Result<Self, String> {
        let limits = engine.limits();
        if !limits.enable_prefix_caching {
            return Err(
                "enable_kv_cache_events: there are no events without prefix caching".into(),
            );
        }
        let publish = match &config.endpoint {
            Endpoint::Bind(address) => Some(bind("endpoint", address).await?),
            Endpoint::Connect(_) => None,
        };
        let replay = match &config.replay_endpoint {
            Some(address) => Some(bind("replay_endpoint", address).await?),
            None => None,
        };
        let events = engine.subscribe_kv_events(salt);
        let disk = engine.subscribe_disk_events(salt);
        let hub = Hub::start(config, events, disk, limits.page_size)
            .map_err(|error| format!("its thread does not start: {error}"))?;
        let topic: Arc<[u8]> = config.topic.as_bytes().into();
        match (publish, &config.endpoint) {
            (Some(listener), _) => {
                tokio::spawn(publisher::listen(listener, hub.clone(), topic));
            }
            (None, Endpoint::Connect(address) | Endpoint::Bind(address)) => {
                tokio::spawn(publisher::connect(address.clone(), hub.clone(), topic));
            }
        }
        if let Some(listener) = replay {
            tokio::spawn(replay::listen(listener, hub.clone()));
        }
        Ok(Self { hub })
    }

    /// Returns the text for the start-up lines.
    pub fn summary(config: &KvEventsConfig) -> String {
        let endpoint = match &config.endpoint {
            Endpoint::Bind(address) => format!("on tcp://{address}"),
            Endpoint::Connect(address) => format!("to tcp://{address}"),
        };
        match &config.replay_endpoint {
            Some(address) => format!("KV events {endpoint}, missed ones on tcp://{address}"),
            None => format!("KV events {endpoint}"),
        }
    }

    /// Returns a collector of the publisher's metrics.
    pub fn collector(&self) -> Box<dyn Collector> {
        Box::new(self.clone())
    }
}

async fn bind(key: &str, address: &str) -> Result<TcpListener, String> {
    let bound = TcpListener::bind(address).await;
    bound.map_err(|error| format!("{key}: cannot listen on tcp://{address}: {error}"))
}

impl Collector for KvEvents {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> fmt::Result {
        let stats = self.hub.stats();
        let gauges = [(
            "corella_kv_event_subscribers",
            "Connections that have subscribed to KV events",
            stats.num_subscribers,
        )];
        let counters = [
            (
                "corella_kv_event_batches",
                "Batches of KV events that were published",
                stats.num_batches,
            ),
            (
                "corella_kv_event_batches_missed",
                "Batches that a subscriber was too slow for, counted for each subscriber",
                stats.num_missed,
            ),
            (
                "corella_kv_event_replays",
                "Requests for batches of KV events that were missed",
                stats.num_replays,
            ),
        ];
        for (name, help, value) in gauges {
            encode(&mut encoder, name, help, &ConstGauge::new(value as i64))?;
        }
        for (name, help, value) in counters {
            encode(&mut encoder, name, help, &ConstCounter::new(value))?;
        }
        Ok(())
    }
}
