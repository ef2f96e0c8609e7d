//! Tests of config.json for each family, with fields and spellings that no golden model has.

use std::collections::HashMap;
use std::fs;
use std::path::{Path, PathBuf};

use safetensors::SafeTensors;
use safetensors::tensor::TensorView;
use serde_json::{Value, json};

use crate::{
    AttentionSpec, Checkpoint, DecoderSpec, FeedForward, LayerTensor, ModelConfig, RotaryScaling,
};

mod encoder;
mod gemma4;
mod ministral3;
mod recurrent;

fn golden(name: &str) -> PathBuf {
    let tests = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/golden");
    tests.join(name)
}

fn golden_config(name: &str) -> Value {
    let bytes = fs::read(golden(name).join("config.json")).unwrap();
    serde_json::from_slice(&bytes).unwrap()
}

fn parse(config: &Value) -> Result<DecoderSpec, String> {
    let config = config.to_string();
    let parsed = ModelConfig::parse(("config.json", config.as_bytes()), None);
    parsed
        .map(|config| config.spec)
        .map_err(|error| error.problem)
}

/// The spec of a golden's configuration after some changes; `null` removes a field.
fn spec(name: &str, changes: Value) -> DecoderSpec {
    let mut config = golden_config(name);
    for (field, value) in changes.as_object().unwrap() {
        match value {
            Value::Null => drop(config.as_object_mut().unwrap().remove(field)),
            value => config[field] = value.clone(),
        }
    }
    parse(&config).unwrap()
}

fn of_layers<T>(spec: &DecoderSpec, of: impl Fn(&AttentionSpec) -> T) -> Vec<T> {
    spec.layers
        .iter()
        .map(|layer| of(&layer.attention))
        .collect()
}

#[test]
fn every_fourth_layer_of_smollm3_does_not_know_positions() {
    let has_rotary = |spec: &DecoderSpec| of_layers(spec, |layer| layer.rotary.is_some());
    let listed = spec("smollm3", json!({}));
    assert_eq!(has_rotary(&listed), [true, false, true, false]);
    let by_default = spec("smollm3", json!({ "no_rope_layers": null }));
    assert_eq!(has_rotary(&by_default), [true, true, true, false]);
    let asked = json!({ "no_rope_layers": null, "no_rope_layer_interval": 3 });
    assert_eq!(
        has_rotary(&spec("smollm3", asked)),
        [true, true, false, true]
    );
}

#[test]
fn windows_are_where_each_family_has_them() {
    let windows = |spec: &DecoderSpec| of_layers(spec, |layer| layer.window);
    let mistral = spec("mistral", json!({}));
    assert_eq!(windows(&mistral), [Some(24); 4]);
    // A window at least as long as the longest context counts as no window.
    assert_eq!(
        windows(&spec("mistral", json!({ "sliding_window": 512 }))),
        [None; 4]
    );
    let alternating = [Some(24), None, Some(24), None];
    assert_eq!(windows(&spec("gemma2", json!({}))), alternating);
    assert_eq!(
        windows(&spec("gemma2", json!({ "layer_types": null }))),
        alternating
    );
    let qwen = json!({ "num_hidden_layers": 3, "use_sliding_window": true, "sliding_window": 8,
        "max_window_layers": 2 });
    assert_eq!(
        windows(&spec("qwen3-gqa-tied", qwen)),
        [None, None, Some(8)]
    );
    // The lower layers have the window, too.
    let with_experts = json!({ "use_sliding_window": true, "sliding_window": 8,
        "max_window_layers": 2 });
    assert_eq!(windows(&spec("qwen3-moe", with_experts)), [Some(8); 4]);
    let types = json!({ "use_sliding_window": true, "sliding_window": 8,
        "layer_types": ["sliding_attention", "full_attention"] });
    assert_eq!(
        windows(&spec("qwen2-gqa-untied", {
            let mut types = types.clone();
            types["num_hidden_layers"] = json!(2);
            types
        })),
        [Some(8), None]
    );
}

