//! Conditions on context (Yap's thesis, fig. 2.10: migration by event): whether a rule applies now.
//!
//! A rule whose condition does not hold is treated as if it were not there, so that the next matching rule applies.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::time::Duration;

use crate::pattern::kernel_name;

/// Maximum length of the name of a fact, in bytes.
pub const FACT_NAME_LIMIT: usize = 32;
/// Maximum length of the value of a fact, in bytes.
pub const FACT_VALUE_LIMIT: usize = 64;
/// Conditions that Braid evaluates itself. A fact cannot have one of these names.
pub const RESERVED_FACTS: [&str; 4] = ["running", "time", "battery_below", "ssid"];
/// The fact that an accelerometer sets.
pub const MOVING: &str = "moving";

const MINUTES_OF_DAY: u16 = 24 * 60;

/// The conditions of a rule on the context; all that are given must hold. The default has no condition and always holds.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct When {
    /// Facts and the value that each must have. A fact without a value counts as `false`.
    pub facts: BTreeMap<String, String>,
    /// A program that must have live flows: a process name, or the path of an executable.
    pub running: Option<String>,
    /// Local time of day.
    pub time: Option<TimeWindow>,
    /// The battery's level must be below this, from 0 to 1.
    pub battery_below: Option<f64>,
    /// A wireless interface must be associated with this network.
    pub ssid: Option<String>,
}

/// What is known about the context.
pub struct Facts<'a> {
    /// Facts with a value.
    pub values: &'a BTreeMap<String, String>,
    /// Whether a program has live flows; the argument is as in [`When::running`].
    pub running: &'a dyn Fn(&str) -> bool,
    /// Time since local midnight; `None` if unknown.
    pub time_of_day: Option<Duration>,
    /// Level of the battery, from 0 to 1; `None` without a battery.
    pub battery: Option<f64>,
    /// Names of the wireless networks that interfaces are associated with.
    pub ssids: &'a BTreeSet<String>,
}

impl When {
    /// Whether no condition is given.
    pub fn is_empty(&self) -> bool {
        *self == Self::default()
    }

    /// Whether all conditions hold.
    pub fn holds(&self, facts: &Facts<'_>) -> bool {
        self.unmet(facts).is_none()
    }

    /// The first condition that does not hold, in words.
    pub fn unmet(&self, facts: &Facts<'_>) -> Option<String> {
        for (name, wanted) in &self.facts {
            match facts.values.get(name) {
                Some(value) if value == wanted => {}
                Some(value) => return Some(format!("{name} is {value}")),
                None if wanted == "false" => {}
                None => return Some(format!("{name} is not set")),
            }
        }
        if let Some(program) = self.running.as_ref().filter(|program| !(facts.running)(program)) {
            return Some(format!("{program} has no live flow"));
        }
        if let Some(window) = self.time {
            match facts.time_of_day {
                None => return Some("the local time is unknown".to_owned()),
                Some(now) if !window.contains(now) => return Some(format!("it is {}", Clock(minute(now)))),
                Some(_) => {}
            }
        }
        if let Some(limit) = self.battery_below {
            match facts.battery {
                None => return Some("there is no battery".to_owned()),
                Some(level) if level >= limit => return Some(format!("the battery's level is {level:.2}")),
                Some(_) => {}
            }
        }
        let absent = self.ssid.as_ref().filter(|ssid| !facts.ssids.contains(*ssid));
        absent.map(|ssid| format!("no interface is connected to the network {ssid:?}"))
    }

    /// Whether this condition holds whenever `other` holds: each of its conditions is also one of `other`.
    pub fn covers(&self, other: &Self) -> bool {
        fn same<T: PartialEq>(mine: &Option<T>, theirs: &Option<T>) -> bool {
            mine.is_none() || mine == theirs
        }
        self.facts.iter().all(|(name, value)| other.facts.get(name) == Some(value))
            && same(&self.running, &other.running)
            && same(&self.time, &other.time)
            && self.battery_below.is_none_or(|mine| other.battery_below.is_some_and(|theirs| theirs <= mine))
            && same(&self.ssid, &other.ssid)
    }
}

