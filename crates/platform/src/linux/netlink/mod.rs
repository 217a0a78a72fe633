//! The kernel's network, followed and shaped over rtnetlink.
//!
//! - `Follower::start() -> Result<(Follower, watch::Receiver<Arc<NetworkSnapshot>>), FollowError>`: reads only, needs no privilege
//! - `snapshot() -> Result<NetworkSnapshot, DumpError>`: the same once, blocking
//! - `device_counters() -> Result<Vec<(LinkIndex, Bytes, Bytes)>, DumpError>`: received and sent bytes of every device
//! - `apply(&TablePlan, &NetworkSnapshot) -> Result<(), ApplyError>`: makes our rules and routes what the plan says
//! - `sweep() -> Result<Swept, ApplyError>`: removes our rules and routes, blocking, needs no daemon
