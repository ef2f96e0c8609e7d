//! One model as a Hugging Face folder and as a GGUF file, which must behave the same.
//! `tests/gguf` holds both and the script that makes them.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use crate::held_isa::held_isa;
use corella::{Error, GenerateParams, Llm, LlmOptions, ModelSource};
use corella_model::{Checkpoint, EndTokens, ModelConfig, RotaryScaling};
use corella_text::{ChatInput, Tokenizer};
use serde_json::{Value, json};

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

    /// Returns the GGUF file's configuration with the folder's end tokens, which have the same ids but another order
    /// and other places that name them.
    fn file_config(&self) -> ModelConfig {
        let mut config = self.file.config.clone();
        let ends = &self.folder.config.end_tokens;
        let sorted = |ends: &EndTokens| {
            let mut ids = ends.ids();
            ids.sort();
            ids
        };
        assert_eq!(sorted(&config.end_tokens), sorted(ends));
        config.end_tokens = ends.clone();
        config
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
            let prompt = folder.encode_chat(None, text).unwrap();
            assert_eq!(prompt, file.encode_chat(None, text).unwrap(), "{text:?}");
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

/// Returns the tokenizer.json of a GGUF file with another pre-tokenizer, and without the settings that would override
/// its name.
fn tokenizer_of(pre_tokenizer: &str) -> Result<Value, String> {
    let file = std::env::temp_dir().join(format!(
        "corella-{}-{pre_tokenizer}.gguf",
        std::process::id()
    ));
    let mut whole = std::fs::read(path("qwen3-f16.gguf")).unwrap();
    let setting = position(&whole, b"add_bos_token");
    whole[setting] = b'_';
    let key = b"tokenizer.ggml.pre";
    // In the file, a value follows its type.
    let start = position(&whole, key) + key.len() + 4;
    let rest = start + 8 + "qwen2".len();
    let mut bytes = whole[..start].to_vec();
    bytes.extend((pre_tokenizer.len() as u64).to_le_bytes());
    bytes.extend(pre_tokenizer.as_bytes());
    bytes.extend(&whole[rest..]);
    // The weights have moved, but nothing reads them.
    bytes.extend([0; 64]);
    std::fs::write(&file, &bytes).unwrap();
    let tokenizer = Checkpoint::open(&file).unwrap().file("tokenizer.json");
    std::fs::remove_file(&file).unwrap();
    let tokenizer = tokenizer.map_err(|error| error.to_string())?.unwrap();
    Ok(serde_json::from_slice(&tokenizer).unwrap())
}

/// A GGUF file only names its pre-tokenizer, so the regular expressions come from Corella.
/// `tests/gguf/make_pre_tokenizer.py` has llama.cpp split the texts.
#[test]
fn text_is_split_as_llama_cpp_does() {
    let golden = std::fs::read(path("pre_tokenizer.json")).unwrap();
    let golden: Value = serde_json::from_slice(&golden).unwrap();
    let list = |value: &Value| value.as_array().unwrap().clone();
    let texts = list(&golden["texts"]);
    let texts: Vec<_> = texts.iter().map(|text| text.as_str().unwrap()).collect();
    let (mut num_names, mut num_splits) = (0, 0);
    for entry in list(&golden["entries"]) {
        for name in list(&entry["names"]) {
            let name = name.as_str().unwrap();
            let tokenizer = tokenizer_of(name).unwrap();
            assert_eq!(
                tokenizer["model"]["ignore_merges"], entry["ignores_merges"],
                "{name}"
            );
            let adds_bos = tokenizer["post_processor"]
                .to_string()
                .contains("<|endoftext|>");
            assert_eq!(adds_bos, entry["adds_bos"], "{name}");
            num_names += 1;
            let pieces = list(&entry["pieces"]);
            assert_eq!(pieces.len(), texts.len());
            let known = texts
                .iter()
                .zip(&pieces)
                .filter(|(_, sizes)| !sizes.is_null());
            let cut: Vec<_> = known
                .map(|(text, sizes)| (*text, cut(text, sizes)))
                .collect();
            num_splits += check_splits(name, &tokenizer["pre_tokenizer"], &cut);
        }
    }
    assert_eq!(num_names, 77);
    assert!(num_splits > 6500, "{num_splits}");
}

/// Returns the pieces of a text, in the characters that represent their bytes.
fn cut(text: &str, sizes: &Value) -> Vec<String> {
    let mut rest = text.as_bytes();
    let sizes = sizes.as_array().unwrap().iter();
    let pieces = sizes.map(|size| {
        let (piece, behind) = rest.split_at(size.as_u64().unwrap() as usize);
        rest = behind;
        piece.iter().map(|&byte| char_of_byte(byte)).collect()
    });
    let pieces = pieces.collect();
    assert!(rest.is_empty(), "{text:?}");
    pieces
}

/// GPT-2's alphabet: printable bytes represent themselves in Latin-1, and the characters from 256 on represent the
/// others.
fn char_of_byte(byte: u8) -> char {
    let is_plain = |byte: u8| matches!(byte, b'!'..=b'~' | 0xA1..=0xAC | 0xAE..);
    match is_plain(byte) {
        true => char::from(byte),
        false => {
            let num_before = (0..byte).filter(|&byte| !is_plain(byte)).count();
            char::from_u32(256 + num_before as u32).unwrap()
        }
    }
}

/// Checks that a pre-tokenizer splits texts into the expected pieces. The vocabulary has these pieces and single bytes,
/// so an unexpected piece has other ids. Returns the number of texts.
fn check_splits(name: &str, pre_tokenizer: &Value, texts: &[(&str, Vec<String>)]) -> usize {
    let mut vocabulary: BTreeMap<String, u32> = BTreeMap::new();
    let bytes = (0..=255).map(|byte| char_of_byte(byte).to_string());
    let pieces = texts.iter().flat_map(|(_, pieces)| pieces.iter().cloned());
    for piece in bytes.chain(pieces) {
        let id = vocabulary.len() as u32;
        vocabulary.entry(piece).or_insert(id);
    }
    let tokenizer = json!({
        "version": "1.0",
        "added_tokens": [],
        "pre_tokenizer": pre_tokenizer,
        "decoder": {"type": "ByteLevel", "add_prefix_space": true, "trim_offsets": true, "use_regex": true},
        "model": {"type": "BPE", "ignore_merges": true, "vocab": vocabulary, "merges": []},
    });
    let tokenizer = Tokenizer::from_bytes(tokenizer.to_string().as_bytes()).unwrap();
    for (text, pieces) in texts {
        let ids = tokenizer.encode(text, false).unwrap();
        let expected: Vec<_> = pieces.iter().map(|piece| vocabulary[piece]).collect();
        assert_eq!(ids, expected, "{name}: {text:?} should be {pieces:?}");
        assert_eq!(tokenizer.decode(&ids, false).unwrap(), *text, "{name}");
    }
    texts.len()
}

/// Pre-tokenizers are unknown if llama.cpp has the splitter as code, if tokens are not spelled by bytes, or if
/// llama.cpp splits texts differently than the published pre-tokenizer.
#[test]
fn pre_tokenizers_that_are_not_known_are_named() {
    for name in ["kimi-k2", "whitespace", "youtu", "nothing"] {
        let error = tokenizer_of(name).unwrap_err();
        let problem = format!("tokenizer.ggml.pre is \"{name}\"; supported are llama-bpe, ");
        assert!(error.contains(&problem), "{error}");
    }
}

/// The reader checks a vocabulary; damage that it overlooks must not cause panics elsewhere.
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
    assert_eq!(pair.folder.config, pair.file_config());
    pair.check();
}

#[test]
fn qwen3_with_merges() {
    let pair = Pair::load("qwen3-f16");
    assert_eq!(pair.folder.config, pair.file_config());
    assert_eq!(pair.file.config.end_tokens.ids().len(), 2);
    pair.check();
}

#[test]
fn llama_with_merges_and_rotary_divisors() {
    let pair = Pair::load("llama3-f16");
    let mut config = pair.file_config();
    // config.json describes a scaling, and a GGUF file stores the resulting divisors.
    let layers = &pair.folder.config.spec.layers;
    for (layer, of_folder) in config.spec.layers.iter_mut().zip(layers) {
        let rotary = layer.attention.rotary.as_mut().unwrap();
        let scaling = &rotary.scaling;
        assert!(matches!(scaling, RotaryScaling::Divisors(divisors) if divisors.len() == 2));
        rotary.scaling = of_folder.attention.rotary.clone().unwrap().scaling;
    }
    assert_eq!(pair.folder.config, config);
    pair.check();
}
