//! A decoder's weights on the device.
//!
//! Matrices with a common input lie one after the other and are multiplied as one: queries, keys and values; gates and
//! the gated values.

use corella_model::{
    DType, DecoderSpec, DecoderWeights, DeviceError, GroupedRow, LayerSpec, LayerTensor,
    LayerWeights, NormKind, NormSpec, OnLayer, Tensor,
};
use half::{bf16, f16};

use crate::device::{DeviceBuffer, DevicePointer, Element, PinnedBuffer, SharedDevice, Stream};
use crate::kernels::linear::{Linear, LinearWeights};
use crate::kernels::norm::DeviceNorm;
use crate::kernels::packed_weight::{PackedWeight, WeightLayout};

/// All weights of a decoder.
pub struct Weights {
    pub embed: DeviceBuffer,
    pub positions: Option<DeviceBuffer>,
    pub layers: Vec<LayerOnDevice>,
    pub norm: Norm,
    pub head: Matrix,
    num_bytes: usize,
}

/// The weights of a layer, by their role.
pub struct LayerOnDevice {
    pub attention_before: Option<Norm>,
    pub attention_after: Option<Norm>,
    pub mlp_before: Option<Norm>,
    pub mlp_after: Option<Norm>,
    pub qkv: Matrix,
    pub query_norm: Option<DeviceBuffer>,
    pub key_norm: Option<DeviceBuffer>,
    pub output: Matrix,
    pub gate_up: Matrix,
    pub down: Matrix,
}

/// A norm's weights, in f32.
pub struct Norm {
    spec: NormSpec,
    weight: DeviceBuffer,
    bias: Option<DeviceBuffer>,
}

/// A matrix, the bias of its outputs, and the kernels that multiply by it.
pub struct Matrix {
    pub linear: Linear,
    /// Whether the outputs are activated and multiplied with the gated values.
    pub is_activated: bool,
    /// The memory of `linear`; empty for a tied head, which uses the embedding's.
    _buffers: Vec<DeviceBuffer>,
}

impl Norm {
    pub fn on_device(&self) -> DeviceNorm {
        DeviceNorm {
            spec: self.spec,
            weight: self.weight.pointer(),
            bias: { self.bias.as_ref() }.map_or(DevicePointer::NULL, DeviceBuffer::pointer),
        }
    }
}

impl Weights {
    /// Uploads all weights, with matrices in the type of activations. Integers of a checkpoint stay integers, except in
    /// f32. `fuses_gates` applies activation functions in the product of gates, which the vendor's library cannot do.
    pub fn upload(
        device: &SharedDevice,
        spec: &DecoderSpec,
        weights: &DecoderWeights,
        element: Element,
        fuses_gates: bool,
        on_layer: OnLayer<'_>,
    ) -> Result<Self, DeviceError> {
        let mut upload = Upload::new(device, element, fuses_gates)?;
        let (vocab, hidden) = (spec.vocab_size, spec.hidden_size);
        let embed = upload.rows(&[(&weights.embed, vocab)], hidden)?;
        let positions = match &weights.positions {
            Some(positions) => Some(upload.rows(&[(positions, spec.max_position)], hidden)?),
            None => None,
        };
        let mut layers = Vec::new();
        for (layer, weights) in spec.layers.iter().zip(&weights.layers) {
            layers.push(upload.layer(layer, weights, hidden)?);
            on_layer(layers.len());
        }
        let norm = upload.norm(spec.norm, &weights.norm, weights.norm_bias.as_ref())?;
        let head = match &weights.lm_head {
            Some(head) => upload.matrix_of(&[(head, vocab)], None, hidden)?,
            None => {
                let weights = upload.floats_at(embed.pointer(), [vocab, hidden], None);
                upload.with_kernels(weights, Vec::new())?
            }
        };
        Ok(Self {
            num_bytes: upload.num_bytes,
            embed,
            positions,
            layers,
            norm,
            head,
        })
    }

    pub fn num_bytes(&self) -> usize {
        self.num_bytes
    }

    /// All matrices of the layers, and the head.
    pub fn matrices(&self) -> impl Iterator<Item = &Matrix> {
        let of_layers = self
            .layers
            .iter()
            .flat_map(|layer| [&layer.qkv, &layer.output, &layer.gate_up, &layer.down]);
        of_layers.chain(std::iter::once(&self.head))
    }
}

/// Copies tensors to the device through pinned memory.
struct Upload<'a> {
    device: &'a SharedDevice,
    element: Element,
    fuses_gates: bool,
    staging: PinnedBuffer<u8>,
    num_bytes: usize,
}

