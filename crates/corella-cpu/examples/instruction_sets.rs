//! Names the instruction sets of this machine that there are kernels for, one a line, as `--isa`
//! takes them. `cargo xtask isas` asks it what to run.

use corella_cpu::{Isa, is_supported};

fn main() {
    for isa in Isa::ALL.into_iter().filter(|&isa| is_supported(isa)) {
        println!("{isa}");
    }
}