/// A missing window is the class's default in Transformers, and `null` means no window.
#[test]
fn null_takes_the_default_window_away() {
    for (family, window) in [
        ("mistral", 4096),
        ("qwen2-gqa-untied", 4096),
        ("qwen3-moe", 4096),
        ("exaone4", 4096),
        ("gpt-oss", 128),
    ] {
        let longest = |mut config: Value| {
            config["use_sliding_window"] = json!(true);
            config["max_window_layers"] = json!(0);
            config["max_position_embeddings"] = json!(8192);
            let spec = parse(&config).unwrap();
            of_layers(&spec, |layer| layer.window).into_iter().max()
        };
        let mut config = golden_config(family);
        config["sliding_window"] = Value::Null;
        assert_eq!(longest(config.clone()), Some(None), "{family}");
        config.as_object_mut().unwrap().remove("sliding_window");
        assert_eq!(longest(config), Some(Some(window)), "{family}");
    }
}

/// AI2 trained OLMo 3 for long contexts with RoPE that is scaled in this way.
#[test]
fn rope_of_olmo3_is_scaled_in_layers_without_a_window() {
    let windows = |spec: &DecoderSpec| of_layers(spec, |layer| layer.window);
    let listed = spec("olmo3", json!({}));
    assert_eq!(windows(&listed), [Some(24), None, Some(24), Some(24)]);
    let by_default = json!({ "layer_types": null });
    assert_eq!(
        windows(&spec("olmo3", by_default)),
        [Some(24), Some(24), Some(24), None]
    );
    let scaling = json!({ "rope_type": "yarn", "factor": 8.0, "rope_theta": 30_000.0,
        "original_max_position_embeddings": 64 });
    let scaled = spec("olmo3", json!({ "rope_parameters": scaling }));
    let plain = json!({ "rope_type": "default", "rope_theta": 30_000.0 });
    let by_type = json!({ "full_attention": scaling, "sliding_attention": plain });
    assert_eq!(spec("olmo3", json!({ "rope_parameters": by_type })), scaled);
    let older = json!({ "rope_parameters": null, "rope_theta": 30_000.0, "rope_scaling": scaling });
    assert_eq!(spec("olmo3", older), scaled);
    assert_eq!(windows(&scaled), [Some(24), None, Some(24), Some(24)]);
    let is_scaled = of_layers(&scaled, |layer| {
        layer.rotary.as_ref().unwrap().scaling != RotaryScaling::None
    });
    assert_eq!(is_scaled, [false, true, false, false]);
}

#[test]
fn layers_of_exaone_have_a_window_or_do_not_know_positions() {
    let layers = |changes| {
        of_layers(&spec("exaone4", changes), |layer| {
            (layer.window.is_some(), layer.rotary.is_some())
        })
    };
    let (local, global) = ((true, true), (false, false));
    assert_eq!(layers(json!({})), [local, global, local, local]);
    let pattern =
        |pattern: Value| json!({ "layer_types": null, "sliding_window_pattern": pattern });
    assert_eq!(layers(pattern(Value::Null)), [local, local, local, global]);
    assert_eq!(layers(pattern(json!(2))), [local, global, local, global]);
    // The last layer has no window, under any pattern.
    assert_eq!(
        layers(pattern(json!("GLL"))),
        [global, local, local, global]
    );
    // A window as long as the context hides no position, so it is dropped. Its layers still have RoPE.
    let long = json!({ "sliding_window": 512 });
    let (local, global) = ((false, true), (false, false));
    assert_eq!(layers(long), [local, global, local, local]);
    let mut config = golden_config("exaone4");
    config["layer_types"] = Value::Null;
    config["sliding_window_pattern"] = json!("LX");
    let error = parse(&config).unwrap_err();
    assert!(
        error.contains("must be made of L for layers with a window"),
        "{error}"
    );
    let full = spec("exaone4-full", json!({}));
    let layers = of_layers(&full, |layer| (layer.window, layer.rotary.is_some()));
    assert_eq!(layers, [(None, true); 4]);
}

