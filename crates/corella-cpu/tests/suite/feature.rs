//! Golden models detect their features: the logits of Transformers follow from their specs, and differ with any feature
//! of a model switched off.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use crate::reference_decoder;
use corella_model::{
    Activation, AttentionSpec, Checkpoint, DType, DecoderSpec, DecoderWeights, ExpertScoring,
    ExpertSpec, FeedForward, GatedDeltaSpec, LayerSpec, LayerTensor, LayerWeights, NormKind,
    RecurrentSpec, RotaryScaling, RotarySpec, ShortConvolutionSpec, Storage, Tensor,
};
use serde_json::Value;

/// Relative to the largest magnitude among a position's logits. Transformers computes in f32.
const TOLERANCE: f64 = 1e-4;

/// The least change of logits by a visible feature, relative to the largest magnitude among a position's logits.
const CHANGE: f64 = 1e-3;

type SwitchOff = fn(&mut DecoderSpec, &mut DecoderWeights);

const FEATURES: [(&str, SwitchOff); 47] = [
    ("the scale of embeddings", |spec, _| {
        spec.embedding_scale = 1.0
    }),
    ("learned positions", |spec, _| {
        spec.learned_positions = false
    }),
    ("the scale of logits", |spec, _| spec.logit_scale = 1.0),
    ("the soft cap of logits", |spec, _| {
        spec.logit_soft_cap = None
    }),
    ("layer norms", |spec, _| {
        spec.norm.kind = NormKind::Rms;
        each_layer(spec, |layer| {
            let norms = [&mut layer.attention_norms, &mut layer.feed_forward_norms];
            for norm in norms.into_iter().flat_map(|norms| &mut norms.before) {
                norm.kind = NormKind::Rms;
            }
        });
    }),
    ("norms behind attention", |spec, _| {
        each_layer(spec, |layer| layer.attention_norms.after = None);
    }),
    ("norms behind the feed-forward part", |spec, _| {
        each_layer(spec, |layer| layer.feed_forward_norms.after = None);
    }),
    ("a feed-forward part beside attention", |spec, _| {
        each_layer(spec, |layer| layer.is_parallel = false);
    }),
    ("the scale of the residual stream", |spec, _| {
        each_layer(spec, |layer| layer.residual_scale = 1.0);
    }),
    ("the scale of attention", |spec, _| {
        each_attention(spec, |attention| {
            attention.scale = AttentionSpec::usual_scale(attention.head_dim);
        });
    }),
    ("the soft cap of attention", |spec, _| {
        each_attention(spec, |attention| attention.soft_cap = None);
    }),
    ("windows", |spec, _| {
        each_attention(spec, |attention| attention.window = None);
    }),
    ("sinks", |spec, _| {
        each_attention(spec, |attention| attention.has_sinks = false);
    }),
    ("gates of attention", |spec, _| {
        each_attention(spec, |attention| attention.has_output_gate = false);
    }),
    ("the state of recurrent layers", |spec, weights| {
        // Decays this fast leave no state.
        each_vector(spec, weights, LayerTensor::DeltaRate, |_| 9.0);
    }),
    ("decays of states", |spec, weights| {
        each_vector(spec, weights, LayerTensor::DeltaRate, |_| -20.0);
    }),
    ("biases of decays", |spec, weights| {
        each_vector(spec, weights, LayerTensor::DeltaDecayBias, |_| 0.0);
    }),
    ("convolutions of recurrent layers", |spec, weights| {
        each_delta(spec, weights, |spec, layer| {
            let is_newest = |at: usize| (at + 1).is_multiple_of(spec.kernel_len);
            change(layer, LayerTensor::DeltaConvolution, |at, x| {
                if is_newest(at) { x } else { 0.0 }
            });
        });
    }),
    ("short convolutions", |spec, weights| {
        each_convolution(spec, weights, |spec, layer| {
            let is_newest = |at: usize| (at + 1).is_multiple_of(spec.kernel_len);
            change(layer, LayerTensor::Convolution, |at, x| {
                if is_newest(at) { x } else { 0.0 }
            });
        });
    }),
    ("gates of short convolutions", |spec, weights| {
        let hidden_size = spec.hidden_size;
        each_convolution(spec, weights, |spec, layer| {
            let is_gate = |row: usize| row < 2 * spec.num_channels;
            if layer.get(LayerTensor::ConvolutionInputBias).is_some() {
                change(layer, LayerTensor::ConvolutionInput, |at, x| {
                    if is_gate(at / hidden_size) { 0.0 } else { x }
                });
                change(layer, LayerTensor::ConvolutionInputBias, |at, x| {
                    if is_gate(at) { 1.0 } else { x }
                });
            }
        });
    }),
    (
        "weights of the norms of recurrent layers",
        |spec, weights| {
            each_vector(spec, weights, LayerTensor::DeltaNorm, |_| 1.0);
        },
    ),
    ("norms of queries and keys", |spec, _| {
        each_attention(spec, |attention| attention.qk_norm = None);
    }),
    ("queries that grow", |spec, _| {
        each_attention(spec, |attention| attention.query_growth = None);
    }),
    ("norms of values", |spec, _| {
        each_attention(spec, |attention| attention.value_norm = None);
    }),
    ("values that are keys", |spec, weights| {
        // Other values: the query projection's first rows.
        for (layer, weights) in spec.layers.iter_mut().zip(&mut weights.layers) {
            let attention = &mut layer.attention;
            if std::mem::take(&mut attention.values_are_keys) {
                let mut values = weights[LayerTensor::Q].clone();
                values.shape[0] = attention.kv_len();
                weights.insert(LayerTensor::V, values);
            }
        }
    }),
    ("keys and values of other layers", |spec, _| {
        // Reads the first layer with heads of the same size, which is another layer than the source.
        let layers = spec.layers.clone();
        for layer in &mut spec.layers {
            if let Some(source) = &mut layer.attention.kv_source {
                let head_dim = layer.attention.head_dim;
                let is_like = |other: &LayerSpec| other.attention.head_dim == head_dim;
                *source = layers.iter().position(is_like).unwrap();
            }
        }
    }),
    ("inputs of layers", |spec, _| {
        each_layer(spec, |layer| layer.per_layer = None);
    }),
    ("looked-up inputs of layers", |_, weights| {
        if let Some(ends) = &mut weights.per_layer {
            ends.table = changed(&ends.table, |_, _| 0.0);
        }
    }),
    ("projected inputs of layers", |_, weights| {
        if let Some(ends) = &mut weights.per_layer {
            ends.projection = changed(&ends.projection, |_, _| 0.0);
        }
    }),
    ("the scale of layers", |spec, _| {
        each_layer(spec, |layer| layer.has_scale = false);
    }),
    ("the scales of experts", |spec, _| {
        each_experts(spec, |experts| experts.has_scales = false);
    }),
    ("norms of experts beside an MLP", |spec, _| {
        each_experts(spec, |experts| experts.own_norms = None);
    }),
    ("the scaling of RoPE", |spec, _| {
        each_rotary(spec, |rotary| rotary.scaling = RotaryScaling::None);
    }),
    ("the base of RoPE", |spec, _| {
        each_rotary(spec, |rotary| rotary.theta = 500.0);
    }),
    ("elements that are not rotated", |spec, _| {
        each_attention(spec, |attention| {
            if let Some(rotary) = &mut attention.rotary
                && rotary.num_dims != attention.head_dim
            {
                *rotary = RotarySpec::plain(rotary.theta, attention.head_dim);
            }
        });
    }),
    ("another RoPE, or none, in some layers", |spec, _| {
        let rotary = spec.layers[0].attention.rotary.clone();
        each_attention(spec, |attention| attention.rotary = rotary.clone());
    }),
    ("the activation", |spec, _| {
        each_layer(spec, |layer| {
            let mlp = match &mut layer.feed_forward {
                FeedForward::Mlp(mlp) => mlp,
                FeedForward::Experts(experts) => &mut experts.expert,
            };
            mlp.activation = match mlp.activation {
                Activation::Silu => Activation::GeluTanh,
                Activation::Gelu | Activation::GeluTanh | Activation::GeluSigmoid => {
                    Activation::Silu
                }
            };
        });
    }),
    ("the limit of gates", |spec, _| {
        each_experts(spec, |experts| {
            let limit = &mut experts.expert.gate_limit;
            *limit = limit.map(|_| f32::INFINITY);
        });
    }),
    ("the offset of gated values", |spec, _| {
        each_experts(spec, |experts| experts.expert.gate_limit = None);
    }),
    ("biases", |spec, weights| {
        for (layer, weights) in spec.layers.iter().zip(&mut weights.layers) {
            for tensor in layer.tensors(spec.hidden_size) {
                if tensor.tensor.owner().is_some() {
                    weights.remove(tensor.tensor);
                }
            }
        }
    }),
    ("all but the best expert", |spec, _| {
        each_experts(spec, |experts| experts.num_experts_per_token = 1);
    }),
    ("the normalisation of experts' weights", |spec, _| {
        each_experts(spec, |experts| {
            // A norm after the experts hides the sum.
            experts.normalises ^= experts.own_norms.is_none();
        });
    }),
    ("the way in which experts are scored", |spec, _| {
        each_experts(spec, |experts| {
            experts.scoring = match experts.scoring {
                ExpertScoring::Softmax => ExpertScoring::Sigmoid,
                ExpertScoring::Sigmoid => ExpertScoring::Softmax,
            };
        });
    }),
    ("biases that choose experts", |spec, _| {
        each_experts(spec, |experts| experts.selection_bias = false);
    }),
    ("the scale of experts", |spec, _| {
        each_experts(spec, |experts| experts.weight_scale = 1.0);
    }),
    ("the shared expert", |spec, _| {
        each_experts(spec, |experts| experts.shared = None);
    }),
    ("the weight of the shared expert", |spec, _| {
        each_experts(spec, |experts| {
            if let Some(shared) = &mut experts.shared {
                shared.is_weighed = false;
            }
        });
    }),
];

