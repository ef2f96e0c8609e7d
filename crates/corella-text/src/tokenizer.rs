//! The tokenizer of a Hugging Face tokenizer.json: text to token ids and back.

pub(crate) mod added_token;
pub(crate) mod byte_alphabet;
pub(crate) mod detokenizer;
pub(crate) mod fill_in_middle;
pub(crate) mod long_word;
pub(crate) mod normalizer;
pub(crate) mod piece;
pub(crate) mod stop_string;
pub(crate) mod text_stream;
pub(crate) mod token_count;
pub(crate) mod token_reach;
pub(crate) mod word_cache;
pub(crate) mod word_splitter;

use std::panic::catch_unwind;
use std::sync::{Arc, OnceLock};

use serde_json::Value;
use tokenizers::models::ModelWrapper;
use tokenizers::{Encoding, Model as _, Token};

use crate::error::TextError;
use crate::recent_cache::RecentCache;
use crate::tokenizer::added_token::Section;
use crate::tokenizer::detokenizer::Detokenizer;
use crate::tokenizer::long_word::CutPoints;
use crate::tokenizer::piece::PieceTable;
use crate::tokenizer::token_reach::{has_type, max_bytes_per_token};
use crate::tokenizer::word_cache::{WordCache, resize_package_cache};
use crate::tokenizer::word_splitter::{Part, WordSplitter};

/// A tokenizer. Clones share their data.
#[derive(Clone)]
pub struct Tokenizer {
    inner: Arc<Inner>,
}

struct Inner {
    model: tokenizers::Tokenizer,
    pieces: PieceTable,
    /// `None` for tokenizers that can tokenise a text only as a whole.
    words: Option<Words>,
    max_bytes_per_token: Option<usize>,
    /// Computed for the first word that needs it.
    cut_points: OnceLock<Option<CutPoints>>,
}

/// The parts for tokenising word by word.
struct Words {
    splitter: WordSplitter,
    /// The tokens of recently used long sections: sections after another one, and sections at the beginning of a text.
    kept: [RecentCache<Box<str>, Arc<[u32]>>; 2],
    known: WordCache,
    /// The special tokens at the beginning and at the end of a prompt.
    prefix: Vec<u32>,
    suffix: Vec<u32>,
}

/// The cost limits of tokenising one text.
#[derive(Clone, Copy)]
pub struct EncodeLimit<'a> {
    pub max_tokens: usize,
    /// Called between words. Returns true when the tokens are no longer wanted.
    pub is_abandoned: &'a dyn Fn() -> bool,
}

impl EncodeLimit<'_> {
    /// No limit, for texts of the program's own user.
    pub const NONE: EncodeLimit<'static> = EncodeLimit {
        max_tokens: usize::MAX,
        is_abandoned: &|| false,
    };
}

/// Two texts as one prompt.
#[derive(Clone, Debug, PartialEq)]
pub struct EncodedPair {
    pub tokens: Vec<u32>,
    /// The beginning of the second text, for tokenizers that distinguish the texts (`token_type_ids`).
    pub second_text: Option<u32>,
}

/// The longest piece that is tokenised at once: an indivisible word, or a whole text if words are unknown. Tokenising
/// takes some 500 bytes of memory for each byte, and the regular expressions that find words give up after a million
/// steps.
const MAX_WORD_BYTES: usize = 1 << 20;
/// Words from this length on are cut, if possible.
const LONG_WORD_BYTES: usize = 16 << 10;
/// The least size of a section whose tokens are kept. Shorter sections are tokenised as fast as they are found in the
/// cache.
const MIN_KEPT_BYTES: usize = 256;
/// The largest size of the kept sections and their tokens.
const MAX_KEPT_BYTES: usize = 16 << 20;

/// The number of pieces that the package `tokenizers` may keep in each thread, for tokenizers without `Words`.
const MAX_CACHED_TEXTS: usize = 500;

