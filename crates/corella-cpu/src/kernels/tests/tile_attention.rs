//! Tests of the attention kernels with matrix tiles.

use half::bf16;

use super::super::*;
use super::{integers, random, tables};

#[test]
fn integers_are_themselves_in_bf16() {
    const HEAD_DIM: usize = 16;
    let integers: [i8; KEY_TILE * HEAD_DIM] = std::array::from_fn(|i| i.min(254) as i16 as i8);
    let integers = integers.map(|i| i.wrapping_sub(127));
    for (_, kernels) in tables() {
        let Some(tiles) = &kernels.tile_attention else {
            continue;
        };
        let mut wide = [bf16::NAN; KEY_TILE * HEAD_DIM];
        let (from, to) = (integers.as_ptr().cast(), wide.as_mut_ptr().cast());
        // SAFETY: the source is a tile whose pairs of dimensions are contiguous, and the target is as large.
        unsafe { (tiles.widen_keys)(from, KEY_TILE * 2, HEAD_DIM, to, &mut LineQueue::new(1)) };
        assert_eq!(wide.map(f32::from), integers.map(f32::from));
    }
}

/// Compares attention with tiles to sums in f64, and rows computed together to each row alone.
#[test]
fn tile_attention_weighs_what_may_be_seen() {
    for (isa, kernels) in tables() {
        if let Some(tiles) = &kernels.tile_attention {
            for (head_dim, num_positions) in [(64, 48), (32, 200), (96, 256), (128, 33)] {
                check_tile_attention(isa, tiles, head_dim, num_positions, false);
                check_tile_attention(isa, tiles, head_dim, num_positions, true);
            }
        }
    }
}

#[test]
fn products_during_a_softmax_are_what_the_kernels_give() {
    const HEAD_DIM: usize = 64;
    let bits = |len: usize, seed| -> Vec<u16> {
        let values = random(len, seed);
        values
            .into_iter()
            .map(|x| bf16::from_f32(x).to_bits())
            .collect()
    };
    for (isa, kernels) in tables() {
        let Some(tiles) = &kernels.tile_attention else {
            continue;
        };
        for num_rows in [17, 32] {
            let queries = bits(num_rows * HEAD_DIM, 1);
            let keys = bits(2 * KEY_TILE * HEAD_DIM, 2);
            let weights = bits(2 * ROW_TILE_LEN, 3);
            let values = bits(2 * VALUE_TILE * HEAD_DIM, 4);
            let groups: Vec<*const u8> = (keys.chunks(KEY_TILE * HEAD_DIM))
                .map(|tile| tile.as_ptr().cast())
                .collect();
            let score_rows = QUERY_TILE_ROWS * TILE_SOFTMAX_BLOCK;
            let mut expected_scores = vec![f32::NAN; score_rows];
            let mut expected_out = random(QUERY_TILE_ROWS * HEAD_DIM, 5);
            let mut scores = expected_scores.clone();
            let mut out = expected_out.clone();
            let mut products = vec![TileProduct {
                a: queries.as_ptr().cast(),
                a_stride: HEAD_DIM * 2,
                a_step: TILE_K * 2,
                b: [groups[0], groups[1]],
                b_stride: KEY_TILE * 4,
                b_step: KEY_TILE * TILE_K * 2,
                num_blocks: HEAD_DIM / TILE_K,
                out: scores.as_mut_ptr(),
                out_stride: TILE_SOFTMAX_BLOCK * 4,
                right: KEY_TILE * 4,
                below: 16 * TILE_SOFTMAX_BLOCK * 4,
                adds: false,
            }];
            for dim in (0..HEAD_DIM).step_by(32) {
                let values = values[dim * VALUE_TILE..].as_ptr().cast::<u8>();
                products.push(TileProduct {
                    a: weights.as_ptr().cast(),
                    a_stride: VALUE_TILE * 2,
                    a_step: ROW_TILE_LEN * 2,
                    b: [values, values.wrapping_add(1024)],
                    b_stride: VALUE_TILE * 2,
                    b_step: HEAD_DIM * VALUE_TILE * 2,
                    num_blocks: 2,
                    out: out[dim * QUERY_TILE_ROWS..].as_mut_ptr(),
                    out_stride: 64,
                    right: 2048,
                    below: 1024,
                    adds: true,
                });
            }
            let zeros = vec![0.0; score_rows];
            let mut own_weights = vec![0; QUERY_TILE_ROWS * TILE_ATTENTION_BLOCK];
            let mut own_out = vec![0.0; QUERY_TILE_ROWS * HEAD_DIM];
            let softmax = TileSoftmax {
                scores: zeros.as_ptr(),
                scale: 1.0,
                scales: None,
                start: 0,
                ends: &vec![TILE_SOFTMAX_BLOCK; num_rows],
                rows: &mut vec![RowSums::NONE; num_rows],
                weights: own_weights.as_mut_ptr(),
                head_dim: HEAD_DIM,
                out: own_out.as_mut_ptr(),
            };
            // SAFETY: the extents are those that the kernels demand.
            unsafe {
                (tiles.configure)(num_rows);
                (tiles.scores)(
                    queries.as_ptr(),
                    num_rows,
                    HEAD_DIM * 2,
                    KeyTiles {
                        tiles: &groups,
                        stride: KEY_TILE * 4,
                        head_dim: HEAD_DIM,
                    },
                    expected_scores.as_mut_ptr(),
                    &mut LineQueue::new(1),
                );
                (tiles.values)(
                    weights.as_ptr(),
                    num_rows,
                    ValueTiles {
                        first: values.as_ptr(),
                        num_tiles: 2,
                        head_dim: HEAD_DIM,
                    },
                    0..HEAD_DIM,
                    expected_out.as_mut_ptr(),
                    &mut LineQueue::new(1),
                );
                (tiles.softmax)(softmax, &products);
                (tiles.release)();
            }
            let same =
                |a: &[f32], b: &[f32]| a.iter().zip(b).all(|(a, b)| a.to_bits() == b.to_bits());
            assert!(
                same(&scores, &expected_scores),
                "{isa} {num_rows} rows: scores"
            );
            assert!(same(&out, &expected_out), "{isa} {num_rows} rows: values");
        }
    }
}

