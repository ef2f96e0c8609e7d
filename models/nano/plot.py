"""Draws the loss curve of a run as a small SVG: training loss and held-out loss over tokens."""

import json
import math
from pathlib import Path

HERE = Path(__file__).parent
W, H, LEFT, BOTTOM = 720, 360, 50, 40


def main():
    rows = [json.loads(line) for line in (HERE / "run" / "log.jsonl").read_text().splitlines()]
    newest = {}
    for r in rows:  # a run that was resumed has written some steps twice; the later line counts
        newest[("held_out" in r, r["step"])] = r
    train = sorted((s, r["loss"]) for (h, s), r in newest.items() if not h)
    held = sorted((s, r["held_out"]) for (h, s), r in newest.items() if h)
    last = max(train[-1][0], held[-1][0])
    low = math.floor(math.log10(min(v for _, v in train + held)) * 5) / 5
    high = 1.0
    x = lambda step: LEFT + (W - LEFT - 20) * step / last
    y = lambda v: 20 + (H - BOTTOM - 20) * (high - math.log10(v)) / (high - low)
    line = lambda points: " ".join(f"{x(s):.1f},{y(min(v, 10)):.1f}" for s, v in points)
    out = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {W} {H}" font-family="sans-serif" font-size="12">',
           f'<rect width="{W}" height="{H}" fill="white"/>']
    for v in (10, 5, 2, 1, 0.5, 0.2, 0.1, 0.05):
        if low <= math.log10(v) <= high:
            out.append(f'<path d="M{LEFT} {y(v):.1f}H{W - 20}" stroke="#ddd"/><text x="{LEFT - 6}" y="{y(v) + 4:.1f}" text-anchor="end">{v}</text>')
    tokens = last * 4096 / 1e6
    for m in range(0, int(tokens) + 1, max(1, round(tokens / 8))):
        out.append(f'<text x="{x(m * 1e6 / 4096):.1f}" y="{H - 22}" text-anchor="middle">{m}</text>')
    thin = train[:: max(1, len(train) // 400)]
    out += [f'<text x="{W / 2}" y="{H - 6}" text-anchor="middle">million tokens</text>',
            f'<polyline points="{line(thin)}" fill="none" stroke="#69c" stroke-width="1"/>',
            f'<polyline points="{line(held)}" fill="none" stroke="#c33" stroke-width="2"/>',
            f'<text x="{W - 24}" y="34" text-anchor="end" fill="#69c">training loss (weighted)</text>',
            f'<text x="{W - 24}" y="50" text-anchor="end" fill="#c33">held-out loss (replies only)</text>', "</svg>"]
    (HERE / "loss.svg").write_text("\n".join(out) + "\n")


if __name__ == "__main__":
    main()
