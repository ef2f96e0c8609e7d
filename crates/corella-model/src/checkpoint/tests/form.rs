//! Tests of experts' tensors in forms that differ from the form of the model's makers.

use std::collections::BTreeMap;
use std::path::Path;

use safetensors::SafeTensors;

use super::*;
use crate::BlockFormat;
use crate::checkpoint::weight_loader;
use crate::file::file_tensor::FileTensor;
use crate::file::gguf::GgufFile;

/// The shape and the bytes of a tensor of f32, by its name.
type Stored = BTreeMap<String, (Vec<usize>, Vec<u8>)>;

fn golden(name: &str) -> PathBuf {
    let golden = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/golden");
    golden.join(name)
}

fn read(folder: &Path) -> Stored {
    let bytes = fs::read(folder.join(SINGLE)).unwrap();
    let file = SafeTensors::deserialize(&bytes).unwrap();
    let tensors = file.iter().map(|(name, view)| {
        assert_eq!(view.dtype(), Dtype::F32);
        let tensor = (view.shape().to_vec(), view.data().to_vec());
        (name.to_owned(), tensor)
    });
    tensors.collect()
}

/// Compares the tensors of layers bit for bit.
fn expect_same(name: &str, found: &DecoderWeights, expected: &DecoderWeights) {
    assert_eq!(found.layers.len(), expected.layers.len());
    for (index, (found, expected)) in found.layers.iter().zip(&expected.layers).enumerate() {
        assert_eq!(found.iter().count(), expected.iter().count());
        for ((tensor, found), (_, expected)) in found.iter().zip(expected.iter()) {
            let is_same = found.shape == expected.shape && found.bytes() == expected.bytes();
            assert!(is_same, "{name}: {index}.{tensor}");
        }
    }
}

/// Loads the model of a golden folder with other tensors, and expects the weights of the folder.
fn expect_weights_of(name: &str, stored: &Stored) {
    let folder = Folder::new(&format!("form-{name}"));
    let views = stored.iter().map(|(name, (shape, bytes))| {
        let view = TensorView::new(Dtype::F32, shape.clone(), bytes);
        (name, view.unwrap())
    });
    folder
        .write(SINGLE, safetensors::serialize(views, None).unwrap())
        .write(CONFIG, fs::read(golden(name).join(CONFIG)).unwrap());
    let found = Checkpoint::open(&folder.0).unwrap().weights().unwrap();
    let expected = Checkpoint::open(golden(name)).unwrap().weights().unwrap();
    assert!(found.left_out.is_empty());
    expect_same(name, &found, &expected);
}

/// Transformers 5 stores the tensors of its modules with `save_original_format=False`.
#[test]
fn experts_are_read_as_transformers_holds_them() {
    let forms = fs::read(golden("forms.json")).unwrap();
    let forms: BTreeMap<String, BTreeMap<String, Vec<String>>> =
        serde_json::from_slice(&forms).unwrap();
    assert_eq!(forms.len(), 12);
    for (name, form) in forms {
        let mut stored = read(&golden(&name));
        let of_down = |(name, parts): (&String, &Vec<String>)| {
            name.ends_with(".down_proj").then_some(parts.len())
        };
        let num_experts = form.iter().find_map(of_down).unwrap();
        let num_stored = stored.len();
        for layer in 0..8 {
            let full = |name: &String| format!("model.layers.{layer}.{name}");
            // Some layers have no experts.
            if !form
                .values()
                .flatten()
                .all(|part| stored.contains_key(&full(part)))
            {
                continue;
            }
            for (module, parts) in &form {
                let parts = parts.iter().map(|part| stored.remove(&full(part)).unwrap());
                let (shapes, bytes): (Vec<_>, Vec<_>) = parts.unzip();
                let shape = match &shapes[..] {
                    [shape] => shape.clone(),
                    [shape, ..] => {
                        let num_rows = shapes.len() / num_experts * shape[0];
                        vec![num_experts, num_rows, shape[1]]
                    }
                    [] => unreachable!("a tensor has parts"),
                };
                stored.insert(full(module), (shape, bytes.concat()));
            }
        }
        assert!(stored.len() < num_stored, "{name} has no experts");
        expect_weights_of(&name, &stored);
    }
}

