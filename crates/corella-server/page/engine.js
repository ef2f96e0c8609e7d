// The picture of the engine, drawn from `/engine/events` while somebody looks at it.

import { call, events } from "./api.js";
import { count, duration, element, percent, rate } from "./format.js";
import { LatencyChart } from "./latency_chart.js";
import { NodeList } from "./node_list.js";
import { PageMap } from "./page_map.js";
import { drawRequests } from "./request_table.js";
import { StepChart } from "./step_chart.js";

/** Rates and latencies in figures are those of so many milliseconds. */
const RECENT_MS = 5000;
const HIT_RATE_MS = 60_000;
const RETRY_MS = 2000;

const at = (id) => document.getElementById(id);

const FIGURES = [
  ["running", "Running"],
  ["waiting", "Waiting"],
  ["output", "Output tokens/s"],
  ["prompt", "Prefill tokens/s"],
  ["first", "TTFT, median"],
  ["inter", "ITL, median"],
  ["hits", "Prefix hits, last min"],
  ["usage", "KV in use"],
];

export class Engine {
  /** `onServer` gets the event that opens each stream. */
  constructor(onUnauthorized, onServer) {
    this.onUnauthorized = onUnauthorized;
    this.onServer = onServer;
    this.isPaused = false;
    this.needsKey = false;
    this.stream = null;
    this.snapshots = [];
    this.steps = new StepChart(at("steps"));
    this.pages = new PageMap(at("pages"), at("pages-legend"), at("pages-note"));
    this.first = new LatencyChart(at("first"));
    this.inter = new LatencyChart(at("inter"));
    this.nodes = new NodeList();
    this.figures = new Map(
      FIGURES.map(([name, label]) => {
        const value = element("dd", { textContent: "–" });
        at("figures").append(element("div", {}, element("dt", { textContent: label }), value));
        return [name, value];
      }),
    );
    at("pause").addEventListener("click", () => {
      this.isPaused = !this.isPaused;
      at("pause").setAttribute("aria-pressed", String(this.isPaused));
      this.update();
    });
    document.addEventListener("visibilitychange", () => this.update());
    addEventListener("resize", () => this.update());
  }

  /** Begins again, for example with another key. */
  restart() {
    this.needsKey = false;
    this.#leave();
    this.update();
  }

  /** Watches when it can be seen, and at no other time: the server computes nothing for nobody. */
  update() {
    const isSeen = !document.hidden && at("engine").clientWidth > 0;
    if (!isSeen || this.isPaused || this.needsKey) {
      this.#leave();
      this.#say(this.isPaused ? "paused" : "", this.isPaused ? "paused" : "not watching");
    } else if (!this.stream) {
      this.#watch();
    }
    this.draw();
  }

  draw() {
    this.steps.draw();
    this.pages.draw();
    this.first.draw();
    this.inter.draw();
  }

  #leave() {
    this.stream?.abort();
    this.stream = null;
  }

  async #watch() {
    const stream = new AbortController();
    this.stream = stream;
    while (this.stream === stream) {
      try {
        this.#say("", "connecting");
        const response = await call("/engine/events", { signal: stream.signal });
        for await (const { name, data } of events(response)) {
          if (name === "server") {
            this.#begin(data);
          } else if (name === "snapshot") {
            this.#show(data);
          }
        }
      } catch (error) {
        if (error.name === "AbortError" || this.stream !== stream) {
          return;
        }
        if (error.status === 401) {
          this.needsKey = true;
          this.stream = null;
          this.#say("trouble", "needs the API key");
          this.onUnauthorized();
          return;
        }
      }
      if (this.stream === stream) {
        this.#say("trouble", "not reachable, trying again");
        await new Promise((resolve) => { setTimeout(resolve, RETRY_MS); });
      }
    }
  }

  /** A server that was started again counts from zero. */
  #begin(server) {
    if (this.server?.started_unix_s !== server.started_unix_s) {
      this.snapshots = [];
      for (const chart of [this.steps, this.first, this.inter]) {
        chart.clear();
      }
    }
    this.server = server;
    this.onServer(server);
  }

  #show(snapshot) {
    const now = snapshot.time_ms;
    this.#say(snapshot.state === "ready" ? "live" : "trouble", snapshot.state === "ready" ? "live" : snapshot.state);
    this.snapshots.push({ now, totals: snapshot.totals });
    while (this.snapshots.length > 1 && this.snapshots[0].now < now - HIT_RATE_MS) {
      this.snapshots.shift();
    }
    this.steps.push(snapshot.steps, now);
    this.pages.push(snapshot.kv);
    this.first.push(snapshot.latency.time_to_first_token, now);
    this.inter.push(snapshot.latency.inter_token, now);
    this.draw();
    this.#drawFigures(snapshot);
    drawRequests(snapshot.requests);
    this.nodes.draw(snapshot.cluster, now);
  }

  #drawFigures({ time_ms: now, requests, kv, totals }) {
    const [oldest] = this.snapshots;
    const recent = this.snapshots.find((other) => other.now >= now - RECENT_MS);
    const seconds = (now - recent.now) / 1000;
    const perSecond = (tokens) => (seconds > 0 ? rate(tokens / seconds) : "–");
    const computed = this.steps.steps.filter(({ time }) => time > recent.now);
    const prefill = computed.reduce((total, step) => total + step.prefill * step.num, 0);
    const queries = totals.prefix_query_tokens - oldest.totals.prefix_query_tokens;
    const hits = totals.prefix_hit_tokens - oldest.totals.prefix_hit_tokens;
    const latency = (chart) => {
      const ms = chart.recent(RECENT_MS);
      return ms === null ? "–" : duration(ms);
    };
    const texts = {
      running: count(requests.running),
      waiting: count(requests.waiting + requests.receiving),
      output: perSecond(totals.generated_tokens - recent.totals.generated_tokens),
      prompt: perSecond(prefill),
      first: latency(this.first),
      inter: latency(this.inter),
      hits: queries > 0 ? percent(hits / queries) : "–",
      usage: percent(kv.in_use / Math.max(kv.pages, 1)),
    };
    for (const [name, text] of Object.entries(texts)) {
      this.figures.get(name).textContent = text;
    }
  }

  #say(state, text) {
    const shown = at("feed-state");
    if (shown.textContent !== text) {
      shown.textContent = text;
    }
    shown.dataset.state = state;
  }
}
