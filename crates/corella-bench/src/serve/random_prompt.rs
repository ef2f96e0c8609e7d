//! Random prompts, drawn from a seed: words or token ids, with or without a common prefix.

use super::prompt::Prompt;
use crate::BenchError;
use crate::sample::split_mix::split_mix;

/// The form of random prompts: a prefix and then `len` words or tokens of the prompt's own. The prompts use the
/// `num_prefixes` prefixes in turn.
#[derive(Debug, Clone, PartialEq)]
pub struct RandomPrompts {
    pub unit: Unit,
    pub len: usize,
    pub prefix_len: usize,
    pub num_prefixes: usize,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Unit {
    /// English words, sent as text.
    Words,
    /// Token ids below `vocab_size`. No two `unique` prompts begin with the same token, so they
    /// share no cached prefix.
    Tokens { vocab_size: u32, unique: bool },
}

/// Every vocabulary has at least this many tokens. Special tokens usually come first.
pub const COMMON_VOCAB_SIZE: u32 = 1000;
const FIRST_ID: u32 = 100;

/// The longest prompt. A longer one is a mistake in the options.
const MAX_LEN: usize = 10_000_000;

const WORDS: [&str; 64] = [
    "the", "a", "of", "and", "to", "in", "over", "under", "parrot", "flock", "tree", "river",
    "cloud", "stone", "house", "garden", "window", "letter", "morning", "evening", "winter",
    "summer", "road", "bridge", "train", "market", "child", "friend", "teacher", "doctor", "song",
    "story", "question", "answer", "number", "colour", "red", "green", "blue", "white", "small",
    "large", "quick", "slow", "old", "new", "bright", "quiet", "flies", "sings", "walks", "reads",
    "writes", "finds", "gives", "takes", "opens", "closes", "begins", "ends", "never", "always",
    "often", "together",
];

impl Default for RandomPrompts {
    fn default() -> Self {
        Self {
            unit: Unit::Words,
            len: 128,
            prefix_len: 0,
            num_prefixes: 1,
        }
    }
}

impl RandomPrompts {
    /// Checks that `num_prompts` prompts, the sum over all runs, can be made.
    pub(super) fn check(&self, num_prompts: usize) -> Result<(), BenchError> {
        let wrong = |reason: String| Err(BenchError::Option(reason));
        let option = match self.unit {
            Unit::Words => "--prompt-words",
            Unit::Tokens { .. } => "--prompt-tokens",
        };
        if !(1..=MAX_LEN).contains(&self.len) {
            let len = self.len;
            return wrong(format!(
                "{option} must be between 1 and {MAX_LEN}, not {len}"
            ));
        }
        if self.prefix_len > MAX_LEN {
            return wrong(format!("--prefix-len must be at most {MAX_LEN}"));
        }
        if self.num_prefixes == 0 {
            return wrong("--num-prefixes must be at least 1".into());
        }
        let Unit::Tokens { vocab_size, unique } = self.unit else {
            return Ok(());
        };
        if vocab_size <= FIRST_ID {
            return wrong(format!("--vocab-size must be above {FIRST_ID}"));
        }
        if unique && self.prefix_len > 0 {
            return wrong(
                "--unique-prompts cannot have a common prefix: leave --prefix-len out".into(),
            );
        }
        let num_ids = vocab_size - FIRST_ID;
        if unique && num_prompts > num_ids as usize {
            return wrong(format!(
                "--unique-prompts: {num_prompts} prompts, including warm-ups and repeats, need \
                 different first tokens, and --vocab-size {vocab_size} has {num_ids}"
            ));
        }
        Ok(())
    }

