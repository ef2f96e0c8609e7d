//! Schemas of libraries, and their rewritten forms.

use serde_json::json;

use super::look_around::without_look_ahead;
use super::*;

fn place_and_reason(schema: &Value) -> (String, String) {
    let error = compiled_schema(schema).expect_err(&schema.to_string());
    (error.place, error.reason)
}

#[test]
fn references_that_lead_back_to_themselves_are_refused() {
    let to = |name: &str| json!({"$ref": format!("#/$defs/{name}")});
    let cases = [
        (json!({"$ref": "#"}), "", "`#`"),
        (
            json!({"anyOf": [{"type": "null"}, {"$ref": "#"}]}),
            "",
            "`#`",
        ),
        (
            json!({"$ref": "#/$defs/a", "$defs": {"a": to("a")}}),
            "$defs.a",
            "`#/$defs/a`",
        ),
        (
            json!({
                "type": "object", "properties": {"x": to("a")}, "required": ["x"],
                "$defs": {"a": {"allOf": [to("b")]}, "b": {"description": "b", "oneOf": [to("a"), {"type": "null"}]}},
            }),
            "$defs.a",
            "`#/$defs/b`, then `#/$defs/a`",
        ),
        (
            json!({"type": "array", "prefixItems": [{"anyOf": [{"$ref": "#/prefixItems/0"}]}]}),
            "prefixItems.0",
            "#/prefixItems/0",
        ),
    ];
    for (schema, place, references) in cases {
        let (found, reason) = place_and_reason(&schema);
        assert_eq!(found, place, "{schema}: {reason}");
        assert!(reason.contains(references), "{schema}: {reason}");
    }
}

