//! Events in virtual time.

use std::cmp::Ordering;
use std::collections::BinaryHeap;

/// Events sorted by time. Events at the same time keep the order of insertion.
pub struct EventQueue<E> {
    events: BinaryHeap<Queued<E>>,
    num_events: u64,
}

/// The earliest event is the greatest.
struct Queued<E> {
    at_us: u64,
    number: u64,
    event: E,
}

impl<E> EventQueue<E> {
    pub fn new() -> Self {
        Self {
            events: BinaryHeap::new(),
            num_events: 0,
        }
    }

    pub fn push(&mut self, at_us: u64, event: E) {
        self.num_events += 1;
        let number = self.num_events;
        self.events.push(Queued {
            at_us,
            number,
            event,
        });
    }

    /// Removes and returns the next event and its time.
    pub fn pop(&mut self) -> Option<(u64, E)> {
        let Queued { at_us, event, .. } = self.events.pop()?;
        Some((at_us, event))
    }

    /// Returns the number of events that were inserted so far.
    pub fn num_events(&self) -> u64 {
        self.num_events
    }
}

impl<E> Ord for Queued<E> {
    fn cmp(&self, other: &Self) -> Ordering {
        (other.at_us, other.number).cmp(&(self.at_us, self.number))
    }
}

impl<E> PartialOrd for Queued<E> {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl<E> PartialEq for Queued<E> {
    fn eq(&self, other: &Self) -> bool {
        self.number == other.number
    }
}

impl<E> Eq for Queued<E> {}