/// The size of the pinned memory for tensors, which is enough for copies at full speed.
const STAGING_BYTES: usize = 16 << 20;

impl<'a> Upload<'a> {
    fn new(
        device: &'a SharedDevice,
        element: Element,
        fuses_gates: bool,
    ) -> Result<Self, DeviceError> {
        Ok(Self {
            device,
            element,
            fuses_gates,
            staging: PinnedBuffer::new(device, STAGING_BYTES)?,
            num_bytes: 0,
        })
    }

    fn layer(
        &mut self,
        spec: &LayerSpec,
        weights: &LayerWeights,
        hidden: usize,
    ) -> Result<LayerOnDevice, DeviceError> {
        use LayerTensor as T;
        let attention = &spec.attention;
        let (query, key) = (attention.query_len(), attention.kv_len());
        let mlp = spec.feed_forward.mlp();
        let inner = mlp.intermediate_size;
        let mut norm = |norm: Option<NormSpec>, tensor: T| match norm {
            Some(norm) => {
                let bias = tensor.bias().and_then(|bias| weights.get(bias));
                self.norm(norm, &weights[tensor], bias).map(Some)
            }
            None => Ok(None),
        };
        let (of_attention, of_mlp) = (&spec.attention_norms, &spec.feed_forward_norms);
        let attention_before = norm(of_attention.before, T::AttentionNorm)?;
        let attention_after = norm(of_attention.after, T::AttentionOutputNorm)?;
        let mlp_before = norm(of_mlp.before, T::MlpNorm)?;
        let mlp_after = norm(of_mlp.after, T::MlpOutputNorm)?;
        let mut vector = |tensor: T| match weights.get(tensor) {
            Some(tensor) => self.floats(tensor).map(Some),
            None => Ok(None),
        };
        let (query_norm, key_norm) = (vector(T::QNorm)?, vector(T::KNorm)?);
        let qkv = [(T::Q, query), (T::K, key), (T::V, key)];
        let gate_up = [(T::GATE, inner), (T::UP, inner)];
        let gate_up = if mlp.is_gated {
            &gate_up[..]
        } else {
            &gate_up[1..]
        };
        let mut gate_up = self.matrix(weights, gate_up, hidden)?;
        if self.fuses_gates && mlp.is_gated && Linear::can_gate(inner) {
            let weights = *gate_up.linear.weights();
            let (activation, element) = (mlp.activation, self.element);
            gate_up.linear = Linear::load_gated(self.device, weights, activation, element)?;
            gate_up.is_activated = true;
        }
        Ok(LayerOnDevice {
            gate_up,
            attention_before,
            attention_after,
            mlp_before,
            mlp_after,
            query_norm,
            key_norm,
            qkv: self.matrix(weights, &qkv, hidden)?,
            output: self.matrix(weights, &[(T::O, hidden)], query)?,
            down: self.matrix(weights, &[(T::DOWN, hidden)], inner)?,
        })
    }

    fn norm(
        &mut self,
        spec: NormSpec,
        weight: &Tensor,
        bias: Option<&Tensor>,
    ) -> Result<Norm, DeviceError> {
        let bias = bias.filter(|_| spec.kind == NormKind::Layer { bias: true });
        Ok(Norm {
            spec,
            weight: self.floats(weight)?,
            bias: match bias {
                Some(bias) => Some(self.floats(bias)?),
                None => None,
            },
        })
    }

    /// Matrices with a common input as one, with their biases. A matrix without a bias gets zeros.
    fn matrix(
        &mut self,
        weights: &LayerWeights,
        parts: &[(LayerTensor, usize)],
        k: usize,
    ) -> Result<Matrix, DeviceError> {
        let tensors: Vec<_> = parts.iter().map(|&(part, n)| (&weights[part], n)).collect();
        let bias_of = |part: LayerTensor| part.bias().and_then(|bias| weights.get(bias));
        let has_bias = parts.iter().any(|&(part, _)| bias_of(part).is_some());
        let bias = has_bias.then(|| {
            let n = parts.iter().map(|(_, n)| n).sum();
            let (mut values, mut first) = (vec![0.0; n], 0);
            for &(part, len) in parts {
                if let Some(bias) = bias_of(part) {
                    read_vector(bias, &mut values[first..first + len]);
                }
                first += len;
            }
            values
        });
        self.matrix_of(&tensors, bias.as_deref(), k)
    }

