//! Grammars compiled for a vocabulary: the tokens that may come next in an answer.

use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;

use llguidance::api::{GrammarWithLexer, TopLevelGrammar};
use llguidance::toktrie::{ApproximateTokEnv, InferenceCapabilities, TokEnv, TokRxInfo, TokTrie};
use llguidance::{JsonCompileOptions, Matcher, ParserFactory};
use serde_json::{Value, json};

use crate::grammar_place::place_of_error;
use crate::grammar_reason::{caller_reason, without_place};
use crate::grammar_source::ComposedGrammar;
use crate::recent_cache::RecentCache;
use crate::schema::compiled_schema;
use crate::{GrammarSource, Tokenizer};

/// Compiles grammars for one vocabulary, with llguidance: derivatives of regular expressions in an Earley parser,
/// walked over a prefix tree of the vocabulary.
pub struct GrammarCompiler {
    factory: ParserFactory,
    vocab_size: usize,
    /// By the grammar as JSON, in which the order of a schema's properties counts: answers follow it.
    cache: RecentCache<Arc<str>, Grammar>,
}

/// A compiled grammar. Clones share it.
#[derive(Clone)]
pub struct Grammar {
    /// As JSON.
    source: Arc<str>,
    /// Never advanced; every answer starts from a copy of it.
    start: Arc<Mutex<Matcher>>,
    vocab_size: usize,
}

/// An allowed answer so far.
pub struct GrammarState {
    matcher: Matcher,
    vocab_size: usize,
}

/// The reason for which a grammar cannot be used.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GrammarError {
    /// The place in a JSON schema, as a path of keys (`properties.age`). Empty at its root, and for other kinds of
    /// grammars, whose reason names line and column where known.
    pub place: String,
    pub reason: String,
    /// The wrong part of a composed grammar, if the error lies in one alone.
    pub(crate) part: Option<usize>,
}

/// The largest grammar. llguidance also limits the cost of compiling: by the size of the compiled grammar, and by steps
/// of its lexer.
const MAX_SOURCE_BYTES: usize = 256 << 10;
/// The memory of a compiled grammar grows with its source, so the sources of all cached ones are bounded; with
/// `GRAMMAR_BYTES` for each, the cache holds some hundred at most.
const MAX_CACHED_BYTES: usize = 2 * MAX_SOURCE_BYTES;
const GRAMMAR_BYTES: usize = 4 << 10;
/// The deepest nesting of brackets. Parsers of regular expressions and of Lark's notation recurse.
const MAX_NESTING: usize = 200;
/// Compiling recurses along chains of definitions, which `MAX_SOURCE_BYTES` limits.
const COMPILE_STACK_BYTES: usize = 256 << 20;
/// The whitespace between two parts of JSON: a space or two, or one line break and 31 levels of two spaces. Otherwise a
/// confused model could write empty lines for ever.
const JSON_WHITESPACE: &str = r"[\x20\x09]{1,2}|\x0D?\x0A[\x20\x09]{0,62}";
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
        // The end of an answer is separate from its tokens, so the end has a token of its own here, behind the model's.
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
        // A state of the lexer takes some 2 kB, and each request has its own.
        limits.max_lexer_states = 20_000;
        Ok(Self {
            factory,
            vocab_size,
            cache: RecentCache::new(MAX_CACHED_BYTES),
        })
    }

    /// Compiles a grammar, which takes milliseconds, and at most a tenth of a second for large ones. Recently used
    /// grammars are cached.
    ///
    /// # Errors
    /// The defect of the grammar, or its excessive size.
    pub fn compile(&self, source: &GrammarSource) -> Result<Grammar, GrammarError> {
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
                .spawn_scoped(scope, || self.compile_here(source));
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

    fn compile_here(&self, source: &GrammarSource) -> Result<Matcher, GrammarError> {
        check_size(source)?;
        let compiled = self.matcher(top_level(&compiled_source(source)?));
        compiled.map_err(|reason| match source {
            GrammarSource::JsonSchema(schema) => {
                let compile = |part: Value| {
                    let part = compiled_schema(&part).ok()?;
                    self.matcher(from_one(json_grammar(part))).err()
                };
                GrammarError {
                    place: place_of_error(schema, &reason, compile),
                    ..GrammarError::at_root(reason)
                }
            }
            GrammarSource::Composed(composed) => self.error_of_part(composed, reason),
            GrammarSource::Regex(_) => GrammarError::at_root(without_place(&reason)),
            _ => GrammarError::at_root(reason),
        })
    }

    /// The first error of a single part, or else of the whole.
    fn error_of_part(&self, composed: &ComposedGrammar, reason: String) -> GrammarError {
        let errors = composed
            .parts
            .iter()
            .enumerate()
            .filter_map(|(part, source)| {
                let error = self.compile_here(source).err()?;
                Some(GrammarError {
                    part: Some(part),
                    ..error
                })
            });
        { errors }
            .next()
            .unwrap_or_else(|| GrammarError::at_root(reason))
    }

    /// The reason for a failure is a sentence or a few lines.
    fn matcher(&self, grammar: TopLevelGrammar) -> Result<Matcher, String> {
        let parser = self.factory.create_parser(grammar);
        let parser = parser.map_err(|error| caller_reason(&error.to_string()))?;
        let matcher = Matcher::new(Ok(parser));
        if let Some(error) = matcher.get_error() {
            return Err(caller_reason(&error));
        }
        let mut first = GrammarState {
            matcher: matcher.deep_clone(),
            vocab_size: self.vocab_size,
        };
        let can_begin = first.allowed()?.iter().any(|&word| word != 0);
        match can_begin || first.may_end()? {
            true => Ok(matcher),
            false => Err("no answer can follow it".to_owned()),
        }
    }
}

