// A button that copies a text.

/** Browsers have a clipboard only for pages of this machine and of HTTPS. */
export const canCopy = () => Boolean(navigator.clipboard);

/** Copies, and says on the button how it went. */
export async function copy(text, button) {
  const said = await navigator.clipboard.writeText(text).then(() => "Copied", () => "Not allowed");
  button.textContent = said;
  setTimeout(() => { button.textContent = "Copy"; }, 1500);
}
