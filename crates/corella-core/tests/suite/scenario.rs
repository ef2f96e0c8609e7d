//! The scheduler's behaviour as text: each file under `scenarios/` states one rule and an example.
//!
//! A line that begins in the first column is a comment or a command. The indented lines below a
//! command are its outcome, which `UPDATE_SCENARIOS=1 cargo test -p corella-core --test suite scenario`
//! rewrites.
//!
//! ```text
//! config pages=16 page=4 budget=10   the limits, before all other commands; show=pages also prints
//!                                    changes of pages
//! config groups=full,w8              two KV groups, the second with a window of 8 positions
//! config snapshots=3 interval=2      a model with recurrent layers; distance=1 is the least distance that saves enough;
//!                                    `(S1)` after a span says that snapshot 1 gets its state, and `S1:` before a span
//!                                    says that it starts from snapshot 1
//! add a prompt=12 max=4              request a, with a prompt of 12 unique tokens
//! add b prompt=xyxy max=2 end=z      each letter is a token
//! add c=3 prompt=5                   the choices c0, c1 and c2 of one call
//! add d prompt=4 came=0              it arrived at 0 us, before requests that were added earlier
//! add e prompt=4 ttft=9000           its TTFT objective is 9,000 us; each step takes 1,000 us
//! ask                                print the requests that could use drafts in the next step, and their numbers
//! give a=xyz                         give a the drafts x, y and z, as a draft model would
//! step                               plan a step: `a 0+5` computes 5 tokens from position 0,
//!                                    `*` draws a token, `<2` takes the token that step 2 draws,
//!                                    `~xy` computes x and y as drafts after it
//! return                             the oldest step returns; each draw is a fresh token
//! return a=z                         the same, but a draws z; a=xyz draws after drafts that hold
//! return a=NaN                       the same, but no token can be drawn for a
//! fail                               the oldest step fails
//! run                                plan and return steps until no work is left
//! pin xyxy                           pin the full pages of a prefix
//! add d prompt=xyxyz keep=4/9000     retain its first 4 tokens for 9,000 us; `keep=2/9000,4/3000` retains two beginnings
//! wait 9000                          9,000 us pass
//! add f prompt=4 drawn=xy            another node drew x and y for it
//! again f prompt=4 drawn=xy          the same, but it was accepted here before
//! add g prompt=4 scored=on           it wants the log-probabilities of its prompt: `a 0+5?1..6` returns
//!                                    log-probabilities of tokens 1 to 5, and `told` shows when they are emitted
//! add g prompt=4 pooled=last         it wants the hidden state of its last token: `a 0+5=last`
//!                                    returns it, and `told` shows when it is emitted
//! add g prompt=4 pooled=mean         it wants the mean of all: `a 0+5+` adds 5 to the sum
//! add g prompt=4 pooled=first        it wants the first token's hidden state, or with `max` the largest values
//! add g prompt=4 masked=on           each of its tokens is drawn through a mask
//! add g prompt=4 export=on           another node wants the KV of its prompt
//! facts                              the facts for that node since its last poll
//! release g                          all reads of g's pages have ended
//! renew g=9000                       extend the lease of g's pages to 9,000 us
//! reserve h prompt=4 until=9000      reserve pages; another node fills them by 9,000 us; made=7 names its arithmetic
//! arrive h=z                         h's KV has arrived, and z was drawn after it
//! arrive h                           h's KV has arrived, and no token was drawn after it
//! lose h · lose h=recompute          h's KV does not come: it ends, or is computed here
//! spills                             the requested copies to and from host memory
//! stored a · stored a=failed         a's pages are in host memory, or could not be copied there
//! restored a · restored a=failed     a has its KV back, or could not get it
//! fetch f prompt=xyxy soft=9 hard=99 reserve pages for the blocks of a prefix; requests follow it
//! fetch f prompt=xyxy medium=disk     the same, from a disk
//! fetched f=2                        the pages of two blocks are filled
//! fetched f=done · fetched f=lost    the writer has stopped
//! cancels                            the fetches whose writers have to stop
//! shorten f=2                        only the first two blocks come
//! look prompt=xyxy                   the number of settled blocks of a prefix
//! look prompt=xyxy from=1            the number for another node that has the first block and borrows the others
//! hold h prompt=xyxy until=9000      lend the blocks, and keep them unchanged; foreign=2 gives block 2 a foreign hash
//! hold h prompt=xyxy from=1          lend the blocks after the first
//! drop h                             all reads of h's blocks have ended: prints whether the hold was live
//! ended                              the holds whose readers have to stop
//! abort a                            abort a
//! end a · end a=reason               no token may follow a's, or no mask can be made for it
//! reset                              reset the prefix cache
//! stats · share · hits · drafts      print counters, the head-room share, hits, drafts
//! ```

