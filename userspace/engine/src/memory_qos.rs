//! Memory QoS.
