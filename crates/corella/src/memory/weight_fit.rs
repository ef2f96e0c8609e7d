//! Refuses weights that do not fit into the memory of their device, and names a format in which they would fit.

use corella_model::{DType, DecoderSpec, DeviceMemory, WeightFormat};

use crate::Error;
use crate::error::display_bytes::display_bytes;
use crate::memory::token_cost::TokenCost;

/// The models to load, with the formats of their weights: a model, and perhaps its draft model.
pub(crate) struct WeightFit<'a> {
    pub models: Vec<(&'a DecoderSpec, WeightFormat)>,
    pub memory: &'a DeviceMemory,
    /// Whether the device packs the model's weights in a format.
    pub packs: &'a dyn Fn(WeightFormat) -> bool,
}

/// The formats to advise, from the largest to the smallest.
const SMALLER: [WeightFormat; 3] = [
    WeightFormat::Float(DType::Bf16),
    WeightFormat::Int8,
    WeightFormat::INT4,
];
/// The share of the memory that weights in an advised format may take, so that the KV cache has room.
const SHARE: f64 = 0.9;

impl WeightFit<'_> {
    /// Checks that the weights leave memory. With an explicit size of the KV cache, memory that other programs use now
    /// is no reason to refuse the weights.
    pub fn check(&self, has_asked_for_kv: bool) -> Result<(), Error> {
        let DeviceMemory {
            available_bytes,
            total_bytes,
            host_bytes,
            ..
        } = *self.memory;
        let num_bytes = self.num_bytes(None);
        let place = match host_bytes {
            None => "this machine",
            Some(_) => "the GPU",
        };
        let (most, room) = if num_bytes >= total_bytes {
            let room = format!("and {place} has {}", display_bytes(total_bytes));
            (total_bytes, room)
        } else if num_bytes >= available_bytes && !has_asked_for_kv {
            let room = format!(
                "and other programs leave {} of the {} that {place} has",
                display_bytes(available_bytes),
                display_bytes(total_bytes)
            );
            (available_bytes, room)
        } else {
            return Ok(());
        };
        Err(self.refusal(most, &room))
    }

    /// Checks that the weights leave some of the memory that several models share.
    pub fn check_share(&self, shared_bytes: u64) -> Result<(), Error> {
        match self.num_bytes(None) < shared_bytes {
            true => Ok(()),
            false => {
                let room = format!("and --model-memory is {}", display_bytes(shared_bytes));
                Err(self.refusal(shared_bytes, &room))
            }
        }
    }

    /// An error with advice for weights that have at most `most` bytes, for the reason in `room`.
    fn refusal(&self, most: u64, room: &str) -> Error {
        let num_bytes = self.num_bytes(None);
        let formats = self.models.iter().map(|(_, format)| format.name());
        let formats: Vec<_> = formats.collect();
        let advice = self.smaller(most).unwrap_or_else(|| {
            let (format, least) = self.smallest();
            match least < num_bytes {
                true => format!(
                    "as {}, too, they would take about {}: choose a smaller model",
                    format.name(),
                    display_bytes(least)
                ),
                false => "choose a smaller model".to_owned(),
            }
        });
        Error::Config(format!(
            "the weights take {} as {} {room}; {advice}",
            display_bytes(num_bytes),
            formats.join(" and "),
        ))
    }

    /// Returns advice: the first smaller format in which the weights fit into `SHARE` of `most` bytes, and their size.
    pub fn smaller(&self, most: u64) -> Option<String> {
        let most = (most as f64 * SHARE) as u64;
        let now = self.num_bytes(None);
        let sizes = SMALLER.map(|format| (format, self.num_bytes(Some(format))));
        let fits = |&(_, num_bytes): &(WeightFormat, u64)| num_bytes < now && num_bytes <= most;
        let (format, num_bytes) = sizes.into_iter().find(fits)?;
        let (name, size) = (format.name(), display_bytes(num_bytes));
        Some(match (self.packs)(format) {
            true => format!("`--dtype {name}` takes about {size}"),
            false => {
                format!("a checkpoint that `corella quantize` wrote as {name} takes about {size}")
            }
        })
    }

    fn smallest(&self) -> (WeightFormat, u64) {
        let format = WeightFormat::INT4;
        (format, self.num_bytes(Some(format)))
    }

    /// Returns the bytes of all weights. `other` replaces the format of the model's weights, but not of the draft
    /// model's.
    fn num_bytes(&self, other: Option<WeightFormat>) -> u64 {
        let sizes = self
            .models
            .iter()
            .enumerate()
            .map(|(index, &(spec, format))| {
                let other = other.filter(|_| index == 0);
                packed_bytes(spec, other.unwrap_or(format))
            });
        sizes.sum()
    }
}

