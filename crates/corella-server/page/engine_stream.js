// The stream of `/engine/events`: reads it, notices when nothing comes, and begins again when it has ended.

import { call, events } from "./api.js";

/** Snapshots come four times a second. */
const SILENCE_MS = 2000;

/** After this time without a snapshot the connection may be dead, for example after a sleep of the computer. */
const DEAD_MS = 10_000;

const TICK_MS = 500;
const MIN_PAUSE_MS = 1000;
const MAX_PAUSE_MS = 10_000;

export class EngineStream {
  /**
   * `onTrouble` is called with a description of the trouble, repeatedly while the trouble lasts. `onAsleep` is called
   * when the model is not loaded, and `onUnauthorized` when the server wants a key; the stream is closed then. `onEnd`
   * is called when the server has ended the stream, which begins again if it is not closed.
   */
  constructor({ onServer, onSnapshot, onTrouble, onAsleep, onEnd, onUnauthorized }) {
    Object.assign(this, { onServer, onSnapshot, onTrouble, onAsleep, onEnd, onUnauthorized });
    this.control = null;
    this.path = "/engine/events";
    this.endPause = () => {};
    addEventListener("online", () => this.endPause());
  }

  get isOpen() {
    return this.control !== null;
  }

  open() {
    this.heard = performance.now();
    this.timer = setInterval(() => this.#tick(), TICK_MS);
    this.#begin();
  }

  close() {
    clearInterval(this.timer);
    this.control?.abort();
    this.control = null;
    this.endPause();
  }

  #begin() {
    this.control?.abort();
    this.control = new AbortController();
    this.begun = performance.now();
    this.failure = null;
    this.#read(this.control);
  }

  #tick() {
    const now = performance.now();
    const silentMs = now - this.heard;
    if (this.failure) {
      this.onTrouble(this.failure);
    } else if (silentMs > SILENCE_MS) {
      this.onTrouble(`no news for ${Math.floor(silentMs / 1000)} s`);
      if (Math.min(silentMs, now - this.begun) > DEAD_MS) {
        this.#begin();
      }
    }
  }

  async #read(control) {
    let pauseMs = MIN_PAUSE_MS;
    while (this.control === control) {
      try {
        const response = await call(this.path, { signal: control.signal });
        this.failure = null;
        for await (const { name, data } of events(response)) {
          if (name === "server") {
            this.onServer(data);
          } else if (name === "snapshot") {
            this.heard = performance.now();
            pauseMs = MIN_PAUSE_MS;
            this.onSnapshot(data);
          }
        }
        this.failure = "not reachable, trying again";
        this.onEnd();
      } catch (error) {
        if (this.control !== control) {
          return;
        }
        if (error.status === 401) {
          this.close();
          this.onUnauthorized();
          return;
        }
        if (error.code === "model_asleep") {
          this.close();
          this.onAsleep();
          return;
        }
        this.failure = error.status ? `error ${error.status}, trying again` : "not reachable, trying again";
      }
      if (this.control === control) {
        this.onTrouble(this.failure);
        await this.#pause(pauseMs);
        pauseMs = Math.min(2 * pauseMs, MAX_PAUSE_MS);
      }
    }
  }

  /** Ends early when the network is back or the stream is closed. */
  #pause(ms) {
    return new Promise((resolve) => {
      this.endPause = resolve;
      setTimeout(resolve, ms);
    });
  }
}
