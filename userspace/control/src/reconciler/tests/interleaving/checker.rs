//! Whether a history is linearizable: whether each operation can be given one instant between its beginning and its answer,
//! so that a sequential model, asked in that order, gives the same answers.
//!
//! The search is that of Wing and Gong: try each operation that may come next, and go back where that leads nowhere. Where
//! the same operations have led to the same state before, it is not tried again (Lowe, "Testing for linearizability").

use std::{collections::HashSet, fmt};

/// More operations do not fit into the set of those that were ordered.
const MOST: usize = 128;

/// What says how it would be if one operation came after the other.
pub(super) trait Model: Clone {
    type Call: fmt::Debug;
    type Answer: fmt::Debug + PartialEq;

    /// What is answered now, and what is then; none where this cannot happen now.
    fn apply(&self, index: usize, call: &Self::Call) -> Option<(Self::Answer, Self)>;

    /// All that later answers depend on.
    fn key(&self) -> String;
}

/// When an operation may have taken place.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Until {
    /// Not after this, and before it for certain: it was answered.
    Answered(u32),
    /// Before this, or never.
    Maybe(u32),
    /// Before this if the operation of this index took place, else never: it undoes that one.
    Undoes(usize, u32),
    /// Before this and only if the operation of this index took place, or never.
    MaybeUndoes(usize, u32),
}

/// One operation.
#[derive(Debug)]
pub(super) struct Entry<M: Model> {
    pub(super) call: M::Call,
    pub(super) from: u32,
    pub(super) until: Until,
    /// What was answered; anything, if nobody knows.
    pub(super) answer: Option<M::Answer>,
    /// It comes after this one.
    pub(super) after: Option<usize>,
    /// It comes before this one, or never.
    pub(super) before: Option<usize>,
}

impl<M: Model> Entry<M> {
    fn last(&self) -> u32 {
        match self.until {
            Until::Answered(last)
            | Until::Maybe(last)
            | Until::Undoes(_, last)
            | Until::MaybeUndoes(_, last) => last,
        }
    }

    fn is_owed(&self, done: u128) -> bool {
        match self.until {
            Until::Answered(_) => true,
            Until::Undoes(what, _) => has(done, what),
            Until::Maybe(_) | Until::MaybeUndoes(..) => false,
        }
    }

    /// Whether it may come next, where the latest of those before it began at `began`.
    fn may_follow(&self, done: u128, began: u32) -> bool {
        let undone = match self.until {
            Until::Undoes(what, _) | Until::MaybeUndoes(what, _) => Some(what),
            Until::Answered(_) | Until::Maybe(_) => None,
        };
        undone.is_none_or(|what| has(done, what))
            && self.after.is_none_or(|first| has(done, first))
            && self.before.is_none_or(|second| !has(done, second))
            && began <= self.last()
    }
}

fn has(done: u128, index: usize) -> bool {
    done & 1 << index != 0
}

/// An order in which all answers are explained; else the longest that explains some.
pub(super) fn linearize<M: Model>(model: &M, history: &[Entry<M>]) -> Result<Vec<usize>, Vec<usize>> {
    assert!(history.len() <= MOST, "{} operations", history.len());
    let mut search = Search { history, seen: HashSet::new(), order: Vec::new(), longest: Vec::new() };
    if search.go(model, 0, 0) { Ok(search.order) } else { Err(search.longest) }
}

struct Search<'a, M: Model> {
    history: &'a [Entry<M>],
    seen: HashSet<(u128, String)>,
    order: Vec<usize>,
    longest: Vec<usize>,
}

