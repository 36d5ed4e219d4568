//! Power settings of exclusive CPUs.

use std::str::FromStr;

use numaward_topology::serde_as_text;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::inline_schema::inline_schema;

/// Power settings of CPUs while they are exclusive. The old values are restored when they are no longer exclusive. Only
/// if guarantees are enforced. Settings that are not given are neither read nor written.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub struct CpuPower {
    /// The governor of cpufreq (`scaling_governor`), such as `performance`.
    pub governor: Option<PowerWord>,
    /// The energy preference (`energy_performance_preference`), such as `performance`. With the governor `performance`,
    /// it must be `performance`.
    pub energy_preference: Option<PowerWord>,
    /// The maximum time that a CPU may take to wake up, in µs (`pm_qos_resume_latency_us`): the kernel uses no idle
    /// state that takes longer. 0: no idle state, the CPU stays awake.
    #[schemars(range(min = 0, max = 1_000_000))]
    pub wake_up_latency: Option<u32>,
}

impl CpuPower {
    /// Returns true if any setting is given.
    pub fn is_configured(&self) -> bool {
        *self != Self::default()
    }
}

/// The name of a governor or of an energy preference.
#[derive(Clone, Debug, PartialEq, Eq, derive_more::Display)]
pub struct PowerWord(String);

impl FromStr for PowerWord {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let is_word = text.starts_with(|c: char| c.is_ascii_lowercase())
            && text.len() <= 24
            && text
                .bytes()
                .all(|byte| byte.is_ascii_lowercase() || byte.is_ascii_digit() || b"_-".contains(&byte));
        if !is_word {
            return Err(format!("{text:?} is not a valid name; expected a name such as performance"));
        }
        if text == "default" {
            return Err(
                "after \"default\" is written, the kernel reports another name: use that name".to_owned()
            );
        }
        Ok(Self(text.to_owned()))
    }
}

serde_as_text!(PowerWord);

inline_schema!(PowerWord, { "type": "string", "examples": ["performance"] });

/// Returns a contradiction between the settings: the key, and the problem.
pub(super) fn problems(power: &CpuPower) -> Option<(&'static str, String)> {
    let CpuPower { governor: Some(governor), energy_preference: Some(preference), .. } = power else {
        return None;
    };
    let is_wrong = governor.0 == "performance" && preference.0 != "performance";
    is_wrong.then(|| {
        let problem =
            "with the governor performance, the kernel accepts no preference other than performance"
                .to_owned();
        ("enforcement.cpuPower.energyPreference", problem)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn refuses_invalid_names() {
        for text in ["performance", "schedutil", "balance_power", "balance-performance"] {
            assert_eq!(text.parse::<PowerWord>().unwrap().to_string(), text);
        }
        for text in ["", "Performance", "a b", "../x", "128", "performance\n", "default", &"x".repeat(25)] {
            assert!(text.parse::<PowerWord>().is_err(), "{text:?}");
        }
    }

    #[test]
    fn refuses_preference_against_governor() {
        let power = |text: &str| serde_json::from_str::<CpuPower>(text).unwrap();
        for (text, is_wrong) in [
            ("{}", false),
            (r#"{"energyPreference": "power"}"#, false),
            (r#"{"governor": "powersave", "energyPreference": "power"}"#, false),
            (r#"{"governor": "performance", "energyPreference": "performance"}"#, false),
            (r#"{"governor": "performance", "energyPreference": "power"}"#, true),
        ] {
            assert_eq!(problems(&power(text)).is_some(), is_wrong, "{text}");
        }
        assert!(!power("{}").is_configured() && power(r#"{"wakeUpLatency": 0}"#).is_configured());
    }
}
