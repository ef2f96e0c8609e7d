//! A loaded model: text in, text out.

use corella_core::{
    FinishReason, SamplingParams, SchedulerConfig, Speculation, StoppingCriteria, TokenId,
};
use corella_engine::{Engine, EngineConfig, KvDiskConfig, StreamEvent, Submission, TokenStream};
use corella_model::{Checkpoint, FileWatch, ModelConfig, SentenceConfig};
use corella_text::{ChatInput, ChatTemplate, TextStream, Tokenizer};
use serde_json::json;

use crate::error::display_bytes::display_bytes;
use crate::model::device::{self, DraftHardware, Hardware, Loaded, Planned};
use crate::model::device_plan::MemoryPlan;
use crate::model::end_token;
use crate::model::model_file::open_watched;
use crate::model::model_identity::ModelIdentity;
use crate::model::opened_model::OpenedModel;
use crate::model::tokenizer_loader::TokenizerLoader;
use crate::options::weight_cache::WeightKeeper;
use crate::process::page_cache;
use crate::{Error, LlmOptions, ModelSource};

/// A loaded model. Its engine stops when this value, the clones of its engine and all streams have
/// been dropped.
pub struct Llm {
    /// The folder's name, or the file's without `.gguf`.
    pub name: String,
    /// Size of the model's files.
    pub file_bytes: u64,
    pub config: ModelConfig,
    /// How hidden states become vectors and scores.
    pub sentence: SentenceConfig,
    pub tokenizer: Tokenizer,
    pub chat_template: Option<ChatTemplate>,
    pub engine: Engine,
    pub max_model_len: u32,
    /// The properties that other nodes must share with this model.
    pub identity: ModelIdentity,
    pub hardware: Hardware,
    /// The draft model's hardware, if the model has one.
    pub draft_hardware: Option<DraftHardware>,
    /// Threads that write packed weights for the next start, with [`LlmOptions::weight_cache`].
    /// Dropping them stops the writing.
    pub weight_keepers: Vec<WeightKeeper>,
}

/// A model as the headers of its files describe it.
pub(crate) struct Described {
    pub name: String,
    pub file_bytes: u64,
    pub config: ModelConfig,
    pub sentence: SentenceConfig,
    pub tokenizer: Tokenizer,
    pub chat_template: Option<ChatTemplate>,
    pub plan: Planned,
}

/// The parameters of one answer. `None` means the default in the model's `generation_config.json`.
#[derive(Clone, Debug, Default)]
pub struct GenerateParams {
    /// Default: the most that the context and the KV cache allow.
    pub max_tokens: Option<u32>,
    pub temperature: Option<f32>,
    pub top_k: Option<u32>,
    pub top_p: Option<f32>,
    pub min_p: Option<f32>,
    pub seed: u64,
    pub stop: Vec<String>,
    /// Whether to continue after an end token.
    pub ignore_eos: bool,
}

/// A complete answer.
#[derive(Clone, Debug, PartialEq)]
pub struct Generation {
    pub text: String,
    pub finish: Finish,
    pub num_prompt_tokens: u32,
    pub num_output_tokens: u32,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Finish {
    /// The model generated an end token, or the text contains a stop string.
    Stop,
    /// `max_tokens` or the context was reached.
    Length,
}

impl Llm {
    pub fn load(source: &ModelSource, options: &LlmOptions) -> Result<Self, Error> {
        Self::load_within(source, options, None)
    }

    /// Loads a model that takes no more memory than `planned`, if that is given.
    pub fn load_within(
        source: &ModelSource,
        options: &LlmOptions,
        planned: Option<&MemoryPlan>,
    ) -> Result<Self, Error> {
        let (name, checkpoint) = open_watched(source)?;
        let watch = checkpoint.watch().cloned();
        let loaded = Self::load_checkpoint(name, checkpoint, options, planned);
        // Any other error may come from a part of a file that was read as zeros.
        check_files(watch.as_ref())?;
        loaded
    }

