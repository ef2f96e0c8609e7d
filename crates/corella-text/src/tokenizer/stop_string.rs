//! Finds stop strings in a growing text, and the part of its end that may still become a stop string.
//!
//! This is an Aho–Corasick automaton. Its state is the longest suffix of the text that begins some stop string, so the
//! depth of the state is exactly the number of bytes to hold back, in any division of the text.

/// The stop strings of a request, ready to search. Empty strings never match.
pub struct StopStrings {
    nodes: Vec<Node>,
    lens: Vec<usize>,
}

struct Node {
    /// The children by their byte, sorted.
    children: Vec<(u8, u32)>,
    /// The node of the longest proper suffix of this node's string that is in the tree.
    fallback: u32,
    depth: u32,
    /// The index of the stop string that ends here. If several stop strings are equal, the index of the first.
    stop: Option<u32>,
}

const ROOT: u32 = 0;

impl StopStrings {
    pub fn new(stop: &[String]) -> Self {
        let mut tree = Self {
            nodes: vec![Node::new(0)],
            lens: Vec::with_capacity(stop.len()),
        };
        for (index, string) in stop.iter().enumerate() {
            tree.lens.push(string.len());
            if !string.is_empty() {
                tree.insert(string, index as u32);
            }
        }
        tree.link();
        tree
    }

    pub fn is_empty(&self) -> bool {
        self.nodes.len() == 1
    }

    fn insert(&mut self, string: &str, index: u32) {
        let mut at = ROOT;
        for byte in string.bytes() {
            at = match self.child(at, byte) {
                Some(child) => child,
                None => {
                    let child = self.nodes.len() as u32;
                    let depth = self.nodes[at as usize].depth + 1;
                    self.nodes.push(Node::new(depth));
                    let children = &mut self.nodes[at as usize].children;
                    let place = children.partition_point(|&(other, _)| other < byte);
                    children.insert(place, (byte, child));
                    child
                }
            };
        }
        self.nodes[at as usize].stop.get_or_insert(index);
    }

    /// Links the fallbacks breadth first, so that a node's fallback is linked before the node itself.
    fn link(&mut self) {
        let mut order = vec![ROOT];
        let mut next = 0;
        while next < order.len() {
            let parent = order[next];
            next += 1;
            for (byte, child) in self.nodes[parent as usize].children.clone() {
                let fallback = if parent == ROOT {
                    ROOT
                } else {
                    self.step(self.nodes[parent as usize].fallback, byte)
                };
                let inherited = self.nodes[fallback as usize].stop;
                let node = &mut self.nodes[child as usize];
                node.fallback = fallback;
                node.stop = [node.stop, inherited].into_iter().flatten().min();
                order.push(child);
            }
        }
    }

    fn child(&self, at: u32, byte: u8) -> Option<u32> {
        let children = &self.nodes[at as usize].children;
        let place = children
            .binary_search_by_key(&byte, |&(other, _)| other)
            .ok()?;
        Some(children[place].1)
    }

    fn step(&self, mut at: u32, byte: u8) -> u32 {
        loop {
            match self.child(at, byte) {
                Some(child) => return child,
                None if at == ROOT => return ROOT,
                None => at = self.nodes[at as usize].fallback,
            }
        }
    }
}

impl Node {
    fn new(depth: u32) -> Self {
        Self {
            children: Vec::new(),
            fallback: ROOT,
            depth,
            stop: None,
        }
    }
}

/// The state of the search in one text.
#[derive(Clone, Copy, Default)]
pub(crate) struct StopState(u32);

/// A stop string that was found: `text[..start]` precedes it, `text[..end]` includes it.
pub(crate) struct StopMatch {
    pub(crate) stop: usize,
    pub(crate) start: usize,
    pub(crate) end: usize,
}

impl StopStrings {
    /// Continues the search in `text[from..]`. The match that ends first wins; of matches that end together, the first
    /// in the list, as in vLLM. `text[..from]` must include the held-back bytes.
    pub(crate) fn search(
        &self,
        state: &mut StopState,
        text: &str,
        from: usize,
    ) -> Option<StopMatch> {
        for (offset, byte) in text.as_bytes()[from..].iter().enumerate() {
            state.0 = self.step(state.0, *byte);
            if let Some(stop) = self.nodes[state.0 as usize].stop {
                let end = from + offset + 1;
                let stop = stop as usize;
                return Some(StopMatch {
                    stop,
                    start: end - self.lens[stop],
                    end,
                });
            }
        }
        None
    }

    /// The number of bytes at the end of the text so far that may begin a stop string.
    pub(crate) fn num_held(&self, state: StopState) -> usize {
        self.nodes[state.0 as usize].depth as usize
    }
}
