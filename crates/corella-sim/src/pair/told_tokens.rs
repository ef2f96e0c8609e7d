//! The check of a decode node's messages: each token once and in order, and the end of the request.

use std::collections::{BTreeMap, BTreeSet};

use corella_core::session::{SessionKey, ToPrefill};

use crate::check::verdict::{Verdict, ensure};

#[derive(Default)]
pub struct ToldTokens {
    /// By session, the position after the last sent token.
    ends: BTreeMap<SessionKey, u32>,
    /// By session, the number of tokens that other nodes sent before this node's first token.
    num_earlier_tokens: BTreeMap<SessionKey, u32>,
    /// Sessions whose request has ended on this node without a message about the end so far.
    untold: BTreeSet<SessionKey>,
}

impl ToldTokens {
    pub fn begin(&mut self, key: SessionKey, num_earlier_tokens: u32) {
        self.num_earlier_tokens.insert(key, num_earlier_tokens);
    }

    /// Checks a sent message. The network may repeat messages; the node does not.
    pub fn send(&mut self, key: SessionKey, message: &ToPrefill) -> Verdict {
        match message {
            ToPrefill::Tokens(tokens) => {
                let first_position = tokens.first_position;
                // The prefill node may have drawn the first token.
                let num_earlier = self.num_earlier_tokens.get(&key).copied();
                let num_drawn_elsewhere = first_position.checked_sub(num_earlier.unwrap_or(0));
                let is_first = num_drawn_elsewhere.is_some_and(|num_tokens| num_tokens <= 1);
                let end = self.ends.get(&key).copied();
                let is_next = end.map_or(is_first, |end| end == first_position);
                ensure(is_next && !tokens.samples.is_empty(), || {
                    format!("{key} sends position {first_position} after {end:?}")
                })?;
                let num_tokens = tokens.samples.len() as u32;
                self.ends.insert(key, first_position + num_tokens);
                Ok(())
            }
            ToPrefill::Finish(_) | ToPrefill::Abort(_) => {
                self.untold.remove(&key);
                Ok(())
            }
            _ => Ok(()),
        }
    }

    pub fn finish(&mut self, key: SessionKey) {
        self.untold.insert(key);
    }

    pub fn close(&mut self, key: SessionKey) -> Verdict {
        self.ends.remove(&key);
        self.num_earlier_tokens.remove(&key);
        ensure(!self.untold.remove(&key), || {
            format!("{key} closes without a message about the end of its request")
        })
    }
}
