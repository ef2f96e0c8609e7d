//! The kernels' registers and shared memory, as the assembler reports them for the architectures that differ. Reading
//! them needs NVRTC, but neither a GPU nor a driver.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};

use corella_model::DeviceError;

use crate::device::{ModuleSource, Nvrtc, cubin};

mod model_shape;
mod recording_device;

use recording_device::{RecordedModule, RecordingDevice};

/// The generations whose code differs: Ampere, Hopper and Blackwell.
const ARCHITECTURES: [&str; 3] = ["sm_80", "sm_90a", "sm_100"];

/// The generations that are compiled with other major versions of NVRTC: Hopper represents all of them.
const ARCHITECTURES_OF_OTHERS: [&str; 1] = ["sm_90a"];

/// The major version of NVRTC with which all generations are compiled.
const FIRST_VERSION: i32 = 12;

/// A kernel's key: architecture, source, macros and name.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct KernelKey {
    architecture: String,
    source: String,
    kernel: String,
    defines: String,
}

/// The cost of one thread or block of a kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KernelCost {
    pub registers: u32,
    /// Static shared memory of a block in bytes.
    pub shared_bytes: u32,
    /// Bytes that a thread spills for lack of registers.
    pub spilled_bytes: u32,
}

/// All kernels that present models use.
#[derive(Debug, PartialEq, Eq)]
pub struct KernelTable {
    nvrtc_version: String,
    kernels: BTreeMap<KernelKey, KernelCost>,
}

impl KernelTable {
    /// Compiles all kernels.
    pub fn compute() -> Result<Self, DeviceError> {
        let nvrtc = Nvrtc::open()?;
        let mut work = Vec::new();
        let architectures = match nvrtc.major_version() {
            FIRST_VERSION => &ARCHITECTURES[..],
            _ => &ARCHITECTURES_OF_OTHERS,
        };
        for &architecture in architectures {
            let modules = RecordingDevice::modules_for(architecture)?;
            work.extend(modules.into_iter().map(|module| (architecture, module)));
        }
        let next = AtomicUsize::new(0);
        let results = Mutex::new(BTreeMap::new());
        let failures = Mutex::new(Vec::new());
        let num_threads = std::thread::available_parallelism().map_or(1, |number| number.get());
        std::thread::scope(|scope| {
            for _ in 0..num_threads {
                scope.spawn(|| {
                    while let Some((architecture, module)) =
                        work.get(next.fetch_add(1, Ordering::Relaxed))
                    {
                        match costs(&nvrtc, architecture, module) {
                            Ok(costs) => results.lock().unwrap().extend(costs),
                            Err(error) => failures.lock().unwrap().push(error.0),
                        }
                    }
                });
            }
        });
        let failures = failures.into_inner().unwrap();
        if !failures.is_empty() {
            return Err(DeviceError(failures.join("\n")));
        }
        Ok(Self {
            nvrtc_version: nvrtc.version(),
            kernels: results.into_inner().unwrap(),
        })
    }

    /// Reads the output of `to_string`.
    pub fn parse(text: &str) -> Result<Self, String> {
        let mut lines = text.lines();
        let nvrtc_version = (lines.next().and_then(|line| line.strip_prefix("NVRTC ")))
            .ok_or("the first line of a kernel table names NVRTC's version")?;
        let mut kernels = BTreeMap::new();
        for line in lines.skip(1) {
            let (key, cost) =
                row(line).ok_or_else(|| format!("not a row of a kernel table: {line}"))?;
            kernels.insert(key, cost);
        }
        Ok(Self {
            nvrtc_version: nvrtc_version.into(),
            kernels,
        })
    }

    /// The compiler's version, such as `12.9`.
    pub fn nvrtc_version(&self) -> &str {
        &self.nvrtc_version
    }

    pub fn num_kernels(&self) -> usize {
        self.kernels.len()
    }

