//! Folders of models of any size, whose weights are holes in a file.

use std::fs::{self, File};
use std::path::Path;

use serde_json::{Map, Value, json};

/// The sizes of a Llama with heads of 128 elements, and 8 KV heads.
pub struct Shape {
    pub hidden: usize,
    pub intermediate: usize,
    pub num_layers: usize,
    pub vocab: usize,
}

/// Writes config.json and the weights in bf16.
pub fn write(folder: &Path, shape: &Shape) {
    let Shape {
        hidden,
        intermediate,
        num_layers,
        vocab,
    } = *shape;
    let config = json!({
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_attention_heads": hidden / 128,
        "num_key_value_heads": 8,
        "num_hidden_layers": num_layers,
        "max_position_embeddings": 8192,
        "rope_theta": 500_000.0,
        "rms_norm_eps": 1e-5,
        "vocab_size": vocab,
        "tie_word_embeddings": false,
    });
    fs::write(folder.join("config.json"), config.to_string()).unwrap();
    let mut tensors = vec![
        ("model.embed_tokens.weight".to_owned(), vec![vocab, hidden]),
        ("lm_head.weight".to_owned(), vec![vocab, hidden]),
        ("model.norm.weight".to_owned(), vec![hidden]),
    ];
    for layer in 0..num_layers {
        for (name, shape) in [
            ("input_layernorm", vec![hidden]),
            ("post_attention_layernorm", vec![hidden]),
            ("self_attn.q_proj", vec![hidden, hidden]),
            ("self_attn.k_proj", vec![1024, hidden]),
            ("self_attn.v_proj", vec![1024, hidden]),
            ("self_attn.o_proj", vec![hidden, hidden]),
            ("mlp.gate_proj", vec![intermediate, hidden]),
            ("mlp.up_proj", vec![intermediate, hidden]),
            ("mlp.down_proj", vec![hidden, intermediate]),
        ] {
            tensors.push((format!("model.layers.{layer}.{name}.weight"), shape));
        }
    }
    let mut header = Map::new();
    let mut end = 0_u64;
    for (name, shape) in tensors {
        let start = end;
        end += 2 * shape.iter().product::<usize>() as u64;
        let entry = json!({"dtype": "BF16", "shape": shape, "data_offsets": [start, end]});
        header.insert(name, entry);
    }
    let header = Value::Object(header).to_string();
    let length = (header.len() as u64).to_le_bytes();
    let path = folder.join("model.safetensors");
    fs::write(&path, [&length[..], header.as_bytes()].concat()).unwrap();
    let file = File::options().write(true).open(path).unwrap();
    file.set_len(8 + header.len() as u64 + end).unwrap();
}
