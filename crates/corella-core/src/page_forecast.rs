//! How many pages the running requests will want at once, in the steps to come.

use crate::log_buckets::{NUM_LOG_BUCKETS, log_bucket};

/// What one request adds to a forecast.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct PageDemand {
    /// Rows that it is expected to fill yet, one in each step, before it ends.
    pub num_steps: u32,
    /// Rows of the pages that it holds which are free: what the first of those steps fill.
    pub num_free_rows: u32,
    /// Pages that it is expected to take yet, all steps together.
    pub num_future_pages: usize,
    /// Pages held now that its end gives back.
    pub num_own_pages: usize,
    /// Pages kept for it by a rule that does not go by time.
    pub num_kept_pages: usize,
    /// Whether it will end when it is expected to.
    pub is_certain: bool,
}

/// Lengths that are only expected spread about as widely as they are long, so that the sum for n
/// requests is off by the sum divided by √n. Pages are kept for a third of that: replays of traces
/// were fastest with it, as more leaves pages idle, and less makes for more preemptions.
const MARGIN_DIVISOR: u64 = 3;

impl PageDemand {
    /// The same when some of the pages are there already.
    pub fn after_taking(&self, num_pages: usize, page_size: u32) -> Self {
        Self {
            num_free_rows: self.num_free_rows + num_pages as u32 * page_size,
            num_future_pages: self.num_future_pages.saturating_sub(num_pages),
            num_own_pages: self.num_own_pages + num_pages,
            num_kept_pages: self.num_kept_pages.saturating_sub(num_pages),
            ..*self
        }
    }
}

/// The most pages that requests will have taken at any step to come, beyond what they have now.
///
/// Requests that end give back what others then take, so the sum of what all will need is far
/// more than they ever hold at once. The idea is that of the Past-Future scheduler (Gong et al.,
/// ASPLOS 2025): in the order in which requests end, the most is held when one of them does.
/// Requests that end at about the same step are counted together, until the last of them does.
#[derive(Clone, Debug)]
pub(crate) struct PageForecast {
    page_size: i64,
    /// Whether pages that one gives back count for the others; else what is kept for each counts
    /// for good.
    is_timed: bool,
    /// Requests by the bucket of their last step.
    cohorts: [Cohort; NUM_LOG_BUCKETS],
    /// No cohort from this one on has members.
    num_cohorts: usize,
    total: Cohort,
    /// The requests whose end is only expected, and the pages that they will take.
    num_uncertain: i64,
    num_uncertain_pages: i64,
    num_kept_pages: i64,
}

#[derive(Clone, Copy, Debug, Default)]
struct Cohort {
    num_requests: i64,
    /// The step in which the last of them ends.
    last_step: u32,
    num_free_rows: i64,
    num_future_pages: i64,
    num_own_pages: i64,
}

/// The step in which a cohort ends.
#[derive(Clone, Copy, Debug)]
struct Station {
    step: u32,
    /// Pages beyond those held now, before the cohort gives its own back, and behind that.
    before: i64,
    after: i64,
}

impl Cohort {
    fn count(&mut self, demand: &PageDemand, sign: i64) {
        self.num_requests += sign;
        self.num_free_rows += sign * i64::from(demand.num_free_rows);
        self.num_future_pages += sign * demand.num_future_pages as i64;
        self.num_own_pages += sign * demand.num_own_pages as i64;
    }
}

impl PageForecast {
    pub fn new(page_size: u32, is_timed: bool) -> Self {
        Self {
            page_size: page_size.into(),
            is_timed,
            cohorts: [Cohort::default(); NUM_LOG_BUCKETS],
            num_cohorts: 0,
            total: Cohort::default(),
            num_uncertain: 0,
            num_uncertain_pages: 0,
            num_kept_pages: 0,
        }
    }

    pub fn clear(&mut self) {
        self.cohorts[..self.num_cohorts].fill(Cohort::default());
        self.num_cohorts = 0;
        self.total = Cohort::default();
        self.num_uncertain = 0;
        self.num_uncertain_pages = 0;
        self.num_kept_pages = 0;
    }

