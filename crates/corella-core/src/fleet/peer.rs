//! One incarnation of another node: its health, its free pages, and the bandwidth of the link to it.

use alloc::collections::BTreeMap;

use crate::fleet::peer_table::{PeerRecord, PeerTableConfig};
use crate::pace::smooth;
use crate::{DecodeCandidate, LoadReport, NodeId, PeerStanding};

/// A node's answer to the first message and to each probe.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PeerFacts {
    pub incarnation: u64,
    pub page_size: u32,
}

/// Identifies one request of this node for pages on another node.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct ReservationId {
    pub(crate) peer_id: NodeId,
    pub(crate) number: u64,
}

#[derive(Clone, Debug)]
pub(crate) struct Peer {
    pub record: PeerRecord,
    /// Taken from the node's own `Hello`, and before that from the registry.
    pub incarnation: Option<u64>,
    pub next_probe_us: u64,
    health: Health,
    page_size: u32,
    report: Option<(LoadReport, u64)>,
    reservations: BTreeMap<u64, Reservation>,
    num_unreported_pages: u32,
    next_reservation: u64,
    /// Bytes per second, smoothed; 0 before the first measurement.
    bandwidth: u64,
    measured_us: u64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Health {
    Healthy { num_failures: u32 },
    Suspect { retry_us: u64 },
    Incompatible,
}

#[derive(Clone, Debug)]
struct Reservation {
    num_pages: u32,
    /// The node's count of granted reservations including this one; `None` until the node has granted it.
    granted_as: Option<u64>,
    is_reported: bool,
}

impl Peer {
    /// A node is suspect until its first answer.
    pub fn new(record: PeerRecord, now_us: u64, config: &PeerTableConfig) -> Self {
        Self {
            incarnation: record.incarnation,
            record,
            next_probe_us: now_us,
            health: Health::Suspect {
                retry_us: config.min_retry_us,
            },
            page_size: 0,
            report: None,
            reservations: BTreeMap::new(),
            num_unreported_pages: 0,
            next_reservation: 0,
            bandwidth: 0,
            measured_us: 0,
        }
    }

    pub fn standing(&self) -> PeerStanding {
        let says_so = self.report.is_some_and(|(report, _)| report.is_draining);
        match self.health {
            Health::Incompatible => PeerStanding::Incompatible,
            Health::Suspect { .. } => PeerStanding::Suspect,
            Health::Healthy { .. } if says_so || self.record.is_draining => PeerStanding::Draining,
            Health::Healthy { .. } => PeerStanding::Healthy,
        }
    }

    /// The node as placement sees it. The caller adds the number of a request's rows that the node's prefix tree has.
    pub fn decode_node(
        &self,
        peer_id: NodeId,
        now_us: u64,
        config: &PeerTableConfig,
    ) -> DecodeCandidate {
        let is_measured = self.bandwidth > 0 && !self.is_measurement_old(now_us, config);
        let reported_us = self.report.map_or(0, |(_, reported_us)| reported_us);
        DecodeCandidate {
            peer_id,
            standing: self.standing(),
            page_size: self.page_size,
            // The node's own answer is newer than its record, and some registries know only addresses.
            max_prompt_tokens: { self.report.and_then(|(report, _)| report.max_prompt_tokens) }
                .unwrap_or(self.record.max_prompt_tokens),
            report: self.report.map(|(report, _)| report),
            report_age_us: now_us.saturating_sub(reported_us),
            num_unreported_pages: self.num_unreported_pages,
            bandwidth: is_measured.then_some(self.bandwidth),
            num_cached_rows: 0,
        }
    }

    /// The time between two probes.
    pub fn probe_interval_us(&self, config: &PeerTableConfig) -> u64 {
        match self.health {
            Health::Healthy { .. } => config.probe_interval_us,
            Health::Suspect { retry_us } => retry_us,
            Health::Incompatible => config.incompatible_interval_us,
        }
    }

    pub fn handle_hello(&mut self, hello: PeerFacts) {
        self.incarnation = Some(hello.incarnation);
        self.page_size = hello.page_size;
        self.health = Health::Healthy { num_failures: 0 };
    }

