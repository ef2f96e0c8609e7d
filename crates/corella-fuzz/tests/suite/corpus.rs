//! Valid inputs, from the goldens of this repository, and a folder for changed ones.

use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::{env, fs, process};

/// A path from the root of the repository.
pub fn path(relative: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("../..")
        .join(relative)
}

pub fn bytes(relative: &str) -> Vec<u8> {
    let path = path(relative);
    fs::read(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

pub fn text(relative: &str) -> String {
    String::from_utf8(bytes(relative)).expect("a text")
}

/// A changed file of a folder, and the folder with its other, unchanged files.
#[derive(Clone)]
pub struct FileInput {
    pub folder: &'static str,
    pub name: &'static str,
    pub bytes: Vec<u8>,
}

impl FileInput {
    pub fn new(folder: &'static str, name: &'static str) -> Self {
        Self {
            folder,
            name,
            bytes: bytes(&format!("{folder}/{name}")),
        }
    }
}

impl AsRef<[u8]> for FileInput {
    fn as_ref(&self) -> &[u8] {
        &self.bytes
    }
}

/// A folder that is removed at the end.
pub struct Scratch(PathBuf);

impl Scratch {
    pub fn new() -> Self {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let name = format!("corella-fuzz-{}-{number}", process::id());
        let folder = env::temp_dir().join(name);
        fs::create_dir_all(&folder).expect("a folder");
        Self(folder)
    }

    pub fn path(&self) -> &Path {
        &self.0
    }

    /// The path of a file with this content.
    pub fn write(&self, name: &str, bytes: &[u8]) -> PathBuf {
        let path = self.0.join(name);
        fs::write(&path, bytes).expect("room for the file");
        path
    }

    /// A folder with the changed file, and with links to the unchanged other files.
    pub fn folder(&self, input: &FileInput) -> PathBuf {
        let folder = self.0.join(input.folder.replace('/', "-"));
        if !folder.exists() {
            fs::create_dir(&folder).expect("a folder");
            for entry in fs::read_dir(path(input.folder)).expect("a golden") {
                let from = entry.expect("a file").path();
                let from = from.canonicalize().expect("a path");
                let name = from.file_name().expect("a name");
                std::os::unix::fs::symlink(&from, folder.join(name)).expect("a link");
            }
        }
        let changed = folder.join(input.name);
        // The link is replaced, not the file of the repository behind it.
        let _ = fs::remove_file(&changed);
        fs::write(&changed, &input.bytes).expect("room for the file");
        folder
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}
