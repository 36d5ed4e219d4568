//! Kubernetes quantities: `100m`, `1.5Gi`, `1e3`, `12E`.
//!
//! A quantity is an exact, whole number of nano-units. Finer values are rounded up, as in Kubernetes. Floating-point
//! numbers are not used.
//!
//! A quantity also records whether its *spelling* has an integer form. The kubelet's memory manager accepts only such
//! spellings: it accepts `1536Mi` but not `1.5Gi`, although both are the same number of bytes. (An API server always
//! returns the integer form.)
//!
//! Source: k8s.io/apimachinery, package `api/resource`.

use std::{cmp::Ordering, fmt, str::FromStr};

/// Nano-units per unit.
const NANOS: u128 = 1_000_000_000;

/// Non-negative amount of CPUs or bytes.
///
/// Comparison ignores the spelling.
#[derive(Clone, Copy, Debug, Default)]
pub struct Quantity {
    nanos: u128,
    integer_form: bool,
}

impl Quantity {
    /// Makes a quantity of whole units, in integer form if it fits 63 bits.
    pub const fn whole(units: u64) -> Self {
        Self { nanos: units as u128 * NANOS, integer_form: units <= i64::MAX as u64 }
    }

    /// Makes a quantity of thousandths.
    pub const fn milli(units: u64) -> Self {
        Self { nanos: units as u128 * (NANOS / 1000), integer_form: units == 0 }
    }

    pub const fn is_zero(self) -> bool {
        self.nanos == 0
    }

    /// Returns whole units, rounded up; `None` above `u64::MAX`.
    pub fn units(self) -> Option<u64> {
        u64::try_from(self.nanos.div_ceil(NANOS)).ok()
    }

    /// Returns thousandths, rounded up; `None` above `u64::MAX`.
    pub fn millis(self) -> Option<u64> {
        u64::try_from(self.nanos.div_ceil(NANOS / 1000)).ok()
    }

    /// Returns the value like Kubernetes' `AsInt64`: only if the spelling has an integer form.
    pub fn as_int64(self) -> Option<u64> {
        if self.integer_form { self.units() } else { None }
    }

    /// Returns the number of CPUs that this quantity makes exclusive: the quantity if it is whole, otherwise none.
    ///
    /// As in the kubelet, a value that is whole after rounding up to thousandths counts as whole.
    pub fn whole_cpus(self) -> Option<u64> {
        let units = self.units()?;
        (units.checked_mul(1000) == self.millis()).then_some(units)
    }

    /// Returns the value as a decimal number without a suffix: `1.5`.
    pub fn decimal(self) -> String {
        let text = format!("{}.{:09}", self.nanos / NANOS, self.nanos % NANOS);
        text.trim_end_matches('0').trim_end_matches('.').to_owned()
    }

    /// Returns the sum; `None` if it overflows.
    pub fn checked_add(self, other: Self) -> Option<Self> {
        Some(Self {
            nanos: self.nanos.checked_add(other.nanos)?,
            integer_form: self.integer_form && other.integer_form,
        })
    }

    /// Returns the difference; zero if it is negative.
    #[must_use]
    pub fn saturating_sub(self, other: Self) -> Self {
        Self {
            nanos: self.nanos.saturating_sub(other.nanos),
            integer_form: self.integer_form && other.integer_form,
        }
    }
}

impl PartialEq for Quantity {
    fn eq(&self, other: &Self) -> bool {
        self.nanos == other.nanos
    }
}

impl Eq for Quantity {}

impl PartialOrd for Quantity {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for Quantity {
    fn cmp(&self, other: &Self) -> Ordering {
        self.nanos.cmp(&other.nanos)
    }
}

impl fmt::Display for Quantity {
    /// Formats the shortest decimal form: whole units, thousandths (`1500m`) or nano-units.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (scale, suffix) in [(NANOS, ""), (NANOS / 1000, "m")] {
            if self.nanos.is_multiple_of(scale) {
                return write!(f, "{}{suffix}", self.nanos / scale);
            }
        }
        write!(f, "{}n", self.nanos)
    }
}

/// Error for a text that is not a quantity.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{text:?} is not a quantity: {problem} (expected a number such as `2`, `100m`, `1.5Gi` or `1e3`)")]
pub struct QuantityError {
    pub text: String,
    pub problem: QuantityProblem,
}

/// Reason why a text is not a quantity.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum QuantityProblem {
    /// There are no digits before the suffix.
    #[error("it has no digits")]
    NoDigits,
    /// The quantity is negative.
    #[error("it is negative")]
    Negative,
    /// The suffix or exponent is unknown.
    #[error("unknown suffix")]
    Suffix,
    /// The value exceeds 128 bits of nano-units.
    #[error("it is too large")]
    TooLarge,
}

