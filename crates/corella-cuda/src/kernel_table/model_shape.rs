//! Shapes of common models, for which kernels are compiled through the executor's loading functions.

use corella_model::{
    Activation, AttentionSpec, DType, DeviceError, ElementOrder, KvFormat, KvGeometry, KvLayers,
    NormSpec, QkNorm, RotarySpec,
};

use crate::device::{DevicePointer, Element, SharedDevice};
use crate::kernels::activation::ActivationKernel;
use crate::kernels::attention::AttentionKernels;
use crate::kernels::embed::EmbedKernel;
use crate::kernels::linear::{Linear, LinearWeights};
use crate::kernels::norm::NormKernel;
use crate::kernels::packed_weight::WeightLayout;
use crate::kernels::page::PageKernels;
use crate::kernels::progress::ProgressKernel;
use crate::kernels::rotary::RotaryKernel;
use crate::kernels::sample::DrawKernels;

struct ModelShape {
    hidden_size: usize,
    num_heads: usize,
    num_kv_heads: usize,
    head_dim: usize,
    has_rotary: bool,
    qk_norm: Option<QkNorm>,
    activation: Activation,
    is_gated: bool,
}

const RMS: NormSpec = NormSpec::rms(1e-6);

const LLAMA_3_8B: ModelShape = ModelShape {
    hidden_size: 4096,
    num_heads: 32,
    num_kv_heads: 8,
    head_dim: 128,
    has_rotary: true,
    qk_norm: None,
    activation: Activation::Silu,
    is_gated: true,
};

const MODEL_SHAPES: [ModelShape; 6] = [
    LLAMA_3_8B,
    // Llama 3.2 1B.
    ModelShape {
        hidden_size: 2048,
        head_dim: 64,
        ..LLAMA_3_8B
    },
    // Qwen3 0.6B.
    ModelShape {
        hidden_size: 1024,
        num_heads: 16,
        qk_norm: Some(QkNorm::Heads(RMS)),
        ..LLAMA_3_8B
    },
    // Phi-3 mini.
    ModelShape {
        hidden_size: 3072,
        num_kv_heads: 32,
        head_dim: 96,
        ..LLAMA_3_8B
    },
    // Gemma 2 9B.
    ModelShape {
        hidden_size: 3584,
        num_heads: 16,
        head_dim: 256,
        activation: Activation::GeluTanh,
        ..LLAMA_3_8B
    },
    // GPT-2.
    ModelShape {
        hidden_size: 768,
        num_heads: 12,
        num_kv_heads: 12,
        head_dim: 64,
        has_rotary: false,
        activation: Activation::GeluTanh,
        is_gated: false,
        ..LLAMA_3_8B
    },
];

/// Weight formats of checkpoints.
const LAYOUTS: [WeightLayout; 6] = [
    WeightLayout::Floats,
    WeightLayout::Int8Channels,
    WeightLayout::Int8Groups { group_len: 32 },
    WeightLayout::Int4Groups {
        group_len: 32,
        has_minimum: false,
    },
    WeightLayout::Int4Groups {
        group_len: 32,
        has_minimum: true,
    },
    WeightLayout::Int4Groups {
        group_len: 128,
        has_minimum: true,
    },
];

/// Loads all kernels of all shapes in bf16, and for tests the kernels of one shape in f32.
pub fn load_all(device: &SharedDevice) -> Result<(), DeviceError> {
    for shape in &MODEL_SHAPES {
        for format in [KvFormat::Float(DType::Bf16), KvFormat::Int8] {
            load(device, shape, Element::Bf16, format, &LAYOUTS)?;
        }
    }
    let format = KvFormat::Float(DType::F32);
    load(device, &LLAMA_3_8B, Element::F32, format, &LAYOUTS[..1])
}

fn load(
    device: &SharedDevice,
    shape: &ModelShape,
    element: Element,
    format: KvFormat,
    layouts: &[WeightLayout],
) -> Result<(), DeviceError> {
    let rotary = RotarySpec::plain(1e4, shape.head_dim);
    let attention = AttentionSpec {
        rotary: shape.has_rotary.then(|| rotary.clone()),
        qk_norm: shape.qk_norm,
        ..AttentionSpec::plain(shape.num_heads, shape.num_kv_heads, shape.head_dim, rotary)
    };
    let geometry = KvGeometry {
        num_layers: 1,
        layers: KvLayers::one(1),
        num_kv_heads: shape.num_kv_heads as u32,
        head_dim: shape.head_dim as u32,
        page_size: 16,
        num_pages: 1,
        format,
        order: ElementOrder::Rows,
    };
    RotaryKernel::load(device, &attention, &geometry, element)?;
    AttentionKernels::load(device, &attention, &geometry, element)?;
    ActivationKernel::load(device, shape.activation, shape.is_gated, element)?;
    NormKernel::load(device, shape.hidden_size, Element::F32, element)?;
    NormKernel::load(device, shape.hidden_size, Element::F32, Element::F32)?;
    EmbedKernel::load(device, element)?;
    PageKernels::load(device, &geometry)?;
    ProgressKernel::load(device)?;
    DrawKernels::load(device)?;
    for &layout in layouts {
        let weights = LinearWeights {
            n: shape.hidden_size,
            k: shape.hidden_size,
            layout,
            weight: DevicePointer::NULL,
            group_scales: DevicePointer::NULL,
            group_minimums: DevicePointer::NULL,
            channel_scales: DevicePointer::NULL,
            bias: DevicePointer::NULL,
        };
        Linear::load(device, weights, element)?;
        // The activation is a small part of the code, so kernels for integers are compiled with only one activation.
        let is_typical = shape.activation == Activation::Silu || layout == WeightLayout::Floats;
        if shape.is_gated && is_typical {
            Linear::load_gated(device, weights, shape.activation, element)?;
        }
    }
    Ok(())
}
