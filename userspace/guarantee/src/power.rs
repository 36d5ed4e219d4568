//! Conversion of the configured power settings of exclusive CPUs.

use numaward_config::cpu_power::CpuPower;
use numaward_enforce::power::{PowerKnob, PowerTargets};

/// Returns the configured settings as the kernel formats their values.
pub fn power_settings(power: &CpuPower) -> PowerTargets {
    let CpuPower { governor, energy_preference, wake_up_latency } = power;
    let latency =
        wake_up_latency.map(|micros| if micros == 0 { "n/a".to_owned() } else { micros.to_string() });
    let settings = [
        (PowerKnob::EnergyPreference, energy_preference.as_ref().map(ToString::to_string)),
        (PowerKnob::Governor, governor.as_ref().map(ToString::to_string)),
        (PowerKnob::WakeUpLatency, latency),
    ];
    settings.into_iter().filter_map(|(knob, value)| Some((knob, value?))).collect()
}
