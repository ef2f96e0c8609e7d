//! Graphs of decode steps: the launches of all layers and of the head, captured once for each padded number of rows.

use crate::device::Graph;

/// The captured steps, by their number of rows, ascending.
#[derive(Debug, Default)]
pub struct Graphs(Vec<(usize, Graph)>);

impl Graphs {
    /// The numbers of rows for steps of up to `max_rows` rows: dense enough that padding stays small, and so few that
    /// capturing their graphs takes a second at most.
    pub fn sizes(max_rows: usize) -> impl Iterator<Item = usize> {
        let small = [1, 2, 4].into_iter();
        let sizes = small.chain((8..64).step_by(8)).chain((64..512).step_by(16));
        sizes.filter(move |&size| size <= max_rows)
    }

    pub fn add(&mut self, num_rows: usize, graph: Graph) {
        self.0.push((num_rows, graph));
    }

    /// The graph of the smallest step with room for `num_rows` rows, and its number of rows.
    pub fn find(&self, num_rows: usize) -> Option<(usize, Graph)> {
        self.0.iter().find(|(size, _)| *size >= num_rows).copied()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_step_takes_the_smallest_graph_that_has_room() {
        let mut graphs = Graphs::default();
        for size in Graphs::sizes(100) {
            graphs.add(size, Graph(size as u64));
        }
        for (num_rows, size) in [(1, 1), (3, 4), (5, 8), (33, 40), (65, 80), (96, 96)] {
            assert_eq!(graphs.find(num_rows), Some((size, Graph(size as u64))));
        }
        assert_eq!(graphs.find(97), None);
    }
}
