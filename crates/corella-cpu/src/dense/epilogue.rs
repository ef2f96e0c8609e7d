//! The epilogue of a dense layer: it processes the outputs in the pass that computes them.

use corella_model::{Activation, MlpSpec};

use super::buffer::Buffer;
use super::packed_rows::PackedRows;

/// The processing of a dense layer's outputs.
#[derive(Clone, Copy)]
pub enum Epilogue<'a> {
    /// `out[row][channel] = value`
    Store(&'a Buffer),
    /// `out[row][channel] = cap * tanh(value * scale / cap)`, or only `value * scale` without a cap.
    StoreShaped {
        out: &'a Buffer,
        scale: f32,
        soft_cap: Option<f32>,
    },
    /// `out[row][channel] += value`
    Add(&'a Buffer),
    /// `out[row][channel] += value * scale`
    AddScaled(&'a Buffer, f32),
    /// SwiGLU: lanes 0–15 of a panel are gates, lanes 16–31 the values they gate. `out` is the input of the next layer.
    SiluMul(&'a PackedRows),
    /// Applies an MLP's activation to the outputs of its first projection: to all lanes, or to the gates, which are
    /// then multiplied by the gated values as in `SiluMul`.
    Activate {
        out: &'a PackedRows,
        mlp: &'a MlpSpec,
    },
}

impl<'a> Epilogue<'a> {
    /// Adds the outputs to `out`, multiplied by `scale`.
    pub fn add(out: &'a Buffer, scale: f32) -> Self {
        match scale == 1.0 {
            true => Self::Add(out),
            false => Self::AddScaled(out, scale),
        }
    }

    /// Stores logits.
    pub fn logits(out: &'a Buffer, scale: f32, soft_cap: Option<f32>) -> Self {
        match scale == 1.0 && soft_cap.is_none() {
            true => Self::Store(out),
            false => Self::StoreShaped {
                out,
                scale,
                soft_cap,
            },
        }
    }

    /// Stores the input of a down projection.
    pub fn activate(out: &'a PackedRows, mlp: &'a MlpSpec) -> Self {
        match (mlp.activation, mlp.gate_limit) {
            (Activation::Silu, None) if mlp.is_gated => Self::SiluMul(out),
            _ => Self::Activate { out, mlp },
        }
    }
}
