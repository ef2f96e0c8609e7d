//! A thread pool whose workers run one job together and meet at barriers inside it.
//!
//! The calling thread is worker 0. A waiting worker spins briefly, then yields, then parks, because other processes may
//! need the core. A panic in one worker releases the others from their barriers, and the pool stays usable.

use std::any::Any;
use std::cell::{Cell, UnsafeCell};
use std::io;
use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::thread::JoinHandle;

use super::claims::{Claims, ShareEnd};
use super::core_affinity;

pub struct ThreadPool {
    shared: Arc<Shared>,
    threads: Vec<JoinHandle<()>>,
    /// The core of each worker; empty if the system chooses.
    cores: Vec<usize>,
}

/// One thread's view of a running job.
pub struct Worker<'a> {
    index: usize,
    shared: &'a Shared,
    /// The number of barriers that this worker has passed.
    round: Cell<usize>,
}

impl ThreadPool {
    pub fn new(num_threads: usize) -> io::Result<Self> {
        Self::with_cores(num_threads, Vec::new())
    }

    /// Starts a pool that pins each worker to a core. Worker 0 is pinned by `pin_caller`.
    pub fn pinned(cores: Vec<usize>) -> io::Result<Self> {
        Self::with_cores(cores.len(), cores)
    }

    fn with_cores(num_threads: usize, cores: Vec<usize>) -> io::Result<Self> {
        let num_threads = num_threads.max(1);
        let shared = Arc::new(Shared {
            num_threads,
            job: UnsafeCell::new(None),
            is_closing: AtomicBool::new(false),
            start: Barrier::new(num_threads),
            middle: Barrier::new(num_threads),
            end: Barrier::new(num_threads),
            panic: Mutex::new(None),
            claims: [(); 2].map(|()| Claims::new(num_threads)),
        });
        let mut pool = Self {
            shared,
            threads: Vec::new(),
            cores,
        };
        for index in 1..num_threads {
            let shared = Arc::clone(&pool.shared);
            let core = pool.cores.get(index).copied();
            let thread = std::thread::Builder::new()
                .name(format!("corella-cpu-{index}"))
                .spawn(move || {
                    if let Some(core) = core {
                        core_affinity::pin_to(core);
                    }
                    help(&shared, index);
                });
            match thread {
                Ok(thread) => pool.threads.push(thread),
                Err(error) => {
                    // The existing threads wait at the start barrier, which can no longer fill up.
                    pool.shared.start.release();
                    return Err(error);
                }
            }
        }
        Ok(pool)
    }

    pub fn num_threads(&self) -> usize {
        self.shared.num_threads
    }

    /// Pins the calling thread to the core of worker 0. The thread that runs jobs must call this.
    pub fn pin_caller(&self) {
        if let Some(&core) = self.cores.first() {
            core_affinity::pin_to(core);
        }
    }

