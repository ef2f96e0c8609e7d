//! The workload of a fleet, made from a seed: its nodes, links, requests, loads and faults.

use corella_core::session::LoadConfig;
use corella_core::{
    BlockHasher, FinishReason, HeadRoom, KvGroup, Namespace, NodeId, Request, RequestId,
    SamplingParams, SchedulerConfig, StoppingCriteria, TokenId,
};

use crate::pair::blocks::block_net::{Links, load_config};
use crate::pair::pair_workload::{LATEST_MINOR, NodePlan, lone_run};
use crate::random::Random;

#[derive(Clone, Debug)]
pub struct FleetWorkload {
    pub(super) nodes: Vec<NodePlan>,
    pub(super) alphabet: u32,
    pub(super) config: LoadConfig,
    pub(super) links: Links,
    pub(super) calls: Vec<FleetCall>,
    pub(super) loads: Vec<LoadPlan>,
    pub(super) crashes: Vec<Crash>,
    /// The time until all nodes know of a restart.
    pub(super) registry_delay_us: u64,
    pub(super) steps_fail_once_in: u64,
}

#[derive(Clone, Debug)]
pub(super) struct FleetCall {
    pub at_us: u64,
    pub node: NodeId,
    pub request: Request,
    pub output: Vec<TokenId>,
    pub finish: FinishReason,
    pub abort_us: Option<u64>,
}

#[derive(Clone, Debug)]
pub(super) struct LoadPlan {
    pub at_us: u64,
    pub node: NodeId,
    pub from: NodeId,
    pub namespace: Namespace,
    pub tokens: Vec<TokenId>,
    pub soft_us: u64,
    pub hard_us: u64,
}

#[derive(Clone, Debug)]
pub(super) struct Crash {
    pub at_us: u64,
    pub node: NodeId,
    pub down_us: u64,
}

struct Writer {
    random: Random,
    alphabet: u32,
    /// Earlier sequences, each with its namespace and the node that has computed it.
    known: Vec<(Namespace, Vec<TokenId>, NodeId)>,
    calls: Vec<FleetCall>,
    loads: Vec<LoadPlan>,
}

impl FleetWorkload {
    pub fn from_seed(seed: u64) -> Self {
        let mut random = Random(seed ^ 0xf1ee7);
        let num_nodes = 2 + random.below(3) as u32;
        let page_size = 1 + random.below(4) as u32;
        let groups = kv_groups(&mut random);
        let nodes = (0..num_nodes).map(|_| node(page_size, &groups, &mut random));
        let mut nodes: Vec<_> = nodes.collect();
        vary_arithmetics(&mut nodes, seed);
        shrink_fetches(&mut nodes, seed);
        let num_layers = groups.iter().map(|_| 1 + random.below(3) as u32);
        let num_layers: Vec<_> = num_layers.collect();
        let config = load_config(page_size, num_layers, &mut random);
        let mut links = Links::drawn(&mut random);
        links.draw_liar(num_nodes.into(), &mut Random(seed ^ 0x11a7));
        let has_crashes = random.once_in(2);
        let registry_delay_us = random.pick(&[0, 1_000, 50_000]);
        let steps_fail_once_in = random.pick(&[0, 0, 20]);
        let mut writer = Writer {
            alphabet: 2 + random.below(3) as u32,
            random,
            known: Vec::new(),
            calls: Vec::new(),
            loads: Vec::new(),
        };
        let span_us = writer.write(&nodes);
        let random = &mut writer.random;
        let num_crashes = if has_crashes { random.below(4) } else { 0 };
        let crashes = (0..num_crashes).map(|_| Crash {
            at_us: random.below(span_us + 1),
            node: NodeId(random.below(num_nodes.into()) as u32),
            down_us: random.pick(&[1, 1_000, 20_000]),
        });
        Self {
            crashes: crashes.collect(),
            nodes,
            alphabet: writer.alphabet,
            config,
            links,
            calls: writer.calls,
            loads: writer.loads,
            registry_delay_us,
            steps_fail_once_in,
        }
    }
}

fn kv_groups(random: &mut Random) -> Vec<KvGroup> {
    let num_groups = random.pick(&[1, 1, 2, 3]);
    let has_windows = random.once_in(2);
    let groups = (0..num_groups).map(|_| KvGroup {
        window: (has_windows && !random.once_in(3)).then(|| 1 + random.below(16) as u32),
    });
    groups.collect()
}

