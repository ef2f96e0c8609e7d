//! The operator's switch for Hopper's own matrix products.

use corella_model::DeviceError;

/// The architecture that supports Hopper's own products.
pub const ARCHITECTURE: &str = "sm_90a";

/// The variable that enables these products with 1. They have not run on a GPU yet.
const VARIABLE: &str = "CORELLA_CUDA_WGMMA";

pub fn is_asked_for() -> Result<bool, DeviceError> {
    read(std::env::var_os(VARIABLE).map(|value| value.to_string_lossy().into_owned()))
}

fn read(value: Option<String>) -> Result<bool, DeviceError> {
    match value.as_deref() {
        None | Some("" | "0") => Ok(false),
        Some("1") => Ok(true),
        Some(other) => Err(DeviceError(format!(
            "{VARIABLE} is {other:?}: 1 asks for Hopper's matrix products, 0 or nothing leaves them out"
        ))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_asks_and_what_is_unclear_is_told() {
        let read = |value: &str| read(Some(value.into()));
        assert_eq!(super::read(None), Ok(false));
        assert_eq!(read(""), Ok(false));
        assert_eq!(read("0"), Ok(false));
        assert_eq!(read("1"), Ok(true));
        let error = read("yes").unwrap_err().0;
        assert!(
            error.starts_with("CORELLA_CUDA_WGMMA is \"yes\": 1 asks"),
            "{error}"
        );
    }
}
