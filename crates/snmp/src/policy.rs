//! What slices share and cannot be cut: values that a policy mediates.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use braid_model::Time;
use serde::{Deserialize, Serialize};

use crate::oid::Oid;
use crate::pdu::{ErrorStatus, Value, VarBind};

/// The value of ifAdminStatus and ifOperStatus for an interface that is off. Source: RFC 2863.
const DOWN: i64 = 2;

/// An object that several slices see, and who may set it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Shared {
    /// The device.
    pub device: usize,
    /// The instance.
    pub object: Oid,
    /// Who may set it.
    pub policy: Policy,
    /// What it may be set to.
    pub bounds: Bounds,
}

/// Values that slices may ask for. Others are answered with wrongValue.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Bounds {
    /// The least value.
    pub least: Option<i64>,
    /// The largest value.
    pub most: Option<i64>,
    /// The only values.
    pub values: Option<BTreeSet<i64>>,
}

impl Bounds {
    fn contain(&self, value: i64) -> bool {
        self.least.is_none_or(|least| value >= least)
            && self.most.is_none_or(|most| value <= most)
            && self.values.as_ref().is_none_or(|values| values.contains(&value))
    }

    fn is_open(&self) -> bool {
        *self == Self::default()
    }
}

/// Who may set a shared object.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Policy {
    /// Nobody: notWritable.
    Fixed,
    /// This slice; others: noAccess.
    Owner(usize),
    /// Every slice, within the bounds. The last one counts.
    Anyone,
    /// Every slice says what it wants, and the least of that is set.
    Lowest,
    /// Every slice says what it wants, and the largest of that is set.
    Highest,
    /// The slice that sets it first, for so long after it last did; others: inconsistentValue.
    Lease(Duration),
    /// Every slice has a value of its own, and the device's stays.
    Virtual {
        /// An object that reads 2 (down) for a slice whose value is 2.
        operational: Option<Oid>,
        /// Where the device has a slice's own value, which is set, too.
        to: BTreeMap<usize, Oid>,
    },
}

/// What setting a variable means.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Effect {
    /// What the agent is asked to set.
    pub(crate) send: Option<VarBind>,
    pub(crate) change: Option<Change>,
}

/// What is remembered.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Change {
    /// A slice's value.
    Value(Key, usize, i64),
    /// The slice that holds an object.
    Holder(Key, usize),
}

pub(crate) type Key = (usize, Oid);

/// The policies, and what slices have asked for.
#[derive(Debug, Clone, Default)]
pub(crate) struct Mediator {
    shared: BTreeMap<Key, Shared>,
    /// Objects that follow a virtual one.
    operational: BTreeMap<Key, Oid>,
    values: BTreeMap<Key, BTreeMap<usize, i64>>,
    holders: BTreeMap<Key, (usize, Time)>,
}

/// What is kept over a restart, by names.
#[derive(Debug, Default, Serialize, Deserialize)]
struct Kept {
    version: u32,
    values: Vec<KeptValue>,
    holders: Vec<KeptHolder>,
}

#[derive(Debug, Serialize, Deserialize)]
struct KeptValue {
    device: String,
    object: String,
    slice: String,
    value: i64,
}

#[derive(Debug, Serialize, Deserialize)]
struct KeptHolder {
    device: String,
    object: String,
    slice: String,
}

/// Version of the kept text.
const VERSION: u32 = 1;

/// Names of devices and slices by their numbers.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Names<'a> {
    pub(crate) devices: &'a [String],
    pub(crate) slices: &'a [String],
}

impl Mediator {
    pub(crate) fn new(shared: Vec<Shared>) -> Self {
        let mut mediator = Self::default();
        for one in shared {
            if let Policy::Virtual { operational: Some(operational), .. } = &one.policy {
                mediator.operational.insert((one.device, operational.clone()), one.object.clone());
            }
            mediator.shared.insert((one.device, one.object.clone()), one);
        }
        mediator
    }

