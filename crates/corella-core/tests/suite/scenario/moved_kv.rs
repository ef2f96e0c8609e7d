//! Commands about KV transfers for which no request waits in a slot.

use corella_core::{
    BlockList, FetchEnd, FetchMedium, FetchRefusal, FetchRequest, HoldId, KvFact, Namespace,
    PageId, PageTable, SnapshotId, SpillTask, TokenId,
};

use super::World;
use crate::page_list::page_list;

impl World {
    pub fn print_facts(&mut self) {
        while let Some(fact) = self.scheduler.poll_kv_fact() {
            let line = match fact {
                KvFact::Exported {
                    request,
                    step,
                    first_row,
                    end_row,
                    tables,
                } => {
                    format!(
                        "{}: rows {first_row}..{end_row} with step {step}, pages {}",
                        self.names[&request],
                        page_list(&tables, self.scheduler.config())
                    )
                }
                KvFact::Declined { request } => {
                    format!("{}: nothing is exported", self.names[&request])
                }
                KvFact::ExportEnded {
                    request,
                    num_rows,
                    state,
                } => {
                    let (name, state) = (&self.names[&request], state_place(state));
                    format!("{name}: {num_rows} rows, and no more{state}")
                }
                KvFact::LeaseEnded { request } => {
                    format!("{}: the lease is over", self.names[&request])
                }
            };
            self.say(&line);
        }
    }

    pub fn print_spills(&mut self) {
        let list = |pages: &[PageId]| {
            let pages = pages.iter().map(|page| format!(" {page}"));
            pages.collect::<String>()
        };
        while let Some(task) = self.scheduler.poll_spill_task() {
            let line = match task {
                SpillTask::Store { request, pages } => {
                    format!("{}: store pages{}", self.names[&request], list(&pages))
                }
                SpillTask::Restore { request, pages } => {
                    let name = &self.names[&request];
                    let (stored, pages): (Vec<_>, Vec<_>) = pages.into_iter().unzip();
                    let first = stored.first().copied().unwrap_or_default();
                    let pages = list(&pages);
                    let is_run = stored.iter().zip(first..).all(|(&page, at)| page == at);
                    match is_run {
                        true => {
                            format!("{name}: restore from its page {first} on, to pages{pages}")
                        }
                        false => format!("{name}: restore its pages {stored:?} to pages{pages}"),
                    }
                }
                SpillTask::Discard { request } => format!("{}: discard", self.names[&request]),
            };
            self.say(&line);
        }
    }

    pub fn move_blocks(&mut self, command: &str, words: &[&str]) {
        match command {
            "fetch" => self.begin_fetch(words),
            "fetched" => self.note_fetched(words[0]),
            "shorten" => self.shorten_fetch(words[0]),
            "cancels" => self.print_cancels(),
            "look" => self.look_up(words),
            "hold" => self.hold_blocks(words),
            "drop" => self.release_blocks(words[0]),
            "ended" => self.print_ended_holds(),
            _ => panic!("unknown command {command}"),
        }
    }

    fn begin_fetch(&mut self, words: &[&str]) {
        let mut request = FetchRequest {
            medium: FetchMedium::Peer,
            namespace: Namespace::default(),
            tokens: Vec::new(),
            soft_us: u64::MAX,
            hard_us: u64::MAX,
        };
        for (key, value) in words[1..].iter().map(|word| word.split_once('=').unwrap()) {
            match key {
                "prompt" => request.tokens = value.chars().map(TokenId::from).collect(),
                "medium" if value == "disk" => request.medium = FetchMedium::Disk,
                "soft" => request.soft_us = value.parse().unwrap(),
                "hard" => request.hard_us = value.parse().unwrap(),
                _ => panic!("unknown property {key}"),
            }
        }
        match self.scheduler.begin_fetch(request) {
            Ok(grant) => {
                self.fetches.insert(grant.id, words[0].into());
                let (tables, state) = (table_list(&grant.tables), state_place(grant.state));
                self.say(&format!("{tables}{state}"));
            }
            Err(refusal) => {
                let why = match refusal {
                    FetchRefusal::UnderWay(id) => format!("{} brings it", self.fetches[&id]),
                    refusal => format!("{refusal:?}"),
                };
                self.say(&format!("refused: {why}"));
            }
        }
    }

