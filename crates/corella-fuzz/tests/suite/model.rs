//! Checkpoints: safetensors, GGUF, configurations, indices of shards, SentencePiece models and LoRA folders.

use std::path::Path;

use corella_fuzz::{Random, Target, Verdict, mutate_bytes, mutate_json};
use corella_model::{Adapter, Checkpoint, CheckpointError, DecoderWeights, Tensor};
use corella_text::{ChatTemplate, TemplateFiles, Tokenizer};
use serde_json::Value;

use crate::corpus::{FileInput, Scratch, path};

const MEGABYTE: usize = 1 << 20;
const WEIGHTS: &str = "model.safetensors";
const CONFIG: &str = "config.json";

/// Reads a checkpoint as `corella serve` does before an executor packs its weights, and some rows.
fn read(path: &Path) -> Result<(), CheckpointError> {
    let checkpoint = Checkpoint::open(path)?;
    checkpoint.totals()?;
    read_rows(&checkpoint.weights()?);
    Ok(())
}

fn read_rows(weights: &DecoderWeights) {
    let mut tensors: Vec<&Tensor> = vec![&weights.embed, &weights.norm];
    tensors.extend(&weights.lm_head);
    for layer in &weights.layers {
        tensors.extend(layer.iter().map(|(_, tensor)| tensor));
    }
    let mut scratch = Vec::new();
    for tensor in tensors {
        // Vectors are read as one row.
        let (num_rows, len) = match tensor.shape[..] {
            [rows, columns] => (rows, columns),
            _ => continue,
        };
        let mut row = vec![0.0; len];
        for index in [0, num_rows - 1] {
            tensor.read_row(index, &mut scratch, &mut row);
        }
    }
}

/// Changes the bytes of a safetensors file, or the content of its header.
fn mutate_safetensors(random: &mut Random, bytes: &mut Vec<u8>, other: &[u8]) {
    let header = |bytes: &[u8]| -> Option<(usize, Value)> {
        let (len, rest) = bytes.split_first_chunk::<8>()?;
        let len = usize::try_from(u64::from_le_bytes(*len)).ok()?;
        let json = serde_json::from_slice(rest.get(..len)?).ok()?;
        Some((8 + len, json))
    };
    let Some((end, mut json)) = header(bytes).filter(|_| random.once_in(2)) else {
        return mutate_bytes(random, bytes, other);
    };
    let words = [
        "dtype",
        "shape",
        "data_offsets",
        "F32",
        "BF16",
        "F8_E4M3",
        "I32",
        "__metadata__",
    ];
    mutate_json(random, &mut json, &words);
    let text = json.to_string().into_bytes();
    let mut changed = (text.len() as u64).to_le_bytes().to_vec();
    changed.extend(text);
    changed.extend(&bytes[end..]);
    *bytes = changed;
}

/// Changes JSON as JSON, and now and then as bytes.
pub fn mutate_json_bytes(random: &mut Random, bytes: &mut Vec<u8>, words: &[&str]) {
    match serde_json::from_slice(bytes) {
        Ok(mut json) if !random.once_in(8) => {
            mutate_json(random, &mut json, words);
            *bytes = json.to_string().into_bytes();
        }
        _ => mutate_bytes(random, bytes, b"{\"a\": [1e999, \"\\ud800\", null]}"),
    }
}

#[test]
fn safetensors() {
    let corpus = [
        FileInput::new("tests/quantized/awq", WEIGHTS),
        FileInput::new("tests/quantized/gptq", WEIGHTS),
        FileInput::new("tests/quantized/int8", WEIGHTS),
        FileInput::new("tests/golden/qwen2-gqa-untied", WEIGHTS),
        FileInput::new("tests/golden/phi3", WEIGHTS),
    ];
    let scratch = Scratch::new();
    let other = corpus[0].bytes.clone();
    Target::new("safetensors", 4 * MEGABYTE, 16).run(
        &corpus,
        |random, input| mutate_safetensors(random, &mut input.bytes, &other),
        |input| Verdict::from(&read(&scratch.folder(input))),
    );
}

#[test]
fn config() {
    let corpus = [
        "cohere",
        "ernie4-5",
        "ernie4-5-moe",
        "exaone4",
        "gemma2",
        "gemma3",
        "glm",
        "glm4",
        "glm4-moe",
        "gpt2",
        "granite",
        "lfm2",
        "lfm2-moe",
        "llama-gqa-tied",
        "minimax-m2",
        "ministral3",
        "mistral",
        "mixtral",
        "olmo2",
        "olmo3",
        "phi3",
        "qwen2-gqa-untied",
        "qwen2-moe",
        "qwen3-gqa-tied",
        "qwen3-moe",
        "seed-oss",
        "smollm3",
    ]
    .map(|name| {
        FileInput::new(
            Box::leak(format!("tests/golden/{name}").into_boxed_str()),
            CONFIG,
        )
    });
    let quantised = ["awq", "gptq", "int4-g32", "int8"].map(|name| {
        FileInput::new(
            Box::leak(format!("tests/quantized/{name}").into_boxed_str()),
            CONFIG,
        )
    });
    let corpus = [&corpus[..], &quantised[..]].concat();
    let words = [
        "model_type",
        "num_hidden_layers",
        "layer_types",
        "sliding_window",
        "rope_scaling",
        "rope_type",
        "yarn",
        "llama3",
        "longrope",
        "quantization_config",
        "bits",
        "group_size",
        "full_attention",
        "llama",
        "qwen3_moe",
        "gemma3",
        "head_dim",
        "num_experts",
        "vocab_size",
    ];
    let scratch = Scratch::new();
    Target::new("config", 16 * MEGABYTE, 256).run(
        &corpus,
        |random, input| mutate_json_bytes(random, &mut input.bytes, &words),
        |input| Verdict::from(&read(&scratch.folder(input))),
    );
}

