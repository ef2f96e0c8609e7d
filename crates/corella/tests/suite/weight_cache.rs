//! Packed weights are kept for the next start, and used only if they belong to the model.

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use crate::held_isa::held_isa;
use corella::{GenerateParams, Llm, LlmOptions, ModelSource, WeightCache};
use corella_model::{DType, WeightFormat};

fn nano() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../models/nano")
}

/// An empty folder that only one test uses.
fn scratch(test: &str) -> PathBuf {
    let name = format!("corella-weight-cache-{test}-{}", std::process::id());
    let folder = std::env::temp_dir().join(name);
    let _ = fs::remove_dir_all(&folder);
    fs::create_dir_all(&folder).unwrap();
    folder
}

fn cache(folder: &Path) -> WeightCache {
    WeightCache {
        min_bytes: 0,
        ..WeightCache::new(folder.to_path_buf())
    }
}

struct Start {
    answer: String,
    were_kept: bool,
}

/// Loads a model, generates an answer, and waits until the packed weights are written.
fn start(model: &Path, cache: WeightCache, weight_format: WeightFormat) -> Start {
    let options = LlmOptions {
        weight_format: Some(weight_format),
        weight_cache: Some(cache),
        kv_cache_bytes: Some(16 << 20),
        num_threads: Some(2),
        isa: held_isa(),
        ..LlmOptions::default()
    };
    let mut llm = Llm::load(&ModelSource::Path(model.to_path_buf()), &options).unwrap();
    let params = GenerateParams {
        max_tokens: Some(24),
        temperature: Some(0.0),
        ..GenerateParams::default()
    };
    let answer = llm.generate("Tell me a story about a fox.", &params);
    for keeper in llm.weight_keepers.drain(..) {
        keeper.wait();
    }
    Start {
        answer: answer.unwrap().text,
        were_kept: llm.hardware.weights_were_kept,
    }
}

fn files(folder: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(folder).unwrap();
    let mut files: Vec<_> = entries.map(|entry| entry.unwrap().path()).collect();
    files.sort();
    files
}

fn copy_of_nano(folder: &Path) -> PathBuf {
    let copy = folder.join("nano");
    fs::create_dir_all(&copy).unwrap();
    for file in files(&nano()).iter().filter(|file| file.is_file()) {
        fs::copy(file, copy.join(file.file_name().unwrap())).unwrap();
    }
    copy
}

#[test]
fn a_second_start_reads_what_the_first_has_packed() {
    let folder = scratch("second");
    for format in [WeightFormat::Int8, WeightFormat::INT4] {
        let first = start(&nano(), cache(&folder), format);
        let second = start(&nano(), cache(&folder), format);
        assert!(!first.were_kept && second.were_kept, "{format:?}");
        assert_eq!(first.answer, second.answer, "{format:?}");
    }
    assert_eq!(files(&folder).len(), 2);
    fs::remove_dir_all(folder).unwrap();
}

#[test]
fn weights_that_are_only_copied_are_not_kept() {
    let folder = scratch("copied");
    let first = start(&nano(), cache(&folder), WeightFormat::Float(DType::Bf16));
    let second = start(&nano(), cache(&folder), WeightFormat::Float(DType::Bf16));
    assert!(!first.were_kept && !second.were_kept);
    assert_eq!(files(&folder), [] as [PathBuf; 0]);
    fs::remove_dir_all(folder).unwrap();
}

/// Files may be damaged by a disk error or an incomplete copy, or come from a build with another layout.
#[test]
fn a_file_that_is_wrong_is_replaced() {
    let folder = scratch("wrong");
    let first = start(&nano(), cache(&folder), WeightFormat::Int8);
    let [file] = &files(&folder)[..] else {
        panic!("one file")
    };
    let bytes = fs::read(file).unwrap();
    let shifted: Vec<u8> = bytes[1..].iter().chain([&0]).copied().collect();
    let other: Vec<u8> = bytes.iter().map(|byte| byte ^ 1).collect();
    for wrong in [&bytes[..bytes.len() / 2], &[], &shifted, &other] {
        fs::write(file, wrong).unwrap();
        let again = start(&nano(), cache(&folder), WeightFormat::Int8);
        assert!(!again.were_kept);
        assert_eq!(first.answer, again.answer);
        assert!(fs::read(file).unwrap() == bytes);
    }
    fs::remove_dir_all(folder).unwrap();
}

