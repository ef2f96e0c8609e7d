//! Tests of files of other writers, and of all kinds of broken files.

mod attention;
mod special_token;

use std::path::Path;

use half::bf16;

use super::*;
use crate::checkpoint::gguf_config::model_config;
use crate::{Checkpoint, FP4_LEVELS, LayerTensor, RowOrder, Tensor};

fn committed(name: &str) -> Vec<u8> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/gguf");
    std::fs::read(folder.join(name)).unwrap()
}

fn open(bytes: &[u8]) -> Result<GgufFile, String> {
    let file = GgufFile::open("x.gguf".into(), Storage::Owned(bytes.to_vec()));
    file.map_err(|error| {
        assert_eq!(error.file, "x.gguf");
        assert!(!error.problem.contains('\n'), "{}", error.problem);
        error.problem
    })
}

/// Reads all fields and tensors that serving a file needs.
fn read_all(bytes: &[u8]) -> Result<(), String> {
    let file = open(bytes)?;
    let all = || {
        let config = model_config(&file)?;
        tokenizer_json(&file)?;
        tokenizer_config_json(&file)?;
        let layout = &config.architecture.family().file;
        let weights =
            crate::checkpoint::weight_loader::load(&config, &[&file], layout, file.label())?;
        for layer in &weights.layers {
            layer[LayerTensor::Q].bytes();
            layer[LayerTensor::DOWN].row(0, &mut Vec::new());
        }
        Ok(())
    };
    all().map_err(|error: CheckpointError| error.problem)
}

/// The gguf package reads the same blocks, and must give the same values.
#[test]
fn blocks_of_every_type_have_their_values() {
    let file = open(&committed("blocks.gguf")).unwrap();
    for &format in BlockFormat::ALL {
        // F32 is stored unchanged, so it has no block values to compare with.
        let Some(values) = file.numbers(&format!("{}.values", format.name())).unwrap() else {
            assert_eq!(format, BlockFormat::F32);
            continue;
        };
        assert_eq!(values.len(), 256);
        let info = &file.tensors[format.name()];
        assert_eq!(info.format, format);
        let stored = &info.storage.bytes()[info.range.clone()];
        let mut read = vec![f32::NAN; values.len()];
        format.dequantise(stored, &mut read);
        for (i, (read, value)) in read.iter().zip(&values).enumerate() {
            let name = format.name();
            assert_eq!(
                read.to_bits(),
                value.to_bits(),
                "{name}[{i}]: {read} {value}"
            );
        }

        let tensor = Tensor::of_blocks(
            &info.storage,
            info.range.clone(),
            format,
            RowOrder::AsStored,
            info.shape.clone(),
        );
        assert_eq!(tensor.shape, [1, 256]);
        let mut scratch = Vec::new();
        assert_eq!(tensor.row(0, &mut scratch), tensor.bytes());
        if let Some(group_format) = tensor.group_format() {
            let mut row = crate::GroupedRow::default();
            tensor.read_groups(0, &mut row);
            assert_eq!(
                row.minimums.len(),
                if group_format.has_minimum {
                    row.scales.len()
                } else {
                    0
                }
            );
            for (i, (q, value)) in row.quants.iter().zip(&values).enumerate() {
                let group = i / group_format.group_len;
                let least = row.minimums.get(group).copied().unwrap_or(0.0);
                assert_eq!(
                    row.scales[group] * f32::from(*q) + least,
                    *value,
                    "{format:?}[{i}]"
                );
                if group_format.is_fp4 {
                    assert!(FP4_LEVELS.contains(q), "{format:?}[{i}] is {q}");
                    continue;
                }
                let range = match (group_format.bits, group_format.has_minimum) {
                    (8, _) => i8::MIN..=i8::MAX,
                    (_, true) => 0..=15,
                    _ => -8..=7,
                };
                assert!(range.contains(q), "{format:?}[{i}] is {q}");
            }
        }
        if let Some(blocks) = tensor.blocks() {
            assert_eq!((blocks.format, blocks.stored_row(0)), (format, stored));
            let rounded = values.iter().flat_map(|v| bf16::from_f32(*v).to_le_bytes());
            assert_eq!(tensor.bytes(), rounded.collect::<Vec<_>>());
        }
    }
}

