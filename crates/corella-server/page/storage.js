// The browser's storage, which may be closed or full, or may hold data of another version of the page.
//
// A page must work without it, so nothing here throws.

const AREAS = { tab: () => sessionStorage, browser: () => localStorage };

/** Returns the text of a key, or `null` if there is none. */
export function readText(area, key) {
  try {
    return AREAS[area]().getItem(key);
  } catch {
    return null;
  }
}

/** Returns false if the text could not be stored. */
export function writeText(area, key, text) {
  try {
    AREAS[area]().setItem(key, text);
    return true;
  } catch {
    return false;
  }
}

/** Returns the value of a key, or `null` if there is none or it is not JSON. */
export function readJson(area, key) {
  try {
    return JSON.parse(readText(area, key));
  } catch {
    return null;
  }
}

export const writeJson = (area, key, value) => writeText(area, key, JSON.stringify(value));
