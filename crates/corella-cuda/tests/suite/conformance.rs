//! The conformance suite for the CUDA executor, on the device that runs its kernels in host memory.

use std::path::Path;

use corella_cuda::{CudaConfig, CudaExecutor, Element, test_device};
use corella_model::{Checkpoint, DType, KvFormat, KvGroups, conformance};

#[test]
fn f32() {
    run("qwen3-gqa-tied", Element::F32, DType::F32, 16, true);
}

#[test]
fn bf16() {
    run("llama-gqa-tied-bf16", Element::Bf16, DType::Bf16, 16, true);
}

#[test]
fn pages_of_seven_without_graphs() {
    run("qwen3-gqa-tied-bf16", Element::Bf16, DType::Bf16, 7, false);
}

#[test]
fn pages_in_8_bits() {
    run("llama-gqa-tied", Element::Bf16, KvFormat::Int8, 16, false);
}

/// Windows have 24 positions. Pages that all windows have left are overwritten.
#[test]
fn windows_in_every_second_layer() {
    run("gemma2", Element::Bf16, DType::Bf16, 5, true);
}

fn run(
    model: &str,
    element: Element,
    kv_format: impl Into<KvFormat>,
    page_size: u32,
    uses_graphs: bool,
) {
    let kv_format = kv_format.into();
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/golden");
    let checkpoint = Checkpoint::open(folder.join(model)).unwrap();
    let spec = checkpoint.config().spec.clone();
    let device = test_device();
    conformance::run(spec.vocab_size, page_size, |limits| {
        let config = CudaConfig {
            element,
            kv_format,
            kv_groups: Some(KvGroups::by_window(&spec)),
            num_pages: limits.num_pages,
            page_size: limits.page_size,
            max_num_seqs: limits.max_num_seqs,
            max_num_batched_tokens: limits.max_num_batched_tokens,
            max_model_len: limits.max_model_len,
            max_logprobs: 256,
            is_batch_invariant: true,
            uses_graphs,
        };
        let weights = checkpoint.weights().unwrap();
        let executor = CudaExecutor::new(&device, spec.clone(), weights, config, &|_| ());
        Box::new(executor.unwrap())
    });
}
