//! A plain forward pass of any decoder spec, in f64 and over a whole sequence at a time.

use corella_model::{
    Activation, AttentionSpec, DecoderSpec, DecoderWeights, ExpertScoring, ExpertSpec, FeedForward,
    GatedDeltaSpec, LayerSpec, LayerTensor, LayerWeights, Mlp, MlpSpec, NormKind, NormSpec,
    PerLayerSpec, QkNorm, RecurrentSpec, ShortConvolutionSpec, Tensor,
};

type Row = Vec<f64>;

/// The logits after each token of a sequence.
pub fn logits(
    spec: &DecoderSpec,
    weights: &DecoderWeights,
    tokens: &[u32],
    max_context: usize,
) -> Vec<Row> {
    let embed = Matrix::new(&weights.embed);
    let mut x: Vec<Row> = tokens
        .iter()
        .map(|&token| scaled(embed.row(token as usize), spec.embedding_scale))
        .collect();
    if let Some(positions) = weights
        .positions
        .as_ref()
        .filter(|_| spec.learned_positions)
    {
        let positions = Matrix::new(positions);
        for (position, row) in x.iter_mut().enumerate() {
            add(row, positions.row(position));
        }
    }
    let inputs = per_layer_inputs(spec, weights, tokens, &x);
    let mut sides: Vec<Sides> = Vec::new();
    for (index, (layer, tensors)) in spec.layers.iter().zip(&weights.layers).enumerate() {
        let shared = layer
            .attention
            .kv_source
            .map(|source| sides[source].clone());
        sides.push(run_layer(layer, tensors, &mut x, shared, max_context));
        for (x, inputs) in x.iter_mut().zip(&inputs) {
            if let Some(spec) = &layer.per_layer {
                add_per_layer(spec, tensors, &inputs[index * spec.len..], x);
            }
        }
        if layer.has_scale {
            let scale = values(&tensors[LayerTensor::LayerScale])[0];
            x.iter_mut().flatten().for_each(|x| *x *= scale);
        }
    }
    let head = match spec.tied_embeddings {
        true => embed,
        false => Matrix::new(weights.lm_head.as_ref().unwrap()),
    };
    let logits = x.iter().map(|row| {
        let row = norm(spec.norm, row, &weights.norm, weights.norm_bias.as_ref());
        let logits = scaled(&head.times(&row), spec.logit_scale);
        capped(logits, spec.logit_soft_cap)
    });
    logits.collect()
}

/// The keys and values of all positions.
type Sides = [Vec<Row>; 2];

/// The layers' own inputs, for all layers of each token.
fn per_layer_inputs(
    spec: &DecoderSpec,
    weights: &DecoderWeights,
    tokens: &[u32],
    embedded: &[Row],
) -> Vec<Row> {
    let (Some(of_layer), Some(weights)) = (spec.per_layer(), &weights.per_layer) else {
        return Vec::new();
    };
    let (table, projection) = (
        Matrix::new(&weights.table),
        Matrix::new(&weights.projection),
    );
    let rows = tokens.iter().zip(embedded).map(|(&token, x)| {
        let root = (spec.hidden_size as f64).sqrt();
        let projected: Row = projection.times(x).iter().map(|x| x / root).collect();
        let normed = projected.chunks(of_layer.len);
        let normed = normed.flat_map(|x| norm(of_layer.norm, &x.to_vec(), &weights.norm, None));
        let root = (of_layer.len as f64).sqrt();
        let sums = normed.zip(table.row(token as usize));
        sums.map(|(x, y)| (x + y * root) / 2.0_f64.sqrt()).collect()
    });
    rows.collect()
}

fn add_per_layer(spec: &PerLayerSpec, layer: &LayerWeights, input: &[f64], x: &mut Row) {
    let gates = dense(layer, LayerTensor::PerLayerGate, x).into_iter();
    let gated = gates.map(|gate| activation(spec.activation, gate));
    let gated: Row = gated.zip(input).map(|(gate, x)| gate * x).collect();
    let out = dense(layer, LayerTensor::PerLayerOutput, &gated);
    add(
        x,
        &norm(spec.norm, &out, &layer[LayerTensor::PerLayerNorm], None),
    );
}

