//! A model's properties, its size and its faults, from the headers of its files.

use corella_core::SchedulerConfig;
use corella_cpu::packed_bytes;
use corella_model::{
    ByPart, Checkpoint, DecoderSpec, DeviceMemory, EndToken, ExecutorFactory, KvFormat, KvGroups,
    ModelConfig, Outline, OutlineSizes, TensorTotals, WeightFormat,
};
use corella_text::{TokenCount, Tokenizer};

use crate::memory::kv_plan::{KvDemand, KvPlan};
use crate::memory::weight_fit::{self, WeightFit};
use crate::model::device;
use crate::model::device_plan::{kv_format, kv_groups};
use crate::model::end_token;
use crate::model::model_file::model_name;
use crate::model::opened_model::template_of;
use crate::model::vocabulary::num_tokens;
use crate::{Error, LlmOptions, ModelSource, built_in};

/// The known properties of a model.
pub struct Inspection {
    /// The name of the folder, or of the file without `.gguf`.
    pub name: String,
    /// The storage form of the model.
    pub form: &'static str,
    /// The model's own name of its architecture.
    pub architecture: Option<String>,
    /// The closest supported architecture, if the model's is not supported.
    pub closest: Option<&'static str>,
    /// The sizes that the model states under common names, for known and unknown families.
    pub sizes: OutlineSizes,
    /// The tensors of all files; `None` if unreadable.
    pub totals: Option<TensorTotals>,
    /// `None` if the configuration is refused.
    pub model: Option<ModelReport>,
    pub tokenizer: Option<TokenizerReport>,
    pub chat_template: Option<TemplateReport>,
    /// The errors by which `corella serve` would refuse the model.
    pub refusals: Vec<String>,
}

/// A model of a known family.
pub struct ModelReport {
    pub config: ModelConfig,
    /// The number of rows of the vocabulary that belong to tokens.
    pub num_known_tokens: usize,
    pub num_parameters: ByPart,
    /// The parameters that a token uses: without the experts that it does not choose.
    pub num_active_parameters: ByPart,
    /// `None` if the tensors are refused.
    pub weights: Option<WeightReport>,
}

/// The weights of a model, as stored and as held by an executor.
pub struct WeightReport {
    pub stored_bytes: ByPart,
    /// The bytes of tensors that the decoder does not use.
    pub unused_bytes: u64,
    /// The names of tensors of other parts, such as a vision tower.
    pub left_out: Vec<String>,
    pub format: WeightFormat,
    pub packed_bytes: ByPart,
    /// `None` for an encoder, or if the machine has no memory for keys and values.
    pub kv: Option<KvSize>,
}

/// The size of keys and values, and the number of tokens for which a server would have room.
pub struct KvSize {
    pub format: KvFormat,
    pub token_bytes: u64,
    /// The part of `token_bytes` for layers with a sliding window.
    pub window_token_bytes: u64,
    pub cache_bytes: u64,
    pub num_tokens: u64,
    /// The longest context of one request.
    pub max_model_len: u32,
    /// Whether the cache is too small for a request of the model's longest context.
    pub is_context_cut: bool,
    /// Pairs of a number of requests and the longest context that all of them can have at once.
    pub fits: Vec<(u32, u32)>,
}

pub struct TokenizerReport {
    pub kind: &'static str,
    pub num_tokens: usize,
    pub num_special: usize,
    /// The token that begins a sequence, and its id.
    pub bos: Option<(u32, String)>,
    /// The tokens that end an answer, and the places that name them.
    pub ends: Vec<(EndToken, String)>,
}

/// The features of a chat template.
pub struct TemplateReport {
    pub reads_tools: bool,
    /// The variable in `chat_template_kwargs` that switches thinking.
    pub thinking_switch: Option<&'static str>,
}

/// The numbers of requests in [`KvSize::fits`], besides `max_num_seqs`.
const BATCHES: [u32; 4] = [1, 8, 32, 128];

