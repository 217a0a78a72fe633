use super::*;
use crate::keys::KeyPair;

const DAY: Duration = Duration::from_secs(86_400);

/// 21 November 2026, noon UTC.
fn noon() -> SystemTime {
    UNIX_EPOCH + Duration::from_secs(1_795_262_400)
}

fn scratch() -> (tempfile::TempDir, StateDir, Registry) {
    let folder = tempfile::tempdir().unwrap();
    let dir = StateDir::open(&folder.path().join("relay")).unwrap();
    let registry = Registry::open(&dir).unwrap();
    (folder, dir, registry)
}

fn key() -> PublicKey {
    KeyPair::generate().unwrap().public()
}

fn name(text: &str) -> ClientName {
    text.parse().unwrap()
}

fn join(registry: &mut Registry, text: &str) -> RegisteredClient {
    let token = registry.invite(Some(&name(text)), DAY, noon()).unwrap();
    registry.redeem(&token, &key(), None, noon()).unwrap()
}

#[test]
fn an_invited_client_stays_registered() {
    let (_folder, dir, mut registry) = scratch();
    let key = key();
    assert_eq!(registry.lookup(&key).unwrap(), None);
    let token = registry.invite(None, DAY, noon()).unwrap();
    let joined = registry.redeem(&token, &key, Some(&name("phone")), noon()).unwrap();
    assert_eq!((joined.key, joined.name.as_str(), joined.revoked, joined.limits), (key, "phone", None, Limits::default()));
    assert_eq!(joined.joined, noon());
    drop(registry);
    assert_eq!(Registry::open(&dir).unwrap().lookup(&key).unwrap(), Some(joined));
}

#[test]
fn a_token_is_valid_for_one_key_and_until_it_expires() {
    let (_folder, _dir, mut registry) = scratch();
    let (first, second) = (key(), key());
    let token = registry.invite(None, DAY, noon()).unwrap();
    assert!(matches!(registry.redeem(&Token::generate().unwrap(), &first, None, noon()), Err(RedeemError::Unknown)));
    let joined = registry.redeem(&token, &first, None, noon() + DAY - Duration::from_secs(1)).unwrap();
    assert!(matches!(registry.redeem(&token, &second, None, noon()), Err(RedeemError::Used)));
    let again = registry.redeem(&token, &first, Some(&name("other")), noon() + 2 * DAY).unwrap();
    assert_eq!(again, joined, "a client may retry after a lost answer, even late");
    let late = registry.invite(None, DAY, noon()).unwrap();
    assert!(matches!(registry.redeem(&late, &second, None, noon() + DAY), Err(RedeemError::Expired)));
    assert_eq!(registry.lookup(&second).unwrap(), None);
}

#[test]
fn only_one_of_several_concurrent_redeemers_succeeds() {
    let (_folder, dir, mut registry) = scratch();
    for round in 0..20 {
        let token = registry.invite(Some(&name("race")), DAY, noon()).unwrap();
        let outcomes: Vec<bool> = std::thread::scope(|scope| {
            let threads: Vec<_> = (0..4)
                .map(|_| {
                    let (dir, token) = (&dir, &token);
                    scope.spawn(move || match Registry::open(dir).unwrap().redeem(token, &key(), None, noon()) {
                        Ok(_) => true,
                        Err(RedeemError::Used) => false,
                        Err(error) => panic!("{error}"),
                    })
                })
                .collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).collect()
        });
        assert_eq!(outcomes.iter().filter(|won| **won).count(), 1, "round {round}: {outcomes:?}");
    }
    assert_eq!(registry.clients().unwrap().len(), 20);
}

#[test]
fn names_are_unique_and_the_operators_name_takes_precedence() {
    let (_folder, _dir, mut registry) = scratch();
    assert_eq!(join(&mut registry, "phone").name, name("phone"));
    assert_eq!(join(&mut registry, "Phone").name, name("Phone-2"));
    let token = registry.invite(Some(&name("phone")), DAY, noon()).unwrap();
    assert_eq!(registry.redeem(&token, &key(), Some(&name("mine")), noon()).unwrap().name, name("phone-3"));
    let token = registry.invite(None, DAY, noon()).unwrap();
    assert_eq!(registry.redeem(&token, &key(), None, noon()).unwrap().name, name("client"));
}

