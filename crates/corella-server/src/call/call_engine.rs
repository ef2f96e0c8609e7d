//! The parts that calls share: the generator of tokens, the served model and the memory of earlier prompts.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use corella_engine::Generate;

use crate::call::prompt_memory::PromptMemory;
use crate::clock::{numbered_seed, random_seed};
use crate::text::served_model::ServedModel;

pub struct CallEngine {
    pub served: Arc<ServedModel>,
    /// The generator of answers: the engine, or the engine with other nodes.
    pub generator: Arc<dyn Generate>,
    pub prompts: Arc<PromptMemory>,
    /// An atomic, because every token reads it.
    is_cutting_off: AtomicBool,
    /// The number of calls so far to which their senders gave no number.
    num_calls: AtomicU64,
}

impl CallEngine {
    pub fn new(
        served: Arc<ServedModel>,
        generator: Arc<dyn Generate>,
        prompts: PromptMemory,
    ) -> Self {
        Self {
            served,
            generator,
            prompts: Arc::new(prompts),
            is_cutting_off: AtomicBool::new(false),
            num_calls: AtomicU64::new(0),
        }
    }

    /// Returns the seed of a call without `seed`. `number` is the sender's number for the call, if there is one.
    pub fn default_seed(&self, number: Option<u64>) -> u64 {
        let number = number.unwrap_or_else(|| self.num_calls.fetch_add(1, Ordering::Relaxed));
        let seed = self.served.config.seed;
        seed.map_or_else(random_seed, |seed| numbered_seed(seed, number))
    }

    /// Ends every generation with an error at its next poll. This wakes no task: the caller must then wake the
    /// connections, which poll their generations.
    pub fn cut_off(&self) {
        self.is_cutting_off.store(true, Ordering::Relaxed);
    }

    pub fn is_cutting_off(&self) -> bool {
        self.is_cutting_off.load(Ordering::Relaxed)
    }
}
