//! The services of this crate.

mod access;
mod multicast;
mod multipath;
mod notices;
mod reserve;

pub use access::Access;
pub use multicast::Multicast;
pub use multipath::Multipath;
pub use notices::Notices;
pub use reserve::Reserve;

use ipnet::IpNet;
use serde::de::DeserializeOwned;
use serde_json::Value;

use super::service::Service;

/// Names of the services of this module.
pub const NAMES: [&str; 5] = ["access", "multicast", "multipath", "notices", "reserve"];

/// All services of this module. `groups` are the multicast addresses that programs may use.
pub fn all(groups: Vec<IpNet>) -> [Box<dyn Service>; 5] {
    [
        Box::new(Access::default()),
        Box::new(Multicast::new(groups)),
        Box::new(Multipath),
        Box::new(Notices::default()),
        Box::new(Reserve::default()),
    ]
}

/// Reads what a program gave. `example` shows what is wanted.
fn given<T: DeserializeOwned>(with: &Value, example: &str) -> Result<T, String> {
    serde_json::from_value(with.clone()).map_err(|error| format!("{error}; write \"with\":{example}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn services_have_the_listed_names() {
        assert_eq!(all(Vec::new()).map(|service| service.name()), NAMES);
    }
}
