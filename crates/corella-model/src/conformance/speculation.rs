//! Conformance rules about speculation: drafts change only the number of steps.

use corella_core::{Sample, TokenId};

use super::driver::{Driver, Script, Sequence};
use super::{NUM_TOKENS, SamplingParams, Suite, assert_same};
use crate::generator::mix;

/// The drafts that are right.
#[derive(Clone, Copy, Debug)]
enum Guesses {
    All,
    None,
    /// The first drafts of each span, up to this number.
    First(usize),
    /// Three in four drafts, chosen by a hash.
    Most,
}

impl Suite<'_> {
    pub fn drafts_change_nothing(&self, expected: &[Vec<Sample>]) {
        let scripts = self.scripts();
        for guesses in [
            Guesses::All,
            Guesses::None,
            Guesses::First(1),
            Guesses::First(2),
            Guesses::Most,
        ] {
            for max_drafts in [1, 3, 2 * NUM_TOKENS] {
                self.play_with_drafts(&scripts, expected, guesses, max_drafts);
            }
        }
        self.drafts_are_behind_min_tokens();
        self.a_mask_is_for_one_draw(expected);
    }

    fn play_with_drafts(
        &self,
        scripts: &[Script],
        expected: &[Vec<Sample>],
        guesses: Guesses,
        max_drafts: usize,
    ) {
        let way = format!("with {max_drafts} drafts, {guesses:?} right");
        let mut driver = self.driver();
        driver.shuffle_pages();
        let mut live: Vec<Sequence> = (0..)
            .zip(scripts)
            .map(|(slot, script)| driver.begin(slot, script))
            .collect();
        while !live.iter().all(Sequence::is_done) {
            let mut due = Vec::new();
            for (sequence, expected) in live.iter_mut().zip(expected) {
                let num_before = sequence.samples.len();
                let coming = &expected[num_before..];
                if coming.is_empty() {
                    continue;
                }
                // The draw after the last draft is a token too, so the drafts are one fewer than the tokens to come.
                let num_drafts = max_drafts.min(coming.len() - 1);
                let drafts = self.drafts(&coming[..num_drafts], guesses);
                driver.advance_with_drafts(sequence, &drafts);
                let pairs = coming.iter().zip(&drafts);
                let num_held = pairs.take_while(|(sample, draft)| sample.token == **draft);
                due.push((sequence, num_before + num_held.count() + 1));
            }
            driver.step_all(due.iter_mut().map(|(sequence, _)| &mut **sequence));
            for (sequence, num_samples) in due {
                assert_eq!(
                    sequence.samples.len(),
                    num_samples,
                    "{way}: a token is drawn behind each draft that holds"
                );
            }
        }
        for (index, (sequence, expected)) in live.iter().zip(expected).enumerate() {
            assert_same(
                &format!("request {index}, {way}"),
                expected,
                &sequence.samples,
            );
        }
    }

    fn drafts(&self, coming: &[Sample], guesses: Guesses) -> Vec<TokenId> {
        let coming = coming.iter().enumerate();
        let guess = |(index, sample): (usize, &Sample)| {
            let is_right = match guesses {
                Guesses::All => true,
                Guesses::None => false,
                Guesses::First(num) => index < num,
                Guesses::Most => !mix(index as u64, sample.token.into()).is_multiple_of(4),
            };
            let wrong = (sample.token + 1) % self.vocab_size as TokenId;
            if is_right { sample.token } else { wrong }
        };
        coming.map(guess).collect()
    }

    /// Checks that a draft counts as an output token for the draws after it.
    fn drafts_are_behind_min_tokens(&self) {
        let free = self.script(24, 5, SamplingParams::GREEDY);
        let drawn = self.alone(&free);
        for min_tokens in 1..NUM_TOKENS {
            let mut script = free.clone();
            script.min_tokens = min_tokens as u32;
            script.masked_until_min_tokens = drawn.iter().map(|sample| sample.token).collect();
            let expected = vec![self.alone(&script)];
            let scripts = [script];
            self.play_with_drafts(&scripts, &expected, Guesses::All, NUM_TOKENS);
        }
    }

    /// Checks that a mask applies to one draw, so that no token is drawn after it.
    fn a_mask_is_for_one_draw(&self, expected: &[Vec<Sample>]) {
        let (script, expected) = (&self.scripts()[0], &expected[0]);
        let everything: Vec<TokenId> = (0..self.vocab_size as TokenId).collect();
        let mut driver = self.driver();
        let mut sequence = driver.begin(0, script);
        while !sequence.is_done() {
            let num_before = sequence.samples.len();
            let coming = &expected[num_before..];
            let drafts = self.drafts(&coming[..coming.len() - 1], Guesses::All);
            driver.advance_with_drafts(&mut sequence, &drafts);
            driver.allow_only(0, self.vocab_size, &everything);
            driver.step(&mut [&mut sequence]);
            assert_eq!(
                sequence.samples.len(),
                num_before + 1,
                "a slot with a mask draws once"
            );
        }
        assert_same("with drafts and masks", expected, &sequence.samples);
        let mut victim = driver.begin(1, script);
        driver.advance_with_drafts(&mut victim, &[expected[0].token]);
        driver.allow_only(1, self.vocab_size, &[]);
        driver.submit();
        let undrawn = driver.receive([&mut victim]);
        assert_eq!(
            undrawn.len(),
            1,
            "nothing is drawn behind a row that draws nothing"
        );
    }
}

impl Driver {
    /// Makes the next step compute all known tokens of the sequence, and the drafts that hold.
    fn advance_with_drafts(&mut self, sequence: &mut Sequence, drafts: &[TokenId]) {
        let (start, end) = (sequence.num_computed, sequence.tokens.len());
        self.take_pages(sequence, end + drafts.len());
        let known = &sequence.tokens[start..end];
        self.batch
            .span_with_drafts(sequence.slot, start, known, drafts);
        sequence.num_computed = end;
        self.ask(sequence, drafts.len());
    }

    fn step_all<'a>(&mut self, sequences: impl IntoIterator<Item = &'a mut Sequence>) {
        self.submit();
        let undrawn = self.receive(sequences);
        assert_eq!(undrawn, [], "everything can be drawn from");
    }
}