    /// Plans the memory that `load` takes, from the headers of the model's files.
    pub fn plan(source: &ModelSource, options: &LlmOptions) -> Result<MemoryPlan, Error> {
        Self::with_headers(source, options, |opened| Ok(opened.plan()?.memory))
    }

    /// Describes a model from the headers of its files, and as it would be loaded.
    pub(crate) fn describe(source: &ModelSource, options: &LlmOptions) -> Result<Described, Error> {
        Self::with_headers(source, options, |opened| {
            Ok(Described {
                plan: opened.plan()?,
                tokenizer: opened.tokenizer.get()?.clone(),
                file_bytes: opened.checkpoint.file_bytes().unwrap_or(0),
                name: opened.name,
                config: opened.config,
                sentence: opened.sentence,
                chat_template: opened.chat_template,
            })
        })
    }

    fn with_headers<T>(
        source: &ModelSource,
        options: &LlmOptions,
        read: impl FnOnce(OpenedModel) -> Result<T, Error>,
    ) -> Result<T, Error> {
        let (name, mut checkpoint) = open_watched(source)?;
        let watch = checkpoint.watch().cloned();
        let tokenizer = TokenizerLoader::open(&mut checkpoint);
        let opened =
            tokenizer.and_then(|tokenizer| OpenedModel::new(name, checkpoint, tokenizer, options));
        let read = opened.and_then(read);
        check_files(watch.as_ref())?;
        read
    }

    /// Lets the system forget the files of a model and of its draft model, and their packed weights on the disk. A file
    /// that cannot be forgotten keeps no other.
    pub(crate) fn drop_page_cache(source: &ModelSource, options: &LlmOptions) -> Result<(), Error> {
        let mut files = Vec::new();
        let draft = options.draft_model.as_ref();
        let formats = [(source, options.weight_format)].into_iter();
        let io_error = |error| Error::Io("dropping the page cache".to_owned(), error);
        for (source, format) in
            formats.chain(draft.map(|draft| (&draft.source, draft.weight_format)))
        {
            let (_, checkpoint) = open_watched(source)?;
            files.extend(checkpoint.files().map_err(io_error)?);
            files.extend(device::packed_file(&checkpoint, format, options));
            // Mapped pages would stay.
            drop(checkpoint);
            if let ModelSource::Path(path) | ModelSource::Named { path, .. } = source
                && path.is_dir()
            {
                files.extend(page_cache::files_in(path).map_err(io_error)?);
            }
        }
        page_cache::drop_files(&files).map_err(io_error)
    }

    fn load_checkpoint(
        name: String,
        mut checkpoint: Checkpoint,
        options: &LlmOptions,
        planned: Option<&MemoryPlan>,
    ) -> Result<Self, Error> {
        let tokenizer = TokenizerLoader::open(&mut checkpoint)?;
        tokenizer.start()?;
        let opened = OpenedModel::new(name, checkpoint, tokenizer, options)?;
        let mut loaded = opened.load(planned)?;
        let OpenedModel {
            name,
            checkpoint,
            tokenizer,
            chat_template,
            sentence,
            mut config,
            options,
            draft,
        } = opened;
        let identity = ModelIdentity::new(&checkpoint)?;
        loaded.scheduler.block_hasher = identity.block_hasher(loaded.hardware.arithmetic());
        warn_of_draw_cost(&loaded);
        let max_model_len = loaded.scheduler.max_model_len;
        let mut engine_config = EngineConfig::new(loaded.scheduler);
        engine_config.step_deadline = options.step_deadline;
        // Among several models, an encoder has nothing to keep. An encoder alone is refused.
        let places = options
            .kv_places()
            .filter(|_| config.spec.encoder.is_none());
        engine_config.kv_disk = places.map(|(places, keeps_salted)| KvDiskConfig {
            places,
            identity: identity.digest(loaded.hardware.arithmetic()),
            label: loaded.hardware.kv_disk_label(&name),
            keeps_salted,
            reads_always: false,
        });
        let tokenizer = tokenizer.get()?.clone();
        end_token::add(&mut config, &tokenizer, |name| checkpoint.file(name))?;
        if config.has_head && config.end_tokens.is_empty() {
            tracing::warn!(
                "no file of the model names a token that ends an answer: answers end with `max_tokens`, a \
                 `stop` text or the context"
            );
        }
        let (draft_model, draft_hardware) = loaded.draft.unzip();
        let engine = match draft_model {
            Some(draft) => Engine::start_with_draft_model(engine_config, loaded.executor, draft)?,
            None => Engine::start(engine_config, loaded.executor)?,
        };
        let llm = Self {
            name,
            // A file deleted after opening must not prevent the start.
            file_bytes: checkpoint.file_bytes().unwrap_or(0),
            config,
            sentence,
            tokenizer,
            chat_template,
            engine,
            max_model_len,
            identity,
            hardware: loaded.hardware,
            draft_hardware,
            weight_keepers: loaded.weight_keepers,
        };
        for prefix in &options.pinned_prefixes {
            llm.pin_prefix(prefix)?;
        }
        check_files(draft.as_ref().and_then(|draft| draft.checkpoint.watch()))?;
        Ok(llm)
    }

