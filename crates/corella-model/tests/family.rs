//! Computes every golden model from its spec and its weights in plain loops of f64, and compares the
//! logits with those of Transformers. So what is wrong here is wrong in the mapping, not in a kernel.

use std::fs;
use std::path::{Path, PathBuf};

use corella_model::{
    Activation, AttentionSpec, Checkpoint, DecoderSpec, DecoderWeights, ExpertScoring, ExpertSpec,
    FeedForward, LayerSpec, LayerTensor, LayerWeights, Mlp, MlpSpec, NormKind, NormSpec, QkNorm,
    Tensor,
};
use serde_json::Value;

/// Relative to the largest magnitude among a position's logits. Transformers computes in f32.
const TOLERANCE: f64 = 1e-4;

#[test]
fn every_family_gives_the_golden_logits() {
    let folders = folders();
    assert!(folders.len() >= 10);
    let mut wrong = Vec::new();
    for folder in folders {
        let name = folder.file_name().unwrap().to_string_lossy().into_owned();
        let checkpoint = Checkpoint::open(&folder).unwrap();
        let spec = &checkpoint.config().spec;
        let weights = checkpoint.weights().unwrap();
        let bytes = fs::read(folder.join("golden.f32")).unwrap();
        let numbers = bytes.as_chunks().0.iter();
        let numbers: Vec<f32> = numbers.map(|&bytes| f32::from_le_bytes(bytes)).collect();
        let mut expected = numbers.chunks(spec.vocab_size);
        for (prompt, tokens) in cases(&folder) {
            let inputs: Vec<usize> = prompt.iter().chain(&tokens).copied().collect();
            let logits = Decoder::new(spec, &weights).logits(&inputs[..inputs.len() - 1]);
            for (index, logits) in logits[prompt.len() - 1..].iter().enumerate() {
                let expected = expected.next().unwrap();
                let largest = expected.iter().fold(0.0, |most: f32, x| most.max(x.abs()));
                let differences = expected.iter().zip(logits);
                let differences = differences.map(|(&x, y)| (f64::from(x) - y).abs());
                let differences: Vec<f64> = differences.collect();
                let tolerance = TOLERANCE * f64::from(largest);
                // The comparison is false for NaN.
                if !differences
                    .iter()
                    .all(|&difference| difference <= tolerance)
                {
                    let most = differences.iter().copied().fold(0.0, f64::max);
                    let most = most / f64::from(largest);
                    wrong.push(format!(
                        "{name}, prompt of {}, token {index}: off by {most:.1e}",
                        prompt.len()
                    ));
                }
            }
        }
        assert!(expected.next().is_none());
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

/// The files have the names and the order of rows of llama.cpp's converter (`make_family.py`).
#[test]
fn a_gguf_file_has_what_its_folder_has() {
    let tests = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests");
    let entries = fs::read_dir(tests.join("gguf/family")).unwrap();
    let files: Vec<PathBuf> = entries.map(|entry| entry.unwrap().path()).collect();
    assert_eq!(files.len(), 8);
    for path in files {
        let name = path.file_stem().unwrap().to_string_lossy().into_owned();
        let file = Checkpoint::open(&path).unwrap();
        let folder = Checkpoint::open(tests.join("golden").join(&name)).unwrap();
        assert_eq!(file.config().architecture, folder.config().architecture);
        let (in_file, in_folder) = (&file.config().spec, &folder.config().spec);
        if ["granite", "olmo2"].contains(&&*name) {
            assert_eq!(in_file, in_folder, "{name}");
        }
        assert_eq!(
            without_layer_types(in_file),
            without_layer_types(in_folder),
            "{name}"
        );
        if name == "phi3" {
            let rotary = |spec: &DecoderSpec| {
                let attention = &spec.layers[0].attention;
                let rotary = attention.rotary.as_ref().unwrap().frequencies(512);
                (rotary, attention.window)
            };
            let (found, expected) = (rotary(in_file), rotary(in_folder));
            assert_eq!(found.1, expected.1);
            assert_eq!(found.0.magnitude, expected.0.magnitude);
            let pairs = found.0.frequencies.iter().zip(&expected.0.frequencies);
            for (found, expected) in pairs {
                assert!((found / expected - 1.0).abs() < 1e-6, "{found}, {expected}");
            }
        }
        let (found, expected) = (file.weights().unwrap(), folder.weights().unwrap());
        let (found, expected) = (tensors(&found), tensors(&expected));
        assert_eq!(found.len(), expected.len(), "{name}");
        for ((what, found), (_, expected)) in found.iter().zip(&expected) {
            assert_eq!(found.shape, expected.shape, "{name}: {what}");
            for (found, expected) in vector(found).into_iter().zip(vector(expected)) {
                // Matrices are rounded to f16.
                let tolerance = expected.abs() / 1024.0 + 1e-7;
                assert!(
                    (found - expected).abs() <= tolerance,
                    "{name}: {what} has {found}, expected {expected}"
                );
            }
        }
    }
}

/// A spec without what GGUF files cannot say of these models: which layers have windows or RoPE, and
/// scales of attention that differ from those of the published models.
fn without_layer_types(spec: &DecoderSpec) -> DecoderSpec {
    let mut spec = spec.clone();
    for layer in &mut spec.layers {
        layer.attention.rotary = None;
        layer.attention.window = None;
        layer.attention.scale = 1.0;
    }
    spec
}

fn tensors(weights: &DecoderWeights) -> Vec<(String, &Tensor)> {
    let ends = [
        Some(&weights.embed),
        weights.positions.as_ref(),
        Some(&weights.norm),
        weights.norm_bias.as_ref(),
        weights.lm_head.as_ref(),
    ];
    let ends = ends
        .into_iter()
        .flatten()
        .map(|tensor| ("end".to_owned(), tensor));
    let layers = weights
        .layers
        .iter()
        .enumerate()
        .flat_map(|(index, layer)| {
            let tensors = layer.iter();
            tensors.map(move |(tensor, values)| (format!("{index}.{tensor}"), values))
        });
    ends.chain(layers).collect()
}

fn folders() -> Vec<PathBuf> {
    let golden = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/golden");
    let entries = fs::read_dir(golden).unwrap();
    let folders = entries.map(|entry| entry.unwrap().path());
    folders
        .filter(|path| path.join("golden.f32").is_file())
        .collect()
}

/// The prompt and the drawn tokens of each case.
fn cases(folder: &Path) -> Vec<(Vec<usize>, Vec<usize>)> {
    let text = fs::read(folder.join("golden.json")).unwrap();
    let golden: Value = serde_json::from_slice(&text).unwrap();
    let tokens = |value: &Value| -> Vec<usize> {
        let list = value.as_array().unwrap().iter();
        list.map(|token| token.as_u64().unwrap() as usize).collect()
    };
    let cases = golden["cases"].as_array().unwrap().iter();
    cases
        .map(|case| (tokens(&case["prompt"]), tokens(&case["tokens"])))
        .collect()
}

type Row = Vec<f64>;

struct Decoder<'a> {
    spec: &'a DecoderSpec,
    weights: &'a DecoderWeights,
}

impl<'a> Decoder<'a> {
    fn new(spec: &'a DecoderSpec, weights: &'a DecoderWeights) -> Self {
        Self { spec, weights }
    }

    /// The logits at every position.
    fn logits(&self, tokens: &[usize]) -> Vec<Row> {
        let (spec, weights) = (self.spec, self.weights);
        let embed = rows(&weights.embed);
        let positions = weights.positions.as_ref().map(rows);
        let embed_token = |(position, &token): (usize, &usize)| {
            let mut row = scaled(&embed[token], f64::from(spec.embedding_scale));
            if let Some(positions) = &positions {
                add(&mut row, &positions[position], 1.0);
            }
            row
        };
        let mut stream: Vec<Row> = tokens.iter().enumerate().map(embed_token).collect();
        for (layer, weights) in spec.layers.iter().zip(&weights.layers) {
            Layer {
                spec: layer,
                weights,
                max_context: spec.max_position,
            }
            .run(&mut stream);
        }
        let head = weights.lm_head.as_ref().map_or(embed, rows);
        let weight = vector(&weights.norm);
        let bias = weights.norm_bias.as_ref().map(vector);
        let logits = |row: Row| {
            let row = norm(&row, spec.norm, &weight, bias.as_deref());
            let mut logits = scaled(&product(&head, &row), f64::from(spec.logit_scale));
            if let Some(cap) = spec.logit_soft_cap {
                logits
                    .iter_mut()
                    .for_each(|logit| *logit = soft_cap(*logit, cap));
            }
            logits
        };
        stream.into_iter().map(logits).collect()
    }
}

struct Layer<'a> {
    spec: &'a LayerSpec,
    weights: &'a LayerWeights,
    max_context: usize,
}

