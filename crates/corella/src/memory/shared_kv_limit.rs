//! Limits of models in which layers have keys and values of different shapes, or read the keys and values of another
//! layer.

use corella_model::DecoderSpec;

use crate::{Error, LlmOptions};

/// Refuses options that such layers do not support. The error names the option.
pub(crate) fn check_options(spec: &DecoderSpec, options: &LlmOptions) -> Result<(), Error> {
    if !spec.has_mixed_kv() && !spec.shares_kv() {
        return Ok(());
    }
    let num_stages = options.scheduler.num_pipeline_stages;
    let refused = [
        (
            options.exchanges_kv,
            "its keys and values are not sent between the nodes of a cluster yet: start it without \
             --role, --registry and --cluster-listen",
        ),
        (
            options.max_adapter_rank.is_some(),
            "LoRA adapters of such models are not supported yet: start without --enable-lora",
        ),
        (
            num_stages > 1 && (spec.shares_kv() || spec.per_layer().is_some()),
            "they are not divided among pipeline stages yet: leave out --pipeline-parallel-size",
        ),
    ];
    match refused.into_iter().find(|(is_asked, _)| *is_asked) {
        Some((_, why)) => Err(Error::Config(format!(
            "the model has layers whose keys and values differ in shape or belong to several: {why}"
        ))),
        None => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use corella_model::Checkpoint;

    use super::*;

    #[test]
    fn what_such_layers_do_not_work_with_is_refused_by_name() {
        let golden = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/golden");
        let spec = |name: &str| {
            let checkpoint = Checkpoint::open(golden.join(name)).unwrap();
            checkpoint.config().spec.clone()
        };
        let refusal = |name: &str, options: &LlmOptions| {
            let refusal = check_options(&spec(name), options).err();
            refusal.map_or_else(String::new, |error| error.to_string())
        };
        let mut options = LlmOptions::default();
        assert_eq!(refusal("gemma4", &options), "");
        options.exchanges_kv = true;
        assert!(refusal("gemma4", &options).contains("nodes of a cluster"));
        assert_eq!(refusal("gemma3", &options), "");
        options = LlmOptions::default();
        options.max_adapter_rank = Some(8);
        assert!(refusal("gemma4-experts", &options).contains("--enable-lora"));
        options = LlmOptions::default();
        options.scheduler.num_pipeline_stages = 2;
        assert_eq!(refusal("gemma4", &options), "");
        assert!(refusal("gemma4-per-layer", &options).contains("--pipeline-parallel-size"));
    }
}