#[test]
fn index() {
    let corpus = [FileInput::new(
        "tests/golden/qwen3-gqa-tied-sharded",
        "model.safetensors.index.json",
    )];
    let scratch = Scratch::new();
    let words = [
        "weight_map",
        "..",
        "/etc/passwd",
        "model-00001-of-00003.safetensors",
        "config.json",
    ];
    Target::new("index", 4 * MEGABYTE, 256).run(
        &corpus,
        |random, input| mutate_json_bytes(random, &mut input.bytes, &words),
        |input| Verdict::from(&read(&scratch.folder(input))),
    );
}

/// Reads a GGUF file, and the tokenizer files that are made from its metadata. The metadata may lack a tokenizer.
fn read_gguf(path: &Path) -> Result<(), CheckpointError> {
    let checkpoint = Checkpoint::open(path)?;
    if let Ok(Some(json)) = checkpoint.file("tokenizer.json") {
        let _ = Tokenizer::from_bytes(&json)
            .map(|tokenizer| crate::tokenizer::use_tokenizer(&tokenizer));
    }
    if let Ok(Some(json)) = checkpoint.file("tokenizer_config.json") {
        let _ = ChatTemplate::from_files(TemplateFiles {
            tokenizer_config_json: Some(&json),
            ..TemplateFiles::default()
        });
    }
    read(path)
}

#[test]
fn gguf() {
    let corpus = [
        "llama-f32",
        "llama3-f16",
        "qwen3-f16",
        "family/gemma3",
        "family/phi3",
        "family/mixtral",
        "family/lfm2-moe-unscaled",
        "family/qwen3-5-groups",
    ]
    .map(|name| crate::corpus::bytes(&format!("tests/gguf/{name}.gguf")));
    let scratch = Scratch::new();
    let other = corpus[1].clone();
    Target::new("gguf", 16 * MEGABYTE, 64).run(
        &corpus,
        |random, bytes| mutate_bytes(random, bytes, &other),
        |bytes| Verdict::from(&read_gguf(&scratch.write("model.gguf", bytes))),
    );
}

/// Reads a folder's tokenizer, which is made from SentencePiece's file.
fn read_sentence_piece(folder: &Path) -> Result<(), String> {
    // The folder has no model, so that its files are read like an adapter's.
    let checkpoint = Checkpoint::open(folder).map_err(|error| error.to_string())?;
    let json = checkpoint
        .file("tokenizer.json")
        .map_err(|error| error.to_string())?;
    let tokenizer = Tokenizer::from_bytes(&json.ok_or("no tokenizer")?);
    let tokenizer = tokenizer.map_err(|error| error.to_string())?;
    crate::tokenizer::use_tokenizer(&tokenizer);
    Ok(())
}

#[test]
fn sentencepiece() {
    let corpus = ["bpe", "bpe-bare", "unigram"]
        .map(|name| crate::corpus::bytes(&format!("tests/sentencepiece/{name}/tokenizer.model")));
    let scratch = Scratch::new();
    let config = crate::corpus::bytes("tests/golden/llama-gqa-tied/config.json");
    let config = scratch.write(CONFIG, &config);
    let folder = config.parent().expect("a folder");
    let other = corpus[2].clone();
    Target::new("sentencepiece", 16 * MEGABYTE, 2000).run(
        &corpus,
        |random, bytes| mutate_bytes(random, bytes, &other),
        |bytes| {
            scratch.write("tokenizer.model", bytes);
            Verdict::from(&read_sentence_piece(folder))
        },
    );
}

#[test]
fn adapter() {
    const FOLDERS: [(&str, &str); 3] = [
        (
            "tests/golden/adapters/llama-some",
            "tests/golden/llama-gqa-tied",
        ),
        ("tests/golden/adapters/phi3-fused", "tests/golden/phi3"),
        ("tests/golden/adapters/gpt2-fused", "tests/golden/gpt2"),
    ];
    let mut corpus = Vec::new();
    for (folder, _) in FOLDERS {
        corpus.push(FileInput::new(folder, "adapter_model.safetensors"));
        corpus.push(FileInput::new(folder, "adapter_config.json"));
    }
    let models = FOLDERS.map(|(_, model)| Checkpoint::open(path(model)).expect("a golden"));
    let scratch = Scratch::new();
    let other = corpus[0].bytes.clone();
    let words = [
        "r",
        "lora_alpha",
        "use_rslora",
        "alpha_pattern",
        "target_modules",
        "bias",
        "LORA",
        "q_proj",
    ];
    Target::new("adapter", 4 * MEGABYTE, 64).run(
        &corpus,
        |random, input| match input.name {
            "adapter_config.json" => mutate_json_bytes(random, &mut input.bytes, &words),
            _ => mutate_safetensors(random, &mut input.bytes, &other),
        },
        |input| {
            let at = FOLDERS
                .iter()
                .position(|(folder, _)| *folder == input.folder);
            let model = models[at.expect("a folder of the list")].config();
            // One changed file is placed beside the other, unchanged one.
            let folder = scratch.folder(input);
            let verdict = Verdict::from(&Adapter::open(&folder, model));
            let whole = FileInput::new(input.folder, input.name);
            scratch.folder(&whole);
            verdict
        },
    );
}
