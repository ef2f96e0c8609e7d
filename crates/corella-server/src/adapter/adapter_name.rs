//! The names of an adapter: one for callers, and one for the engine.

/// Returns the engine's name of an adapter, by which requests share cached prefixes. `number` makes it unique, because
/// the cache of an earlier adapter must not match a new adapter of the same name.
pub fn unique_name(name: &str, number: u64) -> String {
    format!("{name}#{number}")
}

/// Returns the callers' name of an adapter, from the engine's name.
pub fn served_name(unique_name: &str) -> &str {
    let parts = unique_name.rsplit_once('#');
    parts.map_or(unique_name, |(name, _)| name)
}
