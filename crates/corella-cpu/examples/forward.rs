//! Prefill and decode of the Qwen3-0.6B shape beside what the machine can do at best.
//!
//! `cargo run --release -p corella-cpu --example forward -- [threads] [isa]`, with random
//! bf16 weights. `isa` is `avx512`, `avx2` or `portable`.

use std::sync::Arc;
use std::time::Instant;

use corella_core::{SamplingParams, TokenId};
use corella_cpu::{CpuConfig, CpuExecutor, Isa, MachineLimits, measure_limits};
use corella_model::{
    Activation, AttentionSpec, BatchBuilder, DType, DecoderSpec, DecoderWeights, Executor,
    LayerWeights, MlpSpec, RotaryScaling, RotarySpec, Storage, Tensor,
};

const PAGE_SIZE: usize = 16;
const NUM_PAGES: usize = 1024;
const PROMPT_LEN: usize = 512;

fn main() {
    let mut args = std::env::args().skip(1);
    let num_threads = args.next().map_or(2, |n| n.parse().expect("threads"));
    let isa = args.next().map(|name| match name.as_str() {
        "avx512" => Isa::Avx512,
        "avx2" => Isa::Avx2,
        "portable" => Isa::Portable,
        other => panic!("no instruction set is called {other}"),
    });
    let spec = qwen3_0_6b();
    let config = CpuConfig {
        num_threads,
        weight_dtype: None,
        kv_dtype: DType::Bf16,
        num_pages: NUM_PAGES as u32,
        page_size: PAGE_SIZE as u32,
        max_num_seqs: 16,
        max_num_batched_tokens: 2048,
        max_model_len: 4096,
        isa,
        num_stages: 1,
    };
    let weights = random_weights(&spec);
    let start = Instant::now();
    let mut executor = CpuExecutor::new(spec.clone(), weights, config).expect("executor");
    let info = executor.info();
    println!(
        "{} on {} threads, {:.2} GB of weights packed in {:.2} s",
        info.isa,
        info.num_threads,
        info.weight_bytes as f64 / 1e9,
        start.elapsed().as_secs_f64()
    );
    let start = Instant::now();
    executor.warm_up().expect("warm-up");
    println!("warm-up {:.3} s", start.elapsed().as_secs_f64());
    let limits = measure_limits(num_threads).expect("limits");
    println!(
        "limits: {:.0} GFLOP/s, {:.1} GB/s",
        limits.flops_per_s / 1e9,
        limits.read_bytes_per_s / 1e9
    );
    let mut bench = Bench {
        executor,
        builder: BatchBuilder::new(0),
        spec,
        limits,
        weight_bytes: info.weight_bytes,
    };
    for _ in 0..3 {
        bench.prefill(PROMPT_LEN);
    }
    for num_seqs in [1, 4, 8, 16] {
        bench.decode(num_seqs, 64, 8);
    }
    bench.decode(1, 2048, 8);
}

struct Bench {
    executor: CpuExecutor,
    builder: BatchBuilder,
    spec: DecoderSpec,
    limits: MachineLimits,
    weight_bytes: usize,
}

impl Bench {
    /// Seconds of the step that the builder holds.
    fn step(&mut self) -> f64 {
        let batch = self.builder.build();
        let start = Instant::now();
        self.executor.submit(Arc::clone(&batch)).expect("submit");
        self.executor
            .sample(batch.step, Vec::new())
            .expect("sample");
        self.executor.wait().expect("step");
        start.elapsed().as_secs_f64()
    }

    fn start(&mut self, slot: usize, len: usize) {
        let pages = NUM_PAGES / 16;
        let pages = if len <= pages * PAGE_SIZE - 64 {
            (slot * pages) as u32..((slot + 1) * pages) as u32
        } else {
            0..NUM_PAGES as u32
        };
        let pages: Vec<u32> = pages.collect();
        let tokens: Vec<TokenId> = (0..len as u32).map(|i| i * 7919 % 150_000).collect();
        self.builder
            .start(slot as u32, len, &SamplingParams::GREEDY);
        self.builder.pages(slot as u32, 0, &pages);
        self.builder.span(slot as u32, 0, &tokens, true);
    }

    fn prefill(&mut self, len: usize) {
        self.start(0, len);
        let seconds = self.step();
        let attention = &self.spec.attention;
        let dense = self.dense_parameters() as f64 * 2.0 * len as f64;
        let pairs = (len * (len + 1) / 2 * attention.num_heads * attention.head_dim) as f64;
        let flops = dense + 4.0 * pairs * self.spec.num_layers as f64;
        println!(
            "prefill {len}: {:.1} tokens/s, {:.1} % of peak",
            len as f64 / seconds,
            100.0 * flops / seconds / self.limits.flops_per_s
        );
    }