    /// Runs `job` once in every worker. If one panics, the message of the first panic is the error.
    pub fn run(&mut self, job: &(dyn Fn(&Worker<'_>) + Sync)) -> Result<(), String> {
        // SAFETY: only the lifetime changes. Workers use the job between the start barrier and the end barrier, and
        // this function returns after the end barrier.
        let job: Job = unsafe { std::mem::transmute(job) };
        // SAFETY: the other workers wait at the start barrier, and read the cell after it.
        unsafe { *self.shared.job.get() = Some(job) };
        self.shared.claims.iter().for_each(Claims::clear);
        self.shared.start.wait();
        self.shared.take_part(0);
        self.shared.end.wait();
        self.shared.middle.reset();
        let panic = lock(&self.shared.panic).take();
        panic.map_or(Ok(()), Err)
    }
}

impl Drop for ThreadPool {
    fn drop(&mut self) {
        self.shared.is_closing.store(true, Ordering::SeqCst);
        if self.threads.len() + 1 == self.shared.num_threads {
            self.shared.start.wait();
        }
        for thread in self.threads.drain(..) {
            // The worker catches its panics, so the result has no information.
            let _ = thread.join();
        }
    }
}

impl Worker<'_> {
    pub fn index(&self) -> usize {
        self.index
    }

    /// Waits until every worker has arrived. The workers' earlier writes are visible afterwards.
    pub fn barrier(&self) {
        let round = self.round.get() + 1;
        if self.index == 0 {
            // These claims were last used in the previous round, which all workers have left.
            self.shared.claims[round % 2].clear();
        }
        if !self.shared.middle.wait() {
            resume_unwind(Box::new(Released));
        }
        self.round.set(round);
    }

    /// Works through this worker's share of a job, and then helps other workers with their shares. Calls
    /// `work(owner, units)` with ranges of `0..len_of(owner)`. May be called once between two barriers.
    pub fn take_shares(
        &self,
        len_of: impl Fn(usize) -> usize,
        mut work: impl FnMut(usize, Range<usize>),
    ) {
        let claims = &self.shared.claims[self.round.get() % 2];
        let count = self.shared.num_threads;
        for next in 0..count {
            let owner = (self.index + next) % count;
            let end = if next == 0 {
                ShareEnd::Front
            } else {
                ShareEnd::Back
            };
            let len = len_of(owner);
            while let Some(units) = claims.take(owner, len, end) {
                work(owner, units);
            }
        }
    }

    /// This worker's equal share of `0..n`.
    pub fn share(&self, n: usize) -> Range<usize> {
        let count = self.shared.num_threads;
        self.index * n / count..(self.index + 1) * n / count
    }
}

type Job = &'static (dyn Fn(&Worker<'_>) + Sync);

/// The panic payload of a worker that was waiting when another one panicked.
struct Released;

struct Shared {
    num_threads: usize,
    job: UnsafeCell<Option<Job>>,
    is_closing: AtomicBool,
    start: Barrier,
    middle: Barrier,
    end: Barrier,
    panic: Mutex<Option<String>>,
    /// The claims of the current round and of the next, indexed by the parity of the round.
    claims: [Claims; 2],
}

// SAFETY: `job` is written only while all other workers wait at the start barrier, and read only between the start
// barrier and the end barrier.
unsafe impl Sync for Shared {}
// SAFETY: the job behind the reference is `Sync`, and everything else is `Send`.
unsafe impl Send for Shared {}

fn help(shared: &Shared, index: usize) {
    loop {
        if !shared.start.wait() || shared.is_closing.load(Ordering::SeqCst) {
            return;
        }
        shared.take_part(index);
        shared.end.wait();
    }
}

impl Shared {
    fn take_part(&self, index: usize) {
        // SAFETY: the caller is between the start and the end barrier, as the `Sync` impl demands.
        let Some(job) = (unsafe { *self.job.get() }) else {
            return;
        };
        let worker = Worker {
            index,
            shared: self,
            round: Cell::new(0),
        };
        let result = catch_unwind(AssertUnwindSafe(|| job(&worker)));
        if let Err(payload) = result {
            if !payload.is::<Released>() {
                lock(&self.panic).get_or_insert_with(|| panic_message(&*payload));
            }
            self.middle.release();
        }
    }
}

fn panic_message(payload: &(dyn Any + Send)) -> String {
    if let Some(text) = payload.downcast_ref::<&str>() {
        String::from(*text)
    } else if let Some(text) = payload.downcast_ref::<String>() {
        text.clone()
    } else {
        String::from("a worker panicked")
    }
}

fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The number of spins, about ten microseconds: most workers with equal shares arrive by then.
const NUM_SPINS: u32 = 300;
/// The number of yields, about a millisecond. Most shares end so close together that parking and waking up would cost
/// more than the wait.
const NUM_YIELDS: u32 = 3000;

struct Barrier {
    count: usize,
    arrived: AtomicUsize,
    generation: AtomicU64,
    is_released: AtomicBool,
    num_parked: AtomicUsize,
    mutex: Mutex<()>,
    condvar: Condvar,
}

