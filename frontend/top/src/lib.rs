//! `pharos top`: shows the metrics of a server in a terminal. Reads `/metrics` alone, so it works
//! with every server that has Triton's metrics, and shows more with this server's own.

mod events;
mod exposition;
mod fetch;
mod format;
mod history;
mod models;
mod scrape;
mod screen;
mod tables;

use std::io::{self, IsTerminal, Write};
use std::sync::mpsc::{self, Receiver};
use std::thread;
use std::time::Duration;

use pharos::timeline::Instant;
use pharos_os::client::ClientTls;
use pharos_os::clock;
use ratatui::backend::TestBackend;
use ratatui::crossterm::event::{self, Event, KeyCode, KeyEvent, KeyEventKind, KeyModifiers};
use ratatui::{DefaultTerminal, Terminal};

use crate::fetch::Source;
use crate::history::History;
use crate::screen::{MAX_ROWS, View, draw, rows};

/// The time for which the program waits for a key before it looks for a new scrape.
const KEY_WAIT: Duration = Duration::from_millis(100);

/// The width of the text that `--once` prints.
const ONCE_COLUMNS: u16 = 160;

/// The result of one scrape, and the time of its end.
type Answered = (Result<String, String>, Instant);

/// What to show.
#[derive(Clone, Debug)]
pub struct Options {
    /// The URL of the metrics; scheme, port and path may be missing.
    pub url: String,
    /// The time between two scrapes.
    pub interval: Duration,
    /// Print one page as text after two scrapes, and end.
    pub once: bool,
    /// Certificates for `https`.
    pub tls: ClientTls,
}

/// Shows the metrics until the user ends the program.
///
/// # Errors
/// The URL or a certificate cannot be used, there is no terminal, or (with `once`) the server does
/// not answer.
pub fn run(options: Options) -> Result<(), String> {
    let source = Source::new(&options.url, &options.tls)?;
    let has_terminal = io::stdout().is_terminal() && io::stdin().is_terminal();
    if !options.once && !has_terminal {
        return Err("`pharos top` needs a terminal; `--once` prints one page as text".to_owned());
    }
    let mut view = View::new(source.url(), options.interval);
    let scrapes = start_scraping(source, options.interval)?;
    if options.once {
        return once(&scrapes, &view);
    }
    let mut terminal =
        ratatui::try_init().map_err(|error| format!("cannot use the terminal: {error}"))?;
    let ended = interact(&mut terminal, &scrapes, &mut view);
    ratatui::restore();
    ended.map_err(|error| format!("the terminal failed: {error}"))
}

/// Scrapes on a dedicated thread, until the receiver is dropped.
fn start_scraping(source: Source, interval: Duration) -> Result<Receiver<Answered>, String> {
    let (sender, scrapes) = mpsc::sync_channel(1);
    let failed = |error: io::Error| format!("cannot start: {error}");
    let runtime =
        tokio::runtime::Builder::new_current_thread().enable_all().build().map_err(failed)?;
    let scraping = async move {
        let mut ticks = tokio::time::interval(interval);
        ticks.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        loop {
            ticks.tick().await;
            let scrape = source.scrape().await;
            if sender.send((scrape, clock::now())).is_err() {
                return;
            }
        }
    };
    thread::Builder::new()
        .name("scrape".to_owned())
        .spawn(move || runtime.block_on(scraping))
        .map_err(failed)?;
    Ok(scrapes)
}

/// Prints one page.
fn once(scrapes: &Receiver<Answered>, view: &View) -> Result<(), String> {
    let mut history = History::default();
    for _ in 0..2 {
        let (scrape, at) = scrapes.recv().map_err(|_| "the scrapes have ended".to_owned())?;
        history.add(&scrape?, at);
    }
    let rows = rows(&history);
    let Ok(mut terminal) = Terminal::new(TestBackend::new(ONCE_COLUMNS, rows));
    let Ok(_) = terminal.draw(|frame| draw(frame, &history, &mut view.for_text()));
    let buffer = terminal.backend().buffer();
    let lines = buffer.content().chunks(usize::from(ONCE_COLUMNS)).map(|cells| {
        let line: String = cells.iter().map(ratatui::buffer::Cell::symbol).collect();
        line.trim_end().to_owned()
    });
    let mut lines: Vec<String> = lines.collect();
    if rows == MAX_ROWS {
        lines.push(format!("the page ends here, after {MAX_ROWS} rows"));
    }
    let used = lines.iter().rposition(|line| !line.is_empty()).map_or(0, |last| last + 1);
    let mut out = io::stdout().lock();
    match writeln!(out, "{}", lines.get(..used).unwrap_or_default().join("\n"))
        .and_then(|()| out.flush())
    {
        // A reader that closes the pipe early is not an error.
        Err(error) if error.kind() != io::ErrorKind::BrokenPipe => {
            Err(format!("cannot write the page: {error}"))
        }
        _ => Ok(()),
    }
}

