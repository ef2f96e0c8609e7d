//! Quantised folders that must not load, and their errors. The golden tests of the CPU executor
//! check the values of valid ones.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use safetensors::tensor::TensorView;
use safetensors::{Dtype, SafeTensors};
use serde_json::{Value, json};

use crate::{Checkpoint, GroupFormat, GroupedRow, LayerTensor, Quantization};

const Q: &str = "model.layers.0.self_attn.q_proj";

type Tensors = BTreeMap<String, (Dtype, Vec<usize>, Vec<u8>)>;

struct Folder {
    path: PathBuf,
    config: Value,
    tensors: Tensors,
}

impl Folder {
    fn of(name: &str) -> Self {
        let source = source(name);
        let config = serde_json::from_slice(&fs::read(source.join("config.json")).unwrap());
        let bytes = fs::read(source.join("model.safetensors")).unwrap();
        let tensors = SafeTensors::deserialize(&bytes).unwrap();
        let tensors = tensors.tensors().into_iter().map(|(name, view)| {
            let parts = (view.dtype(), view.shape().to_vec(), view.data().to_vec());
            (name, parts)
        });
        // Tests of one process run at the same time.
        static NEXT: std::sync::atomic::AtomicU32 = std::sync::atomic::AtomicU32::new(0);
        let number = NEXT.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
        let name = format!("corella-{}-quantized-{number}", std::process::id());
        Self {
            path: std::env::temp_dir().join(name),
            config: config.unwrap(),
            tensors: tensors.collect(),
        }
    }

    fn part(&mut self, suffix: &str) -> &mut (Dtype, Vec<usize>, Vec<u8>) {
        self.tensors.get_mut(&format!("{Q}.{suffix}")).unwrap()
    }

    fn load(&self) -> Result<crate::DecoderWeights, String> {
        fs::create_dir_all(&self.path).unwrap();
        fs::write(self.path.join("config.json"), self.config.to_string()).unwrap();
        let views = self.tensors.iter().map(|(name, (dtype, shape, bytes))| {
            (name, TensorView::new(*dtype, shape.clone(), bytes).unwrap())
        });
        let bytes = safetensors::serialize(views, None).unwrap();
        fs::write(self.path.join("model.safetensors"), bytes).unwrap();
        let loaded = Checkpoint::open(&self.path).and_then(|checkpoint| checkpoint.weights());
        let prefix = format!("{}/", self.path.display());
        loaded.map_err(|error| error.to_string().replace(&prefix, ""))
    }

    #[track_caller]
    fn check(&self, problem: &str) {
        let error = self.load().err().expect("the folder must not load");
        assert_eq!(error, problem);
    }

    #[track_caller]
    fn check_matrix(&self, problem: &str) {
        self.check(&format!("model.safetensors: matrix {Q}: {problem}"));
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.path);
    }
}

fn source(name: &str) -> PathBuf {
    let tests = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/quantized");
    tests.join(name)
}

#[test]
fn formats_are_found() {
    let format = |bits, group_len, has_minimum| {
        Some(GroupFormat {
            bits,
            group_len,
            has_minimum,
            is_fp4: false,
        })
    };
    for (name, expected) in [
        ("int4-g32", format(4, 32, false)),
        ("int4-g64-asymmetric", format(4, 64, true)),
        ("int4-g128", format(4, 128, false)),
        ("int4-channel-head", format(4, 64, true)),
        ("int8", format(8, 64, false)),
        ("int8-g32", format(8, 32, false)),
        ("gptq", format(4, 32, true)),
        ("gptq-reordered", None),
        ("gptq-symmetric", format(4, 64, false)),
        ("awq", format(4, 32, true)),
    ] {
        let checkpoint = Checkpoint::open(source(name)).unwrap();
        let weights = checkpoint.weights().unwrap();
        let q = &weights.layers[0][LayerTensor::Q];
        assert_eq!(q.group_format(), expected, "{name}");
        let Some(format) = expected else { continue };
        let mut row = GroupedRow::default();
        q.read_groups(0, &mut row);
        assert_eq!(row.quants.len(), q.shape[1]);
        assert_eq!(row.scales.len(), q.shape[1] / format.group_len);
        assert_eq!(row.minimums.is_empty(), !format.has_minimum, "{name}");
    }
    // Matrices in the `ignore` list are not quantised.
    let weights = Checkpoint::open(source("int4-g128")).unwrap().weights();
    assert_eq!(
        weights.unwrap().layers[0][LayerTensor::O].group_format(),
        None
    );
    let weights = Checkpoint::open(source("int4-channel-head"))
        .unwrap()
        .weights();
    assert!(weights.unwrap().lm_head.unwrap().group_format().is_some());
}

