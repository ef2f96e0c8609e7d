//! Page tables in the notation of scenarios.

use corella_core::{KvGroup, PageTable, SchedulerConfig};

/// The pages of each KV group. A table of a group with a window begins with the number of its first entry.
pub fn page_list(tables: &[PageTable], config: &SchedulerConfig) -> String {
    let list = |(table, group): (&PageTable, &KvGroup)| {
        let pages: Vec<_> = table.pages.iter().map(|page| page.to_string()).collect();
        match group.window {
            Some(_) if pages.is_empty() => "none".to_owned(),
            Some(_) => format!("[{}..] {}", table.num_gone, pages.join(" ")),
            None => pages.join(" "),
        }
    };
    let lists: Vec<_> = tables.iter().zip(&config.kv_groups).map(list).collect();
    lists.join(", ")
}