/// Compares the kernels that read keys and values in pages with those that read copies, bit for bit.
#[test]
fn in_place_attention_is_the_same() {
    const PAGE_SIZE: usize = 2 * KEY_TILE;
    for (isa, kernels) in tables() {
        let Some(tiles) = &kernels.tile_attention else {
            continue;
        };
        for (head_dim, num_positions) in [(64, 48), (32, 1), (96, 33), (128, 64), (160, 47)] {
            for num_rows in 1..=IN_PLACE_ROWS {
                for (is_int8, in_place) in [(false, tiles.in_place), (true, tiles.int8_in_place)] {
                    let Some(in_place) = &in_place else {
                        continue;
                    };
                    let page = Page::new(head_dim, num_positions, is_int8);
                    let [expected, actual] = [None, Some(in_place)]
                        .map(|in_place| page.attend(tiles, in_place, num_rows));
                    let bits = |values: &[f32]| -> Vec<u32> {
                        values.iter().map(|value| value.to_bits()).collect()
                    };
                    assert!(
                        bits(&actual) == bits(&expected),
                        "{isa} {num_rows} rows, {head_dim} dimensions, integers: {is_int8}"
                    );
                }
            }
        }
    }

    /// Keys and values of up to 64 positions in pages of two tiles, followed by NaN.
    struct Page {
        keys: Vec<u8>,
        values: Vec<u8>,
        head_dim: usize,
        num_positions: usize,
        is_int8: bool,
    }

    impl Page {
        fn new(head_dim: usize, num_positions: usize, is_int8: bool) -> Self {
            let element_bytes = if is_int8 { 1 } else { 2 };
            let bytes = |seed| -> Vec<u8> {
                let len = TILE_SOFTMAX_BLOCK * head_dim;
                match is_int8 {
                    true => integers(len, seed).into_iter().map(|x| x as u8).collect(),
                    false => (random(len, seed).into_iter())
                        .flat_map(|x| bf16::from_f32(x).to_le_bytes())
                        .collect(),
                }
            };
            let (keys, mut values) = (bytes(1), bytes(2));
            for position in num_positions..TILE_SOFTMAX_BLOCK {
                for i in 0..head_dim {
                    let at = (position / 2 * head_dim + i) * 2 + position % 2;
                    // In bf16 this is NaN.
                    values[at * element_bytes..][..element_bytes].fill(0xff);
                }
            }
            Self {
                keys,
                values,
                head_dim,
                num_positions,
                is_int8,
            }
        }

        fn attend(
            &self,
            tiles: &TileAttention,
            in_place: Option<&InPlaceAttention>,
            num_rows: usize,
        ) -> Vec<f32> {
            let head_dim = self.head_dim;
            let element_bytes = if self.is_int8 { 1 } else { 2 };
            let key_stride = 2 * PAGE_SIZE * element_bytes;
            let tile_bytes = KEY_TILE * head_dim * element_bytes;
            let num_tiles = self.num_positions.div_ceil(KEY_TILE);
            let keys: Vec<*const u8> = (0..num_tiles.next_multiple_of(2))
                .map(|tile| {
                    let page = tile / 2 * 2 * tile_bytes;
                    self.keys[page + tile % 2 * KEY_TILE * 2 * element_bytes..].as_ptr()
                })
                .collect();
            let values: Vec<*const u8> = (0..num_tiles)
                .map(|tile| self.values[tile * tile_bytes..].as_ptr())
                .collect();
            let round = |x: Vec<f32>| -> Vec<u16> {
                x.into_iter().map(|x| bf16::from_f32(x).to_bits()).collect()
            };
            let queries = round(random(num_rows * head_dim, 3));
            let weights = round(random(QUERY_TILE_ROWS * TILE_ATTENTION_BLOCK, 4));
            // Positions that do not exist have weight 0.
            let weights: Vec<u16> = (weights.into_iter().enumerate())
                .map(|(at, weight)| {
                    let position = at / ROW_TILE_LEN * VALUE_TILE + at % VALUE_TILE;
                    if position < self.num_positions {
                        weight
                    } else {
                        0
                    }
                })
                .collect();
            let mut scores = vec![0.0; QUERY_TILE_ROWS * TILE_SOFTMAX_BLOCK];
            let mut out = random(QUERY_TILE_ROWS * head_dim, 5);
            let mut copied_keys = vec![0_u16; keys.len() * KEY_TILE * head_dim];
            let mut copied_values = copied_keys.clone();
            let lines = &mut LineQueue::new(1);
            // SAFETY: the extents are those that the kernels demand.
            unsafe {
                let (q, q_stride) = (queries.as_ptr(), head_dim * 2);
                let mut key_tiles = KeyTiles {
                    tiles: &keys,
                    stride: key_stride,
                    head_dim,
                };
                if let Some(in_place) = in_place {
                    let InPlaceAttention {
                        scores: score,
                        values: weigh,
                    } = in_place;
                    score(q, num_rows, q_stride, key_tiles, scores.as_mut_ptr(), lines);
                    let values = PageValues {
                        tiles: &values,
                        num_positions: self.num_positions,
                        head_dim,
                    };
                    weigh(weights.as_ptr(), num_rows, values, out.as_mut_ptr(), lines);
                } else {
                    let copies = copied_keys.as_mut_ptr();
                    let copies: Vec<*const u8> = (0..keys.len())
                        .map(|tile| copies.add(tile * KEY_TILE * head_dim).cast_const().cast())
                        .collect();
                    if self.is_int8 {
                        for (from, to) in keys.iter().zip(&copies) {
                            let to = to.cast_mut().cast();
                            (tiles.widen_keys)(*from, key_stride, head_dim, to, lines);
                        }
                        (key_tiles.tiles, key_tiles.stride) = (&copies, KEY_TILE * 4);
                    }
                    (tiles.configure)(num_rows);
                    let to = scores.as_mut_ptr();
                    (tiles.scores)(q, num_rows, q_stride, key_tiles, to, lines);
                    let copy = match self.is_int8 {
                        true => tiles.widen_values,
                        false => tiles.copy_values,
                    };
                    for (tile, values) in values.iter().enumerate() {
                        let len = (self.num_positions - tile * KEY_TILE).min(KEY_TILE);
                        let to = tile / 2 * VALUE_TILE * head_dim + tile % 2 * KEY_TILE / 2 * 32;
                        copy(
                            *values,
                            len,
                            head_dim,
                            copied_values[to..].as_mut_ptr(),
                            lines,
                        );
                    }
                    let values = ValueTiles {
                        first: copied_values.as_ptr(),
                        num_tiles: num_tiles.div_ceil(2),
                        head_dim,
                    };
                    let (weights, to) = (weights.as_ptr(), out.as_mut_ptr());
                    (tiles.values)(weights, num_rows, values, 0..head_dim, to, lines);
                    (tiles.release)();
                }
            }
            scores.extend(out);
            scores
        }
    }
}