#[test]
fn configurations_that_are_refused() {
    let compressed = [
        (
            "/quant_method",
            json!("bitsandbytes"),
            "quant_method is \"bitsandbytes\"; supported are compressed-tensors, gptq, awq, \
             mxfp4",
        ),
        (
            "/format",
            json!("naive-quantized"),
            "format is \"naive-quantized\"; supported are pack-quantized and int-quantized",
        ),
        (
            "/quantization_status",
            json!("frozen"),
            "quantization_status is \"frozen\"; supported is compressed",
        ),
        (
            "/kv_cache_scheme",
            json!({"num_bits": 8}),
            "kv_cache_scheme is {\"num_bits\":8}; scales of a quantised KV cache are not supported",
        ),
        (
            "/config_groups",
            json!({}),
            "config_groups is {}; must name a scheme",
        ),
        (
            "/config_groups/group_0",
            json!(["Linear"]),
            "config_groups.group_0 is [\"Linear\"]; must be an object",
        ),
        (
            "/config_groups/group_0/weights/type",
            json!("float"),
            "config_groups.group_0.weights.type is \"float\"; supported is int",
        ),
        (
            "/config_groups/group_0/weights/num_bits",
            json!(3),
            "config_groups.group_0.weights.num_bits is 3; supported are 4 and 8",
        ),
        (
            "/config_groups/group_0/weights/strategy",
            json!("tensor"),
            "config_groups.group_0.weights.strategy is \"tensor\"; supported are group and channel",
        ),
        (
            "/config_groups/group_0/weights/dynamic",
            json!(true),
            "config_groups.group_0.weights.dynamic is true; weights must have their scales in the file",
        ),
        (
            "/config_groups/group_0/input_activations",
            json!({"type": "int", "num_bits": 8, "strategy": "tensor", "dynamic": false}),
            "config_groups.group_0.input_activations.dynamic is false; supported is true: a scale for each token, computed at run time",
        ),
    ];
    let gptq = [
        ("/bits", json!(3), "bits is 3; supported is 4"),
        (
            "/group_size",
            json!(0),
            "group_size is 0; must be a positive whole number",
        ),
        (
            "/checkpoint_format",
            json!("marlin"),
            "checkpoint_format is \"marlin\"; supported are gptq and gptq_v2",
        ),
        (
            "/dynamic",
            json!({"-:mlp": {}}),
            "dynamic is {\"-:mlp\":{}}; settings for single matrices are not supported",
        ),
    ];
    let awq = [
        (
            "/version",
            json!("gemv"),
            "version is \"gemv\"; supported is gemm",
        ),
        (
            "/zero_point",
            json!(false),
            "zero_point is false; supported is true",
        ),
    ];
    let cases = compressed
        .map(|case| ("int4-g32", case))
        .into_iter()
        .chain(gptq.map(|case| ("gptq", case)))
        .chain(awq.map(|case| ("awq", case)));
    for (name, (field, value, problem)) in cases {
        let mut folder = Folder::of(name);
        let quantization = &mut folder.config["quantization_config"];
        match quantization.pointer_mut(field) {
            Some(place) => *place = value,
            None => quantization[&field[1..]] = value,
        }
        folder.check(&format!("config.json: quantization_config.{problem}"));
    }
}

#[test]
fn tensors_that_do_not_fit() {
    let mut folder = Folder::of("int4-g32");
    folder.tensors.remove(&format!("{Q}.weight_scale"));
    folder.check_matrix("weight_scale is missing");

    let mut folder = Folder::of("int4-g32");
    folder.part("weight_packed").1 = vec![32, 16];
    folder.check_matrix("weight_packed has shape [32, 16]; it should be [64, 8]");

    let mut folder = Folder::of("int4-g32");
    folder.part("weight_scale").1 = vec![32, 4];
    folder.check_matrix(
        "weight_scale has shape [32, 4]; it should be [outputs] or [outputs, groups per output]",
    );

    let mut folder = Folder::of("int4-g32");
    folder.config["quantization_config"]["config_groups"]["group_0"]["weights"]["group_size"] =
        json!(64);
    folder.check_matrix(
        "4 bits and 2 scales for the 64 weights of an output match no scheme of \
         quantization_config.config_groups",
    );

    let mut folder = Folder::of("int4-g64-asymmetric");
    folder.tensors.remove(&format!("{Q}.weight_zero_point"));
    folder.check_matrix(
        "4 bits and 1 scales for the 64 weights of an output match no scheme of \
         quantization_config.config_groups",
    );

    let mut folder = Folder::of("int4-g32");
    folder.part("weight_shape").2[0] = 63;
    folder.check_matrix("weight_shape says [63, 64]; it should be [64, 64]");

    let mut folder = Folder::of("int4-g32");
    let scales = folder.part("weight_scale");
    (scales.0, scales.2) = (Dtype::I32, vec![0; scales.2.len()]);
    folder.check_matrix("weight_scale is I32; supported are F32, F16, BF16");

    for part in ["qzeros", "scales"] {
        let mut folder = Folder::of("gptq");
        folder.tensors.remove(&format!("{Q}.{part}"));
        folder.check_matrix(&format!("{part} is missing"));
    }
    let mut folder = Folder::of("gptq");
    folder.config["quantization_config"]["group_size"] = json!(64);
    folder.check_matrix("scales has shape [2, 64]; it should be [1, 64]");

    let mut folder = Folder::of("gptq");
    folder.config["quantization_config"]["group_size"] = json!(48);
    folder.check_matrix("64 inputs are not a multiple of quantization_config.group_size, 48");

    let mut folder = Folder::of("gptq");
    folder.part("g_idx").2[..4].copy_from_slice(&(-1_i32).to_le_bytes());
    folder.check_matrix("g_idx names group -1 of 2");

    // A bias of zeros that the model does not use comes from the exporter. Any other bias belongs to the model.
    let mut folder = Folder::of("gptq");
    assert!(folder.load().is_ok());
    folder.part("bias").2[1] = 0x3c;
    folder.check(&format!(
        "model.safetensors: tensor {Q}.bias has no place in the LlamaForCausalLM that config.json \
         describes"
    ));

    let mut folder = Folder::of("awq");
    let part = folder.part("qweight").clone();
    folder.tensors.insert(format!("{Q}.weight_packed"), part);
    folder.check(&format!(
        "model.safetensors: tensor {Q}.weight_packed has no place in the LlamaForCausalLM that \
         config.json describes"
    ));

    let mut folder = Folder::of("int8");
    folder.tensors.remove(&format!("{Q}.weight_scale"));
    folder.check_matrix("weight_scale is missing");
}