impl<M: Model> Search<'_, M> {
    fn go(&mut self, model: &M, done: u128, began: u32) -> bool {
        if self.order.len() > self.longest.len() {
            self.longest.clone_from(&self.order);
        }
        let history = self.history;
        let open = || history.iter().enumerate().filter(|(index, _)| !has(done, *index));
        // What was answered came before all that began later.
        let Some(first_answer) =
            open().filter(|(_, entry)| entry.is_owed(done)).map(|(_, entry)| entry.last()).min()
        else {
            return true;
        };
        if !self.seen.insert((done, model.key())) {
            return false;
        }
        for (index, entry) in open().filter(|(_, entry)| entry.from <= first_answer) {
            if !entry.may_follow(done, began) {
                continue;
            }
            let Some((answer, next)) = model.apply(index, &entry.call) else { continue };
            if entry.answer.as_ref().is_some_and(|given| *given != answer) {
                continue;
            }
            self.order.push(index);
            if self.go(&next, done | 1 << index, began.max(entry.from)) {
                return true;
            }
            self.order.pop();
        }
        false
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A place for one.
    #[derive(Clone)]
    struct Place(Option<u32>);

    #[derive(Debug)]
    enum Call {
        Take(u32),
        Leave,
        Look,
    }

    impl Model for Place {
        type Call = Call;
        type Answer = Option<u32>;

        fn apply(&self, _: usize, call: &Call) -> Option<(Option<u32>, Self)> {
            Some(match *call {
                Call::Take(who) if self.0.is_none() => (Some(who), Self(Some(who))),
                Call::Take(_) => (None, self.clone()),
                Call::Leave => (self.0, Self(None)),
                Call::Look => (self.0, self.clone()),
            })
        }

        fn key(&self) -> String {
            format!("{:?}", self.0)
        }
    }

    fn did(call: Call, from: u32, last: u32, answer: Option<u32>) -> Entry<Place> {
        let until = Until::Answered(last);
        Entry { call, from, until, answer: Some(answer), after: None, before: None }
    }

    fn order(history: &[Entry<Place>]) -> Result<Vec<usize>, Vec<usize>> {
        linearize(&Place(None), history)
    }

    #[test]
    fn operations_at_the_same_time_take_place_in_either_order() {
        use Call::{Leave, Look, Take};
        let history = [did(Take(1), 0, 9, None), did(Take(2), 1, 8, Some(2)), did(Look, 2, 3, None)];
        assert_eq!(order(&history), Ok(vec![2, 1, 0]));
        let history = [did(Take(1), 0, 1, Some(1)), did(Leave, 2, 9, Some(1)), did(Take(2), 3, 4, Some(2))];
        assert_eq!(order(&history), Ok(vec![0, 1, 2]));
    }

    #[test]
    fn what_no_order_explains_is_rejected() {
        use Call::{Leave, Look, Take};
        // Both have it.
        assert!(order(&[did(Take(1), 0, 9, Some(1)), did(Take(2), 1, 8, Some(2))]).is_err());
        // The answer came before, so it has to be seen.
        assert!(order(&[did(Take(1), 0, 1, Some(1)), did(Look, 2, 3, None)]).is_err());
        // It was there, then not, then there again, and nobody left.
        let back = [did(Take(1), 0, 9, Some(1)), did(Look, 1, 2, Some(1)), did(Look, 3, 4, None)];
        assert!(order(&back).is_err());
        assert!(order(&[did(Leave, 0, 1, Some(1))]).is_err());
    }

    #[test]
    fn what_was_not_answered_has_taken_place_or_not_but_not_later() {
        use Call::{Look, Take};
        let crashed = || Entry { until: Until::Maybe(5), answer: None, ..did(Take(1), 0, 0, None) };
        for seen in [None, Some(1)] {
            assert!(order(&[crashed(), did(Look, 6, 7, seen)]).is_ok());
        }
        let late = [crashed(), did(Look, 6, 7, None), did(Look, 8, 9, Some(1))];
        assert!(order(&late).is_err(), "it was not there after the crash");
        // One that failed was there for a while, and is not in the end.
        let undo =
            |from| Entry { until: Until::Undoes(0, 5), answer: None, ..did(Call::Leave, from, 0, None) };
        let seen = [crashed(), undo(0), did(Look, 1, 2, Some(1)), did(Look, 6, 7, None)];
        assert!(order(&seen).is_ok());
        assert!(order(&[crashed(), undo(0), did(Look, 6, 7, Some(1))]).is_err());
        // An order that is known holds.
        let first = |before| Entry { before, ..crashed() };
        let queue = |before| [first(before), did(Take(2), 0, 3, Some(2)), did(Look, 1, 2, Some(1))];
        assert!(order(&queue(None)).is_err());
        let after = Entry { after: Some(1), ..did(Look, 0, 9, None) };
        assert!(order(&[did(Take(2), 0, 9, Some(2)), did(Take(1), 0, 9, None), after]).is_err());
    }
}
