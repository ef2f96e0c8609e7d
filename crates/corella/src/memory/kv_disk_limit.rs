//! The limits of models whose KV blocks disks, host memory or another program keep.

use std::fs;
use std::path::{Component, Path, PathBuf};

use corella_core::SchedulerConfig;

use crate::{Error, LlmOptions};

/// Refuses `--kv-disk`, `--kv-host-memory` and `--kv-store` if there are no cached blocks that they could keep, and
/// `--kv-disk` if it names a folder twice. Otherwise sets how many pages may be fetched and stored at once. `is_on_host`
/// says whether the pages are in the memory of the CPU.
pub(crate) fn set_limits(
    scheduler: &mut SchedulerConfig,
    options: &LlmOptions,
    is_on_host: bool,
    is_encoder: bool,
) -> Result<(), Error> {
    let is_one_of_several = options.shared_memory_bytes.is_some();
    let is_without = given_options(options).next().is_none();
    if is_without || is_encoder && is_one_of_several {
        return Ok(());
    }
    check(scheduler, options, is_on_host, is_encoder)?;
    // A conversation may fill most of the pages, and all its blocks should come back from the disk. Requests get the
    // pages that they need in any case.
    scheduler.max_fetched_pages = scheduler.num_pages - scheduler.num_pages / 4;
    scheduler.max_served_pages = scheduler.max_fetched_pages;
    Ok(())
}

/// The given options that keep KV blocks outside the cache. Only one may be given.
fn given_options(options: &LlmOptions) -> impl Iterator<Item = &'static str> {
    let given = [
        (options.kv_host_bytes.is_some(), "--kv-host-memory"),
        (options.kv_disk.is_some(), "--kv-disk"),
        (options.has_kv_store, "--kv-store"),
    ];
    given
        .into_iter()
        .filter_map(|(is_given, name)| is_given.then_some(name))
}

/// Refuses the options as `set_limits` does.
pub(crate) fn check(
    scheduler: &SchedulerConfig,
    options: &LlmOptions,
    is_on_host: bool,
    is_encoder: bool,
) -> Result<(), Error> {
    let mut given = given_options(options);
    let Some(option) = given.next() else {
        return Ok(());
    };
    if let Some(other) = given.next() {
        return Err(Error::Config(format!(
            "{option} and {other} do not work together yet: choose one of them"
        )));
    }
    let is_for_gpu = options.kv_host_bytes.is_some();
    let refused = [
        (
            !scheduler.enable_prefix_caching,
            "it keeps pages of the prefix cache: leave out --no-enable-prefix-caching",
        ),
        (
            is_on_host && is_for_gpu,
            "the KV cache of a CPU is host memory already: enlarge it with --kv-cache-memory, or use a GPU",
        ),
        (
            !is_on_host && !is_for_gpu,
            "pages on a GPU are not kept there yet: use --kv-host-memory, or --device cpu",
        ),
        (
            is_encoder,
            "an encoder keeps no keys and values: leave it out",
        ),
    ];
    if let Some((_, why)) = refused.into_iter().find(|(is_so, _)| *is_so) {
        return Err(Error::Config(format!("{option}: {why}")));
    }
    let mut places = Vec::new();
    let folders = options.kv_disk.iter().flat_map(|disk| &disk.folders);
    for folder in folders.map(|folder| &folder.path) {
        let place = place(folder);
        if places.contains(&place) {
            let folder = folder.display();
            return Err(Error::Config(format!(
                "--kv-disk names the folder {folder} twice: name each disk once"
            )));
        }
        places.push(place);
    }
    Ok(())
}

/// The path of a file or folder without links and steps up. Parts that do not exist yet become folders.
pub(crate) fn place(folder: &Path) -> PathBuf {
    let absolute = std::path::absolute(folder).unwrap_or_else(|_| folder.to_owned());
    let mut place = PathBuf::new();
    for part in absolute.components() {
        if part == Component::ParentDir {
            place.pop();
        } else {
            place.push(part);
            place = fs::canonicalize(&place).unwrap_or(place);
        }
    }
    place
}

#[cfg(test)]
mod tests {
    use corella_engine::KvDiskFolder;

    use super::*;
    use crate::KvDiskOptions;

    fn disks(folders: &[&str]) -> KvDiskOptions {
        let folders = folders.iter().map(|path| KvDiskFolder::new(path, 1));
        KvDiskOptions {
            folders: folders.collect(),
            keeps_salted: false,
        }
    }

