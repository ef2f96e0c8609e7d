//! Conditions on numbers in a form that llguidance follows without an error. llguidance computes with doubles and
//! 64-bit integers: it accepts the bound itself for exclusive bounds, and large numbers overflow. So the bounds of a
//! schema are made inclusive, and moved inwards to the next double whose decimal form is within the bounds. This
//! excludes numbers whose double equals the bound, numbers very near to zero, and numbers beyond 64 bits.

use std::cmp::Ordering;
use std::collections::BTreeSet;

use serde_json::{Map, Number, Value, json};

use super::decimal::Decimal;
use super::keyword_list::num_with_all_of;
use super::schema_error::shortened;

/// The largest double below 2^63.
const MAX_BOUND: f64 = 9_223_372_036_854_774_784.0;
/// The largest bound of a range that is open at the other side. For such a bound, llguidance counts with numbers of one
/// more digit, and these must fit into 64 bits.
const MAX_OPEN_BOUND: f64 = 1e18;
/// The least distance from zero of a bound: llguidance nests a group for each of its digits.
const MIN_BOUND: f64 = 1e-30;
/// llguidance's steps through the digits of a multiple are 32-bit integers.
const MAX_REMAINDER: u64 = u32::MAX as u64;
/// The lexer has a state for each remainder, and searches all states for a way to the end of a number. A divisor of a
/// power of ten leads to fewer remainders.
const MAX_DIVISOR: u64 = 4_096;
const MAX_ROUND_DIVISOR: u64 = 10_000;
const MAX_SCALE: i64 = 8;

/// A side of the range.
#[derive(Clone, Copy)]
struct Side {
    inclusive: &'static str,
    exclusive: &'static str,
    /// Upper bounds are handled as lower bounds of the negated number.
    is_upper: bool,
}

const LOWER: Side = Side {
    inclusive: "minimum",
    exclusive: "exclusiveMinimum",
    is_upper: false,
};
const UPPER: Side = Side {
    inclusive: "maximum",
    exclusive: "exclusiveMaximum",
    is_upper: true,
};

/// A lower bound, or a negated upper bound.
struct Bound {
    keyword: &'static str,
    value: Decimal,
    is_exclusive: bool,
}

/// # Errors
/// The keyword, and why it cannot be followed.
pub(super) fn set_numbers(fields: &mut Map<String, Value>) -> Result<(), String> {
    if let Some(constant) = fields.get("const") {
        check_constants("const", constant)?;
    }
    if let Some(constants) = fields.get("enum") {
        check_constants("enum", constants)?;
    }
    let lower = LOWER.bound(fields);
    let upper = UPPER.bound(fields);
    let multiple = multiple(fields)?;
    let is_integer = fields.get("type").is_some_and(|kind| kind == "integer");
    let step = match (multiple, is_integer) {
        (Some(step), true) => Some(step.whole()),
        (step, _) => step,
    };
    if let Some(step) = &step {
        step.check()?;
        fields.insert("multipleOf".to_owned(), step.value.into());
    }
    let ends = [(LOWER, &lower), (UPPER, &upper)];
    for (side, bound) in ends {
        if let Some(bound) = bound {
            let double = bound.double(step.as_ref())?;
            side.set(fields, double);
        }
    }
    for (bound, other) in [(&lower, UPPER), (&upper, LOWER)] {
        let is_far = bound
            .as_ref()
            .is_some_and(|bound| bound.value.nearest() >= MAX_OPEN_BOUND);
        if is_far && !fields.contains_key(other.inclusive) {
            other.set(fields, -MAX_BOUND);
        }
    }
    if let (Some(step), Some(lower), Some(upper)) = (&step, &lower, &upper) {
        set_steps(fields, step, lower, upper);
    }
    Ok(())
}