/// Reads the headers of a model's files, and no weights. Fails only if there is no model.
pub fn inspect(source: &ModelSource, options: &LlmOptions) -> Result<Inspection, Error> {
    let (name, form, outline) = match source {
        ModelSource::BuiltIn => {
            let outline = Outline::from_static(&built_in::FILES)?;
            (built_in::NAME.to_owned(), "built in", outline)
        }
        ModelSource::Path(path) | ModelSource::Named { path, .. } => {
            let outline = Outline::open(path)?;
            let form = match outline.is_gguf() {
                true => "GGUF",
                false => "folder",
            };
            let name = match source {
                ModelSource::Named { name, .. } => name.clone(),
                _ => model_name(path),
            };
            (name, form, outline)
        }
    };
    let mut inspection = Inspection {
        name,
        form,
        architecture: outline.architecture.clone(),
        closest: outline.closest,
        sizes: outline.sizes.clone(),
        totals: outline.totals().ok(),
        model: None,
        tokenizer: None,
        chat_template: None,
        refusals: Vec::new(),
    };
    let (tokenizer, count) = inspection.read_text(&outline).unzip();
    match outline.into_checkpoint() {
        Ok(checkpoint) => {
            let mut model = inspection.read_model(&checkpoint, count, options);
            if let Some(tokenizer) = &tokenizer {
                let config = &mut model.config;
                inspection.accept(end_token::add(config, tokenizer, |name| {
                    checkpoint.file(name)
                }));
                if let Some(report) = &mut inspection.tokenizer {
                    report.name_special_tokens(tokenizer, config);
                }
            }
            inspection.model = Some(model);
        }
        // This error is the most important.
        Err(error) => inspection.refusals.insert(0, error.to_string()),
    }
    Ok(inspection)
}

impl Inspection {
    fn accept<T, E: ToString>(&mut self, result: Result<T, E>) -> Option<T> {
        result
            .map_err(|error| self.refusals.push(error.to_string()))
            .ok()
    }

    fn read_text(&mut self, outline: &Outline) -> Option<(Tokenizer, TokenCount)> {
        let read = || -> Result<_, Error> {
            let json = outline.required_file("tokenizer.json")?;
            let count = TokenCount::from_bytes(&json)?;
            Ok((Tokenizer::from_bytes(&json)?, count))
        };
        let tokenizer = read();
        let tokenizer = self.accept(tokenizer);
        let report = tokenizer.as_ref().map(|(it, _)| TokenizerReport::new(it));
        self.tokenizer = report;
        let template = self
            .accept(template_of(|name| outline.file(name)))
            .flatten();
        self.chat_template = template.map(|template| TemplateReport {
            reads_tools: template.reads_tools(),
            thinking_switch: template.thinking_switch(),
        });
        tokenizer
    }

    fn read_model(
        &mut self,
        checkpoint: &Checkpoint,
        count: Option<TokenCount>,
        options: &LlmOptions,
    ) -> ModelReport {
        let spec = &checkpoint.config().spec;
        let num_known = count.map(|count| num_tokens(checkpoint.config(), count));
        let num_known = num_known.and_then(|num_known| self.accept(num_known));
        let weights = self.read_weights(checkpoint, options);
        ModelReport {
            config: checkpoint.config().clone(),
            num_known_tokens: num_known.unwrap_or(spec.vocab_size),
            num_parameters: spec.num_parameters(),
            num_active_parameters: spec.num_active_parameters(),
            weights,
        }
    }

