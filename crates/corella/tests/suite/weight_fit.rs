//! A model that no machine has the memory for.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use crate::sparse_model::{self, Shape};

struct Folder(PathBuf);

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

/// 3.9 trillion parameters, with the tokenizer of the built-in model.
fn giant() -> Folder {
    let name = format!("corella-giant-{}", std::process::id());
    let folder = Folder(std::env::temp_dir().join(name));
    fs::create_dir(&folder.0).unwrap();
    sparse_model::write(
        &folder.0,
        &Shape {
            hidden: 32_768,
            intermediate: 131_072,
            num_layers: 256,
            vocab: 2048,
        },
    );
    let nano = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../models/nano");
    for name in ["tokenizer.json", "tokenizer_config.json"] {
        fs::copy(nano.join(name), folder.0.join(name)).unwrap();
    }
    folder
}

#[test]
fn weights_beyond_the_memory_are_refused_first() {
    let folder = giant();
    for words in [
        &["serve", "--port", "0"][..],
        &["chat"],
        &["generate", "-p", "hi"],
        &["inspect"],
    ] {
        let mut command = Command::new(env!("CARGO_BIN_EXE_corella"));
        let command = command.stdin(Stdio::null()).args(words).arg(&folder.0);
        let output = command.output().unwrap();
        assert_eq!(output.status.code(), Some(2), "{words:?}");
        let [out, error] = [output.stdout, output.stderr]
            .map(|bytes| String::from_utf8_lossy(&bytes).into_owned());
        // `corella inspect` prints the problems on standard output.
        let told = if words == ["inspect"] { out } else { error };
        let problem = "the weights take 7.0 TiB as bf16 and this machine has ";
        assert!(told.contains(problem), "{words:?}: {told}");
        let advice = "; as int4, too, they would take about 1.8 TiB: choose a smaller model";
        assert!(told.contains(advice), "{words:?}: {told}");
        assert!(!told.contains("--kv-cache-memory"), "{words:?}: {told}");
    }
}
