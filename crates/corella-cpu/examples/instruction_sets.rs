//! Prints the instruction sets that this machine has kernels for, one per line in the spelling of
//! `--isa`. Parts `isa-…` and `tiles` of `cargo xtask night` run this to select the sets to test.

use corella_cpu::{Isa, is_supported};

fn main() {
    for isa in Isa::ALL.into_iter().filter(|&isa| is_supported(isa)) {
        println!("{isa}");
    }
}
