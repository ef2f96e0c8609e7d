//! Compiled modules, kept from one start to the next.

use std::fs;
use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, Ordering};

use xxhash_rust::xxh3::xxh3_64;

const MAGIC: &[u8; 8] = b"corcubin";
const HEAD_BYTES: usize = 16;

/// A folder of cubins, by the hash of their sources. If an entry cannot be read, the source is compiled again.
#[derive(Debug)]
pub struct CubinCache {
    folder: Option<PathBuf>,
}

impl CubinCache {
    /// The cache in the user's cache folder, by the XDG base directory specification.
    pub fn of_user() -> Self {
        let absolute = |name: &str| {
            let path = PathBuf::from(std::env::var_os(name)?);
            path.is_absolute().then_some(path)
        };
        let caches = absolute("XDG_CACHE_HOME").or_else(|| Some(absolute("HOME")?.join(".cache")));
        Self {
            folder: caches.map(|caches| caches.join("corella/kernels")),
        }
    }

    fn path(&self, key: u128) -> Option<PathBuf> {
        Some(self.folder.as_ref()?.join(format!("{key:032x}.cubin")))
    }

    /// The entry of a key, if intact.
    pub fn get(&self, key: u128) -> Option<Vec<u8>> {
        let mut entry = fs::read(self.path(key)?).ok()?;
        let head = entry.get(..HEAD_BYTES)?;
        let is_whole =
            head.starts_with(MAGIC) && head[8..] == xxh3_64(&entry[HEAD_BYTES..]).to_le_bytes();
        is_whole.then(|| entry.split_off(HEAD_BYTES))
    }

    /// Stores a cubin. A reader sees a whole entry or none.
    pub fn put(&self, key: u128, cubin: &[u8]) {
        static COUNT: AtomicU64 = AtomicU64::new(0);
        let Some(path) = self.path(key) else {
            return;
        };
        let mut entry = MAGIC.to_vec();
        entry.extend(xxh3_64(cubin).to_le_bytes());
        entry.extend(cubin);
        let count = COUNT.fetch_add(1, Ordering::Relaxed);
        let draft = path.with_extension(format!("{}-{count}", std::process::id()));
        let _ = path.parent().map(fs::create_dir_all);
        if fs::write(&draft, entry)
            .and_then(|()| fs::rename(&draft, &path))
            .is_err()
        {
            let _ = fs::remove_file(&draft);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_entry_comes_back_unless_a_bit_of_it_was_changed() {
        let folder = std::env::temp_dir().join(format!("corella-cubins-{}", std::process::id()));
        let cache = CubinCache {
            folder: Some(folder.clone()),
        };
        assert_eq!(cache.get(7), None);
        cache.put(7, b"machine code");
        assert_eq!(cache.get(7).as_deref(), Some(&b"machine code"[..]));
        assert_eq!(cache.get(8), None);
        let path = cache.path(7).unwrap();
        let whole = fs::read(&path).unwrap();
        for index in 0..whole.len() {
            let mut changed = whole.clone();
            changed[index] ^= 1;
            fs::write(&path, changed).unwrap();
            assert_eq!(cache.get(7), None, "byte {index}");
            fs::write(&path, &whole[..index]).unwrap();
            assert_eq!(cache.get(7), None, "only {index} bytes");
        }
        cache.put(7, b"machine code");
        assert_eq!(cache.get(7).as_deref(), Some(&b"machine code"[..]));
        assert_eq!(fs::read_dir(&folder).unwrap().count(), 1, "drafts are gone");
        fs::remove_dir_all(folder).unwrap();
    }
}