    fn note_fetched(&mut self, word: &str) {
        let (name, how) = word.split_once('=').unwrap();
        let known = self.fetches.iter().find(|(_, known)| *known == name);
        let (&id, _) = known.expect("a fetch");
        let is_known = match how {
            "done" => self.scheduler.handle_fetch_ended(id, FetchEnd::Done),
            "lost" => self.scheduler.handle_fetch_ended(id, FetchEnd::Lost),
            number => self.scheduler.handle_fetched(id, number.parse().unwrap()),
        };
        if !is_known {
            self.say("nothing is wanted of it");
        }
    }

    fn shorten_fetch(&mut self, word: &str) {
        let (name, num_blocks) = word.split_once('=').unwrap();
        let known = self.fetches.iter().find(|(_, known)| *known == name);
        let (&id, _) = known.expect("a fetch");
        let line = match self
            .scheduler
            .shorten_fetch(id, num_blocks.parse().unwrap())
        {
            Some(grant) => table_list(&grant.tables),
            None => "it is not shortened".to_owned(),
        };
        self.say(&line);
    }

    fn print_cancels(&mut self) {
        while let Some(id) = self.scheduler.poll_fetch_cancel() {
            let line = format!("{} has to stop", self.fetches[&id]);
            self.say(&line);
        }
    }

    fn look_up(&mut self, words: &[&str]) {
        let (list, first_block, _) = self.block_list(words);
        let num_blocks = match first_block {
            Some(first_block) => self.scheduler.look_up_lendable(&list, first_block),
            None => self.scheduler.look_up_blocks(&list),
        };
        self.say(&format!("{num_blocks} blocks"));
    }

    fn hold_blocks(&mut self, words: &[&str]) {
        let (list, first_block, until_us) = self.block_list(&words[1..]);
        let first_block = first_block.unwrap_or(0);
        match self.scheduler.hold_blocks(&list, first_block, until_us) {
            Ok(held) => {
                self.holds.insert(held.id, words[0].into());
                let (num_blocks, tables) = (held.num_blocks, table_list(&held.tables));
                let state = state_place(held.state);
                self.say(&format!("{num_blocks} blocks, {tables}{state}"));
            }
            Err(refusal) => self.say(&format!("refused: {refusal:?}")),
        }
    }

    /// The blocks that words name, the first lent one, and the deadline.
    fn block_list(&self, words: &[&str]) -> (BlockList, Option<u32>, u64) {
        let (mut tokens, mut namespace) = (Vec::new(), Namespace::default());
        let (mut until_us, mut foreign, mut first_block) = (u64::MAX, None, None);
        for (key, value) in words.iter().map(|word| word.split_once('=').unwrap()) {
            match key {
                "prompt" => tokens = value.chars().map(TokenId::from).collect(),
                "salt" => namespace.cache_salt = Some(value.into()),
                "from" => first_block = Some(value.parse().unwrap()),
                "until" => until_us = value.parse().unwrap(),
                "foreign" => foreign = Some(value.parse::<usize>().unwrap()),
                _ => panic!("unknown property {key}"),
            }
        }
        let config = self.scheduler.config();
        let mut list = BlockList::new(namespace, tokens, &config.block_hasher, config.page_size);
        if let Some(at) = foreign {
            list.hashes[at].0 ^= 1;
        }
        (list, first_block, until_us)
    }

    fn release_blocks(&mut self, name: &str) {
        let known = self.holds.iter().rfind(|(_, known)| *known == name);
        let id = known.map_or(HoldId(u64::MAX), |(&id, _)| id);
        let line = match self.scheduler.release_blocks(id, self.now_us) {
            Some(true) => "it has lived",
            Some(false) => "it had ended",
            None => "there is no such hold",
        };
        self.say(line);
    }

    fn print_ended_holds(&mut self) {
        while let Some(id) = self.scheduler.poll_ended_hold() {
            let line = format!("{} has ended", self.holds[&id]);
            self.say(&line);
        }
    }
}

/// The snapshot of the recurrent state after rows, if any.
pub fn state_place(state: Option<SnapshotId>) -> String {
    let place = state.map(|id| format!(", their state in S{id}"));
    place.unwrap_or_default()
}

/// The tables of all groups.
fn table_list(tables: &[PageTable]) -> String {
    let tables = tables.iter().map(|table| {
        let pages = table.pages.iter().map(|page| format!(" {page}"));
        format!("[{}..] ={}", table.num_gone, pages.collect::<String>())
    });
    let tables: Vec<_> = tables.collect();
    tables.join(", ")
}
