//! Decides the number of KV pages, and the longest context that they allow.

use corella_core::SchedulerConfig;
use corella_engine::KvPlaces;
use corella_model::{DecoderSpec, DeviceMemory};

use crate::error::display_bytes::display_bytes;
use crate::{Error, KvSpill, LlmOptions};

/// The input of the plan.
pub(crate) struct KvDemand {
    /// The limits of requests, except those that the plan sets.
    pub limits: SchedulerConfig,
    /// Bytes of a page: keys and values of all layers of a KV group.
    pub page_bytes: u64,
    /// Longest context of the model.
    pub max_position: usize,
    /// The context to plan for; `None` means the longest that model and memory allow.
    pub max_model_len: Option<u32>,
    /// The memory to use; `None` means `default_bytes`, or less if requests cannot use that much.
    pub kv_cache_bytes: Option<u64>,
    pub default_bytes: u64,
    /// Memory that the weights would leave if nothing else ran.
    pub total_bytes: u64,
    /// All memory of the host, if weights and pages lie elsewhere.
    pub host_bytes: Option<u64>,
    /// A format in which the weights would leave more memory, as advice.
    pub smaller_weights: Option<String>,
    /// Whether the memory is shared with other models of the server.
    pub is_shared: bool,
}

#[derive(Debug, PartialEq, Eq)]
pub(crate) struct KvPlan {
    pub num_pages: u32,
    pub max_model_len: u32,
    /// Whether the pages, and neither the model nor the operator, limit the context.
    pub is_context_cut: bool,
}

impl KvDemand {
    /// Returns the demand of a model whose weights take `packed_bytes`, on a device in its present state.
    pub fn new(
        spec: &DecoderSpec,
        limits: &SchedulerConfig,
        options: &LlmOptions,
        page_bytes: u64,
        packed_bytes: u64,
        memory: DeviceMemory,
    ) -> Self {
        Self {
            limits: limits.clone(),
            page_bytes,
            max_position: spec.max_position,
            max_model_len: options.max_model_len,
            kv_cache_bytes: options.kv_cache_bytes,
            default_bytes: {
                let left = memory.available_bytes.saturating_sub(packed_bytes);
                (left as f64 * memory.default_share) as u64
            },
            total_bytes: memory.total_bytes.saturating_sub(packed_bytes),
            host_bytes: memory.host_bytes,
            smaller_weights: None,
            is_shared: options.shared_memory_bytes.is_some(),
        }
    }
}

impl KvPlan {
    pub fn new(demand: &KvDemand) -> Result<Self, Error> {
        let page_bytes = demand.page_bytes;
        let max_position = u32::try_from(demand.max_position).unwrap_or(u32::MAX);
        let wanted_len = demand.max_model_len.unwrap_or(max_position);
        if wanted_len > max_position {
            return Err(Error::Config(format!(
                "--max-model-len {wanted_len} is longer than the model's context of {max_position} \
                 tokens"
            )));
        }

        let num_pages = match demand.kv_cache_bytes {
            // Requests touch pages one by one, so an excess would only be noticed when the system
            // kills the process.
            Some(bytes) if bytes > demand.total_bytes => {
                return Err(Error::Config(format!(
                    "--kv-cache-memory asks for {}, and the weights leave {} of {}",
                    display_bytes(bytes),
                    display_bytes(demand.total_bytes),
                    match demand.is_shared {
                        true => "--model-memory",
                        false => "this machine's memory",
                    }
                )));
            }
            Some(bytes) => bytes / page_bytes,
            None => {
                let limits = &demand.limits;
                let num_step_rows = limits.largest_chunk();
                let num_rows_at_once = num_step_rows.saturating_mul(limits.max_inflight_steps);
                let num_pages = limits.num_pages_of(wanted_len, num_rows_at_once);
                let useful = u64::from(num_pages) * u64::from(limits.max_num_seqs);
                useful.min(demand.default_bytes / page_bytes)
            }
        };
        let num_pages = u32::try_from(num_pages).unwrap_or(u32::MAX);
        let limits = SchedulerConfig {
            max_model_len: wanted_len,
            ..demand.limits.clone()
        };
        let num_tokens = limits.max_len_in(num_pages);
        let short = |needed_tokens: u32| {
            let needed = u64::from(limits.num_least_pages(needed_tokens)) * page_bytes;
            let smaller = match (&demand.smaller_weights, demand.kv_cache_bytes) {
                (Some(smaller), None) => format!(", or let the weights leave more: {smaller}"),
                _ => String::new(),
            };
            let option = match demand.is_shared && demand.kv_cache_bytes.is_none() {
                true => "--model-memory",
                false => "--kv-cache-memory",
            };
            Error::Config(format!(
                "a context of {needed_tokens} tokens needs {} of KV cache, and there is room for \
                 {num_tokens} tokens; raise {option} or lower --max-model-len{smaller}",
                display_bytes(needed)
            ))
        };
        let max_model_len = match demand.max_model_len {
            Some(asked) if asked > num_tokens => return Err(short(asked)),
            Some(asked) => asked,
            None => max_position.min(num_tokens),
        };
        if max_model_len < 2 {
            return Err(short(limits.page_size));
        }
        Ok(Self {
            num_pages,
            max_model_len,
            is_context_cut: demand.max_model_len.is_none() && max_model_len < max_position,
        })
    }