impl Layer<'_> {
    fn run(&self, stream: &mut [Row]) {
        use LayerTensor::{AttentionNorm, AttentionOutputNorm, MlpNorm, MlpOutputNorm};
        assert!(!self.spec.is_parallel, "no golden is parallel");
        let scale = f64::from(self.spec.residual_scale);
        let norms = self.spec.attention_norms;
        let inputs = stream
            .iter()
            .map(|row| self.norm(row, norms.before, AttentionNorm));
        let outputs = self.attention(&inputs.collect::<Vec<_>>());
        for (row, output) in stream.iter_mut().zip(outputs) {
            add(
                row,
                &self.norm(&output, norms.after, AttentionOutputNorm),
                scale,
            );
        }
        let norms = self.spec.feed_forward_norms;
        for row in stream {
            let input = self.norm(row, norms.before, MlpNorm);
            let output = match &self.spec.feed_forward {
                FeedForward::Mlp(mlp) => self.mlp(mlp, Mlp::Only, &input),
                FeedForward::Experts(experts) => self.experts(experts, &input),
            };
            add(row, &self.norm(&output, norms.after, MlpOutputNorm), scale);
        }
    }

    fn norm(&self, row: &[f64], spec: Option<NormSpec>, weight: LayerTensor) -> Row {
        let Some(spec) = spec else {
            return row.to_vec();
        };
        let bias = weight.bias().and_then(|bias| self.weights.get(bias));
        let bias = bias.map(vector);
        norm(row, spec, &vector(&self.weights[weight]), bias.as_deref())
    }

    fn dense(&self, matrix: LayerTensor, inputs: &[Row]) -> Vec<Row> {
        let weights = rows(&self.weights[matrix]);
        let bias = matrix.bias().and_then(|bias| self.weights.get(bias));
        let bias = bias.map(vector);
        let output = |input: &Row| {
            let mut output = product(&weights, input);
            if let Some(bias) = &bias {
                add(&mut output, bias, 1.0);
            }
            output
        };
        inputs.iter().map(output).collect()
    }

    fn attention(&self, inputs: &[Row]) -> Vec<Row> {
        let spec = &self.spec.attention;
        let head_dim = spec.head_dim;
        let mut queries = self.dense(LayerTensor::Q, inputs);
        let mut keys = self.dense(LayerTensor::K, inputs);
        let values = self.dense(LayerTensor::V, inputs);
        for (rows, weight) in [
            (&mut queries, LayerTensor::QNorm),
            (&mut keys, LayerTensor::KNorm),
        ] {
            for (position, row) in rows.iter_mut().enumerate() {
                match spec.qk_norm {
                    Some(QkNorm::Whole(norm)) => *row = self.norm(row, Some(norm), weight),
                    Some(QkNorm::Heads(norm)) => {
                        for head in row.chunks_mut(head_dim) {
                            head.copy_from_slice(&self.norm(head, Some(norm), weight));
                        }
                    }
                    None => {}
                }
                row.chunks_mut(head_dim)
                    .for_each(|head| self.rotate(spec, position, head));
            }
        }
        let group = spec.num_heads / spec.num_kv_heads;
        let attend = |(position, query): (usize, &Row)| {
            let first = spec
                .window
                .map_or(0, |window| (position + 1).saturating_sub(window));
            let mut output = vec![0.0; query.len()];
            for (head, query) in query.chunks(head_dim).enumerate() {
                let own = head / group * head_dim..(head / group + 1) * head_dim;
                let score = |position: usize| {
                    let score = dot(query, &keys[position][own.clone()]) * f64::from(spec.scale);
                    spec.soft_cap.map_or(score, |cap| soft_cap(score, cap))
                };
                let weights = softmax(&(first..=position).map(score).collect::<Vec<_>>());
                let output = &mut output[head * head_dim..][..head_dim];
                for (value, weight) in values[first..=position].iter().zip(weights) {
                    add(output, &value[own.clone()], weight);
                }
            }
            output
        };
        let outputs: Vec<Row> = queries.iter().enumerate().map(attend).collect();
        self.dense(LayerTensor::O, &outputs)
    }

    fn rotate(&self, spec: &AttentionSpec, position: usize, head: &mut [f64]) {
        let Some(rotary) = &spec.rotary else {
            return;
        };
        let half = head.len() / 2;
        let rotary = rotary.frequencies(self.max_context);
        for (i, frequency) in rotary.frequencies.iter().enumerate() {
            let (sin, cos) = (position as f64 * frequency).sin_cos();
            let (a, b) = (head[i], head[i + half]);
            head[i] = (a * cos - b * sin) * rotary.magnitude;
            head[i + half] = (b * cos + a * sin) * rotary.magnitude;
        }
    }

    fn mlp(&self, spec: &MlpSpec, mlp: Mlp, input: &Row) -> Row {
        let input = std::slice::from_ref(input);
        let mut inner = self.dense(LayerTensor::Up(mlp), input).remove(0);
        match spec.is_gated {
            true => {
                let gates = self.dense(LayerTensor::Gate(mlp), input).remove(0);
                for (x, gate) in inner.iter_mut().zip(gates) {
                    *x *= activation(spec.activation, gate);
                }
            }
            false => inner
                .iter_mut()
                .for_each(|x| *x = activation(spec.activation, *x)),
        }
        self.dense(LayerTensor::Down(mlp), &[inner]).remove(0)
    }

    fn experts(&self, spec: &ExpertSpec, input: &Row) -> Row {
        assert!(
            spec.shared.is_none() && !spec.selection_bias,
            "no golden has them"
        );
        let scores = self
            .dense(LayerTensor::Router, std::slice::from_ref(input))
            .remove(0);
        let scores = match spec.scoring {
            ExpertScoring::Softmax => softmax(&scores),
            ExpertScoring::Sigmoid => scores.iter().map(|x| 1.0 / (1.0 + (-x).exp())).collect(),
        };
        let mut order: Vec<usize> = (0..scores.len()).collect();
        order.sort_by(|&a, &b| scores[b].total_cmp(&scores[a]));
        order.truncate(spec.num_experts_per_token);
        let sum: f64 = match spec.normalises {
            true => order.iter().map(|&expert| scores[expert]).sum(),
            false => 1.0,
        };
        let mut output = vec![0.0; input.len()];
        for expert in order {
            let weight = scores[expert] / sum * f64::from(spec.weight_scale);
            add(
                &mut output,
                &self.mlp(&spec.expert, Mlp::Expert(expert), input),
                weight,
            );
        }
        output
    }
}

