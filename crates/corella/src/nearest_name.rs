//! The known name closest to a mistyped one.

/// Returns the known name closest to `written`, if close enough to be meant.
pub fn nearest_name<'a>(
    written: &str,
    known: impl IntoIterator<Item = &'a str>,
) -> Option<&'a str> {
    let written = written.replace('_', "-").to_lowercase();
    let most = (written.chars().count() / 3).max(1);
    known
        .into_iter()
        .map(|name| (distance(&written, &name.replace('_', "-")), name))
        .filter(|(distance, _)| *distance <= most)
        .min_by_key(|(distance, _)| *distance)
        .map(|(_, name)| name)
}

/// The number of characters to insert, delete, replace or swap with their neighbour (Damerau 1964, in the form in which
/// no character is edited twice).
fn distance(a: &str, b: &str) -> usize {
    let (a, b): (Vec<char>, Vec<char>) = (a.chars().collect(), b.chars().collect());
    let mut rows = vec![vec![0; b.len() + 1]; a.len() + 1];
    for i in 0..=a.len() {
        for j in 0..=b.len() {
            rows[i][j] = if i == 0 || j == 0 {
                i + j
            } else {
                let replaced = rows[i - 1][j - 1] + usize::from(a[i - 1] != b[j - 1]);
                let mut least = replaced.min(rows[i - 1][j] + 1).min(rows[i][j - 1] + 1);
                if i > 1 && j > 1 && a[i - 1] == b[j - 2] && a[i - 2] == b[j - 1] {
                    least = least.min(rows[i - 2][j - 2] + 1);
                }
                least
            };
        }
    }
    rows[a.len()][b.len()]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_edit_counts_once() {
        for (a, b, expected) in [
            ("", "abc", 3),
            ("seed", "seed", 0),
            ("seeed", "seed", 1),
            ("sed", "seed", 1),
            ("seet", "seed", 1),
            ("sede", "seed", 1),
            ("kitten", "sitting", 3),
        ] {
            assert_eq!(distance(a, b), expected, "{a} {b}");
            assert_eq!(distance(b, a), expected, "{b} {a}");
        }
    }

    #[test]
    fn a_slip_is_near_and_another_word_is_not() {
        let known = ["temperature", "top-p", "top-k", "max-num-seqs"];
        assert_eq!(nearest_name("temprature", known), Some("temperature"));
        assert_eq!(nearest_name("max_num_seqs", known), Some("max-num-seqs"));
        assert_eq!(nearest_name("topk", known), Some("top-k"));
        assert_eq!(nearest_name("gpu-memory", known), None);
    }
}
