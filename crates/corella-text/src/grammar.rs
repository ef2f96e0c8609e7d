//! Grammars compiled for a vocabulary: the tokens that may come next in an answer.

pub(crate) mod gbnf;
pub(crate) mod grammar_error;
pub(crate) mod grammar_place;
pub(crate) mod grammar_reason;
pub(crate) mod grammar_size;
pub(crate) mod grammar_source;
pub(crate) mod lark_schema;
pub(crate) mod schema;

use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;

use llguidance::api::{GrammarInit, GrammarWithLexer, ParserLimits, TopLevelGrammar};
use llguidance::toktrie::{ApproximateTokEnv, InferenceCapabilities, TokEnv, TokRxInfo, TokTrie};
use llguidance::{JsonCompileOptions, Logger, Matcher, ParserFactory};
use serde_json::{Value, json};

use crate::grammar::gbnf::in_lark;
use crate::grammar::grammar_error::GrammarError;
use crate::grammar::grammar_place::place_of_error;
use crate::grammar::grammar_reason::{caller_reason, is_too_large, without_place};
use crate::grammar::grammar_size::{MAX_SOURCE_BYTES, check_size};
use crate::grammar::grammar_source::ComposedGrammar;
use crate::grammar::lark_schema::with_compiled_schemas;
use crate::grammar::schema::compiled_schema;
use crate::recent_cache::RecentCache;
use crate::{GrammarSource, Tokenizer};

/// Compiles grammars for one vocabulary, with llguidance: derivatives of regular expressions in an Earley parser,
/// walked over a prefix tree of the vocabulary.
pub struct GrammarCompiler {
    factory: ParserFactory,
    vocab_size: usize,
    /// The key is the grammar as JSON. The order of a schema's properties counts in it, because answers follow that
    /// order.
    cache: RecentCache<Arc<str>, Grammar>,
}

/// A compiled grammar. Clones share it.
#[derive(Clone)]
pub struct Grammar {
    /// The source of the grammar, as JSON.
    source: Arc<str>,
    /// The state before the first token. It is never advanced: every answer starts from a copy of it.
    start: Arc<Mutex<Matcher>>,
    vocab_size: usize,
}

/// An allowed answer so far.
pub struct GrammarState {
    matcher: Matcher,
    vocab_size: usize,
    /// The work of all masks so far, as comparisons of items, and its bound.
    work: u64,
    max_work: u64,
}

/// The limit of the total size of cached sources: the memory of a compiled grammar grows with its source. Each grammar
/// also counts for `GRAMMAR_BYTES`, so that the cache holds at most some hundred grammars.
const MAX_CACHED_BYTES: usize = 2 * MAX_SOURCE_BYTES;
const GRAMMAR_BYTES: usize = 4 << 10;
/// Compiling recurses along chains of definitions, which `MAX_SOURCE_BYTES` limits.
const COMPILE_STACK_BYTES: usize = 256 << 20;
/// The whitespace between two parts of JSON: a space or two, or one line break and 31 levels of two spaces. Otherwise a
/// confused model could write empty lines for ever.
const JSON_WHITESPACE: &str = r"[\x20\x09]{1,2}|\x0D?\x0A[\x20\x09]{0,62}";
/// The largest number of symbols in a compiled schema. The parser's first row for an answer has an item for each symbol
/// that may come first, and the items of a row are compared with each other.
const MAX_SYMBOLS: usize = 250_000;
const MAX_LARK_SYMBOLS: usize = 8_000;
/// The largest number of items in a row of the parser. The work for a row grows with the third power of this number in
/// an ambiguous grammar, but only with the second in a schema, which has few ways to read an answer.
const MAX_ROW_ITEMS: usize = 2_000;
const MAX_LARK_ROW_ITEMS: usize = 500;
/// The largest number of items that one mask may take.
const MAX_MASK_ITEMS: usize = 50_000;
const MAX_LARK_MASK_ITEMS: usize = 20_000;
/// The work that all masks of an answer may take, as comparisons of items: at its beginning, and in addition for each
/// token. A usual mask takes some thousands. A step waits for its masks, so these limits decide how much one answer
/// slows down others. A comparison took 16 ns in a measurement, so one answer makes a step at most 3.2 ms longer on
/// average.
const FIRST_WORK: u64 = 15_000_000;
const WORK_PER_TOKEN: u64 = 200_000;
/// llguidance packs the length of a token in 10 bits.
const MAX_TOKEN_BYTES: usize = 1 << 10;

