//! Compiles all kernels with NVRTC and compares their registers and shared memory with the table of its version in
//! `kernel_tables`, or writes that table with `--update`: `cargo run -p corella-cuda --features kernel-table --example
//! kernel_table`.

use std::process::ExitCode;

use corella_cuda::kernel_table::KernelTable;

const FOLDER: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/kernel_tables");

fn main() -> ExitCode {
    match run() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("{error}");
            ExitCode::FAILURE
        }
    }
}

fn run() -> Result<(), String> {
    let updates = match std::env::args().skip(1).collect::<Vec<_>>().as_slice() {
        [] => false,
        [argument] if argument == "--update" => true,
        _ => return Err("only --update is an argument".into()),
    };
    let table = KernelTable::compute().map_err(|error| error.to_string())?;
    let spills = table.spills();
    let path = format!("{FOLDER}/{}.txt", table.nvrtc_version());
    println!(
        "NVRTC {}: {} kernels compiled, of which {} spill registers",
        table.nvrtc_version(),
        table.num_kernels(),
        spills.len()
    );
    if updates {
        for spill in spills {
            println!("spills: {spill}");
        }
        return std::fs::write(&path, table.to_string())
            .map_err(|error| format!("{path}: {error}"));
    }
    let recorded = std::fs::read_to_string(&path).map_err(|error| format!("{path}: {error}"))?;
    let complaints = table.complaints(&KernelTable::parse(&recorded)?);
    match complaints.is_empty() {
        true => Ok(()),
        false => Err(format!(
            "{}\nif this is meant, record it: cargo xtask kernels --update",
            complaints.join("\n")
        )),
    }
}
