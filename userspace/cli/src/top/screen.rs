//! State of the screen, and the effects of keys.

use ratatui::crossterm::event::{KeyCode, KeyEvent, KeyModifiers};

use super::{
    draw::Palette,
    model::{TopModel, WorkloadRow},
};
use crate::args::WorkloadListArgs;

/// Action after a key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum KeyAction {
    Draw,
    Quit,
    Suspend,
}

/// A part of the screen that can have the focus.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum Pane {
    #[default]
    Workloads,
    Nodes,
    Events,
}

/// View that fills the screen.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) enum View {
    /// All panes: nodes, workloads, events.
    #[default]
    Lists,
    /// Details of a workload, by its key.
    Workload(String),
    /// Details of a node.
    Node(u32),
    Help,
}

/// Cursor in a pane.
#[derive(Debug, Default)]
pub(crate) struct PaneCursor {
    /// Index of the selected line.
    pub(crate) at: usize,
    /// Index of the first visible line.
    pub(crate) first_visible: usize,
}

/// State of the screen.
#[derive(Debug, Default)]
pub(crate) struct Screen {
    pub(crate) list: WorkloadListArgs,
    pub(crate) palette: Palette,
    pub(crate) view: View,
    pub(crate) pane: Pane,
    /// Key of the selected workload. Until the user selects one, the first workload is selected.
    pub(crate) selected: Option<String>,
    /// Cursors by [`Pane`]. For workloads, the cursor is the fallback when the selected workload disappears.
    pub(crate) cursors: [PaneCursor; 3],
    /// Index of the first visible line of a view.
    pub(crate) scrolled: usize,
    /// Number of lines that the pane or the view showed last; 0 before the first drawing.
    pub(crate) page: usize,
    /// True while the user edits the filter.
    pub(crate) is_filtering: bool,
}

impl Screen {
    /// Returns whether a key is text here or part of a combination, so that it is no command.
    pub(crate) fn takes_text(&self, key: KeyEvent) -> bool {
        self.is_filtering || key.modifiers.contains(KeyModifiers::CONTROL)
    }

    /// Handles a key.
    pub(crate) fn handle_key(&mut self, key: KeyEvent, model: &TopModel) -> KeyAction {
        if key.modifiers.contains(KeyModifiers::CONTROL) {
            match key.code {
                KeyCode::Char('c') => return KeyAction::Quit,
                KeyCode::Char('z') => return KeyAction::Suspend,
                KeyCode::Char('u') if self.is_filtering => self.list.filter.clear(),
                _ => {}
            }
            return KeyAction::Draw;
        }
        if self.is_filtering {
            self.edit_filter(key.code);
            return KeyAction::Draw;
        }
        match (key.code, &self.view) {
            (KeyCode::Char('q'), View::Lists) => return KeyAction::Quit,
            (KeyCode::Char('q') | KeyCode::Esc | KeyCode::Left | KeyCode::Backspace, view)
                if *view != View::Lists =>
            {
                self.open(View::Lists);
            }
            (KeyCode::Char('?' | 'h') | KeyCode::F(1), View::Help) => self.open(View::Lists),
            (KeyCode::Char('?' | 'h') | KeyCode::F(1), _) => self.open(View::Help),
            (code, View::Lists) => self.lists_key(code, model),
            (code, _) => {
                let page = self.page.max(1);
                self.scrolled =
                    index_after(code, self.scrolled, page, usize::MAX / 2).unwrap_or(self.scrolled);
            }
        }
        KeyAction::Draw
    }

    fn open(&mut self, view: View) {
        self.view = view;
        self.scrolled = 0;
    }

    fn edit_filter(&mut self, code: KeyCode) {
        match code {
            KeyCode::Enter => self.is_filtering = false,
            KeyCode::Esc => {
                self.is_filtering = false;
                self.list.filter.clear();
            }
            KeyCode::Backspace => drop(self.list.filter.pop()),
            KeyCode::Char(c) if self.list.filter.len() < 256 => self.list.filter.push(c),
            _ => {}
        }
    }

    fn lists_key(&mut self, code: KeyCode, model: &TopModel) {
        match code {
            KeyCode::Char('/') => {
                self.is_filtering = true;
                self.pane = Pane::Workloads;
            }
            KeyCode::Esc => self.list.filter.clear(),
            KeyCode::Char('s' | '>') => self.list.sort_by_next(false),
            KeyCode::Char('S' | '<') => self.list.sort_by_next(true),
            KeyCode::Char('r') => self.list.reversed = !self.list.reversed,
            KeyCode::Char('g') => self.list.guaranteed = !self.list.guaranteed,
            KeyCode::Tab | KeyCode::BackTab => {
                let all = [Pane::Workloads, Pane::Nodes, Pane::Events];
                let step = if code == KeyCode::Tab { 1 } else { all.len() - 1 };
                self.pane = all[(self.pane as usize + step) % all.len()];
            }
            KeyCode::Enter | KeyCode::Right => self.open_selected(model),
            code => self.move_in_pane(code, model),
        }
    }

    fn open_selected(&mut self, model: &TopModel) {
        let at = self.cursors[self.pane as usize].at;
        let view = match self.pane {
            Pane::Workloads => {
                let rows = self.list.rows(model);
                rows.get(self.position(&rows)).map(|(key, _)| View::Workload((*key).to_owned()))
            }
            Pane::Nodes => model.nodes.get(at).map(|node| View::Node(node.node)),
            // The event's workload, if it still exists.
            Pane::Events => model.events.get(at).and_then(|event| {
                let name = event.workload.as_ref()?;
                let (key, _) = model.rows.iter().find(|(_, row)| row.is_called(name))?;
                Some(View::Workload(key.clone()))
            }),
        };
        if let Some(view) = view {
            self.open(view);
        }
    }

    fn move_in_pane(&mut self, code: KeyCode, model: &TopModel) {
        let rows = self.list.rows(model);
        let at = self.cursors[self.pane as usize].at;
        let (at, count) = match self.pane {
            Pane::Workloads => (self.position(&rows), rows.len()),
            Pane::Nodes => (at, model.nodes.len()),
            Pane::Events => (at, model.events.len()),
        };
        let Some(at) = index_after(code, at, self.page.max(1), count.saturating_sub(1)) else { return };
        self.cursors[self.pane as usize].at = at;
        if self.pane == Pane::Workloads {
            self.selected = rows.get(at).map(|(key, _)| (*key).to_owned());
        }
    }

    /// Returns the index of the selected workload. If it no longer exists, the workload at its former place is
    /// selected.
    pub(crate) fn position(&self, rows: &[(&str, &WorkloadRow)]) -> usize {
        let Some(key) = &self.selected else { return 0 };
        let before = self.cursors[Pane::Workloads as usize].at.min(rows.len().saturating_sub(1));
        rows.iter().position(|(other, _)| other == key).unwrap_or(before)
    }
}

/// Returns the index that a key moves to; `None` if the key does not move.
fn index_after(code: KeyCode, at: usize, page: usize, last: usize) -> Option<usize> {
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
