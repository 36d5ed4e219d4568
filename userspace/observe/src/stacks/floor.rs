//! Which of many symbols some addresses belong to, when symbols come in any order and are far too many to be kept.

/// The symbol that begins last at or before each of some addresses.
#[derive(Debug)]
pub(super) struct Floor<T> {
    /// In order, each once.
    addresses: Vec<u64>,
    /// The last symbol that begins at or before this address and after the one before it.
    best: Vec<Option<(u64, T)>>,
}

impl<T: Clone> Floor<T> {
    /// Nothing is known of these addresses yet.
    pub(super) fn new(addresses: impl IntoIterator<Item = u64>) -> Self {
        let mut addresses: Vec<u64> = addresses.into_iter().collect();
        addresses.sort_unstable();
        addresses.dedup();
        Self { best: vec![None; addresses.len()], addresses }
    }

    /// A symbol that begins at `start`; `symbol` is asked for where it is the best so far.
    pub(super) fn offer(&mut self, start: u64, symbol: impl FnOnce() -> T) {
        let place = self.addresses.partition_point(|address| *address < start);
        if let Some(best) = self.best.get_mut(place)
            && best.as_ref().is_none_or(|(known, _)| *known < start)
        {
            *best = Some((start, symbol()));
        }
    }

    /// Each address, and the symbol that begins last at or before it.
    pub(super) fn found(self) -> impl Iterator<Item = (u64, Option<(u64, T)>)> {
        let mut last = None;
        self.addresses.into_iter().zip(self.best).map(move |(address, best)| {
            if best.is_some() {
                last = best;
            }
            (address, last.clone())
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_address_belongs_to_the_symbol_before_it() {
        let mut floor = Floor::new([50, 10, 51, 99, 50]);
        for start in [60, 20, 50, 11, 30, 100] {
            floor.offer(start, || format!("at {start}"));
        }
        let found: Vec<_> =
            floor.found().map(|(address, of)| (address, of.map(|(start, _)| start))).collect();
        assert_eq!(found, [(10, None), (50, Some(50)), (51, Some(50)), (99, Some(60))]);
        assert_eq!(Floor::<u32>::new([]).found().count(), 0);
    }
}
