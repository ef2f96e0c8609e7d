//! Sizes in messages.

/// Formats a size with a suitable binary unit.
pub fn display_bytes(bytes: u64) -> String {
    let (value, unit) = match bytes {
        0..0x10_0000 => (bytes as f64 / 1024.0, "KiB"),
        0x10_0000..0x4000_0000 => (bytes as f64 / (1 << 20) as f64, "MiB"),
        0x4000_0000..0x100_0000_0000 => (bytes as f64 / (1 << 30) as f64, "GiB"),
        _ => (bytes as f64 / (1_u64 << 40) as f64, "TiB"),
    };
    format!("{value:.1} {unit}")
}
