//! The number format of each matrix. Only this module decides it: packing, calibration, measurement and reports ask the
//! plan.
//!
//! Matrices that read the same input rows have one form. So there is one form for all matrices of the layers, one for
//! the experts' matrices, and one for the head. Three inputs decide: the wanted format (`--dtype`), the checkpoint's
//! formats, and whether the kernels multiply bf16.
//!
//! | wanted | the checkpoint stores | a matrix is packed as |
//! |---|---|---|
//! | f32, f16, bf16 | anything | floats of that type |
//! | int8 | anything | integers with a scale per output channel |
//! | int8-grouped | anything | groups of 8-bit integers, rounded here |
//! | int4 | the matrix in groups of 4 bits | these groups |
//! | int4 | anything else | groups of 4-bit integers, rounded here |
//! | nothing | groups worth keeping in a matrix with the same input rows | these groups; other matrices as for int8 |
//! | nothing | integers in all matrices with the same input rows | integers with a scale per output channel |
//! | nothing | anything else | floats of the stored type; f32 if the types of its parts differ |
//!
//! * Groups worth keeping have 4 bits, or 8 bits and a length of at least 128 but less than the row. Scaling shorter
//!   groups takes long, and per-channel scales lose little. Groups of 8 bits are kept only if the layers have no
//!   floats, or if the model has groups of 4 bits too: a checkpoint that quantises all matrices is chosen for its
//!   memory and speed.
//! * A packed matrix that combines several matrices of the checkpoint keeps groups if all its parts have groups worth
//!   keeping, with the same number of bits.
//! * Integers that are stored with a scale per output channel stay unchanged.
//! * Down projections in integers are transformed: their input, the output of the gated layer, has a few
//!   large elements that make 8-bit rounding of the others coarse, and a Hadamard transform spreads them.
//!   Stored 8-bit integers are then rounded again, which loses less than rows lose without the transform;
//!   stored 4-bit integers would lose more, and stay without it.
//! * Floats are in matrix tiles where all matrices of the same rows are bf16 and the kernels multiply
//!   bf16, otherwise in columns.

use corella_model::{DType, DeviceError, StoredMatrices, StoredMatrix, WeightFormat};

use crate::kernels::{Form, HADAMARD_ORDER};

use super::grouped_matrix::{GroupedPacking, MAX_GROUP_LEN};
use super::panel::Packing;

/// The place of a matrix in the model.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Role {
    /// A matrix of a layer whose input is a normed row or the output of attention.
    Projection,
    /// The projection of a gated layer's output.
    Down,
    /// The first projection of experts.
    Expert,
    /// The projection of the experts' gated outputs.
    ExpertDown,
    /// The output head, and a tied embedding with it. A separate embedding is read in its stored form.
    Head,
}

/// The formats of a model's matrices. The module's documentation has the rules.
#[derive(Clone, Copy, Debug)]
pub struct FormatPlan {
    /// The type of floating-point weights; `None` keeps the checkpoint's.
    dtype: Option<DType>,
    grouping: Grouping,
    /// The form of the layers' matrices.
    layers: Form,
    experts: Form,
    head: Form,
}

/// The matrices that are packed with group-wise scales.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Grouping {
    None,
    /// All matrices, in groups of this shape.
    All {
        bits: usize,
        group_len: usize,
    },
    /// Matrices stored in groups worth keeping.
    Stored,
}

impl FormatPlan {
    pub fn new(
        wanted: Option<WeightFormat>,
        stored: &StoredMatrices,
        multiplies_bf16: bool,
    ) -> Result<Self, DeviceError> {
        let grouping = match wanted {
            Some(WeightFormat::Int4 { group_len }) => Grouping::all(4, group_len)?,
            Some(WeightFormat::Int8Grouped { group_len }) => Grouping::all(8, group_len)?,
            Some(WeightFormat::Int8 | WeightFormat::Float(_)) => Grouping::None,
            None => match stored.integer_format() {
                Some(WeightFormat::Int4 { .. } | WeightFormat::Int8Grouped { .. }) => {
                    Grouping::Stored
                }
                _ => Grouping::None,
            },
        };
        let has_integers = |matrices: &[StoredMatrix]| match wanted {
            Some(format) => format.has_integers(),
            None => {
                let is_kept = |matrix: &StoredMatrix| matrix.kept_groups().is_some();
                (grouping == Grouping::Stored && matrices.iter().any(is_kept))
                    || matrices.iter().all(|matrix| matrix.is_quantised)
            }
        };
        let dtype = match wanted {
            Some(WeightFormat::Float(dtype)) => Some(dtype),
            _ => None,
        };
        let form = |matrices: &[StoredMatrix]| match has_integers(matrices) {
            true => Form::Int8,
            false => float_form(dtype, matrices, multiplies_bf16),
        };
        Ok(Self {
            dtype,
            grouping,
            layers: form(&stored.layers),
            experts: form(&stored.experts),
            head: form(&[stored.head]),
        })
    }

