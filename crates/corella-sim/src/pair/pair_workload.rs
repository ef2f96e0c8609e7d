//! The plan of one simulation run of a small fleet (its nodes, links, calls and faults), generated from a seed.

use corella_core::session::{Hello, KvShape, SessionConfig};
use corella_core::{
    BlockHasher, FinishReason, HeadRoom, Incarnation, KvGroup, NodeId, RecurrentState, Request,
    RequestId, SchedulerConfig, SessionId, StoppingCriteria, TokenId,
};

use crate::executor::{CheckingExecutor, root_row};
use crate::pair::fleet_plan::FleetPlan;
use crate::random::Random;

/// Everything that a run consists of, known before it begins.
#[derive(Clone, Debug)]
pub struct PairWorkload {
    pub sessions: SessionConfig,
    /// Prefill nodes first.
    pub nodes: Vec<NodePlan>,
    pub num_prefill_nodes: usize,
    pub num_layers: u32,
    pub alphabet: u32,
    pub links: LinkPlan,
    pub calls: Vec<PairCall>,
    pub faults: Vec<Fault>,
    /// On average, one step in this many fails. 0 means never.
    pub fails_once_in: u64,
    /// The time until the registry reports a node's start to other nodes. `None`: nodes learn of a restart only from
    /// each other.
    pub registry_delay_us: Option<u64>,
    /// The plan of placement and block loads.
    pub fleet: FleetPlan,
}

/// The latest minor version of the protocol between prefill and decode nodes.
pub const LATEST_MINOR: u32 = 3;

#[derive(Clone, Debug)]
pub struct NodePlan {
    pub config: SchedulerConfig,
    pub per_step_us: u64,
    pub per_token_us: u64,
    /// The longest duration of a copy to or from host memory. One in `copies_fail_once_in` copies fails; 0 means none.
    pub max_copy_us: u64,
    pub copies_fail_once_in: u64,
    pub is_compatible: bool,
    /// Nodes with different values compute different rows for the same tokens.
    pub arithmetic: u64,
    /// The minor version of the node's protocol.
    pub protocol_minor: u32,
    /// The longest prompt that the node decodes, if it has a limit.
    pub max_prompt_tokens: Option<u32>,
}

#[derive(Clone, Debug)]
pub struct LinkPlan {
    pub min_latency_us: u64,
    pub max_latency_us: u64,
    /// By decode node, the time to transfer one row of all layers, in microseconds.
    pub row_us: Vec<u64>,
    /// On average, one control message in this many is delivered twice. 0 means never.
    pub repeats_once_in: u64,
    /// The longest time that a reader or writer of pages takes to stop.
    pub max_stop_us: u64,
}

/// One request of a client, and its expected result.
#[derive(Clone, Debug)]
pub struct PairCall {
    pub at_us: u64,
    pub node: NodeId,
    pub request: Request,
    pub max_tokens: u32,
    pub deadline_us: Option<u64>,
    /// The time at which the client cancels, which may be earlier than `at_us`.
    pub cancel_us: Option<u64>,
    pub goes_remote: bool,
    /// The session of the first choice, if several calls are choices of one request.
    pub siblings: Option<SessionId>,
    /// A node that the request names, because the node may have a part of the prompt.
    pub hint: Option<NodeId>,
    pub output: Vec<TokenId>,
    pub finish: FinishReason,
}

#[derive(Clone, Copy, Debug)]
pub struct Fault {
    pub at_us: u64,
    pub kind: FaultKind,
}

#[derive(Clone, Copy, Debug)]
pub enum FaultKind {
    /// The node's process dies, and restarts after `down_us`. If only the process died, its host closes the
    /// connections, which the peers notice (`is_told`). If the host died, they notice nothing.
    Crash {
        node: NodeId,
        down_us: u64,
        is_told: bool,
    },
    /// Nothing arrives from one node at the other.
    Block {
        from: NodeId,
        to: NodeId,
        for_us: u64,
    },
    /// Connections between two nodes break: control connections, data connections or both.
    Cut {
        prefill: NodeId,
        decode: NodeId,
        control: bool,
        data: bool,
        is_told: bool,
    },
    /// The decode node takes no new sessions for a while.
    Drain { node: NodeId, for_us: u64 },
}

