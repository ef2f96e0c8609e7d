//! The kernels of a model's layers: layers that differ only in their weights share them.

use corella_model::{
    Activation, AttentionSpec, DecoderSpec, DeviceError, KvGeometry, KvLayer, QkNorm, RotarySpec,
};

use crate::device::{DeviceBuffer, Element, PinnedBuffer, SharedDevice, Stream};
use crate::kernels::activation::ActivationKernel;
use crate::kernels::attention::AttentionKernels;
use crate::kernels::rotary::{RotaryKernel, rotary_angles};

pub struct LayerKernels {
    /// The parts of each layer.
    pub layers: Vec<LayerParts>,
    /// The kernels, each with its angles.
    pub rotaries: Vec<(RotaryKernel, DeviceBuffer)>,
    pub attentions: Vec<AttentionKernels>,
    pub activations: Vec<ActivationKernel>,
}

/// The indices of a layer's shared parts.
pub struct LayerParts {
    pub rotary: usize,
    pub attention: usize,
    pub activation: usize,
    pub kv: KvLayer,
    /// The number of layers of a page that are done in all KV groups once this layer has its keys and values.
    pub num_page_layers_done: usize,
}

type RotaryKind = (Option<RotarySpec>, Option<QkNorm>);
type ActivationKind = (Activation, bool);

impl LayerKernels {
    /// Loads the kernels of layers that store KV at `kv_layers`.
    pub fn load(
        device: &SharedDevice,
        spec: &DecoderSpec,
        kv_layers: &[KvLayer],
        geometry: &KvGeometry,
        element: Element,
        max_model_len: usize,
    ) -> Result<Self, DeviceError> {
        let num_page_layers = geometry.num_layers as usize;
        let (mut rotaries, mut attentions, mut activations) = (Vec::new(), Vec::new(), Vec::new());
        let mut kinds: (Vec<RotaryKind>, Vec<AttentionSpec>, Vec<ActivationKind>) =
            Default::default();
        let mut layers = Vec::new();
        for (index, (layer, &kv_layer)) in spec.layers.iter().zip(kv_layers).enumerate() {
            let attention = &layer.attention;
            let mut unrotated = attention.clone();
            let kind = (unrotated.rotary.take(), unrotated.qk_norm.take());
            let (rotary, is_new) = index_or_add(&mut kinds.0, kind);
            if is_new {
                rotaries.push((
                    RotaryKernel::load(device, attention, geometry, element)?,
                    angles(device, attention.rotary.as_ref(), max_model_len)?,
                ));
            }
            let (attention_kind, is_new) = index_or_add(&mut kinds.1, unrotated);
            if is_new {
                attentions.push(AttentionKernels::load(
                    device, attention, geometry, element,
                )?);
            }
            let mlp = layer.feed_forward.mlp();
            let kind = (mlp.activation, mlp.is_gated);
            let (activation, is_new) = index_or_add(&mut kinds.2, kind);
            if is_new {
                activations.push(ActivationKernel::load(device, kind.0, kind.1, element)?);
            }
            let to_come = kv_layers[index + 1..].iter().map(|layer| layer.in_page);
            layers.push(LayerParts {
                rotary,
                attention: attention_kind,
                activation,
                kv: kv_layer,
                num_page_layers_done: to_come.min().unwrap_or(num_page_layers),
            });
        }
        Ok(Self {
            layers,
            rotaries,
            attentions,
            activations,
        })
    }
}

/// The index of an element of a list, and whether it was added because it was missing.
fn index_or_add<T: PartialEq>(list: &mut Vec<T>, element: T) -> (usize, bool) {
    match list.iter().position(|other| *other == element) {
        Some(index) => (index, false),
        None => {
            list.push(element);
            (list.len() - 1, true)
        }
    }
}

/// The angles of RoPE for contexts of up to `max_context` tokens, in the layout of `rotary_angles`.
fn angles(
    device: &SharedDevice,
    rotary: Option<&RotarySpec>,
    max_context: usize,
) -> Result<DeviceBuffer, DeviceError> {
    let angles = rotary.map_or(Vec::new(), |rotary| rotary_angles(rotary, max_context));
    let buffer = DeviceBuffer::new(device, size_of_val(&*angles))?;
    let mut staged = PinnedBuffer::new(device, angles.len())?;
    // SAFETY: the device has no access to the memory yet.
    unsafe { staged.as_mut_slice() }.copy_from_slice(&angles);
    let num_bytes = buffer.num_bytes();
    if num_bytes > 0 {
        // SAFETY: the copy is waited for, and the buffer has no other user.
        unsafe {
            device.copy(
                Stream::Compute,
                buffer.pointer(),
                staged.pointer(),
                num_bytes,
            )?
        };
        device.synchronize(device.record(Stream::Compute)?)?;
    }
    Ok(buffer)
}
