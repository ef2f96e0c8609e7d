//! Packed bytes read back from their documented places.

use super::*;

fn row(len: usize, lowest: i32, num_values: i32) -> Vec<i8> {
    // 37 is coprime to every `num_values`, so each value occurs.
    (0..len as i32)
        .map(|i| (i * 37 % num_values + lowest) as i8)
        .collect()
}

/// Reads the documented bytes of a lane's inputs.
#[test]
fn bytes_of_a_lane_are_neighbouring_inputs_of_each_block() {
    let quants = row(200, -128, 256);
    let mut packed = PackedWeight::new(WeightLayout::Int8Channels, quants.len());
    let groups = GroupedRow {
        quants: quants.clone(),
        scales: vec![0.5],
        minimums: Vec::new(),
    };
    packed.push(&groups, quants.len());
    assert_eq!(
        (packed.integers.len(), &packed.channel_scales[..]),
        (256, &[0.5][..])
    );
    for (at, byte) in packed.integers.iter().enumerate() {
        let (run, lane, in_lane) = (at / 64, at % 64 / 16, at % 16);
        let (block, word, place) = (in_lane / 8, in_lane % 8 / 4, in_lane % 4);
        let input = run * 64 + block * 32 + lane * 8 + word * 4 + [0, 2, 1, 3][place];
        let expected = quants.get(input).copied().unwrap_or(0);
        assert_eq!(*byte as i8, expected, "byte {at}");
    }
}

#[test]
fn nibbles_of_a_word_are_eight_inputs() {
    let quants = row(256, -8, 16);
    let layout = WeightLayout::Int4Groups {
        group_len: 128,
        has_minimum: false,
    };
    let mut packed = PackedWeight::new(layout, quants.len());
    let groups = GroupedRow {
        quants: quants.clone(),
        scales: vec![1.0, 0.25],
        minimums: Vec::new(),
    };
    packed.push(&groups, 128);
    for (at, word) in packed.integers.as_chunks::<4>().0.iter().enumerate() {
        let word = u32::from_le_bytes(*word);
        let (unit, lane, block) = (at / 16, at % 16 / 4, at % 4);
        for (i, nibble) in [0, 4, 1, 5, 2, 6, 3, 7].into_iter().enumerate() {
            let input = unit * 128 + block * 32 + lane * 8 + i;
            assert_eq!(
                (word >> (4 * nibble) & 15) as i32 - 8,
                i32::from(quants[input])
            );
        }
    }
    let scales = packed
        .scales
        .iter()
        .map(|x| x.to_f32() * packed.channel_scales[0]);
    assert!(scales.eq([1.0, 0.25]));
}

#[test]
fn scales_have_the_range_of_f32_and_padding_has_none() {
    let layout = WeightLayout::Int4Groups {
        group_len: 32,
        has_minimum: true,
    };
    let mut packed = PackedWeight::new(layout, 64);
    let groups = |scale: f32, minimums: Vec<f32>| GroupedRow {
        quants: row(64, if minimums.is_empty() { -8 } else { 0 }, 16),
        scales: vec![scale],
        minimums,
    };
    packed.push(&groups(3e-20, vec![-7.5e-20]), 64);
    // This row has no minimums, but another row has some.
    packed.push(&groups(2.0, Vec::new()), 64);
    let of = |values: &[f16], at: usize| values[at].to_f32() * packed.channel_scales[at / 4];
    for at in [0, 1] {
        assert!((of(&packed.scales, at) / 3e-20 - 1.0).abs() < 5e-4);
        assert!((of(&packed.minimums, at) / -7.5e-20 - 1.0).abs() < 5e-4);
        assert_eq!(of(&packed.scales, at + 2), 0.0);
        assert_eq!(
            (of(&packed.scales, at + 4), of(&packed.minimums, at + 4)),
            (2.0, -16.0)
        );
    }
    assert_eq!(packed.integers[..64], packed.integers[64..]);
}

#[test]
fn groups_lie_within_those_of_the_checkpoint() {
    let within = WeightLayout::group_len_within;
    assert_eq!(within(128, 4096), Some(128));
    assert_eq!(within(256, 4096), Some(128));
    assert_eq!(within(64, 4096), Some(64));
    assert_eq!(within(96, 4096), Some(32));
    // The whole row.
    assert_eq!(within(100, 100), Some(128));
    assert_eq!(within(16, 4096), None);
}
