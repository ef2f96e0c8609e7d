// The requests that run and wait, a row each.

import { count, duration, element } from "./format.js";

const MAX_ROWS = 40;

const at = (id) => document.getElementById(id);

export function drawRequests({ running, waiting, receiving, list }) {
  const num = running + waiting + receiving;
  const rows = list.slice(0, MAX_ROWS);
  at("no-requests").hidden = num > 0;
  at("requests-scroller").hidden = rows.length === 0;
  at("requests").replaceChildren(...rows.map(row));
  const more = at("more-requests");
  more.hidden = num <= rows.length;
  more.textContent = `… and ${count(num - rows.length)} more`;
}

function row(request) {
  const { id, status, age_ms, prompt_tokens, cached_tokens, output_tokens, max_tokens, pages, preemptions } = request;
  const tag = element("span", { className: `tag ${status}-tag` }, element("i"), status);
  const again = preemptions > 0 ? ` ↺${preemptions}` : "";
  const cells = [
    count(id),
    element("span", {}, tag, again),
    count(prompt_tokens),
    count(cached_tokens),
    `${count(output_tokens)}/${count(max_tokens)}`,
    count(pages),
    duration(age_ms),
  ];
  return element("tr", {}, ...cells.map((cell) => element("td", {}, cell)));
}
