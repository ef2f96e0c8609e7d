//! The fields about attention in files.

use super::*;

const BOOL: u32 = 7;

#[test]
fn layers_without_attention_have_to_be_known_to_the_family() {
    let kv_heads = |num_layers: u32, counts: &[u32]| {
        let numbers = counts.iter().flat_map(|count| count.to_le_bytes());
        let mut array = [&U32.to_le_bytes()[..], &(counts.len() as u64).to_le_bytes()].concat();
        array.extend(numbers);
        TestFile::new()
            .with_key("llama.attention.head_count_kv", ARRAY, &array)
            .with_key("llama.block_count", U32, &num_layers.to_le_bytes())
    };
    assert!(read_all(&kv_heads(1, &[1]).bytes()).is_ok());
    kv_heads(1, &[0]).is_refused("some must have it");
    kv_heads(3, &[0, 1, 2]).is_refused("the same for all layers with attention");
    kv_heads(3, &[0, 1]).is_refused("must have 3 numbers");
    kv_heads(2, &[1, 0]).is_refused("not known for layers of this family");
}

/// Embedding models made from decoders declare attention in both directions.
#[test]
fn attention_that_looks_both_ways_is_refused() {
    let file = TestFile::new().with_key("llama.attention.causal", BOOL, &[0]);
    file.is_refused("only attention to what comes before");
    let file = TestFile::new().with_key("llama.attention.causal", BOOL, &[1]);
    assert!(read_all(&file.bytes()).is_ok());
}