/// OpenAI's own configuration has the older names for RoPE, and lists the types of layers.
#[test]
fn gpt_oss_is_what_was_published_where_a_folder_does_not_say() {
    let windows = |spec: &DecoderSpec| of_layers(spec, |layer| layer.window);
    let listed = spec("gpt-oss", json!({}));
    let alternating = [Some(24), None, Some(24), None];
    assert_eq!(windows(&listed), alternating);
    let by_default = spec("gpt-oss", json!({ "layer_types": null }));
    assert_eq!(by_default, listed);
    let types = json!([
        "full_attention",
        "full_attention",
        "full_attention",
        "sliding_attention"
    ]);
    let others = spec("gpt-oss", json!({ "layer_types": types }));
    assert_eq!(windows(&others), [None, None, None, Some(24)]);
    let published = json!({ "rope_parameters": null, "rope_theta": 30_000.0, "rope_scaling": {
        "rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 64,
        "beta_fast": 32.0, "beta_slow": 1.0, "truncate": false } });
    assert_eq!(spec("gpt-oss", published), listed);

    let silent = json!({ "rope_parameters": null, "swiglu_limit": null, "attention_bias": null });
    let silent = spec("gpt-oss", silent);
    let scaling = &silent.layers[0].attention.rotary.as_ref().unwrap().scaling;
    let RotaryScaling::Yarn {
        factor,
        original_max_position,
        truncate,
        ..
    } = scaling
    else {
        panic!("{scaling:?}");
    };
    assert_eq!(
        (*factor, *original_max_position, *truncate),
        (32.0, 4096.0, false)
    );
    assert_eq!(silent.layers[0].feed_forward.mlp().gate_limit, Some(7.0));
    assert!(silent.layers[0].attention.qkv_bias && silent.layers[0].attention.output_bias);
    let plain = spec("gpt-oss", json!({ "attention_bias": false }));
    assert!(!plain.layers[0].attention.qkv_bias && !plain.layers[0].attention.output_bias);

    let mut config = golden_config("gpt-oss");
    config["swiglu_alpha"] = json!(1.5);
    let error = parse(&config).unwrap_err();
    assert_eq!(error, "swiglu_alpha is 1.5; only 1.702 is supported");
}

/// MiniMax's own configuration has the number of rotated elements, and Transformers 5 writes their share.
#[test]
fn a_part_of_each_head_is_rotated_however_it_is_said() {
    let num_dims = |name, changes| {
        let spec = spec(name, changes);
        spec.layers[0].attention.rotary.as_ref().unwrap().num_dims
    };
    for (name, expected) in [("glm", 4), ("glm4-moe", 6)] {
        assert_eq!(
            num_dims(name, json!({ "rope_parameters": null })),
            expected,
            "{name}"
        );
    }
    let published = json!({ "rope_parameters": null, "rope_theta": 5_000_000.0, "rotary_dim": 6 });
    assert_eq!(spec("minimax-m2", published), spec("minimax-m2", json!({})));
    assert_eq!(
        num_dims(
            "minimax-m2",
            json!({ "rope_parameters": null, "rotary_dim": 4 })
        ),
        4
    );
}

#[test]
fn settings_that_no_published_model_has_are_refused() {
    for (name, field, value, expected) in [
        (
            "glm4-moe",
            "n_group",
            json!(2),
            "n_group is 2; groups of experts are not supported",
        ),
        (
            "glm4-moe",
            "scoring_func",
            json!("softmax"),
            "only sigmoids are known",
        ),
        (
            "ernie4-5-moe",
            "use_bias",
            json!(true),
            "biases are not supported",
        ),
        (
            "minimax-m2",
            "scoring_func",
            json!("softmax"),
            "only sigmoids are known",
        ),
        (
            "minimax-m2",
            "use_qk_norm",
            json!(false),
            "only models with these norms",
        ),
        (
            "minimax-m2",
            "qk_norm_type",
            json!("per_head"),
            "only per_layer is supported",
        ),
        (
            "minimax-m2",
            "shared_intermediate_size",
            json!(8),
            "a shared expert is not known",
        ),
        (
            "minimax-m2",
            "rotary_dim",
            json!(14),
            "must be an even number of the 12 elements",
        ),
    ] {
        let mut config = golden_config(name);
        config[field] = value;
        let error = parse(&config).unwrap_err();
        assert!(error.starts_with(field), "{error}");
        assert!(error.contains(expected), "{error}");
    }
}

