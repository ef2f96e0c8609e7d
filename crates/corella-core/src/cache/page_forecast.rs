//! Forecasts the most pages that the running requests will hold at once in later steps.
//!
//! The forecast is kept from step to step. A clock counts turns: in a turn, every decoding request fills one row. Each
//! running request is counted by numbers that the clock does not change: the turn in which it will fill its last row,
//! and its number of rows minus the number of turns so far. So a step in which every request decodes only advances the
//! clock, and a page that a request takes changes only the sum of the pages held.

use alloc::vec::Vec;

/// The pages that one request holds now, and is expected to need before it ends.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct PageDemand {
    pub num_rows: u32,
    /// Rows that the request is expected to fill before it ends, one a turn.
    pub num_steps: u32,
    /// Pages that the request holds, or takes when it starts.
    pub num_held_pages: u32,
    /// Pages that the request is expected to hold when it ends, at least `num_held_pages`.
    pub num_final_pages: u32,
    /// The final pages of groups with windows. Their number does not grow with the rows.
    pub num_window_pages: u32,
    /// Pages that other requests still hold when this one ends.
    pub num_shared_pages: u32,
    /// Pages that `HeadRoom::Limit` or `HeadRoom::Share` keeps for the request, whenever it may need them.
    pub num_kept_pages: u32,
    /// Whether the request's end is known and not predicted.
    pub is_certain: bool,
}

impl PageDemand {
    /// Pages that the request is expected to take from now on.
    pub fn num_future_pages(&self) -> u32 {
        self.num_final_pages - self.num_held_pages
    }
}

/// The numbers that one request adds to a forecast. The request keeps them, so that exactly these numbers are
/// subtracted later.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Contribution {
    /// The turn in which the request ends.
    end: u64,
    /// The last turn of its cohort's window.
    window_end: u64,
    /// The request's number of rows minus the turns of the clock.
    first_rows: i64,
    num_final_pages: i64,
    num_window_pages: i64,
    num_shared_pages: i64,
    is_certain: bool,
    /// With more rows than this, the request is counted anew.
    pub max_rows: u32,
}

/// A request is counted anew when it has filled half of the rows that it was expected to fill, or this number of rows.
/// By then its end is so much nearer that a narrower window is due. Counting anew also corrects for rows that drafts
/// have added and for turns that the request has missed.
const MAX_UNCOUNTED_ROWS: u32 = 64;

/// A window is an eighth as long as the time to its end, or less.
const WINDOW_BITS: u32 = 3;

/// The error of a predicted length is about as large as the length, so the error of a sum over n requests is the sum
/// divided by √n. A third of that error is kept as a margin. Replays of traces were fastest with it: a larger margin
/// leaves pages idle, and a smaller one leads to more preemptions.
const MARGIN_DIVISOR: u64 = 3;

/// Forecasts the most pages that the running requests will hold at any later step, beyond those held now.
///
/// A request that ends gives back pages, which others then take. So the peak of the requests' pages is far below the
/// sum of the pages that all of them will need. As in the Past-Future scheduler (Gong et al., ASPLOS 2025), the number
/// of pages held is largest just before some request ends, so only the ends count, in their order. Requests that end at
/// about the same time form a cohort, which ends with the last of them.
#[derive(Clone, Debug, Default)]
pub(crate) struct PageForecast {
    page_size: i64,
    /// The number of KV groups whose pages grow with the rows of a request.
    num_growing_groups: i64,
    /// Whether pages that one request gives back count for the others. If not, the forecast adds up the pages kept for
    /// all requests.
    is_timed: bool,
    /// The number of turns so far.
    clock: u64,
    /// Rows filled in the current turn.
    num_turn_rows: usize,
    /// The cohorts by the ends of their windows. Two windows overlap only if one contains the other.
    cohorts: Vec<Cohort>,
    total: Cohort,
    num_held_pages: i64,
    /// Sums over the requests whose lengths are predicted.
    uncertain: UncertainPages,
    num_kept_pages: i64,
}

/// The requests whose ends lie in one window.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Cohort {
    window_end: u64,
    /// No request of the cohort ends after this turn.
    end: u64,
    num_requests: i64,
    first_rows: i64,
    num_final_pages: i64,
    num_window_pages: i64,
    num_shared_pages: i64,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct UncertainPages {
    num_requests: i64,
    num_held_pages: i64,
    num_final_pages: i64,
}

