//! The energy service: which devices' profiles to ask it for and when, and its answers (OPERETTA III.C's online service).

use std::collections::BTreeMap;
use std::time::Duration;

use braid_decide::energy::{Profile, Profiles, Technology};
use braid_model::{DeviceModel, LinkIndex, LinkKind, Time};

use super::Core;
use crate::config::EnergyService;
use crate::links::{ChosenProfile, Link};
use crate::profiles::{is_shipped, shipped};
use crate::steering::{Steering, SteeringError};

/// Delay before a failed question is asked again. It doubles with each failure, up to [`MAX_RETRY`].
const MIN_RETRY: Duration = Duration::from_secs(60);
/// Maximum delay before a failed question is asked again.
const MAX_RETRY: Duration = Duration::from_secs(3600);
/// Maximum number of profiles taken from one answer.
const MAX_ROWS: usize = 8;

/// A question for the energy service. The event loop answers each with [`Core::on_profiles`], also if the service does not answer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ProfileQuestion {
    /// The link.
    pub link: LinkIndex,
    /// Technology of its device.
    pub technology: Technology,
    /// Model of its device.
    pub model: DeviceModel,
    /// Which service to ask.
    pub service: EnergyService,
}

/// State of a link's question.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Question {
    Due { at: Time, failures: u32 },
    Asked { failures: u32 },
    Answered,
}

/// Questions and answers by link.
#[derive(Debug, Default)]
pub(super) struct ServiceState {
    questions: BTreeMap<LinkIndex, Question>,
    answers: BTreeMap<LinkIndex, Vec<Profile>>,
    /// Why the last question failed, if so.
    trouble: Option<String>,
}

impl ServiceState {
    /// Forgets the links for which `stays` returns false.
    pub(super) fn retain(&mut self, stays: impl Fn(LinkIndex) -> bool) {
        self.questions.retain(|link, _| stays(*link));
        self.answers.retain(|link, _| stays(*link));
    }

    /// When the next question is due.
    pub(super) fn poll_timeout(&self) -> Option<(Time, LinkIndex)> {
        let due = |(link, question): (&LinkIndex, &Question)| match question {
            Question::Due { at, .. } => Some((*at, *link)),
            Question::Asked { .. } | Question::Answered => None,
        };
        self.questions.iter().filter_map(due).min()
    }

    /// The profiles that the service sent.
    fn fetched(&self) -> impl Iterator<Item = &Profile> {
        self.answers.values().flatten()
    }
}

impl<S: Steering> Core<S> {
    /// Processes the model of a link's device, as asked for by [`Actions::identify`](super::Actions::identify).
    pub fn on_model(&mut self, now: Time, link: LinkIndex, device: &str, model: Option<DeviceModel>) -> Result<(), SteeringError> {
        // Another device may have got the index meanwhile.
        let Some(link) = self.links.get_mut(link).filter(|link| link.facts.name == device) else { return Ok(()) };
        link.model = model;
        self.choose_profiles();
        self.plan_questions(now);
        self.ask_energy_service(now);
        self.update_params(now)
    }

    /// Processes the service's answer to a question, or why there is none.
    pub fn on_profiles(
        &mut self,
        now: Time,
        question: &ProfileQuestion,
        answer: Result<Vec<Profile>, String>,
    ) -> Result<(), SteeringError> {
        let asked = self.energy_service.questions.get(&question.link).copied();
        let same = self.links.get(question.link).is_some_and(|link| link.model.as_ref() == Some(&question.model));
        // The configuration may have changed meanwhile, or the device.
        let same = same && self.config.energy_service.as_ref() == Some(&question.service);
        let (Some(Question::Asked { failures }), true) = (asked, same) else { return Ok(()) };
        match answer {
            Ok(rows) => {
                let rows = rows.into_iter().filter(|row| row.row().technology == question.technology).take(MAX_ROWS);
                self.energy_service.answers.insert(question.link, rows.collect());
                self.energy_service.questions.insert(question.link, Question::Answered);
                self.energy_service.trouble = None;
                self.merge_profiles();
            }
            Err(reason) => {
                let at = now + (MIN_RETRY * 2u32.saturating_pow(failures.min(10))).min(MAX_RETRY);
                let failures = failures.saturating_add(1);
                self.energy_service.questions.insert(question.link, Question::Due { at, failures });
                self.energy_service.trouble = Some(reason);
            }
        }
        self.update_params(now)
    }

