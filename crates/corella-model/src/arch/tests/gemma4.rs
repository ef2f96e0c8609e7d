//! Tests of Gemma 4.

use super::*;
use crate::RotaryScaling;

/// Published files give the heads of layers without a window by two fields, and may have key matrices in layers that do
/// not use them.
#[test]
fn gemma4_is_read_as_it_is_published() {
    let name = "gemma4-per-layer";
    let plain = Checkpoint::open(golden(name)).unwrap();
    let bytes = fs::read(golden(name).join("model.safetensors")).unwrap();
    let tensors = SafeTensors::deserialize(&bytes).unwrap();
    let mut text = golden_config(name);
    text["per_layer_config"] = Value::Null;
    text["global_head_dim"] = json!(16);
    text["num_global_key_value_heads"] = Value::Null;
    let config = json!({ "architectures": ["Gemma4ForConditionalGeneration"],
        "text_config": text, "audio_config": { "hidden_size": 2 } });
    let mut renamed: HashMap<String, TensorView<'_>> = HashMap::new();
    for (name, tensor) in tensors.tensors() {
        renamed.insert(name.replacen("model.", "model.language_model.", 1), tensor);
    }
    let norm = || tensors.tensor("model.norm.weight").unwrap();
    let ear = "model.audio_tower.output_proj.weight";
    renamed.insert(ear.to_owned(), norm());
    let unused = "model.language_model.layers.5.self_attn.k_proj.weight";
    renamed.insert(unused.to_owned(), norm());
    let folder = std::env::temp_dir().join(format!("corella-{}-gemma4", std::process::id()));
    fs::create_dir_all(&folder).unwrap();
    fs::write(folder.join("config.json"), config.to_string()).unwrap();
    let file = safetensors::serialize(renamed, None).unwrap();
    fs::write(folder.join("model.safetensors"), file).unwrap();
    let checkpoint = Checkpoint::open(&folder).unwrap();
    assert_eq!(checkpoint.config().spec, plain.config().spec);
    let (found, expected) = (checkpoint.weights().unwrap(), plain.weights().unwrap());
    assert_eq!(found.left_out, [ear]);
    let projection = |weights: &crate::DecoderWeights| {
        let ends = weights.per_layer.as_ref().unwrap();
        ends.projection.bytes().to_vec()
    };
    assert_eq!(projection(&found), projection(&expected));
    fs::remove_dir_all(folder).unwrap();
}

#[test]
fn heads_of_gemma4_depend_on_the_type_of_the_layer() {
    let of_type = json!({ "per_layer_config": null, "global_head_dim": 16,
        "num_global_key_value_heads": 1 });
    let found = spec("gemma4", of_type.clone());
    assert_eq!(found, spec("gemma4", json!({})));
    let heads = of_layers(&found, |it| {
        (it.num_kv_heads, it.head_dim, it.values_are_keys)
    });
    let (local, global) = ((2, 8, false), (1, 16, true));
    assert_eq!(heads, [local, global, local, local, global]);
    // Without shared projections, the number of KV heads is the same.
    let mut of_type = of_type;
    of_type["attention_k_eq_v"] = json!(false);
    let heads = of_layers(&spec("gemma4", of_type), |it| {
        (it.num_kv_heads, it.head_dim)
    });
    assert_eq!(heads[..2], [(2, 8), (2, 16)]);
    // The last layer attends to all positions, regardless of the list.
    let found = spec(
        "gemma4",
        json!({ "layer_types": null, "rope_parameters": null }),
    );
    let windows = of_layers(&found, |it| it.window.is_some());
    assert_eq!(windows, [true, true, true, true, false]);
    let rotary = found.layers[4].attention.rotary.as_ref().unwrap();
    let quarter = RotaryScaling::Proportional {
        num_pairs: 2,
        factor: 1.0,
    };
    assert_eq!((rotary.theta, &rotary.scaling), (1e6, &quarter));
}

#[test]
fn the_last_layers_of_gemma4_read_the_last_of_their_type() {
    let found = spec("gemma4-per-layer", json!({}));
    let sources = of_layers(&found, |it| it.kv_source);
    let (s, f) = (Some(3), Some(1));
    assert_eq!(sources, [None, None, None, None, f, s, f]);
    let sizes = found.layers.iter();
    let sizes: Vec<_> = sizes
        .map(|it| it.feed_forward.mlp().intermediate_size)
        .collect();
    assert_eq!(sizes, [48, 48, 48, 48, 96, 96, 96]);
}

#[test]
fn what_is_not_computed_of_gemma4_is_refused() {
    for (field, value, why) in [
        (
            "use_bidirectional_attention",
            json!("all"),
            "what comes before",
        ),
        ("vocab_size_per_layer_input", json!(81), "only 80"),
        ("num_kv_shared_layers", json!(6), "no layer of the type"),
        ("num_kv_shared_layers", json!(8), "fewer layers"),
        (
            "per_layer_config",
            json!({"1": {"head_dim": 16, "sliding_window": 3}}),
            "sliding_window",
        ),
        (
            "per_layer_config",
            json!({"1": {"head_dim": 16, "num_key_value_heads": 3}}),
            "cannot share 3 KV heads",
        ),
    ] {
        let mut config = golden_config("gemma4-per-layer");
        config[field] = value;
        let refusal = parse(&config).unwrap_err();
        assert!(refusal.contains(why), "{field}: {refusal}");
    }
    // The vision parts have bidirectional attention for images only.
    let found = spec("gemma4", json!({ "use_bidirectional_attention": "vision" }));
    assert!(found.layers.iter().all(|layer| layer.attention.is_causal));
}
