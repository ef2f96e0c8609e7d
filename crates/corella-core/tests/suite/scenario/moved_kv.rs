//! Commands about KV that comes from elsewhere or goes there, for which no request waits in a slot.

use corella_core::{
    FetchEnd, FetchRefusal, FetchRequest, KvFact, Namespace, PageId, SpillTask, TokenId,
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
                KvFact::ExportEnded { request, num_rows } => {
                    format!("{}: {num_rows} rows, and no more", self.names[&request])
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

    pub fn begin_fetch(&mut self, words: &[&str]) {
        let mut request = FetchRequest {
            namespace: Namespace::default(),
            tokens: Vec::new(),
            soft_us: u64::MAX,
            hard_us: u64::MAX,
        };
        for (key, value) in words[1..].iter().map(|word| word.split_once('=').unwrap()) {
            match key {
                "prompt" => request.tokens = value.chars().map(TokenId::from).collect(),
                "soft" => request.soft_us = value.parse().unwrap(),
                "hard" => request.hard_us = value.parse().unwrap(),
                _ => panic!("unknown property {key}"),
            }
        }
        match self.scheduler.begin_fetch(request) {
            Ok(grant) => {
                self.fetches.insert(grant.id, words[0].into());
                let tables = grant.tables.iter().map(|table| {
                    let pages = table.pages.iter().map(|page| format!(" {page}"));
                    format!("[{}..] ={}", table.num_gone, pages.collect::<String>())
                });
                let tables: Vec<_> = tables.collect();
                self.say(&tables.join(", "));
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

    pub fn note_fetched(&mut self, word: &str) {
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

    pub fn print_cancels(&mut self) {
        while let Some(id) = self.scheduler.poll_fetch_cancel() {
            let line = format!("{} has to stop", self.fetches[&id]);
            self.say(&line);
        }
    }
}