impl PairWorkload {
    pub fn from_seed(seed: u64) -> Self {
        let mut writer = Writer::new(seed);
        let is_fleet = !writer.random.once_in(3);
        let has_many = Random(seed ^ 0x4de5).once_in(4);
        let (num_prefill_nodes, num_decode_nodes) = match is_fleet {
            true if has_many => (1, 4),
            true => (2, 2),
            false => (1, 1),
        };
        let mut workload = writer.write(num_prefill_nodes, num_decode_nodes, seed);
        if Random(seed ^ 0x50e7).once_in(2) {
            sort_by_time(&mut workload.calls);
        }
        keep_states(&mut workload.nodes, seed);
        vary_arithmetics(&mut workload.nodes, seed);
        for node in &mut workload.nodes {
            // As in production, the scheduler and the sessions of a node use the same lease time.
            node.config.hold_lease_us = workload.sessions.hold_lease_us;
        }
        workload
    }

    /// Returns a plan of two to eight nodes that find each other by the real peer table and placement, serve
    /// conversations, and load each other's blocks.
    pub fn fleet_from_seed(seed: u64) -> Self {
        let mut random = Random(seed ^ 0xf1ee_7401);
        let num_prefill_nodes = 1 + random.below(4) as usize;
        let num_decode_nodes = 1 + random.below(4) as usize;
        let seed = random.next();
        let mut workload = Writer::new(seed).write(num_prefill_nodes, num_decode_nodes, seed);
        sort_by_time(&mut workload.calls);
        workload.fleet = FleetPlan::drawn(&mut workload, &mut random);
        vary_arithmetics(&mut workload.nodes, seed);
        workload
    }

    pub fn hello(&self, node: NodeId, incarnation: Incarnation) -> Hello {
        let plan = &self.nodes[node.0 as usize];
        Hello {
            instance: format!("node-{node}").into(),
            incarnation,
            protocol_major: 1,
            protocol_minor: plan.protocol_minor,
            model_fingerprint: if plan.is_compatible { 1 } else { 2 },
            tokenizer_digest: 3,
            kv_shape: KvShape {
                num_layers: self.num_layers,
                num_kv_heads: 1,
                head_dim: 1,
                num_ranks: 1,
                window_digest: u64::from(plan.config.has_windows()),
            },
            kv_format: "bf16".into(),
            page_size: plan.config.page_size,
            element_order: "plain".into(),
            weight_format: format!("format-{}", plan.arithmetic).into(),
            instruction_set: "portable".into(),
            group: "".into(),
        }
    }

    /// Returns the time at which lists and probes end. Later calls use the last list and the last answers.
    pub fn lists_until_us(&self) -> u64 {
        let times = self.calls.iter().map(|call| call.at_us);
        let times = times.chain(self.faults.iter().map(|fault| fault.at_us));
        times.max().unwrap_or(0) + 5_000_000
    }

    pub fn decode_nodes(&self) -> impl Iterator<Item = NodeId> {
        (self.num_prefill_nodes..self.nodes.len()).map(|index| NodeId(index as u32))
    }
}

impl NodePlan {
    /// Gives the node an arithmetic: its rows and block hashes differ from the rows and hashes of nodes with another
    /// arithmetic. Block hashes have their full width, so that they do not collide by chance.
    pub fn set_arithmetic(&mut self, arithmetic: u64) {
        self.arithmetic = arithmetic;
        self.config.block_hasher = BlockHasher::new(arithmetic);
    }
}

/// Gives the nodes of some workloads one of two arithmetics, from a generator of its own.
pub(super) fn vary_arithmetics(nodes: &mut [NodePlan], seed: u64) {
    let mut random = Random(seed ^ 0xa217);
    if random.once_in(3) {
        for node in nodes {
            node.set_arithmetic(random.pick(&[0, 0, 1]));
        }
    }
}

struct Writer {
    random: Random,
    /// Draws the properties of spilled requests.
    spill: Random,
    /// Beginnings of prompts.
    known: Vec<Vec<TokenId>>,
    alphabet: u32,
    span_us: u64,
}

impl Writer {
    fn new(seed: u64) -> Self {
        let mut random = Random(seed ^ 0x9a17);
        Self {
            alphabet: 2 + random.below(3) as u32,
            span_us: random.pick(&[50_000, 1_000_000, 10_000_000]),
            known: vec![Vec::new()],
            spill: Random(seed ^ 0x5b11),
            random,
        }
    }

