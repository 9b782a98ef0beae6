//! Draws one page.

use std::cmp::Ordering;
use std::time::Duration;

use pharos::metrics::builtin::Builtin;
use pharos::timeline::Instant;
use ratatui::Frame;
use ratatui::layout::{Alignment, Constraint, Layout, Rect};
use ratatui::style::{Color, Modifier, Style, Stylize};
use ratatui::text::{Line, Span, Text};
use ratatui::widgets::{self, Paragraph, Row, Wrap};

use crate::events::Lane;
use crate::format::{bytes, number, percent, rate, seconds};
use crate::history::History;
use crate::models::{Model, models};
use crate::tables::{Level, Table, server, tables};

/// A column of the table of models: its head, its width, its text, and its order.
struct Column {
    head: &'static str,
    width: u16,
    text: fn(&Model) -> String,
    value: fn(&Model) -> Option<f64>,
}

/// The columns after the name, the version and the instances.
const COLUMNS: [Column; 10] = [
    Column {
        head: "requests",
        width: 10,
        text: |model| rate(model.requests),
        value: |model| model.requests,
    },
    Column {
        head: "failures",
        width: 9,
        text: |model| rate(model.failures),
        value: |model| model.failures,
    },
    Column { head: "mean", width: 8, text: |model| seconds(model.mean), value: |model| model.mean },
    Column { head: "p50", width: 8, text: |model| seconds(model.p50), value: |model| model.p50 },
    Column { head: "p99", width: 8, text: |model| seconds(model.p99), value: |model| model.p99 },
    Column {
        head: "queue",
        width: 7,
        text: |model| percent(model.queue),
        value: |model| model.queue,
    },
    Column {
        head: "waiting",
        width: 8,
        text: |model| number(model.waiting),
        value: |model| model.waiting,
    },
    Column {
        head: "batch",
        width: 6,
        text: |model| number(model.batch),
        value: |model| model.batch,
    },
    Column { head: "busy", width: 7, text: |model| percent(model.busy), value: |model| model.busy },
    Column {
        head: "memory",
        width: 9,
        text: |model| bytes(model.memory),
        value: |model| model.memory,
    },
];

/// The rows of a small table, and of the events.
const SMALL: u16 = 6;

/// The choices of the user, and the error of the last scrape.
#[derive(Clone, Debug)]
pub(crate) struct View {
    url: String,
    interval: Duration,
    /// The column by which models are sorted: its position, after the name.
    pub(crate) sort: usize,
    pub(crate) ascending: bool,
    /// The first row of the table of models. Drawing the page limits it to the last rows.
    pub(crate) first: usize,
    /// The number of rows that the table of models has room for; set by drawing the page.
    room: usize,
    pub(crate) paused: bool,
    pub(crate) error: Option<String>,
    /// Whether the page has room for all rows.
    unlimited: bool,
}

impl View {
    pub(crate) fn new(url: &str, interval: Duration) -> Self {
        Self {
            url: url.to_owned(),
            interval,
            sort: 1,
            ascending: false,
            first: 0,
            room: 1,
            paused: false,
            error: None,
            unlimited: false,
        }
    }

    /// Returns the view for a page without a limit of rows.
    pub(crate) fn for_text(&self) -> Self {
        Self { unlimited: true, ..self.clone() }
    }

    /// Sorts by the next column, or the one before.
    pub(crate) fn sort_next(&mut self, step: isize) {
        let count = COLUMNS.len() + 1;
        self.sort = self.sort.wrapping_add_signed(step).wrapping_add(count) % count;
    }

    /// Moves the table of models.
    pub(crate) fn scroll(&mut self, rows: isize) {
        self.first = self.first.saturating_add_signed(rows);
    }

    /// Moves the table of models by pages of the rows that it has room for.
    pub(crate) fn scroll_pages(&mut self, pages: isize) {
        self.scroll(pages.saturating_mul(self.room.try_into().unwrap_or(isize::MAX)));
    }

    /// Moves the table of models to its last rows.
    pub(crate) fn scroll_to_end(&mut self) {
        self.first = usize::MAX;
    }

    fn order(&self, a: &Model, b: &Model) -> Ordering {
        let by_name = (&a.name, &a.version).cmp(&(&b.name, &b.version));
        let column = self.sort.checked_sub(1).and_then(|at| COLUMNS.get(at));
        let order = match column {
            None => by_name.reverse(),
            Some(column) => {
                let value = |model: &Model| (column.value)(model).unwrap_or(f64::NEG_INFINITY);
                value(a).total_cmp(&value(b))
            }
        };
        (if self.ascending { order } else { order.reverse() }).then(by_name)
    }
}

