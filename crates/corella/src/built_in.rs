//! The model inside the program; see `models/nano`.

pub const NAME: &str = "corella-nano";

macro_rules! file {
    ($name:literal) => {
        (
            $name,
            include_bytes!(concat!("../../../models/nano/", $name)).as_slice(),
        )
    };
}

/// A static, because a constant would be copied into each codegen unit that uses it.
pub static FILES: [(&str, &[u8]); 5] = [
    file!("config.json"),
    file!("generation_config.json"),
    file!("tokenizer.json"),
    file!("tokenizer_config.json"),
    file!("model.safetensors"),
];