    /// The plan that decodes integers of the checkpoint to floats, and keeps the types of its floats.
    pub fn floats(stored: &StoredMatrices, multiplies_bf16: bool) -> Self {
        Self {
            dtype: None,
            grouping: Grouping::None,
            layers: float_form(None, &stored.layers, multiplies_bf16),
            experts: float_form(None, &stored.experts, multiplies_bf16),
            head: float_form(None, &[stored.head], multiplies_bf16),
        }
    }

    /// The form of a matrix's input rows.
    pub fn form(&self, role: Role) -> Form {
        match role {
            Role::Projection | Role::Down => self.layers,
            Role::Expert | Role::ExpertDown => self.experts,
            Role::Head => self.head,
        }
    }

    /// The packing of a matrix of `k` input channels that combines the output channels of `parts`.
    pub fn packing(&self, role: Role, parts: &[StoredMatrix], k: usize) -> Packing {
        let form = self.form(role);
        let mut groups = self.groups(parts, k);
        let is_stored = |bits| {
            let is_it = |groups: &GroupedPacking| groups.is_stored && groups.shape.bits == bits;
            groups.as_ref().is_some_and(is_it)
        };
        let hadamard = matches!(role, Role::Down | Role::ExpertDown)
            && form == Form::Int8
            && k.is_multiple_of(HADAMARD_ORDER)
            && !is_stored(4);
        if hadamard && is_stored(8) {
            groups = Some(GroupedPacking::rounded(8, k, MAX_GROUP_LEN));
        }
        Packing {
            k,
            dtype: self.dtype.unwrap_or_else(|| common_dtype(parts)),
            form,
            groups,
            hadamard,
        }
    }

    fn groups(&self, parts: &[StoredMatrix], k: usize) -> Option<GroupedPacking> {
        let stored = |bits| GroupedPacking::stored(bits, parts.iter().map(|part| part.groups), k);
        match self.grouping {
            Grouping::None => None,
            Grouping::All { bits: 4, group_len } => {
                Some(stored(4).unwrap_or_else(|| GroupedPacking::rounded(4, k, group_len)))
            }
            Grouping::All { bits, group_len } => Some(GroupedPacking::rounded(bits, k, group_len)),
            Grouping::Stored => stored(4).or_else(|| {
                let are_kept = parts.iter().all(|part| part.kept_groups().is_some());
                stored(8).filter(|_| are_kept)
            }),
        }
    }
}

impl Grouping {
    fn all(bits: usize, group_len: usize) -> Result<Self, DeviceError> {
        match group_len {
            32 | 64 | 128 => Ok(Self::All { bits, group_len }),
            _ => Err(DeviceError(format!(
                "groups of {group_len} weights are not supported; supported lengths are 32, 64 and 128"
            ))),
        }
    }
}

/// The form of floating-point matrices that read the same input rows.
fn float_form(dtype: Option<DType>, matrices: &[StoredMatrix], multiplies_bf16: bool) -> Form {
    let is_bf16 = |matrix: &StoredMatrix| dtype.unwrap_or(matrix.dtype) == DType::Bf16;
    match multiplies_bf16 && matrices.iter().all(is_bf16) {
        true => Form::MatrixTiles,
        false => Form::Columns,
    }
}

/// The type that all parts share, or f32, which holds every other type, if they differ.
fn common_dtype(parts: &[StoredMatrix]) -> DType {
    let mut dtypes = parts.iter().map(|part| part.dtype);
    let first = dtypes.next().unwrap_or(DType::F32);
    match dtypes.all(|dtype| dtype == first) {
        true => first,
        false => DType::F32,
    }
}

#[cfg(test)]
mod tests;