fn style(level: Level) -> Style {
    match level {
        Level::Plain => Style::new(),
        Level::Warning => Style::new().fg(Color::Yellow),
        Level::Bad => Style::new().fg(Color::Red).add_modifier(Modifier::BOLD),
    }
}

/// The most rows of a page that shows all rows: the cells of a page take kilobytes a row.
pub(crate) const MAX_ROWS: u16 = 5_000;

/// Returns the number of rows of a page that shows all rows, up to [`MAX_ROWS`].
pub(crate) fn rows(history: &History) -> u16 {
    let tables: usize = tables(history).iter().map(|table| table.rows.len() + 2).sum();
    // The head and the figures have two rows each, and the parts their titles.
    let rows = 4 + models(history).len().max(1) + 2 + tables + history.events().count().max(1) + 2;
    u16::try_from(rows).unwrap_or(u16::MAX).min(MAX_ROWS)
}

/// Draws the page.
pub(crate) fn draw(frame: &mut Frame<'_>, history: &History, view: &mut View) {
    let mut all = models(history);
    all.sort_by(|a, b| view.order(a, b));
    let small = tables(history);
    let events: Vec<Line<'_>> = events(history);
    let height = |rows: usize| {
        let rows = u16::try_from(rows).unwrap_or(u16::MAX);
        if view.unlimited { rows } else { rows.min(SMALL) }
    };
    let mut parts =
        vec![Constraint::Length(2), Constraint::Length(2), model_height(view, all.len())];
    parts.extend(small.iter().map(|table| Constraint::Length(height(table.rows.len()) + 2)));
    parts.push(Constraint::Length(height(events.len().max(1)) + 1));
    parts.push(Constraint::Length(1));
    let areas = Layout::vertical(parts).split(frame.area());
    let mut remaining = areas.iter().copied();
    let mut next = || remaining.next().unwrap_or_default();
    frame.render_widget(Paragraph::new(head(history, view)), next());
    frame.render_widget(Paragraph::new(figures(history, &all)).wrap(Wrap { trim: true }), next());
    draw_models(frame, next(), &all, view);
    for table in &small {
        draw_table(frame, next(), table);
    }
    let title = Line::from("events since the start of this program".bold());
    let none = events.is_empty().then(|| Line::from("none".dark_gray()));
    let lines: Vec<Line<'_>> = [title].into_iter().chain(none).chain(events).collect();
    frame.render_widget(Paragraph::new(lines), next());
    let keys =
        "q quit   p pause   s/S sort by another column   r reverse   ↑↓ PgUp PgDn Home End scroll";
    if !view.unlimited {
        frame.render_widget(Paragraph::new(keys.dark_gray()), next());
    }
}

fn model_height(view: &View, rows: usize) -> Constraint {
    match view.unlimited {
        true => Constraint::Length(u16::try_from(rows.max(1) + 2).unwrap_or(u16::MAX)),
        false => Constraint::Min(4),
    }
}

/// Returns the line with the server and its state, and the reason if the last scrape failed.
fn head(history: &History, view: &View) -> Vec<Line<'static>> {
    let now = history.latest();
    let build = now.and_then(|now| {
        now.list(Builtin::BuildInfo).first().map(|(key, _)| key.label("version").to_owned())
    });
    let mut line = vec!["pharos top ".bold(), Span::from(view.url.clone())];
    line.extend(build.map(|version| Span::from(format!("   version {version}"))));
    if let (Some(now), Some(started)) = (now, now.and_then(|now| now.one(Builtin::ProcessStart))) {
        let up = pharos_os::clock::wall_ms() as f64 / 1e3 - started;
        line.push(Span::from(format!(
            "   up {}   {} series",
            seconds(Some(up.max(0.0))),
            now.len()
        )));
    }
    let state = match (now, view.paused) {
        (None, _) => Span::from("   waiting for the first answer").yellow(),
        (_, true) => Span::from("   paused").yellow(),
        _ => Span::from(format!("   every {}", seconds(Some(view.interval.as_secs_f64()))))
            .dark_gray(),
    };
    line.push(state);
    let error = view.error.iter().map(|error| Line::from(error.clone().red()));
    [Line::from(line)].into_iter().chain(error).collect()
}

/// Returns the figures of the whole server.
fn figures(history: &History, models: &[Model]) -> Line<'static> {
    let spans = server(history, models).into_iter().flat_map(|(name, (text, level))| {
        [
            Span::from(format!("{name} ")).dark_gray(),
            Span::styled(text, style(level).add_modifier(Modifier::BOLD)),
            Span::from("   "),
        ]
    });
    Line::from(spans.collect::<Vec<_>>())
}

