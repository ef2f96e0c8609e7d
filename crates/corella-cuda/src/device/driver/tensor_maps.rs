//! Tensor maps, which the driver encodes without a GPU.

use std::ffi::c_void;

use corella_model::DeviceError;
use cudarc::driver::sys;

use super::calls::check;
use crate::device::{Tensor, TensorMap};

/// The most dimensions that a tensor map has.
const MAX_DIMS: usize = 5;

pub fn encode(tensor: &Tensor) -> Result<TensorMap, DeviceError> {
    let num_dims = tensor.dims.len();
    assert!((1..=MAX_DIMS).contains(&num_dims), "{tensor:?}");
    let (mut lens, mut strides, mut box_lens) = ([0; MAX_DIMS], [0; MAX_DIMS], [0; MAX_DIMS]);
    for (index, dim) in tensor.dims.iter().enumerate() {
        lens[index] = dim.len as u64;
        strides[index] = dim.stride_bytes as u64;
        box_lens[index] = dim.box_len as u32;
    }
    let mut map = sys::CUtensorMap { opaque: [0; 16] };
    // SAFETY: the driver is loaded; the arrays have a number for each dimension, the strides for all except the
    // innermost.
    let result = unsafe {
        sys::cuTensorMapEncodeTiled(
            &mut map,
            sys::CUtensorMapDataType::CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
            num_dims as u32,
            tensor.address.0 as *mut c_void,
            lens.as_ptr(),
            strides[1..].as_ptr(),
            box_lens.as_ptr(),
            [1; MAX_DIMS].as_ptr(),
            sys::CUtensorMapInterleave::CU_TENSOR_MAP_INTERLEAVE_NONE,
            sys::CUtensorMapSwizzle::CU_TENSOR_MAP_SWIZZLE_128B,
            sys::CUtensorMapL2promotion::CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
            sys::CUtensorMapFloatOOBfill::CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
        )
    };
    match result {
        sys::CUresult::CUDA_SUCCESS => Ok(TensorMap(map.opaque)),
        _ => Err(check(result, &format!("describe {tensor:?}")).unwrap_err()),
    }
}