    /// The differences that are to be recorded or repaired, one line each: another NVRTC, costs that exceed the
    /// recorded costs, and kernels that only one of the tables has.
    pub fn complaints(&self, recorded: &Self) -> Vec<String> {
        let mut complaints = Vec::new();
        if self.nvrtc_version != recorded.nvrtc_version {
            complaints.push(format!(
                "the table was made with NVRTC {}, but this is {}",
                recorded.nvrtc_version, self.nvrtc_version
            ));
        }
        for (key, cost) in &self.kernels {
            match recorded.kernels.get(key) {
                None => complaints.push(format!("{key}: not recorded")),
                Some(before) => {
                    for (what, now, before) in [
                        ("registers", cost.registers, before.registers),
                        (
                            "bytes of shared memory",
                            cost.shared_bytes,
                            before.shared_bytes,
                        ),
                        ("bytes spilled", cost.spilled_bytes, before.spilled_bytes),
                    ] {
                        if now > before {
                            complaints.push(format!("{key}: {now} {what}, recorded are {before}"));
                        }
                    }
                }
            }
        }
        for key in recorded.kernels.keys() {
            if !self.kernels.contains_key(key) {
                complaints.push(format!("{key}: recorded, but no model uses it"));
            }
        }
        complaints
    }

    /// Kernels whose threads spill registers, one line each.
    pub fn spills(&self) -> Vec<String> {
        let spilling = self
            .kernels
            .iter()
            .filter(|(_, cost)| cost.spilled_bytes > 0);
        spilling
            .map(|(key, cost)| format!("{key}: {} bytes", cost.spilled_bytes))
            .collect()
    }
}

impl fmt::Display for KernelKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            architecture,
            source,
            kernel,
            defines,
        } = self;
        write!(f, "{architecture} {source} {kernel} {defines}")
    }
}

/// The version, the names of the columns, and a line for each kernel.
impl fmt::Display for KernelTable {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "NVRTC {}", self.nvrtc_version)?;
        writeln!(
            f,
            "registers shared spilled architecture source kernel macros"
        )?;
        for (key, cost) in &self.kernels {
            let KernelCost {
                registers,
                shared_bytes,
                spilled_bytes,
            } = cost;
            writeln!(f, "{registers} {shared_bytes} {spilled_bytes} {key}")?;
        }
        Ok(())
    }
}

fn row(line: &str) -> Option<(KernelKey, KernelCost)> {
    let mut words = line.splitn(7, ' ');
    let cost = KernelCost {
        registers: words.next()?.parse().ok()?,
        shared_bytes: words.next()?.parse().ok()?,
        spilled_bytes: words.next()?.parse().ok()?,
    };
    let mut word = || words.next().map(String::from);
    let key = KernelKey {
        architecture: word()?,
        source: word()?,
        kernel: word()?,
        defines: word()?,
    };
    Some((key, cost))
}

fn costs(
    nvrtc: &Nvrtc,
    architecture: &str,
    module: &RecordedModule,
) -> Result<Vec<(KernelKey, KernelCost)>, DeviceError> {
    let RecordedModule { source, kernels } = module;
    let compiled = nvrtc.compile(source, architecture, true)?;
    let costs = read_log(&compiled.log);
    let cost = |kernel: &String| {
        let told = costs.get(kernel.as_str()).copied();
        // Launches are checked against this variable.
        let has_args = cubin::variable(&compiled.cubin, &format!("{kernel}_args_bytes")).is_some();
        let (Some(cost), true) = (told, has_args) else {
            return Err(DeviceError(format!(
                "{} has no kernel {kernel} that KERNEL or KERNEL_OF defines:\n{}",
                source.name, compiled.log
            )));
        };
        let key = KernelKey {
            architecture: architecture.into(),
            source: source.name.into(),
            kernel: kernel.clone(),
            defines: defines(source),
        };
        Ok((key, cost))
    };
    kernels.iter().map(cost).collect()
}

/// Macros in a line, `-` without any.
fn defines(source: &ModuleSource) -> String {
    let defines = source.defines.iter();
    let defines: Vec<String> = defines
        .map(|(name, value)| format!("{name}={value}"))
        .collect();
    match defines.is_empty() {
        true => "-".into(),
        false => defines.join(" "),
    }
}

