//! Slices and users that the API makes, beside those of the configuration file; and the file when it is read again.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

use anyhow::Context;
use braid_api::{Accepted, SliceChange, SliceDescription, SlicePart};
use braid_control::RequestError;
use braid_model::{Mac, Rate};
use braid_openflow::ids::DatapathId;
use braid_peer::state::StateDir;
use braid_platform::linux::sys::bpf::now;
use braid_slice::{Limits, PRODUCTION, Part, Permission, Ports, SliceSpec, Stage, User, Wanted, headers};
use serde::{Deserialize, Serialize};

use super::users::{Asked, UserAnswer, UserRequest};
use super::{SlicerOptions, Slices};

/// The file in the state directory.
const NAME: &str = "slices.json";
/// Longest name of a slice in bytes, and most parts and hosts of one in a request.
const NAME_LIMIT: usize = 64;
const MAX_HOSTS: usize = 4096;

/// Slices and users that the API has made. They stay when the slicer is started again.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub(super) struct Made {
    slices: BTreeMap<String, SliceDescription>,
    users: BTreeMap<String, String>,
    #[serde(skip)]
    path: PathBuf,
}

impl Made {
    /// Reads the file, if there is one.
    pub(super) fn load(state_dir: &Path) -> anyhow::Result<Self> {
        let path = StateDir::open(state_dir)?.path().join(NAME);
        if !path.exists() {
            return Ok(Self { path, ..Self::default() });
        }
        let cannot = || format!("cannot read {}: correct it, or remove it and make its slices again", path.display());
        let made: Self = serde_json::from_slice(&fs::read(&path).with_context(cannot)?).with_context(cannot)?;
        Ok(Self { path, ..made })
    }

    fn save(&self) -> std::io::Result<()> {
        let beside = self.path.with_extension("new");
        fs::write(&beside, serde_json::to_vec_pretty(self)?)?;
        fs::rename(beside, &self.path)
    }

    /// All slices and users: the file's, which count more, and these.
    pub(super) fn join(&self, file: &Wanted) -> anyhow::Result<Wanted> {
        let mut wanted = file.clone();
        for (name, slice) in &self.slices {
            if !file.slices.contains_key(name) {
                let spec = spec(slice).map_err(|reason| anyhow::anyhow!("slice {name} in {}: {reason}", self.path.display()))?;
                wanted.slices.insert(name.clone(), spec);
            }
        }
        for (user_text, slice) in &self.users {
            // Those of a slice that is gone have opted out.
            if let (Ok(user), true) = (user(user_text), wanted.slices.contains_key(slice)) {
                wanted.users.insert(user, slice.clone());
            }
        }
        Ok(wanted)
    }
}

impl Slices {
    /// Does what an operator asks for: all of it, or nothing.
    pub(super) fn change(&mut self, change: &SliceChange) -> Result<Accepted, RequestError> {
        let mut made = self.made.clone();
        let message = self.changed(&mut made, change)?;
        self.put_in_force(made)?;
        Ok(Accepted { message, warnings: Vec::new() })
    }

    fn changed(&self, made: &mut Made, change: &SliceChange) -> Result<String, RequestError> {
        let SliceChange { add, change, remove, join, leave } = change;
        let in_file = |name: &str| {
            let detail = format!("slice {name} is in the configuration file: change it there, and send SIGHUP to the slicer");
            if self.config.wanted.slices.contains_key(name) { Err(RequestError::conflict("Not changed", detail)) } else { Ok(()) }
        };
        let known = |name: &str| self.slicer.wanted().slices.contains_key(name);
        let unknown = |name: &str| invalid(format!("there is no slice {name}: `braid net slice list` shows the names"));
        match (add, change, remove, join, leave) {
            (Some(slice), None, None, None, None) => {
                in_file(&slice.name)?;
                if known(&slice.name) && slice.name != PRODUCTION {
                    return Err(invalid(format!("there is a slice {} already: `braid net slice change` changes it", slice.name)));
                }
                check_name(&slice.name)?;
                spec(slice).map_err(invalid)?;
                made.slices.insert(slice.name.clone(), slice.clone());
                Ok(format!("slice {} is in force", slice.name))
            }
            (None, Some(slice), None, None, None) => {
                in_file(&slice.name)?;
                if !known(&slice.name) {
                    return Err(unknown(&slice.name));
                }
                spec(slice).map_err(invalid)?;
                made.slices.insert(slice.name.clone(), slice.clone());
                Ok(format!("slice {} is changed", slice.name))
            }
            (None, None, Some(name), None, None) => {
                in_file(name)?;
                if made.slices.remove(name).is_none() {
                    return Err(unknown(name));
                }
                made.users.retain(|_, slice| slice != name);
                Ok(format!("slice {name} is removed with its entries"))
            }
            (None, None, None, Some(join), None) => {
                let user = user(&join.user).map_err(invalid)?;
                if !known(&join.slice) {
                    return Err(unknown(&join.slice));
                }
                made.users.insert(user.to_string(), join.slice.clone());
                Ok(format!("the packets of {user} belong to slice {}", join.slice))
            }
            (None, None, None, None, Some(leave)) => {
                let user = user(leave).map_err(invalid)?;
                match made.users.remove(&user.to_string()) {
                    Some(slice) => Ok(format!("the packets of {user} do not belong to slice {slice} any more")),
                    None => Err(invalid(format!("{user} is in no slice: `braid net slice list` shows the users"))),
                }
            }
            _ => Err(invalid("ask for one thing: add, change, remove, join or leave".to_owned())),
        }
    }