/// Gemma 4 is published with all experts in one tensor. Programs that quantise the model store its experts one by one.
#[test]
fn experts_are_read_one_by_one() {
    let name = "gemma4-experts";
    let mut stored = read(&golden(name));
    for (name, (shape, bytes)) in stored.clone() {
        let Some((prefix, matrix)) = name.split_once("experts.") else {
            continue;
        };
        let [num_experts, num_rows, row_len] = shape[..] else {
            panic!("{name} has shape {shape:?}");
        };
        let parts = match matrix {
            "gate_up_proj" => vec!["gate_proj", "up_proj"],
            _ => vec![matrix],
        };
        let num_rows = num_rows / parts.len();
        let mut chunks = bytes.chunks_exact(num_rows * row_len * 4);
        for (expert, part) in
            (0..num_experts).flat_map(|expert| parts.iter().map(move |part| (expert, part)))
        {
            let name = format!("{prefix}experts.{expert}.{part}.weight");
            stored.insert(
                name,
                (vec![num_rows, row_len], chunks.next().unwrap().to_vec()),
            );
        }
        stored.remove(&name);
    }
    assert!(
        stored
            .keys()
            .any(|name| name.ends_with("experts.5.down_proj.weight"))
    );
    expect_weights_of(name, &stored);
}

/// A GGUF file whose converter has stacked the experts' gate and up matrices.
struct Stacked(GgufFile);

const GATE: &str = ".ffn_gate_exps.weight";
const UP: &str = ".ffn_up_exps.weight";
const GATE_UP: &str = ".ffn_gate_up_exps.weight";

impl TensorSource for Stacked {
    fn file(&self) -> &str {
        self.0.file()
    }

    fn names(&self) -> Vec<String> {
        let mut names = self.0.names();
        names.retain(|name| !name.ends_with(UP));
        names
            .into_iter()
            .map(|name| name.replace(GATE, GATE_UP))
            .collect()
    }

    fn sizes(&self) -> Vec<(usize, usize)> {
        self.0.sizes()
    }

    fn tensor(&self, name: &str) -> Result<Option<FileTensor>, CheckpointError> {
        let Some(layer) = name.strip_suffix(GATE_UP) else {
            return self.0.tensor(name);
        };
        let part = |suffix| self.0.tensor(&format!("{layer}{suffix}"));
        let (gate, up) = (part(GATE)?.unwrap(), part(UP)?.unwrap());
        assert_eq!(gate.format, BlockFormat::F32);
        let [num_experts, num_rows, row_len] = gate.shape[..] else {
            panic!("{name} has shape {:?}", gate.shape);
        };
        let of_expert = |tensor: &FileTensor, expert: usize| {
            let len = num_rows * row_len * 4;
            let start = tensor.range.start + expert * len;
            tensor.storage.bytes()[start..start + len].to_vec()
        };
        let stacked =
            (0..num_experts).flat_map(|expert| [of_expert(&gate, expert), of_expert(&up, expert)]);
        let bytes: Vec<u8> = stacked.flatten().collect();
        Ok(Some(FileTensor {
            range: 0..bytes.len(),
            storage: Storage::Owned(bytes).into(),
            format: gate.format,
            shape: vec![num_experts, 2 * num_rows, row_len],
        }))
    }
}

#[test]
fn gate_and_up_matrices_of_a_file_may_be_stacked() {
    let family = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/gguf/family");
    for name in ["mixtral", "qwen3-moe-all", "glm4-moe"] {
        let path = family.join(format!("{name}.gguf"));
        let file = Checkpoint::open(&path).unwrap();
        let config = file.config();
        let stored = Storage::Owned(fs::read(&path).unwrap());
        let stacked = Stacked(GgufFile::open(name.into(), stored).unwrap());
        let layout = &config.architecture.family().file;
        let found = weight_loader::load(config, &[stacked], layout, name).unwrap();
        expect_same(name, &found, &file.weights().unwrap());
    }
}
