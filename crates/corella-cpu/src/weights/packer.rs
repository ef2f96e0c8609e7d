//! Packs matrices of a checkpoint, or reads the result of an earlier start.

use std::io;

use corella_model::{DeviceError, Tensor};

use super::format_plan::{FormatPlan, Role};
use super::image_reader::ImageReader;
use super::lane::Lane;
use super::packed_layer::lanes;
use super::panel::{PackedMatrix, Packing};
use crate::kernels::Kernels;
use crate::system::ThreadPool;

/// A matrix `[out, in]` of the checkpoint with its bias.
pub(super) type Part<'a> = (&'a Tensor, Option<&'a Tensor>);

pub(super) struct Packer<'a> {
    pub(super) plan: FormatPlan,
    /// The image of packed weights; `None` once it has proved to hold other weights.
    pub(super) image: Option<ImageReader>,
    pub(super) kernels: &'a Kernels,
    pub(super) pool: &'a mut ThreadPool,
}

impl Packer<'_> {
    /// Packs several matrices as one, whose output channels are the parts' output channels in order.
    pub(super) fn matrix(
        &mut self,
        role: Role,
        parts: &[Part<'_>],
        k: usize,
    ) -> Result<PackedMatrix, DeviceError> {
        let lanes: Vec<_> = parts.iter().copied().flat_map(lanes).collect();
        self.pack(role, parts, &lanes, k)
    }

    /// Packs the rows of `parts` in the order of `lanes`, or reads the result of an earlier start.
    pub(super) fn pack(
        &mut self,
        role: Role,
        parts: &[Part<'_>],
        lanes: &[Option<Lane<'_>>],
        k: usize,
    ) -> Result<PackedMatrix, DeviceError> {
        let stored: Vec<_> = parts.iter().map(|(weight, _)| (*weight).into()).collect();
        let packing = self.plan.packing(role, &stored, k);
        let packed = self.pack_or_read(lanes, packing);
        parts.iter().for_each(|(weight, _)| weight.release());
        packed
    }

    pub(super) fn pack_or_read(
        &mut self,
        lanes: &[Option<Lane<'_>>],
        packing: Packing,
    ) -> Result<PackedMatrix, DeviceError> {
        let (kernels, pool) = (self.kernels, &mut *self.pool);
        if let Some(image) = self.image.as_mut().filter(|_| !packing.copies(lanes)) {
            let read = PackedMatrix::read(lanes, packing, image, kernels, pool);
            if let Some(matrix) = read.map_err(out_of_memory)? {
                return Ok(matrix);
            }
            self.image = None;
        }
        PackedMatrix::pack(lanes, packing, kernels, pool).map_err(out_of_memory)
    }
}

fn out_of_memory(error: io::Error) -> DeviceError {
    DeviceError(format!("no memory for the weights: {error}"))
}

pub(super) fn check_shape(name: &str, tensor: &Tensor, shape: &[usize]) -> Result<(), DeviceError> {
    tensor.check_shape(name, shape).map_err(DeviceError)
}

/// Checks a tensor that the checkpoint must have if it is `wanted`, and must not have otherwise.
pub(super) fn optional<'a>(
    name: &str,
    tensor: &'a Option<Tensor>,
    wanted: bool,
    shape: &[usize],
) -> Result<Option<&'a Tensor>, DeviceError> {
    match tensor {
        Some(tensor) if wanted => check_shape(name, tensor, shape).map(|()| Some(tensor)),
        None if wanted => Err(DeviceError(format!("{name} is missing"))),
        Some(_) => Err(DeviceError(format!(
            "the checkpoint has {name}, but the model does not use it"
        ))),
        None => Ok(None),
    }
}