impl Barrier {
    fn new(count: usize) -> Self {
        Self {
            count,
            arrived: AtomicUsize::new(0),
            generation: AtomicU64::new(0),
            is_released: AtomicBool::new(false),
            num_parked: AtomicUsize::new(0),
            mutex: Mutex::new(()),
            condvar: Condvar::new(),
        }
    }

    /// Returns false if the barrier was released before all workers had arrived.
    fn wait(&self) -> bool {
        let generation = self.generation.load(Ordering::Acquire);
        if self.arrived.fetch_add(1, Ordering::AcqRel) + 1 == self.count {
            self.arrived.store(0, Ordering::Relaxed);
            self.generation.store(generation + 1, Ordering::SeqCst);
            self.wake();
            return !self.is_released.load(Ordering::SeqCst);
        }
        let is_over = || {
            self.generation.load(Ordering::SeqCst) != generation
                || self.is_released.load(Ordering::SeqCst)
        };
        for i in 0..NUM_SPINS + NUM_YIELDS {
            if is_over() {
                return !self.is_released.load(Ordering::SeqCst);
            }
            if i < NUM_SPINS {
                std::hint::spin_loop();
            } else {
                std::thread::yield_now();
            }
        }
        let mut guard = lock(&self.mutex);
        self.num_parked.fetch_add(1, Ordering::SeqCst);
        while !is_over() {
            guard = self
                .condvar
                .wait(guard)
                .unwrap_or_else(PoisonError::into_inner);
        }
        self.num_parked.fetch_sub(1, Ordering::SeqCst);
        !self.is_released.load(Ordering::SeqCst)
    }

    /// Lets all workers through, now and until `reset`.
    fn release(&self) {
        self.is_released.store(true, Ordering::SeqCst);
        self.wake();
    }

    /// Makes a released barrier usable again. No thread may wait at it during the call.
    fn reset(&self) {
        self.arrived.store(0, Ordering::SeqCst);
        self.is_released.store(false, Ordering::SeqCst);
    }

