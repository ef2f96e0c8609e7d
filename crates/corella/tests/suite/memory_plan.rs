//! The memory of a model, planned from the headers of its files.

use std::fs;
use std::path::{Path, PathBuf};

use corella::{Llm, LlmOptions, ModelSource};

use crate::held_isa::held_isa;
use crate::sparse_model::{self, Shape};

const GIB: u64 = 1 << 30;

struct Folder(PathBuf);

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

const SHAPE: Shape = Shape {
    hidden: 4096,
    intermediate: 16_384,
    num_layers: 64,
    vocab: 2048,
};

/// Matrices of bf16: queries and outputs, keys and values, the three of the MLP, and two for tokens.
const WEIGHT_BYTES: u64 =
    2 * (64 * (2 * 4096 * 4096 + 2 * 1024 * 4096 + 3 * 4096 * 16_384) + 2 * 2048 * 4096);

/// Keys and values of 8 heads of 128 elements in 64 layers, as bf16.
const TOKEN_BYTES: u64 = 2 * 8 * 128 * 64 * 2;

/// The weights are a hole of 31 GB in a file, which no test could read.
fn large_model(name: &str) -> Folder {
    let name = format!("corella-{name}-{}", std::process::id());
    let folder = Folder(std::env::temp_dir().join(name));
    fs::create_dir(&folder.0).unwrap();
    sparse_model::write(&folder.0, &SHAPE);
    let nano = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../models/nano");
    for name in ["tokenizer.json", "tokenizer_config.json"] {
        fs::copy(nano.join(name), folder.0.join(name)).unwrap();
    }
    folder
}

fn options(shared_memory_bytes: u64) -> LlmOptions {
    let mut options = LlmOptions {
        shared_memory_bytes: Some(shared_memory_bytes),
        num_threads: Some(1),
        isa: held_isa(),
        ..LlmOptions::default()
    };
    options.scheduler.max_num_seqs = 2;
    options
}

#[test]
fn one_of_several_models_takes_a_quarter_of_what_its_weights_leave() {
    let folder = large_model("memory-plan");
    let source = ModelSource::Path(folder.0.clone());
    let plan = |shared_bytes| Llm::plan(&source, &options(shared_bytes));
    let shared_bytes = WEIGHT_BYTES + 8 * GIB;
    let small = plan(shared_bytes).expect("the weights fit");
    assert_eq!(small.weight_bytes, WEIGHT_BYTES);
    let left_bytes = 8 * GIB - small.working_bytes;
    let page_bytes = 16 * TOKEN_BYTES;
    assert!(small.kv_cache_bytes <= left_bytes / 4);
    assert!(small.kv_cache_bytes > left_bytes / 4 - page_bytes);
    assert!(small.working_bytes < GIB, "{small:?}");
    // Two requests of the longest context cannot use more.
    let large = plan(WEIGHT_BYTES + 64 * GIB).expect("the weights fit");
    assert_eq!(large.kv_cache_bytes, 2 * 8192 * TOKEN_BYTES);
    let error = plan(8 * GIB).expect_err("the weights do not fit");
    let error = error.to_string();
    let told = "the weights take 29.0 GiB as bf16 and --model-memory is 8.0 GiB; ";
    assert!(error.starts_with(told), "{error}");
}

#[test]
fn a_model_takes_the_memory_that_was_planned() {
    for shared_bytes in [96 << 20, 4 * GIB] {
        let options = options(shared_bytes);
        let plan = Llm::plan(&ModelSource::BuiltIn, &options).expect("it fits");
        let llm = Llm::load(&ModelSource::BuiltIn, &options).expect("it fits");
        assert_eq!(llm.hardware.kv_bytes, plan.kv_cache_bytes);
        let weight_bytes = llm.hardware.executor.weight_bytes as u64;
        assert!(weight_bytes <= plan.weight_bytes + plan.working_bytes);
    }
}

/// The files of a model may be replaced between plan and load.
#[test]
fn a_model_that_exceeds_its_plan_is_not_loaded() {
    let options = options(96 << 20);
    let mut plan = Llm::plan(&ModelSource::BuiltIn, &options).expect("it fits");
    Llm::load_within(&ModelSource::BuiltIn, &options, Some(&plan)).expect("it is as planned");
    plan.weight_bytes -= 1;
    let loaded = Llm::load_within(&ModelSource::BuiltIn, &options, Some(&plan));
    let error = loaded.err().expect("it is larger").to_string();
    let told = "its files have changed since its memory was planned: it needs ";
    assert!(error.starts_with(told), "{error}");
}
