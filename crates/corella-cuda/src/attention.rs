//! The attention of a step: which rows and splits of contexts each thread block computes.

mod plan;

pub use plan::{AttentionItem, AttentionPlan, AttentionShape, AttentionSpan, PlanLimits};
