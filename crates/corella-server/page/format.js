// Numbers for people.

const whole = new Intl.NumberFormat("en");

export const count = (number) => whole.format(number);

/** One decimal where it tells something: 0.4, 1, 4.2, 42, 4,200. */
export function rate(number) {
  if (number > 0 && number < 0.05) {
    return "< 0.1";
  }
  return number >= 9.95 ? whole.format(Math.round(number)) : String(Number(number.toFixed(1)));
}

export function duration(ms) {
  if (ms < 1) {
    return `${ms.toFixed(2)} ms`;
  }
  if (ms < 1000) {
    return `${ms < 10 ? ms.toFixed(1) : ms.toFixed(0)} ms`;
  }
  const s = ms / 1000;
  if (s < 60) {
    return `${s < 10 ? s.toFixed(1) : s.toFixed(0)} s`;
  }
  const [number, unit] = s < 3600 ? [s / 60, "min"] : s < 48 * 3600 ? [s / 3600, "h"] : [s / 86_400, "days"];
  return `${number < 10 ? Number(number.toFixed(1)) : number.toFixed(0)} ${unit}`;
}

export function percent(share) {
  const number = 100 * share;
  return `${number >= 99.95 || number === 0 ? number.toFixed(0) : number.toFixed(number < 1 ? 2 : 1)} %`;
}

export function bytes(number) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let unit = 0;
  for (; number >= 1024 && unit < units.length - 1; unit += 1) {
    number /= 1024;
  }
  return `${rate(number)} ${units[unit]}`;
}

/** Makes an element with properties and children. */
export function element(tag, properties = {}, ...children) {
  const made = Object.assign(document.createElement(tag), properties);
  made.append(...children);
  return made;
}