/// The time at which the last request of a cohort ends.
#[derive(Clone, Copy, Debug)]
struct Station {
    /// The number of turns from now.
    num_steps: u32,
    /// Pages held just before the cohort gives back its pages, less the pages held now.
    before: i64,
    /// The same just after the cohort has given back its pages.
    after: i64,
}

impl Cohort {
    fn count(&mut self, request: &Contribution, sign: i64) {
        self.num_requests += sign;
        self.first_rows += sign * request.first_rows;
        self.num_final_pages += sign * request.num_final_pages;
        self.num_window_pages += sign * request.num_window_pages;
        self.num_shared_pages += sign * request.num_shared_pages;
    }
}

impl PageForecast {
    pub fn new(page_size: u32, num_growing_groups: u32, is_timed: bool) -> Self {
        Self {
            page_size: page_size.into(),
            num_growing_groups: num_growing_groups.into(),
            is_timed,
            ..Self::default()
        }
    }

    /// Records that a step computes a row for `num_decodes` of the `num_decoding` requests that decode.
    pub fn advance(&mut self, num_decodes: usize, num_decoding: usize) {
        self.num_turn_rows += num_decodes;
        if self.num_turn_rows >= num_decoding {
            self.num_turn_rows -= num_decoding;
            self.clock += u64::from(num_decoding > 0);
        }
    }

    pub fn note_taken(&mut self, num_pages: usize, is_certain: bool) {
        self.num_held_pages += num_pages as i64;
        if !is_certain {
            self.uncertain.num_held_pages += num_pages as i64;
        }
    }

    pub fn note_given_back(&mut self, num_pages: usize, is_certain: bool) {
        self.num_held_pages -= num_pages as i64;
        if !is_certain {
            self.uncertain.num_held_pages -= num_pages as i64;
        }
    }

    /// Sets the number of pages that `HeadRoom::Limit` or `HeadRoom::Share` keeps for all requests.
    pub fn keep_pages(&mut self, num_pages: usize) {
        self.num_kept_pages = num_pages as i64;
    }

    pub fn drop_kept_pages(&mut self, num_pages: usize) {
        self.num_kept_pages -= num_pages as i64;
    }

    /// Pages that the forecast counts for one request beyond the pages that the request holds.
    pub fn num_own_pages(&self, demand: &PageDemand) -> usize {
        match self.is_timed {
            true => demand.num_future_pages() as usize,
            false => demand.num_kept_pages as usize,
        }
    }

    /// The peak if one more request ran.
    pub fn peak_with(&mut self, demand: &PageDemand) -> usize {
        let request = self.contribution(demand);
        let found = self.cohort_at(request.window_end).ok();
        let cohort = found.map(|at| self.cohorts[at]);
        self.add(demand);
        let peak = self.peak();
        self.remove(&request, demand.num_held_pages as usize);
        self.drop_kept_pages(demand.num_kept_pages as usize);
        if let (Some(at), Some(cohort)) = (found, cohort) {
            self.cohorts[at] = cohort;
        }
        peak
    }

    pub fn add(&mut self, demand: &PageDemand) -> Contribution {
        let request = self.contribution(demand);
        self.num_kept_pages += i64::from(demand.num_kept_pages);
        self.count_until(request.end, &request, demand.num_held_pages.into());
        request
    }

    /// Counts a request in its cohort. The cohort ends at `end` or later.
    fn count_until(&mut self, end: u64, request: &Contribution, num_held_pages: i64) {
        let window_end = request.window_end;
        let at = self.cohort_at(window_end).unwrap_or_else(|at| {
            let cohort = Cohort {
                window_end,
                ..Cohort::default()
            };
            self.cohorts.insert(at, cohort);
            at
        });
        self.cohorts[at].end = self.cohorts[at].end.max(end);
        self.count(at, request, num_held_pages, 1);
    }

    /// Subtracts the contribution of a request that holds `num_held_pages` pages now.
    pub fn remove(&mut self, request: &Contribution, num_held_pages: usize) {
        let at = self.cohort_at(request.window_end);
        let at = at.expect("a request that is counted has a cohort");
        self.count(at, request, num_held_pages as i64, -1);
        if self.cohorts[at].num_requests == 0 {
            self.cohorts.remove(at);
        }
    }

