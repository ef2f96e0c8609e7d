//! The adapters in use by calls and by requests of other nodes: vLLM's `lora_requests_info`. Gateways choose a server
//! where the adapter is in use already.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use prometheus_client::collector::Collector;
use prometheus_client::encoding::{DescriptorEncoder, EncodeLabelSet};
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;

use crate::clock::unix_now_s;
use crate::wire::metric_series::encode_both;

/// Counts the calls of each adapter, including requests from other nodes. Only adapters in use have an entry.
#[derive(Debug, Default)]
pub struct AdapterUses {
    by_name: Mutex<BTreeMap<String, CallCount>>,
}

#[derive(Debug, Default)]
struct CallCount {
    /// Calls without an output.
    num_waiting: usize,
    /// Calls with an output.
    num_running: usize,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct UseLabels {
    max_lora: String,
    running_lora_adapters: String,
    waiting_lora_adapters: String,
}

impl AdapterUses {
    /// Counts a submitted call until the returned value is dropped.
    pub fn begin(self: &Arc<Self>, name: &str) -> AdapterCall {
        self.lock().entry(name.to_owned()).or_default().num_waiting += 1;
        AdapterCall {
            uses: self.clone(),
            name: name.to_owned(),
            is_running: false,
        }
    }

    fn labels(&self, max_adapters: usize) -> UseLabels {
        let by_name = self.lock();
        let names = |is_one: fn(&CallCount) -> bool| {
            let names = by_name.iter().filter(|(_, count)| is_one(count));
            names
                .map(|(name, _)| name.as_str())
                .collect::<Vec<_>>()
                .join(",")
        };
        UseLabels {
            max_lora: max_adapters.to_string(),
            running_lora_adapters: names(|count| count.num_running > 0),
            waiting_lora_adapters: names(|count| count.num_waiting > 0),
        }
    }

    fn lock(&self) -> MutexGuard<'_, BTreeMap<String, CallCount>> {
        self.by_name.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The collector of `lora_requests_info`.
#[derive(Debug)]
pub struct AdapterMetrics {
    pub uses: Arc<AdapterUses>,
    pub max_adapters: usize,
}

impl Collector for AdapterMetrics {
    /// As in vLLM, the value is the time of the scrape: a gateway takes the latest of several series.
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> fmt::Result {
        let family = Family::<UseLabels, Gauge>::default();
        family
            .get_or_create(&self.uses.labels(self.max_adapters))
            .set(unix_now_s() as i64);
        let help = "Adapters in use: of calls that wait for their first output, and of calls that have one";
        encode_both(&mut encoder, "lora_requests_info", help, &family)
    }
}

/// A call that uses an adapter.
#[derive(Debug)]
pub struct AdapterCall {
    uses: Arc<AdapterUses>,
    name: String,
    is_running: bool,
}

impl AdapterCall {
    /// Notes an output. Only the first output takes the lock.
    pub fn handle_output(&mut self) {
        if self.is_running {
            return;
        }
        self.is_running = true;
        if let Some(count) = self.uses.lock().get_mut(&self.name) {
            count.num_waiting -= 1;
            count.num_running += 1;
        }
    }
}

impl Drop for AdapterCall {
    fn drop(&mut self) {
        let mut by_name = self.uses.lock();
        if let Some(count) = by_name.get_mut(&self.name) {
            match self.is_running {
                true => count.num_running -= 1,
                false => count.num_waiting -= 1,
            }
            if (count.num_waiting, count.num_running) == (0, 0) {
                by_name.remove(&self.name);
            }
        }
    }
}
