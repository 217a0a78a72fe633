//! The configuration in force: what changes when the file is read again, and what waits for hosts that are not known yet. And what operators change.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

use braid_api::{Accepted, NetworkChange};
use braid_config::controller::{ControllerConfig, HostSettings};
use braid_control::RequestError;
use braid_model::{Mac, Time};
use braid_network::mobility::FlowMode;
use braid_network::paths::Weight;
use braid_network::{AccessId, FlowId, FlowSpec, Request, Scope, SliceId};
use braid_platform::linux::sys::bpf::now;

use super::{ControllerOptions, MANAGERS, Switches};

/// Time between two trials of what waits for hosts.
const TRY_AGAIN: Duration = Duration::from_secs(1);
/// Time until such a trial when a host appears: others may follow.
const TRY_SOON: Duration = Duration::from_millis(10);

/// What the controller was given.
#[derive(Debug, Default)]
pub(super) struct Applied {
    /// Numbers of slices, groups and flows, from 1 on. A controller that is started again with the same file gives the same ones, so that entries stay.
    slices: BTreeMap<String, u32>,
    groups: BTreeMap<IpAddr, u32>,
    flows: BTreeMap<FlowSpec, u32>,
    /// Flows that wait for their hosts.
    waiting: BTreeMap<FlowId, (FlowSpec, FlowMode)>,
    next_try: Time,
    /// Hosts whose managers were chosen by operators. A file that is read again does not change these.
    chosen: BTreeSet<Mac>,
}

impl Applied {
    /// The requests that lead from one configuration to another. What ends comes before what takes its place.
    fn requests(&mut self, old: &ControllerConfig, new: &ControllerConfig) -> Vec<Request> {
        let mut requests = Vec::new();
        if old.manager != new.manager {
            requests.push(manager(Scope::All, new.manager.as_deref()));
        }
        let gone = old.accesses.iter().filter(|access| !new.accesses.contains(access));
        requests.extend(gone.map(|access| Request::RemoveAccess(access.id)));
        let come = new.accesses.iter().filter(|access| !old.accesses.contains(access));
        requests.extend(come.map(|access| Request::SetAccess(*access)));
        let ended = old.weights.iter().filter(|(place, _)| new.weights.iter().all(|(other, _)| other != place));
        requests.extend(ended.map(|(place, _)| Request::SetWeight { place: *place, weight: Weight::default() }));
        let set = new.weights.iter().filter(|link| !old.weights.contains(link));
        requests.extend(set.map(|(place, weight)| Request::SetWeight { place: *place, weight: *weight }));
        self.slices(old, new, &mut requests);
        self.hosts(old, new, &mut requests);
        self.groups(old, new, &mut requests);
        self.flows(old, new, &mut requests);
        requests
    }

    fn slices(&mut self, old: &ControllerConfig, new: &ControllerConfig, requests: &mut Vec<Request>) {
        for slice in &new.slices {
            let unused = unused(&self.slices);
            let scope = Scope::Slice(SliceId(*self.slices.entry(slice.name.clone()).or_insert(unused)));
            let before = old.slices.iter().find(|former| former.name == slice.name).and_then(|former| former.manager.as_ref());
            if before != slice.manager.as_ref() {
                requests.push(manager(scope, slice.manager.as_deref()));
            }
        }
        for slice in old.slices.iter().filter(|slice| new.slices.iter().all(|other| other.name != slice.name)) {
            requests.extend(self.slices.remove(&slice.name).map(|slice| Request::DropManager(Scope::Slice(SliceId(slice)))));
        }
    }

