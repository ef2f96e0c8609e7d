//! One model as a Hugging Face folder and as a GGUF file, which must behave the same.
//! `tests/gguf` holds both and the script that makes them.

use std::path::{Path, PathBuf};

use crate::held_isa::held_isa;
use corella::{Error, GenerateParams, Llm, LlmOptions, ModelSource};
use corella_model::{Checkpoint, RotaryScaling};
use corella_text::{ChatInput, Tokenizer};
use serde_json::json;

struct Pair {
    folder: Llm,
    file: Llm,
}

impl Pair {
    fn load(name: &str) -> Self {
        let load = |name: &str| {
            let options = LlmOptions {
                num_threads: Some(1),
                kv_cache_bytes: Some(1 << 20),
                isa: held_isa(),
                ..LlmOptions::default()
            };
            Llm::load(&ModelSource::Path(path(name)), &options).unwrap()
        };
        Self {
            folder: load(name),
            file: load(&format!("{name}.gguf")),
        }
    }

    fn check(&self) {
        let (folder, file) = (&self.folder, &self.file);
        assert_eq!(folder.name, file.name);
        assert_eq!(folder.hardware.weight_format, file.hardware.weight_format);
        assert_eq!(folder.max_model_len, file.max_model_len);

        for text in TEXTS {
            let ids = folder.encode(text).unwrap();
            assert_eq!(ids, file.encode(text).unwrap(), "{text:?}");
            let plain = folder.tokenizer.encode(text, false).unwrap();
            assert_eq!(plain, file.tokenizer.encode(text, false).unwrap());
            let read = |llm: &Llm, skip| llm.tokenizer.decode(&ids, skip).unwrap();
            assert_eq!(read(folder, true), read(file, true), "{text:?}");
            assert_eq!(read(folder, false), read(file, false), "{text:?}");
            let prompt = folder.encode_chat(text).unwrap();
            assert_eq!(prompt, file.encode_chat(text).unwrap(), "{text:?}");
        }
        for id in 0..folder.config.spec.vocab_size as u32 {
            let (a, b) = (&folder.tokenizer, &file.tokenizer);
            assert_eq!(a.token_bytes(id), b.token_bytes(id), "token {id}");
            assert_eq!(a.is_special(id), b.is_special(id), "token {id}");
        }
        assert_eq!(conversation(folder), conversation(file));

        for prompt in TEXTS {
            let params = GenerateParams {
                max_tokens: Some(48),
                temperature: Some(0.0),
                ignore_eos: true,
                ..GenerateParams::default()
            };
            let answer = folder.generate(prompt, &params).unwrap();
            assert_eq!(answer, file.generate(prompt, &params).unwrap());
            assert_eq!(answer.num_output_tokens, 48);
        }
    }
}

fn path(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("../../tests/gguf")
        .join(name)
}

fn conversation(llm: &Llm) -> String {
    let messages = [
        json!({"role": "user", "content": "What is it?"}),
        json!({"role": "assistant", "content": "It is water."}),
        json!({"role": "user", "content": " And oil? "}),
    ];
    let template = llm.chat_template.as_ref().unwrap();
    let input = ChatInput {
        messages: &messages,
        tools: None,
        add_generation_prompt: true,
        continue_final_message: false,
        kwargs: None,
    };
    template.render(input).unwrap()
}

/// A GGUF file only names its pre-tokenizer, so the regular expression comes from Corella.
#[test]
fn every_way_to_split_text_loses_nothing() {
    let file = std::env::temp_dir().join(format!("corella-{}-split.gguf", std::process::id()));
    let whole = std::fs::read(path("qwen3-f16.gguf")).unwrap();
    let key = b"tokenizer.ggml.pre";
    // In the file, the type of a value stands before it.
    let start = position(&whole, key) + key.len() + 4;
    let rest = start + 8 + "qwen2".len();
    for name in [
        "llama-bpe",
        "smaug-bpe",
        "qwen2",
        "deepseek-r1-qwen",
        "gpt-2",
        "smollm",
        "tekken",
        "deepseek-coder",
    ] {
        let mut bytes = whole[..start].to_vec();
        bytes.extend((name.len() as u64).to_le_bytes());
        bytes.extend(name.as_bytes());
        bytes.extend(&whole[rest..]);
        // The weights have moved, but nothing reads them.
        bytes.extend([0; 64]);
        std::fs::write(&file, &bytes).unwrap();
        let checkpoint = Checkpoint::open(&file).unwrap();
        let vocabulary = checkpoint.file("tokenizer.json").unwrap().unwrap();
        let tokenizer = Tokenizer::from_bytes(&vocabulary).unwrap();
        for text in TEXTS.iter().filter(|text| !text.contains('\u{301}')) {
            let ids = tokenizer.encode(text, false).unwrap();
            assert_eq!(tokenizer.decode(&ids, false).unwrap(), *text, "{name}");
        }
    }
    std::fs::remove_file(&file).unwrap();
}

