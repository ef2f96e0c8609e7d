//! Models in several GGUF files, as `llama-gguf-split` writes them: the first has the metadata, and each
//! has some of the tensors.

use std::path::{Path, PathBuf};

use super::GgufFile;
use crate::CheckpointError;

const NUMBER: &str = "split.no";
const COUNT: &str = "split.count";
const NUM_TENSORS: &str = "split.tensors.count";
/// The largest number of parts: the numbers in the files' names have five digits.
const MAX_PARTS: usize = 99_999;

impl GgufFile {
    /// Adds the tensors of the other parts, if this file is the first of several parts. `open` opens a file that lies
    /// beside this one.
    pub fn join(
        mut self,
        path: &Path,
        open: impl Fn(&Path) -> Result<GgufFile, CheckpointError>,
    ) -> Result<Self, CheckpointError> {
        let count = self.split_number(COUNT)?.unwrap_or(0);
        // Some converters write these keys for an unsplit file.
        if count <= 1 {
            return Ok(self);
        }
        if count > MAX_PARTS {
            let why = format!("no model has more than {MAX_PARTS} parts");
            return Err(self.metadata.refuse(COUNT, &why));
        }
        let parts = Parts::of(path, count).ok_or_else(|| {
            let why = format!(
                "so the name of the first part must end in {}, by which the others are found",
                ending(1, count)
            );
            self.metadata.refuse(COUNT, &why)
        })?;
        if let number @ 1.. = self.split_number(NUMBER)?.unwrap_or(0) {
            let first = parts.path(1);
            let why = format!(
                "part {} of {count}: give the first one, {}",
                number + 1,
                first.display()
            );
            return Err(self.metadata.refuse(NUMBER, &why));
        }
        let num_tensors = self.split_number(NUM_TENSORS)?;
        for number in 2..=count {
            let path = parts.path(number);
            if !path.is_file() {
                let problem = format!("is missing; {} is the first of {count} parts", self.label);
                return Err(CheckpointError::new(path.display().to_string(), problem));
            }
            let part = open(&path)?;
            part.check_part(&self, number, count, num_tensors)?;
            self.add(part)?;
        }
        match num_tensors {
            Some(expected) if expected != self.tensors.len() => {
                let why = format!("the {count} parts have {} tensors", self.tensors.len());
                Err(self.metadata.refuse(NUM_TENSORS, &why))
            }
            _ => Ok(self),
        }
    }

    /// Checks that this file is part `number`, counted from 1, of the model that `first` begins.
    fn check_part(
        &self,
        first: &Self,
        number: usize,
        count: usize,
        num_tensors: Option<usize>,
    ) -> Result<(), CheckpointError> {
        let not_of = |key| {
            let why = format!("so the file is not part {number} of {}", first.label);
            Err(self.metadata.refuse(key, &why))
        };
        if self.split_number(NUMBER)? != Some(number - 1) {
            return not_of(NUMBER);
        }
        if self.split_number(COUNT)? != Some(count) {
            return not_of(COUNT);
        }
        if self.split_number(NUM_TENSORS)? != num_tensors {
            return not_of(NUM_TENSORS);
        }
        Ok(())
    }

    fn add(&mut self, part: Self) -> Result<(), CheckpointError> {
        for (name, info) in part.tensors {
            if self.tensors.contains_key(&name) {
                let problem = format!("tensor {name} is in another part, too");
                return Err(CheckpointError::new(part.label, problem));
            }
            self.tensors.insert(name, info);
        }
        self.other_parts.push(PathBuf::from(part.label));
        Ok(())
    }

    fn split_number(&self, key: &str) -> Result<Option<usize>, CheckpointError> {
        match self.metadata.try_number(key)? {
            Some(number) if number < 0.0 => Err(self.metadata.refuse(key, "must not be negative")),
            number => Ok(number.map(|number| number as usize)),
        }
    }
}

