//! Scripted replies of the mock, chosen by a request's seed or by a text in its prompt.

use corella_core::TokenId;

use crate::mock::mock_model::Sequence;

/// Replies that the mock gives word for word before it ends.
#[derive(Clone, Debug, Default)]
pub struct MockScript {
    /// A request gets the reply whose index is its seed modulo the number of replies.
    pub seeded: Vec<Vec<TokenId>>,
    /// A request gets the reply whose cue ends last in its prompt. These replies override seeded ones.
    pub cued: Vec<CuedReply>,
}

#[derive(Clone, Debug)]
pub struct CuedReply {
    pub cue: Vec<TokenId>,
    pub reply: Vec<TokenId>,
}

impl MockScript {
    /// The reply to a request whose prompt is complete, or `None` if outputs are made up.
    pub(crate) fn reply(&self, sequence: &Sequence) -> Option<&[TokenId]> {
        if self.cued.is_empty() {
            let choice = sequence
                .start
                .sampling
                .seed
                .checked_rem(self.seeded.len() as u64)?;
            return Some(&self.seeded[choice as usize]);
        }
        let prompt = sequence
            .tokens
            .get(..sequence.start.num_prompt_tokens as usize)?;
        let cued = sequence.cued_reply.get_or_init(|| self.find_cue(prompt));
        cued.map(|index| &*self.cued[index].reply)
    }

    fn find_cue(&self, prompt: &[TokenId]) -> Option<usize> {
        let ends = (0..self.cued.len()).filter_map(|index| {
            let cue = &*self.cued[index].cue;
            let start = prompt
                .windows(cue.len())
                .rposition(|window| window == cue)?;
            Some((start + cue.len(), index))
        });
        ends.max().map(|(_, index)| index)
    }
}

#[cfg(test)]
mod tests {
    use corella_core::SamplingParams;

    use super::{CuedReply, MockScript};
    use crate::{MockConfig, MockEnd};

    #[test]
    fn the_last_cue_of_the_prompt_chooses_the_reply() {
        const END: u32 = 9;
        let cued = |cue: &[u32], reply: &[u32]| CuedReply {
            cue: cue.to_vec(),
            reply: reply.to_vec(),
        };
        let mut config = MockConfig::new(10, 1, 16);
        config.end = Some(MockEnd {
            token: END,
            probability: 0.0,
            at_output: None,
        });
        config.script = MockScript {
            seeded: vec![vec![8, 8]],
            cued: vec![cued(&[1, 2], &[5]), cued(&[3], &[6, 1, 2])],
        };
        let say = |prompt: &[u32]| {
            let sampling = SamplingParams::GREEDY;
            let tokens = config.lone_tokens(prompt, &sampling, 8);
            tokens.split(|&token| token == END).next().unwrap().to_vec()
        };
        assert_eq!(say(&[1, 2]), [5]);
        assert_eq!(say(&[3, 7, 1, 2, 7]), [5]);
        // A cue within the reply itself has no effect.
        assert_eq!(say(&[1, 2, 3]), [6, 1, 2]);
        // Half a cue selects no reply.
        assert_eq!(say(&[3, 1]), [6, 1, 2]);
    }
}
