//! The known name closest to a mistyped one.

use strsim::osa_distance;

/// Returns the known name closest to `written`, if close enough to be meant.
pub fn nearest_name<'a>(
    written: &str,
    known: impl IntoIterator<Item = &'a str>,
) -> Option<&'a str> {
    let written = written.replace('_', "-").to_lowercase();
    let most = (written.chars().count() / 3).max(1);
    known
        .into_iter()
        .map(|name| (osa_distance(&written, &name.replace('_', "-")), name))
        .filter(|(distance, _)| *distance <= most)
        .min_by_key(|(distance, _)| *distance)
        .map(|(_, name)| name)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_slip_is_near_and_another_word_is_not() {
        let known = ["temperature", "top-p", "top-k", "max-num-seqs"];
        assert_eq!(nearest_name("temprature", known), Some("temperature"));
        assert_eq!(nearest_name("max_num_seqs", known), Some("max-num-seqs"));
        assert_eq!(nearest_name("topk", known), Some("top-k"));
        assert_eq!(nearest_name("gpu-memory", known), None);
    }
}
