//! Round robin.

use super::{Chunk, PacketScheduler, PathView};

/// One path after the other, whatever they are (DBAS II.D, "PO round robin").
#[derive(Debug, Clone, Copy, Default)]
pub struct RoundRobin {
    next: usize,
}

impl PacketScheduler for RoundRobin {
    fn choose(&mut self, paths: &[PathView], _: Chunk, chosen: &mut Vec<usize>) {
        chosen.clear();
        let from_next = (self.next..paths.len()).chain(0..self.next.min(paths.len()));
        if let Some(path) = from_next.into_iter().find(|path| paths[*path].up) {
            self.next = path + 1;
            chosen.push(path);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use braid_model::Bytes;

    #[test]
    fn paths_take_turns_and_one_that_is_down_loses_its_own() {
        let mut paths = [PathView::UP; 3];
        let mut robin = RoundRobin::default();
        let mut chosen = Vec::new();
        let mut order = |paths: &[PathView], count: usize| -> Vec<usize> {
            let chunk = Chunk { flow: 0, size: Bytes::new(1) };
            (0..count)
                .map(|_| {
                    robin.choose(paths, chunk, &mut chosen);
                    chosen[0]
                })
                .collect()
        };
        assert_eq!(order(&paths, 4), [0, 1, 2, 0]);
        paths[1].up = false;
        assert_eq!(order(&paths, 3), [2, 0, 2]);
        paths[1].up = true;
        assert_eq!(order(&paths, 3), [0, 1, 2]);
    }
}