#[test]
fn layers_have_experts_where_each_family_has_them() {
    let has_experts = |name, changes| -> Vec<bool> {
        let spec = spec(name, changes);
        let is_mixed =
            |layer: &crate::LayerSpec| matches!(layer.feed_forward, FeedForward::Experts(_));
        spec.layers.iter().map(is_mixed).collect()
    };
    assert_eq!(
        has_experts("ernie4-5-moe", json!({})),
        [false, true, false, true]
    );
    let every = json!({ "moe_layer_interval": null, "moe_layer_start_index": null, "moe_layer_end_index": 2 });
    assert_eq!(
        has_experts("ernie4-5-moe", every),
        [false, true, true, false]
    );
    assert_eq!(
        has_experts("glm4-moe", json!({})),
        [false, true, true, true]
    );
    let later = json!({ "first_k_dense_replace": 3 });
    assert_eq!(has_experts("glm4-moe", later), [false, false, false, true]);
    assert_eq!(has_experts("qwen2-moe", json!({})), [true; 4]);
    let shared = |name, changes| {
        let spec = spec(name, changes);
        let FeedForward::Experts(experts) = &spec.layers[3].feed_forward else {
            panic!("{spec:?}");
        };
        let shared = experts.shared.as_ref();
        shared.map(|shared| (shared.mlp.intermediate_size, shared.is_weighed))
    };
    assert_eq!(shared("qwen2-moe", json!({})), Some((20, true)));
    assert_eq!(shared("ernie4-5-moe", json!({})), Some((24, false)));
    assert_eq!(
        shared("ernie4-5-moe", json!({ "moe_num_shared_experts": 0 })),
        None
    );
    assert_eq!(shared("glm4-moe", json!({})), Some((24, false)));
}

/// Some makers publish a draft head with their model. Transformers leaves it out, too.
#[test]
fn what_guesses_further_tokens_is_left_out() {
    let folder = std::env::temp_dir().join(format!("corella-{}-guessing", std::process::id()));
    fs::create_dir_all(&folder).unwrap();
    for (name, guesses, is_known) in [
        ("glm4-moe", "model.layers.4.eh_proj.weight", true),
        ("glm4-moe", "model.layers.3.eh_proj.weight", false),
        ("ernie4-5-moe", "model.mtp_linear_proj.0.weight", true),
        ("qwen2-moe", "model.layers.4.eh_proj.weight", false),
    ] {
        let bytes = fs::read(golden(name).join("model.safetensors")).unwrap();
        let tensors = SafeTensors::deserialize(&bytes).unwrap();
        let mut more: HashMap<String, TensorView<'_>> = tensors.tensors().into_iter().collect();
        more.insert(
            guesses.to_owned(),
            tensors.tensor("model.norm.weight").unwrap(),
        );
        let file = safetensors::serialize(more, None).unwrap();
        fs::write(folder.join("model.safetensors"), file).unwrap();
        fs::copy(golden(name).join("config.json"), folder.join("config.json")).unwrap();
        let weights = Checkpoint::open(&folder).unwrap().weights();
        match is_known {
            true => assert_eq!(weights.unwrap().left_out, [guesses]),
            false => {
                let error = weights.err().unwrap();
                assert!(error.problem.contains("has no place"), "{}", error.problem);
            }
        }
    }
    fs::remove_dir_all(folder).unwrap();
}

#[test]
fn families_that_rotate_otherwise_store_rows_in_another_order() {
    for (name, expected) in [
        ("llama-gqa-tied", false),
        ("olmo3", false),
        ("seed-oss", false),
        ("cohere", true),
        ("ernie4-5", true),
        ("glm4-moe", true),
        ("minimax-m2", true),
    ] {
        let checkpoint = Checkpoint::open(golden(name)).unwrap();
        let config = checkpoint.config();
        assert_eq!(
            config.architecture.reorders_rows(&config.spec),
            expected,
            "{name}"
        );
    }
}

#[test]
fn the_inner_size_of_gpt2_is_four_times_the_outer_unless_it_is_given() {
    let inner = |changes| {
        let spec = spec("gpt2", changes);
        spec.layers[0].feed_forward.mlp().intermediate_size
    };
    assert_eq!(inner(json!({ "n_inner": null })), 128);
    assert_eq!(inner(json!({ "n_inner": 56 })), 56);
}

/// Gemma 3 as published, before Transformers 5 gave each type of layer an object.
#[test]
fn both_spellings_of_gemma3_are_read() {
    let new = spec("gemma3", json!({ "layer_types": null }));
    let old = spec(
        "gemma3",
        json!({ "layer_types": null, "rope_parameters": null, "rope_theta": 100_000.0,
            "rope_local_base_freq": 1000.0,
            "rope_scaling": { "rope_type": "linear", "factor": 4.0 } }),
    );
    assert_eq!(old, new);
    let six = json!({ "layer_types": null, "num_hidden_layers": 6 });
    let theta = |layer: &AttentionSpec| layer.rotary.as_ref().unwrap().theta;
    let thetas = of_layers(&spec("gemma3", six), theta);
    assert_eq!(thetas, [1000.0, 1000.0, 1000.0, 1000.0, 1000.0, 100_000.0]);
}

