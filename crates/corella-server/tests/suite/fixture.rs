//! A server on a real socket over the real engine, with the mock executor and a tiny tokenizer.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use corella_core::{PromptLogprob, SamplingParams, SchedulerConfig, TokenId};
use corella_engine::{Engine, EngineConfig, KvDiskConfig};
use corella_model::{CostModel, MockConfig, MockEnd, MockExecutor, StepGate};
use corella_server::batch::{Batches, FilesConfig};
use corella_server::{
    AdapterLoader, Backend, DrainReport, KvTransfer, LocalClient, ModelSet, OutputMetrics,
    ServeConfig, ServerConfig, ServerParts, ServerState, Shutdown, ShutdownSender, TextModel,
    serve,
};
use corella_test::{wait_for_async, wait_until_asked, wait_until_async};
use corella_text::{ChatTemplate, SpecialTokens, Tokenizer};
use serde_json::{Map, Value, json};
use tokio::net::TcpListener;
use tokio::task::JoinHandle;

use crate::client::PATIENCE;

pub const MODEL: &str = "org/mock";
pub const MAX_MODEL_LEN: u32 = 256;
pub const VOCAB_SIZE: usize = 261;
/// The tokens of more than one byte.
pub const AB: TokenId = 256;
pub const BC: TokenId = 257;
pub const END: TokenId = 260;

const TEMPLATE: &str = "{% for message in messages %}\
    {% if message.role == 'robot' %}{{ raise_exception('no robots') }}{% endif %}\
    <|{{ message.role }}|>{{ message.content }}<|end|>{% endfor %}\
    {% if add_generation_prompt %}<|assistant|>{% endif %}";

/// Makes the reader of `kv_transfer_params` for an engine.
type MakeKvTransfer = Box<dyn FnOnce(Engine) -> Arc<dyn KvTransfer> + Send>;

/// Makes the reader of adapters for an engine.
type MakeAdapters = Box<dyn FnOnce(Engine) -> Arc<dyn AdapterLoader> + Send>;

pub struct Setup {
    pub scheduler: SchedulerConfig,
    pub mock: MockConfig,
    pub server: ServerConfig,
    pub serve: ServeConfig,
    /// Special tokens after the tokenizer's usual ones.
    pub more_tokens: &'static [&'static str],
    pub template: &'static str,
    /// The model's replies. A request's seed chooses one.
    pub replies: Vec<String>,
    /// Makes the reader of `kv_transfer_params`, if the test needs one.
    pub kv_transfer: Option<MakeKvTransfer>,
    /// Makes the reader of adapters, if the test needs one.
    pub adapters: Option<MakeAdapters>,
    /// A tier of the KV cache.
    pub kv_disk: Option<KvDiskConfig>,
    /// The folder of files, if the test runs batches.
    pub files: Option<FilesConfig>,
}

impl Setup {
    pub fn new() -> Self {
        let scheduler = SchedulerConfig::new(256, 4, MAX_MODEL_LEN);
        let mut mock = MockConfig::new(VOCAB_SIZE, scheduler.num_pages, scheduler.page_size);
        // The mock draws letters, and the two bytes of é, in and out of order.
        mock.drawable = (b'a'..=b'z').map(TokenId::from).collect();
        mock.drawable.extend([b' '.into(), 0xC3, 0xA9, AB, BC]);
        let mut serve = ServeConfig::new(MODEL, MAX_MODEL_LEN, VOCAB_SIZE, mock.hidden_size);
        serve.end_token_ids = vec![END];
        let server = ServerConfig {
            drain_timeout: Duration::from_secs(10),
            ..ServerConfig::default()
        };
        Self {
            scheduler,
            mock,
            server,
            serve,
            more_tokens: &[],
            template: TEMPLATE,
            replies: Vec::new(),
            kv_transfer: None,
            adapters: None,
            kv_disk: None,
            files: None,
        }
    }

    /// Ends every answer at this output token.
    pub fn ending_at(mut self, output: u32) -> Self {
        self.mock.end = Some(MockEnd {
            token: END,
            probability: 0.0,
            at_output: Some(output),
        });
        self
    }