#[test]
fn a_model_that_has_changed_is_packed_anew() {
    let folder = scratch("changed");
    let (model, kept) = (copy_of_nano(&folder), folder.join("kept"));
    start(&model, cache(&kept), WeightFormat::Int8);
    let weights = File::options()
        .write(true)
        .open(model.join("model.safetensors"));
    let later = SystemTime::now() + Duration::from_secs(10);
    weights.unwrap().set_modified(later).unwrap();
    assert!(!start(&model, cache(&kept), WeightFormat::Int8).were_kept);
    assert!(start(&model, cache(&kept), WeightFormat::Int8).were_kept);
    assert_eq!(files(&kept).len(), 2);
    fs::remove_dir_all(folder).unwrap();
}

#[test]
fn what_was_used_last_stays_when_room_is_made() {
    let folder = scratch("room");
    let others = [
        "notes.txt",
        "model.packed",
        "model-0123456789abcdef.safetensors",
    ];
    for name in others {
        fs::write(folder.join(name), "not ours").unwrap();
    }
    let ours = |name: &str, age_s: u64| {
        let path = folder.join(format!("{name}-avx2-0123456789abcdef.packed"));
        let file = File::create(&path).unwrap();
        file.set_len(1 << 20).unwrap();
        let used = SystemTime::now() - Duration::from_secs(age_s);
        file.set_modified(used).unwrap();
        path
    };
    let (oldest, newest) = (ours("oldest", 2000), ours("newest", 1000));
    let left_behind = folder.join("killed-avx2-0123456789abcdef.partial");
    fs::write(&left_behind, "half").unwrap();
    let being_written = folder.join("other-avx2-0123456789abcdef.partial");
    let writer = File::create(&being_written).unwrap();
    writer.lock().unwrap();

    let sizing = scratch("room-sizing");
    start(&nano(), cache(&sizing), WeightFormat::Int8);
    let len = files(&sizing)[0].metadata().unwrap().len();
    let bounded = |max_bytes: u64| WeightCache {
        max_bytes,
        ..cache(&folder)
    };
    // The file alone is too large, so nothing is deleted for it.
    start(&nano(), bounded(len - 1), WeightFormat::Int8);
    assert!(oldest.exists() && newest.exists() && left_behind.exists());

    start(&nano(), bounded(len + (1 << 20)), WeightFormat::Int8);
    assert!(!oldest.exists() && newest.exists());
    assert!(!left_behind.exists() && being_written.exists());
    for name in others {
        assert_eq!(fs::read(folder.join(name)).unwrap(), b"not ours");
    }
    assert!(start(&nano(), bounded(len), WeightFormat::Int8).were_kept);
    for folder in [folder, sizing] {
        fs::remove_dir_all(folder).unwrap();
    }
}

/// When two servers start at once, only one of them writes.
#[test]
fn what_another_process_is_writing_is_left_to_it() {
    let folder = scratch("both");
    start(&nano(), cache(&folder), WeightFormat::Int8);
    let file = files(&folder).remove(0);
    fs::remove_file(&file).unwrap();
    let partial = file.with_extension("partial");
    let writer = File::create(&partial).unwrap();
    writer.lock().unwrap();
    start(&nano(), cache(&folder), WeightFormat::Int8);
    assert_eq!(files(&folder), std::slice::from_ref(&partial));
    assert_eq!(partial.metadata().unwrap().len(), 0);
    drop(writer);
    start(&nano(), cache(&folder), WeightFormat::Int8);
    assert_eq!(files(&folder), [file]);
    fs::remove_dir_all(folder).unwrap();
}

#[test]
fn a_folder_that_cannot_be_written_costs_nothing_else() {
    let folder = scratch("unwritable");
    let file = folder.join("file");
    fs::write(&file, "").unwrap();
    let in_a_file = start(&nano(), cache(&file.join("folder")), WeightFormat::Int8);
    let kept = start(&nano(), cache(&folder), WeightFormat::Int8);
    assert_eq!(in_a_file.answer, kept.answer);
    fs::remove_dir_all(folder).unwrap();
}
