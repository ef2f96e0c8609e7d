//! A parser under test: its inputs, and its limits of time and memory.

use std::any::Any;
use std::panic::{self, AssertUnwindSafe, catch_unwind, resume_unwind};
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Mutex, Once, PoisonError};
use std::time::{Duration, Instant};
use std::{env, fs, process, thread};

use crate::{CountingAllocator, Random};

/// A parser's result for an input.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    Accepted,
    Refused,
}

impl<T, E> From<&Result<T, E>> for Verdict {
    fn from(result: &Result<T, E>) -> Self {
        match result {
            Ok(_) => Self::Accepted,
            Err(_) => Self::Refused,
        }
    }
}

/// A parser, and its limit of memory.
pub struct Target {
    name: &'static str,
    base_bytes: usize,
    bytes_per_byte: usize,
    watches_threads: bool,
    /// The name of the test to run in a child process, if the cases run there.
    test: Option<&'static str>,
}

/// The seconds for each target, if `CORELLA_FUZZ_SECONDS` is not set.
const SECONDS: f64 = 1.0;
/// The longest time for one input, on a machine with other load.
const MAX_CASE_TIME: Duration = Duration::from_secs(60);
/// Memory beyond a target's limit fails the test. Beyond the limit plus this margin, the allocator ends the process at
/// once.
const RESERVE_BYTES: usize = 1 << 30;

/// The variable that tells a child process where to note its cases.
const CHILD: &str = "CORELLA_FUZZ_CHILD";

/// All targets share one count of allocated memory, so only one target runs at a time.
static RUNNING: Mutex<()> = Mutex::new(());

/// The number of panics in all threads. Counting starts with the first target that watches threads.
static PANICS: AtomicU64 = AtomicU64::new(0);

impl Target {
    /// A target with the limit `base_bytes`, plus `bytes_per_byte` for each byte of its input.
    pub fn new(name: &'static str, base_bytes: usize, bytes_per_byte: usize) -> Self {
        Self {
            name,
            base_bytes,
            bytes_per_byte,
            watches_threads: false,
            test: None,
        }
    }

    /// Runs all cases in a child process, which runs only this test. If a case ends the process, for example by a stack
    /// overflow, the parent names the case.
    pub fn in_child(self, test: &'static str) -> Self {
        Self {
            test: Some(test),
            ..self
        }
    }

    /// Makes a panic of any thread fail the target, for parsers with threads that outlive a call.
    pub fn watching_threads(self) -> Self {
        static COUNT: Once = Once::new();
        COUNT.call_once(|| {
            let others = panic::take_hook();
            panic::set_hook(Box::new(move |panic| {
                PANICS.fetch_add(1, Ordering::Relaxed);
                others(panic);
            }));
        });
        Self {
            watches_threads: true,
            ..self
        }
    }

    /// Parses each input of the corpus unchanged, which must be accepted, and then changed inputs until the time is up.
    ///
    /// # Panics
    /// When the parser panics, or exceeds its memory; the message has the command that repeats the case. If a case takes
    /// too long, the process is ended.
    pub fn run<I: Clone + AsRef<[u8]>>(
        &self,
        corpus: &[I],
        mutate: impl Fn(&mut Random, &mut I),
        parse: impl Fn(&I) -> Verdict,
    ) {
        let _alone = RUNNING.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(test) = self.test
            && env::var_os(CHILD).is_none()
        {
            return self.watch_child(test);
        }
        for (index, input) in corpus.iter().enumerate() {
            let verdict = parse(input);
            assert_eq!(
                verdict,
                Verdict::Accepted,
                "{}: input {index} of the corpus",
                self.name
            );
        }
        let seed = number("CORELLA_FUZZ_SEED").unwrap_or(1.0) as u64;
        let make = |case: u64| {
            let mut random = Random::new(seed, case);
            let mut input = random.pick(corpus);
            mutate(&mut random, &mut input);
            input
        };
        if let Some(case) = number("CORELLA_FUZZ_CASE") {
            let input = make(case as u64);
            println!(
                "{}: kept as {}",
                self.name,
                self.keep(case as u64, input.as_ref()).display()
            );
            let (verdict, peak) = self.measure(&input, &parse);
            println!(
                "{}: {verdict:?}, {peak} bytes for {}",
                self.name,
                input.as_ref().len()
            );
            return;
        }
        let time = Duration::from_secs_f64(number("CORELLA_FUZZ_SECONDS").unwrap_or(SECONDS));
        let report = self.attack(seed, time, &make, &parse);
        println!("{}: {report}", self.name);
    }

    /// Parses each of these inputs unchanged.
    ///
    /// # Panics
    /// When the parser panics, or exceeds its memory.
    pub fn check<I: AsRef<[u8]>>(&self, inputs: &[I], parse: impl Fn(&I) -> Verdict) {
        let _alone = RUNNING.lock().unwrap_or_else(PoisonError::into_inner);
        for input in inputs {
            let bytes = input.as_ref();
            let (_, peak) = self.measure(input, &parse);
            let allowed = self.allowed(bytes.len());
            let text = String::from_utf8_lossy(bytes);
            assert!(
                peak <= allowed,
                "{}: held {peak} bytes; {allowed} are allowed for {text}",
                self.name
            );
        }
    }

