//! Reports on the files of a folder, for an operator. Servers may use the files meanwhile, since nothing is changed.

use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use super::file_layer::FileLayer;
use super::folder::{self, Listed};
use super::label::{KvDiskLabel, LABEL_BYTES, read_label};
use super::slot::{SlotContent, SlotShape};

/// A file of `--kv-disk`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KvFileReport {
    pub path: PathBuf,
    pub num_bytes: u64,
    /// The time of the last write, or of the last start of a server with the file.
    pub last_used: SystemTime,
    /// Whether a process uses the file.
    pub is_in_use: bool,
    pub content: KvFileContent,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum KvFileContent {
    /// The file has no label of this version of Corella.
    Unknown,
    /// The file cannot be read.
    Unreadable(String),
    Pages(KvFilePages),
}

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct KvFilePages {
    pub label: KvDiskLabel,
    /// A digest of everything that decides the bits of a block.
    pub layout: u128,
    /// The number of tokens of a page.
    pub page_size: u32,
    /// The size of a page with its header.
    pub slot_bytes: u64,
    pub num_slots: u64,
    /// Pages whose checksums are right.
    pub num_whole: u64,
    /// Pages that are damaged or torn. A page that a server writes at the moment may count, too.
    pub num_damaged: u64,
    /// Whole pages of prompts with a salt.
    pub num_salted: u64,
    /// Whole pages of adapters.
    pub num_of_adapters: u64,
}

/// Reads all files of a folder of `--kv-disk`, the least recently used first.
pub fn inspect_kv_disk(folder: &Path) -> io::Result<Vec<KvFileReport>> {
    let turn = folder::take_turn(folder, folder::TURN_LIMIT)?;
    let files = folder::files(folder)?;
    let in_use: Vec<_> = files
        .iter()
        .map(|file| folder::is_in_use(&file.path))
        .collect();
    drop(turn);
    let reports = files.into_iter().zip(in_use);
    Ok(reports
        .map(|(file, is_in_use)| report(file, is_in_use))
        .collect())
}

fn report(file: Listed, is_in_use: bool) -> KvFileReport {
    let content = File::open(&file.path).and_then(|open| content(&open, file.num_bytes));
    KvFileReport {
        content: content.unwrap_or_else(|error| KvFileContent::Unreadable(error.to_string())),
        path: file.path,
        num_bytes: file.num_bytes,
        last_used: file.last_used,
        is_in_use,
    }
}

fn content(file: &File, num_bytes: u64) -> io::Result<KvFileContent> {
    let mut label = [0; LABEL_BYTES];
    if num_bytes < LABEL_BYTES as u64 {
        return Ok(KvFileContent::Unknown);
    }
    file.read_at(&mut label, 0)?;
    let Some((shape, label)) = read_label(&label) else {
        return Ok(KvFileContent::Unknown);
    };
    let mut pages = KvFilePages {
        label,
        layout: shape.layout,
        page_size: shape.page_size,
        slot_bytes: shape.slot_bytes() as u64,
        ..KvFilePages::default()
    };
    count(file, shape, num_bytes, &mut pages)?;
    Ok(KvFileContent::Pages(pages))
}

