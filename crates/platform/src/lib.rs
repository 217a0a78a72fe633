//! The operating system interfaces that Braid needs. Linux implements them; tests use a fake battery sensor.

pub mod battery;
pub mod linux;
