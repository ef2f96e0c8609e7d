//! Settles `--device auto`: the GPU, if one can compute the model with all options, else the CPU. A log line gives the
//! reason for an idle GPU.

use corella_cuda::{DeviceProperties, find_gpu};
use corella_model::{Checkpoint, DecoderSpec, DeviceError, WeightFormat};

use crate::error::display_bytes::display_bytes;
use crate::memory::weight_fit::packed_bytes;
use crate::{Device, Error, LlmOptions};

/// Limits the weights' part of a GPU's usable memory, so that the KV cache has room.
const MAX_SHARE_OF_WEIGHTS: f64 = 0.8;

/// A model, and its requested weight format, if any.
pub(crate) type AskedModel<'a> = (&'a Checkpoint, Option<WeightFormat>);

/// Returns the options with a device other than `Auto`. `models` are the model and its draft model.
pub(crate) fn settle(options: &LlmOptions, models: &[AskedModel<'_>]) -> Result<LlmOptions, Error> {
    let mut settled = options.clone();
    if options.device == Device::Auto {
        settled.device = best_device(options, models)?;
        if let (Device::Cuda, Some(limits)) = (settled.device, options.gpu_limits) {
            limits.set(&mut settled.scheduler);
        }
    }
    let default = LlmOptions::default().gpu_memory_utilization;
    if settled.device != Device::Cuda && options.gpu_memory_utilization != default {
        tracing::warn!(
            "--gpu-memory-utilization has no effect on a CPU: --kv-cache-memory sets the memory of the KV cache"
        );
    }
    Ok(settled)
}

fn best_device(options: &LlmOptions, models: &[AskedModel<'_>]) -> Result<Device, Error> {
    Ok(match find_gpu() {
        Ok(None) => Device::Cpu,
        Ok(Some(gpu)) => match reason_for_cpu(options, &gpu, models)? {
            None => Device::Cuda,
            Some(reason) => {
                tracing::info!("{} stays idle: {reason}", gpu.name);
                Device::Cpu
            }
        },
        Err(DeviceError(reason)) => {
            tracing::warn!("the GPU stays idle: {reason}");
            Device::Cpu
        }
    })
}

fn reason_for_cpu(
    options: &LlmOptions,
    gpu: &DeviceProperties,
    models: &[AskedModel<'_>],
) -> Result<Option<String>, Error> {
    if let Some(what) = option_of_cpu(options) {
        return Ok(Some(format!("{what} is for CPUs only")));
    }
    let mut weight_bytes = 0;
    for &(checkpoint, asked) in models {
        let spec = &checkpoint.config().spec;
        let stored = checkpoint.weights()?.stored_format();
        if let Some(reason) = reason_of_model(spec, stored, asked) {
            return Ok(Some(reason));
        }
        weight_bytes += packed_bytes(spec, asked.unwrap_or(stored));
    }
    Ok(reason_of_memory(
        weight_bytes,
        gpu.total_bytes,
        options.gpu_memory_utilization,
    ))
}

fn option_of_cpu(options: &LlmOptions) -> Option<&'static str> {
    [
        (options.max_adapter_rank.is_some(), "--enable-lora"),
        (
            options.scheduler.num_pipeline_stages > 1,
            "--pipeline-parallel-size",
        ),
        (options.isa.is_some(), "--isa"),
        (options.num_threads.is_some(), "--threads"),
        (options.pin_threads, "--pin-threads"),
        (options.profile.is_some(), "--profile"),
    ]
    .into_iter()
    .find_map(|(is_asked, name)| is_asked.then_some(name))
}

fn reason_of_model(
    spec: &DecoderSpec,
    stored: WeightFormat,
    asked: Option<WeightFormat>,
) -> Option<String> {
    if let Some(what) = corella_cuda::unsupported(spec) {
        return Some(format!("{what} do not run on GPUs yet"));
    }
    match asked {
        Some(asked) if asked != stored && !matches!(asked, WeightFormat::Float(_)) => {
            Some(format!(
                "it takes quantised weights only as the checkpoint stores them, here {}",
                stored.name()
            ))
        }
        _ => None,
    }
}

fn reason_of_memory(weight_bytes: u64, total_bytes: usize, utilization: f64) -> Option<String> {
    let most = (total_bytes as f64 * utilization * MAX_SHARE_OF_WEIGHTS) as u64;
    (weight_bytes > most).then(|| {
        format!(
            "the weights take {}, and {} of its memory are for them; --device cuda takes the GPU all the same",
            display_bytes(weight_bytes),
            display_bytes(most)
        )
    })
}

#[cfg(test)]
mod tests {
    use corella_model::DType;

    use super::*;

    #[test]
    fn options_of_cpus_leave_the_gpu_idle() {
        let mut options = LlmOptions::default();
        assert_eq!(option_of_cpu(&options), None);
        options.num_threads = Some(2);
        assert_eq!(option_of_cpu(&options), Some("--threads"));
        options.max_adapter_rank = Some(8);
        assert_eq!(option_of_cpu(&options), Some("--enable-lora"));
    }

    #[test]
    fn weights_leave_a_fifth_of_the_usable_memory() {
        // 80 of 100 are usable, and 64 of these are for weights.
        assert_eq!(reason_of_memory(64, 100, 0.8), None);
        let reason = reason_of_memory(65 << 30, 100 << 30, 0.8).unwrap();
        assert!(reason.contains("65.0 GiB, and 64.0 GiB"), "{reason}");
    }

    #[test]
    fn a_model_runs_on_a_gpu_in_the_formats_that_the_gpu_takes() {
        let folder = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/golden");
        let spec = |name: &str| {
            Checkpoint::open(folder.join(name))
                .unwrap()
                .config()
                .spec
                .clone()
        };
        let bf16 = WeightFormat::Float(DType::Bf16);
        let dense = spec("llama-gqa-tied-bf16");
        assert_eq!(reason_of_model(&dense, bf16, None), None);
        let f32 = Some(WeightFormat::Float(DType::F32));
        assert_eq!(reason_of_model(&dense, bf16, f32), None);
        let reason = reason_of_model(&dense, bf16, Some(WeightFormat::Int8)).unwrap();
        assert!(reason.ends_with("here bf16"), "{reason}");
        let reason = reason_of_model(&spec("qwen3-moe"), bf16, None).unwrap();
        assert_eq!(reason, "models with experts do not run on GPUs yet");
    }

    #[test]
    fn a_machine_without_a_gpu_computes_on_its_cpu() {
        let options = LlmOptions {
            device: Device::Auto,
            ..LlmOptions::default()
        };
        // On a machine with a GPU, the GPU may be chosen, with its limits.
        let settled = settle(&options, &[]).unwrap();
        assert_ne!(settled.device, Device::Auto);
    }
}