mod config_line;
mod moved_kv;
mod retained;

use std::collections::BTreeMap;
use std::fmt::Write;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;

use self::config_line::ConfigLine;
use crate::line_diff::line_diff;
use crate::page_list::page_list;
use crate::pooling_name;
use crate::span_token::{drafts, letter, logprob};
use corella_core::{
    Arithmetic, Batch, BatchOutput, DraftRequest, FetchId, FinishReason, HeadRoom, HoldId,
    InputToken, LatencyObjectives, LostKv, Namespace, Request, RequestError, RequestId, Sample,
    SamplingParams, Scheduler, SlotId, StoppingCriteria, TokenId, Yield,
};

#[test]
fn scenarios() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/scenarios");
    let update = std::env::var_os("UPDATE_SCENARIOS").is_some();
    let mut paths: Vec<_> = std::fs::read_dir(folder)
        .unwrap()
        .map(|entry| entry.unwrap().path())
        .collect();
    paths.sort();
    assert!(!paths.is_empty(), "there are no scenario files");
    let (mut changed, mut broken) = (Vec::new(), Vec::new());
    for path in paths {
        let expected = std::fs::read_to_string(&path).unwrap();
        let name = path.file_name().unwrap().to_string_lossy().into_owned();
        let found = match World::try_play(&expected) {
            Ok(found) => found,
            Err(reason) => {
                broken.push(format!("{name}: {reason}"));
                continue;
            }
        };
        if found == expected {
            continue;
        }
        if update {
            std::fs::write(&path, found).unwrap();
        } else {
            changed.push(format!(
                "--- {name}, as expected\n+++ {name}, as found\n{}",
                line_diff(&expected, &found)
            ));
        }
    }
    assert!(
        changed.is_empty() && broken.is_empty(),
        "{} scenarios have another outcome than their files say, and {} panic:\n{}",
        changed.len(),
        broken.len(),
        [changed, broken].concat().join("\n")
    );
}

/// A panic in one scenario must not hide the outcomes of the others.
#[test]
fn a_panic_ends_one_scenario_and_names_its_line() {
    let script = "config pages=8\n# A rule.\nadd a prompt=4\nstep\n  a 0+4*\n";
    let unknown = format!("{script}stp\nreturn\n");
    assert!(World::try_play(script).is_ok());
    assert_eq!(
        World::try_play(&unknown),
        Err("line 6, `stp`: unknown command stp".to_owned())
    );
}

struct World {
    scheduler: Scheduler,
    show_pages: bool,
    names: BTreeMap<RequestId, String>,
    fetches: BTreeMap<FetchId, String>,
    holds: BTreeMap<HoldId, String>,
    /// The request in each slot.
    slots: BTreeMap<SlotId, RequestId>,
    inflight: Vec<Batch>,
    num_fresh_tokens: TokenId,
    now_us: u64,
    out: String,
}

impl World {
    /// Returns the script with its outcome, or the line of a panic and its message.
    fn try_play(script: &str) -> Result<String, String> {
        let mut at = (0, "");
        let play = AssertUnwindSafe(|| Self::play(script, &mut at));
        catch_unwind(play).map_err(|panic| {
            let message = match panic.downcast_ref::<String>() {
                Some(message) => message,
                None => panic.downcast_ref::<&str>().copied().unwrap_or("a panic"),
            };
            format!("line {}, `{}`: {message}", at.0, at.1)
        })
    }

