//! The system's resources: memory, cores, and threads that work on one job together.

mod claims;
mod core_affinity;
mod region;
mod thread_pool;

pub use self::core_affinity::{allowed_cores, has_near_memory, num_cores};
pub use self::region::Region;
pub use self::thread_pool::{ThreadPool, Worker};
