//! Linearizability checker.
//!
//! A history is linearizable if each operation can be assigned an instant between its start and its answer, so that a sequential
//! model that executes the operations in this order gives the same answers.
//!
//! # Algorithm
//! The search of Wing and Gong: try each operation that may be next, and backtrack at a dead end. A state that was reached before
//! with the same set of operations is not searched again (Lowe, "Testing for linearizability").

use std::{collections::HashSet, fmt};

/// Maximum length of a history: the set of ordered operations is a `u128`.
const MAX_OPERATIONS: usize = 128;

/// A sequential model.
pub(super) trait Model: Clone {
    type Call: fmt::Debug;
    type Answer: fmt::Debug + PartialEq;

    /// Returns the answer of an operation and the next state; `None` if the operation is impossible in this state.
    fn apply(&self, index: usize, call: &Self::Call) -> Option<(Self::Answer, Self)>;

    /// Returns a text for the state. Two states with the same text give the same answers.
    fn key(&self) -> String;
}

/// Latest time at which an operation takes effect, and whether it must take effect.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Deadline {
    /// The operation was answered at this time, so it has taken effect before.
    Answered(u32),
    /// The operation takes effect before this time, or never.
    Maybe(u32),
    /// Undoes the operation of this index: takes effect before this time if that operation has, else never.
    Undoes(usize, u32),
    /// May undo the operation of this index: takes effect before this time, after that operation, or never.
    MaybeUndoes(usize, u32),
}

/// One operation of a history.
#[derive(Debug)]
pub(super) struct CallRecord<M: Model> {
    pub(super) call: M::Call,
    pub(super) from: u32,
    pub(super) until: Deadline,
    /// The answer; `None` if it is unknown, which matches any answer.
    pub(super) answer: Option<M::Answer>,
    /// Index of an operation that takes effect earlier.
    pub(super) after: Option<usize>,
    /// Index of an operation that takes effect later, if this one takes effect at all.
    pub(super) before: Option<usize>,
}

impl<M: Model> CallRecord<M> {
    fn last(&self) -> u32 {
        match self.until {
            Deadline::Answered(last)
            | Deadline::Maybe(last)
            | Deadline::Undoes(_, last)
            | Deadline::MaybeUndoes(_, last) => last,
        }
    }

    fn must_take_effect(&self, done: u128) -> bool {
        match self.until {
            Deadline::Answered(_) => true,
            Deadline::Undoes(what, _) => has(done, what),
            Deadline::Maybe(_) | Deadline::MaybeUndoes(..) => false,
        }
    }