impl GrammarCompiler {
    /// Reads the vocabulary: the tokenizer's tokens among the model's `vocab_size`. Takes some tenths of a second with
    /// 150,000 tokens.
    ///
    /// # Errors
    /// The reason for which llguidance cannot use the vocabulary.
    pub fn new(tokenizer: &Tokenizer, vocab_size: usize) -> Result<Self, String> {
        let vocab_size = vocab_size.min(tokenizer.vocab_size());
        let mut words: Vec<_> = (0..vocab_size as u32)
            .map(|id| word(tokenizer, id))
            .collect();
        // The end of an answer has a token of its own here, after the model's tokens.
        let end = words.len() as u32;
        words.push(special_word("<end of the answer>"));
        let trie = TokTrie::from(&TokRxInfo::new(end + 1, end), &words);
        let vocabulary: TokEnv = Arc::new(ApproximateTokEnv::new(trie));
        let slices = llguidance::earley::SlicedBiasComputer::general_slices();
        let caps = InferenceCapabilities::default();
        let mut factory =
            ParserFactory::new(&vocabulary, caps, &slices).map_err(|error| error.to_string())?;
        factory.quiet();
        let limits = factory.limits_mut();
        limits.verbose_errors = false;
        // A state of the lexer takes some 2 kB, and each request has states of its own.
        limits.max_lexer_states = 20_000;
        limits.max_grammar_size = MAX_SYMBOLS;
        limits.max_items_in_row = MAX_ROW_ITEMS;
        limits.step_max_items = MAX_MASK_ITEMS;
        Ok(Self {
            factory,
            vocab_size,
            cache: RecentCache::new(MAX_CACHED_BYTES),
        })
    }

    /// Compiles a grammar, which takes milliseconds, and about a second for the largest ones. Recently used grammars are
    /// cached.
    ///
    /// # Errors
    /// The defect of the grammar, or its excessive size.
    pub fn compile(&self, source: &GrammarSource) -> Result<Grammar, GrammarError> {
        self.compile_while(source, &|| true)
    }

    /// Compiles a grammar while its result is wanted.
    ///
    /// # Errors
    /// Those of [`GrammarCompiler::compile`]. If the result is no longer wanted, the error has no meaning.
    pub fn compile_while(
        &self,
        source: &GrammarSource,
        is_wanted: &(dyn Fn() -> bool + Sync),
    ) -> Result<Grammar, GrammarError> {
        let key = serde_json::to_string(source);
        let key: Arc<str> = key
            .map_err(|error| GrammarError::at_root(error.to_string()))?
            .into();
        if let Some(grammar) = self.cache.find(&key) {
            return Ok(grammar);
        }
        let matcher = thread::scope(|scope| {
            let compiling = thread::Builder::new()
                .name("corella-grammar".to_owned())
                .stack_size(COMPILE_STACK_BYTES)
                .spawn_scoped(scope, || self.compile_here(source, is_wanted));
            let compiling = compiling.map_err(|error| GrammarError::at_root(error.to_string()))?;
            compiling
                .join()
                .unwrap_or_else(|_| Err(GrammarError::at_root("compiling it failed".to_owned())))
        })?;
        let grammar = Grammar {
            source: key.clone(),
            start: Arc::new(Mutex::new(matcher)),
            vocab_size: self.vocab_size,
        };
        let weight = key.len() + GRAMMAR_BYTES;
        self.cache.keep(key, grammar.clone(), weight);
        Ok(grammar)
    }

