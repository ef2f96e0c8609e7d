//! The row paths, and their list.

pub(super) mod nixl;
mod shm;
pub(super) mod tcp;

use std::sync::Arc;

use super::path_name::PathName;
use super::row_path::{Link, PathKind, RowPath};

/// The row paths. A greeting has a bit for each place in this list, so a new path is appended. If two paths suit a
/// connection, the later one is tried.
pub const ROW_PATHS: [PathKind; 3] = [tcp::KIND, shm::KIND, nixl::KIND];

/// Returns the paths that every node has.
pub fn own_paths(incarnation: u64) -> Vec<Arc<dyn RowPath>> {
    let own = ROW_PATHS.iter().filter(|kind| kind.load.is_none());
    own.map(|kind| (kind.start)(incarnation).expect("a path that needs nothing starts"))
        .collect()
}

/// The paths of a node, as in the node's greeting. Bits of unknown paths are kept.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PathSet(pub u8);

impl PathSet {
    pub const ALL: Self = Self(u8::MAX);

    pub fn of<'a>(paths: impl IntoIterator<Item = &'a Arc<dyn RowPath>>) -> Self {
        let bits = paths.into_iter().map(|path| 1 << place_of(path.name()));
        Self(bits.fold(0, |set, bit| set | bit))
    }

    pub fn has(self, name: PathName) -> bool {
        self.0 & 1 << place_of(name) != 0
    }
}

fn place_of(name: PathName) -> usize {
    let place = ROW_PATHS.iter().position(|kind| kind.name == name);
    place.expect("the list has every path")
}

/// Returns the path that two nodes try. Both nodes compute the same path.
pub fn agreed<'a>(
    own: impl IntoIterator<Item = &'a Arc<dyn RowPath>>,
    theirs: PathSet,
    link: Link,
) -> Option<&'a Arc<dyn RowPath>> {
    let both = own
        .into_iter()
        .filter(|path| theirs.has(path.name()) && path.suits(link));
    both.max_by_key(|path| place_of(path.name()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use corella_model::PageForm;

    #[test]
    fn both_ends_must_have_a_path_that_suits_their_connection() {
        let own = own_paths(7);
        let name = |theirs, is_local| {
            let form = PageForm::Native;
            agreed(&own, theirs, Link { is_local, form }).map(|path| path.name())
        };
        let tcp_alone = PathSet(1);
        assert_eq!(PathSet::of(&own), PathSet(0b11));
        assert_eq!(name(PathSet::ALL, true), Some(shm::KIND.name));
        assert_eq!(name(PathSet::ALL, false), Some(tcp::NAME));
        assert_eq!(name(tcp_alone, true), Some(tcp::NAME));
        // This node does not know the other node's paths.
        assert_eq!(name(PathSet(0b1111_0000), true), None);
    }
}
