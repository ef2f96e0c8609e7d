//! The conformance suite for the CPU executor, with every instruction set of this machine, every KV format, and pages
//! of 16 positions and of odd sizes.

use std::path::{Path, PathBuf};

use crate::held_isa::{held_isa, isas};
use corella_cpu::{CpuConfig, CpuExecutor, Isa, detect_isa};
use corella_model::Executor;
use corella_model::conformance::ConformanceConfig;
use corella_model::{Checkpoint, DType, KvFormat, KvGroups, WeightFormat, conformance};

#[test]
fn f32_pages() {
    run("qwen3-gqa-tied", best_isa(), DType::F32, 16);
}

#[test]
fn bf16_pages() {
    run("llama-mha-untied", best_isa(), DType::Bf16, 16);
}

#[test]
fn f16_pages_of_five() {
    run("llama-gqa-untied-f16", best_isa(), DType::F16, 5);
}

#[test]
fn bf16_weights_and_pages_of_seventeen() {
    run("qwen3-gqa-tied-bf16", best_isa(), DType::Bf16, 17);
}

#[test]
fn portable_kernels() {
    if isas().any(|isa| isa == Isa::Portable) {
        run("qwen3-gqa-untied", Isa::Portable, DType::Bf16, 7);
    }
}

#[cfg(target_arch = "x86_64")]
#[test]
fn avx2_kernels() {
    if isas().any(|isa| isa == Isa::Avx2) {
        run("qwen3-mha-tied", Isa::Avx2, DType::Bf16, 16);
    }
}

/// The scales of a key and a value must not depend on their neighbours.
#[test]
fn pages_in_8_bits() {
    for isa in isas() {
        run("qwen3-gqa-tied", isa, KvFormat::Int8, 16);
        run("llama-gqa-tied", isa, KvFormat::Int8, 7);
    }
}

#[test]
fn weights_in_bf16() {
    for isa in isas() {
        run("llama-gqa-tied-bf16", isa, DType::Bf16, 16);
        run("qwen3-gqa-tied-bf16", isa, DType::Bf16, 7);
    }
}

#[test]
fn two_stages() {
    run_stages(golden("qwen3-gqa-untied"), best_isa(), DType::F32, 16, 2);
}

#[test]
fn four_stages_of_unequal_length() {
    let nano = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../models/nano");
    run_stages(nano, best_isa(), DType::Bf16, 7, 4);
}

/// Windows have 24 positions. Pages that all windows have left are overwritten.
#[test]
fn windows_in_every_second_layer() {
    for isa in isas() {
        run("gemma2", isa, DType::Bf16, 16);
    }
}

#[test]
fn windows_in_three_of_four_layers() {
    run("gemma3", best_isa(), KvFormat::Int8, 16);
    run("gemma3", best_isa(), DType::F32, 7);
}

#[test]
fn windows_in_all_layers() {
    run("mistral", best_isa(), KvFormat::Int8, 16);
}

#[test]
fn windows_and_experts() {
    run("mixtral", best_isa(), DType::F16, 5);
}

/// Prompts are longer than the original context, beyond which queries grow.
#[test]
fn queries_that_grow() {
    run("ministral3", best_isa(), DType::F32, 16);
    run("ministral3", best_isa(), KvFormat::Int8, 7);
}

#[test]
fn sinks_windows_and_experts() {
    run("gpt-oss", best_isa(), DType::F32, 7);
}

/// Heads are long enough for matrix tiles.
#[test]
fn sinks_and_experts_in_fp4() {
    let quantized = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/quantized");
    for isa in isas() {
        for kv_format in [KvFormat::Float(DType::Bf16), KvFormat::Int8] {
            run_stages(quantized.join("mxfp4"), isa, kv_format, 16, 1);
        }
    }
}

#[test]
fn stages_have_groups_of_their_own() {
    run_stages(golden("gemma2"), best_isa(), DType::F32, 7, 2);
    run_stages(golden("gemma3"), best_isa(), DType::Bf16, 16, 3);
}

/// Pages hold layers of two widths.
#[test]
fn heads_that_differ_from_layer_to_layer() {
    for isa in isas() {
        run("gemma4", isa, DType::F32, 16);
    }
}

/// Heads of both lengths fit matrix tiles.
#[test]
fn heads_that_differ_through_tiles() {
    for isa in isas() {
        for kv_format in [KvFormat::Float(DType::Bf16), KvFormat::Int8] {
            run("gemma4-wide", isa, kv_format, 16);
        }
    }
    // One of the stages has short heads only.
    run_stages(golden("gemma4-wide"), best_isa(), DType::Bf16, 16, 2);
}

#[test]
fn heads_that_differ_beside_inputs_of_layers() {
    for isa in isas() {
        run("gemma4-per-layer", isa, KvFormat::Int8, 16);
    }
}

#[test]
fn heads_that_differ_in_smaller_formats() {
    run("gemma4", best_isa(), DType::Bf16, 5);
    run("gemma4-per-layer", best_isa(), DType::F16, 7);
}

#[test]
fn heads_that_differ_beside_experts() {
    run("gemma4-experts", best_isa(), KvFormat::Int8, 7);
    run_stages(golden("gemma4-experts"), best_isa(), DType::F32, 16, 2);
}

