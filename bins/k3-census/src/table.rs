//! The census as people read it, on stderr.

use comfy_table::{CellAlignment, Table, presets};
use k3_shared::{formats::census::Census, names::TensorClass};

/// Problems printed one by one; the JSON has all of them.
const MAX_PRINTED: usize = 100;

/// Print the table unless `quiet`, then every problem.
pub(crate) fn print(census: &Census, quiet: bool) {
    if !quiet {
        log::info!("{}", classes(census));
        log::info!("{}", summary(census));
    }
    for problem in census.problems.iter().take(MAX_PRINTED) {
        log::error!("{problem}");
    }
    if census.problems.len() > MAX_PRINTED {
        let more = census.problems.len() - MAX_PRINTED;
        log::error!("and {more} more problems, which the JSON names");
    }
    log::info!("{}", verdict(census));
}

fn classes(census: &Census) -> String {
    let mut table = Table::new();
    table.load_style(presets::NOTHING);
    table.set_header(["class", "tensors", "parameters", "bytes", "size"]);
    for (class, totals) in census.classes.iter() {
        table.add_row([
            class_name(class),
            grouped(totals.tensors),
            grouped(totals.params),
            grouped(totals.bytes),
            crate::size(totals.bytes),
        ]);
    }
    table.add_row([
        "all".into(),
        grouped(census.num_tensors),
        grouped(census.total_params),
        grouped(census.total_bytes),
        crate::size(census.total_bytes),
    ]);
    for column in table.column_iter_mut().skip(1) {
        column.set_cell_alignment(CellAlignment::Right);
    }
    table.trim_fmt()
}

fn class_name(class: TensorClass) -> String {
    // One list of names, that of the JSON.
    match serde_json::to_value(class) {
        Ok(serde_json::Value::String(name)) => name.replace('_', " "),
        _ => String::new(),
    }
}

fn summary(census: &Census) -> String {
    let trunk: u64 = census.layers.iter().map(|l| l.trunk_bytes).sum();
    let mut lines = vec![format!(
        "{} shards, {} of files; {} layers, {} of trunk, {} experts of {}",
        census.num_shards,
        crate::size(census.total_file_bytes),
        census.layers.len(),
        crate::size(trunk),
        grouped(census.num_experts_total),
        crate::size(census.expert_bytes),
    )];
    if let Some(layers) = census.first_layers {
        lines.push(format!("the first {layers} layers only"));
    }
    if let Some(identity) = &census.identity {
        lines.push(format!("identity {identity}"));
    }
    if let Some(nan) = census.scale_bytes_nan {
        lines.push(format!("{} NaN scales", grouped(nan)));
    }
    lines.join("\n")
}

fn verdict(census: &Census) -> String {
    let found = crate::problem_count(&census.problems);
    if census.ok {
        format!("{}: whole, {found}", census.model_dir)
    } else {
        format!("{}: not whole, {found}", census.model_dir)
    }
}

/// Thousands set apart.
fn grouped(number: u64) -> String {
    let digits = number.to_string();
    let mut text = String::new();
    for (i, digit) in digits.chars().enumerate() {
        if i > 0 && (digits.len() - i).is_multiple_of(3) {
            text.push(',');
        }
        text.push(digit);
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_grouped_by_thousands() {
        for (number, text) in [
            (0, "0"),
            (999, "999"),
            (1000, "1,000"),
            (1_560_936_091_448, "1,560,936,091,448"),
        ] {
            assert_eq!(grouped(number), text);
        }
    }

    #[test]
    fn the_table_has_the_published_totals() {
        let text = classes(&Census::of_release());
        for number in [
            "497,220",
            "2,779,931,837,184",
            "1,560,860,324,864",
            "kda attention",
        ] {
            assert!(text.contains(number), "{text}");
        }
    }
}
