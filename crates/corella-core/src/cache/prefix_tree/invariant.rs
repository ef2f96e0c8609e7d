//! Invariants of the prefix tree.

use alloc::vec::Vec;

use crate::cache::prefix_tree::{Above, PrefixTree, TreeNodeId, root_key};

impl PrefixTree {
    /// # Panics
    /// Panics when the tree does not have the shape that [`PrefixTree`] describes.
    pub fn check_invariants(&self) {
        let mut num_blocks = 0;
        let mut num_nodes = self.unused_nodes.len();
        let mut open: Vec<TreeNodeId> = self.roots.values().copied().collect();
        while let Some(id) = open.pop() {
            let node = self.node(id);
            num_nodes += 1;
            num_blocks += node.blocks.len();
            let is_root = matches!(&node.above, Above::Namespace(namespace)
                if self.roots.get(&root_key(namespace)) == Some(&id));
            let is_whole = node.tokens.len() == node.blocks.len() * self.page_size;
            let is_tail = node.blocks.len() == 1
                && !node.tokens.is_empty()
                && node.tokens.len() < self.page_size
                && node.children.is_empty();
            assert_eq!(
                is_root,
                node.blocks.is_empty(),
                "a root has blocks, or another node has none"
            );
            assert!(
                is_whole || is_tail,
                "a node is neither a run of full blocks nor a tail"
            );
            assert!(
                !is_root || !node.children.is_empty(),
                "a root has no children"
            );
            assert!(
                node.blocks.len() <= self.max_node_blocks,
                "a node has more blocks than allowed"
            );
            let capacity = (node.tokens.capacity(), node.blocks.capacity());
            assert!(
                capacity.0 <= 4 * node.tokens.len().max(1)
                    && capacity.1 <= 4 * node.blocks.len().max(1),
                "a node has room for {capacity:?} tokens and blocks, with {} and {}",
                node.tokens.len(),
                node.blocks.len()
            );
            let keys = node.children.keys().zip(node.children.keys().skip(1));
            for (left, right) in keys {
                assert!(
                    !right.tokens.starts_with(&left.tokens),
                    "a node's first block is a prefix of a sibling's"
                );
            }
            for (index, block) in node.blocks.iter().enumerate() {
                let position = self.position(*block);
                assert_eq!((position.node, position.index), (id, index as u32));
            }
            for (key, &child) in &node.children {
                let child_node = self.node(child);
                let is_here = matches!(child_node.above, Above::Node(above) if above == id);
                assert!(is_here, "a child names another node as its parent");
                assert_eq!(*key, child_node.first_block(self.page_size));
                open.push(child);
            }
        }
        assert_eq!(
            num_nodes,
            self.nodes.len(),
            "a node is neither in the tree nor unused"
        );
        let num_placed = self.positions.iter().flatten().count();
        assert_eq!(
            num_placed, num_blocks,
            "a block has a position in the tree that no node lists"
        );
    }
}