    /// What it means that a slice sets a variable that it may set, or the error to answer with.
    pub(crate) fn judge(&self, now: Time, slice: usize, device: usize, binding: &VarBind) -> Result<Effect, ErrorStatus> {
        if !binding.value.is_real() {
            return Err(ErrorStatus::WrongType);
        }
        let key = (device, binding.name.clone());
        if self.operational.contains_key(&key) {
            return Err(ErrorStatus::NotWritable);
        }
        let passed = Effect { send: Some(binding.clone()), change: None };
        let Some(Shared { policy, bounds, .. }) = self.shared.get(&key) else { return Ok(passed) };
        match policy {
            Policy::Fixed => return Err(ErrorStatus::NotWritable),
            Policy::Owner(owner) if *owner != slice => return Err(ErrorStatus::NoAccess),
            _ => {}
        }
        let number = match policy {
            // Texts have no bounds.
            Policy::Owner(_) | Policy::Anyone | Policy::Lease(_) if bounds.is_open() => 0,
            _ => binding.value.number().ok_or(ErrorStatus::WrongType)?,
        };
        if !bounds.contain(number) && !bounds.is_open() {
            return Err(ErrorStatus::WrongValue);
        }
        Ok(match policy {
            Policy::Fixed | Policy::Owner(_) | Policy::Anyone => passed,
            Policy::Lease(_) => {
                if self.holders.get(&key).is_some_and(|(holder, until)| *holder != slice && now < *until) {
                    return Err(ErrorStatus::InconsistentValue);
                }
                Effect { change: Some(Change::Holder(key, slice)), ..passed }
            }
            Policy::Lowest | Policy::Highest => {
                let others = self.values.get(&key).into_iter().flatten().filter(|(other, _)| **other != slice).map(|(_, value)| *value);
                let all = others.chain([number]);
                let wanted = if *policy == Policy::Lowest { all.min() } else { all.max() }.unwrap_or(number);
                let value = match binding.value {
                    Value::Integer(_) => i32::try_from(wanted).map(Value::Integer),
                    _ => u32::try_from(wanted).map(Value::Gauge32),
                };
                // One slice asks with a sign, another one without.
                let value = value.map_err(|_| ErrorStatus::WrongType)?;
                let send = Some(VarBind::new(binding.name.clone(), value));
                Effect { send, change: Some(Change::Value(key, slice, number)) }
            }
            Policy::Virtual { to, .. } => {
                if !matches!(binding.value, Value::Integer(_)) {
                    return Err(ErrorStatus::WrongType);
                }
                let send = to.get(&slice).map(|own| VarBind::new(own.clone(), binding.value.clone()));
                Effect { send, change: Some(Change::Value(key, slice, number)) }
            }
        })
    }

    /// Remembers.
    pub(crate) fn apply(&mut self, now: Time, change: &Change) {
        match change {
            Change::Value(key, slice, value) => {
                self.values.entry(key.clone()).or_default().insert(*slice, *value);
            }
            Change::Holder(key, slice) => {
                if let Some(Shared { policy: Policy::Lease(hold), .. }) = self.shared.get(key) {
                    self.holders.insert(key.clone(), (*slice, now + *hold));
                }
            }
        }
    }

    /// What a slice reads instead of the device's value.
    pub(crate) fn overlay(&self, slice: usize, device: usize, name: &Oid) -> Option<Value> {
        let value = |key: &Key| {
            let is_virtual = matches!(self.shared.get(key)?.policy, Policy::Virtual { .. });
            self.values.get(key)?.get(&slice).copied().filter(|_| is_virtual)
        };
        let key = (device, name.clone());
        match self.operational.get(&key) {
            Some(object) => value(&(device, object.clone())).filter(|value| *value == DOWN),
            None => value(&key),
        }
        .and_then(|value| i32::try_from(value).ok())
        .map(Value::Integer)
    }

    /// What is kept over a restart.
    pub(crate) fn kept(&self, names: Names<'_>) -> String {
        let name = |(device, object): &Key| (names.devices[*device].clone(), object.to_string());
        let mut kept = Kept { version: VERSION, ..Kept::default() };
        for (key, values) in &self.values {
            for (slice, value) in values {
                let (device, object) = name(key);
                kept.values.push(KeptValue { device, object, slice: names.slices[*slice].clone(), value: *value });
            }
        }
        for (key, (slice, _)) in &self.holders {
            let (device, object) = name(key);
            kept.holders.push(KeptHolder { device, object, slice: names.slices[*slice].clone() });
        }
        serde_json::to_string(&kept).unwrap_or_default()
    }

    /// Takes what was kept. What is no longer configured is left out. Who held an object holds it for a whole time again.
    pub(crate) fn restore(&mut self, now: Time, names: Names<'_>, text: &str) -> Result<(), serde_json::Error> {
        let kept: Kept = serde_json::from_str(text)?;
        let find = |all: &[String], name: &str| all.iter().position(|one| one == name);
        let key = |device: &str, object: &str, slice: &str| {
            let key = (find(names.devices, device)?, object.parse().ok()?);
            Some((key, find(names.slices, slice)?))
        };
        for one in &kept.values {
            let Some((key, slice)) = key(&one.device, &one.object, &one.slice) else { continue };
            let policy = self.shared.get(&key).map(|shared| &shared.policy);
            if matches!(policy, Some(Policy::Lowest | Policy::Highest | Policy::Virtual { .. })) {
                self.apply(now, &Change::Value(key, slice, one.value));
            }
        }
        for one in &kept.holders {
            if let Some((key, slice)) = key(&one.device, &one.object, &one.slice) {
                self.apply(now, &Change::Holder(key, slice));
            }
        }
        Ok(())
    }
}
