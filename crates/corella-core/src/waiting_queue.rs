//! Requests without a slot, in the order of their turn.

use alloc::collections::VecDeque;

use crate::request_state::RequestIndex;

/// Preempted requests go before new ones; each group is in order of arrival.
#[derive(Debug, Default)]
pub(crate) struct WaitingQueue {
    pub preempted: VecDeque<RequestIndex>,
    pub new: VecDeque<RequestIndex>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Queue {
    Preempted,
    New,
}

impl WaitingQueue {
    pub fn queue(&self, queue: Queue) -> &VecDeque<RequestIndex> {
        match queue {
            Queue::Preempted => &self.preempted,
            Queue::New => &self.new,
        }
    }

    pub fn len(&self) -> usize {
        self.preempted.len() + self.new.len()
    }

    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    pub fn remove(&mut self, index: RequestIndex) {
        for queue in [&mut self.preempted, &mut self.new] {
            if let Some(at) = queue.iter().position(|&other| other == index) {
                queue.remove(at);
                return;
            }
        }
    }
}