impl Side {
    /// The stricter of the bounds of both keywords. Values that are no numbers are left to the compiler's check.
    fn bound(self, fields: &Map<String, Value>) -> Option<Bound> {
        let read = |keyword, is_exclusive| {
            let value = Decimal::of(fields.get(keyword)?.as_number()?);
            Some(Bound {
                keyword,
                value: if self.is_upper {
                    value.negated()
                } else {
                    value
                },
                is_exclusive,
            })
        };
        let mut inclusive = read(self.inclusive, false);
        // Draft 4.
        if let Some(inclusive) = &mut inclusive {
            inclusive.is_exclusive = fields.get(self.exclusive) == Some(&Value::Bool(true));
        }
        match (inclusive, read(self.exclusive, true)) {
            (Some(a), Some(b)) if a.value > b.value => Some(a),
            (a, b) => b.or(a),
        }
    }

    /// Sets the bound. `double` is negated for an upper one.
    fn set(self, fields: &mut Map<String, Value>, double: f64) {
        fields.shift_remove(self.exclusive);
        let double = if self.is_upper { -double } else { double };
        // No number has a negative zero.
        fields.insert(self.inclusive.to_owned(), json!(double + 0.0));
    }
}

impl Bound {
    /// The double to which the bound is moved.
    fn double(&self, step: Option<&Step>) -> Result<f64, String> {
        let mut double = self.value.nearest();
        if let Some(step) = step
            && let Some(first) = self.first_multiple(step)
        {
            double = Decimal::scaled(first, step.scale).nearest();
        }
        if double > MAX_BOUND {
            return Err(format!(
                "`{}` is beyond the numbers of answers, which end at ±9223372036854774784",
                self.keyword
            ));
        }
        double = double.max(-MAX_BOUND);
        let is_within = |double| {
            let mut shown = Decimal::shown(double).into_iter();
            shown.all(|shown| self.allows(&shown))
        };
        while !is_within(double) {
            double = double.next_up();
        }
        Ok(match double.abs() < MIN_BOUND {
            true if double > 0.0 => MIN_BOUND,
            true => 0.0,
            false => double,
        })
    }

    fn allows(&self, value: &Decimal) -> bool {
        match value.cmp(&self.value) {
            Ordering::Less => false,
            Ordering::Equal => !self.is_exclusive,
            Ordering::Greater => true,
        }
    }

    /// The first multiple within the bound, in units of the step's last digit.
    fn first_multiple(&self, step: &Step) -> Option<i128> {
        let unit = step.coefficient as i128;
        // The largest multiple up to the bound.
        let below = self.value.floor(step.scale)?.div_euclid(unit) * unit;
        match self.allows(&Decimal::scaled(below, step.scale)) {
            true => Some(below),
            false => Some(below + unit),
        }
    }
}

/// `coefficient / 10^scale`.
struct Step {
    coefficient: u64,
    scale: u32,
    /// The step as a double, which llguidance converts to a coefficient and a scale.
    value: f64,
}

fn multiple(fields: &Map<String, Value>) -> Result<Option<Step>, String> {
    let Some(number) = fields.get("multipleOf").and_then(Value::as_number) else {
        return Ok(None);
    };
    let value = Decimal::of(number);
    if value.is_zero() || value.is_negative() {
        return Err("`multipleOf` must be above 0".to_owned());
    }
    let too_long = || Err(step_reason(number));
    let scale = value.scale();
    if scale > MAX_SCALE {
        return too_long();
    }
    let scale = scale as u32;
    let coefficient = value
        .floor(scale)
        .and_then(|whole| u64::try_from(whole).ok());
    let Some(coefficient) = coefficient else {
        return too_long();
    };
    let step = Step {
        coefficient,
        scale,
        value: value.nearest(),
    };
    Ok(Some(step))
}

fn step_reason(number: impl std::fmt::Display) -> String {
    let number = shortened(&number.to_string());
    format!(
        "`multipleOf` {number} has too many digits: it may be at most {MAX_DIVISOR} without its decimal point, and have \
         at most {MAX_SCALE} digits behind the point"
    )
}

impl Step {
    /// The step between the integers among the multiples of this step.
    fn whole(self) -> Self {
        let unit = 10u64.pow(self.scale);
        let divisor = gcd(self.coefficient.into(), unit.into()) as u64;
        let coefficient = self.coefficient / divisor;
        Self {
            coefficient,
            scale: 0,
            value: coefficient as f64,
        }
    }

