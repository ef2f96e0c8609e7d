//! The device that tests run on.

use super::{EmulatedDevice, GpuDevice, SharedDevice};

/// Names the device of tests: `emulated`, as without it, or `gpu`.
const VARIABLE: &str = "CORELLA_TEST_DEVICE";

/// The emulated device, or the first GPU where `CORELLA_TEST_DEVICE` says so.
///
/// # Panics
/// If there is no such device: a test that was meant for a GPU must not pass without one.
pub fn test_device() -> SharedDevice {
    match std::env::var(VARIABLE).as_deref() {
        Err(_) | Ok("emulated") => EmulatedDevice::open(),
        Ok("gpu") => GpuDevice::open(0).unwrap_or_else(|error| panic!("{error}")),
        Ok(other) => panic!("{VARIABLE} is {other:?}, not gpu or emulated"),
    }
}
