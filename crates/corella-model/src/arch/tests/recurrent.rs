//! Tests of families with recurrent layers.

use super::*;

/// Published folders of Qwen3.5 have the decoder beside the vision part and the draft part, and all experts of a layer
/// in two tensors.
#[test]
fn qwen3_5_is_read_as_it_is_published() {
    let plain = Checkpoint::open(golden("qwen3-5-moe")).unwrap();
    let bytes = fs::read(golden("qwen3-5-moe").join("model.safetensors")).unwrap();
    let tensors = SafeTensors::deserialize(&bytes).unwrap();
    let config = json!({ "architectures": ["Qwen3_5MoeForConditionalGeneration"],
        "text_config": golden_config("qwen3-5-moe"), "vision_config": { "depth": 2 },
        "tie_word_embeddings": false });
    let matrix = |layer: usize, expert: usize, name: &str| {
        let name = format!("model.layers.{layer}.mlp.experts.{expert}.{name}_proj.weight");
        tensors.tensor(&name).unwrap().data().to_vec()
    };
    let fused = |layer: usize| {
        let of_expert = |expert| [matrix(layer, expert, "gate"), matrix(layer, expert, "up")];
        let gate_up: Vec<u8> = (0..6).flat_map(of_expert).flatten().collect();
        let down: Vec<u8> = (0..6)
            .flat_map(|expert| matrix(layer, expert, "down"))
            .collect();
        [
            ("gate_up_proj", vec![6, 24, 32], gate_up),
            ("down_proj", vec![6, 32, 12], down),
        ]
    };
    let fused: Vec<_> = (0..4)
        .flat_map(|layer| fused(layer).map(|it| (layer, it)))
        .collect();
    let mut renamed: HashMap<String, TensorView<'_>> = HashMap::new();
    for (name, tensor) in tensors.tensors() {
        if !name.contains(".mlp.experts.") {
            renamed.insert(name.replacen("model.", "model.language_model.", 1), tensor);
        }
    }
    for (layer, (name, shape, bytes)) in &fused {
        let name = format!("model.language_model.layers.{layer}.mlp.experts.{name}");
        let tensor = TensorView::new(safetensors::Dtype::F32, shape.clone(), bytes).unwrap();
        renamed.insert(name, tensor);
    }
    for other in ["model.visual.patch_embed.proj.weight", "mtp.fc.weight"] {
        renamed.insert(
            other.to_owned(),
            tensors.tensor("model.norm.weight").unwrap(),
        );
    }
    let folder = std::env::temp_dir().join(format!("corella-{}-published", std::process::id()));
    fs::create_dir_all(&folder).unwrap();
    fs::write(folder.join("config.json"), config.to_string()).unwrap();
    let file = safetensors::serialize(renamed, None).unwrap();
    fs::write(folder.join("model.safetensors"), file).unwrap();
    let checkpoint = Checkpoint::open(&folder).unwrap();
    let (found, expected) = (checkpoint.config(), plain.config());
    assert_eq!(found.spec, expected.spec);
    assert_eq!(found.end_tokens, expected.end_tokens);
    let (found, expected) = (checkpoint.weights().unwrap(), plain.weights().unwrap());
    assert_eq!(found.left_out.len(), 2);
    for (found, expected) in found.layers.iter().zip(&expected.layers) {
        assert_eq!(found.iter().count(), expected.iter().count());
        for ((tensor, found), (_, expected)) in found.iter().zip(expected.iter()) {
            assert_eq!(found.bytes(), expected.bytes(), "{tensor}");
        }
    }
    fs::remove_dir_all(folder).unwrap();
}

