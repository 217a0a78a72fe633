//! A request to set: all of it or nothing. Requests to set of one device are carried out one after another.
//!
//! Order: every variable is judged; what the policies remember is stored; the agent is asked to set the rest by one request, which is all or nothing, too;
//! what is remembered counts; the manager gets its answer. If the agent refuses, the former text is stored again. If the agent does not answer, nothing is
//! remembered, and whether it has set its part is unknown, as it is to every manager of SNMP that gets no answer.

use std::collections::BTreeSet;

use braid_model::Time;

use super::{Event, Output, Slicer, Work};
use crate::pdu::{ErrorStatus, Pdu, PduKind, VarBind};
use crate::policy::{Change, Names};
use crate::view::Access;

use super::view;

/// Most requests to set that wait for one device.
const MOST_SETS: usize = 64;

/// A request to set.
#[derive(Debug, Default)]
pub(super) struct Setting {
    /// What the agent is asked to set, and the place of the variable in the request, from 1.
    send: Vec<(VarBind, usize)>,
    changes: Vec<Change>,
    /// Whether the stored text has the changes.
    is_stored: bool,
}

impl Slicer {
    /// Carries a request out, or lets it wait for earlier ones of the device.
    pub(super) fn queue_set(&mut self, now: Time, id: u64) {
        let Some(job) = self.jobs.get(&id) else { return };
        let sets = &mut self.devices[job.device].sets;
        if sets.len() >= MOST_SETS {
            return self.finish(now, id, (ErrorStatus::ResourceUnavailable, 0, Vec::new()));
        }
        sets.push_back(id);
        if sets.len() == 1 {
            self.start_set(now, id);
        }
    }

    /// A job of the device has ended: the next request to set begins if it was one.
    pub(super) fn set_ended(&mut self, now: Time, device: usize, id: u64) {
        let sets = &mut self.devices[device].sets;
        let was_first = sets.front() == Some(&id);
        sets.retain(|one| *one != id);
        if was_first && let Some(next) = sets.front().copied() {
            self.start_set(now, next);
        }
    }

    fn start_set(&mut self, now: Time, id: u64) {
        match self.judge(now, id) {
            Err((place, status, why)) => {
                if let Some(job) = self.jobs.get(&id) {
                    let (device, slice) = (self.device_names[job.device].clone(), self.slice_names[job.slice].clone());
                    let name = job.request.bindings[place].name.clone();
                    self.event(Event::NotSet { device, slice, name, status, why });
                }
                self.finish(now, id, (status, place + 1, Vec::new()));
            }
            Ok(setting) => {
                let changes = setting.changes.clone();
                if let Some(job) = self.jobs.get_mut(&id) {
                    job.work = Work::Setting(setting);
                }
                if changes.is_empty() {
                    return self.send_set(now, id);
                }
                let mut next = self.mediator.clone();
                changes.iter().for_each(|change| next.apply(now, change));
                let text = next.kept(Names { devices: &self.device_names, slices: &self.slice_names });
                self.given.clone_from(&text);
                self.output.push_back(Output::Store { job: Some(id), text });
            }
        }
    }

    /// What the request means, or its first variable that cannot be set, by its place from 0.
    fn judge(&self, now: Time, id: u64) -> Result<Setting, (usize, ErrorStatus, &'static str)> {
        let Some(job) = self.jobs.get(&id) else { return Ok(Setting::default()) };
        let (may_write, view) = (self.managers[job.manager].write, view(&self.views, job.slice, job.device));
        let (mut setting, mut names, mut targets) = (Setting::default(), BTreeSet::new(), BTreeSet::new());
        for (place, binding) in job.request.bindings.iter().enumerate() {
            let refuse = |status, why| Err((place, status, why));
            if !may_write {
                return refuse(ErrorStatus::NoAccess, "the manager may only read; `write = true` in its entry changes that");
            }
            match view.access(&binding.name) {
                Access::None => return refuse(ErrorStatus::NoAccess, "the slice does not see it; a [[slice.view]] entry changes that"),
                Access::Read => {
                    return refuse(ErrorStatus::NoAccess, "the slice may only read it; `write` in its [[slice.view]] entry changes that");
                }
                Access::Write => {}
            }
            if !names.insert(&binding.name) {
                return refuse(ErrorStatus::InconsistentValue, "the request sets it twice");
            }
            let effect = match self.mediator.judge(now, job.slice, job.device, binding) {
                Ok(effect) => effect,
                Err(status) => return refuse(status, reason(status)),
            };
            if let Some(binding) = effect.send {
                if !targets.insert(binding.name.clone()) {
                    return refuse(ErrorStatus::InconsistentValue, "the request sets, by another name, what it sets already");
                }
                setting.send.push((binding, place + 1));
            }
            setting.changes.extend(effect.change);
        }
        Ok(setting)
    }

