//! Tests of adapters that were made for multimodal models.

use std::collections::BTreeMap;
use std::fs;
use std::path::PathBuf;

use safetensors::{Dtype, SafeTensors, tensor::TensorView};
use serde_json::json;

use super::*;
use crate::Checkpoint;

/// The shape and the bytes of a tensor of f32, by its name.
type Stored = BTreeMap<String, (Vec<usize>, Vec<u8>)>;

fn golden(name: &str) -> PathBuf {
    let golden = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/golden");
    golden.join(name)
}

fn text_model() -> ModelConfig {
    let model = Checkpoint::open(golden("gemma3")).unwrap();
    model.config().clone()
}

fn multimodal_model() -> ModelConfig {
    let text = fs::read(golden("gemma3/config.json")).unwrap();
    let text: Value = serde_json::from_slice(&text).unwrap();
    let whole = json!({
        "architectures": ["Gemma3ForConditionalGeneration"],
        "tie_word_embeddings": true,
        "text_config": text,
    });
    ModelConfig::parse(("config.json", whole.to_string().as_bytes()), None).unwrap()
}

/// The tensors of an adapter that was made for the text model. The decoder has the name `decoder`.
fn stored(decoder: &str) -> Stored {
    let bytes = fs::read(golden("adapters/gemma3-all").join(WEIGHTS)).unwrap();
    let file = SafeTensors::deserialize(&bytes).unwrap();
    let tensors = file.iter().map(|(name, view)| {
        let name = name.replace("base_model.model.model.", &format!("{PREFIX}{decoder}"));
        (name, (view.shape().to_vec(), view.data().to_vec()))
    });
    tensors.collect()
}

fn add_update(stored: &mut Stored, module: &str) {
    for matrix in ["lora_A", "lora_B"] {
        let name = format!("{PREFIX}{module}.{matrix}.weight");
        stored.insert(name, (vec![2, 3], vec![0; 24]));
    }
}

fn open(test: &str, stored: &Stored, model: &ModelConfig) -> Result<Adapter, CheckpointError> {
    let folder = std::env::temp_dir().join(format!("corella-{}-{test}", std::process::id()));
    fs::create_dir_all(&folder).unwrap();
    let views = stored.iter().map(|(name, (shape, bytes))| {
        let view = TensorView::new(Dtype::F32, shape.clone(), bytes);
        (name, view.unwrap())
    });
    let weights = safetensors::serialize(views, None).unwrap();
    fs::write(folder.join(WEIGHTS), weights).unwrap();
    let config = golden("adapters/gemma3-all").join(CONFIG);
    fs::copy(config, folder.join(CONFIG)).unwrap();
    let opened = Adapter::open(&folder, model);
    fs::remove_dir_all(folder).unwrap();
    opened
}

const TOWER: &str = "vision_tower.vision_model.encoder.layers.0.self_attn.q_proj";

#[test]
fn updates_of_a_vision_tower_are_left() {
    let alone = Adapter::open(&golden("adapters/gemma3-all"), &text_model()).unwrap();
    assert!(alone.left_out.is_empty());
    for (model, decoder, parts) in [
        (
            multimodal_model(),
            "model.language_model.",
            [
                format!("model.{TOWER}"),
                "model.multi_modal_projector.x".into(),
            ],
        ),
        (
            multimodal_model(),
            "language_model.model.",
            [TOWER.into(), "multi_modal_projector.x".into()],
        ),
        // The decoder is served without the other parts, for example from a GGUF file.
        (
            text_model(),
            "model.language_model.",
            [
                format!("model.{TOWER}"),
                "model.visual.blocks.0.attn.qkv".into(),
            ],
        ),
        (
            text_model(),
            "model.",
            [TOWER.into(), "model.audio_tower.x".into()],
        ),
    ] {
        let mut stored = stored(decoder);
        parts.iter().for_each(|part| add_update(&mut stored, part));
        let adapter = open("tower", &stored, &model).unwrap();
        assert_eq!(adapter.left_out.len(), 4, "{:?}", adapter.left_out);
        assert_eq!(adapter.fingerprint(), alone.fingerprint(), "{decoder}");
    }
}

#[test]
fn an_adapter_without_updates_of_text_is_refused() {
    let mut stored = Stored::new();
    add_update(&mut stored, TOWER);
    let error = open("only-tower", &stored, &multimodal_model())
        .err()
        .unwrap();
    let expected = format!(
        "updates only parts of the model that read no text, such as {PREFIX}{TOWER}.lora_A.weight, and text is \
         all that is served"
    );
    assert_eq!(error.problem, expected);
    // A part that reads text and cannot be updated is still refused.
    add_update(&mut stored, "lm_head");
    let error = open("head", &stored, &multimodal_model()).err().unwrap();
    let expected = format!("tensor {PREFIX}lm_head.lora_A.weight cannot be used");
    assert!(error.problem.starts_with(&expected), "{error}");
}