/// Multiplier of the digits: a power of two or of ten.
enum Suffix {
    Binary(u32),
    Decimal(i32),
}

fn suffix(text: &str) -> Result<Suffix, QuantityProblem> {
    Ok(match text {
        "Ki" => Suffix::Binary(10),
        "Mi" => Suffix::Binary(20),
        "Gi" => Suffix::Binary(30),
        "Ti" => Suffix::Binary(40),
        "Pi" => Suffix::Binary(50),
        "Ei" => Suffix::Binary(60),
        "n" => Suffix::Decimal(-9),
        "u" => Suffix::Decimal(-6),
        "m" => Suffix::Decimal(-3),
        "" => Suffix::Decimal(0),
        "k" => Suffix::Decimal(3),
        "M" => Suffix::Decimal(6),
        "G" => Suffix::Decimal(9),
        "T" => Suffix::Decimal(12),
        "P" => Suffix::Decimal(15),
        "E" => Suffix::Decimal(18),
        _ => {
            let exponent = text.strip_prefix(['e', 'E']).ok_or(QuantityProblem::Suffix)?;
            let digits = exponent.strip_prefix(['+', '-']).unwrap_or(exponent);
            if digits.is_empty() || !digits.bytes().all(|byte| byte.is_ascii_digit()) {
                return Err(QuantityProblem::Suffix);
            }
            let too_large = if exponent.starts_with('-') { i32::MIN / 2 } else { i32::MAX / 2 };
            Suffix::Decimal(exponent.parse().unwrap_or(too_large).clamp(i32::MIN / 2, i32::MAX / 2))
        }
    })
}

/// Multiplies by a power of ten. Rounds positive results below one up to one.
fn scale(value: u128, exponent: i32) -> Option<u128> {
    if value == 0 {
        return Some(0);
    }
    match 10u128.checked_pow(exponent.unsigned_abs()) {
        Some(power) if exponent >= 0 => value.checked_mul(power),
        Some(power) => Some(value.div_ceil(power)),
        None => (exponent < 0).then_some(1),
    }
}

/// Returns whether Kubernetes stores this spelling as a 63-bit integer times a non-negative power of ten.
///
/// The maximum numbers of digits are those of its parser, which uses this form only if it cannot overflow.
fn has_integer_form(digits: u128, whole: usize, fraction: usize, suffix: &Suffix) -> bool {
    const MAX_INT64: u128 = i64::MAX as u128;
    match *suffix {
        Suffix::Binary(shift) => {
            // Three decimal digits for each ten bits of the suffix, and one in reserve.
            let room = 15 - i64::from(shift) * 3 / 10 - 1;
            fraction == 0
                && i64::try_from(whole).is_ok_and(|len| len <= room)
                && digits.checked_mul(1 << shift).is_some_and(|value| value <= MAX_INT64)
        }
        Suffix::Decimal(exponent) => {
            let power = i64::from(exponent) - i64::try_from(fraction).unwrap_or(i64::MAX);
            whole + fraction <= 18
                && u32::try_from(power).is_ok_and(|power| {
                    digits == 0
                        || 10u128
                            .checked_pow(power)
                            .and_then(|ten| digits.checked_mul(ten))
                            .is_some_and(|value| value <= MAX_INT64)
                })
        }
    }
}

fn parse(text: &str) -> Result<Quantity, QuantityProblem> {
    let number = match text.strip_prefix('-') {
        Some(_) => return Err(QuantityProblem::Negative),
        None => text.strip_prefix('+').unwrap_or(text),
    };
    let count = |part: &str| part.bytes().take_while(u8::is_ascii_digit).count();
    let (whole, rest) = number.split_at(count(number));
    let (fraction, rest) = match rest.strip_prefix('.') {
        Some(rest) => rest.split_at(count(rest)),
        None => ("", rest),
    };
    if whole.is_empty() && fraction.is_empty() {
        return Err(QuantityProblem::NoDigits);
    }
    let suffix = suffix(rest)?;
    let significant = whole.trim_start_matches('0');

    // Zeros at the end of the fraction do not change the value and could overflow it.
    let exact_fraction = fraction.trim_end_matches('0');
    let digits = significant
        .bytes()
        .chain(exact_fraction.bytes())
        .try_fold(0u128, |value, byte| value.checked_mul(10)?.checked_add(u128::from(byte - b'0')))
        .ok_or(QuantityProblem::TooLarge)?;
    let places = i32::try_from(exact_fraction.len()).map_err(|_| QuantityProblem::TooLarge)?;
    let nanos = match suffix {
        Suffix::Binary(shift) => digits.checked_mul(1 << shift).and_then(|value| scale(value, 9 - places)),
        Suffix::Decimal(exponent) => scale(digits, exponent + 9 - places),
    };

    let spelt_digits = scale(digits, i32::try_from(fraction.len()).unwrap_or(i32::MAX) - places);
    let integer_form = spelt_digits
        .is_some_and(|digits| has_integer_form(digits, significant.len().max(1), fraction.len(), &suffix));
    Ok(Quantity { nanos: nanos.ok_or(QuantityProblem::TooLarge)?, integer_form })
}