/// `tests/golden/make_rotary.py` writes the file.
#[test]
fn rope_is_that_of_transformers_however_it_is_spelled() {
    let cases: Value =
        serde_json::from_slice(&fs::read(golden("rotary_config.json")).unwrap()).unwrap();
    let cases = cases.as_array().unwrap();
    assert_eq!(cases.len(), 29);
    for case in cases {
        let spec = parse(&case["config"]).unwrap();
        for (layer, name) in [(spec.layers.first(), "first"), (spec.layers.last(), "last")] {
            let rotary = layer.unwrap().attention.rotary.as_ref().unwrap();
            let found = rotary.frequencies(spec.max_position);
            let expected = &case[name];
            let close_to = |found: f64, expected: &Value| {
                let expected = expected.as_f64().unwrap();
                // Transformers computes in f32.
                assert!(
                    (found - expected).abs() <= 1e-6 * expected.abs(),
                    "{name}: {found}, {expected}: {}",
                    case["config"]
                );
            };
            close_to(found.magnitude, &expected["magnitude"]);
            let frequencies = expected["frequencies"].as_array().unwrap();
            assert_eq!(found.frequencies.len(), frequencies.len());
            for (&found, expected) in found.frequencies.iter().zip(frequencies) {
                close_to(found, expected);
            }
        }
    }
}

/// YaRN as Qwen's model cards write it. vLLM reads it in the same way.
#[test]
fn yarn_makes_the_context_longer() {
    let context = |model: &str, max_position: usize, scaling: Value| {
        let changes = json!({ "max_position_embeddings": max_position, "rope_scaling": scaling,
            "rope_theta": 1_000_000.0, "rope_parameters": null });
        spec(model, changes).max_position
    };
    let yarn = |factor: f64| json!({ "rope_type": "yarn", "factor": factor, "original_max_position_embeddings": 32_768 });
    for model in ["qwen3-gqa-tied", "cohere", "gemma3"] {
        assert_eq!(context(model, 40_960, yarn(4.0)), 131_072, "{model}");
        assert_eq!(context(model, 131_072, yarn(4.0)), 131_072, "{model}");
    }
    // The files' own context is never reduced.
    assert_eq!(context("qwen3-gqa-tied", 40_960, yarn(1.1)), 40_960);
    let without_original = json!({ "type": "yarn", "factor": 4.0 });
    assert_eq!(context("qwen3-gqa-tied", 32_768, without_original), 131_072);
    let by_context = json!({ "type": "yarn", "original_max_position_embeddings": 32_768 });
    assert_eq!(context("qwen3-gqa-tied", 131_072, by_context), 131_072);
    let linear = json!({ "rope_type": "linear", "factor": 4.0 });
    assert_eq!(context("qwen3-gqa-tied", 40_960, linear), 40_960);
    assert_eq!(context("qwen3-gqa-tied", 40_960, yarn(1e30)), 1 << 31);
    // A window as long as the stated context is a window in the longer context.
    let changes = json!({ "max_position_embeddings": 40_960, "sliding_window": 40_960,
        "rope_scaling": yarn(4.0), "rope_parameters": null });
    let windows = of_layers(&spec("mistral", changes), |layer| layer.window);
    assert_eq!(windows, [Some(40_960); 4]);
}

#[test]
fn the_class_may_be_the_decoder_alone() {
    for (name, decoder) in [
        ("qwen3-gqa-untied", "Qwen3Model"),
        ("mistral", "MistralModel"),
        ("gpt2", "GPT2Model"),
        ("gemma3", "Gemma3TextModel"),
    ] {
        let changed = spec(name, json!({ "architectures": [decoder] }));
        assert_eq!(changed, spec(name, json!({})), "{name}");
    }
}

#[test]
fn soft_caps_can_be_taken_away() {
    let mut config = golden_config("gemma2");
    config["attn_logit_softcapping"] = Value::Null;
    let spec = parse(&config).unwrap();
    assert_eq!(spec.layers[0].attention.soft_cap, None);
    assert_eq!(spec.logit_soft_cap, Some(1.5));
    config
        .as_object_mut()
        .unwrap()
        .remove("attn_logit_softcapping");
    assert_eq!(
        parse(&config).unwrap().layers[0].attention.soft_cap,
        Some(50.0)
    );
}

