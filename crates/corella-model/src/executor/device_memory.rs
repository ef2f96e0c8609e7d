//! The memory of a device for weights and KV pages.

/// The memory that weights and KV pages share.
#[derive(Clone, Debug)]
pub struct DeviceMemory {
    /// Bytes that may be used now.
    pub available_bytes: u64,
    /// Bytes that could be used if no other program ran.
    pub total_bytes: u64,
    /// The share of the memory beside the weights that the KV cache gets by default, from 0 to 1.
    pub default_share: f64,
    /// All memory of the host in bytes, for a device with memory of its own.
    pub host_bytes: Option<u64>,
}

impl DeviceMemory {
    /// The memory of this machine. Other programs need some of it too.
    pub fn of_host() -> Self {
        Self {
            available_bytes: available_bytes(),
            total_bytes: host_bytes(),
            default_share: 0.5,
            host_bytes: None,
        }
    }

    /// The memory that remains if `num_bytes` are used otherwise.
    pub fn without(self, num_bytes: u64) -> Self {
        Self {
            available_bytes: self.available_bytes.saturating_sub(num_bytes),
            total_bytes: self.total_bytes.saturating_sub(num_bytes),
            ..self
        }
    }
}

/// Memory that can be allocated now without swapping: the smaller of the free memory of the machine and of the control
/// group.
fn available_bytes() -> u64 {
    // If neither can be read, assume an amount that most machines have.
    const UNKNOWN: u64 = 4 << 30;
    let machine = machine_bytes("MemAvailable:");
    // The control group counts the page cache as used, although it can be reclaimed.
    let reclaimable = group_text("memory.stat")
        .and_then(|text| {
            let line = text
                .lines()
                .find_map(|line| line.strip_prefix("inactive_file "))?;
            line.trim().parse::<u64>().ok()
        })
        .unwrap_or(0);
    let group = group_bytes("memory.max")
        .zip(group_bytes("memory.current"))
        .map(|(max, current)| max.saturating_sub(current.saturating_sub(reclaimable)));
    match (machine, group) {
        (Some(machine), Some(group)) => machine.min(group),
        (Some(bytes), None) | (None, Some(bytes)) => bytes,
        (None, None) => UNKNOWN,
    }
}

/// Bytes of this machine's memory that this process could use if no other program ran.
pub fn host_bytes() -> u64 {
    let limits = [machine_bytes("MemTotal:"), group_bytes("memory.max")];
    limits.into_iter().flatten().min().unwrap_or(u64::MAX)
}

fn machine_bytes(field: &str) -> Option<u64> {
    let text = std::fs::read_to_string("/proc/meminfo").ok()?;
    let value = text.lines().find_map(|line| line.strip_prefix(field))?;
    let kib: u64 = value.trim().strip_suffix("kB")?.trim().parse().ok()?;
    Some(kib << 10)
}

fn group_text(name: &str) -> Option<String> {
    std::fs::read_to_string(format!("/sys/fs/cgroup/{name}")).ok()
}

fn group_bytes(name: &str) -> Option<u64> {
    group_text(name)?.trim().parse().ok()
}
