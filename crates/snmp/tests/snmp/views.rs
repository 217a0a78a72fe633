//! What managers see, compared with a model of views that reads names as texts.

use std::collections::{BTreeMap, BTreeSet};

use braid_snmp::{Oid, Part, Pdu, PduKind, Setup, Value, VarBind, View};
use proptest::prelude::*;

use crate::support::*;

/// Whether a part shows a name, by the texts of both.
fn shows(part: &Part, name: &Oid) -> bool {
    let below = |name: &str, prefix: &str| format!("{name}.").starts_with(&format!("{prefix}."));
    let text = name.to_string();
    match part {
        Part::Subtree { root, except, .. } => {
            below(&text, &root.to_string()) && !except.iter().any(|except| below(&text, &except.to_string()))
        }
        Part::Table { entry, columns, rows, .. } => {
            let Some((column, index)) = text.strip_prefix(&format!("{entry}.")).and_then(|rest| rest.split_once('.')) else { return false };
            let row = |row: &Vec<u32>| row.iter().map(u32::to_string).collect::<Vec<_>>().join(".");
            let column: u32 = column.parse().unwrap();
            column > 0 && columns.as_ref().is_none_or(|columns| columns.contains(&column)) && rows.iter().any(|one| below(index, &row(one)))
        }
    }
}

/// Names with few different parts, so that they meet often. Columns have numbers from 1.
fn name() -> impl Strategy<Value = Oid> {
    proptest::collection::vec(prop_oneof![0u32..4, Just(u32::MAX)], 1..5)
        .prop_map(|rest| Oid::new([vec![1, 3, 6, 1], rest].concat()).unwrap())
}

fn object() -> impl Strategy<Value = (Oid, Value)> {
    (name(), 1u32..4, proptest::collection::vec(0u32..4, 1..3), any::<i32>())
        .prop_map(|(name, column, index, value)| (name.below(&[&[column], &index[..]].concat()).unwrap(), Value::Integer(value)))
}

fn part() -> impl Strategy<Value = Part> {
    let subtree = (name(), proptest::collection::vec(proptest::collection::vec(0u32..4, 1..3), 0..3)).prop_map(|(root, except)| {
        let except = except.iter().map(|rest| root.below(rest).unwrap()).collect();
        Part::Subtree { root, except, write: true }
    });
    let columns = proptest::option::of(proptest::collection::btree_set(1u32..4, 1..3));
    let rows = proptest::collection::btree_set(proptest::collection::vec(0u32..4, 1..3), 1..4);
    let table = (name(), columns, rows).prop_map(|(entry, columns, rows)| Part::Table { entry, columns, rows, write: BTreeSet::from([1]) });
    prop_oneof![subtree, table]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(400))]

    #[test]
    fn a_manager_gets_what_its_view_shows_and_nothing_else(
        objects in proptest::collection::vec(object(), 0..60),
        parts in proptest::collection::vec(part(), 0..4),
        asked in proptest::collection::vec(name(), 1..5),
        single in 0..3i32,
        repetitions in 0..12i32,
        room in 2..60usize,
    ) {
        let tree: BTreeMap<Oid, Value> = objects.into_iter().collect();
        let seen: BTreeMap<Oid, Value> = tree.clone().into_iter().filter(|(name, _)| parts.iter().any(|part| shows(part, name))).collect();
        let view = View::new(parts.clone());
        for name in tree.keys() {
            prop_assert_eq!(view.access(name) > braid_snmp::Access::None, parts.iter().any(|part| shows(part, name)), "{}", name);
        }
        let setup = Setup { devices: vec![device("ap1")], slices: vec![slice("blue", parts.clone())], ..Setup::default() };
        let agent = Tree { room, ..Tree::new(tree.clone()) };
        let mut world = World::new(setup, vec![agent]);
        prop_assert_eq!(world.walk("blue"), seen.clone().into_iter().collect::<Vec<_>>());

        // Get: what is shown, as it is.
        for name in tree.keys().chain(&asked) {
            let value = world.get("blue", &name.to_string());
            if parts.iter().any(|part| shows(part, name)) {
                prop_assert_eq!(value, tree.get(name).cloned().unwrap_or(Value::NoSuchObject));
            } else {
                prop_assert!(matches!(value, Value::NoSuchObject | Value::NoSuchInstance));
            }
        }
        // GetNext and GetBulk, of several names at once.
        let after = |name: &Oid, count: usize| -> Vec<VarBind> {
            use std::ops::Bound::{Excluded, Unbounded};
            seen.range((Excluded(name.clone()), Unbounded)).take(count).map(|(name, value)| VarBind::new(name.clone(), value.clone())).collect()
        };
        let ended = |name: &Oid, found: &[VarBind]| VarBind::new(found.last().map_or(name, |last| &last.name).clone(), Value::EndOfMibView);
        let next = world.ask("blue", Pdu::asking(PduKind::GetNext, asked.clone())).unwrap();
        let expected: Vec<VarBind> = asked.iter().map(|name| after(name, 1).pop().unwrap_or_else(|| ended(name, &[]))).collect();
        prop_assert_eq!((next.status, next.bindings), (0, expected));

        let bulk = Pdu { status: single, index: repetitions, ..Pdu::asking(PduKind::GetBulk, asked.clone()) };
        let bulk = world.ask("blue", bulk).unwrap();
        let (single, repeated) = asked.split_at((single as usize).min(asked.len()));
        let mut expected: Vec<VarBind> = single.iter().map(|name| after(name, 1).pop().unwrap_or_else(|| ended(name, &[]))).collect();
        let columns: Vec<Vec<VarBind>> = repeated.iter().map(|name| after(name, repetitions as usize)).collect();
        for row in 0..repetitions as usize {
            expected.extend(columns.iter().zip(repeated).map(|(column, name)| column.get(row).cloned().unwrap_or_else(|| ended(name, column))));
            if columns.iter().all(|column| column.len() <= row) {
                break;
            }
        }
        prop_assert_eq!(bulk.status, 0);
        // It may be cut off where the answer would be too large.
        prop_assert!(expected.starts_with(&bulk.bindings), "{:?} {:?}", expected, bulk.bindings);
        prop_assert!(bulk.bindings.len() == expected.len() || bulk.bindings.len() * 30 > 1000);
    }
}