    fn pin_prefix(&self, prefix: &str) -> Result<(), Error> {
        let tokens = self.encode(prefix)?;
        let num_tokens = tokens.len();
        let pinned = self.engine.pin_prefix(tokens);
        let num_pages = pinned.map_err(|error| {
            Error::Config(format!(
                "--pin-prefix of {num_tokens} tokens: {error}; shorten it, or raise \
                 --max-pinned-share or --kv-cache-memory"
            ))
        })?;
        tracing::info!(num_tokens, num_pages, "a prefix is pinned");
        Ok(())
    }

    /// Answers one user message. A model without a chat template continues the message as plain text.
    pub fn generate(&self, prompt: &str, params: &GenerateParams) -> Result<Generation, Error> {
        let mut generation = Generation {
            text: String::new(),
            finish: Finish::Length,
            num_prompt_tokens: 0,
            num_output_tokens: 0,
        };
        for event in self.stream(self.encode_chat(None, prompt)?, params)? {
            let event = event?;
            generation.text.push_str(&event.text);
            generation.num_prompt_tokens = event.num_prompt_tokens;
            generation.num_output_tokens = event.num_output_tokens;
            if let Some(finish) = event.finish {
                generation.finish = finish;
            }
        }
        Ok(generation)
    }

    /// One line that describes the model, the hardware and the KV cache.
    pub fn summary(&self) -> String {
        let hardware = &self.hardware;
        let executor = &hardware.executor;
        format!(
            "{name} on {device} ({isa}, {threads} thread{s}{stages}): weights {weights} {weight_format}{kept}, \
             {pages} KV pages of {page_size} tokens{layers} ({kv} {kv_format}){states}, context {context}{cut}{head}{draft}",
            name = self.name,
            device = executor.device,
            isa = executor.isa,
            threads = executor.num_threads,
            s = if executor.num_threads == 1 { "" } else { "s" },
            stages = match hardware.num_stages {
                1 => String::new(),
                num_stages => format!(" in {num_stages} stages"),
            },
            weights = display_bytes(executor.weight_bytes as u64),
            weight_format = hardware.weight_format.name(),
            kept = if hardware.weights_were_kept {
                " as packed before"
            } else {
                ""
            },
            pages = hardware.num_kv_pages,
            page_size = hardware.page_size,
            layers = match hardware.num_page_layers {
                None => String::new(),
                Some(num_layers) => {
                    let num_all = self.config.spec.layers.len();
                    format!(" in {num_layers} of {num_all} layers")
                }
            },
            kv = display_bytes(hardware.kv_bytes),
            kv_format = hardware.kv_format.name(),
            states = match hardware.state_bytes {
                0 => String::new(),
                bytes => format!(
                    ", {} of state for each request and {} snapshots, one in {} tokens of a prompt",
                    display_bytes(bytes),
                    hardware.num_snapshots,
                    hardware.snapshot_distance
                ),
            },
            context = self.max_model_len,
            cut = match hardware.is_context_cut {
                true => format!(
                    " of {}, because the KV cache holds no more",
                    self.config.spec.max_position
                ),
                false => String::new(),
            },
            head = match (self.config.has_head, &self.sentence.classes) {
                (true, _) => "",
                (false, None) => ", no output head: embeddings only",
                (false, Some(_)) => ", no output head: scores of texts only",
            },
            draft = match &self.draft_hardware {
                None if self.config.spec.draft_head.is_some() =>
                    "; drafts by its own head".to_owned(),
                None => String::new(),
                Some(draft) => format!(
                    "; drafts by {}: weights {} {}, KV {}",
                    draft.name,
                    display_bytes(draft.weight_bytes as u64),
                    draft.weight_format.name(),
                    display_bytes(draft.kv_bytes),
                ),
            },
        )
    }

