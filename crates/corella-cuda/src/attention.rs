//! The attention of a step: the rows and splits of contexts of each thread block.

mod plan;

pub use plan::{AttentionItem, AttentionPlan, AttentionShape, AttentionSpan, PlanLimits};
