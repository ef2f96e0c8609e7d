//! What is run on a machine with a GPU, which may have nothing of Rust and no network: test binaries and the release
//! binary are packed here, and `bench/gpu.py` runs them there.

use std::collections::BTreeMap;
use std::fs;
use std::path::PathBuf;

use crate::repository::{Repository, output, run};

/// Fits a machine that takes so much of a tree at once, with room for the sources.
const MAX_PACK_BYTES: u64 = 56 << 20;

/// Test binaries of corella-cuda by their targets' names: the kernels, conformance, and goldens.
const TESTS: [&str; 3] = ["corella_cuda", "conformance", "golden"];

/// Packs binaries into `target/gpu`. `--run` then runs them on this machine; what follows goes to `bench/gpu.py`.
pub fn gpu(repository: &Repository, arguments: &[String]) -> Result<(), String> {
    let runs = arguments
        .first()
        .is_some_and(|argument| argument == "--run");
    if !runs && !arguments.is_empty() {
        return Err("the first argument of gpu is --run, or there is none".into());
    }
    let pack = pack(repository)?;
    if !runs {
        println!(
            "take this tree to a machine with a GPU, with {} in it, and run there, in a call of ten minutes each:\n\
             \n  python3 bench/gpu.py --pack target/gpu --results FOLDER\n\
             \nuntil it says that all stages are done. FOLDER is that of the call before.",
            pack.display()
        );
        return Ok(());
    }
    let mut command = repository.command("python3".as_ref(), &["bench/gpu.py", "--pack"]);
    command.arg(pack).args(&arguments[1..]);
    run(&mut command, "a stage on the GPU failed, above")
}

fn pack(repository: &Repository) -> Result<PathBuf, String> {
    let folder = repository.target.join("gpu");
    let _ = fs::remove_dir_all(&folder);
    fs::create_dir_all(&folder).map_err(|error| format!("{}: {error}", folder.display()))?;
    let mut binaries = test_binaries(repository)?;
    run(
        &mut repository.cargo(&["build", "--release", "--package", "corella", "--locked"]),
        "the release build failed, above",
    )?;
    binaries.insert("corella".into(), repository.target.join("release/corella"));
    let mut num_bytes = 0;
    for (name, binary) in &binaries {
        let packed = folder.join(name);
        fs::copy(binary, &packed).map_err(|error| format!("{}: {error}", binary.display()))?;
        let mut strip = repository.command("strip".as_ref(), &[]);
        run(
            strip.arg(&packed),
            "symbols could not be left out; install binutils",
        )?;
        num_bytes += fs::metadata(&packed).map_or(0, |metadata| metadata.len());
    }
    // Tests find their data by the path at which they were compiled.
    let root = repository.root.display().to_string();
    fs::write(folder.join("root"), root).map_err(|error| format!("root: {error}"))?;
    println!(
        "{}: {:.1} MiB",
        folder.display(),
        num_bytes as f64 / 1048576.0
    );
    if num_bytes > MAX_PACK_BYTES {
        return Err(format!(
            "the binaries have {num_bytes} bytes, more than {MAX_PACK_BYTES}"
        ));
    }
    Ok(folder)
}

/// Builds tests without running them, and returns where each binary is.
fn test_binaries(repository: &Repository) -> Result<BTreeMap<String, PathBuf>, String> {
    let mut build = repository.cargo(&[
        "test",
        "--release",
        "--locked",
        "--no-run",
        "--package",
        "corella-cuda",
        "--features",
        "emulated-device",
        "--message-format",
        "json-render-diagnostics",
    ]);
    let messages = output(&mut build)?;
    let mut binaries = BTreeMap::new();
    for line in messages.lines() {
        // One message a line, with the path behind the name; no crate of this workspace reads JSON here.
        let field = |name: &str| {
            let (_, rest) = line.split_once(&format!("\"{name}\":\""))?;
            rest.split('"').next()
        };
        let target = TESTS
            .iter()
            .find(|name| line.contains(&format!("\"name\":\"{name}\"")));
        if let (Some(name), Some(path)) = (target, field("executable")) {
            binaries.insert((*name).into(), PathBuf::from(path));
        }
    }
    match TESTS.iter().find(|&&name| !binaries.contains_key(name)) {
        Some(name) => Err(format!("cargo built no test {name} of corella-cuda")),
        None => Ok(binaries),
    }
}
