//! What this device says about itself.

use braid_openflow::action::ActionId;
use braid_openflow::flags::TableConfig;
use braid_openflow::multipart::{Description, TableFeatures, TableProperty, TableStats};
use braid_openflow::oxm::{Field, OxmId};

use super::meaning::FIELDS;
use super::table::TABLE;

/// Types of instructions and actions. Source: OpenFlow 1.3.5 sections 7.2.4 and 7.2.5.
const WRITE_ACTIONS: ActionId = ActionId::Basic(3);
const APPLY_ACTIONS: ActionId = ActionId::Basic(4);
const OUTPUT: ActionId = ActionId::Basic(0);

pub(super) fn description() -> Description {
    Description {
        manufacturer: "Braid".into(),
        hardware: "links of a device".into(),
        software: concat!("Braid ", env!("CARGO_PKG_VERSION")).into(),
        serial: "".into(),
        datapath: "chooses the link of each flow; what no entry matches follows the device's own policy".into(),
    }
}

pub(super) fn table_stats(entries: usize) -> TableStats {
    TableStats { table: TABLE, v10: None, active: u32::try_from(entries).unwrap_or(u32::MAX), lookups: None, matched: None }
}

/// What the table can do. `room`: the most rules, of which an entry takes one, or two if it names no Ethernet type.
pub(super) fn table_features(room: usize) -> TableFeatures {
    let is_masked = |field: &Field| matches!(field, Field::Ipv4Dst | Field::Ipv6Dst);
    let fields = || FIELDS.iter().map(|field| OxmId::Basic { field: *field, masked: is_masked(field) }).collect::<Vec<_>>();
    let miss = false;
    TableFeatures {
        table: TABLE,
        name: "links".into(),
        metadata_match: 0,
        metadata_write: 0,
        config: TableConfig::NONE,
        max_entries: u32::try_from(room).unwrap_or(u32::MAX),
        properties: vec![
            TableProperty::Instructions { miss, ids: vec![WRITE_ACTIONS, APPLY_ACTIONS] },
            TableProperty::NextTables { miss, ids: Vec::new() },
            TableProperty::WriteActions { miss, ids: vec![OUTPUT] },
            TableProperty::ApplyActions { miss, ids: vec![OUTPUT] },
            TableProperty::Match(fields()),
            TableProperty::Wildcards(fields()),
            TableProperty::WriteSetField { miss, ids: Vec::new() },
            TableProperty::ApplySetField { miss, ids: Vec::new() },
        ],
    }
}
