// Latencies over time: the median and the 95th percentile.

import { SPAN_MS, ceiling, colour, dropOld, frame, prepare } from "./chart.js";
import { duration } from "./format.js";

const LINES = [["slow", "p95_ms"], ["median", "p50_ms"]];

/** Snapshots further apart are not joined by a line. */
const MAX_GAP_MS = 1500;

export class LatencyChart {
  constructor(canvas) {
    this.canvas = canvas;
    this.points = [];
  }

  push(summary, now) {
    if (summary) {
      this.points.push({ time: now, ...summary });
    }
    this.moveTo(now);
  }

  /** The engine's time at the right end. */
  moveTo(now) {
    dropOld(this.points, now);
    this.now = now;
  }

  clear() {
    this.points = [];
  }

  /** The median of the last seconds, weighted by how many tokens each snapshot has. `null` without any. */
  recent(lastMs) {
    const points = this.points.filter(({ time }) => time > this.now - lastMs);
    const num = points.reduce((total, { count }) => total + count, 0);
    return num === 0 ? null : points.reduce((total, { count, p50_ms }) => total + count * p50_ms, 0) / num;
  }

  draw() {
    const surface = prepare(this.canvas);
    if (!surface) {
      return;
    }
    const { context } = surface;
    const most = Math.max(1, ...this.points.map(({ p95_ms }) => p95_ms));
    const top = ceiling(most, [1, 2, 5, 10]);
    const area = frame(surface, top / 2, top, duration);
    for (const [className, field] of LINES) {
      const tint = colour(className);
      context.strokeStyle = tint;
      context.fillStyle = tint;
      context.lineWidth = 1.75;
      let before = null;
      for (const point of this.points) {
        const x = area.left + area.width * (1 - (this.now - point.time) / SPAN_MS);
        const y = area.top + area.height * (1 - point[field] / top);
        if (before && point.time - before.time < MAX_GAP_MS) {
          context.beginPath();
          context.moveTo(before.x, before.y);
          context.lineTo(x, y);
          context.stroke();
        } else {
          context.fillRect(x - 1.5, y - 1.5, 3, 3);
        }
        before = { x, y, time: point.time };
      }
    }
    const last = this.points.at(-1);
    const text = last
      ? `Last: median ${duration(last.p50_ms)}, p95 ${duration(last.p95_ms)}`
      : "No token in the last minute";
    this.canvas.setAttribute("aria-label", text);
  }
}