    fn contribution(&self, demand: &PageDemand) -> Contribution {
        let end = self.clock + u64::from(demand.num_steps);
        let window_bits = demand.num_steps.max(1).ilog2().saturating_sub(WINDOW_BITS);
        let num_uncounted_rows = (demand.num_steps / 2).clamp(1, MAX_UNCOUNTED_ROWS);
        Contribution {
            end,
            window_end: end | ((1 << window_bits) - 1),
            first_rows: i64::from(demand.num_rows) - self.clock as i64,
            num_final_pages: demand.num_final_pages.into(),
            num_window_pages: demand.num_window_pages.into(),
            num_shared_pages: demand.num_shared_pages.into(),
            is_certain: demand.is_certain,
            max_rows: demand.num_rows + num_uncounted_rows,
        }
    }

    fn cohort_at(&self, window_end: u64) -> Result<usize, usize> {
        self.cohorts
            .binary_search_by_key(&window_end, |cohort| cohort.window_end)
    }

    fn count(&mut self, at: usize, request: &Contribution, num_held_pages: i64, sign: i64) {
        self.cohorts[at].count(request, sign);
        self.total.count(request, sign);
        self.num_held_pages += sign * num_held_pages;
        if !request.is_certain {
            let uncertain = &mut self.uncertain;
            uncertain.num_requests += sign;
            uncertain.num_held_pages += sign * num_held_pages;
            uncertain.num_final_pages += sign * request.num_final_pages;
        }
    }

    /// The most pages that the requests need at any step, less the pages held now.
    pub fn peak(&self) -> usize {
        if !self.is_timed {
            return self.num_kept_pages as usize;
        }
        let stations = self.stations().map(|station| station.before);
        stations.max().unwrap_or(0).max(0) as usize + self.margin()
    }

    /// The margin for predicted lengths. A request that runs alone has none, because no other request could take its
    /// pages.
    fn margin(&self) -> usize {
        let uncertain = &self.uncertain;
        if self.total.num_requests < 2 || uncertain.num_requests == 0 {
            return 0;
        }
        let num_pages = (uncertain.num_final_pages - uncertain.num_held_pages).max(0) as u64;
        let spread = num_pages / (uncertain.num_requests as u64).isqrt();
        (spread / MARGIN_DIVISOR) as usize
    }

    /// The number of steps after which `num_pages` pages are expected to be available, if `num_available` are available
    /// now. If no end of a request gives enough, the number of steps until the last one.
    pub fn num_steps_until(&self, num_pages: usize, num_available: usize) -> u32 {
        let is_there = |station: &Station| station.after + num_pages as i64 <= num_available as i64;
        let mut stations = self.stations();
        let found = stations.find(is_there).or_else(|| self.stations().last());
        found.map_or(0, |station| station.num_steps)
    }

    /// Pages held once all requests that end within `num_steps` steps have ended, less the pages held now.
    pub fn pages_after(&self, num_steps: u32) -> i64 {
        let ended = self
            .stations()
            .take_while(|station| station.num_steps <= num_steps);
        ended.last().map_or(0, |station| station.after)
    }

    fn stations(&self) -> impl Iterator<Item = Station> {
        let mut later = self.total;
        let mut at = self.clock;
        let mut num_left_pages = 0;
        self.cohorts.iter().map(move |cohort| {
            at = at.max(cohort.end);
            later.num_requests -= cohort.num_requests;
            later.first_rows -= cohort.first_rows;
            later.num_final_pages -= cohort.num_final_pages;
            later.num_window_pages -= cohort.num_window_pages;
            // On average half of a request's last page is free.
            let num_rows = later.first_rows + later.num_requests * (at as i64 + self.page_size / 2);
            // The requests that end up to here hold at most their final pages now, so the later requests hold at least
            // the rest.
            let num_others_pages = self.total.num_final_pages - later.num_final_pages;
            let num_held_now = (self.num_held_pages - num_others_pages).max(0);
            let num_row_pages = num_rows * self.num_growing_groups / self.page_size;
            let num_later_pages = (num_row_pages + later.num_window_pages)
                .max(num_held_now)
                .min(later.num_final_pages);
            let num_pages = num_later_pages + num_left_pages - self.num_held_pages;
            num_left_pages += cohort.num_shared_pages;
            Station {
                num_steps: u32::try_from(at - self.clock).unwrap_or(u32::MAX),
                before: num_pages + cohort.num_final_pages,
                after: num_pages + cohort.num_shared_pages,
            }
        })
    }

