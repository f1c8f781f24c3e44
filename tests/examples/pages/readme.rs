//! The blocks of the README that are written by programs: what stands between a comment that says what it is and `<!-- end -->`.
//!
//! `<!-- flags TOOL -->` is a tool's command line; `<!-- plans SPEED... -->` what the planner says of the release at these disk
//! speeds; `<!-- from FILE -->` the table of a file of measured rows. Each is a function of this tree alone, not of the machine.

use std::{fmt::Write as _, path::Path};

use anyhow::{Context as _, bail, ensure};
use clap::{Command, Parser as _};
use k3_shared::{formats::plan::Plans, size::Bytes};
use k3_tests::rows;

/// The end of every block.
const END: &str = "<!-- end -->";

/// Budgets of the planner's table.
const BUDGETS: &str = "floor,8G,32G,64G,96G,128G,224G";

/// `text` with every block written again, and how many there are; files are below `root`.
///
/// # Errors
/// If a block has no end, is of no known kind, or what it is made from cannot be had.
pub(crate) fn update(text: &str, root: &Path) -> anyhow::Result<(String, usize)> {
    let (mut out, mut count) = (String::new(), 0);
    let mut lines = text.lines();
    while let Some(line) = lines.next() {
        let _ = writeln!(out, "{line}");
        let Some(block) = block(line, root)? else {
            continue;
        };
        ensure!(lines.any(|line| line == END), "{line}: no {END} after it");
        let _ = writeln!(out, "{block}{END}");
        count += 1;
    }
    Ok((out, count))
}

/// What belongs under a line, if the line begins a block.
fn block(line: &str, root: &Path) -> anyhow::Result<Option<String>> {
    let inner = line
        .strip_prefix("<!-- ")
        .and_then(|l| l.strip_suffix(" -->"));
    let Some((kind, what)) = inner.and_then(|inner| inner.split_once(' ')) else {
        return Ok(None);
    };
    match kind {
        "flags" => {
            let commands = super::pages::commands();
            let command = commands.iter().find(|c| c.get_name() == what);
            let command = command.with_context(|| format!("{line}: no such tool"))?;
            Ok(Some(flags(command)))
        }
        "plans" => {
            let speeds: Vec<&str> = what.split(' ').collect();
            plans(&speeds).map(Some)
        }
        "from" => {
            let rows = rows::read(&root.join(what)).context(what.to_owned())?;
            ensure!(!rows.is_empty(), "{line}: no rows in it");
            Ok(Some(rows::table(&rows)))
        }
        _ => bail!("{line}: not a kind of block"),
    }
}

/// How a tool is called, and a line for each of its flags.
fn flags(command: &Command) -> String {
    let mut command = command.clone();
    command.build();
    let usage = command.render_usage().to_string();
    let mut text = format!("```\n{}\n", usage.trim_start_matches("Usage: "));
    let shown = command.get_arguments().filter(|arg| !arg.is_hide_set());
    let shown = shown.filter(|arg| !matches!(arg.get_id().as_str(), "help" | "version"));
    for arg in shown {
        let names = match (arg.get_short(), arg.get_long()) {
            (Some(short), Some(long)) => format!("-{short}, --{long}"),
            (_, Some(long)) => format!("--{long}"),
            _ => continue,
        };
        let takes = arg.get_action().takes_values();
        let values = arg.get_value_names().filter(|_| takes).unwrap_or_default();
        let names = values
            .iter()
            .fold(names, |names, value| format!("{names} {value}"));
        let help = arg.get_help().map(ToString::to_string).unwrap_or_default();
        let _ = writeln!(text, "  {names:<28} {}", brief(&help));
    }
    text + "```\n"
}

/// What fits on a line: the text up to its first colon, semicolon or full stop, without backquotes.
fn brief(help: &str) -> String {
    let ends = [": ", "; ", ". ", " [default", " (default"];
    let end = ends.iter().filter_map(|end| help.find(end)).min();
    help[..end.unwrap_or(help.len())].replace('`', "")
}

/// Budgets down, disk speeds across.
fn plans(speeds: &[&str]) -> anyhow::Result<String> {
    let made: Vec<Plans> = speeds
        .iter()
        .map(|speed| plan(speed))
        .collect::<Result<_, _>>()?;
    let first = made.first().context("no disk speed")?;
    let mut text = String::from("| budget | trunk in memory | expert slots | read for a token |");
    for speed in speeds {
        let speed: Bytes = speed.parse()?;
        let _ = write!(text, " s/token at {:.0} GB/s |", speed.0 as f64 / 1e9);
    }
    let _ = writeln!(text, "\n|{}", "---|".repeat(4 + speeds.len()));
    for (index, plan) in first.plans.iter().enumerate() {
        let predicted = &plan.predicted;
        let read = predicted.trunk_bytes_per_token
            + predicted.head_bytes_per_token
            + predicted.expert_bytes_per_token;
        let _ = write!(
            text,
            "| {} | {} | {} | {} |",
            Bytes(plan.budget_bytes),
            Bytes(plan.pinned_trunk_bytes),
            plan.expert_slots,
            Bytes(read)
        );
        for plans in &made {
            let seconds = plans
                .plans
                .get(index)
                .and_then(|p| p.predicted.seconds_per_token);
            let _ = write!(text, " {:.1} |", seconds.context("no time was predicted")?);
        }
        text.push('\n');
    }
    Ok(text)
}

/// Plans of the release on a machine that is named whole, so that the table is the same wherever it is made.
fn plan(disk_speed: &str) -> anyhow::Result<Plans> {
    let line = "k3-plan -q --census kimi-k3 --threads 8 --memory-speed 40G --probe-cache none";
    let line = line
        .split(' ')
        .chain(["--budget", BUDGETS, "--disk-speed", disk_speed]);
    let mut out = Vec::new();
    k3_plan::run(&k3_plan::Cli::try_parse_from(line)?, &mut out)?;
    Ok(serde_json::from_slice(&out)?)
}
