//! Which token sequences have their KV in which pages.

use alloc::collections::BTreeMap;
use alloc::vec::Vec;

use crate::{Namespace, PageId, StepId, TokenId};

/// A radix tree over tokens, one root per namespace. A node is one of two kinds:
/// * a run of whole pages: `tokens.len() == pages.len() * page_size`; what follows it are its
///   children, and cuts are always between pages;
/// * a tail: one page of which only the first `tokens.len() < page_size` rows are filled. It
///   has no children and only lends its rows by copy.
///
/// Among siblings no node's first page is a prefix of another's: there is one path for every
/// token sequence, and the neighbours of a key in sorted order hold its longest match.
///
/// Pages are the handles: a page knows its place, so that callers keep no node numbers and a
/// split disturbs nobody.
#[derive(Debug)]
pub(crate) struct PrefixTree {
    page_size: usize,
    nodes: Vec<Node>,
    unused_nodes: Vec<NodeId>,
    roots: BTreeMap<Namespace, NodeId>,
    /// By page; `None` when it is not in the tree.
    places: Vec<Option<Place>>,
    num_insertions: u64,
}

/// What the tree has of a token sequence.
#[derive(Debug, Default, PartialEq)]
pub struct PrefixMatch {
    /// Whole pages from the start.
    pub pages: Vec<PageId>,
    /// The page after them whose first rows agree, and how many do.
    pub donor: Option<(PageId, u32)>,
}

/// The whole pages that a token sequence was found to have, each with the insertion that put
/// it where it was.
#[derive(Debug, Default)]
pub(crate) struct KnownPath {
    pages: Vec<(PageId, u64)>,
}

impl KnownPath {
    pub fn num_pages(&self) -> usize {
        self.pages.len()
    }
}

/// Where the next page of a sequence goes.
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
    /// Numbered over the tree's life: tells the page from an earlier use of it.
    insertion: u64,
}

#[derive(Debug, Default)]
struct Node {
    parent: Option<NodeId>,
    tokens: Vec<TokenId>,
    pages: Vec<PageId>,
    /// Sorted by tokens.
    children: Vec<NodeId>,
}

impl PrefixTree {
    pub fn new(num_pages: u32, page_size: u32) -> Self {
        Self {
            page_size: page_size as usize,
            nodes: Vec::new(),
            unused_nodes: Vec::new(),
            roots: BTreeMap::new(),
            places: alloc::vec![None; num_pages as usize],
            num_insertions: 0,
        }
    }