    /// # Panics
    /// When the sums differ from the requests, or a request ends outside of its cohort's window.
    pub fn check_invariants<'a>(&self, requests: impl Iterator<Item = (&'a Contribution, usize)>) {
        let mut again = Self::new(
            self.page_size as u32,
            self.num_growing_groups as u32,
            self.is_timed,
        );
        for (request, num_held_pages) in requests {
            let at = self.cohort_at(request.window_end);
            let cohort = at.map(|at| self.cohorts[at]).unwrap_or_default();
            assert!(
                request.end <= cohort.end && cohort.end <= cohort.window_end,
                "a request ends later than its cohort"
            );
            again.count_until(cohort.end, request, num_held_pages as i64);
        }
        assert_eq!(self.cohorts, again.cohorts, "cohorts of the page forecast");
        assert_eq!(self.total, again.total, "requests of the page forecast");
        assert_eq!(self.num_held_pages, again.num_held_pages, "pages held");
        assert_eq!(self.uncertain, again.uncertain, "pages of uncertain length");
    }
}

#[cfg(test)]
mod tests {
    use alloc::vec::Vec;

    use super::*;

    const PAGE_SIZE: u32 = 4;

    /// The demand of a request that has `num_rows` rows and ends after `num_steps` steps.
    fn demand((num_rows, num_steps): (u32, u32)) -> PageDemand {
        let num_pages = num_rows.div_ceil(PAGE_SIZE);
        let num_final_pages = (num_rows + num_steps).div_ceil(PAGE_SIZE);
        PageDemand {
            num_rows,
            num_steps,
            num_held_pages: num_pages,
            num_final_pages,
            num_window_pages: 0,
            num_shared_pages: 0,
            num_kept_pages: num_final_pages - num_pages,
            is_certain: true,
        }
    }

    fn forecast(requests: &[(u32, u32)], is_timed: bool) -> PageForecast {
        let mut forecast = PageForecast::new(PAGE_SIZE, 1, is_timed);
        for &request in requests {
            forecast.add(&demand(request));
        }
        forecast
    }

    /// The pages held in each step beyond those held at first, worked out step by step.
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

