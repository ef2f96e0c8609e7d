//! Tests of Ministral 3 and other multimodal models.

use super::*;

/// Published folders have the decoder beside the vision part, in one of two layouts.
#[test]
fn ministral3_is_read_as_it_is_published() {
    let plain = Checkpoint::open(golden("ministral3")).unwrap();
    let bytes = fs::read(golden("ministral3").join("model.safetensors")).unwrap();
    let tensors = SafeTensors::deserialize(&bytes).unwrap();
    let config = json!({ "architectures": ["Mistral3ForConditionalGeneration"],
        "text_config": golden_config("ministral3"), "vision_config": { "num_hidden_layers": 2 } });
    let folder = std::env::temp_dir().join(format!("corella-{}-ministral3", std::process::id()));
    fs::create_dir_all(&folder).unwrap();
    fs::write(folder.join("config.json"), config.to_string()).unwrap();
    for (body, head, other) in [
        (
            "language_model.model.",
            "language_model.lm_head",
            "vision_tower.ln_pre.weight",
        ),
        (
            "model.language_model.",
            "lm_head",
            "model.multi_modal_projector.norm.weight",
        ),
    ] {
        let renamed = |name: &str| match name {
            "lm_head.weight" => format!("{head}.weight"),
            name => name.replacen("model.", body, 1),
        };
        let mut all: HashMap<String, TensorView<'_>> = HashMap::new();
        for (name, tensor) in tensors.tensors() {
            all.insert(renamed(&name), tensor);
        }
        all.insert(
            other.to_owned(),
            tensors.tensor("model.norm.weight").unwrap(),
        );
        let file = safetensors::serialize(all, None).unwrap();
        fs::write(folder.join("model.safetensors"), file).unwrap();
        let checkpoint = Checkpoint::open(&folder).unwrap();
        // No field declares a separate head, but the file has one.
        assert_eq!(checkpoint.config().spec, plain.config().spec);
        let (found, expected) = (checkpoint.weights().unwrap(), plain.weights().unwrap());
        assert_eq!(found.left_out, [other]);
        for (found, expected) in found.layers.iter().zip(&expected.layers) {
            assert_eq!(found.iter().count(), expected.iter().count());
            for ((tensor, found), (_, expected)) in found.iter().zip(expected.iter()) {
                assert_eq!(found.bytes(), expected.bytes(), "{tensor}");
            }
        }
    }
    fs::remove_dir_all(folder).unwrap();
}

/// Mistral Small 3.1 is described like Ministral 3, but its decoder is a Mistral.
#[test]
fn the_decoder_beside_what_sees_is_of_the_family_that_it_names() {
    let mut config = json!({ "architectures": ["Mistral3ForConditionalGeneration"],
        "text_config": golden_config("mistral"), "tie_word_embeddings": false });
    assert_eq!(parse(&config).unwrap(), spec("mistral", json!({})));
    config["text_config"]["model_type"] = json!("mistral4");
    let refusal = parse(&config).unwrap_err();
    assert!(refusal.contains("ministral3, mistral"), "{refusal}");
    drop(config.as_object_mut().unwrap().remove("text_config"));
    assert!(parse(&config).unwrap_err().contains("text_config"));
}

#[test]
fn queries_of_ministral3_grow_at_multiples_of_the_original_context() {
    let growth = spec("ministral3", json!({})).layers[0]
        .attention
        .query_growth;
    let growth = growth.unwrap();
    for (position, expected) in [
        (0, 1.0),
        (15, 1.0),
        (16, 1.0 + 0.2 * 2_f64.ln()),
        (31, 1.0 + 0.2 * 2_f64.ln()),
        (170, 1.0 + 0.2 * 11_f64.ln()),
    ] {
        assert!((growth.at(position) - expected).abs() < 1e-12, "{position}");
    }
    let mut config = golden_config("ministral3");
    drop(config.as_object_mut().unwrap().remove("rope_parameters"));
    let refusal = parse(&config).unwrap_err();
    assert!(refusal.contains("rope_parameters"), "{refusal}");
    for field in ["llama_4_scaling_beta", "original_max_position_embeddings"] {
        let mut config = golden_config("ministral3");
        let parameters = config["rope_parameters"].as_object_mut();
        drop(parameters.unwrap().remove(field));
        let refusal = parse(&config).unwrap_err();
        assert!(refusal.contains(field), "{refusal}");
    }
}