impl FromStr for Quantity {
    type Err = QuantityError;

    fn from_str(text: &str) -> Result<Self, QuantityError> {
        parse(text).map_err(|problem| QuantityError { text: text.to_owned(), problem })
    }
}

numaward_topology::serde_as_text!(Quantity);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parses_exactly() {
        for (text, nanos, int64) in [
            ("0", 0, Some(0)),
            ("100m", 100_000_000, None),
            ("2", 2 * NANOS, Some(2)),
            ("+2", 2 * NANOS, Some(2)),
            ("1k", 1000 * NANOS, Some(1000)),
            ("1e3", 1000 * NANOS, Some(1000)),
            ("1E3", 1000 * NANOS, Some(1000)),
            ("12e-1", 1_200_000_000, None),
            ("1.5k", 1500 * NANOS, Some(1500)),
            ("12E", 12 * 10u128.pow(18) * NANOS, None),
            ("9E", 9 * 10u128.pow(18) * NANOS, Some(9 * 10u64.pow(18))),
            ("4Gi", (4 << 30) * NANOS, Some(4 << 30)),
            ("1536Mi", (1536 << 20) * NANOS, Some(1536 << 20)),
            ("1.5Gi", (1536 << 20) * NANOS, None),
            (".5", NANOS / 2, None),
            ("2.", 2 * NANOS, Some(2)),
            ("2.0", 2 * NANOS, None),
            ("2000m", 2 * NANOS, None),
            ("0.1n", 1, None),
            ("1e-99999999999", 1, None),
            ("00012", 12 * NANOS, Some(12)),
            // Nine digits with Mi are too many for the fast path of the parser.
            ("12345678Mi", (12_345_678 << 20) * NANOS, Some(12_345_678 << 20)),
            ("123456789Mi", (123_456_789 << 20) * NANOS, None),
            ("999999999999999999", 999_999_999_999_999_999 * NANOS, Some(999_999_999_999_999_999)),
            ("1000000000000000000", 1_000_000_000_000_000_000 * NANOS, None),
        ] {
            let quantity: Quantity = text.parse().unwrap_or_else(|error| panic!("{error}"));
            assert_eq!(quantity.nanos, nanos, "{text}");
            assert_eq!(quantity.as_int64(), int64, "{text}");
        }
    }

    #[test]
    fn refuses_invalid_quantities() {
        for (text, problem) in [
            ("", QuantityProblem::NoDigits),
            (".", QuantityProblem::NoDigits),
            ("Gi", QuantityProblem::NoDigits),
            ("-1", QuantityProblem::Negative),
            ("1gb", QuantityProblem::Suffix),
            ("1 Gi", QuantityProblem::Suffix),
            ("1e", QuantityProblem::Suffix),
            ("1e+", QuantityProblem::Suffix),
            ("1e1.5", QuantityProblem::Suffix),
            ("1.2.3", QuantityProblem::Suffix),
            ("99999999999999999999999999999999999999999", QuantityProblem::TooLarge),
            ("1e40", QuantityProblem::TooLarge),
            ("1e999999999999", QuantityProblem::TooLarge),
        ] {
            assert_eq!(text.parse::<Quantity>().unwrap_err().problem, problem, "{text:?}");
        }
    }

    #[test]
    fn only_whole_cpus_are_exclusive() {
        for (text, cpus) in [
            ("2", Some(2)),
            ("1000m", Some(1)),
            ("1500m", None),
            ("0.5", None),
            ("1.0000001", None),
            // Whole after rounding up to thousandths.
            ("999999900n", Some(1)),
        ] {
            assert_eq!(text.parse::<Quantity>().unwrap().whole_cpus(), cpus, "{text}");
        }
    }

    #[test]
    fn display_parses_to_the_same_value() {
        for text in ["0", "2", "1500m", "1n", "4294967296"] {
            assert_eq!(text.parse::<Quantity>().unwrap().to_string(), text);
        }
        for (text, decimal) in
            [("0", "0"), ("20", "20"), ("1500m", "1.5"), ("1.0001", "1.0001"), ("1n", "0.000000001")]
        {
            assert_eq!(text.parse::<Quantity>().unwrap().decimal(), decimal);
        }
    }
}
