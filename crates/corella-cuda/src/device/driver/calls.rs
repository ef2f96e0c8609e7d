//! The functions of the driver that are used here, and their errors.

use std::ffi::CStr;

use corella_model::DeviceError;
use cudarc::driver::sys;

use crate::device::dynamic_library;

const FUNCTIONS: [&str; 37] = [
    "cuCtxSetCurrent",
    "cuDeviceGet",
    "cuDeviceGetAttribute",
    "cuDeviceGetCount",
    "cuDeviceGetName",
    "cuDeviceTotalMem_v2",
    "cuDevicePrimaryCtxRelease_v2",
    "cuDevicePrimaryCtxRetain",
    "cuDriverGetVersion",
    "cuEventCreate",
    "cuEventDestroy_v2",
    "cuEventQuery",
    "cuEventRecord",
    "cuEventSynchronize",
    "cuFuncGetAttribute",
    "cuFuncSetAttribute",
    "cuGetErrorName",
    "cuGetErrorString",
    "cuGraphDestroy",
    "cuGraphExecDestroy",
    "cuGraphInstantiateWithFlags",
    "cuGraphLaunch",
    "cuInit",
    "cuLaunchKernelEx",
    "cuMemAlloc_v2",
    "cuMemFreeHost",
    "cuMemFree_v2",
    "cuMemGetInfo_v2",
    "cuMemHostAlloc",
    "cuMemcpyAsync",
    "cuMemsetD8Async",
    "cuModuleGetFunction",
    "cuModuleLoadData",
    "cuStreamBeginCapture_v2",
    "cuStreamCreate",
    "cuStreamSynchronize",
    "cuStreamWaitEvent",
];

/// Functions for closing a device or ending a capture.
const MORE_FUNCTIONS: [&str; 3] = ["cuModuleUnload", "cuStreamDestroy_v2", "cuStreamEndCapture"];

/// Functions that came with CUDA 12.0. The version is checked before, so that an older driver gets an error that names
/// its version.
const FUNCTIONS_OF_12: [&str; 1] = ["cuTensorMapEncodeTiled"];

/// CUDA 12.0, whose machine code the driver must load.
const OLDEST_VERSION: i32 = 12000;

/// Loads the driver, and returns its CUDA version: 1000 times the major version plus 10 times the minor version.
pub fn load() -> Result<i32, DeviceError> {
    dynamic_library::DRIVER.load(&FUNCTIONS)?;
    dynamic_library::DRIVER.load(&MORE_FUNCTIONS)?;
    let mut version = 0;
    // SAFETY: the library is loaded and has the functions.
    unsafe {
        check(sys::cuInit(0), "start")?;
        check(sys::cuDriverGetVersion(&mut version), "tell its version")?;
    }
    if version < OLDEST_VERSION {
        return Err(DeviceError(format!(
            "the NVIDIA driver is of CUDA {}.{}, but 12.0 or later is needed: update it, or use --device cpu",
            version / 1000,
            version % 1000 / 10
        )));
    }
    dynamic_library::DRIVER.load(&FUNCTIONS_OF_12)?;
    Ok(version)
}

/// Whether a driver and a GPU exist.
pub fn finds_gpu() -> bool {
    if dynamic_library::DRIVER.load(&FUNCTIONS).is_err() {
        return false;
    }
    let mut num_devices = 0;
    // SAFETY: the library is loaded and has the functions. The second one writes an integer.
    let results = unsafe { [sys::cuInit(0), sys::cuDeviceGetCount(&mut num_devices)] };
    results == [sys::CUresult::CUDA_SUCCESS; 2] && num_devices > 0
}

/// An error names the operation that failed in the driver.
pub fn check(result: sys::CUresult, what: &str) -> Result<(), DeviceError> {
    if result == sys::CUresult::CUDA_SUCCESS {
        return Ok(());
    }
    let mut name = std::ptr::null();
    let mut text = std::ptr::null();
    // SAFETY: the functions write C strings that live as long as the library, or null.
    let [name, text] = unsafe {
        sys::cuGetErrorName(result, &mut name);
        sys::cuGetErrorString(result, &mut text);
        [name, text].map(|string| match string.is_null() {
            true => "unknown error".into(),
            false => CStr::from_ptr(string).to_string_lossy(),
        })
    };
    Err(DeviceError(format!(
        "the GPU could not {what}: {name} ({text})"
    )))
}