    fn hosts(&self, old: &ControllerConfig, new: &ControllerConfig, requests: &mut Vec<Request>) {
        let mut hosts: BTreeMap<Mac, [Option<&HostSettings>; 2]> = BTreeMap::new();
        for (place, config) in [old, new].into_iter().enumerate() {
            config.hosts.iter().for_each(|host| hosts.entry(host.mac).or_default()[place] = Some(host));
        }
        for (host, both) in hosts {
            let [before, slice] = both.map(|settings| settings?.slice.as_ref());
            if before != slice {
                let slice = slice.and_then(|name| self.slices.get(name)).map(|slice| SliceId(*slice));
                requests.push(Request::SetSlice { host, slice });
            }
            let [before, wanted] = both.map(|settings| settings?.manager.as_deref());
            if before != wanted && !self.chosen.contains(&host) {
                requests.push(manager(Scope::Host(host), wanted));
            }
            let [before, limit] = both.map(|settings| settings?.limit);
            if before != limit {
                requests.push(Request::SetLimit { host, limit });
            }
        }
    }

    fn groups(&mut self, old: &ControllerConfig, new: &ControllerConfig, requests: &mut Vec<Request>) {
        for group in old.groups.iter().filter(|group| new.groups.iter().all(|other| other.address != group.address)) {
            requests.extend(self.groups.remove(&group.address).map(|group| Request::RemoveGroup(FlowId(group))));
        }
        for group in new.groups.iter().filter(|group| !old.groups.contains(group)) {
            let unused = unused(&self.groups);
            let id = FlowId(*self.groups.entry(group.address).or_insert(unused));
            requests.push(Request::SetGroup { id, spec: group.clone() });
        }
    }

    fn flows(&mut self, old: &ControllerConfig, new: &ControllerConfig, requests: &mut Vec<Request>) {
        for (spec, _) in old.flows.iter().filter(|(spec, _)| new.flows.iter().all(|(other, _)| other != spec)) {
            if let Some(id) = self.flows.remove(spec).map(FlowId) {
                self.waiting.remove(&id);
                requests.push(Request::RemoveFlow(id));
            }
        }
        for (spec, mode) in new.flows.iter().filter(|flow| !old.flows.contains(flow)) {
            let unused = unused(&self.flows);
            let id = FlowId(*self.flows.entry(*spec).or_insert(unused));
            requests.push(Request::SetFlow { id, spec: *spec, mode: *mode });
        }
    }
}

/// Chooses a manager, or ends the choice.
fn manager(scope: Scope, manager: Option<&str>) -> Request {
    match manager {
        Some(manager) => Request::UseManager { scope, manager: manager.to_owned() },
        None => Request::DropManager(scope),
    }
}

fn unused<K>(numbers: &BTreeMap<K, u32>) -> u32 {
    numbers.values().max().map_or(1, |last| last + 1)
}

impl Switches {
    /// Brings a configuration into force.
    pub(super) fn configure(&mut self, config: ControllerConfig) {
        for request in self.applied.requests(&self.config, &config) {
            let flow = match request {
                Request::SetFlow { id, spec, mode } => Some((id, (spec, mode))),
                _ => None,
            };
            match (self.controller.request(now(), request), flow) {
                (Ok(()), None) => {}
                (Ok(()), Some((id, _))) => {
                    self.applied.waiting.remove(&id);
                }
                (Err(error), Some((id, flow))) => {
                    self.log.write(&format!("the flow to {} waits: {error}", flow.0.to), false);
                    self.applied.waiting.insert(id, flow);
                }
                // The parser has excluded the reasons that it can exclude.
                (Err(error), None) => self.log.write(&format!("a part of the configuration is not in force: {error}"), true),
            }
        }
        let keys = config.hosts.iter().filter_map(|host| Some((host.key?, host.mac))).collect();
        self.keys.send_replace(Arc::new(keys));
        if let Some(programs) = &mut self.programs {
            programs.configure(&mut self.controller, &config);
        }
        self.config = config;
    }

    /// A host is known now, or has become a client: what waits for it is asked for soon.
    pub(super) fn is_there(&mut self, host: Mac) {
        if self.applied.waiting.values().any(|(spec, _)| spec.to == host) {
            self.applied.next_try = self.applied.next_try.min(now() + TRY_SOON);
        }
    }

