//! Changes of binary files.

use crate::Random;

/// The longest run that one change adds.
const MAX_ADDED: usize = 4096;

/// Makes a few changes. A change flips a bit, overwrites a number, removes or repeats a run of bytes, or copies a run
/// from `other`, an input of the same kind. Places near the beginning are likelier, because headers are there.
pub fn mutate_bytes(random: &mut Random, bytes: &mut Vec<u8>, other: &[u8]) {
    for _ in 0..1 + random.magnitude_below(6) {
        mutate_once(random, bytes, other);
    }
}

fn mutate_once(random: &mut Random, bytes: &mut Vec<u8>, other: &[u8]) {
    let at = place(random, bytes.len());
    let rest = bytes.len() - at;
    match random.below(10) {
        0 if rest > 0 => bytes[at] ^= 1 << random.below(8),
        1 if rest > 0 => bytes[at] = random.next_u64() as u8,
        2..=4 => overwrite_number(random, &mut bytes[at..]),
        5 => {
            let len = random.magnitude_below(rest + 1);
            bytes.drain(at..at + len);
        }
        6 => {
            let len = random.magnitude_below(rest.min(MAX_ADDED) + 1);
            let run = bytes[at..at + len].to_vec();
            bytes.splice(at..at, run);
        }
        7 => {
            let run = vec![random.next_u64() as u8; random.magnitude_below(MAX_ADDED)];
            bytes.splice(at..at, run);
        }
        8 => {
            let from = place(random, other.len());
            let len = random.magnitude_below((other.len() - from).min(MAX_ADDED) + 1);
            let replaced = random.magnitude_below(rest.min(len) + 1);
            bytes.splice(at..at + replaced, other[from..from + len].iter().copied());
        }
        _ => bytes.truncate(at),
    }
}

fn place(random: &mut Random, len: usize) -> usize {
    match random.once_in(2) {
        true => random.below(len + 1),
        false => random.magnitude_below(len + 1),
    }
}

/// Writes a number at which sizes and counts fail, or a neighbour of the present one.
fn overwrite_number(random: &mut Random, bytes: &mut [u8]) {
    let width = random.pick(&[1, 2, 4, 8]);
    let Some(field) = bytes.get_mut(..width) else {
        return;
    };
    let mut wide = [0; 8];
    wide[..width].copy_from_slice(field);
    let old = u64::from_le_bytes(wide);
    let power = 1u64 << random.below(64);
    let new = match random.below(6) {
        0 => old.wrapping_add(1),
        1 => old.wrapping_sub(1),
        2 => old.wrapping_mul(1 + random.below(300) as u64),
        3 => power,
        4 => power.wrapping_neg(),
        _ => power.wrapping_sub(1),
    };
    field.copy_from_slice(&new.to_le_bytes()[..width]);
    if random.once_in(8) {
        field.reverse();
    }
}