    fn check(&self) -> Result<(), String> {
        let most = (self.coefficient.saturating_mul(10)).saturating_add(9 * 10u64.pow(self.scale));
        // llguidance moves the decimal point by multiplying a double, which is exact only for some doubles.
        let (mut double, mut scale) = (self.value, 0);
        while double.fract() != 0.0 && scale < MAX_SCALE as u32 {
            double *= 10.0;
            scale += 1;
        }
        let is_exact = (double, scale) == (self.coefficient as f64, self.scale);
        let is_round = 10u64.pow(16).is_multiple_of(self.coefficient);
        let max_divisor = match is_round {
            true => MAX_ROUND_DIVISOR,
            false => MAX_DIVISOR,
        };
        match is_exact && most <= MAX_REMAINDER && self.coefficient <= max_divisor {
            true => Ok(()),
            false => Err(step_reason(self.value)),
        }
    }
}

/// The steps of a schema. llguidance multiplies the steps of one number.
#[derive(Default)]
pub(super) struct StepSet {
    steps: BTreeSet<(u64, u32)>,
    /// Whether several parts of the schema may describe one number.
    are_combined: bool,
}

impl StepSet {
    pub(super) fn add(&mut self, fields: &Map<String, Value>) {
        if let Ok(Some(step)) = multiple(fields) {
            self.steps.insert((step.coefficient, step.scale));
        }
        let others = ["multipleOf", "anyOf", "oneOf", "$ref"];
        self.are_combined |= num_with_all_of(fields, &others) > 1;
    }

    pub(super) fn check(&self) -> Result<(), String> {
        if !self.are_combined || self.steps.len() < 2 {
            return Ok(());
        }
        let scale = self.steps.iter().map(|step| step.1).max().unwrap_or(0);
        let unit =
            |&(coefficient, own): &(u64, u32)| u128::from(coefficient) * 10u128.pow(scale - own);
        let largest = self.steps.iter().map(unit).max().unwrap_or(1);
        let mut common = 1u128;
        for step in self.steps.iter().map(unit) {
            common = common / gcd(common, step) * step;
            if common * largest > u128::from(MAX_REMAINDER) / 10 {
                return Err(format!(
                    "the values of `multipleOf` have too large a common multiple: it may be at most {} where several \
                     of them may describe one number",
                    MAX_REMAINDER / 10 / u64::try_from(largest).unwrap_or(u64::MAX).max(1)
                ));
            }
        }
        Ok(())
    }
}

fn gcd(a: u128, b: u128) -> u128 {
    if b == 0 { a } else { gcd(b, a % b) }
}

/// llguidance counts the multiples in a range with doubles. This function handles ranges that contain no multiple or
/// only one.
fn set_steps(fields: &mut Map<String, Value>, step: &Step, lower: &Bound, upper: &Bound) {
    let (Some(first), Some(last)) = (lower.first_multiple(step), upper.first_multiple(step)) else {
        return;
    };
    let last = -last;
    if first < last {
        return;
    }
    fields.shift_remove("multipleOf");
    let only = Decimal::scaled(first, step.scale);
    if first > last || !only.is_shown(only.nearest()) {
        // A range that contains no number.
        LOWER.set(fields, 1.0);
        UPPER.set(fields, 0.0);
    }
}

/// Checks that each number within a constant keeps its value.
fn check_constants(keyword: &str, constant: &Value) -> Result<(), String> {
    match constant {
        Value::Number(number) => check_constant(keyword, number),
        Value::Array(items) => { items.iter() }.try_for_each(|item| check_constants(keyword, item)),
        Value::Object(fields) => fields
            .values()
            .try_for_each(|value| check_constants(keyword, value)),
        Value::Null | Value::Bool(_) | Value::String(_) => Ok(()),
    }
}

fn check_constant(keyword: &str, number: &Number) -> Result<(), String> {
    let value = Decimal::of(number);
    let double = value.nearest();
    let is_kept = value.is_shown(double) && double.abs() <= MAX_BOUND;
    match is_kept {
        true => Ok(()),
        false => Err(format!(
            "`{keyword}` has the number {}, which no double has, or which is beyond ±9223372036854774784: use a string, \
             or a range",
            shortened(&number.to_string())
        )),
    }
}

#[cfg(test)]
mod tests;
