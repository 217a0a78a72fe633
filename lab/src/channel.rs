//! A radio channel that several stations share: one sends at a time, and each that waits is as likely to be next (IEEE 802.11's DCF without collisions).

use std::collections::VecDeque;
use std::time::Duration;

use braid_model::{ByteCount, Rate, Time};
use braid_netem::{Packet, Random};

/// Size of the packets of the station that sends all the time.
const BUSY_PACKET: ByteCount = ByteCount::new(1500);

/// A packet of a station.
#[derive(Debug)]
struct Waiting<P> {
    packet: P,
    rate: Rate,
}

/// A channel.
#[derive(Debug)]
pub(crate) struct Channel<P> {
    /// The packets that wait, by station.
    stations: Vec<VecDeque<Waiting<P>>>,
    /// Rate of one more station, which always has a packet to send.
    busy: Option<Rate>,
    /// Size of each station's queue.
    queue: ByteCount,
    dice: Random,
    /// When the channel is free again.
    free_at: Time,
    /// What is being sent, until `free_at`, or has been sent.
    sent: VecDeque<(Time, P)>,
}

impl<P: Packet> Channel<P> {
    /// A channel of this many stations. `busy`: the rate of one more, which sends all the time.
    pub(crate) fn new(stations: usize, busy: Option<Rate>, queue: ByteCount, seed: u64, now: Time) -> Self {
        let stations = (0..stations).map(|_| VecDeque::new()).collect();
        Self { stations, busy, queue, dice: Random::new(seed), free_at: now, sent: VecDeque::new() }
    }

    /// Puts a packet into a station's queue. One that has no room is lost.
    pub(crate) fn push(&mut self, now: Time, station: usize, packet: P, rate: Rate) {
        self.advance(now);
        let waiting = &mut self.stations[station];
        let size: u64 = waiting.iter().map(|one| one.packet.size().get()).sum();
        if waiting.is_empty() || size + packet.size().get() <= self.queue.get() {
            waiting.push_back(Waiting { packet, rate });
        }
        self.advance(now);
    }

    /// The next packet that has been sent by `now`.
    pub(crate) fn pop(&mut self, now: Time) -> Option<P> {
        self.advance(now);
        if self.sent.front()?.0 > now {
            return None;
        }
        self.sent.pop_front().map(|(_, packet)| packet)
    }

    /// When to call [`pop`](Self::pop) next.
    pub(crate) fn poll_timeout(&self) -> Option<Time> {
        let starts = self.stations.iter().any(|waiting| !waiting.is_empty()).then_some(self.free_at);
        self.sent.front().map(|(at, _)| *at).or(starts)
    }

    /// Sends what begins by `now`.
    fn advance(&mut self, now: Time) {
        while self.free_at <= now {
            let mut contenders: Vec<usize> = (0..self.stations.len()).filter(|station| !self.stations[*station].is_empty()).collect();
            match self.busy {
                Some(rate) if contenders.is_empty() => {
                    let each = time_of(BUSY_PACKET, rate);
                    let whole = now.since(self.free_at).as_nanos() / each.as_nanos().max(1);
                    self.free_at = self.free_at + each * (u32::try_from(whole).unwrap_or(u32::MAX - 1) + 1);
                    continue;
                }
                None if contenders.is_empty() => {
                    self.free_at = now;
                    return;
                }
                Some(_) => contenders.push(self.stations.len()),
                None => {}
            }
            let winner = contenders[self.dice.up_to(contenders.len() as u64 - 1) as usize];
            match self.stations.get_mut(winner).and_then(VecDeque::pop_front) {
                Some(Waiting { packet, rate }) => {
                    self.free_at = self.free_at + time_of(packet.size(), rate);
                    self.sent.push_back((self.free_at, packet));
                }
                None => self.free_at = self.free_at + time_of(BUSY_PACKET, self.busy.unwrap_or(Rate::ZERO)),
            }
        }
    }
}

fn time_of(size: ByteCount, rate: Rate) -> Duration {
    Duration::from_nanos(size.get().saturating_mul(8_000_000_000) / rate.bps().max(1)).max(Duration::from_nanos(1))
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    /// Bytes that each station with endless packets sends within ten seconds.
    fn saturated(rates: &[Rate], busy: Option<Rate>) -> Vec<u64> {
        let mut channel = Channel::new(rates.len(), busy, ByteCount::new(64_000), 1, Time::ZERO);
        let end = Time::ZERO + SECOND * 10;
        let packet = |station: usize| vec![station as u8; 1500];
        for (station, rate) in rates.iter().enumerate() {
            (0..8).for_each(|_| channel.push(Time::ZERO, station, packet(station), *rate));
        }
        let mut sent = vec![0; rates.len()];
        while let Some(at) = channel.poll_timeout().filter(|at| *at <= end) {
            while let Some(got) = channel.pop(at) {
                let station = usize::from(got[0]);
                sent[station] += got.len() as u64;
                channel.push(at, station, packet(station), rates[station]);
            }
        }
        sent
    }

    #[test]
    fn one_station_alone_has_its_rate() {
        let sent = saturated(&[Rate::from_mbps(12)], None);
        assert!((14_900_000..=15_000_000).contains(&sent[0]), "{sent:?}");
    }

    #[test]
    fn stations_send_as_many_packets_whatever_their_rates() {
        let sent = saturated(&[Rate::from_mbps(24), Rate::from_mbps(6)], Some(Rate::from_mbps(24)));
        // In the time of one packet of each, of 0.5, 2 and 0.5 ms.
        let expected = 10.0 / 0.003 * 1500.0;
        assert!(sent.iter().all(|bytes| (*bytes as f64 / expected - 1.0).abs() < 0.1), "{sent:?}, not {expected}");
    }

    #[test]
    fn a_station_that_sends_all_the_time_delays_others_by_one_packet_at_most_on_average() {
        let mut channel = Channel::new(1, Some(Rate::from_mbps(12)), ByteCount::new(64_000), 1, Time::ZERO);
        let (mut now, mut total) = (Time::ZERO, Duration::ZERO);
        for _ in 0..1000 {
            // At any time within a packet of the other station.
            now = now + Duration::from_micros(50_370);
            channel.push(now, 0, vec![0; 1500], Rate::from_mbps(12));
            let mut at = now;
            while channel.pop(at).is_none() {
                at = channel.poll_timeout().unwrap();
            }
            total += at.since(now);
        }
        // Half of a packet that is being sent, as many packets of the other as the dice give (one on average), and the packet itself.
        let mean = total / 1000;
        assert!((Duration::from_micros(2200)..Duration::from_micros(2800)).contains(&mean), "{mean:?}");
    }

    #[test]
    fn a_full_queue_loses_packets() {
        let mut channel = Channel::new(1, None, ByteCount::new(3000), 1, Time::ZERO);
        (0..5).for_each(|_| channel.push(Time::ZERO, 0, vec![0; 1500], Rate::from_mbps(12)));
        assert_eq!(std::iter::from_fn(|| channel.pop(Time::ZERO + SECOND)).count(), 3, "one is being sent, two wait");
    }
}