fn each_layer(spec: &mut DecoderSpec, change: impl FnMut(&mut LayerSpec)) {
    spec.layers.iter_mut().for_each(change);
}

fn each_attention(spec: &mut DecoderSpec, mut change: impl FnMut(&mut AttentionSpec)) {
    each_layer(spec, |layer| change(&mut layer.attention));
}

fn each_experts(spec: &mut DecoderSpec, mut change: impl FnMut(&mut ExpertSpec)) {
    each_layer(spec, |layer| {
        if let FeedForward::Experts(experts) = &mut layer.feed_forward {
            change(experts);
        }
    });
}

fn each_rotary(spec: &mut DecoderSpec, mut change: impl FnMut(&mut RotarySpec)) {
    each_attention(spec, |attention| {
        attention.rotary.iter_mut().for_each(&mut change);
    });
}

/// Calls `change` with each gated delta network.
fn each_delta(
    spec: &DecoderSpec,
    weights: &mut DecoderWeights,
    mut change: impl FnMut(&GatedDeltaSpec, &mut LayerWeights),
) {
    for (layer, weights) in spec.layers.iter().zip(&mut weights.layers) {
        if let Some(RecurrentSpec::GatedDelta(spec)) = &layer.recurrent {
            change(spec, weights);
        }
    }
}

