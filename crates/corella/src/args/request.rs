//! The options that say how API requests are read, whoever sends them: clients of `corella serve`, or
//! a file of requests.

use clap::Args;

#[derive(Args)]
#[command(next_help_heading = "Requests")]
pub struct RequestArgs {
    /// Name of the model in the API; give the option again for further names [default: the name of
    /// the folder or file]
    #[arg(long, value_name = "NAME")]
    pub served_model_name: Vec<String>,
    /// Seed for requests that give none [default: a different one for each request]
    #[arg(long, value_name = "SEED")]
    pub seed: Option<u64>,
    /// Ignore request fields with unknown names instead of answering 400
    #[arg(long)]
    pub allow_unknown_fields: bool,
}
