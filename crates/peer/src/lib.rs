//! Identity and permissions of Braid's peers: keys, TLS with raw public keys, invitations, a relay's clients with their limits, and the
//! destinations that clients may reach.
//!
//! # Trust
//!
//! Every relay and every client has one Ed25519 key pair, and the public key identifies it to the other side. There are no certificates,
//! names or passwords to trust: TLS 1.3 proves that the other end holds the key that it presents ([`tls`]); the permissions of that key
//! are looked up afterwards.
//!
//! - A **client** pins its relay's key, which it gets from the invitation ([`invite`]). An attacker who redirects its packets, answers for
//!   the relay's name or owns the network in between can only cut the connection.
//! - A **relay** lets any key finish the handshake, but serves only keys in its [`registry`]. An unknown key may do one thing: redeem an
//!   invitation's token, once, before it expires. The client sends the token only after the relay has proved its pinned key, never in
//!   early data, and the relay stores only its hash, so neither an eavesdropper, an impostor nor a stolen database reveals it.
//! - A **server** that runs a relay for itself (`--local`) accepts anonymous clients and opens its own addresses only. Clients trust its
//!   key on first use and pin it: an attacker in the path at the first contact can impersonate it, as with plain TCP. The application's
//!   own end-to-end encryption is not affected.

#![forbid(unsafe_code)]

pub mod destination;
pub mod invite;
pub mod keys;
pub mod limits;
pub mod name;
pub mod packet;
pub mod quota;
pub mod registry;
pub mod shared;
pub mod state;
pub mod tls;
