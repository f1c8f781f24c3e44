//! Rows as a table: medians over repeats, and how far apart they lie.

use comfy_table::{CellAlignment, Table, presets::ASCII_MARKDOWN};
use k3_shared::size::Bytes;

use super::{Group, Row, Spread, groups, settled};

/// A table of every row's medians, the spread from the smallest to the largest beside the seconds, and what they were measured on.
pub fn table(rows: &[Row]) -> String {
    let rows = &settled(rows);
    let mut table = Table::new();
    table.load_style(ASCII_MARKDOWN);
    table.set_header([
        "row",
        "n",
        "s/token",
        "min..max",
        "read/token",
        "trunk",
        "head",
        "experts",
        "hits",
        "limit",
        "of limit",
        "bound by",
        "peak of plan",
    ]);
    let groups = groups(rows);
    for group in &groups {
        table.add_row(cells(group));
    }
    for column in table.column_iter_mut().skip(1) {
        column.set_cell_alignment(CellAlignment::Right);
    }
    let mut text = format!("{table}\n");
    for line in facts(rows) {
        text.push_str(&line);
        text.push('\n');
    }
    text
}

fn cells(group: &Group<'_>) -> Vec<String> {
    let seconds = group.spread(Row::seconds_per_token);
    let bytes = |figure: fn(&Row) -> f64| {
        #[expect(
            clippy::cast_possible_truncation,
            clippy::cast_sign_loss,
            reason = "a number of bytes"
        )]
        let bytes = group.spread(figure).median as u64;
        Bytes(bytes).to_string()
    };
    let limit = group.known(|row| row.limit().map(super::Limit::seconds));
    let ratio = group.known(|row| Some(row.seconds_per_token() / row.limit()?.seconds()));
    let known = |value: Option<Spread>, decimals| {
        value.map_or("-".to_owned(), |s| format!("{:.decimals$}", s.median))
    };
    let hits = group.spread(|row| {
        let token = &row.report.token;
        token.expert_hits / token.expert_requests.max(1.0)
    });
    let peak = group.spread(|row| {
        row.report.peak_rss_bytes as f64 / row.report.planned_peak_bytes.max(1) as f64
    });
    vec![
        group.name.to_owned(),
        seconds.count.to_string(),
        format!("{:.3}", seconds.median),
        format!("{:.3}..{:.3}", seconds.least, seconds.most),
        bytes(|row| row.report.token.requested_bytes),
        bytes(|row| row.report.token.trunk_bytes),
        bytes(|row| row.report.token.head_bytes),
        bytes(|row| row.report.token.expert_bytes),
        format!("{:.1} %", 100.0 * hits.median),
        known(limit, 3),
        known(ratio, 2),
        group.typical().report.bound_by.clone(),
        format!("{:.1} %", 100.0 * peak.most),
    ]
}

/// What the rows were measured on, each once: machines, trees, caps, and the speeds of the probes.
pub(super) fn facts(rows: &[Row]) -> Vec<String> {
    let machine = |row: &Row| {
        let machine = &row.machine;
        format!(
            "{}, {} cores, Linux {}",
            machine.cpu, machine.cores, machine.kernel
        )
    };
    let tree = |row: &Row| row.tree.clone();
    // The number of a cgroup or process is another in every row.
    let cap = |row: &Row| row.cap.clone();
    let mut lines = vec![
        format!("machine  {}", distinct(rows, machine)),
        format!("tree     {}", distinct(rows, tree)),
        format!("cap      {}", distinct(rows, cap)),
    ];
    let speed = |name: &str, figure: fn(&Row) -> Option<f64>, how: &str| {
        let values: Vec<f64> = rows.iter().filter_map(figure).collect();
        let spread = (!values.is_empty()).then(|| Spread::of(&values))?;
        Some(format!(
            "{name:<8} {:.2} GB/s ({:.2}..{:.2}), {how}",
            spread.median / 1e9,
            spread.least / 1e9,
            spread.most / 1e9
        ))
    };
    lines.extend(speed(
        "disk",
        |row| row.plan.disk_bytes_per_second,
        "each round's probe, or its fastest row",
    ));
    lines.extend(speed(
        "memory",
        |row| row.plan.memory_bytes_per_second,
        "each round's probe",
    ));
    if let Some(most) = rows.iter().map(|row| row.report.peak_rss_bytes).max() {
        lines.push(format!("peak     at most {}", Bytes(most)));
    }
    lines
}

/// The different texts of the rows, in order, joined.
fn distinct(rows: &[Row], text: impl Fn(&Row) -> String) -> String {
    let mut seen: Vec<String> = Vec::new();
    for text in rows.iter().map(text) {
        if !seen.contains(&text) {
            seen.push(text);
        }
    }
    seen.join("; ")
}

#[cfg(test)]
mod tests {
    use super::{super::make::tests::row, *};

    #[test]
    fn repeats_are_one_line_with_median_and_spread() {
        let mut rows = vec![
            row("1 GB", 1),
            row("1 GB", 2),
            row("1 GB", 3),
            row("2 GB", 1),
        ];
        rows[1].report.decode_seconds = vec![2.5];
        rows[2].report.decode_seconds = vec![1.5];
        let text = table(&rows);
        let line = text.lines().find(|line| line.contains("1 GB")).unwrap();
        for cell in [
            " 3 ",
            " 2.000 ",
            " 1.500..2.500 ",
            " 5.70 GB ",
            " 1.6 % ",
            " 1.900 ",
            " disk ",
            " 96.0 % ",
        ] {
            assert!(line.contains(cell), "no {cell:?} in {line}");
        }
        assert_eq!(text.lines().filter(|line| line.contains("2 GB")).count(), 1);
    }

    #[test]
    fn rows_of_several_trees_say_so() {
        let mut rows = vec![row("a", 1), row("b", 1), row("c", 1)];
        rows[2].tree = "later".to_owned();
        assert!(table(&rows).contains("tree     0123456789ab; later"));
    }
}
