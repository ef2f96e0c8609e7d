//! The CPU executor: kernels by instruction set, worker pool, paged KV memory.
