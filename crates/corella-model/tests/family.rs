//! Compares models of every family as GGUF files with their Hugging Face folders.

use std::fs;
use std::path::{Path, PathBuf};

use corella_model::{Checkpoint, DecoderSpec, DecoderWeights, FeedForward, GroupedRow, Tensor};

/// Families whose files are as complete as their folders.
const WHOLE: [&str; 21] = [
    "ernie4-5",
    "ernie4-5-moe",
    "exaone4-full",
    "glm",
    "glm4",
    "glm4-moe",
    "granite",
    "lfm2-moe-unscaled",
    "lfm2-unbiased",
    "minimax-m2",
    "ministral3",
    "olmo2",
    "olmo3",
    "phi3-full",
    "qwen2-moe",
    "qwen3-5",
    "qwen3-5-groups",
    "qwen3-5-moe",
    "qwen3-moe-all",
    "qwen3-next-all",
    "seed-oss",
];

/// The files were written by llama.cpp's own converter (`make_family.py`).
#[test]
fn a_gguf_file_has_what_its_folder_has() {
    let tests = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests");
    let entries = fs::read_dir(tests.join("gguf/family")).unwrap();
    let files: Vec<PathBuf> = entries.map(|entry| entry.unwrap().path()).collect();
    assert_eq!(files.len(), 30);
    for path in files {
        let name = path.file_stem().unwrap().to_string_lossy().into_owned();
        let file = Checkpoint::open(&path).unwrap();
        let folder = Checkpoint::open(tests.join("golden").join(&name)).unwrap();
        let architecture = match &*name {
            // The files of this family declare Llama.
            "mistral" => "LlamaForCausalLM",
            _ => folder.config().architecture.name(),
        };
        assert_eq!(file.config().architecture.name(), architecture);
        let (in_file, in_folder) = (&file.config().spec, &folder.config().spec);
        if WHOLE.contains(&&*name) {
            assert_eq!(in_file, in_folder, "{name}");
        } else {
            assert_ne!(in_file, in_folder, "{name}");
        }
        assert_eq!(
            without_layer_types(in_file),
            without_layer_types(in_folder),
            "{name}"
        );
        if name == "phi3" {
            let rotary = |spec: &DecoderSpec| {
                let attention = &spec.layers[0].attention;
                let rotary = attention.rotary.as_ref().unwrap().frequencies(512);
                (rotary, attention.window)
            };
            let (found, expected) = (rotary(in_file), rotary(in_folder));
            assert_eq!(found.1, expected.1);
            assert_eq!(found.0.magnitude, expected.0.magnitude);
            let pairs = found.0.frequencies.iter().zip(&expected.0.frequencies);
            for (found, expected) in pairs {
                assert!((found / expected - 1.0).abs() < 1e-6, "{found}, {expected}");
            }
        }
        if name == "gpt-oss" {
            let mut published = in_folder.clone();
            limit_gates(&mut published, Some(7.0));
            assert_eq!(in_file, &published);
        }
        let (found, expected) = (file.weights().unwrap(), folder.weights().unwrap());
        let (found, expected) = (tensors(&found), tensors(&expected));
        assert_eq!(found.len(), expected.len(), "{name}");
        for ((what, found), (_, expected)) in found.iter().zip(&expected) {
            assert_eq!(found.shape, expected.shape, "{name}: {what}");
            for (found, expected) in vector(found).into_iter().zip(vector(expected)) {
                // The converter adds one to Gemma's norm weights, which rounds them.
                let tolerance = expected.abs() * 2e-7;
                assert!(
                    (found - expected).abs() <= tolerance,
                    "{name}: {what} has {found}, expected {expected}"
                );
            }
        }
    }
}

/// The experts of gpt-oss are 4-bit floats in the folder and in the file, where llama.cpp's converter has reordered
/// them.
#[test]
fn mxfp4_blocks_of_a_file_are_those_of_its_folder() {
    let tests = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests");
    let file = Checkpoint::open(tests.join("gguf/mxfp4.gguf")).unwrap();
    let folder = Checkpoint::open(tests.join("quantized/mxfp4")).unwrap();
    assert_eq!(file.config().spec, folder.config().spec);
    let (found, expected) = (file.weights().unwrap(), folder.weights().unwrap());
    let (found, expected) = (tensors(&found), tensors(&expected));
    assert_eq!(found.len(), expected.len());
    let mut num_in_fp4 = 0;
    for ((what, found), (_, expected)) in found.iter().zip(&expected) {
        assert_eq!(found.shape, expected.shape, "{what}");
        assert_eq!(vector(found), vector(expected), "{what}");
        assert_eq!(found.group_format(), expected.group_format(), "{what}");
        if found.group_format().is_none() {
            continue;
        }
        let [mut of_file, mut of_folder] = [GroupedRow::default(), GroupedRow::default()];
        for row in 0..found.shape[0] {
            found.read_groups(row, &mut of_file);
            expected.read_groups(row, &mut of_folder);
            assert_eq!(of_file.quants, of_folder.quants, "{what}, row {row}");
            assert_eq!(of_file.scales, of_folder.scales, "{what}, row {row}");
        }
        num_in_fp4 += usize::from(found.group_format().unwrap().is_fp4);
    }
    let spec = &file.config().spec;
    assert_eq!(num_in_fp4, spec.layers.len() * 4 * 3);
}

fn limit_gates(spec: &mut DecoderSpec, limit: Option<f32>) {
    for layer in &mut spec.layers {
        if let FeedForward::Experts(experts) = &mut layer.feed_forward {
            experts.expert.gate_limit = limit;
        }
    }
}

/// A spec without the parts that GGUF files cannot express for these models: the layers with windows or RoPE, scales of
/// attention that differ from the published models', and the limit of gates.
fn without_layer_types(spec: &DecoderSpec) -> DecoderSpec {
    let mut spec = spec.clone();
    for layer in &mut spec.layers {
        layer.attention.rotary = None;
        layer.attention.window = None;
        layer.attention.scale = 1.0;
    }
    limit_gates(&mut spec, None);
    spec
}

fn tensors(weights: &DecoderWeights) -> Vec<(String, &Tensor)> {
    let ends = [
        Some(&weights.embed),
        weights.positions.as_ref(),
        Some(&weights.norm),
        weights.norm_bias.as_ref(),
        weights.lm_head.as_ref(),
    ];
    let ends = ends
        .into_iter()
        .flatten()
        .map(|tensor| ("end".to_owned(), tensor));
    let layers = weights
        .layers
        .iter()
        .enumerate()
        .flat_map(|(index, layer)| {
            let tensors = layer.iter();
            tensors.map(move |(tensor, values)| (format!("{index}.{tensor}"), values))
        });
    ends.chain(layers).collect()
}

fn rows(tensor: &Tensor) -> Vec<Vec<f64>> {
    let row_len = tensor.shape[1..].iter().product();
    let read = |row| {
        let mut values = vec![0.0; row_len];
        tensor.read_row(row, &mut Vec::new(), &mut values);
        values.into_iter().map(f64::from).collect()
    };
    (0..tensor.shape[0]).map(read).collect()
}

fn vector(tensor: &Tensor) -> Vec<f64> {
    rows(tensor).into_iter().flatten().collect()
}