    fn put_in_force(&mut self, made: Made) -> Result<(), RequestError> {
        let wanted = made.join(&self.config.wanted).map_err(|error| invalid(error.to_string()))?;
        self.slicer.set(now(), wanted).map_err(|error| invalid(error.to_string()))?;
        self.made = made;
        if let Err(error) = self.made.save() {
            let text = format!(
                "cannot write {}: {error}; the change is in force until the slicer ends. Make room on the disk",
                self.made.path.display()
            );
            self.log.write(&text, true);
        }
        Ok(())
    }

    /// Does what a user asks for.
    pub(super) fn user(&mut self, asked: &Asked) -> UserAnswer {
        let user = asked.user.to_string();
        let change = match &asked.request {
            UserRequest::List => {
                let open = |(name, spec): (&String, &SliceSpec)| spec.opt_in.then(|| name.clone());
                return UserAnswer::Slices(self.slicer.wanted().slices.iter().filter_map(open).collect());
            }
            UserRequest::Join(slice) => {
                SliceChange { join: Some(braid_api::SliceUser { slice: slice.clone(), user }), ..SliceChange::default() }
            }
            UserRequest::Leave => SliceChange { leave: Some(user), ..SliceChange::default() },
        };
        match self.change(&change) {
            Ok(accepted) => UserAnswer::Done(accepted.message),
            Err(error) => UserAnswer::Refused(error.detail),
        }
    }

    /// Reads the file again. All of it comes into force, or nothing.
    pub(super) fn reload(&mut self, options: &SlicerOptions) {
        let Some(path) = options.config.as_ref().map(|path| path.display()) else { return };
        let mut config = match options.read() {
            Ok(config) => config,
            Err(errors) => return tracing::warn!("{path} was refused, and the configuration before stays in force:\n{errors}"),
        };
        config.warnings.iter().for_each(|finding| tracing::warn!("{finding}"));
        let at_start =
            |config: &braid_config::slicer::SlicerConfig| (config.listen.clone(), config.users_listen.clone(), config.tls.clone());
        if at_start(&config) != at_start(&self.config) {
            tracing::warn!("{path}: listen, users_listen and [tls] come into force when the slicer is started again");
            (config.listen, config.users_listen, config.tls) = at_start(&self.config);
        }
        let done = self.made.join(&config.wanted).and_then(|wanted| Ok(self.slicer.set(now(), wanted)?));
        match done {
            Ok(()) => {
                self.config = config;
                tracing::info!("{path} is in force");
            }
            Err(error) => tracing::warn!("{path} was refused, and the configuration before stays in force: {error}"),
        }
    }
}

fn invalid(detail: String) -> RequestError {
    RequestError::invalid("Not changed", detail)
}

fn check_name(name: &str) -> Result<(), RequestError> {
    if name.is_empty() || name.len() > NAME_LIMIT || name.chars().any(char::is_control) {
        return Err(invalid(format!("{name:?} is no name: write 1 to {NAME_LIMIT} bytes")));
    }
    Ok(())
}

fn user(text: &str) -> Result<User, String> {
    let address = || text.parse().ok().map(User::Address);
    let found = text.parse().ok().map(User::Host).or_else(address);
    found.ok_or_else(|| format!("{text:?} is neither an Ethernet address nor an IP address"))
}