    /// Concatenates tensors in the form that the kernels multiply: integers if the tensors have a common layout, or
    /// else floats.
    fn matrix_of(
        &mut self,
        parts: &[(&Tensor, usize)],
        bias: Option<&[f32]>,
        k: usize,
    ) -> Result<Matrix, DeviceError> {
        let n = parts.iter().map(|(_, n)| n).sum();
        let bias = match bias {
            Some(bias) => Some(self.copy(bytes_of(bias))?),
            None => None,
        };
        let Some(layout) = self.layout(parts, k) else {
            let owned = self.rows(parts, k)?;
            let weights = self.floats_at(owned.pointer(), [n, k], bias.as_ref());
            return self.with_kernels(weights, bias.into_iter().chain([owned]).collect());
        };
        let mut packed = PackedWeight::new(layout, k);
        let mut row = GroupedRow::default();
        for &(tensor, n) in parts {
            let stored_len = tensor.group_format().map_or(k, |format| format.group_len);
            for index in 0..n {
                tensor.read_groups(index, &mut row);
                packed.push(&row, stored_len);
            }
            tensor.release();
        }
        let halves = |values: &[f16]| {
            values
                .iter()
                .flat_map(|x| x.to_le_bytes())
                .collect::<Vec<_>>()
        };
        let integers = self.copy(&packed.integers)?;
        let scales = self.copy(&halves(&packed.scales))?;
        let minimums = self.copy(&halves(&packed.minimums))?;
        let channels = self.copy(bytes_of(&packed.channel_scales))?;
        let weights = LinearWeights {
            layout,
            weight: integers.pointer(),
            group_scales: scales.pointer(),
            group_minimums: minimums.pointer(),
            channel_scales: channels.pointer(),
            ..self.floats_at(DevicePointer::NULL, [n, k], bias.as_ref())
        };
        let buffers = [integers, scales, minimums, channels];
        self.with_kernels(weights, bias.into_iter().chain(buffers).collect())
    }

    /// The kernels' layout for the integers of tensors; `None` if the tensors are multiplied as floats, because
    /// activations are f32 or the tensors have no common layout.
    fn layout(&self, parts: &[(&Tensor, usize)], k: usize) -> Option<WeightLayout> {
        if self.element == Element::F32 {
            return None;
        }
        let mut layouts = parts.iter().map(|(tensor, _)| layout_of(tensor, k));
        let first = layouts.next()??;
        layouts.try_fold(first, |layout, other| common_layout(layout, other?))
    }

    fn floats_at(
        &self,
        weight: DevicePointer,
        [n, k]: [usize; 2],
        bias: Option<&DeviceBuffer>,
    ) -> LinearWeights {
        LinearWeights {
            n,
            k,
            layout: WeightLayout::Floats,
            weight,
            group_scales: DevicePointer::NULL,
            group_minimums: DevicePointer::NULL,
            channel_scales: DevicePointer::NULL,
            bias: bias.map_or(DevicePointer::NULL, DeviceBuffer::pointer),
        }
    }

    fn with_kernels(
        &self,
        weights: LinearWeights,
        buffers: Vec<DeviceBuffer>,
    ) -> Result<Matrix, DeviceError> {
        Ok(Matrix {
            linear: Linear::load(self.device, weights, self.element)?,
            is_activated: false,
            _buffers: buffers,
        })
    }

    /// The rows of several matrices, one after the other, in the type of activations.
    fn rows(&mut self, parts: &[(&Tensor, usize)], k: usize) -> Result<DeviceBuffer, DeviceError> {
        let row_bytes = k * self.element.num_bytes();
        let num_rows: usize = parts.iter().map(|(_, n)| n).sum();
        let buffer = DeviceBuffer::new(self.device, num_rows * row_bytes).map_err(no_memory)?;
        self.num_bytes += buffer.num_bytes();
        let at_once = (STAGING_BYTES / row_bytes).max(1);
        let (mut scratch, mut values) = (Vec::new(), vec![0.0; k]);
        let mut to = buffer.pointer();
        for &(tensor, n) in parts {
            assert_eq!(
                tensor.shape,
                [n, k],
                "a matrix has another shape than its part"
            );
            for first in (0..n).step_by(at_once) {
                let rows = first..n.min(first + at_once);
                let num_bytes = rows.len() * row_bytes;
                if self.staging_len() < num_bytes {
                    self.staging = PinnedBuffer::new(self.device, num_bytes)?;
                }
                // SAFETY: the previous copy is done.
                let staged = unsafe { self.staging.as_mut_slice() };
                for (row, out) in rows.zip(staged.chunks_exact_mut(row_bytes)) {
                    match (self.element, tensor.dtype) {
                        (Element::Bf16, DType::Bf16) | (Element::F32, DType::F32) => {
                            out.copy_from_slice(tensor.row(row, &mut scratch));
                        }
                        (Element::Bf16, _) => {
                            tensor.read_row(row, &mut scratch, &mut values);
                            for (out, value) in out.as_chunks_mut().0.iter_mut().zip(&values) {
                                *out = bf16::from_f32(*value).to_le_bytes();
                            }
                        }
                        (Element::F32, _) => {
                            tensor.read_row(row, &mut scratch, &mut values);
                            out.copy_from_slice(bytes_of(&values));
                        }
                    }
                }
                self.copy_staged(to, num_bytes)?;
                to = to.add(num_bytes);
            }
            tensor.release();
        }
        Ok(buffer)
    }

