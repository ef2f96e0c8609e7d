// Buttons that copy a text.

import { icon } from "./icons.js";

/** Copies a text, and shows on the button whether that succeeded. The button has an icon and a `span` with its name. */
export async function copy(text, button) {
  const isCopied = await write(text);
  const label = button.querySelector("span");
  const image = button.querySelector("svg");
  const name = label.textContent;
  label.textContent = isCopied ? "Copied" : "Not allowed";
  image.replaceWith(icon(isCopied ? "check" : "close"));
  button.disabled = true;
  setTimeout(() => {
    label.textContent = name;
    button.querySelector("svg").replaceWith(image);
    button.disabled = false;
  }, 1500);
}

/** Browsers offer `navigator.clipboard` only to pages of this machine or over HTTPS. Others copy a selection. */
async function write(text) {
  if (navigator.clipboard) {
    return navigator.clipboard.writeText(text).then(() => true, () => false);
  }
  const focused = document.activeElement;
  const field = Object.assign(document.createElement("textarea"), { value: text, className: "hidden" });
  document.body.append(field);
  field.select();
  const isCopied = document.execCommand("copy");
  field.remove();
  focused?.focus();
  return isCopied;
}