    /// Adds special tokens to tokenizer and model.
    pub fn with_tokens(mut self, tokens: &'static [&'static str]) -> Self {
        self.more_tokens = tokens;
        self.mock.vocab_size = VOCAB_SIZE + tokens.len();
        self.serve.vocab_size = VOCAB_SIZE + tokens.len();
        self
    }

    /// Makes steps take this long by the wall clock, for the server's estimates.
    pub fn with_step_ms(mut self, millis: u32) -> Self {
        self.mock.cost = Some(CostModel::per_step(f64::from(millis) * 1000.0));
        self
    }

    /// Lets `num_steps` steps return and holds the next, until the test opens the gate. The mock draws no halves of
    /// characters, because the server holds a half back until the next token.
    pub fn holding_behind(mut self, num_steps: u64) -> Self {
        self.mock
            .drawable
            .retain(|token| ![0xC3, 0xA9].contains(token));
        self.mock.gate.close();
        self.mock.gate.let_through(num_steps);
        self
    }

    /// Starts the engine, for a server that loads models itself.
    pub fn load(self, parts: Arc<ServerParts>) -> Arc<ServerState> {
        let (text, mock) = (self.text(), self.mock());
        let executor = Box::new(MockExecutor::new(mock));
        let engine = Engine::start(EngineConfig::new(self.scheduler), executor);
        ServerState::new(parts, self.serve, text, engine.expect("it starts"))
    }

    pub fn text(&self) -> TextModel {
        let template = ChatTemplate::new(self.template, SpecialTokens::default());
        let template = template.expect("it parses");
        TextModel {
            reply_format: template.reply_format(),
            tokenizer: tokenizer(self.more_tokens),
            chat_template: Some(template),
        }
    }

    fn mock(&self) -> MockConfig {
        let tokenizer = tokenizer(self.more_tokens);
        let tokens = |reply: &String| tokenizer.encode(reply, false).expect("it encodes");
        let mut mock = self.mock.clone();
        mock.script.seeded = self.replies.iter().map(tokens).collect();
        mock
    }

    pub async fn start(self) -> TestServer {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a free port");
        self.start_on(listener).await
    }

    /// Starts on a socket to which clients may have connected already.
    pub async fn start_on(self, listener: TcpListener) -> TestServer {
        let text = self.text();
        let tokenizer = text.tokenizer.clone();
        let mock = self.mock();
        let executor = MockExecutor::new(mock.clone());
        let mut config = EngineConfig::new(self.scheduler);
        config.kv_disk = self.kv_disk;
        let engine = Engine::start(config, Box::new(executor)).expect("it starts");
        let address = listener.local_addr().expect("an address");
        let backend = Backend {
            generator: Arc::new(engine.clone()),
            kv_transfer: self.kv_transfer.map(|make| make(engine.clone())),
            roles: None,
            adapters: self.adapters.map(|make| make(engine.clone())),
            outputs: OutputMetrics::default(),
            collectors: Vec::new(),
        };
        let batches = { self.files }.map(|files| Batches::open(files).expect("it opens"));
        let name = self.serve.served_model_names.first();
        let name = name.map(String::as_str);
        let parts = ServerParts::new(self.server, batches, name, Vec::new());
        let state =
            ServerState::with_backend(parts.clone(), self.serve, text, engine.clone(), backend);
        let (shutdown, asked) = Shutdown::channel();
        let models = ModelSet::of(state.clone());
        let local = LocalClient::new(state);
        let server = tokio::spawn(serve(listener, None, models.clone(), asked));
        TestServer {
            address,
            local,
            parts,
            models,
            engine,
            mock: Arc::new(mock),
            tokenizer,
            shutdown,
            server,
        }
    }
}

pub struct TestServer {
    pub address: SocketAddr,
    /// Calls the same server without a socket.
    pub local: LocalClient,
    pub parts: Arc<ServerParts>,
    pub models: ModelSet,
    pub engine: Engine,
    pub mock: Arc<MockConfig>,
    pub tokenizer: Tokenizer,
    shutdown: ShutdownSender,
    server: JoinHandle<std::io::Result<DrainReport>>,
}

impl TestServer {
    pub async fn start() -> Self {
        Setup::new().start().await
    }

    /// Returns the model's output for a prompt, computed without a server.
    pub fn oracle(
        &self,
        prompt: &[TokenId],
        sampling: &SamplingParams,
        num_tokens: usize,
    ) -> String {
        let tokens = self.mock.lone_tokens(prompt, sampling, num_tokens);
        self.tokenizer.decode(&tokens, true).expect("it decodes")
    }

    /// Returns the log-probabilities of a prompt, computed without a server.
    pub fn prompt_logprobs(&self, prompt: &[TokenId], num_top: usize) -> Vec<PromptLogprob> {
        self.mock.lone_prompt_logprobs(prompt, num_top)
    }

    pub fn greedy(&self, prompt: &[TokenId], num_tokens: usize) -> String {
        self.oracle(prompt, &SamplingParams::GREEDY, num_tokens)
    }

    pub fn greedy_tokens(&self, prompt: &[TokenId], num_tokens: usize) -> Vec<TokenId> {
        let greedy = SamplingParams::GREEDY;
        self.mock.lone_tokens(prompt, &greedy, num_tokens)
    }

    pub fn encode(&self, text: &str) -> Vec<TokenId> {
        self.tokenizer.encode(text, false).expect("it encodes")
    }