    /// Returns the number of pages that preempted requests may keep in spill memory. `page_bytes` is the size of a
    /// spilled page. It excludes the draft model's keys and values, which are computed again.
    pub fn max_spilled_pages(
        &self,
        spill: KvSpill,
        page_bytes: u64,
        demand: &KvDemand,
    ) -> Result<u32, Error> {
        let bytes = match spill {
            KvSpill::QuarterOfCache => return Ok(self.num_pages / 4),
            KvSpill::Bytes(0) => return Ok(0),
            KvSpill::Bytes(bytes) => bytes,
        };
        let option = "--kv-spill-memory";
        let left_bytes = self.host_bytes_left(demand);
        if bytes > left_bytes {
            return Err(Error::Config(format!(
                "{option} asks for {}, and there are {} of this machine's memory for it",
                display_bytes(bytes),
                display_bytes(left_bytes)
            )));
        }
        if bytes < page_bytes {
            return Err(Error::Config(format!(
                "{option} {} does not hold one KV page, which takes {}; leave it out to keep nothing",
                display_bytes(bytes),
                display_bytes(page_bytes)
            )));
        }
        Ok(u32::try_from(bytes / page_bytes).unwrap_or(u32::MAX))
    }

    /// Refuses `--kv-host-memory` with `bytes` if its files hold no page, or if the host has less memory beside the
    /// spilled pages. `page_bytes` is the size of a page in the files and of a spilled page.
    pub fn check_kv_host_memory(
        &self,
        bytes: u64,
        page_bytes: u64,
        num_spilled_pages: u32,
        demand: &KvDemand,
    ) -> Result<(), Error> {
        let option = "--kv-host-memory";
        let spilled_bytes = u64::from(num_spilled_pages) * page_bytes;
        let left_bytes = self.host_bytes_left(demand).saturating_sub(spilled_bytes);
        if bytes > left_bytes {
            return Err(Error::Config(format!(
                "{option} asks for {}, and there are {} of this machine's memory for it, beside {} for \
                 --kv-spill-memory",
                display_bytes(bytes),
                display_bytes(left_bytes),
                display_bytes(spilled_bytes)
            )));
        }
        let least_bytes = KvPlaces::least_memory_bytes(demand.limits.page_size, page_bytes);
        if bytes < least_bytes {
            return Err(Error::Config(format!(
                "{option} {} does not hold a KV page in each of its files, which takes {}; leave it out to keep nothing",
                display_bytes(bytes),
                display_bytes(least_bytes)
            )));
        }
        Ok(())
    }

    /// The host's memory beside a KV cache in it.
    fn host_bytes_left(&self, demand: &KvDemand) -> u64 {
        let cache_bytes = u64::from(self.num_pages) * demand.page_bytes;
        let beside = || demand.total_bytes.saturating_sub(cache_bytes);
        demand.host_bytes.unwrap_or_else(beside)
    }
}

#[cfg(test)]
mod tests {
    use corella_core::KvGroup;

    use super::*;

    fn demand() -> KvDemand {
        let mut limits = SchedulerConfig::new(1, 16, 2);
        limits.max_num_seqs = 4;
        KvDemand {
            limits,
            page_bytes: 8 << 10,
            max_position: 1024,
            max_model_len: None,
            kv_cache_bytes: None,
            default_bytes: 1 << 29,
            total_bytes: 2 << 30,
            host_bytes: None,
            smaller_weights: None,
            is_shared: false,
        }
    }

    #[test]
    fn no_more_pages_than_the_requests_can_use() {
        let plan = KvPlan::new(&demand()).unwrap();
        assert_eq!((plan.num_pages, plan.max_model_len), (4 * 64, 1024));
        assert!(!plan.is_context_cut);
    }

    #[test]
    fn little_memory_shortens_the_context() {
        let mut demand = demand();
        demand.default_bytes = 10 * (8 << 10);
        let plan = KvPlan::new(&demand).unwrap();
        assert_eq!((plan.num_pages, plan.max_model_len), (10, 160));
        assert!(plan.is_context_cut);
        demand.max_model_len = Some(161);
        let error = KvPlan::new(&demand).unwrap_err().to_string();
        assert!(error.contains("161 tokens needs 88.0 KiB"), "{error}");
        demand.smaller_weights = Some("`--dtype int8` takes about 1 MiB".to_owned());
        let error = KvPlan::new(&demand).unwrap_err().to_string();
        let advice = "lower --max-model-len, or let the weights leave more: `--dtype int8` takes about 1 MiB";
        assert!(error.ends_with(advice), "{error}");
        demand.max_model_len = Some(160);
        let plan = KvPlan::new(&demand).unwrap();
        assert_eq!((plan.max_model_len, plan.is_context_cut), (160, false));
    }

