//! Packs the programs for a machine with a GPU, which may lack Rust and a network: test binaries, the release binary
//! and the kernels of `bench/cuda/hopper`. `bench/gpu.py` runs them there.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use crate::python;
use crate::repository::{Repository, output, run};

/// Limits the tree that a machine takes at once: the repository's files and the pack.
const MAX_TREE_BYTES: u64 = 63 << 20;

/// Binaries of corella-cuda by their targets' names: the kernels' tests, conformance and goldens, and the benchmarks.
const OF_CORELLA_CUDA: [&str; 3] = ["corella_cuda", "suite", "speed"];

/// Packs binaries into `target/gpu/pack.tar.xz`. `--run` then runs them on this machine; further arguments go to
/// `bench/gpu.py`.
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
            "copy this tree, with {} in it, to a machine with a GPU, and run there:\n\
             \n  python3 bench/gpu.py --pack PACK --results FOLDER\n\
             \nA run takes up to ten minutes. Repeat it with the same FOLDER until it says that all stages are done.",
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
    let binaries_folder = folder.join("binaries");
    let _ = fs::remove_dir_all(&folder);
    let at = |path: &Path, error| format!("{}: {error}", path.display());
    fs::create_dir_all(&binaries_folder).map_err(|error| at(&folder, error))?;
    let mut binaries = binaries_of_corella_cuda(repository)?;
    run(
        &mut repository.cargo(&["build", "--release", "--package", "corella", "--locked"]),
        "the release build failed, above",
    )?;
    binaries.insert("corella".into(), repository.target.join("release/corella"));
    for (name, binary) in &binaries {
        let packed = binaries_folder.join(name);
        fs::copy(binary, &packed).map_err(|error| at(binary, error))?;
        let mut strip = repository.command("strip".as_ref(), &[]);
        run(
            strip.arg(&packed),
            "symbols could not be left out; install binutils",
        )?;
    }
    compile_hopper(repository, &binaries_folder.join("hopper"))?;
    // Tests find their data below the root at which they were compiled.
    let root = repository.root.display().to_string();
    fs::write(binaries_folder.join("root"), root).map_err(|error| at(&folder, error))?;
    let pack = folder.join("pack.tar.xz");
    let mut tar = repository.command("tar".as_ref(), &["--create", "--xz", "--file"]);
    tar.arg(&pack).arg("--directory").arg(&binaries_folder);
    run(
        tar.arg("."),
        "the binaries could not be packed; install tar and xz",
    )?;
    let pack_bytes = fs::metadata(&pack).map_err(|error| at(&pack, error))?.len();
    let tree_bytes = pack_bytes + tracked_bytes(repository)?;
    println!("{}: {}", pack.display(), mebibytes(pack_bytes));
    if tree_bytes > MAX_TREE_BYTES {
        return Err(format!(
            "the repository's files and the pack have {}, more than the {} that are taken at once",
            mebibytes(tree_bytes),
            mebibytes(MAX_TREE_BYTES)
        ));
    }
    Ok(pack)
}

/// Compiles the checks and benchmarks of Hopper's matrix kernel.
fn compile_hopper(repository: &Repository, folder: &Path) -> Result<(), String> {
    let environment = python::nvrtc_12(repository)?;
    let build = "bench/cuda/hopper/build.py";
    let mut command = repository.command("python3".as_ref(), &[build, "--nvrtc"]);
    command.arg(environment).arg("--out").arg(folder);
    run(&mut command, "Hopper's kernels do not compile, above")
}

fn mebibytes(num_bytes: u64) -> String {
    format!("{:.1} MiB", num_bytes as f64 / f64::from(1 << 20))
}

/// Returns the bytes of the files that Git knows.
fn tracked_bytes(repository: &Repository) -> Result<u64, String> {
    let names = output(&mut repository.command("git".as_ref(), &["ls-files", "-z"]))?;
    let sizes = names
        .split_terminator('\0')
        .map(|name| fs::metadata(repository.root.join(name)).map_or(0, |metadata| metadata.len()));
    Ok(sizes.sum())
}

/// Builds tests and benchmarks without running them, and returns the path of each binary.
fn binaries_of_corella_cuda(repository: &Repository) -> Result<BTreeMap<String, PathBuf>, String> {
    let mut build = repository.cargo(&[
        "test",
        "--release",
        "--locked",
        "--no-run",
        "--package",
        "corella-cuda",
        "--features",
        "emulated-device,speed",
        "--message-format",
        "json-render-diagnostics",
    ]);
    let messages = output(&mut build)?;
    let mut binaries = BTreeMap::new();
    for line in messages.lines() {
        // One message per line, with the path after the name; no crate of this workspace reads JSON here.
        let field = |name: &str| {
            let (_, rest) = line.split_once(&format!("\"{name}\":\""))?;
            rest.split('"').next()
        };
        let target = OF_CORELLA_CUDA
            .iter()
            .find(|name| line.contains(&format!("\"name\":\"{name}\"")));
        if let (Some(name), Some(path)) = (target, field("executable")) {
            binaries.insert((*name).into(), PathBuf::from(path));
        }
    }
    let missing = OF_CORELLA_CUDA
        .iter()
        .find(|&&name| !binaries.contains_key(name));
    match missing {
        Some(name) => Err(format!("cargo built no {name} of corella-cuda")),
        None => Ok(binaries),
    }
}
