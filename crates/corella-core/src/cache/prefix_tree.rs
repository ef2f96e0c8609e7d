//! The prefix tree: which token sequences have their KV in which pages.

use alloc::boxed::Box;
use alloc::collections::BTreeMap;
use alloc::vec::Vec;

use crate::cache::kv_event::PageHash;
use crate::{Namespace, PageId, StepId, TokenId};

/// A node has at most this many tokens (or one page), so that cutting one costs little however long
/// a prompt is. Tests use a small limit so that short sequences reach it.
const MAX_NODE_TOKENS: usize = if cfg!(test) { 6 } else { 8192 };

/// A radix tree over tokens, one root per namespace. A node is one of two kinds:
/// * a run of full pages: `tokens.len() == pages.len() * page_size`. What follows it are its
///   children, and it is only ever cut between pages.
/// * a tail: one page of which only the first `tokens.len() < page_size` rows are filled. It has no
///   children, and others use its rows only by copying them.
///
/// No node's first page is a prefix of a sibling's. So there is one path for each token sequence,
/// and the longest match of a key is one of its two neighbours in sorted order.
///
/// The cost of an operation hardly depends on the number of namespaces, siblings and pages: it
/// searches maps and touches only the pages that it concerns. A node's memory is proportional to
/// its pages.
///
/// Callers name positions in the tree by page. A page knows its place, so callers need no node ids,
/// and splitting a node does not invalidate anything that they hold. With KV groups, callers number
/// positions instead of pages (`group_cache.rs`).
#[derive(Debug)]
pub(crate) struct PrefixTree {
    page_size: usize,
    max_node_pages: usize,
    /// At most twice as many nodes as pages: each node has at least one page, or is the root above
    /// one.
    nodes: Vec<Node>,
    unused_nodes: Vec<NodeId>,
    /// The roots by namespace. A hash comes first, so that a search seldom compares the names
    /// themselves.
    roots: BTreeMap<(u64, Namespace), NodeId>,
    /// The place of each page, or `None` if the page is not in the tree.
    places: Vec<Option<Place>>,
    num_insertions: u64,
}

/// The part of a token sequence that the tree has.
#[derive(Debug, Default, PartialEq)]
pub struct PrefixMatch {
    /// Full pages from the start of the sequence.
    pub pages: Vec<PageId>,
    /// A page whose first rows continue the match, and how many of its rows do. They can be copied.
    pub donor: Option<(PageId, u32)>,
}

/// The full pages that were found for a token sequence, each with the number of the insertion that
/// put it there. A page that was removed and inserted again has another number.
#[derive(Debug, Default)]
pub(crate) struct KnownPath {
    pages: Vec<(PageId, u64)>,
}

impl KnownPath {
    pub fn num_pages(&self) -> usize {
        self.pages.len()
    }
}

