//! The tokens that end an answer, in folders whose files disagree.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::held_isa::held_isa;
use corella::{Finish, GenerateParams, Llm, LlmOptions, ModelSource};
use serde_json::{Value, json};

/// A copy of the built-in model, whose configuration names no end token.
struct Folder(PathBuf);

const IM_END: u32 = 2;

impl Folder {
    fn new(name: &str) -> Self {
        let name = format!("corella-end-{}-{name}", std::process::id());
        let folder = Self(std::env::temp_dir().join(name));
        fs::create_dir(&folder.0).unwrap();
        let nano = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../models/nano");
        for name in [
            "config.json",
            "model.safetensors",
            "tokenizer.json",
            "tokenizer_config.json",
        ] {
            fs::copy(nano.join(name), folder.0.join(name)).unwrap();
        }
        folder.set("config.json", "eos_token_id", Value::Null);
        folder
    }

    fn set(&self, file: &str, field: &str, value: Value) {
        let path = self.0.join(file);
        let fields = fs::read(&path).unwrap_or_else(|_| b"{}".to_vec());
        let mut fields: Value = serde_json::from_slice(&fields).unwrap();
        fields[field] = value;
        fs::write(path, fields.to_string()).unwrap();
    }

    fn load(&self) -> Llm {
        let options = LlmOptions {
            num_threads: Some(1),
            kv_cache_bytes: Some(4 << 20),
            isa: held_isa(),
            ..LlmOptions::default()
        };
        Llm::load(&ModelSource::Path(self.0.clone()), &options).unwrap()
    }

    /// The ids of the tokens that end answers, with the files that name them.
    fn ends(&self) -> Vec<(u32, String)> {
        let llm = self.load();
        let ends = llm.config.end_tokens.iter();
        ends.map(|end| (end.id, end.named_by.clone())).collect()
    }

    fn inspect(&self) -> Value {
        let mut command = Command::new(env!("CARGO_BIN_EXE_corella"));
        let output = command.arg("inspect").arg(&self.0).arg("--json").output();
        serde_json::from_slice(&output.unwrap().stdout).unwrap()
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

#[test]
fn answers_end_with_the_tokenizers_end_token() {
    let folder = Folder::new("alone");
    let llm = folder.load();
    assert_eq!(llm.config.end_tokens.ids(), [IM_END]);
    let told = "answers end with <|im_end|> (tokenizer_config.json)";
    assert_eq!(llm.end_summary().as_deref(), Some(told));
    let params = GenerateParams {
        temperature: Some(0.0),
        ..GenerateParams::default()
    };
    let answer = llm.generate("hi", &params).unwrap();
    assert_eq!(answer.finish, Finish::Stop, "{answer:?}");
    let ends = json!([{"id": IM_END, "token": "<|im_end|>", "named_by": "tokenizer_config.json"}]);
    assert_eq!(folder.inspect()["tokenizer"]["ends"], ends);
}

#[test]
fn every_file_may_name_an_end_token() {
    let folder = Folder::new("several");
    let file = |name: &str| name.to_owned();
    folder.set("config.json", "eos_token_id", json!(0));
    let both = [
        (0, file("config.json")),
        (IM_END, file("tokenizer_config.json")),
    ];
    assert_eq!(folder.ends(), both);
    // The form that `AddedToken` writes.
    let token = json!({"content": "<|im_end|>", "lstrip": false, "special": true});
    folder.set("tokenizer_config.json", "eos_token", token);
    assert_eq!(folder.ends(), both);
    // A token that several files name is named once.
    folder.set("generation_config.json", "eos_token_id", json!([IM_END, 0]));
    let both = [
        (0, file("config.json")),
        (IM_END, file("generation_config.json")),
    ];
    assert_eq!(folder.ends(), both);
    fs::remove_file(folder.0.join("generation_config.json")).unwrap();
    // special_tokens_map.json, the older file, only counts if tokenizer_config.json names no end token.
    folder.set(
        "special_tokens_map.json",
        "eos_token",
        json!("<|im_start|>"),
    );
    assert_eq!(folder.ends()[1].1, "tokenizer_config.json");
    folder.set("tokenizer_config.json", "eos_token", Value::Null);
    assert_eq!(
        folder.ends(),
        [
            (0, file("config.json")),
            (1, file("special_tokens_map.json"))
        ]
    );
}

#[test]
fn a_model_without_end_tokens_says_so() {
    let folder = Folder::new("none");
    // The vocabulary does not have this token.
    folder.set("tokenizer_config.json", "eos_token", json!("</s>"));
    let llm = folder.load();
    assert!(llm.config.end_tokens.is_empty());
    assert_eq!(llm.end_summary(), None);
    let mut command = Command::new(env!("CARGO_BIN_EXE_corella"));
    let output = command.arg("inspect").arg(&folder.0).output().unwrap();
    let told = String::from_utf8(output.stdout).unwrap();
    assert!(
        told.contains("answers end   no token: no file names one"),
        "{told}"
    );
    let mut command = Command::new(env!("CARGO_BIN_EXE_corella"));
    let output = command
        .args([
            "generate",
            "-p",
            "hi",
            "--max-tokens",
            "3",
            "--device",
            "mock",
        ])
        .arg(&folder.0)
        .output()
        .unwrap();
    let told = String::from_utf8(output.stderr).unwrap();
    assert!(
        told.contains("no file of the model names a token that ends an answer"),
        "{told}"
    );
}
