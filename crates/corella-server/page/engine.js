// The picture of the engine, drawn from `/engine/events` while it can be seen.

import { count, duration, element, percent, rate } from "./format.js";
import { EngineStream } from "./engine_stream.js";
import { LatencyChart } from "./latency_chart.js";
import { stateOf } from "./models.js";
import { NodeList } from "./node_list.js";
import { PageMap } from "./page_map.js";
import { drawRequests, forgetRequests } from "./request_table.js";
import { StepChart } from "./step_chart.js";
import { drawTiers } from "./tier_list.js";

/** Rates and latencies in figures are those of so many milliseconds. */
const RECENT_MS = 5000;
const HIT_RATE_MS = 60_000;

const at = (id) => document.getElementById(id);

/** Names and labels, with the unit in the strip for those that it has, too. */
const FIGURES = [
  ["running", "Running", "running"],
  ["waiting", "Waiting", "waiting"],
  ["output", "Output tokens/s", "tokens/s"],
  ["prompt", "Prefill tokens/s"],
  ["first", "TTFT, median", "TTFT"],
  ["inter", "ITL, median"],
  ["hits", "Prefix hits, last min"],
  ["usage", "KV in use", "KV in use"],
];

export class Engine {
  /**
   * `onServer` gets the event that opens each stream, and whether another server was there before. `onEnd` is called
   * when the server has ended a stream: the model may have been unloaded.
   */
  constructor(onUnauthorized, onServer, onEnd) {
    this.onServer = onServer;
    /** Nothing is watched before it is known which model. */
    this.hasBegun = false;
    /** Why the model has no engine now, if it has none. */
    this.sleep = null;
    this.isPaused = false;
    this.needsKey = false;
    this.server = null;
    this.snapshots = [];
    /** When the newest snapshot came, by the clock of the page. */
    this.shown = null;
    this.stream = new EngineStream({
      onServer: (event) => this.#begin(event),
      onSnapshot: (event) => this.#show(event),
      onTrouble: (text) => this.#showTrouble(text),
      onAsleep: () => {
        this.sleep = "not loaded";
        this.update();
        onEnd();
      },
      onEnd,
      onUnauthorized: () => {
        this.needsKey = true;
        this.#say("trouble", "needs the API key");
        forgetRequests();
        onUnauthorized();
      },
    });
    this.steps = new StepChart(at("steps"));
    this.pages = new PageMap(at("pages"), at("pages-legend"), at("pages-note"));
    this.first = new LatencyChart(at("first"));
    this.inter = new LatencyChart(at("inter"));
    this.charts = [this.steps, this.first, this.inter];
    this.nodes = new NodeList();
    this.figures = new Map(
      FIGURES.map(([name, label, unit]) => {
        const value = element("dd", { textContent: "–" });
        at("figures").append(element("div", {}, element("dt", { textContent: label }), value));
        if (!unit) {
          return [name, [value]];
        }
        const short = element("b", { textContent: "–" });
        at("strip-figures").append(element("span", {}, short, ` ${unit}`));
        return [name, [value, short]];
      }),
    );
    at("pause").addEventListener("click", () => {
      this.isPaused = !this.isPaused;
      at("pause").textContent = this.isPaused ? "Resume" : "Pause";
      this.update();
    });
    document.addEventListener("visibilitychange", () => this.update());
    addEventListener("resize", () => this.update());
  }

  /** Watches this model of several; `null` means the only one. A model that is not loaded has no engine. */
  setModel(name, status) {
    const path = name === null ? "/engine/events" : `/engine/events?model=${encodeURIComponent(name)}`;
    const sleep = status && status.value !== "loaded" ? stateOf(status) : null;
    if (path !== this.stream.path || sleep !== this.sleep) {
      this.stream.close();
      if (path !== this.stream.path) {
        this.#forget();
        this.shown = null;
        at("server").textContent = "";
      }
      this.stream.path = path;
      this.sleep = sleep;
      this.update();
    }
  }

  /** Begins again, for example with another key. */
  restart() {
    this.hasBegun = true;
    this.needsKey = false;
    this.stream.close();
    this.update();
  }

  /** Watches when it can be seen, and at no other time: the server computes nothing for nobody. */
  update() {
    const isSeen = !document.hidden && [at("engine"), at("strip")].some(({ clientWidth }) => clientWidth > 0);
    if (this.needsKey || !this.hasBegun) {
      this.stream.close();
    } else if (!isSeen || this.isPaused) {
      this.stream.close();
      this.#say(this.isPaused ? "paused" : "", this.isPaused ? "paused" : "not watching");
    } else if (this.sleep !== null) {
      this.#showTrouble(this.sleep, "asleep");
    } else if (!this.stream.isOpen) {
      if (this.shown === null) {
        this.#say("", "connecting");
      }
      this.stream.open();
    }
    this.draw();
  }

  draw() {
    this.charts.forEach((chart) => chart.draw());
    this.pages.draw();
  }

  /** A server that was started again counts from zero. */
  #begin(server) {
    const isOther = this.server?.started_unix_s !== server.started_unix_s;
    if (isOther || this.server.model !== server.model) {
      this.#forget();
    }
    const wasKnown = this.server !== null;
    this.server = server;
    this.onServer(server, wasKnown && isOther);
  }

  #forget() {
    this.snapshots = [];
    this.charts.forEach((chart) => chart.clear());
  }

  #show(snapshot) {
    const now = snapshot.time_ms;
    // The engine of a model that was loaded again.
    if (now < (this.snapshots.at(-1)?.now ?? 0)) {
      this.#forget();
    }
    this.shown = { now, came: performance.now() };
    delete at("engine").dataset.stale;
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
    drawTiers(snapshot.kv);
    this.nodes.draw(snapshot.cluster, snapshot.totals, now);
    at("legend-drafts").hidden = snapshot.totals.draft_tokens === 0;
    this.#describe(now);
  }

  /** What is shown is old. Its figures go, and the clock of the charts goes on, so that the gap can be seen. */
  #showTrouble(text, state = "trouble") {
    this.#say(state, text);
    at("engine").dataset.stale = "";
    forgetRequests();
    for (const figure of [...this.figures.values()].flat()) {
      figure.textContent = "–";
    }
    if (this.shown) {
      const now = this.shown.now + performance.now() - this.shown.came;
      this.charts.forEach((chart) => chart.moveTo(now));
      this.draw();
    }
  }

  /** The server in a line. */
  #describe(now) {
    const { version, model, max_model_len, max_num_seqs } = this.server;
    const parts = [
      `Corella ${version}`,
      model,
      `context ${count(max_model_len)} tokens`,
      `at most ${count(max_num_seqs)} requests at once`,
      now < 60_000 ? "started just now" : `up ${duration(now)}`,
    ];
    const text = parts.join(" · ");
    if (at("server").textContent !== text) {
      at("server").textContent = text;
    }
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
      this.figures.get(name).forEach((figure) => { figure.textContent = text; });
    }
  }

  /** Only a change between trouble and none is announced, because the seconds of a silence would be too much. */
  #say(state, text) {
    const shown = at("feed-state");
    if (shown.textContent !== text) {
      shown.textContent = text;
    }
    const was = shown.dataset.state;
    shown.dataset.state = state;
    at("strip-state").dataset.state = state;
    at("strip").title = `Engine: ${text}`;
    if (state === "trouble" && was !== "trouble") {
      at("feed-announcer").textContent = `Engine: ${text}`;
    } else if (state === "live" && was === "trouble") {
      at("feed-announcer").textContent = "Engine: live again";
    }
  }
}
