//! Tests of config.json for encoders.

use std::fs;
use std::path::Path;

use serde_json::{Value, json};

use super::{of_layers, parse};
use crate::DecoderSpec;

fn encoder(name: &str, changes: Value) -> Result<DecoderSpec, String> {
    let tests = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/encoder");
    let bytes = fs::read(tests.join(name).join("config.json")).unwrap();
    let mut config: Value = serde_json::from_slice(&bytes).unwrap();
    let changes = changes.as_object().unwrap().clone();
    config.as_object_mut().unwrap().extend(changes);
    parse(&config)
}

#[test]
fn texts_of_roberta_begin_behind_the_padding() {
    let first = |name, changes| {
        let spec = encoder(name, changes).unwrap();
        (spec.encoder.unwrap().first_position, spec.max_position)
    };
    assert_eq!(first("bert-mean", json!({})), (0, 160));
    assert_eq!(first("xlm-roberta-cls", json!({})), (2, 160));
    assert_eq!(
        first("xlm-roberta-cls", json!({ "pad_token_id": 4 })),
        (5, 157)
    );
    let none_left = encoder("xlm-roberta-cls", json!({ "max_position_embeddings": 2 }));
    assert!(
        none_left
            .unwrap_err()
            .contains("max_position_embeddings is 2")
    );
}

#[test]
fn layers_of_modernbert_look_around_or_everywhere() {
    let kinds = |changes| {
        of_layers(&encoder("modernbert-mean", changes).unwrap(), |layer| {
            (layer.window, layer.rotary.as_ref().unwrap().theta)
        })
    };
    // Half of `local_attention` on each side, and the token itself.
    let (local, global) = ((Some(13), 1e4), (None, 16e4));
    let listed = kinds(json!({}));
    assert_eq!(listed, [global, local, local, global]);
    // The first checkpoints have these fields.
    let older = json!({ "layer_types": null, "rope_parameters": null, "local_rope_theta": 1e4,
        "global_rope_theta": 16e4 });
    assert_eq!(kinds(older), listed);
}

#[test]
fn nomic_bert_is_described_by_its_own_names_or_those_of_transformers() {
    let common = encoder("nomic-bert-mean", json!({})).unwrap();
    let own = json!({ "n_embd": 32, "n_head": 2, "n_layer": 2, "n_inner": 40, "n_positions": 160,
        "layer_norm_epsilon": 1e-6, "activation_function": "swiglu", "rotary_emb_base": 1000,
        "rotary_emb_fraction": 1.0, "rotary_scaling_factor": null, "prenorm": false,
        "hidden_size": null, "num_attention_heads": null, "num_hidden_layers": null,
        "intermediate_size": null, "max_position_embeddings": null, "layer_norm_eps": null,
        "hidden_act": null, "rope_parameters": null });
    assert_eq!(encoder("nomic-bert-mean", own), Ok(common));
}

#[test]
fn encoders_of_other_kinds_are_refused_by_their_fields() {
    for (name, changes, problem) in [
        (
            "bert-mean",
            json!({ "position_embedding_type": "relative_key" }),
            "only absolute positions",
        ),
        ("bert-mean", json!({ "is_decoder": true }), "only encoders"),
        (
            "bert-mean",
            json!({ "hidden_act": "quick" }),
            "hidden_act is \"quick\"",
        ),
        (
            "nomic-bert-mean",
            json!({ "prenorm": true }),
            "prenorm is true",
        ),
        (
            "nomic-bert-mean",
            json!({ "rotary_scaling_factor": 2.0 }),
            "rotary_scaling_factor is 2.0",
        ),
        (
            "bert-mean",
            json!({ "architectures": ["BertForMaskedLM"] }),
            "the closest that is supported is BertForSequenceClassification",
        ),
    ] {
        let error = encoder(name, changes).unwrap_err();
        assert!(error.contains(problem), "{name}: {error}");
    }
}
