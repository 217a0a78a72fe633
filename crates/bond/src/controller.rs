//! The congestion controller of a path, and what a bond reads from it.
//!
//! [`RateController`] is made for links that lose packets, change their rate within a second and have buffers for many seconds. QUIC runs it once
//! per path (noq's `Controller`); [`PathMetrics`] is what it shows.
//!
//! # The idea
//!
//! *Rate and round trip, not loss.* Each round gives a rate of delivery and the least round trip of its packets. The rate that is paced is
//! the greatest of eight rounds, more than one probing cycle (BBR: Cardwell et al., ACM Queue 2016); a queue is what the round trip has
//! beyond the least one of ten seconds. While a queue stands, what is acknowledged *is* the capacity, so the rate follows at once, and
//! the queue is emptied within about two round trips. A cycle is two rounds at the rate, one 10 % faster, one to see what became of it,
//! and one 10 % slower; when the faster one delivered more without a queue, steps of 25, 50 and 100 % follow. What is lost in slower rounds
//! was lost at random: the pace makes up for that part of it, up to 15 %, which is more than the 10 % promised and less than two in ten,
//! where links are better given up.
//!
//! *The beginning* doubles what is under way every round trip, as a window does, since the rate of a round is what the round before sent. It ends
//! when a queue builds: then what was acknowledged of late is the rate, and no more is emptied than the path holds.
//!
//! *A rival.* A queue that does not go although we have sent slower, for long enough to have emptied it, or that is not empty once in
//! twelve rounds, is filled by somebody else (the test for elastic cross traffic of Copa, Arun and Balakrishnan, NSDI 2018, and Nimbus,
//! Goyal et al., SIGCOMM 2022), or the way has become longer; then the round trip did not change when we slowed down. Against a rival we
//! do not imitate its law, since CUBIC's and BBR's differ: we hold a rate, 0.46 of the capacity, and are as polite as ever above it. A
//! flow of constant rate leaves the rest to any law, also to another of our kind. The capacity is known from before the rival came, or is
//! measured: a burst of at least 12 packets or 10 ms beyond our rate makes a standing queue longer by bytes / capacity; of three
//! measurements the least counts. The capacity is forgotten when the rate held was sent but not delivered (the path itself is slower),
//! is lowered while more than 4 % are lost in a full buffer, and the rival counts as gone after ten seconds with a short queue.
//!
//! *Short buffers.* A loss is a full buffer's when the packet before it waited for at least 0.7 of the longest wait of late (the Spike
//! scheme of Cen, Cosman and Voelker, ToN 2003). More than 2 % of such losses in a round, and more than random loss may bring in two
//! standard deviations, count as a standing queue. Nor may chance take more of the rate that a round with a queue shows.
//!
//! *Noise.* Where round trips jump by more than a packet's sending time, as on cellular links, all limits of the queue grow with the
//! jumps, and a small queue is kept so that a moment of higher rate finds something to send.
//!
//! # What was measured
//!
//! `cargo run --release -p braid-bond --example controller` prints the tables, beside CUBIC and BBRv3, in virtual time; with recordings as
//! arguments it runs them. `cargo test -p braid-bond --test controller` holds the promises. Alone at 5 to 50 Mbit/s with 1 MB of buffer and
//! round trips of 10 to 600 ms: at least 0.94 of the rate as goodput (headers take 0.04), the median queue under 2 ms. With 1, 3 and 10 %
//! loss, random or in bursts of five: 0.94, 0.92 and 0.90 of rate x (1 - loss). Beside one flow at 20 Mbit/s and 40 ms with 0.5 to 4 BDP,
//! whoever came first: at least 0.39 for each. On an LTE recording 3.2 Mbit/s with 96 ms of queue (95th percentile), where CUBIC
//! had 4.1 with 1,642 and BBRv3 3.8 with 348.
//!
//! Known limits: 0.46 of the capacity is held whether the rivals are one or many. Buffers of fewer than about twenty packets are shared
//! badly, those of two to four not at all (a burst does not fit, and one packet is half of the queue). On the cellular recordings a tenth
//! to two fifths of CUBIC's rate are given for less than a tenth of its median delay. At 1 Mbit/s, where a round has nine packets and one or
//! two of the own make a queue, a tenth of random loss leaves 0.87 of rate x (1 - loss).

mod cross_traffic;
mod filters;
mod flight;
mod loss_classifier;
mod metrics;
mod probe;
mod rate_controller;

pub use metrics::PathMetrics;
pub use rate_controller::RateController;