    /// The longest match, to the token. Only pages filled before `step` lend rows.
    ///
    /// `known` is what an earlier call found for the same tokens, and becomes what this one
    /// finds: what the tree still has of it is not compared again.
    pub fn match_prefix(
        &self,
        namespace: &Namespace,
        tokens: &[TokenId],
        step: StepId,
        known: &mut KnownPath,
    ) -> PrefixMatch {
        // Pages leave the tree with all that follows them: a page that stayed kept its path.
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
            None => match self.roots.get(namespace) {
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

    /// Puts a page whose rows are `tokens` after `parent`; fewer tokens than a page make a
    /// tail. When the tree already has those tokens there, nothing changes and the page that
    /// has them is returned. A tail that the new page covers leaves the tree and is pushed to
    /// `superseded`.
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
        let (parent, after) = match parent {
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
            self.split(parent, after);
        }
        let mut at = self.child_position(parent, tokens);
        let children = &self.node(parent).children;
        if let Some(&child) = children.get(at)
            && self.node(child).tokens.starts_with(tokens)
        {
            return Err(self.node(child).pages[0]);
        }
        // A sibling that is a prefix of the key sorts directly before it.
        if at > 0 && tokens.starts_with(&self.node(children[at - 1]).tokens) {
            at -= 1;
            let tail = self.node_mut(parent).children.remove(at);
            self.drop_node(tail, superseded);
        }
        let is_whole = tokens.len() == self.page_size;
        let parent_node = self.node(parent);
        let (node, index) =
            if is_whole && parent_node.children.is_empty() && !parent_node.pages.is_empty() {
                (parent, parent_node.pages.len())
            } else {
                let node = self.new_node(Node {
                    parent: Some(parent),
                    ..Node::default()
                });
                self.node_mut(parent).children.insert(at, node);
                (node, 0)
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
        Ok(())
    }

    /// Takes a page and everything below it out of the tree.
    pub fn remove_from(&mut self, page: PageId, removed: &mut Vec<PageId>) {
        let Place { node, index, .. } = self.place(page);
        let mut below = core::mem::take(&mut self.node_mut(node).children);
        while let Some(child) = below.pop() {
            below.extend(&self.node(child).children);
            self.drop_node(child, removed);
        }
        let at = index as usize * self.page_size;
        let target = self.node_mut(node);
        target.tokens.truncate(at);
        let pages = target.pages.split_off(index as usize);
        self.forget(&pages, removed);
        if index == 0 {
            self.remove_empty(node);
        }
    }

    /// When `page` can leave alone: it ends a node that has no children.
    pub fn is_leaf(&self, page: PageId) -> bool {
        self.places[page.0 as usize].is_some_and(|place| {
            let node = self.node(place.node);
            node.children.is_empty() && node.pages.len() == place.index as usize + 1
        })
    }

    /// The page before `page` on its path.
    pub fn page_before(&self, page: PageId) -> Option<PageId> {
        let place = self.places[page.0 as usize]?;
        let node = self.node(place.node);
        match (place.index as usize).checked_sub(1) {
            Some(index) => Some(node.pages[index]),
            None => self.node(node.parent?).pages.last().copied(),
        }
    }

    pub fn contains(&self, page: PageId) -> bool {
        self.places[page.0 as usize].is_some()
    }

    pub fn page_size(&self) -> usize {
        self.page_size
    }

    /// The tokens of a page's rows; fewer than a page's in a tail.
    pub fn page_tokens(&self, page: PageId) -> &[TokenId] {
        let Place { node, index, .. } = self.place(page);
        let rest = &self.node(node).tokens[index as usize * self.page_size..];
        &rest[..rest.len().min(self.page_size)]
    }

    /// All pages but tails, each after the one before it on its path.
    pub fn whole_pages(&self) -> Vec<PageId> {
        let mut pages = Vec::new();
        let mut open: Vec<NodeId> = self.roots.values().copied().collect();
        while let Some(node) = open.pop() {
            let Node {
                tokens, children, ..
            } = self.node(node);
            let num_whole = tokens.len() / self.page_size;
            pages.extend(&self.node(node).pages[..num_whole]);
            open.extend(children);
        }
        pages
    }

    /// Of the root that a page's path begins at.
    pub fn namespace(&self, page: PageId) -> &Namespace {
        let mut root = self.place(page).node;
        while let Some(parent) = self.node(root).parent {
            root = parent;
        }
        let is_its = |(_, node): &(&Namespace, &NodeId)| **node == root;
        let found = self.roots.iter().find(is_its);
        found.expect("every node is below a root").0
    }

    /// `None` when the page is not in the tree.
    pub fn filled_by(&self, page: PageId) -> Option<StepId> {
        self.places[page.0 as usize].map(|place| place.filled_by)
    }

    /// The child that shares the most tokens with the front of `key`, and how many, counting
    /// the first page only. It sorts directly before or after the key.
    fn closest_child(&self, node: NodeId, key: &[TokenId]) -> Option<(NodeId, usize)> {
        let key = &key[..key.len().min(self.page_size)];
        let children = &self.node(node).children;
        let at = self.child_position(node, key);
        let neighbours = &children[at.saturating_sub(1)..children.len().min(at + 1)];
        let with_common = |&child: &NodeId| (child, num_common_tokens(self.first_page(child), key));
        neighbours
            .iter()
            .map(with_common)
            .filter(|&(_, num_common)| num_common > 0)
            .max_by_key(|&(_, num_common)| num_common)
    }

    /// How many children sort before `key`.
    fn child_position(&self, node: NodeId, key: &[TokenId]) -> usize {
        self.node(node)
            .children
            .partition_point(|&child| self.first_page(child) < key)
    }

    fn first_page(&self, node: NodeId) -> &[TokenId] {
        let tokens = &self.node(node).tokens;
        &tokens[..tokens.len().min(self.page_size)]
    }

    /// Cuts a node before page `index`. The front keeps its number and its place among its
    /// siblings.
    fn split(&mut self, node: NodeId, index: usize) {
        let at = index * self.page_size;
        let front = self.node_mut(node);
        let back = Node {
            parent: Some(node),
            tokens: front.tokens.split_off(at),
            pages: front.pages.split_off(index),
            children: core::mem::take(&mut front.children),
        };
        let back_id = self.new_node(Node::default());
        self.node_mut(node).children.push(back_id);
        for &child in &back.children {
            self.node_mut(child).parent = Some(back_id);
        }
        for (index, page) in back.pages.iter().enumerate() {
            if let Some(place) = &mut self.places[page.0 as usize] {
                place.node = back_id;
                place.index = index as u32;
            }
        }
        *self.node_mut(back_id) = back;
    }

    /// Unlinks a node that has neither pages nor children, and a root that it leaves bare.
    fn remove_empty(&mut self, node: NodeId) {
        if let Some(parent) = self.node(node).parent {
            let siblings = &mut self.node_mut(parent).children;
            siblings.retain(|&sibling| sibling != node);
            if siblings.is_empty() && self.node(parent).parent.is_none() {
                self.remove_empty(parent);
            }
        } else {
            self.roots.retain(|_, root| *root != node);
        }
        self.drop_node(node, &mut Vec::new());
    }

    fn drop_node(&mut self, node: NodeId, removed: &mut Vec<PageId>) {
        let dropped = core::mem::take(self.node_mut(node));
        self.unused_nodes.push(node);
        self.forget(&dropped.pages, removed);
    }

    fn forget(&mut self, pages: &[PageId], removed: &mut Vec<PageId>) {
        for page in pages {
            self.places[page.0 as usize] = None;
        }
        removed.extend_from_slice(pages);
    }

    fn root(&mut self, namespace: &Namespace) -> NodeId {
        if let Some(&root) = self.roots.get(namespace) {
            return root;
        }
        let root = self.new_node(Node::default());
        self.roots.insert(namespace.clone(), root);
        root
    }

    fn new_node(&mut self, node: Node) -> NodeId {
        if let Some(unused) = self.unused_nodes.pop() {
            *self.node_mut(unused) = node;
            return unused;
        }
        self.nodes.push(node);
        NodeId(self.nodes.len() as u32 - 1)
    }

    fn node(&self, node: NodeId) -> &Node {
        &self.nodes[node.0 as usize]
    }

    fn node_mut(&mut self, node: NodeId) -> &mut Node {
        &mut self.nodes[node.0 as usize]
    }

    fn place(&self, page: PageId) -> Place {
        self.places[page.0 as usize].expect("the page is in the tree")
    }

    /// # Panics
    /// When the shape of the tree is not as [`PrefixTree`] says.
    pub fn check_invariants(&self) {
        let mut num_pages = 0;
        let mut num_nodes = self.unused_nodes.len();
        let mut open: Vec<NodeId> = self.roots.values().copied().collect();
        while let Some(id) = open.pop() {
            let node = self.node(id);
            num_nodes += 1;
            num_pages += node.pages.len();
            let is_root = node.parent.is_none();
            let is_whole = node.tokens.len() == node.pages.len() * self.page_size;
            let is_tail = node.pages.len() == 1
                && !node.tokens.is_empty()
                && node.tokens.len() < self.page_size
                && node.children.is_empty();
            assert_eq!(is_root, node.pages.is_empty(), "only roots have no pages");
            assert!(is_whole || is_tail, "a node is a run of pages or a tail");
            assert!(!is_root || !node.children.is_empty(), "a root is bare");
            for pair in node.children.windows(2) {
                let (left, right) = (self.first_page(pair[0]), self.first_page(pair[1]));
                assert!(left < right, "siblings are sorted");
                assert!(!right.starts_with(left), "a sibling covers another");
            }
            for (index, page) in node.pages.iter().enumerate() {
                let place = self.place(*page);
                assert_eq!((place.node, place.index), (id, index as u32));
            }
            for &child in &node.children {
                assert_eq!(self.node(child).parent, Some(id));
                open.push(child);
            }
        }
        assert_eq!(num_nodes, self.nodes.len(), "a node is lost");
        let num_placed = self.places.iter().flatten().count();
        assert_eq!(num_placed, num_pages, "a page thinks it is in the tree");
    }
}

fn num_common_tokens(left: &[TokenId], right: &[TokenId]) -> usize {
    left.iter().zip(right).take_while(|(l, r)| l == r).count()
}