    fn write(
        mut self,
        num_prefill_nodes: usize,
        num_decode_nodes: usize,
        seed: u64,
    ) -> PairWorkload {
        let num_nodes = num_prefill_nodes + num_decode_nodes;
        let mut nodes: Vec<_> = (0..num_nodes).map(|_| self.node()).collect();
        if num_nodes > 2 && self.random.once_in(10) {
            nodes[num_nodes - 1].is_compatible = false;
        }
        if self.spill.once_in(3) {
            for node in &mut nodes[num_prefill_nodes..] {
                self.spill(node);
            }
        }
        let mut groups = Random(seed ^ 0x6709);
        if groups.once_in(3) {
            split_layers(&mut nodes, &mut groups);
        }
        let mut sessions = self.sessions();
        sessions.falls_back = !Random(seed ^ 0x57a7).once_in(6);
        let num_calls = 2 + self.random.below(30);
        let calls: Vec<_> = (0..num_calls)
            .map(|id| {
                let node = self.random.below(num_prefill_nodes as u64) as usize;
                self.call(id, node, &nodes[node].config)
            })
            .collect();
        let calls = with_choices(calls, seed);
        vary_versions(&mut nodes, seed);
        let num_layers = 1 + self.random.below(3) as u32;
        let mut workload = PairWorkload {
            fleet: FleetPlan::plain(&nodes, num_layers, &mut Random(seed ^ 0xf1ee_7402)),
            num_layers,
            alphabet: self.alphabet,
            links: self.links(num_decode_nodes),
            faults: Vec::new(),
            fails_once_in: self.random.pick(&[0, 0, 0, 50]),
            registry_delay_us: self.random.pick(&[None, Some(1_000), Some(5_000_000)]),
            sessions,
            num_prefill_nodes,
            nodes,
            calls,
        };
        if !self.random.once_in(5) {
            let num_faults = 1 + self.random.below(5);
            workload.faults = (0..num_faults).map(|_| self.fault(&workload)).collect();
        }
        workload
    }

    fn sessions(&mut self) -> SessionConfig {
        let mut config = SessionConfig::new(1000);
        // At the lowest of these bandwidths, a load may outlast the shortest lease.
        config.min_bandwidth_bytes_per_s = self.random.pick(&[1_000_000, 100_000, 10_000]);
        config.resumes_locally = !self.random.once_in(6);
        config.first_token_timeout_us = self.random.pick(&[500_000, 60_000_000]);
        config.hold_lease_us = self.random.pick(&[3_500_000, 4_000_000, 30_000_000]);
        config.max_asked_peers = 1 + self.random.below(3) as u32;
        if self.random.once_in(8) {
            config.max_sessions = 1 + self.random.below(6) as u32;
            config.max_tombstones = config.max_sessions + self.random.below(20) as u32;
        }
        config
    }

    fn node(&mut self) -> NodePlan {
        let random = &mut self.random;
        let page_size = 1 + random.below(5) as u32;
        let num_pages = 100 / page_size + random.below(200) as u32;
        let mut config = SchedulerConfig::new(num_pages, page_size, 96);
        config.max_num_seqs = 2 + random.below(8) as u32;
        config.max_num_batched_tokens = config.max_num_seqs + 4 + random.below(60) as u32;
        config.max_prefill_tokens = 4 + random.below(60) as u32;
        config.max_inflight_steps = 1 + random.below(2) as u32;
        config.enable_prefix_caching = !random.once_in(5);
        config.max_preemptions = 100_000;
        config.max_held_pages = random.pick(&[num_pages / 4, num_pages / 2, num_pages]);
        if random.once_in(12) {
            config.max_held_pages = random.below(8) as u32;
        }
        if random.once_in(2) {
            config.head_room = HeadRoom::Estimate;
        }
        if random.once_in(5) {
            config.max_queued_requests = 1 + random.below(4) as u32;
            config.max_queued_tokens = random.pick(&[u64::MAX, 1, 20]);
        }
        NodePlan {
            config,
            per_step_us: 200 + random.below(20_000),
            per_token_us: random.below(500),
            max_copy_us: 0,
            copies_fail_once_in: 0,
            is_compatible: true,
            arithmetic: 0,
            protocol_minor: LATEST_MINOR,
            max_prompt_tokens: None,
        }
    }

