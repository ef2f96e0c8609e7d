//! A job of the engine: a source of items.

use std::iter::Enumerate;
use std::sync::Arc;

use corella::{EventStream, PatientClient};
use pyo3::prelude::*;
use pyo3::types::PyBytes;
use tokio::sync::{Mutex, mpsc};
use tokio::task::{AbortHandle, JoinError, JoinSet};
use tokio::time::timeout;

use crate::courier::{self, Delivery};
use crate::engine::{SIGNAL_INTERVAL, Shared};

/// The limit of items that wait for Python. At the limit, the producer waits.
const MAX_UNREAD_ITEMS: usize = 64;

/// An answer or a part of one.
pub struct Item {
    /// The index of the request.
    index: usize,
    /// The HTTP status: 200 for answers and events. With 0, `body` is the reason for a missing answer.
    status: u16,
    /// JSON.
    body: Vec<u8>,
}

impl Item {
    pub fn into_tuple(self, py: Python<'_>) -> (usize, u16, Bound<'_, PyBytes>) {
        (self.index, self.status, PyBytes::new(py, &self.body))
    }

    fn failure(index: usize, reason: String) -> Self {
        Self {
            index,
            status: 0,
            body: reason.into_bytes(),
        }
    }

    fn panic(error: &JoinError) -> Self {
        Self::failure(0, format!("a request failed: {error}"))
    }
}

/// One call from Python. Dropping the job aborts its requests.
#[pyclass(frozen, module = "corella._corella")]
pub struct Job {
    /// Keeps the engine and its threads while a caller may wait for them.
    shared: Arc<Shared>,
    task: AbortHandle,
    items: Arc<Mutex<mpsc::Receiver<Item>>>,
}

impl Job {
    /// Checks all bodies before it answers one, so that a fault in the last one costs no computation.
    pub fn answer_all(shared: Arc<Shared>, path: String, bodies: Vec<String>) -> Self {
        let batch = Batch::new(&shared, path);
        let first_number = shared.take_numbers(bodies.len());
        Self::start(shared, |sender| async move {
            let refusals = batch.check_all(&bodies, true).await;
            match refusals.into_iter().next() {
                None => batch.answer_all(bodies, first_number, sender).await,
                Some(refusal) => {
                    // Sending fails if the receiver is gone.
                    let _ = sender.send(refusal).await;
                }
            }
        })
    }

    /// Items are the refusals, in the order of the bodies.
    pub fn check_all(shared: Arc<Shared>, path: String, bodies: Vec<String>) -> Self {
        let batch = Batch::new(&shared, path);
        Self::start(shared, |sender| async move {
            for refusal in batch.check_all(&bodies, false).await {
                if sender.send(refusal).await.is_err() {
                    return;
                }
            }
        })
    }

    pub fn stream(shared: Arc<Shared>, path: String, body: String) -> Self {
        let number = shared.take_numbers(1);
        let client = shared.server().client.with_number(number);
        Self::start(shared, |sender| stream(client, path, body, sender))
    }

    fn start<F>(shared: Arc<Shared>, task: impl FnOnce(mpsc::Sender<Item>) -> F) -> Self
    where
        F: Future<Output = ()> + Send + 'static,
    {
        let (sender, items) = mpsc::channel(MAX_UNREAD_ITEMS);
        let task = shared.handle().spawn(task(sender)).abort_handle();
        Self {
            shared,
            task,
            items: Arc::new(Mutex::new(items)),
        }
    }

    /// Returns the item for a fork, which has no threads and would otherwise wait for ever.
    fn fork_failure(&self) -> Option<Item> {
        let reason = self.shared.why_elsewhere()?;
        Some(Item::failure(0, reason.to_owned()))
    }

    /// Aborts the task, except in a fork: there, a thread of the parent may hold a lock of the runtime for ever.
    fn abort(&self) {
        if self.shared.why_elsewhere().is_none() {
            self.task.abort();
        }
    }
}

#[pymethods]
impl Job {
    /// Waits for the next item: the index of its request, the HTTP status, and JSON. Returns `None` at the end.
    /// Handles signals while it waits.
    fn next<'py>(&self, py: Python<'py>) -> PyResult<Option<(usize, u16, Bound<'py, PyBytes>)>> {
        if let Some(item) = self.fork_failure() {
            return Ok(Some(item.into_tuple(py)));
        }
        loop {
            let received = py.detach(|| {
                let receive = async { timeout(SIGNAL_INTERVAL, receive(&self.items)).await };
                self.shared.handle().block_on(receive)
            });
            match received {
                Ok(item) => return Ok(item.map(|item| item.into_tuple(py))),
                Err(_) => py.check_signals()?,
            }
        }
    }

    /// Calls `callback` with the next item, from another thread.
    fn deliver_next(&self, py: Python<'_>, callback: Py<PyAny>) -> PyResult<()> {
        if let Some(item) = self.fork_failure() {
            // A fork has no other thread.
            callback.call1(py, (item.into_tuple(py),))?;
            return Ok(());
        }
        let items = self.items.clone();
        self.shared.handle().spawn(async move {
            let item = receive(&items).await;
            courier::deliver(Delivery { callback, item });
        });
        Ok(())
    }

    /// Aborts unanswered requests.
    fn cancel(&self) {
        self.abort();
    }
}

