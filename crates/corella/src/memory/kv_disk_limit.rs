//! The limits of models whose KV blocks a disk keeps.

use corella_core::SchedulerConfig;

use crate::{Error, LlmOptions};

/// Refuses `--kv-disk` if there are no cached blocks that the disk could keep. Otherwise sets how many pages it may
/// fetch and store at once. `is_on_host` says whether the pages are in the memory of the CPU.
pub(crate) fn set_limits(
    scheduler: &mut SchedulerConfig,
    options: &LlmOptions,
    is_on_host: bool,
    is_encoder: bool,
) -> Result<(), Error> {
    if options.kv_disk.is_none() {
        return Ok(());
    }
    let refused = [
        (
            !scheduler.enable_prefix_caching,
            "it keeps pages of the prefix cache: leave out --no-enable-prefix-caching",
        ),
        (
            !is_on_host,
            "pages on a GPU are not kept yet: use --device cpu, or leave it out",
        ),
        (
            is_encoder,
            "an encoder keeps no keys and values: leave it out",
        ),
    ];
    if let Some((_, why)) = refused.into_iter().find(|(is_so, _)| *is_so) {
        return Err(Error::Config(format!("--kv-disk: {why}")));
    }
    // A conversation may fill most of the pages, and all its blocks should come back from the disk. Requests get the
    // pages that they need in any case.
    scheduler.max_fetched_pages = scheduler.num_pages - scheduler.num_pages / 4;
    scheduler.max_served_pages = scheduler.max_fetched_pages;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::KvDiskOptions;

    #[test]
    fn only_plain_blocks_on_the_host_are_kept() {
        let options = LlmOptions {
            kv_disk: Some(KvDiskOptions {
                folder: "/nowhere".into(),
                max_bytes: 1,
                keeps_salted: false,
            }),
            ..LlmOptions::default()
        };
        let plain = SchedulerConfig::new(64, 16, 100);
        let refusal = |limits: &SchedulerConfig, is_on_host, is_encoder| {
            let mut limits = limits.clone();
            let refusal = set_limits(&mut limits, &options, is_on_host, is_encoder);
            refusal
                .err()
                .map_or_else(String::new, |error| error.to_string())
        };
        assert_eq!(refusal(&plain, true, false), "");
        assert!(refusal(&plain, false, false).contains("--device cpu"));
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
