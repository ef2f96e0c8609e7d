//! The API keys in use, with the remaining amounts of their limits. A prompt's tokens are taken from the limit before
//! the prompt is submitted, an answer's tokens as they come.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock};

use axum::http::{HeaderMap, HeaderName, HeaderValue};

use crate::call::rate_limit::{RateLimit, Refusal};
use crate::config::api_key::{ApiKey, Clock, KeyDigest};
use crate::wire::api_error::ApiError;
use crate::wire::reset_time::ResetTime;

/// The keys of a server. Without keys, every caller has all permissions.
pub struct ApiKeys {
    accounts: RwLock<Arc<[Arc<Account>]>>,
    clock: Clock,
}

impl ApiKeys {
    pub fn new(keys: Vec<ApiKey>, clock: Clock) -> Self {
        let accounts = keys.into_iter().map(|key| Account::new(key, clock.clone()));
        let accounts = accounts.map(Arc::new).collect();
        Self {
            accounts: RwLock::new(accounts),
            clock,
        }
    }

    /// Replaces all keys. An unchanged key keeps its used amounts.
    pub fn replace(&self, keys: Vec<ApiKey>) {
        let old = self.accounts();
        let accounts = keys.into_iter().map(|key| {
            let same = old.iter().find(|account| account.key == key);
            match same {
                Some(account) => account.clone(),
                None => Arc::new(Account::new(key, self.clock.clone())),
            }
        });
        let accounts = accounts.collect();
        *self
            .accounts
            .write()
            .unwrap_or_else(PoisonError::into_inner) = accounts;
    }

    pub fn are_required(&self) -> bool {
        !self.accounts().is_empty()
    }

    /// The key with this name.
    pub fn named(&self, name: &str) -> Option<Arc<Account>> {
        let accounts = self.accounts();
        accounts
            .iter()
            .find(|account| account.name() == name)
            .cloned()
    }

    /// Takes the same time for every presented key, to reveal nothing about similar keys.
    pub fn find(&self, presented: &[u8]) -> Option<Arc<Account>> {
        let digest = KeyDigest::of(presented);
        let mut found = None;
        for account in self.accounts().iter() {
            if account.key.secret.is_same(&digest) {
                found = Some(account.clone());
            }
        }
        found
    }

    fn accounts(&self) -> Arc<[Arc<Account>]> {
        self.accounts
            .read()
            .unwrap_or_else(PoisonError::into_inner)
            .clone()
    }
}

/// A key in use, with the remaining amounts of its limits.
pub struct Account {
    key: ApiKey,
    limits: Mutex<Limits>,
    clock: Clock,
}

struct Limits {
    requests: Option<RateLimit>,
    tokens: Option<RateLimit>,
}

impl Account {
    fn new(key: ApiKey, clock: Clock) -> Self {
        let now_us = clock.now_us();
        let limit = |per_minute: Option<u32>| Some(RateLimit::new(per_minute?, now_us));
        let limits = Limits {
            requests: limit(key.requests_per_minute),
            tokens: limit(key.tokens_per_minute),
        };
        Self {
            key,
            limits: Mutex::new(limits),
            clock,
        }
    }

    pub fn name(&self) -> &str {
        &self.key.name
    }

    pub fn is_admin(&self) -> bool {
        self.key.is_admin
    }

    pub fn priority(&self) -> Option<i32> {
        self.key.priority
    }

    /// Whether the key permits listed models alone.
    pub fn has_own_models(&self) -> bool {
        self.key.models.is_some()
    }

    pub fn may_use(&self, model: &str) -> bool {
        let models = self.key.models.as_deref();
        models.is_none_or(|models| models.iter().any(|allowed| allowed == model))
    }

    /// Counts a request, or refuses it.
    pub fn take_request(&self) -> Result<(), ApiError> {
        let now_us = self.clock.now_us();
        let mut limits = self.limits();
        let Some(requests) = &mut limits.requests else {
            return Ok(());
        };
        requests.try_take(now_us, 1).map_err(|refusal| {
            let limit = requests.per_minute();
            match refusal {
                Refusal::After { wait_us } => ApiError::rate_limited(
                    format!("This API key may make {limit} requests per minute."),
                    wait_us,
                ),
                Refusal::Never => ApiError::forbidden("This API key may make no requests."),
            }
        })
    }

