//! Energy of data transfers: power profiles of interfaces, joules per byte, and meters that add them up.
//!
//! Sources: OPERETTA III.C and Table I (a database of interface power), IV.A and eq. 2 (the energy of a load is `a_j / r_j` per bit, where `a_j` is
//! the power of the active interface minus that of the idle one); Huang et al., "A Close Examination of Performance and Power Characteristics of 4G
//! LTE Networks", MobiSys 2012 (the power of an active radio is linear in its rates: `alpha_u * t_u + alpha_d * t_d + beta`).
//!
//! Not modelled: the tail time for which a cellular radio stays active after a transfer, and the energy of the processor.

mod fit;
mod nearest;

use std::fmt;
use std::str::FromStr;

use braid_model::{ByteCount, Joules, LinkKind, PerDirection, Power, Rate};
use serde::{Deserialize, Serialize};

use crate::pattern::Pattern;

pub use fit::{FittedPower, PowerFit};
pub use nearest::{Nearest, Nearness};

/// Maximum length of a text field in bytes.
const TEXT_LIMIT: usize = 500;
/// Maximum plausible value in milliwatts, or milliwatts per Mbit/s: 100 W.
const MILLIWATT_LIMIT: f64 = 100_000.0;

/// Technology of an interface, by which its power profile is chosen.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Technology {
    /// IEEE 802.11.
    Wifi,
    /// Bluetooth.
    Bluetooth,
    /// GPRS and EDGE.
    Gprs,
    /// UMTS and HSPA.
    #[serde(rename = "3g")]
    ThreeG,
    /// LTE.
    Lte,
    /// 5G New Radio.
    #[serde(rename = "5g")]
    FiveG,
    /// Wired Ethernet.
    Ethernet,
}

impl Technology {
    /// All technologies with their names in files.
    pub const ALL: [(&str, Self); 7] = [
        ("wifi", Self::Wifi),
        ("bluetooth", Self::Bluetooth),
        ("gprs", Self::Gprs),
        ("3g", Self::ThreeG),
        ("lte", Self::Lte),
        ("5g", Self::FiveG),
        ("ethernet", Self::Ethernet),
    ];

    /// The default technology of a link of this kind; cellular links count as LTE. `None` for tunnels and virtual devices, because their bytes are
    /// charged to the underlying device.
    pub const fn of(kind: LinkKind) -> Option<Self> {
        match kind {
            LinkKind::Wired => Some(Self::Ethernet),
            LinkKind::Wireless => Some(Self::Wifi),
            LinkKind::Cellular => Some(Self::Lte),
            LinkKind::Vpn | LinkKind::Virtual | LinkKind::Loopback => None,
        }
    }
}

impl fmt::Display for Technology {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(Self::ALL.iter().find(|(_, one)| one == self).map_or("unknown", |(name, _)| name))
    }
}

/// The error for a text that is not a technology.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0:?} is not a technology: write wifi, bluetooth, gprs, 3g, lte, 5g or ethernet")]
pub struct UnknownTechnology(String);

impl FromStr for Technology {
    type Err = UnknownTechnology;
    fn from_str(text: &str) -> Result<Self, UnknownTechnology> {
        let found = Self::ALL.iter().find(|(name, _)| *name == text);
        found.map(|(_, technology)| *technology).ok_or_else(|| UnknownTechnology(text.to_owned()))
    }
}

/// A profile as written in files and by the profile service. [`Profile::try_from`] validates it. Powers are in milliwatts.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Row {
    /// Model of the device. `*` matches any text; alone it matches every device of the technology.
    pub model: String,
    /// Technology of the device.
    pub technology: Technology,
    /// Power while idle.
    pub idle_mw: f64,
    /// Power while receiving at a rate near zero.
    pub receive_mw: f64,
    /// Power while sending at a rate near zero.
    pub transmit_mw: f64,
    /// Additional power per Mbit/s received.
    #[serde(default)]
    pub down_mw_per_mbps: f64,
    /// Additional power per Mbit/s sent.
    #[serde(default)]
    pub up_mw_per_mbps: f64,
    /// Highest measured receive rate; above it the power does not grow.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub limit_down_mbps: Option<f64>,
    /// Highest measured send rate; above it the power does not grow.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub limit_up_mbps: Option<f64>,
    /// Source of the figures.
    pub source: String,
}

