//! The tier's files in host memory.

use super::*;

fn config() -> KvDiskConfig {
    KvDiskConfig {
        places: KvPlaces::Memory(MAX_BYTES),
        ..disk_config(&[""], MAX_BYTES)
    }
}

#[test]
fn blocks_in_host_memory_come_back_until_the_engine_ends() {
    let first = engine_on(limits(64, 1), config());
    let tokens = store_plain(&first, 1);
    let mut events = first.subscribe_disk_events(7).expect("it is the first");
    assert!(events.is_in_memory());
    assert_eq!(told(&mut events, 6).len(), 6);
    let forget = || wait_until("no page is in use", || first.reset_prefix_cache().is_ok());
    forget();
    assert_eq!(ask_plain(&first, 1), (tokens.clone(), 24));
    let found = stats(&first);
    assert!(found.is_in_memory);
    assert_eq!((found.num_pages, found.num_read), (6, 6));
    assert_eq!((found.num_damaged, found.num_errors), (0, 0));
    // Erased blocks stay away.
    wait_until("no page is in use", || {
        first.reset_prefix_cache_and_tiers().is_ok()
    });
    assert_eq!(ask_plain(&first, 1), (tokens.clone(), 0));
    ask_plain(&first, 1);
    wait_stored(&first, 12);
    stop(first);

    let second = engine_on(limits(64, 1), config());
    wait_opened(&second);
    assert_eq!(ask_plain(&second, 1), (tokens, 0));
    stop(second);
}

#[test]
fn memory_without_room_for_a_page_costs_only_time() {
    let engine_with = |num_bytes| {
        let places = KvPlaces::Memory(num_bytes);
        engine_on(limits(64, 1), KvDiskConfig { places, ..config() })
    };
    // The mock's page has 64 bytes.
    let least_bytes = KvPlaces::least_memory_bytes(4, 64);
    let engine = engine_with(least_bytes);
    engine.wait_disk_opened();
    assert_eq!(stats(&engine).num_on, 2);
    stop(engine);
    let engine = engine_with(least_bytes - 1);
    engine.wait_disk_opened();
    assert_eq!(stats(&engine).num_on, 0);
    ask_plain(&engine, 1);
    assert_eq!(ask_plain(&engine, 1).1, 25);
    stop(engine);
}
