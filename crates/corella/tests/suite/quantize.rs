//! `corella quantize`: its folder is correct, and absent after a failure.

use std::fs;
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};

use crate::held_isa::held_isa;
use corella::{
    CalibrationText, GenerateParams, Llm, LlmOptions, ModelSource, QuantizeOptions, quantize,
};
use corella_core::SamplingParams;
use corella_engine::{StreamEvent, Submission};
use corella_model::{
    Checkpoint, CheckpointWriter, DType, DecoderSpec, KvFormat, LayerTensor, LayerWeights, Tensor,
    WeightFormat,
};
use corella_quantize::{QuantizeFormat, QuantizePlan};
use corella_test::wait_until;

/// A folder that only one test uses.
struct Scratch(PathBuf);

impl Scratch {
    fn new(name: &str) -> Self {
        let path = std::env::temp_dir().join(format!("corella-{}-q-{name}", std::process::id()));
        fs::create_dir(&path).unwrap();
        Self(path)
    }

    fn path(&self, name: &str) -> PathBuf {
        self.0.join(name)
    }

    fn names(&self) -> Vec<String> {
        let entries = fs::read_dir(&self.0).unwrap();
        let mut names: Vec<_> = entries
            .map(|entry| entry.unwrap().file_name().into_string().unwrap())
            .collect();
        names.sort();
        names
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

fn root(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("../..")
        .join(name)
}

fn nano() -> PathBuf {
    root("models/nano")
}

fn int4(group_len: usize, symmetric: bool) -> QuantizeFormat {
    QuantizeFormat::Int4 {
        group_len: Some(group_len),
        symmetric,
    }
}

/// 8-bit integers with one scale per output channel.
const INT8: QuantizeFormat = QuantizeFormat::Int8 { group_len: None };

fn options(format: QuantizeFormat) -> QuantizeOptions {
    QuantizeOptions {
        format,
        keep: Vec::new(),
        calibration: None,
        num_threads: 2,
        isa: held_isa(),
    }
}

fn write(source: &Path, out: &Path, options: &QuantizeOptions) {
    let source = ModelSource::Path(source.to_path_buf());
    let mut seen = 0;
    let quantized = quantize(&source, out, options, &mut |progress| {
        assert!(seen < progress.done && progress.done <= progress.total);
        seen = progress.done;
        ControlFlow::Continue(())
    });
    let size = fs::read_dir(out).unwrap();
    let size = size.map(|entry| entry.unwrap().metadata().unwrap().len());
    assert_eq!(quantized.unwrap().num_bytes, size.sum::<u64>());
}

/// Loads a model with keys and values in f32, so that only weights and rows are rounded.
fn load(folder: &Path, format: Option<WeightFormat>) -> Llm {
    let options = LlmOptions {
        num_threads: Some(1),
        kv_cache_bytes: Some(8 << 20),
        kv_format: Some(KvFormat::Float(DType::F32)),
        weight_format: format,
        isa: held_isa(),
        ..LlmOptions::default()
    };
    Llm::load(&ModelSource::Path(folder.to_path_buf()), &options).unwrap()
}

fn answers(folder: &Path, format: Option<WeightFormat>) -> Vec<String> {
    let llm = load(folder, format);
    let prompts = ["Tell me a story about a fox.", "What is 47 + 38?"];
    let params = GenerateParams {
        max_tokens: Some(48),
        temperature: Some(0.0),
        ignore_eos: true,
        ..GenerateParams::default()
    };
    let answers = prompts.map(|prompt| llm.generate(prompt, &params).unwrap().text);
    answers.into_iter().collect()
}

/// Writes the dequantised weights of a folder as a folder of floats.
fn dequantised(folder: &Path, out: &Path) {
    let checkpoint = Checkpoint::open(folder).unwrap();
    let weights = checkpoint.weights().unwrap();
    let everything = ["layers".to_owned(), "lm_head".to_owned()];
    let plan = QuantizePlan::new(checkpoint.config(), &weights, INT8, &everything).unwrap();
    assert_eq!(plan.matrices().count(), 0);
    let mut writer = CheckpointWriter::create(out, &plan.parts()).unwrap();
    for planned in &plan.tensors {
        writer.write(&planned.name, planned.tensor.bytes()).unwrap();
    }
    for name in [
        "tokenizer.json",
        "tokenizer_config.json",
        "generation_config.json",
    ] {
        writer
            .write_file(name, &checkpoint.file(name).unwrap().unwrap())
            .unwrap();
    }
    let config = checkpoint.file("config.json").unwrap().unwrap();
    let mut config: serde_json::Value = serde_json::from_slice(&config).unwrap();
    let fields = config.as_object_mut().unwrap();
    assert!(fields.remove("quantization_config").is_some());
    writer
        .write_file("config.json", config.to_string().as_bytes())
        .unwrap();
    writer.finish().unwrap();
}

/// Returns the log-probabilities of all tokens after some prefixes of a fixed text. Drawn tokens are not compared,
/// because any rounding decides between two about equally likely tokens.
fn predictions(folder: &Path, format: Option<WeightFormat>) -> Vec<Vec<f32>> {
    const TEXT: &str = "Once there was a fox who lived near a lake. Every morning it looked for a \
                        lantern. One day a small bird asked: What is 47 + 38?";
    let llm = load(folder, format);
    let vocab_size = llm.config.spec.vocab_size;
    let tokens = llm.encode(TEXT).unwrap();
    let beginnings = (1..=tokens.len()).step_by(3).map(|len| &tokens[..len]);
    let predicted = beginnings.map(|beginning| {
        let submission = Submission {
            sampling: SamplingParams {
                logprobs: Some(vocab_size as u32),
                ..SamplingParams::GREEDY
            },
            ..Submission::new(beginning.to_vec(), 1)
        };
        let mut stream = llm.engine.submit(submission).unwrap().remove(0);
        let sample = loop {
            match stream.next_blocking().expect("an output") {
                StreamEvent::Output(output) => break output.sample.expect("a token"),
                StreamEvent::Accepted => {}
                StreamEvent::Refused(error) => panic!("{error}"),
            }
        };
        let mut logprobs = vec![f32::NAN; vocab_size];
        for &(token, logprob) in &sample.logprobs.unwrap().top {
            logprobs[token as usize] = logprob;
        }
        logprobs
    });
    predicted.collect()
}

/// The root mean square of the difference between two predictions, relative to the standard deviation
/// of the expected one.
fn relative_error(actual: &[Vec<f32>], expected: &[Vec<f32>]) -> f64 {
    let (mut error, mut spread) = (0.0, 0.0);
    for (actual, expected) in actual.iter().zip(expected) {
        let mean = expected.iter().map(|&x| f64::from(x)).sum::<f64>() / expected.len() as f64;
        for (&actual, &expected) in actual.iter().zip(expected) {
            error += f64::from(actual - expected).powi(2);
            spread += (f64::from(expected) - mean).powi(2);
        }
    }
    (error / spread).sqrt()
}

/// A bound for the error of the logits when all rows are rounded to 8 bits. A step is 1/127 of a row's largest
/// magnitude. The largest of n normal numbers is about √(2 ln n) times their root mean square; rows have a few larger
/// values, so twice this is allowed. Errors are uniform within a step, so their root mean square is 1/√12 of a step.
/// Rows are rounded before each of the four products of a layer and before the head, and these errors are independent.
fn rounded_rows_error(spec: &DecoderSpec) -> f64 {
    let longest = spec
        .hidden_size
        .max(spec.layers[0].feed_forward.mlp().intermediate_size) as f64;
    let largest = 2.0 * (2.0 * longest.ln()).sqrt();
    let one = largest / 127.0 / 12f64.sqrt();
    one * (4.0 * spec.layers.len() as f64 + 1.0).sqrt()
}

#[test]
fn a_folder_predicts_as_its_numbers_do() {
    let scratch = Scratch::new("round-trip");
    let bf16 = Some(WeightFormat::Float(DType::Bf16));
    let f32 = Some(WeightFormat::Float(DType::F32));
    for (name, format) in [
        ("int8", INT8),
        (
            "int8-g128",
            QuantizeFormat::Int8 {
                group_len: Some(128),
            },
        ),
        ("g128", int4(128, true)),
        ("g32", int4(32, false)),
    ] {
        let (folder, plain) = (scratch.path(name), scratch.path(&format!("{name}-plain")));
        write(&nano(), &folder, &options(format));
        dequantised(&folder, &plain);
        assert!(
            predictions(&folder, bf16) == predictions(&plain, bf16),
            "{name}: the same numbers by the same arithmetic"
        );
        // The served form: the integers themselves, and rows in 8 bits.
        let error = relative_error(&predictions(&folder, None), &predictions(&plain, f32));
        let most = rounded_rows_error(&Checkpoint::open(&folder).unwrap().config().spec);
        println!("{name}: {error:.4} of at most {most:.4}");
        assert!(error > 0.0 && error <= most, "{name}: {error}, {most}");
    }
    // If groups of 128 do not divide the inputs, smaller groups are used, and the folder records their length.
    let config = fs::read(scratch.path("g128").join("config.json")).unwrap();
    let config: serde_json::Value = serde_json::from_slice(&config).unwrap();
    let groups = &config["quantization_config"]["config_groups"];
    assert_eq!(groups["group_0"]["targets"][0], "re:.*mlp\\.down_proj$");
    assert_eq!(groups["group_0"]["weights"]["group_size"], 32);
    assert_eq!(groups["group_1"]["targets"][0], "Linear");
    assert_eq!(groups["group_1"]["weights"]["group_size"], 128);
    assert_eq!(config["quantization_config"]["ignore"][0], "lm_head");
    // No temporary file is left.
    assert_eq!(scratch.names().len(), 8);
}

fn values(tensor: &Tensor) -> Vec<f32> {
    assert_eq!(tensor.dtype, DType::Bf16);
    let bytes = tensor.bytes();
    let halves = bytes.as_chunks::<2>().0.iter();
    halves
        .map(|&half| f32::from_bits(u32::from(u16::from_le_bytes(half)) << 16))
        .collect()
}

/// The bound of a weight's error is half a step in 8 bits, and a whole step in 4 bits, where the largest weights may be
/// clipped. The rounding of the scale and of the product to bf16 adds to the bound.
#[test]
fn no_weight_is_further_off_than_its_scale_allows() {
    let scratch = Scratch::new("weights");
    let original = Checkpoint::open(nano()).unwrap().weights().unwrap();
    for (name, format, steps) in [
        ("int8", INT8, 2.0 * 127.0),
        ("g128", int4(128, true), 7.0),
        ("g32", int4(32, false), 7.0),
    ] {
        let folder = scratch.path(name);
        write(&nano(), &folder, &options(format));
        let written = Checkpoint::open(&folder).unwrap().weights().unwrap();
        for (layer, before) in written.layers.iter().zip(&original.layers) {
            let matrices = |layer: &LayerWeights| layer.matrices().map(values).collect::<Vec<_>>();
            let lens = before.matrices().map(|tensor| tensor.shape[1]);
            let pairs = matrices(layer).into_iter().zip(matrices(before));
            for ((written, before), len) in pairs.zip(lens) {
                assert_ne!(written, before, "{name}");
                for (written, before) in written.chunks(len).zip(before.chunks(len)) {
                    let largest = before.iter().fold(0.0f32, |most, w| most.max(w.abs()));
                    for (written, before) in written.iter().zip(before) {
                        let most = largest / steps + before.abs() / 128.0;
                        assert!(
                            (written - before).abs() <= most,
                            "{name}: {before}, {written}"
                        );
                    }
                }
            }
        }
    }
}

#[test]
fn an_answer_does_not_depend_on_what_file_the_model_came_in() {
    let scratch = Scratch::new("gguf");
    for name in ["llama-f32", "llama3-f16", "qwen3-f16"] {
        let (folder, file) = (scratch.path(name), scratch.path(&format!("{name}-file")));
        write(&root("tests/gguf").join(name), &folder, &options(INT8));
        let gguf = root("tests/gguf").join(format!("{name}.gguf"));
        write(&gguf, &file, &options(INT8));
        assert_eq!(answers(&folder, None), answers(&file, None), "{name}");
    }
}

#[test]
fn the_bytes_depend_on_nothing_but_the_inputs() {
    let scratch = Scratch::new("same");
    let text = fs::read_to_string(root("models/nano/README.md")).unwrap();
    let mut files = Vec::new();
    for (name, num_threads) in [("one", 1), ("two", 2), ("again", 2)] {
        let mut options = options(int4(32, true));
        options.num_threads = num_threads;
        options.calibration = Some(CalibrationText {
            documents: vec![text.clone(), String::new(), "Once upon a time.".to_owned()],
            context: 700,
            max_tokens: 1000,
        });
        let out = scratch.path(name);
        write(&nano(), &out, &options);
        files.push(fs::read(out.join("model.safetensors")).unwrap());
    }
    assert!(files[0] == files[1] && files[1] == files[2]);
    let nearest = scratch.path("nearest");
    write(&nano(), &nearest, &options(int4(32, true)));
    assert!(fs::read(nearest.join("model.safetensors")).unwrap() != files[0]);
}

#[test]
fn matrices_that_are_kept_are_kept() {
    let scratch = Scratch::new("keep");
    let out = scratch.path("out");
    let mut options = options(INT8);
    options.keep = vec!["down_proj".to_owned(), "layers.0".to_owned()];
    write(&nano(), &out, &options);
    let weights = Checkpoint::open(&out).unwrap().weights().unwrap();
    let original = Checkpoint::open(nano()).unwrap().weights().unwrap();
    for (index, (layer, before)) in weights.layers.iter().zip(&original.layers).enumerate() {
        assert_eq!(layer[LayerTensor::Q].has_int8_rows(), index > 0);
        let down = |layer: &LayerWeights| layer[LayerTensor::DOWN].bytes().to_vec();
        assert!(down(layer) == down(before), "layer {index}");
    }
    // Some matrices are floats, so all of them are served as floats.
    let served = load(&out, None).hardware;
    let as_numbers = load(&nano(), None).hardware;
    assert_eq!(served.weight_format, as_numbers.weight_format);
    assert_eq!(
        served.executor.weight_bytes,
        as_numbers.executor.weight_bytes
    );
}

fn corella(arguments: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_corella"));
    command
        .args(arguments)
        .stdin(Stdio::null())
        .env_remove("RUST_LOG");
    command
}

#[track_caller]
fn refusal(output: &Output) -> String {
    let text = String::from_utf8(output.stderr.clone()).unwrap();
    assert_eq!(output.status.code(), Some(2), "{text}");
    assert_eq!(text.trim_end().lines().count(), 1, "{text}");
    assert!(
        text.starts_with("error: ") && !text.contains("panicked"),
        "{text}"
    );
    text
}

#[track_caller]
fn check_refusal(arguments: &[&str], expected: &str) {
    let arguments = [&["quantize"], arguments].concat();
    let line = refusal(&corella(&arguments).output().unwrap());
    assert!(line.contains(expected), "{line}");
}

#[test]
fn what_cannot_be_done_is_said_in_a_line() {
    let scratch = Scratch::new("refused");
    let nano = nano();
    let (model, out) = (nano.to_str().unwrap(), scratch.path("out"));
    let out = out.to_str().unwrap();
    check_refusal(
        &[model, out, "--format", "int8", "--asymmetric"],
        "needs --format int4",
    );
    check_refusal(
        &[model, out, "--format", "int4", "--method", "gptq"],
        "--method gptq needs --calibration FILE",
    );
    let readme = root("README.md");
    let readme = readme.to_str().unwrap();
    check_refusal(
        &[model, out, "--format", "int4", "--calibration", readme],
        "--calibration needs --method gptq",
    );
    check_refusal(
        &[
            model,
            out,
            "--format",
            "int4",
            "--method",
            "gptq",
            "--calibration",
            "/no/text",
        ],
        "cannot read /no/text",
    );
    check_refusal(
        &[model, out, "--format", "int8", "--keep", "lm_head,nose"],
        "--keep: nose is not part of any matrix's name; there are model.layers.0.self_attn.q_proj,",
    );
    check_refusal(
        &[model, out, "--format", "int8", "--keep", "layers"],
        "there is no matrix to quantise",
    );
    check_refusal(
        &["/no/model", out, "--dtype", "int8"],
        "/no/model: no such folder or file",
    );
    let empty = scratch.path("empty.txt");
    fs::write(&empty, "").unwrap();
    let empty = empty.to_str().unwrap();
    check_refusal(
        &[
            model,
            out,
            "--format",
            "int4",
            "--method",
            "gptq",
            "--calibration",
            empty,
        ],
        "the text is empty",
    );
    fs::create_dir(out).unwrap();
    check_refusal(&[model, out, "--format", "int8"], "out: already exists");
    fs::remove_dir(out).unwrap();
    check_refusal(
        &[model, "/proc/out", "--format", "int8"],
        "cannot be written",
    );
    check_refusal(
        &[model, "/no/such/out", "--format", "int8"],
        "cannot be written: No such file",
    );
    assert_eq!(scratch.names(), ["empty.txt"]);
}

#[test]
fn a_broken_model_leaves_nothing() {
    let scratch = Scratch::new("broken");
    let (model, out) = (scratch.path("model"), scratch.path("out"));
    fs::create_dir(&model).unwrap();
    for entry in fs::read_dir(root("tests/quantized/int4-g32")).unwrap() {
        let entry = entry.unwrap();
        fs::copy(entry.path(), model.join(entry.file_name())).unwrap();
    }
    // The first scale of the matrix becomes NaN.
    let file = model.join("model.safetensors");
    let mut bytes = fs::read(&file).unwrap();
    let header_len = u64::from_le_bytes(*bytes.first_chunk().unwrap()) as usize;
    let header: serde_json::Value = serde_json::from_slice(&bytes[8..8 + header_len]).unwrap();
    let scale = &header["model.layers.0.mlp.up_proj.weight_scale"]["data_offsets"][0];
    let at = 8 + header_len + scale.as_u64().unwrap() as usize;
    bytes[at..at + 4].copy_from_slice(&f32::NAN.to_le_bytes());
    fs::write(&file, &bytes).unwrap();
    let (from, to) = (model.to_str().unwrap(), out.to_str().unwrap());
    check_refusal(
        &[from, to, "--format", "int8"],
        "model.layers.0.mlp.up_proj: weight [0, 0] is NaN",
    );
    fs::write(&file, &bytes[..bytes.len() - 1]).unwrap();
    check_refusal(&[from, to, "--format", "int8"], "is truncated");
    assert_eq!(scratch.names(), ["model"]);
}

/// A limit on the size of files has the effect of a full disk.
#[test]
fn a_full_disk_leaves_nothing() {
    let scratch = Scratch::new("full");
    let out = scratch.path("out");
    let script = format!(
        "trap '' XFSZ; ulimit -f 1000; exec {} quantize {} {} --format int8",
        env!("CARGO_BIN_EXE_corella"),
        nano().display(),
        out.display()
    );
    let output = Command::new("sh").args(["-c", &script]).output().unwrap();
    let line = refusal(&output);
    assert!(line.contains("cannot be written: File too large"), "{line}");
    assert!(scratch.names().is_empty(), "{:?}", scratch.names());
}

/// Starts a quantisation, and waits until it is writing.
fn start_slow(scratch: &Scratch) -> Child {
    let text = scratch.path("text.txt");
    fs::write(
        &text,
        "The fox looked for a kite, and by luck it found one. ".repeat(9000),
    )
    .unwrap();
    let (model, out) = (nano(), scratch.path("out"));
    let arguments = [
        "quantize",
        model.to_str().unwrap(),
        out.to_str().unwrap(),
        "--format",
        "int4",
        "--method",
        "gptq",
        "--calibration",
        text.to_str().unwrap(),
    ];
    let child = corella(&arguments).stderr(Stdio::piped()).spawn().unwrap();
    wait_until("the folder is begun", || scratch.names().len() == 2);
    child
}

#[test]
fn a_killed_process_leaves_no_folder_of_that_name() {
    let scratch = Scratch::new("killed");
    let mut child = start_slow(&scratch);
    child.kill().unwrap();
    child.wait().unwrap();
    let left = format!("out.partial-{}", child.id());
    assert_eq!(scratch.names(), [left, "text.txt".to_owned()]);
}

#[test]
fn an_interrupted_process_leaves_nothing() {
    let scratch = Scratch::new("interrupted");
    let child = start_slow(&scratch);
    let killed = Command::new("kill")
        .args(["-INT", &child.id().to_string()])
        .status();
    assert!(killed.unwrap().success());
    let line = refusal(&child.wait_with_output().unwrap());
    assert!(line.contains("interrupted"), "{line}");
    assert_eq!(scratch.names(), ["text.txt"]);
}
