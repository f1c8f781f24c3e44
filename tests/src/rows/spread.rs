//! Repeats of a row: medians and how far they lie apart.

use super::Row;

/// Rows of one name, in the order of the file.
#[derive(Clone, Debug)]
pub struct Group<'a> {
    /// The ladder.
    pub target: &'a str,
    /// The row's name.
    pub name: &'a str,
    /// Its repeats; at least one.
    pub rows: Vec<&'a Row>,
}

impl<'a> Group<'a> {
    /// Median and spread of a figure of its rows.
    pub fn spread(&self, figure: impl Fn(&Row) -> f64) -> Spread {
        let values: Vec<f64> = self.rows.iter().map(|row| figure(row)).collect();
        Spread::of(&values)
    }

    /// As [`Self::spread`], of a figure that not every row has.
    pub fn known(&self, figure: impl Fn(&Row) -> Option<f64>) -> Option<Spread> {
        let values: Vec<f64> = self.rows.iter().filter_map(|row| figure(row)).collect();
        (!values.is_empty()).then(|| Spread::of(&values))
    }

    /// The row of median seconds a token, the faster of two.
    pub fn typical(&self) -> &'a Row {
        let mut rows = self.rows.clone();
        rows.sort_by(|a, b| f64::total_cmp(&a.seconds_per_token(), &b.seconds_per_token()));
        rows[(rows.len() - 1) / 2]
    }
}

/// Rows by ladder and name, each group where its first row stands.
pub fn groups(rows: &[Row]) -> Vec<Group<'_>> {
    let mut groups: Vec<Group<'_>> = Vec::new();
    for row in rows {
        let same = |g: &&mut Group<'_>| g.target == row.target && g.name == row.name;
        match groups.iter_mut().find(same) {
            Some(group) => group.rows.push(row),
            None => groups.push(Group {
                target: &row.target,
                name: &row.name,
                rows: vec![row],
            }),
        }
    }
    groups
}

/// Rows with the speed that the disk is known to have had in their round: what the round's probe found, or what its fastest row
/// read, whichever is more.
///
/// A disk that others share is faster at one minute than at the next. A limit from the probe alone would be passed by rows that met
/// a better minute; this one flatters no row.
pub fn settled(rows: &[Row]) -> Vec<Row> {
    let seen = |row: &Row| {
        let probed = row.plan.disk_bytes_per_second?;
        Some(probed.max(row.bytes_per_second()))
    };
    let fastest = |of: &Row| {
        let round = rows
            .iter()
            .filter(|row| row.target == of.target && row.round == of.round);
        round.filter_map(seen).max_by(f64::total_cmp)
    };
    let settle = |row: &Row| {
        let mut settled = row.clone();
        if row.plan.disk_bytes_per_second.is_some() {
            settled.plan.disk_bytes_per_second = fastest(row);
        }
        settled
    };
    rows.iter().map(settle).collect()
}

/// A figure over repeats.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Spread {
    /// Repeats.
    pub count: usize,
    /// The middle one, or the mean of the middle two.
    pub median: f64,
    /// The smallest.
    pub least: f64,
    /// The largest.
    pub most: f64,
    /// Ends of the middle half.
    pub quartiles: (f64, f64),
}

impl Spread {
    /// Of these values, at least one.
    pub fn of(values: &[f64]) -> Self {
        let mut sorted = values.to_vec();
        sorted.sort_by(f64::total_cmp);
        Self {
            count: sorted.len(),
            median: median(&sorted),
            least: sorted.first().copied().unwrap_or(f64::NAN),
            most: sorted.last().copied().unwrap_or(f64::NAN),
            quartiles: (quantile(&sorted, 0.25), quantile(&sorted, 0.75)),
        }
    }
}

/// The middle value, or the mean of the middle two; NaN of none.
pub fn median(values: &[f64]) -> f64 {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    quantile(&sorted, 0.5)
}

/// Between the two nearest of ascending values.
fn quantile(sorted: &[f64], share: f64) -> f64 {
    let Some(last) = sorted.len().checked_sub(1) else {
        return f64::NAN;
    };
    let place = share * last as f64;
    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "between 0 and the number of values"
    )]
    let below = place.floor() as usize;
    let above = (below + 1).min(last);
    sorted[below] + (sorted[above] - sorted[below]) * (place - place.floor())
}

#[cfg(test)]
mod tests {
    use super::{super::make::tests::row, *};

    #[test]
    fn a_row_that_read_faster_than_the_probe_sets_the_limit_of_its_round() {
        let mut rows = vec![row("a", 1), row("b", 1), row("a", 2)];
        rows[1].report.decode_seconds = vec![1.5];
        let speeds: Vec<f64> = settled(&rows)
            .iter()
            .filter_map(|row| row.plan.disk_bytes_per_second)
            .collect();
        assert_eq!(speeds, [3.8e9, 3.8e9, 3e9]);
    }

    #[test]
    fn a_median_lies_in_the_middle_whatever_the_order() {
        assert!((median(&[3.0, 1.0, 2.0]) - 2.0).abs() < 1e-12);
        assert!((median(&[4.0, 1.0, 2.0, 3.0]) - 2.5).abs() < 1e-12);
        assert!((median(&[7.0]) - 7.0).abs() < 1e-12);
        assert!(median(&[]).is_nan());
    }

    #[test]
    fn the_spread_has_the_ends_and_the_middle_half() {
        let spread = Spread::of(&[5.0, 1.0, 3.0, 2.0, 4.0]);
        assert_eq!(spread.count, 5);
        assert_eq!((spread.least, spread.median, spread.most), (1.0, 3.0, 5.0));
        assert_eq!(spread.quartiles, (2.0, 4.0));
    }
}