/// The assembler's report about each entry function.
fn read_log(log: &str) -> BTreeMap<&str, KernelCost> {
    let number_before = |line: &str, what: &str| {
        let before = &line[..line.find(what)?];
        before.rsplit([' ', ',']).next()?.parse::<u32>().ok()
    };
    let mut costs = BTreeMap::new();
    let mut kernel = None;
    for line in log.lines() {
        if let Some((_, rest)) = line.split_once("Compiling entry function '") {
            kernel = rest.split('\'').next();
        }
        let Some(kernel) = kernel else {
            continue;
        };
        let cost = costs.entry(kernel).or_insert(KernelCost {
            registers: 0,
            shared_bytes: 0,
            spilled_bytes: 0,
        });
        if let Some(number) = number_before(line, " bytes spill stores") {
            cost.spilled_bytes = number;
        }
        if let Some(number) = number_before(line, " registers") {
            cost.registers = number;
            cost.shared_bytes = number_before(line, " bytes smem").unwrap_or(0);
        }
    }
    costs
}

#[cfg(test)]
mod tests {
    use super::*;

    const LOG: &str = "\
ptxas info    : 12 bytes gmem, 4 bytes cmem[3], 24 bytes cmem[4]
ptxas info    : Compiling entry function 'first' for 'sm_80'
ptxas info    : Function properties for first
ptxas         .     0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 31 registers, used 1 barriers, 1152 bytes smem, 376 bytes cmem[0]
ptxas info    : Compiling entry function 'second' for 'sm_80'
ptxas info    : Function properties for second
ptxas         .     16 bytes stack frame, 8 bytes spill stores, 12 bytes spill loads
ptxas info    : Used 255 registers, used 0 barriers
";

    fn table(costs: &[(&str, u32, u32, u32)]) -> KernelTable {
        let kernels = costs
            .iter()
            .map(|&(kernel, registers, shared_bytes, spilled_bytes)| {
                let key = KernelKey {
                    architecture: "sm_80".into(),
                    source: "a.cu".into(),
                    kernel: kernel.into(),
                    defines: "ELEMENT=float N=2".into(),
                };
                let cost = KernelCost {
                    registers,
                    shared_bytes,
                    spilled_bytes,
                };
                (key, cost)
            });
        KernelTable {
            nvrtc_version: "12.9".into(),
            kernels: kernels.collect(),
        }
    }

    #[test]
    fn the_assemblers_log_is_read() {
        let told: Vec<_> = read_log(LOG)
            .into_iter()
            .map(|(name, cost)| (name, cost.registers, cost.shared_bytes, cost.spilled_bytes))
            .collect();
        assert_eq!(told, [("first", 31, 1152, 0), ("second", 255, 0, 8)]);
    }

    #[test]
    fn what_is_worse_is_complained_about() {
        let recorded = table(&[("a", 40, 100, 0), ("b", 40, 100, 0), ("gone", 1, 0, 0)]);
        assert_eq!(
            KernelTable::parse(&recorded.to_string()),
            Ok(table(&[
                ("a", 40, 100, 0),
                ("b", 40, 100, 0),
                ("gone", 1, 0, 0)
            ]))
        );
        assert!(recorded.complaints(&recorded).is_empty());
        let now = table(&[("a", 41, 99, 0), ("b", 39, 101, 4), ("new", 1, 0, 0)]);
        let expected = [
            "sm_80 a.cu a ELEMENT=float N=2: 41 registers, recorded are 40",
            "sm_80 a.cu b ELEMENT=float N=2: 101 bytes of shared memory, recorded are 100",
            "sm_80 a.cu b ELEMENT=float N=2: 4 bytes spilled, recorded are 0",
            "sm_80 a.cu new ELEMENT=float N=2: not recorded",
            "sm_80 a.cu gone ELEMENT=float N=2: recorded, but no model uses it",
        ];
        assert_eq!(now.complaints(&recorded), expected);
        assert_eq!(now.spills(), ["sm_80 a.cu b ELEMENT=float N=2: 4 bytes"]);
    }
}
