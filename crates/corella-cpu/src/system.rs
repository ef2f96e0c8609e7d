//! The system's resources: memory, cores, threads that work on one job together, and turns of executors.

mod claims;
mod core_affinity;
mod region;
mod step_turn;
mod thread_pool;

pub use self::core_affinity::{allowed_cores, has_near_memory, num_cores};
pub use self::region::Region;
pub use self::step_turn::{StepTurn, StepTurns};
pub use self::thread_pool::{ThreadPool, Worker};
