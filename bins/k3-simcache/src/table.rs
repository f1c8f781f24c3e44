//! The result as text.

use std::io::{self, Write};

use comfy_table::{CellAlignment, Table, presets::ASCII_MARKDOWN};
use k3_shared::cache::PolicyKind;

use crate::{CacheSize, Counted, Phase, Report, Row};

/// Numbers of tokens whose union is printed; JSON has them all.
const UNIONS: [usize; 8] = [1, 2, 3, 4, 6, 8, 12, 16];

/// Facts, working sets, then hit rates and bytes (and seconds): a row a size, a column a policy.
///
/// # Errors
/// If `out` fails.
pub(crate) fn write(
    report: &Report,
    policies: &[PolicyKind],
    sizes: &[CacheSize],
    out: &mut dyn Write,
) -> io::Result<()> {
    facts(report, out)?;
    reuse(report, out)?;
    unions(report, out)?;
    let grid = |title: &str, cell: &dyn Fn(&Row) -> Option<String>, out: &mut dyn Write| {
        if report.rows.iter().all(|row| cell(row).is_none()) {
            return Ok(());
        }
        writeln!(out, "\n{title}\n{}", by_size(report, policies, sizes, cell))
    };
    let percent = |counted: Counted| format!("{:.2}", 100.0 * counted.hit_rate);
    let billions = |bytes: f64| format!("{:.2}", bytes / 1e9);
    let seconds = |seconds: f64| format!("{seconds:.2}");
    grid("Hit rate, %", &|row| Some(percent(row.all)), out)?;
    let mixed = report
        .rows
        .iter()
        .any(|row| row.prefill.is_some() && row.decode.is_some());
    if mixed {
        grid(
            "Hit rate of prefill, %",
            &|row| row.prefill.map(percent),
            out,
        )?;
        grid("Hit rate of decode, %", &|row| row.decode.map(percent), out)?;
    }
    grid(
        "Read, GB",
        &|row| Some(billions(row.all.bytes_read as f64)),
        out,
    )?;
    // The price of a generated token where there is one, else of any.
    let token = |row: &Row| row.decode.unwrap_or(row.all);
    let what = if report.trace.decode_tokens > Some(0) {
        "decoded token"
    } else {
        "token"
    };
    let title = format!("Read a {what}, GB");
    grid(&title, &|row| token(row).bytes_per_token.map(billions), out)?;
    grid(
        "Read, seconds",
        &|row| row.all.read_seconds.map(seconds),
        out,
    )?;
    let title = format!("Read a {what}, seconds");
    grid(
        &title,
        &|row| token(row).seconds_per_token.map(seconds),
        out,
    )
}

fn facts(report: &Report, out: &mut dyn Write) -> io::Result<()> {
    let facts = &report.trace;
    let tokens = match (facts.tokens, facts.prefill_tokens, facts.decode_tokens) {
        (Some(all), Some(prefill), Some(decode)) if prefill > 0 && decode > 0 => {
            format!(" by {all} tokens ({prefill} of prompts, {decode} decoded)")
        }
        (Some(all), ..) => format!(" by {all} tokens"),
        _ => String::new(),
    };
    writeln!(
        out,
        "{} requests{tokens} for {} distinct experts of {} bytes; {} are the first of their expert, so no policy hits more \
         than {:.2} %.",
        facts.requests,
        facts.distinct_experts,
        report.expert_bytes,
        report.compulsory_misses,
        100.0 * report.ceiling
    )?;
    if facts.warmup_requests > 0 {
        writeln!(
            out,
            "{} more requests filled the cache and are not counted.",
            facts.warmup_requests
        )?;
    }
    writeln!(
        out,
        "One token asks for {} experts, {} GB: below that LRU hits nothing.",
        facts.working_set,
        gigabytes(report.expert_bytes.saturating_mul(facts.working_set as u64))
    )
}

fn reuse(report: &Report, out: &mut dyn Write) -> io::Result<()> {
    for distance in &report.reuse_distances {
        let of = of(report, distance.phase);
        let slots = |slots: Option<u64>| slots.map_or("-".to_owned(), |slots| slots.to_string());
        writeln!(
            out,
            "Reuse{of}: {:.2} % of requests repeat; half of those within {} distinct experts, 90 % within {}, 99 % within {}.",
            100.0 * distance.ceiling,
            slots(distance.median),
            slots(distance.p90),
            slots(distance.p99)
        )?;
        let gaps = report
            .reuse_tokens
            .iter()
            .filter(|gap| gap.phase == distance.phase);
        let mut from = 1;
        let parts: Vec<String> = gaps
            .map(|gap| {
                let ago = match gap.tokens {
                    Some(upto) if upto > from => format!("{from}-{upto}"),
                    Some(upto) => upto.to_string(),
                    None => "longer or never".to_owned(),
                };
                from = gap.tokens.map_or(from, |upto| upto + 1);
                format!("{ago}: {:.1} %", 100.0 * gap.share)
            })
            .collect();
        if !parts.is_empty() {
            writeln!(
                out,
                "Tokens since an expert was needed{of}: {}.",
                parts.join(", ")
            )?;
        }
    }
    Ok(())
}

/// Which phase, where there is more than one.
fn of(report: &Report, phase: Phase) -> &'static str {
    match phase {
        _ if report.reuse_distances.len() < 2 => "",
        Phase::Prefill => " in prefill",
        Phase::Decode => " in decode",
        Phase::Unknown => " elsewhere",
    }
}

fn unions(report: &Report, out: &mut dyn Write) -> io::Result<()> {
    let mut table = Table::new();
    table.load_style(ASCII_MARKDOWN);
    table.set_header(["tokens", "experts", "GB", "of reading each alone, %"]);
    for union in &report.unions {
        if UNIONS.contains(&union.tokens) {
            let bytes = union.mean_experts * report.expert_bytes as f64;
            table.add_row([
                format!("{}{}", union.tokens, of(report, union.phase)),
                format!("{:.1}", union.mean_experts),
                format!("{:.2}", bytes / 1e9),
                format!("{:.1}", 100.0 * union.per_token),
            ]);
        }
    }
    if table.is_empty() {
        return Ok(());
    }
    right_align(&mut table);
    writeln!(out, "\nExperts of consecutive tokens together\n{table}")
}

fn by_size(
    report: &Report,
    policies: &[PolicyKind],
    sizes: &[CacheSize],
    cell: &dyn Fn(&Row) -> Option<String>,
) -> String {
    let mut table = Table::new();
    table.load_style(ASCII_MARKDOWN);
    let names = policies.iter().map(ToString::to_string);
    table.set_header(
        ["cache GB".to_owned(), "slots".to_owned()]
            .into_iter()
            .chain(names),
    );
    for (i, size) in sizes.iter().enumerate() {
        let of_size = report.rows.iter().skip(i).step_by(sizes.len());
        let of_size = of_size.map(|row| cell(row).unwrap_or_default());
        let head = [gigabytes(size.capacity_bytes), size.slots.to_string()];
        table.add_row(head.into_iter().chain(of_size));
    }
    right_align(&mut table);
    table.to_string()
}

fn right_align(table: &mut Table) {
    for column in table.column_iter_mut() {
        column.set_cell_alignment(CellAlignment::Right);
    }
}

/// Whole gigabytes without decimals, others with as many as there are, at most three.
fn gigabytes(bytes: u64) -> String {
    let text = format!("{:.3}", bytes as f64 / 1e9);
    text.trim_end_matches('0').trim_end_matches('.').to_owned()
}
