//! Whole networks in virtual time: model switches, the slicer, and controllers that do what a test says.

mod basics;
mod cascade;
mod changes;
mod corpus;
mod isolation;
mod support;
