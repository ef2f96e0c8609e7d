//! Constrained answers in different steps.

use std::sync::Arc;

use corella_core::{FinishReason, SchedulerConfig, Speculation, TokenId};
use corella_engine::{
    Allowed, ConstrainedAnswer, StreamEvent, Submission, TokenConstraint, TokenStream,
};
use corella_model::{MockConfig, MockEcho};

use crate::fixture::{
    VOCAB_SIZE, assert_at_rest, assert_failed, finish, limits, model, start, submission,
    submit_one, submit_together,
};
use crate::load::Dice;

/// Every token must be a multiple of 3 beyond a number that depends on all tokens before it, and
/// the answer ends after `len` tokens.
#[derive(Clone, Copy, Debug)]
struct Steps {
    len: usize,
    fault: Fault,
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum Fault {
    None,
    Start,
    Push,
    Panic,
    DeadEnd,
}

struct StepsSoFar {
    steps: Steps,
    tokens: Vec<TokenId>,
}

impl Steps {
    fn allowed(&self, before: &[TokenId]) -> Option<Box<[u32]>> {
        if before.len() >= self.len {
            return None;
        }
        let offset = before.iter().fold(1, |sum, token| (sum * 2 + token) % 3);
        let mut words = vec![0; VOCAB_SIZE.div_ceil(32)];
        for token in (offset..VOCAB_SIZE as TokenId).step_by(3) {
            words[token as usize / 32] |= 1 << (token % 32);
        }
        Some(words.into())
    }
}

impl TokenConstraint for Steps {
    fn start(&self) -> Result<Box<dyn ConstrainedAnswer>, String> {
        if self.fault == Fault::Start {
            return Err("it has no beginning".to_owned());
        }
        Ok(Box::new(StepsSoFar {
            steps: *self,
            tokens: Vec::new(),
        }))
    }
}

impl ConstrainedAnswer for StepsSoFar {
    fn push(&mut self, token: TokenId) -> Result<(), String> {
        let allowed = self
            .steps
            .allowed(&self.tokens)
            .expect("nothing may follow");
        assert!(allowed[token as usize / 32] >> (token % 32) & 1 == 1);
        self.tokens.push(token);
        match self.tokens.len() == 3 && self.steps.fault == Fault::Push {
            true => Err("it stumbled".to_owned()),
            false => Ok(()),
        }
    }