impl Drop for Job {
    fn drop(&mut self) {
        self.abort();
        if self.shared.why_elsewhere().is_some() {
            // Closing the channel takes a lock, which in a fork a thread of the parent process may hold for ever.
            std::mem::forget(self.items.clone());
        }
    }
}

async fn receive(items: &Mutex<mpsc::Receiver<Item>>) -> Option<Item> {
    items.lock().await.recv().await
}

/// Several requests to one endpoint.
struct Batch {
    client: PatientClient,
    path: String,
    max_concurrency: usize,
}

impl Batch {
    fn new(shared: &Shared, path: String) -> Self {
        // While some requests run, the next ones are read, checked and tokenised.
        let max_num_seqs = shared.server().engine.limits().max_num_seqs as usize;
        Self {
            client: shared.server().client.clone(),
            path,
            max_concurrency: max_num_seqs.saturating_mul(2),
        }
    }

    /// Returns the refusals of all bodies, or of the first body that is refused, in the order of the bodies. A single
    /// body that is to be answered needs no check before.
    async fn check_all(&self, bodies: &[String], only_first: bool) -> Vec<Item> {
        let mut refusals = Vec::new();
        if only_first && bodies.len() == 1 {
            return refusals;
        }
        let client = self.client.only_checking();
        let requests = bodies.iter().map(|body| (client.clone(), body.clone()));
        let mut running = self.run(requests);
        while let Some(item) = running.next().await {
            if item.status != CHECKED {
                refusals.push(item);
                running.begins_more = !only_first;
            }
        }
        refusals.sort_unstable_by_key(|item| item.index);
        refusals
    }

    /// Answers some requests at a time, and sends answers in the order of their arrival.
    async fn answer_all(self, bodies: Vec<String>, first_number: u64, sender: mpsc::Sender<Item>) {
        let clients = (first_number..).map(|number| self.client.with_number(number));
        let mut running = self.run(clients.zip(bodies));
        while let Some(item) = running.next().await {
            if sender.send(item).await.is_err() {
                return;
            }
        }
    }

    fn run<I: Iterator>(&self, requests: I) -> Running<I> {
        Running {
            path: self.path.clone(),
            max_concurrency: self.max_concurrency,
            rest: requests.enumerate(),
            begins_more: true,
            tasks: JoinSet::new(),
        }
    }
}

/// The requests of a batch, some of which run at a time.
struct Running<I> {
    path: String,
    max_concurrency: usize,
    rest: Enumerate<I>,
    begins_more: bool,
    tasks: JoinSet<Item>,
}

impl<I: Iterator<Item = (PatientClient, String)>> Running<I> {
    /// Begins further requests, and waits for the next item of any request that runs.
    async fn next(&mut self) -> Option<Item> {
        while self.begins_more
            && self.tasks.len() < self.max_concurrency
            && let Some((index, (client, body))) = self.rest.next()
        {
            self.tasks
                .spawn(item(index, client, self.path.clone(), body));
        }
        let ended = self.tasks.join_next().await?;
        Some(ended.unwrap_or_else(|error| Item::panic(&error)))
    }
}

/// The status of a request without fault that is only checked.
const CHECKED: u16 = 204;

async fn item(index: usize, client: PatientClient, path: String, body: String) -> Item {
    match answer(&client, &path, body).await {
        Ok((status, body)) => Item {
            index,
            status,
            body,
        },
        Err(reason) => Item::failure(index, reason),
    }
}

async fn answer(
    client: &PatientClient,
    path: &str,
    body: String,
) -> Result<(u16, Vec<u8>), String> {
    let mut response = client.post(path, body.into_bytes()).await?;
    Ok((response.status(), response.bytes().await?))
}

/// Sends the events of an answer, or a refusal.
async fn stream(client: PatientClient, path: String, body: String, sender: mpsc::Sender<Item>) {
    let streamed = async {
        let response = client.post(&path, body.into_bytes()).await?;
        let mut events = match EventStream::open(response).await? {
            Ok(events) => events,
            Err(refusal) => {
                let item = Item {
                    index: 0,
                    status: refusal.status,
                    body: refusal.body,
                };
                // Sending fails if the receiver is gone, here and below.
                let _ = sender.send(item).await;
                return Ok(());
            }
        };
        while let Some(body) = events.next().await? {
            let item = Item {
                index: 0,
                status: 200,
                body,
            };
            if sender.send(item).await.is_err() {
                break;
            }
        }
        Ok(())
    };
    if let Err(reason) = streamed.await {
        let _ = sender.send(Item::failure(0, reason)).await;
    }
}
