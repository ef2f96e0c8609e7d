//! The names of an adapter: one for callers, and one for the engine.

/// The engine's name of an adapter. Requests share cached prefixes by it, so an earlier adapter's cache must not match
/// a new adapter of the same name. The number makes it unique among all names of callers.
pub fn unique_name(name: &str, number: u64) -> String {
    format!("{name}#{number}")
}

/// Callers' name of an adapter of the engine.
pub fn served_name(unique_name: &str) -> &str {
    let parts = unique_name.rsplit_once('#');
    parts.map_or(unique_name, |(name, _)| name)
}