#[test]
fn regression_walks_reach_rows_with_index_zero() {
    let tree = Tree::new([(oid("1.3.6.1.5.1.1.0"), Value::Integer(1)), (oid("1.3.6.1.5.1.2.0"), Value::Integer(2))]);
    let setup =
        Setup { devices: vec![device("ap1")], slices: vec![slice("blue", vec![table("1.3.6.1.5.1", &[&[0]], &[])])], ..Setup::default() };
    assert_eq!(World::new(setup, vec![tree]).walk("blue").len(), 2);
}

#[test]
fn regression_a_table_has_no_column_0() {
    let tree = Tree::new([(oid("1.3.6.1.5.0.2"), Value::Integer(1)), (oid("1.3.6.1.5.1.2"), Value::Integer(2))]);
    let setup =
        Setup { devices: vec![device("ap1")], slices: vec![slice("blue", vec![table("1.3.6.1.5", &[&[2]], &[0])])], ..Setup::default() };
    let mut world = World::new(setup, vec![tree]);
    assert_eq!(world.walk("blue"), [(oid("1.3.6.1.5.1.2"), Value::Integer(2))]);
    assert!(matches!(world.get("blue", "1.3.6.1.5.0.2"), Value::NoSuchObject | Value::NoSuchInstance));
}

#[test]
fn few_requests_reach_the_agent() {
    let rows = 1..=200u32;
    let tree = Tree::new(
        rows.flat_map(|row| (1..=22).map(move |column| (oid(&format!("1.3.6.1.2.1.2.2.1.{column}.{row}")), Value::Gauge32(row)))),
    );
    let parts = vec![table("1.3.6.1.2.1.2.2.1", &[&[7], &[150]], &[])];
    let setup = Setup { devices: vec![device("ap1")], slices: vec![slice("blue", parts)], ..Setup::default() };
    let mut world = World::new(setup, vec![tree]);
    assert_eq!(world.walk("blue").len(), 44);
    assert!(world.agents[0].requests <= 2 * 45, "{} requests", world.agents[0].requests);
    let bulk = Pdu { index: 44, ..Pdu::asking(PduKind::GetBulk, [oid("1.3")]) };
    assert!(world.ask("blue", bulk).unwrap().bindings.len() >= 44);
}
