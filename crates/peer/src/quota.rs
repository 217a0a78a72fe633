//! A quota of permits, with a limit for all origins together and a limit for one origin.

use std::collections::BTreeMap;
use std::convert::Infallible;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio::sync::oneshot;

/// Resolves when the permit is revoked in favour of another.
pub type Ended = oneshot::Receiver<Infallible>;

/// A quota of permits. Clones share it.
#[derive(Debug)]
pub struct Quota<K>(Arc<Mutex<Inner<K>>>);

impl<K> Clone for Quota<K> {
    fn clone(&self) -> Self {
        Self(self.0.clone())
    }
}

#[derive(Debug)]
struct Inner<K> {
    max: usize,
    max_per_origin: usize,
    next: u64,
    /// Oldest first.
    taken: BTreeMap<u64, Taken<K>>,
}

#[derive(Debug)]
struct Taken<K> {
    origin: K,
    kept: bool,
    /// Dropping it notifies the holder of the permit.
    _end: Option<oneshot::Sender<Infallible>>,
}

/// A permit; dropping it returns it to the quota.
#[derive(Debug)]
pub struct Permit<K> {
    quota: Quota<K>,
    number: u64,
    origin: K,
}

impl<K: Copy + Ord> Quota<K> {
    /// A quota of `max` permits, of which one origin may hold `max_per_origin`.
    pub fn new(max: usize, max_per_origin: usize) -> Self {
        Self(Arc::new(Mutex::new(Inner { max, max_per_origin, next: 0, taken: BTreeMap::new() })))
    }

    /// Takes a free permit; `None` if there is none.
    pub fn try_take(&self, origin: K) -> Option<Permit<K>> {
        let mut inner = self.lock();
        (inner.taken.len() < inner.max && inner.own(origin) < inner.max_per_origin).then(|| self.enter(&mut inner, origin, None))
    }

    /// Takes a permit, and revokes the oldest one that is not [kept](Permit::keep) if a limit is reached: the origin's own oldest at the origin's
    /// limit, else the oldest of the origin with the most permits. `None` if all candidates are kept.
    pub fn take(&self, origin: K) -> Option<(Permit<K>, Ended)> {
        let mut inner = self.lock();
        if inner.own(origin) >= inner.max_per_origin {
            inner.end_oldest(origin)?;
        } else if inner.taken.len() >= inner.max {
            let greediest = inner.greediest()?;
            inner.end_oldest(greediest)?;
        }
        let (end, ended) = oneshot::channel();
        Some((self.enter(&mut inner, origin, Some(end)), ended))
    }

    fn enter(&self, inner: &mut Inner<K>, origin: K, end: Option<oneshot::Sender<Infallible>>) -> Permit<K> {
        let number = inner.next;
        inner.next += 1;
        inner.taken.insert(number, Taken { origin, kept: false, _end: end });
        Permit { quota: self.clone(), number, origin }
    }
}

impl<K> Quota<K> {
    fn lock(&self) -> MutexGuard<'_, Inner<K>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl<K: Copy + Ord> Inner<K> {
    fn own(&self, origin: K) -> usize {
        self.taken.values().filter(|taken| taken.origin == origin).count()
    }

    /// The origin with the most permits that are not kept.
    fn greediest(&self) -> Option<K> {
        let mut counts: BTreeMap<K, usize> = BTreeMap::new();
        self.taken.values().filter(|taken| !taken.kept).for_each(|taken| *counts.entry(taken.origin).or_default() += 1);
        counts.into_iter().max_by_key(|(_, count)| *count).map(|(origin, _)| origin)
    }

    fn end_oldest(&mut self, origin: K) -> Option<()> {
        let oldest = self.taken.iter().find(|(_, taken)| taken.origin == origin && !taken.kept).map(|(number, _)| *number)?;
        self.taken.remove(&oldest).map(drop)
    }
}

impl<K: Copy> Permit<K> {
    /// Protects the permit from revocation: its holder has authenticated.
    pub fn keep(&self) {
        if let Some(taken) = self.quota.lock().taken.get_mut(&self.number) {
            taken.kept = true;
        }
    }

    /// The origin that holds the permit.
    pub fn origin(&self) -> K {
        self.origin
    }
}

impl<K> Drop for Permit<K> {
    fn drop(&mut self) {
        self.quota.lock().taken.remove(&self.number);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn is_over(ended: &mut Ended) -> bool {
        ended.try_recv() == Err(oneshot::error::TryRecvError::Closed)
    }

    #[test]
    fn an_origin_at_its_limit_loses_its_own_oldest_permit() {
        let quota = Quota::new(10, 3);
        let [greedy, other] = [1, 2];
        let mut held: Vec<_> = (0..4).map(|_| quota.take(greedy).unwrap()).collect();
        let mut theirs = quota.take(other).unwrap();
        assert_eq!(held.iter_mut().map(|(_, ended)| is_over(ended)).collect::<Vec<_>>(), [true, false, false, false]);
        assert!(!is_over(&mut theirs.1));
        assert!(quota.try_take(greedy).is_none() && quota.try_take(other).is_some());
        drop(held);
        assert!(quota.try_take(greedy).is_some(), "the permits were returned");
    }

    #[test]
    fn at_the_total_limit_the_origin_with_the_most_permits_loses_one() {
        let quota = Quota::new(4, 3);
        let mut held: Vec<_> = [1, 1, 1, 2].map(|from| quota.take(from).unwrap()).into();
        held[0].0.keep();
        assert!(quota.try_take(3).is_none());
        held.push(quota.take(3).unwrap());
        assert_eq!(held.iter_mut().map(|(_, ended)| is_over(ended)).collect::<Vec<_>>(), [false, true, false, false, false]);
        held.iter().for_each(|(permit, _)| permit.keep());
        assert!(quota.take(4).is_none(), "all permits are kept");
        assert_eq!(held[0].0.origin(), 1);
    }
}
