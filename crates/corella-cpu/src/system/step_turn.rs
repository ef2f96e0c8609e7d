//! Turns of executors that share the cores of a process.
//!
//! The workers of a step spin at barriers, so that two steps at once on the same cores take longer than one after the
//! other. Executors that compute at once therefore take turns, in the order in which they ask. Between two turns of an
//! executor that asks again at once, each other executor has at most one.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// A turn that takes longer than this is over, because its step may hang. The next step then computes beside it.
const LONGEST_TURN: Duration = Duration::from_secs(10);

/// The turns of all executors that share cores. An executor that is alone takes none.
#[derive(Debug)]
pub struct StepTurns {
    num_members: AtomicUsize,
    queue: Mutex<Queue>,
    changed: Condvar,
    longest_turn: Duration,
}

#[derive(Debug)]
struct Queue {
    /// The number of the next turn that is asked for.
    next: u64,
    /// The number of the turn that has begun, or that begins when it is asked for.
    current: u64,
    begun_at: Instant,
    /// The threads in the order of their turns, each with the number of turns that had begun when it asked.
    #[cfg(test)]
    begun: Vec<(std::thread::ThreadId, usize)>,
}

impl StepTurns {
    pub fn new() -> Arc<Self> {
        Self::with_longest(LONGEST_TURN)
    }

    /// Turns that are over after another time than 10 seconds.
    pub fn with_longest(longest_turn: Duration) -> Arc<Self> {
        Arc::new(Self {
            num_members: AtomicUsize::new(0),
            queue: Mutex::new(Queue {
                next: 0,
                current: 0,
                begun_at: Instant::now(),
                #[cfg(test)]
                begun: Vec::new(),
            }),
            changed: Condvar::new(),
            longest_turn,
        })
    }

    /// Adds an executor.
    pub fn join(self: &Arc<Self>) -> StepTurn {
        self.num_members.fetch_add(1, Ordering::Relaxed);
        StepTurn {
            turns: self.clone(),
            number: None,
        }
    }

    /// The number of turns that have been asked for and are not over.
    pub fn num_asked(&self) -> u64 {
        let queue = self.lock();
        queue.next - queue.current
    }

    fn begin(&self) -> u64 {
        let mut queue = self.lock();
        let number = queue.next;
        queue.next += 1;
        #[cfg(test)]
        let num_begun = queue.begun.len();
        // Others may have passed this turn on before this thread woke up.
        while queue.current < number {
            let left = self.longest_turn.saturating_sub(queue.begun_at.elapsed());
            if left.is_zero() {
                self.pass_on(&mut queue);
                continue;
            }
            let waited = self.changed.wait_timeout(queue, left);
            (queue, _) = waited.unwrap_or_else(PoisonError::into_inner);
        }
        queue.begun_at = Instant::now();
        #[cfg(test)]
        queue.begun.push((std::thread::current().id(), num_begun));
        number
    }

    fn end(&self, number: u64) {
        let mut queue = self.lock();
        // Others end a turn that takes too long.
        if queue.current == number {
            self.pass_on(&mut queue);
        }
    }

    fn pass_on(&self, queue: &mut Queue) {
        queue.current += 1;
        // The next turn's own time begins, even before its thread has woken up.
        queue.begun_at = Instant::now();
        self.changed.notify_all();
    }

    fn lock(&self) -> MutexGuard<'_, Queue> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// An executor's part in the turns. It leaves when it is dropped.
#[derive(Debug)]
pub struct StepTurn {
    turns: Arc<StepTurns>,
    /// The turn that has begun.
    number: Option<u64>,
}

impl StepTurn {
    /// Waits for this executor's turn, unless it has begun, or the executor is alone.
    pub fn begin(&mut self) {
        let is_alone = self.turns.num_members.load(Ordering::Relaxed) < 2;
        if self.number.is_none() && !is_alone {
            self.number = Some(self.turns.begin());
        }
    }

    pub fn end(&mut self) {
        if let Some(number) = self.number.take() {
            self.turns.end(number);
        }
    }
}

impl Drop for StepTurn {
    fn drop(&mut self) {
        self.end();
        self.turns.num_members.fetch_sub(1, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicBool;
    use std::thread;

    use super::*;

    #[test]
    fn executors_that_compute_at_once_have_turns_in_order() {
        const NUM_TURNS: usize = 200;
        let turns = StepTurns::with_longest(Duration::from_secs(3600));
        let mut members: Vec<_> = (0..3).map(|_| turns.join()).collect();
        let is_computing = AtomicBool::new(false);
        let compute = &|member: &mut StepTurn| {
            for _ in 0..NUM_TURNS {
                member.begin();
                assert!(!is_computing.swap(true, Ordering::SeqCst));
                thread::yield_now();
                is_computing.store(false, Ordering::SeqCst);
                member.end();
            }
        };
        thread::scope(|scope| {
            for member in &mut members {
                scope.spawn(move || compute(member));
            }
        });
        let begun = std::mem::take(&mut turns.lock().begun);
        assert_eq!(begun.len(), 3 * NUM_TURNS);
        for (at, (_, asked_at)) in begun.iter().enumerate() {
            let mut others: Vec<_> = begun[*asked_at..at].iter().map(|(id, _)| id).collect();
            assert!(others.len() <= 2, "{others:?} at {at}");
            others.dedup();
            assert_eq!(others.len(), at - asked_at, "one of them had two turns");
        }
        assert_eq!(turns.num_asked(), 0);
    }

    #[test]
    fn an_executor_that_is_alone_takes_no_turn() {
        let turns = StepTurns::new();
        let mut first = turns.join();
        first.begin();
        assert_eq!(turns.num_asked(), 0);
        let mut second = turns.join();
        // The step of the first, which began alone, ends beside that of the second.
        second.begin();
        assert_eq!(turns.num_asked(), 1);
        first.end();
        assert_eq!(turns.num_asked(), 1);
        drop(second);
        assert_eq!(turns.num_asked(), 0);
        first.begin();
        assert_eq!(turns.num_asked(), 0);
    }

    #[test]
    fn a_step_that_hangs_keeps_no_other_from_computing() {
        let turns = StepTurns::with_longest(Duration::from_millis(1));
        let (mut hangs, mut other) = (turns.join(), turns.join());
        hangs.begin();
        other.begin();
        hangs.end();
        assert_eq!(turns.num_asked(), 1, "the other's turn goes on");
        other.end();
        assert_eq!(turns.num_asked(), 0);
    }
}