/// The suffix of the name of a part, counted from 1.
fn ending(number: usize, count: usize) -> String {
    format!("-{number:05}-of-{count:05}.gguf")
}

/// The name of the model in a GGUF file called `file_name`: a whole model, or the first part of a split model. `None`
/// if `file_name` has another ending.
pub fn gguf_model_name(file_name: &str) -> Option<&str> {
    name_of_first_part(file_name).or_else(|| file_name.strip_suffix(".gguf"))
}

/// The name of the split model whose first part is called `file_name`; `None` if `file_name` is not that of a first
/// part.
pub fn name_of_first_part(file_name: &str) -> Option<&str> {
    let count = file_name.strip_suffix(".gguf")?.rsplit_once("-of-")?.1;
    let count = count.parse().ok()?;
    file_name.strip_suffix(&ending(1, count))
}

/// The files of a split model.
struct Parts<'a> {
    folder: &'a Path,
    name: &'a str,
    count: usize,
}

impl<'a> Parts<'a> {
    /// All parts of the model to which the part at `path` belongs; `None` if `path` is not named like a part.
    fn of(path: &'a Path, count: usize) -> Option<Self> {
        let file_name = path.file_name()?.to_str()?;
        let name = (1..=count).find_map(|number| file_name.strip_suffix(&ending(number, count)))?;
        let folder = path.parent()?;
        Some(Self {
            folder,
            name,
            count,
        })
    }

