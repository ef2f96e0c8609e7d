//! Two compatible nodes, and a request that they serve together.

use corella_core::session::{
    Allocate, FirstToken, Hello, KvShape, NodeIncarnation, SessionConfig, SessionKey, Submission,
    ToPrefill, Tokens,
};
use corella_core::{
    CacheUse, FinishReason, Incarnation, NodeId, Request, RequestId, RequestOutput, Sample,
    SamplingParams, SessionId, StoppingCriteria,
};

pub const PREFILL: NodeId = NodeId(1);
pub const DECODE: NodeId = NodeId(2);
pub const NUM_ROWS: u32 = 10;
pub const SECOND_US: u64 = 1_000_000;

/// One row has 100 kB, so that all ten take a second at the smallest bandwidth.
pub fn config() -> SessionConfig {
    SessionConfig::new(100_000)
}

pub fn hello(incarnation: u64) -> Hello {
    Hello {
        instance: "a node".into(),
        incarnation: Incarnation(incarnation),
        protocol_major: 1,
        protocol_minor: 0,
        model_fingerprint: 11,
        tokenizer_digest: 12,
        kv_shape: KvShape {
            num_layers: 2,
            num_kv_heads: 2,
            head_dim: 8,
            num_ranks: 1,
            window_digest: 0,
        },
        kv_format: "bf16".into(),
        page_size: 4,
        element_order: "plain".into(),
        weight_format: "bf16".into(),
        instruction_set: "avx512".into(),
        group: "".into(),
    }
}

pub fn peer(node: u32, incarnation: u64) -> NodeIncarnation {
    NodeIncarnation {
        node: NodeId(node),
        incarnation: Incarnation(incarnation),
    }
}

/// Both nodes are in their fifth incarnation.
pub fn key(session: u128, attempt: u32) -> SessionKey {
    SessionKey {
        session: SessionId(session),
        attempt,
        prefill_incarnation: Incarnation(5),
        decode_incarnation: Incarnation(5),
    }
}

pub fn submission(session: u128) -> Submission {
    Submission {
        session: SessionId(session),
        request: Request::greedy(RequestId(0), (0..NUM_ROWS).collect(), 8),
        max_tokens: 8,
        deadline_us: None,
        siblings: None,
        adapter: None,
        constraint: None,
        trace_id: None,
        asks_first: false,
    }
}

pub fn allocate() -> Allocate {
    Allocate {
        prompt: (0..NUM_ROWS).collect(),
        output: Vec::new(),
        sampling: SamplingParams::GREEDY,
        stopping: StoppingCriteria::default(),
        priority: 0,
        namespace: Default::default(),
        remaining_us: None,
        max_tpot_us: None,
        siblings: None,
        adapter: None,
        constraint: None,
        trace_id: None,
    }
}

pub fn sample(token: u32) -> Sample {
    Sample {
        token,
        logprobs: None,
    }
}

pub fn first_token(token: u32) -> Box<FirstToken> {
    Box::new(FirstToken {
        sample: sample(token),
        num_cached_tokens: 0,
    })
}

pub fn tokens(first_position: u32, tokens: &[u32]) -> ToPrefill {
    ToPrefill::Tokens(Tokens {
        first_position,
        samples: tokens.iter().map(|&token| sample(token)).collect(),
    })
}

pub fn output(request: u64, token: Option<u32>, finish: Option<FinishReason>) -> RequestOutput {
    RequestOutput {
        request: RequestId(request),
        sample: token.map(sample),
        prompt_logprobs: [].into(),
        hidden_state: None,
        finish,
        num_prompt_tokens: NUM_ROWS,
        cache_use: CacheUse {
            num_cached_tokens: 4,
            ..CacheUse::default()
        },
        num_output_tokens: 0,
        queue_us: 7,
    }
}
