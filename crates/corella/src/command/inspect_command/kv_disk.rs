//! `corella inspect --kv-disk`: prints which blocks the files of folders have.

use std::path::PathBuf;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use corella_engine::{KvDiskLabel, KvFileContent, KvFilePages, KvFileReport, inspect_kv_disk};
use serde_json::{Value, json};

use crate::terminal::output::print_text;
use crate::{Error, display_bytes};

/// The width of the first column, which has the names of the lines.
const NAME_LEN: usize = 14;

pub fn run(folders: &[PathBuf], prints_json: bool) -> Result<(), Error> {
    let mut files = Vec::new();
    for folder in folders {
        let shown = folder.display();
        let found = inspect_kv_disk(folder)
            .map_err(|error| Error::Io(format!("cannot read the folder {shown}"), error))?;
        files.extend(found);
    }
    print_text(match prints_json {
        true => format!("{:#}\n", json(&files)),
        false => text(&files, SystemTime::now()),
    });
    Ok(())
}

fn num_bytes(files: &[KvFileReport]) -> u64 {
    files.iter().map(|file| file.num_bytes).sum()
}

fn text(files: &[KvFileReport], now: SystemTime) -> String {
    let mut text = String::new();
    for file in files {
        let mut line = |name: &str, value: String| {
            text += &format!("{name:<NAME_LEN$}{value}\n");
        };
        line("file", file.path.display().to_string());
        match &file.content {
            KvFileContent::Pages(pages) => {
                line("model", model(&pages.label));
                line("layout", format!("{:032x}", pages.layout));
                line("pages", pages_text(pages));
            }
            KvFileContent::Unknown => line(
                "problem",
                "the file is empty, damaged, or of another version of Corella".to_owned(),
            ),
            KvFileContent::Unreadable(why) => line("problem", why.clone()),
        }
        line("size", display_bytes(file.num_bytes));
        let age = now.duration_since(file.last_used).unwrap_or_default();
        let used = match file.is_in_use {
            true => "a process uses it now",
            false => "no process uses it",
        };
        line("last use", format!("{} ago; {used}", age_text(age)));
        text.push('\n');
    }
    let size = display_bytes(num_bytes(files));
    match files.len() {
        0 => "no files\n".to_owned(),
        1 => text + &format!("1 file, {size}\n"),
        num_files => text + &format!("{num_files} files, {size}\n"),
    }
}

fn model(label: &KvDiskLabel) -> String {
    let KvDiskLabel {
        model,
        weight_type,
        kv_type,
        isa,
        version,
    } = label;
    format!("{model} (weights {weight_type}, KV {kv_type}, {isa}, Corella {version})")
}

fn pages_text(pages: &KvFilePages) -> String {
    let KvFilePages {
        page_size,
        num_slots,
        num_whole,
        num_damaged,
        num_salted,
        num_of_adapters,
        ..
    } = pages;
    let mut text = format!(
        "{num_whole} whole, {num_damaged} damaged, room for {num_slots}; {page_size} tokens each"
    );
    if *num_salted > 0 {
        text += &format!("; {num_salted} with a salt");
    }
    if *num_of_adapters > 0 {
        text += &format!("; {num_of_adapters} of adapters");
    }
    text
}

fn age_text(age: Duration) -> String {
    let seconds = age.as_secs();
    match seconds {
        0..120 => format!("{seconds} s"),
        120..7200 => format!("{} min", seconds / 60),
        7200..172_800 => format!("{} h", seconds / 3600),
        _ => format!("{} days", seconds / 86_400),
    }
}

/// Sizes are in bytes, and times in seconds since 1970.
fn json(files: &[KvFileReport]) -> Value {
    let files_json: Vec<_> = files.iter().map(file_json).collect();
    json!({"num_bytes": num_bytes(files), "files": files_json})
}

fn file_json(file: &KvFileReport) -> Value {
    let last_used = file.last_used.duration_since(UNIX_EPOCH);
    let (pages, problem) = match &file.content {
        KvFileContent::Pages(pages) => (Some(pages), None),
        KvFileContent::Unknown => (None, Some("unknown")),
        KvFileContent::Unreadable(why) => (None, Some(why.as_str())),
    };
    let label = pages.map(|pages| &pages.label);
    json!({
        "path": file.path.display().to_string(),
        "num_bytes": file.num_bytes,
        "last_used": last_used.unwrap_or_default().as_secs(),
        "in_use": file.is_in_use,
        "problem": problem,
        "model": label.map(|label| &label.model),
        "weights": label.map(|label| &label.weight_type),
        "kv": label.map(|label| &label.kv_type),
        "isa": label.map(|label| &label.isa),
        "version": label.map(|label| &label.version),
        "layout": pages.map(|pages| format!("{:032x}", pages.layout)),
        "pages": pages.map(|pages| json!({
            "page_size": pages.page_size,
            "slot_bytes": pages.slot_bytes,
            "room": pages.num_slots,
            "whole": pages.num_whole,
            "damaged": pages.num_damaged,
            "salted": pages.num_salted,
            "of_adapters": pages.num_of_adapters,
        })),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn files() -> [KvFileReport; 2] {
        let pages = KvFilePages {
            label: KvDiskLabel {
                model: "tiny".to_owned(),
                weight_type: "bf16".to_owned(),
                kv_type: "f32".to_owned(),
                isa: "avx2".to_owned(),
                version: "1.2".to_owned(),
            },
            layout: 10,
            page_size: 16,
            slot_bytes: 1024,
            num_slots: 40,
            num_whole: 5,
            num_damaged: 1,
            num_salted: 2,
            num_of_adapters: 0,
        };
        let of = |name: &str, content| KvFileReport {
            path: name.into(),
            num_bytes: 3 << 19,
            last_used: UNIX_EPOCH + Duration::from_secs(1000),
            is_in_use: name == "b",
            content,
        };
        [
            of("a", KvFileContent::Unknown),
            of("b", KvFileContent::Pages(pages)),
        ]
    }

    #[test]
    fn each_file_has_its_lines() {
        let expected = "\
file          a
problem       the file is empty, damaged, or of another version of Corella
size          1.5 MiB
last use      2 h ago; no process uses it

file          b
model         tiny (weights bf16, KV f32, avx2, Corella 1.2)
layout        0000000000000000000000000000000a
pages         5 whole, 1 damaged, room for 40; 16 tokens each; 2 with a salt
size          1.5 MiB
last use      2 h ago; a process uses it now

2 files, 3.0 MiB
";
        let now = UNIX_EPOCH + Duration::from_secs(1000 + 7300);
        assert_eq!(text(&files(), now), expected);
        assert_eq!(text(&[], now), "no files\n");
    }

    #[test]
    fn json_has_the_same_facts() {
        let json = json(&files());
        assert_eq!(json["num_bytes"], 3 << 20);
        let [unknown, known] = [&json["files"][0], &json["files"][1]];
        assert_eq!(unknown["problem"], "unknown");
        assert!(unknown["pages"].is_null() && unknown["model"].is_null());
        assert_eq!(known["model"], "tiny");
        assert_eq!(known["last_used"], 1000);
        assert_eq!(known["in_use"], true);
        assert_eq!(known["pages"]["whole"], 5);
        assert_eq!(known["pages"]["salted"], 2);
        assert!(known["problem"].is_null());
    }
}
