"""The plot of `next_turn.py`: times to the first token on a logarithmic scale."""

import math

COLOURS = ("#d62728", "#1f77b4", "#ff7f0e", "#2ca02c", "#7f7f7f")
LEFT, HEIGHT, SPACE = 60, 240, 60
BAR, GAP = 20, 26


def plot(cells, modes):
    """Returns an SVG with a row for each place: a bar for each mode up to the median, and a line from lowest to
    highest."""
    places = list(dict.fromkeys(cell.place for cell in cells))
    times = [time for cell in cells for mode in cell.modes() for time in cell.times_ms(mode)]
    low, high = math.floor(math.log10(min(times))), math.ceil(math.log10(max(times)))
    per_place = max(sum(cell.place == place for cell in cells) for place in places)
    width = LEFT + per_place * (len(modes) * BAR + GAP)
    parts = []
    for at, mode in enumerate(modes):
        x = LEFT + at * 120
        parts.append(f'<rect x="{x}" y="8" width="10" height="10" fill="{COLOURS[at]}"/>')
        parts.append(f'<text x="{x + 15}" y="18">{mode}</text>')
    for row, place in enumerate(places):
        top = SPACE + row * (HEIGHT + 2 * SPACE)

        def y_of(time_ms):
            return top + HEIGHT * (high - math.log10(time_ms)) / max(1, high - low)

        parts.append(f'<text x="{LEFT}" y="{top - 10}">{place}: time to first token, ms</text>')
        for power in range(low, high + 1):
            y = y_of(10**power)
            parts.append(f'<path d="M{LEFT} {y:.1f}H{width}" stroke="#e4e4e4"/>')
            parts.append(f'<text x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{10**power:g}</text>')
        of_place = [cell for cell in cells if cell.place == place]
        for column, cell in enumerate(of_place):
            left = LEFT + GAP / 2 + column * (len(modes) * BAR + GAP)
            for at, mode in enumerate(modes):
                if mode in cell.modes():
                    parts.append(bar(left + at * BAR, top + HEIGHT, cell.median_ms(mode), cell.times_ms(mode), y_of, COLOURS[at]))
            name = f"{cell.num_prompt:,} + {cell.num_answer:,} tokens"
            middle = left + len(modes) * BAR / 2
            parts.append(f'<text x="{middle:.1f}" y="{top + HEIGHT + 18}" text-anchor="middle">{name}</text>')
    height = len(places) * (HEIGHT + 2 * SPACE)
    return (f'<svg xmlns="http://www.w3.org/2000/svg" width="{max(width, LEFT + len(modes) * 120)}" height="{height}">'
            f'<style>text{{font:12px system-ui,sans-serif}}</style>{"".join(parts)}</svg>\n')


def bar(x, bottom, median_ms, times_ms, y_of, colour):
    top, middle = y_of(median_ms), x + BAR / 2 - 1
    return (f'<rect x="{x:.1f}" y="{top:.1f}" width="{BAR - 2}" height="{bottom - top:.1f}" fill="{colour}"/>'
            f'<path d="M{middle:.1f} {y_of(max(times_ms)):.1f}V{y_of(min(times_ms)):.1f}" stroke="#000"/>'
            f'<text x="{middle:.1f}" y="{top - 4:.1f}" text-anchor="middle" style="font-size:9px">{median_ms:.0f}</text>')