    /// Compiles a grammar from [`Grammar::source`], perhaps of another process.
    ///
    /// # Errors
    /// The source is malformed, or this vocabulary cannot follow it.
    pub fn compile_again(&self, source: &str) -> Result<Grammar, GrammarError> {
        let source = serde_json::from_str(source);
        self.compile(&source.map_err(|error| GrammarError::at_root(error.to_string()))?)
    }

    fn compile_here(
        &self,
        source: &GrammarSource,
        is_wanted: &dyn Fn() -> bool,
    ) -> Result<Matcher, GrammarError> {
        check_size(source)?;
        let compiled = compiled_source(source)?;
        if !is_wanted() {
            return Err(GrammarError::at_root(
                "it is not wanted any more".to_owned(),
            ));
        }
        let limits = self.limits(&compiled);
        let compiled = self.matcher(top_level(&compiled), &limits);
        compiled.map_err(|reason| match source {
            // The search for the place would take the same work again.
            _ if is_too_large(&reason) || !is_wanted() => GrammarError::at_root(reason),
            GrammarSource::JsonSchema(schema) => {
                let compile = |part: Value| {
                    let part = compiled_schema(&part).ok().filter(|_| is_wanted())?;
                    self.matcher(from_one(json_grammar(part)), &limits).err()
                };
                GrammarError {
                    place: place_of_error(schema, &reason, compile),
                    ..GrammarError::at_root(reason)
                }
            }
            GrammarSource::Composed(composed) => self.error_of_part(composed, reason, is_wanted),
            GrammarSource::Regex(_) | GrammarSource::Gbnf(_) => {
                GrammarError::at_root(without_place(&reason))
            }
            _ => GrammarError::at_root(reason),
        })
    }

    /// The first error of a part that is compiled alone, or otherwise the error of the whole.
    fn error_of_part(
        &self,
        composed: &ComposedGrammar,
        reason: String,
        is_wanted: &dyn Fn() -> bool,
    ) -> GrammarError {
        let mut errors = composed
            .parts
            .iter()
            .enumerate()
            .filter_map(|(part, source)| {
                let error = self.compile_here(source, is_wanted).err()?;
                Some(GrammarError {
                    part: Some(part),
                    ..error
                })
            });
        errors
            .next()
            .unwrap_or_else(|| GrammarError::at_root(reason))
    }

    /// Returns the limits of a grammar's parser. Grammars in Lark's notation have stricter limits, because they may be
    /// ambiguous. The symbols of Lark's notation and of schemas count together.
    fn limits(&self, source: &GrammarSource) -> ParserLimits {
        let mut limits = self.factory.limits().clone();
        let has_lark = match source {
            GrammarSource::Lark(_) => {
                limits.max_grammar_size = MAX_LARK_SYMBOLS;
                true
            }
            GrammarSource::Composed(composed) => composed
                .parts
                .iter()
                .any(|part| matches!(part, GrammarSource::Lark(_))),
            _ => false,
        };
        if has_lark {
            limits.max_items_in_row = MAX_LARK_ROW_ITEMS;
            limits.step_max_items = MAX_LARK_MASK_ITEMS;
        }
        limits
    }

    /// The reason for a failure is a sentence or a few lines.
    fn matcher(&self, grammar: TopLevelGrammar, limits: &ParserLimits) -> Result<Matcher, String> {
        let parser = self.factory.create_parser_from_init_ext(
            GrammarInit::Serialized(grammar),
            Logger::new(0, 0),
            InferenceCapabilities::default(),
            limits.clone(),
        );
        let parser = parser.map_err(|error| caller_reason(&error.to_string()))?;
        let matcher = Matcher::new(Ok(parser));
        if let Some(error) = matcher.get_error() {
            return Err(caller_reason(&error));
        }
        let mut first = GrammarState::new(matcher.deep_clone(), self.vocab_size);
        let allowed = first.allowed()?;
        let token = allowed.iter().zip(0u32..).find(|(word, _)| **word != 0);
        match token {
            // A row that is too long is noticed only after the next token.
            Some((word, at)) => first.push(at * 32 + word.trailing_zeros())?,
            None if first.may_end()? => {}
            None => return Err("no answer can follow it".to_owned()),
        }
        Ok(matcher)
    }
}