impl GrammarError {
    pub(crate) fn at_root(reason: String) -> Self {
        Self {
            place: String::new(),
            reason,
            part: None,
        }
    }
}

impl fmt::Display for GrammarError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.place.is_empty() {
            true => f.write_str(&self.reason),
            false => write!(f, "at {}: {}", self.place, self.reason),
        }
    }
}

impl std::error::Error for GrammarError {}

impl fmt::Debug for Grammar {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Grammar").finish_non_exhaustive()
    }
}

impl Grammar {
    /// Its source, for [`GrammarCompiler::compile_again`].
    pub fn source(&self) -> &Arc<str> {
        &self.source
    }

    /// The beginning of an answer. It has memory of its own, so that no failure of one answer affects another.
    pub fn start(&self) -> GrammarState {
        let start = self.start.lock().unwrap_or_else(PoisonError::into_inner);
        GrammarState {
            matcher: start.deep_clone(),
            vocab_size: self.vocab_size,
        }
    }
}

impl GrammarState {
    /// Appends the next token of the answer.
    ///
    /// # Errors
    /// The token is not allowed, or the grammar takes too many steps.
    pub fn push(&mut self, token: u32) -> Result<(), String> {
        let pushed = self.matcher.consume_token(token);
        pushed.map_err(|error| caller_reason(&error.to_string()))
    }

    /// The tokens that may come next, as bits: bit `t % 32` of word `t / 32`. Empty behind a complete answer that no
    /// token can follow.
    ///
    /// # Errors
    /// The grammar takes too many steps, or too much memory.
    pub fn allowed(&mut self) -> Result<Box<[u32]>, String> {
        let num_words = self.vocab_size.div_ceil(32);
        if self.matcher.is_stopped() && !self.matcher.is_error() {
            return Ok(vec![0; num_words].into());
        }
        let mask = self.matcher.compute_mask();
        let mask = mask.map_err(|error| caller_reason(&error.to_string()))?;
        let mut words: Box<[u32]> = mask.as_slice()[..num_words].into();
        // The bit behind the last token stands for the end of the answer.
        if !self.vocab_size.is_multiple_of(32) {
            words[num_words - 1] &= (1 << (self.vocab_size % 32)) - 1;
        }
        Ok(words)
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

/// The bytes of a token. Special tokens have a mark that no text has, so that only a grammar that names them allows
/// them.
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
            let texts: Vec<_> = texts.iter().map(|text| json!(text).to_string()).collect();
            GrammarWithLexer::from_lark(format!("start: {}", texts.join(" | ")))
        }
        GrammarSource::Lark(lark) => GrammarWithLexer::from_lark(lark.clone()),
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

fn check_size(source: &GrammarSource) -> Result<(), GrammarError> {
    let (num_bytes, nesting) = size(source);
    if num_bytes > MAX_SOURCE_BYTES {
        return Err(GrammarError::at_root(format!(
            "it has {num_bytes} bytes, and at most {MAX_SOURCE_BYTES} are compiled"
        )));
    }
    if nesting > MAX_NESTING {
        return Err(GrammarError::at_root(too_nested()));
    }
    Ok(())
}

/// The reason against compiling a regular expression, before it is parsed.
pub(crate) fn nesting_error(regex: &str) -> Option<String> {
    (nesting(regex) > MAX_NESTING).then(too_nested)
}

fn too_nested() -> String {
    format!("its brackets are nested more than {MAX_NESTING} deep")
}

/// The bytes of a grammar, and the nesting of brackets in its parsed parts.
fn size(source: &GrammarSource) -> (usize, usize) {
    match source {
        GrammarSource::JsonObject => (0, 0),
        GrammarSource::JsonSchema(schema) => (schema.to_string().len(), patterns_nesting(schema)),
        GrammarSource::Regex(text) | GrammarSource::Lark(text) => (text.len(), nesting(text)),
        GrammarSource::Choice(texts) => (texts.iter().map(String::len).sum(), 0),
        GrammarSource::Composed(composed) => { composed.parts.iter() }.map(size).fold(
            (composed.start.len(), 0),
            |(all, deepest), (bytes, depth)| (all + bytes, deepest.max(depth)),
        ),
    }
}

/// The deepest nesting of brackets.
fn nesting(text: &str) -> usize {
    let (mut depth, mut deepest, mut is_escaped) = (0usize, 0, false);
    for byte in text.bytes() {
        match byte {
            _ if is_escaped => {}
            b'(' | b'[' | b'{' => depth += 1,
            b')' | b']' | b'}' => depth = depth.saturating_sub(1),
            _ => {}
        }
        is_escaped = byte == b'\\' && !is_escaped;
        deepest = deepest.max(depth);
    }
    deepest
}

/// The nesting of the regular expressions in a schema. Any string may be one.
fn patterns_nesting(schema: &Value) -> usize {
    match schema {
        Value::String(text) => nesting(text),
        Value::Array(items) => items.iter().map(patterns_nesting).max().unwrap_or(0),
        Value::Object(fields) => { fields.iter() }
            .map(|(key, value)| nesting(key).max(patterns_nesting(value)))
            .max()
            .unwrap_or(0),
        Value::Null | Value::Bool(_) | Value::Number(_) => 0,
    }
}

#[cfg(test)]
mod tests;
