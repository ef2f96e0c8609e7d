//! The number of tokens to guess, by the success of earlier guesses: more while guesses are right, fewer when they are
//! wrong, and none for a while when they do not pay.

use crate::SchedulerConfig;

/// The draft length of one request. It uses whole numbers only, so that equal histories give equal
/// lengths. Gains and costs are in hundredths of a step.
#[derive(Debug)]
pub(crate) struct DraftLength {
    length: u32,
    /// The cost of drawing one draft, before it is checked.
    draw_cost: i32,
    /// The gains of drafts so far, less their costs.
    balance: i32,
    /// The number of proposals still to be skipped, and the length of the next pause.
    pause: u32,
    next_pause: u32,
}

/// The gain of a right draft: one step.
const GAIN: i32 = 100;
/// The cost of checking a draft, which adds a row to a step. On a CPU, that takes a fraction of the time of a step for
/// this row alone.
const ROW_COST: i32 = GAIN - SchedulerConfig::MAX_DRAW_COST as i32;
/// Upper bound of `draw_cost`. A draft that costs this much is given up after one try.
const MAX_COUNTED_COST: u32 = 1000;
/// Speculation pauses at this loss.
const MAX_LOSS: i32 = 16 * ROW_COST;
/// Upper bound of the balance, so that success long ago does not pay for failure now.
const MAX_BALANCE: i32 = 32 * ROW_COST;
/// The further loss that is allowed after a pause before the next one.
const TRIAL: i32 = 4 * ROW_COST;
const FIRST_LENGTH: u32 = 2;
const FIRST_PAUSE: u32 = 16;
const MAX_PAUSE: u32 = 512;

impl DraftLength {
    /// `draw_cost` is the cost of drawing one draft, in hundredths of a step.
    pub fn new(draw_cost: u32) -> Self {
        Self {
            length: FIRST_LENGTH,
            draw_cost: draw_cost.min(MAX_COUNTED_COST) as i32,
            balance: 0,
            pause: 0,
            next_pause: FIRST_PAUSE,
        }
    }

    /// The number of drafts for the next step, at most `max`. It is 0 during a pause.
    pub fn next(&mut self, max: u32) -> u32 {
        if self.pause > 0 {
            self.pause -= 1;
            return 0;
        }
        self.length.min(max)
    }

    pub fn note_checked(&mut self, num_drafts: u32, num_accepted: u32) {
        let num_rejected = (num_drafts - num_accepted) as i32;
        let cost = (ROW_COST + self.draw_cost) * num_drafts as i32;
        self.balance = (self.balance + GAIN * num_accepted as i32 - cost).min(MAX_BALANCE);
        if num_rejected > 0 {
            self.length = ((num_drafts + num_accepted) / 2).max(1);
        } else if num_drafts >= self.length {
            self.length = 2 * num_drafts;
        }
        if self.balance > 0 {
            self.next_pause = FIRST_PAUSE;
        }
        self.pause_at_loss();
    }

    /// Charges for drafts that were drawn but never checked.
    pub fn note_unused(&mut self, num_drafts: u32) {
        self.balance -= self.draw_cost * num_drafts as i32;
        self.pause_at_loss();
    }

    fn pause_at_loss(&mut self) {
        if self.balance <= -MAX_LOSS {
            self.pause = self.next_pause;
            self.next_pause = (2 * self.next_pause).min(MAX_PAUSE);
            self.balance = TRIAL - MAX_LOSS;
            self.length = 1;
        }
    }
}

#[cfg(test)]
mod tests {
    use alloc::vec::Vec;

    use super::*;

    /// Plays `num_steps` steps with at most `holds` right drafts each. Returns the numbers of tried drafts.
    fn play(length: &mut DraftLength, max: u32, num_steps: usize, holds: u32) -> Vec<u32> {
        let step = |_| {
            let num_drafts = length.next(max);
            if num_drafts > 0 {
                length.note_checked(num_drafts, num_drafts.min(holds));
            }
            num_drafts
        };
        (0..num_steps).map(step).collect()
    }

    #[test]
    fn it_doubles_while_all_hold_up_to_the_limit() {
        let mut length = DraftLength::new(0);
        assert_eq!(play(&mut length, 8, 5, 64), [2, 4, 8, 8, 8]);
        assert_eq!(play(&mut length, 3, 2, 64), [3, 3]);
    }

    #[test]
    fn it_goes_half_way_to_what_holds() {
        let mut length = DraftLength::new(0);
        play(&mut length, 16, 8, 64);
        assert_eq!(play(&mut length, 16, 4, 5), [16, 10, 7, 6]);
    }

    #[test]
    fn it_pauses_longer_and_longer_while_nothing_holds() {
        let mut length = DraftLength::new(0);
        let tried = play(&mut length, 8, 2000, 0);
        let num_tried: u32 = tried.iter().sum();
        // 16 drafts at first, then 4 after each pause of 16, 32, 64, 128, 256, 512 and 512 steps.
        assert_eq!(num_tried, 16 + 7 * 4);
        let pauses = tried.split(|&num| num > 0).map(<[u32]>::len);
        let pauses: Vec<_> = pauses.filter(|&len| len > 0).collect();
        assert_eq!(pauses[..7], [16, 32, 64, 128, 256, 512, 512]);
    }

    #[test]
    fn one_in_four_breaks_even() {
        let mut length = DraftLength::new(0);
        for at in 0..1000 {
            assert!(length.next(1) == 1, "{at}");
            length.note_checked(1, u32::from(at % 4 == 0));
        }
        for at in 0..1000 {
            if length.next(1) == 0 {
                return;
            }
            length.note_checked(1, u32::from(at % 5 == 0));
        }
        panic!("one in five never pauses");
    }

    /// Drawing costs half a step and checking a quarter, so three in four drafts must be right.
    #[test]
    fn what_drawing_costs_must_be_won_too() {
        for (one_fails_in, pays) in [(5, true), (4, true), (3, false)] {
            let mut length = DraftLength::new(50);
            let mut num_pauses = 0;
            for at in 0..1000 {
                match length.next(1) {
                    0 => num_pauses += 1,
                    _ => length.note_checked(1, u32::from(at % one_fails_in != 0)),
                }
            }
            assert_eq!(num_pauses == 0, pays, "one fails in {one_fails_in}");
        }
    }

    #[test]
    fn a_draft_as_dear_as_a_step_is_only_tried() {
        let mut length = DraftLength::new(100);
        let tried = play(&mut length, 8, 2000, 64);
        let num_tried: u32 = tried.iter().sum();
        // Each draft loses the cost of its row: 2 + 4 + 8 + 8 at first, then 1 + 2 + 4 after each of seven pauses.
        assert_eq!(num_tried, 22 + 7 * 7);
    }

    #[test]
    fn drawn_in_vain_is_paid_for() {
        let mut length = DraftLength::new(50);
        for _ in 0..7 {
            length.note_unused(1);
            assert!(length.next(1) > 0);
        }
        length.note_unused(1);
        assert_eq!(length.next(1), 0);
    }
    /// Each draft costs half a step, so three cost 150. Speculation pauses at a loss of 400: after two times three
    /// drafts, two more drafts reach it.
    #[test]
    fn each_draft_drawn_in_vain_is_paid_for() {
        let mut length = DraftLength::new(50);
        for _ in 0..2 {
            length.note_unused(3);
            assert!(length.next(8) > 0);
        }
        length.note_unused(2);
        assert_eq!(length.next(8), 0);
    }
}
