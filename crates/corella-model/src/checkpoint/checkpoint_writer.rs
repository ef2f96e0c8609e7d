//! Writes a Hugging Face folder tensor by tensor. The folder appears under its name only when it is
//! complete.

use std::collections::HashMap;
use std::fs::{self, File};
use std::io::{self, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};

use safetensors::Dtype;
use serde_json::{Map, Value, json};

use crate::CheckpointError;
use crate::json::file_name::{INDEX, SINGLE};

/// A folder during writing. All files go to a temporary folder beside the target. `finish` renames it to the target;
/// without `finish`, it is removed. Only a killed process leaves it behind.
pub struct CheckpointWriter {
    target: PathBuf,
    partial: PathBuf,
    shards: Vec<File>,
    /// For each tensor, the index of its shard, the offset of its next byte there, and the number of its missing bytes.
    places: HashMap<String, (usize, u64, u64)>,
    num_bytes: u64,
}

/// A tensor to write: its name, type and shape.
pub type PlannedPart = (String, Dtype, Vec<usize>);

/// The largest size of a shard, as in Transformers.
const MAX_SHARD_BYTES: u64 = 5_000_000_000;

impl CheckpointWriter {
    /// Begins a folder. `tensors` lists all tensors, in the order of their shards.
    pub fn create(target: &Path, tensors: &[PlannedPart]) -> Result<Self, CheckpointError> {
        Self::create_with(target, tensors, MAX_SHARD_BYTES)
    }

    fn create_with(
        target: &Path,
        tensors: &[PlannedPart],
        max_shard_bytes: u64,
    ) -> Result<Self, CheckpointError> {
        refuse_existing(target)?;
        let Some(name) = target.file_name() else {
            let problem = "does not name a new folder";
            return Err(CheckpointError::new(target.display().to_string(), problem));
        };
        let mut partial_name = name.to_os_string();
        partial_name.push(format!(".partial-{}", std::process::id()));
        let partial = target.with_file_name(partial_name);
        fs::create_dir(&partial).map_err(|error| failure(&partial, &error))?;
        let mut writer = Self {
            target: target.to_path_buf(),
            partial,
            shards: Vec::new(),
            places: HashMap::new(),
            num_bytes: 0,
        };
        let shards = cut(tensors, max_shard_bytes);
        let names = shard_names(shards.len());
        for (name, tensors) in names.iter().zip(&shards) {
            writer.begin_shard(name, tensors)?;
        }
        if shards.len() > 1 {
            writer.write_index(&names)?;
        }
        Ok(writer)
    }

    fn begin_shard(&mut self, name: &str, tensors: &[&PlannedPart]) -> Result<(), CheckpointError> {
        // Tensors with the largest elements come first, so that all tensors are aligned, as readers expect.
        let mut tensors = tensors.to_vec();
        tensors.sort_by_key(|(_, dtype, _)| std::cmp::Reverse(dtype.bitsize()));
        let mut header = Map::new();
        header.insert("__metadata__".into(), json!({"format": "pt"}));
        let (mut offset, mut offsets) = (0, Vec::new());
        for tensor in tensors {
            let (name, dtype, shape) = tensor;
            let end = offset + num_bytes(tensor);
            let entry = json!({
                "dtype": format!("{dtype:?}"),
                "shape": shape,
                "data_offsets": [offset, end],
            });
            header.insert(name.clone(), entry);
            offsets.push((name, offset, end - offset));
            offset = end;
        }
        let mut header = Value::Object(header).to_string().into_bytes();
        header.resize(header.len().next_multiple_of(8), b' ');
        let path = self.partial.join(name);
        let create = || -> io::Result<File> {
            let mut file = File::create_new(&path)?;
            file.write_all(&(header.len() as u64).to_le_bytes())?;
            file.write_all(&header)?;
            Ok(file)
        };
        let file = create().map_err(|error| failure(&path, &error))?;
        let data_start = 8 + header.len() as u64;
        for (name, offset, len) in offsets {
            let place = (self.shards.len(), data_start + offset, len);
            self.places.insert(name.clone(), place);
        }
        self.num_bytes += data_start + offset;
        self.shards.push(file);
        Ok(())
    }