    /// Plays a script; `at` becomes the number and the text of each line in turn.
    fn play<'a>(script: &'a str, at: &mut (usize, &'a str)) -> String {
        let mut world: Option<World> = None;
        let mut out = String::new();
        for (number, line) in (1..).zip(script.lines()) {
            *at = (number, line);
            if line.starts_with(' ') {
                continue;
            }
            writeln!(out, "{line}").unwrap();
            if line.is_empty() || line.starts_with('#') {
                continue;
            }
            let mut words = line.split_whitespace();
            let command = words.next().unwrap();
            let words: Vec<_> = words.collect();
            if command == "config" {
                match World::new(&words) {
                    Ok(new) => world = Some(new),
                    Err(error) => writeln!(out, "  refused: {error}").unwrap(),
                }
                continue;
            }
            let world = world.as_mut().expect("no config");
            world.run(command, &words);
            world.scheduler.check_invariants();
            out.push_str(&std::mem::take(&mut world.out));
        }
        out
    }

    fn new(words: &[&str]) -> Result<Self, corella_core::ConfigError> {
        let ConfigLine { config, show_pages } = ConfigLine::read(words);
        Ok(Self {
            scheduler: Scheduler::new(config)?,
            show_pages,
            names: BTreeMap::new(),
            fetches: BTreeMap::new(),
            holds: BTreeMap::new(),
            slots: BTreeMap::new(),
            inflight: Vec::new(),
            num_fresh_tokens: 0,
            now_us: 0,
            out: String::new(),
        })
    }

    fn run(&mut self, command: &str, words: &[&str]) {
        match command {
            "add" => self.add(words, false),
            "again" => self.add(words, true),
            "reserve" => self.reserve(words),
            "arrive" => {
                let (id, token) = self.named(words[0]);
                let token = token.and_then(|token| token.chars().next());
                let is_received = match token.map(TokenId::from) {
                    Some(token) => self.scheduler.handle_kv_arrived(id, token),
                    None => self.scheduler.handle_rows_arrived(id),
                };
                if !is_received {
                    self.say("nobody receives it");
                }
                self.print_outputs();
            }
            "lose" => {
                let (id, how) = self.named(words[0]);
                let how = match how {
                    Some(_) => LostKv::Recompute,
                    None => LostKv::End("its node has gone".into()),
                };
                if !self.scheduler.handle_kv_lost(id, how) {
                    self.say("nothing is held for it");
                }
                self.print_outputs();
            }
            "release" => {
                let (id, _) = self.named(words[0]);
                if !self.scheduler.release_hold(id) {
                    self.say("nothing is held for it");
                }
            }
            "renew" => {
                let (id, until) = self.named(words[0]);
                let until_us = until.expect("a time").parse().unwrap();
                if !self.scheduler.renew_hold(id, until_us) {
                    self.say("too late");
                }
            }
            "facts" => self.print_facts(),
            "fetch" | "fetched" | "shorten" | "cancels" | "look" | "hold" | "drop" | "ended" => {
                self.move_blocks(command, words);
            }
            "spills" => self.print_spills(),
            "stored" | "restored" => {
                let (id, how) = self.named(words[0]);
                let is_done = how.is_none();
                let is_known = match command {
                    "stored" => self.scheduler.handle_stored(id, is_done),
                    _ => self.scheduler.handle_restored(id, is_done),
                };
                if !is_known {
                    self.say("nothing is copied");
                }
                self.print_outputs();
            }
            "ask" => {
                let asked = self.scheduler.draft_requests();
                let asked = asked.iter().map(|request| {
                    let name = &self.names[&request.start.request];
                    let DraftRequest {
                        tokens, max_drafts, ..
                    } = request;
                    format!("{name} {max_drafts} behind {}", tokens.len())
                });
                let asked: Vec<_> = asked.collect();
                match asked.is_empty() {
                    true => self.say("nobody"),
                    false => self.say(&asked.join(", ")),
                }
            }
            "give" => {
                for word in words {
                    let (who, tokens) = word.split_once('=').unwrap();
                    let (id, _) = self.names.iter().find(|(_, name)| *name == who).unwrap();
                    let drafts = tokens.chars().map(TokenId::from).collect();
                    self.scheduler.give_drafts(*id, drafts);
                }
            }
            "step" => {
                if !self.step() {
                    self.say("nothing");
                }
            }
            "return" => self.return_oldest(words),
            "fail" => {
                let step = self.inflight.remove(0).step;
                self.scheduler.handle_step_failed(step, "injected");
                self.print_outputs();
            }
            "run" => loop {
                while self.step() {}
                if self.inflight.is_empty() {
                    break;
                }
                self.return_oldest(&[]);
            },
            "abort" => {
                let known = self.names.iter().find(|(_, name)| *name == words[0]);
                let id = known.map_or(RequestId(u64::MAX), |(id, _)| *id);
                if !self.scheduler.abort_request(id) {
                    self.say("it had ended");
                }
                self.print_outputs();
            }
            "end" => {
                let (id, why) = self.named(words[0]);
                let reason = match why {
                    Some(why) => FinishReason::Error(RequestError::NotMasked(why.into())),
                    None => FinishReason::EndToken,
                };
                if !self.scheduler.end_request(id, reason) {
                    self.say("it had ended");
                }
                self.print_outputs();
            }
            "reset" => match self.scheduler.reset_prefix_cache() {
                Ok(()) => self.say("done"),
                Err(in_use) => {
                    self.say(&format!(
                        "refused: {} pages in use",
                        in_use.num_pages_in_use
                    ));
                }
            },
            "wait" => self.wait(words[0]),
            "stats" => self.print_stats(),
            "pin" => {
                let tokens: Vec<_> = words[0].chars().map(TokenId::from).collect();
                match self.scheduler.pin_prefix(&Namespace::default(), &tokens) {
                    Ok(num_pages) => self.say(&format!("{num_pages} pages")),
                    Err(error) => self.say(&format!("refused: {error}")),
                }
            }
            "hits" => {
                let hits = self.scheduler.stats().prefix_hits;
                self.say(&format!(
                    "cached {} copied {} shared {} resumed {}",
                    hits.num_cached_tokens,
                    hits.num_copied_tokens,
                    hits.num_shared_tokens,
                    hits.num_resumed_tokens
                ));
            }
            "drafts" => {
                let stats = self.scheduler.stats();
                let (drafted, accepted) = (stats.num_draft_tokens, stats.num_accepted_draft_tokens);
                let by_position = stats.accepted_by_position.0;
                let num_positions = by_position.iter().take_while(|count| **count > 0).count();
                self.say(&format!(
                    "{accepted} of {drafted} held, by position: {:?}",
                    &by_position[..num_positions]
                ));
            }
            "share" => {
                let share = self.scheduler.stats().head_room_share;
                let percent = (share * 100 + HeadRoom::ONE / 2) >> 16;
                self.say(&format!("{percent} %"));
            }
            _ => panic!("unknown command {command}"),
        }
    }

