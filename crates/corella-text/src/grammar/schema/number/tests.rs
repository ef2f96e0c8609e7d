//! Ranges and steps of numbers. Drawn answers are checked digit by digit.

use proptest::prelude::*;
use serde_json::json;

use crate::grammar::tests::{compiler, draw};
use crate::{GrammarCompiler, GrammarSource};

use super::*;

/// A number as digits before and after its decimal point, read by other means than `Decimal`.
#[derive(Debug, PartialEq)]
struct Fixed {
    is_negative: bool,
    digits: Vec<u8>,
}

/// The number of digits on either side of the point.
const WIDTH: usize = 400;

impl Fixed {
    fn of(text: &str) -> Self {
        let text = text.to_lowercase();
        let (mantissa, exponent) = text.split_once('e').unwrap_or((&text, "0"));
        let exponent: i64 = exponent.parse().expect("an exponent");
        let is_negative = mantissa.starts_with('-');
        let mantissa = mantissa.trim_start_matches('-');
        let point = mantissa.find('.').unwrap_or(mantissa.len());
        let mut digits = vec![0; 2 * WIDTH];
        for (at, digit) in mantissa.bytes().filter(u8::is_ascii_digit).enumerate() {
            let place = WIDTH as i64 - point as i64 - exponent + at as i64;
            if digit != b'0' {
                digits[usize::try_from(place).expect("it is not too far away")] = digit - b'0';
            }
        }
        let is_zero = digits.iter().all(|&digit| digit == 0);
        Self {
            is_negative: is_negative && !is_zero,
            digits,
        }
    }

    fn is_below(&self, other: &Self) -> bool {
        match (self.is_negative, other.is_negative) {
            (true, true) => self.digits > other.digits,
            (false, false) => self.digits < other.digits,
            (is_negative, _) => is_negative,
        }
    }

    /// Whether the number is a multiple of `step`.
    fn is_multiple_of(&self, step: &Self) -> bool {
        let end = step.digits.iter().rposition(|&digit| digit != 0);
        let end = end.expect("it is not zero") + 1;
        let modulus = step.digits[..end]
            .iter()
            .fold(0u128, |all, &digit| all * 10 + u128::from(digit));
        let rest = self.digits[..end].iter().fold(0u128, |rest, &digit| {
            (rest * 10 + u128::from(digit)) % modulus
        });
        rest == 0 && self.digits[end..].iter().all(|&digit| digit == 0)
    }
}

/// Whether a number follows a schema with the keywords of numbers, `allOf` and `enum`.
fn follows(schema: &Value, text: &str) -> bool {
    let Some(fields) = schema.as_object() else {
        return true;
    };
    fields.iter().all(|(keyword, wanted)| {
        let number = || Fixed::of(&wanted.to_string());
        let value = || Fixed::of(text);
        match keyword.as_str() {
            "type" => {
                wanted != "integer" || value().digits[WIDTH..].iter().all(|&digit| digit == 0)
            }
            "minimum" => !value().is_below(&number()),
            "maximum" => !number().is_below(&value()),
            "exclusiveMinimum" => number().is_below(&value()),
            "exclusiveMaximum" => value().is_below(&number()),
            "multipleOf" => value().is_multiple_of(&number()),
            "allOf" => { wanted.as_array().into_iter().flatten() }.all(|part| follows(part, text)),
            "enum" => { wanted.as_array().into_iter().flatten() }
                .any(|one| Fixed::of(&one.to_string()) == value()),
            keyword => panic!("{keyword}"),
        }
    })
}

/// Draws some answers, checks them, and returns how many were drawn.
fn check(compiler: &GrammarCompiler, schema: &Value, seed: u64) -> usize {
    let Ok(grammar) = compiler.compile(&GrammarSource::JsonSchema(schema.clone())) else {
        return 0;
    };
    let answers: Vec<_> = (0..6)
        .filter_map(|at| draw(&grammar, seed + at, 60))
        .collect();
    for answer in &answers {
        assert!(follows(schema, answer), "{answer} for {schema}");
    }
    answers.len()
}

/// The cases in which llguidance alone answers with the bound itself.
#[test]
fn exclusive_bounds_exclude_their_bound() {
    let compiler = compiler();
    for (lower, upper) in [
        ("0", "0.5"),
        ("0", "0.001"),
        ("-0.5", "0"),
        ("1", "1.5"),
        ("1", "2"),
        ("0.1", "0.2"),
        ("0.99", "1"),
        ("-1", "-0.5"),
        ("-1", "1"),
        ("1e-7", "2e-7"),
        ("-3", "-2.999"),
        ("123456789.25", "123456789.26"),
    ] {
        for (lower_keyword, upper_keyword) in [
            ("exclusiveMinimum", "maximum"),
            ("minimum", "exclusiveMaximum"),
            ("exclusiveMinimum", "exclusiveMaximum"),
        ] {
            let text = format!(
                r#"{{"type":"number","{lower_keyword}":{lower},"{upper_keyword}":{upper}}}"#
            );
            let schema = serde_json::from_str(&text).expect("JSON");
            assert!(check(&compiler, &schema, 1) > 0, "{schema}");
        }
    }
    for schema in [
        json!({"type": "number", "exclusiveMinimum": 0}),
        json!({"type": "number", "exclusiveMaximum": 0}),
        // The nearest double of this bound is an integer above the bound.
        json!({"type": "integer", "minimum": -1_524_953_850_836_299_999i64, "maximum": -1_524_953_850_836_298_500i64}),
        json!({"type": "integer", "exclusiveMinimum": 0, "exclusiveMaximum": 2}),
        json!({"type": "number", "allOf": [{"exclusiveMinimum": 0}, {"maximum": 0.5}]}),
    ] {
        assert!(check(&compiler, &schema, 1) > 0, "{schema}");
    }
}

