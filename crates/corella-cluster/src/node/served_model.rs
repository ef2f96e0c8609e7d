//! The model of a node: its engine, and its facts for other nodes.

use std::sync::Arc;
use std::time::{SystemTime, UNIX_EPOCH};

use corella_core::Incarnation;
use corella_core::session::{Hello, KvShape, SessionConfig};
use corella_engine::{ConstraintMaker, Engine};
use corella_model::KvGeometry;

use super::config::NodeConfig;

/// The version of the protocol between nodes of a cluster. Nodes of different major versions do not work together.
/// Version 3 added constraints on whole answers, which older nodes would ignore, and names adapters by their contents.
/// Version 4 added the arithmetic of rows to the greetings of KV connections.
const PROTOCOL: (u32, u32) = (4, 3);

pub struct ServedModel {
    pub engine: Engine,
    /// Makes the constraints of requests from other nodes.
    pub constraints: Arc<dyn ConstraintMaker>,
    /// The greeting without the node's name and incarnation.
    hello: Hello,
}

/// The facts by which nodes check that they have the same model, or name the difference.
pub struct ModelFacts {
    pub model_fingerprint: u128,
    pub tokenizer_digest: u128,
    pub kv_format: Box<str>,
    pub weight_format: Box<str>,
    pub instruction_set: Box<str>,
}

impl ModelFacts {
    /// Returns the greeting for the model in pages of this geometry, without the node's name and incarnation.
    pub fn hello(self, geometry: &KvGeometry) -> Hello {
        Hello {
            instance: "".into(),
            incarnation: Incarnation(0),
            protocol_major: PROTOCOL.0,
            protocol_minor: PROTOCOL.1,
            model_fingerprint: self.model_fingerprint,
            tokenizer_digest: self.tokenizer_digest,
            kv_shape: KvShape {
                num_layers: geometry.layers.num_layers(),
                num_kv_heads: geometry.num_kv_heads,
                head_dim: geometry.head_dim,
                num_ranks: 1,
                window_digest: geometry.layers.window_digest(),
            },
            kv_format: self.kv_format,
            page_size: geometry.page_size,
            element_order: format!("{:?}", geometry.order).to_lowercase().into(),
            weight_format: self.weight_format,
            instruction_set: self.instruction_set,
            group: "".into(),
        }
    }
}

impl ServedModel {
    pub fn new(engine: Engine, constraints: Arc<dyn ConstraintMaker>, facts: ModelFacts) -> Self {
        let hello = facts.hello(engine.kv_pages().geometry());
        Self {
            engine,
            constraints,
            hello,
        }
    }

    /// Returns the greeting of a role that starts now: each start is another incarnation.
    pub fn hello(&self, instance: &str, group: &str) -> Hello {
        Hello {
            instance: instance.into(),
            group: group.into(),
            incarnation: Incarnation(microseconds_since_1970()),
            ..self.hello.clone()
        }
    }

    pub fn session_config(&self, config: &NodeConfig) -> SessionConfig {
        let session = SessionConfig::new(self.row_bytes());
        // The size of a recurrent state does not grow with the prompt, so its time is a part of the base time.
        let state_us = self.state_bytes() * 1_000_000 / session.min_bandwidth_bytes_per_s.max(1);
        SessionConfig {
            load_base_us: config.load_time.as_micros() as u64 + state_us,
            hold_lease_us: self.engine.limits().hold_lease_us,
            max_prompt_tokens: config.max_prompt_tokens.unwrap_or(u32::MAX),
            ..session
        }
    }

    /// The limit of the bytes of one sequence's recurrent state. The state is largest in the middle of a chunk.
    fn state_bytes(&self) -> u64 {
        let states = self.engine.kv_pages().states();
        states.map_or(0, |states| states.total_bytes(u32::MAX) as u64)
    }

    /// Bytes of K and V of one token in all layers.
    pub fn row_bytes(&self) -> u64 {
        let geometry = self.engine.kv_pages().geometry();
        let num_layers = geometry.layers.num_layers() as usize;
        (num_layers * geometry.layer_bytes() / geometry.page_size as usize) as u64
    }
}

/// Returns the number of an incarnation. A later start has a larger number, unless the clock is set back.
fn microseconds_since_1970() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH);
    since.map_or(1, |since| since.as_micros() as u64)
}
