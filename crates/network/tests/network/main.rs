//! Tests of the controller on model networks. One program, so that it is linked once.

mod basics;
mod corpus;
mod failures;
mod flows;
mod histories;
mod hostile;
mod mobility;
mod reservations;
mod sfnet;
mod support;
mod tunnels;