/// Each of these schemas overflowed the stack, or compiled without end.
#[test]
fn numbers_at_the_edges_of_machine_numbers_end_no_process() {
    let compiler = compiler();
    let edges = [
        "-9223372036854775808",
        "9223372036854775807",
        "-9223372036854775809",
        "18446744073709551615",
        "18446744073709551616",
        "-1e19",
        "-9.9e18",
        "1e300",
        "-1.7976931348623157e308",
        "5e-324",
        "-5e-324",
        "0",
        "-0.0",
        "9007199254740993",
        "-4611686018427387904",
        "1e-30",
    ];
    let mut num_answers = 0;
    for lower in edges {
        for upper in edges {
            for multiple in [
                "",
                r#","multipleOf":2147483648"#,
                r#","multipleOf":4294967295"#,
                r#","multipleOf":1e-9"#,
            ] {
                let text =
                    format!(r#"{{"type":"number","minimum":{lower},"maximum":{upper}{multiple}}}"#);
                let number = serde_json::from_str(&text).expect("JSON");
                let text = text
                    .replace("number", "integer")
                    .replace("minimum", "exclusiveMinimum");
                let integer = serde_json::from_str(&text).expect("JSON");
                num_answers += check(&compiler, &number, 1) + check(&compiler, &integer, 2);
            }
        }
        let constant = serde_json::from_str(&format!(r#"{{"enum":[{lower}]}}"#)).expect("JSON");
        num_answers += check(&compiler, &constant, 3);
        // The places that only a reference leads to, and a grammar around the schema.
        let hidden = format!(
            r##"{{"$ref":"#/other/a","other":{{"a":{{"type":"integer","minimum":{lower},"maximum":{lower}}}}}}}"##
        );
        let hidden: Value = serde_json::from_str(&hidden).expect("JSON");
        let _ = compiler.compile(&GrammarSource::JsonSchema(hidden.clone()));
        let _ = compiler.compile(&GrammarSource::Lark(format!("start: %json {hidden}")));
    }
    assert!(num_answers > 500, "{num_answers}");
}

#[test]
fn what_cannot_be_followed_names_its_keyword() {
    for (schema, words) in [
        (
            json!({"minimum": 1e300}),
            ["`minimum`", "9223372036854774784"],
        ),
        (
            json!({"exclusiveMaximum": -1e20}),
            ["`exclusiveMaximum`", "9223372036854774784"],
        ),
        (json!({"multipleOf": 0}), ["`multipleOf`", "above 0"]),
        (json!({"multipleOf": 1e-9}), ["`multipleOf`", "digits"]),
        (
            json!({"multipleOf": 2_147_483_648u64}),
            ["`multipleOf`", "4096"],
        ),
        (
            json!({"const": 9_007_199_254_740_993u64}),
            ["`const`", "9007199254740993"],
        ),
        (json!({"enum": [1, {"a": [1e300]}]}), ["`enum`", "300"]),
        // The double that is nearest to the number has other digits, and llguidance writes the double's digits.
        (
            json!({"const": 9_223_372_036_854_774_000u64}),
            ["`const`", "9223372036854774000"],
        ),
        (json!({"const": 1e19}), ["`const`", "9223372036854774784"]),
        (json!({"multipleOf": 4097}), ["`multipleOf`", "4097"]),
        (json!({"multipleOf": 0.07}), ["`multipleOf`", "0.07"]),
        (json!({"multipleOf": 1e-30}), ["`multipleOf`", "digits"]),
    ] {
        let mut fields = schema.as_object().expect("an object").clone();
        let reason = set_numbers(&mut fields).expect_err(&schema.to_string());
        for word in words {
            assert!(reason.contains(word), "{reason}");
        }
    }
}

/// Conditions that llguidance alone would check with doubles, each with its only answer.
#[test]
fn conditions_with_one_answer_have_it() {
    let compiler = compiler();
    for (schema, expected) in [
        // 0.3 is no multiple of 0.1 in doubles.
        (
            json!({"type": "number", "minimum": 0.25, "maximum": 0.35, "multipleOf": 0.1}),
            "0.3",
        ),
        // The integers among multiples.
        (
            json!({"type": "integer", "minimum": 1, "maximum": 4000, "multipleOf": 40.98}),
            "2049",
        ),
        // Draft 4.
        (
            json!({"type": "integer", "minimum": 0, "exclusiveMinimum": true, "maximum": 2, "exclusiveMaximum": true}),
            "1",
        ),
    ] {
        let grammar = compiler.compile(&GrammarSource::JsonSchema(schema.clone()));
        let grammar = grammar.unwrap_or_else(|error| panic!("{schema}: {error}"));
        for seed in 0..8 {
            let answer = draw(&grammar, seed, 60).expect("it ends");
            assert!(
                Fixed::of(&answer) == Fixed::of(expected),
                "{schema}: {answer}"
            );
        }
    }
    // A lower bound above `MAX_OPEN_BOUND`, without an upper bound.
    let far = json!({"type": "integer", "minimum": 2e18});
    assert!(check(&compiler, &far, 1) > 0);
}

#[test]
fn steps_that_apply_to_one_number_are_bounded_together() {
    let set = |schemas: &[Value]| {
        let mut steps = StepSet::default();
        for schema in schemas {
            steps.add(schema.as_object().expect("an object"));
        }
        steps.check()
    };
    let [a, b] = [json!({"multipleOf": 4001}), json!({"multipleOf": 0.003})];
    let all = json!({"allOf": [{}, {}]});
    assert_eq!(set(&[a.clone(), b.clone()]), Ok(()));
    assert!(set(&[a.clone(), b, all.clone()]).is_err());
    assert_eq!(set(&[a, json!({"multipleOf": 3}), all]), Ok(()));
}

fn bound() -> impl Strategy<Value = String> {
    prop_oneof![
        (-30i64..30).prop_map(|whole| whole.to_string()),
        (-3000i64..3000).prop_map(|cents| format!("{}e-2", cents)),
        (-300i64..300, 1u32..12).prop_map(|(digits, scale)| format!("{digits}e-{scale}")),
        (-999i64..999, 0u32..16).prop_map(|(digits, scale)| format!("{digits}e{scale}")),
        any::<i64>().prop_map(|whole| whole.to_string()),
        any::<i32>().prop_map(|whole| whole.to_string()),
        (-1.0f64..1.0).prop_map(|double| double.to_string()),
    ]
}

/// Schemas of one number, often with bounds that are less than 1 apart.
fn schema() -> impl Strategy<Value = Value> {
    let lower = prop_oneof![Just("minimum"), Just("exclusiveMinimum")];
    let upper = prop_oneof![Just("maximum"), Just("exclusiveMaximum")];
    let step = prop::sample::select(vec![
        "1", "2", "3", "5", "7", "10", "12", "100", "1000", "0.5", "0.25", "0.1", "0.01", "1.5",
        "0.05", "0.3", "97", "1e1", "2.5",
    ]);
    let gap = prop_oneof![
        Just(None),
        prop::sample::select(vec![
            "0", "1e-9", "0.001", "0.01", "0.1", "0.3", "0.5", "0.999", "1", "2.5"
        ])
        .prop_map(Some),
    ];
    let kind = prop_oneof![Just("number"), Just("integer")];
    let sides = (prop::option::of(bound()), prop::option::of(bound()), gap);
    (
        kind,
        lower,
        upper,
        sides,
        prop::option::weighted(0.3, step),
        any::<bool>(),
    )
        .prop_map(|(kind, lower, upper, (from, to, gap), step, splits)| {
            let read = |text: &str| serde_json::from_str::<Value>(text).expect("JSON");
            let mut parts = Vec::new();
            if let Some(from) = &from {
                parts.push(json!({lower: read(from)}));
                if let Some(gap) = gap {
                    let [from, gap] =
                        [from, gap].map(|text| text.parse::<f64>().expect("a number"));
                    parts.push(json!({upper: from + gap}));
                }
            }
            if let Some(to) = to.filter(|_| parts.len() < 2) {
                parts.push(json!({upper: read(&to)}));
            }
            parts.extend(step.map(|step| json!({"multipleOf": read(step)})));
            if splits {
                return json!({"type": kind, "allOf": parts});
            }
            let mut whole = json!({"type": kind});
            for part in parts {
                let fields = whole.as_object_mut().expect("an object");
                fields.extend(part.as_object().expect("an object").clone());
            }
            whole
        })
}

/// `CORELLA_NUMERIC_SCHEMAS=10000` tries 10,000 schemas.
#[test]
fn answers_follow_random_conditions_on_numbers() {
    let number = std::env::var("CORELLA_NUMERIC_SCHEMAS").ok();
    let number = number.map_or(300, |number| number.parse().expect("a number"));
    let mut runner = proptest::test_runner::TestRunner::new(ProptestConfig {
        cases: number,
        failure_persistence: None,
        ..ProptestConfig::default()
    });
    let compiler = compiler();
    let num_followed = std::cell::Cell::new(0);
    let result = runner.run(&(schema(), any::<u32>()), |(schema, seed)| {
        let num_answers = check(&compiler, &schema, seed.into());
        num_followed.set(num_followed.get() + usize::from(num_answers > 0));
        Ok(())
    });
    result.unwrap_or_else(|error| panic!("{error}"));
    assert!(num_followed.get() > number as usize / 2, "{num_followed:?}");
}
