//! A request's rules about single tokens: preferred tokens, allowed tokens, and banned sequences.

use alloc::vec::Vec;

use crate::TokenId;

/// Changes of logits by token. They are part of a draw, like penalties, so that steps in flight, drafts and preemption
/// need not know them. Tokens beyond the vocabulary have no effect.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct TokenRules {
    /// Added to the logits of these tokens.
    bias: Vec<(TokenId, f32)>,
    /// The allowed tokens in ascending order, without repetitions.
    allowed: Option<Vec<TokenId>>,
    /// The banned sequences, none of them empty.
    banned: Vec<Vec<TokenId>>,
}

impl TokenRules {
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds a bias to the logits of these tokens. A token that is not allowed, or is banned, stays excluded.
    pub fn with_bias(mut self, bias: Vec<(TokenId, f32)>) -> Self {
        self.bias = bias;
        self
    }

    /// Lets only these tokens be drawn.
    pub fn with_allowed(mut self, mut allowed: Vec<TokenId>) -> Self {
        allowed.sort_unstable();
        allowed.dedup();
        self.allowed = Some(allowed);
        self
    }

    /// Bans these sequences from the output: the last token of a sequence is not drawn while the output ends with the
    /// tokens before it. Empty sequences are left out.
    pub fn with_banned(mut self, mut banned: Vec<Vec<TokenId>>) -> Self {
        banned.retain(|sequence| !sequence.is_empty());
        self.banned = banned;
        self
    }

    pub fn bias(&self) -> &[(TokenId, f32)] {
        &self.bias
    }

    /// The only tokens that may be drawn, in ascending order. `None` means all.
    pub fn allowed(&self) -> Option<&[TokenId]> {
        self.allowed.as_deref()
    }

    /// The sequences that must not appear in the output.
    pub fn banned(&self) -> &[Vec<TokenId>] {
        &self.banned
    }

    /// The tokens that must not follow this output.
    pub fn banned_after<'a>(&'a self, output: &'a [TokenId]) -> impl Iterator<Item = TokenId> + 'a {
        self.banned.iter().filter_map(move |sequence| {
            let (&last, before) = sequence.split_last()?;
            output.ends_with(before).then_some(last)
        })
    }

    /// Whether the rules change no logit.
    pub fn is_empty(&self) -> bool {
        self.bias.is_empty() && self.allowed.is_none() && self.banned.is_empty()
    }
}

#[cfg(test)]
mod tests {
    use alloc::vec;

    use super::*;

    #[test]
    fn a_sequence_bans_its_last_token_behind_the_others() {
        let rules = TokenRules::new().with_banned(vec![vec![7], vec![1, 2, 3], vec![2, 4], vec![]]);
        let banned = |output: &[TokenId]| rules.banned_after(output).collect::<Vec<_>>();
        assert_eq!(rules.banned().len(), 3);
        assert_eq!(banned(&[]), [7]);
        assert_eq!(banned(&[2]), [7, 4]);
        assert_eq!(banned(&[1, 2]), [7, 3, 4]);
        assert_eq!(banned(&[1, 2, 1]), [7]);
        assert_eq!(banned(&[9, 1, 2]), [7, 3, 4]);
    }
    /// One rule of any kind is enough. A banned empty sequence is no rule, but an empty list of allowed tokens is one.
    #[test]
    fn rules_are_empty_if_none_of_a_kind_is_there() {
        let empty = TokenRules::new().with_banned(vec![vec![]]);
        assert!(empty.is_empty());
        let biased = TokenRules::new().with_bias(vec![(3, 0.5)]);
        assert_eq!(biased.bias(), [(3, 0.5)]);
        let allowed = TokenRules::new().with_allowed(vec![]);
        let banned = TokenRules::new().with_banned(vec![vec![4]]);
        for rules in [biased, allowed, banned] {
            assert!(!rules.is_empty(), "{rules:?}");
        }
    }
}