#[test]
fn blocks_stay_reachable_behind_the_weights() {
    let golden = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/golden");
    let checkpoint = Checkpoint::open(golden.join("llama-gguf/model.gguf")).unwrap();
    let weights = checkpoint.weights().unwrap();
    let q = weights.layers[0][LayerTensor::Q].blocks().unwrap();
    assert_eq!(q.format, BlockFormat::Q4_0);
    let are_neighbours = RowOrder::Heads {
        head_dim: 8,
        num_dims: 8,
        are_neighbours: true,
    };
    assert_eq!(q.row_order, are_neighbours);
    assert_eq!(q.stored_row(0).len(), 18, "one block of 32");
    let down = weights.layers[0][LayerTensor::DOWN].blocks().unwrap();
    assert_eq!(down.format, BlockFormat::Q4K);
    assert_eq!(down.row_order, RowOrder::AsStored);
    assert!(
        weights.layers[0][LayerTensor::O].blocks().is_none(),
        "F16 needs no blocks"
    );
}

/// The length of the rows exceeds the number of values that are dequantised at once, and is not a multiple of it.
#[test]
fn long_rows_are_whole() {
    const LEN: usize = 2080;
    let format = BlockFormat::Q8_0;
    // The scales are f16; none of these bytes makes one infinite.
    let stored: Vec<u8> = (0..3 * LEN / 32 * 34)
        .map(|i| (i * 37 % 101) as u8)
        .collect();
    let mut values = vec![0.0; 3 * LEN];
    format.dequantise(&stored, &mut values);
    let range = 0..stored.len();
    let file = Arc::new(Storage::Owned(stored));
    let tensor = Tensor::of_blocks(&file, range, format, RowOrder::AsStored, vec![3, LEN]);
    for (row, values) in values.chunks(LEN).enumerate() {
        let rounded = values.iter().flat_map(|v| bf16::from_f32(*v).to_le_bytes());
        let rounded: Vec<u8> = rounded.collect();
        assert_eq!(tensor.row(row, &mut Vec::new()), rounded);
        assert_eq!(tensor.bytes()[row * 2 * LEN..][..2 * LEN], rounded);
    }
}

/// RoPE rotates rows 0 and 4 of a head of 8 together, in either order of the file.
#[test]
fn interleaved_rows_are_told_apart() {
    let file = Arc::new(Storage::Owned(
        (0..16).flat_map(|x| (x as f32).to_le_bytes()).collect(),
    ));
    for (num_dims, are_neighbours, expected) in [
        (8, true, [0, 2, 4, 6, 1, 3, 5, 7]),
        (8, false, [0, 1, 2, 3, 4, 5, 6, 7]),
        // Only the first rows are rotated: 0 with 1 and 2 with 3, or 0 with 2 and 1 with 3.
        (4, true, [0, 2, 4, 5, 1, 3, 6, 7]),
        (4, false, [0, 1, 4, 5, 2, 3, 6, 7]),
        (6, false, [0, 1, 2, 6, 3, 4, 5, 7]),
    ] {
        let order = RowOrder::Heads {
            head_dim: 8,
            num_dims,
            are_neighbours,
        };
        let tensor = Tensor::of_blocks(&file, 0..64, BlockFormat::F32, order, vec![16]);
        let rows = tensor.bytes().as_chunks().0.iter();
        let rows = rows.map(|&x| f32::from_le_bytes(x) as usize);
        let both = expected.into_iter().chain(expected.map(|row| 8 + row));
        assert!(rows.eq(both), "{num_dims}, {are_neighbours}");
    }
}

