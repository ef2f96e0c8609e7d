//! The text of one running request: tokens go in, and text that can no longer change comes out.

use crate::tokenizer::Tokenizer;
use crate::tokenizer::detokenizer::Detokenizer;
use crate::tokenizer::stop_string::{StopState, StopStrings};

/// The effect of one token on the text.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct TextDelta {
    /// The new text. It may be empty in the middle of a character, or while a stop string may be forming.
    pub text: String,
    /// The stop string that ended the text, as an index into the request's list.
    pub stopped: Option<usize>,
}

/// A detokenizer with stop strings. Joined together, its deltas are the text of the request.
pub struct TextStream {
    detokenizer: Detokenizer,
    stop: StopStrings,
    include_stop: bool,
    /// The number of further tokens during which stop strings are ignored.
    num_unstoppable: u32,
    state: StopState,
    /// The end of the text, which may be the beginning of a stop string.
    held: String,
    stopped: Option<usize>,
}

impl TextStream {
    /// Leaves special tokens out of the text; `with_detokenizer` can keep them.
    pub fn new(
        tokenizer: Tokenizer,
        stop: Vec<String>,
        include_stop: bool,
        prompt_tail: &[u32],
    ) -> Self {
        Self::with_detokenizer(
            Detokenizer::new(tokenizer, true, prompt_tail),
            stop,
            include_stop,
        )
    }

    pub fn with_detokenizer(
        detokenizer: Detokenizer,
        stop: Vec<String>,
        include_stop: bool,
    ) -> Self {
        Self {
            detokenizer,
            stop: StopStrings::new(&stop),
            include_stop,
            num_unstoppable: 0,
            state: StopState::default(),
            held: String::new(),
            stopped: None,
        }
    }

    /// Treats stop strings that end within the first `min_tokens` tokens as ordinary text.
    pub fn with_min_tokens(mut self, min_tokens: u32) -> Self {
        self.num_unstoppable = min_tokens;
        self
    }

    /// Adds a token. After a stop string was found, tokens are ignored.
    pub fn push(&mut self, id: u32) -> TextDelta {
        if self.stopped.is_some() {
            return TextDelta {
                text: String::new(),
                stopped: self.stopped,
            };
        }
        let from = self.held.len();
        self.detokenizer.push_into(id, &mut self.held);
        let may_stop = self.num_unstoppable == 0;
        self.num_unstoppable = self.num_unstoppable.saturating_sub(1);
        TextDelta {
            text: self.release(from, may_stop),
            stopped: self.stopped,
        }
    }

    /// Returns the held-back text, unless a stop string ended the text. Call it once, after the last token.
    pub fn finish(&mut self) -> String {
        if self.stopped.is_some() {
            return String::new();
        }
        let from = self.held.len();
        self.detokenizer.finish_into(&mut self.held);
        let may_stop = self.num_unstoppable == 0;
        let mut text = self.release(from, may_stop);
        text.push_str(&self.held);
        self.held.clear();
        text
    }

    /// The stop string that ended the text, as an index into the request's list.
    pub fn stopped(&self) -> Option<usize> {
        self.stopped
    }

    /// Removes the settled text from `held`, after searching `held[from..]` for stop strings.
    fn release(&mut self, mut from: usize, may_stop: bool) -> String {
        if self.stop.is_empty() {
            return std::mem::take(&mut self.held);
        }
        while let Some(found) = self.stop.search(&mut self.state, &self.held, from) {
            if !may_stop {
                from = found.end;
                continue;
            }
            self.stopped = Some(found.stop);
            let mut text = std::mem::take(&mut self.held);
            text.truncate(if self.include_stop {
                found.end
            } else {
                found.start
            });
            return text;
        }
        let settled = self.held.len() - self.stop.num_held(self.state);
        let kept = self.held.split_off(settled);
        std::mem::replace(&mut self.held, kept)
    }
}
