//! What the user looks at, and what the keys do.

use ratatui::crossterm::event::{KeyCode, KeyEvent, KeyModifiers};

use super::{
    draw::Paint,
    model::{Model, Row},
};
use crate::args::Choice;

/// What comes after a key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Then {
    Draw,
    Quit,
    Suspend,
}

/// A part of the screen that keys move in.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum Pane {
    #[default]
    Workloads,
    Nodes,
    Events,
}

/// What takes the screen.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) enum View {
    /// Nodes, workloads, events.
    #[default]
    Lists,
    /// A workload in full, by its key.
    Workload(String),
    /// A node in full.
    Node(u32),
    Help,
}

/// Where the user is in a pane.
#[derive(Debug, Default)]
pub(crate) struct Place {
    /// The selected line.
    pub(crate) at: usize,
    /// The first line in sight.
    pub(crate) from: usize,
}

/// What is shown.
#[derive(Debug, Default)]
pub(crate) struct Screen {
    pub(crate) choice: Choice,
    pub(crate) paint: Paint,
    pub(crate) view: View,
    pub(crate) pane: Pane,
    /// The workload that is selected, by its key; the first until one is.
    pub(crate) selected: Option<String>,
    /// By [`Pane`]. Of the workloads, where the selected one was: for when it goes.
    pub(crate) places: [Place; 3],
    /// The first line in sight of a view.
    pub(crate) scrolled: usize,
    /// Lines that the pane or the view showed last; none before the first.
    pub(crate) page: usize,
    /// Whether the filter is being written.
    pub(crate) is_filtering: bool,
}

impl Screen {
    /// Whether a key is a letter here, or goes with another.
    pub(crate) fn takes_text(&self, key: KeyEvent) -> bool {
        self.is_filtering || key.modifiers.contains(KeyModifiers::CONTROL)
    }

    /// Does what a key asks for.
    pub(crate) fn key(&mut self, key: KeyEvent, model: &Model) -> Then {
        if key.modifiers.contains(KeyModifiers::CONTROL) {
            match key.code {
                KeyCode::Char('c') => return Then::Quit,
                KeyCode::Char('z') => return Then::Suspend,
                KeyCode::Char('u') if self.is_filtering => self.choice.filter.clear(),
                _ => {}
            }
            return Then::Draw;
        }
        if self.is_filtering {
            self.write_filter(key.code);
            return Then::Draw;
        }
        match (key.code, &self.view) {
            (KeyCode::Char('q'), View::Lists) => return Then::Quit,
            (KeyCode::Char('q') | KeyCode::Esc | KeyCode::Left | KeyCode::Backspace, view)
                if *view != View::Lists =>
            {
                self.show(View::Lists);
            }
            (KeyCode::Char('?' | 'h') | KeyCode::F(1), View::Help) => self.show(View::Lists),
            (KeyCode::Char('?' | 'h') | KeyCode::F(1), _) => self.show(View::Help),
            (code, View::Lists) => self.lists_key(code, model),
            (code, _) => {
                let page = self.page.max(1);
                self.scrolled = moved(code, self.scrolled, page, usize::MAX / 2).unwrap_or(self.scrolled);
            }
        }
        Then::Draw
    }

    fn show(&mut self, view: View) {
        self.view = view;
        self.scrolled = 0;
    }

    fn write_filter(&mut self, code: KeyCode) {
        match code {
            KeyCode::Enter => self.is_filtering = false,
            KeyCode::Esc => {
                self.is_filtering = false;
                self.choice.filter.clear();
            }
            KeyCode::Backspace => drop(self.choice.filter.pop()),
            KeyCode::Char(c) if self.choice.filter.len() < 256 => self.choice.filter.push(c),
            _ => {}
        }
    }

    fn lists_key(&mut self, code: KeyCode, model: &Model) {
        match code {
            KeyCode::Char('/') => {
                self.is_filtering = true;
                self.pane = Pane::Workloads;
            }
            KeyCode::Esc => self.choice.filter.clear(),
            KeyCode::Char('s' | '>') => self.choice.sort_by_next(false),
            KeyCode::Char('S' | '<') => self.choice.sort_by_next(true),
            KeyCode::Char('r') => self.choice.reversed = !self.choice.reversed,
            KeyCode::Char('g') => self.choice.guaranteed = !self.choice.guaranteed,
            KeyCode::Tab | KeyCode::BackTab => {
                let all = [Pane::Workloads, Pane::Nodes, Pane::Events];
                let step = if code == KeyCode::Tab { 1 } else { all.len() - 1 };
                self.pane = all[(self.pane as usize + step) % all.len()];
            }
            KeyCode::Enter | KeyCode::Right => self.look_into(model),
            code => self.move_in_pane(code, model),
        }
    }

    fn look_into(&mut self, model: &Model) {
        let at = self.places[self.pane as usize].at;
        let view = match self.pane {
            Pane::Workloads => {
                let rows = self.choice.rows(model);
                rows.get(self.position(&rows)).map(|(key, _)| View::Workload((*key).to_owned()))
            }
            Pane::Nodes => model.nodes.get(at).map(|node| View::Node(node.node)),
            // Of the workload that it is about, if that is still there.
            Pane::Events => model.events.get(at).and_then(|event| {
                let name = event.workload.as_ref()?;
                let (key, _) = model.rows.iter().find(|(_, row)| row.is_called(name))?;
                Some(View::Workload(key.clone()))
            }),
        };
        if let Some(view) = view {
            self.show(view);
        }
    }

    fn move_in_pane(&mut self, code: KeyCode, model: &Model) {
        let rows = self.choice.rows(model);
        let at = self.places[self.pane as usize].at;
        let (at, count) = match self.pane {
            Pane::Workloads => (self.position(&rows), rows.len()),
            Pane::Nodes => (at, model.nodes.len()),
            Pane::Events => (at, model.events.len()),
        };
        let Some(at) = moved(code, at, self.page.max(1), count.saturating_sub(1)) else { return };
        self.places[self.pane as usize].at = at;
        if self.pane == Pane::Workloads {
            self.selected = rows.get(at).map(|(key, _)| (*key).to_owned());
        }
    }

    /// Where the selected workload is among these. One that is gone leaves its place to the next.
    pub(crate) fn position(&self, rows: &[(&str, &Row)]) -> usize {
        let Some(key) = &self.selected else { return 0 };
        let before = self.places[Pane::Workloads as usize].at.min(rows.len().saturating_sub(1));
        rows.iter().position(|(other, _)| other == key).unwrap_or(before)
    }
}

/// Where a key leads from a place; nowhere if it is no key that moves.
fn moved(code: KeyCode, at: usize, page: usize, last: usize) -> Option<usize> {
    Some(match code {
        KeyCode::Up | KeyCode::Char('k') => at.saturating_sub(1),
        KeyCode::Down | KeyCode::Char('j') => at.saturating_add(1).min(last),
        KeyCode::PageUp => at.saturating_sub(page),
        KeyCode::PageDown | KeyCode::Char(' ') => at.saturating_add(page).min(last),
        KeyCode::Home => 0,
        KeyCode::End => last,
        _ => return None,
    })
}