    /// Applies a change of the configuration. Answers of another service are forgotten.
    pub(super) fn reconfigure_energy_service(&mut self, now: Time, changed: bool) {
        if changed {
            self.energy_service = ServiceState::default();
        }
        self.plan_questions(now);
        self.merge_profiles();
    }

    /// Plans a question for each link that needs one and has none, and drops the others' questions.
    fn plan_questions(&mut self, now: Time) {
        let wanted: Vec<LinkIndex> = match self.config.energy_service {
            Some(_) => self.links.values().filter(|link| is_asked(link)).map(|link| link.facts.index).collect(),
            None => Vec::new(),
        };
        let service = &mut self.energy_service;
        service.questions.retain(|link, _| wanted.contains(link));
        for link in wanted {
            service.questions.entry(link).or_insert(Question::Due { at: now, failures: 0 });
        }
        if service.questions.is_empty() {
            service.trouble = None;
        }
    }

    /// Asks the questions that are due.
    pub(super) fn ask_energy_service(&mut self, now: Time) {
        let (links, service) = (&self.links, &self.config.energy_service);
        for (index, state) in &mut self.energy_service.questions {
            if let Question::Due { at, failures } = *state
                && at <= now
                && let Some(question) = links.get(*index).zip(service.as_ref()).and_then(|(link, service)| question(link, service))
            {
                *state = Question::Asked { failures };
                self.actions.profile_questions.push(question);
            }
        }
    }

    /// Rebuilds the list of profiles: the user's take precedence over the service's, and those over the shipped ones.
    pub(super) fn merge_profiles(&mut self) {
        let own: Vec<Profile> = self.config.profiles.iter().filter(|profile| !is_shipped(profile)).cloned().collect();
        let mut all = shipped();
        all.extend(self.energy_service.fetched().cloned().collect());
        all.extend(own);
        self.profiles = all;
        self.choose_profiles();
    }

    /// The warning of a service that does not answer.
    pub(super) fn energy_service_warning(&self) -> Option<String> {
        let reason = self.energy_service.trouble.as_ref()?;
        Some(format!(
            "cannot get energy profiles from energy_service: {reason}; Braid uses the profiles it has and asks again within an hour"
        ))
    }

    /// Chooses the profile of each link whose device, kind or list of profiles may have changed.
    pub(super) fn choose_profiles(&mut self) {
        let (profiles, config) = (&self.profiles, &self.config.profiles);
        for link in self.links.values_mut() {
            let device = link.model.clone().unwrap_or_default();
            let nearest = technology(link).and_then(|technology| profiles.nearest(&device, technology));
            link.profile = nearest.map(|nearest| ChosenProfile {
                profile: nearest.profile.clone(),
                nearness: nearest.nearness,
                origin: origin(nearest.profile, config),
            });
        }
    }
}

/// Where a profile comes from.
fn origin(profile: &Profile, config: &Profiles) -> &'static str {
    match config.iter().any(|own| own == profile) {
        true if is_shipped(profile) => "shipped",
        true => "file",
        false => "service",
    }
}

/// Whether the service is asked about a link: the configuration does not give its energy, and its model is known.
fn is_asked(link: &Link) -> bool {
    link.rule.energy.is_none() && link.model.as_ref().is_some_and(|model| model.label().is_some()) && technology(link).is_some()
}

fn question(link: &Link, service: &EnergyService) -> Option<ProfileQuestion> {
    let model = link.model.clone().filter(|_| is_asked(link))?;
    Some(ProfileQuestion { link: link.facts.index, technology: technology(link)?, model, service: service.clone() })
}

/// The technology of a link's device. A device with a driver of a software device that nevertheless is on a bus (a port of a switch chip) is Ethernet.
pub(super) fn technology(link: &Link) -> Option<Technology> {
    let on_bus = || link.facts.kind == LinkKind::Virtual && link.model.is_some();
    Technology::of(link.facts.kind).or_else(|| on_bus().then_some(Technology::Ethernet))
}
