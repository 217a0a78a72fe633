//! The state of a slicer, for the API.

use std::net::SocketAddr;

use braid_api::{SliceDescription, SliceLink, SlicePart, SliceTrouble, SliceView, SlicedSwitch, SlicerStatus};
use braid_model::Time;
use braid_slice::{Ports, SliceState, Snapshot, SwitchPhase, SwitchState, Trouble, UplinkState, Wanted};

pub(super) fn status(listens: &[SocketAddr], snapshot: Snapshot, file: &Wanted, now: Time) -> SlicerStatus {
    SlicerStatus {
        listens: listens.iter().map(ToString::to_string).collect(),
        slices: snapshot.slices.into_iter().map(|slice| view(slice, file)).collect(),
        switches: snapshot.switches.into_iter().map(switch).collect(),
        troubles: snapshot.troubles.into_iter().filter(|trouble| !trouble.usual).map(|trouble| complaint(trouble, now)).collect(),
    }
}

fn view(state: SliceState, file: &Wanted) -> SliceView {
    let SliceState { name, spec, users, staged, links, entries, counters } = state;
    let part = |part: &braid_slice::Part| SlicePart {
        switch: part.switch.map(|switch| format!("{:016x}", switch.0)),
        ports: match &part.ports {
            Ports::All => Vec::new(),
            Ports::Only(ports) => ports.iter().copied().collect(),
        },
        matching: if part.header == braid_slice::space::Header::ANY { String::new() } else { part.header.to_string() },
        read: part.permission.read,
        write: part.permission.write,
        delegate: part.permission.delegate,
    };
    let slice = SliceDescription {
        controllers: spec.controllers.clone(),
        priority: spec.priority,
        space: spec.space.iter().map(part).collect(),
        within: spec.within.clone(),
        opt_in: spec.opt_in,
        stage_of: spec.stage.as_ref().map(|stage| stage.of.clone()),
        stage_hosts: spec.stage.iter().flat_map(|stage| &stage.hosts).map(ToString::to_string).collect(),
        stage_percent: spec.stage.as_ref().map(|stage| stage.percent).unwrap_or_default(),
        rate_bps: spec.rate.map(|rate| rate.bps()),
        queues: spec.queues.clone(),
        max_entries: Some(spec.limits.entries as u64),
        max_messages: Some(spec.limits.from_controller),
        max_packets: Some(spec.limits.to_controller),
        name: name.clone(),
    };
    let link = |link: UplinkState| SliceLink {
        datapath: format!("{:016x}", link.link.switch.0),
        controller: link.link.address,
        version: link.version.map(|version| version.to_string()),
    };
    SliceView {
        slice,
        in_file: file.slices.contains_key(&name),
        users: users.iter().map(ToString::to_string).collect(),
        staged: staged.iter().map(ToString::to_string).collect(),
        links: links.into_iter().map(link).collect(),
        entries: entries.0 as u64,
        rows: entries.1 as u64,
        messages: counters.messages,
        refused: counters.refused,
        packets: counters.packets,
        dropped: counters.dropped,
    }
}

fn switch(switch: SwitchState) -> SlicedSwitch {
    SlicedSwitch {
        datapath: format!("{:016x}", switch.datapath.0),
        peer: switch.peer,
        state: match switch.phase {
            SwitchPhase::Reading => "reading",
            SwitchPhase::Live => "live",
            SwitchPhase::Away => "away",
        }
        .to_owned(),
        version: switch.version.to_string(),
        rows: switch.rows as u64,
        ports: switch.ports.iter().map(|port| port.0).collect(),
    }
}

fn complaint(trouble: Trouble, now: Time) -> SliceTrouble {
    SliceTrouble {
        age_ms: u64::try_from(now.since(trouble.at).as_millis()).unwrap_or(u64::MAX),
        slice: trouble.slice,
        datapath: trouble.switch.map(|switch| format!("{:016x}", switch.0)),
        message: trouble.message.map(str::to_owned),
        text: trouble.text,
    }
}