/// Checks attention over keys and values in bf16, or in 8-bit integers with scales.
fn check_tile_attention(
    isa: Isa,
    tiles: &TileAttention,
    head_dim: usize,
    num_positions: usize,
    is_int8: bool,
) {
    const SCALE: f32 = 0.3;
    let round =
        |values: Vec<f32>| -> Vec<bf16> { values.into_iter().map(bf16::from_f32).collect() };
    let len = num_positions * head_dim;
    let elements = |seed| match is_int8 {
        true => round(integers(len, seed).into_iter().map(f32::from).collect()),
        false => round(random(len, seed)),
    };
    let (keys, values) = (elements(1), elements(2));
    let padded = num_positions.next_multiple_of(TILE_SOFTMAX_BLOCK);
    let scales = [4, 5].map(|seed| -> Vec<f32> {
        let scale = |x: f32| if is_int8 { (x + 1.5) / 127.0 } else { 1.0 };
        random(padded, seed).into_iter().map(scale).collect()
    });
    // Memory beyond the last position must not affect a result.
    let mut key_tiles = vec![bf16::NAN; padded * head_dim];
    let mut value_tiles = key_tiles.clone();
    for position in 0..num_positions {
        let (tile, p) = (position / KEY_TILE, position % KEY_TILE);
        for i in 0..head_dim {
            let start = tile * KEY_TILE * head_dim;
            let from = position * head_dim + i;
            key_tiles[start + (i / 2 * KEY_TILE + p) * 2 + i % 2] = keys[from];
            value_tiles[start + (p / 2 * head_dim + i) * 2 + p % 2] = values[from];
        }
    }
    let bytes = |tile: &[bf16]| -> Vec<i8> { tile.iter().map(|x| x.to_f32() as i8).collect() };
    let mut copied_keys = vec![0_u16; padded * head_dim];
    let mut copied = vec![0_u16; padded * head_dim];
    for tile in 0..padded / KEY_TILE {
        let at = tile * KEY_TILE * head_dim..(tile + 1) * KEY_TILE * head_dim;
        let (keys, values) = (&key_tiles[at.clone()], &value_tiles[at.clone()]);
        let len = num_positions.saturating_sub(tile * KEY_TILE).min(KEY_TILE);
        let to = tile / 2 * VALUE_TILE * head_dim + tile % 2 * KEY_TILE / 2 * 32;
        let to = copied[to..].as_mut_ptr();
        if is_int8 {
            let (keys, values) = (bytes(keys), bytes(values));
            let (keys, values) = (keys.as_ptr().cast(), values.as_ptr().cast());
            // SAFETY: there is a tile of keys, a tile of values, and half a tile for the copied values.
            unsafe {
                let copied = copied_keys[at].as_mut_ptr();
                (tiles.widen_keys)(keys, KEY_TILE * 2, head_dim, copied, &mut LineQueue::new(1));
                (tiles.widen_values)(values, len, head_dim, to, &mut LineQueue::new(1));
            }
        } else {
            let keys = keys.iter().map(|key| key.to_bits());
            copied_keys[at]
                .iter_mut()
                .zip(keys)
                .for_each(|(to, key)| *to = key);
            let (values, lines) = (values.as_ptr().cast(), &mut LineQueue::new(1));
            // SAFETY: source and target are half a tile of values each.
            unsafe { (tiles.copy_values)(values, len, head_dim, to, lines) };
        }
    }
    let key_tiles: Vec<*const u8> = (copied_keys.chunks(KEY_TILE * head_dim))
        .map(|tile| tile.as_ptr().cast())
        .collect();
    // `limits` has the number of positions that each row attends to.
    let attend = |q: &[Vec<bf16>], limits: &[usize]| -> Vec<Vec<f32>> {
        let num_rows = q.len();
        let queries: Vec<bf16> = q.concat();
        let mut scores = vec![f32::NAN; QUERY_TILE_ROWS * TILE_SOFTMAX_BLOCK];
        let mut weights = vec![0_u16; QUERY_TILE_ROWS * TILE_ATTENTION_BLOCK];
        let mut out = vec![0.0; QUERY_TILE_ROWS * head_dim];
        let mut rows = vec![RowSums::NONE; num_rows];
        // SAFETY: the extents are those that the kernels demand.
        unsafe {
            (tiles.configure)(num_rows);
            for first in (0..num_positions).step_by(TILE_SOFTMAX_BLOCK) {
                (tiles.scores)(
                    queries.as_ptr().cast(),
                    num_rows,
                    head_dim * 2,
                    KeyTiles {
                        tiles: &key_tiles[first / KEY_TILE..][..TILE_SOFTMAX_BLOCK / KEY_TILE],
                        stride: KEY_TILE * 4,
                        head_dim,
                    },
                    scores.as_mut_ptr(),
                    &mut LineQueue::new(1),
                );
                (tiles.softmax)(
                    TileSoftmax {
                        scores: scores.as_ptr(),
                        scale: SCALE,
                        scales: is_int8.then(|| scales.each_ref().map(|s| s[first..].as_ptr())),
                        start: first,
                        ends: limits,
                        rows: &mut rows,
                        weights: weights.as_mut_ptr(),
                        head_dim,
                        out: out.as_mut_ptr(),
                    },
                    &[],
                );
            }
            let (weights, num_tiles) = (weights.as_ptr(), padded / VALUE_TILE);
            let to = out.as_mut_ptr();
            for dims in [0..32, 32..head_dim] {
                let values = copied.as_ptr();
                let lines = &mut LineQueue::new(1);
                let values = ValueTiles {
                    first: values,
                    num_tiles,
                    head_dim,
                };
                (tiles.values)(weights, num_rows, values, dims, to, lines);
            }
            (tiles.release)();
        }
        let rows = rows.iter().enumerate();
        rows.map(|(row, RowSums { sums, .. })| {
            let sum = sum_lanes(sums);
            let value = |i| out[tile_out_index(row, i)] / sum;
            (0..head_dim).map(value).collect()
        })
        .collect()
    };
    // Weights have 8 bits of precision. Values are at most 1, or at most 2.5 if they are integers with scales.
    let tolerance = if is_int8 { 1e-2 } else { 4e-3 };
    for num_rows in [1, 2, 15, 16, 17, 32] {
        // The scores of some rows are far apart, so that a later score raises the row's reference.
        let rows = random(num_rows * head_dim, 3);
        let q: Vec<Vec<bf16>> = (rows.chunks(head_dim).enumerate())
            .map(|(row, q)| round(q.iter().map(|q| q * (1 + row % 5 * 20) as f32).collect()))
            .collect();
        let limits: Vec<usize> = (0..num_rows)
            .map(|row| num_positions - row * 7 % num_positions)
            .collect();
        let together = attend(&q, &limits);
        for row in 0..num_rows {
            let alone = attend(&q[row..=row], &limits[row..=row]);
            assert_eq!(together[row], alone[0], "{isa} {num_rows} rows");
            let dot = |position: usize| -> f64 {
                let key = &keys[position * head_dim..][..head_dim];
                let terms = q[row].iter().zip(key);
                let sum: f64 = terms.map(|(a, b)| a.to_f64() * b.to_f64()).sum();
                sum * f64::from(SCALE) * f64::from(scales[0][position])
            };
            let max = (0..limits[row]).map(dot).fold(f64::MIN, f64::max);
            let weights: Vec<f64> = (0..limits[row]).map(|p| (dot(p) - max).exp()).collect();
            let sum: f64 = weights.iter().sum();
            for i in 0..head_dim {
                let terms = weights.iter().enumerate();
                let expected: f64 = terms
                    .map(|(p, w)| {
                        let scale = f64::from(scales[1][p]);
                        w / sum * values[p * head_dim + i].to_f64() * scale
                    })
                    .sum();
                let error = (f64::from(together[row][i]) - expected).abs();
                assert!(
                    error < tolerance,
                    "{isa} row {row}, dimension {i}: off by {error}"
                );
            }
        }
    }
}
