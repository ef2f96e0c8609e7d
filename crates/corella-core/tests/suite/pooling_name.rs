//! The names of poolings in scenarios.

use corella_core::Pooling;

const NAMES: [(&str, Pooling); 4] = [
    ("last", Pooling::LastToken),
    ("mean", Pooling::Mean),
    ("first", Pooling::FirstToken),
    ("max", Pooling::Max),
];

/// The pooling of a name.
pub fn find(name: &str) -> Pooling {
    let found = NAMES.iter().find(|(known, _)| *known == name);
    found.unwrap_or_else(|| panic!("unknown pooling {name}")).1
}

/// The name of a pooling.
pub fn of(pooling: Pooling) -> &'static str {
    let found = NAMES.iter().find(|(_, known)| *known == pooling);
    found.expect("every pooling has a name").0
}
