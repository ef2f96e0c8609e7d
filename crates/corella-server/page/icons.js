// Icons, drawn as lines on 24 × 24.

const PATHS = {
  check: "M5 12.5l4.5 4.5L19 7.5",
  clip: "M19 11.5l-7.6 7.6a4.6 4.6 0 0 1-6.5-6.5l8-8a3 3 0 0 1 4.3 4.3l-8 8a1.5 1.5 0 0 1-2.1-2.1l7-7",
  close: "M6 6l12 12M18 6L6 18",
  compose: "M12 5H5.5A1.5 1.5 0 0 0 4 6.5v12A1.5 1.5 0 0 0 5.5 20h12a1.5 1.5 0 0 0 1.5-1.5V12M9.5 14.5l.5-3 7.8-7.8a1.4 1.4 0 0 1 2 0l.5.5a1.4 1.4 0 0 1 0 2L12.5 14z",
  copy: "M9.5 8h9A1.5 1.5 0 0 1 20 9.5v9a1.5 1.5 0 0 1-1.5 1.5h-9A1.5 1.5 0 0 1 8 18.5v-9A1.5 1.5 0 0 1 9.5 8zM4 15.5V5.5A1.5 1.5 0 0 1 5.5 4h10",
  down: "M12 5v13M6 12.5l6 6 6-6",
  edit: "M4.5 19.5l.8-4L15.6 5.2a1.6 1.6 0 0 1 2.3 0l.9.9a1.6 1.6 0 0 1 0 2.3L8.5 18.7zM13.7 7.1l3.2 3.2",
  file: "M13.5 3.5h-6A1.5 1.5 0 0 0 6 5v14a1.5 1.5 0 0 0 1.5 1.5h9A1.5 1.5 0 0 0 18 19V8zM13.5 3.5V8H18",
  gear: "M12 9a3 3 0 1 0 0 6 3 3 0 0 0 0-6zM10.4 3.5h3.2l.5 2.3 1.7 1 2.2-.7 1.6 2.8-1.7 1.6v2l1.7 1.6-1.6 2.8-2.2-.7-1.7 1-.5 2.3h-3.2l-.5-2.3-1.7-1-2.2.7-1.6-2.8 1.7-1.6v-2L4.4 8.9 6 6.1l2.2.7 1.7-1z",
  pulse: "M3 12h4l2.5-6.5 5 13L17 12h4",
  remove: "M4.5 7h15M9.5 7V4.5h5V7M6.5 7l.8 12.5h9.4L17.5 7M10.5 10.5v6M13.5 10.5v6",
  retry: "M19.5 12a7.5 7.5 0 1 1-2.2-5.3L19.5 9M19.5 4.5V9H15",
  send: "M12 19V6M6 11.5L12 5.5l6 6",
  side: "M5.5 5h13A1.5 1.5 0 0 1 20 6.5v11a1.5 1.5 0 0 1-1.5 1.5h-13A1.5 1.5 0 0 1 4 17.5v-11A1.5 1.5 0 0 1 5.5 5zM9.5 5v14",
  stop: "M8 7h8a1 1 0 0 1 1 1v8a1 1 0 0 1-1 1H8a1 1 0 0 1-1-1V8a1 1 0 0 1 1-1z",
};

const SVG = "http://www.w3.org/2000/svg";

export function icon(name) {
  const svg = document.createElementNS(SVG, "svg");
  const path = document.createElementNS(SVG, "path");
  path.setAttribute("d", PATHS[name]);
  svg.setAttribute("viewBox", "0 0 24 24");
  svg.setAttribute("aria-hidden", "true");
  svg.append(path);
  return svg;
}

/** Returns a button that shows an icon, with `label` as its accessible name. */
export function iconButton(name, label, action) {
  const button = document.createElement("button");
  Object.assign(button, { type: "button", className: "icon", title: label });
  const text = document.createElement("span");
  Object.assign(text, { className: "hidden", textContent: label });
  button.append(icon(name), text);
  button.addEventListener("click", () => action(button));
  return button;
}

/** Gives buttons of the document the icons that they name. */
export function drawIcons() {
  for (const button of document.querySelectorAll("[data-icon]")) {
    button.prepend(icon(button.dataset.icon));
  }
}