fn norm(row: &[f64], spec: NormSpec, weight: &[f64], bias: Option<&[f64]>) -> Row {
    let len = row.len() as f64;
    let mean = match spec.kind {
        NormKind::Rms => 0.0,
        NormKind::Layer { .. } => row.iter().sum::<f64>() / len,
    };
    let squares: f64 = row.iter().map(|x| (x - mean).powi(2)).sum();
    let scale = 1.0 / (squares / len + f64::from(spec.eps)).sqrt();
    let weighed = row
        .iter()
        .zip(weight)
        .map(|(x, weight)| (x - mean) * scale * weight);
    let mut output: Row = weighed.collect();
    if let Some(bias) = bias {
        add(&mut output, bias, 1.0);
    }
    output
}

fn activation(kind: Activation, x: f64) -> f64 {
    match kind {
        Activation::Silu => x / (1.0 + (-x).exp()),
        Activation::GeluTanh => {
            let inner = (2.0 / std::f64::consts::PI).sqrt() * (x + 0.044715 * x.powi(3));
            0.5 * x * (1.0 + inner.tanh())
        }
        Activation::Gelu => panic!("no golden has GELU without tanh"),
    }
}

fn soft_cap(x: f64, cap: f32) -> f64 {
    f64::from(cap) * (x / f64::from(cap)).tanh()
}