    /// Takes the tokens of a request's prompts, or refuses the request.
    pub fn take_prompt(&self, num_tokens: usize, prompt_field: &str) -> Result<(), ApiError> {
        let now_us = self.clock.now_us();
        let mut limits = self.limits();
        let Some(tokens) = &mut limits.tokens else {
            return Ok(());
        };
        let limit = tokens.per_minute();
        tokens
            .try_take(now_us, num_tokens as u64)
            .map_err(|refusal| match refusal {
                Refusal::After { wait_us } => ApiError::rate_limited(
                    format!(
                        "This API key may use {limit} tokens per minute, and {prompt_field} has \
                         {num_tokens} tokens."
                    ),
                    wait_us,
                ),
                Refusal::Never => ApiError::beyond_rate(prompt_field, num_tokens, limit),
            })
    }

    /// Gives back the tokens of prompts that were not computed.
    pub fn give_back_prompt(&self, num_tokens: usize) {
        let now_us = self.clock.now_us();
        if let Some(tokens) = &mut self.limits().tokens {
            tokens.give_back(now_us, num_tokens as u64);
        }
    }

    /// Counts a token of an answer, even beyond the limit: later requests are refused until the limit has room.
    ///
    /// Every token takes a lock, which is held for a few instructions and is shared only by requests of one key with a
    /// limit of tokens.
    pub fn handle_token(&self) {
        if self.key.tokens_per_minute.is_none() {
            return;
        }
        let now_us = self.clock.now_us();
        if let Some(tokens) = &mut self.limits().tokens {
            tokens.take(now_us, 1);
        }
    }

    /// Writes the remaining amount of each limit, under OpenAI's header names.
    pub fn write_headers(&self, headers: &mut HeaderMap) {
        let now_us = self.clock.now_us();
        let mut limits = self.limits();
        if let Some(requests) = &mut limits.requests {
            write_limit(headers, &REQUEST_HEADERS, requests, now_us);
        }
        if let Some(tokens) = &mut limits.tokens {
            write_limit(headers, &TOKEN_HEADERS, tokens, now_us);
        }
    }

    fn limits(&self) -> MutexGuard<'_, Limits> {
        // Limits are whole numbers, which stay valid after a panic elsewhere.
        self.limits.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The headers of a limit: the amount per minute, the remaining amount, and the time until the limit is full again.
struct LimitHeaders {
    limit: HeaderName,
    remaining: HeaderName,
    reset: HeaderName,
}

static REQUEST_HEADERS: LimitHeaders = LimitHeaders {
    limit: HeaderName::from_static("x-ratelimit-limit-requests"),
    remaining: HeaderName::from_static("x-ratelimit-remaining-requests"),
    reset: HeaderName::from_static("x-ratelimit-reset-requests"),
};

static TOKEN_HEADERS: LimitHeaders = LimitHeaders {
    limit: HeaderName::from_static("x-ratelimit-limit-tokens"),
    remaining: HeaderName::from_static("x-ratelimit-remaining-tokens"),
    reset: HeaderName::from_static("x-ratelimit-reset-tokens"),
};

fn write_limit(headers: &mut HeaderMap, names: &LimitHeaders, limit: &mut RateLimit, now_us: u64) {
    let time_us = limit.time_to_full_us(now_us);
    headers.insert(names.limit.clone(), limit.per_minute().into());
    headers.insert(names.remaining.clone(), limit.remaining(now_us).into());
    if let Ok(reset) = HeaderValue::from_str(&ResetTime { time_us }.to_string()) {
        headers.insert(names.reset.clone(), reset);
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn new_keys_keep_what_was_used_of_those_that_stay() {
        let key = |name: &str, requests| ApiKey {
            requests_per_minute: Some(requests),
            ..ApiKey::unlimited(name, name)
        };
        let keys = ApiKeys::new(
            vec![key("stays", 2), key("grows", 2), key("goes", 2)],
            Clock::new(|| Duration::ZERO),
        );
        let take = |name: &str| keys.find(name.as_bytes()).map(|key| key.take_request());
        for name in ["stays", "grows"] {
            assert!(take(name).expect("it is there").is_ok());
            assert!(take(name).expect("it is there").is_ok());
            assert!(take(name).expect("it is there").is_err());
        }
        keys.replace(vec![key("grows", 3), key("stays", 2), key("comes", 1)]);
        assert!(take("stays").expect("it is there").is_err());
        assert!(take("grows").expect("it is there").is_ok());
        assert!(take("comes").expect("it is there").is_ok());
        assert!(take("goes").is_none());
    }
}
