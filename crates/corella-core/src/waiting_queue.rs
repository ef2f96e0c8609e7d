//! Requests without a slot, in the order of their turn.

use alloc::collections::VecDeque;

use crate::request_state::RequestIndex;

/// Aged requests are those that others may overtake no longer; they are in order of arrival.
/// Each of the other groups is in order of [`Scheduler::turn`](crate::Scheduler::turn), and
/// preempted requests go before new ones of the same turn.
#[derive(Debug, Default)]
pub(crate) struct WaitingQueue {
    pub aged: VecDeque<RequestIndex>,
    pub preempted: VecDeque<RequestIndex>,
    pub new: VecDeque<RequestIndex>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Queue {
    Aged,
    Preempted,
    New,
}

impl WaitingQueue {
    pub fn queue(&self, queue: Queue) -> &VecDeque<RequestIndex> {
        match queue {
            Queue::Aged => &self.aged,
            Queue::Preempted => &self.preempted,
            Queue::New => &self.new,
        }
    }

    pub fn queue_mut(&mut self, queue: Queue) -> &mut VecDeque<RequestIndex> {
        match queue {
            Queue::Aged => &mut self.aged,
            Queue::Preempted => &mut self.preempted,
            Queue::New => &mut self.new,
        }
    }

    pub fn len(&self) -> usize {
        self.aged.len() + self.preempted.len() + self.new.len()
    }

    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    pub fn remove(&mut self, index: RequestIndex) {
        for queue in [&mut self.aged, &mut self.preempted, &mut self.new] {
            if let Some(at) = queue.iter().position(|&other| other == index) {
                queue.remove(at);
                return;
            }
        }
    }
}