    /// The prompt with this index, which counts the prompts of all runs. The prefixes depend on `run`, so that no run
    /// finds the prefixes of an earlier run in the cache.
    pub(super) fn prompt(&self, seed: u64, run: u64, index: u64) -> Prompt {
        const PREFIX: u64 = 1;
        const OWN: u64 = 2;
        let prefix = index % self.num_prefixes as u64;
        let mut prefix = stream(&[seed, PREFIX, run, prefix]);
        let mut own = stream(&[seed, OWN, index]);
        let prefix = (0..self.prefix_len).map(|_| split_mix(&mut prefix));
        let numbers = prefix.chain((0..self.len).map(|_| split_mix(&mut own)));
        match self.unit {
            Unit::Words => {
                let word = |number| WORDS[(number % WORDS.len() as u64) as usize];
                let words: Vec<&str> = numbers.map(word).collect();
                Prompt::Text(words.join(" "))
            }
            Unit::Tokens { vocab_size, unique } => {
                let num_ids = u64::from(vocab_size - FIRST_ID);
                let token = |number| FIRST_ID + (number % num_ids) as u32;
                let mut tokens: Vec<u32> = numbers.map(token).collect();
                if unique {
                    tokens[0] = token(index);
                }
                Prompt::Tokens(tokens)
            }
        }
    }
}

/// A state of SplitMix64 that depends on every key.
fn stream(keys: &[u64]) -> u64 {
    keys.iter()
        .fold(0, |state, key| split_mix(&mut (state ^ key)))
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    fn tokens(prompt: &Prompt) -> &[u32] {
        match prompt {
            Prompt::Tokens(tokens) => tokens,
            Prompt::Text(text) => panic!("not tokens: {text}"),
        }
    }

    fn random_tokens(unique: bool) -> RandomPrompts {
        let vocab_size = COMMON_VOCAB_SIZE;
        RandomPrompts {
            unit: Unit::Tokens { vocab_size, unique },
            len: 40,
            ..RandomPrompts::default()
        }
    }

    #[test]
    fn a_prompt_depends_on_the_seed_and_its_place_only() {
        let words = RandomPrompts {
            len: 40,
            ..RandomPrompts::default()
        };
        for random in [words, random_tokens(false), random_tokens(true)] {
            let prompt = random.prompt(7, 1, 5);
            assert_eq!(
                prompt,
                random.prompt(7, 2, 5),
                "a prompt without a prefix depends on the run"
            );
            assert_ne!(prompt, random.prompt(7, 1, 6));
            assert_ne!(prompt, random.prompt(8, 1, 5));
            match &prompt {
                Prompt::Text(text) => assert_eq!(text.split(' ').count(), 40),
                Prompt::Tokens(tokens) => {
                    assert_eq!(tokens.len(), 40);
                    assert!(tokens.iter().all(|token| (100..1000).contains(token)));
                }
            }
        }
    }

    #[test]
    fn prompts_share_their_prefix_and_nothing_more() {
        let random = RandomPrompts {
            prefix_len: 30,
            num_prefixes: 2,
            ..random_tokens(false)
        };
        let prompts: Vec<Prompt> = (0..4).map(|index| random.prompt(7, 1, index)).collect();
        let [a, b, c, d] = [0, 1, 2, 3].map(|index| tokens(&prompts[index]));
        assert_eq!(a.len(), 70);
        assert_eq!((&a[..30], &b[..30]), (&c[..30], &d[..30]));
        assert_ne!(a[..30], b[..30]);
        assert_ne!(a[30..], c[30..]);
        assert_ne!(
            a[..30],
            tokens(&random.prompt(7, 2, 4))[..30],
            "two runs have the same prefix"
        );

        let words = RandomPrompts {
            unit: Unit::Words,
            ..random
        };
        let [a, c] = [0, 2].map(|index| match words.prompt(7, 1, index) {
            Prompt::Text(text) => text,
            Prompt::Tokens(_) => panic!("words are text"),
        });
        let prefix = |text: &str| text.split(' ').take(30).collect::<Vec<_>>().join(" ");
        assert_eq!(prefix(&a), prefix(&c));
        assert_ne!(a, c);
    }

    #[test]
    fn unique_prompts_have_no_first_token_in_common() {
        let firsts = |unique| {
            let random = random_tokens(unique);
            let firsts = (0..900).map(|index| tokens(&random.prompt(7, 1, index))[0]);
            firsts.collect::<BTreeSet<u32>>().len()
        };
        assert_eq!(firsts(true), 900);
        assert!(
            firsts(false) < 800,
            "random first tokens are all different: the test cannot fail"
        );
    }

    #[test]
    fn what_cannot_be_made_is_refused() {
        let unique = random_tokens(true);
        assert_eq!(unique.check(900), Ok(()));
        let refused = [
            (unique.clone(), 901, "--vocab-size"),
            (
                RandomPrompts {
                    prefix_len: 1,
                    ..unique.clone()
                },
                1,
                "--prefix-len",
            ),
            (
                RandomPrompts {
                    len: 0,
                    ..unique.clone()
                },
                1,
                "--prompt-tokens",
            ),
            (
                RandomPrompts {
                    num_prefixes: 0,
                    ..unique
                },
                1,
                "--num-prefixes",
            ),
            (
                RandomPrompts {
                    len: 0,
                    ..RandomPrompts::default()
                },
                1,
                "--prompt-words",
            ),
        ];
        for (random, num_prompts, option) in refused {
            let error = random.check(num_prompts).unwrap_err().to_string();
            assert!(error.contains(option), "{error}");
        }
        let few = Unit::Tokens {
            vocab_size: 100,
            unique: false,
        };
        let few = RandomPrompts {
            unit: few,
            ..RandomPrompts::default()
        };
        assert!(
            few.check(1)
                .unwrap_err()
                .to_string()
                .contains("--vocab-size")
        );
    }
}