/// Calls `change` with each short convolution.
fn each_convolution(
    spec: &DecoderSpec,
    weights: &mut DecoderWeights,
    mut change: impl FnMut(&ShortConvolutionSpec, &mut LayerWeights),
) {
    for (layer, weights) in spec.layers.iter().zip(&mut weights.layers) {
        if let Some(RecurrentSpec::ShortConvolution(spec)) = &layer.recurrent {
            change(spec, weights);
        }
    }
}

/// Changes the elements of a vector of each gated delta network.
fn each_vector(
    spec: &DecoderSpec,
    weights: &mut DecoderWeights,
    tensor: LayerTensor,
    to: fn(f32) -> f32,
) {
    each_delta(spec, weights, |_, layer| {
        change(layer, tensor, |_, x| to(x));
    });
}

/// Changes the elements of a tensor in f32, by their places.
fn change(layer: &mut LayerWeights, tensor: LayerTensor, to: impl Fn(usize, f32) -> f32) {
    let new = changed(&layer[tensor], to);
    layer.insert(tensor, new);
}

fn changed(old: &Tensor, to: impl Fn(usize, f32) -> f32) -> Tensor {
    let values = old.bytes().as_chunks::<4>().0.iter().enumerate();
    let values = values.map(|(at, &bytes)| to(at, f32::from_le_bytes(bytes)));
    let bytes: Vec<u8> = values.flat_map(f32::to_le_bytes).collect();
    Tensor {
        range: 0..bytes.len(),
        storage: Arc::new(Storage::Owned(bytes)),
        dtype: DType::F32,
        shape: old.shape.clone(),
    }
}

