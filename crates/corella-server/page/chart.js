// Drawing on a canvas: its size, its colours, and the frame that both kinds of charts share.

const SECONDS = 60;

/** The width of the charts in milliseconds. */
export const SPAN_MS = SECONDS * 1000;

/** Clears a canvas, and returns its context in CSS pixels; `null` while the canvas is not shown. */
export function prepare(canvas) {
  const { clientWidth: width, clientHeight: height } = canvas;
  if (width === 0 || height === 0) {
    return null;
  }
  const scale = devicePixelRatio || 1;
  const [w, h] = [Math.round(width * scale), Math.round(height * scale)];
  if (canvas.width !== w || canvas.height !== h) {
    canvas.width = w;
    canvas.height = h;
  }
  const context = canvas.getContext("2d");
  context.setTransform(scale, 0, 0, scale, 0, 0);
  context.clearRect(0, 0, width, height);
  return { context, width, height };
}

/** Returns the colour of a class in the current theme: a canvas cannot read style sheets. */
export function colour(className) {
  let probe = probes.get(className);
  if (!probe) {
    probe = document.createElement("i");
    probe.className = className;
    probe.hidden = true;
    document.body.append(probe);
    probes.set(className, probe);
  }
  const style = getComputedStyle(probe);
  return className === "quiet" ? style.color : style.backgroundColor;
}

const probes = new Map();

/** Returns the least product of a factor and a power of ten that is at least `value`. The last factor is 10 or more. */
export function ceiling(value, factors) {
  const power = 10 ** Math.floor(Math.log10(value));
  return factors.map((factor) => factor * power).find((round) => round >= value * 0.999);
}

/** Draws lines at half and full height with their values, and the seconds below. Returns the rectangle for the data. */
export function frame({ context, width, height }, half, top, label) {
  const area = { left: 0, top: 14, width, height: height - 14 - 16 };
  context.font = "11px system-ui, sans-serif";
  context.fillStyle = colour("quiet");
  context.strokeStyle = colour("free");
  context.lineWidth = 1;
  for (const [share, value] of [[0, 0], [0.5, half], [1, top]]) {
    const y = Math.round(area.top + area.height * (1 - share)) + 0.5;
    context.beginPath();
    context.moveTo(area.left, y);
    context.lineTo(area.left + area.width, y);
    context.stroke();
    if (share > 0) {
      context.fillText(label(value), 2, y - 3);
    }
  }
  const y = height - 3;
  context.textAlign = "left";
  context.fillText(`${SECONDS} s ago`, 2, y);
  context.textAlign = "right";
  context.fillText("now", width - 2, y);
  context.textAlign = "left";
  return area;
}

/** Drops entries that are older than the width of the charts. `time` is the time at the right end. */
export function dropOld(list, now) {
  const first = list.findIndex(({ time }) => time > now - SPAN_MS - 2000);
  list.splice(0, first === -1 ? list.length : first);
}
