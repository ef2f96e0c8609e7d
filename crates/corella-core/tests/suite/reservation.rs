//! The count of the reservations that a node has granted.

use corella_core::{Request, RequestId, Scheduler, SchedulerConfig};

/// From these numbers other nodes know which of their requests a report counts.
#[test]
fn each_granted_reservation_has_the_next_number() {
    let mut scheduler = Scheduler::new(SchedulerConfig::new(4, 4, 64)).unwrap();
    let mut reserve = |id: u64, num_rows: u32| {
        let prompt = (0..num_rows).map(|token| 100 * id as u32 + token);
        let request = Request::greedy(RequestId(id), prompt.collect(), 1);
        let granted = scheduler.reserve(request, 9000);
        let granted_as = granted.ok().map(|reservation| reservation.granted_as);
        (granted_as, scheduler.stats().num_reservations)
    };
    assert_eq!(reserve(1, 4), (Some(1), 1));
    assert_eq!(reserve(2, 8), (Some(2), 2));
    // One page of four is left.
    assert_eq!(reserve(3, 8), (None, 2));
    assert_eq!(reserve(4, 4), (Some(3), 3));
}
