// JSON Schemas in words.

import { element } from "./format.js";

/** Limits beyond these are those of a number's representation. */
const MAX_TOLD = 2 ** 31 - 1;

/** The address of an entry within its page. */
export const addressOf = (name) => name.replaceAll(/[^\w-]+/g, "-");

/** What a value may be, as nodes. */
export function typeOf(schema) {
  if (schema.$ref) {
    const name = schema.$ref.split("/").at(-1);
    return [element("a", { href: `#${addressOf(name)}`, textContent: name })];
  }
  const choices = (schema.anyOf ?? schema.oneOf)?.filter(({ type }) => type !== "null");
  if (choices) {
    return choices.flatMap((choice, index) => [...(index === 0 ? [] : [" or "]), ...typeOf(choice)]);
  }
  if (schema.const !== undefined) {
    return [value(schema.const)];
  }
  if (schema.enum) {
    return schema.enum.filter((one) => one !== null).flatMap((one, index) => [...(index === 0 ? [] : [" or "]), value(one)]);
  }
  const types = [schema.type ?? []].flat().filter((type) => type !== "null");
  if (types.includes("array") && schema.items) {
    return ["array of ", ...typeOf(schema.items), limits(schema)];
  }
  if (schema.properties) {
    const names = Object.keys(schema.properties);
    return ["object with ", ...names.flatMap((name, index) => [...(index === 0 ? [] : [", "]), element("code", { textContent: name })])];
  }
  return [`${types.join(" or ") || "any"}${limits(schema)}`];
}

const value = (one) => element("code", { textContent: JSON.stringify(one) });

function limits(schema) {
  const parts = [
    range(schema.minimum, schema.maximum, ""),
    schema.exclusiveMinimum === undefined ? "" : `above ${schema.exclusiveMinimum}`,
    range(schema.minLength || undefined, schema.maxLength, " characters"),
    range(schema.minItems || undefined, schema.maxItems, " items"),
  ];
  return parts.filter((part) => part !== "").map((part) => `, ${part}`).join("");
}

function range(least, most, unit) {
  const [hasLeast, hasMost] = [least, most].map((limit) => Math.abs(limit) < MAX_TOLD);
  if (hasLeast && hasMost) {
    return `${least} to ${most}${unit}`;
  }
  return hasLeast ? `at least ${least}${unit}` : hasMost ? `at most ${most}${unit}` : "";
}
