//! The workload of nodes that load each other's cached blocks and decode all requests themselves, made from a seed.
//! Pages are few, and hashes have 8 bits, so that different blocks often collide.

use corella_core::session::SessionConfig;
use corella_core::{
    BlockHasher, HeadRoom, KvGroup, Namespace, NodeId, Request, RequestId, SchedulerConfig, TokenId,
};

use crate::pair::blocks::block_net::{Links, load_config};
use crate::pair::fleet_plan::{FleetPlan, PromptFetch};
use crate::pair::pair_workload::{
    Fault, FaultKind, LATEST_MINOR, LinkPlan, NodePlan, PairCall, PairWorkload, lone_run,
    vary_arithmetics,
};
use crate::random::Random;

impl PairWorkload {
    /// Returns a workload of two to four nodes that open no sessions: they compute, load, crash and restart.
    pub fn blocks_from_seed(seed: u64) -> Self {
        let mut random = Random(seed ^ 0xf1ee7);
        let num_nodes = 2 + random.below(3);
        let page_size = 1 + random.below(4) as u32;
        let groups = kv_groups(&mut random);
        let nodes = (0..num_nodes).map(|_| node(page_size, &groups, &mut random));
        let mut nodes: Vec<_> = nodes.collect();
        vary_arithmetics(&mut nodes, seed);
        shrink_fetches(&mut nodes, seed);
        let num_layers = groups.iter().map(|_| 1 + random.below(3) as u32);
        let num_layers: Vec<_> = num_layers.collect();
        let mut fleet = FleetPlan::plain(&nodes, 1, &mut Random(seed ^ 0xf1ee_7403));
        fleet.loads = load_config(page_size, num_layers, &mut random);
        fleet.links = Links::drawn(&mut random);
        fleet.links.draw_liar(num_nodes, &mut Random(seed ^ 0x11a7));
        let has_crashes = random.once_in(2);
        let registry_delay_us = random.pick(&[0, 1_000, 50_000]);
        let fails_once_in = random.pick(&[0, 0, 20]);
        let mut writer = Writer {
            alphabet: 2 + random.below(3) as u32,
            random,
            known: Vec::new(),
            calls: Vec::new(),
            fetches: Vec::new(),
        };
        let span_us = writer.write(&nodes);
        fleet.prompt_fetches = writer.fetches;
        let random = &mut writer.random;
        let num_crashes = if has_crashes { random.below(4) } else { 0 };
        let crashes = (0..num_crashes).map(|_| Fault {
            at_us: random.below(span_us + 1),
            kind: FaultKind::Crash {
                node: NodeId(random.below(num_nodes) as u32),
                down_us: random.pick(&[1, 1_000, 20_000]),
                is_told: true,
            },
        });
        Self {
            sessions: SessionConfig::new(1000),
            num_prefill_nodes: nodes.len(),
            num_layers: 1,
            alphabet: writer.alphabet,
            links: LinkPlan {
                min_latency_us: 1,
                max_latency_us: 1,
                row_us: Vec::new(),
                repeats_once_in: 0,
                max_stop_us: 0,
            },
            calls: writer.calls,
            faults: crashes.collect(),
            fails_once_in,
            registry_delay_us: Some(registry_delay_us),
            nodes,
            fleet,
        }
    }
}

struct Writer {
    random: Random,
    alphabet: u32,
    /// Earlier sequences, each with its namespace and the node that has computed it.
    known: Vec<(Namespace, Vec<TokenId>, NodeId)>,
    calls: Vec<PairCall>,
    fetches: Vec<PromptFetch>,
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

/// Lets some nodes reserve only a few pages for fetches. A generator of its own leaves all other draws unchanged.
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
    /// Plans calls and loads. Returns the time of the last one.
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
        let max_tokens = 1 + random.below(12) as u32;
        let request = Request {
            arrival_us: at_us,
            namespace,
            ..Request::greedy(RequestId(id), prompt, max_tokens)
        };
        let config = &nodes[node.0 as usize].config;
        let max_tokens = config.check_request(&request).expect("requests fit");
        let (output, finish) = lone_run(&request, max_tokens, self.alphabet);
        let mut whole = request.prompt.clone();
        whole.extend(&output);
        self.fetch(at_us, node, source, nodes.len());
        self.known.push((request.namespace.clone(), whole, node));
        let random = &mut self.random;
        let is_cancelled = random.once_in(10);
        self.calls.push(PairCall {
            at_us,
            node,
            request,
            max_tokens,
            deadline_us: None,
            cancel_us: is_cancelled.then(|| at_us + random.below(20_000)),
            goes_remote: false,
            siblings: None,
            hint: None,
            output,
            finish,
        });
    }

    /// Plans the fetch of the next call's prompt, from the node that has computed its beginning or from any other.
    fn fetch(&mut self, at_us: u64, node: NodeId, source: Option<NodeId>, num_nodes: usize) {
        let random = &mut self.random;
        let others = (0..num_nodes as u32).map(NodeId);
        let others: Vec<_> = others.filter(|&other| other != node).collect();
        let source = source.filter(|&source| source != node && !random.once_in(4));
        let from = source.unwrap_or_else(|| random.pick(&others));
        if random.once_in(5) {
            return;
        }
        let soft_us = random.pick(&[0, 1_000, 20_000, 200_000]);
        self.fetches.push(PromptFetch {
            at_us: at_us.saturating_sub(random.pick(&[0, 500, 5_000])),
            node,
            from,
            call: self.calls.len(),
            soft_us,
            hard_us: soft_us + random.pick(&[1, 20_000, 1_000_000]),
        });
    }
}