fn softmax(scores: &[f64]) -> Row {
    let most = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    let weights: Row = scores.iter().map(|score| (score - most).exp()).collect();
    let sum: f64 = weights.iter().sum();
    weights.iter().map(|weight| weight / sum).collect()
}

fn dot(a: &[f64], b: &[f64]) -> f64 {
    a.iter().zip(b).map(|(a, b)| a * b).sum()
}

fn product(matrix: &[Row], row: &[f64]) -> Row {
    matrix.iter().map(|weights| dot(weights, row)).collect()
}

fn scaled(row: &[f64], scale: f64) -> Row {
    row.iter().map(|x| x * scale).collect()
}

fn add(to: &mut [f64], row: &[f64], scale: f64) {
    for (to, x) in to.iter_mut().zip(row) {
        *to += scale * x;
    }
}

fn rows(tensor: &Tensor) -> Vec<Row> {
    let row_len = tensor.shape[1..].iter().product();
    let read = |row| {
        let mut values = vec![0.0; row_len];
        tensor.read_row(row, &mut Vec::new(), &mut values);
        values.into_iter().map(f64::from).collect()
    };
    (0..tensor.shape[0]).map(read).collect()
}

fn vector(tensor: &Tensor) -> Row {
    rows(tensor).into_iter().flatten().collect()
}
