//! Two disks with one index.

use super::*;

/// Two disks with 16 and eight slots, which grow by two slots and by one.
fn open_two() -> PageStore<LossyFile> {
    let files = [(); 2].map(|()| LossyFile::new(Vec::new(), u64::MAX));
    open_groups(files.into(), vec![KvGroup::default()], None, &sizes(24))
}

#[test]
fn the_pages_of_a_path_lie_on_all_disks_by_their_sizes() {
    let store = open_two();
    assert_eq!((store.max_pages(), store.num_open()), (24, 2));
    let paths = [1, 2, 3, 4].map(|first| Path::new(first, 6));
    for path in &paths {
        assert_eq!(store_path(&store, path).unwrap(), 6);
        assert_eq!(store.count_by_disk(&path.hashes, 0), [4, 2]);
    }
    // The least recently used page makes room, whichever disk has it.
    let last = Path::new(5, 3);
    assert_eq!(store_path(&store, &last).unwrap(), 3);
    assert_eq!(store.num_usable(&paths[0].hashes, 0), 3);
    assert_eq!(check(&store, &last), 3);
    assert_eq!(store.count_by_disk(&paths[1].hashes, 0), [4, 2]);
    let pages = store.count_by_disk(&paths[1].hashes, 4);
    assert_eq!(pages.iter().sum::<u32>(), 2);
    for (disk, num_pages) in [(0, pages[0]), (1, pages[1])] {
        let last = store.last_on_disk(&paths[1].hashes, disk).unwrap();
        assert_eq!(last.0 >= 4, num_pages > 0);
    }
}

#[test]
fn a_disk_that_cannot_grow_leaves_its_part_to_the_others() {
    let store = open_two();
    content(&store, 0).room = store.file(0).offset(2) as usize;
    let path = Path::new(1, 6);
    assert_eq!(store_path(&store, &path).unwrap(), 6);
    assert_eq!(store.count_by_disk(&path.hashes, 0), [2, 4]);
    assert_eq!((store.max_pages(), check(&store, &path)), (10, 6));
}

#[test]
fn when_a_disk_fails_the_pages_on_the_other_stay() {
    let store = open_two();
    let paths = [1, 2].map(|first| Path::new(first, 6));
    store_path(&store, &paths[0]).unwrap();
    content(&store, 1).num_left = 1;
    let (time, epoch) = (store.begin_path(&paths[1].hashes), store.epoch());
    let stored = store.store(&paths[1].names(), &paths[1].rows(0), time, epoch);
    assert_eq!(stored.num_pages, 4);
    let failed: Vec<_> = stored.failed.iter().map(|failed| failed.disk).collect();
    assert_eq!(failed, [1]);
    store.close_disk(1);
    assert_eq!(
        (store.num_pages(), store.max_pages(), store.num_open()),
        (8, 16, 1)
    );
    for path in &paths {
        assert_eq!(store.count_by_disk(&path.hashes, 0), [4, 0]);
        assert_eq!(check(&store, path), 4);
    }
    // New pages go to the first disk, also those that the second one had.
    store_path(&store, &paths[1]).unwrap();
    assert_eq!(store.count_by_disk(&paths[1].hashes, 0), [6, 0]);
    assert_eq!(store.num_usable(&paths[1].hashes, 0), 6);
    // The second disk comes back with its pages.
    content(&store, 1).num_left = u64::MAX;
    store.try_to_write(1).unwrap();
    store.open_disk(1);
    store.scan(1, &RUNNING).unwrap();
    assert_eq!(store.count_by_disk(&paths[0].hashes, 0)[1], 2);
    assert_eq!(check(&store, &paths[1]), 6);
    assert_eq!((check(&store, &paths[0]), store.num_pages()), (6, 12));
    assert!(store.erase(&[0, 1]).is_empty());
    assert_eq!(store.num_pages(), 0);
    for disk in 0..2 {
        assert!(
            content(&store, disk).bytes[LABEL_BYTES..]
                .iter()
                .all(|&byte| byte == 0)
        );
    }
}