fn run_layer(
    spec: &LayerSpec,
    layer: &LayerWeights,
    x: &mut [Row],
    shared: Option<Sides>,
    max_context: usize,
) -> Sides {
    let optional = |spec: Option<NormSpec>, row: &Row, tensor: LayerTensor| match spec {
        Some(spec) => norm(spec, row, &layer[tensor], bias(layer, tensor)),
        None => row.clone(),
    };
    let scale = f64::from(spec.residual_scale);
    let norms = &spec.attention_norms;
    let normed = x.iter();
    let normed = normed.map(|row| optional(norms.before, row, LayerTensor::AttentionNorm));
    let normed: Vec<Row> = normed.collect();
    let (attended, sides) = match &spec.recurrent {
        None => attention(&spec.attention, layer, &normed, shared, max_context),
        Some(RecurrentSpec::GatedDelta(spec)) => {
            (gated_delta(spec, layer, &normed), Sides::default())
        }
        Some(RecurrentSpec::ShortConvolution(spec)) => {
            (short_convolution(spec, layer, &normed), Sides::default())
        }
    };
    for (x, row) in x.iter_mut().zip(&attended) {
        let row = optional(norms.after, row, LayerTensor::AttentionOutputNorm);
        x.iter_mut().zip(row).for_each(|(x, y)| *x += scale * y);
    }
    let norms = &spec.feed_forward_norms;
    for (x, normed) in x.iter_mut().zip(normed) {
        let input = match spec.is_parallel {
            true => normed,
            false => optional(norms.before, x, LayerTensor::MlpNorm),
        };
        let row = match &spec.feed_forward {
            FeedForward::Mlp(spec) => mlp(spec, layer, Mlp::Only, &input),
            FeedForward::Experts(spec) => experts(spec, layer, &input, x),
        };
        let row = optional(norms.after, &row, LayerTensor::MlpOutputNorm);
        x.iter_mut().zip(row).for_each(|(x, y)| *x += scale * y);
    }
    sides
}

/// The bias of a matrix or a norm.
fn bias(layer: &LayerWeights, tensor: LayerTensor) -> Option<&Tensor> {
    layer.get(tensor.bias()?)
}

/// A matrix times a row, with its bias.
fn dense(layer: &LayerWeights, matrix: LayerTensor, input: &Row) -> Row {
    let output = Matrix::new(&layer[matrix]).times(input);
    biased(output, bias(layer, matrix))
}

fn attention(
    spec: &AttentionSpec,
    layer: &LayerWeights,
    input: &[Row],
    shared: Option<Sides>,
    max_context: usize,
) -> (Vec<Row>, Sides) {
    let project = |matrix| input.iter().map(move |row| dense(layer, matrix, row));
    let mut q: Vec<Row> = project(LayerTensor::Q).collect();
    let dim = spec.head_dim;
    let (is_shared, [mut k, mut v]) = match shared {
        Some(sides) => (true, sides),
        None => {
            let values = match spec.values_are_keys {
                true => LayerTensor::K,
                false => LayerTensor::V,
            };
            let sides = [LayerTensor::K, values].map(|matrix| project(matrix).collect());
            (false, sides)
        }
    };
    if let Some(norm) = spec.value_norm {
        for head in v.iter_mut().flat_map(|row| row.chunks_mut(dim)) {
            let mean = dot(head, head) / dim as f64;
            let scale = 1.0 / (mean + f64::from(norm.eps)).sqrt();
            head.iter_mut().for_each(|x| *x *= scale);
        }
    }
    let frequencies = spec.rotary.as_ref().map(|r| r.frequencies(max_context));
    let sides = [(&mut q, LayerTensor::QNorm), (&mut k, LayerTensor::KNorm)];
    for (rows, weight) in sides.into_iter().take(if is_shared { 1 } else { 2 }) {
        for (position, row) in rows.iter_mut().enumerate() {
            let part_len = match spec.qk_norm {
                Some(QkNorm::Whole(_)) => row.len(),
                _ => dim,
            };
            if let Some(QkNorm::Heads(kind) | QkNorm::Whole(kind)) = spec.qk_norm {
                for part in row.chunks_mut(part_len) {
                    let normed = norm(kind, &part.to_vec(), &layer[weight], None);
                    part.copy_from_slice(&normed);
                }
            }
            let Some(rotary) = &frequencies else {
                continue;
            };
            for head in row.chunks_mut(dim) {
                for (i, frequency) in rotary.frequencies.iter().enumerate() {
                    let (sin, cos) = (position as f64 * frequency).sin_cos();
                    let (a, b) = (head[i], head[i + dim / 2]);
                    head[i] = (a * cos - b * sin) * rotary.magnitude;
                    head[i + dim / 2] = (b * cos + a * sin) * rotary.magnitude;
                }
            }
        }
    }
    if let Some(growth) = spec.query_growth {
        for (position, row) in q.iter_mut().enumerate() {
            let num_contexts = (position as f64 / growth.original_max_position as f64).floor();
            let factor = 1.0 + growth.beta * (1.0 + num_contexts).ln();
            row.iter_mut().for_each(|x| *x *= factor);
        }
    }
    let sinks = layer.get(LayerTensor::Sinks).filter(|_| spec.has_sinks);
    let sinks = sinks.map_or(Row::new(), values);
    let rows = q.iter().enumerate().map(|(position, q)| {
        let first = match spec.window {
            Some(window) if position + 1 > window => position + 1 - window,
            _ => 0,
        };
        let mut attended = vec![0.0; spec.num_heads * dim];
        for head in 0..spec.num_heads {
            let kv = head * spec.num_kv_heads / spec.num_heads * dim;
            let q = &q[head * dim..][..dim];
            let scores = k[first..=position].iter().map(|k| {
                let score = dot(q, &k[kv..][..dim]) * f64::from(spec.scale);
                capped(vec![score], spec.soft_cap)[0]
            });
            let mut scores: Row = scores.collect();
            // A sink is weighed like a position, but has no value.
            scores.extend(sinks.get(head));
            let weights = softmax(&scores);
            for (v, weight) in v[first..=position].iter().zip(weights) {
                let out = &mut attended[head * dim..][..dim];
                out.iter_mut()
                    .zip(&v[kv..])
                    .for_each(|(out, v)| *out += weight * v);
            }
        }
        if spec.has_output_gate {
            let gates = dense(layer, LayerTensor::AttentionGate, &input[position]);
            let gated = attended.iter_mut().zip(gates);
            gated.for_each(|(x, gate)| *x *= sigmoid(gate));
        }
        dense(layer, LayerTensor::O, &attended)
    });
    (rows.collect(), [k.clone(), v.clone()])
}

