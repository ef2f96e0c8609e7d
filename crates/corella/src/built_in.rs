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

/// One place in memory: a constant would be copied into each unit that names it.
pub static FILES: [(&str, &[u8]); 5] = [
    file!("config.json"),
    file!("generation_config.json"),
    file!("tokenizer.json"),
    file!("tokenizer_config.json"),
    file!("model.safetensors"),
];