    fn path(&self, number: usize) -> PathBuf {
        let ending = ending(number, self.count);
        self.folder.join(format!("{}{ending}", self.name))
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;
    use crate::Checkpoint;

    const COUNT_OF_PARTS: usize = 4;

    fn committed() -> PathBuf {
        Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/gguf")
    }

    /// A copy of the parts that the gguf package made from tests/gguf/qwen3-f16.gguf.
    struct Folder(PathBuf);

    impl Folder {
        fn new(test: &str) -> Self {
            let name = format!("corella-split-{}-{test}", std::process::id());
            let folder = Self(std::env::temp_dir().join(name));
            fs::create_dir_all(&folder.0).unwrap();
            for number in 1..=COUNT_OF_PARTS {
                let part = folder.part(number);
                let from = committed().join("split").join(part.file_name().unwrap());
                fs::copy(from, part).unwrap();
            }
            folder
        }

        fn part(&self, number: usize) -> PathBuf {
            let ending = ending(number, COUNT_OF_PARTS);
            self.0.join(format!("qwen3-f16{ending}"))
        }

        /// Replaces the number of a part or the number of parts, which has 16 bits.
        fn set(&self, number: usize, key: &str, value: u16) {
            let path = self.part(number);
            let mut bytes = fs::read(&path).unwrap();
            let entry = [key.as_bytes(), &2_u32.to_le_bytes()].concat();
            let found = bytes.windows(entry.len()).position(|bytes| bytes == entry);
            let at = found.unwrap() + entry.len();
            bytes[at..at + 2].copy_from_slice(&value.to_le_bytes());
            fs::write(path, bytes).unwrap();
        }

        #[track_caller]
        fn error(&self, path: &Path) -> String {
            let error = Checkpoint::open(path).err();
            let error = error.expect("the model must not load").to_string();
            assert!(!error.contains('\n'), "{error}");
            error.replace(&format!("{}/", self.0.display()), "")
        }

        /// The error of the whole model.
        #[track_caller]
        fn error_of_first(&self) -> String {
            self.error(&self.part(1))
        }
    }

    impl Drop for Folder {
        fn drop(&mut self) {
            let _ = fs::remove_dir_all(&self.0);
        }
    }

    #[test]
    fn parts_are_the_same_model_as_the_whole() {
        let whole = Checkpoint::open(committed().join("qwen3-f16.gguf")).unwrap();
        let folder = Folder::new("same");
        for path in [&folder.part(1), &folder.0] {
            let parts = Checkpoint::open(path).unwrap();
            assert_eq!(parts.config(), whole.config());
            assert_eq!(
                parts.file("tokenizer.json").unwrap(),
                whole.file("tokenizer.json").unwrap()
            );
            let (weights, expected) = (parts.weights().unwrap(), whole.weights().unwrap());
            assert_eq!(weights.embed.bytes(), expected.embed.bytes());
            assert_eq!(weights.norm.bytes(), expected.norm.bytes());
            for (layer, expected) in weights.layers.iter().zip(&expected.layers) {
                for ((tensor, values), (_, expected)) in layer.iter().zip(expected.iter()) {
                    assert_eq!(values.bytes(), expected.bytes(), "{tensor}");
                }
            }
            assert_eq!(parts.totals().unwrap(), whole.totals().unwrap());
            let expected: Vec<_> = (1..=COUNT_OF_PARTS).map(|n| folder.part(n)).collect();
            assert_eq!(parts.files().unwrap(), expected);
        }
    }

    #[test]
    fn only_the_first_part_is_a_model() {
        let folder = Folder::new("second");
        let error = folder.error(&folder.part(2));
        let expected = "qwen3-f16-00002-of-00004.gguf: split.no is 1; part 2 of 4: give the first one, \
                        qwen3-f16-00001-of-00004.gguf";
        assert_eq!(error, expected);

        let renamed = folder.0.join("renamed.gguf");
        fs::rename(folder.part(1), &renamed).unwrap();
        let error = folder.error(&renamed);
        assert!(
            error.starts_with("renamed.gguf: split.count is 4; "),
            "{error}"
        );
        assert!(
            error.contains("must end in -00001-of-00004.gguf"),
            "{error}"
        );
    }

    #[test]
    fn a_part_that_is_missing_is_named() {
        let folder = Folder::new("missing");
        fs::remove_file(folder.part(3)).unwrap();
        for path in [&folder.part(1), &folder.0] {
            assert_eq!(
                folder.error(path),
                "qwen3-f16-00003-of-00004.gguf: is missing; qwen3-f16-00001-of-00004.gguf is the first \
                 of 4 parts"
            );
        }
    }

    #[test]
    fn parts_that_do_not_belong_together_are_refused() {
        let folder = Folder::new("repeated");
        fs::copy(folder.part(2), folder.part(3)).unwrap();
        let error = folder.error_of_first();
        let expected = "qwen3-f16-00003-of-00004.gguf: split.no is 1; so the file is not part 3 of \
                        qwen3-f16-00001-of-00004.gguf";
        assert_eq!(error, expected);
        // The same tensors under another number.
        folder.set(3, NUMBER, 2);
        let error = folder.error_of_first();
        assert!(
            error.starts_with("qwen3-f16-00003-of-00004.gguf: tensor "),
            "{error}"
        );
        assert!(error.ends_with(" is in another part, too"), "{error}");

        let folder = Folder::new("foreign");
        folder.set(4, COUNT, 5);
        let error = folder.error_of_first();
        assert!(
            error.starts_with("qwen3-f16-00004-of-00004.gguf: split.count is 5; "),
            "{error}"
        );
    }

    #[test]
    fn a_part_that_is_cut_off_is_named() {
        let folder = Folder::new("cut");
        let bytes = fs::read(folder.part(3)).unwrap();
        fs::write(folder.part(3), &bytes[..bytes.len() - 40]).unwrap();
        let error = folder.error_of_first();
        assert!(
            error.starts_with("qwen3-f16-00003-of-00004.gguf: is truncated"),
            "{error}"
        );
    }

    #[test]
    fn names_of_models() {
        for (file, name) in [
            ("a-b-00001-of-00012.gguf", Some("a-b")),
            ("a-00002-of-00012.gguf", Some("a-00002-of-00012")),
            ("a.gguf", Some("a")),
            ("-of-.gguf", Some("-of-")),
            ("a-00001-of-00012", None),
            ("a.safetensors", None),
        ] {
            assert_eq!(gguf_model_name(file), name, "{file}");
        }
    }
}