/// A gated delta network, token by token as in its definition.
fn gated_delta(spec: &GatedDeltaSpec, layer: &LayerWeights, input: &[Row]) -> Vec<Row> {
    use LayerTensor::*;
    let (key_dim, value_dim) = (spec.key_dim, spec.value_dim);
    let projected: Vec<Row> = input
        .iter()
        .map(|row| {
            [DeltaQ, DeltaK, DeltaV]
                .map(|matrix| dense(layer, matrix, row))
                .concat()
        })
        .collect();
    let convolution = Matrix::new(&layer[DeltaConvolution]);
    let mut states = vec![vec![vec![0.0; value_dim]; key_dim]; spec.num_value_heads];
    let mut rows = Vec::new();
    for (position, row) in input.iter().enumerate() {
        let channel = |channel: usize| {
            let weights = convolution.row(channel).iter().rev();
            let inputs = projected[..=position].iter().rev();
            let sum: f64 = weights.zip(inputs).map(|(w, x)| w * x[channel]).sum();
            activation(Activation::Silu, sum)
        };
        let channels: Row = (0..spec.num_channels()).map(channel).collect();
        let unit = |head: &[f64]| {
            let length = (dot(head, head) + 1e-6).sqrt();
            head.iter().map(|x| x / length).collect::<Row>()
        };
        let (queries, others) = channels.split_at(spec.key_len());
        let (keys, values_of_heads) = others.split_at(spec.key_len());
        let [gates, strengths, decays] =
            [DeltaGate, DeltaStrength, DeltaDecay].map(|matrix| dense(layer, matrix, row));
        let (bias, rates) = (values(&layer[DeltaDecayBias]), values(&layer[DeltaRate]));
        let mut outputs = Row::new();
        for (head, state) in states.iter_mut().enumerate() {
            let of_key = head / (spec.num_value_heads / spec.num_key_heads) * key_dim;
            let query = unit(&queries[of_key..][..key_dim]);
            let key = unit(&keys[of_key..][..key_dim]);
            let value = &values_of_heads[head * value_dim..][..value_dim];
            let decay = (-rates[head].exp() * (decays[head] + bias[head]).exp().ln_1p()).exp();
            state.iter_mut().flatten().for_each(|x| *x *= decay);
            let column = |state: &[Row], j: usize, x: &[f64]| -> f64 {
                state.iter().zip(x).map(|(row, x)| row[j] * x).sum()
            };
            for j in 0..value_dim {
                let read = column(state, j, &key);
                let update = (value[j] - read) * sigmoid(strengths[head]);
                state
                    .iter_mut()
                    .zip(&key)
                    .for_each(|(row, key)| row[j] += key * update);
            }
            let scale = (key_dim as f64).sqrt();
            let out: Row = (0..value_dim)
                .map(|j| column(state, j, &query) / scale)
                .collect();
            let out = norm(spec.norm, &out, &layer[DeltaNorm], None);
            let gates = gates[head * value_dim..].iter();
            let gated = out.iter().zip(gates);
            outputs.extend(gated.map(|(x, gate)| x * activation(Activation::Silu, *gate)));
        }
        rows.push(dense(layer, DeltaO, &outputs));
    }
    rows
}

