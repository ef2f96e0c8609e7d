//! The cost of masks: follows each schema of a file with random tokens, and prints the time per mask.
//!
//! ```sh
//! cargo run --release -p corella-text --example mask_cost -- MODEL/tokenizer.json tests/schemas/schemas.jsonl
//! ```

use std::time::{Duration, Instant};

use corella_text::{GrammarCompiler, GrammarSource, GrammarState, Tokenizer};

/// An answer to an unbounded schema ends here.
const MAX_TOKENS: usize = 100;

fn main() {
    let paths: Vec<_> = std::env::args().skip(1).collect();
    let [tokenizer, schemas] = &paths[..] else {
        eprintln!("usage: mask_cost TOKENIZER.json SCHEMAS.jsonl");
        std::process::exit(2);
    };
    let read =
        |path: &String| std::fs::read(path).unwrap_or_else(|error| panic!("{path}: {error}"));
    let tokenizer = Tokenizer::from_bytes(&read(tokenizer)).expect("a tokenizer.json");
    let begun = Instant::now();
    let compiler = GrammarCompiler::new(&tokenizer, tokenizer.vocab_size()).expect("a vocabulary");
    println!(
        "{} tokens, read in {:?}",
        tokenizer.vocab_size(),
        begun.elapsed()
    );
    let (mut compiling, mut masks) = (Vec::new(), Vec::new());
    for line in String::from_utf8(read(schemas)).expect("text").lines() {
        let schema = serde_json::from_str(line).expect("a schema on each line");
        let begun = Instant::now();
        let Ok(grammar) = compiler.compile(&GrammarSource::JsonSchema(schema)) else {
            continue;
        };
        compiling.push(begun.elapsed());
        follow(grammar.start(), compiling.len() as u64, &mut masks);
    }
    report("schemas compiled", compiling);
    report("masks", masks);
}

/// Draws allowed tokens, all equally likely.
fn follow(mut answer: GrammarState, seed: u64, masks: &mut Vec<Duration>) {
    let mut state = seed;
    for _ in 0..MAX_TOKENS {
        let begun = Instant::now();
        let words = answer.allowed().expect("a mask");
        masks.push(begun.elapsed());
        let num_allowed: u32 = words.iter().map(|word| word.count_ones()).sum();
        if num_allowed == 0 {
            return;
        }
        // A linear congruential generator, by Knuth's constants.
        state = state
            .wrapping_mul(6364136223846793005)
            .wrapping_add(1442695040888963407);
        let mut nth = (state >> 33) as u32 % num_allowed;
        let mut bits = (0..words.len() as u32 * 32)
            .filter(|at| words[*at as usize / 32] >> (at % 32) & 1 == 1);
        let token = bits.find(|_| {
            let is_it = nth == 0;
            nth = nth.wrapping_sub(1);
            is_it
        });
        let begun = Instant::now();
        answer
            .push(token.expect("an allowed token"))
            .expect("it is allowed");
        *masks.last_mut().expect("a mask") += begun.elapsed();
    }
}

fn report(what: &str, mut times: Vec<Duration>) {
    times.sort();
    let at = |share: f64| times[((times.len() - 1) as f64 * share) as usize];
    let mean = times.iter().sum::<Duration>() / times.len() as u32;
    println!(
        "{} {what}: mean {mean:?}, median {:?}, 99 in 100 within {:?}, longest {:?}",
        times.len(),
        at(0.5),
        at(0.99),
        at(1.0)
    );
}
