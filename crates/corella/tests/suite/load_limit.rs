//! The limits of pages for loads of blocks between nodes, and the names of blocks.

use std::path::Path;

use corella::{Llm, LlmOptions, ModelSource};
use corella_core::{BlockList, Namespace, SchedulerConfig};
use corella_model::{DType, KvFormat, WeightFormat};

use crate::held_isa::held_isa;

fn limits(model: &str, exchanges_kv: bool, kv_format: Option<KvFormat>) -> SchedulerConfig {
    limits_of(model, exchanges_kv, kv_format, None)
}

fn limits_of(
    model: &str,
    exchanges_kv: bool,
    kv_format: Option<KvFormat>,
    weight_format: Option<WeightFormat>,
) -> SchedulerConfig {
    let options = LlmOptions {
        exchanges_kv,
        kv_format,
        weight_format,
        num_threads: Some(1),
        kv_cache_bytes: Some(1 << 20),
        isa: held_isa(),
        ..LlmOptions::default()
    };
    let tests = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests");
    let llm = Llm::load(&ModelSource::Path(tests.join(model)), &options).unwrap();
    llm.engine.limits().clone()
}

/// Returns blocks with the names that a node with these limits gives them.
fn list(limits: &SchedulerConfig) -> BlockList {
    let tokens = (0..64).collect();
    let hasher = &limits.block_hasher;
    BlockList::new(Namespace::default(), tokens, hasher, limits.page_size)
}

#[test]
fn nodes_that_exchange_kv_lend_a_quarter_of_their_pages() {
    let alone = limits("gguf/llama-f32", false, None);
    assert_eq!((alone.max_served_pages, alone.max_fetched_pages), (0, 0));
    let in_fleet = limits("gguf/llama-f32", true, None);
    let quarter = in_fleet.num_pages / 4;
    assert!(quarter > 0);
    let lent = (in_fleet.max_served_pages, in_fleet.max_fetched_pages);
    assert_eq!(lent, (quarter, quarter));
}

/// The same checkpoint gives the same names on every node. Another model, KV format or weight format gives other names,
/// so that no node finds rows of other bits under a name that it knows.
#[test]
fn blocks_of_different_models_and_formats_have_no_name_in_common() {
    let model = "gguf/llama-f32";
    let f32 = Some(KvFormat::Float(DType::F32));
    let first = list(&limits(model, true, f32));
    assert_eq!(first, list(&limits(model, false, f32)));
    let packed = |format| limits_of(model, true, f32, Some(format));
    let others = [
        limits(model, true, Some(KvFormat::Int8)),
        packed(WeightFormat::Float(DType::Bf16)),
        packed(WeightFormat::Int8),
        packed(WeightFormat::Int4 { group_len: 32 }),
        limits("gguf/qwen3-f16", true, f32),
        limits("gguf/llama3-f16", true, f32),
    ];
    let mut seen = vec![first];
    for other in others {
        let other = list(&other);
        for known in &seen {
            assert_eq!(known.hashes.len(), other.hashes.len());
            assert!(known.hashes.iter().all(|hash| !other.hashes.contains(hash)));
        }
        seen.push(other);
    }
}