    /// A group without a window takes 64 pages for the longest context. A group with a window of 100 positions touches
    /// at most 40 pages while 512 rows are computed, and 8 while one row is computed.
    #[test]
    fn a_window_needs_few_pages() {
        let mut demand = demand();
        demand.limits.kv_groups = [None, Some(100)].map(|window| KvGroup { window }).to_vec();
        demand.limits.max_inflight_steps = 1;
        demand.limits.max_num_batched_tokens = 512;
        demand.limits.max_prefill_tokens = 512;
        let plan = KvPlan::new(&demand).unwrap();
        assert_eq!((plan.num_pages, plan.max_model_len), (4 * (64 + 40), 1024));
        demand.default_bytes = 20 * (8 << 10);
        let plan = KvPlan::new(&demand).unwrap();
        assert_eq!((plan.num_pages, plan.max_model_len), (20, 12 * 16));
        // All layers have the window, so any context fits into the pages that it touches.
        demand.limits.kv_groups.remove(0);
        demand.default_bytes = 8 * (8 << 10);
        let plan = KvPlan::new(&demand).unwrap();
        assert_eq!((plan.num_pages, plan.max_model_len), (8, 1024));
    }

    #[test]
    fn memory_that_was_asked_for_is_used() {
        let mut demand = demand();
        demand.kv_cache_bytes = Some(1 << 20);
        assert_eq!(KvPlan::new(&demand).unwrap().num_pages, 128);
        demand.kv_cache_bytes = Some(100);
        assert!(KvPlan::new(&demand).is_err());
    }

    #[test]
    fn more_than_the_machine_has_is_refused() {
        let mut demand = demand();
        demand.kv_cache_bytes = Some(2 << 30);
        assert!(KvPlan::new(&demand).is_ok());
        demand.kv_cache_bytes = Some(1 << 40);
        let error = KvPlan::new(&demand).unwrap_err().to_string();
        assert!(
            error.contains("1.0 TiB") && error.contains("2.0 GiB"),
            "{error}"
        );
    }

    #[test]
    fn spilled_pages_need_memory_beside_the_cache() {
        let demand = demand();
        let plan = KvPlan::new(&demand).unwrap();
        let page_bytes = demand.page_bytes;
        let spilled = |spill| plan.max_spilled_pages(spill, page_bytes, &demand);
        assert_eq!(spilled(KvSpill::QuarterOfCache).unwrap(), 64);
        assert_eq!(spilled(KvSpill::Bytes(0)).unwrap(), 0);
        assert_eq!(spilled(KvSpill::Bytes(3 * page_bytes + 1)).unwrap(), 3);
        let error = spilled(KvSpill::Bytes(2 << 30)).unwrap_err().to_string();
        assert!(
            error.contains("--kv-spill-memory asks for 2.0 GiB"),
            "{error}"
        );
        let error = spilled(KvSpill::Bytes(page_bytes - 1)).unwrap_err();
        assert!(error.to_string().contains("8.0 KiB"), "{error}");
        // The cache fills the GPU's memory, so the host's is free.
        let beside_gpu = KvDemand {
            total_bytes: plan.num_pages as u64 * page_bytes,
            host_bytes: Some(4 << 30),
            ..demand
        };
        let spilled =
            |bytes| plan.max_spilled_pages(KvSpill::Bytes(bytes), page_bytes, &beside_gpu);
        assert_eq!(u64::from(spilled(2 << 30).unwrap()), (2 << 30) / page_bytes);
        assert!(spilled(5 << 30).is_err());
    }

    #[test]
    fn kept_pages_need_memory_beside_spilled_pages() {
        let demand = KvDemand {
            host_bytes: Some(4 << 30),
            ..demand()
        };
        let plan = KvPlan::new(&demand).unwrap();
        let page_bytes = demand.page_bytes;
        let num_spilled = ((1 << 30) / page_bytes) as u32;
        let check =
            |bytes, num_spilled| plan.check_kv_host_memory(bytes, page_bytes, num_spilled, &demand);
        assert!(check(4 << 30, 0).is_ok());
        assert!(check(3 << 30, num_spilled).is_ok());
        let error = check((3 << 30) + 1, num_spilled).unwrap_err().to_string();
        assert!(
            error.contains("beside 1.0 GiB for --kv-spill-memory"),
            "{error}"
        );
        // A file has a label of 4 KiB, and its page a header of a sector.
        let least_bytes = 2 * (4096 + 512 + page_bytes);
        assert!(check(least_bytes, 0).is_ok());
        let error = check(least_bytes - 1, 0).unwrap_err().to_string();
        assert!(error.contains("25.0 KiB"), "{error}");
    }

    #[test]
    fn a_context_beyond_the_models_is_refused() {
        let mut demand = demand();
        demand.max_model_len = Some(1025);
        let error = KvPlan::new(&demand).unwrap_err().to_string();
        assert!(error.contains("1024"), "{error}");
    }
}