    /// When what waits is asked for again.
    pub(super) fn next_retry(&self) -> Option<Time> {
        (!self.applied.waiting.is_empty()).then_some(self.applied.next_try)
    }

    /// Asks again for what waits, if it is time. Returns whether something came into force.
    pub(super) fn retry(&mut self) -> bool {
        if self.next_retry().is_none_or(|next| now() < next) {
            return false;
        }
        let before = self.applied.waiting.len();
        self.applied.next_try = now() + TRY_AGAIN;
        for (id, (spec, mode)) in std::mem::take(&mut self.applied.waiting) {
            match self.controller.request(now(), Request::SetFlow { id, spec, mode }) {
                Ok(()) => self.log.write(&format!("the flow to {} is in force", spec.to), false),
                Err(_) => {
                    self.applied.waiting.insert(id, (spec, mode));
                }
            }
        }
        self.applied.waiting.len() < before
    }

    /// Reads the file again. All of it comes into force, or nothing.
    pub(super) fn reload(&mut self, options: &ControllerOptions) {
        let Some(path) = options.config.as_ref().map(|path| path.display()) else { return };
        let mut config = match options.read() {
            Ok(config) => config,
            Err(errors) => return tracing::warn!("{path} was refused, and the configuration before stays in force:\n{errors}"),
        };
        config.warnings.iter().for_each(|finding| tracing::warn!("{finding}"));
        let at_start = |config: &ControllerConfig| (config.listen.clone(), config.hold, config.tls.clone(), config.clients_listen.clone());
        if at_start(&config) != at_start(&self.config) {
            tracing::warn!("{path}: listen, hold, [tls] and [clients] come into force when the controller is started again");
            (config.listen, config.hold, config.tls, config.clients_listen) = at_start(&self.config);
        }
        let of_programs = |config: &ControllerConfig| {
            let sfnet = config.sfnet.clone()?;
            Some((sfnet.listen, sfnet.tls_listen, sfnet.discovery, sfnet.groups))
        };
        if of_programs(&config) != of_programs(&self.config) {
            tracing::warn!("{path}: [sfnet], but for sees and services, comes into force when the controller is started again");
            config.sfnet.clone_from(&self.config.sfnet);
        }
        tracing::info!("{path} is in force");
        self.configure(config);
    }

    /// Does what an operator asks for.
    pub(super) fn change(&mut self, change: &NetworkChange) -> Result<Accepted, RequestError> {
        let host = address("host", &change.host)?;
        let (request, message) = match (&change.manager, &change.to) {
            (Some(wanted), None) => {
                let message = format!("{host} has the mobility manager {wanted} until the controller ends");
                (manager(Scope::Host(host), Some(wanted)), message)
            }
            (None, Some(to)) => {
                let to = AccessId(address("to", to)?);
                (Request::MoveHost { host, to }, format!("{host} is asked to go to {to}"))
            }
            (Some(_), Some(_)) => return Err(invalid("manager and to are both given: send them in two requests".to_owned())),
            (None, None) => return Err(invalid("nothing is asked for: give a manager, or to with an access point".to_owned())),
        };
        self.controller.request(now(), request).map_err(|error| {
            invalid(format!("{error}: `braid net status` shows the hosts and the access points; the managers are {}", MANAGERS.join(", ")))
        })?;
        if change.manager.is_some() {
            self.applied.chosen.insert(host);
        }
        Ok(Accepted { message, warnings: Vec::new() })
    }
}

fn address(key: &str, text: &str) -> Result<Mac, RequestError> {
    text.parse().map_err(|_| {
        invalid(format!(
            "{key} = {text:?} is no Ethernet address such as 02:00:00:00:00:01: `braid net status` shows the hosts and the access points"
        ))
    })
}

fn invalid(detail: String) -> RequestError {
    RequestError::invalid("Not changed", detail)
}

#[cfg(test)]
mod tests {
    use super::*;