/// The contents of a file, which a test may damage.
#[derive(Clone)]
struct TestFile {
    version: u32,
    num_tensors: Option<u64>,
    num_keys: Option<u64>,
    keys: Vec<(&'static str, u32, Vec<u8>)>,
    tensors: Vec<Entry>,
    data: Vec<u8>,
}

#[derive(Clone)]
struct Entry {
    name: &'static str,
    /// The shape as in the file: the length of a row first.
    shape: Vec<u64>,
    format: u32,
    offset: u64,
}

fn text(text: &str) -> Vec<u8> {
    [&(text.len() as u64).to_le_bytes(), text.as_bytes()].concat()
}

fn texts(texts: &[&str]) -> Vec<u8> {
    let mut bytes = [&8u32.to_le_bytes()[..], &(texts.len() as u64).to_le_bytes()].concat();
    bytes.extend(texts.iter().flat_map(|t| text(t)));
    bytes
}

const U32: u32 = 4;
const F32: u32 = 6;
const TEXT: u32 = 8;
const ARRAY: u32 = 9;

impl TestFile {
    /// A model with one layer of width 4 and a vocabulary of 4.
    fn new() -> Self {
        let number = |key, number: u32| (key, U32, number.to_le_bytes().to_vec());
        let scores = [0f32; 4].map(f32::to_le_bytes).concat();
        let types = [2u32, 3, 3, 1].map(u32::to_le_bytes).concat();
        let array = |kind: u32, bytes: Vec<u8>| {
            [&kind.to_le_bytes()[..], &4u64.to_le_bytes(), &bytes].concat()
        };
        let keys = vec![
            ("general.architecture", TEXT, text("llama")),
            number("llama.context_length", 64),
            number("llama.embedding_length", 4),
            number("llama.block_count", 1),
            number("llama.feed_forward_length", 6),
            number("llama.attention.head_count", 2),
            number("llama.attention.head_count_kv", 1),
            (
                "llama.attention.layer_norm_rms_epsilon",
                F32,
                1e-5f32.to_le_bytes().to_vec(),
            ),
            ("tokenizer.ggml.model", TEXT, text("llama")),
            (
                "tokenizer.ggml.tokens",
                ARRAY,
                texts(&["<unk>", "<s>", "</s>", "a"]),
            ),
            ("tokenizer.ggml.scores", ARRAY, array(F32, scores)),
            ("tokenizer.ggml.token_type", ARRAY, array(U32, types)),
            number("tokenizer.ggml.bos_token_id", 1),
            number("tokenizer.ggml.eos_token_id", 2),
        ];
        let mut test_file = Self {
            version: 3,
            num_tensors: None,
            num_keys: None,
            keys,
            tensors: Vec::new(),
            data: Vec::new(),
        };
        for (name, shape) in [
            ("token_embd.weight", vec![4, 4]),
            ("output_norm.weight", vec![4]),
            ("blk.0.attn_norm.weight", vec![4]),
            ("blk.0.attn_q.weight", vec![4, 4]),
            ("blk.0.attn_k.weight", vec![4, 2]),
            ("blk.0.attn_v.weight", vec![4, 2]),
            ("blk.0.attn_output.weight", vec![4, 4]),
            ("blk.0.ffn_norm.weight", vec![4]),
            ("blk.0.ffn_gate.weight", vec![4, 6]),
            ("blk.0.ffn_up.weight", vec![4, 6]),
            ("blk.0.ffn_down.weight", vec![6, 4]),
        ] {
            let offset = test_file.data.len() as u64;
            let num_bytes = 4 * shape.iter().product::<u64>() as usize;
            let end = (test_file.data.len() + num_bytes).next_multiple_of(32);
            test_file.data.resize(end, 0);
            test_file.tensors.push(Entry {
                name,
                shape,
                format: 0,
                offset,
            });
        }
        test_file
    }

    fn bytes(&self) -> Vec<u8> {
        let mut bytes = b"GGUF".to_vec();
        bytes.extend(self.version.to_le_bytes());
        bytes.extend(
            self.num_tensors
                .unwrap_or(self.tensors.len() as u64)
                .to_le_bytes(),
        );
        bytes.extend(
            self.num_keys
                .unwrap_or(self.keys.len() as u64)
                .to_le_bytes(),
        );
        for (key, kind, value) in &self.keys {
            bytes.extend(text(key));
            bytes.extend(kind.to_le_bytes());
            bytes.extend(value);
        }
        for entry in &self.tensors {
            bytes.extend(text(entry.name));
            bytes.extend((entry.shape.len() as u32).to_le_bytes());
            bytes.extend(entry.shape.iter().flat_map(|size| size.to_le_bytes()));
            bytes.extend(entry.format.to_le_bytes());
            bytes.extend(entry.offset.to_le_bytes());
        }
        bytes.resize(bytes.len().next_multiple_of(32), 0);
        bytes.extend(&self.data);
        bytes
    }