    #[test]
    fn a_folder_that_is_named_twice_is_refused_by_its_name() {
        let refusal = |folders: &[&str]| {
            let options = LlmOptions {
                kv_disk: Some(disks(folders)),
                ..LlmOptions::default()
            };
            let mut limits = SchedulerConfig::new(64, 16, 100);
            let refusal = set_limits(&mut limits, &options, true, false);
            refusal.err().map(|error| error.to_string())
        };
        assert_eq!(refusal(&["/nowhere/a", "/nowhere/b", "/nowhere/a/b"]), None);
        for twice in [
            "/nowhere/a",
            "/nowhere/a/",
            "/nowhere/./a",
            "/./nowhere//a",
            "/nowhere/new/../a",
            "/../new/../nowhere/a",
        ] {
            let refusal = refusal(&["/nowhere/a", "b", twice]).unwrap();
            assert!(
                refusal.contains(&format!("the folder {twice} twice")),
                "{refusal}"
            );
        }
        // A link leads to a folder that is named, too.
        let folder = std::env::temp_dir().join(format!("corella-kv-twice-{}", std::process::id()));
        fs::create_dir_all(&folder).unwrap();
        let link = folder.join("link");
        std::os::unix::fs::symlink(&folder, &link).unwrap();
        let behind_new = folder.join("new/../link");
        let [folder, link, behind_new] =
            [&folder, &link, &behind_new].map(|path| path.to_str().unwrap());
        let found = [link, behind_new].map(|twice| refusal(&[folder, twice]));
        fs::remove_dir_all(folder).unwrap();
        for (found, twice) in found.into_iter().zip([link, behind_new]) {
            assert!(found.unwrap().contains(twice));
        }
    }

    /// Returns an empty text if the options are taken.
    fn refusal(
        limits: &SchedulerConfig,
        options: &LlmOptions,
        is_on_host: bool,
        is_encoder: bool,
    ) -> String {
        let mut limits = limits.clone();
        let refusal = set_limits(&mut limits, options, is_on_host, is_encoder);
        refusal.map_or_else(|error| error.to_string(), |()| String::new())
    }

    #[test]
    fn host_memory_is_for_pages_on_a_gpu() {
        let mut options = LlmOptions {
            kv_host_bytes: Some(1 << 30),
            ..LlmOptions::default()
        };
        let plain = SchedulerConfig::new(64, 16, 100);
        assert_eq!(refusal(&plain, &options, false, false), "");
        assert_eq!(
            refusal(&plain, &options, true, false),
            "--kv-host-memory: the KV cache of a CPU is host memory already: enlarge it with --kv-cache-memory, or use \
             a GPU"
        );
        assert!(refusal(&plain, &options, false, true).contains("encoder"));
        let mut limits = plain.clone();
        set_limits(&mut limits, &options, false, false).unwrap();
        assert_eq!(limits.max_fetched_pages, 48);
        options.has_kv_store = true;
        let both = refusal(&plain, &options, false, false);
        assert!(both.starts_with("--kv-host-memory and --kv-store do not work together"));
        options.has_kv_store = false;
        options.kv_disk = Some(disks(&["/nowhere"]));
        let both = refusal(&plain, &options, false, false);
        assert!(both.starts_with("--kv-host-memory and --kv-disk do not work together"));
    }

    #[test]
    fn only_plain_blocks_on_the_host_are_kept() {
        let options = LlmOptions {
            kv_disk: Some(disks(&["/nowhere"])),
            ..LlmOptions::default()
        };
        let plain = SchedulerConfig::new(64, 16, 100);
        let refusal = |limits: &SchedulerConfig, is_on_host, is_encoder| {
            refusal(limits, &options, is_on_host, is_encoder)
        };
        assert_eq!(refusal(&plain, true, false), "");
        let on_gpu = refusal(&plain, false, false);
        assert!(on_gpu.contains("--device cpu") && on_gpu.contains("--kv-host-memory"));
        assert!(refusal(&plain, true, true).contains("encoder"));
        let mut uncached = plain.clone();
        uncached.enable_prefix_caching = false;
        assert!(refusal(&uncached, true, false).contains("--no-enable-prefix-caching"));
        let mut limits = plain.clone();
        set_limits(&mut limits, &options, true, false).unwrap();
        assert_eq!(
            (limits.max_fetched_pages, limits.max_served_pages),
            (48, 48)
        );
        set_limits(&mut limits, &LlmOptions::default(), false, true).unwrap();
    }
}
