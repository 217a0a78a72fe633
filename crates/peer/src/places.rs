//! Places: so many for all, and so many of them for one who comes.

use std::collections::BTreeMap;
use std::convert::Infallible;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio::sync::oneshot;

/// Comes to pass when a place is given to another.
pub type Ended = oneshot::Receiver<Infallible>;

/// The places. Clones are the same.
#[derive(Debug)]
pub struct Places<K>(Arc<Mutex<Inner<K>>>);

impl<K> Clone for Places<K> {
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
    /// Dropped, it tells whoever has the place.
    _end: Option<oneshot::Sender<Infallible>>,
}

/// A place; given back when dropped.
#[derive(Debug)]
pub struct Place<K> {
    places: Places<K>,
    number: u64,
    origin: K,
}

impl<K: Copy + Ord> Places<K> {
    /// `most` places, of which one origin has `of_one`.
    pub fn new(most: usize, of_one: usize) -> Self {
        Self(Arc::new(Mutex::new(Inner { most, of_one, next: 0, taken: BTreeMap::new() })))
    }

    /// A place, if one is free.
    pub fn try_take(&self, origin: K) -> Option<Place<K>> {
        let mut inner = self.lock();
        (inner.taken.len() < inner.most && inner.own(origin) < inner.of_one).then(|| self.enter(&mut inner, origin, None))
    }

    /// A place, for which the oldest that is not [kept](Place::keep) makes room: one of its own where one origin has no more, else one of whoever
    /// has most. `None` where all are kept.
    pub fn take(&self, origin: K) -> Option<(Place<K>, Ended)> {
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

    fn enter(&self, inner: &mut Inner<K>, origin: K, end: Option<oneshot::Sender<Infallible>>) -> Place<K> {
        let number = inner.next;
        inner.next += 1;
        inner.taken.insert(number, Taken { origin, kept: false, _end: end });
        Place { places: self.clone(), number, origin }
    }
}

impl<K> Places<K> {
    fn lock(&self) -> MutexGuard<'_, Inner<K>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl<K: Copy + Ord> Inner<K> {
    fn own(&self, origin: K) -> usize {
        self.taken.values().filter(|taken| taken.origin == origin).count()
    }

    /// Who has most places that are not kept.
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

impl<K: Copy> Place<K> {
    /// It is given to nobody else any more: who has it has shown that it may change something.
    pub fn keep(&self) {
        if let Some(taken) = self.places.lock().taken.get_mut(&self.number) {
            taken.kept = true;
        }
    }

    /// Whose it is.
    pub fn origin(&self) -> K {
        self.origin
    }
}

impl<K> Drop for Place<K> {
    fn drop(&mut self) {
        self.places.lock().taken.remove(&self.number);
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
        let places = Places::new(10, 3);
        let [greedy, other] = [1, 2];
        let mut held: Vec<_> = (0..4).map(|_| places.take(greedy).unwrap()).collect();
        let mut theirs = places.take(other).unwrap();
        assert_eq!(held.iter_mut().map(|(_, ended)| is_over(ended)).collect::<Vec<_>>(), [true, false, false, false]);
        assert!(!is_over(&mut theirs.1));
        assert!(places.try_take(greedy).is_none() && places.try_take(other).is_some());
        drop(held);
        assert!(places.try_take(greedy).is_some(), "given back");
    }

    #[test]
    fn when_all_are_taken_whoever_has_most_makes_room() {
        let places = Places::new(4, 3);
        let mut held: Vec<_> = [1, 1, 1, 2].map(|from| places.take(from).unwrap()).into();
        held[0].0.keep();
        assert!(places.try_take(3).is_none());
        held.push(places.take(3).unwrap());
        assert_eq!(held.iter_mut().map(|(_, ended)| is_over(ended)).collect::<Vec<_>>(), [false, true, false, false, false]);
        held.iter().for_each(|(place, _)| place.keep());
        assert!(places.take(4).is_none(), "nobody can be sent away");
        assert_eq!(held[0].0.origin(), 1);
    }
}
