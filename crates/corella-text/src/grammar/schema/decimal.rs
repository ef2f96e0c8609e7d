//! Numbers of a schema with all their digits.

use std::cmp::Ordering;

use serde_json::Number;

/// A number as written: `0.DIGITS × 10^point`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Decimal {
    is_negative: bool,
    /// The digits, without zeros at either end. The number zero has no digits.
    digits: Vec<u8>,
    point: i64,
}

/// Larger exponents are clamped to this one: no number in an answer has such an exponent, and sums of an exponent and a
/// text's length stay in the range of `i64`.
const MAX_EXPONENT: i64 = 1 << 40;

impl Decimal {
    pub(super) fn of(number: &Number) -> Self {
        Self::parse(&number.to_string())
    }

    /// Reads JSON's notation, and Rust's of floating-point numbers.
    fn parse(text: &str) -> Self {
        let (mantissa, exponent) = text.split_once(['e', 'E']).unwrap_or((text, "0"));
        let (is_negative, mantissa) = match mantissa.strip_prefix('-') {
            Some(mantissa) => (true, mantissa),
            None => (false, mantissa),
        };
        let (whole, fraction) = mantissa.split_once('.').unwrap_or((mantissa, ""));
        let all: Vec<u8> = whole.bytes().chain(fraction.bytes()).collect();
        let num_zeros = all.iter().take_while(|&&digit| digit == b'0').count();
        let end = all.iter().rposition(|&digit| digit != b'0');
        let Some(end) = end else {
            return Self::default();
        };
        Self {
            is_negative,
            digits: all[num_zeros..=end].to_vec(),
            point: exponent_of(exponent) + whole.len() as i64 - num_zeros as i64,
        }
    }

    /// The two decimals that llguidance may write for a double: the shortest one that reads as the double, and one with
    /// all digits of an integer. They differ only beyond 2^53.
    pub(super) fn shown(double: f64) -> [Self; 2] {
        let shortest = Self::parse(&format!("{double:e}"));
        let whole = match double.fract() == 0.0 {
            true => Self::parse(&format!("{double:.0}")),
            false => shortest.clone(),
        };
        [shortest, whole]
    }

    /// Whether llguidance writes this number for a double.
    pub(super) fn is_shown(&self, double: f64) -> bool {
        Self::shown(double).iter().all(|shown| shown == self)
    }

    /// The nearest double. Infinite beyond the largest.
    pub(super) fn nearest(&self) -> f64 {
        let digits = std::str::from_utf8(&self.digits).unwrap_or_default();
        let sign = if self.is_negative { "-" } else { "" };
        { format!("{sign}0.{digits}0e{}", self.point) }
            .parse()
            .unwrap_or(f64::INFINITY)
    }

    pub(super) fn negated(mut self) -> Self {
        self.is_negative = !self.is_negative && !self.digits.is_empty();
        self
    }

    pub(super) fn is_zero(&self) -> bool {
        self.digits.is_empty()
    }

    pub(super) fn is_negative(&self) -> bool {
        self.is_negative
    }

    /// The number of digits after the decimal point.
    pub(super) fn scale(&self) -> i64 {
        (self.digits.len() as i64 - self.point).max(0)
    }

    /// `self × 10^scale`, rounded towards minus infinity. `None` beyond 36 digits.
    pub(super) fn floor(&self, scale: u32) -> Option<i128> {
        let num_digits = self.point + i64::from(scale);
        if num_digits > 36 {
            return None;
        }
        let (mut whole, mut is_exact) = (0i128, true);
        for at in 0..num_digits.max(0) as usize {
            let digit = self.digits.get(at).map_or(0, |digit| digit - b'0');
            whole = whole * 10 + i128::from(digit);
        }
        if self.digits.len() as i64 > num_digits {
            is_exact = false;
        }
        match (self.is_negative, is_exact) {
            (false, _) => Some(whole),
            (true, true) => Some(-whole),
            (true, false) => Some(-whole - 1),
        }
    }

    /// `value / 10^scale`.
    pub(super) fn scaled(value: i128, scale: u32) -> Self {
        Self::parse(&format!("{value}e-{scale}"))
    }
}

impl Ord for Decimal {
    fn cmp(&self, other: &Self) -> Ordering {
        let sign = |number: &Self| match (number.is_zero(), number.is_negative) {
            (true, _) => 0,
            (false, false) => 1,
            (false, true) => -1,
        };
        let size = || {
            self.point
                .cmp(&other.point)
                .then_with(|| self.digits.cmp(&other.digits))
        };
        sign(self)
            .cmp(&sign(other))
            .then_with(|| match self.is_negative {
                false => size(),
                true => size().reverse(),
            })
    }
}

impl PartialOrd for Decimal {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

fn exponent_of(text: &str) -> i64 {
    let far = match text.starts_with('-') {
        true => -MAX_EXPONENT,
        false => MAX_EXPONENT,
    };
    let exponent = text.parse().unwrap_or(far);
    exponent.clamp(-MAX_EXPONENT, MAX_EXPONENT)
}