    /// Holds back steps.
    pub fn gate(&self) -> &StepGate {
        &self.mock.gate
    }

    /// Waits until the engine holds no state of a request.
    pub async fn assert_at_rest(&self) {
        let stats = wait_for_async("the engine is at rest", || {
            let stats = self.engine.stats();
            let is_at_rest = stats.num_live_requests == 0 && stats.scheduler.num_in_use_pages == 0;
            is_at_rest.then_some(stats)
        });
        let stats = stats.await;
        assert_eq!(stats.scheduler.num_running, 0);
        assert_eq!(stats.scheduler.num_waiting, 0);
    }

    /// Waits until this many requests run.
    pub async fn has_running(&self, num_requests: usize) {
        wait_until_async("they run", || {
            self.engine.stats().scheduler.num_running == num_requests
        })
        .await;
    }

    /// Waits until this many requests have been aborted.
    pub async fn has_aborted(&self, num_requests: u64) {
        wait_until_async("they are aborted", || {
            self.engine.stats().num_finished_abort == num_requests
        })
        .await;
    }

    /// Waits until the server reports that it drains.
    pub async fn is_draining(&self) {
        wait_until_asked("it drains", async || {
            crate::client::get(self.address, "/ready").await.status == 503
        })
        .await;
    }

    /// The value of the first series with this name and all these labels.
    pub async fn metric(&self, name: &str, labels: &[&str]) -> Option<f64> {
        let reply = crate::client::get(self.address, "/metrics").await;
        let line = reply.text().lines().find(|line| {
            line.strip_prefix(name)
                .is_some_and(|rest| rest.starts_with('{'))
                && labels.iter().all(|label| line.contains(label))
        })?;
        line.rsplit(' ').next()?.parse().ok()
    }

    /// Returns the number of HTTP requests counted with a path and a status.
    pub async fn num_counted(&self, path: &str, status: u16) -> f64 {
        let labels = [format!("path=\"{path}\""), format!("status=\"{status}\"")];
        let labels = [labels[0].as_str(), labels[1].as_str()];
        let count = self.metric("corella_http_requests_total", &labels);
        count.await.unwrap_or(0.0)
    }

    pub fn ask_to_stop(&self) {
        self.shutdown.try_send(()).expect("it still runs");
    }

    pub async fn stopped(self) -> DrainReport {
        self.ended().await.expect("it stops without an error")
    }

    pub async fn ended(self) -> std::io::Result<DrainReport> {
        tokio::time::timeout(PATIENCE, self.server)
            .await
            .expect("it stops in time")
            .expect("it does not panic")
    }
}

/// A tokenizer with a token for each byte, `ab`, `bc`, three special tokens, and `more` of them.
fn tokenizer(more: &[&str]) -> Tokenizer {
    let mut vocab = Map::new();
    for byte in 0..=255u8 {
        vocab.insert(byte_character(byte).to_string(), byte.into());
    }
    vocab.insert("ab".into(), AB.into());
    vocab.insert("bc".into(), BC.into());
    let special = |id: TokenId, content: &str| {
        json!({
            "id": id, "content": content, "special": true, "single_word": false,
            "lstrip": false, "rstrip": false, "normalized": false,
        })
    };
    let mut added = vec![
        special(258, "<|user|>"),
        special(259, "<|assistant|>"),
        special(END, "<|end|>"),
    ];
    added.extend(
        more.iter()
            .zip(END + 1..)
            .map(|(token, id)| special(id, token)),
    );
    let byte_level = json!({
        "type": "ByteLevel", "add_prefix_space": false, "trim_offsets": false, "use_regex": false,
    });
    let file = json!({
        "version": "1.0", "truncation": null, "padding": null, "normalizer": null,
        "added_tokens": added,
        "pre_tokenizer": byte_level,
        "post_processor": null,
        "decoder": byte_level,
        "model": {
            "type": "BPE", "dropout": null, "unk_token": null, "fuse_unk": false,
            "byte_fallback": false, "continuing_subword_prefix": null,
            "end_of_word_suffix": null, "ignore_merges": false,
            "vocab": Value::Object(vocab), "merges": [["a", "b"], ["b", "c"]],
        },
    });
    Tokenizer::from_bytes(file.to_string().as_bytes()).expect("it is a tokenizer")
}

/// Returns the character for a byte in GPT-2's vocabulary.
fn byte_character(byte: u8) -> char {
    match byte {
        0x21..=0x7E | 0xA1..=0xAC | 0xAE..=0xFF => char::from(byte),
        0x00..=0x20 => char::from_u32(0x100 + u32::from(byte)).expect("a character"),
        0x7F..=0xA0 => char::from_u32(0x121 + u32::from(byte) - 0x7F).expect("a character"),
        0xAD => '\u{143}',
    }
}
