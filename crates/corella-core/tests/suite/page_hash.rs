//! Page hashes of different namespaces differ. Otherwise a router would send requests to the wrong
//! cache.

use corella_core::{Namespace, PageHash};

#[test]
fn adapters_and_salts_are_told_apart() {
    let root = |lora: Option<&str>, salt: Option<&str>| {
        let namespace = Namespace {
            lora: lora.map(Into::into),
            cache_salt: salt.map(Into::into),
            arithmetic: None,
        };
        PageHash::root(7, &namespace)
    };
    let names = [None, Some(""), Some("a"), Some("ab"), Some("b")];
    let pairs = names.map(|lora| names.map(|salt| root(lora, salt)));
    let mut hashes = pairs.concat();
    hashes.sort_unstable();
    hashes.dedup();
    assert_eq!(hashes.len(), names.len() * names.len());
}