/// The error for an invalid row.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{field}: {reason}")]
pub struct BadRow {
    field: &'static str,
    reason: String,
}

/// A validated power profile.
#[derive(Debug, Clone, PartialEq)]
pub struct Profile {
    row: Row,
}

impl TryFrom<Row> for Profile {
    type Error = BadRow;

    fn try_from(row: Row) -> Result<Self, BadRow> {
        for (field, text) in [("model", &row.model), ("source", &row.source)] {
            if text.trim().is_empty() || text.len() > TEXT_LIMIT || text.contains(char::is_control) {
                return Err(BadRow { field, reason: format!("must be 1 to {TEXT_LIMIT} bytes of text without control characters") });
            }
        }
        let powers = [("idle_mw", row.idle_mw), ("receive_mw", row.receive_mw), ("transmit_mw", row.transmit_mw)];
        let slopes = [("down_mw_per_mbps", row.down_mw_per_mbps), ("up_mw_per_mbps", row.up_mw_per_mbps)];
        for (field, value) in powers.into_iter().chain(slopes) {
            if !(0.0..=MILLIWATT_LIMIT).contains(&value) {
                return Err(BadRow { field, reason: format!("{value} is not from 0 to {MILLIWATT_LIMIT} milliwatts") });
            }
        }
        for (field, value) in [("limit_down_mbps", row.limit_down_mbps), ("limit_up_mbps", row.limit_up_mbps)] {
            if value.is_some_and(|limit| !(limit > 0.0 && limit <= 1e6)) {
                return Err(BadRow { field, reason: "must be above 0 and at most 1000000 Mbit/s".to_owned() });
            }
        }
        for (field, value) in [("receive_mw", row.receive_mw), ("transmit_mw", row.transmit_mw)] {
            if value < row.idle_mw {
                return Err(BadRow { field, reason: format!("{value} is less than idle_mw, {}", row.idle_mw) });
            }
        }
        Ok(Self { row })
    }
}

impl Profile {
    /// The underlying row.
    pub fn row(&self) -> &Row {
        &self.row
    }

    /// Whether the profile applies to every device of its technology.
    fn is_general(&self) -> bool {
        self.row.model.bytes().all(|byte| byte == b'*')
    }

    /// Power while idle.
    pub fn idle(&self) -> Power {
        Power::from_milliwatts(self.row.idle_mw)
    }

    /// Power while moving data at these rates.
    ///
    /// If the base powers of receiving and sending differ, they are mixed in proportion to the bits, because a Wi-Fi radio does one at a time. With
    /// equal base powers this is Huang et al.'s model.
    pub fn power_at(&self, down: Rate, up: Rate) -> Power {
        let row = &self.row;
        let mbps = |rate: Rate| rate.bps() as f64 / 1e6;
        let (down, up) = (mbps(down), mbps(up));
        if down + up == 0.0 {
            return self.idle();
        }
        let base = (row.receive_mw * down + row.transmit_mw * up) / (down + up);
        let within = |rate: f64, limit: Option<f64>| limit.map_or(rate, |limit| rate.min(limit));
        let slopes = row.down_mw_per_mbps * within(down, row.limit_down_mbps) + row.up_mw_per_mbps * within(up, row.limit_up_mbps);
        Power::from_milliwatts(base + slopes)
    }

    /// Energy per byte in each direction on a link of these capacities (OPERETTA eq. 2: `a_j / r_j`).
    pub fn cost(&self, down: Rate, up: Rate) -> ByteCost {
        let extra = |power: Power| power.above(self.idle());
        let active = PerDirection { down: extra(self.power_at(down, Rate::ZERO)), up: extra(self.power_at(Rate::ZERO, up)) };
        ByteCost::of(active, PerDirection { down, up })
    }
}

/// Energy per byte received and sent, above the idle power of the interface.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct ByteCost {
    /// Energy per byte received.
    pub down: Joules,
    /// Energy per byte sent.
    pub up: Joules,
}

impl ByteCost {
    /// Computes the cost from the additional power of activity and the capacity, by direction. It is zero at a capacity of zero.
    pub fn of(active: PerDirection<Power>, capacity: PerDirection<Rate>) -> Self {
        let byte = ByteCount::new(1);
        Self { down: active.down.to_move(byte, capacity.down), up: active.up.to_move(byte, capacity.up) }
    }