    /// A sleeper counts itself before it looks at the generation, and the waker looks at the count
    /// after it has changed the generation, so at least one of them notices the other.
    fn wake(&self) {
        if self.num_parked.load(Ordering::SeqCst) > 0 {
            let _guard = lock(&self.mutex);
            self.condvar.notify_all();
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicUsize;
    use std::sync::mpsc;

    use corella_test::{wait_for, wait_until};

    use super::*;

    #[test]
    fn every_worker_runs_the_job_and_shares_cover_the_work() {
        let mut pool = ThreadPool::new(3).unwrap();
        let cells: Vec<AtomicUsize> = (0..100).map(|_| AtomicUsize::new(0)).collect();
        pool.run(&|worker| {
            for i in worker.share(cells.len()) {
                cells[i].fetch_add(1, Ordering::Relaxed);
            }
        })
        .unwrap();
        assert!(cells.iter().all(|c| c.load(Ordering::Relaxed) == 1));
    }

    #[test]
    fn writes_before_a_barrier_are_seen_after_it() {
        let mut pool = ThreadPool::new(2).unwrap();
        let cells = [const { AtomicUsize::new(0) }; 2];
        for round in 1..20_000 {
            pool.run(&|worker| {
                cells[worker.index()].store(round, Ordering::Relaxed);
                worker.barrier();
                assert_eq!(cells[1 - worker.index()].load(Ordering::Relaxed), round);
                worker.barrier();
            })
            .unwrap();
        }
    }

    #[test]
    fn shares_are_taken_once_in_every_round() {
        let mut pool = ThreadPool::new(3).unwrap();
        const LEN: usize = 50;
        let cells: Vec<AtomicUsize> = (0..3 * LEN).map(|_| AtomicUsize::new(0)).collect();
        for _ in 0..100 {
            pool.run(&|worker| {
                for round in 1..=20 {
                    worker.take_shares(
                        |owner| LEN - owner,
                        |owner, units| {
                            for unit in units {
                                cells[owner * LEN + unit].fetch_add(round, Ordering::Relaxed);
                            }
                        },
                    );
                    worker.barrier();
                }
            })
            .unwrap();
        }
        for (i, cell) in cells.into_iter().enumerate() {
            let expected = if i % LEN < LEN - i / LEN {
                100 * 210
            } else {
                0
            };
            assert_eq!(cell.into_inner(), expected, "{i}");
        }
    }

    #[test]
    fn a_slow_workers_share_is_finished_by_others() {
        let mut pool = ThreadPool::new(2).unwrap();
        let taken = [const { AtomicUsize::new(0) }; 2];
        let num_taken = |index: usize| taken[index].load(Ordering::SeqCst);
        pool.run(&|worker| {
            worker.take_shares(
                |owner| if owner == 0 { 64 } else { 0 },
                |owner, units| {
                    assert_eq!(owner, 0);
                    taken[worker.index()].fetch_add(units.len(), Ordering::SeqCst);
                    if worker.index() == 0 {
                        // The owner is so slow that the other worker does the rest.
                        wait_until("the other has finished the share", || {
                            num_taken(0) + num_taken(1) == 64
                        });
                    }
                },
            );
        })
        .unwrap();
        assert_eq!(num_taken(0) + num_taken(1), 64);
        // The owner returned for more when no unit was left.
        assert!(num_taken(0) <= 16);
    }

    #[test]
    fn a_panic_in_any_worker_ends_the_job_and_spares_the_pool() {
        let mut pool = ThreadPool::new(3).unwrap();
        for culprit in 0..3 {
            let error = pool
                .run(&|worker| {
                    worker.barrier();
                    assert!(worker.index() != culprit, "worker {culprit} fell");
                    worker.barrier();
                    worker.barrier();
                })
                .unwrap_err();
            assert_eq!(error, format!("worker {culprit} fell"));
            let count = AtomicUsize::new(0);
            pool.run(&|worker| {
                worker.barrier();
                count.fetch_add(1, Ordering::Relaxed);
                worker.barrier();
            })
            .unwrap();
            assert_eq!(count.into_inner(), 3);
        }
    }

    #[cfg(target_os = "linux")]
    #[test]
    fn pinned_workers_stay_on_their_cores() {
        let cores = core_affinity::allowed_cores().unwrap();
        let mut pool = ThreadPool::pinned(cores.clone()).unwrap();
        let seen: Vec<_> = cores.iter().map(|_| Mutex::new(Vec::new())).collect();
        // This needs a thread of its own, because the pinning is permanent.
        std::thread::scope(|scope| {
            scope.spawn(|| {
                pool.pin_caller();
                pool.run(&|worker| {
                    *lock(&seen[worker.index()]) = core_affinity::allowed_cores().unwrap();
                })
                .unwrap();
            });
        });
        for (core, seen) in cores.iter().zip(seen) {
            assert_eq!(*lock(&seen), [*core]);
        }
        assert_eq!(core_affinity::allowed_cores().unwrap(), cores);
    }

    /// Waits until a worker sleeps at a barrier.
    fn wait_until_parked(barrier: &Barrier) {
        wait_until("a worker parks", || {
            barrier.num_parked.load(Ordering::SeqCst) == 1
        });
    }

    /// The first worker finds the second one parked at the start, and parks itself at the barrier.
    #[test]
    fn parked_workers_wake_up() {
        let mut pool = ThreadPool::new(2).unwrap();
        let shared = Arc::clone(&pool.shared);
        let (num_done, is_done) = mpsc::channel();
        // Workers that are never woken would block a thread that waits for them.
        std::thread::spawn(move || {
            for _ in 0..3 {
                wait_until_parked(&shared.start);
                let num_through = AtomicUsize::new(0);
                pool.run(&|worker| {
                    if worker.index() == 1 {
                        wait_until_parked(&shared.middle);
                    }
                    worker.barrier();
                    num_through.fetch_add(1, Ordering::SeqCst);
                })
                .unwrap();
                num_done.send(num_through.into_inner()).unwrap();
            }
        });
        for _ in 0..3 {
            let num_through = wait_for("the workers wake up", || is_done.try_recv().ok());
            assert_eq!(num_through, 2);
        }
    }
}
