"""Makes schemas.jsonl: JSON schemas as callers write them, from a seed.

    python3 tests/schemas/make_schemas.py

A line is a schema. Three in ten have a string without a bound, so that an answer to such a schema may end at its limit
of tokens. The same seed gives the same file.
"""

import json
import random
from pathlib import Path

SEED = 23
NUM_SCHEMAS = 500
NAMES = ["id", "name", "größe", "items", "a b", "kind", "value", "x", "nested", "tags", "on", "when"]
WORDS = ["red", "green", "blue", "größer", 'say "no"', "back\\slash", "", "line\nbreak"]
PATTERNS = ["^[A-Z]{2,4}$", "^[a-z]+-[0-9]{1,3}$", "^(yes|no)$", "^\\d{3}\\.\\d{2}$", "^[^x]{1,5}$"]
FORMATS = ["date", "time", "date-time", "uuid", "ipv4", "email"]


class Maker:
    def __init__(self, rng, is_unbounded):
        self.rng = rng
        self.is_unbounded = is_unbounded
        self.definitions = {}

    def string(self):
        kind = self.rng.randrange(6)
        if self.is_unbounded and kind < 3:
            return {"type": "string"}
        if kind == 3:
            return {"type": "string", "pattern": self.rng.choice(PATTERNS)}
        if kind == 4:
            return {"type": "string", "format": self.rng.choice(FORMATS)}
        if kind == 5:
            return {"enum": self.rng.sample(WORDS, self.rng.randint(1, 4))}
        low = self.rng.randint(0, 3)
        return {"type": "string", "minLength": low, "maxLength": low + self.rng.randint(0, 8)}

    def number(self):
        if self.rng.random() < 0.3:
            low = self.rng.randint(-9, 9)
            return {"type": "number", "minimum": low, "maximum": low + self.rng.randint(1, 90)}
        low = self.rng.randint(-100, 100)
        schema = {"type": "integer", "minimum": low, "maximum": low + self.rng.randint(0, 1000)}
        if self.rng.random() < 0.2:
            schema = {"type": "integer", "exclusiveMinimum": 0, "exclusiveMaximum": 50, "multipleOf": 5}
        return schema

    def leaf(self):
        kind = self.rng.randrange(10)
        if kind < 5:
            return self.string()
        if kind < 8:
            return self.number()
        if kind == 8:
            return {"type": self.rng.choice(["boolean", "null", ["boolean", "null"]])}
        return {"const": self.rng.choice([1, "x", True, None, 2.5])}

    def object(self, depth):
        names = self.rng.sample(NAMES, self.rng.randint(1, 4))
        schema = {
            "type": "object",
            "properties": {name: self.schema(depth - 1) for name in names},
            "required": [name for name in names if self.rng.random() < 0.7],
            "additionalProperties": False,
        }
        if self.rng.random() < 0.1:
            schema["additionalProperties"] = {"type": "integer", "minimum": 0, "maximum": 9}
        return schema

    def array(self, depth):
        low = self.rng.randint(0, 2)
        schema = {"type": "array", "items": self.schema(depth - 1), "minItems": low}
        schema["maxItems"] = low + self.rng.randint(0, 2)
        if self.rng.random() < 0.15:
            parts = [self.leaf() for _ in range(self.rng.randint(1, 3))]
            schema = {
                "type": "array",
                "prefixItems": parts,
                "items": False,
                "minItems": len(parts),
            }
        return schema

    def schema(self, depth):
        kind = self.rng.randrange(12)
        if depth <= 0 or kind < 4:
            return self.leaf()
        if kind < 7:
            return self.object(depth)
        if kind < 9:
            return self.array(depth)
        if kind == 9:
            return {"anyOf": [self.schema(depth - 1), {"type": "null"}]}
        if kind == 10:
            # The cases exclude each other by their types.
            return {"oneOf": [self.string(), {"type": "boolean"}]}
        name = f"part{len(self.definitions)}"
        self.definitions[name] = {}
        self.definitions[name] = self.schema(depth - 1)
        return {"$ref": f"#/$defs/{name}"}

    def whole(self):
        schema = self.object(3)
        if self.is_unbounded:
            schema["properties"]["text"] = {"type": "string"}
            schema["required"].append("text")
        if self.definitions:
            schema["$defs"] = self.definitions
        # `uniqueItems` cannot be enforced while an answer is drawn, so Corella must refuse it.
        if self.rng.random() < 0.04:
            inner = {"type": "array", "items": self.number(), "maxItems": 3, "uniqueItems": True}
            schema["properties"]["unique"] = inner
        return schema


def main():
    rng = random.Random(SEED)
    schemas = [Maker(rng, at % 10 < 3).whole() for at in range(NUM_SCHEMAS)]
    lines = [json.dumps(schema, ensure_ascii=False, separators=(",", ":")) for schema in schemas]
    Path(__file__).with_name("schemas.jsonl").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
