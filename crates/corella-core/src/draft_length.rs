//! How many tokens to guess, by how guesses have fared: more while they hold, fewer when they do
//! not, none for a while when they do not pay.

use crate::SchedulerConfig;

/// Of one request. Whole numbers only, so that equal histories guess alike; gains and costs are
/// hundredths of a step.
#[derive(Debug)]
pub(crate) struct DraftLength {
    length: u32,
    /// What drawing a draft costs, before it is checked.
    draw_cost: i32,
    /// What drafts have brought in, less what they cost.
    balance: i32,
    /// Proposals still to be left out, and how many it will be the next time.
    pause: u32,
    next_pause: u32,
}

/// A draft that holds spares a step.
const GAIN: i32 = 100;
/// Checking a draft is a further row of a step: on a CPU a fraction of a step of its own.
const ROW_COST: i32 = GAIN - SchedulerConfig::MAX_DRAW_COST as i32;
/// What costs more is lost as soon as it is tried.
const MAX_COUNTED_COST: u32 = 1000;
/// With this much lost guessing pauses.
const MAX_LOSS: i32 = 16 * ROW_COST;
/// Success long ago is no reason to go on.
const MAX_BALANCE: i32 = 32 * ROW_COST;
/// What may still be lost after a pause before the next one.
const TRIAL: i32 = 4 * ROW_COST;
const FIRST_LENGTH: u32 = 2;
const FIRST_PAUSE: u32 = 16;
const MAX_PAUSE: u32 = 512;

impl DraftLength {
    /// For drafts that cost `draw_cost` hundredths of a step each to draw.
    pub fn new(draw_cost: u32) -> Self {
        Self {
            length: FIRST_LENGTH,
            draw_cost: draw_cost.min(MAX_COUNTED_COST) as i32,
            balance: 0,
            pause: 0,
            next_pause: FIRST_PAUSE,
        }
    }

    /// For the next step; 0 in a pause.
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

    /// So many were drawn and not computed.
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

    /// Steps in a row in which so many of each draft hold, and how many were tried in each.
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
        // 16 at first, then 4 after each of 16, 32, 64, 128, 256, 512 and 512 steps.
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

    /// Half a step each: with the row three in four must hold.
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
        // Each loses its row. 2 + 4 + 8 + 8 at first, then 1 + 2 + 4 after each of seven pauses.
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
}