impl Grammar {
    /// The grammar's source, for [`GrammarCompiler::compile_again`].
    pub fn source(&self) -> &Arc<str> {
        &self.source
    }

    /// The beginning of an answer. It has memory of its own, so that no failure of one answer affects another.
    pub fn start(&self) -> GrammarState {
        let start = self.start.lock().unwrap_or_else(PoisonError::into_inner);
        GrammarState::new(start.deep_clone(), self.vocab_size)
    }
}

impl GrammarState {
    fn new(matcher: Matcher, vocab_size: usize) -> Self {
        Self {
            matcher,
            vocab_size,
            work: 0,
            max_work: FIRST_WORK,
        }
    }

    /// Appends the next token of the answer.
    ///
    /// # Errors
    /// The token is not allowed, or the grammar takes too many steps.
    pub fn push(&mut self, token: u32) -> Result<(), String> {
        let pushed = self.matcher.consume_token(token);
        pushed.map_err(|error| caller_reason(&error.to_string()))
    }

    /// The tokens that may come next, as bits: bit `t % 32` of word `t / 32`. Empty after a complete answer that no
    /// token can follow.
    ///
    /// # Errors
    /// The grammar takes too much work for this token or for the whole answer, or too much memory.
    pub fn allowed(&mut self) -> Result<Box<[u32]>, String> {
        let num_words = self.vocab_size.div_ceil(32);
        if self.matcher.is_stopped() && !self.matcher.is_error() {
            return Ok(vec![0; num_words].into());
        }
        let mask = self.matcher.compute_mask();
        let mask = mask.map_err(|error| caller_reason(&error.to_string()))?;
        self.pay()?;
        let mut words: Box<[u32]> = mask.as_slice()[..num_words].into();
        // The bit after the last token stands for the end of the answer.
        if !self.vocab_size.is_multiple_of(32) {
            words[num_words - 1] &= (1 << (self.vocab_size % 32)) - 1;
        }
        Ok(words)
    }

    /// The work of all masks that were made, as comparisons of items.
    pub fn work(&self) -> u64 {
        self.work
    }

    /// Adds the work of the newest mask to the answer's.
    fn pay(&mut self) -> Result<(), String> {
        let stats = self.matcher.last_step_stats();
        let stats = stats.map_err(|error| caller_reason(&error.to_string()))?;
        let num_items = stats.all_items as u64;
        self.work += num_items * (num_items / stats.rows.max(1) as u64);
        self.max_work += WORK_PER_TOKEN;
        if self.work > self.max_work {
            return Err(
                "the grammar takes too much work for each token of the answer: make it less ambiguous, or use fewer \
                 alternatives"
                    .to_owned(),
            );
        }
        Ok(())
    }

    /// Whether the answer may end here.
    ///
    /// # Errors
    /// The grammar has failed before.
    pub fn may_end(&mut self) -> Result<bool, String> {
        if self.matcher.is_stopped() && !self.matcher.is_error() {
            return Ok(true);
        }
        let may_end = self.matcher.is_accepting();
        may_end.map_err(|error| caller_reason(&error.to_string()))
    }
}

/// The bytes of a token. The bytes of a special token begin with a mark that no text has, so that only a grammar that
/// names the token allows it.
fn word(tokenizer: &Tokenizer, id: u32) -> Vec<u8> {
    let bytes = match tokenizer.is_special(id) {
        true => tokenizer.id_to_token(id).map(|name| special_word(&name)),
        false => tokenizer.token_bytes(id).map(<[u8]>::to_vec),
    };
    let bytes = bytes.unwrap_or_default();
    let is_unusable = bytes.len() >= MAX_TOKEN_BYTES
        || bytes.first() == Some(&TokTrie::SPECIAL_TOKEN_MARKER) && !tokenizer.is_special(id);
    if is_unusable { Vec::new() } else { bytes }
}

