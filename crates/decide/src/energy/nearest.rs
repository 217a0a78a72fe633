//! Chooses the profile nearest to a device: by its model, by a model of the same series, or by its technology.
//!
//! Databases of hardware name devices otherwise than papers and data sheets do: `8086:1229` is the "82557/8/9/0/1 Ethernet Pro 100" of the "Intel
//! Corporation" there, and an "Intel 82559" in a data sheet. So words are compared, not whole names.

use braid_model::DeviceModel;

use super::{Profile, Profiles, Technology, matches};

/// Minimum length of a model number that may name a series.
const MIN_SERIES: usize = 4;
/// Maximum number of words of a name that are compared.
const MAX_WORDS: usize = 40;

/// How near a profile is to a device, nearest first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Nearness {
    /// The profile's model matches the device's name or numbers as a pattern.
    Exact,
    /// The device's name contains all words of the profile's model, with a model number among them.
    Model,
    /// Same vendor, and a model number that differs in the last digit only.
    Series,
    /// Only the technology is the same.
    Technology,
}

impl Nearness {
    /// Name in the API.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Exact => "exact",
            Self::Model => "model",
            Self::Series => "series",
            Self::Technology => "technology",
        }
    }
}

/// The profile of a device.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Nearest<'a> {
    /// The profile.
    pub profile: &'a Profile,
    /// How near it is.
    pub nearness: Nearness,
}

impl Profiles {
    /// The profile that is nearest to a device. Among equally near profiles, the one added last wins.
    pub fn nearest(&self, device: &DeviceModel, technology: Technology) -> Option<Nearest<'_>> {
        let have: Vec<Vec<String>> = device.names().map(words).collect();
        let nearness = |profile: &Profile| {
            let model = profile.row().model.as_str();
            if profile.is_general() {
                return Some(Nearness::Technology);
            }
            if device.names().chain(device.id.as_deref()).any(|name| matches(model, name)) {
                return Some(Nearness::Exact);
            }
            let want = words(model);
            have.iter().filter_map(|have| compare(&want, have)).min()
        };
        let mine = self.iter().filter(|profile| profile.row().technology == technology);
        let found = mine.filter_map(|profile| Some(Nearest { profile, nearness: nearness(profile)? }));
        found.min_by_key(|nearest| nearest.nearness)
    }
}

fn compare(want: &[String], have: &[String]) -> Option<Nearness> {
    if want.iter().any(|word| is_number(word)) && want.iter().all(|word| have.contains(word)) {
        return Some(Nearness::Model);
    }
    let vendor = want.first().filter(|word| !is_number(word) && have.contains(word));
    let series = || want.iter().any(|number| have.iter().any(|other| same_series(number, other)));
    (vendor.is_some() && series()).then_some(Nearness::Series)
}

fn is_number(word: &str) -> bool {
    word.contains(|c: char| c.is_ascii_digit())
}

fn same_series(a: &str, b: &str) -> bool {
    let digits = |word: &str| word.bytes().all(|byte| byte.is_ascii_digit());
    a.len() >= MIN_SERIES && a.len() == b.len() && digits(a) && digits(b) && a[..a.len() - 1] == b[..b.len() - 1]
}

/// The words of a name in lower case, without hyphens. `82557/8/9` stands for 82557, 82558 and 82559.
fn words(name: &str) -> Vec<String> {
    let mut words: Vec<String> = Vec::new();
    for group in name.to_lowercase().split(|c: char| !(c.is_alphanumeric() || c == '/' || c == '-')) {
        let mut previous = String::new();
        for part in group.split('/') {
            let part = part.replace('-', "");
            if part.is_empty() || words.len() == MAX_WORDS {
                continue;
            }
            let digits = |text: &str| text.bytes().all(|byte| byte.is_ascii_digit());
            let word = match previous.len().checked_sub(part.len()) {
                Some(kept) if kept > 0 && digits(&part) && digits(&previous) => format!("{}{part}", &previous[..kept]),
                _ => part,
            };
            words.push(word.clone());
            previous = word;
        }
    }
    words
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::energy::Row;

    fn profiles(models: &[&str]) -> Profiles {
        let row = |model: &&str| Row {
            model: (*model).to_owned(),
            technology: Technology::Ethernet,
            idle_mw: 0.0,
            receive_mw: 1.0,
            transmit_mw: 1.0,
            down_mw_per_mbps: 0.0,
            up_mw_per_mbps: 0.0,
            limit_down_mbps: None,
            limit_up_mbps: None,
            source: "a test".to_owned(),
        };
        let mut all = Profiles::default();
        all.extend(models.iter().map(|model| Profile::try_from(row(model)).unwrap()).collect());
        all
    }

    fn device(id: &str, name: &str) -> DeviceModel {
        DeviceModel { id: Some(id.to_owned()), name: (!name.is_empty()).then(|| name.to_owned()), product: None }
    }

    #[test]
    fn the_nearest_profile_is_found_by_name_numbers_series_or_technology() {
        let all = profiles(&["*", "Intel 82559", "8086:2723", "Wi-Fi Link 5300", "Foo*"]);
        for (device, model, nearness) in [
            (device("8086:1229", "Intel Corporation 82557/8/9/0/1 Ethernet Pro 100"), "Intel 82559", Nearness::Model),
            (device("8086:1229", "Intel Corporation 82558 (Rev. 4)"), "Intel 82559", Nearness::Series),
            (device("8086:1229", "Other Corporation 82558"), "*", Nearness::Technology),
            (device("8086:1011", "Intel Corporation 82545EM Gigabit"), "*", Nearness::Technology),
            (device("8086:2723", "Intel Corporation Wi-Fi 6 AX200"), "8086:2723", Nearness::Exact),
            (device("8086:2723", ""), "8086:2723", Nearness::Exact),
            (device("8086:4235", "Intel Corporation Ultimate N WiFi Link 5300"), "Wi-Fi Link 5300", Nearness::Model),
            (device("1:1", "foo 7"), "Foo*", Nearness::Exact),
            (DeviceModel::default(), "*", Nearness::Technology),
        ] {
            let found = all.nearest(&device, Technology::Ethernet).unwrap();
            assert_eq!((found.profile.row().model.as_str(), found.nearness), (model, nearness), "{device:?}");
        }
        assert!(all.nearest(&device("1:1", "Intel 82559"), Technology::Wifi).is_none());
    }

    #[test]
    fn a_word_without_a_number_names_no_model() {
        let all = profiles(&["Intel"]);
        assert!(all.nearest(&device("8086:1", "Intel Corporation Ethernet"), Technology::Ethernet).is_none());
        assert!(all.nearest(&device("8086:1", "intel"), Technology::Ethernet).is_some(), "the whole name");
    }

    #[test]
    fn hostile_names_are_bounded() {
        let long = "1/".repeat(10_000) + &"ü-/é ".repeat(1000);
        assert!(words(&long).len() <= MAX_WORDS);
        assert_eq!(words("--/ //"), Vec::<String>::new());
        assert_eq!(words("82557/8/9/0/1"), ["82557", "82558", "82559", "82550", "82551"]);
        assert_eq!(words("RTL8111/8168/8411"), ["rtl8111", "8168", "8411"]);
    }
}
