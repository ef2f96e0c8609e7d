// The browser's storage, which may be closed, full, or hold what another version of the page wrote.
//
// A page must work without it, so nothing here throws.

const AREAS = { tab: () => sessionStorage, browser: () => localStorage };

/** `null` where there is nothing. */
export function readText(area, key) {
  try {
    return AREAS[area]().getItem(key);
  } catch {
    return null;
  }
}

/** False if it could not be kept. */
export function writeText(area, key, text) {
  try {
    AREAS[area]().setItem(key, text);
    return true;
  } catch {
    return false;
  }
}

/** `null` where there is nothing that can be read. */
export function readJson(area, key) {
  try {
    return JSON.parse(readText(area, key));
  } catch {
    return null;
  }
}

export const writeJson = (area, key, value) => writeText(area, key, JSON.stringify(value));
