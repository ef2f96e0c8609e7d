//! Nodes that load each other's cached blocks.

use std::sync::Arc;

use corella_cluster::blocks::FetchConfig;
use corella_cluster::kv_connector::{FetchOutcome, KvConnector};
use corella_core::{FinishReason, SamplingParams, SchedulerConfig, TokenId};
use corella_engine::{Engine, Generate, Submission, TokenStream};
use corella_model::{MockConfig, MockExecutor};
use serde_json::{Map, Value};

use crate::pair::blocks::{Blocks, FETCHES, Way};
use crate::pair::fixture::*;

pub struct Node {
    pub engine: Engine,
    pub connector: KvConnector,
    pub blocks: Blocks,
}

impl Node {
    pub fn start(model: &MockConfig, incarnation: u64, way: Way) -> Self {
        Self::start_with(model, incarnation, way, FETCHES, None)
    }

    pub fn start_with(
        model: &MockConfig,
        incarnation: u64,
        way: Way,
        fetches: FetchConfig,
        max_bandwidth: Option<u64>,
    ) -> Self {
        let executor = Box::new(MockExecutor::new(model.clone()));
        let (engine, _) = start_engine(executor);
        let blocks = Blocks::start_with(&engine, incarnation, way, fetches, max_bandwidth);
        Self::of(engine, blocks)
    }

    /// Starts a node that lends at most `num_pages` at a time.
    pub fn lending(model: &MockConfig, incarnation: u64, way: Way, num_pages: u32) -> Self {
        let executor = Box::new(MockExecutor::new(model.clone()));
        let set = |limits: &mut SchedulerConfig| limits.max_served_pages = num_pages;
        let (engine, _) = start_engine_with(executor, set);
        let blocks = Blocks::start(&engine, incarnation, way);
        Self::of(engine, blocks)
    }

    fn of(engine: Engine, blocks: Blocks) -> Self {
        let connector = KvConnector {
            kept: None,
            prompt_fetcher: None,
            fetcher: Some(blocks.fetcher.clone()),
            local: Arc::new(engine.clone()),
        };
        Self {
            engine,
            connector,
            blocks,
        }
    }

    /// Submits a request that names `site`.
    pub fn submit(&self, site: &Map<String, Value>, submission: Submission) -> Vec<TokenStream> {
        let call = self.connector.begin(site, "a-test");
        let call = call.expect("it is valid").expect("it asks for something");
        call.submit(submission).expect("it is taken")
    }

    /// Returns the tokens of each choice of a request that names `site`.
    pub async fn answer(&self, site: &Self, submission: Submission) -> Vec<Vec<TokenId>> {
        self.answer_from(&site.blocks.params, submission).await
    }

    /// Like `answer`, for a source given by its parameters.
    pub async fn answer_from(
        &self,
        site: &Map<String, Value>,
        submission: Submission,
    ) -> Vec<Vec<TokenId>> {
        let mut answers = Vec::new();
        for stream in self.submit(site, submission) {
            let (tokens, reason) = finish(stream).await;
            assert_eq!(reason, FinishReason::Length);
            answers.push(tokens);
        }
        answers
    }

    /// Answers a request without other nodes.
    pub async fn compute(&self, submission: Submission) -> Vec<TokenId> {
        let mut streams = self.engine.submit(submission).expect("it is taken");
        finish(streams.remove(0)).await.0
    }

    /// Computes a request. Other nodes can load its blocks when this returns.
    pub async fn cache(&self, submission: Submission) {
        self.compute(submission).await;
        at_rest(&self.engine).await;
    }

    pub fn num(&self, outcome: FetchOutcome) -> u64 {
        self.blocks.fetcher.num_requests(outcome)
    }

    pub fn num_blocks(&self) -> u64 {
        self.blocks.num_blocks()
    }

    pub async fn at_rest(&self) {
        at_rest(&self.engine).await;
        self.blocks.at_rest().await;
    }
}

pub fn seeded(seed: u64) -> SamplingParams {
    SamplingParams {
        temperature: 1.0,
        seed,
        ..SamplingParams::GREEDY
    }
}