    fn with_key(mut self, key: &'static str, kind: u32, value: &[u8]) -> Self {
        self.keys.retain(|(known, ..)| *known != key);
        self.keys.push((key, kind, value.to_vec()));
        self
    }

    fn without_key(mut self, key: &str) -> Self {
        self.keys.retain(|(known, ..)| *known != key);
        self
    }

    fn with_tensor(mut self, name: &str, change: impl FnOnce(&mut Entry)) -> Self {
        let tensor = self.tensors.iter_mut().find(|tensor| tensor.name == name);
        change(tensor.unwrap());
        self
    }

    #[track_caller]
    fn is_refused(&self, why: &str) {
        let problem = read_all(&self.bytes()).expect_err("it must be refused");
        assert!(problem.contains(why), "{problem}");
    }
}

#[test]
fn the_test_file_is_a_model() {
    read_all(&TestFile::new().bytes()).unwrap();
    let mut test_file = TestFile::new();
    test_file.version = 2;
    read_all(&test_file.bytes()).unwrap();
}

#[test]
fn a_file_cut_anywhere_is_refused() {
    let bytes = TestFile::new().bytes();
    for len in 0..bytes.len() {
        let problem = read_all(&bytes[..len]).expect_err("cut");
        assert!(
            problem.contains("truncated") || problem.contains("not a GGUF file"),
            "{len}: {problem}"
        );
    }
    let bytes = committed("qwen3-f16.gguf");
    for len in (0..bytes.len()).step_by(97) {
        read_all(&bytes[..len]).expect_err("cut");
    }
}

/// Any bytes give an answer, without a panic.
#[test]
fn damaged_bytes_never_panic() {
    let whole = TestFile::new().bytes();
    for at in 0..whole.len() {
        for damage in [0, 1, 0x7f, 0x80, 0xff] {
            let mut bytes = whole.clone();
            bytes[at] ^= damage;
            let _ = read_all(&bytes);
        }
    }
    for at in 0..whole.len() - 8 {
        for number in [0, 1 << 31, 1 << 32, 1 << 62, u64::MAX - 40, u64::MAX] {
            let mut bytes = whole.clone();
            bytes[at..at + 8].copy_from_slice(&u64::to_le_bytes(number));
            let _ = read_all(&bytes);
        }
    }
    let whole = committed("llama3-f16.gguf");
    for at in (0..whole.len() / 2).step_by(5) {
        let mut bytes = whole.clone();
        bytes[at] = 0xff;
        let _ = read_all(&bytes);
    }
}

#[test]
fn headers_that_are_none() {
    assert!(read_all(b"").unwrap_err().contains("0 bytes"));
    assert!(
        read_all(b"GGML....")
            .unwrap_err()
            .contains("does not begin")
    );
    let mut test_file = TestFile::new();
    for (version, why) in [
        (1, "version 1"),
        (4, "version 4"),
        (3u32.swap_bytes(), "big-endian"),
    ] {
        test_file.version = version;
        test_file.is_refused(why);
    }
}

#[test]
fn counts_that_the_file_cannot_hold() {
    for count in [1 << 20, 1 << 40, u64::MAX] {
        let mut test_file = TestFile::new();
        test_file.num_tensors = Some(count);
        test_file.is_refused("tensors");
        let mut test_file = TestFile::new();
        test_file.num_keys = Some(count);
        test_file.is_refused("keys");
        let array = |kind: u32| [&kind.to_le_bytes()[..], &count.to_le_bytes()].concat();
        for kind in 0..=12 {
            let test_file = TestFile::new().with_key("x.y", ARRAY, &array(kind));
            test_file.is_refused("elements of an array");
        }
        TestFile::new()
            .with_key("x.y", TEXT, &count.to_le_bytes())
            .is_refused("metadata");
    }
    let mut test_file = TestFile::new();
    test_file.num_tensors = Some(u64::from(u32::MAX));
    test_file.data = vec![0; 1 << 20];
    test_file.is_refused("4294967295 tensors");
}

#[test]
fn values_of_wrong_types() {
    TestFile::new()
        .with_key("x.y", 13, &[0; 8])
        .is_refused("unknown type 13");
    let mut nested = vec![];
    for _ in 0..6 {
        nested.extend(ARRAY.to_le_bytes());
        nested.extend(1u64.to_le_bytes());
    }
    nested.extend([0; 64]);
    TestFile::new()
        .with_key("x.y", ARRAY, &nested)
        .is_refused("arrays within arrays");
    TestFile::new()
        .with_key("llama.block_count", TEXT, &text("1"))
        .is_refused("llama.block_count is \"1\"; must be a positive whole number");
    TestFile::new()
        .with_key("tokenizer.ggml.tokens", U32, &[0; 4])
        .is_refused("tokenizer.ggml.tokens is 0; must be an array of strings");
    let mut test_file = TestFile::new();
    test_file.keys.push(test_file.keys[3].clone());
    test_file.is_refused("llama.block_count occurs twice");
}

#[test]
fn models_that_are_not_supported() {
    let keyed = |key, kind, value: &[u8]| TestFile::new().with_key(key, kind, value);
    keyed("general.architecture", TEXT, &text("mamba")).is_refused(
        "is \"mamba\"; it is not supported; supported are models of the types chatglm, ",
    );
    keyed("tokenizer.ggml.model", TEXT, &text("bert")).is_refused("supported are gpt2, llama");
    keyed("llama.expert_count", U32, &8u32.to_le_bytes())
        .is_refused("expert_used_count is missing");
    keyed("llama.rope.scaling.type", TEXT, &text("yarn")).is_refused("scaling.factor is missing");
    keyed("llama.attention.sliding_window", U32, &32u32.to_le_bytes()).is_refused("32; sliding");
    keyed("llama.attention.key_length", U32, &3u32.to_le_bytes()).is_refused("is 3; must be even");
    keyed("llama.rope.dimension_count", U32, &1u32.to_le_bytes())
        .is_refused("an even number of the 2");
    keyed("tokenizer.ggml.eos_token_id", U32, &4u32.to_le_bytes()).is_refused("4 tokens");
    let tokens = texts(&["a", "b", "c", "d", "e"]);
    keyed("tokenizer.ggml.tokens", ARRAY, &tokens).is_refused("4");
    for (key, _, _) in TestFile::new().keys {
        let has_default =
            key.ends_with("_kv") || key.contains("_token_id") || key.ends_with("type");
        match read_all(&TestFile::new().without_key(key).bytes()) {
            Ok(()) => assert!(has_default, "{key}"),
            // The default is the number of query heads, which does not fit these tensors.
            Err(problem) if has_default => assert!(problem.contains("attn_k.weight"), "{problem}"),
            Err(problem) => assert!(problem.contains(key), "{key}: {problem}"),
        }
    }
    let gpt2 = keyed("tokenizer.ggml.model", TEXT, &text("gpt2"));
    gpt2.is_refused("tokenizer.ggml.pre is missing; supported are llama-bpe");
    gpt2.with_key("tokenizer.ggml.pre", TEXT, &text("qwen2"))
        .with_key("tokenizer.ggml.merges", ARRAY, &texts(&["a b"]))
        .is_refused("\"a b\", does not merge two tokens into one");
}

/// As in a folder, the stated context is the original one, without YaRN.
#[test]
fn yarn_makes_the_context_longer() {
    let context = |original: u32| {
        let test_file = TestFile::new()
            .with_key("llama.rope.scaling.type", TEXT, &text("yarn"))
            .with_key("llama.rope.scaling.factor", F32, &4f32.to_le_bytes())
            .with_key(
                "llama.rope.scaling.original_context_length",
                U32,
                &original.to_le_bytes(),
            );
        let file = open(&test_file.bytes()).ok().unwrap();
        model_config(&file).unwrap().spec.max_position
    };
    assert_eq!((context(48), context(16), context(8)), (192, 64, 64));
}

#[test]
fn a_tokenizer_that_is_brought_along_is_used() {
    let file = |test_file: TestFile| open(&test_file.bytes()).ok().unwrap();
    let whole = "{\"model\": 1}";
    let test_file = TestFile::new().with_key("tokenizer.huggingface.json", TEXT, &text(whole));
    assert_eq!(tokenizer_json(&file(test_file)).unwrap(), whole.as_bytes());
}

#[test]
fn chat_templates_have_names() {
    let config = |test_file: &TestFile| -> serde_json::Value {
        let file = open(&test_file.bytes()).ok().unwrap();
        serde_json::from_slice(&tokenizer_config_json(&file).unwrap()).unwrap()
    };
    let test_file = TestFile::new();
    assert_eq!(config(&test_file)["bos_token"], "<s>");
    let padded = test_file
        .clone()
        .with_key("tokenizer.ggml.padding_token_id", U32, &[0xff; 4]);
    assert!(config(&padded)["pad_token"].is_null());
    assert!(config(&test_file)["chat_template"].is_null());
    let test_file = test_file.with_key("tokenizer.chat_template", TEXT, &text("a"));
    assert_eq!(config(&test_file)["chat_template"], "a");
    let test_file = test_file
        .with_key(
            "tokenizer.chat_templates",
            ARRAY,
            &texts(&["default", "tool_use"]),
        )
        .with_key("tokenizer.chat_template.tool_use", TEXT, &text("b"));
    assert_eq!(
        config(&test_file)["chat_template"],
        serde_json::json!([
            {"name": "default", "template": "a"},
            {"name": "tool_use", "template": "b"},
        ])
    );
}

#[test]
fn tensors_out_of_place() {
    const UP: &str = "blk.0.ffn_up.weight";
    let with = |change: fn(&mut Entry)| TestFile::new().with_tensor(UP, change);
    with(|up| up.offset += 4).is_refused("not a multiple of the alignment");
    with(|up| up.offset = 1 << 20).is_refused("truncated");
    with(|up| up.offset = u64::MAX - 31).is_refused("impossible offset");
    with(|up| up.format = 15).is_refused("tensor blk.0.ffn_up.weight is Q8_K; supported are F32");
    with(|up| up.format = 31).is_refused("is type 31");
    with(|up| up.format = 8).is_refused("not a whole number of Q8_0 blocks");
    with(|up| up.shape = vec![]).is_refused("0 dimensions");
    with(|up| up.shape = vec![1; 5]).is_refused("5 dimensions");
    with(|up| up.shape = vec![0, 6]).is_refused("a dimension of size 0");
    with(|up| up.shape = vec![u64::MAX, 6]).is_refused("a dimension of size");
    with(|up| up.shape = vec![1 << 31, 1 << 31, 1 << 31]).is_refused("impossibly large");
    with(|up| up.shape = vec![6, 4]).is_refused("[4, 6]; the metadata makes it [6, 4]");
    with(|up| up.name = "blk.0.ffn_gate.weight").is_refused("occurs twice");
    with(|up| up.name = "blk.0.ffn_exp.weight").is_refused("blk.0.ffn_up.weight is missing");
    with(|up| {
        up.shape = vec![32];
        up.format = 8;
    })
    .is_refused("is a vector of Q8_0");

    let mut test_file = TestFile::new();
    test_file.tensors.push(Entry {
        name: "blk.1.attn_norm.weight",
        ..test_file.tensors[1].clone()
    });
    test_file.is_refused("blk.1.attn_norm.weight has no place in the LlamaForCausalLM");
    for alignment in [0u32, 3, 1 << 30] {
        TestFile::new()
            .with_key("general.alignment", U32, &alignment.to_le_bytes())
            .is_refused("general.alignment");
    }
}