impl fmt::Display for When {
    /// The conditions in the syntax of the configuration.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let value = |value: &str| if matches!(value, "true" | "false") { value.to_owned() } else { format!("{value:?}") };
        let facts = self.facts.iter().map(|(name, wanted)| format!("{name} = {}", value(wanted)));
        let others = [
            self.running.as_ref().map(|program| format!("running = {program:?}")),
            self.time.map(|window| format!("time = \"{window}\"")),
            self.battery_below.map(|level| format!("battery_below = {level}")),
            self.ssid.as_ref().map(|ssid| format!("ssid = {ssid:?}")),
        ];
        f.write_str(&facts.chain(others.into_iter().flatten()).collect::<Vec<_>>().join(", "))
    }
}

/// Whether the text names the program: its path if it contains a slash, else the name of the process, of which the kernel keeps 15 bytes.
pub fn names_program(text: &str, name: &str, exe: Option<&str>) -> bool {
    if text.contains('/') { exe == Some(text) } else { kernel_name(text) == kernel_name(name) }
}

/// Whether a text may be the name of a fact that users set: lower-case letters, digits, `-` and `_`, with a letter first.
pub fn is_fact_name(text: &str) -> bool {
    (1..=FACT_NAME_LIMIT).contains(&text.len())
        && text.starts_with(|letter: char| letter.is_ascii_lowercase())
        && text.chars().all(|letter| letter.is_ascii_lowercase() || letter.is_ascii_digit() || matches!(letter, '-' | '_'))
        && !RESERVED_FACTS.contains(&text)
}

/// Whether a text may be the value of a fact: 1 to 64 bytes without control characters.
pub fn is_fact_value(text: &str) -> bool {
    (1..=FACT_VALUE_LIMIT).contains(&text.len()) && !text.chars().any(char::is_control)
}

/// A daily window of local time, from the start of one minute to the start of another. It may cross midnight.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TimeWindow {
    /// First minute of the day, from 0 to 1439; never the same as `to`.
    from: u16,
    /// First minute after the window.
    to: u16,
}

/// Why a text is not a window of time.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum InvalidWindow {
    /// It is not of the form `22:00-06:00`.
    #[error("it is not of the form \"22:00-06:00\"")]
    Form,
    /// It begins when it ends, so that it holds always or never.
    #[error("it begins and ends at the same time")]
    Empty,
}

impl std::str::FromStr for TimeWindow {
    type Err = InvalidWindow;

    fn from_str(text: &str) -> Result<Self, InvalidWindow> {
        let (from, to) = text.split_once('-').ok_or(InvalidWindow::Form)?;
        let [from, to] = [from, to].map(|clock| minute_of(clock.trim()).ok_or(InvalidWindow::Form));
        let (from, to) = (from?, to?);
        if from == to { Err(InvalidWindow::Empty) } else { Ok(Self { from, to }) }
    }
}

impl fmt::Display for TimeWindow {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}-{}", Clock(self.from), Clock(self.to))
    }
}

impl TimeWindow {
    /// Whether the time, counted from local midnight, lies within the window.
    pub fn contains(&self, time_of_day: Duration) -> bool {
        let now = minute(time_of_day);
        if self.from < self.to { (self.from..self.to).contains(&now) } else { now >= self.from || now < self.to }
    }

    /// Time until the window next begins or ends; above zero.
    pub fn next_change(&self, time_of_day: Duration) -> Duration {
        let day = Duration::from_secs(u64::from(MINUTES_OF_DAY) * 60);
        let until = |minute: u16| {
            let at = Duration::from_secs(u64::from(minute) * 60);
            if at > time_of_day { at - time_of_day } else { (at + day).saturating_sub(time_of_day) }
        };
        until(self.from).min(until(self.to))
    }
}

