//! Tests of the messages and of both sides of a connection. One program, so that it is linked once.

mod connection;
mod corpus;
mod hostile;
mod live;
mod ovs;
mod properties;
mod support;
mod vectors;