    /// Random sets of requests, the same in each run.
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
            assert_near(forecast(&requests, true).peak(), &requests, 8);
        }
    }

    /// The peak may be off by half a page for each request, and too high by one in `part` of the pages to come.
    fn assert_near(peak: usize, requests: &[(u32, u32)], part: i64) {
        let peak = peak as i64;
        let exact = held_in_steps(requests).into_iter().max();
        let exact = exact.unwrap_or(0).max(0);
        let steps = requests.iter().map(|&(_, num_steps)| i64::from(num_steps));
        let num_grown = steps.sum::<i64>() / i64::from(PAGE_SIZE);
        let slack = requests.len() as i64 / 2 + 1;
        assert!(peak >= exact - slack, "{peak} instead of {exact}");
        let max = exact + slack + num_grown / part;
        assert!(peak <= max, "{peak} instead of {exact}");
    }

    /// Requests are counted when they start, and anew when due. In every step the peak is near the peak worked out for
    /// the rows that the requests have in that step.
    #[test]
    fn time_shifts_nothing() {
        for requests in loads().take(100) {
            let mut kept = PageForecast::new(PAGE_SIZE, 1, true);
            let count = |forecast: &mut PageForecast, request| forecast.add(&demand(request));
            let mut counted: Vec<_> = requests
                .iter()
                .map(|&request| (request, count(&mut kept, request)))
                .collect();
            while !counted.is_empty() {
                let rows = counted.iter().map(|(request, contribution)| {
                    let (num_rows, _) = request;
                    assert!(*num_rows <= contribution.max_rows);
                    (contribution, num_rows.div_ceil(PAGE_SIZE) as usize)
                });
                kept.check_invariants(rows);
                // A window is an eighth of what was left when a request was counted, and no more
                // than half of that has passed since.
                let now: Vec<_> = counted.iter().map(|&(request, _)| request).collect();
                assert_near(kept.peak(), &now, 4);

                kept.advance(counted.len(), counted.len());
                counted.retain_mut(|((num_rows, num_steps), contribution)| {
                    let num_pages = num_rows.div_ceil(PAGE_SIZE) as usize;
                    if *num_steps == 0 {
                        kept.remove(contribution, num_pages);
                        return false;
                    }
                    *num_rows += 1;
                    *num_steps -= 1;
                    let num_pages_now = num_rows.div_ceil(PAGE_SIZE) as usize;
                    kept.note_taken(num_pages_now - num_pages, true);
                    if *num_rows >= contribution.max_rows {
                        kept.remove(contribution, num_pages_now);
                        *contribution = kept.add(&demand((*num_rows, *num_steps)));
                    }
                    true
                });
            }
            assert_eq!(kept.peak(), 0);
        }
    }

    /// Two of four requests decode in each step, so that a turn takes two steps.
    #[test]
    fn the_clock_counts_turns() {
        let mut forecast = forecast(&[(4, 8); 4], true);
        let num_pages = forecast.peak();
        for _ in 0..8 {
            forecast.advance(2, 4);
        }
        assert_eq!(forecast.clock, 4);
        assert_eq!(forecast.peak(), num_pages);
        assert_eq!(forecast.num_steps_until(0, 0), 4);
    }

    /// Worked out by hand, with pages of 4 rows: a has 2 pages and ends after 8 steps with 2 more, b has 3 pages and
    /// ends after 40 steps with 10 more. When a ends, they have taken 2 + 2 pages, and a gives back 4.
    #[test]
    fn what_ends_first_gives_room_to_what_goes_on() {
        let (a, b) = ((8, 8), (12, 40));
        let both = forecast(&[a, b], true);
        assert_eq!(both.peak(), 8);
        assert_eq!(forecast(&[a, b], false).peak(), 12);
        assert_eq!(both.pages_after(8), 0);
        assert_eq!(both.pages_after(7), 0);
        assert_eq!(both.pages_after(40), -5);
        // With 4 available pages now, 4 are available when a has ended, and 5 only when b has ended too.
        assert_eq!(both.num_steps_until(4, 4), 8);
        assert_eq!(both.num_steps_until(5, 4), 40);
    }

    /// Worked out by hand: a ends after 4 steps with 5 pages, 3 of which other requests still hold. Then b has 5 pages,
    /// and 14 when it ends. So 9 pages are needed beyond the 8 that are held now.
    #[test]
    fn shared_pages_are_not_given_back() {
        let mut forecast = forecast(&[(16, 40)], true);
        forecast.add(&PageDemand {
            num_shared_pages: 3,
            ..demand((16, 4))
        });
        assert_eq!(forecast.pages_after(4), 0);
        assert_eq!(forecast.peak(), 9);
    }

    /// Eight requests have just begun their second page. When the ninth ends at once, they hold 16 pages, and not 14,
    /// the average for their rows.
    #[test]
    fn pages_that_are_held_stay_held() {
        let mut requests = [(5, 40); 9];
        requests[0] = (4, 0);
        assert_eq!(forecast(&requests, true).pages_after(0), -1);
    }

    /// The requests have missed turns, so the clock is behind their ends. They are expected to end now, and with no
    /// more pages than predicted.
    #[test]
    fn a_request_that_is_late_ends_now() {
        let mut forecast = forecast(&[(8, 4), (8, 8)], true);
        for _ in 0..20 {
            forecast.advance(1, 1);
        }
        assert_eq!(forecast.num_steps_until(0, 0), 0);
        assert_eq!(forecast.peak(), 3);
    }

    /// Both ends, after 100 and 103 steps, lie in one window.
    #[test]
    fn asking_for_a_peak_moves_no_end() {
        let mut forecast = forecast(&[(8, 100), (8, 400)], true);
        // The first has ended, and the second has about 27 pages; 4 were held at first.
        assert_eq!(forecast.pages_after(100), 23);
        forecast.peak_with(&demand((8, 103)));
        assert_eq!(forecast.pages_after(100), 23);
    }

    /// Nine requests with predicted lengths have 12 pages each to come. The margin is a third of
    /// 108 / √9. One request alone has no margin.
    #[test]
    fn pages_are_kept_for_what_is_only_expected() {
        let uncertain = PageDemand {
            is_certain: false,
            ..demand((4, 48))
        };
        let mut forecast = PageForecast::new(PAGE_SIZE, 1, true);
        forecast.add(&uncertain);
        assert_eq!(forecast.peak(), 12);
        for _ in 1..9 {
            forecast.add(&uncertain);
        }
        assert_eq!(forecast.peak(), 108 + 12);
    }
}
