//! The thread that loads and unloads models, one after the other.

use std::collections::HashMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use corella_engine::EngineState;

use crate::model_set::driver::ModelSet;
use crate::model_set::model_loader::{ModelId, ModelLoader, ModelMemory};
use crate::model_set::model_table::{ModelAction, UnloadReason};
use crate::state::server_state::ServerState;

/// The time between two looks whether a model's last holder has gone.
const HOLDER_CHECK_PERIOD: Duration = Duration::from_millis(1);
/// Others hold a model's state for less than this. The log reports longer holds.
const LONG_HOLD: Duration = Duration::from_secs(5);

/// Other models wait while a model's prefix cache is stored, so that this takes no longer.
const STORE_LIMIT: Duration = Duration::from_secs(5);

/// Carries out actions until the set is closed.
pub fn run(set: &ModelSet, loader: &dyn ModelLoader) {
    let mut plans = HashMap::new();
    while let Some(action) = set.next_action() {
        match action {
            ModelAction::Plan(model) => {
                let plan = unpanicked(|| loader.plan(model, &set.name(model)));
                match &plan {
                    Ok(memory) => {
                        plans.insert(model, *memory);
                    }
                    Err(reason) => {
                        tracing::error!(reason, "{} cannot be loaded", set.name(model));
                    }
                }
                set.handle_planned(model, plan);
            }
            ModelAction::Load(model) => {
                let memory = plans.remove(&model).unwrap_or_default();
                set.handle_load(model, load(set, loader, model, memory));
            }
            ModelAction::Unload(model, reason) => {
                let is_unloaded = set
                    .take_state(model)
                    .is_none_or(|state| unload(state, &set.name(model), &reason_text(set, reason)));
                match is_unloaded {
                    true => set.handle_unloaded(model),
                    false => set.handle_stuck(model),
                }
            }
        }
    }
}

fn load(
    set: &ModelSet,
    loader: &dyn ModelLoader,
    model: ModelId,
    memory: ModelMemory,
) -> Result<Arc<ServerState>, String> {
    let name = set.name(model);
    tracing::info!("loading {name}: {memory}");
    let begin = Instant::now();
    let loaded = unpanicked(|| loader.load(model, &name, memory));
    match &loaded {
        Ok(_) => {
            let time = begin.elapsed();
            set.parts().http_metrics.handle_load(&name, time);
            tracing::info!("loaded {name} in {:.1} s", time.as_secs_f32());
        }
        Err(reason) => tracing::error!(reason, "{name} cannot be loaded"),
    }
    loaded
}

/// A panic of the loader fails its model, and no other.
fn unpanicked<T>(work: impl FnOnce() -> Result<T, String>) -> Result<T, String> {
    let done = catch_unwind(AssertUnwindSafe(work));
    done.unwrap_or_else(|_| Err("the loader has a defect; see the log".to_owned()))
}

/// Returns whether the model's memory is free. A step that hangs keeps it.
fn unload(state: Arc<ServerState>, name: &str, reason: &str) -> bool {
    let num_pages = state.engine.stats().scheduler.num_cached_pages as u64;
    let num_tokens = num_pages * u64::from(state.engine.limits().page_size);
    let is_lost = matches!(state.engine.state(), EngineState::Lost(_));
    match state.engine.has_disk() && !is_lost {
        true => store_cache(&state, name, &format!("{reason}; stores {num_tokens}")),
        false => tracing::info!("unloading {name}: {reason}; drops {num_tokens} cached tokens"),
    }
    give_ends_back();
    if !state.engine.shutdown() {
        tracing::error!(
            "{name} cannot be unloaded, because its engine does not stop: it keeps its memory until the server restarts"
        );
        return false;
    }
    let held = Arc::downgrade(&state);
    drop(state);
    // Requests have ended. Others hold a state only for moments, and its memory is free when the last has gone.
    let begin = Instant::now();
    let mut is_reported = false;
    while held.strong_count() > 0 {
        if !is_reported && begin.elapsed() > LONG_HOLD {
            is_reported = true;
            let num_holders = held.strong_count();
            tracing::warn!(
                num_holders,
                "{name} keeps its memory until questions about it have been answered"
            );
        }
        thread::sleep(HOLDER_CHECK_PERIOD);
    }
    give_memory_back();
    true
}

/// Stores the prefix cache on the disks of `--kv-disk`, as far as the time allows.
fn store_cache(state: &ServerState, name: &str, what: &str) {
    tracing::info!("unloading {name}: {what} cached tokens on the disk");
    if !state.engine.store_prefix_cache(STORE_LIMIT) {
        tracing::warn!("unloading {name}: drops the cached tokens that --kv-disk has not stored");
    }
}

/// Has the allocator return the free memory at the end of each arena from now on. `malloc_trim` does so only for the
/// first arena, and the allocator's own limit grows up to 64 MiB for each.
fn give_ends_back() {
    #[cfg(all(target_os = "linux", target_env = "gnu"))]
    // SAFETY: The call changes only the allocator's own limit.
    unsafe {
        libc::mallopt(libc::M_TRIM_THRESHOLD, 128 << 10);
    }
}

/// Returns free memory of the heap to the system.
fn give_memory_back() {
    #[cfg(all(target_os = "linux", target_env = "gnu"))]
    // SAFETY: The call changes only the allocator's own free memory.
    unsafe {
        libc::malloc_trim(0);
    }
}

fn reason_text(set: &ModelSet, reason: UnloadReason) -> String {
    match reason {
        UnloadReason::Idle { idle_us } => {
            let idle = Duration::from_micros(idle_us).as_secs_f32();
            format!("no request has used it for {idle:.0} s")
        }
        UnloadReason::Room { of } => format!("{} needs its room", set.name(of)),
        UnloadReason::Sleep { level } => format!("the server sleeps at level {level}"),
        UnloadReason::Asked => "the operator has asked for it".to_owned(),
        UnloadReason::Lost => "its engine has stopped".to_owned(),
    }
}