impl Tokenizer {
    /// Reads tokenizer.json. Its truncation and padding are ignored: a prompt is never cut silently.
    pub fn from_bytes(tokenizer_json: &[u8]) -> Result<Self, TextError> {
        // The package `tokenizers` panics for some files that it cannot read or use.
        catch_unwind(|| Self::read(tokenizer_json)).unwrap_or_else(|panic| {
            let reason = panic.downcast::<String>().map(|reason| *reason);
            let reason = reason.unwrap_or_else(|_| "it cannot be read".to_owned());
            Err(TextError::TokenizerFile(reason))
        })
    }

    fn read(tokenizer_json: &[u8]) -> Result<Self, TextError> {
        let mut model = tokenizers::Tokenizer::from_bytes(tokenizer_json)
            .map_err(|error| TextError::TokenizerFile(error.to_string()))?;
        model
            .with_truncation(None)
            .map_err(|error| TextError::TokenizerFile(error.to_string()))?;
        model.with_padding(None);
        let vocab = model.get_vocab(false);
        let pieces = PieceTable::new(&model, &vocab)?;
        let words = Words::new(&model);
        let num_cached = if words.is_some() { 0 } else { MAX_CACHED_TEXTS };
        resize_package_cache(&mut model, num_cached)
            .map_err(|error| TextError::TokenizerFile(error.to_string()))?;
        Ok(Self {
            inner: Arc::new(Inner {
                words,
                max_bytes_per_token: max_bytes_per_token(&model, &vocab),
                cut_points: OnceLock::new(),
                model,
                pieces,
            }),
        })
    }

    pub fn encode(&self, text: &str, add_special_tokens: bool) -> Result<Vec<u32>, TextError> {
        self.encode_within(text, add_special_tokens, EncodeLimit::NONE)
    }

    /// Like `encode`, but stops as soon as it has too many tokens or the result is no longer wanted. A text whose
    /// length alone exceeds the limit is refused at once.
    pub fn encode_within(
        &self,
        text: &str,
        add_special_tokens: bool,
        limit: EncodeLimit,
    ) -> Result<Vec<u32>, TextError> {
        if let Some(max_bytes) = self.max_bytes_per_token() {
            let at_least = text.len().div_ceil(max_bytes);
            if at_least > limit.max_tokens {
                return Err(TextError::TooManyTokens { at_least });
            }
        }
        match &self.inner.words {
            Some(words) => self.encode_words(words, text, add_special_tokens, limit),
            None => self.encode_whole(text, add_special_tokens, limit),
        }
    }

    /// The largest number of bytes of a text that can become one token; `None` if unbounded.
    pub fn max_bytes_per_token(&self) -> Option<usize> {
        self.inner.max_bytes_per_token
    }

    fn encode_words(
        &self,
        words: &Words,
        text: &str,
        add_special_tokens: bool,
        limit: EncodeLimit,
    ) -> Result<Vec<u32>, TextError> {
        let (prefix, suffix) = match add_special_tokens {
            true => (&words.prefix[..], &words.suffix[..]),
            false => (&[][..], &[][..]),
        };
        let mut ids = prefix.to_vec();
        let mut since_asked = 0;
        let mut is_start = true;
        for section in words.splitter.sections(text) {
            match section {
                Section::Token(id) => ids.push(id),
                Section::Text(section) => {
                    self.encode_section(words, section, is_start, limit, &mut ids)?;
                    since_asked += section.len();
                }
            }
            if since_asked >= LONG_WORD_BYTES {
                since_asked = 0;
                limit.check_wanted()?;
            }
            limit.check_len(ids.len() + suffix.len())?;
            is_start = false;
        }
        ids.extend_from_slice(suffix);
        limit.check_len(ids.len())?;
        Ok(ids)
    }