    fn write_index(&mut self, shards: &[String]) -> Result<(), CheckpointError> {
        let places = self.places.iter();
        let map: Map<_, _> = places
            .map(|(name, &(shard, ..))| (name.clone(), shards[shard].clone().into()))
            .collect();
        let total: u64 = self.places.values().map(|&(.., len)| len).sum();
        let index = json!({"metadata": {"total_size": total}, "weight_map": map});
        self.write_file(INDEX, format!("{index:#}\n").as_bytes())
    }

    /// Writes the next bytes of a tensor, row-major and little-endian.
    pub fn write(&mut self, name: &str, bytes: &[u8]) -> Result<(), CheckpointError> {
        let (shard, start, rest) = self
            .places
            .get_mut(name)
            .expect("the tensor is not in the plan");
        let len = bytes.len() as u64;
        assert!(len <= *rest, "tensor {name} is longer than planned");
        let file = &mut self.shards[*shard];
        let mut write = || -> io::Result<()> {
            file.seek(SeekFrom::Start(*start))?;
            file.write_all(bytes)
        };
        write().map_err(|error| failure(&self.partial, &error))?;
        (*start, *rest) = (*start + len, *rest - len);
        Ok(())
    }

    /// Writes a file beside the weights, or in a folder beside them.
    pub fn write_file(&mut self, name: &str, bytes: &[u8]) -> Result<(), CheckpointError> {
        let path = self.partial.join(name);
        self.num_bytes += bytes.len() as u64;
        let write = || {
            fs::create_dir_all(path.parent().unwrap_or(&self.partial))?;
            File::create_new(&path)?.write_all(bytes)
        };
        write().map_err(|error| failure(&path, &error))
    }

    /// Completes the folder and gives it its name. Returns its size in bytes.
    pub fn finish(mut self) -> Result<u64, CheckpointError> {
        for (name, (.., rest)) in &self.places {
            assert_eq!(*rest, 0, "tensor {name} is not complete");
        }
        for file in self.shards.drain(..) {
            let synced = file.sync_all();
            synced.map_err(|error| failure(&self.partial, &error))?;
        }
        // Renaming would replace an empty folder.
        refuse_existing(&self.target)?;
        let renamed = fs::rename(&self.partial, &self.target);
        renamed.map_err(|error| failure(&self.target, &error))?;
        Ok(self.num_bytes)
    }
}

impl Drop for CheckpointWriter {
    fn drop(&mut self) {
        // After `finish` this folder does not exist.
        let _ = fs::remove_dir_all(&self.partial);
    }
}

fn refuse_existing(target: &Path) -> Result<(), CheckpointError> {
    // A dangling link counts as existing, too.
    match fs::symlink_metadata(target) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        Err(error) => Err(failure(target, &error)),
        Ok(_) => Err(CheckpointError::new(
            target.display().to_string(),
            "already exists; name a folder that does not",
        )),
    }
}

fn failure(path: &Path, error: &io::Error) -> CheckpointError {
    let problem = format!("cannot be written: {error}");
    CheckpointError::new(path.display().to_string(), problem)
}

fn num_bytes((_, dtype, shape): &PlannedPart) -> u64 {
    (shape.iter().product::<usize>() * dtype.bitsize() / 8) as u64
}

/// Distributes tensors over shards in their order. A tensor that would make a shard too large
/// starts a new one.
fn cut(tensors: &[PlannedPart], max_bytes: u64) -> Vec<Vec<&PlannedPart>> {
    let (mut shards, mut used) = (vec![Vec::new()], 0);
    for tensor in tensors {
        let bytes = num_bytes(tensor);
        if used > 0 && used + bytes > max_bytes {
            shards.push(Vec::new());
            used = 0;
        }
        used += bytes;
        shards
            .last_mut()
            .expect("there is always a shard")
            .push(tensor);
    }
    shards
}

