//! The engine of calls: it generates their tokens, and knows the text of the tokens.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use corella_engine::Generate;

use crate::call::prompt_memory::PromptMemory;
use crate::text::served_model::ServedModel;

pub struct CallEngine {
    pub served: Arc<ServedModel>,
    /// The generator of answers: the engine, or the engine with other nodes.
    pub generator: Arc<dyn Generate>,
    pub prompts: Arc<PromptMemory>,
    /// An atomic, because every token reads it.
    is_cutting_off: AtomicBool,
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
        }
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