#[test]
fn layers_of_qwen3_5_are_recurrent_where_it_says_so() {
    let are_recurrent = |changes| {
        let spec = spec("qwen3-5", changes);
        let layers = spec.layers.iter();
        layers
            .map(|layer| layer.recurrent.is_some())
            .collect::<Vec<_>>()
    };
    let (yes, no) = (true, false);
    assert_eq!(are_recurrent(json!({})), [yes, no, yes, no]);
    assert_eq!(
        are_recurrent(json!({ "layer_types": null })),
        [yes, yes, yes, no]
    );
    let third = json!({ "layer_types": null, "full_attention_interval": 3 });
    assert_eq!(are_recurrent(third), [yes, yes, no, yes]);
    let mut config = golden_config("qwen3-5");
    for (types, problem) in [
        (
            json!([
                "linear_attention",
                "linear_attention",
                "linear_attention",
                "linear_attention"
            ]),
            "without any layer of attention",
        ),
        (
            json!(["full_attention", "full_attention", "full_attention"]),
            "types of 4 layers",
        ),
        (
            json!(["full_attention", "mamba", "mamba", "mamba"]),
            "mamba",
        ),
    ] {
        config["layer_types"] = types;
        let refusal = parse(&config).unwrap_err();
        assert!(refusal.contains(problem), "{refusal}");
    }
}

#[test]
fn gated_delta_networks_have_no_other_activation_than_silu() {
    for (family, activation, is_refused) in [
        ("qwen3-5", "gelu", true),
        ("qwen3-5-moe", "gelu_pytorch_tanh", true),
        ("qwen3-next", "gelu", true),
        ("qwen3-next", "swish", false),
    ] {
        let mut config = golden_config(family);
        config["hidden_act"] = json!(activation);
        let refusal = parse(&config).err();
        let why = "recurrent layers are supported with silu only";
        let has_reason = refusal.as_ref().is_some_and(|it| it.contains(why));
        assert_eq!(has_reason, is_refused, "{family}: {refusal:?}");
    }
}

/// The makers' own names of settings, and those of Transformers.
#[test]
fn lfm2_is_read_as_it_is_published() {
    let published = json!({ "block_ff_dim": 48, "intermediate_size": 7, "tie_embedding": false,
        "tie_word_embeddings": true, "layer_types": null, "full_attn_idxs": [1],
        "rope_parameters": null, "rope_theta": 30000.0 });
    assert_eq!(spec("lfm2", published), spec("lfm2", json!({})));
    let moe = json!({ "tie_embedding": true, "tie_word_embeddings": false });
    assert_eq!(spec("lfm2-moe", moe), spec("lfm2-moe", json!({})));
}

/// Sizes that `Lfm2MLP` of Transformers has for these settings.
#[test]
fn the_size_of_mlps_of_lfm2_is_made_of_settings() {
    let size = |changes| {
        let spec = spec("lfm2", changes);
        spec.layers[0].feed_forward.mlp().intermediate_size
    };
    assert_eq!(size(json!({ "block_auto_adjust_ff_dim": false })), 48);
    assert_eq!(size(json!({})), 44);
    assert_eq!(size(json!({ "block_multiple_of": 1 })), 41);
    let unsaid = json!({ "block_multiple_of": null, "block_ffn_dim_multiplier": null });
    assert_eq!(size(unsaid), 256);
    let of_1_2b = json!({ "intermediate_size": 12288, "block_multiple_of": 256,
        "block_ffn_dim_multiplier": 1.0 });
    assert_eq!(size(of_1_2b), 8192);
    let mut config = golden_config("lfm2");
    config["block_ffn_dim_multiplier"] = Value::Null;
    config["intermediate_size"] = json!(50);
    let spec = parse(&config).unwrap();
    assert_eq!(spec.layers[0].feed_forward.mlp().intermediate_size, 33);
}