    /// One line with the tokens that end an answer and the files that name them; `None` if no token does.
    pub fn end_summary(&self) -> Option<String> {
        let ends = end_token::display(&self.config, &self.tokenizer);
        (self.config.has_head && !ends.is_empty()).then(|| format!("answers end with {ends}"))
    }

    /// Returns the tokens of a conversation of one message, behind a system message if there is one.
    pub fn encode_chat(&self, system: Option<&str>, message: &str) -> Result<Vec<TokenId>, Error> {
        let Some(template) = &self.chat_template else {
            return match system {
                None => self.encode(message),
                Some(_) => Err(Error::Config(
                    "a system message needs a chat template, and this model has none: write the text \
                     into the prompt"
                        .to_owned(),
                )),
            };
        };
        let system = system.map(|system| json!({"role": "system", "content": system}));
        let message = json!({"role": "user", "content": message});
        let prompt = template.render(ChatInput {
            messages: &system.into_iter().chain([message]).collect::<Vec<_>>(),
            tools: None,
            add_generation_prompt: true,
            continue_final_message: false,
            kwargs: None,
        })?;
        Ok(self.tokenizer.encode(&prompt, false)?)
    }

    /// Returns the tokens of plain text.
    pub fn encode(&self, text: &str) -> Result<Vec<TokenId>, Error> {
        Ok(self.tokenizer.encode(text, true)?)
    }