#[test]
fn a_revoked_client_stays_excluded_until_it_is_invited_again() {
    let (_folder, _dir, mut registry) = scratch();
    let token = registry.invite(Some(&name("phone")), DAY, noon()).unwrap();
    let client = registry.redeem(&token, &key(), None, noon()).unwrap();
    let limits = Limits { flows: Some(3), ..Limits::default() };
    registry.set_limits(client.id, limits).unwrap();
    assert!(registry.revoke(client.id, noon() + DAY).unwrap());
    assert!(!registry.revoke(client.id, noon() + 2 * DAY).unwrap(), "it is already revoked");
    assert_eq!(registry.lookup(&client.key).unwrap().unwrap().revoked, Some(noon() + DAY));
    assert!(matches!(registry.redeem(&token, &client.key, None, noon()), Err(RedeemError::Used)), "its old invitation is used");
    let fresh = registry.invite(None, DAY, noon()).unwrap();
    let back = registry.redeem(&fresh, &client.key, Some(&name("new")), noon()).unwrap();
    assert_eq!((back.id, back.name.as_str(), back.revoked, back.limits), (client.id, "phone", None, limits));
}

#[test]
fn a_client_is_found_by_its_name_key_or_key_prefix() {
    let (_folder, _dir, mut registry) = scratch();
    let phone = join(&mut registry, "phone");
    join(&mut registry, "laptop");
    for text in ["phone", "PHONE", &phone.key.to_string(), &phone.key.to_string().to_uppercase(), &phone.key.to_string()[..12]] {
        assert_eq!(registry.find(text).unwrap(), phone, "{text}");
    }
    for text in ["", "pho", "tablet", "zzzzzzzzzz", "' OR 1=1 --", &phone.key.to_string()[..7]] {
        assert!(matches!(registry.find(text), Err(FindError::Nobody(_))), "{text}");
    }
}

#[test]
fn an_invitation_sets_limits() {
    let (_folder, _dir, mut registry) = scratch();
    let limits = Limits { rate_down: Some(Rate::from_mbps(10)), monthly: Some(ByteCount::new(5_000)), ..Limits::default() };
    let token = registry.invite_limited(None, limits, DAY, noon()).unwrap();
    let client = registry.redeem(&token, &key(), None, noon()).unwrap();
    assert_eq!((client.limits, registry.lookup(&client.key).unwrap().unwrap().limits), (limits, limits));
    registry.revoke(client.id, noon()).unwrap();
    let other = Limits { flows: Some(9), monthly: Some(ByteCount::new(7)), ..Limits::default() };
    let token = registry.invite_limited(None, other, DAY, noon()).unwrap();
    let back = registry.redeem(&token, &client.key, None, noon()).unwrap();
    assert_eq!(back.limits, Limits { rate_down: limits.rate_down, ..other }, "limits that the second one does not set stay");
}

#[test]
fn a_registry_with_the_first_schema_is_migrated() {
    let folder = tempfile::tempdir().unwrap();
    let dir = StateDir::open(&folder.path().join("relay")).unwrap();
    let old = rusqlite::Connection::open(dir.path().join("relay.sqlite")).unwrap();
    old.execute_batch(
        "CREATE TABLE client (id INTEGER PRIMARY KEY AUTOINCREMENT, key BLOB NOT NULL UNIQUE, name TEXT NOT NULL UNIQUE COLLATE NOCASE,
            joined INTEGER NOT NULL, seen INTEGER, revoked INTEGER, rate_down INTEGER, rate_up INTEGER, flows INTEGER, monthly INTEGER);
        CREATE TABLE token (digest BLOB PRIMARY KEY, name TEXT, made INTEGER NOT NULL, expires INTEGER NOT NULL, redeemer BLOB) WITHOUT ROWID;
        CREATE TABLE usage (client INTEGER NOT NULL REFERENCES client, month INTEGER NOT NULL, down INTEGER NOT NULL, up INTEGER NOT NULL,
            PRIMARY KEY (client, month)) WITHOUT ROWID;
        PRAGMA user_version = 1;",
    )
    .unwrap();
    let token = Token::generate().unwrap();
    let times = (noon().duration_since(UNIX_EPOCH).unwrap().as_secs(), (noon() + DAY).duration_since(UNIX_EPOCH).unwrap().as_secs());
    old.execute("INSERT INTO token VALUES (?1, 'phone', ?2, ?3, NULL)", rusqlite::params![token.digest(), times.0 as i64, times.1 as i64])
        .unwrap();
    drop(old);
    let mut registry = Registry::open(&dir).unwrap();
    let joined = registry.redeem(&token, &key(), None, noon()).unwrap();
    assert_eq!((joined.name, joined.limits), (name("phone"), Limits::default()));
}