/// What a description means.
pub(super) fn spec(slice: &SliceDescription) -> Result<SliceSpec, String> {
    if let Some(address) = slice.controllers.iter().find(|address| !is_address(address)) {
        return Err(format!("{address:?} has no host and port: write \"127.0.0.1:6654\""));
    }
    if slice.priority > 3 {
        return Err(format!("priority {} is not one of 0 to 3", slice.priority));
    }
    let space: Vec<Vec<Part>> = slice.space.iter().map(parts).collect::<Result<_, _>>()?;
    let stage = match &slice.stage_of {
        None => None,
        Some(_) if slice.stage_percent > 100 || slice.stage_hosts.len() > MAX_HOSTS => {
            return Err(format!("a version of a controller has 0 to 100 percent of the hosts, and at most {MAX_HOSTS} that are named"));
        }
        Some(of) => {
            let mac = |text: &String| text.parse::<Mac>().map_err(|_| format!("{text:?} is no Ethernet address"));
            let hosts = slice.stage_hosts.iter().map(mac).collect::<Result<BTreeSet<_>, _>>()?;
            Some(Stage { of: of.clone(), hosts, percent: slice.stage_percent })
        }
    };
    let usual = Limits::default();
    let limits = Limits {
        entries: slice.max_entries.map_or(usual.entries, |most| usize::try_from(most).unwrap_or(usize::MAX)),
        from_controller: slice.max_messages.unwrap_or(usual.from_controller).max(1),
        to_controller: slice.max_packets.unwrap_or(usual.to_controller).max(1),
        ..usual
    };
    Ok(SliceSpec {
        controllers: slice.controllers.clone(),
        priority: slice.priority,
        space: space.into_iter().flatten().collect(),
        within: slice.within.clone(),
        opt_in: slice.opt_in,
        stage,
        rate: slice.rate_bps.map(Rate::from_bps),
        queues: slice.queues.clone(),
        limits,
    })
}

fn is_address(text: &str) -> bool {
    text.rsplit_once(':').is_some_and(|(host, port)| !host.is_empty() && port.parse::<u16>().is_ok_and(|port| port > 0))
}

fn parts(part: &SlicePart) -> Result<Vec<Part>, String> {
    let switch = match &part.switch {
        None => None,
        Some(text) => {
            let number = u64::from_str_radix(text, 16).ok().filter(|_| text.bytes().all(|digit| digit.is_ascii_hexdigit()));
            Some(DatapathId(number.ok_or_else(|| format!("{text:?} is not the datapath of a switch: write 1 to 16 hexadecimal digits"))?))
        }
    };
    let ports = if part.ports.is_empty() { Ports::All } else { Ports::Only(part.ports.iter().copied().collect()) };
    let permission = Permission { read: part.read, write: part.write, delegate: part.delegate };
    let headers = headers(&part.matching).map_err(|error| error.to_string())?;
    Ok(headers.into_iter().map(|header| Part { switch, ports: ports.clone(), header, permission }).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn descriptions_become_slices_or_are_refused_with_the_reason() {
        let part = SlicePart { matching: "mac=02:00:5e:10:00:01".to_owned(), ..SlicePart::default() };
        let slice = SliceDescription {
            name: "a".to_owned(),
            controllers: vec!["127.0.0.1:6654".to_owned()],
            space: vec![part],
            ..SliceDescription::default()
        };
        assert_eq!(spec(&slice).unwrap().space.len(), 2);
        let refused = |change: fn(&mut SliceDescription)| {
            let mut slice = slice.clone();
            change(&mut slice);
            spec(&slice).unwrap_err()
        };
        assert!(refused(|slice| slice.controllers = vec!["host".to_owned()]).contains("no host and port"));
        assert!(refused(|slice| slice.priority = 4).contains("0 to 3"));
        assert!(refused(|slice| slice.space[0].matching = "colour=red".to_owned()).contains("colour"));
        assert!(refused(|slice| slice.space[0].switch = Some("xyz".to_owned())).contains("datapath"));
        assert!(refused(|slice| (slice.stage_of, slice.stage_percent) = (Some("b".to_owned()), 101)).contains("percent"));
    }

    #[test]
    fn what_the_api_made_is_kept() {
        let scratch = tempfile::tempdir().unwrap();
        let mut made = Made::load(scratch.path()).unwrap();
        let slice = SliceDescription { name: "a".to_owned(), opt_in: true, ..SliceDescription::default() };
        made.slices.insert("a".to_owned(), slice);
        made.users.insert("10.1.2.3".to_owned(), "a".to_owned());
        made.users.insert("10.1.2.4".to_owned(), "gone".to_owned());
        made.save().unwrap();
        let wanted = Made::load(scratch.path()).unwrap().join(&Wanted::default()).unwrap();
        assert_eq!((wanted.slices.len(), wanted.users.len()), (1, 1));
    }
}