/// The reader checks a vocabulary; what it overlooks must not make others panic.
#[test]
fn damaged_vocabularies_never_panic() {
    let file = std::env::temp_dir().join(format!("corella-{}-damaged.gguf", std::process::id()));
    for name in ["llama-f32.gguf", "llama3-f16.gguf"] {
        let whole = std::fs::read(path(name)).unwrap();
        let end = position(&whole, b"tokenizer.chat_template");
        let start = position(&whole, b"tokenizer.ggml.model");
        let (mut num_read, mut num_refused) = (0, 0);
        for at in (start..end).step_by(53) {
            let mut bytes = whole.clone();
            bytes[at] ^= 1 << (at % 8);
            std::fs::write(&file, &bytes).unwrap();
            match read_vocabulary(&file) {
                Ok(()) => num_read += 1,
                Err(_) => num_refused += 1,
            }
        }
        assert!(
            num_read > 20 && num_refused > 5,
            "{num_read}, {num_refused}"
        );
    }
    std::fs::remove_file(&file).unwrap();
}

fn read_vocabulary(file: &Path) -> Result<(), Error> {
    let checkpoint = Checkpoint::open(file)?;
    let vocabulary = checkpoint.file("tokenizer.json")?.unwrap();
    let tokenizer = Tokenizer::from_bytes(&vocabulary)?;
    for text in TEXTS {
        let ids = tokenizer.encode(text, true)?;
        tokenizer.decode(&ids, false)?;
    }
    Ok(())
}

fn position(bytes: &[u8], part: &[u8]) -> usize {
    let mut windows = bytes.windows(part.len());
    windows.position(|window| window == part).unwrap()
}

const TEXTS: [&str; 9] = [
    "The people could write many words about water.",
    " and  then,   they've\n\n\nmade 12345 more!?\t(it's THEIRS)\r\n",
    "naïve e\u{301}te\u{301} Ünïcødé 日本語 🦊👩‍👩‍👧 \u{a0}x",
    "<|im_start|>user\nhow<|im_end|> <think>so</think>",
    "<s> of </s>the<unk> <|eot_id|>[INST]",
    "x",
    "",
    " ",
    "if(a<b){return a[0]-1;} // 3.14e-10 ▁▁ Ġ",
];

#[test]
fn llama_with_scores_and_bytes() {
    let pair = Pair::load("llama-f32");
    assert_eq!(pair.folder.config, pair.file.config);
    pair.check();
}

#[test]
fn qwen3_with_merges() {
    let pair = Pair::load("qwen3-f16");
    assert_eq!(pair.folder.config, pair.file.config);
    assert_eq!(pair.file.config.eos_token_ids.len(), 2);
    pair.check();
}

#[test]
fn llama_with_merges_and_rotary_divisors() {
    let pair = Pair::load("llama3-f16");
    let mut config = pair.file.config.clone();
    // config.json describes a scaling, and a file stores the divisors that result from it.
    let layers = &pair.folder.config.spec.layers;
    for (layer, of_folder) in config.spec.layers.iter_mut().zip(layers) {
        let rotary = layer.attention.rotary.as_mut().unwrap();
        let scaling = &rotary.scaling;
        assert!(matches!(scaling, RotaryScaling::Divisors(divisors) if divisors.len() == 2));
        rotary.scaling = of_folder.attention.rotary.clone().unwrap().scaling;
    }
    // The file does not say the order of the end tokens either.
    config.eos_token_ids = pair.folder.config.eos_token_ids.clone();
    assert_eq!(pair.folder.config, config);
    let sorted = |llm: &Llm| {
        let mut ids = llm.config.eos_token_ids.clone();
        ids.sort();
        ids
    };
    assert_eq!(sorted(&pair.folder), sorted(&pair.file));
    pair.check();
}