#[test]
fn limits_of_every_size_are_stored() {
    let (_folder, _dir, mut registry) = scratch();
    let client = join(&mut registry, "phone");
    let some = Limits {
        rate_down: Some(Rate::from_mbps(10)),
        rate_up: Some(Rate::ZERO),
        flows: Some(u32::MAX),
        monthly: Some(ByteCount::new(50_000_000_000)),
    };
    registry.set_limits(client.id, some).unwrap();
    assert_eq!(registry.lookup(&client.key).unwrap().unwrap().limits, some);
    let huge = Limits { rate_down: Some(Rate::from_bps(u64::MAX)), ..Limits::default() };
    registry.set_limits(client.id, huge).unwrap();
    assert_eq!(registry.lookup(&client.key).unwrap().unwrap().limits.rate_down, Some(Rate::from_bps(i64::MAX as u64)));
}

#[test]
fn usage_is_counted_by_month_and_persists() {
    let (_folder, dir, mut registry) = scratch();
    let client = join(&mut registry, "phone");
    registry.count(client.id, ByteCount::new(1000), ByteCount::new(10), noon());
    assert_eq!(registry.used(client.id, noon()).unwrap().total(), ByteCount::new(1010), "including unflushed usage");
    assert_eq!(registry.flush(), None);
    registry.count(client.id, ByteCount::new(1), ByteCount::new(2), noon());
    registry.count(client.id, ByteCount::new(5), ByteCount::new(5), noon() + 10 * DAY);
    assert_eq!(registry.flush(), None);
    drop(registry);
    let registry = Registry::open(&dir).unwrap();
    let november = Month { first_day: 20_758, down: ByteCount::new(1001), up: ByteCount::new(12) };
    let december = Month { first_day: 20_788, down: ByteCount::new(5), up: ByteCount::new(5) };
    assert_eq!(registry.months(client.id).unwrap(), [november, december]);
    assert_eq!(registry.used(client.id, noon()).unwrap(), november);
    assert_eq!(registry.lookup(&client.key).unwrap().unwrap().seen, Some(noon() + 10 * DAY));
}

#[test]
fn usage_saturates_instead_of_overflowing() {
    let (_folder, _dir, mut registry) = scratch();
    let client = join(&mut registry, "phone");
    for _ in 0..3 {
        registry.count(client.id, ByteCount::new(u64::MAX), ByteCount::new(1), noon());
        assert_eq!(registry.flush(), None);
    }
    assert_eq!(
        registry.used(client.id, noon()).unwrap(),
        Month { first_day: 20_758, down: ByteCount::new(i64::MAX as u64), up: ByteCount::new(3) }
    );
}

#[test]
fn unwritable_usage_is_kept_and_reported_once() {
    let (_folder, dir, mut registry) = scratch();
    registry.connection.busy_timeout(Duration::from_millis(1)).unwrap();
    let client = join(&mut registry, "phone");
    let other = Connection::open(dir.path().join("relay.sqlite")).unwrap();
    other.execute_batch("BEGIN IMMEDIATE").unwrap();
    registry.count(client.id, ByteCount::new(7), ByteCount::ZERO, noon());
    let told = registry.flush().unwrap();
    assert!(told.contains("cannot be saved") && told.contains("locked"), "{told}");
    assert_eq!((registry.flush(), registry.trouble()), (None, Some(told.as_str())));
    let refused = registry.revoke(client.id, noon()).unwrap_err();
    assert!(matches!(refused, RegistryError::Failed { .. }), "{refused}");
    other.execute_batch("COMMIT").unwrap();
    assert!(registry.flush().unwrap().contains("again"));
    assert_eq!((registry.used(client.id, noon()).unwrap().down, registry.trouble()), (ByteCount::new(7), None));
}

#[test]
fn a_change_by_another_process_is_detected() {
    let (_folder, dir, mut registry) = scratch();
    let client = join(&mut registry, "phone");
    assert!(!registry.changed().unwrap(), "its own changes do not count");
    let mut operator = Registry::open(&dir).unwrap();
    operator.revoke(client.id, noon()).unwrap();
    assert!(registry.changed().unwrap() && !registry.changed().unwrap());
    assert!(registry.lookup(&client.key).unwrap().unwrap().revoked.is_some());
}