    /// A vector in f32.
    fn floats(&mut self, tensor: &Tensor) -> Result<DeviceBuffer, DeviceError> {
        let mut values = vec![0.0; tensor.shape.iter().product()];
        read_vector(tensor, &mut values);
        self.copy(bytes_of(&values))
    }

    fn copy(&mut self, bytes: &[u8]) -> Result<DeviceBuffer, DeviceError> {
        let buffer = DeviceBuffer::new(self.device, bytes.len()).map_err(no_memory)?;
        self.num_bytes += bytes.len();
        if self.staging_len() < bytes.len() {
            self.staging = PinnedBuffer::new(self.device, bytes.len())?;
        }
        // SAFETY: the previous copy is done.
        unsafe { self.staging.as_mut_slice()[..bytes.len()].copy_from_slice(bytes) };
        self.copy_staged(buffer.pointer(), bytes.len())?;
        Ok(buffer)
    }

    fn staging_len(&self) -> usize {
        // SAFETY: no copy is under way.
        unsafe { self.staging.as_slice().len() }
    }

    fn copy_staged(&self, to: DevicePointer, num_bytes: usize) -> Result<(), DeviceError> {
        let from = self.staging.pointer();
        // SAFETY: the caller has filled the staging memory, and waits for the copy here.
        unsafe { self.device.copy(Stream::Compute, to, from, num_bytes)? };
        self.device
            .synchronize(self.device.record(Stream::Compute)?)
    }
}

/// The layout for a stored tensor; `None` for floats, and for integers that kernels do not read.
fn layout_of(tensor: &Tensor, k: usize) -> Option<WeightLayout> {
    let format = tensor.group_format()?;
    let group_len = WeightLayout::group_len_within(format.group_len, k);
    match format.bits {
        8 if tensor.has_int8_rows() => Some(WeightLayout::Int8Channels),
        8 if !format.has_minimum => Some(WeightLayout::Int8Groups {
            group_len: group_len?,
        }),
        4 if !format.is_fp4 => Some(WeightLayout::Int4Groups {
            group_len: group_len?,
            has_minimum: format.has_minimum,
        }),
        _ => None,
    }
}

/// The layout in which rows of both layouts can be multiplied.
fn common_layout(a: WeightLayout, b: WeightLayout) -> Option<WeightLayout> {
    use WeightLayout::{Int4Groups, Int8Channels, Int8Groups};
    match (a, b) {
        (Int8Channels, Int8Channels) => Some(a),
        (Int8Groups { group_len: a }, Int8Groups { group_len: b }) => Some(Int8Groups {
            group_len: a.min(b),
        }),
        (
            Int4Groups {
                group_len: a,
                has_minimum: of_a,
            },
            Int4Groups {
                group_len: b,
                has_minimum: of_b,
            },
        ) => Some(Int4Groups {
            group_len: a.min(b),
            has_minimum: of_a || of_b,
        }),
        _ => None,
    }
}

fn read_vector(tensor: &Tensor, out: &mut [f32]) {
    let bytes = tensor.bytes();
    match tensor.dtype {
        DType::F32 => {
            for (value, bytes) in out.iter_mut().zip(bytes.as_chunks().0) {
                *value = f32::from_le_bytes(*bytes);
            }
        }
        DType::F16 => {
            for (value, bytes) in out.iter_mut().zip(bytes.as_chunks().0) {
                *value = f16::from_le_bytes(*bytes).to_f32();
            }
        }
        DType::Bf16 => {
            for (value, bytes) in out.iter_mut().zip(bytes.as_chunks().0) {
                *value = bf16::from_le_bytes(*bytes).to_f32();
            }
        }
    }
}

fn bytes_of(values: &[f32]) -> &[u8] {
    // SAFETY: floats have no padding, and any bytes may be read.
    unsafe { std::slice::from_raw_parts(values.as_ptr().cast(), size_of_val(values)) }
}

fn no_memory(error: DeviceError) -> DeviceError {
    DeviceError(format!("no memory for the weights: {error}"))
}