#[test]
fn heads_that_differ_with_weights_of_8_bits() {
    for name in [
        "gemma4",
        "gemma4-wide",
        "gemma4-per-layer",
        "gemma4-experts",
    ] {
        let format = Some(WeightFormat::Int8);
        run_format(golden(name), format, best_isa(), DType::Bf16, 16, 1);
    }
}

/// Prompts are longer than several chunks of recurrent layers, whose states continue with the requests.
#[test]
fn recurrent_layers() {
    for isa in isas() {
        run("qwen3-5", isa, DType::F32, 16);
    }
    run("qwen3-next", best_isa(), DType::Bf16, 5);
    run_stages(golden("qwen3-next"), best_isa(), DType::F32, 7, 3);
    let model = golden("qwen3-5-moe");
    run_format(
        model,
        Some(WeightFormat::Int8),
        best_isa(),
        KvFormat::Int8,
        16,
        2,
    );
}

/// States of convolutions are the inputs of the last few tokens.
#[test]
fn short_convolutions() {
    for isa in isas() {
        run("lfm2", isa, DType::F32, 16);
    }
    run_stages(golden("lfm2"), best_isa(), DType::Bf16, 5, 3);
    let (model, format) = (golden("lfm2-moe"), Some(WeightFormat::Int8));
    run_format(model, format, best_isa(), KvFormat::Int8, 7, 2);
}

fn golden(model: &str) -> PathBuf {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/golden");
    folder.join(model)
}

fn run(model: &str, isa: Isa, kv_format: impl Into<KvFormat>, page_size: u32) {
    run_stages(golden(model), isa, kv_format, page_size, 1);
}

/// Rows of 8-bit integers have scales, which must not depend on the rows beside them.
#[test]
fn weights_in_8_bits() {
    for isa in isas() {
        let (model, format) = (golden("qwen3-gqa-tied"), Some(WeightFormat::Int8));
        run_format(model, format, isa, DType::Bf16, 16, 1);
    }
}

/// Checkpoints with quantised layers run in their stored form; the head of the 8-bit one is not quantised.
#[test]
fn quantised_checkpoints() {
    let quantized = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/quantized");
    for isa in isas() {
        for model in ["int8", "int4-g64-asymmetric"] {
            run_stages(quantized.join(model), isa, DType::Bf16, 16, 1);
        }
    }
}

/// Rows also have sums of chunks, and the AMX kernels treat few rows differently.
#[test]
fn weights_in_4_bits() {
    for isa in isas() {
        for (model, group_len) in [("qwen3-gqa-tied", 32), ("llama-mha-untied", 64)] {
            let format = Some(WeightFormat::Int4 { group_len });
            run_format(golden(model), format, isa, DType::Bf16, 16, 1);
        }
        let model = golden("llama-q4-gguf").join("model.gguf");
        run_format(model, None, isa, DType::Bf16, 16, 1);
    }
}

#[test]
fn groups_of_8_bits() {
    for isa in isas() {
        for (model, group_len) in [("qwen3-gqa-tied", 32), ("llama-mha-untied", 64)] {
            let format = Some(WeightFormat::Int8Grouped { group_len });
            run_format(golden(model), format, isa, DType::Bf16, 16, 1);
        }
    }
}

fn best_isa() -> Isa {
    held_isa().unwrap_or_else(detect_isa)
}

fn run_stages(
    model: PathBuf,
    isa: Isa,
    kv_format: impl Into<KvFormat>,
    page_size: u32,
    num_stages: usize,
) {
    run_format(model, None, isa, kv_format, page_size, num_stages);
}

fn run_format(
    model: PathBuf,
    weight_format: Option<WeightFormat>,
    isa: Isa,
    kv_format: impl Into<KvFormat>,
    page_size: u32,
    num_stages: usize,
) {
    let kv_format = kv_format.into();
    let checkpoint = Checkpoint::open(model).unwrap();
    let spec = checkpoint.config().spec.clone();
    let make = |limits: &ConformanceConfig| -> Box<dyn Executor> {
        let config = CpuConfig {
            num_threads: limits.num_threads,
            weight_format,
            kv_format,
            kv_groups: Some(KvGroups::by_window(&spec)),
            num_pages: limits.num_pages,
            page_size: limits.page_size,
            max_num_seqs: limits.max_num_seqs,
            max_num_batched_tokens: limits.max_num_batched_tokens,
            max_model_len: limits.max_model_len,
            max_draft_tokens: 16,
            num_snapshots: 8,
            isa: Some(isa),
            num_stages,
            pin_threads: false,
            max_adapter_rank: None,
            profile: None,
            turns: None,
        };
        let weights = checkpoint.weights().unwrap();
        Box::new(CpuExecutor::new(spec.clone(), weights, config).unwrap())
    };
    match (spec.is_recurrent(), spec.has_mixed_kv()) {
        (true, _) => conformance::run_recurrent(spec.vocab_size, page_size, make),
        (false, true) => conformance::run_native(spec.vocab_size, page_size, make),
        (false, false) => conformance::run(spec.vocab_size, page_size, make),
    }
}