    fn read_weights(
        &mut self,
        checkpoint: &Checkpoint,
        options: &LlmOptions,
    ) -> Option<WeightReport> {
        let spec = &checkpoint.config().spec;
        let weights = self.accept(checkpoint.weights())?;
        let wanted = options.weight_format;
        let packed_bytes = self.accept(packed_bytes(spec, &weights, wanted, options.isa))?;
        let stored_bytes = weights.stored_bytes(spec);
        let all_bytes = self.totals.map_or(0, |totals| totals.num_bytes);
        let format = wanted.unwrap_or_else(|| weights.stored_format());
        // An encoder keeps no keys and values.
        let kv = match spec.encoder {
            Some(_) => None,
            None => self.accept(KvSize::new(spec, format, options)),
        };
        Some(WeightReport {
            stored_bytes,
            unused_bytes: all_bytes.saturating_sub(stored_bytes.total()),
            left_out: weights.left_out,
            format,
            packed_bytes,
            kv,
        })
    }
}

impl KvSize {
    fn new(spec: &DecoderSpec, weights: WeightFormat, options: &LlmOptions) -> Result<Self, Error> {
        let format = kv_format(options, weights);
        let groups = kv_groups(spec, options);
        let limits = SchedulerConfig {
            kv_groups: groups.groups().to_vec(),
            ..options.scheduler.clone()
        };
        let factory = device::cpu_factory(options);
        let page_bytes = factory.kv_page_bytes(spec, &groups, &limits, format);
        let packed_bytes = weight_fit::packed_bytes(spec, weights);
        let memory = DeviceMemory::of_host();
        let fit = WeightFit {
            models: vec![(spec, weights)],
            memory: &memory,
            packs: &|_| true,
        };
        fit.check(options.kv_cache_bytes.is_some())?;
        let smaller_weights = fit.smaller(memory.available_bytes);
        let demand = KvDemand {
            smaller_weights,
            ..KvDemand::new(spec, &limits, options, page_bytes, packed_bytes, memory)
        };
        let plan = KvPlan::new(&demand)?;
        let limits = SchedulerConfig {
            max_model_len: plan.max_model_len,
            ..limits
        };
        let batches = BATCHES.into_iter().filter(|&n| n < limits.max_num_seqs);
        let fits = batches.chain([limits.max_num_seqs]).map(|num_requests| {
            let context = limits.max_len_in(plan.num_pages / num_requests);
            (num_requests, context.min(plan.max_model_len))
        });
        let fits: Vec<_> = fits.filter(|&(_, context)| context > 0).collect();
        let all_tokens =
            |&(num_requests, context): &(u32, u32)| u64::from(num_requests) * u64::from(context);
        let num_tokens = match limits.has_windows() {
            // The number of tokens that fit depends on how many tokens of each request are in its windows.
            true => fits.iter().map(all_tokens).max().unwrap_or(0),
            false => u64::from(plan.num_pages) * u64::from(limits.page_size),
        };
        let one_token = SchedulerConfig::new(1, 1, 2);
        let token_bytes = |spec: &DecoderSpec| {
            factory.kv_page_bytes(spec, &KvGroups::one(spec), &one_token, format)
        };
        let mut windowed = spec.clone();
        windowed
            .layers
            .retain(|layer| layer.attention.window.is_some() && layer.has_kv());
        Ok(Self {
            format,
            token_bytes: token_bytes(spec),
            window_token_bytes: token_bytes(&windowed),
            cache_bytes: u64::from(plan.num_pages) * page_bytes,
            num_tokens,
            max_model_len: plan.max_model_len,
            is_context_cut: plan.is_context_cut,
            fits,
        })
    }
}

impl TokenizerReport {
    fn new(tokenizer: &Tokenizer) -> Self {
        let (num_tokens, num_special) = tokenizer.num_tokens();
        Self {
            kind: tokenizer.kind(),
            num_tokens,
            num_special,
            bos: None,
            ends: Vec::new(),
        }
    }

    fn name_special_tokens(&mut self, tokenizer: &Tokenizer, config: &ModelConfig) {
        let text = |id: u32| tokenizer.id_to_token(id).unwrap_or_default();
        self.bos = config.bos_token_id.map(|id| (id, text(id)));
        let ends = config.end_tokens.iter();
        self.ends = ends.map(|end| (end.clone(), text(end.id))).collect();
    }
}