fn special_word(name: &str) -> Vec<u8> {
    let mut word = vec![TokTrie::SPECIAL_TOKEN_MARKER];
    word.extend_from_slice(name.as_bytes());
    word
}

/// The grammar with its schemas rewritten for llguidance.
fn compiled_source(source: &GrammarSource) -> Result<GrammarSource, GrammarError> {
    match source {
        GrammarSource::JsonSchema(schema) => compiled_schema(schema).map(GrammarSource::JsonSchema),
        GrammarSource::Lark(lark) => {
            with_compiled_schemas(lark, compiled_schema).map(GrammarSource::Lark)
        }
        GrammarSource::Gbnf(gbnf) => in_lark(gbnf).map(GrammarSource::Lark),
        GrammarSource::Composed(composed) => {
            let parts = composed.parts.iter().enumerate().map(|(part, source)| {
                compiled_source(source).map_err(|error| GrammarError {
                    part: Some(part),
                    ..error
                })
            });
            Ok(GrammarSource::Composed(ComposedGrammar {
                start: composed.start.clone(),
                parts: parts.collect::<Result<_, _>>()?,
            }))
        }
        source => Ok(source.clone()),
    }
}

fn top_level(source: &GrammarSource) -> TopLevelGrammar {
    match source {
        GrammarSource::Composed(composed) => {
            let parts = composed.parts.iter().enumerate().map(|(part, source)| {
                let mut grammar = single(source);
                grammar.name = Some(ComposedGrammar::part_name(part));
                grammar
            });
            let mut grammars = vec![GrammarWithLexer::from_lark(composed.start.clone())];
            grammars.extend(parts);
            TopLevelGrammar {
                grammars,
                max_tokens: None,
            }
        }
        source => from_one(single(source)),
    }
}

fn from_one(grammar: GrammarWithLexer) -> TopLevelGrammar {
    TopLevelGrammar::from_grammar(grammar)
}

fn single(source: &GrammarSource) -> GrammarWithLexer {
    match source {
        GrammarSource::JsonObject => json_grammar(json!({"type": "object"})),
        GrammarSource::JsonSchema(schema) => json_grammar(schema.clone()),
        GrammarSource::Regex(regex) => GrammarWithLexer::from_regex(regex),
        GrammarSource::Choice(texts) => {
            // All texts form one terminal. With one terminal for each text, the parser would have an item for each. A
            // terminal cannot be empty.
            let (empty, texts): (Vec<_>, Vec<_>) = texts.iter().partition(|text| text.is_empty());
            let texts: Vec<_> = texts.iter().map(|text| json!(text).to_string()).collect();
            let lark = match (&empty[..], &texts[..]) {
                (_, []) => "start: \"\"".to_owned(),
                ([], texts) => format!("start: TEXT\nTEXT: {}", texts.join(" | ")),
                (_, texts) => format!("start: TEXT?\nTEXT: {}", texts.join(" | ")),
            };
            GrammarWithLexer::from_lark(lark)
        }
        // `compiled_source` has left no GBNF.
        GrammarSource::Lark(lark) | GrammarSource::Gbnf(lark) => {
            GrammarWithLexer::from_lark(lark.clone())
        }
        // Compositions are made here, and never nested.
        GrammarSource::Composed(composed) => GrammarWithLexer::from_lark(composed.start.clone()),
    }
}

fn json_grammar(mut schema: Value) -> GrammarWithLexer {
    if let Some(object) = schema.as_object()
        && !object.contains_key("x-guidance")
    {
        let options = JsonCompileOptions {
            whitespace_pattern: Some(JSON_WHITESPACE.to_owned()),
            ..JsonCompileOptions::default()
        };
        options.apply_to(&mut schema);
    }
    GrammarWithLexer::from_json_schema(schema)
}

#[cfg(test)]
pub(crate) mod tests;

impl fmt::Debug for Grammar {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Grammar").finish_non_exhaustive()
    }
}