fn shard_names(num_shards: usize) -> Vec<String> {
    match num_shards {
        1 => vec![SINGLE.to_owned()],
        _ => (1..=num_shards)
            .map(|shard| format!("model-{shard:05}-of-{num_shards:05}.safetensors"))
            .collect(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use safetensors::SafeTensors;

    fn folder(test: &str) -> PathBuf {
        std::env::temp_dir().join(format!("corella-{}-writer-{test}", std::process::id()))
    }

    fn tensors() -> Vec<PlannedPart> {
        vec![
            ("bytes".into(), Dtype::I8, vec![3]),
            ("long".into(), Dtype::I64, vec![2]),
            ("half".into(), Dtype::BF16, vec![2, 2]),
        ]
    }

    fn leftovers(target: &Path) -> usize {
        let name = target.file_name().unwrap().to_str().unwrap();
        let entries = fs::read_dir(target.parent().unwrap()).unwrap();
        let names = entries.map(|entry| entry.unwrap().file_name().into_string().unwrap());
        names.filter(|entry| entry.starts_with(name)).count()
    }

    #[test]
    fn tensors_lie_aligned_whatever_their_order() {
        let target = folder("aligned");
        let mut writer = CheckpointWriter::create(&target, &tensors()).unwrap();
        writer.write("half", &[1, 2, 3, 4, 5, 6]).unwrap();
        writer.write("bytes", &[7, 8, 9]).unwrap();
        writer.write("half", &[7, 8]).unwrap();
        writer.write("long", &[5; 16]).unwrap();
        writer.write_file("config.json", b"{}").unwrap();
        assert!(!target.exists());
        let num_bytes = writer.finish().unwrap();
        let file = fs::read(target.join(SINGLE)).unwrap();
        assert_eq!(num_bytes, file.len() as u64 + 2);
        let read = SafeTensors::deserialize(&file).unwrap();
        assert_eq!(
            read.tensor("half").unwrap().data(),
            [1, 2, 3, 4, 5, 6, 7, 8]
        );
        assert_eq!(read.tensor("bytes").unwrap().data(), [7, 8, 9]);
        let long = read.tensor("long").unwrap();
        assert_eq!(
            (long.data(), long.shape()),
            ([5; 16].as_slice(), [2].as_slice())
        );
        let address = long.data().as_ptr() as usize - file.as_ptr() as usize;
        assert!(address.is_multiple_of(8));
        assert_eq!(leftovers(&target), 1);
        fs::remove_dir_all(&target).unwrap();
    }

    #[test]
    fn large_folders_have_shards_and_an_index() {
        let target = folder("shards");
        let mut writer = CheckpointWriter::create_with(&target, &tensors(), 19).unwrap();
        for (name, len) in [("bytes", 3), ("long", 16), ("half", 8)] {
            writer.write(name, &vec![1; len]).unwrap();
        }
        writer.finish().unwrap();
        let index = fs::read(target.join(INDEX)).unwrap();
        let index: Value = serde_json::from_slice(&index).unwrap();
        assert_eq!(index["metadata"]["total_size"], 27);
        assert_eq!(
            index["weight_map"]["bytes"],
            "model-00001-of-00002.safetensors"
        );
        assert_eq!(
            index["weight_map"]["half"],
            "model-00002-of-00002.safetensors"
        );
        let shard = fs::read(target.join("model-00002-of-00002.safetensors")).unwrap();
        assert_eq!(SafeTensors::deserialize(&shard).unwrap().names(), ["half"]);
        fs::remove_dir_all(&target).unwrap();
    }

    #[test]
    fn nothing_is_left_of_what_is_not_finished() {
        let target = folder("unfinished");
        let mut writer = CheckpointWriter::create(&target, &tensors()).unwrap();
        writer.write("bytes", &[1]).unwrap();
        assert_eq!(leftovers(&target), 1);
        drop(writer);
        assert_eq!(leftovers(&target), 0);
    }

    #[test]
    fn what_exists_is_not_touched() {
        let target = folder("existing");
        fs::create_dir(&target).unwrap();
        let error = CheckpointWriter::create(&target, &tensors()).err().unwrap();
        assert_eq!(error.problem, "already exists; name a folder that does not");
        fs::remove_dir(&target).unwrap();
        // A file that appears during the writing is not replaced either.
        let mut writer = CheckpointWriter::create(&target, &tensors()[..1]).unwrap();
        writer.write("bytes", &[1, 2, 3]).unwrap();
        fs::write(&target, "mine").unwrap();
        assert!(writer.finish().is_err());
        assert_eq!(fs::read(&target).unwrap(), b"mine");
        assert_eq!(leftovers(&target), 1);
        fs::remove_file(&target).unwrap();
    }

    #[test]
    fn a_place_that_does_not_exist() {
        let error = CheckpointWriter::create(Path::new("/no/such/place"), &tensors());
        let problem = error.err().unwrap().problem;
        assert!(
            problem.starts_with("cannot be written: No such file"),
            "{problem}"
        );
        let error = CheckpointWriter::create(Path::new("/no/such/.."), &tensors());
        assert!(error.is_err());
    }
}
