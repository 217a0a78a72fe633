//! Who Braid's peers are and what they may do: keys, TLS by raw public keys, invitations, a relay's clients, their limits and the
//! destinations they may reach.
//!
//! # Trust
//!
//! Every relay and every client has one Ed25519 key pair; its public half is its name to the other side. There are no certificates,
//! names or passwords to trust: TLS 1.3 proves that the other end holds the key that it shows ([`tls`]), and what that key may do is
//! looked up afterwards.
//!
//! - A **client** pins its relay's key, which it has from the invitation ([`invite`]): whoever redirects its packets, answers for the
//!   relay's name or owns the network between can cut the connection, and no more.
//! - A **relay** lets any key finish the handshake and serves none that its [`registry`] does not know. An unknown key may do one thing:
//!   redeem an invitation's token, once, before it expires. The token is sent only after the relay has proved its pinned key, never in
//!   early data, and is stored hashed, so neither a listener, an impostor nor a stolen database has it.
//! - A **server** that runs a relay for itself (`--local`) takes anonymous clients and reaches its own addresses only. Its key is trusted
//!   on first use and pinned then: who is in the way at the first contact can pretend to be it, as with plain TCP; whatever
//!   end-to-end encryption the application has is untouched by that.

#![forbid(unsafe_code)]

pub mod destination;
pub mod invite;
pub mod keys;
pub mod limits;
pub mod name;
pub mod quota;
pub mod registry;
pub mod state;
pub mod tls;