    /// A request by its name, and the text after it.
    fn named<'a>(&self, word: &'a str) -> (RequestId, Option<&'a str>) {
        let (name, value) = match word.split_once('=') {
            Some((name, value)) => (name, Some(value)),
            None => (word, None),
        };
        let known = self.names.iter().find(|(_, known)| *known == name);
        (known.map_or(RequestId(u64::MAX), |(id, _)| *id), value)
    }

    fn reserve(&mut self, words: &[&str]) {
        let (requests, until_us) = self.requests(&words[1..], 1);
        let [request] = requests.try_into().expect("one request");
        let id = request.id;
        match self.scheduler.reserve(request, until_us) {
            Ok(reservation) => {
                self.names.insert(id, words[0].into());
                self.say(&format!(
                    "pages {}, {} rows are there{}",
                    page_list(&reservation.tables, self.scheduler.config()),
                    reservation.num_cached_rows,
                    moved_kv::state_place(reservation.state)
                ));
            }
            Err(error) => self.say(&format!("refused: {error}")),
        }
    }

    fn add(&mut self, words: &[&str], is_accepted: bool) {
        let (name, num_choices) = match words[0].split_once('=') {
            Some((name, choices)) => (name, choices.parse().unwrap()),
            None => (words[0], 1),
        };
        let (requests, _) = self.requests(&words[1..], num_choices);
        let ids: Vec<_> = requests.iter().map(|request| request.id).collect();
        let added = match is_accepted {
            true => self.scheduler.add_accepted_requests(requests),
            false => self.scheduler.add_requests(requests),
        };
        match added {
            Ok(()) if num_choices == 1 => {
                self.names.insert(ids[0], name.into());
            }
            Ok(()) => {
                for (choice, id) in ids.into_iter().enumerate() {
                    self.names.insert(id, format!("{name}{choice}"));
                }
            }
            Err(error) => self.say(&format!("refused: {error}")),
        }
    }

    /// The choices of one call, and the deadline of their KV.
    fn requests(&mut self, words: &[&str], num_choices: u32) -> (Vec<Request>, u64) {
        let mut until_us = u64::MAX;
        let mut output = Vec::new();
        let mut exports_kv = false;
        let mut is_masked = false;
        let mut prompt_logprobs = None;
        let mut pooling = None;
        let mut prompt = Vec::new();
        let mut stopping = StoppingCriteria::default();
        let mut namespace = Namespace::default();
        let mut priority = 0;
        let mut came_us = None;
        let mut objectives = LatencyObjectives::default();
        let mut retentions = Vec::new();
        for (key, value) in words.iter().map(|word| word.split_once('=').unwrap()) {
            match key {
                "until" => until_us = value.parse().unwrap(),
                "drawn" => output = value.chars().map(TokenId::from).collect(),
                "scored" => prompt_logprobs = (value == "on").then_some(0),
                "pooled" => pooling = Some(pooling_name::find(value)),
                "export" => exports_kv = value == "on",
                "masked" => is_masked = value == "on",
                "prompt" => {
                    prompt = match value.parse() {
                        Ok(num_tokens) => (0..num_tokens).map(|_| self.fresh_token()).collect(),
                        Err(_) => value.chars().map(TokenId::from).collect(),
                    }
                }
                "max" => stopping.max_tokens = Some(value.parse().unwrap()),
                "min" => stopping.min_tokens = value.parse().unwrap(),
                "end" => stopping.end_token_ids = value.chars().map(TokenId::from).collect(),
                "stop" => stopping.stop_token_ids = value.chars().map(TokenId::from).collect(),
                "lora" => namespace.lora = Some(value.into()),
                "salt" => namespace.cache_salt = Some(value.into()),
                "made" => namespace.arithmetic = Some(Arithmetic(value.parse().unwrap())),
                "priority" => priority = value.parse().unwrap(),
                "keep" => retentions = retained::read(value),
                "ttft" => objectives.ttft_us = Some(value.parse().unwrap()),
                "came" => came_us = Some(value.parse().unwrap()),
                _ => panic!("unknown property {key}"),
            }
        }
        let requests = (0..num_choices).map(|choice| {
            let id = RequestId(self.names.len() as u64 + u64::from(choice));
            Request {
                id,
                prompt: prompt.clone(),
                output: output.clone(),
                exports_kv,
                is_masked,
                sampling: SamplingParams {
                    choice,
                    prompt_logprobs,
                    pooling,
                    ..SamplingParams::GREEDY
                },
                stopping: stopping.clone(),
                priority,
                arrival_us: came_us.unwrap_or(self.now_us),
                objectives,
                namespace: namespace.clone(),
                retentions: retentions.clone(),
            }
        });
        (requests.collect(), until_us)
    }

    /// Plans a step. Returns false for an empty plan.
    fn step(&mut self) -> bool {
        self.now_us += 1000;
        let Some(batch) = self.scheduler.schedule(self.now_us) else {
            self.print_outputs();
            return false;
        };
        for slot in &batch.released {
            self.slots.remove(slot);
        }
        for start in &batch.started {
            let before = self.slots.insert(start.slot, start.request);
            assert!(
                before.is_none(),
                "slot {} is started before it is released",
                start.slot
            );
        }
        let mut line = format!("{}:", batch.step);
        for span in &batch.spans {
            let name = &self.names[&self.slots[&span.slot]];
            let num_tokens = span.tokens.len() as u32 - span.num_drafts;
            write!(line, " {name} ").unwrap();
            let mut started = batch.started.iter();
            let restored = started.find(|start| start.slot == span.slot);
            if let Some(id) = restored.and_then(|start| start.snapshot) {
                write!(line, "S{id}:").unwrap();
            }
            write!(line, "{}+{num_tokens}", span.start).unwrap();
            if let InputToken::FromStep { step, .. } = batch.span_tokens(span)[0] {
                write!(line, "<{step}").unwrap();
            }
            if span.num_drafts > 0 {
                let letters = drafts(&batch, span).map(letter);
                write!(line, "~{}", letters.collect::<String>()).unwrap();
            }
            match &span.yields {
                Yield::Nothing | Yield::Draw => {}
                Yield::Logprobs { positions, .. } => write!(line, "?{positions:?}").unwrap(),
                Yield::Sum => line.push('+'),
                Yield::HiddenState(pooling) => {
                    write!(line, "={}", pooling_name::of(*pooling)).unwrap()
                }
            }
            if span.yields.draws() {
                line.push('*');
            }
            let mut taken = batch.snapshots.iter();
            if let Some(taken) = taken.find(|taken| taken.slot == span.slot) {
                write!(line, " (S{})", taken.to).unwrap();
            }
            line.push(',');
        }
        self.say(line.trim_end_matches(','));
        if self.show_pages {
            self.print_page_work(&batch);
        }
        self.inflight.push(batch);
        self.print_outputs();
        true
    }

    fn print_page_work(&mut self, batch: &Batch) {
        let released: Vec<_> = batch.released.iter().map(|slot| slot.to_string()).collect();
        if !released.is_empty() {
            self.say(&format!("  release slot {}", released.join(" ")));
        }
        for start in &batch.started {
            let name = &self.names[&start.request];
            let (slot, cached) = (start.slot, start.cached_tokens.len());
            self.say(&format!("  start {name} in slot {slot}, {cached} cached"));
        }
        for delta in &batch.tables {
            let name = &self.names[&self.slots[&delta.slot]];
            let pages = batch.delta_pages(delta).iter();
            let pages: Vec<_> = pages.map(|page| page.to_string()).collect();
            let group = match delta.group.0 {
                0 => String::new(),
                group => format!(" group {group}"),
            };
            self.say(&format!(
                "  table {name}{group}[{}..] = {}",
                delta.first,
                pages.join(" ")
            ));
        }
        for copy in &batch.copies {
            self.say(&format!(
                "  copy {} rows of page {} to {}",
                copy.num_rows, copy.from, copy.to
            ));
        }
    }

    fn return_oldest(&mut self, words: &[&str]) {
        if self.inflight.is_empty() {
            self.say("nothing is in flight");
            return;
        }
        let batch = self.inflight.remove(0);
        let (mut samples, mut undrawn) = (Vec::new(), Vec::new());
        let (mut logprobs, mut hidden_states) = (Vec::new(), Vec::new());
        for span in batch.spans.iter().filter(|span| span.yields.returns()) {
            // A slot is not given to another request before this step has returned.
            let name = self.names[&self.slots[&span.slot]].clone();
            let asked = words.iter().find_map(|word| {
                let (who, tokens) = word.split_once('=')?;
                (who == name).then_some(tokens)
            });
            if asked == Some("NaN") {
                undrawn.push((span.slot, "the logits are NaN".into()));
                continue;
            }
            if let Yield::Logprobs {
                positions, next, ..
            } = &span.yields
            {
                let of = |position| logprob(&batch, span, *next, position);
                logprobs.push((span.slot, positions.clone().map(of).collect()));
            }
            if let Yield::HiddenState(_) = span.yields {
                hidden_states.push((span.slot, [0.0; 4].into()));
            }
            if !span.yields.draws() {
                continue;
            }
            let mut asked = asked.unwrap_or_default().chars().map(TokenId::from);
            let mut drafts = drafts(&batch, span);
            loop {
                let token = asked.next().unwrap_or_else(|| self.fresh_token());
                let sample = Sample {
                    token,
                    logprobs: None,
                };
                samples.push((span.slot, sample));
                if drafts.next() != Some(token) {
                    break;
                }
            }
            if let Some(token) = asked.next() {
                self.say(&format!("{name} has no draft before {}", letter(token)));
            }
        }
        self.scheduler.update_from_output(&BatchOutput {
            step: batch.step,
            samples,
            logprobs,
            hidden_states,
            undrawn,
        });
        self.print_outputs();
    }

    /// Prints the ends of requests, and their log-probabilities and hidden states.
    fn print_outputs(&mut self) {
        while let Some(output) = self.scheduler.poll_output() {
            let name = &self.names[&output.request];
            if let [first, ..] = &output.prompt_logprobs[..] {
                let positions: Vec<_> = output
                    .prompt_logprobs
                    .iter()
                    .map(|it| it.logprobs.rank)
                    .collect();
                let end = first.logprobs.rank + positions.len() as u32;
                assert!(
                    positions.into_iter().eq(first.logprobs.rank..end),
                    "{name} is told out of order"
                );
                self.say(&format!("{name} is told {}..{end}", first.logprobs.rank));
                continue;
            }
            if output.hidden_state.is_some() {
                assert!(output.finish.is_none(), "the end is an event of its own");
                self.say(&format!("{name} is told its hidden state"));
                continue;
            }
            let Some(finish) = output.finish else {
                continue;
            };
            let how = match finish {
                FinishReason::Error(error) => error.to_string(),
                other => format!("{other:?}").to_lowercase(),
            };
            let cached = match output.cache_use.num_cached_tokens {
                0 => String::new(),
                cached => format!(", {cached} of {} cached", output.num_prompt_tokens),
            };
            let mut fetched = String::new();
            for (num_tokens, medium) in [
                (output.cache_use.fetched_tokens.num_from_peers, "fetched"),
                (
                    output.cache_use.fetched_tokens.num_from_disk,
                    "from the disk",
                ),
            ] {
                if num_tokens > 0 {
                    write!(fetched, ", {num_tokens} {medium}").unwrap();
                }
            }
            let num_tokens = output.num_output_tokens;
            let retained = retained::in_words(output.cache_use.num_retained_tokens);
            self.say(&format!(
                "{name} ends: {how}, {num_tokens} out{cached}{fetched}{retained}"
            ));
        }
    }

    fn print_stats(&mut self) {
        let stats = self.scheduler.stats();
        self.say(&format!(
            "running {} waiting {} · pages free {} cached {} in use {}",
            stats.num_running,
            stats.num_waiting,
            stats.num_free_pages,
            stats.num_cached_pages,
            stats.num_in_use_pages
        ));
        if stats.num_receiving + stats.num_arrived + stats.num_held_pages > 0 {
            self.say(&format!(
                "receiving {} arrived {} · pages held {}",
                stats.num_receiving, stats.num_arrived, stats.num_held_pages
            ));
        }
        if let Some(state) = self.scheduler.config().recurrent_state {
            self.say(&format!(
                "snapshots {} of {}",
                stats.num_snapshots, state.num_snapshots
            ));
        }
        if stats.num_fetching_pages > 0 || stats.num_fetched_blocks > 0 {
            self.say(&format!(
                "fetching pages {} · blocks fetched {}",
                stats.num_fetching_pages, stats.num_fetched_blocks
            ));
        }
        if stats.num_served_pages > 0 {
            self.say(&format!("served pages {}", stats.num_served_pages));
        }
        self.print_retained(&stats);
        if stats.num_spills + stats.num_handed_back + stats.num_spilled_pages as u64 > 0 {
            self.say(&format!(
                "spilled pages {} · spills {} restores {} handed back {}",
                stats.num_spilled_pages,
                stats.num_spills,
                stats.num_restores,
                stats.num_handed_back
            ));
        }
        self.say(&format!(
            "scheduled {} generated {} · hits {} of {} · preempted {} evicted {}",
            stats.num_scheduled_tokens,
            stats.num_generated_tokens,
            stats.num_prefix_hit_tokens,
            stats.num_prefix_query_tokens,
            stats.num_preemptions,
            stats.num_evicted_pages
        ));
    }

    fn fresh_token(&mut self) -> TokenId {
        self.num_fresh_tokens += 1;
        1_000_000 + self.num_fresh_tokens
    }

    fn say(&mut self, line: &str) {
        writeln!(self.out, "  {line}").unwrap();
    }
}
