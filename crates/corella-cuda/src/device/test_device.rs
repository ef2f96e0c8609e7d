//! The device of tests.

use super::{EmulatedDevice, GpuDevice, SharedDevice};

/// The name of the device of tests: `emulated` (the default) or `gpu`.
const VARIABLE: &str = "CORELLA_TEST_DEVICE";

/// The emulated device, or the first GPU if `CORELLA_TEST_DEVICE` asks for it.
///
/// # Panics
/// Panics without such a device: a test for a GPU must not pass without a GPU.
pub fn test_device() -> SharedDevice {
    match std::env::var(VARIABLE).as_deref() {
        Err(_) | Ok("emulated") => EmulatedDevice::open(),
        Ok("gpu") => GpuDevice::open(0).unwrap_or_else(|error| panic!("{error}")),
        Ok(other) => panic!("{VARIABLE} is {other:?}, not gpu or emulated"),
    }
}
