//! The plan of a fleet, made from a seed: its nodes find each other by the real peer table and placement, and load each
//! other's cached blocks.

use corella_core::session::LoadConfig;
use corella_core::{
    BlockHasher, ComputePlace, LoadReport, NodeId, PeerPolicy, PeerTableConfig, PlacementConfig,
    SchedulerConfig,
};

use crate::pair::blocks::block_net::{Links, load_config};
use crate::pair::pair_workload::{NodePlan, PairWorkload};
use crate::random::Random;

#[derive(Clone, Debug)]
pub struct FleetPlan {
    pub placement: PlacementConfig,
    pub peer_table: PeerTableConfig,
    /// The largest number of entries in a prefill node's map of sent blocks.
    pub max_sent: usize,
    /// The time between two lists of the registry.
    pub list_interval_us: u64,
    /// One in this many lists fails, and one in this many lists is empty.
    pub lists_fail_once_in: u64,
    /// Whether prefill nodes fetch the blocks of prompts from decode nodes, and whether they do so even if computing is
    /// quicker.
    pub fetches: bool,
    pub pulls_always: bool,
    pub kv_bytes_per_token: u64,
    pub links: Links,
    pub loads: LoadConfig,
    /// Fetches of a prompt's blocks between any two nodes, apart from placement.
    pub prompt_fetches: Vec<PromptFetch>,
}

#[derive(Clone, Debug)]
pub struct PromptFetch {
    pub at_us: u64,
    pub node: NodeId,
    pub from: NodeId,
    /// The index of the call with the prompt.
    pub call: usize,
    pub soft_us: u64,
    pub hard_us: u64,
}

/// A decode node's answer to a probe.
#[derive(Clone, Debug)]
pub struct Answer {
    pub incarnation: u64,
    pub page_size: u32,
    pub is_compatible: bool,
    pub report: LoadReport,
}

impl FleetPlan {
    /// Draws the plan of a fleet whose nodes load blocks.
    pub fn drawn(workload: &mut PairWorkload, random: &mut Random) -> Self {
        let page_size = workload.nodes[0].config.page_size;
        for node in &mut workload.nodes {
            exchange_blocks(&mut node.config, page_size, random);
        }
        let num_prompt_fetches = random.below(12);
        let mut plan = Self::plain(&workload.nodes, workload.num_layers, random);
        plan.fetches = true;
        plan.pulls_always = random.once_in(4);
        plan.placement.disaggregate_min_tokens = random.pick(&[0, 0, 8]);
        plan.lists_fail_once_in = random.pick(&[0, 0, 6]);
        plan.prompt_fetches = (0..num_prompt_fetches)
            .map(|_| PromptFetch::drawn(workload, random))
            .collect();
        plan.links.draw_liar(workload.nodes.len() as u64, random);
        let num_nodes = workload.nodes.len() as u64;
        for node in &mut workload.nodes {
            node.max_prompt_tokens = random.pick(&[None, None, None, Some(12)]);
        }
        for call in &mut workload.calls {
            let hint = NodeId(random.below(num_nodes) as u32);
            let is_hinted = random.once_in(6) && hint != call.node;
            call.hint = is_hinted.then_some(hint);
            if random.once_in(6) {
                call.request.objectives.tpot_us = Some(random.pick(&[500, 10_000, 1_000_000]));
            }
        }
        plan
    }

    /// Draws the plan of a fleet whose nodes load no blocks.
    pub fn plain(nodes: &[NodePlan], num_layers: u32, random: &mut Random) -> Self {
        let page_size = nodes[0].config.page_size;
        let num_layers = vec![num_layers; nodes[0].config.kv_groups.len()];
        // The operator may fix the node that computes the next turn of a conversation.
        let places = [
            None,
            None,
            Some(ComputePlace::Here),
            Some(ComputePlace::There),
        ];
        Self {
            placement: PlacementConfig {
                policy: random.pick(&[PeerPolicy::Weighted, PeerPolicy::RoundRobin]),
                compute_place: random.pick(&places),
                ..PlacementConfig::default()
            },
            peer_table: PeerTableConfig {
                outage_grace_us: random.pick(&[100_000, 15_000_000]),
                bandwidth_lifetime_us: random.pick(&[500_000, 60_000_000]),
                ..PeerTableConfig::default()
            },
            max_sent: random.pick(&[1, 8, 1_000]),
            list_interval_us: random.pick(&[200_000, 1_000_000]),
            lists_fail_once_in: 0,
            fetches: false,
            pulls_always: false,
            // Only transfers of at least a megabyte measure a link.
            kv_bytes_per_token: 1 << 20,
            loads: load_config(page_size, num_layers, random),
            links: Links::drawn(random),
            prompt_fetches: Vec::new(),
        }
    }
}

impl PromptFetch {
    fn drawn(workload: &PairWorkload, random: &mut Random) -> Self {
        let num_nodes = workload.nodes.len() as u64;
        let node = random.below(num_nodes);
        let from = (node + 1 + random.below(num_nodes - 1)) % num_nodes;
        let call = random.below(workload.calls.len() as u64) as usize;
        let soft_us = random.pick(&[0, 1_000, 20_000, 200_000]);
        Self {
            at_us: workload.calls[call].at_us + random.below(200_000),
            node: NodeId(node as u32),
            from: NodeId(from as u32),
            call,
            soft_us,
            hard_us: soft_us + random.pick(&[1, 20_000, 1_000_000]),
        }
    }
}

/// Gives a node blocks of the common size, and hashes that often collide.
fn exchange_blocks(config: &mut SchedulerConfig, page_size: u32, random: &mut Random) {
    config.page_size = page_size;
    let num_groups = config.kv_groups.len() as u32;
    let num_least_pages = num_groups * config.max_model_len.div_ceil(page_size);
    config.num_pages = config.num_pages.max(num_least_pages);
    let num_few_pages = 2 * num_groups;
    config.max_fetched_pages =
        random.pick(&[config.num_pages, config.num_pages / 2, num_few_pages]);
    config.max_served_pages = random.pick(&[config.num_pages, config.num_pages / 3, 4]);
    config.block_hasher = BlockHasher::truncated(7, 8);
}