/// What the next page of a sequence follows.
#[derive(Clone, Copy, Debug)]
pub enum Parent<'a> {
    Root(&'a Namespace),
    Page(PageId),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct NodeId(u32);

#[derive(Clone, Copy, Debug)]
struct Place {
    node: NodeId,
    index: u32,
    /// The step whose return makes the page ready.
    filled_by: StepId,
    /// The number of the insertion, which tells this use of the page from earlier ones.
    insertion: u64,
}

#[derive(Debug, Default)]
struct Node {
    above: Above,
    tokens: Vec<TokenId>,
    pages: Vec<PageId>,
    children: BTreeMap<FirstPage, NodeId>,
}

/// The tokens of a node's first page, which the children of a node are sorted by.
#[derive(Debug, PartialEq, Eq, PartialOrd, Ord)]
struct FirstPage {
    /// The first two tokens. They are stored in the map itself, so that most searches read no
    /// others.
    head: u64,
    tokens: Box<[TokenId]>,
}

/// What a node is below.
#[derive(Debug, Default)]
enum Above {
    /// The node is unused.
    #[default]
    Nothing,
    /// The node is the root of this namespace.
    Namespace(Namespace),
    Node(NodeId),
}

impl FirstPage {
    fn new(tokens: &[TokenId]) -> Self {
        let token = |at: usize| u64::from(tokens.get(at).copied().unwrap_or(0));
        Self {
            head: token(0) << TokenId::BITS | token(1),
            tokens: tokens.into(),
        }
    }
}

impl Node {
    fn first_page(&self, page_size: usize) -> FirstPage {
        FirstPage::new(&self.tokens[..self.tokens.len().min(page_size)])
    }

    /// Frees memory once four times as much is allocated as needed, so that removing a page copies
    /// only a few pages on average.
    fn shrink(&mut self) {
        if self.tokens.capacity() > 4 * self.tokens.len() {
            self.tokens.shrink_to(2 * self.tokens.len());
        }
        if self.pages.capacity() > 4 * self.pages.len() {
            self.pages.shrink_to(2 * self.pages.len());
        }
    }
}

impl PrefixTree {
    pub fn new(num_pages: u32, page_size: u32) -> Self {
        Self {
            page_size: page_size as usize,
            max_node_pages: (MAX_NODE_TOKENS / page_size as usize).max(1),
            nodes: Vec::new(),
            unused_nodes: Vec::new(),
            roots: BTreeMap::new(),
            places: alloc::vec![None; num_pages as usize],
            num_insertions: 0,
        }
    }

    /// Makes room for a page whose number is the next.
    pub fn add_page_number(&mut self) {
        self.places.push(None);
    }

    /// Finds the longest match, to the token. Only pages filled before `step` lend rows.
    ///
    /// `known` is what an earlier call found for the same tokens, and is updated to what this one
    /// finds. Pages that the tree still has are not compared again.
    pub fn match_prefix(
        &self,
        namespace: &Namespace,
        tokens: &[TokenId],
        step: StepId,
        known: &mut KnownPath,
    ) -> PrefixMatch {
        // A page leaves the tree together with all that follow it, so the path to a page that is
        // still there is unchanged.
        while let Some(&(page, insertion)) = known.pages.last()
            && self.places[page.0 as usize].map(|place| place.insertion) != Some(insertion)
        {
            known.pages.pop();
        }
        let (mut node, mut num_pages) = match known.pages.last() {
            Some(&(page, _)) => {
                let place = self.place(page);
                (place.node, place.index as usize + 1)
            }
            None => match self.roots.get(&root_key(namespace)) {
                Some(&root) => (root, 0),
                None => return PrefixMatch::default(),
            },
        };
        let mut rest = &tokens[known.pages.len() * self.page_size..];
        let donor = loop {
            let Node { tokens, pages, .. } = self.node(node);
            let first = num_pages;
            num_pages += tokens[first * self.page_size..]
                .chunks_exact(self.page_size)
                .zip(rest.chunks_exact(self.page_size))
                .take_while(|(ours, theirs)| ours == theirs)
                .count();
            for &page in &pages[first..num_pages] {
                known.pages.push((page, self.place(page).insertion));
            }
            rest = &rest[(num_pages - first) * self.page_size..];
            if let Some(&page) = pages.get(num_pages) {
                let num_rows = num_common_tokens(&tokens[num_pages * self.page_size..], rest);
                break (page, num_rows);
            }
            match self.closest_child(node, rest) {
                Some((child, num_common)) if num_common < self.page_size => {
                    break (self.node(child).pages[0], num_common);
                }
                Some((child, _)) => (node, num_pages) = (child, 0),
                None => break (PageId(0), 0),
            }
        };
        let lends =
            |&(page, num_rows): &(PageId, usize)| num_rows > 0 && self.filled_by(page) < Some(step);
        PrefixMatch {
            pages: known.pages.iter().map(|&(page, _)| page).collect(),
            donor: Some(donor)
                .filter(lends)
                .map(|(page, num_rows)| (page, num_rows as u32)),
        }
    }

    /// Inserts a page whose rows are `tokens` after `parent`; fewer tokens than a page make a tail.
    /// If the tree already has those tokens there, nothing changes and the page that has them is
    /// returned. A tail that the new page covers leaves the tree and is appended to `superseded`.
    pub fn insert_page(
        &mut self,
        parent: Parent,
        tokens: &[TokenId],
        page: PageId,
        filled_by: StepId,
        superseded: &mut Vec<PageId>,
    ) -> Result<(), PageId> {
        debug_assert!(!tokens.is_empty() && tokens.len() <= self.page_size);
        debug_assert!(!self.contains(page));
        let (mut parent, after) = match parent {
            Parent::Root(namespace) => (self.root(namespace), 0),
            Parent::Page(page) => {
                let place = self.place(page);
                (place.node, place.index as usize + 1)
            }
        };
        if after < self.node(parent).pages.len() {
            let there = &self.node(parent).tokens[after * self.page_size..];
            if there.starts_with(tokens) {
                return Err(self.node(parent).pages[after]);
            }
            parent = self.split(parent, after);
        }
        let Node {
            pages, children, ..
        } = self.node(parent);
        let mut covered = None;
        if !children.is_empty() {
            let (before, from) = neighbours(children, &FirstPage::new(tokens));
            if let Some((first_page, child)) = from
                && first_page.starts_with(tokens)
            {
                return Err(self.node(child).pages[0]);
            }
            // A sibling that is a prefix of the key sorts directly before it.
            let is_covered = |(first_page, _): &Child| tokens.starts_with(first_page);
            covered = before.filter(is_covered).map(|(_, tail)| tail);
        }
        let has_room = !pages.is_empty() && pages.len() < self.max_node_pages;
        let is_whole = tokens.len() == self.page_size;
        let is_extended = is_whole && has_room && children.len() == usize::from(covered.is_some());
        let (node, index) = match is_extended {
            true => (parent, self.node(parent).pages.len()),
            false => {
                let node = self.new_node(Above::Node(parent));
                let siblings = &mut self.node_mut(parent).children;
                siblings.insert(FirstPage::new(tokens), node);
                (node, 0)
            }
        };
        let target = self.node_mut(node);
        target.tokens.extend_from_slice(tokens);
        target.pages.push(page);
        self.places[page.0 as usize] = Some(Place {
            node,
            index: index as u32,
            filled_by,
            insertion: self.num_insertions,
        });
        self.num_insertions += 1;
        if let Some(tail) = covered {
            self.remove_node(tail, superseded);
        }
        Ok(())
    }

    /// Removes a page and everything below it from the tree.
    pub fn remove_from(&mut self, page: PageId, removed: &mut Vec<PageId>) {
        let Place { node, index, .. } = self.place(page);
        let below = core::mem::take(&mut self.node_mut(node).children);
        let mut below: Vec<NodeId> = below.into_values().collect();
        while let Some(child) = below.pop() {
            below.extend(self.node(child).children.values());
            let child = self.drop_node(child);
            self.forget(&child.pages, removed);
        }
        if index == 0 {
            self.remove_node(node, removed);
            return;
        }
        let target = &mut self.nodes[node.0 as usize];
        target.tokens.truncate(index as usize * self.page_size);
        for page in target.pages.drain(index as usize..) {
            self.places[page.0 as usize] = None;
            removed.push(page);
        }
        target.shrink();
    }

    /// Whether `page` can be removed alone: it is the last page of a node without children.
    pub fn is_leaf(&self, page: PageId) -> bool {
        self.places[page.0 as usize].is_some_and(|place| {
            let node = self.node(place.node);
            node.children.is_empty() && node.pages.len() == place.index as usize + 1
        })
    }

    /// The page before `page` on its path.
    pub fn page_before(&self, page: PageId) -> Option<PageId> {
        match self.parent(page)? {
            Parent::Page(before) => Some(before),
            Parent::Root(_) => None,
        }
    }

    /// What `page` follows, or `None` if it is not in the tree.
    pub fn parent(&self, page: PageId) -> Option<Parent<'_>> {
        let place = self.places[page.0 as usize]?;
        let node = self.node(place.node);
        if let Some(index) = (place.index as usize).checked_sub(1) {
            return Some(Parent::Page(node.pages[index]));
        }
        let Above::Node(above) = node.above else {
            unreachable!("a node that has pages has no parent");
        };
        let above = self.node(above);
        match &above.above {
            Above::Namespace(namespace) => Some(Parent::Root(namespace)),
            _ => above.pages.last().copied().map(Parent::Page),
        }
    }

    pub fn contains(&self, page: PageId) -> bool {
        self.places[page.0 as usize].is_some()
    }

    pub fn page_size(&self) -> usize {
        self.page_size
    }

    /// The tokens of a page's filled rows: fewer than a page's in a tail.
    pub fn page_tokens(&self, page: PageId) -> &[TokenId] {
        let Place { node, index, .. } = self.place(page);
        let rest = &self.node(node).tokens[index as usize * self.page_size..];
        &rest[..rest.len().min(self.page_size)]
    }

    /// All full pages in the order of their insertion, so that each comes after the one before it
    /// on its path. Pages that follow each other are mostly neighbours in memory as well.
    pub fn whole_pages(&self) -> Vec<PageId> {
        let placed = self.places.iter().enumerate();
        let mut pages: Vec<(u64, PageId)> = placed
            .filter_map(|(page, place)| Some((place.as_ref()?.insertion, PageId(page as u32))))
            .collect();
        pages.sort_unstable();
        let is_whole = |page: &PageId| self.page_tokens(*page).len() == self.page_size;
        let pages = pages.into_iter().map(|(_, page)| page);
        pages.filter(is_whole).collect()
    }

    /// The step that fills the page, or `None` if the page is not in the tree.
    pub fn filled_by(&self, page: PageId) -> Option<StepId> {
        self.places[page.0 as usize].map(|place| place.filled_by)
    }

    /// The child whose first page shares the most tokens with the front of `key`, and how many. It
    /// sorts directly before or after the key.
    fn closest_child(&self, node: NodeId, key: &[TokenId]) -> Option<(NodeId, usize)> {
        let children = &self.node(node).children;
        if children.is_empty() {
            return None;
        }
        let key = &key[..key.len().min(self.page_size)];
        let first_page = FirstPage::new(key);
        if let Some(&child) = children.get(&first_page) {
            return Some((child, key.len()));
        }
        let (before, from) = neighbours(children, &first_page);
        let num_common = |(page, child)| (child, num_common_tokens(page, key));
        before
            .into_iter()
            .chain(from)
            .map(num_common)
            .filter(|&(_, num_common)| num_common > 0)
            .max_by_key(|&(_, num_common)| num_common)
    }

    /// Cuts a node before page `index` and returns the front. The back keeps the node's id, because
    /// any number of children may name it.
    fn split(&mut self, node: NodeId, index: usize) -> NodeId {
        let page_size = self.page_size;
        let front_id = self.new_node(Above::Nothing);
        let back = &mut self.nodes[node.0 as usize];
        let mut front = Node {
            above: core::mem::replace(&mut back.above, Above::Node(front_id)),
            tokens: back.tokens.drain(..index * page_size).collect(),
            pages: back.pages.drain(..index).collect(),
            children: BTreeMap::new(),
        };
        back.shrink();
        let places = &mut self.places;
        for page in &front.pages {
            if let Some(place) = &mut places[page.0 as usize] {
                place.node = front_id;
            }
        }
        for page in &back.pages {
            if let Some(place) = &mut places[page.0 as usize] {
                place.index -= index as u32;
            }
        }
        front.children.insert(back.first_page(page_size), node);
        if let Above::Node(parent) = front.above {
            let siblings = &mut self.node_mut(parent).children;
            let entry = siblings.get_mut(&front.first_page(page_size));
            *entry.expect("a node is missing among its parent's children") = front_id;
        }
        *self.node_mut(front_id) = front;
        front_id
    }

    /// Removes a node without children, and its root if that has no others.
    fn remove_node(&mut self, node: NodeId, removed: &mut Vec<PageId>) {
        let dropped = self.drop_node(node);
        self.forget(&dropped.pages, removed);
        let Above::Node(parent) = dropped.above else {
            unreachable!("a node that has pages has no parent");
        };
        let first_page = dropped.first_page(self.page_size);
        let parent_node = self.node_mut(parent);
        let entry = parent_node.children.remove(&first_page);
        debug_assert_eq!(entry, Some(node));
        if parent_node.children.is_empty()
            && let Above::Namespace(namespace) = &parent_node.above
        {
            let key = root_key(namespace);
            self.roots.remove(&key);
            self.drop_node(parent);
        }
    }

    fn drop_node(&mut self, node: NodeId) -> Node {
        self.unused_nodes.push(node);
        core::mem::take(self.node_mut(node))
    }

    fn forget(&mut self, pages: &[PageId], removed: &mut Vec<PageId>) {
        for page in pages {
            self.places[page.0 as usize] = None;
        }
        removed.extend_from_slice(pages);
    }

    fn root(&mut self, namespace: &Namespace) -> NodeId {
        let key = root_key(namespace);
        if let Some(&root) = self.roots.get(&key) {
            return root;
        }
        let root = self.new_node(Above::Namespace(namespace.clone()));
        self.roots.insert(key, root);
        root
    }

    fn new_node(&mut self, above: Above) -> NodeId {
        let node = self.unused_nodes.pop().unwrap_or_else(|| {
            self.nodes.push(Node::default());
            NodeId(self.nodes.len() as u32 - 1)
        });
        self.node_mut(node).above = above;
        node
    }

    fn node(&self, node: NodeId) -> &Node {
        &self.nodes[node.0 as usize]
    }

    fn node_mut(&mut self, node: NodeId) -> &mut Node {
        &mut self.nodes[node.0 as usize]
    }

    fn place(&self, page: PageId) -> Place {
        self.places[page.0 as usize].expect("the page is not in the tree")
    }

    /// # Panics
    /// Panics when the tree does not have the shape that [`PrefixTree`] describes.
    pub fn check_invariants(&self) {
        let mut num_pages = 0;
        let mut num_nodes = self.unused_nodes.len();
        let mut open: Vec<NodeId> = self.roots.values().copied().collect();
        while let Some(id) = open.pop() {
            let node = self.node(id);
            num_nodes += 1;
            num_pages += node.pages.len();
            let is_root = matches!(&node.above, Above::Namespace(namespace)
                if self.roots.get(&root_key(namespace)) == Some(&id));
            let is_whole = node.tokens.len() == node.pages.len() * self.page_size;
            let is_tail = node.pages.len() == 1
                && !node.tokens.is_empty()
                && node.tokens.len() < self.page_size
                && node.children.is_empty();
            assert_eq!(
                is_root,
                node.pages.is_empty(),
                "a root has pages, or another node has none"
            );
            assert!(
                is_whole || is_tail,
                "a node is neither a run of full pages nor a tail"
            );
            assert!(
                !is_root || !node.children.is_empty(),
                "a root has no children"
            );
            assert!(
                node.pages.len() <= self.max_node_pages,
                "a node has more pages than allowed"
            );
            let capacity = (node.tokens.capacity(), node.pages.capacity());
            assert!(
                capacity.0 <= 4 * node.tokens.len().max(1)
                    && capacity.1 <= 4 * node.pages.len().max(1),
                "a node has room for {capacity:?} tokens and pages, with {} and {}",
                node.tokens.len(),
                node.pages.len()
            );
            let keys = node.children.keys().zip(node.children.keys().skip(1));
            for (left, right) in keys {
                assert!(
                    !right.tokens.starts_with(&left.tokens),
                    "a node's first page is a prefix of a sibling's"
                );
            }
            for (index, page) in node.pages.iter().enumerate() {
                let place = self.place(*page);
                assert_eq!((place.node, place.index), (id, index as u32));
            }
            for (key, &child) in &node.children {
                let child_node = self.node(child);
                let is_here = matches!(child_node.above, Above::Node(above) if above == id);
                assert!(is_here, "a child names another node as its parent");
                assert_eq!(*key, child_node.first_page(self.page_size));
                open.push(child);
            }
        }
        assert_eq!(
            num_nodes,
            self.nodes.len(),
            "a node is neither in the tree nor unused"
        );
        let num_placed = self.places.iter().flatten().count();
        assert_eq!(
            num_placed, num_pages,
            "a page has a place in the tree that no node lists"
        );
    }
}

fn root_key(namespace: &Namespace) -> (u64, Namespace) {
    (PageHash::root(0, namespace).0 as u64, namespace.clone())
}

type Child<'a> = (&'a [TokenId], NodeId);

/// The last child that sorts before `key`, and the first that does not.
fn neighbours<'a>(
    children: &'a BTreeMap<FirstPage, NodeId>,
    key: &FirstPage,
) -> (Option<Child<'a>>, Option<Child<'a>>) {
    let child = |(first_page, &node): (&'a FirstPage, &NodeId)| (&*first_page.tokens, node);
    let before = children.range(..key).next_back();
    let from = children.range(key..).next();
    (before.map(child), from.map(child))
}

fn num_common_tokens(left: &[TokenId], right: &[TokenId]) -> usize {
    left.iter().zip(right).take_while(|(l, r)| l == r).count()
}
