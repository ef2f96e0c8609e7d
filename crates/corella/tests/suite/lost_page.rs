//! Files that become shorter while their model is loaded or serves. They end this model, and not the process.

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use crate::held_isa::held_isa;
use corella::{Error, GenerateParams, Llm, LlmOptions, LoadWatcher, ModelSource};
use corella_engine::EngineState;

/// A copy of a model that reads its embedding in place.
struct Copy {
    folder: PathBuf,
    is_gguf: bool,
}

impl Copy {
    fn new(test: &str, is_gguf: bool) -> Self {
        let name = format!("corella-lost-page-{test}-{is_gguf}-{}", std::process::id());
        let folder = std::env::temp_dir().join(name);
        let _ = fs::remove_dir_all(&folder);
        fs::create_dir_all(&folder).unwrap();
        let models = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/gguf");
        if is_gguf {
            fs::copy(models.join("llama3-f16.gguf"), folder.join("model.gguf")).unwrap();
        } else {
            for file in fs::read_dir(models.join("llama3-f16")).unwrap() {
                let file = file.unwrap();
                fs::copy(file.path(), folder.join(file.file_name())).unwrap();
            }
        }
        Self { folder, is_gguf }
    }

    fn weights(&self) -> PathBuf {
        let name = match self.is_gguf {
            true => "model.gguf",
            false => "model.safetensors",
        };
        self.folder.join(name)
    }

    fn empty(&self) {
        let file = File::options().write(true).open(self.weights()).unwrap();
        file.set_len(0).unwrap();
    }

    fn load(&self, load_watcher: Option<LoadWatcher>) -> Result<Llm, Error> {
        let source = match self.is_gguf {
            true => self.weights(),
            false => self.folder.clone(),
        };
        let options = LlmOptions {
            num_threads: Some(2),
            kv_cache_bytes: Some(1 << 20),
            isa: held_isa(),
            load_watcher,
            ..LlmOptions::default()
        };
        Llm::load(&ModelSource::Path(source), &options)
    }

    /// The text that tells the loss.
    fn loss(&self) -> String {
        format!("{} has become shorter", self.weights().display())
    }
}

impl Drop for Copy {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.folder);
    }
}

fn answer(llm: &Llm) -> Result<String, Error> {
    let params = GenerateParams {
        max_tokens: Some(8),
        temperature: Some(0.0),
        ignore_eos: true,
        ..GenerateParams::default()
    };
    let answer = llm.generate("What is it?", &params);
    answer.map(|answer| answer.text)
}

#[test]
fn a_file_that_shrinks_while_it_serves_ends_its_own_model_only() {
    for is_gguf in [false, true] {
        let (cut, whole) = (Copy::new("cut", is_gguf), Copy::new("whole", is_gguf));
        let [of_cut, of_whole] = [&cut, &whole].map(|copy| copy.load(None).unwrap());
        let expected = answer(&of_whole).unwrap();
        assert_eq!(answer(&of_cut).unwrap(), expected);
        cut.empty();
        let _ = answer(&of_cut);
        let EngineState::Lost(reason) = of_cut.engine.state() else {
            panic!("the engine goes on without its weights");
        };
        assert!(reason.contains(&cut.loss()), "{reason}");
        assert!(answer(&of_cut).is_err());
        assert_eq!(answer(&of_whole).unwrap(), expected);
    }
}

#[test]
fn a_file_that_shrinks_while_it_is_loaded_is_refused() {
    for is_gguf in [false, true] {
        let copy = Arc::new(Copy::new("load", is_gguf));
        let cut = copy.clone();
        // The head is read after the layers.
        let empty = LoadWatcher(Arc::new(move |_, _| cut.empty()));
        let refused = copy.load(Some(empty)).err().map(|error| error.to_string());
        let refused = refused.unwrap_or_default();
        assert!(refused.contains(&copy.loss()), "{refused:?}");
    }
}

#[test]
fn a_removed_or_replaced_file_changes_no_answer() {
    for is_gguf in [false, true] {
        let copy = Copy::new("replaced", is_gguf);
        let llm = copy.load(None).unwrap();
        let expected = answer(&llm).unwrap();
        let other = copy.folder.join("other");
        fs::write(&other, b"{}").unwrap();
        fs::rename(&other, copy.weights()).unwrap();
        assert_eq!(answer(&llm).unwrap(), expected);
        fs::remove_dir_all(&copy.folder).unwrap();
        assert_eq!(answer(&llm).unwrap(), expected);
    }
}
