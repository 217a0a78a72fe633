//! What a slice sees of a device (RFC 3415 has views by masks; here a table is cut by the indexes of its rows).

use std::collections::BTreeSet;

use crate::oid::Oid;

/// A part of what a slice sees.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Part {
    /// All below a name, except some.
    Subtree {
        /// The name.
        root: Oid,
        /// What is left out, with all below.
        except: Vec<Oid>,
        /// Whether the slice may set it.
        write: bool,
    },
    /// Rows of a table.
    Table {
        /// The name of the entry, which is the table's followed by 1.
        entry: Oid,
        /// The columns; `None`: all.
        columns: Option<BTreeSet<u32>>,
        /// The rows, by their indexes or what these begin with.
        rows: BTreeSet<Vec<u32>>,
        /// The columns that the slice may set.
        write: BTreeSet<u32>,
    },
}

/// What a slice may do with an object.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Access {
    /// Nothing: it does not see it.
    None,
    /// Read it.
    Read,
    /// Read and set it.
    Write,
}

/// What a slice sees of a device.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct View {
    parts: Vec<Part>,
}

impl View {
    /// A view of nothing.
    pub(crate) const fn nothing() -> Self {
        Self { parts: Vec::new() }
    }

    /// A view of these parts. Without any it is empty.
    pub fn new(parts: Vec<Part>) -> Self {
        Self { parts }
    }

    /// What the slice may do with this object: the most that a part allows.
    pub fn access(&self, name: &Oid) -> Access {
        self.parts.iter().map(|part| part.access(name)).max().unwrap_or(Access::None)
    }

    /// Whether the slice sees other instances of this object. Then it lacks an instance only, not the object.
    pub(crate) fn has_object(&self, name: &Oid) -> bool {
        self.parts.iter().any(|part| match part {
            Part::Subtree { .. } => false,
            Part::Table { entry, columns, .. } => {
                let column = name.parts().get(entry.parts().len());
                name.starts_with(entry) && column.is_some_and(|column| columns.as_ref().is_none_or(|columns| columns.contains(column)))
            }
        })
    }

    /// The name to continue a walk from: all that the slice sees behind `name` is behind it, too. It is not before `name`. `None`: nothing is left.
    pub(crate) fn walk_from(&self, name: &Oid) -> Option<Oid> {
        self.parts.iter().filter_map(|part| part.walk_from(name)).min()
    }

    /// The names below which the slice may set all.
    pub fn writable(&self) -> Vec<(Oid, &[Oid])> {
        let mut all: Vec<(Oid, &[Oid])> = Vec::new();
        for part in &self.parts {
            match part {
                Part::Subtree { root, except, write: true } => all.push((root.clone(), except)),
                Part::Subtree { .. } => {}
                Part::Table { entry, rows, write, .. } => {
                    let pairs = write.iter().flat_map(|column| rows.iter().map(move |row| (column, row)));
                    all.extend(pairs.filter_map(|(column, row)| Some((cell(entry, *column, row)?, &[][..]))));
                }
            }
        }
        all
    }
}

fn cell(entry: &Oid, column: u32, row: &[u32]) -> Option<Oid> {
    entry.below(&[&[column], row].concat())
}

impl Part {
    fn access(&self, name: &Oid) -> Access {
        let (sees, writes) = match self {
            Self::Subtree { root, except, write } => {
                (name.starts_with(root) && !except.iter().any(|except| name.starts_with(except)), *write)
            }
            Self::Table { entry, columns, rows, write } => match name.parts().get(entry.parts().len()..) {
                Some([column, index @ ..]) if name.starts_with(entry) => {
                    // Columns have numbers from 1 (RFC 2578 section 7.7).
                    let sees = *column > 0 && columns.as_ref().is_none_or(|columns| columns.contains(column));
                    (sees && rows.iter().any(|row| index.starts_with(row)), write.contains(column))
                }
                _ => (false, false),
            },
        };
        match (sees, writes) {
            (false, _) => Access::None,
            (true, false) => Access::Read,
            (true, true) => Access::Write,
        }
    }