#[test]
fn experts_are_counted_under_both_names() {
    let both = [
        json!({}),
        json!({ "num_local_experts": null, "num_experts": 6 }),
    ];
    for changes in both {
        let spec = spec("qwen3-moe", changes);
        let num_experts = spec.layers.iter().map(|layer| match &layer.feed_forward {
            FeedForward::Experts(experts) => experts.num_experts,
            FeedForward::Mlp(_) => 0,
        });
        assert_eq!(num_experts.collect::<Vec<_>>(), [6, 0, 6, 6]);
    }
    let mut config = golden_config("qwen3-moe");
    config["num_experts_per_tok"] = json!(7);
    let error = parse(&config).unwrap_err();
    assert_eq!(error, "num_experts_per_tok is 7; there are 6 experts");
}

/// sqrt(1 + ln(512 / 16) / ln(16)) is 1.5.
#[test]
fn long_rope_has_a_magnitude_of_its_own() {
    let spec = spec("phi3", json!({}));
    let rotary = spec.layers[0].attention.rotary.as_ref().unwrap();
    assert_eq!(rotary.num_dims, 6);
    let RotaryScaling::LongRope {
        attention_factor,
        original_max_position,
        ..
    } = rotary.scaling
    else {
        panic!("{rotary:?}");
    };
    assert_eq!(original_max_position, 16);
    assert!((attention_factor - 1.5).abs() < 1e-12, "{attention_factor}");
}

/// A multimodal folder has the decoder's tensors behind a prefix, and the decoder's settings in an object.
#[test]
fn a_decoder_is_found_in_a_larger_model() {
    let plain = Checkpoint::open(golden("gemma3")).unwrap();
    let expected = plain.weights().unwrap();
    let bytes = fs::read(golden("gemma3").join("model.safetensors")).unwrap();
    let tensors = SafeTensors::deserialize(&bytes).unwrap();
    let config = json!({ "architectures": ["Gemma3ForConditionalGeneration"],
        "text_config": golden_config("gemma3"), "vision_config": { "hidden_size": 2 },
        "bos_token_id": 1, "eos_token_id": 2 });
    let folder = std::env::temp_dir().join(format!("corella-{}-multimodal", std::process::id()));
    fs::create_dir_all(&folder).unwrap();
    fs::write(folder.join("config.json"), config.to_string()).unwrap();
    for (prefix, eye) in [
        ("language_model.model.", "vision_tower.patch.weight"),
        ("model.language_model.", "model.vision_tower.patch.weight"),
    ] {
        let mut renamed: HashMap<String, TensorView<'_>> = HashMap::new();
        for (name, tensor) in tensors.tensors() {
            renamed.insert(name.replacen("model.", prefix, 1), tensor);
        }
        let norm = tensors.tensor("model.norm.weight").unwrap();
        renamed.insert(eye.to_owned(), norm);
        let file = safetensors::serialize(renamed, None).unwrap();
        fs::write(folder.join("model.safetensors"), file).unwrap();
        let checkpoint = Checkpoint::open(&folder).unwrap();
        assert_eq!(checkpoint.config().spec, plain.config().spec);
        let weights = checkpoint.weights().unwrap();
        assert_eq!(weights.left_out, [eye]);
        for (found, expected) in weights.layers.iter().zip(&expected.layers) {
            let q = |layer: &crate::LayerWeights| layer[LayerTensor::Q].bytes().to_vec();
            assert_eq!(q(found), q(expected));
        }
    }
    fs::remove_dir_all(folder).unwrap();
}

#[test]
fn an_unknown_name_is_answered_with_the_closest() {
    let answer = |name: &str| {
        let config = json!({"architectures": [name]}).to_string();
        let error = ModelConfig::parse(("config.json", config.as_bytes()), None).unwrap_err();
        error.problem
    };
    assert_eq!(
        answer("Qwen3MoEForCausalLM"),
        "architectures is [\"Qwen3MoEForCausalLM\"]; it is not supported; the closest that is supported is \
         Qwen3MoeForCausalLM"
    );
    // Without a close name, each type is listed once.
    let answer = answer("T5");
    let start =
        "architectures is [\"T5\"]; it is not supported; supported are models of the types bert, ";
    assert!(answer.starts_with(start), "{answer}");
    assert_eq!(answer.matches(" gemma3,").count(), 1, "{answer}");
    assert!(answer.len() < 700, "{answer}");
}