/// A gated convolution. A channel's weights have the newest token last.
fn short_convolution(spec: &ShortConvolutionSpec, layer: &LayerWeights, input: &[Row]) -> Vec<Row> {
    use LayerTensor::*;
    let num_channels = spec.num_channels;
    let kernel = Matrix::new(&layer[Convolution]);
    let biases = bias(layer, Convolution).map_or(vec![0.0; num_channels], values);
    let (mut gated, mut rows) = (Vec::<Row>::new(), Vec::new());
    for row in input {
        let projected = dense(layer, ConvolutionInput, row);
        let (before, others) = projected.split_at(num_channels);
        let (behind, x) = others.split_at(num_channels);
        gated.push(before.iter().zip(x).map(|(gate, x)| gate * x).collect());
        let channel = |channel: usize| {
            let weights = kernel.row(channel).iter().rev();
            let inputs = gated.iter().rev();
            let sum: f64 = weights.zip(inputs).map(|(w, x)| w * x[channel]).sum();
            (sum + biases[channel]) * behind[channel]
        };
        let outputs = (0..num_channels).map(channel).collect();
        rows.push(dense(layer, ConvolutionOutput, &outputs));
    }
    rows
}

fn mlp(spec: &MlpSpec, layer: &LayerWeights, which: Mlp, input: &Row) -> Row {
    let up = dense(layer, LayerTensor::Up(which), input);
    let inner: Row = match spec.is_gated {
        true => {
            let gate = dense(layer, LayerTensor::Gate(which), input);
            let pairs = gate.into_iter().zip(up);
            let pairs = pairs.map(|(gate, up)| match spec.gate_limit.map(f64::from) {
                Some(limit) => (gate.min(limit), up.clamp(-limit, limit) + 1.0),
                None => (gate, up),
            });
            let products = pairs.map(|(gate, up)| activation(spec.activation, gate) * up);
            products.collect()
        }
        false => up.iter().map(|&x| activation(spec.activation, x)).collect(),
    };
    dense(layer, LayerTensor::Down(which), &inner)
}

/// The feed-forward part is added to `residual`.
fn experts(spec: &ExpertSpec, layer: &LayerWeights, input: &Row, residual: &Row) -> Row {
    let own_norm = |row: &Row, tensor| match spec.own_norms {
        Some(spec) => norm(spec, row, &layer[tensor], None),
        None => row.clone(),
    };
    let (of_experts, of_router) = match spec.own_norms {
        Some(_) => {
            let root = (input.len() as f64).sqrt();
            let routed = own_norm(residual, LayerTensor::RouterNorm);
            let routed = routed.iter().map(|x| x / root).collect();
            (own_norm(residual, LayerTensor::ExpertNorm), routed)
        }
        None => (input.clone(), input.clone()),
    };
    let logits = dense(layer, LayerTensor::Router, &of_router);
    let scores: Row = match spec.scoring {
        ExpertScoring::Softmax => softmax(&logits),
        ExpertScoring::Sigmoid => logits.iter().map(|&x| sigmoid(x)).collect(),
    };
    let bias = layer.get(LayerTensor::SelectionBias);
    let ranks = biased(scores.clone(), bias.filter(|_| spec.selection_bias));
    let mut order: Vec<usize> = (0..spec.num_experts).collect();
    order.sort_by(|&a, &b| ranks[b].total_cmp(&ranks[a]));
    order.truncate(spec.num_experts_per_token);
    let sum: f64 = order.iter().map(|&expert| scores[expert]).sum();
    let mut out = vec![0.0; input.len()];
    for expert in order {
        let weight = match spec.normalises {
            true => scores[expert] / (sum + f64::from(spec.weight_sum_eps)),
            false => scores[expert],
        };
        let scale = match spec.has_scales {
            true => values(&layer[LayerTensor::ExpertScales])[expert],
            false => 1.0,
        };
        let weight = weight * f64::from(spec.weight_scale) * scale;
        let row = mlp(&spec.expert, layer, Mlp::Expert(expert), &of_experts);
        out.iter_mut()
            .zip(row)
            .for_each(|(out, y)| *out += weight * y);
    }
    out = own_norm(&out, LayerTensor::ExpertOutputNorm);
    if let Some(shared) = &spec.shared {
        let row = mlp(&shared.mlp, layer, Mlp::Shared, input);
        let row = own_norm(&row, LayerTensor::SharedOutputNorm);
        let weight = match shared.is_weighed {
            true => sigmoid(dot(&values(&layer[LayerTensor::SharedWeight]), input)),
            false => 1.0,
        };
        out.iter_mut()
            .zip(row)
            .for_each(|(out, y)| *out += weight * y);
    }
    out
}

