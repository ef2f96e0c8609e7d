//! The loop's answer to one question, for which an async caller waits.

use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, Waker};

/// The caller's end: a future. `None` when the loop has ended.
pub(crate) struct Answer<T> {
    mailbox: Arc<Mailbox<T>>,
    /// Undoes the effect of an answer that came after the caller had given up.
    undo: Option<Box<dyn FnOnce(T) + Send>>,
}

/// The loop's end. Dropped without an answer, it ends the wait.
pub(crate) struct Reply<T>(Arc<Mailbox<T>>);

struct Mailbox<T>(Mutex<Inner<T>>);

struct Inner<T> {
    answer: Option<T>,
    waker: Option<Waker>,
    /// The loop has answered, or never will.
    is_closed: bool,
    is_abandoned: bool,
}

/// Makes both ends of a question. If a caller gives up before an answer that changed the engine, `undo` gets the
/// answer, or [`Reply::send`] returns it.
pub(crate) fn question<T>(undo: impl FnOnce(T) + Send + 'static) -> (Reply<T>, Answer<T>) {
    let mailbox = Arc::new(Mailbox(Mutex::new(Inner {
        answer: None,
        waker: None,
        is_closed: false,
        is_abandoned: false,
    })));
    let answer = Answer {
        mailbox: mailbox.clone(),
        undo: Some(Box::new(undo)),
    };
    (Reply(mailbox), answer)
}

impl<T> Mailbox<T> {
    fn lock(&self) -> MutexGuard<'_, Inner<T>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl<T> Reply<T> {
    /// Returns the answer if the caller has given up.
    pub fn send(self, answer: T) -> Result<(), T> {
        let mut inner = self.0.lock();
        if inner.is_abandoned {
            return Err(answer);
        }
        inner.answer = Some(answer);
        Ok(())
    }
}

impl<T> Drop for Reply<T> {
    fn drop(&mut self) {
        let mut inner = self.0.lock();
        inner.is_closed = true;
        let waker = inner.waker.take();
        drop(inner);
        if let Some(waker) = waker {
            waker.wake();
        }
    }
}

impl<T> Future for Answer<T> {
    type Output = Option<T>;

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<T>> {
        let mut inner = self.mailbox.lock();
        if inner.is_closed {
            return Poll::Ready(inner.answer.take());
        }
        inner.waker = Some(cx.waker().clone());
        Poll::Pending
    }
}

impl<T> Drop for Answer<T> {
    fn drop(&mut self) {
        let mut inner = self.mailbox.lock();
        inner.is_abandoned = true;
        let missed = inner.answer.take();
        drop(inner);
        if let (Some(missed), Some(undo)) = (missed, self.undo.take()) {
            undo(missed);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn poll<T>(answer: &mut Answer<T>) -> Poll<Option<T>> {
        Pin::new(answer).poll(&mut Context::from_waker(Waker::noop()))
    }

    /// Whenever the asker gives up, exactly one of the two ends gets the answer.
    #[test]
    fn an_answer_is_taken_or_taken_back() {
        let undone = Arc::new(Mutex::new(Vec::new()));
        let ask = || {
            let undone = undone.clone();
            question(move |answer: u32| undone.lock().unwrap().push(answer))
        };

        let (reply, mut answer) = ask();
        assert_eq!(poll(&mut answer), Poll::Pending);
        assert_eq!(reply.send(1), Ok(()));
        assert_eq!(poll(&mut answer), Poll::Ready(Some(1)));
        drop(answer);
        assert!(undone.lock().unwrap().is_empty());

        let (reply, answer) = ask();
        drop(answer);
        assert_eq!(reply.send(2), Err(2));
        assert!(undone.lock().unwrap().is_empty());

        let (reply, answer) = ask();
        assert_eq!(reply.send(3), Ok(()));
        drop(answer);
        assert_eq!(*undone.lock().unwrap(), [3]);

        let (reply, mut answer) = ask();
        drop(reply);
        assert_eq!(poll(&mut answer), Poll::Ready(None));
    }
}
