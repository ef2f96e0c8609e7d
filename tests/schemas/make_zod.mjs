// Makes zod.jsonl: JSON schemas as Zod writes them, with values that it takes and refuses.
//
//     node tests/schemas/make_zod.mjs target/ci-node > tests/schemas/zod.jsonl
//
// The folder has zod 4.6.7 in node_modules, as `cargo xtask ci set-up` leaves it. Zod tells which of the
// values beside a schema it takes. OpenAI's library writes Zod 3's patterns.

import { createRequire } from "node:module";
import { resolve } from "node:path";

const { z } = createRequire(resolve(process.argv[2], "package.json"))("zod");

const TEXTS = [
  "", "a", "A", "x", "ab", "a b", "a.b", ".a@b.ch", "a..b@c.ch", "a.b@c.ch", "a.@c.ch", "a+b@c-d.co.uk", "a@b", "ä@b.ch",
  "a@b..ch", "a@-b.ch", "P1Y", "P", "PT", "P1YT", "P1W", "P1W1D", "P1DT2H", "PT2H3M4.5S", "P1M", "PT1M", "P1D2Y", "PT0,5S",
  "example.org", "-a.org", "a.org.", "a..org", `${"a".repeat(63)}.org`, `${"a".repeat(64)}.org`, "🙂", "12", "🙂a", "🇨🇭", "#",
  "CH9300762011623852957", "CH0000762011623852957", "CH0100762011623852957", "CH9900762011623852957", "CH9", "admin", "admins",
  "+41446681800", "QUJD", "QUI=", "QUI", "192.0.2.0/24", "2001:db8::/32", "00:1b:44:11:3a:b7", "a1!Bcdef", "abcdefgh", "12345678",
  "V1StGXR8_Z5jdHi6B-myT", "cjld2cjxh0000qzrmn831i7rn", "01ARZ3NDEKTSV4RRFFQ69G5FAV", "9f9b1c2d-8a3e-4f5b-9c1d-2e3f4a5b6c7d",
];

const EMAIL_3 = /^(?!\.)(?!.*\.\.)([a-zA-Z0-9_'+\-.]*)[a-zA-Z0-9_+-]@([a-zA-Z0-9][a-zA-Z0-9-]*\.)+[a-zA-Z]{2,}$/;
const strings = {
  email: z.email(),
  "email 3": z.string().regex(EMAIL_3),
  duration: z.iso.duration(),
  hostname: z.hostname(),
  domain: z.string().regex(z.regexes.domain),
  emoji: z.emoji(),
  iban: z.string().regex(z.regexes.iban),
  nanoid: z.nanoid(),
  cuid: z.cuid(),
  cuid2: z.cuid2(),
  ulid: z.ulid(),
  uuid: z.uuid(),
  e164: z.e164(),
  base64: z.base64(),
  cidrv4: z.cidrv4(),
  cidrv6: z.cidrv6(),
  mac: z.mac(),
  lowercase: z.string().lowercase(),
  includes: z.string().includes("a."),
  password: z.string().regex(/^(?=.*[A-Z])(?=.*\d)(?=.*[^\w]).{8,}$/),
  "no name": z.string().regex(/^(?!admin$)[a-z]+$/),
  "no beginning": z.string().regex(/^(?!ad|x)[a-z]+$/),
  "no end": z.string().regex(/^(?!.*\.$)[a-z.]+$/),
  "no character": z.string().regex(/^(?!.*[A-Z]).+$/),
  "not empty": z.string().regex(/^(?!$).*$/),
};
const OBJECTS = [{}, { a: 1 }, { b: 2 }, { a: 1, b: 2 }, { a: 1, c: 3 }, { a: "1" }, { x: 1 }, { xa: 1, x: 2 }, [1], null, "a"];
const objects = {
  record: z.record(z.string(), z.number()),
  "record of two": z.record(z.enum(["a", "b"]), z.number()),
  "partial record": z.partialRecord(z.enum(["a", "b"]), z.number()),
  "record by pattern": z.record(z.string().regex(/^x/), z.number()),
  json: z.json(),
  never: z.object({ a: z.never().optional(), b: z.number() }),
};

for (const [values, schemas] of [
  [TEXTS, strings],
  [OBJECTS, objects],
]) {
  for (const [name, schema] of Object.entries(schemas)) {
    const [taken, refused] = [true, false].map((is) => values.filter((value) => schema.safeParse(value).success === is));
    console.log(JSON.stringify({ name, schema: z.toJSONSchema(schema), taken, refused }));
  }
}