fn interact(
    terminal: &mut DefaultTerminal,
    scrapes: &Receiver<Answered>,
    view: &mut View,
) -> io::Result<()> {
    let mut history = History::default();
    let mut changed = true;
    loop {
        // While paused, the last scrapes wait in the channel, with their times.
        if !view.paused
            && let Ok((scrape, at)) = scrapes.try_recv()
        {
            match scrape {
                Ok(text) => {
                    history.add(&text, at);
                    view.error = None;
                }
                Err(error) => view.error = Some(error),
            }
            changed = true;
        }
        if changed {
            terminal.draw(|frame| draw(frame, &history, view))?;
        }
        changed = event::poll(KEY_WAIT)?;
        if changed
            && let Event::Key(key) = event::read()?
            && key.kind != KeyEventKind::Release
            && !press(view, key)
        {
            return Ok(());
        }
    }
}

/// Handles a key. Returns `false` if it ends the program.
fn press(view: &mut View, key: KeyEvent) -> bool {
    match key.code {
        KeyCode::Char('c') if key.modifiers.contains(KeyModifiers::CONTROL) => return false,
        KeyCode::Char('q') | KeyCode::Esc => return false,
        KeyCode::Char('p' | ' ') => view.paused = !view.paused,
        KeyCode::Char('s') | KeyCode::Right => view.sort_next(1),
        KeyCode::Char('S') | KeyCode::Left => view.sort_next(-1),
        KeyCode::Char('r') => view.ascending = !view.ascending,
        KeyCode::Up | KeyCode::Char('k') => view.scroll(-1),
        KeyCode::Down | KeyCode::Char('j') => view.scroll(1),
        KeyCode::PageUp => view.scroll_pages(-1),
        KeyCode::PageDown => view.scroll_pages(1),
        KeyCode::Home => view.first = 0,
        KeyCode::End => view.scroll_to_end(),
        _ => {}
    }
    true
}

#[cfg(test)]
mod tests {
    use super::*;

    fn key(code: KeyCode) -> KeyEvent {
        KeyEvent::new(code, KeyModifiers::NONE)
    }

    #[test]
    fn keys_change_the_view_or_end_it() {
        let mut view = View::new("u", Duration::from_secs(2));
        assert!(press(&mut view, key(KeyCode::Char('p'))) && view.paused);
        assert!(press(&mut view, key(KeyCode::Char(' '))) && !view.paused);
        let before = view.sort;
        assert!(press(&mut view, key(KeyCode::Right)) && view.sort != before);
        assert!(press(&mut view, key(KeyCode::Left)) && view.sort == before);
        assert!(press(&mut view, key(KeyCode::Char('r'))) && view.ascending);
        assert!(
            press(&mut view, key(KeyCode::Down))
                && press(&mut view, key(KeyCode::PageDown))
                && view.first == 2
        );
        assert!(press(&mut view, key(KeyCode::Up)) && view.first == 1);
        assert!(press(&mut view, key(KeyCode::PageUp)) && view.first == 0);
        assert!(press(&mut view, key(KeyCode::End)) && view.first > 0);
        assert!(press(&mut view, key(KeyCode::Home)) && view.first == 0);
        assert!(press(&mut view, key(KeyCode::Up)) && view.first == 0);
        assert!(!press(&mut view, key(KeyCode::Char('q'))));
        assert!(!press(&mut view, KeyEvent::new(KeyCode::Char('c'), KeyModifiers::CONTROL)));
        assert!(press(&mut view, key(KeyCode::Char('c'))));
    }
}
