//! The names of an adapter: one for callers, and one for the engine.

/// Returns the engine's name for an adapter. Requests share cached prefixes only under the same name. `number` makes
/// the name unique, because a new adapter must not use the cached prefixes of an earlier adapter with the same name.
pub fn unique_name(name: &str, number: u64) -> String {
    format!("{name}#{number}")
}

/// Returns the callers' name for an adapter, from the engine's name.
pub fn served_name(unique_name: &str) -> &str {
    let parts = unique_name.rsplit_once('#');
    parts.map_or(unique_name, |(name, _)| name)
}