    /// Appends the tokens of the text between two added tokens. The tokens of a long section are kept: requests repeat
    /// the same instructions, tools and first messages.
    fn encode_section(
        &self,
        words: &Words,
        section: &str,
        is_start: bool,
        limit: EncodeLimit,
        ids: &mut Vec<u32>,
    ) -> Result<(), TextError> {
        let is_long = section.len() >= MIN_KEPT_BYTES;
        let kept = is_long.then(|| &words.kept[usize::from(is_start)]);
        if let Some(known) = kept.and_then(|kept| kept.find(section)) {
            ids.extend_from_slice(&known);
            return Ok(());
        }
        let start = ids.len();
        let mut since_asked = 0;
        words.splitter.split(section, is_start, &mut |part| {
            match part {
                Part::Token(id) => ids.push(id),
                Part::Word(word) if word.len() <= LONG_WORD_BYTES => {
                    match words.known.find(word) {
                        Some(known) => ids.extend_from_slice(&known),
                        None => {
                            let start = ids.len();
                            self.encode_word(word, ids)?;
                            words.known.keep(word, &ids[start..]);
                        }
                    }
                    since_asked += word.len();
                }
                Part::Word(word) => self.encode_long_word(word, limit, ids)?,
            }
            if since_asked >= LONG_WORD_BYTES {
                since_asked = 0;
                limit.check_wanted()?;
            }
            limit.check_len(ids.len())
        })?;
        if let Some(kept) = kept {
            let new: Arc<[u32]> = ids[start..].into();
            let weight = section.len() + size_of_val(&*new);
            kept.keep(section.into(), new, weight);
        }
        Ok(())
    }

    fn encode_word(&self, word: &str, ids: &mut Vec<u32>) -> Result<(), TextError> {
        let tokens = self.inner.model.get_model().tokenize(word);
        let tokens = tokens.map_err(|error| TextError::Encode(error.to_string()))?;
        ids.extend(tokens.iter().map(|token| token.id));
        Ok(())
    }

    fn encode_long_word(
        &self,
        word: &str,
        limit: EncodeLimit,
        ids: &mut Vec<u32>,
    ) -> Result<(), TextError> {
        let cut_points = self
            .inner
            .cut_points
            .get_or_init(|| CutPoints::new(&self.inner.model));
        let Some(cut_points) = cut_points else {
            limit.check_word(word)?;
            return self.encode_word(word, ids);
        };
        for piece in cut_points.pieces(word) {
            limit.check_wanted()?;
            limit.check_word(piece)?;
            self.encode_word(piece, ids)?;
            limit.check_len(ids.len())?;
        }
        Ok(())
    }

    fn encode_whole(
        &self,
        text: &str,
        add_special_tokens: bool,
        limit: EncodeLimit,
    ) -> Result<Vec<u32>, TextError> {
        limit.check_word(text)?;
        limit.check_wanted()?;
        let encoding = self.inner.model.encode_fast(text, add_special_tokens);
        let encoding = encoding.map_err(|error| TextError::Encode(error.to_string()))?;
        limit.check_len(encoding.len())?;
        Ok(encoding.get_ids().to_vec())
    }

    /// Tokenises two texts as one prompt, with the tokenizer's special tokens between them.
    pub fn encode_pair(
        &self,
        (first, second): (&str, &str),
        add_special_tokens: bool,
        limit: EncodeLimit,
    ) -> Result<EncodedPair, TextError> {
        if let Some(max_bytes) = self.max_bytes_per_token() {
            let at_least = first.len().div_ceil(max_bytes) + second.len().div_ceil(max_bytes);
            if at_least > limit.max_tokens {
                return Err(TextError::TooManyTokens { at_least });
            }
        }
        limit.check_word(first)?;
        limit.check_word(second)?;
        limit.check_wanted()?;
        let encoding = self
            .inner
            .model
            .encode_fast((first, second), add_special_tokens);
        let encoding = encoding.map_err(|error| TextError::Encode(error.to_string()))?;
        limit.check_len(encoding.len())?;
        let types = encoding.get_type_ids();
        let second_text = types.iter().position(|&kind| kind > 0);
        Ok(EncodedPair {
            tokens: encoding.get_ids().to_vec(),
            second_text: second_text.map(|at| at as u32),
        })
    }

    /// Decodes `ids`. Ids without a token are skipped. Bytes that are not UTF-8 become U+FFFD, as
    /// with Python's `bytes.decode(errors="replace")`.
    pub fn decode(&self, ids: &[u32], skip_special_tokens: bool) -> Result<String, TextError> {
        let mut detokenizer = Detokenizer::new(self.clone(), skip_special_tokens, &[]);
        let mut text = String::new();
        for &id in ids {
            detokenizer.push_into(id, &mut text);
        }
        detokenizer.finish_into(&mut text);
        Ok(text)
    }