    const HOST: Mac = Mac([2, 0, 0, 0, 1, 1]);

    fn config(text: &str) -> ControllerConfig {
        braid_config::controller::parse("controller.toml", text).unwrap_or_else(|errors| panic!("{errors}"))
    }

    fn access(id: u8, port: u8) -> String {
        format!("[[access]]\nid = \"02:aa:00:00:00:{id:02x}\"\nswitch = \"1\"\nport = {port}\ncapacity = \"20 Mbit/s\"\n")
    }

    /// Applies configurations one after the other, and returns the requests of the last one.
    fn steps(applied: &mut Applied, texts: &[&str]) -> Vec<String> {
        let (mut former, mut requests) = (ControllerConfig::default(), Vec::new());
        for text in texts {
            let next = config(text);
            requests = applied.requests(&former, &next);
            former = next;
        }
        requests.into_iter().map(|request| format!("{request:?}").chars().take_while(|letter| letter.is_alphabetic()).collect()).collect()
    }

    #[test]
    fn only_what_differs_is_asked_for() {
        let all = format!(
            "manager = \"hoolock\"\n{}{}[[link]]\nswitch = \"1\"\nport = 9\nweight = 50\n[[slice]]\nname = \"guests\"\nmanager = \"n-cast\"\n[[host]]\nmac = \"{HOST}\"\nmanager = \"hard\"\n\
             slice = \"guests\"\nlimit = \"1 Mbit/s\"\n[[group]]\naddress = \"239.1.2.3\"\nmembers = [\"{HOST}\"]\n[[flow]]\nto = \"{HOST}\"\n",
            access(1, 1),
            access(2, 2)
        );
        let come = [
            "UseManager",
            "SetAccess",
            "SetAccess",
            "SetWeight",
            "UseManager",
            "SetSlice",
            "UseManager",
            "SetLimit",
            "SetGroup",
            "SetFlow",
        ];
        assert_eq!(steps(&mut Applied::default(), &[&all]), come);
        assert_eq!(steps(&mut Applied::default(), &[&all, &all]), [""; 0]);
        let gone = "DropManager RemoveAccess RemoveAccess SetWeight DropManager SetSlice DropManager SetLimit RemoveGroup RemoveFlow";
        assert_eq!(steps(&mut Applied::default(), &[&all, ""]).join(" "), gone);
        // Places that change hands are free before they are taken.
        let (before, after) = (access(1, 1) + &access(2, 2), access(1, 2) + &access(2, 1));
        assert_eq!(steps(&mut Applied::default(), &[&before, &after]), ["RemoveAccess", "RemoveAccess", "SetAccess", "SetAccess"]);
    }

    #[test]
    fn flows_keep_their_numbers() {
        let flow = |port: u16, more: &str| format!("[[flow]]\nto = \"{HOST}\"\nprotocol = \"udp\"\nport = {port}\n{more}");
        let mut applied = Applied::default();
        let (one, two) = (flow(1, ""), flow(1, "copies = 2\n") + &flow(2, ""));
        assert_eq!(steps(&mut applied, &[&one, &two]), ["SetFlow", "SetFlow"]);
        assert_eq!(applied.flows.values().copied().collect::<Vec<_>>(), [1, 2]);
        assert_eq!(steps(&mut applied, &[&two, &flow(2, "")]), ["RemoveFlow"]);
        assert_eq!(applied.flows.values().copied().collect::<Vec<_>>(), [2]);
    }

    #[test]
    fn what_an_operator_chose_stays() {
        let host = |more: &str| format!("[[host]]\nmac = \"{HOST}\"\n{more}");
        let mut applied = Applied { chosen: BTreeSet::from([HOST]), ..Applied::default() };
        assert_eq!(steps(&mut applied, &[&host("manager = \"hoolock\"\n"), &host("limit = \"1 Mbit/s\"\n")]), ["SetLimit"]);
    }
}
