//! Roles of the controllers of a switch. Source: OpenFlow 1.3.5 sections 6.3, "Multiple Controllers", and 7.3.9.

use std::collections::BTreeMap;

use crate::codes::ErrorCode;
use crate::switch::{Role, RoleMessage};

/// Value of `generation_id` before the first election.
const NO_GENERATION: u64 = u64::MAX;

/// The roles of all controllers of one switch. `C` identifies a connection.
#[derive(Debug, Clone)]
pub struct Roles<C> {
    roles: BTreeMap<C, Role>,
    /// Number of the newest election.
    generation: Option<u64>,
}

/// What a request for a role changed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RoleChange<C> {
    /// The reply to send.
    pub reply: RoleMessage,
    /// The connection whose controller was the master, and is a slave now.
    pub demoted: Option<C>,
}

impl<C> Default for Roles<C> {
    fn default() -> Self {
        Self { roles: BTreeMap::new(), generation: None }
    }
}

impl<C: Copy + Ord> Roles<C> {
    /// The role of a controller; [`Role::Equal`] until it asks for another.
    pub fn role(&self, connection: C) -> Role {
        self.roles.get(&connection).copied().unwrap_or_default()
    }

    /// Forgets a connection that ended.
    pub fn remove(&mut self, connection: C) {
        self.roles.remove(&connection);
    }

    /// A controller asks for a role. The error is the one to answer with.
    pub fn request(&mut self, connection: C, request: RoleMessage) -> Result<RoleChange<C>, ErrorCode> {
        let mut demoted = None;
        if matches!(request.role, Role::Master | Role::Slave) {
            if self.generation.is_some_and(|newest| is_before(request.generation, newest)) {
                return Err(ErrorCode::RoleRequestFailedStale);
            }
            self.generation = Some(request.generation);
        }
        if request.role == Role::Master {
            let master = self.roles.iter_mut().find(|(other, role)| **other != connection && **role == Role::Master);
            demoted = master.map(|(other, role)| {
                *role = Role::Slave;
                *other
            });
        }
        if request.role != Role::NoChange {
            self.roles.insert(connection, request.role);
        }
        let reply = RoleMessage { role: self.role(connection), generation: self.generation.unwrap_or(NO_GENERATION) };
        Ok(RoleChange { reply, demoted })
    }
}

/// Whether an election was before another. Their numbers wrap around.
fn is_before(one: u64, other: u64) -> bool {
    (one.wrapping_sub(other) as i64) < 0
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ask(roles: &mut Roles<u8>, connection: u8, role: Role, generation: u64) -> Result<(Role, u64, Option<u8>), ErrorCode> {
        let change = roles.request(connection, RoleMessage { role, generation })?;
        Ok((change.reply.role, change.reply.generation, change.demoted))
    }

    #[test]
    fn one_controller_is_the_master() {
        let mut roles = Roles::default();
        assert_eq!(ask(&mut roles, 1, Role::NoChange, 0), Ok((Role::Equal, NO_GENERATION, None)));
        assert_eq!(ask(&mut roles, 1, Role::Master, 5), Ok((Role::Master, 5, None)));
        assert_eq!(ask(&mut roles, 2, Role::Master, 5), Ok((Role::Master, 5, Some(1))));
        assert_eq!((roles.role(1), roles.role(2), roles.role(3)), (Role::Slave, Role::Master, Role::Equal));
        assert_eq!(ask(&mut roles, 2, Role::Equal, 0), Ok((Role::Equal, 5, None)));
        roles.remove(1);
        assert_eq!(roles.role(1), Role::Equal);
    }

    #[test]
    fn old_elections_are_refused() {
        let mut roles = Roles::default();
        ask(&mut roles, 1, Role::Master, u64::MAX - 1).unwrap();
        assert_eq!(ask(&mut roles, 2, Role::Master, u64::MAX - 2), Err(ErrorCode::RoleRequestFailedStale));
        assert_eq!(ask(&mut roles, 2, Role::Slave, u64::MAX - 2), Err(ErrorCode::RoleRequestFailedStale));
        assert_eq!(roles.role(1), Role::Master);
        // The numbers wrap around.
        assert_eq!(ask(&mut roles, 2, Role::Master, 3), Ok((Role::Master, 3, Some(1))));
    }
}
