//! The results of finished runs in a file, so that an interrupted command can continue.

use std::fs::{self, File, OpenOptions};
use std::io::Write;
use std::path::{Path, PathBuf};

use super::harness::Failure;
use super::mode::Mode;

/// The result of a unit, a test binary or a test file, in a run.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Outcome {
    pub run: usize,
    pub unit: String,
    pub mode: Mode,
    pub seconds: u64,
    pub failure: Option<Failure>,
}

pub struct Record {
    /// The folder has the results and the output of failed units.
    pub folder: PathBuf,
    pub seed: u64,
    pub outcomes: Vec<Outcome>,
}

impl Record {
    /// Opens the record of runs with these arguments: a new one, or with `resumes` the existing
    /// one.
    pub fn open(
        folder: PathBuf,
        what: &str,
        seed: Option<u64>,
        resumes: bool,
    ) -> Result<Self, String> {
        let path = folder.join("results.txt");
        let at = |error| format!("{}: {error}", path.display());
        if !resumes {
            let _ = fs::remove_dir_all(&folder);
            fs::create_dir_all(&folder).map_err(at)?;
            let seed = seed.unwrap_or_else(seed_of_clock);
            fs::write(&path, format!("{what}\n{seed}\n")).map_err(at)?;
            return Ok(Self {
                folder,
                seed,
                outcomes: Vec::new(),
            });
        }
        let text = fs::read_to_string(&path).map_err(|_| {
            format!("shake: there is nothing to resume: no run with `{what}` is kept")
        })?;
        let mut lines = text.lines().skip(1);
        let kept = lines.next().and_then(|line| line.parse().ok());
        let kept: u64 = kept.ok_or_else(|| format!("{}: it has no seed", path.display()))?;
        if seed.is_some_and(|seed| seed != kept) {
            return Err(format!("shake: the runs to resume have the seed {kept}"));
        }
        // The last line may have been cut off.
        let outcomes: Vec<Outcome> = lines.filter_map(Outcome::parse).collect();
        let lines = outcomes.iter().map(|outcome| outcome.line() + "\n");
        let whole = format!("{what}\n{kept}\n{}", lines.collect::<String>());
        fs::write(&path, whole).map_err(at)?;
        Ok(Self {
            folder,
            seed: kept,
            outcomes,
        })
    }

    pub fn has(&self, run: usize, unit: &str) -> bool {
        let is_it = |outcome: &Outcome| outcome.run == run && outcome.unit == unit;
        self.outcomes.iter().any(is_it)
    }

    /// Records an outcome.
    pub fn add(&mut self, outcome: Outcome) -> Result<(), String> {
        let path = self.folder.join("results.txt");
        let open = OpenOptions::new().append(true).open(&path);
        let write = |mut file: File| writeln!(file, "{}", outcome.line());
        open.and_then(write)
            .map_err(|error| format!("{}: {error}", path.display()))?;
        self.outcomes.push(outcome);
        Ok(())
    }

    /// Returns the file for a unit's output in a run.
    pub fn output(&self, run: usize, unit: &str, mode: Mode) -> PathBuf {
        let name = unit.replace(|c: char| !c.is_ascii_alphanumeric(), "-");
        self.folder
            .join(format!("run-{run:02}-{}-{name}.txt", mode.name()))
    }
}

impl Outcome {
    fn line(&self) -> String {
        let Self {
            run,
            unit,
            mode,
            seconds,
            failure,
        } = self;
        let mut line = format!("{run}\t{unit}\t{}\t{seconds}\t", mode.name());
        match failure {
            None => line += "ok",
            Some(Failure { what, tests }) => {
                line += "failed\t";
                line += what.as_deref().unwrap_or_default();
                tests.iter().for_each(|test| line += &format!("\t{test}"));
            }
        }
        line + "\t."
    }

    fn parse(line: &str) -> Option<Self> {
        let mut fields = line.strip_suffix("\t.")?.split('\t');
        Some(Self {
            run: fields.next()?.parse().ok()?,
            unit: fields.next()?.to_string(),
            mode: Mode::named(fields.next()?)?,
            seconds: fields.next()?.parse().ok()?,
            failure: match fields.next()? {
                "ok" => None,
                _ => Some(Failure {
                    what: Some(fields.next()?.to_string()).filter(|what| !what.is_empty()),
                    tests: fields.map(str::to_owned).collect(),
                }),
            },
        })
    }
}

/// Returns the folder of runs with these arguments.
pub fn folder(target: &Path, what: &str) -> PathBuf {
    let name = what.replace(|c: char| !c.is_ascii_alphanumeric(), "-");
    let name: String = name.trim_matches('-').chars().take(60).collect();
    // An FNV-1a hash distinguishes arguments with the same letters.
    let hash = what.bytes().fold(0x811c_9dc5_u32, |hash, byte| {
        (hash ^ u32::from(byte)).wrapping_mul(0x0100_0193)
    });
    target.join("shake").join(format!("{name}-{hash:08x}"))
}

/// Returns a seed short enough to type.
fn seed_of_clock() -> u64 {
    let since_epoch = std::time::UNIX_EPOCH.elapsed().unwrap_or_default();
    u64::from(since_epoch.subsec_nanos()) ^ (since_epoch.as_secs() & 0xff_ffff)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn outcome(run: usize, unit: &str, failure: Option<Failure>) -> Outcome {
        Outcome {
            run,
            unit: unit.into(),
            mode: Mode::OneCore,
            seconds: 12,
            failure,
        }
    }

    #[test]
    fn what_was_interrupted_goes_on_with_its_seed() {
        let folder = std::env::temp_dir().join(format!("xtask-record-{}", std::process::id()));
        let open = |seed, resumes| Record::open(folder.clone(), "-k a", seed, resumes);
        let failure = Failure {
            what: Some("signal".into()),
            tests: vec!["a::b[x y]".into(), "c".into()],
        };
        let plain = Failure {
            what: None,
            tests: vec!["a".into()],
        };
        let outcomes = [
            outcome(1, "a suite", None),
            outcome(1, "b suite", Some(failure)),
            outcome(2, "a suite", Some(plain)),
        ];
        let mut record = open(Some(7), false).unwrap();
        for outcome in &outcomes {
            record.add(outcome.clone()).unwrap();
        }
        // A run was cut off while its result was written.
        let path = folder.join("results.txt");
        let text = fs::read_to_string(&path).unwrap();
        fs::write(&path, text + "2\tb suite\tpla").unwrap();
        open(None, true)
            .unwrap()
            .add(outcome(3, "a suite", None))
            .unwrap();
        let mut again = open(None, true).unwrap();
        assert_eq!(again.outcomes.pop(), Some(outcome(3, "a suite", None)));
        assert_eq!((again.seed, &again.outcomes[..]), (7, &outcomes[..]));
        assert!(again.has(2, "a suite") && !again.has(2, "b suite"));
        assert!(open(Some(8), true).is_err());
        assert!(open(Some(8), false).unwrap().outcomes.is_empty());
        fs::remove_dir_all(&folder).unwrap();
        assert!(open(None, true).is_err());
    }

    #[test]
    fn other_arguments_have_another_folder() {
        let of = |what: &str| folder(Path::new("/t"), what);
        assert_ne!(of("-k a.b"), of("-k a-b"));
        assert_eq!(of("-k a"), of("-k a"));
        assert!(of("-k a").to_string_lossy().starts_with("/t/shake/k-a-"));
    }
}