    fn walk_from(&self, name: &Oid) -> Option<Oid> {
        match self {
            Self::Subtree { root, .. } if name < root => Some(root.before().max(name.clone())),
            Self::Subtree { root, .. } if !name.starts_with(root) => None,
            Self::Subtree { except, .. } => {
                let skipped = except.iter().filter(|except| name.starts_with(except)).map(Oid::end).max();
                Some(skipped.map_or_else(|| name.clone(), |end| end.max(name.clone())))
            }
            Self::Table { entry, columns, rows, .. } => {
                let first = rows.first()?;
                let column_from = |least: u32| match columns {
                    Some(columns) => columns.range(least.max(1)..).next().copied(),
                    None => Some(least.max(1)),
                };
                let (column, index) = match name.parts().get(entry.parts().len()..) {
                    Some([column, index @ ..]) if name.starts_with(entry) => (*column, index),
                    _ if name > entry && !name.starts_with(entry) => return None,
                    _ => (0, &[][..]),
                };
                let start = |column: u32, row: &[u32]| Some(cell(entry, column, row)?.before().max(name.clone()));
                let here = column_from(column)?;
                if here != column {
                    return start(here, first);
                }
                if rows.iter().any(|row| index.starts_with(row)) {
                    return Some(name.clone());
                }
                match rows.range(index.to_vec()..).next() {
                    Some(row) => start(column, row),
                    None => start(column_from(column.checked_add(1)?)?, first),
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn oid(text: &str) -> Oid {
        text.parse().unwrap()
    }

    fn rows(view: &[u32]) -> Part {
        let entry = oid("1.3.6.1.2.1.2.2.1");
        Part::Table { entry, columns: None, rows: view.iter().map(|row| vec![*row]).collect(), write: BTreeSet::from([7]) }
    }

    #[test]
    fn rows_and_columns_decide() {
        let view =
            View::new(vec![rows(&[3]), Part::Subtree { root: oid("1.3.6.1.2.1.1"), except: vec![oid("1.3.6.1.2.1.1.6")], write: false }]);
        for (name, access) in [
            ("1.3.6.1.2.1.1.5.0", Access::Read),
            ("1.3.6.1.2.1.1.6.0", Access::None),
            ("1.3.6.1.2.1.2.1.0", Access::None),
            ("1.3.6.1.2.1.2.2.1.7.3", Access::Write),
            ("1.3.6.1.2.1.2.2.1.8.3", Access::Read),
            ("1.3.6.1.2.1.2.2.1.7.33", Access::None),
            ("1.3.6.1.2.1.2.2.1.7", Access::None),
        ] {
            assert_eq!(view.access(&oid(name)), access, "{name}");
        }
        assert!(view.has_object(&oid("1.3.6.1.2.1.2.2.1.7.4")) && !view.has_object(&oid("1.3.6.1.2.1.2.2.2")));
    }

    #[test]
    fn walks_jump_to_what_is_seen() {
        let view = View::new(vec![rows(&[3, 9])]);
        for (name, from) in [
            ("1.3", Some("1.3.6.1.2.1.2.2.1.1.2.4294967295")),
            ("1.3.6.1.2.1.2.2.1.1.3", Some("1.3.6.1.2.1.2.2.1.1.3")),
            ("1.3.6.1.2.1.2.2.1.1.4", Some("1.3.6.1.2.1.2.2.1.1.8.4294967295")),
            ("1.3.6.1.2.1.2.2.1.1.10", Some("1.3.6.1.2.1.2.2.1.2.2.4294967295")),
            ("1.3.6.1.2.1.2.2.2", None),
        ] {
            assert_eq!(view.walk_from(&oid(name)), from.map(oid), "{name}");
        }
    }
}
