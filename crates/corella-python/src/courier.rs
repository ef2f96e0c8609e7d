//! The only thread that enters Python by itself: it passes items to callbacks, so that the threads that serve requests
//! never wait for Python's lock.

use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Mutex, PoisonError};
use std::thread::JoinHandle;

use pyo3::prelude::*;

use crate::job::Item;

/// The courier's thread, which the first delivery starts.
static COURIER: Mutex<State> = Mutex::new(State::Asleep);

enum State {
    Asleep,
    Awake {
        sender: Sender<Message>,
        thread: JoinHandle<()>,
        /// The process that has the thread. A fork has a copy of this state, but no thread.
        process: u32,
    },
    Stopped,
}

impl State {
    /// In a fork, forgets the parent process's thread, which the fork does not have.
    fn leave_fork(&mut self) {
        if let Self::Awake { process, .. } = self
            && *process != std::process::id()
        {
            std::mem::forget(std::mem::replace(self, Self::Asleep));
        }
    }
}

enum Message {
    Deliver(Delivery),
    Stop,
}

/// An item for a callback. Each job has at most one waiting delivery, so there are no more deliveries than jobs.
pub struct Delivery {
    pub callback: Py<PyAny>,
    /// `None` at the end of a job.
    pub item: Option<Item>,
}

/// Calls the callback with the item, soon. Has no effect after [`stop`].
pub fn deliver(delivery: Delivery) {
    let mut state = COURIER.lock().unwrap_or_else(PoisonError::into_inner);
    state.leave_fork();
    if let State::Asleep = *state {
        let (sender, receiver) = channel();
        let thread = std::thread::Builder::new()
            .name("corella-courier".to_owned())
            .spawn(move || run(&receiver));
        match thread {
            Ok(thread) => {
                let process = std::process::id();
                *state = State::Awake {
                    sender,
                    thread,
                    process,
                };
            }
            Err(error) => eprintln!("corella: cannot start a thread: {error}"),
        }
    }
    if let State::Awake { sender, .. } = &*state {
        // Sending fails if the thread has found that Python has ended. No caller waits then.
        let _ = sender.send(Message::Deliver(delivery));
    }
}

/// Ends the thread, and waits for its end. Must be called before Python ends, without holding Python's lock.
pub fn stop() {
    let mut state = COURIER.lock().unwrap_or_else(PoisonError::into_inner);
    state.leave_fork();
    let before = std::mem::replace(&mut *state, State::Stopped);
    drop(state);
    if let State::Awake { sender, thread, .. } = before {
        let _ = sender.send(Message::Stop);
        let _ = thread.join();
    }
}

fn run(messages: &Receiver<Message>) {
    while let Ok(first) = messages.recv() {
        let waiting: Vec<Message> = std::iter::once(first).chain(messages.try_iter()).collect();
        let attached = Python::try_attach(|py| {
            for message in waiting {
                match message {
                    Message::Stop => return false,
                    Message::Deliver(delivery) => hand_over(py, delivery),
                }
            }
            true
        });
        if attached != Some(true) {
            return;
        }
    }
}

fn hand_over(py: Python<'_>, delivery: Delivery) {
    let Delivery { callback, item } = delivery;
    let item = item.map(|item| item.into_tuple(py));
    if let Err(error) = callback.call1(py, (item,)) {
        error.write_unraisable(py, Some(callback.bind(py)));
    }
}
