//! Compiled grammars that are kept: a service sends the same few schemas again and again.

use std::collections::VecDeque;
use std::sync::{Mutex, PoisonError};

use super::{Grammar, MAX_SOURCE_BYTES};
use crate::GrammarSource;

/// The grammars used last, at most `MAX_GRAMMARS` of them, and together not longer than the longest one
/// that is compiled: what compiled grammars take is then bounded by what one may take.
#[derive(Default)]
pub(super) struct GrammarCache(Mutex<VecDeque<Entry>>);

struct Entry {
    key: GrammarKey,
    grammar: Grammar,
}

/// A grammar as it was written. The order of a schema's properties counts, because answers have it too.
#[derive(PartialEq)]
pub(super) struct GrammarKey(String);

const MAX_GRAMMARS: usize = 64;

impl GrammarKey {
    pub(super) fn new(source: &GrammarSource) -> Option<Self> {
        serde_json::to_string(source).ok().map(Self)
    }
}

impl GrammarCache {
    pub(super) fn find(&self, key: &GrammarKey) -> Option<Grammar> {
        let mut entries = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let at = entries.iter().position(|entry| entry.key == *key)?;
        let entry = entries.remove(at)?;
        let grammar = entry.grammar.clone();
        entries.push_front(entry);
        Some(grammar)
    }

    /// Keeps a grammar that was not found, in place of those that were used longest ago.
    pub(super) fn keep(&self, key: GrammarKey, grammar: Grammar) {
        let mut entries = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        entries.retain(|entry| entry.key != key);
        entries.push_front(Entry { key, grammar });
        let mut num_bytes = 0;
        let kept = entries.iter().take(MAX_GRAMMARS).take_while(|entry| {
            num_bytes += entry.key.0.len();
            num_bytes <= MAX_SOURCE_BYTES
        });
        let num_kept = kept.count();
        entries.truncate(num_kept);
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use serde_json::json;

    use super::super::tests::compiler;
    use super::*;

    fn schema(text: &str) -> GrammarSource {
        GrammarSource::JsonSchema(serde_json::from_str(text).expect("JSON"))
    }

    fn is_same(a: &Grammar, b: &Grammar) -> bool {
        Arc::ptr_eq(&a.start, &b.start)
    }

    #[test]
    fn a_grammar_is_compiled_once() {
        let compiler = compiler();
        let compile = |source: &GrammarSource| compiler.compile(source).expect("it compiles");
        let regex = GrammarSource::Regex("ab".to_owned());
        let lark = GrammarSource::Lark("start: \"ab\"".to_owned());
        let first = compile(&regex);
        assert!(!is_same(&compile(&lark), &first));
        assert!(is_same(&compile(&regex), &first));
        // The same text as another kind of grammar is another grammar.
        assert!(!is_same(
            &compile(&GrammarSource::Choice(vec!["ab".to_owned()])),
            &first
        ));
    }

    /// JSON objects are equal in any order of their members.
    #[test]
    fn the_order_of_properties_counts() {
        let compiler = compiler();
        let texts = [
            r#"{"properties": {"a": {"const": 1}, "b": {"const": 2}}, "required": ["a", "b"]}"#,
            r#"{"properties": {"b": {"const": 2}, "a": {"const": 1}}, "required": ["a", "b"]}"#,
        ];
        let answers = [r#"{"a":1,"b":2}"#, r#"{"b":2,"a":1}"#];
        for (own, text) in texts.iter().enumerate() {
            let grammar = compiler.compile(&schema(text)).expect("it compiles");
            for (at, answer) in answers.iter().enumerate() {
                let mut state = grammar.start();
                let mut pushed = answer.bytes().map(|byte| state.push(byte.into()));
                assert_eq!(
                    pushed.all(|pushed| pushed.is_ok()),
                    at == own,
                    "{text} {answer}"
                );
            }
        }
    }

    #[test]
    fn what_is_kept_is_bounded() {
        let grammar = compiler()
            .compile(&GrammarSource::JsonObject)
            .expect("it compiles");
        let cache = GrammarCache::default();
        let key = |name: usize, num_bytes: usize| {
            let choice = vec![name.to_string(), "x".repeat(num_bytes)];
            GrammarKey::new(&GrammarSource::Choice(choice)).expect("it is JSON")
        };
        let is_kept = |name, num_bytes| cache.find(&key(name, num_bytes)).is_some();
        for name in 0..=MAX_GRAMMARS {
            cache.keep(key(name, 1), grammar.clone());
            assert!(is_kept(0, 1) || name == MAX_GRAMMARS);
        }
        // The first was used between the others, so the second is the oldest.
        assert!(is_kept(0, 1) && !is_kept(1, 1) && is_kept(2, 1));
        for name in 0..3 {
            cache.keep(key(name, MAX_SOURCE_BYTES / 3), grammar.clone());
        }
        assert_eq!(
            [0, 1, 2].map(|name| is_kept(name, MAX_SOURCE_BYTES / 3)),
            [false, true, true]
        );
        assert!(!is_kept(2, 1));
        cache.keep(key(7, MAX_SOURCE_BYTES + 1), grammar.clone());
        assert!(!is_kept(7, MAX_SOURCE_BYTES + 1));
        cache.keep(key(8, 1), grammar);
        assert!(is_kept(8, 1));
    }
}