    /// Makes a decode node run short of pages, and often gives it host memory.
    fn spill(&mut self, node: &mut NodePlan) {
        let random = &mut self.spill;
        node.max_copy_us = random.pick(&[0, 1_000, 100_000]);
        node.copies_fail_once_in = random.pick(&[0, 0, 4]);
        let config = &mut node.config;
        config.num_pages = config.max_model_len.div_ceil(config.page_size) + random.below(8) as u32;
        config.max_held_pages = config.num_pages;
        config.head_room = HeadRoom::fixed_share(0);
        config.max_spilled_pages = random.below(2 * u64::from(config.num_pages)) as u32;
    }

    fn links(&mut self, num_decode_nodes: usize) -> LinkPlan {
        let random = &mut self.random;
        let min_latency_us = random.pick(&[50, 500, 5_000]);
        let factor = random.pick(&[1, 3, 30]);
        LinkPlan {
            min_latency_us,
            max_latency_us: min_latency_us * factor,
            // The time to transfer a row of 1000 bytes. The values range from 100 MB/s down to a speed below the
            // smallest `min_bandwidth_bytes_per_s`.
            row_us: (0..num_decode_nodes)
                .map(|_| random.pick(&[10, 100, 1_000, 20_000, 100_000]))
                .collect(),
            repeats_once_in: random.pick(&[0, 5]),
            max_stop_us: random.pick(&[0, 1_000, 50_000, 2_000_000]),
        }
    }

    fn call(&mut self, id: u64, node: usize, config: &SchedulerConfig) -> PairCall {
        let at_us = self.random.below(self.span_us);
        let mut prompt = match self.random.once_in(2) {
            true => {
                let at = self.random.below(self.known.len() as u64) as usize;
                self.known[at].clone()
            }
            false => Vec::new(),
        };
        let num_new = 1 + self.random.below(40);
        prompt.extend((0..num_new).map(|_| self.random.below(self.alphabet.into()) as TokenId));
        prompt.truncate(60);
        let mut stopping = StoppingCriteria {
            max_tokens: (!self.random.once_in(4)).then(|| 1 + self.random.below(30) as u32),
            min_tokens: self.random.pick(&[0, 0, 2]),
            ..StoppingCriteria::default()
        };
        if self.random.once_in(3) {
            stopping.end_token_ids.push(0);
        }
        if self.random.once_in(5) && self.alphabet > 2 {
            stopping.stop_token_ids.push(1);
        }
        let request = Request {
            stopping,
            arrival_us: at_us,
            ..Request::greedy(RequestId(id), prompt, 0)
        };
        let max_tokens = config
            .check_request(&request)
            .expect("prompts of 60 tokens and 30 more fit every node");
        let (output, finish) = lone_run(&request, max_tokens, self.alphabet);
        let mut whole = request.prompt.clone();
        whole.extend(&output);
        self.known.push(whole);
        let cancel = self.random.once_in(6);
        let deadline = self.random.once_in(8);
        PairCall {
            at_us,
            node: NodeId(node as u32),
            max_tokens,
            deadline_us: deadline.then(|| at_us + self.random.below(3_000_000)),
            cancel_us: cancel.then(|| (at_us + self.random.below(600_000)).saturating_sub(20_000)),
            goes_remote: !self.random.once_in(8),
            siblings: None,
            hint: None,
            request,
            output,
            finish,
        }
    }

    fn fault(&mut self, workload: &PairWorkload) -> Fault {
        let num_prefill = workload.num_prefill_nodes as u64;
        let num_decode = workload.nodes.len() as u64 - num_prefill;
        let prefill = NodeId(self.random.below(num_prefill) as u32);
        let decode = NodeId((num_prefill + self.random.below(num_decode)) as u32);
        let either = self.random.pick(&[prefill, decode]);
        let other = if either == prefill { decode } else { prefill };
        let short_us = 1 + self.random.below(8_000_000);
        let kind = match self.random.below(8) {
            0..=2 => FaultKind::Crash {
                node: either,
                down_us: self.random.pick(&[1_000, 100_000, 5_000_000]),
                is_told: self.random.once_in(2),
            },
            3 | 4 => FaultKind::Block {
                from: either,
                to: other,
                for_us: short_us,
            },
            5 | 6 => {
                let which = self.random.below(3);
                FaultKind::Cut {
                    prefill,
                    decode,
                    control: which != 1,
                    data: which != 0,
                    is_told: self.random.once_in(2),
                }
            }
            _ => FaultKind::Drain {
                node: decode,
                for_us: short_us,
            },
        };
        Fault {
            at_us: self.random.below(self.span_us * 2),
            kind,
        }
    }
}