    /// The peak with one more request.
    pub fn peak_with(&mut self, demand: &PageDemand) -> usize {
        let at = log_bucket(demand.num_steps);
        let cohort = self.cohorts[at];
        let num_cohorts = self.num_cohorts;
        self.add(demand);
        let peak = self.peak();
        self.remove(demand);
        self.cohorts[at] = cohort;
        self.num_cohorts = num_cohorts;
        peak
    }

    pub fn add(&mut self, demand: &PageDemand) {
        self.count(demand, 1);
    }

    /// Takes back what was added. Its cohort may count as ending later than it does.
    pub fn remove(&mut self, demand: &PageDemand) {
        self.count(demand, -1);
    }

    fn count(&mut self, demand: &PageDemand, sign: i64) {
        self.num_kept_pages += sign * demand.num_kept_pages as i64;
        let at = log_bucket(demand.num_steps);
        let cohort = &mut self.cohorts[at];
        cohort.count(demand, sign);
        cohort.last_step = cohort.last_step.max(demand.num_steps);
        self.total.count(demand, sign);
        if !demand.is_certain {
            self.num_uncertain += sign;
            self.num_uncertain_pages += sign * demand.num_future_pages as i64;
        }
        self.num_cohorts = self.num_cohorts.max(at + 1);
    }

    /// Pages beyond those held now that must be there for those counted, at the step that wants
    /// the most of them.
    pub fn peak(&self) -> usize {
        if !self.is_timed {
            return self.num_kept_pages as usize;
        }
        let stations = self.stations().map(|station| station.before);
        stations.max().unwrap_or(0).max(0) as usize + self.margin()
    }

    /// Pages kept because lengths are only expected. Alone a request is never kept waiting by what
    /// it might need.
    fn margin(&self) -> usize {
        if self.total.num_requests < 2 || self.num_uncertain == 0 {
            return 0;
        }
        let num_pages = self.num_uncertain_pages as u64;
        let spread = num_pages / (self.num_uncertain as u64).isqrt();
        (spread / MARGIN_DIVISOR) as usize
    }

    /// The first step behind which at least `num_pages` of `num_available` are left.
    pub fn first_step_with(&self, num_pages: usize, num_available: usize) -> u32 {
        let is_there = |station: &Station| station.after + num_pages as i64 <= num_available as i64;
        let mut stations = self.stations();
        let found = stations.find(is_there).or_else(|| self.stations().last());
        found.map_or(0, |station| station.step)
    }

    /// Pages beyond those held now when all that end up to `step` have ended.
    pub fn pages_after(&self, step: u32) -> i64 {
        let ended = self.stations().take_while(|station| station.step <= step);
        ended.last().map_or(0, |station| station.after)
    }

    fn stations(&self) -> impl Iterator<Item = Station> {
        let mut later = self.total;
        let mut num_given_back = 0;
        let cohorts = self.cohorts[..self.num_cohorts].iter();
        cohorts
            .filter(|cohort| cohort.num_requests > 0)
            .map(move |cohort| {
                later.num_requests -= cohort.num_requests;
                later.num_free_rows -= cohort.num_free_rows;
                later.num_future_pages -= cohort.num_future_pages;
                // On average a request has half a page begun.
                let num_rows = later.num_requests
                    * (i64::from(cohort.last_step) + self.page_size / 2)
                    - later.num_free_rows;
                let num_grown = (num_rows / self.page_size).clamp(0, later.num_future_pages);
                let before = num_grown + cohort.num_future_pages - num_given_back;
                num_given_back += cohort.num_own_pages;
                Station {
                    step: cohort.last_step,
                    before,
                    after: num_grown - num_given_back,
                }
            })
    }
}

#[cfg(test)]
mod tests {
    use alloc::vec::Vec;

    use super::*;

    const PAGE_SIZE: u32 = 4;

    /// A request with so many rows, of which it holds whole pages, and steps to go.
    fn demand((num_rows, num_steps): (u32, u32)) -> PageDemand {
        let num_pages = num_rows.div_ceil(PAGE_SIZE);
        let num_final_pages = (num_rows + num_steps).div_ceil(PAGE_SIZE);
        PageDemand {
            num_steps,
            num_free_rows: num_pages * PAGE_SIZE - num_rows,
            num_future_pages: (num_final_pages - num_pages) as usize,
            num_own_pages: num_pages as usize,
            num_kept_pages: (num_final_pages - num_pages) as usize,
            is_certain: true,
        }
    }