    /// Returns true if the operation may be next after the operations `done`, the last of which began at `began`.
    fn may_follow(&self, done: u128, began: u32) -> bool {
        let undone = match self.until {
            Deadline::Undoes(what, _) | Deadline::MaybeUndoes(what, _) => Some(what),
            Deadline::Answered(_) | Deadline::Maybe(_) => None,
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

/// Returns an order that explains all answers. The error is the longest order that was found.
pub(super) fn linearize<M: Model>(model: &M, history: &[CallRecord<M>]) -> Result<Vec<usize>, Vec<usize>> {
    assert!(history.len() <= MAX_OPERATIONS, "{} operations", history.len());
    let mut search = Search { history, seen: HashSet::new(), order: Vec::new(), longest: Vec::new() };
    if search.extend(model, 0, 0) { Ok(search.order) } else { Err(search.longest) }
}

struct Search<'a, M: Model> {
    history: &'a [CallRecord<M>],
    seen: HashSet<(u128, String)>,
    order: Vec<usize>,
    longest: Vec<usize>,
}

impl<M: Model> Search<'_, M> {
    fn extend(&mut self, model: &M, done: u128, began: u32) -> bool {
        if self.order.len() > self.longest.len() {
            self.longest.clone_from(&self.order);
        }
        let history = self.history;
        let open = || history.iter().enumerate().filter(|(index, _)| !has(done, *index));
        // An answered operation took effect before any operation that began after the answer.
        let Some(first_answer) =
            open().filter(|(_, entry)| entry.must_take_effect(done)).map(|(_, entry)| entry.last()).min()
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
            if entry.answer.as_ref().is_some_and(|observed| *observed != answer) {
                continue;
            }
            self.order.push(index);
            if self.extend(&next, done | 1 << index, began.max(entry.from)) {
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

    /// A seat that one client can take.
    #[derive(Clone)]
    struct Seat(Option<u32>);

    #[derive(Debug)]
    enum Call {
        Take(u32),
        Leave,
        Look,
    }

    impl Model for Seat {
        type Call = Call;
        type Answer = Option<u32>;

        fn apply(&self, _: usize, call: &Call) -> Option<(Option<u32>, Self)> {
            Some(match *call {
                Call::Take(client) if self.0.is_none() => (Some(client), Self(Some(client))),
                Call::Take(_) => (None, self.clone()),
                Call::Leave => (self.0, Self(None)),
                Call::Look => (self.0, self.clone()),
            })
        }

        fn key(&self) -> String {
            format!("{:?}", self.0)
        }
    }

    fn answered(call: Call, from: u32, last: u32, answer: Option<u32>) -> CallRecord<Seat> {
        let until = Deadline::Answered(last);
        CallRecord { call, from, until, answer: Some(answer), after: None, before: None }
    }

    fn order(history: &[CallRecord<Seat>]) -> Result<Vec<usize>, Vec<usize>> {
        linearize(&Seat(None), history)
    }

    #[test]
    fn concurrent_operations_have_any_order() {
        use Call::{Leave, Look, Take};
        let history =
            [answered(Take(1), 0, 9, None), answered(Take(2), 1, 8, Some(2)), answered(Look, 2, 3, None)];
        assert_eq!(order(&history), Ok(vec![2, 1, 0]));
        let history = [
            answered(Take(1), 0, 1, Some(1)),
            answered(Leave, 2, 9, Some(1)),
            answered(Take(2), 3, 4, Some(2)),
        ];
        assert_eq!(order(&history), Ok(vec![0, 1, 2]));
    }

    #[test]
    fn rejects_unexplainable_answers() {
        use Call::{Leave, Look, Take};
        // Both clients have the seat.
        assert!(order(&[answered(Take(1), 0, 9, Some(1)), answered(Take(2), 1, 8, Some(2))]).is_err());
        // The look began after the answer, but does not see its effect.
        assert!(order(&[answered(Take(1), 0, 1, Some(1)), answered(Look, 2, 3, None)]).is_err());
        // The seat is taken and then free, but no client left.
        let back =
            [answered(Take(1), 0, 9, Some(1)), answered(Look, 1, 2, Some(1)), answered(Look, 3, 4, None)];
        assert!(order(&back).is_err());
        assert!(order(&[answered(Leave, 0, 1, Some(1))]).is_err());
    }

    #[test]
    fn unanswered_operation_may_take_effect() {
        use Call::{Look, Take};
        let crashed =
            || CallRecord { until: Deadline::Maybe(5), answer: None, ..answered(Take(1), 0, 0, None) };
        for seen in [None, Some(1)] {
            assert!(order(&[crashed(), answered(Look, 6, 7, seen)]).is_ok());
        }
        let late = [crashed(), answered(Look, 6, 7, None), answered(Look, 8, 9, Some(1))];
        assert!(order(&late).is_err(), "it cannot take effect after the crash");
        // A failed operation has an effect for a while, which is undone.
        let undo = |from| CallRecord {
            until: Deadline::Undoes(0, 5),
            answer: None,
            ..answered(Call::Leave, from, 0, None)
        };
        let seen = [crashed(), undo(0), answered(Look, 1, 2, Some(1)), answered(Look, 6, 7, None)];
        assert!(order(&seen).is_ok());
        assert!(order(&[crashed(), undo(0), answered(Look, 6, 7, Some(1))]).is_err());
        // A known order is respected.
        let first = |before| CallRecord { before, ..crashed() };
        let queue = |before| [first(before), answered(Take(2), 0, 3, Some(2)), answered(Look, 1, 2, Some(1))];
        assert!(order(&queue(None)).is_err());
        let after = CallRecord { after: Some(1), ..answered(Look, 0, 9, None) };
        assert!(order(&[answered(Take(2), 0, 9, Some(2)), answered(Take(1), 0, 9, None), after]).is_err());
    }
}
