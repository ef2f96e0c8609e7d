//! Compiles all kernels by NVRTC and compares what they take with `kernel_table.txt`, or with `--update` writes it:
//! `cargo run -p corella-cuda --features kernel-table --example kernel_table`.

use std::process::ExitCode;

use corella_cuda::kernel_table::KernelTable;

const PATH: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/kernel_table.txt");

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
    println!(
        "{} kernels compiled, of which {} spill registers",
        table.num_kernels(),
        spills.len()
    );
    if updates {
        for spill in spills {
            println!("spills: {spill}");
        }
        return std::fs::write(PATH, table.to_string()).map_err(|error| format!("{PATH}: {error}"));
    }
    let recorded = std::fs::read_to_string(PATH).map_err(|error| format!("{PATH}: {error}"))?;
    let complaints = table.complaints(&KernelTable::parse(&recorded)?);
    match complaints.is_empty() {
        true => Ok(()),
        false => Err(format!(
            "{}\nif this is meant, record it: cargo xtask kernels --update",
            complaints.join("\n")
        )),
    }
}
