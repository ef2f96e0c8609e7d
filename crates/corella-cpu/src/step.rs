//! One step of a pipeline stage: from a batch, over the layers, to drawn tokens.

mod activation_memory;
mod draft_head;
mod expert_plan;
mod forward;
mod head_groups;
mod kept_state;
mod layout;
mod profile;
mod rotary;
mod stage;

pub use self::draft_head::{DraftHead, DraftHeadParts, draft_page_bytes, draft_state_bytes};
pub use self::forward::adapter::AdapterStore;
pub use self::forward::{Forward, ForwardLimits, ForwardParts, Incoming, Observer};
pub use self::layout::StepLayout;
pub use self::profile::{Operation, OperationReport, Profile, ProfileReport};
pub use self::stage::{Command, Output, Stage};
