//! The core's [`ExportTable`] with a clock, and with the connections of its waiting loads.

use std::sync::Arc;
use std::time::{Duration, Instant};

use corella_core::Incarnation;
use corella_core::session::{
    ExportEnd, ExportRefusal, ExportTable, ExportTableConfig, ExportTableStats, Loaded, SessionKey,
};

use super::connection_queue::{ConnectionId, ConnectionQueue};
use super::frame::{Frame, LoadFrame, Refusal};
use super::outgoing::Outgoing;
use super::sender_config::SenderConfig;

/// The exports of a sender, and the loads that wait for an export. The number of each is limited.
pub struct TimedExports {
    exports: ExportTable<Arc<Outgoing>, WaitingLoad>,
    start: Instant,
}

struct WaitingLoad {
    connection: Arc<ConnectionQueue>,
    load: LoadFrame,
}

impl WaitingLoad {
    fn is(&self, connection: ConnectionId, load_id: u64) -> bool {
        self.load.load_id == load_id && self.connection.id == connection
    }

    fn refuse(&self, reason: Refusal) {
        self.connection.remove_load(self.load.load_id);
        self.connection.send(&Frame::Failed {
            load_id: self.load.load_id,
            reason,
        });
    }
}

/// The outcome of a load.
pub enum Lookup {
    Exported(Arc<Outgoing>),
    Refused(Refusal),
    /// The load waits. The task that watches the deadlines must look again.
    Waits,
}

impl TimedExports {
    pub fn new(config: &SenderConfig) -> Self {
        Self {
            exports: ExportTable::new(ExportTableConfig {
                incarnation: Incarnation(config.incarnation),
                max_exports: config.max_exported,
                max_waiting_loads: config.max_waiting_loads,
                tombstone_us: micros(config.tombstone_time),
                max_tombstones: config.max_tombstones,
            }),
            start: Instant::now(),
        }
    }

    pub fn get(&self, key: &SessionKey) -> Option<&Arc<Outgoing>> {
        self.exports.get(*key)
    }

    /// Exports a session and serves the load that waits for it. The error says why it cannot be stored.
    pub fn insert(&mut self, outgoing: Arc<Outgoing>, now: Instant) -> Result<(), Refusal> {
        let now_us = self.time_us(now);
        let exported = self.exports.export(outgoing.key, outgoing.clone(), now_us);
        if let Some(waiting) = exported.map_err(Refusal::from)? {
            waiting.connection.remove_load(waiting.load.load_id);
            outgoing.serve(&waiting.connection, &waiting.load);
        }
        Ok(())
    }

    pub fn remove(
        &mut self,
        key: &SessionKey,
        end: ExportEnd,
        now: Instant,
    ) -> Option<Arc<Outgoing>> {
        let now_us = self.time_us(now);
        let (outgoing, waiting) = self.exports.end(*key, end, now_us);
        if let Some(waiting) = waiting {
            waiting.refuse(end.into());
        }
        outgoing
    }

    pub fn look_up(
        &mut self,
        connection: &Arc<ConnectionQueue>,
        load: LoadFrame,
        deadline: Instant,
        now: Instant,
    ) -> Lookup {
        let (deadline_us, now_us) = (self.time_us(deadline), self.time_us(now));
        let (key, load_id) = (load.key, load.load_id);
        let waiting = || WaitingLoad {
            connection: connection.clone(),
            load,
        };
        match self.exports.load(key, deadline_us, now_us, waiting) {
            Ok(Loaded::Exported(outgoing)) => Lookup::Exported(outgoing.clone()),
            Ok(Loaded::Waits { replaced }) => {
                if let Some(older) = replaced {
                    older.refuse(Refusal::Superseded);
                }
                if connection.add_load(load_id, key) {
                    return Lookup::Waits;
                }
                self.cancel(connection.id, load_id, &key);
                Lookup::Refused(Refusal::Busy)
            }
            Err(refusal) => Lookup::Refused(refusal.into()),
        }
    }

    /// Refuses the loads whose deadline has passed, and returns the next deadline.
    pub fn expire(&mut self, now: Instant) -> Option<Instant> {
        let now_us = self.time_us(now);
        while let Some((_, waiting)) = self.exports.poll_late_load(now_us) {
            waiting.refuse(Refusal::NotExported);
        }
        let next_us = self.exports.poll_timeout()?;
        Some(self.start + Duration::from_micros(next_us))
    }

    /// Cancels a load; the receiver may ask again.
    pub fn cancel(&mut self, connection: ConnectionId, load_id: u64, key: &SessionKey) {
        self.exports
            .cancel(*key, |waiting| waiting.is(connection, load_id));
    }

    pub fn clear(&mut self) -> Vec<Arc<Outgoing>> {
        self.exports.clear().collect()
    }

    pub fn stats(&mut self, now: Instant) -> ExportTableStats {
        let now_us = self.time_us(now);
        self.exports.stats(now_us)
    }

    fn time_us(&self, at: Instant) -> u64 {
        micros(at.saturating_duration_since(self.start))
    }
}

fn micros(time: Duration) -> u64 {
    u64::try_from(time.as_micros()).unwrap_or(u64::MAX)
}

impl From<ExportEnd> for Refusal {
    fn from(end: ExportEnd) -> Self {
        match end {
            ExportEnd::NotExported => Self::NotExported,
            ExportEnd::Deleted => Self::Gone,
            ExportEnd::Failed => Self::Failed,
        }
    }
}

impl From<ExportRefusal> for Refusal {
    fn from(refusal: ExportRefusal) -> Self {
        match refusal {
            ExportRefusal::Over(end) => end.into(),
            ExportRefusal::OtherIncarnation => Self::OtherIncarnation,
            ExportRefusal::Duplicate | ExportRefusal::Full => Self::Busy,
        }
    }
}