#[test]
fn mxfp4_tensors_that_do_not_fit() {
    const DOWN: &str = "model.layers.0.mlp.experts.down_proj";
    let check = |change: fn(&mut Tensors), problem: &str| {
        let mut folder = Folder::of("mxfp4");
        change(&mut folder.tensors);
        folder.check(&format!("model.safetensors: {problem}"));
    };
    let matrix = |problem: &str| format!("matrix {DOWN}: {problem}");
    fn part<'a>(tensors: &'a mut Tensors, suffix: &str) -> &'a mut (Dtype, Vec<usize>, Vec<u8>) {
        tensors.get_mut(&format!("{DOWN}_{suffix}")).unwrap()
    }
    check(
        |tensors| drop(tensors.remove(&format!("{DOWN}_scales"))),
        &matrix("scales is missing"),
    );
    check(
        |tensors| part(tensors, "blocks").1 = vec![4, 32, 6, 16],
        &matrix("blocks has shape [4, 32, 6, 16]; it should be [4, 64, 3, 16]"),
    );
    check(
        |tensors| part(tensors, "scales").1 = vec![2, 128, 3],
        &matrix("scales has shape [2, 128, 3]; it should be [4, 64, 3]"),
    );
    check(
        |tensors| part(tensors, "scales").0 = Dtype::I8,
        &matrix("scales is I8; supported are U8"),
    );
    // Without blocks, the experts might be floats.
    check(
        |tensors| drop(tensors.remove(&format!("{DOWN}_blocks"))),
        &format!("tensor {DOWN} is missing; it should have shape [4, 96, 64]"),
    );
    let mut folder = Folder::of("mxfp4");
    let config = folder.config.as_object_mut().unwrap();
    config.remove("quantization_config");
    folder.check(
        "model.safetensors: tensor model.layers.0.mlp.experts.gate_up_proj is missing; it should \
         have shape [4, 64, 192]",
    );
}

/// Any configuration gives an error or a checkpoint, never a panic.
#[test]
fn random_damage_does_not_panic() {
    for name in ["int4-g64-asymmetric", "int8", "gptq", "awq", "mxfp4"] {
        let folder = Folder::of(name);
        let config = folder.config.to_string();
        let mut num_loaded = 0;
        for round in 0..500u64 {
            let random = |what| crate::generator::mix(round, what);
            let mut bytes = config.clone().into_bytes();
            let start = config.find("quantization_config").unwrap() as u64;
            let at = start + random(0) % (bytes.len() as u64 - start);
            let digits = b"0123456789-e.\"{}[],:";
            bytes[at as usize] = digits[(random(1) % digits.len() as u64) as usize];
            let parsed = crate::ModelConfig::parse(("config.json", &bytes), None);
            let Ok(config) = parsed else { continue };
            let file = fs::read(source(name).join("model.safetensors")).unwrap();
            let file = crate::file::safetensors_file::SafetensorsFile::open(
                "model.safetensors".into(),
                crate::Storage::Owned(file),
            )
            .unwrap();
            let names = &config.architecture.family().folder;
            let loaded = crate::checkpoint::weight_loader::load(
                &config,
                &[file],
                names,
                "model.safetensors",
            );
            num_loaded += usize::from(loaded.is_ok());
        }
        assert!(num_loaded < 400, "{name}: {num_loaded} of 500 loaded");
    }
}

#[test]
fn a_plain_folder_has_no_quantization() {
    let golden = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/golden/llama-gqa-tied");
    let checkpoint = Checkpoint::open(golden).unwrap();
    assert_eq!(checkpoint.config().quantization, None);
    let checkpoint = Checkpoint::open(source("awq")).unwrap();
    let awq = Quantization::Awq {
        group_len: Some(32),
    };
    assert_eq!(checkpoint.config().quantization, Some(awq));
}
