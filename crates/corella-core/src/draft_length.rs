//! How many tokens to guess, by how guesses have fared: more while they hold, fewer when they do
//! not, none for a while when they do not pay.

/// Of one request. Whole numbers only, so that equal histories guess alike.
#[derive(Debug)]
pub(crate) struct DraftLength {
    length: u32,
    /// What drafts have brought in, less what they cost.
    balance: i32,
    /// Proposals still to be left out, and how many it will be the next time.
    pause: u32,
    next_pause: u32,
}

/// A draft that holds pays for itself and so many that do not: on a CPU a further row costs a
/// fraction of a step of its own.
const GAIN: i32 = 3;
/// With this much lost guessing pauses.
const MAX_LOSS: i32 = 16;
/// Success long ago is no reason to go on.
const MAX_BALANCE: i32 = 32;
/// What may still be lost after a pause before the next one.
const TRIAL: i32 = 4;
const FIRST_LENGTH: u32 = 2;
const FIRST_PAUSE: u32 = 16;
const MAX_PAUSE: u32 = 512;

impl Default for DraftLength {
    fn default() -> Self {
        Self {
            length: FIRST_LENGTH,
            balance: 0,
            pause: 0,
            next_pause: FIRST_PAUSE,
        }
    }
}

impl DraftLength {
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
        let change = GAIN * num_accepted as i32 - num_rejected;
        self.balance = (self.balance + change).min(MAX_BALANCE);
        if num_rejected > 0 {
            self.length = ((num_drafts + num_accepted) / 2).max(1);
        } else if num_drafts >= self.length {
            self.length = 2 * num_drafts;
        }
        if self.balance > 0 {
            self.next_pause = FIRST_PAUSE;
        }
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
        let mut length = DraftLength::default();
        assert_eq!(play(&mut length, 8, 5, 64), [2, 4, 8, 8, 8]);
        assert_eq!(play(&mut length, 3, 2, 64), [3, 3]);
    }

    #[test]
    fn it_goes_half_way_to_what_holds() {
        let mut length = DraftLength::default();
        play(&mut length, 16, 8, 64);
        assert_eq!(play(&mut length, 16, 4, 5), [16, 10, 7, 6]);
    }

    #[test]
    fn it_pauses_longer_and_longer_while_nothing_holds() {
        let mut length = DraftLength::default();
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
        let mut length = DraftLength::default();
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
}