#[test]
fn a_replaced_file_is_detected() {
    let (folder, dir, mut registry) = scratch();
    let client = join(&mut registry, "phone");
    let fresh = StateDir::open(&folder.path().join("fresh")).unwrap();
    drop(Registry::open(&fresh).unwrap());
    for suffix in ["", "-wal", "-shm"] {
        let _ = std::fs::remove_file(dir.path().join(format!("relay.sqlite{suffix}")));
    }
    assert!(matches!(registry.changed(), Err(RegistryError::Unusable { .. })), "it does not create a new file");
    assert!(!Registry::exists(dir.path()));
    std::fs::rename(fresh.path().join("relay.sqlite"), dir.path().join("relay.sqlite")).unwrap();
    assert!(registry.changed().unwrap() && !registry.changed().unwrap());
    assert_eq!(registry.lookup(&client.key).unwrap(), None, "clients of the old file are not clients of the new one");
}

#[test]
fn a_damaged_registry_admits_nobody_and_is_not_changed() {
    let (_folder, dir, mut registry) = scratch();
    for number in 0..200 {
        join(&mut registry, &format!("client-{number}"));
    }
    drop(registry);
    let path = dir.path().join("relay.sqlite");
    let whole = std::fs::read(&path).unwrap();
    let damage: [fn(&mut Vec<u8>); 3] =
        [|bytes| bytes[..100].fill(7), |bytes| bytes.truncate(5000), |bytes| bytes[4096..].iter_mut().for_each(|byte| *byte ^= 0x55)];
    for damage in damage {
        let mut bytes = whole.clone();
        damage(&mut bytes);
        std::fs::write(&path, &bytes).unwrap();
        let error = Registry::open(&dir).unwrap_err();
        assert!(matches!(error, RegistryError::Damaged { .. }), "{error}");
        assert!(error.to_string().contains("restore a copy"));
        assert_eq!(std::fs::read(&path).unwrap(), bytes);
    }
}

#[test]
fn a_foreign_or_later_file_is_not_changed() {
    let (_folder, dir, registry) = scratch();
    registry.connection.pragma_update(None, "user_version", 99).unwrap();
    drop(registry);
    assert!(matches!(Registry::open(&dir), Err(RegistryError::Later { found: 99, .. })));
    let path = dir.path().join("relay.sqlite");
    std::fs::remove_file(&path).unwrap();
    std::os::unix::fs::symlink("/etc/passwd", &path).unwrap();
    assert!(matches!(Registry::open(&dir), Err(RegistryError::Unusable { .. })));
    std::fs::remove_file(&path).unwrap();
    std::fs::create_dir(&path).unwrap();
    assert!(matches!(Registry::open(&dir), Err(RegistryError::Unusable { .. })));
}

#[test]
fn only_the_owner_can_read_the_registry_and_it_holds_no_token() {
    use std::os::unix::fs::PermissionsExt;
    let (_folder, dir, mut registry) = scratch();
    let token = registry.invite(None, DAY, noon()).unwrap();
    let mut files = 0;
    for entry in std::fs::read_dir(dir.path()).unwrap() {
        let entry = entry.unwrap();
        assert_eq!(entry.metadata().unwrap().permissions().mode() & 0o077, 0, "{:?}", entry.path());
        let bytes = std::fs::read(entry.path()).unwrap();
        assert!(!bytes.windows(16).any(|window| window == token.reveal()), "{:?}", entry.path());
        files += 1;
    }
    assert!(files >= 2);
}

#[test]
fn old_invitations_are_deleted_and_their_number_is_limited() {
    let (_folder, _dir, mut registry) = scratch();
    let old = registry.invite(None, DAY, noon()).unwrap();
    registry.invite(None, DAY, noon() + 40 * DAY).unwrap();
    assert!(matches!(registry.redeem(&old, &key(), None, noon() + 40 * DAY), Err(RedeemError::Unknown)));
    registry
        .connection
        .execute(
            "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < ?1)
             INSERT INTO token (digest, made, expires) SELECT randomblob(32), 0, ?2 FROM n",
            params![TOKEN_LIMIT, i64::MAX],
        )
        .unwrap();
    assert!(matches!(registry.invite(None, DAY, noon()), Err(RegistryError::TooManyInvites)));
}

#[test]
fn extreme_clock_values_are_handled() {
    let (_folder, _dir, mut registry) = scratch();
    let token = registry.invite(None, Duration::MAX, UNIX_EPOCH - DAY).unwrap();
    let client = registry.redeem(&token, &key(), None, noon()).unwrap();
    registry.count(client.id, ByteCount::new(1), ByteCount::ZERO, UNIX_EPOCH - DAY);
    assert_eq!(registry.flush(), None);
    assert_eq!(registry.used(client.id, UNIX_EPOCH).unwrap().down, ByteCount::new(1));
}