    fn attack<I: AsRef<[u8]>>(
        &self,
        seed: u64,
        time: Duration,
        make: &impl Fn(u64) -> I,
        parse: &impl Fn(&I) -> Verdict,
    ) -> Report {
        let start = Instant::now();
        let mut report = Report::default();
        let watch = Watch::default();
        thread::scope(|scope| {
            scope.spawn(|| watch.run(self.name, seed));
            let _ends = Ends(&watch.is_over);
            for case in 0.. {
                if start.elapsed() >= time {
                    break;
                }
                watch.case.store(case, Ordering::Relaxed);
                self.note(seed, case);
                let input = make(case);
                let case_start = Instant::now();
                let outcome = catch_unwind(AssertUnwindSafe(|| self.measure(&input, parse)));
                let (verdict, peak) =
                    outcome.unwrap_or_else(|panic| self.fail(seed, case, input.as_ref(), panic));
                let allowed = self.allowed(input.as_ref().len());
                if peak > allowed {
                    let much = format!("held {peak} bytes; {allowed} are allowed");
                    self.fail(seed, case, input.as_ref(), Box::new(much));
                }
                report.num_cases += 1;
                report.num_accepted += u64::from(verdict == Verdict::Accepted);
                report.most_bytes = report.most_bytes.max(peak);
                report.longest = report.longest.max(case_start.elapsed());
            }
        });
        report.seconds = start.elapsed().as_secs_f64();
        report
    }

    fn watch_child(&self, test: &str) {
        let directory = env::temp_dir().join(format!("corella-fuzz-{}", process::id()));
        fs::create_dir_all(&directory).expect("a directory for the number of the case");
        let mut child = process::Command::new(env::current_exe().expect("this program"));
        let child = child
            .args([test, "--exact", "--nocapture"])
            .env(CHILD, &directory);
        let status = child.status().expect("this program starts again");
        let noted = fs::read_to_string(directory.join(self.name)).unwrap_or_default();
        let _ = fs::remove_dir_all(&directory);
        assert!(
            status.success(),
            "{}: {status}, in or before: {noted}",
            self.name
        );
    }

    /// Writes the command that repeats a case to a file before the case begins. The parent process shows it if the case
    /// ends this process.
    fn note(&self, seed: u64, case: u64) {
        if self.test.is_some()
            && let Some(directory) = env::var_os(CHILD)
        {
            let path = PathBuf::from(directory).join(self.name);
            let _ = fs::write(path, again(self.name, seed, case));
        }
    }

    /// Parses one input, and also returns the peak of allocated bytes.
    fn measure<I: AsRef<[u8]>>(
        &self,
        input: &I,
        parse: impl Fn(&I) -> Verdict,
    ) -> (Verdict, usize) {
        let num_panics = PANICS.load(Ordering::Relaxed);
        let before = CountingAllocator::held();
        CountingAllocator::take_peak();
        CountingAllocator::hold_at_most(
            before + self.allowed(input.as_ref().len()) + RESERVE_BYTES,
        );
        let verdict = parse(input);
        CountingAllocator::hold_at_most(usize::MAX);
        let peak = CountingAllocator::take_peak().saturating_sub(before);
        let has_panicked = PANICS.load(Ordering::Relaxed) > num_panics;
        assert!(
            !(self.watches_threads && has_panicked),
            "a thread has panicked"
        );
        (verdict, peak)
    }

    fn allowed(&self, num_bytes: usize) -> usize {
        self.base_bytes + self.bytes_per_byte * num_bytes
    }

    fn fail(&self, seed: u64, case: u64, input: &[u8], panic: Box<dyn Any + Send>) -> ! {
        CountingAllocator::hold_at_most(usize::MAX);
        eprintln!("{}", again(self.name, seed, case));
        eprintln!("the input is {}", self.keep(case, input).display());
        match panic.downcast::<String>() {
            Ok(text) => panic!("{}: {text}", self.name),
            Err(panic) => resume_unwind(panic),
        }
    }

    fn keep(&self, case: u64, input: &[u8]) -> PathBuf {
        let path = env::temp_dir().join(format!("corella-fuzz-{}-{case}", self.name));
        // The seed and the case number suffice to recreate the input, so a failed write does no harm.
        let _ = fs::write(&path, input);
        path
    }
}

/// The command that repeats a case.
fn again(name: &str, seed: u64, case: u64) -> String {
    format!("{name}: CORELLA_FUZZ_SEED={seed} CORELLA_FUZZ_CASE={case} repeats this case")
}

fn number(variable: &str) -> Option<f64> {
    let text = env::var(variable).ok()?;
    match text.parse() {
        Ok(number) => Some(number),
        Err(_) => panic!("{variable} is {text:?}, which is no number"),
    }
}

/// Ends the process when a case does not end.
#[derive(Default)]
struct Watch {
    case: AtomicU64,
    is_over: AtomicBool,
}

impl Watch {
    fn run(&self, name: &str, seed: u64) {
        let mut seen = (0, Instant::now());
        while !self.is_over.load(Ordering::Relaxed) {
            thread::sleep(Duration::from_millis(20));
            let case = self.case.load(Ordering::Relaxed);
            if case != seen.0 {
                seen = (case, Instant::now());
            } else if seen.1.elapsed() > MAX_CASE_TIME {
                eprintln!("after {MAX_CASE_TIME:?} still: {}", again(name, seed, case));
                process::abort();
            }
        }
    }
}

/// Ends the watch, also when the test fails.
struct Ends<'a>(&'a AtomicBool);

impl Drop for Ends<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

#[derive(Default)]
struct Report {
    seconds: f64,
    num_cases: u64,
    num_accepted: u64,
    most_bytes: usize,
    longest: Duration,
}

impl std::fmt::Display for Report {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(
            f,
            "{} cases in {:.1} s, {} accepted; at most {} kB held and {:.1} ms taken by one",
            self.num_cases,
            self.seconds,
            self.num_accepted,
            self.most_bytes / 1000,
            self.longest.as_secs_f64() * 1000.0
        )
    }
}
