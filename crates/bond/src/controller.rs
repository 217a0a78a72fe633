//! Congestion controller of a path, and the state that a bond reads from it.
//!
//! [`RateController`] is designed for links that lose packets, change their rate within a second and have buffers for many seconds. QUIC runs one
//! instance per path (noq's `Controller`). [`PathMetrics`] publishes its state.
//!
//! # Design
//!
//! *Rate and round trip, not loss.* Each round yields a delivery rate and the minimum round trip of its packets. The pace is the maximum rate of
//! eight rounds, more than one probing cycle (BBR: Cardwell et al., ACM Queue 2016). The queueing delay is the excess of the round trip over its
//! minimum in ten seconds. While a queue stands, the acknowledgement rate *is* the capacity, so the pace follows it at once, and the queue is drained
//! within about two round trips. A probing cycle has two rounds at the rate, one round 10 % faster, one to observe its result, and one 10 % slower.
//! When the faster round delivered more without a queue, steps of 25, 50 and 100 % follow. Losses in slower rounds are random. The pace compensates
//! for random loss up to 15 %: more than the promised 10 %, and less than 20 %, where it is better to stop using the link.
//!
//! *Start phase.* The bytes in flight double every round trip, as with a window, since the rate sample of a round is what the round before has sent.
//! The phase ends when a queue builds. Then the recent acknowledgement rate becomes the pace, and the queue is drained down to what the path holds.
//!
//! *Cross traffic.* If a queue does not drain although we sent more slowly for long enough to drain it, or if it is not empty once in twelve rounds,
//! then either cross traffic fills it (the test for elastic cross traffic of Copa, Arun and Balakrishnan, NSDI 2018, and Nimbus, Goyal et al.,
//! SIGCOMM 2022), or the path has become longer. In the latter case the round trip did not change when we slowed down. Against cross traffic we do
//! not imitate its control law, since those of CUBIC and BBR differ. Instead we hold a rate of 0.46 of the capacity, and above it behave as without
//! cross traffic. A flow of constant rate leaves the rest to any control law, including another instance of ours. The capacity is known from before
//! the cross traffic started, or is measured: a burst of at least 12 packets or 10 ms beyond our rate lengthens a standing queue by bytes / capacity;
//! the minimum of three measurements counts. The capacity estimate is discarded when the held rate was sent but not delivered (the path itself is
//! slower). It is lowered while more than 4 % are lost in a full buffer. The cross traffic counts as gone after ten seconds with a short queue.
//!
//! *Short buffers.* A loss is attributed to a full buffer when the packet before it was delayed by at least 0.7 of the recent maximum queueing delay
//! (the Spike scheme of Cen, Cosman and Voelker, ToN 2003). More than 2 % of such losses in a round, and more than random loss explains within two
//! standard deviations, count as a standing queue. The rate sample of a round with a queue is also corrected for the variation of random loss.
//!
//! *Noise.* Where round trips vary by more than the transmission time of a packet, as on cellular links, all thresholds of the queue grow with the
//! variation. A small queue is then kept, so that the sender can use short increases of the rate.
//!
//! # Measurements
//!
//! `cargo run --release -p braid-bond --example controller` prints the tables, with CUBIC and BBRv3 for comparison, in virtual time; with recordings
//! as arguments it replays them. `cargo test -p braid-bond --test controller` checks the guarantees. Alone at 5 to 50 Mbit/s with 1 MB of buffer and
//! round trips of 10 to 600 ms: at least 0.94 of the rate as goodput (headers take 0.04), with a median queueing delay under 2 ms. With 1, 3 and 10 %
//! loss, random or in bursts of five: 0.94, 0.92 and 0.90 of rate x (1 - loss). Beside one other flow at 20 Mbit/s and 40 ms with 0.5 to 4 BDP of
//! buffer, whichever started first: at least 0.39 for each. On an LTE recording: 3.2 Mbit/s with a queueing delay of 96 ms (95th percentile), where
//! CUBIC had 4.1 with 1,642 and BBRv3 3.8 with 348.
//!
//! Known limits: the controller holds 0.46 of the capacity regardless of the number of competing flows. Buffers of fewer than about twenty packets
//! are shared unfairly, and those of two to four are not shared at all (a burst does not fit, and one packet is half of the queue). On the cellular
//! recordings the controller gives up a tenth to two fifths of CUBIC's rate and has less than a tenth of its median delay. At 1 Mbit/s, where a round
//! has nine packets and one or two of our own packets form a queue, 10 % random loss leaves 0.87 of rate x (1 - loss).

mod cross_traffic;
mod filters;
mod flight;
mod loss_classifier;
mod metrics;
mod probe;
mod rate_controller;

pub use metrics::PathMetrics;
pub use rate_controller::RateController;
