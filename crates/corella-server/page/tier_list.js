// The tiers of the KV cache: memory, and the disks of `--kv-disk` or the memory of `--kv-host-memory`.

import { bytes, count, element } from "./format.js";

const at = (id) => document.getElementById(id);

function note(disk, name) {
  if (!disk.on) {
    return `the ${name} is off`;
  }
  return disk.off_disks ? `disks that are off: ${disk.off_disks}` : "";
}

/** `kv.disk` is `null` without a disk. */
export function drawTiers(kv) {
  const { disk } = kv;
  at("tiers").hidden = !disk;
  if (!disk) {
    return;
  }
  const [name, where] = disk.in_memory ? ["host memory", "in host memory"] : ["disk", "on disk"];
  at("tiers-note").textContent = note(disk, name);
  const figures = [
    ["Pages in memory", count(kv.pages - kv.free), `of ${count(kv.pages)}`],
    [`Pages ${where}`, disk.on ? count(disk.pages) : "–", disk.on ? `of ${count(disk.max_pages)}` : ""],
    [`Read from ${name}`, count(disk.hits), "pages"],
    [`Written to ${name}`, bytes(disk.written_bytes), `${bytes(disk.read_bytes)} read`],
  ];
  at("tier-figures").replaceChildren(
    ...figures.map(([label, value, more]) =>
      element(
        "div",
        {},
        element("dt", { textContent: label }),
        element("dd", {}, value, " ", element("small", { textContent: more })),
      ),
    ),
  );
}