    /// Energy of these bytes received and sent.
    pub fn energy(&self, down: ByteCount, up: ByteCount) -> Joules {
        Joules::new(self.down.get() * down.get() as f64 + self.up.get() * up.get() as f64)
    }
}

/// Adds up the energy of a link, a flow or an application. The total is unknown until something with a known cost is counted.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct EnergyMeter {
    total: Option<Joules>,
}

impl EnergyMeter {
    /// Counts bytes received and sent at `cost`. Bytes with an unknown cost are not counted.
    pub fn count(&mut self, cost: Option<ByteCost>, down: ByteCount, up: ByteCount) {
        if let Some(cost) = cost {
            *self.total.get_or_insert_default() += cost.energy(down, up);
        }
    }

    /// Adds the total of another meter.
    pub fn absorb(&mut self, other: Self) {
        if let Some(more) = other.total {
            *self.total.get_or_insert_default() += more;
        }
    }

    /// The total energy, if known.
    pub fn total(&self) -> Option<Joules> {
        self.total
    }
}

/// A list of profiles. Profiles added later take precedence.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Profiles {
    all: Vec<Profile>,
}

impl Profiles {
    /// Adds profiles in front of the existing ones, in their order. A profile replaces one of the same model and technology.
    pub fn extend(&mut self, profiles: Vec<Profile>) {
        let same = |a: &Profile, b: &Profile| a.row.technology == b.row.technology && a.row.model == b.row.model;
        self.all.retain(|old| !profiles.iter().any(|new| same(old, new)));
        self.all.splice(0..0, profiles);
    }

    /// All profiles in order of precedence.
    pub fn iter(&self) -> impl Iterator<Item = &Profile> {
        self.all.iter()
    }

    /// The profile of a device: the first whose model matches (ignoring case), else a general one (`*`).
    pub fn find(&self, model: Option<&str>, technology: Technology) -> Option<&Profile> {
        let mine = || self.all.iter().filter(move |profile| profile.row.technology == technology);
        let named = |model| mine().find(|profile| !profile.is_general() && matches(&profile.row.model, model));
        model.and_then(named).or_else(|| mine().find(|profile| profile.is_general()))
    }

    /// The profile that `name` means in a configuration: a technology, or a model of any technology.
    pub fn named(&self, name: &str) -> Option<&Profile> {
        match name.parse() {
            Ok(technology) => self.find(None, technology),
            Err(_) => self.all.iter().find(|profile| !profile.is_general() && matches(&profile.row.model, name)),
        }
    }
}