    /// Generates token by token. Dropping the stream aborts the request.
    pub fn stream(
        &self,
        prompt: Vec<TokenId>,
        params: &GenerateParams,
    ) -> Result<TextEvents, Error> {
        check_head(&self.config)?;
        let vocab_size = self.config.spec.vocab_size;
        if let Some(token) = prompt.iter().find(|&&token| token as usize >= vocab_size) {
            return Err(Error::Config(format!(
                "the prompt contains token {token}, but the vocabulary has only {vocab_size} tokens"
            )));
        }
        let recommended = &self.config.generation;
        let sampling = SamplingParams {
            temperature: params
                .temperature
                .or(recommended.temperature)
                .unwrap_or(1.0),
            top_k: params.top_k.or(recommended.top_k).unwrap_or(0),
            top_p: params.top_p.or(recommended.top_p).unwrap_or(1.0),
            min_p: params.min_p.or(recommended.min_p).unwrap_or(0.0),
            repetition_penalty: recommended.repetition_penalty.unwrap_or(1.0),
            seed: params.seed,
            ..SamplingParams::GREEDY
        };
        let end_token_ids = match params.ignore_eos {
            true => Vec::new(),
            false => self.config.end_tokens.ids(),
        };
        let stop = match params.stop.is_empty() {
            true => recommended.stop.clone(),
            false => params.stop.clone(),
        };
        let text = TextStream::new(self.tokenizer.clone(), stop, false, prompt_tail(&prompt));
        let mut streams = self.engine.submit(Submission {
            sampling,
            stopping: StoppingCriteria {
                max_tokens: params.max_tokens,
                end_token_ids,
                ..StoppingCriteria::default()
            },
            ..Submission::new(prompt, 0)
        })?;
        Ok(TextEvents {
            stream: streams.pop(),
            text,
        })
    }
}

/// Returns an error if a file of the model has become shorter since it was opened: parts of it may have been
/// read as zeros.
fn check_files(watch: Option<&FileWatch>) -> Result<(), Error> {
    let checked = watch.map_or(Ok(()), FileWatch::check);
    checked.map_err(Error::Config)
}

/// Refuses a model that cannot generate text.
pub(crate) fn check_head(config: &ModelConfig) -> Result<(), Error> {
    match (config.has_head, &config.spec.encoder) {
        (true, _) => Ok(()),
        (false, Some(_)) => Err(Error::Config(
            "the model is an encoder: it reads whole texts and generates none; `corella serve` \
             answers /v1/embeddings, /score, /rerank and /classify with such models"
                .into(),
        )),
        (false, None) => Err(Error::Config(
            "the model has no output head (lm_head), so it generates no text; \
             `corella serve` answers /v1/embeddings with it"
                .into(),
        )),
    }
}

/// The text of one request, as generated.
pub struct TextEvents {
    /// `None` after the last event.
    stream: Option<TokenStream>,
    text: TextStream,
}

/// The text of one token. The last event, and only the last, has `finish`.
#[derive(Clone, Debug, PartialEq)]
pub struct TextEvent {
    /// Empty in the middle of a character, or while the text may become a stop string.
    pub text: String,
    pub finish: Option<Finish>,
    pub num_prompt_tokens: u32,
    /// Number of prompt tokens found in the prefix cache.
    pub num_cached_tokens: u32,
    pub num_output_tokens: u32,
}

impl Iterator for TextEvents {
    type Item = Result<TextEvent, Error>;

    fn next(&mut self) -> Option<Self::Item> {
        let output = loop {
            match self.stream.as_mut()?.next_blocking()? {
                StreamEvent::Accepted => {}
                StreamEvent::Refused(error) => {
                    self.stream = None;
                    return Some(Err(error.into()));
                }
                StreamEvent::Output(output) => break output,
            }
        };
        let mut finish = match output.finish {
            None => None,
            Some(FinishReason::EndToken | FinishReason::StopToken) => Some(Finish::Stop),
            Some(FinishReason::Length) => Some(Finish::Length),
            Some(FinishReason::Error(error)) => {
                self.stream = None;
                return Some(Err(error.into()));
            }
            // Only this value, which holds the stream, can abort it.
            Some(FinishReason::Aborted) => return None,
        };
        let mut text = String::new();
        if let Some(sample) = output.sample
            && finish != Some(Finish::Stop)
        {
            text = self.text.push(sample.token).text;
        }
        if finish.is_some() {
            text.push_str(&self.text.finish());
        }
        if self.text.stopped().is_some() {
            finish = Some(Finish::Stop);
        }
        if finish.is_some() {
            self.stream = None;
        }
        Some(Ok(TextEvent {
            text,
            finish,
            num_prompt_tokens: output.num_prompt_tokens,
            num_cached_tokens: output.cache_use.num_cached_tokens,
            num_output_tokens: output.num_output_tokens,
        }))
    }
}

fn warn_of_draw_cost(loaded: &Loaded) {
    if let Speculation::Draft { draw_cost } = loaded.scheduler.speculation
        && draw_cost >= SchedulerConfig::MAX_DRAW_COST
    {
        tracing::warn!(
            "a guess costs {draw_cost} % of a token of the model, so guesses cannot pay; \
             and few will be tried"
        );
    }
}

/// Returns the end of the prompt, long enough to decode the first output token in its context.
fn prompt_tail(prompt: &[TokenId]) -> &[TokenId] {
    const LEN: usize = 8;
    &prompt[prompt.len().saturating_sub(LEN)..]
}