    /// The text of this job has been stored, or cannot be.
    pub fn stored(&mut self, now: Time, job: Option<u64>, is_stored: bool) {
        if !is_stored {
            self.event(Event::State(
                "what slices ask for cannot be stored, so requests to set it get resourceUnavailable: see that the state directory can be written",
            ));
        }
        let Some(id) = job else { return };
        let Some(super::Job { work: Work::Setting(setting), .. }) = self.jobs.get_mut(&id) else { return };
        if is_stored {
            setting.is_stored = true;
            self.send_set(now, id);
        } else {
            setting.changes.clear();
            self.finish(now, id, (ErrorStatus::ResourceUnavailable, 0, Vec::new()));
        }
    }

    fn send_set(&mut self, now: Time, id: u64) {
        let Some(super::Job { device, work: Work::Setting(setting), .. }) = self.jobs.get(&id) else { return };
        let device = *device;
        let bindings: Vec<VarBind> = setting.send.iter().map(|(binding, _)| binding.clone()).collect();
        if bindings.is_empty() {
            return self.set_done(now, id);
        }
        self.ask(now, id, device, Pdu::new(PduKind::Set, 0, bindings));
        if !self.jobs.contains_key(&id) {
            self.store_what_counts();
        }
    }

    fn set_done(&mut self, now: Time, id: u64) {
        let Some(super::Job { device, slice, request, work: Work::Setting(setting), .. }) = self.jobs.get(&id) else { return };
        let names = request.bindings.iter().map(|binding| binding.name.clone()).collect();
        let (device, slice) = (self.device_names[*device].clone(), self.slice_names[*slice].clone());
        let (event, bindings, is_stored) = (Event::Set { device, slice, names }, request.bindings.clone(), setting.is_stored);
        setting.changes.iter().for_each(|change| self.mediator.apply(now, change));
        self.event(event);
        self.finish(now, id, (ErrorStatus::NoError, 0, bindings));
        if is_stored {
            self.store_what_counts();
        }
    }

    /// The agent has answered a request to set.
    pub(super) fn set_answered(&mut self, now: Time, id: u64, answer: &Pdu) {
        if answer.status == 0 {
            return self.set_done(now, id);
        }
        let Some(super::Job { work: Work::Setting(setting), .. }) = self.jobs.get(&id) else { return };
        let status = ErrorStatus::of(answer.status).unwrap_or(ErrorStatus::GenErr);
        let sent = usize::try_from(answer.index).ok().and_then(|index| setting.send.get(index.checked_sub(1)?));
        let (place, is_stored) = (sent.map_or(0, |(_, place)| *place), setting.is_stored);
        self.finish(now, id, (status, place, Vec::new()));
        if is_stored {
            self.store_what_counts();
        }
    }

    /// The agent has not answered a request to set, or does not take it.
    pub(super) fn set_failed(&mut self, now: Time, id: u64) {
        let is_stored = matches!(self.jobs.get(&id), Some(super::Job { work: Work::Setting(Setting { is_stored: true, .. }), .. }));
        self.finish(now, id, (ErrorStatus::GenErr, 0, Vec::new()));
        if is_stored {
            self.store_what_counts();
        }
    }

    /// Stores what counts, if the text has something else: what was meant to count, or what a request for another device had not changed yet.
    fn store_what_counts(&mut self) {
        let text = self.to_store();
        if text != self.given {
            self.given.clone_from(&text);
            self.output.push_back(Output::Store { job: None, text });
        }
    }
}

fn reason(status: ErrorStatus) -> &'static str {
    match status {
        ErrorStatus::NotWritable => "nobody can set it: its [[shared]] entry is fixed, or it follows another object",
        ErrorStatus::NoAccess => "another slice owns it, as its [[shared]] entry says",
        ErrorStatus::WrongType => "it takes numbers of the type that it has, and no empty values",
        ErrorStatus::WrongValue => "its [[shared]] entry does not allow the value",
        ErrorStatus::InconsistentValue => "another slice holds it for now; try again when its `hold` has passed",
        _ => "it cannot be set",
    }
}