fn matches(pattern: &str, model: &str) -> bool {
    Pattern::new(pattern.to_lowercase()).matches(&model.to_lowercase())
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn row(model: &str, technology: Technology) -> Row {
        Row {
            model: model.to_owned(),
            technology,
            idle_mw: 0.0,
            receive_mw: 1000.0,
            transmit_mw: 1000.0,
            down_mw_per_mbps: 0.0,
            up_mw_per_mbps: 0.0,
            limit_down_mbps: None,
            limit_up_mbps: None,
            source: "a test".to_owned(),
        }
    }

    fn lte() -> Profile {
        let base = Row { receive_mw: 1288.04, transmit_mw: 1288.04, ..row("*", Technology::Lte) };
        Profile::try_from(Row { down_mw_per_mbps: 51.97, up_mw_per_mbps: 438.39, limit_down_mbps: Some(20.0), ..base }).unwrap()
    }

    #[test]
    fn power_is_linear_in_the_rates_up_to_the_limit() {
        let milliwatts = |down, up| (lte().power_at(Rate::from_mbps(down), Rate::from_mbps(up)).watts() * 1e5).round() / 100.0;
        assert_eq!(milliwatts(10, 2), 1288.04 + 519.7 + 876.78);
        assert_eq!(milliwatts(0, 0), 0.0);
        assert_eq!(milliwatts(20, 0), milliwatts(500, 0));
    }

    #[test]
    fn a_byte_costs_active_power_over_capacity() {
        // OPERETTA Table III: 634 mW at 1 Mbit/s are 0.634 microjoules a bit.
        let wifi = Row { idle_mw: 100.0, receive_mw: 734.0, transmit_mw: 1368.0, ..row("*", Technology::Wifi) };
        let cost = Profile::try_from(wifi).unwrap().cost(Rate::from_mbps(1), Rate::from_mbps(2));
        assert!((cost.down.get() - 0.634e-6 * 8.0).abs() < 1e-15 && (cost.up.get() - cost.down.get()).abs() < 1e-15, "{cost:?}");
        assert_eq!(lte().cost(Rate::ZERO, Rate::ZERO), ByteCost::default());
    }

    #[test]
    fn a_meter_has_no_total_until_a_cost_is_known() {
        let mut meter = EnergyMeter::default();
        meter.count(None, ByteCount::new(1000), ByteCount::ZERO);
        assert_eq!(meter.total(), None);
        meter.count(Some(ByteCost { down: Joules::new(0.5), up: Joules::new(2.0) }), ByteCount::new(4), ByteCount::new(1));
        let mut sum = EnergyMeter::default();
        sum.absorb(meter);
        sum.absorb(EnergyMeter::default());
        assert_eq!(sum.total(), Some(Joules::new(4.0)));
    }

    #[test]
    fn models_take_precedence_over_technologies_and_later_rows_over_earlier_ones() {
        let profile = |model, technology| Profile::try_from(row(model, technology)).unwrap();
        let mut profiles = Profiles::default();
        profiles.extend(vec![profile("*", Technology::Wifi), profile("Netgear MA701", Technology::Wifi), profile("*", Technology::Lte)]);
        let found = |profiles: &Profiles, model, technology| profiles.find(model, technology).map(|found| found.row.model.clone());
        assert_eq!(found(&profiles, Some("netgear ma701"), Technology::Wifi).as_deref(), Some("Netgear MA701"));
        assert_eq!(found(&profiles, Some("unheard of"), Technology::Wifi).as_deref(), Some("*"));
        assert_eq!(found(&profiles, None, Technology::FiveG), None);
        profiles.extend(vec![Profile::try_from(Row { source: "mine".into(), ..row("Netgear*", Technology::Wifi) }).unwrap()]);
        assert_eq!(profiles.named("Netgear MA701").unwrap().row.source, "mine");
        assert_eq!(profiles.named("lte").unwrap().row.technology, Technology::Lte);
        assert_eq!(profiles.named("no such thing"), None);
        profiles.extend(vec![profile("*", Technology::Lte)]);
        assert_eq!(profiles.iter().count(), 4, "the same model and technology is replaced");
    }

    #[test]
    fn bad_rows_are_refused_with_the_field() {
        type Spoil = fn(&mut Row);
        let cases: [(&str, Spoil); 7] = [
            ("model", |row| row.model = " ".into()),
            ("source", |row| row.source = "a\u{7}b".into()),
            ("idle_mw", |row| row.idle_mw = -1.0),
            ("receive_mw", |row| row.receive_mw = f64::NAN),
            ("up_mw_per_mbps", |row| row.up_mw_per_mbps = 1e9),
            ("limit_down_mbps", |row| row.limit_down_mbps = Some(0.0)),
            ("transmit_mw", |row| row.idle_mw = 1000.5),
        ];
        for (field, spoil) in cases {
            let mut bad = Row { receive_mw: 2000.0, ..row("x", Technology::Gprs) };
            spoil(&mut bad);
            let message = Profile::try_from(bad).unwrap_err().to_string();
            assert!(message.starts_with(field), "{message}");
        }
    }

    #[test]
    fn technologies_parse_from_their_names() {
        for (name, technology) in Technology::ALL {
            assert_eq!((name.parse(), technology.to_string().as_str()), (Ok(technology), name));
        }
        assert!("6g".parse::<Technology>().unwrap_err().to_string().contains("5g"));
    }

    proptest! {
        #[test]
        fn energy_is_additive(
            capacity in 1u64..10_000, parts in prop::collection::vec((0u64..1_000_000, 0u64..1_000_000), 1..20),
        ) {
            let cost = Some(lte().cost(Rate::from_mbps(capacity), Rate::from_mbps(capacity)));
            let (mut pieces, mut whole) = (EnergyMeter::default(), EnergyMeter::default());
            for (down, up) in &parts {
                pieces.count(cost, ByteCount::new(*down), ByteCount::new(*up));
            }
            let sum = |pick: fn(&(u64, u64)) -> u64| ByteCount::new(parts.iter().map(pick).sum());
            whole.count(cost, sum(|part| part.0), sum(|part| part.1));
            let (pieces, whole) = (pieces.total().unwrap().get(), whole.total().unwrap().get());
            prop_assert!((pieces - whole).abs() <= 1e-9 * whole);
        }
    }
}
