// This node in its cluster: its sessions, the KV rows that it sends and receives, and the other nodes that it knows.

import { bytes, count, element } from "./format.js";

const RECENT_MS = 5000;

const at = (id) => document.getElementById(id);

export class NodeList {
  constructor() {
    this.sent = [];
  }

  /** `cluster` is `null` where the server serves alone. `totals` and `now` are the engine's. */
  draw(cluster, totals, now) {
    at("nodes").hidden = !cluster;
    if (!cluster) {
      return;
    }
    const becomes = cluster.changing_to ? `, becoming ${cluster.changing_to}` : "";
    at("nodes-note").textContent = `this is a ${cluster.role} node${becomes}`;
    const figures = [["Sessions", count(cluster.sessions)], ["Loads of KV rows", count(cluster.loads)]];
    figures.push(["Blocks fetched", count(totals.fetched_blocks)]);
    if (cluster.sent_bytes !== null) {
      figures.push(["KV sent", bytes(cluster.sent_bytes)], ["KV sent per second", this.#rate(cluster.sent_bytes, now)]);
      figures.push(["Tokens that came back", count(cluster.remote_tokens)]);
    }
    at("node-figures").replaceChildren(
      ...figures.map(([label, value]) =>
        element("div", {}, element("dt", { textContent: label }), element("dd", { textContent: value })),
      ),
    );
    at("nodes-scroller").hidden = cluster.nodes.length === 0;
    at("node-rows").replaceChildren(...cluster.nodes.map(row));
    const more = cluster.num_nodes - cluster.nodes.length;
    if (more > 0) {
      at("nodes-note").textContent += `, and ${count(more)} more are known`;
    }
  }

  #rate(sentBytes, now) {
    this.sent = this.sent.filter(({ time, total }) => time > now - RECENT_MS && time < now && total <= sentBytes);
    this.sent.push({ time: now, total: sentBytes });
    const [first] = this.sent;
    const seconds = (now - first.time) / 1000;
    return seconds > 0 ? `${bytes((sentBytes - first.total) / seconds)}/s` : "–";
  }
}

function row({ id, address, standing, running, waiting, free_pages, bandwidth }) {
  const known = (number) => (number === null ? "–" : count(number));
  const state = standing ?? "known";
  const tag = element("span", { className: `tag ${state}-tag` }, element("i"), state);
  const link = bandwidth === null ? "–" : `${bytes(bandwidth)}/s`;
  const cells = [element("span", { textContent: id, title: address }), tag, known(running), known(waiting), known(free_pages), link];
  return element("tr", {}, ...cells.map((cell) => element("td", {}, cell)));
}
