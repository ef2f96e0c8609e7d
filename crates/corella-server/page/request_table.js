// The requests that run and wait, a row each.

import { count, duration, element } from "./format.js";

const MAX_ROWS = 40;

const NONE = "None at the moment.";
const NOT_KNOWN = "Not known while the server does not tell.";

const at = (id) => document.getElementById(id);

export function drawRequests({ running, waiting, receiving, list }) {
  const num = running + waiting + receiving;
  const rows = list.slice(0, MAX_ROWS);
  at("no-requests").hidden = num > 0;
  at("no-requests").textContent = NONE;
  at("requests-scroller").hidden = rows.length === 0;
  at("requests").replaceChildren(...rows.map(row));
  const more = at("more-requests");
  more.hidden = num <= rows.length;
  more.textContent = `… and ${count(num - rows.length)} more`;
}

/** Empties the table while the server reports no requests, for example without a connection. */
export function forgetRequests() {
  at("no-requests").hidden = false;
  at("no-requests").textContent = NOT_KNOWN;
  at("requests-scroller").hidden = true;
  at("more-requests").hidden = true;
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