fn norm(spec: NormSpec, x: &Row, weight: &Tensor, bias: Option<&Tensor>) -> Row {
    let n = x.len() as f64;
    let mean = match spec.kind {
        NormKind::Rms => 0.0,
        NormKind::Layer { .. } => x.iter().sum::<f64>() / n,
    };
    let variance = x.iter().map(|x| (x - mean).powi(2)).sum::<f64>() / n;
    let scale = 1.0 / (variance + f64::from(spec.eps)).sqrt();
    let row = x
        .iter()
        .zip(values(weight))
        .map(|(x, w)| (x - mean) * scale * w);
    biased(row.collect(), bias)
}

fn activation(activation: Activation, x: f64) -> f64 {
    match activation {
        Activation::Silu => x * sigmoid(x),
        Activation::Gelu => x * normal_distribution(x),
        Activation::GeluTanh => {
            let u = (2.0 / std::f64::consts::PI).sqrt() * (x + 0.044715 * x.powi(3));
            0.5 * x * (1.0 + u.tanh())
        }
        Activation::GeluSigmoid => x * sigmoid(1.702 * x),
    }
}

/// Φ(x), by the series `1/2 + φ(x) (x + x³/3 + x⁵/15 + …)`.
fn normal_distribution(x: f64) -> f64 {
    if x.abs() > 8.0 {
        return if x > 0.0 { 1.0 } else { 0.0 };
    }
    let (mut term, mut sum) = (x, x);
    for n in 1..200 {
        term *= x * x / (2 * n + 1) as f64;
        sum += term;
    }
    0.5 + sum * (-x * x / 2.0).exp() / (2.0 * std::f64::consts::PI).sqrt()
}

fn sigmoid(x: f64) -> f64 {
    1.0 / (1.0 + (-x).exp())
}

fn softmax(x: &[f64]) -> Row {
    let most = x.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    let powers: Row = x.iter().map(|x| (x - most).exp()).collect();
    let sum: f64 = powers.iter().sum();
    powers.iter().map(|power| power / sum).collect()
}

fn capped(mut x: Row, cap: Option<f32>) -> Row {
    if let Some(cap) = cap.map(f64::from) {
        x.iter_mut().for_each(|x| *x = cap * (*x / cap).tanh());
    }
    x
}

fn scaled(x: &[f64], scale: f32) -> Row {
    x.iter().map(|x| x * f64::from(scale)).collect()
}

fn biased(mut x: Row, bias: Option<&Tensor>) -> Row {
    if let Some(bias) = bias {
        add(&mut x, &values(bias));
    }
    x
}

fn add(x: &mut [f64], y: &[f64]) {
    x.iter_mut().zip(y).for_each(|(x, y)| *x += y);
}

fn dot(x: &[f64], y: &[f64]) -> f64 {
    x.iter().zip(y).map(|(x, y)| x * y).sum()
}

fn values(tensor: &Tensor) -> Row {
    let values = tensor.bytes().as_chunks::<4>().0;
    values
        .iter()
        .map(|&bytes| f64::from(f32::from_le_bytes(bytes)))
        .collect()
}

/// A matrix `[out, in]`.
struct Matrix {
    values: Row,
    num_columns: usize,
}

impl Matrix {
    fn new(tensor: &Tensor) -> Self {
        Self {
            values: values(tensor),
            num_columns: tensor.shape[1],
        }
    }

    fn row(&self, row: usize) -> &[f64] {
        &self.values[row * self.num_columns..][..self.num_columns]
    }

    fn times(&self, x: &[f64]) -> Row {
        let rows = self.values.chunks(self.num_columns);
        rows.map(|row| dot(row, x)).collect()
    }
}