#[test]
fn what_lfm2_does_not_have_is_refused_by_name() {
    let conv = json!(["conv", "conv", "conv", "conv"]);
    let mixed = json!(["conv", "full_attention", "mamba", "conv"]);
    for (name, field, value, problem) in [
        (
            "lfm2",
            "layer_types",
            conv,
            "without any layer of attention",
        ),
        ("lfm2", "layer_types", mixed, "full_attention, conv"),
        ("lfm2", "conv_L_cache", json!(5000), "conv_L_cache"),
        (
            "lfm2",
            "block_ffn_dim_multiplier",
            json!(1e300),
            "intermediate_size",
        ),
        ("lfm2-moe", "layer_types", Value::Null, "layer_types"),
    ] {
        let mut config = golden_config(name);
        config[field] = value;
        let refusal = parse(&config).unwrap_err();
        assert!(refusal.contains(problem), "{refusal}");
    }
}

/// Changes a copy of a model with a draft head, and returns the error about the head.
fn refused_head(
    name: &str,
    config: Value,
    change: impl FnOnce(&mut HashMap<String, TensorView<'_>>),
) -> String {
    let from = golden("mtp").join(name);
    let bytes = fs::read(from.join("model.safetensors")).unwrap();
    let tensors = SafeTensors::deserialize(&bytes).unwrap();
    let mut tensors: HashMap<String, TensorView<'_>> = tensors.tensors().into_iter().collect();
    change(&mut tensors);
    let file = safetensors::serialize(tensors, None).unwrap();
    let mut fields = serde_json::from_slice(&fs::read(from.join("config.json")).unwrap()).unwrap();
    let (Value::Object(fields), Value::Object(config)) = (&mut fields, config) else {
        panic!("configurations are objects");
    };
    fields.extend(config);
    let folder = std::env::temp_dir().join(format!("corella-{}-head", std::process::id()));
    fs::create_dir_all(&folder).unwrap();
    fs::write(folder.join("model.safetensors"), file).unwrap();
    fs::write(folder.join("config.json"), json!(fields).to_string()).unwrap();
    let mut checkpoint = Checkpoint::open(&folder).unwrap();
    // Without its head, the model is still read.
    assert!(checkpoint.weights().is_ok());
    let refused = checkpoint.add_draft_head();
    let refused = refused.and_then(|()| checkpoint.weights().map(|_| ()));
    fs::remove_dir_all(folder).unwrap();
    refused.unwrap_err().to_string()
}

#[test]
fn draft_heads_of_other_shapes_are_refused() {
    let same = |_: &mut HashMap<String, TensorView<'_>>| ();
    let layers = json!({ "mtp_num_hidden_layers": 2 });
    let refusal = refused_head("qwen3-5", layers, same);
    assert!(refusal.contains("mtp_num_hidden_layers"), "{refusal}");
    let embeddings = json!({ "mtp_use_dedicated_embeddings": true });
    let refusal = refused_head("qwen3-5", embeddings, same);
    assert!(
        refusal.contains("mtp_use_dedicated_embeddings"),
        "{refusal}"
    );
    let refusal = refused_head("qwen3-next", json!({}), |tensors| {
        tensors.retain(|name, _| !name.starts_with("mtp."));
    });
    assert!(refusal.contains("no tensor begins with mtp."), "{refusal}");
    let refusal = refused_head("qwen3-next", json!({}), |tensors| {
        tensors.remove("mtp.layers.0.mlp.experts.3.up_proj.weight");
    });
    assert!(
        refusal.contains("experts.3.up_proj.weight is missing"),
        "{refusal}"
    );
    let refusal = refused_head("qwen3-5-moe", json!({}), |tensors| {
        tensors.insert(
            "mtp.layers.1.extra".to_owned(),
            tensors["mtp.norm.weight"].clone(),
        );
    });
    assert!(
        refusal.contains("mtp.layers.1.extra has no place"),
        "{refusal}"
    );
    let mut other = Checkpoint::open(golden("qwen3-moe")).unwrap();
    let refusal = other.add_draft_head().unwrap_err().to_string();
    assert!(
        refusal.contains("Qwen3MoeForCausalLM is read without a head"),
        "{refusal}"
    );
}