/// The minimum width of the names of models, and the width of the two columns behind them.
const NAMES: u16 = 16;
const NUMBERS: u16 = 7;

/// Returns at most `width` characters of a name, without its beginning: the names of models in a
/// repository differ at their ends.
fn shortened(name: &str, width: u16) -> String {
    let excess = name.chars().count().saturating_sub(width.into());
    match excess {
        0 => name.to_owned(),
        _ => format!("…{}", name.chars().skip(excess + 1).collect::<String>()),
    }
}

fn draw_models(frame: &mut Frame<'_>, area: Rect, models: &[Model], view: &mut View) {
    view.room = usize::from(area.height.saturating_sub(1)).max(1);
    view.first = view.first.min(models.len().saturating_sub(view.room));
    let arrow = |at: usize| match (view.sort == at && !view.unlimited, view.ascending) {
        (true, true) => "▲",
        (true, false) => "▼",
        (false, _) => "",
    };
    let right = |text: String| Text::from(text).alignment(Alignment::Right);
    let mut heads = vec![
        Text::from(format!("model{}", arrow(0))),
        right("version".to_owned()),
        right("ready".to_owned()),
    ];
    heads.extend(
        COLUMNS.iter().zip(1..).map(|(column, at)| right(format!("{}{}", column.head, arrow(at)))),
    );
    let others: u16 = COLUMNS.iter().map(|column| column.width + 1).sum();
    let names = area.width.saturating_sub(others + 2 * (NUMBERS + 1)).max(NAMES);
    // A row takes kilobytes, so only the rows on the screen are made.
    let rows = models.iter().skip(view.first).take(view.room).map(|model| {
        let ready = match (model.ready, model.instances) {
            (Some(ready), Some(all)) => format!("{}/{}", number(Some(ready)), number(Some(all))),
            _ if model.is_loading => match model.loaded_share {
                None => "loading".to_owned(),
                share => percent(share),
            },
            _ if model.load_failed && model.version.is_empty() => "failed".to_owned(),
            _ => crate::format::NONE.to_owned(),
        };
        let mut cells = vec![
            Text::from(shortened(&model.name, names)),
            right(model.version.clone()),
            right(ready),
        ];
        cells.extend(COLUMNS.iter().map(|column| right((column.text)(model))));
        Row::new(cells).style(style(if model.is_troubled() { Level::Bad } else { Level::Plain }))
    });
    let mut widths =
        vec![Constraint::Min(NAMES), Constraint::Length(NUMBERS), Constraint::Length(NUMBERS)];
    widths.extend(COLUMNS.iter().map(|column| Constraint::Length(column.width)));
    let head =
        Row::new(heads).style(Style::new().add_modifier(Modifier::BOLD | Modifier::UNDERLINED));
    frame.render_widget(widgets::Table::new(rows, widths).header(head).column_spacing(1), area);
}

fn draw_table(frame: &mut Frame<'_>, area: Rect, table: &Table) {
    // The first columns have names, which may be long.
    let texts = if table.title == "objectives" { 2 } else { 1 };
    let text = |at: usize, text: String| {
        Text::from(text).alignment(if at < texts { Alignment::Left } else { Alignment::Right })
    };
    let heads = table.heads.iter().enumerate().map(|(at, head)| text(at, (*head).to_owned()));
    let rows = table.rows.iter().map(|row| {
        let cells = row.iter().enumerate();
        let cells =
            cells.map(|(at, (content, level))| text(at, content.clone()).style(style(*level)));
        Row::new(cells.collect::<Vec<_>>())
    });
    let columns = 0..table.heads.len();
    let width = if columns.len() > 7 { 11 } else { 16 };
    let widths =
        columns.map(|at| if at < texts { Constraint::Min(16) } else { Constraint::Length(width) });
    let head = Row::new(heads.collect::<Vec<_>>())
        .style(Style::new().add_modifier(Modifier::BOLD | Modifier::UNDERLINED));
    frame.render_widget(widgets::Table::new(rows, widths).header(head).column_spacing(1), area);
}

