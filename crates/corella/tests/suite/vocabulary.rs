//! Models whose embedding has more or fewer rows than the tokenizer has tokens.

use std::fs;
use std::path::{Path, PathBuf};

use crate::held_isa::held_isa;
use corella::{Error, GenerateParams, Llm, LlmOptions, ModelSource};
use corella_model::WeightFormat;
use serde_json::{Value, json};

/// A copy of the built-in model, whose embedding, also its head, has `num_rows` rows.
struct Folder(PathBuf);

const NUM_TOKENS: usize = 2048;
const EMBEDDING: &str = "model.embed_tokens.weight";

fn nano(name: &str) -> PathBuf {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../models/nano");
    folder.join(name)
}

impl Folder {
    /// Added rows have larger logits than the token that the model would draw first.
    fn new(name: &str, num_rows: usize) -> Self {
        let name = format!("corella-vocabulary-{}-{name}", std::process::id());
        let folder = Self(std::env::temp_dir().join(name));
        fs::create_dir(&folder.0).unwrap();
        for name in [
            "generation_config.json",
            "tokenizer.json",
            "tokenizer_config.json",
        ] {
            fs::copy(nano(name), folder.0.join(name)).unwrap();
        }
        let mut config: Value =
            serde_json::from_slice(&fs::read(nano("config.json")).unwrap()).unwrap();
        config["vocab_size"] = num_rows.into();
        folder.write("config.json", config.to_string().as_bytes());

        let bytes = fs::read(nano("model.safetensors")).unwrap();
        let header_len = u64::from_le_bytes(*bytes.first_chunk().unwrap()) as usize;
        let (header, data) = bytes[8..].split_at(header_len);
        let header: Value = serde_json::from_slice(header).unwrap();
        let (mut new_header, mut new_data) = (json!({}), Vec::new());
        for (name, tensor) in header.as_object().unwrap() {
            if name == "__metadata__" {
                continue;
            }
            let [start, end] =
                [0_usize, 1].map(|i| tensor["data_offsets"][i].as_u64().unwrap() as usize);
            let mut values = data[start..end].to_vec();
            let mut tensor = tensor.clone();
            if name == EMBEDDING {
                assert_eq!(tensor["dtype"], "BF16");
                let row_bytes = values.len() / NUM_TOKENS;
                let loudest = loudest_row(&values, row_bytes);
                values.resize(num_rows.min(NUM_TOKENS) * row_bytes, 0);
                while values.len() < num_rows * row_bytes {
                    values.extend(&loudest);
                }
                tensor["shape"][0] = num_rows.into();
            }
            let start = new_data.len();
            new_data.extend(values);
            tensor["data_offsets"] = json!([start, new_data.len()]);
            new_header[name] = tensor;
        }
        let header = new_header.to_string();
        let length = (header.len() as u64).to_le_bytes();
        folder.write(
            "model.safetensors",
            &[&length[..], header.as_bytes(), &new_data].concat(),
        );
        folder
    }

    fn write(&self, name: &str, bytes: &[u8]) {
        fs::write(self.0.join(name), bytes).unwrap();
    }

    fn load(&self, weight_format: Option<WeightFormat>) -> Result<Llm, Error> {
        load(&ModelSource::Path(self.0.clone()), weight_format)
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

fn load(source: &ModelSource, weight_format: Option<WeightFormat>) -> Result<Llm, Error> {
    let options = LlmOptions {
        num_threads: Some(1),
        kv_cache_bytes: Some(1 << 20),
        isa: held_isa(),
        weight_format,
        ..LlmOptions::default()
    };
    Llm::load(source, &options)
}

/// Returns the row of the token that follows "Once upon", with all elements 8 times as large.
fn loudest_row(values: &[u8], row_bytes: usize) -> Vec<u8> {
    let llm = load(&ModelSource::BuiltIn, None).unwrap();
    let token = answer(&llm)[0] as usize;
    let row = &values[token * row_bytes..][..row_bytes];
    // Adding 3 to the exponent of a bf16 multiplies it by 8.
    let times_eight = |bits: u16| {
        if bits & 0x7F80 == 0 {
            bits
        } else {
            bits + (3 << 7)
        }
    };
    let elements = row.as_chunks::<2>().0.iter();
    let elements = elements.map(|&bytes| times_eight(u16::from_le_bytes(bytes)));
    elements.flat_map(u16::to_le_bytes).collect()
}

/// Returns the ids of a greedy answer.
fn answer(llm: &Llm) -> Vec<u32> {
    let params = GenerateParams {
        max_tokens: Some(24),
        temperature: Some(0.0),
        ignore_eos: true,
        ..GenerateParams::default()
    };
    let prompt = llm.encode("Once upon").unwrap();
    let events = llm.stream(prompt, &params).unwrap();
    let text: String = events.map(|event| event.unwrap().text).collect();
    llm.encode(&text).unwrap()
}

#[test]
fn padding_is_never_drawn() {
    let folder = Folder::new("padded", NUM_TOKENS + 64);
    for format in [None, Some(WeightFormat::Int8)] {
        let padded = folder.load(format).unwrap();
        let plain = load(&ModelSource::BuiltIn, format).unwrap();
        assert_eq!(padded.config.spec.vocab_size, NUM_TOKENS);
        assert_eq!(answer(&padded), answer(&plain), "{format:?}");
    }
}

#[test]
fn a_tokenizer_of_another_model_is_refused() {
    let folder = Folder::new("short", NUM_TOKENS - 8);
    let error = folder.load(None).err().expect("the model is refused");
    let expected = "tokenizer.json has 2048 tokens, and the model's embedding 2040 rows";
    assert!(error.to_string().starts_with(expected), "{error}");
}

#[test]
fn added_tokens_without_a_row_are_refused_in_prompts_only() {
    let folder = Folder::new("added", NUM_TOKENS);
    let path = folder.0.join("tokenizer.json");
    let mut tokenizer: Value = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
    let added = tokenizer["added_tokens"].as_array_mut().unwrap();
    let mut extra = added[0].clone();
    extra["id"] = NUM_TOKENS.into();
    extra["content"] = "<extra>".into();
    added.push(extra);
    fs::write(&path, tokenizer.to_string()).unwrap();

    let llm = folder.load(None).unwrap();
    assert_eq!(
        answer(&llm).len(),
        answer(&load(&ModelSource::BuiltIn, None).unwrap()).len()
    );
    let prompt = llm.encode("a <extra> b").unwrap();
    assert!(prompt.contains(&(NUM_TOKENS as u32)));
    let error = llm.stream(prompt, &GenerateParams::default()).err();
    let error = error.expect("the prompt is refused").to_string();
    assert!(
        error.contains("token 2048, but the vocabulary has only 2048 tokens"),
        "{error}"
    );
}