/// Sorts the times of calls, so that later turns of a conversation come later.
fn sort_by_time(calls: &mut [PairCall]) {
    let mut times_us: Vec<_> = calls.iter().map(|call| call.at_us).collect();
    times_us.sort_unstable();
    for (call, at_us) in calls.iter_mut().zip(times_us) {
        let moved = |time_us: u64| (time_us + at_us).saturating_sub(call.at_us);
        call.deadline_us = call.deadline_us.map(moved);
        call.cancel_us = call.cancel_us.map(moved);
        call.request.arrival_us = at_us;
        call.at_us = at_us;
    }
}

/// Gives the model of all nodes one to three KV groups, most of them with windows. Each node's number of pages is
/// multiplied by the number of groups. With windows, all nodes have the same page size.
fn split_layers(nodes: &mut [NodePlan], random: &mut Random) {
    let num_groups = 1 + random.below(3) as u32;
    let groups = (0..num_groups).map(|_| KvGroup {
        window: (!random.once_in(3)).then(|| 1 + random.below(30) as u32),
    });
    let groups: Vec<_> = groups.collect();
    let page_size = nodes[0].config.page_size;
    for node in nodes {
        let config = &mut node.config;
        if groups.iter().any(|group| group.window.is_some()) {
            config.page_size = page_size;
            let num_least_pages = config.max_model_len.div_ceil(page_size);
            config.num_pages = config.num_pages.max(num_least_pages);
        }
        config.kv_groups = groups.clone();
        config.num_pages *= num_groups;
        config.max_held_pages *= num_groups;
        config.max_spilled_pages *= num_groups;
    }
}

/// Gives some models recurrent layers, from a generator of its own. Nodes have few snapshots, so that some nodes have
/// none left for a prompt. Nodes do not load cached blocks of such models, so fleets do not use these models.
fn keep_states(nodes: &mut [NodePlan], seed: u64) {
    let mut random = Random(seed ^ 0x57a7e);
    if !random.once_in(4) {
        return;
    }
    for node in nodes {
        node.config.set_recurrent_state(RecurrentState {
            num_snapshots: random.below(12) as u32,
            snapshot_interval: 1 + random.below(5) as u32,
            least_distance: 1 + random.below(3) as u32,
        });
    }
}

/// Gives some nodes an earlier version of the protocol, from a generator of its own.
fn vary_versions(nodes: &mut [NodePlan], seed: u64) {
    let mut random = Random(seed ^ 0xa5_f125);
    if random.once_in(2) {
        return;
    }
    for node in nodes {
        let latest = LATEST_MINOR;
        node.protocol_minor = random.pick(&[0, 1, latest, latest, latest, latest]);
    }
}

/// Gives some calls further choices, each with its own time of cancellation. A generator of their own leaves the rest
/// of the workload unchanged.
fn with_choices(calls: Vec<PairCall>, seed: u64) -> Vec<PairCall> {
    let mut random = Random(seed ^ 0x0c40_1ce5);
    let mut all: Vec<PairCall> = Vec::new();
    for mut call in calls {
        let first = SessionId(all.len() as u128);
        let num_others = random.pick(&[0, 0, 0, 1, 3]);
        call.siblings = (num_others > 0).then_some(first);
        let mut other = call.clone();
        all.push(call);
        for _ in 0..num_others {
            if other.cancel_us.is_some() {
                other.cancel_us = Some(other.at_us + random.below(600_000));
            }
            all.push(other.clone());
        }
    }
    for (id, call) in all.iter_mut().enumerate() {
        call.request.id = RequestId(id as u64);
    }
    all
}

/// Returns the output of a lone run of the request.
pub(super) fn lone_run(
    request: &Request,
    max_tokens: u32,
    alphabet: u32,
) -> (Vec<TokenId>, FinishReason) {
    let stopping = &request.stopping;
    let (end, stop) = (&stopping.end_token_ids, &stopping.stop_token_ids);
    let masked: Vec<_> = end.iter().chain(stop).copied().collect();
    let mut output = CheckingExecutor::lone_run(
        alphabet,
        root_row(&request.namespace),
        &request.prompt,
        max_tokens as usize,
        &masked,
        stopping.min_tokens as usize,
    );
    let Some(at) = output.iter().position(|token| masked.contains(token)) else {
        return (output, FinishReason::Length);
    };
    output.truncate(at + 1);
    match end.contains(&output[at]) {
        true => (output, FinishReason::EndToken),
        false => (output, FinishReason::StopToken),
    }
}
