//! A quota: so many permits for all, and so many of them for one origin.

use std::collections::BTreeMap;
use std::convert::Infallible;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio::sync::oneshot;

/// Resolves when a permit is given to another.
pub type Ended = oneshot::Receiver<Infallible>;

/// The quota. Clones share it.
#[derive(Debug)]
pub struct Quota<K>(Arc<Mutex<Inner<K>>>);

impl<K> Clone for Quota<K> {
    fn clone(&self) -> Self {
        Self(self.0.clone())
    }
}

#[derive(Debug)]
struct Inner<K> {
    most: usize,
    of_one: usize,
    next: u64,
    /// The oldest first.
    taken: BTreeMap<u64, Taken<K>>,
}

#[derive(Debug)]
struct Taken<K> {
    origin: K,
    kept: bool,
    /// Dropped, it notifies the holder of the permit.
    _end: Option<oneshot::Sender<Infallible>>,
}

/// A permit; given back when dropped.
#[derive(Debug)]
pub struct Permit<K> {
    quota: Quota<K>,
    number: u64,
    origin: K,
}

impl<K: Copy + Ord> Quota<K> {
    /// `most` permits, of which one origin may have `of_one`.
    pub fn new(most: usize, of_one: usize) -> Self {
        Self(Arc::new(Mutex::new(Inner { most, of_one, next: 0, taken: BTreeMap::new() })))
    }

    /// A permit, if one is free.
    pub fn try_take(&self, origin: K) -> Option<Permit<K>> {
        let mut inner = self.lock();
        (inner.taken.len() < inner.most && inner.own(origin) < inner.of_one).then(|| self.enter(&mut inner, origin, None))
    }

    /// A permit, for which the oldest that is not [kept](Permit::keep) makes room: one of its own where one origin has no more, else one of whoever
    /// has most. `None` where all are kept.
    pub fn take(&self, origin: K) -> Option<(Permit<K>, Ended)> {
        let mut inner = self.lock();
        if inner.own(origin) >= inner.of_one {
            inner.end_oldest(origin)?;
        } else if inner.taken.len() >= inner.most {
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

    /// Who has most permits that are not kept.
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
    /// It is given to nobody else any more: who has it has shown that it may change something.
    pub fn keep(&self) {
        if let Some(taken) = self.quota.lock().taken.get_mut(&self.number) {
            taken.kept = true;
        }
    }

    /// Whose it is.
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
    fn one_who_has_enough_makes_room_for_itself() {
        let quota = Quota::new(10, 3);
        let [greedy, other] = [1, 2];
        let mut held: Vec<_> = (0..4).map(|_| quota.take(greedy).unwrap()).collect();
        let mut theirs = quota.take(other).unwrap();
        assert_eq!(held.iter_mut().map(|(_, ended)| is_over(ended)).collect::<Vec<_>>(), [true, false, false, false]);
        assert!(!is_over(&mut theirs.1));
        assert!(quota.try_take(greedy).is_none() && quota.try_take(other).is_some());
        drop(held);
        assert!(quota.try_take(greedy).is_some(), "given back");
    }

    #[test]
    fn when_all_are_taken_whoever_has_most_makes_room() {
        let quota = Quota::new(4, 3);
        let mut held: Vec<_> = [1, 1, 1, 2].map(|from| quota.take(from).unwrap()).into();
        held[0].0.keep();
        assert!(quota.try_take(3).is_none());
        held.push(quota.take(3).unwrap());
        assert_eq!(held.iter_mut().map(|(_, ended)| is_over(ended)).collect::<Vec<_>>(), [false, true, false, false, false]);
        held.iter().for_each(|(permit, _)| permit.keep());
        assert!(quota.take(4).is_none(), "nobody can be sent away");
        assert_eq!(held[0].0.origin(), 1);
    }
}