    fn forecast(requests: &[(u32, u32)], is_timed: bool) -> PageForecast {
        let mut forecast = PageForecast::new(PAGE_SIZE, is_timed);
        for &request in requests {
            forecast.add(&demand(request));
        }
        forecast
    }

    /// Step by step: pages held beyond those held at first, before a step's ends give theirs back.
    fn held_in_steps(requests: &[(u32, u32)]) -> Vec<i64> {
        let last = requests.iter().map(|&(_, num_steps)| num_steps).max();
        let steps = 0..=last.unwrap_or(0);
        let held = steps.map(|step| {
            let change = |&(num_rows, num_steps): &(u32, u32)| {
                let before = i64::from(num_rows.div_ceil(PAGE_SIZE));
                match step <= num_steps {
                    true => i64::from((num_rows + step).div_ceil(PAGE_SIZE)) - before,
                    false => -before,
                }
            };
            requests.iter().map(change).sum()
        });
        held.collect()
    }

    /// Requests by chance, the same in each run.
    fn loads() -> impl Iterator<Item = Vec<(u32, u32)>> {
        let mut random = 1_u32;
        let mut below = move |bound: u32| {
            random = random.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            (random >> 8) % bound
        };
        (0..2000).map(move |_| {
            let num_requests = 1 + below(40);
            (0..num_requests)
                .map(|_| (1 + below(200), below(400)))
                .collect()
        })
    }

    #[test]
    fn the_peak_is_near_that_of_every_step() {
        for requests in loads() {
            let peak = forecast(&requests, true).peak() as i64;
            let exact = held_in_steps(&requests)
                .into_iter()
                .max()
                .unwrap_or(0)
                .max(0);
            // Off by half a page a request, and by an eighth of the steps of those that grow.
            let num_requests = requests.len() as i64;
            let steps = requests.iter().map(|&(_, num_steps)| i64::from(num_steps));
            let num_grown = steps.sum::<i64>() / i64::from(PAGE_SIZE);
            let slack = num_requests / 2 + 1;
            assert!(peak >= exact - slack, "{peak} instead of {exact}");
            assert!(
                peak <= exact + slack + num_grown / 8,
                "{peak} instead of {exact}"
            );
        }
    }

    #[test]
    fn what_is_taken_back_was_never_there() {
        for mut requests in loads() {
            let other = demand(requests.pop().unwrap_or_default());
            let mut forecast = forecast(&requests, true);
            let before = forecast.peak();
            let with = forecast.peak_with(&other);
            assert_eq!(forecast.peak(), before);
            forecast.add(&other);
            assert_eq!(forecast.peak(), with);
        }
    }

    /// By hand, in pages of 4 rows. a has 2 pages and ends after 8 steps with 2 more; b has 3 and
    /// ends after 40 with 10 more. At the end of a they have taken 2 + 2, and give 4 back.
    #[test]
    fn what_ends_first_gives_room_to_what_goes_on() {
        let (a, b) = ((8, 8), (12, 40));
        let both = forecast(&[a, b], true);
        assert_eq!(both.peak(), 8);
        assert_eq!(forecast(&[a, b], false).peak(), 12);
        assert_eq!(both.pages_after(8), 0);
        assert_eq!(both.pages_after(7), 0);
        assert_eq!(both.pages_after(40), -5);
        // Of 4 pages 4 are left when a has ended, 5 only when b has, too.
        assert_eq!(both.first_step_with(4, 4), 8);
        assert_eq!(both.first_step_with(5, 4), 40);
    }

    /// Nine requests whose ends are only expected, of 12 pages each to come: a third of 108 / √9
    /// is kept beside them, and nothing beside one alone.
    #[test]
    fn pages_are_kept_for_what_is_only_expected() {
        let uncertain = PageDemand {
            is_certain: false,
            ..demand((4, 48))
        };
        let mut forecast = PageForecast::new(PAGE_SIZE, true);
        forecast.add(&uncertain);
        assert_eq!(forecast.peak(), 12);
        for _ in 1..9 {
            forecast.add(&uncertain);
        }
        assert_eq!(forecast.peak(), 108 + 12);
    }
}
