//! Counts the uses of a server, so that an unused server can end.

use std::time::Duration;

use tokio::sync::watch;
use tokio::time::sleep;

/// A number that others can watch. Clones share the number.
#[derive(Clone, Default)]
pub struct Count(watch::Sender<usize>);

impl Count {
    /// Counts one more until the returned value is dropped.
    pub fn begin(&self) -> Counted {
        self.0.send_modify(|num| *num += 1);
        Counted(self.clone())
    }
}

pub struct Counted(Count);

impl Drop for Counted {
    fn drop(&mut self) {
        self.0.0.send_modify(|num| *num -= 1);
    }
}

#[derive(Default)]
pub struct UseCount {
    /// Requests and batches, without probes.
    pub uses: Count,
    /// Connections whose first request has no answer yet. Such a connection may become a use, but is not one yet.
    pub newcomers: Count,
}

impl UseCount {
    /// Returns when there was no use for this long, and no newcomer is left.
    pub async fn unused_for(&self, period: Duration) {
        let mut uses = self.uses.0.subscribe();
        let mut newcomers = self.newcomers.0.subscribe();
        loop {
            // The waits cannot fail, because `self` has the senders.
            let _ = uses.wait_for(|&num| num == 0).await;
            let quiet = async {
                sleep(period).await;
                let _ = newcomers.wait_for(|&num| num == 0).await;
            };
            tokio::select! {
                biased;
                // A use that has already ended again counts, too.
                _ = uses.changed() => {}
                () = quiet => return,
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::future::poll_fn;
    use std::pin::pin;
    use std::task::Poll;

    use super::*;

    /// Polls once, and returns whether the future has ended.
    async fn has_ended(mut future: impl Future<Output = ()> + Unpin) -> bool {
        poll_fn(|context| Poll::Ready(std::pin::Pin::new(&mut future).poll(context).is_ready()))
            .await
    }

    #[tokio::test]
    async fn a_server_is_unused_when_its_last_use_has_ended() {
        let count = UseCount::default();
        let [first, second] = [count.uses.begin(), count.uses.begin()];
        let mut unused = pin!(count.unused_for(Duration::ZERO));
        assert!(!has_ended(unused.as_mut()).await);
        drop(first);
        assert!(!has_ended(unused.as_mut()).await);
        drop(second);
        unused.await;
    }

    #[tokio::test]
    async fn a_use_within_the_period_starts_it_again() {
        let count = UseCount::default();
        let mut unused = pin!(count.unused_for(Duration::from_secs(3600)));
        assert!(!has_ended(unused.as_mut()).await);
        drop(count.uses.begin());
        let last = count.uses.begin();
        assert!(!has_ended(unused.as_mut()).await);
        drop(last);
        assert!(!has_ended(unused.as_mut()).await);
    }

    #[tokio::test]
    async fn a_newcomer_delays_the_end_until_its_request_is_known() {
        let count = UseCount::default();
        let newcomer = count.newcomers.begin();
        let mut unused = pin!(count.unused_for(Duration::ZERO));
        assert!(!has_ended(unused.as_mut()).await);
        // A period that began later is over.
        UseCount::default().unused_for(Duration::ZERO).await;
        assert!(!has_ended(unused.as_mut()).await);
        let its_request = count.uses.begin();
        drop(newcomer);
        assert!(!has_ended(unused.as_mut()).await);
        drop(its_request);
        unused.await;
    }
}
