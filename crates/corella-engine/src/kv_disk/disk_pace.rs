//! The measured paces of the disks.

use corella_core::session::{BlockOffer, FetchPace};

/// The pace of each disk, for pages.
#[derive(Debug)]
pub(super) struct DiskPaces(Vec<FetchPace>);

impl DiskPaces {
    pub fn new(num_disks: usize) -> Self {
        Self(vec![FetchPace::default(); num_disks])
    }

    /// Records the time in which a disk has read `num_pages` pages.
    pub fn note(&mut self, disk: usize, num_pages: u32, elapsed_us: u64) {
        self.0[disk].note_load(num_pages, elapsed_us);
    }

    /// The pace of offered blocks that have so many pages on each disk, and the disk that takes the longest. Disks read
    /// at the same time.
    pub fn pace_of(&self, counts: &[u32], offer: BlockOffer) -> (FetchPace, usize) {
        let times = self.0.iter().zip(counts);
        let times = times.map(|(pace, &num_pages)| pace.load_us(num_pages));
        let (mut slowest, mut longest_us) = (0, 0);
        for (disk, time_us) in times.enumerate() {
            if time_us > longest_us {
                (slowest, longest_us) = (disk, time_us);
            }
        }
        let mut pace = FetchPace::default();
        pace.note_load(offer.num_offered - offer.num_here, longest_us);
        (pace, slowest)
    }

    /// The time in which a disk reads 1,024 pages.
    #[cfg(test)]
    pub fn kilopage_us(&self, disk: usize) -> u64 {
        self.0[disk].kiloblock_us()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_disk_that_ends_last_counts() {
        let mut paces = DiskPaces::new(3);
        let offer = BlockOffer {
            num_blocks: 12,
            num_here: 2,
            num_offered: 12,
        };
        // The first read always happens.
        let (pace, slowest) = paces.pace_of(&[4, 8, 8], offer);
        assert_eq!((pace.load_us(10), slowest), (0, 0));
        paces.note(0, 10, 5_000);
        paces.note(1, 10, 3_000);
        let (pace, slowest) = paces.pace_of(&[4, 8, 8], offer);
        assert_eq!((pace.load_us(10), slowest), (2_400, 1));
        let (pace, slowest) = paces.pace_of(&[6, 8, 8], offer);
        assert_eq!((pace.load_us(10), slowest), (3_000, 0));
    }
}
