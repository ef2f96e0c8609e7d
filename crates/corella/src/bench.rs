//! `corella bench`: load on a server, numbers on standard output.

use std::error::Error;

use corella_bench::serve::BenchServeOptions;
use tokio::runtime::Runtime;

pub fn serve(options: BenchServeOptions) -> Result<(), Box<dyn Error>> {
    let runtime = Runtime::new()?;
    let report = runtime.block_on(corella_bench::serve::run(options))?;
    println!("{report}");
    Ok(())
}