    fn allowed(&mut self) -> Result<Allowed, String> {
        let is_due = self.tokens.len() == 3;
        assert!(!is_due || self.steps.fault != Fault::Panic, "it fell over");
        let nothing = || vec![0; 2].into();
        if is_due && self.steps.fault == Fault::DeadEnd {
            let (tokens, may_end) = (nothing(), false);
            return Ok(Allowed { tokens, may_end });
        }
        let allowed = self.steps.allowed(&self.tokens);
        Ok(Allowed {
            may_end: allowed.is_none(),
            tokens: allowed.unwrap_or_else(nothing),
        })
    }
}

fn constrained(submission: Submission, steps: Steps) -> Submission {
    Submission {
        constraint: Some(Arc::new(steps)),
        ..submission
    }
}

/// The expected outputs are drawn through the same masks, without pages, batches or steps. In the engine, the mock also
/// checks every row that it reads.
#[test]
fn constrained_outputs_equal_lone_runs() {
    let configs = [
        (limits(40, 1), None),
        (limits(40, 2), None),
        (pipeline(limits(40, 2)), None),
        (guessing(limits(40, 1)), Some(7)),
    ];
    for (seed, (limits, distance)) in configs.into_iter().enumerate() {
        let mut mock = model(&limits);
        mock.num_stages = limits.num_pipeline_stages;
        mock.echo = distance.map(|distance| MockEcho {
            distance,
            probability: 0.75,
        });
        let is_guessing = distance.is_some();
        let engine = start(limits, mock.clone());
        let mut dice = Dice(seed as u64);
        for _ in 0..4 {
            let drawn = (0..48).map(|_| draw(&mut dice, &mock));
            let (submissions, expected): (Vec<_>, Vec<_>) = drawn.unzip();
            let streams = submit_together(&engine, &mock.gate, submissions);
            for (mut stream, expected) in streams.into_iter().zip(expected) {
                assert_eq!(read(&mut stream), expected);
            }
            assert_at_rest(&engine);
        }
        let stats = engine.stats();
        assert_eq!(stats.num_finished_error, 0);
        assert!(stats.num_finished_stop > 20 && stats.num_finished_length > 20);
        assert!(stats.scheduler.num_preemptions > 0, "{stats:?}");
        assert!(!is_guessing || stats.scheduler.num_accepted_draft_tokens > 0);
    }
}

/// Reads to the end. The counters include tokens that were drawn on another node.
fn read(stream: &mut TokenStream) -> (Vec<TokenId>, FinishReason) {
    let mut tokens = Vec::new();
    while let Some(event) = stream.next_blocking() {
        let StreamEvent::Output(output) = event else {
            continue;
        };
        tokens.extend(output.sample.map(|sample| sample.token));
        if let Some(reason) = output.finish {
            return (tokens, reason);
        }
    }
    panic!("the stream ended without a terminal event");
}

/// A request, constrained two times in three, and its expected output.
fn draw(dice: &mut Dice, mock: &MockConfig) -> (Submission, (Vec<TokenId>, FinishReason)) {
    let max_tokens = 1 + dice.roll(40);
    let mut asked = submission(dice.prompt(), max_tokens as u32);
    asked.sampling = dice.sampling();
    // Its rules ban tokens in a row, and could exclude all tokens of a mask.
    asked.sampling.rules = None;
    if dice.roll(3) == 0 {
        let tokens = mock.lone_tokens(&asked.prompt, &asked.sampling, max_tokens);
        return (asked, (tokens, FinishReason::Length));
    }
    let steps = Steps {
        len: 1 + dice.roll(40),
        fault: Fault::None,
    };
    let allowed = |before: &[TokenId]| {
        let is_over = before.len() == max_tokens;
        if is_over { None } else { steps.allowed(before) }
    };
    let mut tokens = mock.lone_masked_tokens(&asked.prompt, &asked.sampling, allowed);
    let reason = match tokens.len() == max_tokens {
        true => FinishReason::Length,
        false => FinishReason::EndToken,
    };
    let expected = tokens.clone();
    if dice.roll(4) == 0 && tokens.len() > 1 {
        // Some tokens were drawn on another node, and the answer continues after them.
        let num_left = 1 + dice.roll(tokens.len() - 1);
        let rest = tokens.split_off(tokens.len() - num_left);
        asked.output = tokens;
        return (constrained(asked, steps), (rest, reason));
    }
    (constrained(asked, steps), (expected, reason))
}

#[test]
fn each_choice_is_held_to_the_constraint_by_itself() {
    let limits = limits(200, 2);
    let mock = model(&limits);
    let engine = start(limits, mock.clone());
    let steps = Steps {
        len: 9,
        fault: Fault::None,
    };
    let mut asked = constrained(submission(vec![3, 1, 4], 20), steps);
    asked.sampling.temperature = 1.0;
    asked.num_choices = 3;
    let mut answers = Vec::new();
    let streams = engine.submit(asked.clone()).unwrap();
    for (choice, mut stream) in streams.into_iter().enumerate() {
        let mut sampling = asked.sampling.clone();
        sampling.choice = choice as u32;
        let expected = mock.lone_masked_tokens(&asked.prompt, &sampling, |it| steps.allowed(it));
        assert_eq!(expected.len(), 9);
        assert_eq!(
            finish(&mut stream),
            (expected.clone(), FinishReason::EndToken)
        );
        answers.push(expected);
    }
    answers.dedup();
    assert_eq!(answers.len(), 3);
    assert_at_rest(&engine);
}

#[test]
fn a_constraint_that_fails_ends_its_request_alone() {
    let faults = [
        (Fault::Start, 0, "it has no beginning"),
        (Fault::Push, 3, "it stumbled"),
        (Fault::Panic, 3, "it fell over"),
        (Fault::DeadEnd, 3, "no token is allowed here"),
    ];
    for max_inflight_steps in [1, 2] {
        let limits = limits(200, max_inflight_steps);
        let mock = model(&limits);
        let engine = start(limits, mock.clone());
        for (fault, num_tokens, text) in faults {
            let prompt = vec![5, 6, 7];
            let plain = submission(prompt.clone(), 30);
            let expected = mock.lone_tokens(&prompt, &plain.sampling, 30);
            let steps = |fault| Steps { len: 25, fault };
            let whole = steps(Fault::None);
            let masked = mock.lone_masked_tokens(&prompt, &plain.sampling, |it| whole.allowed(it));
            let mut beside = submit_one(&engine, plain.clone());
            let mut well = submit_one(&engine, constrained(plain.clone(), whole));
            let mut failing = submit_one(&engine, constrained(plain, steps(fault)));
            let (tokens, reason) = finish(&mut failing);
            assert_eq!(tokens, masked[..num_tokens]);
            assert_failed(&reason, text);
            assert_eq!(finish(&mut beside), (expected, FinishReason::Length));
            assert_eq!(finish(&mut well), (masked, FinishReason::EndToken));
        }
        assert_at_rest(&engine);
        assert_eq!(engine.stats().num_failed_steps, 0);
    }
}

fn pipeline(limits: SchedulerConfig) -> SchedulerConfig {
    SchedulerConfig {
        num_pipeline_stages: 2,
        ..limits
    }
}

fn guessing(limits: SchedulerConfig) -> SchedulerConfig {
    SchedulerConfig {
        speculation: Speculation::Ngram,
        max_draft_tokens: 6,
        ..limits
    }
}
