//! Tests of valid folders, and of all kinds of broken ones.

mod form;
mod head;

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::os::unix::fs::symlink;
use std::process::Command;

use safetensors::Dtype;
use safetensors::tensor::TensorView;
use serde_json::{Value, json};

use super::source::shards;
use super::*;
use crate::arch::{self, Layout};
use crate::file::safetensors_file::SafetensorsFile;
use crate::json::file_name::{INDEX, SINGLE};
use crate::{DType, LayerTensor, QkNorm, RotaryScaling, Storage};

/// A temporary folder for one test.
struct Folder(PathBuf);

impl Folder {
    fn new(test: &str) -> Self {
        let path = std::env::temp_dir().join(format!("corella-{}-{test}", std::process::id()));
        fs::create_dir_all(&path).unwrap();
        Self(path)
    }

    fn write(&self, name: &str, bytes: impl AsRef<[u8]>) -> &Self {
        fs::write(self.0.join(name), bytes).unwrap();
        self
    }

    fn error(&self) -> String {
        let error = match Checkpoint::open(&self.0) {
            Ok(checkpoint) => checkpoint
                .weights()
                .err()
                .expect("the folder must not load"),
            Err(error) => error,
        };
        let line = error.to_string();
        assert!(!line.contains('\n'), "more than a line: {line}");
        line.replace(&format!("{}/", self.0.display()), "")
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

fn config() -> Value {
    json!({
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": 4,
        "intermediate_size": 6,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "num_hidden_layers": 1,
        "rms_norm_eps": 1e-5,
        "vocab_size": 8,
        "tie_word_embeddings": true,
        "bos_token_id": 1,
        "eos_token_id": 2,
    })
}

fn with(changes: Value) -> String {
    let mut config = config();
    for (field, value) in changes.as_object().unwrap() {
        config[field] = value.clone();
    }
    config.to_string()
}

type Shapes = BTreeMap<&'static str, (Dtype, Vec<usize>)>;

fn shapes() -> Shapes {
    [
        ("model.embed_tokens.weight", vec![8, 4]),
        ("model.norm.weight", vec![4]),
        ("model.layers.0.input_layernorm.weight", vec![4]),
        ("model.layers.0.post_attention_layernorm.weight", vec![4]),
        ("model.layers.0.self_attn.q_proj.weight", vec![4, 4]),
        ("model.layers.0.self_attn.k_proj.weight", vec![2, 4]),
        ("model.layers.0.self_attn.v_proj.weight", vec![2, 4]),
        ("model.layers.0.self_attn.o_proj.weight", vec![4, 4]),
        ("model.layers.0.mlp.gate_proj.weight", vec![6, 4]),
        ("model.layers.0.mlp.up_proj.weight", vec![6, 4]),
        ("model.layers.0.mlp.down_proj.weight", vec![4, 6]),
    ]
    .map(|(name, shape)| (name, (Dtype::BF16, shape)))
    .into()
}

/// Every byte of the tensor with index n, in the order of names, is n + 1.
fn serialize(shapes: &Shapes) -> Vec<u8> {
    let data: Vec<Vec<u8>> = shapes
        .values()
        .enumerate()
        .map(|(n, (dtype, shape))| {
            vec![n as u8 + 1; shape.iter().product::<usize>() * dtype.bitsize() / 8]
        })
        .collect();
    let views = shapes
        .iter()
        .zip(&data)
        .map(|((name, (dtype, shape)), data)| {
            (*name, TensorView::new(*dtype, shape.clone(), data).unwrap())
        });
    safetensors::serialize(views, None).unwrap()
}

fn index(shards: &[(&str, &str)]) -> String {
    let map: BTreeMap<_, _> = shards.iter().copied().collect();
    json!({ "metadata": {}, "weight_map": map }).to_string()
}

#[test]
fn a_single_file_loads_with_every_tensor_in_its_place() {
    let folder = Folder::new("single");
    folder
        .write(CONFIG, with(json!({})))
        .write(SINGLE, serialize(&shapes()));
    let checkpoint = Checkpoint::open(&folder.0).unwrap();
    let weights = checkpoint.weights().unwrap();
    let layer = &weights.layers[0];
    let named = [
        ("model.embed_tokens.weight", &weights.embed),
        ("model.norm.weight", &weights.norm),
        (
            "model.layers.0.input_layernorm.weight",
            &layer[LayerTensor::AttentionNorm],
        ),
        (
            "model.layers.0.post_attention_layernorm.weight",
            &layer[LayerTensor::MlpNorm],
        ),
        (
            "model.layers.0.self_attn.q_proj.weight",
            &layer[LayerTensor::Q],
        ),
        (
            "model.layers.0.self_attn.k_proj.weight",
            &layer[LayerTensor::K],
        ),
        (
            "model.layers.0.self_attn.v_proj.weight",
            &layer[LayerTensor::V],
        ),
        (
            "model.layers.0.self_attn.o_proj.weight",
            &layer[LayerTensor::O],
        ),
        (
            "model.layers.0.mlp.gate_proj.weight",
            &layer[LayerTensor::GATE],
        ),
        ("model.layers.0.mlp.up_proj.weight", &layer[LayerTensor::UP]),
        (
            "model.layers.0.mlp.down_proj.weight",
            &layer[LayerTensor::DOWN],
        ),
    ];
    for (name, tensor) in named {
        let expected = shapes().keys().position(|known| *known == name).unwrap() as u8 + 1;
        assert_eq!(tensor.shape, shapes()[name].1);
        assert_eq!(tensor.dtype, DType::Bf16);
        assert_eq!(
            tensor.bytes().len(),
            tensor.shape.iter().product::<usize>() * 2
        );
        assert!(
            tensor.bytes().iter().all(|&byte| byte == expected),
            "{name}"
        );
    }
    assert!(weights.lm_head.is_none() && layer.iter().count() == 9);
}

#[test]
fn shards_and_embedded_files_load_like_a_single_file() {
    let (mut first, mut second) = (shapes(), shapes());
    first.retain(|name, _| name.contains("self_attn"));
    second.retain(|name, _| !name.contains("self_attn"));
    let map: Vec<_> = first
        .keys()
        .map(|name| (*name, "a.safetensors"))
        .chain(second.keys().map(|name| (*name, "b.safetensors")))
        .collect();
    let config = with(json!({}));
    let folder = Folder::new("shards");
    folder
        .write(CONFIG, &config)
        .write(INDEX, index(&map))
        .write("a.safetensors", serialize(&first))
        .write("b.safetensors", serialize(&second));
    let sharded = Checkpoint::open(&folder.0).unwrap().weights().unwrap();
    assert_eq!(sharded.layers[0][LayerTensor::DOWN].shape, [4, 6]);
    assert_eq!(sharded.layers[0][LayerTensor::K].shape, [2, 4]);

    let leak = |bytes: Vec<u8>| &*bytes.leak();
    let embedded = Checkpoint::from_static(&[
        (CONFIG, leak(config.into_bytes())),
        (SINGLE, leak(serialize(&shapes()))),
        ("tokenizer.json", b"{}"),
    ])
    .unwrap();
    assert_eq!(
        embedded.weights().unwrap().layers[0][LayerTensor::DOWN].shape,
        [4, 6]
    );
    assert_eq!(
        embedded.file("tokenizer.json").unwrap().as_deref(),
        Some(&b"{}"[..])
    );
    assert_eq!(embedded.file("chat_template.jinja").unwrap(), None);
    let Err(error) = Checkpoint::from_static(&[]) else {
        panic!("a checkpoint was opened without files")
    };
    assert_eq!(error.to_string(), "built-in config.json: is missing");
}

#[test]
fn the_golden_checkpoints_load() {
    let golden = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/golden");
    let mut num_loaded = 0;
    for entry in fs::read_dir(golden).unwrap() {
        let folder = entry.unwrap().path();
        if !folder.join(CONFIG).exists() {
            continue;
        }
        let checkpoint = Checkpoint::open(&folder).unwrap();
        let weights = checkpoint.weights().unwrap();
        let config = checkpoint.config();
        assert_eq!(weights.layers.len(), config.spec.layers.len());
        assert_eq!(Some(weights.embed.dtype), config.dtype);
        assert_eq!(
            (config.bos_token_id, config.end_tokens.ids()),
            (Some(1), vec![2])
        );
        num_loaded += 1;
    }
    assert!(num_loaded >= 12);
}

fn parse(config: &str) -> Result<ModelConfig, CheckpointError> {
    ModelConfig::parse((CONFIG, config.as_bytes()), None)
}

#[test]
fn configurations_mean_what_transformers_means() {
    let spec = |changes: Value| parse(&with(changes)).unwrap().spec;
    let attention = |changes: Value| spec(changes).layers[0].attention.clone();
    let llama = spec(json!({ "attention_bias": true, "mlp_bias": true }));
    let layer = &llama.layers[0];
    assert!(layer.attention.qkv_bias && layer.attention.output_bias);
    assert!(layer.feed_forward.mlp().bias && layer.attention.qk_norm.is_none());
    assert_eq!((layer.attention.head_dim, llama.max_position), (2, 2048));
    assert_eq!(attention(json!({ "head_dim": 6 })).head_dim, 6);
    assert_eq!(attention(json!({ "head_dim": null })).head_dim, 2);
    assert_eq!(
        attention(json!({ "num_key_value_heads": null })).num_kv_heads,
        2
    );

    let config = parse(&with(json!({ "architectures": ["Qwen3ForCausalLM"] }))).unwrap();
    assert_eq!(config.architecture.name(), "Qwen3ForCausalLM");
    let attention = &config.spec.layers[0].attention;
    assert!(matches!(attention.qk_norm, Some(QkNorm::Heads(_))) && !attention.qkv_bias);
    assert_eq!(
        (attention.head_dim, config.spec.max_position),
        (128, 32_768)
    );
    // Llama and Qwen3 have this flag; Qwen2 always has these biases.
    for flag in [false, true] {
        let fields = json!({ "architectures": ["Qwen2ForCausalLM"], "attention_bias": flag });
        let qwen2 = parse(&with(fields)).unwrap();
        assert_eq!(qwen2.architecture.name(), "Qwen2ForCausalLM");
        let attention = &qwen2.spec.layers[0].attention;
        assert!(attention.qkv_bias && !attention.output_bias && attention.qk_norm.is_none());
        assert_eq!((attention.head_dim, qwen2.spec.max_position), (2, 32_768));
    }
    // A sliding window that is not in use does not matter.
    spec(json!({ "sliding_window": 4096, "use_sliding_window": false,
        "layer_types": ["full_attention"] }));
}

#[test]
fn both_spellings_of_rotary_scaling_are_read() {
    let rotary = |changes: Value| {
        let spec = parse(&with(changes)).unwrap().spec;
        spec.layers[0].attention.rotary.clone().unwrap()
    };
    let none = rotary(json!({}));
    assert_eq!((none.theta, none.scaling), (10_000.0, RotaryScaling::None));
    let old = json!({ "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0,
        "high_freq_factor": 4.0, "original_max_position_embeddings": 8192 });
    let mut new = old.clone();
    new["rope_theta"] = json!(500_000.0);
    let expected = RotaryScaling::Llama3 {
        factor: 8.0,
        low_freq_factor: 1.0,
        high_freq_factor: 4.0,
        original_max_position: 8192.0,
    };
    for changes in [
        json!({ "rope_theta": 500_000, "rope_scaling": old }),
        json!({ "rope_parameters": new }),
    ] {
        let rotary = rotary(changes);
        assert_eq!((rotary.theta, &rotary.scaling), (500_000.0, &expected));
    }
    let linear = rotary(json!({ "rope_scaling": { "type": "linear", "factor": 4 } }));
    assert_eq!(linear.scaling, RotaryScaling::Linear { factor: 4.0 });
    let default = rotary(json!({ "rope_parameters": { "rope_type": "default", "rope_theta": 7 } }));
    assert_eq!((default.theta, default.scaling), (7.0, RotaryScaling::None));
}

#[test]
fn generation_config_adds_end_tokens_and_recommendations() {
    let generation = json!({ "bos_token_id": 5, "eos_token_id": [7, 2], "temperature": 0.6,
        "top_p": 0.95, "top_k": 20, "do_sample": true });
    let config = ModelConfig::parse(
        (CONFIG, with(json!({})).as_bytes()),
        Some((GENERATION_CONFIG, generation.to_string().as_bytes())),
    )
    .unwrap();
    assert_eq!(config.bos_token_id, Some(5));
    assert_eq!(config.end_tokens.ids(), [2, 7]);
    let defaults = config.generation;
    assert_eq!(
        (
            defaults.temperature,
            defaults.top_p,
            defaults.top_k,
            defaults.min_p
        ),
        (Some(0.6), Some(0.95), Some(20), None)
    );
}

#[test]
fn paths_that_are_no_checkpoint() {
    let folder = Folder::new("paths");
    let open = |name: &str| Checkpoint::open(folder.0.join(name)).err().unwrap().problem;
    assert_eq!(open("nowhere"), "no such folder or file");
    let of_name = |name: &str| Checkpoint::open(name).err().unwrap().problem;
    let advice = "`corella pull no-such-owner/Model-0.6B`";
    assert!(of_name("no-such-owner/Model-0.6B").contains(advice));
    for name in [
        "no-such-owner/",
        "./no-such-owner/model",
        "no-such-owner/model/more",
        "no-such-owner/model.gguf",
    ] {
        assert_eq!(of_name(name), "no such folder or file", "{name}");
    }
    folder.write("model.bin", "x");
    assert_eq!(
        open("model.bin"),
        "is not a GGUF file; a model is one, or a folder with config.json and safetensors"
    );
    folder.write("saved", "{}");
    assert!(open("saved").contains("/load"), "{}", open("saved"));
    assert_eq!(folder.error(), "config.json: is missing");
    folder.write("x-Q4_0.gguf", "GGUF");
    assert_eq!(
        folder.error(),
        "config.json: is missing; x-Q4_0.gguf is a model by itself"
    );
    folder.write(CONFIG, with(json!({})));
    assert_eq!(
        folder.error(),
        "model.safetensors: is missing, and so is model.safetensors.index.json; other weight \
         files are not supported"
    );
    for name in [CONFIG, SINGLE, "tokenizer.json", "model.bin"] {
        folder.write(name, with(json!({})));
        let advice = format!("name its folder instead: {}", folder.0.display());
        assert_eq!(open(name), format!("is one file of a model; {advice}"));
    }
}

#[test]
fn a_missing_tokenizer_is_told_with_its_folder() {
    let folder = Folder::new("no-tokenizer");
    folder.write(CONFIG, with(json!({})));
    let checkpoint = Checkpoint::open(&folder.0).unwrap();
    let error = checkpoint.required_file("tokenizer.json").unwrap_err();
    assert_eq!(
        error.file,
        folder.0.join("tokenizer.json").display().to_string()
    );
    let problem = "is missing, and so is tokenizer.model; a folder needs one of them";
    assert_eq!(error.problem, problem);
}

#[test]
fn a_pointer_of_git_lfs_says_that_it_is_one() {
    let pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n";
    let problem = "is a Git LFS pointer and not the file itself; run `git lfs pull` in its folder";
    let folder = Folder::new("lfs");
    folder.write("config.json", config().to_string());
    folder.write(SINGLE, pointer);
    assert_eq!(folder.error(), format!("model.safetensors: {problem}"));
    let checkpoint = Checkpoint::open(&folder.0).unwrap();
    for name in ["tokenizer.json", "chat_template.jinja"] {
        folder.write(name, pointer);
        let error = checkpoint.file(name).unwrap_err().to_string();
        assert!(error.ends_with(&format!("{name}: {problem}")), "{error}");
    }
    folder.write("config.json", pointer);
    assert_eq!(folder.error(), format!("config.json: {problem}"));
    folder.write("model.gguf", pointer);
    let error = Checkpoint::open(folder.0.join("model.gguf")).err().unwrap();
    let error = error.to_string();
    assert!(
        error.ends_with(&format!("model.gguf: {problem}")),
        "{error}"
    );
}

/// A device never ends, and a pipe without a writer never answers.
#[test]
fn files_that_are_not_regular_are_not_read() {
    let folder = Folder::new("regular");
    symlink("/dev/zero", folder.0.join("config.json")).unwrap();
    assert_eq!(folder.error(), "config.json: is not a regular file");
    fs::remove_file(folder.0.join("config.json")).unwrap();
    folder.write("config.json", config().to_string());
    let pipe = folder.0.join(SINGLE);
    let made = Command::new("mkfifo").arg(pipe).status().unwrap();
    assert!(made.success());
    assert_eq!(folder.error(), "model.safetensors: is not a regular file");
}

#[test]
fn no_description_is_larger_than_its_bound() {
    let folder = Folder::new("bound");
    // The file is sparse, and takes no room on disk.
    let file = fs::File::create(folder.0.join("config.json")).unwrap();
    file.set_len(1 << 40).unwrap();
    assert_eq!(
        folder.error(),
        "config.json: has more than 256 MiB, which no such file needs"
    );
}

#[test]
fn configurations_that_are_refused() {
    let types = BTreeSet::from(arch::folder_types());
    assert!(types.contains("llama"));
    let types: Vec<_> = types.into_iter().collect();
    let known = format!("supported are models of the types {}", types.join(", "));
    let cases = [
        (
            json!({ "architectures": null }),
            format!("architectures is missing; {known}"),
        ),
        (
            json!({ "architectures": ["GPTNeoXForCausalLM"] }),
            format!("architectures is [\"GPTNeoXForCausalLM\"]; it is not supported; {known}"),
        ),
        (
            json!({ "architectures": ["Qwen25ForCausalLM"] }),
            "architectures is [\"Qwen25ForCausalLM\"]; it is not supported; the closest that is \
             supported is Qwen2ForCausalLM"
                .into(),
        ),
        (
            json!({ "is_causal": false }),
            "is_causal is false; only attention to what comes before is supported".into(),
        ),
        (
            json!({ "hidden_size": null }),
            "hidden_size is missing".into(),
        ),
        (
            json!({ "hidden_size": 0 }),
            "hidden_size is 0; must be a positive whole number".into(),
        ),
        (
            json!({ "vocab_size": "8" }),
            "vocab_size is \"8\"; must be a positive whole number".into(),
        ),
        (
            json!({ "num_key_value_heads": 3 }),
            "num_key_value_heads is 3; must divide the 2 query heads".into(),
        ),
        (
            json!({ "hidden_size": 5 }),
            "hidden_size is 5; without head_dim it must be a multiple of 2 heads".into(),
        ),
        (
            json!({ "num_hidden_layers": 5000 }),
            "num_hidden_layers is 5000; no model has more than 4096 layers".into(),
        ),
        (
            json!({ "head_dim": 3 }),
            "head_dim is 3; must be even".into(),
        ),
        (
            json!({ "hidden_act": "relu" }),
            "hidden_act is \"relu\"; supported are silu, gelu, gelu_new, gelu_fast, \
             gelu_pytorch_tanh, quick_gelu"
                .into(),
        ),
        (
            json!({ "sliding_window": 8, "layer_types": ["sliding_attention"] }),
            "layer_types is [\"sliding_attention\"]; sliding windows are not known for this family"
                .into(),
        ),
        (
            json!({ "architectures": ["Qwen3ForCausalLM"], "use_sliding_window": true,
                "layer_types": ["chunked_attention"] }),
            "layer_types is [\"chunked_attention\"]; \"chunked_attention\" is not one of \
             full_attention, sliding_attention"
                .into(),
        ),
        (
            json!({ "rope_scaling": { "rope_type": "xpos", "factor": 4.0 } }),
            "rope_scaling.rope_type is \"xpos\"; supported are default, linear, dynamic, llama3, \
             yarn, longrope"
                .into(),
        ),
        (
            json!({ "rope_parameters": { "rope_type": "linear" } }),
            "rope_parameters.factor is missing".into(),
        ),
        (
            json!({ "partial_rotary_factor": 0.5 }),
            "partial_rotary_factor is 0.5; an even number of 2 elements must be rotated".into(),
        ),
        (
            json!({ "quantization_config": { "quant_method": "gptq" } }),
            "quantization_config.bits is missing".into(),
        ),
        (
            json!({ "torch_dtype": "float8" }),
            "torch_dtype is \"float8\"; supported are float32, float16, bfloat16".into(),
        ),
        (
            json!({ "eos_token_id": [1, -1] }),
            "eos_token_id is [1,-1]; must be a token id or a list of them".into(),
        ),
        (
            json!({ "mlp_bias": "no" }),
            "mlp_bias is \"no\"; must be true or false".into(),
        ),
    ];
    let folder = Folder::new("configurations");
    for (changes, problem) in cases {
        folder.write(CONFIG, with(changes));
        assert_eq!(folder.error(), format!("config.json: {problem}"));
    }
    folder.write(CONFIG, "{ \"hidden_size\": ");
    assert!(
        folder
            .error()
            .starts_with("config.json: is not valid JSON: EOF")
    );
    folder.write(CONFIG, "[]");
    assert_eq!(folder.error(), "config.json: is JSON but not an object");
    folder
        .write(CONFIG, with(json!({})))
        .write(GENERATION_CONFIG, "{\"temperature\":-1}");
    assert_eq!(
        folder.error(),
        "generation_config.json: temperature is -1; must not be negative"
    );
}

#[test]
fn weight_files_that_are_broken() {
    let folder = Folder::new("broken");
    let whole = serialize(&shapes());
    folder.write(CONFIG, with(json!({})));
    let check = |bytes: &[u8], problem: &str| {
        folder.write(SINGLE, bytes);
        assert_eq!(folder.error(), format!("model.safetensors: {problem}"));
    };
    check(b"", "is truncated: 0 bytes");
    check(&whole[..5], "is truncated: 5 bytes");
    let header_len = u64::from_le_bytes(whole[..8].try_into().unwrap());
    check(
        &whole[..100],
        &format!("is truncated: 100 bytes, but its header alone has {header_len}"),
    );
    let short = whole.len() - 3;
    check(
        &whole[..short],
        &format!("is truncated: {short} bytes of {}", whole.len()),
    );
    folder.write(SINGLE, "these are no weights, but a text\n");
    assert!(
        folder
            .error()
            .starts_with("model.safetensors: is not a safetensors file: ")
    );
    let mut garbled = whole.clone();
    garbled[8] = b'?';
    folder.write(SINGLE, &garbled);
    assert!(
        folder
            .error()
            .starts_with("model.safetensors: is not a safetensors file: ")
    );
}

#[test]
fn tensors_that_do_not_fit_the_configuration() {
    let folder = Folder::new("tensors");
    folder.write(CONFIG, with(json!({})));
    let check = |change: fn(&mut Shapes), problem: &str| {
        let mut shapes = shapes();
        change(&mut shapes);
        folder.write(SINGLE, serialize(&shapes));
        assert_eq!(folder.error(), format!("model.safetensors: {problem}"));
    };
    check(
        |shapes| {
            shapes.remove("model.layers.0.self_attn.k_proj.weight");
        },
        "tensor model.layers.0.self_attn.k_proj.weight is missing; it should have shape [2, 4]",
    );
    check(
        |shapes| {
            shapes.insert("model.norm.weight", (Dtype::F32, vec![5]));
        },
        "tensor model.norm.weight has shape [5]; config.json makes it [4]",
    );
    check(
        |shapes| {
            shapes.insert("model.norm.weight", (Dtype::F8_E4M3, vec![4]));
        },
        "tensor model.norm.weight is F8_E4M3; supported are F32, F16 and BF16",
    );
    check(
        |shapes| {
            shapes.insert(
                "model.layers.0.self_attn.q_proj.bias",
                (Dtype::F32, vec![4]),
            );
        },
        "tensor model.layers.0.self_attn.q_proj.bias has no place in the LlamaForCausalLM that \
         config.json describes",
    );
    // Exporters leave this tensor behind, and it does not matter.
    let mut shapes = shapes();
    shapes.insert(
        "model.layers.0.self_attn.rotary_emb.inv_freq",
        (Dtype::F32, vec![1]),
    );
    folder.write(SINGLE, serialize(&shapes));
    Checkpoint::open(&folder.0).unwrap().weights().unwrap();
}

#[test]
fn indexes_that_are_broken() {
    let folder = Folder::new("indexes");
    folder.write(CONFIG, with(json!({})));
    let check = |index: &str, problem: &str| {
        folder.write(INDEX, index);
        assert_eq!(folder.error(), problem);
    };
    check(
        "{}",
        "model.safetensors.index.json: weight_map is missing or not an object",
    );
    check(
        &index(&[("model.norm.weight", "a.safetensors")]),
        "a.safetensors: is missing; model.safetensors.index.json names it",
    );
    check(
        &index(&[("model.norm.weight", "../a.safetensors")]),
        "model.safetensors.index.json: weight_map.model.norm.weight is \"../a.safetensors\"; \
         must be the name of a file beside it",
    );
    folder
        .write("a.safetensors", serialize(&shapes()))
        .write("b.safetensors", b"");
    check(
        &index(&[
            ("model.norm.weight", "a.safetensors"),
            ("x", "b.safetensors"),
        ]),
        "b.safetensors: is truncated: 0 bytes",
    );
    let mut partial = shapes();
    partial.remove("model.norm.weight");
    folder.write("a.safetensors", serialize(&partial));
    check(
        &index(&[("model.norm.weight", "a.safetensors")]),
        "model.safetensors.index.json: tensor model.norm.weight is missing; it should have \
         shape [4]",
    );
}

/// Any damage gives an error or a checkpoint, never a panic.
#[test]
fn random_damage_does_not_panic() {
    let configuration = with(json!({ "rope_scaling": { "rope_type": "linear", "factor": 2 } }));
    let (weights, index) = (
        serialize(&shapes()),
        index(&[("model.norm.weight", SINGLE)]),
    );
    let header_len = 8 + u64::from_le_bytes(weights[..8].try_into().unwrap());
    let mut num_refused = 0;
    for round in 0..3000u64 {
        let random = |what| crate::generator::mix(round, what);
        let mut files = [
            configuration.clone().into_bytes(),
            weights.clone(),
            index.clone().into_bytes(),
        ];
        let damaged = (random(0) % 3) as usize;
        let file = &mut files[damaged];
        // Only the header of the weights is damaged: the rest are numbers, all of which are valid.
        let len = if damaged == 1 {
            header_len
        } else {
            file.len() as u64
        };
        match random(1) % 3 {
            0 => file.truncate((random(2) % len) as usize),
            1 => file[(random(2) % len) as usize] ^= 1 << (random(3) % 8),
            _ => {
                let digits = b"0123456789-e.\"{}[],:";
                let at = (random(2) % len) as usize;
                file[at] = digits[(random(3) % digits.len() as u64) as usize];
            }
        }
        let [configuration, weights, index] = files;
        let load = || {
            shards(INDEX, &index)?;
            let file = SafetensorsFile::open(SINGLE.into(), Storage::Owned(weights))?;
            let config = ModelConfig::parse((CONFIG, &configuration), None)?;
            weight_loader::load(&config, &[file], &Layout::FOLDER, SINGLE)
        };
        num_refused += usize::from(load().is_err());
    }
    assert!(
        num_refused > 2000,
        "only {num_refused} of 3000 were noticed"
    );
}
