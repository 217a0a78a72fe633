//! Whole networks in virtual time: model switches, the slicer, and controllers that do what a test says.

mod basics;
mod cascade;
mod changes;
mod isolation;
mod support;