fn node(page_size: u32, groups: &[KvGroup], random: &mut Random) -> NodePlan {
    let num_groups = groups.len() as u32;
    let num_spare_pages = random.pick(&[0, 4, 40]);
    let num_pages = num_groups * (64_u32.div_ceil(page_size) + num_spare_pages);
    let mut config = SchedulerConfig::new(num_pages, page_size, 64);
    config.kv_groups = groups.to_vec();
    config.max_num_seqs = 1 + random.below(5) as u32;
    config.max_num_batched_tokens = config.max_num_seqs + 4 + random.below(30) as u32;
    config.max_prefill_tokens = 2 + random.below(30) as u32;
    config.max_inflight_steps = 1 + random.below(2) as u32;
    config.max_fetched_pages = random.pick(&[num_pages, num_pages / 2]);
    config.max_served_pages = random.pick(&[num_pages, num_pages / 3, 2 * num_groups]);
    config.hold_lease_us = random.pick(&[3_000, 1_000_000]);
    config.block_hasher = BlockHasher::truncated(7, 8);
    if random.once_in(3) {
        config.head_room = HeadRoom::fixed_share(0);
    }
    NodePlan {
        config,
        per_step_us: 1 + random.below(300),
        per_token_us: random.below(100),
        max_copy_us: 0,
        copies_fail_once_in: 0,
        is_compatible: true,
        arithmetic: 0,
        protocol_minor: LATEST_MINOR,
        max_prompt_tokens: None,
    }
}

/// Gives the nodes of some fleets one of two arithmetics, from a generator of its own.
fn vary_arithmetics(nodes: &mut [NodePlan], seed: u64) {
    let mut random = Random(seed ^ 0x30de1);
    if random.once_in(4) {
        for node in nodes {
            node.set_arithmetic(random.pick(&[0, 0, 1]));
        }
    }
}

/// Has some nodes reserve few pages for fetches, from a generator of its own.
fn shrink_fetches(nodes: &mut [NodePlan], seed: u64) {
    let mut random = Random(seed ^ 0x5f37c4);
    for node in nodes {
        if random.once_in(4) {
            let num_groups = node.config.kv_groups.len() as u32;
            node.config.max_fetched_pages = num_groups * (1 + random.below(4) as u32);
        }
    }
}

impl Writer {
    /// Writes calls and loads. Returns the time of the last.
    fn write(&mut self, nodes: &[NodePlan]) -> u64 {
        let num_calls = 5 + self.random.below(40);
        let max_pause_us = self.random.pick(&[100, 2_000, 10_000]);
        let mut at_us = 0;
        for id in 0..num_calls {
            at_us += self.random.below(max_pause_us + 1);
            self.call(id, at_us, nodes);
        }
        at_us
    }

    fn call(&mut self, id: u64, at_us: u64, nodes: &[NodePlan]) {
        let random = &mut self.random;
        let node = NodeId(random.below(nodes.len() as u64) as u32);
        let (mut namespace, mut prompt) = (Namespace::default(), Vec::new());
        if random.once_in(6) {
            namespace.cache_salt = Some("name".into());
        }
        let mut source = None;
        if !self.known.is_empty() && !random.once_in(4) {
            // Newer sequences are continued more often.
            let near = random.below(self.known.len().min(8) as u64) as usize;
            let (of_known, known, at) = &self.known[self.known.len() - 1 - near];
            let num_kept = match random.once_in(3) {
                true => random.below(known.len() as u64 + 1) as usize,
                false => known.len(),
            };
            prompt.extend(&known[..num_kept]);
            namespace = of_known.clone();
            source = Some(*at);
        }
        let num_new = 1 + random.below(12);
        prompt.extend((0..num_new).map(|_| random.below(self.alphabet.into()) as TokenId));
        prompt.truncate(44);
        let stopping = StoppingCriteria {
            max_tokens: Some(1 + random.below(12) as u32),
            ..StoppingCriteria::default()
        };
        let request = Request {
            id: RequestId(id),
            prompt,
            output: Vec::new(),
            exports_kv: false,
            is_masked: false,
            sampling: SamplingParams::GREEDY,
            stopping,
            priority: 0,
            arrival_us: at_us,
            objectives: Default::default(),
            namespace,
        };
        let config = &nodes[node.0 as usize].config;
        let max_tokens = config.check_request(&request).expect("requests fit");
        let (output, finish) = lone_run(&request, max_tokens, self.alphabet);
        let mut whole = request.prompt.clone();
        whole.extend(&output);
        self.load(at_us, node, source, &request, nodes.len());
        self.known.push((request.namespace.clone(), whole, node));
        let random = &mut self.random;
        let abort = random.once_in(10);
        self.calls.push(FleetCall {
            at_us,
            node,
            request,
            output,
            finish,
            abort_us: abort.then(|| at_us + random.below(20_000)),
        });
    }

    /// Plans the load of a request's prompt, from the node that has computed its beginning or from any other.
    fn load(
        &mut self,
        at_us: u64,
        node: NodeId,
        source: Option<NodeId>,
        request: &Request,
        num_nodes: usize,
    ) {
        let random = &mut self.random;
        let others = (0..num_nodes as u32).map(NodeId);
        let others: Vec<_> = others.filter(|&other| other != node).collect();
        let source = source.filter(|&source| source != node && !random.once_in(4));
        let from = source.unwrap_or_else(|| random.pick(&others));
        if random.once_in(5) {
            return;
        }
        let soft_us = random.pick(&[0, 1_000, 20_000, 200_000]);
        self.loads.push(LoadPlan {
            at_us: at_us.saturating_sub(random.pick(&[0, 500, 5_000])),
            node,
            from,
            namespace: request.namespace.clone(),
            tokens: request.prompt.clone(),
            soft_us,
            hard_us: soft_us + random.pick(&[1, 20_000, 1_000_000]),
        });
    }
}
