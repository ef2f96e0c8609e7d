//! Records 1,000 routes of a running prefill node, each with a copy of the node's state before it. From this state, the
//! same route must be chosen again.

use std::sync::{Arc, Mutex};

use corella_core::{
    Call, Namespace, PageHash, PeerPolicy, PrefillNode, Route, SamplingParams, SchedulerStats,
    StayReason, StoppingCriteria, TokenId,
};
use corella_model::{CostModel, MockConfig, MockExecutor};

use crate::pair::fixture::*;

/// A route, and the input of its choice.
struct Recorded {
    before: PrefillNode,
    call: Call<'static>,
    namespace: Namespace,
    stopping: StoppingCriteria,
    hashes: Vec<PageHash>,
    here: SchedulerStats,
    now_us: u64,
    route: Route,
}

impl Recorded {
    fn new(
        before: PrefillNode,
        call: &Call<'_>,
        here: &SchedulerStats,
        now_us: u64,
        route: Route,
    ) -> Self {
        static NOWHERE: std::sync::LazyLock<(Namespace, StoppingCriteria)> =
            std::sync::LazyLock::new(Default::default);
        Self {
            before,
            call: Call {
                namespace: &NOWHERE.0,
                stopping: &NOWHERE.1,
                hashes: &[],
                ..*call
            },
            namespace: call.namespace.clone(),
            stopping: call.stopping.clone(),
            hashes: call.hashes.to_vec(),
            here: *here,
            now_us,
            route,
        }
    }

    fn replay(&mut self) -> Route {
        let call = Call {
            namespace: &self.namespace,
            stopping: &self.stopping,
            hashes: &self.hashes,
            ..self.call
        };
        self.before.route(&call, &self.here, self.now_us)
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn routes_of_running_nodes_are_chosen_again_alike() {
    let model = MockConfig {
        cost: Some(CostModel::per_step(50.0)),
        ..model(256)
    };
    let decode = [
        Decode::start(&model, 11).await,
        Decode::start(&model, 12).await,
    ];
    let recorded = Arc::new(Mutex::new(Vec::new()));
    let record = recorded.clone();
    let mut options = PrefillOptions {
        watch: Some(Arc::new(move |before, call, here, now_us, route| {
            let made = Recorded::new(before, call, here, now_us, route);
            record.lock().unwrap().push(made);
        })),
        ..PrefillOptions::default()
    };
    options.directory.placement.policy = PeerPolicy::Weighted;
    options.directory.placement.disaggregate_min_tokens = 8;
    options.directory.peer_table.probe_interval_us = 50_000;
    // The test keeps a copy of the directory for each route.
    options.directory.max_sent = 32;
    let engine = start_engine(Box::new(MockExecutor::new(model)));
    let prefill = Prefill::start_on(engine, options);
    prefill.list(&decode.each_ref());
    prefill.meet_all().await;

    // Conversations that grow by turns, beside short prompts and prompts with several choices.
    let mut turns: Vec<Vec<TokenId>> = (0..6).map(|i| (i..i + 20).collect()).collect();
    let num_routes = || recorded.lock().unwrap().len();
    for round in 0.. {
        if num_routes() >= 1000 {
            break;
        }
        let mut streams = Vec::new();
        for (i, turn) in turns.iter_mut().enumerate() {
            let mut asked = match (round + i) % 7 {
                0 => submission(vec![1, 2, 3], 2, SamplingParams::GREEDY),
                _ => submission(turn.clone(), 4, SamplingParams::GREEDY),
            };
            asked.num_choices = 1 + u32::from((round + i) % 11 == 0);
            streams.extend(prefill.submit(asked));
            turn.push((round % 40) as TokenId);
            if turn.len() > 120 {
                turn.truncate(20 - i);
            }
        }
        for stream in streams {
            finish(stream).await;
        }
    }

    let recorded = std::mem::take(&mut *recorded.lock().unwrap());
    let (mut num_short, mut num_asking, mut num_placed) = (0, 0, 0);
    for mut made in recorded {
        assert_eq!(made.replay(), made.route);
        match made.route {
            Route::Here(StayReason::Short) => num_short += 1,
            Route::Session { asks_first, .. } if asks_first => num_asking += 1,
            Route::Session { .. } => num_placed += 1,
            _ => {}
        }
    }
    let seen = [num_short, num_asking, num_placed];
    assert!(seen.iter().all(|&num| num > 0), "{seen:?}");
}