    pub fn handle_incompatible(&mut self, now_us: u64, config: &PeerTableConfig) {
        self.health = Health::Incompatible;
        self.next_probe_us = now_us + config.incompatible_interval_us;
    }

    /// Records a probe without an answer. A single silent probe may be due to a lost packet.
    pub fn handle_silent(&mut self, now_us: u64, config: &PeerTableConfig) {
        match &mut self.health {
            Health::Healthy { num_failures } => {
                *num_failures += 1;
                if *num_failures >= config.max_failed_probes {
                    self.suspect(now_us, config);
                }
            }
            Health::Suspect { retry_us } => {
                *retry_us = (*retry_us * 2).min(config.max_retry_us);
            }
            Health::Incompatible => {}
        }
    }

    /// Marks the node as suspect until it answers a probe, because a session with it broke off.
    pub fn suspect(&mut self, now_us: u64, config: &PeerTableConfig) {
        if matches!(self.health, Health::Healthy { .. }) {
            self.health = Health::Suspect {
                retry_us: config.min_retry_us,
            };
            self.next_probe_us = now_us + config.min_retry_us;
        }
    }

    pub fn handle_report(&mut self, report: LoadReport, now_us: u64) {
        let is_late = self
            .report
            .is_some_and(|(newest, _)| report.num_reservations < newest.num_reservations);
        if is_late {
            return;
        }
        self.report = Some((report, now_us));
        for reservation in self.reservations.values_mut() {
            let is_counted = reservation
                .granted_as
                .is_some_and(|number| number <= report.num_reservations);
            if is_counted && !reservation.is_reported {
                reservation.is_reported = true;
                self.num_unreported_pages -= reservation.num_pages;
            }
        }
    }

    pub fn reserve(&mut self, num_pages: u32) -> u64 {
        let number = self.next_reservation;
        self.next_reservation += 1;
        // No pool is this large; the bound only keeps the sum from overflowing.
        let num_pages = num_pages.min(u32::MAX - self.num_unreported_pages);
        self.num_unreported_pages += num_pages;
        let reservation = Reservation {
            num_pages,
            granted_as: None,
            is_reported: false,
        };
        self.reservations.insert(number, reservation);
        number
    }

    pub fn handle_granted(&mut self, number: u64, granted_as: u64) {
        let num_reported = self.report.map_or(0, |(report, _)| report.num_reservations);
        if let Some(reservation) = self.reservations.get_mut(&number) {
            reservation.granted_as = Some(granted_as);
            if granted_as <= num_reported && !reservation.is_reported {
                reservation.is_reported = true;
                self.num_unreported_pages -= reservation.num_pages;
            }
        }
    }

    pub fn release(&mut self, number: u64) {
        let released = self.reservations.remove(&number);
        if let Some(reservation) = released.filter(|reservation| !reservation.is_reported) {
            self.num_unreported_pages -= reservation.num_pages;
        }
    }

    /// Returns whether the speed of the link was unknown before.
    pub fn handle_transfer(
        &mut self,
        num_bytes: u64,
        elapsed_ns: u64,
        now_us: u64,
        config: &PeerTableConfig,
    ) -> bool {
        if self.is_measurement_old(now_us, config) {
            self.bandwidth = 0;
        }
        let was_unknown = self.bandwidth == 0;
        let bandwidth = u128::from(num_bytes) * 1_000_000_000 / u128::from(elapsed_ns.max(1));
        smooth(
            &mut self.bandwidth,
            // `smooth` multiplies by seven; a petabyte per second leaves room for that.
            bandwidth.clamp(1, 1 << 50) as u64,
        );
        self.measured_us = now_us;
        was_unknown
    }

    /// Bytes per second, smoothed; 0 before the first measurement.
    pub fn bandwidth(&self) -> u64 {
        self.bandwidth
    }

    /// Whether the measurement is too old to count, so that a link that was slow once gets another chance.
    fn is_measurement_old(&self, now_us: u64, config: &PeerTableConfig) -> bool {
        now_us.saturating_sub(self.measured_us) > config.bandwidth_lifetime_us
    }
}
