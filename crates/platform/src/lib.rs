//! What Braid needs of an operating system, as traits, with Linux behind them and a fake for tests.

pub mod battery;
pub mod linux;
