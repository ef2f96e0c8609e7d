//! The output head of a folder: its own, the embedding, or none.

use super::*;

/// The observed behaviour of Transformers, from `tests/golden/make_head.py`.
#[test]
fn the_head_is_the_one_in_the_files() {
    let folder = Folder::new("head");
    let check = |is_tied: Option<bool>, head: Option<Dtype>, is_copy: bool| {
        let shapes = shapes();
        let mut tensors: BTreeMap<_, _> = shapes
            .iter()
            .map(|(&name, (dtype, shape))| (name, (*dtype, shape.clone(), 1.0)))
            .collect();
        if let Some(dtype) = head {
            let value = if is_copy { 1.0 } else { 2.0 };
            tensors.insert("lm_head.weight", (dtype, vec![8, 4], value));
        }
        folder.write(SINGLE, filled(&tensors));
        folder.write(CONFIG, with(json!({ "tie_word_embeddings": is_tied })));
        let checkpoint = Checkpoint::open(&folder.0).unwrap();
        let weights = checkpoint.weights().unwrap();
        let config = checkpoint.config();
        assert_eq!(weights.lm_head.is_none(), config.spec.tied_embeddings);
        (config.has_head, weights.lm_head.is_some())
    };
    let (tied, own, none) = ((true, false), (true, true), (false, false));
    assert_eq!(check(Some(true), None, false), tied);
    // A copy of any type is no separate head.
    assert_eq!(check(Some(true), Some(Dtype::BF16), true), tied);
    assert_eq!(check(Some(true), Some(Dtype::F32), true), tied);
    assert_eq!(check(Some(true), Some(Dtype::BF16), false), own);
    assert_eq!(check(Some(true), Some(Dtype::F32), false), own);
    assert_eq!(check(Some(false), Some(Dtype::BF16), true), own);
    assert_eq!(check(Some(false), None, false), none);
    // The classes of this family do not tie the head.
    assert_eq!(check(None, None, false), none);
    assert_eq!(check(None, Some(Dtype::BF16), false), own);
}

#[test]
fn a_tied_matrix_may_have_the_name_of_the_head() {
    let folder = Folder::new("swapped");
    let mut shapes = shapes();
    let embed = shapes.remove("model.embed_tokens.weight").unwrap();
    shapes.insert("lm_head.weight", embed);
    folder.write(SINGLE, serialize(&shapes));
    folder.write(CONFIG, with(json!({})));
    let checkpoint = Checkpoint::open(&folder.0).unwrap();
    let weights = checkpoint.weights().unwrap();
    assert!(weights.lm_head.is_none() && checkpoint.config().has_head);
    // The embedding is the first of the tensors.
    assert!(weights.embed.bytes().iter().all(|&byte| byte == 1));
    folder.write(CONFIG, with(json!({ "tie_word_embeddings": false })));
    assert_eq!(
        folder.error(),
        "model.safetensors: tensor model.embed_tokens.weight is missing; it should have shape [8, 4]"
    );
}

/// Tensors with one value everywhere, which 16 bits can hold.
fn filled(tensors: &BTreeMap<&str, (Dtype, Vec<usize>, f32)>) -> Vec<u8> {
    let data = tensors.values().map(|(dtype, shape, value)| {
        let bytes = value.to_le_bytes();
        let element = match dtype {
            Dtype::BF16 => &bytes[2..],
            _ => &bytes[..],
        };
        element.repeat(shape.iter().product())
    });
    let data: Vec<_> = data.collect();
    let views = tensors
        .iter()
        .zip(&data)
        .map(|((name, (dtype, shape, _)), data)| {
            (*name, TensorView::new(*dtype, shape.clone(), data).unwrap())
        });
    safetensors::serialize(views, None).unwrap()
}

/// The class of an embedding model, whose tensors have no prefix.
#[test]
fn a_decoder_alone_loads_without_a_head() {
    let folder = Folder::new("decoder");
    let mut shapes = shapes();
    let names: Vec<_> = shapes.keys().copied().collect();
    for name in names {
        let tensor = shapes.remove(name).unwrap();
        shapes.insert(name.strip_prefix("model.").unwrap(), tensor);
    }
    folder.write(SINGLE, serialize(&shapes));
    folder.write(
        CONFIG,
        with(json!({ "architectures": ["MistralModel"], "tie_word_embeddings": false })),
    );
    let checkpoint = Checkpoint::open(&folder.0).unwrap();
    checkpoint.weights().unwrap();
    assert!(!checkpoint.config().has_head);
}
