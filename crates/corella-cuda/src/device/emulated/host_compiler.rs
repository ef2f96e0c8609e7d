//! Kernel sources as shared objects, from the host's C++ compiler. They are cached by content.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};

use corella_model::DeviceError;

use xxhash_rust::xxh3::Xxh3;

use crate::device::ModuleSource;
use crate::kernel_include::INCLUDES;

const EMULATION: &str = include_str!("../emulation.h");

/// The path of the shared object of a source. Several processes or threads may compile the same source at the same
/// time. The last result then replaces the earlier ones, which are equal.
pub fn compile(source: &ModuleSource) -> Result<PathBuf, DeviceError> {
    let compiler = std::env::var("CXX").unwrap_or_else(|_| "g++".into());
    let flags = flags(source);
    let folder = folder()?;
    let object = folder.join(format!("{:032x}.so", hash(source, &flags, &compiler)?));
    if object.is_file() {
        return Ok(object);
    }
    let scratch = Scratch::new(&folder)?;
    let write = |name: &str, text: &str| {
        let path = scratch.0.join(name);
        fs::write(&path, text).map_err(|error| failed(&path, &error))?;
        Ok(path)
    };
    for &(name, text) in INCLUDES {
        write(name, text)?;
    }
    let emulation = write("emulation.h", EMULATION)?;
    let text = write(source.name, source.text)?;
    let output = scratch.0.join("kernels.so");
    let result = Command::new(&compiler)
        .args(&flags)
        .arg("-include")
        .arg(emulation)
        .args(["-x", "c++"])
        .arg(text)
        .arg("-o")
        .arg(&output)
        .arg("-lm")
        .output()
        .map_err(|error| {
            DeviceError(format!(
                "{compiler} cannot be run: {error}; the emulated device needs a C++ compiler: install one, or set CXX"
            ))
        })?;
    if !result.status.success() {
        return Err(DeviceError(format!(
            "{} does not compile:\n{}",
            source.name,
            String::from_utf8_lossy(&result.stderr)
        )));
    }
    fs::rename(&output, &object).map_err(|error| failed(&object, &error))?;
    Ok(object)
}

fn flags(source: &ModuleSource) -> Vec<String> {
    let mut flags: Vec<String> = [
        "-std=c++17",
        "-O2",
        "-ffp-contract=off",
        "-fno-strict-aliasing",
        "-fno-exceptions",
        "-fvisibility=hidden",
        "-fno-gnu-unique",
        // A GPU reads 4, 8 or 16 bytes only at aligned addresses; the host allows others.
        "-fsanitize=alignment",
        "-fsanitize-undefined-trap-on-error",
        "-shared",
        "-fPIC",
        // All of .bss is the kernels' shared memory, so start-up files, which may have .bss, are left out.
        "-nostartfiles",
        "-fmax-errors=20",
        "-w",
    ]
    .map(String::from)
    .into();
    #[cfg(target_arch = "x86_64")]
    if is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma") {
        flags.push("-march=x86-64-v3".into());
    }
    for (name, value) in &source.defines {
        flags.push(format!("-D{name}={value}"));
    }
    flags
}

fn hash(source: &ModuleSource, flags: &[String], compiler: &str) -> Result<u128, DeviceError> {
    static VERSION: OnceLock<Vec<u8>> = OnceLock::new();
    let version = VERSION.get_or_init(|| {
        let output = Command::new(compiler).arg("--version").output();
        output.map(|output| output.stdout).unwrap_or_default()
    });
    let mut hash = Xxh3::new();
    let mut add = |part: &[u8]| {
        hash.update(&(part.len() as u64).to_le_bytes());
        hash.update(part);
    };
    add(compiler.as_bytes());
    add(version);
    add(EMULATION.as_bytes());
    for &(name, text) in INCLUDES {
        add(name.as_bytes());
        add(text.as_bytes());
    }
    add(source.name.as_bytes());
    add(source.text.as_bytes());
    for flag in flags {
        add(flag.as_bytes());
    }
    Ok(hash.digest128())
}

/// The folder of shared objects, which no other user of this machine could have written.
fn folder() -> Result<PathBuf, DeviceError> {
    // SAFETY: the call has no conditions.
    let user = unsafe { libc::getuid() };
    let folder = std::env::temp_dir().join(format!("corella-emulated-kernels-{user}"));
    fs::create_dir_all(&folder).map_err(|error| failed(&folder, &error))?;
    use std::os::unix::fs::{MetadataExt, PermissionsExt};
    let metadata = fs::metadata(&folder).map_err(|error| failed(&folder, &error))?;
    if metadata.uid() != user {
        let folder = folder.display();
        return Err(DeviceError(format!(
            "{folder} belongs to another user: remove it, or set TMPDIR"
        )));
    }
    fs::set_permissions(&folder, fs::Permissions::from_mode(0o700))
        .map_err(|error| failed(&folder, &error))?;
    Ok(folder)
}

pub fn failed(path: &Path, error: &std::io::Error) -> DeviceError {
    DeviceError(format!("{}: {error}", path.display()))
}

/// A unique name in a folder.
pub fn unique_path(folder: &Path) -> PathBuf {
    static COUNT: AtomicU64 = AtomicU64::new(0);
    let count = COUNT.fetch_add(1, Ordering::Relaxed);
    folder.join(format!("{}-{count}", std::process::id()))
}

/// A folder for one compilation, removed with its content.
struct Scratch(PathBuf);

impl Scratch {
    fn new(folder: &Path) -> Result<Self, DeviceError> {
        let path = unique_path(folder);
        let _ = fs::remove_dir_all(&path);
        fs::create_dir(&path).map_err(|error| failed(&path, &error))?;
        Ok(Self(path))
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}
