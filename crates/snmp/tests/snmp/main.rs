//! Tests of the slicer: managers and agents are models, and time is virtual.

mod corpus;
mod hostile;
mod secured;
mod sharing;
mod support;
mod views;
