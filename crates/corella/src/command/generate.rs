//! `corella generate`: one answer, and its speed.

use std::io::{self, Write};
use std::time::{Duration, Instant};

use corella_core::TokenId;
use corella_cpu::{MachineLimits, Profile, detect_isa, measure_limits};

use crate::arguments::config::{Generate, Prompt};
use crate::command::limit_share::{Limit, LimitShare};
use crate::command::profile_table::{self, Peak};
use crate::{Error, Llm, TokenCost};

pub fn run(config: Generate) -> Result<(), Error> {
    let mut llm = Llm::load(&config.source, &config.options)?;
    llm.engine.wait_disk_opened();
    // Packed weights are written to the cache while a server runs; here that would slow the answer.
    llm.weight_keepers.clear();
    let prompt = match config.prompt {
        Prompt::Chat { system, message } => llm.encode_chat(system.as_deref(), &message)?,
        Prompt::Raw(text) => llm.encode(&text)?,
        Prompt::MadeUp { num_tokens } => made_up_prompt(num_tokens, llm.config.spec.vocab_size),
    };
    let num_threads = llm.hardware.executor.num_threads;
    let isa = config.options.isa.unwrap_or_else(detect_isa);
    let measure = || {
        measure_limits(num_threads, isa)
            .map_err(|error| Error::Io("measuring the machine".to_owned(), error))
    };
    let with_limits = config.compare_with_limits && llm.hardware.executor.device == "cpu";
    let limits_before = with_limits.then(measure).transpose()?;
    let mut speed = Speed::start();
    let mut out = io::stdout().lock();
    for event in llm.stream(prompt, &config.params)? {
        let event = event?;
        speed.handle_token(event.num_prompt_tokens - event.num_cached_tokens);
        if write(&mut out, &event.text).is_err() {
            // The reader has closed the pipe.
            return Ok(());
        }
    }
    let _ = write(&mut out, "\n");
    let limits = match limits_before {
        Some(before) => Some(before.best_of(&measure()?)),
        None => None,
    };
    if config.shows_speed {
        speed.report(&llm, limits.as_ref(), config.options.profile.as_deref());
    }
    Ok(())
}

fn write(out: &mut impl Write, text: &str) -> io::Result<()> {
    out.write_all(text.as_bytes())?;
    out.flush()
}

/// Returns an arbitrary prompt, the same in every run.
fn made_up_prompt(num_tokens: usize, vocab_size: usize) -> Vec<TokenId> {
    const MULTIPLIER: usize = 7919;
    (1..=num_tokens)
        .map(|i| (i * MULTIPLIER % vocab_size) as TokenId)
        .collect()
}

struct Speed {
    start: Instant,
    first_token: Option<Instant>,
    last_token: Instant,
    num_prompt_tokens: usize,
    num_output_tokens: usize,
}

impl Speed {
    fn start() -> Self {
        let start = Instant::now();
        Self {
            start,
            first_token: None,
            last_token: start,
            num_prompt_tokens: 0,
            num_output_tokens: 0,
        }
    }

    fn handle_token(&mut self, num_prompt_tokens: u32) {
        self.last_token = Instant::now();
        self.first_token.get_or_insert(self.last_token);
        self.num_prompt_tokens = num_prompt_tokens as usize;
        self.num_output_tokens += 1;
    }

    fn report(&self, llm: &Llm, limits: Option<&MachineLimits>, profile: Option<&Profile>) {
        let Some(first_token) = self.first_token else {
            return;
        };
        let prefill = first_token - self.start;
        let decode = self.last_token - first_token;
        let num_decoded = self.num_output_tokens - 1;
        let mut prefill_line = line("prefill", self.num_prompt_tokens, prefill);
        let mut decode_line = line("decode", num_decoded, decode);
        let mut tables = Vec::new();
        if let Some(limits) = limits {
            let hardware = &llm.hardware;
            let cost = TokenCost {
                spec: &llm.config.spec,
                weight_format: hardware.weight_format,
                kv_format: hardware.kv_format,
            };
            let Peak { flops_per_s, name } = Peak::of(hardware.weight_format, limits);
            let flops = cost.prefill_flops(self.num_prompt_tokens) / prefill.as_secs_f64();
            prefill_line += &format!(
                "  {:.2} of {:.2} TFLOP/s {name} peak ({})",
                flops / 1e12,
                flops_per_s / 1e12,
                LimitShare::new(Limit::Arithmetic, flops, flops_per_s)
            );
            if num_decoded > 0 {
                let context = self.num_prompt_tokens as f64 + self.num_output_tokens as f64 / 2.0;
                let bytes = cost.decode_bytes(context) * num_decoded as f64 / decode.as_secs_f64();
                decode_line += &format!(
                    "  {:.1} of {:.1} GB/s memory bandwidth ({})",
                    bytes / 1e9,
                    limits.read_bytes_per_s / 1e9,
                    LimitShare::new(Limit::Memory, bytes, limits.read_bytes_per_s)
                );
            }
            if let Some(profile) = profile {
                tables = profile_table::tables(profile, hardware, limits);
            }
        }
        eprintln!("{prefill_line}");
        if num_decoded > 0 {
            eprintln!("{decode_line}");
        }
        for table in tables {
            eprintln!("\n{table}");
        }
    }
}

fn line(name: &str, num_tokens: usize, duration: Duration) -> String {
    let seconds = duration.as_secs_f64();
    let rate = num_tokens as f64 / seconds;
    format!("{name:<8} {num_tokens:>6} tokens  {seconds:>8.3} s  {rate:>9.1} tokens/s")
}
