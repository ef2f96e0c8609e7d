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
}

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
            num_kept_pages: 0,
        }
    }

    pub fn clear(&mut self) {
        self.cohorts[..self.num_cohorts].fill(Cohort::default());
        self.num_cohorts = 0;
        self.total = Cohort::default();
        self.num_kept_pages = 0;
    }

    /// The peak with one more request.
    pub fn peak_with(&mut self, demand: &PageDemand) -> usize {
        let at = log_bucket(demand.num_steps);
        let before = (self.cohorts[at], self.num_cohorts, self.total, self.num_kept_pages);
        self.add(demand);
        let peak = self.peak();
        (self.cohorts[at], self.num_cohorts, self.total, self.num_kept_pages) = before;
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
        self.num_cohorts = self.num_cohorts.max(at + 1);
    }

    /// Pages beyond those held now that must be there for those counted, at the step that wants
    /// the most of them.
    pub fn peak(&self) -> usize {
        if !self.is_timed {
            return self.num_kept_pages as usize;
        }
        let stations = self.stations().map(|station| station.before);
        stations.max().unwrap_or(0).max(0) as usize
    }

    /// The first step behind which at least `num_pages` of `num_available` are left.
    pub fn first_step_with(&self, num_pages: usize, num_available: usize) -> u32 {
        let is_there = |station: &Station| {
            station.after + num_pages as i64 <= num_available as i64
        };
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
        cohorts.filter(|cohort| cohort.num_requests > 0).map(move |cohort| {
            later.num_requests -= cohort.num_requests;
            later.num_free_rows -= cohort.num_free_rows;
            later.num_future_pages -= cohort.num_future_pages;
            // On average a request has half a page begun.
            let num_rows = later.num_requests * (i64::from(cohort.last_step) + self.page_size / 2)
                - later.num_free_rows;
            let num_grown = (num_rows / self.page_size).clamp(0, later.num_future_pages);
            let before = num_grown + cohort.num_future_pages - num_given_back;
            let num_own_pages = cohort.num_own_pages + cohort.num_future_pages;
            num_given_back += num_own_pages;
            Station {
                step: cohort.last_step,
                before,
                after: before - num_own_pages,
            }
        })
    }
}
