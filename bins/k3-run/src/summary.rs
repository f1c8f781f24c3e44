//! The five lines with which a run ends: tokens, what bound it, memory, bytes, and the plan's word against what came.

use k3_shared::{
    formats::{plan::Plan, trace::Mode},
    size::Bytes,
};

use crate::report::{BoundBy, Report, StepReport};

/// Five lines, each within 80 columns unless numbers are very large.
pub(crate) fn summary(report: &Report, plan: &Plan) -> String {
    [
        tokens(report),
        bound(report),
        memory(report, plan),
        bytes(report),
        prediction(report, plan),
    ]
    .join("\n")
}

fn steps(report: &Report, mode: Mode) -> impl Iterator<Item = &StepReport> {
    report.steps.iter().filter(move |step| step.mode == mode)
}

/// Seconds of a decoded token: the median, because the first steps also check what they read.
fn decode_seconds(report: &Report) -> Option<f64> {
    median(
        steps(report, Mode::Decode)
            .map(|s| s.spent.seconds)
            .collect(),
    )
}

fn tokens(report: &Report) -> String {
    let generated = report.generated_ids.len();
    let each = decode_seconds(report).map_or_else(String::new, |s| format!(" at {s:.3} s each"));
    let rows: usize = steps(report, Mode::Prefill).map(|step| step.rows).sum();
    let seconds: f64 = steps(report, Mode::Prefill)
        .map(|step| step.spent.seconds)
        .sum();
    let prompt = if rows == 0 {
        String::new()
    } else {
        let each = seconds / rows as f64;
        format!("; a prompt of {rows} in {seconds:.3} s, {each:.3} s each")
    };
    let noun = if generated == 1 { "token" } else { "tokens" };
    format!("{generated} {noun}{each}{prompt}")
}

fn bound(report: &Report) -> String {
    let spent = &report.totals.spent;
    let seconds = spent.seconds.max(f64::MIN_POSITIVE);
    let percent = |part: f64| 100.0 * part / seconds;
    let waited = format!(
        "waiting for reads {:.1} % of the time",
        percent(spent.wait_seconds)
    );
    let limit = &report.limit;
    let flops: f64 = report.steps.iter().map(|step| step.flops).sum();
    let touched = (spent.touched_bytes + spent.bytes_requested) as f64;
    let why = match (
        report.totals.bound_by,
        limit.memory_bytes_per_second,
        limit.flops_per_second,
    ) {
        (BoundBy::Disk, ..) => {
            // Reads ahead also go on between steps, whose time is not in the sum.
            let reading = percent(spent.reading_seconds).min(100.0);
            format!("{waited}; reads in flight {reading:.1} %")
        }
        (BoundBy::Memory, Some(rate), _) => {
            let share = percent(touched / rate);
            format!(
                "{share:.1} % of the time at {:.1} GB/s; {waited}",
                rate / 1e9
            )
        }
        (BoundBy::Arithmetic, _, Some(rate)) => {
            let share = percent(flops / rate);
            format!(
                "{share:.1} % of the time at {:.0} GFLOP/s; {waited}",
                rate / 1e9
            )
        }
        _ => format!("{waited} (on what? k3-plan --probe)"),
    };
    format!("bound by {}: {why}", report.totals.bound_by)
}

fn memory(report: &Report, plan: &Plan) -> String {
    let (peak, planned) = (report.peak_rss_bytes, report.planned_peak_bytes);
    format!(
        "peak memory {} of {} planned ({}); trunk pinned {}",
        Bytes(peak),
        Bytes(planned),
        share(peak, planned),
        Bytes(plan.pinned_trunk_bytes)
    )
}

fn bytes(report: &Report) -> String {
    let spent = &report.totals.spent;
    let hits = match spent.expert_requests {
        0 => String::new(),
        requests => format!(
            " (hit {} of {requests})",
            share(spent.expert_hits, requests)
        ),
    };
    format!(
        "read: trunk {}, head {}, experts {}{hits}",
        Bytes(spent.trunk_bytes_read),
        Bytes(spent.head_bytes_read),
        Bytes(spent.expert_bytes_read),
    )
}

fn prediction(report: &Report, plan: &Plan) -> String {
    let predicted = &plan.predicted;
    let wanted = predicted.trunk_bytes_per_token
        + predicted.head_bytes_per_token
        + predicted.expert_bytes_per_token;
    let read = |step: &StepReport| {
        let spent = &step.spent;
        (spent.trunk_bytes_read + spent.head_bytes_read + spent.expert_bytes_read) as f64
    };
    let time = match predicted.seconds_per_token {
        Some(seconds) => format!(", {seconds:.3} s"),
        None => String::new(),
    };
    let came = median(steps(report, Mode::Decode).map(read).collect());
    let measured = match (came, decode_seconds(report)) {
        (Some(bytes), Some(seconds)) => {
            #[expect(
                clippy::cast_possible_truncation,
                clippy::cast_sign_loss,
                reason = "a median of byte counts"
            )]
            let bytes = Bytes(bytes as u64);
            let off = predicted
                .seconds_per_token
                .map(|wanted| format!(" ({:+.1} %)", 100.0 * (seconds / wanted - 1.0)));
            format!(
                "measured {bytes}, {seconds:.3} s{}",
                off.unwrap_or_default()
            )
        }
        _ => "no token was decoded to compare".to_owned(),
    };
    format!("a token: predicted {}{time}; {measured}", Bytes(wanted))
}

fn share(part: u64, whole: u64) -> String {
    format!("{:.1} %", 100.0 * part as f64 / whole.max(1) as f64)
}

/// The middle value, or the mean of the two middle ones; none of none.
fn median(mut values: Vec<f64>) -> Option<f64> {
    values.sort_unstable_by(f64::total_cmp);
    let (below, above) = (values.len().checked_sub(1)? / 2, values.len() / 2);
    Some(f64::midpoint(*values.get(below)?, *values.get(above)?))
}