#[test]
fn trees_and_definitions_that_are_not_used_are_no_cycles() {
    for schema in [
        json!({"type": "object", "properties": {"next": {"anyOf": [{"$ref": "#"}, {"type": "null"}]}}}),
        json!({"type": "array", "items": {"$ref": "#"}}),
        json!({"additionalProperties": {"$ref": "#"}}),
        json!({"patternProperties": {"^x": {"$ref": "#"}}}),
        json!({"anyOf": [{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/a"}], "$defs": {"a": {"type": "null"}}}),
        json!({"type": "null", "$defs": {"a": {"$ref": "#/$defs/a"}}}),
        json!({"const": {"$ref": "#"}}),
    ] {
        compiled_schema(&schema).unwrap_or_else(|error| panic!("{schema}: {error}"));
    }
}

#[test]
fn what_narrows_nothing_is_left_out() {
    for (schema, compiled) in [
        (
            json!({"propertyNames": {"type": "string"}, "additionalProperties": {"type": "number"}}),
            json!({"additionalProperties": {"type": "number"}}),
        ),
        (json!({"propertyNames": true}), json!({})),
        (
            json!({"type": "string", "format": "password"}),
            json!({"type": "string"}),
        ),
        (
            json!({"items": {"format": "nanoid", "pattern": "^[a-z]{21}$"}}),
            json!({"items": {"pattern": "^[a-z]{21}$"}}),
        ),
        (
            json!({"format": "date", "pattern": "^2"}),
            json!({"format": "date", "pattern": "^2"}),
        ),
        (
            json!({"properties": {"a": {"not": {}}}}),
            json!({"properties": {"a": false}, "additionalProperties": false}),
        ),
        (
            json!({"properties": {"propertyNames": {"type": "string"}}}),
            json!({"properties": {"propertyNames": {"type": "string"}}, "additionalProperties": false}),
        ),
    ] {
        assert_eq!(compiled_schema(&schema), Ok(compiled), "{schema}");
    }
}

#[test]
fn names_that_there_may_be_become_patterns() {
    let schema = json!({
        "propertyNames": {"type": "string", "enum": ["a.b", "ü"]},
        "additionalProperties": {"type": "number"}, "required": ["ü"],
    });
    let compiled = json!({
        "required": ["ü"], "patternProperties": {"^(?:a\\x{2e}b|ü)$": {"type": "number"}},
        "additionalProperties": false,
    });
    assert_eq!(compiled_schema(&schema), Ok(compiled));
    let (place, reason) = place_and_reason(&json!({
        "properties": {"a": {"propertyNames": {"pattern": "^x"}, "properties": {"x": {}}}},
    }));
    assert_eq!(place, "properties.a");
    assert!(reason.contains("propertyNames"), "{reason}");
}

#[test]
fn look_arounds_that_cannot_be_said_otherwise_are_told() {
    assert_eq!(without_look_ahead("^a[(?=]\\(?=b$"), Ok(None));
    for pattern in [
        "(?=a)b",
        "a(?=b)",
        "^(?=a)b|c",
        "^(?!(?=a))b",
        "^(?!.*abc)x",
        "^(?!a*)b",
        "^x(?<!x)$",
        "^(?<=a)b",
        "^(?=a",
        "^((?!a)b)$",
    ] {
        let error = without_look_ahead(pattern).expect_err(pattern);
        assert!(error.contains("(?<!"), "{error}");
    }
}

#[test]
fn an_object_has_the_members_that_its_schema_names() {
    let text = || json!({"type": "string"});
    let inner = || json!({"properties": {"b": text()}});
    let inner_closed = || json!({"properties": {"b": text()}, "additionalProperties": false});
    for (schema, compiled) in [
        (inner(), inner_closed()),
        (
            json!({"type": "object", "properties": {"a": inner()}, "required": ["a", "c"]}),
            json!({
                "type": "object", "properties": {"a": inner_closed(), "c": {}}, "required": ["a", "c"],
                "additionalProperties": false,
            }),
        ),
        (
            json!({"items": {"anyOf": [inner(), {"type": "null"}]}}),
            json!({"items": {"anyOf": [inner_closed(), {"type": "null"}]}}),
        ),
        // Pydantic writes definitions and references.
        (
            json!({"properties": {"a": {"$ref": "#/$defs/x"}}, "$defs": {"x": inner()}}),
            json!({
                "properties": {"a": {"$ref": "#/$defs/x"}}, "$defs": {"x": inner_closed()},
                "additionalProperties": false,
            }),
        ),
    ] {
        assert_eq!(compiled_schema(&schema), Ok(compiled), "{schema}");
    }
}

#[test]
fn an_object_stays_open_whose_schema_speaks_of_others_or_of_none() {
    for schema in [
        json!({"type": "object"}),
        json!({"properties": {"a": {}}, "additionalProperties": true}),
        json!({"properties": {"a": {}}, "additionalProperties": {"type": "number"}}),
        json!({"properties": {"a": {}}, "patternProperties": {"^x": {}}}),
        json!({"allOf": [{"properties": {"a": {}}}, {"additionalProperties": true}]}),
        json!({"properties": {"a": {}}, "minProperties": 2}),
    ] {
        assert_eq!(compiled_schema(&schema), Ok(schema.clone()));
    }
}

/// Each part alone would exclude the members of the others.
#[test]
fn parts_of_an_object_are_closed_together() {
    let base = || json!({"type": "object", "properties": {"a": {"type": "string"}}});
    let schema = json!({
        "properties": {
            "plain": {"$ref": "#/$defs/base"},
            "derived": {"allOf": [{"$ref": "#/$defs/base"}, {"properties": {"b": {"type": "number"}}}]},
        },
        "$defs": {"base": base()},
    });
    let bound = |names: &[&str]| {
        let members: serde_json::Map<_, _> = names
            .iter()
            .map(|name| ((*name).to_owned(), json!({})))
            .collect();
        json!({"properties": members, "additionalProperties": false})
    };
    let compiled = json!({
        "properties": {
            "plain": {"$ref": "#/$defs/base", "allOf": [bound(&["a"])]},
            "derived": {"allOf": [
                {"$ref": "#/$defs/base"}, {"properties": {"b": {"type": "number"}}}, bound(&["a", "b"]),
            ]},
        },
        "$defs": {"base": base()},
        "additionalProperties": false,
    });
    assert_eq!(compiled_schema(&schema), Ok(compiled));
}

/// No validator takes an answer with the member or without it.
#[test]
fn a_required_member_that_is_excluded_is_named() {
    let inner = json!({
        "type": "object", "properties": {"a": {}}, "required": ["a", "b"], "additionalProperties": false,
    });
    let (place, reason) = place_and_reason(&json!({"items": inner}));
    assert_eq!(place, "items");
    assert!(reason.contains("`required` names `b`"), "{reason}");
    let schema = json!({"required": ["b"], "additionalProperties": false});
    assert!(place_and_reason(&schema).1.contains("`b`"));
    for schema in [
        json!({"properties": {"a": {}}, "required": ["a", "b"]}),
        json!({"required": ["b"], "patternProperties": {"^b": {}}, "additionalProperties": false}),
        json!({"required": ["b"], "additionalProperties": {"type": "null"}}),
    ] {
        compiled_schema(&schema).unwrap_or_else(|error| panic!("{schema}: {error}"));
    }
}
