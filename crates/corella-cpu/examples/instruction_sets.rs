//! Prints the instruction sets that this machine has kernels for, one per line and spelled as
//! `--isa` takes them. `cargo xtask isas` runs this to learn which sets to test.

use corella_cpu::{Isa, is_supported};

fn main() {
    for isa in Isa::ALL.into_iter().filter(|&isa| is_supported(isa)) {
        println!("{isa}");
    }
}
