//! Numbers with units: `8k` is 8000 and `8K` is 8192, as in vLLM.

pub fn parse_count(text: &str) -> Result<u32, String> {
    let number = parse_large_count(text)?;
    u32::try_from(number).map_err(|_| format!("must be at most {}", u32::MAX))
}

pub fn parse_large_count(text: &str) -> Result<u64, String> {
    let text = text.trim();
    if let Ok(number) = text.parse() {
        return Ok(number);
    }
    let refusal = || "must be a whole number, such as 8192, 8k (8000) or 8K (8192)".to_owned();
    let unit = text.chars().next_back().ok_or_else(refusal)?;
    let base: f64 = match unit.is_ascii_uppercase() {
        true => 1024.0,
        false => 1000.0,
    };
    let power = match unit.to_ascii_lowercase() {
        'k' => 1,
        'm' => 2,
        'g' => 3,
        't' => 4,
        _ => return Err(refusal()),
    };
    let digits = &text[..text.len() - 1];
    let is_number = digits
        .bytes()
        .all(|byte| byte.is_ascii_digit() || byte == b'.');
    let number = digits.parse::<f64>().ok().filter(|_| is_number);
    let number = number.ok_or_else(refusal)? * base.powi(power);
    // An `f64` holds larger integers inexactly.
    match number.fract() == 0.0 && number <= 2f64.powi(53) {
        true => Ok(number as u64),
        false => Err(refusal()),
    }
}

/// A maximum length; `None` means the longest that fits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ModelLen(pub Option<u32>);

/// Parses a length. For the longest that fits, vLLM has `auto` and -1, and llama.cpp has 0.
pub fn parse_model_len(text: &str) -> Result<ModelLen, String> {
    match text.trim() {
        "auto" | "-1" | "0" => Ok(ModelLen(None)),
        text => parse_count(text).map(|number| ModelLen(Some(number))),
    }
}

/// The size of the chunks in which a prompt is computed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ChunkSize {
    /// One step computes the whole prompt.
    Whole,
    AtMost(u32),
}

/// Parses a chunk size. As in SGLang, -1 means no chunks.
pub fn parse_chunk_size(text: &str) -> Result<ChunkSize, String> {
    match text.trim() {
        "-1" => Ok(ChunkSize::Whole),
        text => match parse_count(text) {
            Ok(number @ 1..) => Ok(ChunkSize::AtMost(number)),
            Ok(0) | Err(_) => Err(
                "must be a number of tokens, such as 2048 or 2k, or -1 for no chunks".to_owned(),
            ),
        },
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The values follow vLLM's `human_readable_int`.
    #[test]
    fn a_number_may_have_a_unit() {
        for (text, expected) in [
            ("1", 1),
            ("1k", 1000),
            ("1K", 1024),
            ("25.6k", 25_600),
            ("2m", 2_000_000),
            ("2M", 2 << 20),
            ("1g", 1_000_000_000),
            ("1G", 1 << 30),
            ("1t", 1_000_000_000_000),
            ("1T", 1 << 40),
        ] {
            assert_eq!(parse_large_count(text), Ok(expected), "{text}");
        }
        for text in ["", "k", "-1k", "1.5", "1e3", "infk", "1kk", "0.0001k", "é"] {
            assert!(parse_large_count(text).is_err(), "{text}");
        }
        assert_eq!(
            parse_count("4G"),
            Err("must be at most 4294967295".to_owned())
        );
        assert_eq!(parse_model_len("auto"), Ok(ModelLen(None)));
        assert_eq!(parse_model_len("32k"), Ok(ModelLen(Some(32_000))));
    }

    #[test]
    fn a_chunk_has_tokens_or_is_a_whole_prompt() {
        assert_eq!(parse_chunk_size("-1"), Ok(ChunkSize::Whole));
        assert_eq!(parse_chunk_size("2k"), Ok(ChunkSize::AtMost(2000)));
        for text in ["0", "-2", "-1k", "many", "8G"] {
            assert!(parse_chunk_size(text).is_err(), "{text}");
        }
    }
}