/// Returns a line for each event, latest first.
fn events(history: &History) -> Vec<Line<'static>> {
    let now = history.latest().map_or(Instant::default(), |now| now.at);
    let lines = history.events().map(|event| {
        let color = match event.lane {
            Lane::Server => Color::Gray,
            Lane::Models => Color::Blue,
            Lane::Instances => Color::Yellow,
            Lane::Refusals => Color::Red,
        };
        let ago = format!("{:>8} ago  ", seconds(Some((now - event.from).as_secs_f64().round())));
        Line::from(vec![Span::from(ago).dark_gray(), Span::from(event.shown()).fg(color)])
    });
    lines.collect()
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use ratatui::Terminal;
    use ratatui::backend::TestBackend;

    use super::*;

    /// Returns the lines of a page of this size.
    fn page(history: &History, view: &View, width: u16, height: u16) -> Vec<String> {
        let mut terminal = Terminal::new(TestBackend::new(width, height)).unwrap();
        terminal.draw(|frame| draw(frame, history, &mut view.clone())).unwrap();
        let cells = terminal.backend().buffer().content();
        let line = |cells: &[ratatui::buffer::Cell]| {
            cells.iter().map(ratatui::buffer::Cell::symbol).collect::<String>()
        };
        cells.chunks(width.into()).map(|cells| line(cells).trim_end().to_owned()).collect()
    }

    fn view() -> View {
        View::new("http://host:8082/metrics", Duration::from_secs(2))
    }

    fn scrape(n: u64) -> String {
        let mut text = "process_start_time_seconds 1\npharos_build_info{version=\"9\"} \
                        1\nCPUUtilization 95\n"
            .to_owned();
        for (model, factor) in [("slow", 1), ("quick", 10)] {
            text += &format!(
                "nv_inference_request_success{{model=\"{model}\",version=\"1\"}} {}\n",
                factor * n
            );
        }
        for tenant in ["a", "b\u{1b}[31m"] {
            text += &format!(
                "pharos_tenant_requests_total{{model=\"slow\",version=\"1\",tenant=\"{tenant}\"}} \
                 {n}\n"
            );
        }
        let slo = "slo=\"fast\",sli=\"latency\",model=\"slow\",version=\"1\"";
        text += &format!(
            "pharos_slo_good_requests_total{{{slo}}} 0\npharos_slo_requests_total{{{slo}}} {n}\n"
        );
        text += &format!(
            "pharos_slo_objective_ratio{{{slo}}} \
             0.9\npharos_slo_error_budget_remaining_ratio{{{slo}}} -9\n"
        );
        text
    }

    fn history() -> History {
        let mut history = History::default();
        for second in 0..3 {
            history.add(&scrape(2 * second), Instant(second * 1_000_000_000));
        }
        history
    }

    #[test]
    fn a_page_has_all_parts() {
        let lines = page(&history(), &view(), 140, 30);
        let text = lines.join("\n");
        assert!(
            lines[0].starts_with("pharos top http://host:8082/metrics   version 9   up "),
            "{text}"
        );
        assert!(text.contains("requests 22/s") && text.contains("CPU 95 %"), "{text}");
        let of = |name: &str| lines.iter().position(|line| line.starts_with(name)).unwrap();
        assert!(of("quick") < of("slow"), "{text}");
        assert!(lines[of("fast latency")].contains("-900 %"), "{text}");
        assert!(lines[of("a ")].contains("2/s"), "{text}");
        assert!(!text.contains('\u{1b}'), "control characters of a label reach the terminal");
        assert!(text.contains("events since the start of this program\nnone"), "{text}");
        assert!(lines.last().unwrap().starts_with("q quit"));
    }

    #[test]
    fn language_models_have_a_table() {
        let of = "model=\"chat\",version=\"1\"";
        let scrape = |n: u64| {
            let mut text = format!(
                "pharos_llm_prompt_tokens_total{{{of}}} {}\npharos_llm_generation_tokens_total{{{of}}} \
                 {n}\nnv_inference_pending_request_count{{{of}}} 3\n",
                10 * n
            );
            for (le, count) in [("0.5", n), ("1", 2 * n), ("+Inf", 2 * n)] {
                for name in ["time_to_first_token", "inter_token_latency"] {
                    text +=
                        &format!("pharos_llm_{name}_seconds_bucket{{{of},le=\"{le}\"}} {count}\n");
                }
            }
            for instance in [0, 1] {
                for (name, value) in [
                    ("running_requests", 4.0),
                    ("waiting_requests", 1.0),
                    ("kv_cache_usage_ratio", 0.95),
                ] {
                    text += &format!("pharos_llm_{name}{{{of},instance=\"{instance}\"}} {value}\n");
                }
            }
            text
        };
        let mut history = History::default();
        (0..3).for_each(|second| history.add(&scrape(6 * second), Instant(second * 1_000_000_000)));
        let lines = page(&history, &view(), 140, 30);
        let row = lines.iter().find(|line| line.starts_with("chat/1")).unwrap();
        let cells: Vec<&str> =
            row.split("  ").map(str::trim).filter(|cell| !cell.is_empty()).collect();
        let expected = ["chat/1", "60/s", "6/s", "500 ms", "990 ms", "500 ms", "8", "5", "95 %"];
        assert_eq!(cells, expected, "{lines:#?}");
    }

    #[test]
    fn long_names_keep_their_ends() {
        let mut history = History::default();
        let models =
            ["/a/repository/of/many/models/one", "/a/repository/of/many/models/two", "short"];
        let text = models.map(|name| {
            format!("nv_inference_request_success{{model=\"{name}\",version=\"1\"}} 1\n")
        });
        history.add(&text.concat(), Instant(0));
        let others = usize::from(COLUMNS.iter().map(|column| column.width + 1).sum::<u16>()) + 16;
        for (width, expected) in [
            (17, ["…/many/models/one", "…/many/models/two"]),
            (32, ["/a/repository/of/many/models/one", "/a/repository/of/many/models/two"]),
        ] {
            let page = page(&history, &view(), u16::try_from(others + width).unwrap(), 30);
            for name in expected.iter().chain(&["short"]) {
                assert!(
                    page.iter().any(|line| line.starts_with(&format!("{name} "))),
                    "{name}: {page:#?}"
                );
            }
        }
    }

    #[test]
    fn models_are_sorted_and_scrolled() {
        let history = history();
        let first = |view: &View| {
            let lines = page(&history, view, 140, 30);
            let at = lines.iter().position(|line| line.starts_with("model")).unwrap();
            lines[at + 1].split_whitespace().next().unwrap().to_owned()
        };
        let mut view = view();
        assert_eq!(first(&view), "quick");
        view.ascending = true;
        assert_eq!(first(&view), "slow");
        view.sort = 0;
        assert_eq!(first(&view), "slow");
        view.ascending = false;
        assert_eq!(first(&view), "quick");
        view.first = 100;
        assert_eq!(first(&view), "quick", "all rows are visible");
    }

    #[test]
    fn pages_have_the_rows_of_the_screen_and_end_at_the_last_model() {
        let mut history = History::default();
        let models: String = (0..95)
            .map(|n| format!("nv_inference_request_success{{model=\"m{n:02}\",version=\"1\"}} 1\n"))
            .collect();
        history.add(&models, Instant(0));
        let mut terminal = Terminal::new(TestBackend::new(140, 30)).unwrap();
        let mut view = view();
        let mut first = |view: &mut View, change: fn(&mut View)| {
            change(view);
            terminal.draw(|frame| draw(frame, &history, view)).unwrap();
            view.first
        };
        assert_eq!(first(&mut view, |_| ()), 0);
        let room = view.room;
        assert!((15..30).contains(&room), "{room}");
        assert_eq!(first(&mut view, |view| view.scroll_pages(1)), room);
        for _ in 0..10 {
            first(&mut view, |view| view.scroll_pages(1));
        }
        assert_eq!(view.first, 95 - room, "the last page is full");
        assert_eq!(first(&mut view, |view| view.scroll_pages(-1)), 95 - 2 * room);
        assert_eq!(first(&mut view, View::scroll_to_end), 95 - room);
        assert_eq!(first(&mut view, |view| view.scroll(-1)), 94 - room);
        assert_eq!(first(&mut view, |view| view.scroll_pages(-10)), 0);
    }

    #[test]
    fn small_terminals_and_missing_answers_are_no_error() {
        for (width, height) in [(1, 1), (20, 3), (80, 10), (200, 100)] {
            page(&history(), &view(), width, height);
            page(&History::default(), &view(), width, height);
        }
        let mut view = view();
        assert!(
            page(&History::default(), &view, 120, 9)[0].contains("waiting for the first answer")
        );
        view.error = Some("cannot read it".to_owned());
        assert_eq!(page(&history(), &view, 120, 9)[1], "cannot read it");
    }

    #[test]
    fn all_rows_fit_on_an_unlimited_page() {
        let mut history = History::default();
        let models: String = (0..1000)
            .map(|n| format!("nv_inference_request_success{{model=\"m{n}\",version=\"1\"}} 1\n"))
            .collect();
        history.add(&models, Instant(0));
        let lines = page(&history, &view().for_text(), 140, rows(&history));
        assert_eq!(
            lines.iter().filter(|line| line.starts_with('m') && !line.starts_with("model")).count(),
            1000
        );
        assert!(lines.iter().any(|line| line == "none"), "the part after the models is there too");
    }
}
