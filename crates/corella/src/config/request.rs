//! How API requests are read, for every command that answers them.

use corella::Llm;
use corella_server::{GenerationDefaults, ServeConfig};

use crate::args::RequestArgs;

/// What the command line says about requests. The default is what it says when it says nothing.
#[derive(Clone, Debug, Default)]
pub struct RequestOptions {
    pub served_model_names: Vec<String>,
    pub seed: Option<u64>,
    pub allow_unknown_fields: bool,
}

pub fn request(args: RequestArgs) -> RequestOptions {
    RequestOptions {
        served_model_names: args.served_model_name,
        seed: args.seed,
        allow_unknown_fields: args.allow_unknown_fields,
    }
}

impl RequestOptions {
    /// The configuration of a server of this model. Without a name of its own, the model is served by
    /// the name of its folder or file.
    pub fn serve_config(self, llm: &Llm) -> ServeConfig {
        let generation = &llm.config.generation;
        let mut names = self.served_model_names;
        if names.is_empty() {
            names.push(llm.name.clone());
        }
        ServeConfig {
            served_model_names: names,
            seed: self.seed,
            allow_unknown_fields: self.allow_unknown_fields,
            end_token_ids: llm.config.eos_token_ids.clone(),
            generation_defaults: GenerationDefaults {
                temperature: generation.temperature,
                top_p: generation.top_p,
                top_k: generation.top_k,
                min_p: generation.min_p,
                repetition_penalty: generation.repetition_penalty,
            },
            ..ServeConfig::new("", llm.max_model_len, llm.config.spec.vocab_size)
        }
    }
}