fn count(file: &File, shape: SlotShape, num_bytes: u64, pages: &mut KvFilePages) -> io::Result<()> {
    pages.num_slots = (num_bytes - LABEL_BYTES as u64) / pages.slot_bytes;
    let mut slot = Vec::new();
    for at in 0..pages.num_slots {
        slot.resize(shape.slot_bytes(), 0);
        match file.read_at(&mut slot, LABEL_BYTES as u64 + at * pages.slot_bytes) {
            Ok(()) => {}
            // A server has emptied the file meanwhile.
            Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => break,
            Err(error) => return Err(error),
        }
        match shape.content(&slot) {
            SlotContent::Empty => {}
            SlotContent::Damaged => pages.num_damaged += 1,
            SlotContent::Page(namespace) => {
                pages.num_whole += 1;
                pages.num_salted += u64::from(namespace.salt != 0);
                pages.num_of_adapters += u64::from(namespace.adapter != 0);
            }
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::sync::atomic::AtomicBool;

    use corella_core::{KvGroup, PageHash};

    use super::*;
    use crate::kv_disk::folder::KvFile;
    use crate::kv_disk::page_store::PageStore;
    use crate::kv_disk::slot::{PageKey, PageName, SlotNamespace};
    use crate::kv_disk::tier::KvDiskFolder;

    const SHAPE: SlotShape = SlotShape {
        layout: 7,
        page_size: 2,
        row_bytes: 700,
    };

    fn label() -> KvDiskLabel {
        KvDiskLabel {
            model: "a model".to_owned(),
            ..KvDiskLabel::default()
        }
    }

    fn page(hash: u128, namespace: SlotNamespace) -> PageName<'static> {
        PageName {
            key: PageKey {
                hash: PageHash(hash),
                group: 0,
            },
            namespace,
            parent: None,
            depth: 0,
            tokens: &[1, 2],
        }
    }

    #[test]
    fn files_are_counted_while_a_process_uses_them_and_stay_as_they_are() {
        let name = format!("corella-kv-inspection-{}", std::process::id());
        let folder = std::env::temp_dir().join(name);
        let _ = fs::remove_dir_all(&folder);
        assert_eq!(
            inspect_kv_disk(&folder).unwrap_err().kind(),
            io::ErrorKind::NotFound
        );
        let file = KvFile::open(&KvDiskFolder::new(&folder, 100_000), SHAPE.layout).unwrap();
        assert_eq!(
            inspect_kv_disk(&folder).unwrap()[0].content,
            KvFileContent::Unknown
        );
        let groups = vec![KvGroup::default()];
        let store = PageStore::new(SHAPE, groups, None, &label(), &[100_000]);
        store.file(0).prepare(&file).unwrap();
        store.file(0).set(file);
        store.open_disk(0);
        store.scan(0, &AtomicBool::new(false)).unwrap();
        let none = SlotNamespace::default();
        let names = [
            page(1, none),
            page(2, SlotNamespace { salt: 5, ..none }),
            page(3, SlotNamespace { adapter: 5, ..none }),
            page(4, none),
        ];
        let stored = store.store(&names, &[5; 4 * 700], 1, store.epoch());
        assert_eq!(stored.num_pages, 4);
        let pages = KvFilePages {
            label: label(),
            layout: 7,
            page_size: 2,
            slot_bytes: 1536,
            // An eighth of the 62 slots that have room
            num_slots: 8,
            num_whole: 4,
            num_salted: 1,
            num_of_adapters: 1,
            ..KvFilePages::default()
        };
        let report = inspect_kv_disk(&folder).unwrap().pop().unwrap();
        assert_eq!(report.content, KvFileContent::Pages(pages.clone()));
        assert_eq!(
            (report.is_in_use, report.num_bytes),
            (true, 4096 + 8 * 1536)
        );
        drop(store);

        // Rows of the first page, the header of the second one.
        let mut bytes = fs::read(&report.path).unwrap();
        bytes[4096 + 600] ^= 1;
        bytes[4096 + 1536 + 30] ^= 1;
        fs::write(&report.path, &bytes).unwrap();
        fs::write(folder.join("older.corella-kv"), [1; 9000]).unwrap();
        fs::write(folder.join("notes.txt"), "").unwrap();
        let damaged = KvFilePages {
            num_whole: 2,
            num_damaged: 2,
            num_salted: 0,
            ..pages
        };
        let reports = inspect_kv_disk(&folder).unwrap();
        let contents: Vec<_> = reports
            .iter()
            .map(|report| (report.is_in_use, &report.content))
            .collect();
        let expected = KvFileContent::Pages(damaged);
        assert!(contents.contains(&(false, &expected)), "{contents:?}");
        assert!(contents.contains(&(false, &KvFileContent::Unknown)));
        assert_eq!(contents.len(), 2);
        assert_eq!(fs::read(&report.path).unwrap(), bytes);
        fs::remove_dir_all(folder).unwrap();
    }
}
