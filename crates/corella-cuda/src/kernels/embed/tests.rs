//! Compares embedded rows with the rows of the tables.

use super::*;
use crate::kernels::test_memory::{Random, device, download, is_near, rounded, upload, upload_as};

const VOCAB_SIZE: usize = 11;
const MAX_LEN: usize = 6;
const NUM_SLOTS: usize = 3;
/// The content of unwritten memory.
const UNTOUCHED: f32 = -7.5;

/// Rows are token, position, slot and span.
fn embed(element: Element, hidden: usize, has_positions: bool) {
    let device = device();
    let mut random = Random::new(3);
    let table = rounded(element, random.numbers(VOCAB_SIZE * hidden));
    let learned = rounded(element, random.numbers(MAX_LEN * hidden));
    let rows: [[i32; 4]; 5] = [
        [4, 0, 2, 0],
        // A token that an earlier step drew.
        [-1, 5, 1, 1],
        [0, -1, 0, 0],
        [10, 3, 0, 2],
        [-1, 1, 2, 0],
    ];
    let drawn = [9u32, 7, 1];
    let residual = upload(&device, &vec![UNTOUCHED; rows.len() * hidden]);
    let history = upload(&device, &[99u32; NUM_SLOTS * MAX_LEN]);
    let buffers = [
        upload(&device, &rows),
        upload(&device, &drawn),
        upload_as(&device, element, &table),
        upload_as(&device, element, &learned),
    ];
    let [places, drawn_tokens, embedding, positions] = &buffers;
    let args = EmbedArgs {
        rows: places.pointer(),
        drawn: drawn_tokens.pointer(),
        embedding: embedding.pointer(),
        positions: match has_positions {
            true => positions.pointer(),
            false => DevicePointer::NULL,
        },
        residual: residual.pointer(),
        history: history.pointer(),
        vocab_size: VOCAB_SIZE as u32,
        hidden: hidden as u32,
        max_len: MAX_LEN as u32,
        scale: 1.5,
    };
    let kernel = EmbedKernel::load(&device, element).unwrap();
    // SAFETY: the buffers have the shapes of the arguments.
    unsafe { kernel.launch(&device, rows.len(), &args) }.unwrap();

    let written: Vec<f32> = download(&device, &residual, rows.len() * hidden);
    let tokens: Vec<u32> = download(&device, &history, NUM_SLOTS * MAX_LEN);
    let mut expected_tokens = vec![99; NUM_SLOTS * MAX_LEN];
    for (row, [token, position, slot, _]) in rows.into_iter().enumerate() {
        let written = &written[row * hidden..][..hidden];
        let (Ok(position), slot) = (usize::try_from(position), slot as usize) else {
            assert!(written.iter().all(|x| *x == UNTOUCHED), "a padding row");
            continue;
        };
        let token = usize::try_from(token).unwrap_or(drawn[slot] as usize);
        expected_tokens[slot * MAX_LEN + position] = token as u32;
        for (i, actual) in written.iter().enumerate() {
            let added = match has_positions {
                true => learned[position * hidden + i],
                false => 0.0,
            };
            let exact = f64::from(table[token * hidden + i]) * 1.5 + f64::from(added);
            assert!(
                is_near(Element::F32, *actual, exact),
                "row {row}, element {i}"
            );
        }
    }
    assert_eq!(tokens, expected_tokens);
}

#[test]
fn rows_are_those_of_their_tokens() {
    embed(Element::F32, 40, false);
    embed(Element::F32, 21, true);
    embed(Element::Bf16, 40, true);
    embed(Element::Bf16, 21, false);
    // More chunks than a block can have threads.
    embed(Element::Bf16, 8 * 1024 + 16, true);
}