/// The minute of the day of a time since midnight. A leap second, or a day that is longer than usual, counts as the last minute.
fn minute(time_of_day: Duration) -> u16 {
    u16::try_from(time_of_day.as_secs() / 60).unwrap_or(u16::MAX).min(MINUTES_OF_DAY - 1)
}

fn minute_of(clock: &str) -> Option<u16> {
    let (hour, minute) = clock.split_once(':')?;
    let number = |text: &str, limit: u16| {
        let digits = (1..=2).contains(&text.len()) && text.bytes().all(|byte| byte.is_ascii_digit());
        text.parse::<u16>().ok().filter(|number| digits && *number < limit)
    };
    Some(number(hour, 24)? * 60 + number(minute, 60).filter(|_| minute.len() == 2)?)
}

/// A minute of the day as hours and minutes.
pub struct Clock(u16);

impl Clock {
    /// The minute of a time since midnight.
    pub fn of(time_of_day: Duration) -> Self {
        Self(minute(time_of_day))
    }
}

impl fmt::Display for Clock {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:02}:{:02}", self.0 / 60, self.0 % 60)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn at(hours: u64, minutes: u64, seconds: u64) -> Duration {
        Duration::from_secs((hours * 60 + minutes) * 60 + seconds)
    }

    fn window(text: &str) -> TimeWindow {
        text.parse().unwrap()
    }

    /// The first unmet condition with these facts.
    fn unmet(when: &When, values: &[(&str, &str)], change: impl FnOnce(&mut Facts<'_>)) -> Option<String> {
        let values = values.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect();
        let ssids = BTreeSet::from(["home".to_owned()]);
        let mut facts =
            Facts { values: &values, running: &|program| program == "game", time_of_day: Some(at(12, 0, 0)), battery: None, ssids: &ssids };
        change(&mut facts);
        when.unmet(&facts)
    }

    #[test]
    fn a_window_may_cross_midnight() {
        let night = window("22:00-06:00");
        let inside = [at(22, 0, 0), at(23, 59, 59), at(0, 0, 0), at(5, 59, 59)];
        assert!(inside.iter().all(|now| night.contains(*now)));
        assert!([at(6, 0, 0), at(12, 0, 0), at(21, 59, 59)].iter().all(|now| !night.contains(*now)));
        let day = window("6:30-22:00");
        assert_eq!(day.to_string(), "06:30-22:00");
        assert_eq!([at(6, 29, 59), at(6, 30, 0), at(21, 59, 59), at(22, 0, 0)].map(|now| day.contains(now)), [false, true, true, false]);
        assert_eq!(night.next_change(at(21, 59, 58)), Duration::from_secs(2));
        assert_eq!(night.next_change(at(22, 0, 0)), at(8, 0, 0));
        assert_eq!(night.next_change(at(6, 0, 0)), at(16, 0, 0));
    }

    #[test]
    fn malformed_and_empty_windows_are_rejected() {
        for text in ["", "22:00", "22-06", "24:00-06:00", "22:60-06:00", "22:0-06:00", "+1:00-02:00", "22:00-06:00-07:00", "-", "a:b-c:d"] {
            assert_eq!(text.parse::<TimeWindow>(), Err(InvalidWindow::Form), "{text}");
        }
        assert_eq!("7:00-07:00".parse::<TimeWindow>(), Err(InvalidWindow::Empty));
    }

    #[test]
    fn every_condition_must_hold() {
        let moving = When { facts: [(MOVING.to_owned(), "true".to_owned())].into(), ..When::default() };
        assert_eq!(unmet(&moving, &[], |_| {}).as_deref(), Some("moving is not set"));
        assert_eq!(unmet(&moving, &[("moving", "false")], |_| {}).as_deref(), Some("moving is false"));
        assert_eq!(unmet(&moving, &[("moving", "true")], |_| {}), None);
        let still = When { facts: [(MOVING.to_owned(), "false".to_owned())].into(), ..When::default() };
        assert_eq!(unmet(&still, &[], |_| {}), None, "a fact without a value counts as false");
        let all = When {
            running: Some("game".into()),
            time: Some(window("11:00-13:00")),
            battery_below: Some(0.3),
            ssid: Some("home".into()),
            ..moving
        };
        let values = [("moving", "true")];
        assert_eq!(unmet(&all, &values, |facts| facts.battery = Some(0.29)), None);
        assert_eq!(unmet(&all, &values, |facts| facts.battery = Some(0.3)).as_deref(), Some("the battery's level is 0.30"));
        assert_eq!(unmet(&all, &values, |_| {}).as_deref(), Some("there is no battery"));
        assert_eq!(unmet(&all, &values, |facts| facts.time_of_day = Some(at(13, 0, 0))).as_deref(), Some("it is 13:00"));
        assert_eq!(unmet(&all, &values, |facts| facts.running = &|_| false).as_deref(), Some("game has no live flow"));
        let away = unmet(&When { ssid: Some("away".into()), ..When::default() }, &[], |_| {});
        assert_eq!(away.as_deref(), Some("no interface is connected to the network \"away\""));
        assert_eq!(all.to_string(), "moving = true, running = \"game\", time = \"11:00-13:00\", battery_below = 0.3, ssid = \"home\"");
    }

    #[test]
    fn a_condition_covers_stricter_ones() {
        let when = |facts: &[(&str, &str)], battery_below| When {
            facts: facts.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect(),
            battery_below,
            ..When::default()
        };
        let always = When::default();
        let moving = when(&[("moving", "true")], None);
        assert!(always.covers(&moving) && !moving.covers(&always) && moving.covers(&moving));
        assert!(!moving.covers(&when(&[("moving", "false")], None)));
        assert!(moving.covers(&when(&[("moving", "true"), ("docked", "false")], Some(0.2))));
        assert!(when(&[], Some(0.5)).covers(&when(&[], Some(0.2))) && !when(&[], Some(0.2)).covers(&when(&[], Some(0.5))));
    }

    #[test]
    fn names_and_values_of_facts_are_bounded() {
        assert!(["moving", "at-work", "x2", &"a".repeat(32)].iter().all(|name| is_fact_name(name)));
        assert!(["", "Moving", "2x", "a b", "time", "ssid", "ä", &"a".repeat(33)].iter().all(|name| !is_fact_name(name)));
        assert!(["true", "two words", "ü"].iter().all(|value| is_fact_value(value)));
        assert!(["", "a\nb", &"a".repeat(65)].iter().all(|value| !is_fact_value(value)));
    }

    #[test]
    fn programs_are_named_by_process_or_path() {
        assert!(names_program("game", "game", None) && !names_program("game", "gamer", None));
        assert!(names_program("a-very-long-process-name", "a-very-long-pro", None));
        assert!(names_program("/usr/games/game", "x", Some("/usr/games/game")) && !names_program("/usr/games/game", "game", None));
    }

    proptest! {
        #[test]
        fn a_window_changes_exactly_at_its_next_change(from in 0u16..1440, to in 0u16..1440, second in 0u64..86_400, nanos in 0u32..1_000_000_000) {
            prop_assume!(from != to);
            let (window, now) = (TimeWindow { from, to }, Duration::new(second, nanos));
            let day = Duration::from_secs(86_400);
            let wrapped = |at: Duration| if at >= day { at - day } else { at };
            let next = now + window.next_change(now);
            prop_assert_ne!(window.contains(now), window.contains(wrapped(next)));
            let before = next - Duration::from_nanos(1);
            prop_assert_eq!(window.contains(now), window.contains(wrapped(before)));
        }
    }
}