    /// The size of the vocabulary: one more than the largest token id.
    pub fn vocab_size(&self) -> usize {
        self.inner.pieces.len()
    }

    /// The number of tokens, and of special ones among them.
    pub fn num_tokens(&self) -> (usize, usize) {
        let pieces = &self.inner.pieces;
        let ids = || 0..pieces.len() as u32;
        let num_tokens = ids().filter(|&id| pieces.bytes(id).is_some()).count();
        let num_special = ids().filter(|&id| pieces.is_special(id)).count();
        (num_tokens, num_special)
    }

    /// The kind of the tokenizer, in a few words.
    pub fn kind(&self) -> &'static str {
        let model = &self.inner.model;
        let as_json = |part: serde_json::Result<Value>| part.unwrap_or_default();
        let parts = [
            as_json(serde_json::to_value(model.get_normalizer())),
            as_json(serde_json::to_value(model.get_pre_tokenizer())),
        ];
        let is_byte_level = parts.iter().any(|part| has_type(part, "ByteLevel"));
        match model.get_model() {
            ModelWrapper::BPE(_) if is_byte_level => "byte-level BPE",
            ModelWrapper::BPE(bpe) if bpe.byte_fallback => "SentencePiece BPE with bytes",
            ModelWrapper::BPE(_) => "BPE",
            ModelWrapper::Unigram(unigram) if unigram.byte_fallback() => {
                "SentencePiece unigram with bytes"
            }
            ModelWrapper::Unigram(_) => "SentencePiece unigram",
            ModelWrapper::WordPiece(_) => "WordPiece",
            ModelWrapper::WordLevel(_) => "whole words",
        }
    }

    pub fn token_to_id(&self, token: &str) -> Option<u32> {
        self.inner.model.token_to_id(token)
    }

    /// The token in the spelling of the vocabulary (`Ġthe`, `▁the`, `<0x0A>`).
    pub fn id_to_token(&self, id: u32) -> Option<String> {
        self.inner.model.id_to_token(id)
    }

    /// The bytes that the token adds to a text in which it is not the first token.
    pub fn token_bytes(&self, id: u32) -> Option<&[u8]> {
        self.inner.pieces.bytes(id)
    }

    pub fn is_special(&self, id: u32) -> bool {
        self.inner.pieces.is_special(id)
    }

    pub(crate) fn pieces(&self) -> &PieceTable {
        &self.inner.pieces
    }
}

impl Words {
    fn new(model: &tokenizers::Tokenizer) -> Option<Self> {
        const TEXT: u32 = u32::MAX;
        let text = Encoding::from_tokens(vec![Token::new(TEXT, String::new(), (0, 0))], 0);
        let processed = model.post_process(text, None, true).ok()?;
        let (prefix, suffix) = {
            let ids = processed.get_ids();
            let at = ids.iter().position(|&id| id == TEXT)?;
            (ids[..at].to_vec(), ids[at + 1..].to_vec())
        };
        if suffix.contains(&TEXT) {
            return None;
        }
        Some(Self {
            splitter: WordSplitter::new(model)?,
            kept: [(); 2].map(|()| RecentCache::new(MAX_KEPT_BYTES)),
            known: WordCache::new(),
            prefix,
            suffix,
        })
    }
}

impl EncodeLimit<'_> {
    fn check_wanted(&self) -> Result<(), TextError> {
        match (self.is_abandoned)() {
            true => Err(TextError::Abandoned),
            false => Ok(()),
        }
    }

    fn check_len(&self, num_tokens: usize) -> Result<(), TextError> {
        match num_tokens > self.max_tokens {
            true => Err(TextError::TooManyTokens {
                at_least: num_tokens,
            }),
            false => Ok(()),
        }
    }

    fn check_word(&self, word: &str) -> Result<(), TextError> {
        match self.max_tokens < usize::MAX && word.len() > MAX_WORD_BYTES {
            true => Err(TextError::WordTooLong {
                max_bytes: MAX_WORD_BYTES,
            }),
            false => Ok(()),
        }
    }
}
