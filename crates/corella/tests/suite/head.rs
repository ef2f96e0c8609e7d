//! A model without an output head, which only makes embeddings: every generating command reports it.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

use corella_model::Checkpoint;
use serde_json::Value;

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

/// Makes a folder whose embedding is not a head.
fn headless(test: &str) -> PathBuf {
    let folder = std::env::temp_dir().join(format!("corella-{}-{test}", std::process::id()));
    let _ = fs::remove_dir_all(&folder);
    fs::create_dir_all(&folder).unwrap();
    for entry in fs::read_dir(root().join("tests/gguf/qwen3-f16")).unwrap() {
        let entry = entry.unwrap();
        fs::copy(entry.path(), folder.join(entry.file_name())).unwrap();
    }
    let config = fs::read(folder.join("config.json")).unwrap();
    let mut config: Value = serde_json::from_slice(&config).unwrap();
    config["tie_word_embeddings"] = false.into();
    fs::write(folder.join("config.json"), config.to_string()).unwrap();
    folder
}

fn run(arguments: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_corella"));
    command.stdin(Stdio::null()).env_remove("RUST_LOG");
    command.current_dir(root()).args(arguments);
    command.output().expect("it runs")
}

#[test]
fn what_needs_a_head_is_refused() {
    let folder = headless("headless");
    let model = folder.to_str().unwrap();
    let text = folder.join("text.txt");
    fs::write(&text, "It is water.").unwrap();
    let cases = [
        vec!["generate", model, "--no-limits", "-p", "a"],
        vec![
            "bench",
            "perplexity",
            model,
            "--text",
            text.to_str().unwrap(),
        ],
        vec![
            "serve",
            "tests/gguf/qwen3-f16",
            "--port",
            "0",
            "--speculate",
            "draft",
            "--draft-model",
            model,
        ],
    ];
    for arguments in cases {
        let output = run(&arguments);
        let error = String::from_utf8_lossy(&output.stderr);
        assert!(!output.status.success(), "{arguments:?}");
        assert!(
            error.contains("no output head (lm_head)"),
            "{arguments:?}: {error}"
        );
    }
    fs::remove_dir_all(&folder).unwrap();
}

#[test]
fn it_is_inspected_and_quantised() {
    let folder = headless("no-head");
    let model = folder.to_str().unwrap();
    let output = run(&["inspect", model]);
    let told = String::from_utf8(output.stdout).unwrap();
    assert!(told.contains(", no head: embeddings only\n"), "{told}");
    assert!(!told.contains("embed + head"), "{told}");
    let quantised = folder.with_extension("int8");
    let _ = fs::remove_dir_all(&quantised);
    let output = run(&[
        "quantize",
        "--format",
        "int8",
        model,
        quantised.to_str().unwrap(),
    ]);
    assert!(
        output.status.success(),
        "{}",
        String::from_utf8_lossy(&output.stderr)
    );
    let checkpoint = Checkpoint::open(&quantised).unwrap();
    assert!(!checkpoint.config().has_head);
    checkpoint.weights().unwrap();
    for folder in [folder, quantised] {
        fs::remove_dir_all(folder).unwrap();
    }
}
