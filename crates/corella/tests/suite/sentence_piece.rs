//! Folders with SentencePiece's `tokenizer.model` and no tokenizer.json give the same ids as the Python package.
//! `tests/sentencepiece` has them, and the script that makes them.

use std::fs;
use std::path::{Path, PathBuf};

use corella_model::Outline;
use corella_text::Tokenizer;
use serde_json::{Value, json};

const MODELS: [&str; 4] = ["bpe", "bpe-bare", "unigram", "unigram-nfkc"];

fn folder(name: &str) -> PathBuf {
    let tests = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/sentencepiece");
    tests.join(name)
}

fn tokenizer(folder: &Path) -> Result<Tokenizer, String> {
    let outline = Outline::open(folder).map_err(|error| error.to_string())?;
    let json = outline
        .file("tokenizer.json")
        .map_err(|error| error.to_string())?;
    Tokenizer::from_bytes(&json.ok_or("no tokenizer")?).map_err(|error| error.to_string())
}

fn ids(value: &Value) -> Vec<u32> {
    let ids = value.as_array().unwrap().iter();
    ids.map(|id| id.as_u64().unwrap() as u32).collect()
}

/// A folder with a `tokenizer.model` and files that a test writes.
struct Folder(PathBuf);

impl Folder {
    fn new(name: &str, model: &str) -> Self {
        let name = format!("corella-pieces-{}-{name}", std::process::id());
        let made = Self(std::env::temp_dir().join(name));
        fs::create_dir(&made.0).unwrap();
        for file in ["config.json", "tokenizer.model"] {
            fs::copy(folder(model).join(file), made.0.join(file)).unwrap();
        }
        made
    }

    fn write(&self, name: &str, content: Value) {
        fs::write(self.0.join(name), content.to_string()).unwrap();
    }

    fn tokenizer(&self) -> Tokenizer {
        tokenizer(&self.0).unwrap()
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

#[test]
fn ids_are_those_of_the_package() {
    for name in MODELS {
        let tokenizer = tokenizer(&folder(name)).unwrap();
        let golden = fs::read(folder(name).join("golden.json")).unwrap();
        let golden: Value = serde_json::from_slice(&golden).unwrap();
        let pieces = golden["pieces"].as_array().unwrap();
        for (id, piece) in pieces.iter().enumerate() {
            assert_eq!(
                tokenizer.id_to_token(id as u32).as_deref(),
                piece.as_str(),
                "{name}"
            );
        }
        let cases = golden["cases"].as_array().unwrap();
        assert!(cases.len() >= 30);
        for case in cases {
            let text = case["text"].as_str().unwrap();
            let expected = ids(&case["ids"]);
            let found = tokenizer.encode(text, false).unwrap();
            assert_eq!(found, expected, "{name}: {text:?}");
            let with_bos = [&[1], &expected[..]].concat();
            assert_eq!(
                tokenizer.encode(text, true).unwrap(),
                with_bos,
                "{name}: {text:?}"
            );
            // The package prints a question mark for unknown characters.
            if !expected.contains(&0) {
                let decoded = tokenizer.decode(&expected, false).unwrap();
                assert_eq!(
                    decoded,
                    case["decoded"].as_str().unwrap(),
                    "{name}: {text:?}"
                );
            }
        }
    }
}

#[test]
fn kinds_are_told() {
    let kinds = MODELS.map(|name| tokenizer(&folder(name)).unwrap().kind());
    let expected = [
        "SentencePiece BPE with bytes",
        "SentencePiece BPE with bytes",
        "SentencePiece unigram with bytes",
        "SentencePiece unigram",
    ];
    assert_eq!(kinds, expected);
}

#[test]
fn configuration_files_add_tokens_and_say_what_begins_and_ends_a_text() {
    let folder = Folder::new("added", "bpe");
    folder.write(
        "added_tokens.json",
        json!({"<pad>": 600, "<|im_start|>": 601}),
    );
    folder.write(
        "tokenizer_config.json",
        json!({
            "add_bos_token": false,
            "add_eos_token": true,
            "eos_token": {"content": "<|im_start|>"},
            "added_tokens_decoder": {
                "2": {"content": "<|end|>", "special": true},
                "601": {"content": "<|im_start|>", "special": false},
            },
        }),
    );
    let tokenizer = folder.tokenizer();
    assert_eq!(tokenizer.token_to_id("<|end|>"), Some(2));
    assert!(tokenizer.is_special(2) && tokenizer.is_special(600));
    assert!(!tokenizer.is_special(601));
    let plain = folder_ids(&tokenizer, "a");
    let found = tokenizer.encode("<pad>a<|end|>", true).unwrap();
    assert_eq!(found, [&[600][..], &plain, &[2, 601]].concat());
}

fn folder_ids(tokenizer: &Tokenizer, text: &str) -> Vec<u32> {
    tokenizer.encode(text, false).unwrap()
}

/// Transformers' meaning of `legacy` in tokenizer_config.json: with it, text after a special token begins with a space,
/// too.
#[test]
fn a_space_is_added_where_the_configuration_says() {
    let folder = Folder::new("spaces", "bpe");
    let pieces = |tokenizer: &Tokenizer| {
        let ids = tokenizer.encode("x</s>x", false).unwrap();
        let pieces = ids.iter().map(|&id| tokenizer.id_to_token(id).unwrap());
        pieces.collect::<Vec<_>>().concat()
    };
    assert_eq!(pieces(&folder.tokenizer()), "▁x</s>▁x");
    folder.write("tokenizer_config.json", json!({"legacy": false}));
    assert_eq!(pieces(&folder.tokenizer()), "▁x</s>x");
    folder.write("tokenizer_config.json", json!({"add_prefix_space": false}));
    assert_eq!(pieces(&folder.tokenizer()), "x</s>x");
}

#[test]
fn what_is_no_model_is_refused_by_name() {
    let folder = Folder::new("broken", "bpe");
    let path = folder.0.join("tokenizer.model");
    let whole = fs::read(&path).unwrap();
    let refusal = |bytes: &[u8]| {
        fs::write(&path, bytes).unwrap();
        tokenizer(&folder.0).err().expect("the file is refused")
    };
    for bytes in [&whole[..whole.len() - 1], b"IQ== 0\nIg== 1\n", b""] {
        let error = refusal(bytes);
        assert!(
            error.contains("tokenizer.model: is not a SentencePiece model"),
            "{error}"
        );
    }
    fs::write(&path, &whole).unwrap();
    folder.write("added_tokens.json", json!({"<far>": 700}));
    let error = tokenizer(&folder.0).err().expect("a gap is refused");
    assert!(
        error.contains("has id 700, and there is none with id 600"),
        "{error}"
    );
    fs::remove_file(folder.0.join("tokenizer.model")).unwrap();
    assert_eq!(tokenizer(&folder.0).err().as_deref(), Some("no tokenizer"));
}
