//! What the user looks at, and what the keys do.

use ratatui::crossterm::event::{KeyCode, KeyEvent, KeyModifiers};

use super::{draw::Paint, list::Choice, model::Model};

/// What comes after a key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Then {
    Draw,
    Quit,
    Suspend,
}

/// A part of the screen that keys move in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Pane {
    Workloads,
    Nodes,
    Events,
}

/// What takes the screen.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum View {
    /// Nodes, workloads, events.
    Lists,
    /// A workload in full, by its key.
    Workload(String),
    /// A node in full.
    Node(u32),
    Help,
}

/// What is shown.
#[derive(Debug)]
pub(crate) struct Screen {
    pub(crate) choice: Choice,
    pub(crate) paint: Paint,
    pub(crate) view: View,
    pub(crate) pane: Pane,
    /// The workload that is selected, by its key; the first until one is.
    pub(crate) selected: Option<String>,
    /// Where the selected workload was, for when it goes.
    pub(crate) selected_at: usize,
    pub(crate) node: usize,
    pub(crate) event: usize,
    /// The first line that is shown of what does not fit: of the workloads, the nodes, the events, a view.
    pub(crate) workloads_from: usize,
    pub(crate) nodes_from: usize,
    pub(crate) scrolled: usize,
    /// Lines that the pane or the view showed last.
    pub(crate) page: usize,
    /// Whether the filter is being written.
    pub(crate) is_filtering: bool,
}

impl Screen {
    pub(crate) fn new(choice: Choice, paint: Paint) -> Self {
        Self {
            choice,
            paint,
            view: View::Lists,
            pane: Pane::Workloads,
            selected: None,
            selected_at: 0,
            node: 0,
            event: 0,
            workloads_from: 0,
            nodes_from: 0,
            scrolled: 0,
            page: 1,
            is_filtering: false,
        }
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
            KeyCode::Tab => {
                self.pane = match self.pane {
                    Pane::Workloads => Pane::Nodes,
                    Pane::Nodes => Pane::Events,
                    Pane::Events => Pane::Workloads,
                }
            }
            KeyCode::BackTab => {
                self.pane = match self.pane {
                    Pane::Workloads => Pane::Events,
                    Pane::Nodes => Pane::Workloads,
                    Pane::Events => Pane::Nodes,
                }
            }
            KeyCode::Enter | KeyCode::Right => self.look_into(model),
            code => self.move_in_pane(code, model),
        }
    }

    fn look_into(&mut self, model: &Model) {
        match self.pane {
            Pane::Workloads => {
                let rows = self.choice.rows(model);
                if let Some((key, _)) = rows.get(self.position(&rows)) {
                    self.show(View::Workload((*key).to_owned()));
                }
            }
            Pane::Nodes => {
                if let Some(node) = model.nodes.get(self.node) {
                    self.show(View::Node(node.node));
                }
            }
            Pane::Events => {
                // Of the workload that it is about, if that is still there.
                let name = model.events.get(self.event).and_then(|event| event.workload.as_ref());
                let about = name.and_then(|name| {
                    let is_it = |row: &super::model::Row| {
                        row.workload.workload == *name
                            || row.allocation.as_ref().is_some_and(|held| held.name == *name)
                    };
                    model.rows.iter().find(|(_, row)| is_it(row))
                });
                if let Some((key, _)) = about {
                    self.show(View::Workload(key.clone()));
                }
            }
        }
    }

    fn move_in_pane(&mut self, code: KeyCode, model: &Model) {
        let page = self.page.max(1);
        match self.pane {
            Pane::Workloads => {
                let rows = self.choice.rows(model);
                if let Some(at) = moved(code, self.position(&rows), page, rows.len().saturating_sub(1)) {
                    self.selected_at = at;
                    self.selected = rows.get(at).map(|(key, _)| (*key).to_owned());
                }
            }
            Pane::Nodes => {
                self.node =
                    moved(code, self.node, page, model.nodes.len().saturating_sub(1)).unwrap_or(self.node);
            }
            Pane::Events => {
                let last = model.events.len().saturating_sub(1);
                self.event = moved(code, self.event, page, last).unwrap_or(self.event);
            }
        }
    }

    /// Where the selected workload is among these. One that is gone leaves its place to the next.
    pub(crate) fn position(&self, rows: &[(&str, &super::model::Row)]) -> usize {
        let last = rows.len().saturating_sub(1);
        match &self.selected {
            None => 0,
            Some(key) => {
                rows.iter().position(|(other, _)| other == key).unwrap_or_else(|| self.selected_at.min(last))
            }
        }
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