    fn decode(&mut self, num_seqs: usize, len: usize, num_steps: usize) {
        for slot in 0..num_seqs {
            self.start(slot, len);
        }
        self.step();
        let mut seconds = 0.0;
        for step in 0..num_steps {
            for slot in 0..num_seqs {
                let token = (step * 31 + slot) as TokenId;
                self.builder.span(slot as u32, len + step, &[token], true);
            }
            seconds += self.step();
        }
        let attention = &self.spec.attention;
        let row_bytes = 2 * 2 * attention.num_kv_heads * attention.head_dim;
        let kv_bytes = num_seqs * (len + num_steps / 2) * row_bytes * self.spec.num_layers;
        let bytes = (self.weight_bytes + kv_bytes) as f64;
        let steps_per_s = num_steps as f64 / seconds;
        println!(
            "decode {num_seqs} after {len}: {:.1} tokens/s, {:.1} GB/s, {:.1} % of bandwidth",
            num_seqs as f64 * steps_per_s,
            bytes * steps_per_s / 1e9,
            100.0 * bytes * steps_per_s / self.limits.read_bytes_per_s
        );
    }

    /// Of the layers; the head works for one row only.
    fn dense_parameters(&self) -> usize {
        let spec = &self.spec;
        let attention = &spec.attention;
        let heads = 2 * attention.num_heads + 2 * attention.num_kv_heads;
        let mlp = 3 * spec.mlp.intermediate_size;
        spec.num_layers * spec.hidden_size * (heads * attention.head_dim + mlp)
    }
}

fn qwen3_0_6b() -> DecoderSpec {
    DecoderSpec {
        vocab_size: 151_936,
        hidden_size: 1024,
        num_layers: 28,
        max_position: 40_960,
        norm_eps: 1e-6,
        rotary: RotarySpec {
            theta: 1e6,
            scaling: RotaryScaling::None,
        },
        attention: AttentionSpec {
            num_heads: 16,
            num_kv_heads: 8,
            head_dim: 128,
            qk_norm: true,
            qkv_bias: false,
            output_bias: false,
        },
        mlp: MlpSpec {
            intermediate_size: 3072,
            activation: Activation::Silu,
            bias: false,
        },
        tied_embeddings: true,
    }
}

fn random_weights(spec: &DecoderSpec) -> DecoderWeights {
    let mut state = 1;
    let (hidden, mlp) = (spec.hidden_size, spec.mlp.intermediate_size);
    let head_dim = spec.attention.head_dim;
    let num_q = spec.attention.num_heads * head_dim;
    let num_kv = spec.attention.num_kv_heads * head_dim;
    let mut tensor = |shape: &[usize]| random_tensor(&mut state, shape);
    DecoderWeights {
        embed: tensor(&[spec.vocab_size, hidden]),
        layers: (0..spec.num_layers)
            .map(|_| LayerWeights {
                attention_norm: tensor(&[hidden]),
                q: tensor(&[num_q, hidden]),
                k: tensor(&[num_kv, hidden]),
                v: tensor(&[num_kv, hidden]),
                o: tensor(&[hidden, num_q]),
                q_bias: None,
                k_bias: None,
                v_bias: None,
                o_bias: None,
                q_norm: Some(tensor(&[head_dim])),
                k_norm: Some(tensor(&[head_dim])),
                mlp_norm: tensor(&[hidden]),
                gate: tensor(&[mlp, hidden]),
                up: tensor(&[mlp, hidden]),
                down: tensor(&[hidden, mlp]),
                gate_bias: None,
                up_bias: None,
                down_bias: None,
            })
            .collect(),
        norm: tensor(&[hidden]),
        lm_head: None,
    }
}

/// bf16, magnitudes between 1/128 and 1/32, random signs.
fn random_tensor(state: &mut u64, shape: &[usize]) -> Tensor {
    let len: usize = shape.iter().product();
    let mut bytes = Vec::with_capacity(2 * len);
    for _ in 0..len {
        *state = state
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1);
        let random = (*state >> 48) as u16;
        bytes.extend_from_slice(&(0x3c00 + (random & 0x80ff)).to_le_bytes());
    }
    Tensor {
        range: 0..bytes.len(),
        storage: Arc::new(Storage::Owned(bytes)),
        dtype: DType::Bf16,
        shape: shape.to_vec(),
    }
}