/// Estimates the size of packed weights, for the plan of the remaining memory.
pub(crate) fn packed_bytes(spec: &DecoderSpec, weight_format: WeightFormat) -> u64 {
    weight_format.num_bytes(TokenCost::num_weights(spec)) as u64
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use corella_model::Checkpoint;

    use super::*;

    const GIB: u64 = 1 << 30;

    /// Checks a model of 31 billion parameters in this format, on a device with this memory in GiB. Returns the error.
    fn told(
        format: WeightFormat,
        [available, total]: [u64; 2],
        packs: bool,
        has_asked_for_kv: bool,
    ) -> Option<String> {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../models/nano");
        let mut spec = Checkpoint::open(folder).unwrap().config().spec.clone();
        spec.hidden_size = 5120;
        let mut layer = spec.layers[0].clone();
        layer.attention.num_heads = 64;
        layer.attention.num_kv_heads = 8;
        layer.attention.head_dim = 128;
        if let corella_model::FeedForward::Mlp(mlp) = &mut layer.feed_forward {
            mlp.intermediate_size = 25_600;
        }
        spec.layers = vec![layer; 64];
        spec.vocab_size = 151_936;
        let memory = DeviceMemory {
            available_bytes: available * GIB,
            total_bytes: total * GIB,
            default_share: 0.5,
            host_bytes: (!packs).then_some(64 * GIB),
        };
        let fit = WeightFit {
            models: vec![(&spec, format)],
            memory: &memory,
            packs: &|_| packs,
        };
        let refusal = fit.check(has_asked_for_kv).err();
        refusal.map(|error| error.to_string())
    }

    const BF16: WeightFormat = WeightFormat::Float(DType::Bf16);

    #[test]
    fn weights_that_do_not_fit_are_refused_with_a_format_that_does() {
        for (format, memory, packs, expected) in [
            (
                BF16,
                [20, 24],
                true,
                "the weights take 59.6 GiB as bf16 and this machine has 24.0 GiB; `--dtype int4` takes about 15.4 GiB",
            ),
            (
                BF16,
                [20, 40],
                true,
                "the weights take 59.6 GiB as bf16 and this machine has 40.0 GiB; `--dtype int8` takes about 29.8 GiB",
            ),
            (
                BF16,
                [32, 64],
                true,
                "the weights take 59.6 GiB as bf16 and other programs leave 32.0 GiB of the 64.0 GiB that this \
                 machine has; `--dtype int4` takes about 15.4 GiB",
            ),
            (
                BF16,
                [20, 24],
                false,
                "the weights take 59.6 GiB as bf16 and the GPU has 24.0 GiB; a checkpoint that `corella quantize` \
                 wrote as int4 takes about 15.4 GiB",
            ),
            (
                WeightFormat::Int8,
                [8, 8],
                true,
                "the weights take 29.8 GiB as int8 and this machine has 8.0 GiB; as int4, too, they would take \
                 about 15.4 GiB: choose a smaller model",
            ),
            (
                WeightFormat::INT4,
                [8, 8],
                true,
                "the weights take 15.4 GiB as int4 and this machine has 8.0 GiB; choose a smaller model",
            ),
        ] {
            assert_eq!(
                told(format, memory, packs, false).as_deref(),
                Some(expected)
            );
        }
    }

    #[test]
    fn weights_that_fit_are_not_refused() {
        assert_eq!(told(BF16, [61, 64], true, false), None);
        assert_eq!(told(WeightFormat::INT4, [20, 24], true, false), None);
        // The operator has decided about the memory of other programs.
        assert_eq!(told(BF16, [32, 64], true, true), None);
    }
}
