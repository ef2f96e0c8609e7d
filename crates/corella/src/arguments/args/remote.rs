//! The command line of `corella ps` and `corella stop`, which ask a running server.

use clap::Args;

#[derive(Args)]
pub struct PsArgs {
    #[command(flatten)]
    pub server: ServerUrlArgs,
}

#[derive(Args)]
pub struct StopArgs {
    /// Model to unload, as `corella ps` names it
    #[arg(value_name = "MODEL", required = true)]
    pub models: Vec<String>,
    #[command(flatten)]
    pub server: ServerUrlArgs,
}

#[derive(Args)]
pub struct ServerUrlArgs {
    /// The running server, of Corella or Ollama
    #[arg(long, value_name = "URL", default_value = "http://127.0.0.1:8000")]
    pub url: String,
    /// API key to send as a bearer token
    #[arg(
        long,
        value_name = "KEY",
        env = "CORELLA_API_KEY",
        hide_env_values = true
    )]
    pub api_key: Option<String>,
}