#[test]
fn every_feature_of_a_family_shows_in_its_golden() {
    let folders = folders();
    assert!(folders.len() >= 10);
    let (mut wrong, mut num_seen) = (Vec::new(), [0; FEATURES.len()]);
    for folder in folders {
        let name = folder.file_name().unwrap().to_string_lossy().into_owned();
        let checkpoint = Checkpoint::open(&folder).unwrap();
        let spec = &checkpoint.config().spec;
        let weights = checkpoint.weights().unwrap();
        let golden = Golden::open(&folder, spec.vocab_size);
        let difference = golden.difference(spec, &weights);
        if difference.is_nan() || difference > TOLERANCE {
            wrong.push(format!("{name} is off by {difference:.1e}"));
        }
        for ((feature, switch_off), num_seen) in FEATURES.into_iter().zip(&mut num_seen) {
            let (mut without, mut others) = (spec.clone(), weights.clone());
            switch_off(&mut without, &mut others);
            if without == *spec && have_same_elements(&others, &weights) {
                continue;
            }
            *num_seen += 1;
            let difference = golden.difference(&without, &others);
            if difference < CHANGE {
                wrong.push(format!(
                    "{name} without {feature} is off by {difference:.1e} only"
                ));
            }
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
    for ((feature, _), num_seen) in FEATURES.into_iter().zip(num_seen) {
        assert!(num_seen > 0, "no golden has {feature}");
    }
}

fn have_same_elements(a: &DecoderWeights, b: &DecoderWeights) -> bool {
    let are_same = |(a, b): (&LayerWeights, &LayerWeights)| {
        let same =
            |((a, x), (b, y)): ((_, &Tensor), (_, &Tensor))| a == b && x.bytes() == y.bytes();
        a.iter().count() == b.iter().count() && a.iter().zip(b.iter()).all(same)
    };
    let ends = |weights: &DecoderWeights| {
        let ends = weights.per_layer.as_ref();
        ends.map(|ends| {
            [
                ends.table.bytes().to_vec(),
                ends.projection.bytes().to_vec(),
            ]
        })
    };
    ends(a) == ends(b) && a.layers.iter().zip(&b.layers).all(are_same)
}

/// The results of Transformers for the longest prompt.
struct Golden {
    /// The prompt and the drawn tokens except the last.
    inputs: Vec<u32>,
    /// The logits at each drawn token.
    logits: Vec<Vec<f32>>,
}

impl Golden {
    fn open(folder: &Path, vocab_size: usize) -> Self {
        let text = fs::read(folder.join("golden.json")).unwrap();
        let golden: Value = serde_json::from_slice(&text).unwrap();
        let tokens = |value: &Value| -> Vec<u32> {
            let list = value.as_array().unwrap().iter();
            list.map(|token| token.as_u64().unwrap() as u32).collect()
        };
        let bytes = fs::read(folder.join("golden.f32")).unwrap();
        let numbers = bytes.as_chunks().0.iter();
        let numbers: Vec<f32> = numbers.map(|&bytes| f32::from_le_bytes(bytes)).collect();
        let mut all_logits = numbers.chunks(vocab_size).map(<[f32]>::to_vec);
        let cases = golden["cases"].as_array().unwrap().iter();
        let cases = cases.map(|case| {
            let (mut inputs, drawn) = (tokens(&case["prompt"]), tokens(&case["tokens"]));
            let logits = all_logits.by_ref().take(drawn.len()).collect();
            inputs.extend(&drawn[..drawn.len() - 1]);
            Self { inputs, logits }
        });
        let cases: Vec<Self> = cases.collect();
        assert!(all_logits.next().is_none());
        cases
            .into_iter()
            .max_by_key(|case| case.inputs.len())
            .unwrap()
    }

    /// The largest difference to plainly computed logits, relative to the largest magnitude among the position's
    /// logits.
    fn difference(&self, spec: &DecoderSpec, weights: &DecoderWeights) -> f64 {
        let logits = reference_decoder::logits(spec, weights, &self.inputs, spec.max_position);
        let logits = &logits[logits.len() - self.logits.len()..];
        let of_position = |(expected, found): (&Vec<f32>, &Vec<f64>)| {
            let largest = expected.iter().fold(0.0, |most: f32, x| most.max(x.abs()));
            let differences = expected.iter().zip(found);
            let differences = differences.map(|(&x, y)| (f64::from(x) - y).abs());
            differences.fold(0.0, larger) / f64::from(largest)
        };
        self.logits
            .iter()
            .zip(logits)
            .map(of_position)
            .fold(0.0, larger)
    }
}

/// The larger number, or NaN if one of them is NaN.
fn larger(a: f64, b: f64) -> f64 {
    if a > b || a.is_nan() { a } else { b }
}

/// The families' models from `make_golden.py`.
fn folders() -> Vec<PathBuf> {
    let golden = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/golden");
    let entries = fs::read_dir(golden).unwrap();
    let mut folders: Vec<_> = entries.map(|entry| entry.unwrap().path()).collect();
    folders.retain(|path| path.join("golden.f32").is_file());
    folders.sort();
    folders
}
